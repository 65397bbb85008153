// Which rows of which group the blocks of a launch that follows have, or which group each row belongs to (docs/numerics.md, section 7).
//
// group_find_runs  sizes of groups -> runs [count]: RowRun of every run of RUN_ROWS rows of the results, as find_run() (row_groups.cuh) finds them,
//                  which a block of the launch that follows then loads. A warp finds one. And zeros in a workspace of those launches, where
//                  one is given.
// group_find_rows  sizes of groups -> group_of [all]: the group of each of `rows` rows, kNobody of those that no group has and of what is
//                  beyond; sizes that are wrong are reported. A warp finds those of kSpan rows.
// Bytes moved: 64 per run, 16 per chunk cleared, 4 per row; the sizes are read from the L2.
#include "groups/row_groups.cuh"

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

#ifdef ENTRY_group_find_rows
constexpr int kSpan = 128;           // also in calls/row_segments.py
constexpr u32 kNobody = ~0u;

struct GroupRowsParams {
    Splits splits;
    i64 rows, all;
    u32* group_of;
};

extern "C" __global__ void __launch_bounds__(kThreads) group_find_rows(const __grid_constant__ GroupRowsParams p) {
    const int lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * kWarps + threadIdx.x / 32) * kSpan;
    if (first >= p.all) return;
    if (first == 0) check_sizes(p.splits, p.rows);
    const int span = left_of(p.all - first, kSpan);
    const auto write = [&](i64 from, i64 to, u32 group) {
        const int end = left_of(to - first, span);
        for (int r = left_of(from - first, span) + lane; r < end; r += 32) p.group_of[first + r] = group;
    };
    i64 before = 0;                                                  // rows of all groups of earlier rounds
    for (i64 round = 0; round < p.splits.groups && before < first + span; round += 32) {
        const i64 given = p.splits.load(round + lane), size = given < 0 ? 0 : given > p.rows ? p.rows + 1 : given;
        const i64 end = before + warp_prefix_sum(size), start = end - size, stop = end < p.rows ? end : p.rows;
        for (u32 having = __ballot_sync(~0u, start < stop && start < first + span && stop > first); having; having &= having - 1) {
            const int other = __ffs((int)having) - 1;
            write(__shfl_sync(~0u, start, other), __shfl_sync(~0u, stop, other), (u32)(round + other));
        }
        before = __shfl_sync(~0u, end, 31);
        before = before < p.rows ? before : p.rows;
    }
    write(before, p.all, kNobody);
}
#endif
