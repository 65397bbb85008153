// Interface between a compiled kernel and the runtime; included by both.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "vector_types.h"

struct HostWarp;
struct HostWorker;

// A CUDA thread, run as a fiber. The runtime derives its own, larger record from this one.
struct HostThread {
    uint3 thread_index;
    unsigned lane;               // 0..31, within the warp
    unsigned linear;             // within the block
    bool fenced;                 // has executed a __threadfence: its atomics publish (see atomics.h)
    bool returned;
    HostWarp* warp;
    HostWorker* worker;
    const void* call_site;       // last call of the runtime, for error messages
    const char* waiting_for;     // what it waits for; nullptr while it can run
    const void* waiting_object;  // the mbarrier it polls, for the deadlock report
};

// The block that the current operating-system thread runs.
struct HostBlock {
    uint3 block_index;
    uint3 block_dim, grid_dim;
    unsigned char* dynamic_shared;
};

enum HostCollectiveKind { HOST_SYNCWARP = 1, HOST_SHUFFLE, HOST_BALLOT, HOST_REDUCE, HOST_MATCH };

// A warp-wide operation. A caller may read it until its next call of the runtime.
struct HostCollective {
    unsigned mask, arrived, departed;
    int kind;
    bool complete;
    uint64_t value[32];
};

enum HostBarrierKind { HOST_BARRIER_PLAIN, HOST_BARRIER_AND };

// Exported by every kernel library as host_kernel.
struct HostKernel {
    void (*call)(const void* params);
    size_t param_bytes;
    // Address of one of the library's thread_locals; nullptr if __shared__ is plain static.
    void* (*shared_anchor)();
    char *shared_begin, *shared_end;  // plain static shared memory
};

enum HostOrder { HOST_ASCENDING, HOST_DESCENDING, HOST_RANDOM };

// Consecutive blocks of a grid, by their linear indices.
struct HostBlocks {
    uint64_t first, count;
};

struct HostLaunch {
    unsigned grid[3], block[3];
    unsigned shared_bytes, order, seed, workers;
    unsigned resident, cluster;  // cluster: blocks resident together; clusters run one after the other
    unsigned stack_bytes;
    unsigned ranges;
    const HostBlocks* blocks;    // blocks that run: disjoint ranges in ascending order
    const void* params;
    // Grids that run together, each with its own parameters, `params_stride` bytes apart: the kernels of
    // several GPUs, which may wait for each other.
    unsigned ranks, params_stride;
};

#pragma GCC visibility push(default)
extern "C" {
extern __thread HostThread* host_thread __attribute__((tls_model("initial-exec")));
extern __thread HostBlock host_block __attribute__((tls_model("initial-exec")));

// Returns 0, or 1 with a message in host_error(), where <pc 0x...> stands for an address inside the kernel's
// library.
int host_launch(const HostKernel* kernel, const HostLaunch* launch);
const char* host_error();

[[noreturn]] void host_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void host_yield();
void host_progress();
int host_barrier(int id, int count, int predicate, int kind);
// Barrier of all threads of the `blocks` blocks of this cluster.
void host_cluster_barrier(unsigned blocks);
// Returns the address, in another block of the cluster, that corresponds to `own` in this block's dynamic
// shared memory. Both have met in host_cluster_barrier.
void* host_shared_of_block(void* own, unsigned block);
const HostCollective* host_collective(unsigned mask, int kind, uint64_t value);

// asynchronous copies, see async_copy.h
void host_cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes);
void host_cp_async_commit();
void host_cp_async_wait(unsigned pending_groups);
void host_mbarrier_init(void* barrier, unsigned arrivals);
void host_mbarrier_arrive(void* barrier, unsigned expect_bytes);
void host_mbarrier_complete_tx(void* barrier, unsigned bytes);
int host_mbarrier_try_wait(void* barrier, unsigned parity);
void host_bulk_load(void* shared, const void* global, unsigned bytes, void* barrier);
void host_bulk_load_row(void* shared, const void* global, unsigned bytes, unsigned source_bytes,
                        unsigned swizzle, void* barrier);
void host_bulk_store(void* global, const void* shared, unsigned bytes);
void host_bulk_add_f32(void* global, const void* shared, unsigned bytes);
void host_bulk_commit();
void host_bulk_wait(unsigned pending_groups);
}
#pragma GCC visibility pop
