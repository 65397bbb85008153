// Elementwise kernels over flat arrays: registers only, one wide load and one wide store per chunk, several loads in flight
// before the first use. A block covers kUnroll * kThreads chunks, neighbouring threads neighbouring chunks.
#pragma once
#include "memory.cuh"

constexpr int kFlatThreads = 128;

// Elements per chunk: 16 bytes on the wider side.
template <class In, class Out>
constexpr int kFlatChunk = 16 / (sizeof(typename In::storage) > sizeof(typename Out::storage) ? sizeof(typename In::storage)
                                                                                              : sizeof(typename Out::storage));
constexpr int kFlatUnroll = 2;

// dst[i] = map(src[i]); `map` takes a Chunk<In> and returns a Chunk<Out>; elements past the end are zeros to it and are not
// written. vector: src and dst are aligned to their chunks.
template <class In, class Out, class Map>
__device__ __forceinline__ void flat_map(const typename In::storage* src, typename Out::storage* dst, i64 n, bool vector, Map map) {
    constexpr int kChunk = kFlatChunk<In, Out>, kUnroll = kFlatUnroll;
    const i64 first = (i64)blockIdx.x * (kUnroll * kFlatThreads * kChunk) + (i64)threadIdx.x * kChunk;
    constexpr i64 kStep = kFlatThreads * kChunk;
    if (vector && first - (i64)threadIdx.x * kChunk + kUnroll * kStep <= n) {
        Chunk<In, kChunk> c[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) c[u] = Chunk<In, kChunk>::load(src + first + u * kStep);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) map(c[u]).store(dst + first + u * kStep);
    } else {
#pragma unroll 1
        for (int u = 0; u < kUnroll; u++) {
            const i64 at = first + u * kStep;
            const int left = left_of(n - at, kChunk);
            map(Chunk<In, kChunk>::load_partial(src + at, left)).store_partial(dst + at, left);
        }
    }
}
