// Loads rows at any address, 16 bytes at a time.
#pragma once
#include "memory/chunks.cuh"

constexpr int kChunkBytes = 16;

// Returns true if the words that chunk `at` of a row overlaps lie inside the row.
__device__ __forceinline__ bool has_neighbours(i64 at, i64 row_bytes) {
    return at >= 4 && at + kChunkBytes + 4 <= row_bytes;
}

// Loads 16 bytes at any address. The words that they overlap exist completely.
__device__ __forceinline__ uint4 load_inner_16(const u8* from) {
    const u32 odd = (u32)(u64)from % 4;
    const u32* const words = reinterpret_cast<const u32*>(from - odd);
    u32 word[5];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = load_read_only(words + i);
    word[4] = odd ? load_read_only(words + 4) : 0;
    return make_uint4(__funnelshift_r(word[0], word[1], 8 * odd), __funnelshift_r(word[1], word[2], 8 * odd),
                      __funnelshift_r(word[2], word[3], 8 * odd), __funnelshift_r(word[3], word[4], 8 * odd));
}

// Loads `bytes` of 16 bytes at any address. inner: the words that they overlap exist completely.
__device__ __forceinline__ uint4 load_16(const u8* from, int bytes, bool inner) {
    const u32 odd = (u32)(u64)from % 4;
    if (bytes < kChunkBytes || (odd && !inner)) {
        const Chunk<e4m3fn, 16> chunk = Chunk<e4m3fn, 16>::load_partial(from, bytes);
        return make_uint4(chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]);
    }
    return load_inner_16(from);
}
