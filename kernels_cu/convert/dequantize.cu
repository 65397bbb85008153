// Dequantises data with block scales (docs/numerics.md, rules 3 to 5 and 10):
//
//   out[i, j] = narrow(fl(widen(data[i, j]) * widen(scale_inv of the block of (i, j))))
//   the block of (i, j) is (i >> row_shift, j >> column_shift)
//
// data       IN [batch, rows, columns], or [batch, columns, rows] for dequantize_blocks_transposed
// out        OUT [batch, rows, columns]
// scale_inv  f32 or E8M0, at strides (compact, rows of scales, a transposed view, …) or swizzled
//            (swizzle.cuh). Extents of blocks other than 1 are 32 or more.
//
// dequantize_long_row           Row-wise blocks tile the rows of data without a tail, and scales are compact,
//                               so data are one long row of consecutive blocks with consecutive scales. No
//                               shared memory.
// dequantize_blocks             A thread block has 2^chunks_log2 chunks of 16 bytes of out side by side; a
//                               thread has a few rows of one chunk, all in flight, and loads a column's scale
//                               only once.
// dequantize_blocks_transposed  A thread block transposes a tile of data in shared memory. Scales that many
//                               threads need are widened once and kept there. One scale for everything is a
//                               block that covers everything.
//
// The product and the result are each rounded to nearest-even. NaN becomes the format's one NaN. Zeros keep
// their sign. Bytes moved: 1 + sizeof(OUT) per element, and the scale of each block.
//
// Defines:
//   IN, OUT      the formats: {e4m3fn, e5m2} and {f32, bf16, f16}; conversions are instructions of the inner
//                loop
//   SWIZZLED     for dequantize_blocks. 1: scales are swizzled E8M0 bytes, whose sectors neighbouring rows
//                share, so a thread has eight rows instead of four. 0: scales at strides.
//   TILE_ROWS, TILE_COLUMNS, DOWN_FIRST, ALIGNED   for dequantize_blocks_transposed, as for `transpose` in
//                                                  astype.cu
// The type of the scales and column-wise blocks are no defines: a uniform branch, outside of loops. Measured
// speed and what was tried: docs/lab-notes.
#include "memory/elementwise.cuh"
#include "scale/swizzle.cuh"
#include "tile/tile.cuh"

struct DequantizeParams {
    const IN::storage* data;
    OUT::storage* out;
    const void* scale_inv;
    i64 rows, columns;                               // shape of each matrix of out
    i64 row_stride, column_stride, matrix_stride;    // strides of the scales: down, to the right, to the next
                                                     // matrix
    i64 scale_tiles;                                 // swizzle_tiles(blocks of a row or a column); 0: strides
    u32 row_shift, column_shift;                     // log2 of a block's extents
    u32 down, across;                                // dequantize_blocks: tiles of a matrix
    u32 chunks_log2;                                 // dequantize_blocks: chunks along a row of a tile
    u32 vector;                                      // bit 0: rows of data allow chunked access; bit 1: rows
                                                     // of out; bit 2: scales of four columns are one load
    u32 f32_scales;                                  // 1: f32, 0: E8M0
    u32 columnwise;                                  // 1: blocks are one column wide
};

// Returns the place of a block's scale. row, column: in the grid of blocks. The rows of swizzled scales are
// the columns of out if `columnwise`.
template <class Scale>
__device__ __forceinline__ const typename Scale::storage* scale_at(const DequantizeParams& p, bool swizzled,
                                                                   bool columnwise, i64 matrix, i64 row,
                                                                   i64 column) {
    const i64 at = !swizzled    ? row * p.row_stride + column * p.column_stride
                   : columnwise ? swizzled_at(column, row, p.scale_tiles)
                                : swizzled_at(row, column, p.scale_tiles);
    return static_cast<const typename Scale::storage*>(p.scale_inv) + matrix * p.matrix_stride + at;
}

// Scales of kCount adjacent columns: one each if kColumnwise, else one for all of them.
template <bool kColumnwise, int kCount>
struct ChunkScales {
    float scale[kColumnwise ? kCount : 1];

    // `from` is 16-byte aligned if kColumnwise.
    __device__ __forceinline__ void load_shared(const float* from) {
        if constexpr (!kColumnwise) scale[0] = *from;
        else {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const auto part = Chunk<f32, 4>::load_shared(reinterpret_cast<const u8*>(from + i));
#pragma unroll
                for (int j = 0; j < 4; j++) scale[i + j] = as_float(part.word[j]);
            }
        }
    }
    __device__ __forceinline__ Chunk<OUT, kCount> operator()(const Chunk<IN, kCount>& in) const {
        return converted<OUT>(in, [&](float v, int i) { return mul_rn(v, scale[kColumnwise ? i : 0]); });
    }
};

#ifdef ENTRY_dequantize_long_row
using Chunks = ElementwiseChunks<IN, OUT>;

// Loads the scales of a thread's chunks. All loads are in flight before the first scale is widened.
template <class Scale>
__device__ __forceinline__ void load_scales(const DequantizeParams& p, const Chunks& in,
                                            float (&scale)[kElementwiseUnroll]) {
    const auto* const scales = static_cast<const typename Scale::storage*>(p.scale_inv);
    u32 bits[kElementwiseUnroll];
#pragma unroll
    for (int u = 0; u < kElementwiseUnroll; u++)
        bits[u] = in.whole || in.left(u) > 0 ? load_read_only(scales + (in.at(u) >> p.column_shift)) : 0;
#pragma unroll
    for (int u = 0; u < kElementwiseUnroll; u++) scale[u] = Scale::widen(bits[u]);
}

extern "C" __global__ void __launch_bounds__(kElementwiseThreads)
dequantize_long_row(const __grid_constant__ DequantizeParams p) {
    const Chunks in(p.data, p.columns, p.vector & 1);
    float scale[kElementwiseUnroll];
    if (p.f32_scales) load_scales<f32>(p, in, scale);
    else load_scales<e8m0fnu>(p, in, scale);
#pragma unroll
    for (int u = 0; u < kElementwiseUnroll; u++) {
        const auto values = ChunkScales<false, in.kCount>{{scale[u]}}(in.chunk[u]);
        if (in.whole) values.store_whole(p.out + in.at(u));
        else values.store_partial(p.out + in.at(u), in.left(u));
    }
}
#endif

#ifdef ENTRY_dequantize_blocks
constexpr int kCount = kElementwiseChunk<IN, OUT>;                   // elements in a thread's chunk
constexpr int kSteps = SWIZZLED ? 8 : 4;                             // rows per thread

// A thread's part: up to kSteps rows of a chunk of columns.
struct Part {
    i64 row, column;
    u32 matrix;
    int rows_left, columns_left;

    __device__ __forceinline__ explicit Part(const DequantizeParams& p) {
        // at most 5
        const u32 chunks_log2 = p.chunks_log2;
        const u32 row_of_tiles = blockIdx.x / p.across, in_row = threadIdx.x & ((1u << chunks_log2) - 1);
        matrix = row_of_tiles / p.down;
        row = ((i64)(row_of_tiles - matrix * p.down) * (kElementwiseThreads >> chunks_log2)
               + (threadIdx.x >> chunks_log2)) * kSteps;
        column = ((i64)(blockIdx.x - row_of_tiles * p.across) << chunks_log2 | in_row) * kCount;
        columns_left = left_of(p.columns - column, kCount);
        rows_left = columns_left ? left_of(p.rows - row, kSteps) : 0;
    }
};

// Loads the scales of a thread's columns in one row of blocks.
template <class Scale>
__device__ __forceinline__ void load_scales(const DequantizeParams& p, const Part& part,
                                            ChunkScales<true, kCount>& to) {
    const i64 block_row = part.row >> p.row_shift;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        u32 bits[4] = {};
        if (!SWIZZLED && p.vector & 4) {
            const auto four = Chunk<Scale, 4>::load(
                scale_at<Scale>(p, SWIZZLED, true, part.matrix, block_row, part.column + i));
            constexpr u32 kMask = four.kPerWord == 4 ? 0xffu : ~0u;
#pragma unroll
            for (int j = 0; j < 4; j++)
                bits[j] = four.word[j / four.kPerWord] >> j % four.kPerWord * 8 & kMask;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j < part.columns_left)
                    bits[j] = load_read_only(scale_at<Scale>(p, SWIZZLED, true, part.matrix, block_row,
                                                             part.column + i + j));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) to.scale[i + j] = Scale::widen(bits[j]);
    }
}
// Loads the scales of a thread's rows. All loads are in flight before the first scale is widened.
template <class Scale, int kRows>
__device__ __forceinline__ void load_scales(const DequantizeParams& p, const Part& part, i64 row,
                                            float (&scale)[kRows]) {
    u32 bits[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++)
        bits[r] = load_read_only(scale_at<Scale>(p, SWIZZLED, false, part.matrix, (row + r) >> p.row_shift,
                                                 part.column >> p.column_shift));
#pragma unroll
    for (int r = 0; r < kRows; r++) scale[r] = Scale::widen(bits[r]);
}
template <int kRows>
__device__ __forceinline__ void load_scales(const DequantizeParams& p, const Part& part, i64 row,
                                            float (&scale)[kRows]) {
    if (!SWIZZLED && p.f32_scales) load_scales<f32>(p, part, row, scale);
    else load_scales<e8m0fnu>(p, part, row, scale);
}

template <bool kColumnwise>
__device__ __forceinline__ void dequantize_part(const DequantizeParams& p, const Part& part) {
    ChunkScales<kColumnwise, kCount> scales;
    if constexpr (kColumnwise) {                     // a thread's rows are in one row of blocks
        if (!SWIZZLED && p.f32_scales) load_scales<f32>(p, part, scales);
        else load_scales<e8m0fnu>(p, part, scales);
    }
    i64 at = (part.matrix * p.rows + part.row) * p.columns + part.column;
    if (p.vector & 1 && part.rows_left == kSteps) {
        Chunk<IN, kCount> chunk[kSteps];
#pragma unroll
        for (int r = 0; r < kSteps; r++) chunk[r] = Chunk<IN, kCount>::load(p.data + at + r * p.columns);
        float of_row[kSteps];
        if constexpr (!kColumnwise) load_scales(p, part, part.row, of_row);
#pragma unroll
        for (int r = 0; r < kSteps; r++) {
            if constexpr (!kColumnwise) scales.scale[0] = of_row[r];
            scales(chunk[r]).store_whole(p.out + at + r * p.columns);
        }
        return;
    }
#pragma unroll 1
    for (int r = 0; r < part.rows_left; r++, at += p.columns) {
        if constexpr (!kColumnwise) load_scales(p, part, part.row + r, scales.scale);
        scales(Chunk<IN, kCount>::load_partial(p.data + at, part.columns_left))
            .store_partial(p.out + at, part.columns_left);
    }
}

// thread blocks per SM, as limited by registers; kernels for only one kind of blocks get the same
constexpr int kBlocks = sizeof(OUT::storage) == 4 && !SWIZZLED ? 16 : 12;

extern "C" __global__ void __launch_bounds__(kElementwiseThreads, kBlocks)
dequantize_blocks(const __grid_constant__ DequantizeParams p) {
    const Part part(p);
    if (!part.rows_left) return;
    if (p.columnwise) dequantize_part<true>(p, part);
    else dequantize_part<false>(p, part);
}
#endif

#ifdef ENTRY_dequantize_blocks_transposed
using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;

// Scales of a tile of data, as f32 in shared memory. Rows of data are columns of out. The tile's extents are
// powers of two, and its first element's indices are multiples of them.
struct TileScales {
    static constexpr int kMostScales = TILE_ROWS * TILE_COLUMNS / 32; // at least 32 elements per block
    float* shared;
    u32 row_shift, column_shift;
    u32 columns_log2;                                // log2 of the tile's blocks along a row of out

    __device__ __forceinline__ TileScales(u8* after_tile, const DequantizeParams& p)
        : shared(reinterpret_cast<float*>(after_tile)), row_shift(p.row_shift), column_shift(p.column_shift),
          columns_log2(blocks_log2(TILE_ROWS, p.column_shift)) {}

    // row, column: the tile's first element in out. Call __syncthreads() before get().
    template <class Scale>
    __device__ __forceinline__ void load(const DequantizeParams& p, i64 matrix, i64 row, i64 column) const {
        static_assert(kMostScales % Tile::kThreads == 0, "every thread loads the same number");
        const u32 count = 1u << (columns_log2 + blocks_log2(TILE_COLUMNS, row_shift));
        const bool swizzled = sizeof(typename Scale::storage) == 1 && p.scale_tiles;
        u32 scale[kMostScales / Tile::kThreads];     // all loads are in flight before the first is widened
#pragma unroll
        for (int k = 0; k < kMostScales / Tile::kThreads; k++) {
            const u32 i = k * Tile::kThreads + threadIdx.x;
            const i64 block_row = (row >> row_shift) + (i >> columns_log2);
            const i64 block_column = (column >> column_shift) + (i & ((1u << columns_log2) - 1));
            const bool exists = i < count && block_row << row_shift < p.rows
                                && block_column << column_shift < p.columns;
            scale[k] = !exists ? 0
                               : load_read_only(scale_at<Scale>(p, swizzled, p.columnwise, matrix, block_row,
                                                                block_column));
        }
#pragma unroll
        for (int k = 0; k < kMostScales / Tile::kThreads; k++)
            shared[k * Tile::kThreads + threadIdx.x] = Scale::widen(scale[k]);
    }
    // Returns the scale of an element, followed by those of its right neighbours. row, column: in the tile,
    // as in out.
    __device__ __forceinline__ const float* get(int row, int column) const {
        return shared + (((i64)row >> row_shift) << columns_log2) + ((i64)column >> column_shift);
    }

private:
    // a tile has at least one block, or part of one
    static __device__ __forceinline__ u32 blocks_log2(u32 elements, u32 shift) {
        const u32 log2 = 31 - __clz((int)elements);
        return log2 > shift ? log2 - shift : 0;
    }
};

template <bool kColumnwise>
__device__ __forceinline__ void store_tile(const DequantizeParams& p, const TilePosition& at,
                                           const Tile& tile, const TileScales& scales) {
    constexpr int kStore = 16 / sizeof(OUT::storage);                // elements of a 16-byte store
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<kStore>; unit++) {
        const int tile_row = Tile::column<kStore>(unit), tile_column = Tile::row<kStore>();
        const i64 to_row = at.column + tile_row, to_column = at.row + tile_column;
        const int left = to_row < p.rows ? left_of(p.columns - to_column, kStore) : 0;
        ChunkScales<kColumnwise, kStore> convert;
        convert.load_shared(scales.get(tile_row, tile_column));
        const Chunk<OUT, kStore> values = convert(tile.read<IN, kStore>(unit));
        OUT::storage* to = p.out + (at.matrix * p.rows + to_row) * p.columns + to_column;
        if (!(ALIGNED || p.vector & 2)) values.store_partial(to, left);
        else if (left > 0) values.store_whole(to);
    }
}

// 32 registers per thread, so that eight thread blocks of small tiles fit an SM. 0 lets the compiler choose
// (36 to 51); with 1 it takes up to 110, which is 17 to 35 % slower.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = Tile::kThreads == 256 ? 8 : 0;
#else
constexpr int kBlocks = 0;
#endif

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
dequantize_blocks_transposed(const __grid_constant__ DequantizeParams p) {
    extern __shared__ __align__(16) u8 shared[];     // the tile of data, then its scales
    const Tile tile{shared};
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.columns, p.rows);
    // this thread's first element in out
    const i64 column = at.row + Tile::patch_row(), row = at.column + Tile::patch_column();
    int columns_left = left_of(p.columns - column, 8), rows_left = left_of(p.rows - row, 8);
    if (ALIGNED) columns_left = rows_left = columns_left && rows_left ? 8 : 0;
    Chunk<IN, 8> patch[8];
    Tile::load_patch(patch, p.data + (at.matrix * p.columns + column) * p.rows + row, p.rows, columns_left,
                     rows_left, ALIGNED || p.vector & 1);
    const TileScales scales(shared + TILE_ROWS * TILE_COLUMNS, p);
    if (p.f32_scales) scales.load<f32>(p, at.matrix, at.column, at.row);
    else scales.load<e8m0fnu>(p, at.matrix, at.column, at.row);
    tile.write_patch(patch);
    __syncthreads();
    if (p.columnwise) store_tile<true>(p, at, tile, scales);
    else store_tile<false>(p, at, tile, scales);
}
#endif
