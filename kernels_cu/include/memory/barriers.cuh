// Arrival-count barriers in shared memory (mbarrier), and named barriers for some of a block's warps; sm_80
// and later. A thread waits for the end of a phase, named by its parity. Before the first phase has ended, a
// wait for parity 1 returns at once.
#pragma once
#include "memory/chunks.cuh"

using PhaseBarrier = u64;

// Call from one thread, before a barrier of the whole block. arrivals: how many end a phase.
__device__ __forceinline__ void init_phases(PhaseBarrier* barrier, u32 arrivals) {
#ifdef CUPY_FP8_HOST
    host_mbarrier_init(barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(barrier)),
                 "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void arrive(PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    host_mbarrier_arrive(barrier, 0);
#else
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}"
                 :: "r"(shared_address(barrier)) : "memory");
#endif
}
// Arrives once all of this thread's earlier copy_async() have ended, without waiting for them.
__device__ __forceinline__ void arrive_after_copies(PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    copy_async_wait();
    host_mbarrier_arrive(barrier, 0);
#else
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
#endif
}
__device__ __forceinline__ bool has_ended(PhaseBarrier* barrier, u32 parity) {
#ifdef CUPY_FP8_HOST
    return host_mbarrier_try_wait(barrier, parity);
#else
    u32 ended;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return ended;
#endif
}
__device__ __forceinline__ void wait_for_end(PhaseBarrier* barrier, u32 parity) {
#if defined(CUPY_FP8_HOST) || __CUDA_ARCH__ < 900
    while (!has_ended(barrier, parity)) {}
#else
    u32 ended;
    // try_wait suspends the thread for a while by itself.
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!ended);
#endif
}

// Named barrier for kThreads threads of the block (whole warps). kId: 1 to 15; 0 is __syncthreads().
template <int kId, int kThreads>
__device__ __forceinline__ void sync_some() {
#ifdef CUPY_FP8_HOST
    host_named_barrier(kId, kThreads);
#else
    asm volatile("bar.sync %0, %1;" :: "n"(kId), "n"(kThreads) : "memory");
#endif
}
