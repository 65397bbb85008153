// The amax (docs/numerics.md, rule 6): the largest magnitude, at least 0. Magnitudes of every format order
// like their bits as unsigned integers (Inf above every number, NaN above Inf), so reductions are integer
// maxima, exact in any order.
#pragma once
#include "memory/chunks.cuh"

// A thread's running maximum over chunks of format F. kNan false: NaN is ignored; true: one NaN wins.
template <class F, bool kNan = false>
struct Amax {
    // 16-bit formats: two running maxima, one per half
    u32 largest = 0;

    template <int kCount>
    __device__ __forceinline__ void add(const Chunk<F, kCount>& c) {
#pragma unroll
        for (int w = 0; w < Chunk<F, kCount>::kWords; w++)
            largest = F::template max_magnitudes<kNan>(largest, c.word[w] & F::kMagnitudes);
    }
    __device__ __forceinline__ u32 f32_bits() const {
        if constexpr (sizeof(typename F::storage) == 4) return largest;
        else {
            const u32 low = largest & 0xffffu, high = largest >> 16;
            return as_bits(F::widen(low > high ? low : high));
        }
    }
};

// Adds to each thread's maximum its share of `n` consecutive elements at x, with four 16-byte loads in flight
// per thread. Call from all kThreads threads of the block.
template <int kThreads, class F>
__device__ __forceinline__ void add_elements(Amax<F>& amax, const typename F::storage* x, i64 n) {
    constexpr int kUnroll = 4, kChunk = 16 / sizeof(typename F::storage);
    constexpr i64 kStep = (i64)kThreads * kChunk;
    using Source = Chunk<F, kChunk>;
    // elements before the first aligned chunk
    const int lead = left_of(n, (int)(-reinterpret_cast<u64>(x) % 16 / sizeof(typename F::storage)));
    const typename F::storage* const aligned = x + lead;
    const i64 whole = (n - lead) / kChunk * kChunk;
    for (i64 first = threadIdx.x * kChunk; first < whole; first += kUnroll * kStep) {
        Source c[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
            c[u] = first + u * kStep < whole ? Source::load(aligned + first + u * kStep) : Source{};
#pragma unroll
        for (int u = 0; u < kUnroll; u++) amax.add(c[u]);
    }
    if (threadIdx.x == 0) {
        amax.add(Source::load_partial(x, lead));
        amax.add(Source::load_partial(aligned + whole, (int)(n - lead - whole)));
    }
}

// One step of a butterfly reduction of several words: lanes kDistance apart exchange kKeep words each way, so
// that each is left with half of them (kKeep 0: with the same single word).
template <int kDistance, int kKeep, int kCount, class Combine>
__device__ __forceinline__ void halve(u32 (&v)[kCount], Combine combine) {
    const bool upper = threadIdx.x & kDistance;
    if constexpr (kKeep == 0) v[0] = combine(v[0], __shfl_xor_sync(~0u, v[0], kDistance));
#pragma unroll
    for (int i = 0; i < kKeep; i++) {
        const u32 sent = upper ? v[i] : v[i + kKeep], kept = upper ? v[i + kKeep] : v[i];
        v[i] = combine(kept, __shfl_xor_sync(~0u, sent, kDistance));
    }
}
// All steps of that reduction, over distances kDistance, kDistance / 2, ..., 1.
template <int kDistance, int kKeep, int kCount, class Combine>
__device__ __forceinline__ void halve_down(u32 (&v)[kCount], Combine combine) {
    if constexpr (kDistance > 0) {
        halve<kDistance, kKeep>(v, combine);
        halve_down<kDistance / 2, kKeep / 2>(v, combine);
    }
}

// Maximum over all threads: every thread calls put(), and after a __syncthreads() that the kernel needs
// anyway, get() returns it to thread 0. kThreads: the block size or an upper bound of it.
template <int kThreads>
struct BlockMax {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 32 of them");
    static constexpr int kWarps = kThreads / 32;
    u32* per_warp;                                                   // kWarps words of shared memory

    __device__ __forceinline__ void put(u32 value) const {
        value = __reduce_max_sync(~0u, value);
        if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = value;
    }
    __device__ __forceinline__ u32 get(int warps = kWarps) const {
        if (threadIdx.x >= 32) return 0;
        return __reduce_max_sync(~0u, threadIdx.x < warps ? per_warp[threadIdx.x] : 0u);
    }
};

// Returns the maximum over all threads to thread 0, with its own barrier. kThreads: upper bound of the block
// size `threads`.
template <int kThreads>
__device__ __forceinline__ u32 block_max(u32 value, int threads = kThreads) {
    __shared__ u32 per_warp[BlockMax<kThreads>::kWarps];
    const BlockMax<kThreads> top{per_warp};
    top.put(value);
    __syncthreads();
    return top.get(threads / 32);
}

// Relaxed accesses may race with those of other blocks or their atomics; plain ones would be data races.
__device__ __forceinline__ u32 load_relaxed(const u32* word) {
#ifdef CUPY_FP8_HOST
    return host_load_relaxed(word);
#else
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
#endif
}
__device__ __forceinline__ u64 load_relaxed(const u64* word) {
#ifdef CUPY_FP8_HOST
    return host_load_relaxed(word);
#else
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#endif
}
__device__ __forceinline__ void store_relaxed(u64* word, u64 value) {
#ifdef CUPY_FP8_HOST
    host_store_relaxed(word, value);
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(word), "l"(value) : "memory");
#endif
}
__device__ __forceinline__ void store_relaxed(u32* word, u32 value) {
#ifdef CUPY_FP8_HOST
    host_store_relaxed(word, value);
#else
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(word), "r"(value) : "memory");
#endif
}
__device__ __forceinline__ i32 load_relaxed(const float* buffer) {
    return (i32)load_relaxed(reinterpret_cast<const u32*>(buffer));
}

// Returns true in the last of `blocks` blocks to call it, which then sees what the others wrote before. Call
// from one thread per block. done: 0 at first.
__device__ __forceinline__ bool is_last_block(u32* done, u32 blocks) {
    __threadfence();
    if (atomicAdd(done, 1u) != blocks - 1) return false;
    __threadfence();
    return true;
}

// The same, returned to every thread of the block, which all call it; resets *done to 0. last: in shared
// memory.
__device__ __forceinline__ bool is_last_block(bool& last, u32* done, u32 blocks) {
    __syncthreads();
    if (thread_again() == 0) {
        last = is_last_block(done, blocks);
        if (last) atomicExch(done, 0u);
    }
    __syncthreads();
    return last;
}

// Amax over all blocks, known to the last block that adds its own.
struct AmaxOfBlocks {            // zero before the first launch, and after each
    u32 amax;                    // f32 bits
    u32 blocks_done;

    // Adds the amax of one of `blocks` blocks. Returns true in the last one, with the overall amax in
    // `of_all`. Call from one thread per block.
    __device__ __forceinline__ bool add(u32 of_block, u32 blocks, float& of_all) {
        atomicMax(&amax, of_block);
        if (!is_last_block(&blocks_done, blocks)) return false;
        of_all = as_float(atomicExch(&amax, 0u));
        atomicExch(&blocks_done, 0u);
        return true;
    }
};

// Sets *buffer = max(*buffer, amax) on the bits. before: the buffer's bits at some earlier time. Most blocks
// of a large tensor have nothing to raise, so a comparison saves the atomic.
__device__ __forceinline__ void raise_amax(float* buffer, u32 bits, i32 before) {
    if (before < (i32)bits) atomicMax(reinterpret_cast<i32*>(buffer), (i32)bits);
}
