// Groups of consecutive rows, whose sizes only the device knows, are matrices of their own. Their rows are
// divided into row segments, each within one group. The places of a group's scales depend on all groups
// before it.
//
// find_segment: the first warp of a block finds the block's segment by a scan over the sizes, while the block
// waits. load_segment: another launch (row_segments.cu) has found all segments before a launch of many
// blocks.
#pragma once
#include "groups/splits.cuh"
#include "memory/chunks.cuh"

struct RowSegment;
// Groups of the rows of an array x [rows, columns]. In the results each group is padded with rows of zeros to
// a multiple of `align` (1: no padding). Wrong sizes and offsets are made harmless: a negative size counts as
// 0, a group that goes past the last row ends there, and a group whose given offset is not a row start, or
// points past the end, is skipped.
struct RowGroups {
    const i64* offsets;          // [groups + 1] in elements, with align 1; null: sums of the sizes
    i64* offsets_out;            // [groups + 1] in the results: `offsets` or the sums; or null
    void* sizes_out;             // [groups]: sizes (align > 1: rows in the results), in their type; or null
    Splits splits;
    i64 rows, columns;           // shape of x
    i64 result_rows;             // rows of the results, enough for any sizes
    u32 across;                  // tiles along a row
    u32 align;                   // a power of two
    const RowSegment* segments;  // segments of the results; null: a block finds its own

    __device__ __forceinline__ i64 aligned(i64 size) const { return (size + align - 1) & -(i64)align; }
    __device__ __forceinline__ i64 size(i64 group) const {
        const i64 n = splits.load(group);
        return n < 0 ? 0 : n > rows ? rows + 1 : n;      // sums stay small, and still differ from rows
    }
};

// Consecutive rows of a group, or consecutive rows after the last group.
struct RowSegment {
    i64 group;                   // -1: none
    i64 start;                   // the group's first element in x
    i64 result_start;            // the group's first element in the results; without a group, the segment's
    i64 rows_in_x;               // the group's rows in x
    i64 rows;                    // the group's rows in the results; without a group, the segment's
    i64 index;                   // index of the segment in the group, or after the last group
    i64 units_before[2];         // units of all groups before this one, for each direction
};

// Searches for a segment of 2^rows_log2 rows: rows of the results if kAligns, else of x. A group has a unit
// per 2^shift rows, rounded up; units are counted if kCounts.
template <bool kCounts, bool kAligns>
struct SegmentSearch {
    static constexpr int kPerLane = 4;           // groups per lane and round
    const RowGroups& p;
    i64 segment;
    u32 rows_log2, first_shift, second_shift;

    // Unsigned: fewer instructions. With a few more, NVRTC no longer advances a pointer from row to row of
    // the following tile, but keeps the offsets of its 32 rows in 64 registers.
    static __device__ __forceinline__ i64 units(i64 rows, u32 shift) {
        return (i64)(((u64)rows + ((u64)1 << shift) - 1) >> shift);
    }
    __device__ __forceinline__ i64 segments_of(i64 rows) const { return units(rows, rows_log2); }
    __device__ __forceinline__ i64 in_results(i64 size) const { return kAligns ? p.aligned(size) : size; }

    // Clamps the sizes of a lane's groups, which begin at row `at`. Adds their rows in the results to `to`,
    // their segments to `segments` and their units to `own_units`.
    __device__ __forceinline__ void add_up(i64 at, i64 (&size)[kPerLane], i64& to, i64& segments,
                                           i64 (&own_units)[2]) const {
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            size[u] = smaller(size[u], p.rows - at);
            at += size[u];
            const i64 written = in_results(size[u]);
            if (kAligns) to += written;
            segments += segments_of(written);
            if (!kCounts) continue;
            own_units[0] += units(written, first_shift), own_units[1] += units(written, second_shift);
        }
    }
    // Describes the segment if it belongs to one of this lane's groups: `group` is the first of these,
    // beginning at row `start` and segment own_segment. before: units of all groups before it.
    __device__ __forceinline__ void look(i64 group, const i64 (&size)[kPerLane], i64 start, i64 own_segment,
                                         i64 (&before)[2], RowSegment& found) const {
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 written = in_results(size[u]), own_segments = segments_of(written);
            if (segment >= own_segment && segment < own_segment + own_segments) {
                found.group = group + u, found.start = start * p.columns;
                found.rows_in_x = size[u], found.index = segment - own_segment;
                found.units_before[0] = before[0], found.units_before[1] = before[1];
            }
            own_segment += own_segments;
            start += size[u];
            if (kCounts) before[0] += units(written, first_shift), before[1] += units(written, second_shift);
        }
    }
    // Returns this lane's share of the result rows of the groups before one that the search has reached; they
    // lie in x completely.
    __device__ __forceinline__ i64 lane_rows_before(i64 group) const {
        i64 to = 0;
        for (i64 g = threadIdx.x % 32; g < group; g += 32) to += p.aligned(p.size(g));
        return to;
    }
    // Describes a segment after the last group. to: its first row in the results.
    __device__ __forceinline__ void describe_rest(i64 end, i64 own_segment, const i64 (&before)[2],
                                                  RowSegment& found) const {
        const i64 all = kAligns ? p.result_rows : p.rows;
        const i64 to = smaller(end + (own_segment << rows_log2), all);
        found = {-1, 0, to * p.columns, 0, left_of(all - to, 1 << rows_log2), own_segment,
                 {before[0], before[1]}};
    }
    // Completes the description of a segment of a group. to: the group's first row in the results, if
    // `aligns`.
    __device__ __forceinline__ void complete(bool aligns, i64 to, RowSegment& found) const {
        found.rows = in_results(found.rows_in_x);
        found.result_start = aligns ? to * p.columns : found.start;
        if (!p.offsets) return;
        found.start = found.result_start = p.offsets[found.group];
        if (found.start < 0 || found.start > (p.rows - found.rows) * p.columns ||
            (p.columns && found.start % p.columns))
            found.start = found.result_start = 0, found.rows = 0;
    }
};

// Writes the segment that SegmentSearch describes to shared memory. Call from one whole warp.
template <bool kCounts, bool kAligns>
__device__ __forceinline__ void find_segment(const RowGroups& p, i64 segment, u32 rows_log2, u32 first_shift,
                                             u32 second_shift, RowSegment& found) {
    using Search = SegmentSearch<kCounts, kAligns>;
    const Search search{p, segment, rows_log2, first_shift, second_shift};
    const int lane = threadIdx.x % 32;
    i64 round_start = 0, round_segment = 0, round_units[2] = {};     // sums over all earlier rounds
    i64 to = 0;                                          // this lane's share of their result rows
    bool reached = false;
    for (i64 round = 0; round < p.splits.groups && !reached; round += 32 * Search::kPerLane) {
        i64 size[Search::kPerLane], rows = 0, segments = 0, own_units[2] = {};
#pragma unroll
        for (int u = 0; u < Search::kPerLane; u++)
            rows += size[u] = p.size(round + lane * Search::kPerLane + u);
        const i64 end = warp_prefix_sum(rows), start = smaller(round_start + end - rows, p.rows);
        search.add_up(start, size, to, segments, own_units);
        const i64 end_segment = warp_prefix_sum(segments);
        i64 own_segment = round_segment + end_segment - segments, before[2] = {}, end_units[2] = {};
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                end_units[i] = warp_prefix_sum(own_units[i]);
                before[i] = round_units[i] + end_units[i] - own_units[i];
            }
        search.look(round + lane * Search::kPerLane, size, start, own_segment, before, found);
        round_start = smaller(round_start + __shfl_sync(~0u, end, 31), p.rows);
        round_segment += __shfl_sync(~0u, end_segment, 31);
        reached = segment < round_segment;
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) round_units[i] += __shfl_sync(~0u, end_units[i], 31);
    }
    __syncwarp();
    const bool aligns = kAligns && p.align > 1;
    if (aligns) {                                // here the registers of the other sums are free
        if (reached) to = search.lane_rows_before(found.group);
        to = __shfl_sync(~0u, warp_prefix_sum(to), 31);
    }
    if (lane != 0) return;
    if (!reached)
        return search.describe_rest(aligns ? to : round_start, segment - round_segment, round_units, found);
    search.complete(aligns, to, found);
}

constexpr u32 kSegmentWords = sizeof(RowSegment) / sizeof(u32);
static_assert(kSegmentWords == 16, "half a warp; also in calls/row_segments.py");
// Loads a segment that an earlier launch has found.
__device__ __forceinline__ void load_segment(const RowGroups& p, i64 segment, RowSegment& found) {
    const u32* const from = reinterpret_cast<const u32*>(p.segments + segment);
    if (threadIdx.x % 32 < kSegmentWords)
        reinterpret_cast<u32*>(&found)[threadIdx.x % 32] = load_read_only(from + threadIdx.x % 32);
    __syncwarp();
}

// Places of the scales of groups of rows: the scales of the groups follow one another, each group padded
// separately. A group has a row of scales per row of its blocks.
struct GroupScales {
    u32 block_shift;             // a block has 2^block_shift rows
    u32 unit_shift;              // a group is padded to a multiple of 2^unit_shift rows
    i64 unit;                    // scales per 2^unit_shift rows
    i64 all;                     // all stored scales, including those past the last group

    __device__ __forceinline__ i64 units(i64 rows) const {
        return (rows + ((i64)1 << unit_shift) - 1) >> unit_shift;
    }
    // Rows of blocks of a group, with its padding.
    __device__ __forceinline__ i64 block_rows(i64 rows) const {
        return units(rows) << (unit_shift - block_shift);
    }

    // Writes zeros after the scales of `before` units. Call from all kThreads threads of each of `blocks`
    // blocks.
    template <int kThreads, class T>
    __device__ __forceinline__ void clear_rest(T* to, i64 before, i64 block, i64 blocks) const {
        if (!to) return;
        const i64 first = before * unit + block * kThreads + threadIdx.x;
        for (i64 i = first; i < all; i += blocks * kThreads) as_global(to)[i] = T{};
    }
};

// Writes zeros to `rows` rows of `width` bytes, `stride` bytes apart. Call from all kThreads threads of a
// block.
template <int kThreads>
__device__ __forceinline__ void clear_rows(u8* to, i64 rows, int width, i64 stride) {
    const bool whole = (reinterpret_cast<u64>(to) | (u64)stride | (u64)width) % 16 == 0;
    const int step = whole ? 16 : 1, across = width / step;
    for (int i = threadIdx.x; i < (int)rows * across; i += kThreads) {
        u8* const at = to + i / across * stride + i % across * step;
        if (whole) Chunk<e8m0fnu, 16>{}.store_whole(at);
        else *at = 0;
    }
}

// Writes offsets and sizes if there are arrays for them, and reports wrong ones. Call from one whole warp.
__device__ __forceinline__ void write_offsets(const RowGroups& p) {
    const int lane = threadIdx.x % 32;
    const bool aligns = p.align > 1;
    i64 before = 0, to = 0;                      // rows of x and of the results in earlier rounds
    u32 wrong = 0;
    for (i64 round = 0; round < p.splits.groups; round += 32) {
        const i64 g = round + lane, given = p.splits.load(g), size = p.size(g);
        const i64 end = before + warp_prefix_sum(size), start = end - size;
        i64 kept = given;
        if (given < 0) wrong |= kSplitNegative;
        if (end > p.rows) wrong |= kSplitSum;
        i64 first = smaller(start, p.rows), end_to = 0;
        if (aligns) {
            kept = p.aligned(smaller(end, p.rows) - first);
            end_to = to + warp_prefix_sum(kept);
            first = end_to - kept;
        }
        if (g < p.splits.groups) {
            const i64 offset = p.offsets ? p.offsets[g] : first * p.columns;
            if (p.offsets && offset != start * p.columns) wrong |= kSplitSum;
            if (p.offsets_out) p.offsets_out[g] = offset;
            if (p.sizes_out) p.splits.store(p.sizes_out, g, kept);
        }
        before = smaller(__shfl_sync(~0u, end, 31), p.rows + 1);
        to = __shfl_sync(~0u, end_to, 31);
    }
    if (lane == 0 && p.offsets_out)
        p.offsets_out[p.splits.groups] =
            p.offsets ? p.offsets[p.splits.groups] : (aligns ? to : smaller(before, p.rows)) * p.columns;
    report(p.splits.errors, wrong);
}
