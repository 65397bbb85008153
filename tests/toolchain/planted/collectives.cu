// These kernels misuse barriers, shuffles and asynchronous copies.
#include "planted.cuh"

extern "C" __global__ void __launch_bounds__(kThreads) divergent_shuffle(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    int v = p.in[i];
#ifdef BUG
    if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(0xffffffffu, v, 8);  // planted
#else
    const int other = __shfl_xor_sync(0xffffffffu, v, 8);
    if (threadIdx.x % 32 < 16) v += other;
#endif
    __syncthreads();
    p.out[i] = v;
}

extern "C" __global__ void __launch_bounds__(kThreads) shuffle_from_exited(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
#ifdef BUG
    if (i >= p.n) return;
    const int v = p.in[i];
#else
    const int v = i < p.n ? p.in[i] : 0;
#endif
    const int other = __shfl_down_sync(0xffffffffu, v, 16);  // planted
    if (i < p.n) p.out[i] = v + other;
}

__device__ void meet() { __syncthreads(); }  // planted
extern "C" __global__ void __launch_bounds__(kThreads) divergent_barrier(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
#ifdef BUG
    if (i >= p.n) return;
#endif
    meet();
    if (i < p.n) p.out[i] = p.in[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) named_barrier(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads, half = t / 32 * 32;
    words[t] = p.in[base + t];
#ifdef BUG
    host_named_barrier(1, t < 32 ? 32 : 64);  // planted
#else
    host_named_barrier(1 + t / 32, 32);
#endif
    p.out[base + t] = words[half + 31 - t % 32];
}

extern "C" __global__ void __launch_bounds__(kThreads) cp_async(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    if (t < kThreads / 4) host_cp_async(words + 4 * t, p.in + base + 4 * t, 16, 16);
    host_cp_async_commit();
#ifndef BUG
    host_cp_async_wait(0);
#endif
    __syncthreads();
    p.out[base + t] = words[kThreads - 1 - t];
}

__device__ void load_block(int* words, unsigned long long* barrier, const int* from, unsigned announced) {
    if (threadIdx.x == 0) {
        host_mbarrier_init(barrier, 1);
        host_mbarrier_arrive(barrier, announced);
        host_bulk_load(words, from, kThreads * 4, barrier);
    }
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(kThreads) mbarrier_wait(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    __shared__ unsigned long long barrier;
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    load_block(words, &barrier, p.in + base, kThreads * 4);
#ifndef BUG
    while (!host_mbarrier_try_wait(&barrier, 0)) {}
#endif
    p.out[base + t] = words[kThreads - 1 - t];
}

extern "C" __global__ void __launch_bounds__(kThreads) bulk_bytes(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    __shared__ unsigned long long barrier;
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
#ifdef BUG
    load_block(words, &barrier, p.in + base, kThreads * 4 + 16);
#else
    load_block(words, &barrier, p.in + base, kThreads * 4);
#endif
    while (!host_mbarrier_try_wait(&barrier, 0)) {}  // planted
    p.out[base + t] = words[kThreads - 1 - t];
}

// Two stages go through one buffer: the second load must not start before everybody has read the first.
extern "C" __global__ void __launch_bounds__(kThreads) refilled_buffer(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    __shared__ unsigned long long barriers[2];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    if (t == 0) host_mbarrier_init(&barriers[1], 1);
    load_block(words, &barriers[0], p.in + base, kThreads * 4);
    while (!host_mbarrier_try_wait(&barriers[0], 0)) {}
    const int first = words[kThreads - 1 - t];
#ifndef BUG
    __syncthreads();
#endif
    if (t == 0) {
        host_mbarrier_arrive(&barriers[1], kThreads * 4);
        host_bulk_load(words, p.in, kThreads * 4, &barriers[1]);
    }
    while (!host_mbarrier_try_wait(&barriers[1], 0)) {}
    p.out[base + t] = first + words[t];
}

extern "C" __global__ void __launch_bounds__(kThreads) bulk_store(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];
    __syncthreads();
    if (t == 0) {
        host_bulk_store(p.out + base, words, kThreads * 4);
        host_bulk_commit();
#ifndef BUG
        host_bulk_wait(0);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) bulk_bounds(const __grid_constant__ Params p) {
    __shared__ __align__(16) int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];
    __syncthreads();
    if (t == 0) {
#ifdef BUG
        host_bulk_store(p.out + base, words, kThreads * 4 + 16);  // planted
#else
        host_bulk_store(p.out + base, words, kThreads * 4);
#endif
        host_bulk_commit();
        host_bulk_wait(0);
    }
}

// Both blocks of a cluster get each other's values.
extern "C" __global__ void __launch_bounds__(kThreads) cluster_store(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned long long* const barrier = reinterpret_cast<unsigned long long*>(memory);
    int* const values = reinterpret_cast<int*>(memory + 16);
    const int t = threadIdx.x;
    const unsigned other = blockIdx.x ^ 1;
    if (t == 0) host_mbarrier_init(barrier, kThreads);
    host_cluster_barrier(2);
    host_mbarrier_arrive(barrier, 4);
    host_store_async((int*)host_shared_of_block(&values[t], other), p.in[blockIdx.x * kThreads + t],
                     host_shared_of_block(barrier, other));
#ifndef BUG
    while (!host_mbarrier_try_wait(barrier, 0)) {}
#endif
    p.out[blockIdx.x * kThreads + t] = values[kThreads - 1 - t];  // planted
    host_cluster_barrier(2);
}

// Without the first barrier of the cluster the other block may not have begun.
extern "C" __global__ void __launch_bounds__(kThreads) cluster_begin(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    int* const values = reinterpret_cast<int*>(memory);
    const int t = threadIdx.x;
#ifndef BUG
    host_cluster_barrier(2);
#endif
    int* const others = (int*)host_shared_of_block(values, blockIdx.x ^ 1);  // planted
    others[t] = p.in[blockIdx.x * kThreads + t];
    host_cluster_barrier(2);
    p.out[blockIdx.x * kThreads + t] = values[t];
}

// Without the last barrier of the cluster the other block may have ended.
extern "C" __global__ void __launch_bounds__(kThreads) cluster_end(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
    host_cluster_barrier(2);
    if (blockIdx.x == 0) {
        for (int polls = 0; polls < 50; polls++) host_yield();
        ((int*)host_shared_of_block(memory, 1))[t] = t;  // planted
    }
#ifndef BUG
    host_cluster_barrier(2);
#endif
    p.out[i] = p.in[i];
}
