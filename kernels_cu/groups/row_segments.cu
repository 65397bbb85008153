// Finds the rows of groups (docs/numerics.md, section 7) for the thread blocks of the next launch:
//
//   group_find_segments:  to[i] = the RowSegment of rows i * 2^rows_log2 and following of the results
//   group_find_rows:      group_of[row] = the group that has the row
//
// group_find_segments  sizes i32 or i64 [groups] -> to RowSegment [count], as find_segment() in
//                      include/groups/row_groups.cuh; one per warp. Also zeroes a workspace of the next
//                      launch, if one is given.
// group_find_rows      sizes i32 or i64 [groups] -> group_of u32 [all]: the group of each of `rows` rows, and
//                      kNobody for rows without a group and beyond. kSpan rows per warp. Reports wrong sizes.
//
// A negative size counts as 0, and a group that goes past the last row ends there. Bytes moved: 64 per
// segment, 16 per cleared chunk and 4 per row; sizes come from the L2. No defines.
#include "groups/row_groups.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;

#ifdef ENTRY_group_find_segments
struct GroupSegmentsParams {
    RowGroups groups;
    RowSegment* to;
    i64 count;
    u32 rows_log2;
    u32 first_shift, second_shift;                       // as for find_segment()
    u8* clear;                                           // 16-byte aligned, or null
    i64 chunks;                                          // chunks of 16 bytes to clear
};

extern "C" __global__ void __launch_bounds__(kThreads)
group_find_segments(const __grid_constant__ GroupSegmentsParams p) {
    __shared__ RowSegment by_warp[kWarps];
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < p.chunks; i += (i64)gridDim.x * kThreads)
        Chunk<e8m0fnu, 16>{}.store_whole(p.clear + 16 * i);
    const i64 segment = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
    if (segment >= p.count) return;
    RowSegment& found = by_warp[threadIdx.x / 32];
    find_segment<true, true>(p.groups, segment, p.rows_log2, p.first_shift, p.second_shift, found);
    if (threadIdx.x % 32 == 0) p.to[segment] = found;
}
#endif

#ifdef ENTRY_group_find_rows
constexpr int kSpan = 128;                               // the same in calls/row_segments.py
constexpr u32 kNobody = ~0u;

struct GroupRowsParams {
    Splits splits;
    i64 rows, all;
    u32* group_of;
};

extern "C" __global__ void __launch_bounds__(kThreads)
group_find_rows(const __grid_constant__ GroupRowsParams p) {
    const int lane = threadIdx.x % 32;
    const i64 first = ((i64)blockIdx.x * kWarps + threadIdx.x / 32) * kSpan;
    if (first >= p.all) return;
    if (first == 0) check_sizes(p.splits, p.rows);
    const int span = left_of(p.all - first, kSpan);
    const auto write = [&](i64 from, i64 to, u32 group) {
        const int end = left_of(to - first, span);
        for (int r = left_of(from - first, span) + lane; r < end; r += 32) p.group_of[first + r] = group;
    };
    i64 before = 0;                                      // rows of all groups in earlier rounds
    for (i64 round = 0; round < p.splits.groups && before < first + span; round += 32) {
        const i64 given = p.splits.load(round + lane);
        const i64 size = given < 0 ? 0 : given > p.rows ? p.rows + 1 : given;
        const i64 end = before + warp_prefix_sum(size), start = end - size;
        const i64 stop = end < p.rows ? end : p.rows;
        const bool has_rows = start < stop && start < first + span && stop > first;
        for (u32 having = __ballot_sync(~0u, has_rows); having; having &= having - 1) {
            const int other = __ffs((int)having) - 1;
            write(__shfl_sync(~0u, start, other), __shfl_sync(~0u, stop, other), (u32)(round + other));
        }
        before = __shfl_sync(~0u, end, 31);
        before = before < p.rows ? before : p.rows;
    }
    write(before, p.all, kNobody);
}
#endif
