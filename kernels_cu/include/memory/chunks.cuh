// A chunk: a few neighbouring elements of one format, moved by one wide load or store, or at ragged ends by
// one access per element.
#pragma once
#include "numerics/formats.cuh"

template <int kBytes> struct Words;                                  // unsigned type of kBytes bytes
template <> struct Words<4> { using type = u32; };
template <> struct Words<8> { using type = uint2; };
template <> struct Words<16> { using type = uint4; };

// Loads memory that the kernel never writes. L1::no_allocate would cost every kernel here a tenth of its
// bandwidth on an H200 (docs/lab-notes).
template <class T>
__device__ __forceinline__ T load_read_only(const T* p) { return __ldg(p); }

// Re-reads threadIdx.x, so that the compiler keeps nothing derived from it in registers.
__device__ __forceinline__ int thread_again() {
    u32 thread = threadIdx.x;
#ifndef CUPY_FP8_HOST
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#endif
    return (int)thread;
}

// The same for blockIdx.x.
__device__ __forceinline__ u32 block_again() {
    u32 block = blockIdx.x;
#ifndef CUPY_FP8_HOST
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
#endif
    return block;
}

// Returns a shared-memory address as PTX takes it.
__device__ __forceinline__ u32 shared_address(const void* p) {
#ifdef CUPY_FP8_HOST
    return 0;
#else
    return (u32)__cvta_generic_to_shared(p);
#endif
}

// Starts an asynchronous copy of kBytes (4, 8 or 16; both ends aligned to kBytes) from global to shared
// memory; it has ended after copy_async_wait() in the same thread. Copies the first `existing` bytes and
// writes zeros for the others. kThroughL1: for parts of sectors whose other parts are copied soon.
template <int kBytes, bool kThroughL1 = kBytes != 16>
__device__ __forceinline__ void copy_async_part(void* shared, const void* from, u32 existing) {
#ifdef CUPY_FP8_HOST
    host_cp_async(shared, from, kBytes, existing);
#else
    const u32 to = shared_address(shared);
    if constexpr (kThroughL1)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(to), "l"(from), "n"(kBytes),
                     "r"(existing) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(existing)
                     : "memory");
#endif
}
template <bool kThroughL1 = false>
__device__ __forceinline__ void copy_async(u8* shared, const void* from, bool exists = true) {
    copy_async_part<16, kThroughL1>(shared, from, exists ? 16 : 0);
}
// copy_async_commit() ends a group of copies; copy_async_wait() waits for all but the last kPending groups.
__device__ __forceinline__ void copy_async_commit() {
#ifdef CUPY_FP8_HOST
    host_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#ifdef CUPY_FP8_HOST
    host_cp_async_wait(kPending);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
#endif
}
__device__ __forceinline__ void copy_async_wait() {
#ifdef CUPY_FP8_HOST
    host_cp_async_wait_all();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Prefetches up to 128 bytes into the L2. Address and size are multiples of 16.
__device__ __forceinline__ void fetch_to_l2(const void* from, u32 bytes) {
#ifdef CUPY_FP8_HOST
    const volatile u8* const all = static_cast<const u8*>(from);
    (void)all[0], (void)all[bytes - 1];                              // lets sanitizers check the range
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(__cvta_generic_to_global(from)),
                 "r"(bytes));
#else
    asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(from)));
#endif
}

// Stores 16 bytes to shared memory by one instruction. NVRTC splits a plain store into four words in some
// kernels, with bank conflicts.
__device__ __forceinline__ void store_shared_whole(void* shared, u32 a, u32 b, u32 c, u32 d) {
#ifdef CUPY_FP8_HOST
    *reinterpret_cast<uint4*>(shared) = make_uint4(a, b, c, d);
#else
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(shared)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#endif
}

// Tells the compiler that a pointer, read from a struct in shared memory, points to global memory.
template <class T>
__device__ __forceinline__ T* as_global(T* p) {
#ifdef CUPY_FP8_HOST
    return p;
#else
    __builtin_assume(__isGlobal(p));
    return p;
#endif
}

// Returns true if a flag on the device (one f32; may be null) is 1.0.
__device__ __forceinline__ bool is_set(const float* flag) { return flag && as_bits(*flag) == 0x3f800000u; }

// Returns how many of the next `most` elements exist, of `left` remaining ones (may be negative).
__device__ __forceinline__ int left_of(i64 left, int most) {
    return left >= most ? most : left > 0 ? (int)left : 0;
}

// kCount elements of format F, the first in the low bits
template <class F, int kCount>
struct Chunk {
    using storage = typename F::storage;
    static constexpr int kBytes = kCount * sizeof(storage), kWords = kBytes / 4;
    static constexpr int kPerWord = 4 / sizeof(storage);
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "a chunk is one load of 4, 8 or 16 bytes");
    using Vector = typename Words<kBytes>::type;
    u32 word[kWords];

    static __device__ __forceinline__ Chunk load(const storage* p) {
        Chunk c;
        c.set(load_read_only(reinterpret_cast<const Vector*>(p)));
        return c;
    }
    static __device__ __forceinline__ Chunk load_shared(const u8* p) {
        Chunk c;
        c.set(*reinterpret_cast<const Vector*>(p));
        return c;
    }
    static __device__ __forceinline__ Chunk load_partial(const storage* p, int count) {
        Chunk c;
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            c.word[w] = 0;
#pragma unroll
            for (int i = 0; i < kPerWord; i++)
                if (w * kPerWord + i < count)
                    c.word[w] |= (u32)p[w * kPerWord + i] << (8 * sizeof(storage) * i);
        }
        return c;
    }
    __device__ __forceinline__ void store(storage* p) const {
        Vector v;
        get(v);
        *reinterpret_cast<Vector*>(p) = v;
    }
    // Stores 16 bytes, which the kernel does not read, to global memory by one instruction. On sm_80 and
    // sm_90 NVRTC splits store() into four words in some kernels that also use shared memory, so that every
    // 16 bytes take four partial writes. kFirstOut: the L2 may evict them first, which pays off if a kernel
    // writes much more than it reads (docs/lab-notes).
    template <bool kFirstOut = false>
    __device__ __forceinline__ void store_whole(storage* p) const {
        static_assert(kBytes == 16, "one 16-byte store");
#ifdef CUPY_FP8_HOST
        store(p);
#else
        const u64 to = __cvta_generic_to_global(p);
        if constexpr (kFirstOut)
            asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(word[0]), "r"(word[1]),
                         "r"(word[2]), "r"(word[3]));
        else
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(word[0]), "r"(word[1]),
                         "r"(word[2]), "r"(word[3]));
#endif
    }
    __device__ __forceinline__ void store_partial(storage* p, int count) const {
#pragma unroll
        for (int w = 0; w < kWords; w++)
#pragma unroll
            for (int i = 0; i < kPerWord; i++)
                if (w * kPerWord + i < count)
                    p[w * kPerWord + i] = (storage)(word[w] >> (8 * sizeof(storage) * i) % 32);
    }

    // Widens elements 2i and 2i + 1. The index is a constant after unrolling.
    __device__ __forceinline__ void widen2(int i, float& lo, float& hi) const {
        if constexpr (sizeof(storage) == 4) lo = F::widen(word[2 * i]), hi = F::widen(word[2 * i + 1]);
        else if constexpr (sizeof(storage) == 2) F::widen2(word[i], lo, hi);
        else F::widen2(word[i / 2] >> (i % 2 * 16) & 0xffffu, lo, hi);
    }
    // Call for i = 0, 1, ... in order: an even pair of bytes starts its word.
    template <bool kSaturate = true>
    __device__ __forceinline__ void narrow2(int i, float lo, float hi) {
        if constexpr (sizeof(storage) == 4) word[2 * i] = F::narrow(lo), word[2 * i + 1] = F::narrow(hi);
        else if constexpr (sizeof(storage) == 2) word[i] = F::narrow2(lo, hi);
        else {
            const u32 pair = F::template narrow2<kSaturate>(lo, hi);
            word[i / 2] = i % 2 ? word[i / 2] | pair << 16 : pair;
        }
    }

private:
    __device__ __forceinline__ void set(u32 v) { word[0] = v; }
    __device__ __forceinline__ void set(uint2 v) { word[0] = v.x, word[1] = v.y; }
    __device__ __forceinline__ void set(uint4 v) {
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
    __device__ __forceinline__ void get(u32& v) const { v = word[0]; }
    __device__ __forceinline__ void get(uint2& v) const { v = make_uint2(word[0], word[1]); }
    __device__ __forceinline__ void get(uint4& v) const {
        v = make_uint4(word[0], word[1], word[2], word[3]);
    }
};

// Returns the codes of values in format F. change(value, i): maps each value before it is narrowed.
template <class F, bool kSaturate = true, int kCount, class Change>
__device__ __forceinline__ Chunk<F, kCount> narrowed(const float (&v)[kCount], Change change) {
    Chunk<F, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount / 2; i++)
        out.template narrow2<kSaturate>(i, change(v[2 * i], 2 * i), change(v[2 * i + 1], 2 * i + 1));
    return out;
}
// The same for the elements of a chunk.
template <class F, bool kSaturate = true, class From, int kCount, class Change>
__device__ __forceinline__ Chunk<F, kCount> converted(const Chunk<From, kCount>& in, Change change) {
    Chunk<F, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
        float lo, hi;
        in.widen2(i, lo, hi);
        out.template narrow2<kSaturate>(i, change(lo, 2 * i), change(hi, 2 * i + 1));
    }
    return out;
}
