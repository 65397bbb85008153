// Transposing bytes through shared memory. A tile is kTile x kTile bytes; each thread owns a patch of 8 rows x 8 columns, which
// it transposes in registers (prmt) and writes as eight 8-byte pieces of transposed rows. The 8-byte columns of the shared tile
// are XOR-swizzled by patch, so that neither those writes nor the 16-byte reads of whole transposed rows conflict in banks.
#pragma once
#include "memory.cuh"

template <int kTile>
struct ByteTile {
    static_assert(kTile == 128 || kTile == 256, "the swizzle is free of bank conflicts for these");
    static constexpr int kPatches = kTile / 8, kThreads = kPatches * kPatches, kBytes = kTile * kTile;
    static constexpr int kRowUnits = kTile / 16;                     // 16-byte units of a transposed row
    static constexpr int kUnits = kTile * kRowUnits / kThreads;      // of which each thread reads this many

    u8* shared;                                                      // kBytes, 16-byte aligned

    // This thread's patch of the source tile: neighbouring threads take neighbouring columns.
    static __device__ __forceinline__ int patch_row() { return threadIdx.x / kPatches * 8; }
    static __device__ __forceinline__ int patch_column() { return threadIdx.x % kPatches * 8; }

    // row[r]: the eight bytes of source row patch_row() + r. Call __syncthreads() before read().
    template <class F>
    __device__ __forceinline__ void write_patch(const Chunk<F, 8> (&row)[8]) const {
        static_assert(sizeof(typename F::storage) == 1, "a tile of bytes");
        const int pr = threadIdx.x / kPatches, pc = threadIdx.x % kPatches;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 top[4], bottom[4];
            transpose_4x4(row[0].word[half], row[1].word[half], row[2].word[half], row[3].word[half], top);
            transpose_4x4(row[4].word[half], row[5].word[half], row[6].word[half], row[7].word[half], bottom);
#pragma unroll
            for (int k = 0; k < 4; k++)
                *reinterpret_cast<uint2*>(shared + (pc * 8 + half * 4 + k) * kTile + (pr ^ pc) * 8) = make_uint2(top[k], bottom[k]);
        }
    }
    // The unit-th 16 bytes that this thread reads back: source column `column`, source rows from `row`.
    static __device__ __forceinline__ int unit_column(int unit) { return (unit * kThreads + threadIdx.x) / kRowUnits; }
    static __device__ __forceinline__ int unit_row(int) { return threadIdx.x % kRowUnits * 16; }
    template <class F>
    __device__ __forceinline__ Chunk<F, 16> read(int unit) const {
        const int column = unit_column(unit), key = column / 8;
        const uint4 v = *reinterpret_cast<const uint4*>(shared + column * kTile + (threadIdx.x % kRowUnits ^ key >> 1) * 16);
        return key & 1 ? Chunk<F, 16>{{v.z, v.w, v.x, v.y}} : Chunk<F, 16>{{v.x, v.y, v.z, v.w}};
    }

private:
    static __device__ __forceinline__ void transpose_4x4(u32 a, u32 b, u32 c, u32 d, u32 (&out)[4]) {
        const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
        const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
        out[0] = __byte_perm(ab_low, cd_low, 0x5410);
        out[1] = __byte_perm(ab_low, cd_low, 0x7632);
        out[2] = __byte_perm(ab_high, cd_high, 0x5410);
        out[3] = __byte_perm(ab_high, cd_high, 0x7632);
    }
};

// Where block blockIdx.x of a batch of [rows, columns] matrices works: matrices one after the other, row of tiles by row of tiles.
struct TilePosition {
    i64 matrix, row, column;
    __device__ __forceinline__ TilePosition(i64 rows, i64 columns, int tile) {
        const i64 across = (columns + tile - 1) / tile, down = (rows + tile - 1) / tile;
        const i64 block = blockIdx.x, line = block / across;
        column = (block - line * across) * tile;
        matrix = line / down;
        row = (line - matrix * down) * tile;
    }
};
