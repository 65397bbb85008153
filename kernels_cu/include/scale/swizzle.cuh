// The swizzled layout of E8M0 scales (docs/layouts.md): tiles of 128 lines x 4 blocks, each 512 consecutive
// bytes; the tiles of 128 lines follow one another by blocks. Within a tile, lines i, i + 32, i + 64 and i +
// 96 share 16 bytes:
//
//   byte of scale (line, block) = (line / 128 * tiles + block / 4) * 512
//                                 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4
#pragma once
#include "numerics/types.cuh"

constexpr int kSwizzleLines = 128, kSwizzleBlocks = 4;
constexpr i64 kSwizzleTile = kSwizzleLines * kSwizzleBlocks;         // bytes

__device__ __forceinline__ i64 swizzle_tiles(i64 blocks) {
    return (blocks + kSwizzleBlocks - 1) / kSwizzleBlocks;
}

// Returns the offset of scale (line, block) in its matrix. tiles: tiles per line, swizzle_tiles(all blocks).
__device__ __forceinline__ i64 swizzled_at(i64 line, i64 block, i64 tiles) {
    return (line / kSwizzleLines * tiles + block / kSwizzleBlocks) * kSwizzleTile + line % 32 * 16
        + line % kSwizzleLines / 32 * 4 +
           block % kSwizzleBlocks;
}
