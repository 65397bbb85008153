// Where results of SwiGLU go, and how many blocks share a multiprocessor. Macros: those of swiglu.cuh; PLAIN, OUT.
#pragma once
#include "scale/cast.cuh"
#if PLAIN
#include "swiglu/swiglu_rows.cuh"
#else
#include "swiglu/swiglu.cuh"
#endif

constexpr int kWarps = kThreads / 32;
// On a multiprocessor, for 128 registers. Gradients in f32 do not fit these, on sm_120 other kernels do not either.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = sizeof(IN::storage) == 2 && !BACKWARD ? 2 : 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kBlocks = (PLAIN || sizeof(IN::storage) == 4) && BACKWARD ? 1 : 2;      // conversions by integers take more
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 || !BACKWARD ? 2 : 1;
#endif

// Row r of the patch, stored as y is.
__device__ __forceinline__ void store_row(const SwigluCall& call, const Place& place, u8* data, int r, const Chunk<OUT, 8>& codes) {
    if (r >= place.rows_left) return;
    u8* to = data + (place.row + r) * call.columns + place.column;
    if (!call.has(SwigluCall::kWide)) codes.store_partial(to, place.columns_left);
    else if (place.columns_left) codes.store(to);
}

// The transposed tile, behind a __syncthreads(). vector: every transposed row allows 16-byte stores.
__device__ __forceinline__ void store_transposed(const SwigluCall& call, const TilePosition& at, const Tile& tile, u8* data, bool vector) {
    if (!vector) {
        tile.store_ragged(data + at.column * call.rows + at.row, call.rows, left_of(call.columns - at.column, Tile::kColumns),
                          left_of(call.rows - at.row, Tile::kRows));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
        const i64 row = at.column + Tile::column<16>(unit), column = at.row + Tile::row<16>();
        if (row < call.columns && column < call.rows) tile.read<OUT, 16>(unit).store_whole(data + row * call.rows + column);
    }
}

#if PLAIN
// Where the rows of a patch go that are stored as y is, group by group.
struct RowStore {
    u8* to;                      // of the first row of a group
    i64 half;
    int left;

    __device__ __forceinline__ RowStore(const SwigluCall& call, const Place& place, u8* data)
        : to(data), half(call.half()), left(data && place.columns_left ? place.rows_left : 0) {
        if (left) to += place.row * call.columns + place.column;
    }
    // Row r of the group that starts with row `first`.
    __device__ __forceinline__ void put(int first, int r, int part, const Chunk<OUT, 8>& codes) const {
        if (first + r < left) codes.store(to + (r * kParts + part) * half);
    }
    __device__ __forceinline__ void advance(int rows) {
        if (left) to += rows * kParts * half;
    }
};
// Of a block, along rows of tiles. (In 32 bits: there are no more tiles than blocks. A division of i64 is a call, which costs registers.)
__device__ __forceinline__ TilePosition position(const SwigluCall& call, u32 block) {
    const u32 across = (u32)((call.half() + Tile::kColumns - 1) / Tile::kColumns), line = across ? block / across : 0;
    return {0, (i64)line * Tile::kRows, (i64)(block - line * across) * Tile::kColumns};
}
__device__ __forceinline__ TilePosition moved(const TilePosition& at, i64 columns) { return {at.matrix, at.row, at.column + columns}; }
// The upper or lower four rows of a patch of Tile::write_patch(); to: of the first.
__device__ __forceinline__ void write_half_patch(u8* to, const Chunk<OUT, 8> (&line)[4]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 columns[4];
        transpose_4x4(line[0].word[w], line[1].word[w], line[2].word[w], line[3].word[w], columns);
#pragma unroll
        for (int k = 0; k < 4; k++) *reinterpret_cast<u32*>(to + (w * 4 + k) * Tile::kRows) = columns[k];
    }
}
#endif
