// MX blocks of 32 elements with E8M0 scales (docs/numerics.md, section 2; numerics/e8m0.cuh); column-wise
// data are not transposed.
//
// Launch and bytes moved: as in one_scale.cuh, plus a byte per block for its scale. Every path but any
// streams.
#pragma once
#include "fused/block_amaxes.cuh"
#include "fused/drivers.cuh"
#include "numerics/e8m0.cuh"

static_assert(kScaling == Scaling::mx_blocks);

struct FusedMxParams {
    SourceCall call;
    u8 *data, *column_data;      // row-wise and column-wise; or null
    ScaleDestination row_scales, column_scales;
    MXScaleRule rule;
    u32 tiles;                   // tiles per thread block, one below the other, where rows stream
};

// A thread stores a word of scale bytes that are in shared memory: four blocks of a row or of a column
// (swizzled), or one block of each of four columns. Swizzled, a warp's words are adjacent in the result.
struct ScaleWord {
    int word, swizzled;

    __device__ __forceinline__ ScaleWord() : word(thread_again()), swizzled(word % 4 * 32 + word / 4 % 32) {}
    // Returns the bytes of four blocks of a column.
    __device__ __forceinline__ u32 blocks_of_column(const u8* of_columns) const {
        u32 blocks = 0;
#pragma unroll
        for (int b = 0; b < kSubblocks; b++)
            blocks |= (u32)of_columns[b * Tile::kColumns + swizzled] << 8 * b;
        return blocks;
    }
};

// Stores a tile's scale bytes; call __syncthreads() before.
__device__ __forceinline__ void store_scales(const FusedMxParams& p, const TilePosition& at,
                                             const u8* of_rows, const u8* of_columns) {
    const SourceCall& call = p.call;
    const i64 row_blocks = (call.columns + kSubblock - 1) / kSubblock;
    const i64 column_blocks = (call.rows + kSubblock - 1) / kSubblock;
    const ScaleWord own;
    if (p.data && own.word < Tile::kRows) {
        const int row = p.row_scales.swizzled() ? own.swizzled : own.word;
        const u32 four = reinterpret_cast<const u32*>(of_rows)[row];
        p.row_scales.store_blocks(0, at.row + row, at.column / kSubblock, four, call.rows, row_blocks);
    }
    if (p.column_data && own.word < Tile::kColumns) {
        if (p.column_scales.swizzled()) {
            p.column_scales.store_blocks(0, at.column + own.swizzled, at.row / kSubblock,
                                         own.blocks_of_column(of_columns), call.columns, column_blocks);
        } else {
            const int b = own.word / 32, c = own.word % 32 * 4;
            p.column_scales.store_lines(0, at.column + c, at.row / kSubblock + b,
                                        reinterpret_cast<const u32*>(of_columns)[own.word], call.columns,
                                        column_blocks);
        }
    }
}

// Stores the row-wise scale bytes of a tile of one part, whose columns end at `end`. last: only padding
// follows.
__device__ __forceinline__ void store_part_of_rows(const FusedMxParams& p, const TilePosition& at, i64 end,
                                                   bool last, const ScaleWord& own, const u8* of_rows) {
    const i64 all = (p.call.columns + kSubblock - 1) / kSubblock;
    const i64 block = at.column / kSubblock, blocks = (end + kSubblock - 1) / kSubblock;
    const int row = p.row_scales.swizzled() ? own.swizzled : own.word;
    const u32 four = reinterpret_cast<const u32*>(of_rows)[row];
    if (!p.row_scales.swizzled()) {
        p.row_scales.store_blocks(0, at.row + row, block, four, p.call.rows, blocks);
        return;
    }
    const i64 stored = last ? swizzle_tiles(all) * kSwizzleBlocks : blocks;
#pragma unroll 1
    for (i64 b = block; b < stored && (last || b < block + kSubblocks); b++)
        *p.row_scales.at(0, at.row + row, b) =
            b < block + kSubblocks ? (u8)(four >> (int)(b - block) * 8) : 0;
}

// The same for column-wise scales.
__device__ __forceinline__ void store_part_of_columns(const FusedMxParams& p, const TilePosition& at,
                                                      i64 end, bool last, const ScaleWord& own,
                                                      const u8* of_columns) {
    const i64 column_blocks = (p.call.rows + kSubblock - 1) / kSubblock;
    if (!p.column_scales.swizzled()) {
        const int b = own.word / 32, c = own.word % 32 * 4;
        const u32 four = reinterpret_cast<const u32*>(of_columns)[own.word];
        p.column_scales.store_lines(0, at.column + c, at.row / kSubblock + b, four, end, column_blocks);
        return;
    }
    const u32 blocks = own.blocks_of_column(of_columns);
    const i64 stored = last ? (end + kSwizzleLines - 1) / kSwizzleLines * kSwizzleLines : end;
#pragma unroll 1
    for (i64 column = at.column + own.swizzled;
         column < stored && (last || column < at.column + Tile::kColumns);
         column += Tile::kColumns)
        p.column_scales.store_blocks(0, column, at.row / kSubblock, column < end ? blocks : 0, p.call.columns,
                                     column_blocks);
}

// Stores the scale bytes of a tile of one part.
__device__ __forceinline__ void store_part_scales(const FusedMxParams& p, const TilePosition& at, i64 end,
                                                  const u8* of_rows, const u8* of_columns) {
    const bool last = end == p.call.columns && at.column < end && at.column + Tile::kColumns >= end;
    if (!kBackward || (at.column % Tile::kColumns == 0 && (last || at.column + Tile::kColumns <= end))) {
        store_scales(p, at, of_rows, of_columns);
        return;
    }
    const ScaleWord own;
    if (p.data && own.word < Tile::kRows) store_part_of_rows(p, at, end, last, own, of_rows);
    if (p.column_data && own.word < Tile::kColumns) store_part_of_columns(p, at, end, last, own, of_columns);
}

__device__ __forceinline__ Chunk<OUT, 8> quantized(const float (&y)[8], float by) {
    return narrowed<OUT>(y, [&](float v, int) { return mul_rn(v, by); });
}
// Quantises a chunk with one factor per column.
__device__ __forceinline__ Chunk<OUT, 8> quantized(const float (&y)[8], const float (&by)[8]) {
    return narrowed<OUT>(y, [&](float v, int i) { return mul_rn(v, by[i]); });
}
// Loads the factors of eight columns from their scale bytes.
__device__ __forceinline__ void load_factors(const u8* of_columns, float (&by)[8]) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(of_columns);
#pragma unroll
    for (int c = 0; c < 8; c++) by[c] = inverse_e8m0((c < 4 ? bytes.x : bytes.y) >> c % 4 * 8 & 0xffu);
}

// ---- streamed rows ----
// Scales along rows. A lane writes the byte of the chunk that it owns; 0 where the chunk has no elements.
struct MxRowScales {
    const FusedMxParams& p;
    bool given;                  // the chunk's subblock has columns (0 times a weight may be NaN)

    // Returns the factor of this lane's chunk. to: destination of its byte.
    __device__ __forceinline__ float scale(const float (&y)[4][8], u8* to) const { return put(amax(y), to); }
    // The same for u, before multiplication by the rows' weights (see BlockRowScales in f32_blocks.cuh).
    __device__ __forceinline__ float scale_weighted(float (&u)[4][8], const float* weights,
                                                    u8* to) const {
        const float weight = weights[row_of(owned<4>()) * kRowStride];
        const u32 weighted = as_bits(mul_rn(as_float(amax(u)), weight)) & 0x7fffffffu;
        if (__all_sync(~0u, is_moderate(weight) && is_moderate_amax(weighted)))
            return mul_rn(weight, put(weighted, to));
        multiply_chunks(u, weights);
        return scale(u, to);
    }

private:
    __device__ __forceinline__ u32 amax(const float (&y)[4][8]) const {
        return p.rule.nan_wins() ? fold_chunks<true>(y) : fold_chunks<false>(y);
    }
    __device__ __forceinline__ float put(u32 amax, u8* to) const {
        const u32 byte = p.rule.byte(amax);
        *to = given ? (u8)byte : 0;
        return inverse_e8m0(byte);
    }
};

// Quantises the subblocks down the columns. of_columns: a row of bytes per row of subblocks.
__device__ __forceinline__ void quantize_columns(const FusedMxParams& p, const TilePosition& at,
                                                 const i64& end, const float (&y)[4][8],
                                                 const ColumnAmaxes& amaxes, u8* of_columns, u8* data,
                                                 const ChunkPosition& position, int left) {
    const SourceCall& call = p.call;
    if (p.rule.nan_wins()) amaxes.write<true>(y);
    else amaxes.write<false>(y);
    __syncthreads();
    const int thread = thread_again();
    const int subblock = ColumnAmaxes::subblock(thread);
    const int column = ColumnAmaxes::column(thread);
    const bool exists = at.column + column < end && at.row + subblock * kSubblock < call.rows;
    of_columns[subblock * Tile::kColumns + column] =
        exists ? (u8)p.rule.byte(amaxes.read(subblock, column)) : 0;
    __syncthreads();
    float by[8];
    load_factors(of_columns + row_in_step(0) / kSubblock * Tile::kColumns + Tile::patch_column(), by);
    store_chunks(call, data, position, left, [&](int r) { return quantized(y[r], by); });
}

// Stores four chunks in the order of y. by: factor of the chunk that this lane owns.
__device__ __forceinline__ void store_quantized(const FusedMxParams& p, u8* data,
                                                const ChunkPosition& position, int left,
                                                const float (&four)[4][8], float by) {
    store_chunks(p.call, data, position, left,
                 [&](int chunk) { return quantized(four[chunk], broadcast(by, chunk)); });
}

// With options: quantises the chunks of one part row-wise. columns: offset of the part from the first tile of
// the results; end: the column after its last; bytes: destination of its scales.
__device__ __forceinline__ void quantize_rows(const FusedMxParams& p, const StreamPosition& at, i64 columns,
                                              i64 end, const float (&four)[4][8], int left, u8* bytes) {
    const SourceCall& call = p.call;
    // nothing derived from `thread` takes registers before this
    const int thread = thread_again();
    const int subblock = thread % Tile::kColumnPatches / (kSubblock / 8);
    // row of the chunk that this lane owns
    const int row = thread / Tile::kColumnPatches * kThreadRows + thread % 2 * 2 + thread / 2 % 2;
    const MxRowScales scales{p, at.results(call).column + columns + subblock * kSubblock < end};
    const float by = scales.scale(four, bytes + row * kSubblocks + subblock);
    const ChunkPosition position(call, at.results(call), thread);
    store_quantized(p, p.data + columns, position, left, four, by);
}

struct OptionMx {
    const ColumnAmaxes amaxes;
    float y[kThreadChunks][8];

    // behind: shared memory after the stages.
    __device__ __forceinline__ OptionMx(const FusedMxParams&, u8* behind)
        : amaxes{reinterpret_cast<u32*>(behind)} {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8], int) { keep(y, r, values); }
    template <class Rows>
    __device__ __forceinline__ void store(const FusedMxParams& p, const StreamPosition& at,
                                          const Rows& rows) {
        // a word per row; double-buffered
        __shared__ __align__(16) u8 of_rows[2][kParts][Tile::kRows * kSubblocks];
        __shared__ __align__(16) u8 of_columns[kSubblocks * Tile::kColumns];     // a row of bytes per 32 rows
        const SourceCall& call = p.call;
        clear_absent_rows(y, rows.left + kStepRows);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_chunks(y, part);
            const i64 columns = part * columns_between_parts(call), end = end_of(call, part);
            const int left = rows.left_in(part, rows.left + kStepRows);
            u8* const bytes = of_rows[at.down % 2][part];
            if (p.data) quantize_rows(p, at, columns, end, four, left, bytes);
            const auto part_at = moved(at.results(call), columns);
            if (p.column_data) {
                const ChunkPosition position(call, at.results(call), thread_again());
                quantize_columns(p, part_at, end, four, amaxes, of_columns, p.column_data + columns, position,
                                 left);
            } else {
                // store_part_scales() reads other warps' bytes
                __syncthreads();
            }
            store_part_scales(p, part_at, end, bytes, of_columns);
        }
    }
    static __device__ __forceinline__ u32 amax() { return 0; }
};

struct StreamMx {
    static constexpr bool kWholeTiles = true;
    const ColumnAmaxes amaxes;
    float y[kThreadChunks][8];

    __device__ __forceinline__ StreamMx(const FusedMxParams&, const TilePosition&, u8* behind)
        : amaxes{reinterpret_cast<u32*>(behind)} {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8]) { keep(y, r, values); }
    __device__ __forceinline__ void store(const FusedMxParams& p, const StreamPosition& at, int step,
                                          const ChunkPosition& position, int left, const float* weights) {
        // a word per row; double-buffered
        __shared__ __align__(16) u8 of_rows[2][kParts][Tile::kRows * kSubblocks];
        const int own = owned<4>(), subblock = Tile::column_patch() / (kSubblock / 8);
        const int row = step * kStepRows + row_in_step(0);           // from the thread block's first row on
        const MxRowScales scales{p, at.tile().column + subblock * kSubblock < p.call.half()};
        u8* const bytes = of_rows[step / kSteps % 2][0];
        const int own_row = part_of(own) * Tile::kRows + row % Tile::kRows + row_of(own) * kRowStride;
        u8* const to = bytes + own_row * kSubblocks + subblock;
        if constexpr (kTiled) {
            store_tile(p, at, scales, position, left, bytes, to);
        } else {
            auto& four = four_chunks(y, 0);
            const float by = kWeighsScales ? scales.scale_weighted(four, weights, to)
                                           : scales.scale(four, to);
            store_quantized(p, p.data, position, left, four, by);
            if (step % kSteps == kSteps - 1) store_row_scales(p, at, bytes);
        }
    }
    __device__ __forceinline__ void advance(const FusedMxParams&) {}
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    // Quantises a tile in the directions of the call. bytes: destination of its rows' scales; to: destination
    // of the scale of the chunk that this lane owns.
    __device__ __forceinline__ void store_tile(const FusedMxParams& p, const StreamPosition& at,
                                               const MxRowScales& scales, const ChunkPosition& position,
                                               int left, u8* bytes, u8* to) {
        __shared__ __align__(16) u8 of_columns[kSubblocks * Tile::kColumns];     // a row of bytes per 32 rows
        const SourceCall& call = p.call;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_chunks(y, part);
            const i64 columns = part * call.half();
            const int skipped = part * (Tile::kRows * kSubblocks);
            if (p.data) {
                const float by = scales.scale(four, to + skipped);
                store_quantized(p, p.data + columns, position, left, four, by);
            }
            const auto part_at = moved(at.tile(), columns);
            if (kPath == Path::tiles || p.column_data)
                quantize_columns(p, part_at, call.columns, four, amaxes, of_columns, p.column_data + columns,
                                 position, left);
            else __syncthreads();
            store_scales(p, part_at, bytes + skipped, of_columns);
        }
    }
    // Stores the scales of a whole tile's rows.
    static __device__ __forceinline__ void store_row_scales(const FusedMxParams& p, const StreamPosition& at,
                                                            const u8* bytes) {
        // store_scales() reads other warps' bytes
        __syncthreads();
        for (int part = 0; part < kParts; part++)
            store_scales(p, moved(at.tile(), part * p.call.half()), bytes + part * (Tile::kRows * kSubblocks),
                         nullptr);
    }
};

// ---- path any ----
// Quantises the 32 rows of each subblock down the columns. of_columns: a row of bytes per row of subblocks.
__device__ __forceinline__ void quantize_columns(const FusedMxParams& p, const TilePosition& at,
                                                 const PatchPosition& patch, const float (&y)[8][8],
                                                 u32* amaxes, u8* of_columns) {
    const SourceCall& call = p.call;
    const i64 column_blocks = (call.rows + kSubblock - 1) / kSubblock;
    PatchAmaxes amax;
    if (p.rule.nan_wins()) amax.find_columns<true>(y);
    else amax.find_columns<false>(y);
    store_column_amaxes(amaxes, amax.column);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kSubblocks * Tile::kColumns; i += kThreads) {
        const int b = i / Tile::kColumns, c = i % Tile::kColumns;
        const bool exists = at.column + c < call.columns && at.row / kSubblock + b < column_blocks;
        of_columns[i] =
            exists ? (u8)p.rule.byte(column_amax(amaxes, b * (kSubblock / 8), kSubblock / 8, c)) : 0;
    }
    __syncthreads();
    float by[8];
    load_factors(of_columns + Tile::row_patch() / (kSubblock / 8) * Tile::kColumns + Tile::patch_column(),
                 by);
#pragma unroll
    for (int r = 0; r < 8; r++) store_row(call, patch, p.column_data, r, quantized(y[r], by));
}

class PatchMx {
public:
    __device__ __forceinline__ explicit PatchMx(const FusedMxParams&) {}
    __device__ __forceinline__ void take(const FusedMxParams&, const PatchPosition&, int,
                                         const EightValues& values) {
        append(rows, values);
    }
    __device__ __forceinline__ void store(const FusedMxParams& p, const TilePosition& at,
                                          const PatchPosition& patch) const {
        __shared__ __align__(16) u32 amaxes[Tile::kRowPatches * Tile::kColumns];
        __shared__ __align__(16) u8 of_columns[kSubblocks * Tile::kColumns];     // a row of bytes per 32 rows
        __shared__ __align__(16) u8 of_rows[Tile::kRows * kSubblocks];           // a word per row
        const SourceCall& call = p.call;
        float y[8][8];
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int c = 0; c < 8; c++) y[r][c] = rows[r].of[c];
        PatchAmaxes amax;
        const i64 row_blocks = (call.columns + kSubblock - 1) / kSubblock;
        if (p.data) {
            if (p.rule.nan_wins()) amax.find_rows<true>(y);
            else amax.find_rows<false>(y);
            amax.reduce_rows();
            const int subblock = Tile::column_patch() / (kSubblock / 8);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = Tile::patch_row() + PatchAmaxes::owned() + i;
                const bool exists = at.row + row < call.rows && at.column / kSubblock + subblock < row_blocks;
                of_rows[row * kSubblocks + subblock] = exists ? (u8)p.rule.byte(amax.row[i]) : 0;
            }
            __syncwarp();
#pragma unroll
            for (int r = 0; r < 8; r++) {
                const float by = inverse_e8m0(of_rows[(Tile::patch_row() + r) * kSubblocks + subblock]);
                store_row(call, patch, p.data, r, quantized(y[r], by));
            }
        }
        if (p.column_data) quantize_columns(p, at, patch, y, amaxes, of_columns);
        // store_scales() reads other warps' bytes
        else __syncthreads();
        store_scales(p, at, of_rows, of_columns);
    }
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    EightValues rows[8] = {};
};

constexpr int kFusedThreads = kPath == Path::any ? kThreads : kStreamThreads;
constexpr int kFusedBlocks = kPath == Path::any ? kBlocks : kStreamBlocks;

// Computes values and quantises them.
template <class Params>
__device__ __forceinline__ void quantize(const Params& p) {
    if (is_set(p.call.noop)) return;
    if constexpr (kOptions) stream_with_options<OptionMx>(p, p.call);
    else if constexpr (kPath == Path::any) patches<PatchMx>(p, p.call);
    else stream<StreamMx>(p, p.call);
    add_up_sums(p.call, p.tiles);
}
