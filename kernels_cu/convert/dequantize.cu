// Dequantising data whose blocks share a scale (docs/numerics.md, rules 3 to 5 and 10):
//
//   out[i, j] = narrow(fl(widen(data[i, j]) * widen(scale_inv of the block of (i, j))))
//
// out [batch, rows, columns]; the block of (i, j) is (i >> row_shift, j >> column_shift). scale_inv is found by strides (compact, whole
// rows, a transposed view, …) or swizzled (swizzle.cuh: lines are the columns where COLUMNWISE, else the rows).
// COLUMNWISE 1: blocks are one column wide, so that neighbouring columns have scales of their own; 0: 32 columns or more.
// IN in {e4m3fn, e5m2}, OUT in {f32, bf16, f16}, SCALE in {e8m0fnu, f32}. Extents of blocks other than 1 are 32 or more.
//
// dequantize_runs               data stored as out, row-wise blocks that tile its rows (no tail), compact scales: one long row, in which
//                               neighbouring blocks have neighbouring scales. Registers only.
// dequantize_blocks             data stored as out: a block of threads has 2^run_shift chunks of 16 bytes of out side by side (32 where
//                               COLUMNWISE), a thread STEPS rows of one, all in flight, so that it needs a column's
//                               scale once; eight or more where scales are swizzled, since then neighbouring lines share their sectors.
// dequantize_blocks_transposed  data stored [batch, columns, rows]: through shared memory, a block of threads per tile of data, TILE_ROWS x
//                               TILE_COLUMNS. ALIGNED, DOWN_FIRST: as `transpose` in astype.cu.
// Scales that many threads need are widened once and kept in shared memory. Bytes moved per element: 1 + sizeof(OUT) + 1 scale per block.
// Speed and what was tried: docs/performance.md.
#include "memory/elementwise.cuh"
#include "scale/swizzle.cuh"
#include "tile/tile.cuh"

struct DequantizeParams {
    const IN::storage* data;
    OUT::storage* out;
    const SCALE::storage* scale_inv;
    i64 rows, columns;                               // of each matrix of out
    i64 row_stride, column_stride, matrix_stride;    // of scale_inv, in elements: to the block below, to the right, of the next matrix
    i64 scale_tiles;                                 // swizzled: swizzle_tiles(blocks along a line); 0: strides
    u32 row_shift, column_shift;                     // log2 of a block's extents
    u32 down, across, run_shift;                     // dequantize_blocks: tiles of a matrix; log2 of a tile's chunks along a row
    u32 vector;                                      // bit 0: data allows chunked access in every row; bit 1: out (untransposed: both or
                                                     // none); bit 2: where COLUMNWISE, so do four neighbouring columns' scales
};

// Of the block in a row and a column of blocks.
__device__ __forceinline__ const SCALE::storage* scale_at(const DequantizeParams& p, i64 matrix, i64 row, i64 column) {
    const i64 at = p.scale_tiles == 0 ? row * p.row_stride + column * p.column_stride
                   : COLUMNWISE       ? swizzled_at(column, row, p.scale_tiles)
                                      : swizzled_at(row, column, p.scale_tiles);
    return p.scale_inv + matrix * p.matrix_stride + at;
}
__device__ __forceinline__ u32 load_scale(const DequantizeParams& p, i64 matrix, i64 row, i64 column) {
    return load_read_only(scale_at(p, matrix, row, column));
}

// The scales of a tile of kRows x kColumns elements of out, both powers of two, whose first element's indices are multiples of them; in
// shared memory. Their number is at most kMost.
template <int kRows, int kColumns, int kMost, int kThreads>
struct TileScales {
    float* shared;
    u32 row_shift, column_shift;
    u32 columns_log2;                                // of the tile, in blocks

    __device__ __forceinline__ TileScales(float* shared, const DequantizeParams& p)
        : shared(shared), row_shift(p.row_shift), column_shift(p.column_shift), columns_log2(blocks_log2(kColumns, p.column_shift)) {}

    // Call __syncthreads() before get().
    __device__ __forceinline__ void load(const DequantizeParams& p, i64 matrix, i64 row, i64 column) const {
        static_assert(kMost % kThreads == 0, "every thread loads the same number");
        const u32 count = 1u << (columns_log2 + blocks_log2(kRows, row_shift));
        u32 scale[kMost / kThreads];                 // all on their way before the first is widened
#pragma unroll
        for (int k = 0; k < kMost / kThreads; k++) {
            const u32 i = k * kThreads + threadIdx.x;
            const i64 block_row = (row >> row_shift) + (i >> columns_log2);
            const i64 block_column = (column >> column_shift) + (i & ((1u << columns_log2) - 1));
            const bool exists = i < count && block_row << row_shift < p.rows && block_column << column_shift < p.columns;
            scale[k] = exists ? load_scale(p, matrix, block_row, block_column) : 0;
        }
#pragma unroll
        for (int k = 0; k < kMost / kThreads; k++) shared[k * kThreads + threadIdx.x] = SCALE::widen(scale[k]);
    }
    // Of an element of the tile, and of those to its right.
    __device__ __forceinline__ const float* get(int row, int column) const {
        return shared + (((i64)row >> row_shift) << columns_log2) + ((i64)column >> column_shift);
    }

private:
    // At least one block, of which the tile may be a part.
    static __device__ __forceinline__ u32 blocks_log2(u32 elements, u32 shift) {
        const u32 log2 = 31 - __clz((int)elements);
        return log2 > shift ? log2 - shift : 0;
    }
};

// A scale for each of kCount neighbouring columns, or one for all of them.
template <int kCount>
struct ChunkScales {
    float scale[COLUMNWISE ? kCount : 1];

    __device__ __forceinline__ explicit ChunkScales(float all) : scale{all} {}
    // from: in shared memory, 16-byte aligned where COLUMNWISE.
    __device__ __forceinline__ explicit ChunkScales(const float* from) {
        if (COLUMNWISE) {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const auto part = Chunk<f32, 4>::load_shared(reinterpret_cast<const u8*>(from + i));
#pragma unroll
                for (int j = 0; j < 4; j++) scale[COLUMNWISE ? i + j : 0] = as_float(part.word[j]);
            }
        } else scale[0] = *from;
    }
    // From global memory, where COLUMNWISE: those of `column` and on, of which columns_left exist.
    __device__ __forceinline__ ChunkScales(const DequantizeParams& p, i64 matrix, i64 row, i64 column, int columns_left) {
#pragma unroll
        for (int i = 0; i < (COLUMNWISE ? kCount : 0); i += 4) {
            u32 bits[4] = {};
            if (p.vector & 4) {
                const auto four = Chunk<SCALE, 4>::load(scale_at(p, matrix, row, column + i));
#pragma unroll
                for (int j = 0; j < 4; j++) bits[j] = four.word[j / four.kPerWord] >> j % four.kPerWord * 8 & (four.kPerWord == 4 ? 0xffu : ~0u);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (i + j < columns_left) bits[j] = load_scale(p, matrix, row, column + i + j);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) scale[COLUMNWISE ? i + j : 0] = SCALE::widen(bits[j]);
        }
    }
    __device__ __forceinline__ Chunk<OUT, kCount> operator()(const Chunk<IN, kCount>& in) const {
        Chunk<OUT, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount / 2; i++) {
            float lo, hi;
            in.widen2(i, lo, hi);
            out.narrow2(i, mul_rn(lo, scale[COLUMNWISE ? 2 * i : 0]), mul_rn(hi, scale[COLUMNWISE ? 2 * i + 1 : 0]));
        }
        return out;
    }
};

#ifdef ENTRY_dequantize_runs
extern "C" __global__ void __launch_bounds__(kFlatThreads) dequantize_runs(const __grid_constant__ DequantizeParams p) {
    const FlatChunks<IN, OUT> in(p.data, p.columns, p.vector & 1);
    u32 scale[kFlatUnroll];
#pragma unroll
    for (int u = 0; u < kFlatUnroll; u++)
        scale[u] = in.whole || in.left(u) > 0 ? load_read_only(p.scale_inv + (in.at(u) >> p.column_shift)) : 0;
#pragma unroll
    for (int u = 0; u < kFlatUnroll; u++) {
        const auto values = ChunkScales<in.kCount>(SCALE::widen(scale[u]))(in.chunk[u]);
        if (in.whole) values.store_whole(p.out + in.at(u));
        else values.store_partial(p.out + in.at(u), in.left(u));
    }
}
#endif

#ifdef ENTRY_dequantize_blocks
constexpr int kCount = kFlatChunk<IN, OUT>;                          // of a thread's chunk

extern "C" __global__ void __launch_bounds__(kFlatThreads) dequantize_blocks(const __grid_constant__ DequantizeParams p) {
    const u32 run = COLUMNWISE ? 5 : p.run_shift;                    // at most 5: a thread's chunks are in one column
    const u32 line = blockIdx.x / p.across, matrix = line / p.down;
    const i64 row = ((i64)(line - matrix * p.down) * (kFlatThreads >> run) + (threadIdx.x >> run)) * STEPS;
    const i64 column = ((i64)(blockIdx.x - line * p.across) << run | (threadIdx.x & ((1u << run) - 1))) * kCount;
    const int columns_left = left_of(p.columns - column, kCount), rows_left = columns_left ? left_of(p.rows - row, STEPS) : 0;
    if (!rows_left) return;
#if COLUMNWISE
    const ChunkScales<kCount> convert(p, matrix, row >> p.row_shift, column, columns_left);         // one block of rows has them all
#endif
    i64 at = (matrix * p.rows + row) * p.columns + column;
    if (p.vector & 1 && rows_left == STEPS) {
        Chunk<IN, kCount> chunk[STEPS];
        u32 scale[STEPS];
#pragma unroll
        for (int r = 0; r < STEPS; r++) {
            chunk[r] = Chunk<IN, kCount>::load(p.data + at + r * p.columns);
            scale[r] = COLUMNWISE ? 0 : load_scale(p, matrix, (row + r) >> p.row_shift, column >> p.column_shift);
        }
#pragma unroll
        for (int r = 0; r < STEPS; r++) {
#if !COLUMNWISE
            const ChunkScales<kCount> convert{SCALE::widen(scale[r])};
#endif
            convert(chunk[r]).store_whole(p.out + at + r * p.columns);
        }
        return;
    }
#pragma unroll 1
    for (int r = 0; r < rows_left; r++, at += p.columns) {
#if !COLUMNWISE
        const ChunkScales<kCount> convert{SCALE::widen(load_scale(p, matrix, (row + r) >> p.row_shift, column >> p.column_shift))};
#endif
        convert(Chunk<IN, kCount>::load_partial(p.data + at, columns_left)).store_partial(p.out + at, columns_left);
    }
}
#endif

#ifdef ENTRY_dequantize_blocks_transposed
using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;

extern "C" __global__ void __launch_bounds__(Tile::kThreads) dequantize_blocks_transposed(const __grid_constant__ DequantizeParams p) {
    extern __shared__ __align__(16) u8 shared[];     // the tile of data, then its scales
    const Tile tile{shared};
    // Of out; a tile's rows are columns of out.
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.columns, p.rows);
    const i64 matrix = at.matrix * p.rows * p.columns;
    const i64 column = at.row + Tile::patch_row(), row = at.column + Tile::patch_column();
    const bool vector_in = ALIGNED || p.vector & 1, vector_out = ALIGNED || p.vector & 2;
    int columns_left = left_of(p.columns - column, 8), rows_left = left_of(p.rows - row, 8);
    if (ALIGNED) columns_left = rows_left = columns_left && rows_left ? 8 : 0;
    Chunk<IN, 8> patch[8];
    Tile::load_patch(patch, p.data + matrix + column * p.rows + row, p.rows, columns_left, rows_left, vector_in);
    const TileScales<TILE_COLUMNS, TILE_ROWS, TILE_ROWS * TILE_COLUMNS / 32, Tile::kThreads> scales{
        reinterpret_cast<float*>(shared + TILE_ROWS * TILE_COLUMNS), p};
    scales.load(p, at.matrix, at.column, at.row);
    tile.write_patch(patch);
    __syncthreads();
    constexpr int kStore = 16 / sizeof(OUT::storage);                // elements of a 16-byte store
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<kStore>; unit++) {
        const int tile_row = Tile::column<kStore>(unit), tile_column = Tile::row<kStore>();
        const i64 to_row = at.column + tile_row, to_column = at.row + tile_column;
        const int left = to_row < p.rows ? left_of(p.columns - to_column, kStore) : 0;
        const ChunkScales<kStore> convert{scales.get(tile_row, tile_column)};
        const Chunk<OUT, kStore> values = convert(tile.read<IN, kStore>(unit));
        OUT::storage* to = p.out + matrix + to_row * p.columns + to_column;
        if (!vector_out) values.store_partial(to, left);
        else if (left > 0) values.store_whole(to);
    }
}
#endif
