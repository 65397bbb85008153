// group_sums adds up the rows of each group (docs/numerics.md, section 12):
//
//   sums[e, k] = the sum over the rows r of group e of fl(weights[r] * x[r, k]), by the fixed tree over the
//                group's rows
//
// x IN [rows, columns], times its scales if FP8; sizes i32 or i64 [groups], weights f32 [rows] or none ->
// sums f32 [groups, columns]. FP8 values are rounded to f32 with their scale, then with their weight. NaN
// becomes the one NaN.
//
// Groups are cut into segments of up to 256 rows, and rows into strips. A thread block takes a strip of a
// segment; in each round a warp takes eight consecutive rows, a lane kCount columns of them. The sums of a
// warp's rows, of a segment and of 32 segments are subtrees of the fixed tree. The last thread block of a
// group's strip adds up the sums of its segments. Thread blocks of the first segment also clear the sums of
// groups without rows. Bytes moved: x once, and 8 per column of a segment of a group that has several.
//
// Defines:
//   IN      the format of x
#include "groups/row_groups.cuh"
#include "numerics/amax.cuh"
#include "numerics/tree_sum.cuh"

struct GroupSumsParams {
    const IN::storage* x;        // [rows, columns]
    const u8* scale;             // of FP8, f32 or E8M0: see scale_row; else null
    const float* weights;        // [rows], or null: 1
    float* sums;                 // [groups, columns]
    float* of_segments;          // [see first_slot, columns] sums of segments, of groups with several
    u32* done;                   // [see first_slot, strips] blocks done; zero before and after a launch
    i64 columns;
    i64 scale_row, scale_block;  // scales between rows, and between blocks of 128 columns; 0: one for all
    RowGroups groups;            // starts are rows, since `columns` there is 1; across: strips
    u32 f32_scales;              // 1: f32, 0: E8M0
    u32 rows_log2;               // log2 of a segment's rows: 6 (one round) to 8
    u32 vector;                  // 1: all rows are whole chunks at multiples of a chunk's bytes
};

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 8, kRoundRows = kWarps * kRows;        // rows per round of a warp, of a block
constexpr int kMostRounds = 4, kMostRows = kMostRounds * kRoundRows;
constexpr bool kScaled = sizeof(IN::storage) == 1;
constexpr int kCount = sizeof(IN::storage) == 4 ? 4 : 8, kStrip = 32 * kCount;
constexpr int kScaleColumns = 128, kScales = kScaled ? kStrip / kScaleColumns : 1;
constexpr int kSegmentsAtOnce = 32;
using LaneChunk = Chunk<IN, kCount>;
static_assert(kStrip <= kThreads, "a thread for each column");

struct Shared {
    RowSegment segment;
    float scale[kScales][kMostRows];
    float weight[kMostRows];
    union {
        float of_rows[kMostRounds * kWarps][kStrip];         // sums of kRows rows each
        RunningTreeSum of_column[kStrip];
    };
    bool last;
};

// Returns where a group with several segments has the sums of its first one. Groups do not overlap, since a
// group has at most twice as many segments as whole ones.
__device__ __forceinline__ i64 first_slot(const GroupSumsParams& p, const RowSegment& segment) {
    return (segment.start >> p.rows_log2) * 2;
}

__device__ __forceinline__ float load_scale(const GroupSumsParams& p, i64 at) {
    if (p.f32_scales) return load_read_only(reinterpret_cast<const float*>(p.scale) + at);
    return e8m0fnu::widen(load_read_only(p.scale + at));
}

// Loads the factors of a segment's rows. An absent one counts as +0 * 1 * -0, an absent term.
__device__ __forceinline__ void load_factors(const GroupSumsParams& p, Shared& shared, i64 first, int rows,
                                             i64 column) {
    for (int r = threadIdx.x; r < 1 << p.rows_log2; r += kThreads) {
        const bool exists = r < rows;
        const float given = exists && p.weights ? load_read_only(p.weights + first + r) : 1.0f;
        shared.weight[r] = exists ? given : as_float(kAbsentTerm);
        if (!kScaled) continue;
#pragma unroll
        for (int b = 0; b < kScales; b++) {
            const i64 block = column / kScaleColumns + b;
            shared.scale[b][r] = exists && block * kScaleColumns < p.columns
                ? load_scale(p, (first + r) * p.scale_row + block * p.scale_block) : 1.0f;
        }
    }
}

// Writes the sums of a warp's rows in a round to shared memory. at: the first row's place in the segment;
// from: the lane's chunk of it; rows: existing rows from it on; left: columns from the lane's first one on.
template <bool kVector>
__device__ __forceinline__ void add_rows(const GroupSumsParams& p, Shared& shared, int at,
                                         const IN::storage* from, int rows, int left) {
    const int lane = threadIdx.x % 32;
    const float* const weight = shared.weight + at;
    const float* const scale = shared.scale[kScaled ? lane * kCount / kScaleColumns : 0] + at;
    LaneChunk row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        row[r] = {};
        if (r < rows && left)
            row[r] = kVector ? LaneChunk::load(from + r * p.columns)
                             : LaneChunk::load_partial(from + r * p.columns, left);
    }
    TreeSum<kRows> sum[kCount];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            float lo, hi;
            row[r].widen2(i / 2, lo, hi);
            if (kScaled) lo = mul_rn(lo, scale[r]), hi = mul_rn(hi, scale[r]);
            sum[i].add(r, mul_rn(lo, weight[r]));
            sum[i + 1].add(r, mul_rn(hi, weight[r]));
        }
    }
    float* const to = shared.of_rows[at / kRows] + lane * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) to[i] = sum[i].sum();
}

// Returns the sum of this thread's column over the first `rounds` rounds; the others are absent terms.
__device__ __forceinline__ float sum_of_rounds(const Shared& shared, int rounds) {
    TreeSum<kMostRounds * kWarps> sum;
#pragma unroll
    for (int i = 0; i < kMostRounds * kWarps; i++)
        sum.add(i, i / kWarps < rounds ? shared.of_rows[i][threadIdx.x] : as_float(kAbsentTerm));
    return sum.sum();
}

// Returns the sum of this thread's column over all segments of a group.
__device__ __forceinline__ float sum_of_segments(const float* from, i64 columns, i64 segments,
                                                 RunningTreeSum& sum) {
    const i64 rounds = (segments + kSegmentsAtOnce - 1) / kSegmentsAtOnce;
    for (i64 round = 0; round < rounds; round++, from += kSegmentsAtOnce * columns) {
        const int left = left_of(segments - round * kSegmentsAtOnce, kSegmentsAtOnce);
        TreeSum<kSegmentsAtOnce> of_round;
        float term[kSegmentsAtOnce];
#pragma unroll
        for (int i = 0; i < kSegmentsAtOnce; i++)
            term[i] = as_float(i < left ? (u32)load_relaxed(from + i * columns) : kAbsentTerm);
#pragma unroll
        for (int i = 0; i < kSegmentsAtOnce; i++) of_round.add(i, term[i]);
        sum.add(round, of_round.sum());
    }
    return sum.total(rounds);
}

// Writes zeros as the sums of all groups without rows. column: this thread's; exists: it has one.
__device__ __forceinline__ void clear_empty_groups(const GroupSumsParams& p, i64 column, bool exists) {
    const i64 groups = p.groups.splits.groups;
    i64 before = 0;                                // rows of all groups in earlier rounds
    for (i64 round = 0; round < groups; round += 32) {
        const i64 group = round + threadIdx.x % 32, size = p.groups.size(group);
        const i64 end = before + warp_prefix_sum(size);
        const bool empty = group < groups && (size == 0 || end - size >= p.groups.rows);
        for (u32 left = __ballot_sync(~0u, empty); left; left &= left - 1)
            if (exists) p.sums[(round + __ffs((int)left) - 1) * p.columns + column] = 0.0f;
        before = smaller(__shfl_sync(~0u, end, 31), p.groups.rows);
    }
}

// Writes the sums of a strip of a segment, and in the group's last thread block those of the group. Call from
// all threads.
__device__ __forceinline__ void do_segment(const GroupSumsParams& p, Shared& shared, i64 strip) {
    const RowSegment& segment = shared.segment;
    const i64 before = segment.index << p.rows_log2, column = strip * kStrip;
    const int rows = left_of(segment.rows - before, 1 << p.rows_log2);
    load_factors(p, shared, segment.start + before, rows, column);
    __syncthreads();
    const i64 own_column = column + threadIdx.x % 32 * kCount;
    const int left = left_of(p.columns - own_column, kCount), rounds = (rows + kRoundRows - 1) / kRoundRows;
    int at = threadIdx.x / 32 * kRows;
    const IN::storage* from = p.x + (segment.start + before + at) * p.columns + own_column;
#pragma unroll 1
    for (int round = 0; round < rounds; round++, at += kRoundRows, from += kRoundRows * p.columns) {
        if (p.vector) add_rows<true>(p, shared, at, from, rows - at, left);
        else add_rows<false>(p, shared, at, from, rows - at, left);
    }
    __syncthreads();
    const i64 segments = (segment.rows + (1 << p.rows_log2) - 1) >> p.rows_log2;
    const i64 slot = first_slot(p, segment);
    const i64 to = column + threadIdx.x;
    const bool exists = (int)threadIdx.x < kStrip && to < p.columns;
    float* const result = p.sums + segment.group * p.columns + to;
    if (exists) {
        const float sum = sum_of_rounds(shared, rounds);
        if (segments > 1) p.of_segments[(slot + segment.index) * p.columns + to] = sum;
        else *result = as_float(f32::narrow(sum));
    }
    if (segments == 1) return;
    u32* const done = p.done + slot * p.groups.across + strip;
    if (!is_last_block(shared.last, done, (u32)segments) || !exists) return;
    *result = as_float(f32::narrow(sum_of_segments(p.of_segments + slot * p.columns + to, p.columns, segments,
                                                   shared.of_column[threadIdx.x])));
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
group_sums(const __grid_constant__ GroupSumsParams p) {
    __shared__ Shared shared;
    const u32 index = blockIdx.x / p.groups.across, strip = blockIdx.x - index * p.groups.across;
    if (threadIdx.x < 32) {
        if (p.groups.segments) load_segment(p.groups, index, shared.segment);
        else find_segment<false, false>(p.groups, index, p.rows_log2, 0, 0, shared.segment);
        if (blockIdx.x == 0) check_sizes(p.groups.splits, p.groups.rows);
    }
    __syncthreads();
    if (shared.segment.group >= 0) do_segment(p, shared, strip);
    const i64 column = (i64)strip * kStrip + threadIdx.x;
    if (index == 0) clear_empty_groups(p, column, (int)threadIdx.x < kStrip && column < p.columns);
}
