// Elementwise kernels: an array of any shape is one long row; a chunk is one wide load and one wide store,
// without shared memory. Each thread issues the loads of its kElementwiseUnroll chunks before the first use.
// A thread block takes kElementwiseUnroll * kElementwiseThreads chunks, neighbouring threads neighbouring
// chunks.
#pragma once
#include "memory/chunks.cuh"

constexpr int kElementwiseThreads = 128;
constexpr int kElementwiseUnroll = 2;                                // chunks per thread

// 16 bytes of the wider type per chunk
template <class In, class Out>
constexpr int kElementwiseChunk =
    16 / (sizeof(typename In::storage) > sizeof(typename Out::storage) ? sizeof(typename In::storage)
                                                                       : sizeof(typename Out::storage));

// A thread's chunks of src. Elements past the end are zeros and are never stored.
template <class In, class Out>
struct ElementwiseChunks {
    static constexpr int kCount = kElementwiseChunk<In, Out>;
    using Source = Chunk<In, kCount>;
    using Result = Chunk<Out, kCount>;

    Source chunk[kElementwiseUnroll];
    i64 first, n;
    // all elements of the thread block exist and are aligned
    bool whole;

    // vector: src and dst are aligned to their chunks. block: index of the thread block's part of src.
    __device__ __forceinline__ ElementwiseChunks(const typename In::storage* src, i64 n, bool vector,
                                                 i64 block = blockIdx.x) : n(n) {
        const i64 start = block * (kElementwiseUnroll * kStep);
        first = start + threadIdx.x * kCount;
        whole = vector && start + kElementwiseUnroll * kStep <= n;
#pragma unroll
        for (int u = 0; u < kElementwiseUnroll; u++)
            chunk[u] = whole ? Source::load(src + at(u)) : Source::load_partial(src + at(u), left(u));
    }
    // Stores dst[i] = map(src[i]), chunk by chunk.
    template <class Map>
    __device__ __forceinline__ void store(typename Out::storage* dst, Map map) const {
#pragma unroll
        for (int u = 0; u < kElementwiseUnroll; u++) {
            const Result out = map(chunk[u]);
            if (whole) out.store(dst + at(u));
            else out.store_partial(dst + at(u), left(u));
        }
    }

    // First element of chunk u, and how many of its elements exist.
    __device__ __forceinline__ i64 at(int u) const { return first + u * kStep; }
    __device__ __forceinline__ int left(int u) const { return left_of(n - at(u), kCount); }

private:
    static constexpr i64 kStep = kElementwiseThreads * kCount;
};
