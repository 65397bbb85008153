// These kernels depend on the order between threads and between blocks.
#include "planted.cuh"

extern "C" __global__ void __launch_bounds__(kThreads) missing_syncthreads(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];  // planted: the other side of the race
#ifndef BUG
    __syncthreads();
#endif
    p.out[base + t] = words[kThreads - 1 - t];  // planted
}

extern "C" __global__ void __launch_bounds__(kThreads)
    missing_second_syncthreads(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    int sum = 0;
    for (int round = 0; round < 4; round++) {
        words[t] = p.in[base + t] + round;  // planted: the other side of the race
        __syncthreads();
        sum += words[(t + 1) % kThreads];  // planted
#ifndef BUG
        __syncthreads();
#endif
    }
    p.out[base + t] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads) missing_syncwarp(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];  // planted: the other side of the race
#ifndef BUG
    __syncwarp();
#endif
    p.out[base + t] = words[t ^ 1];  // planted
}

// Every schedule gives the right bytes here; still a shuffle orders no memory.
extern "C" __global__ void __launch_bounds__(kThreads) shuffle_as_barrier(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];  // planted: the other side of the race
    const int zero = __shfl_xor_sync(0xffffffffu, 0, 1);
#ifndef BUG
    __syncwarp();
#endif
    p.out[base + t] = words[t ^ 1] + zero;  // planted
}

extern "C" __global__ void __launch_bounds__(kThreads) unordered_blocks(const __grid_constant__ Params p) {
    if (threadIdx.x) return;
#ifdef BUG
    p.out[0] += 1;  // planted
#else
    atomicAdd(&p.out[0], 1);
#endif
}

// out[0] has the tickets, out[1] the result, and out[2...] one partial sum per block.
extern "C" __global__ void __launch_bounds__(kThreads) last_block(const __grid_constant__ Params p) {
    __shared__ bool is_last;
    const int t = threadIdx.x;
    const int sum = __reduce_add_sync(0xffffffffu, p.in[blockIdx.x * kThreads + t]);
    if (t == 0) {
        p.out[2 + blockIdx.x] = sum;  // planted: the other side of the race
#ifndef BUG
        __threadfence();
#endif
        is_last = atomicAdd(&p.out[0], 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    if (t == kThreads - 1) {
        int total = 0;
        for (unsigned block = 0; block < gridDim.x; block++) total += p.out[2 + block];  // planted
        p.out[1] = total;
    }
}

// Static and dynamic shared memory must survive this grid barrier. out[0] has the arrivals; then comes one
// value per thread.
extern "C" __global__ void __launch_bounds__(kThreads) grid_barrier(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    extern __shared__ int more[];
    const int t = threadIdx.x, base = blockIdx.x * kThreads;
    words[t] = p.in[base + t];
    more[t] = 3 * words[t];
    p.out[1 + base + t] = words[t];  // planted: the other side of the race
    __syncthreads();
    if (t == 0) {
        __threadfence();
        atomicAdd(&p.out[0], 1);
#ifdef BUG
        while (host_load_relaxed(&p.out[0]) < (int)gridDim.x) host_yield();
#else
        while (host_load_acquire(&p.out[0]) < (int)gridDim.x) host_yield();
#endif
    }
    __syncthreads();
    const int left = p.out[1 + (blockIdx.x + gridDim.x - 1) % gridDim.x * kThreads + t];  // planted
    p.out[1 + gridDim.x * kThreads + base + t] = left + words[kThreads - 1 - t] + more[kThreads - 1 - t];
}

// This is decoupled look-back: a running sum over blocks, each waiting for the one before it. out has n
// prefixes, then one flag per block.
extern "C" __global__ void __launch_bounds__(kThreads) look_back(const __grid_constant__ Params p) {
    __shared__ int carry;
    const int t = threadIdx.x, block = blockIdx.x;
    int* flags = p.out + gridDim.x;
    if (t == 0) {
        carry = 0;
        if (block) {
#ifdef BUG
            while (!host_load_acquire(&flags[block])) host_yield();  // planted
#else
            while (!host_load_acquire(&flags[block - 1])) host_yield();
#endif
            carry = p.out[block - 1];
        }
        p.out[block] = carry + p.in[block];
        host_store_release(&flags[block], 1);
    }
    __syncthreads();
    assert(p.out[block] == carry + p.in[block]);
}
