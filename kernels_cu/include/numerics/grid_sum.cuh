// Sum over all threads of a grid, one term each, by the fixed tree (docs/numerics.md, rule 11).
#pragma once
#include "numerics/amax.cuh"
#include "numerics/tree_sum.cuh"

template <int kThreads>
struct GridSum {
    float of_warp[32];
    RunningTreeSum running;
    bool last;

    // Returns the block's sum to all its threads, which all call it.
    __device__ __forceinline__ float of_block(float term) {
        const float sum = warp_tree_sum(term);
        __syncthreads();
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
        __syncthreads();
        return warp_tree_sum((int)threadIdx.x % 32 < kThreads / 32 ? of_warp[threadIdx.x % 32]
                                                                   : as_float(kAbsentTerm));
    }

    // Adds up the terms of all threads of all blocks, in the order of blocks. Threads without a term pass
    // kAbsentTerm. Returns true in one thread of the grid, with the result in `total`. of_blocks: one float
    // per block; done: zero before and after.
    __device__ __forceinline__ bool add(float term, float* of_blocks, u32* done, float& total) {
        const float sum = of_block(term);
        if (gridDim.x == 1) {
            total = sum;
            return threadIdx.x == 0;
        }
        if (threadIdx.x == 0) {
            of_blocks[blockIdx.x] = sum;
            last = is_last_block(done, gridDim.x);
            if (last) atomicExch(done, 0u);
        }
        __syncthreads();
        if (!last) return false;
        const u32 rounds = (gridDim.x + kThreads - 1) / kThreads;
        for (u32 round = 0; round < rounds; round++) {
            const u32 block = round * kThreads + threadIdx.x;
            const float of_round = of_block(as_float(block < gridDim.x ? (u32)load_relaxed(of_blocks + block)
                                                                       : kAbsentTerm));
            if (threadIdx.x == 0) running.add(round, of_round);
        }
        if (threadIdx.x == 0) total = running.total(rounds);
        return threadIdx.x == 0;
    }
};
