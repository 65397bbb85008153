// Which rows of which group the blocks of a launch that follows have (docs/numerics.md, section 7).
//
// group_find_runs  sizes of groups -> runs [count]: RowRun of every run of RUN_ROWS rows of the results, as find_run() (groups.cuh) finds them,
//                  which a block of the launch that follows then loads. A warp finds one. And zeros in a workspace of those launches, where
//                  one is given.
// Bytes moved: 64 per run, 16 per chunk cleared; the sizes are read from the L2.
#include "groups.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;

#ifdef ENTRY_group_find_runs
struct GroupRunsParams {
    RowGroups groups;
    RowRun* to;
    i64 count;
    u32 first_shift, second_shift;                                   // as find_run() takes them
    u8* clear;                                                       // 16-byte aligned, or null
    i64 chunks;                                                      // of 16 bytes to clear
};

extern "C" __global__ void __launch_bounds__(kThreads) group_find_runs(const __grid_constant__ GroupRunsParams p) {
    __shared__ RowRun runs[kWarps];
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < p.chunks; i += (i64)gridDim.x * kThreads)
        Chunk<e8m0fnu, 16>{}.store_whole(p.clear + 16 * i);
    const i64 run = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
    if (run >= p.count) return;
    RowRun& found = runs[threadIdx.x / 32];
    find_run<RUN_ROWS, true, true>(p.groups, run, p.first_shift, p.second_shift, found);
    if (threadIdx.x % 32 == 0) p.to[run] = found;
}
#endif
