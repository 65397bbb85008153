// Sources of the rows of moved groups (moe/pad.cu), found by the first warp of a block by scans over the
// sizes of all groups.
#pragma once
#include "groups/row_groups.cuh"

// Rows that move, and how thread blocks share them.
struct RowArray {
    const u8* from;              // [from_rows, row_bytes]
    u8* to;                      // [rows, row_bytes]
    i64 row_bytes;
    u32 rows_per_block;          // 1 if thread blocks share a row
    u32 across;                  // thread blocks per row
    u32 row_share;               // bytes of a row per thread block; a multiple of 16 if they share a row
    u32 step;                    // common divisor of addresses and sizes, in bytes: 16, 4 or 1
};

struct GroupsParams {
    RowArray data, scales;
    Splits splits;
    const void* order;           // [groups] i32, or i64 if `order_wide`; null: groups keep their order
    i64 from_rows, rows;         // rows of `from` and of `to`
    i64 align_from, align_to;    // powers of two
    const u32* scale;            // one word, copied to `scale_to`; or null
    u32* scale_to;
    u32 order_wide;
    u32 exact;                   // 1: the groups have all rows of `from`; 0: rows may follow the last group
    u32 data_blocks;             // thread blocks before those of `scales`

    // sizes are clamped to [0, most()], so that sums stay small
    __device__ __forceinline__ i64 most() const { return larger(from_rows, rows) + 1; }
    __device__ __forceinline__ i64 size(i64 group) const {
        const i64 given = splits.load(group);
        return given < 0 ? 0 : given < most() ? given : most();
    }
    // Returns the group at a position in `to`; absent ones have size 0.
    __device__ __forceinline__ i64 group_at(i64 position) const {
        if (!order || position >= splits.groups) return position;
        const i64 group = order_wide ? load_read_only(static_cast<const i64*>(order) + position)
                                     : load_read_only(static_cast<const i32*>(order) + position);
        return group >= 0 && group < splits.groups ? group : splits.groups;
    }
};

constexpr int kThreads = 256, kMostRows = 2048;
constexpr int kPerLane = 4, kRound = 32 * kPerLane;  // groups per lane and per warp in a round of a scan
constexpr int kWindow = 1024;                        // groups whose starts are in shared memory at a time

struct Shared {
    // source row of each row of the block, later its byte offset; -1: zeros
    i64 source[kMostRows];
    // with an order: the group of each row, whose start is added later, and the first row of each group
    i32 group[kMostRows];
    i64 start[kWindow];
};

// Inclusive prefix sums of both over the lanes, at once.
template <class T>
__device__ __forceinline__ void warp_prefix_sums(T& a, T& b) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other_a = __shfl_up_sync(~0u, a, step), other_b = __shfl_up_sync(~0u, b, step);
        if ((int)(threadIdx.x % 32) >= step) a += other_a, b += other_b;
    }
}

// value[u] = from[index[u]], or -1 for an absent index. from has `count` integers. All loads are in flight at
// once: absent indices load element 0.
template <class Stored, int kCount>
__device__ __forceinline__ void load_stored(const void* from, const i64 (&index)[kCount], i64 count,
                                            i64 (&value)[kCount]) {
    Stored given[kCount];
#pragma unroll
    for (int u = 0; u < kCount; u++)
        given[u] = load_read_only(static_cast<const Stored*>(from) + (index[u] < count ? index[u] : 0));
#pragma unroll
    for (int u = 0; u < kCount; u++) value[u] = index[u] < count ? given[u] : -1;
}
template <int kCount>
__device__ __forceinline__ void load_all(const void* from, u32 wide, const i64 (&index)[kCount], i64 count,
                                         i64 (&value)[kCount]) {
    if (wide) load_stored<i64, kCount>(from, index, count, value);
    else load_stored<i32, kCount>(from, index, count, value);
}

// Sizes of a lane's groups in a round. There is at least one group.
template <class T, int kCount>
struct LaneGroups {
    T size[kCount];

    __device__ __forceinline__ void load(const GroupsParams& p, i64 round, bool ordered) {
        const i64 groups = p.splits.groups;
        i64 index[kCount], given[kCount];
#pragma unroll
        for (int u = 0; u < kCount; u++) index[u] = round + threadIdx.x % 32 * kCount + u;
        if (ordered) {
            load_all(p.order, p.order_wide, index, groups, given);
#pragma unroll
            for (int u = 0; u < kCount; u++)
                index[u] = given[u] >= 0 && given[u] < groups ? given[u] : groups;
        }
        load_all(p.splits.sizes, p.splits.wide, index, groups, given);
#pragma unroll
        for (int u = 0; u < kCount; u++)
            size[u] = (T)(given[u] < 0 ? 0 : given[u] < p.most() ? given[u] : p.most());
    }
    // Rows of the lane's groups, each aligned.
    __device__ __forceinline__ T rows(T align) const {
        T sum = 0;
#pragma unroll
        for (int u = 0; u < kCount; u++) sum += aligned_up(size[u], align);
        return sum;
    }
};

// With fewer rows in both arrays, T is u32: no sum of a round's groups overflows.
constexpr i64 kFewRows = 1 << 24;

// Writes the sources of the block's rows that a round's groups have. own: this lane's groups. own_from,
// own_to: their first rows in `from` (0 with an order) and in `to`.
template <class T, int kCount>
__device__ __forceinline__ void write_sources(const GroupsParams& p, const LaneGroups<T, kCount>& own,
                                              i64 round, T own_from, T own_to, i64 first_row, int count,
                                              Shared& shared) {
    const int lane = threadIdx.x % 32;
    const T first = (T)first_row, end = first + (T)count;
#pragma unroll
    for (int u = 0; u < kCount; u++) {
        const bool here = own.size[u] > 0 && own_to < end && own_to + own.size[u] > first;
#pragma unroll 1
        for (u32 left = __ballot_sync(~0u, here); left; left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const i64 begin = (i64)__shfl_sync(~0u, own_to, owner) - first_row;
            const i64 rows = __shfl_sync(~0u, own.size[u], owner);
            const i64 start = __shfl_sync(~0u, own_from, owner);
            const int stop = left_of(begin + rows, count);
            const i32 index = p.order ? (i32)p.group_at(round + owner * kCount + u) : 0;
#pragma unroll 1
            for (int r = left_of(begin, count) + lane; r < stop; r += 32)
                shared.source[r] = start + r - begin, shared.group[r] = index;
        }
        if (!p.order) own_from += aligned_up(own.size[u], (T)p.align_from);
        own_to += aligned_up(own.size[u], (T)p.align_to);
    }
}

// Finds the sources of `count` rows from `first_row` on; with an order, relative to the start of their group.
// Call from one whole warp.
template <class T>
__device__ __forceinline__ void find_in_groups(const GroupsParams& p, i64 first_row, int count,
                                               Shared& shared) {
    const T first = (T)first_row, end = first + (T)count, most = (T)p.most();
    constexpr bool kEarly = sizeof(T) == 4;          // load the next round's sizes during this one
    // i64: four groups per lane and round take too many registers
    constexpr int kCount = kEarly ? kPerLane : 1;
    LaneGroups<T, kCount> next;
    if (kEarly && p.splits.groups > 0) next.load(p, 0, p.order);
    for (int r = threadIdx.x % 32; r < count; r += 32) shared.source[r] = -1, shared.group[r] = -1;
    __syncwarp();
    T from = 0, to = 0;                              // rows before this round's groups
    for (i64 round = 0; round < p.splits.groups && to < end; round += 32 * kCount) {
        LaneGroups<T, kCount> own;
        if constexpr (kEarly) {
            own = next;
            if (round + 32 * kCount < p.splits.groups) next.load(p, round + 32 * kCount, p.order);
        } else {
            own.load(p, round, p.order);
        }
        const T from_rows = own.rows((T)p.align_from), to_rows = own.rows((T)p.align_to);
        // A round that ends before the first row costs only two sums.
        if constexpr (sizeof(T) == 4) {
            const T all = to + __reduce_add_sync(~0u, to_rows);
            if (all <= first) {
                from += __reduce_add_sync(~0u, from_rows);
                from = smaller(from, most);
                to = all;                            // at most `first`
                continue;
            }
        }
        T from_end = from_rows, to_end = to_rows;
        warp_prefix_sums(from_end, to_end);
        const T own_from = p.order ? 0 : from + from_end - from_rows, own_to = to + to_end - to_rows;
        write_sources(p, own, round, own_from, own_to, first_row, count, shared);
        from += __shfl_sync(~0u, from_end, 31);
        to += __shfl_sync(~0u, to_end, 31);
        from = smaller(from, most);
        to = smaller(to, most);
    }
    __syncwarp();
}

// Adds to each row's source its group's start in `from`, for groups with an order. Call from one whole warp.
__device__ __forceinline__ void add_starts(const GroupsParams& p, int count, Shared& shared) {
    const int lane = threadIdx.x % 32;
    i64 before = 0;
    for (i64 window = 0; window < p.splits.groups; window += kWindow) {
        for (int round = 0; round < kWindow && window + round < p.splits.groups; round += kRound) {
            LaneGroups<i64, kPerLane> own;
            own.load(p, window + round, false);
            i64 rows = 0;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) rows += own.size[u];
            const i64 end = warp_prefix_sum(rows);
            i64 at = before + end - rows;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) {
                shared.start[round + lane * kPerLane + u] = at;
                at += own.size[u];
            }
            before = smaller(before + __shfl_sync(~0u, end, 31), p.most());
        }
        __syncwarp();
        for (int r = lane; r < count; r += 32) {
            const i64 group = shared.group[r] - window;
            if (group >= 0 && group < kWindow) shared.source[r] += shared.start[group];
        }
        __syncwarp();
    }
}

// Reports sizes that are negative or do not fit. Call from one whole warp.
__device__ __forceinline__ void check_group_sizes(const GroupsParams& p) {
    bool negative = false;
    i64 sum = 0, from = 0;                           // sums of the sizes, and of the aligned sizes in `from`
    for (i64 g = threadIdx.x; g < p.splits.groups; g += 32) {
        const i64 size = p.size(g);
        negative |= p.splits.load(g) < 0;
        sum = smaller(sum + size, p.most());
        from = smaller(from + aligned_up(size, p.align_from), p.most());
    }
    sum = __shfl_sync(~0u, warp_prefix_sum(sum), 31);
    from = __shfl_sync(~0u, warp_prefix_sum(from), 31);
    const bool fits = p.exact ? from == p.from_rows : from <= p.from_rows && sum <= p.rows;
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (threadIdx.x == 0)
        report(p.splits.errors, (any_negative ? kSplitNegative : 0u) | (fits ? 0u : kSplitSum));
}

// Reports sizes that do not fit, and an order that is no permutation. Call from all threads.
__device__ __forceinline__ void check_groups(const GroupsParams& p, Shared& shared) {
    if (threadIdx.x < 32) check_group_sizes(p);
    if (!p.order) return;
    constexpr int kBits = kWindow * 64;              // one bit per group, in the memory of the starts
    u32* seen = reinterpret_cast<u32*>(shared.start);
    bool wrong = false;
    for (i64 window = 0; window < p.splits.groups; window += kBits) {
        __syncthreads();
        for (int w = threadIdx.x; w < kBits / 32; w += kThreads) seen[w] = 0;
        __syncthreads();
        for (i64 position = threadIdx.x; position < p.splits.groups; position += kThreads) {
            const i64 group = p.group_at(position), bit = group - window;
            wrong |= group == p.splits.groups;
            if (bit >= 0 && bit < kBits && group < p.splits.groups)
                wrong |= atomicOr(seen + bit / 32, 1u << bit % 32) >> bit % 32 & 1;
        }
    }
    if (wrong) report(p.splits.errors, kOrder);
}
