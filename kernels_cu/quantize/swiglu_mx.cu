// SwiGLU, or its gradients, quantised in MX blocks of 32 elements with E8M0 scales (include/numerics/e8m0.cuh); column-wise data as y. See
// swiglu_tensor.cu.
//
// PLAIN 2: row-wise blocks alone. OPTIONS 1: in any direction.
#include "swiglu/swiglu.cuh"
#include "numerics/e8m0.cuh"
#include "swiglu/swiglu_blocks.cuh"

#ifdef ENTRY_swiglu_mx
struct SwigluMxParams {
    SwigluCall call;
    u8 *data, *column_data;        // row-wise and column-wise; or null
    ScaleTarget row_scales, column_scales;
    ScaleRule rule;
    u32 tiles;                   // of a block, one below the other (PLAIN)
};

// The bytes of scales, behind a __syncthreads(). A word per thread: four blocks of a row; four blocks of a column (swizzled), or a block of
// four columns.
__device__ __forceinline__ void store_scales(const SwigluMxParams& p, const TilePosition& at, const u8* of_rows, const u8* of_columns) {
    const SwigluCall& call = p.call;
    const i64 row_blocks = (call.columns + kRun - 1) / kRun, column_blocks = (call.rows + kRun - 1) / kRun;
    const int word = thread_again(), swizzled_line = word % 4 * 32 + word / 4 % 32;
    if (p.data && word < Tile::kRows) {
        const int line = p.row_scales.swizzled() ? swizzled_line : word;
        p.row_scales.store_blocks(0, at.row + line, at.column / kRun, reinterpret_cast<const u32*>(of_rows)[line], call.rows, row_blocks);
    }
    if (p.column_data && word < Tile::kColumns) {
        if (p.column_scales.swizzled()) {
            u32 blocks = 0;
#pragma unroll
            for (int b = 0; b < kRuns; b++) blocks |= (u32)of_columns[b * Tile::kColumns + swizzled_line] << 8 * b;
            p.column_scales.store_blocks(0, at.column + swizzled_line, at.row / kRun, blocks, call.columns, column_blocks);
        } else {
            const int b = word / 32, c = word % 32 * 4;
            p.column_scales.store_lines(0, at.column + c, at.row / kRun + b, reinterpret_cast<const u32*>(of_columns)[word], call.columns,
                               column_blocks);
        }
    }
}

#if OPTIONS
// The same of a tile of one part, whose columns end at `end`. What is after the last part is padding.
__device__ __forceinline__ void store_part_scales(const SwigluMxParams& p, const TilePosition& at, i64 end, const u8* of_rows,
                                                  const u8* of_columns) {
    const SwigluCall& call = p.call;
    const bool last = end == call.columns && at.column < end && at.column + Tile::kColumns >= end;
    if (BACKWARD ? at.column % Tile::kColumns == 0 && (last || at.column + Tile::kColumns <= end) : true) {
        store_scales(p, at, of_rows, of_columns);
        return;
    }
    const i64 all = (call.columns + kRun - 1) / kRun, column_blocks = (call.rows + kRun - 1) / kRun;
    const int word = thread_again(), swizzled_line = word % 4 * 32 + word / 4 % 32;
    if (p.data && word < Tile::kRows) {
        const i64 block = at.column / kRun, blocks = (end + kRun - 1) / kRun;
        const int line = p.row_scales.swizzled() ? swizzled_line : word;
        const u32 four = reinterpret_cast<const u32*>(of_rows)[line];
        if (!p.row_scales.swizzled()) {
            p.row_scales.store_blocks(0, at.row + line, block, four, call.rows, blocks);
        } else {
            const i64 stored = last ? swizzle_tiles(all) * kSwizzleBlocks : blocks;
#pragma unroll 1
            for (i64 b = block; b < stored && (last || b < block + kRuns); b++)
                *p.row_scales.at(0, at.row + line, b) = b < block + kRuns ? (u8)(four >> (int)(b - block) * 8) : 0;
        }
    }
    if (p.column_data && word < Tile::kColumns) {
        if (p.column_scales.swizzled()) {
            u32 blocks = 0;
#pragma unroll
            for (int b = 0; b < kRuns; b++) blocks |= (u32)of_columns[b * Tile::kColumns + swizzled_line] << 8 * b;
            const i64 stored = last ? (end + kSwizzleLines - 1) / kSwizzleLines * kSwizzleLines : end;
#pragma unroll 1
            for (i64 line = at.column + swizzled_line; line < stored && (last || line < at.column + Tile::kColumns); line += Tile::kColumns)
                p.column_scales.store_blocks(0, line, at.row / kRun, line < end ? blocks : 0, call.columns, column_blocks);
        } else {
            const int b = word / 32, c = word % 32 * 4;
            p.column_scales.store_lines(0, at.column + c, at.row / kRun + b, reinterpret_cast<const u32*>(of_columns)[word], end, column_blocks);
        }
    }
}
#endif

__device__ __forceinline__ Chunk<OUT, 8> quantised(const float (&y)[8], float by) {
    Chunk<OUT, 8> codes;
#pragma unroll
    for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[2 * i], by), mul_rn(y[2 * i + 1], by));
    return codes;
}

#if PLAIN
// Scales of lines. A lane writes the byte of the line that it owns: 0 where it has no elements, since these are zeros then.
struct MxLines {
    const SwigluMxParams& p;
    bool given;                  // the line's run has columns: zeros times a weight may be NaN

    // What the elements of this lane's line are multiplied by. to: of the byte.
    __device__ __forceinline__ float scale(const float (&y)[4][8], u8* to) const { return put(tops(y), to); }
#if PLAIN == 2 && !BACKWARD
    // The same of u, which has not been multiplied by the rows' weights yet: as in BlockLines.
    __device__ __forceinline__ float scale(float (&u)[4][8], const float* weights, u8* to) const {
        const float weight = weights[row_of(owned<4>()) * kApart];
        const u32 amax = as_bits(mul_rn(as_float(tops(u)), weight)) & 0x7fffffffu;
        if (__all_sync(~0u, is_moderate(weight) && is_moderate_amax(amax))) return mul_rn(weight, put(amax, to));
        multiply_lines(u, weights);
        return scale(u, to);
    }
#endif

private:
    __device__ __forceinline__ u32 tops(const float (&y)[4][8]) const {
        return p.rule.nan_wins() ? fold_lines<true>(y) : fold_lines<false>(y);
    }
    __device__ __forceinline__ float put(u32 amax, u8* to) const {
        const u32 byte = p.rule.byte(amax);
        *to = given ? (u8)byte : 0;
        return inverse_e8m0(byte);
    }
};
#endif

#if PLAIN
#if PLAIN == 1
// The runs down the columns; of_columns: a line per run.
__device__ __forceinline__ void quantise_columns(const SwigluMxParams& p, const TilePosition& at, const i64& end, const float (&y)[4][8],
                                                 const ColumnTops& tops, u8* of_columns, u8* data, const LineStore& store, int left) {
    const SwigluCall& call = p.call;
    if (p.rule.nan_wins()) tops.write<true>(y);
    else tops.write<false>(y);
    __syncthreads();
    const int thread = thread_again(), run = ColumnTops::run(thread), column = ColumnTops::column(thread);
    const bool exists = at.column + column < end && at.row + run * kRun < call.rows;
    of_columns[run * Tile::kColumns + column] = exists ? (u8)p.rule.byte(tops.read(run, column)) : 0;
    __syncthreads();
    const uint2 bytes = *reinterpret_cast<const uint2*>(of_columns + line_row(0) / kRun * Tile::kColumns + Tile::patch_column());
    float by[8];
#pragma unroll
    for (int c = 0; c < 8; c++) by[c] = inverse_e8m0((c < 4 ? bytes.x : bytes.y) >> c % 4 * 8 & 0xffu);
    store_lines(call, data, store, left, [&](int r) {
        Chunk<OUT, 8> codes;
#pragma unroll
        for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by[2 * i]), mul_rn(y[r][2 * i + 1], by[2 * i + 1]));
        return codes;
    });
}
#endif

#if OPTIONS
extern "C" __global__ void __launch_bounds__(kLineThreads, kLineBlocks) swiglu_mx(const __grid_constant__ SwigluMxParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u8 of_rows[2][kParts][Tile::kRows * kRuns];         // a word per row; of two tiles, which take turns
    __shared__ __align__(16) u8 of_columns[kRuns * Tile::kColumns];              // a line per 32 rows
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    StreamPosition at(call, p.tiles);
    Stream rows(call, at.tile(), p.tiles, shared);
    const ColumnTops tops{reinterpret_cast<u32*>(shared + kStages * kStageBytes)};
    const float* weights = Stream::shared_probs() + line_row(0);
#pragma unroll 1
    for (bool more = at.down * (i64)Tile::kRows < call.rows; more; more = at.advance(call, p.tiles), weights += kStepRows) {
        float y[kLines][8];
        rows.compute(call, at, 0, weights, y);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_lines(y, part);
            const i64 columns = part * apart(call), end = end_of(call, part);
            const int left = rows.left_in(part, rows.left + kStepRows);
            u8* const bytes = of_rows[at.down % 2][part];
            if (p.data) {
                const int thread = thread_again();                   // what follows from it takes no registers until here
                const int run = thread % Tile::kColumnPatches / (kRun / 8);
                const int row = thread / Tile::kColumnPatches * kLineRows + thread % 2 * 2 + thread / 2 % 2;         // that this lane owns
                const MxLines lines{p, at.results(call).column + columns + run * kRun < end};
                const float by = lines.scale(four, bytes + row * kRuns + run);
                const LineStore store(call, at.results(call), thread);
                store_lines(call, p.data + columns, store, left, [&](int line) { return quantised(four[line], broadcast(by, line)); });
            }
            const auto position = moved(at.results(call), columns);
            if (p.column_data) {
                const LineStore store(call, at.results(call), thread_again());
                quantise_columns(p, position, end, four, tops, of_columns, p.column_data + columns, store, left);
            } else {
                __syncthreads();                                     // bytes are other warps' below
            }
            store_part_scales(p, position, end, bytes, of_columns);
        }
    }
    Stream::finish();
}
#else
extern "C" __global__ void __launch_bounds__(kLineThreads, kLineBlocks) swiglu_mx(const __grid_constant__ SwigluMxParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u8 of_rows[2][kParts][Tile::kRows * kRuns];         // a word per row; of two tiles, which take turns
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    StreamPosition at(call, p.tiles);
    const auto first = at.tile();
    const int own = owned<4>(), run = Tile::column_patch() / (kRun / 8);
    Stream rows(call, first, p.tiles, shared);
    LineStore store(call, first);
#if PLAIN == 1
    __shared__ __align__(16) u8 of_columns[kRuns * Tile::kColumns];              // a line per 32 rows
    const ColumnTops tops{reinterpret_cast<u32*>(shared + kStages * kStageBytes)};
#endif
    const int tiles = (left_of(call.rows - first.row, (int)p.tiles * Tile::kRows) + Tile::kRows - 1) / Tile::kRows;
#pragma unroll 1
    for (int step = 0; step < tiles * kSteps; step++) {
        u8* const bytes = of_rows[step / kSteps % 2][0];
        float y[kLines][8];
        const int row = step * kStepRows + line_row(0);        // from the block's first row on
        const float* const weights = Stream::shared_probs() + row;
        const MxLines lines{p, at.tile().column + run * kRun < call.half()};
        u8* const to = bytes + (part_of(own) * Tile::kRows + row % Tile::kRows + row_of(own) * kApart) * kRuns + run;
        rows.compute(call, at, step % kSteps, weights, y);
#if PLAIN == 1
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_lines(y, part);
            const i64 columns = part * call.half();
            const int skipped = part * (Tile::kRows * kRuns);
            if (p.data) {
                const float by = lines.scale(four, to + skipped);
                store_lines(call, p.data + columns, store, rows.left + kStepRows,
                            [&](int line) { return quantised(four[line], broadcast(by, line)); });
            }
            const auto position = moved(at.tile(), columns);
            quantise_columns(p, position, call.columns, four, tops, of_columns, p.column_data + columns, store, rows.left + kStepRows);
            store_scales(p, position, bytes + skipped, of_columns);
        }
        at.down++;
#else
#if BACKWARD
        const float by = lines.scale(y, to);
#else
        const float by = lines.scale(y, weights, to);
#endif
        store_lines(call, p.data, store, rows.left + kStepRows, [&](int line) { return quantised(y[line], broadcast(by, line)); });
        if (step % kSteps == kSteps - 1) {
            __syncthreads();                                         // of_rows is other warps' below
            for (int part = 0; part < kParts; part++)
                store_scales(p, moved(at.tile(), part * call.half()), bytes + part * (Tile::kRows * kRuns), nullptr);
            at.down++;
        }
#endif
        store.advance(call);
    }
    Stream::finish();
}
#endif
#else
// The 32 rows of each run down the columns; of_columns: a line per run.
__device__ __forceinline__ void quantise_columns(const SwigluMxParams& p, const TilePosition& at, const Place& place,
                                                 const float (&y)[8][8], u32* tops, u8* of_columns) {
    const SwigluCall& call = p.call;
    const i64 column_blocks = (call.rows + kRun - 1) / kRun;
    PatchTops top;
    if (p.rule.nan_wins()) top.find_columns<true>(y);
    else top.find_columns<false>(y);
    store_column_tops(tops, top.column);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kRuns * Tile::kColumns; i += kThreads) {
        const int b = i / Tile::kColumns, c = i % Tile::kColumns;
        const bool exists = at.column + c < call.columns && at.row / kRun + b < column_blocks;
        of_columns[i] = exists ? (u8)p.rule.byte(column_top(tops, b * (kRun / 8), kRun / 8, c)) : 0;
    }
    __syncthreads();
    const uint2 bytes =
        *reinterpret_cast<const uint2*>(of_columns + Tile::row_patch() / (kRun / 8) * Tile::kColumns + Tile::patch_column());
    float by[8];
#pragma unroll
    for (int c = 0; c < 8; c++) by[c] = inverse_e8m0((c < 4 ? bytes.x : bytes.y) >> c % 4 * 8 & 0xffu);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        Chunk<OUT, 8> codes;
#pragma unroll
        for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by[2 * i]), mul_rn(y[r][2 * i + 1], by[2 * i + 1]));
        store_row(call, place, p.column_data, r, codes);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) swiglu_mx(const __grid_constant__ SwigluMxParams p) {
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
    __shared__ __align__(16) u8 of_columns[kRuns * Tile::kColumns];      // a line per 32 rows
    __shared__ __align__(16) u8 of_rows[Tile::kRows * kRuns];        // a word per row
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, call.rows, call.columns);
    const Place place(call, at);
    float y[8][8];
    each_row(call, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const i64 row_blocks = (call.columns + kRun - 1) / kRun;
    if (p.data) {
        if (p.rule.nan_wins()) top.find_rows<true>(y);
        else top.find_rows<false>(y);
        top.reduce_rows();
        const int run = Tile::column_patch() / (kRun / 8);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = Tile::patch_row() + PatchTops::owned() + i;
            const bool exists = at.row + row < call.rows && at.column / kRun + run < row_blocks;
            of_rows[row * kRuns + run] = exists ? (u8)p.rule.byte(top.row[i]) : 0;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float by = inverse_e8m0(of_rows[(Tile::patch_row() + r) * kRuns + run]);
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by), mul_rn(y[r][2 * i + 1], by));
            store_row(call, place, p.data, r, codes);
        }
    }
    if (p.column_data) quantise_columns(p, at, place, y, tops, of_columns);
    else __syncthreads();                                            // of_rows is other warps' below
    store_scales(p, at, of_rows, of_columns);
}
#endif
#endif
