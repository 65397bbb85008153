// Stores of results, and thread blocks per SM.
#pragma once
#include "fused/patch.cuh"
#include "fused/rows.cuh"
#include "numerics/amax.cuh"
#include "scale/cast.cuh"

constexpr int kWarps = kThreads / 32;
// thread blocks of kThreads threads per SM, for 128 registers. Gradients in f32 need more; on sm_120 so do
// other kernels.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = sizeof(IN::storage) == 2 && !kBackward ? 2 : 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
// conversions by integers take more registers
constexpr int kBlocks = (kPath != Path::any || sizeof(IN::storage) == 4) && kBackward ? 1 : 2;
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 || !kBackward ? 2 : 1;
#endif

// Stores row r of a patch of path any.
__device__ __forceinline__ void store_row(const SourceCall& call, const PatchPosition& patch, u8* data, int r,
                                          const Chunk<OUT, 8>& codes) {
    if (r >= patch.rows_left) return;
    u8* to = data + (patch.row + r) * call.columns + patch.column;
    if (!call.has(SourceCall::kWide)) codes.store_partial(to, patch.columns_left);
    else if (patch.columns_left) codes.store(to);
}

// Stores the transposed tile; call __syncthreads() before. vector: every transposed row allows 16-byte
// stores.
__device__ __forceinline__ void store_transposed(const SourceCall& call, const TilePosition& at,
                                                 const Tile& tile, u8* data, bool vector) {
    if (!vector) {
        tile.store_ragged(data + at.column * call.rows + at.row, call.rows,
                          left_of(call.columns - at.column, Tile::kColumns),
                          left_of(call.rows - at.row, Tile::kRows));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
        const i64 row = at.column + Tile::column<16>(unit), column = at.row + Tile::row<16>();
        if (row < call.columns && column < call.rows)
            tile.read<OUT, 16>(unit).store_whole(data + row * call.rows + column);
    }
}

// Stores the rows of a patch of Rows in the order of y, group by group.
struct RowStore {
    u8* to;                      // the first row of a group
    i64 half;
    int left;

    __device__ __forceinline__ RowStore(const SourceCall& call, const PatchPosition& patch, u8* data)
        : to(data), half(call.half()), left(data && patch.columns_left ? patch.rows_left : 0) {
        if (left) to += patch.row * call.columns + patch.column;
    }
    // Stores row r of the group that starts with row `first`.
    __device__ __forceinline__ void put(int first, int r, int part, const Chunk<OUT, 8>& codes) const {
        if (first + r < left) codes.store(to + (r * kParts + part) * half);
    }
    __device__ __forceinline__ void advance(int rows) {
        if (left) to += rows * kParts * half;
    }
};

// Returns the tile of a thread block; thread blocks follow rows of tiles. A grid has fewer than 2^32 thread
// blocks, so u32 holds the numbers of tiles: an i64 division is a call, which costs registers.
__device__ __forceinline__ TilePosition position(const SourceCall& call, u32 block) {
    const u32 across = (u32)((call.half() + Tile::kColumns - 1) / Tile::kColumns);
    const u32 row = across ? block / across : 0;
    return {0, (i64)row * Tile::kRows, (i64)(block - row * across) * Tile::kColumns};
}
__device__ __forceinline__ TilePosition moved(const TilePosition& at, i64 columns) {
    return {at.matrix, at.row, at.column + columns};
}
// Writes the upper or lower four rows of a patch of Tile::write_patch(). to: the first of them.
__device__ __forceinline__ void write_half_patch(u8* to, const Chunk<OUT, 8> (&rows)[4]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 columns[4];
        transpose_4x4(rows[0].word[w], rows[1].word[w], rows[2].word[w], rows[3].word[w], columns);
#pragma unroll
        for (int k = 0; k < 4; k++) *reinterpret_cast<u32*>(to + (w * 4 + k) * Tile::kRows) = columns[k];
    }
}
