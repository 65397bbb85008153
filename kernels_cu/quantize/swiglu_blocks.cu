// SwiGLU, or its gradients, quantised in blocks with f32 scales (include/scale/block_scale.cuh); column-wise data transposed. See swiglu_tensor.cu.
//
// DIVIDE 1: elements are divided by scale_inv (vllm). PLAIN 2: row-wise blocks alone. OPTIONS 1: in any direction.
#include "swiglu/swiglu.cuh"
#include "scale/block_scale.cuh"
#include "swiglu/swiglu_blocks.cuh"

#ifdef ENTRY_swiglu_block
struct SwigluBlockParams {
    SwigluCall call;
    u8 *data, *data_t;           // or null
    ScaleGrid row_scales, column_scales;        // of row-wise and column-wise blocks
    BlockRule rule;
    u32 block_segments;                    // of 32 elements in a block: 1, 2 or 4
    u32 vector;                  // every row of data_t allows 16-byte stores
    u32 tiles;                   // of a block, one below the other (PLAIN)
    u32 divides;                 // elements are divided by scale_inv, not multiplied by the scale (PATH any)
};

// Elements are divided by scale_inv, not multiplied by the scale.
__device__ __forceinline__ bool divides(const SwigluBlockParams& p) { return PLAIN == 0 ? p.divides : DIVIDE; }
__device__ __forceinline__ float operand(const SwigluBlockParams& p, const BlockScale& s) { return divides(p) ? s.scale_inv : s.factor; }
__device__ __forceinline__ float scaled(const SwigluBlockParams& p, float v, float by) {
    return divides(p) ? div_rn(v, by) : mul_rn(v, by);
}
__device__ __forceinline__ Chunk<OUT, 8> quantised(const SwigluBlockParams& p, const float (&y)[8], float by) {
    Chunk<OUT, 8> codes;
#pragma unroll
    for (int i = 0; i < 4; i++) codes.narrow2(i, scaled(p, y[2 * i], by), scaled(p, y[2 * i + 1], by));
    return codes;
}

#if PLAIN
// Scales of lines. A block is one to four runs of four lanes; a lane writes the scale of the line that it owns.
struct BlockLines {
    const SwigluBlockParams& p;
    u32 at_scale;                // where it goes, from p.row_scales.to on: the host refuses 2^32 scales
    int given;                   // how many rows there are from this one on
#if OPTIONS && BACKWARD
    bool has, has_other;         // its block in the first part, in the other
#endif

#if OPTIONS
    // at: of the tile's results.
    __device__ __forceinline__ BlockLines(const SwigluBlockParams& p, const TilePosition& at, int thread)
        : BlockLines(p, at.row + thread / Tile::kColumnPatches * kLineRows + thread % 2 * 2 + thread / 2 % 2,
                     at.column + thread % Tile::kColumnPatches / (kRun / 8) * kRun) {}
#endif
    // row, column: of the line that this lane owns, and of its run.
    __device__ __forceinline__ BlockLines(const SwigluBlockParams& p, i64 row, i64 column) : p(p) {
        const i64 run = column / kRun, block = run >> p.block_segments / 2;
#if OPTIONS && BACKWARD
        this->has = column < end_of(p.call, 0), has_other = column + apart(p.call) < end_of(p.call, 1);
#endif
        const bool has = p.data && !(run & (p.block_segments - 1)) && block < p.row_scales.columns;
        const i64 rows = p.call.rows - row;
        given = !has ? -kMost : rows < kMost ? (int)rows : kMost;
        at_scale = (u32)(row * p.row_scales.row + block * p.row_scales.column);
    }
    // Whose line is this many rows below.
    __device__ __forceinline__ void advance(int rows) {
        at_scale += (u32)(rows * p.row_scales.row);
        given -= rows;
    }
    // What the elements of this lane's line are multiplied (DIVIDE: divided) by.
    // columns: how far to the right of this one the line is.
    __device__ __forceinline__ float scale(const float (&y)[4][8], i64 columns = 0) const {
        const BlockScale s = p.rule.quick_of(tops(y));
#if OPTIONS && BACKWARD
        if (columns ? has_other : has)
#endif
            store(s, columns);
        return operand(p, s);
    }
#if PLAIN == 2 && !BACKWARD
    // The same of u, which has not been multiplied by the rows' weights yet: where all scales are powers of two, and nothing is extreme,
    // the scale takes its weight with it, since no product of a power of two is rounded but to what FP8 makes 0.
    __device__ __forceinline__ float scale(float (&u)[4][8], const float* weights) const {
        const float weight = weights[row_of(owned<4>()) * kApart];
        const u32 amax = as_bits(mul_rn(as_float(tops(u)), weight)) & 0x7fffffffu;
        if (!DIVIDE && __all_sync(~0u, p.rule.is_quick(amax) && is_moderate(weight))) {
            const BlockScale s = p.rule.quick(amax);
            store(s, 0);
            return mul_rn(weight, s.factor);
        }
        multiply_lines(u, weights);
        return scale(u);
    }
#endif

private:
    static constexpr int kMost = 1 << 16;                            // more rows than a block has

    __device__ __forceinline__ u32 tops(const float (&y)[4][8]) const {
        u32 top = fold_lines<false>(y);
        // Without branches: at distance 0 a lane finds itself.
        top = larger_bits(top, __shfl_xor_sync(~0u, top, p.block_segments > 1 ? 4 : 0));
        return larger_bits(top, __shfl_xor_sync(~0u, top, p.block_segments > 2 ? 8 : 0));
    }
    __device__ __forceinline__ void store(const BlockScale& s, i64 columns) const {
        const u32 further = columns ? (u32)((columns / kRun >> p.block_segments / 2) * p.row_scales.column) : 0;
        if (given > (int)(p.call.rows - p.row_scales.rows)) as_global(p.row_scales.to)[at_scale + further] = given > 0 ? s.scale_inv : 0.0f;
    }
};
#endif

#if PLAIN == 1
// The transposed tile, column by column.
__device__ __forceinline__ void quantise_columns(const SwigluBlockParams& p, const TilePosition& at, const float (&y)[4][8],
                                                 const i64& end, const ColumnTops& tops, const Tile& tile) {
    const SwigluCall& call = p.call;
    tops.write<false>(y);
    __syncthreads();
    const int thread = thread_again(), run = ColumnTops::run(thread), column = ColumnTops::column(thread);
    u32 top = tops.read(run, column);
    if (p.block_segments > 1) top = larger_bits(top, __shfl_xor_sync(~0u, top, 8));
    if (p.block_segments > 2) top = larger_bits(top, __shfl_xor_sync(~0u, top, 16));
    const BlockScale s = p.rule.quick_of(top);
    tops.put(run, column, operand(p, s));
    const i64 to_block = (at.row / kRun + run) >> p.block_segments / 2, to_column = at.column + column;
#if OPTIONS
    // Wide rows need no padding; beyond the end may be the other part.
    if (!(run & (p.block_segments - 1)) && p.column_scales.has(to_block, to_column) && to_column < end) *p.column_scales.at(0, to_block, to_column) = s.scale_inv;
#else
    if (!(run & (p.block_segments - 1)) && p.column_scales.has(to_block, to_column))
        *p.column_scales.at(0, to_block, to_column) = to_column < call.columns ? s.scale_inv : 0.0f;
#endif
    __syncthreads();
    float by[8];
    tops.operands(by);
    Chunk<OUT, 8> lines[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) lines[r].narrow2(i, scaled(p, y[r][2 * i], by[2 * i]), scaled(p, y[r][2 * i + 1], by[2 * i + 1]));
    write_four_rows(tile, line_row(0), lines);
    __syncthreads();
    store_tile(call, at, end, tile, p.data_t, p.vector);
}
#elif !PLAIN
// The transposed tile, column by column. tops: [16][128] words.
__device__ __forceinline__ void quantise_columns(const SwigluBlockParams& p, const TilePosition& at, const float (&y)[8][8], u32* tops,
                                                 const Tile& tile) {
    const SwigluCall& call = p.call;
    const int blocks = kRuns / (int)p.block_segments, patches = (int)p.block_segments * (kRun / 8);
    PatchTops top;
    top.find_columns<false>(y);
    store_column_tops(tops, top.column);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < blocks * Tile::kColumns; i += kThreads) {
        const int b = i / Tile::kColumns, c = i % Tile::kColumns;
        const BlockScale s = p.rule.quick_of(column_top(tops, b * patches, patches, c));
        tops[b * patches * Tile::kColumns + c] = as_bits(operand(p, s));
        const i64 to_block = at.row / Tile::kRows * blocks + b, to_column = at.column + c;
        if (p.column_scales.has(to_block, to_column)) *p.column_scales.at(0, to_block, to_column) = to_column < call.columns ? s.scale_inv : 0.0f;
    }
    __syncthreads();
    float by[8];
    load_floats(tops + Tile::row_patch() / patches * patches * Tile::kColumns + Tile::patch_column(), by);
    Chunk<OUT, 8> patch[8];
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) patch[r].narrow2(i, scaled(p, y[r][2 * i], by[2 * i]), scaled(p, y[r][2 * i + 1], by[2 * i + 1]));
    tile.write_patch(patch);
    __syncthreads();
    store_transposed(call, at, tile, p.data_t, p.vector);
}
#endif

#if OPTIONS
extern "C" __global__ void __launch_bounds__(kLineThreads, kLineBlocks) swiglu_block(const __grid_constant__ SwigluBlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    StreamPosition at(call, p.tiles);
    Stream rows(call, at.tile(), p.tiles, shared);
    const ColumnTops tops{reinterpret_cast<u32*>(shared + kStages * kStageBytes)};
    const Tile tile{shared + kStages * kStageBytes + ColumnTops::kWords * 4};
#pragma unroll 1
    for (bool more = at.down * (i64)Tile::kRows < call.rows; more; more = at.advance(call, p.tiles)) {
        float y[kLines][8];
        const float* const weights = Stream::shared_probs() + at.down % p.tiles * Tile::kRows + line_row(0);
        rows.compute(call, at, 0, weights, y);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_lines(y, part);
            const i64 columns = part * apart(call);
            if (p.data) {
                const int thread = thread_again();                   // what follows from it takes no registers until here
                const float by = BlockLines(p, at.results(call), thread).scale(four, columns);
                const LineStore store(call, at.results(call), thread);
                store_lines(call, p.data + columns, store, rows.left_in(part, rows.left + kStepRows),
                            [&](int line) { return quantised(p, four[line], broadcast(by, line)); });
            }
            if (p.data_t) quantise_columns(p, moved(at.results(call), columns), four, end_of(call, part), tops, tile);
        }
    }
    Stream::finish();
}
#elif PLAIN
extern "C" __global__ void __launch_bounds__(kLineThreads, kLineBlocks) swiglu_block(const __grid_constant__ SwigluBlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    StreamPosition at(call, p.tiles);
    const auto first = at.tile();
    const int own = owned<4>();
    Stream rows(call, first, p.tiles, shared);
    LineStore store(call, first);
    BlockLines lines(p, first.row + line_row(row_of(own)),
                     first.column + part_of(own) * call.half() + Tile::column_patch() / (kRun / 8) * kRun);
    const float* weights = Stream::shared_probs() + line_row(0);
    const int steps = (left_of(call.rows - first.row, (int)p.tiles * Tile::kRows) + kStepRows - 1) / kStepRows;
#if PLAIN == 1
    const ColumnTops tops{reinterpret_cast<u32*>(shared + kStages * kStageBytes)};
    const Tile tile{shared + kStages * kStageBytes + ColumnTops::kWords * 4};
#endif
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        float y[kLines][8];
#if PLAIN == 1
        rows.compute(call, at, 0, weights, y);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_lines(y, part);
            const i64 columns = part * call.half();
            if (p.data) {
                const float by = lines.scale(four, columns);
                store_lines(call, p.data + columns, store, rows.left + kStepRows,
                            [&](int line) { return quantised(p, four[line], broadcast(by, line)); });
            }
            quantise_columns(p, moved(at.tile(), columns), four, call.columns, tops, tile);
        }
        at.down++;
#else
        rows.compute(call, at, step, weights, y);
#if BACKWARD
        const float by = lines.scale(y);
#else
        const float by = lines.scale(y, weights);
#endif
        store_lines(call, p.data, store, rows.left + kStepRows, [&](int line) { return quantised(p, y[line], broadcast(by, line)); });
#endif
        store.advance(call), lines.advance(kStepRows);
        weights += kStepRows;
    }
    Stream::finish();
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) swiglu_block(const __grid_constant__ SwigluBlockParams p) {
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
    constexpr int kRunStride = 16 + 4;                               // words: a warp's rows, without conflicts of banks
    __shared__ __align__(16) float of_rows[kWarps][kRuns * kRunStride];
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, call.rows, call.columns);
    const Place place(call, at);
    float y[8][8];
    each_row(call, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const int lane = threadIdx.x % 32, blocks = kRuns / (int)p.block_segments;
    if (p.data) {
        float* const mine = of_rows[threadIdx.x / 32];               // of the 16 rows of this warp, run by run
        top.find_rows<false>(y);
        top.reduce_rows();
        const int run = Tile::column_patch() / (kRun / 8), row = lane / 16 * 8;
        float* const owned = mine + run * kRunStride + row + PatchTops::owned();
        owned[0] = as_float(top.row[0]), owned[1] = as_float(top.row[1]);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * blocks; i += 32) {               // a lane per block
            const int r = i % 16, b = i / 16;
            u32 bits = 0;
            for (int k = b * (int)p.block_segments; k < (b + 1) * (int)p.block_segments; k++) {
                const u32 other = as_bits(mine[k * kRunStride + r]);
                bits = other > bits ? other : bits;
            }
            const BlockScale s = p.rule.of(bits);
            // Of all its runs, so that nobody needs to know the block. Nobody else reads this lane's.
            for (int k = b * (int)p.block_segments; k < (b + 1) * (int)p.block_segments; k++) mine[k * kRunStride + r] = operand(p, s);
            const i64 to_row = at.row + threadIdx.x / 32 * 16 + r, to_block = at.column / Tile::kColumns * blocks + b;
            if (p.row_scales.has(to_row, to_block)) *p.row_scales.at(0, to_row, to_block) = to_row < call.rows ? s.scale_inv : 0.0f;
        }
        __syncwarp();
        float by[8];
        load_floats(mine + run * kRunStride + row, by);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, scaled(p, y[r][2 * i], by[r]), scaled(p, y[r][2 * i + 1], by[r]));
            store_row(call, place, p.data, r, codes);
        }
    }
    if (p.data_t) quantise_columns(p, at, y, tops, Tile{shared});
}
#endif
#endif
