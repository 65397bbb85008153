// Elementwise kernels over flat arrays: registers only, one wide load and one wide store per chunk, several
// loads in flight before the first use. A block covers kUnroll * kThreads chunks, neighbouring threads
// neighbouring chunks.
#pragma once
#include "memory/chunks.cuh"

constexpr int kFlatThreads = 128;
constexpr int kFlatUnroll = 2;                                       // chunks per thread

// Elements per chunk: 16 bytes on the wider side.
template <class In, class Out>
constexpr int kFlatChunk = 16 / (sizeof(typename In::storage) > sizeof(typename Out::storage)
                                     ? sizeof(typename In::storage) : sizeof(typename Out::storage));

// This thread's chunks of src. Elements past the end are zeros, and are not stored.
template <class In, class Out>
struct FlatChunks {
    static constexpr int kCount = kFlatChunk<In, Out>;
    using Source = Chunk<In, kCount>;
    using Target = Chunk<Out, kCount>;

    Source chunk[kFlatUnroll];
    i64 first, n;
    // no element of the block is past the end, all is aligned
    bool whole;

    // vector: src and dst are aligned to their chunks. Blocks take runs of src in their order, or in the
    // order of `block`.
    __device__ __forceinline__ FlatChunks(const typename In::storage* src, i64 n, bool vector,
                                          i64 block = blockIdx.x) : n(n) {
        const i64 start = block * (kFlatUnroll * kStep);
        first = start + threadIdx.x * kCount;
        whole = vector && start + kFlatUnroll * kStep <= n;
#pragma unroll
        for (int u = 0; u < kFlatUnroll; u++)
            chunk[u] = whole ? Source::load(src + at(u)) : Source::load_partial(src + at(u), left(u));
    }
    // dst[i] = map(src[i]), chunk by chunk.
    template <class Map>
    __device__ __forceinline__ void store(typename Out::storage* dst, Map map) const {
#pragma unroll
        for (int u = 0; u < kFlatUnroll; u++) {
            const Target out = map(chunk[u]);
            if (whole) out.store(dst + at(u));
            else out.store_partial(dst + at(u), left(u));
        }
    }

    // Where chunk u starts, and how many elements of it there are.
    __device__ __forceinline__ i64 at(int u) const { return first + u * kStep; }
    __device__ __forceinline__ int left(int u) const { return left_of(n - at(u), kCount); }

private:
    static constexpr i64 kStep = kFlatThreads * kCount;
};
