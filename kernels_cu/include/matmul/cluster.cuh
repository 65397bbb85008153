// Clusters of two neighbouring thread blocks: each can copy to the other's shared memory and arrive at its
// barriers. For sm_90 and later. `rank`: which of the two.
#pragma once
#include "matmul/tensor_copy.cuh"

constexpr int kClusterBlocks = 2;

__device__ __forceinline__ int cluster_rank() { return (int)(blockIdx.x % kClusterBlocks); }

// Barrier of all threads of both blocks. Call from whole warps.
__device__ __forceinline__ void sync_cluster() {
#ifdef CUPY_FP8_HOST
    host_cluster_barrier(kClusterBlocks);
#else
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

#ifdef CUPY_FP8_HOST
template <class T>
__device__ __forceinline__ T* of_block(T* own, int rank) {
    const unsigned block = blockIdx.x / kClusterBlocks * kClusterBlocks + rank;
    return reinterpret_cast<T*>(host_shared_of_block(own, block));
}
#endif

// Arrives at block `rank`'s barrier at the same address, after this block has read its own memory: whoever
// waits there may copy to that again.
__device__ __forceinline__ void arrive_at(PhaseBarrier* barrier, int rank) {
#ifdef CUPY_FP8_HOST
    host_mbarrier_arrive(of_block(barrier, rank), 0);
#else
    // not .release.cluster, for which the assembler would add a MEMBAR per block of K
    asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [at];}"
                 :: "r"(shared_address(barrier)), "r"(rank) : "memory");
#endif
}

// Stores a number to the same address in block `rank`, whose barrier counts its 4 bytes like those of a copy.
__device__ __forceinline__ void send(int* to, int value, PhaseBarrier* barrier, int rank) {
#ifdef CUPY_FP8_HOST
    host_store_async(of_block(to, rank), value, of_block(barrier, rank));
#else
    asm volatile("{.reg .b32 at, counted; mapa.shared::cluster.u32 at, %0, %2; "
                 "mapa.shared::cluster.u32 counted, %1, %2; "
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], %3, [counted];}"
                 :: "r"(shared_address(to)), "r"(shared_address(barrier)), "r"(rank), "r"(value) : "memory");
#endif
}

// Like copy_box(), but multicast to both blocks: each gets the box at the same address, and its barrier at
// that address counts the bytes.
__device__ __forceinline__ void copy_box_to_cluster(u8* shared, const TensorMap* map, int row, int column,
                                                    PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    for (int rank = 0; rank < kClusterBlocks; rank++)
        copy_box(of_block(shared, rank), map, row, column, of_block(barrier, rank));
#else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row),
                    "r"(shared_address(barrier)), "h"((u16)((1 << kClusterBlocks) - 1)) : "memory");
#endif
}
