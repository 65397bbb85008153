// Groups of consecutive rows, each a matrix of its own, whose sizes only the device knows. Their rows are
// divided into row segments, none with rows of two groups, whose scales have places that depend on all groups
// before.
//
// The first warp of a block finds the block's segment by a scan over the sizes: find_segment. The block waits
// for it, so before a launch of many blocks another launch (row_segments.cu) finds all
// segments: load_segment.
#pragma once
#include "groups/splits.cuh"
#include "memory/chunks.cuh"

struct RowSegment;
// Groups of the rows of an array x [rows, columns], each followed in the results by rows of zeros up to a
// multiple of `align` (1: by none). Wrong sizes and offsets are made harmless: a negative size counts as 0, a
// group that goes past the last row ends there, and a group whose given offset is not a row start, or points
// past the end, is skipped.
struct RowGroups {
    const i64* offsets;          // [groups + 1], in elements, given with align 1; or null: sums of the sizes
    i64* offsets_out;            // [groups + 1], of the results, or null
    void* sizes_out;             // [groups], as wide as the sizes: rows of each in the results; or null
    Splits splits;
    i64 rows, columns;           // of x
    i64 result_rows;             // of the results: enough for any sizes
    u32 across;                  // tiles along a row
    u32 align;                   // a power of two
    const RowSegment* segments;  // of the results; or null: a block finds its own

    __device__ __forceinline__ i64 aligned(i64 size) const { return (size + align - 1) & -(i64)align; }
    __device__ __forceinline__ i64 size(i64 group) const {
        const i64 n = splits.load(group);
        return n < 0 ? 0 : n > rows ? rows + 1 : n;      // sums stay small, and still differ from rows
    }
};

// Neighbouring rows of a group; or of the rows that follow the last group and belong to none.
struct RowSegment {
    i64 group;                   // -1: none
    i64 start;                   // the first element of the group in x
    i64 to;                      // and in the results; without a group the first one of this segment
    i64 given;                   // rows of the group in x
    i64 rows;                    // and in the results; without a group those of this segment
    i64 index;                   // which segment of the group, or of the rows without one, this is
    i64 before[2];               // how many units there are in all groups before this one
};

// Finds a segment of 2^rows_log2 rows, of the results where kAligns, else of x, in shared memory. One whole
// warp calls it. shifts: units of 2^shift rows, of which a group has as many as its rows start; counted where
// kCounts.
template <bool kCounts, bool kAligns>
__device__ __forceinline__ void find_segment(const RowGroups& p, i64 segment, u32 rows_log2, u32 first_shift,
                                             u32 second_shift, RowSegment& found) {
    constexpr int kPerLane = 4;
    const int lane = threadIdx.x % 32;
    const auto least = [](i64 a, i64 b) { return a < b ? a : b; };
    // Unsigned, for fewer instructions: with a few more NVRTC no longer advances a pointer from row to row of
    // the tile that follows, but keeps the offsets of its 32 rows, in 64 registers.
    const auto units = [](i64 rows, u32 shift) {
        return (i64)(((u64)rows + ((u64)1 << shift) - 1) >> shift);
    };
    const auto segments_of = [&](i64 rows) { return units(rows, rows_log2); };
    const auto in_results = [&](i64 size) { return kAligns ? p.aligned(size) : size; };
    i64 round_start = 0, round_segment = 0, round_units[2] = {};     // before this round's groups
    i64 to = 0;                                          // this lane's part of the result rows before
    bool reached = false;
    for (i64 round = 0; round < p.splits.groups && !reached; round += 32 * kPerLane) {
        i64 size[kPerLane], rows = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) rows += size[u] = p.size(round + lane * kPerLane + u);
        const i64 end = warp_prefix_sum(rows);
        i64 start = least(round_start + end - rows, p.rows), at = start, segments = 0, own_units[2] = {};
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            size[u] = least(size[u], p.rows - at);
            at += size[u];
            const i64 written = in_results(size[u]);
            if (kAligns) to += written;
            segments += segments_of(written);
            if (!kCounts) continue;
            own_units[0] += units(written, first_shift), own_units[1] += units(written, second_shift);
        }
        const i64 end_segment = warp_prefix_sum(segments);
        i64 own_segment = round_segment + end_segment - segments, before[2] = {}, end_units[2] = {};
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                end_units[i] = warp_prefix_sum(own_units[i]);
                before[i] = round_units[i] + end_units[i] - own_units[i];
            }
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 written = in_results(size[u]), own_segments = segments_of(written);
            if (segment >= own_segment && segment < own_segment + own_segments) {
                found.group = round + lane * kPerLane + u, found.start = start * p.columns;
                found.given = size[u], found.index = segment - own_segment;
                found.before[0] = before[0], found.before[1] = before[1];
            }
            own_segment += own_segments;
            start += size[u];
            if (kCounts) before[0] += units(written, first_shift), before[1] += units(written, second_shift);
        }
        round_start = least(round_start + __shfl_sync(~0u, end, 31), p.rows);
        round_segment += __shfl_sync(~0u, end_segment, 31);
        reached = segment < round_segment;
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) round_units[i] += __shfl_sync(~0u, end_units[i], 31);
    }
    __syncwarp();
    const bool aligns = kAligns && p.align > 1;
    if (aligns) {                                // here, where the registers of the other sums are free
        if (reached) {
            to = 0;
            // None of these groups ends short: x has rows beyond them.
            for (i64 g = lane; g < found.group; g += 32) to += p.aligned(p.size(g));
        }
        to = __shfl_sync(~0u, warp_prefix_sum(to), 31);
    }
    if (lane != 0) return;
    if (!reached) {
        const i64 all = kAligns ? p.result_rows : p.rows, own_segment = segment - round_segment;
        to = least((aligns ? to : round_start) + (own_segment << rows_log2), all);
        found = {-1, 0, to * p.columns, 0, left_of(all - to, 1 << rows_log2), own_segment,
                 {round_units[0], round_units[1]}};
        return;
    }
    found.rows = in_results(found.given);
    found.to = aligns ? to * p.columns : found.start;
    if (!p.offsets) return;
    found.start = found.to = p.offsets[found.group];
    if (found.start < 0 || found.start > (p.rows - found.rows) * p.columns ||
        (p.columns && found.start % p.columns))
        found.start = found.to = 0, found.rows = 0;
}

constexpr u32 kSegmentWords = sizeof(RowSegment) / sizeof(u32);
static_assert(kSegmentWords == 16, "half a warp; also in calls/row_segments.py");
// Loads a segment that find_segment() has found before.
__device__ __forceinline__ void load_segment(const RowGroups& p, i64 segment, RowSegment& found) {
    const u32* const from = reinterpret_cast<const u32*>(p.segments + segment);
    if (threadIdx.x % 32 < kSegmentWords)
        reinterpret_cast<u32*>(&found)[threadIdx.x % 32] = load_read_only(from + threadIdx.x % 32);
    __syncwarp();
}

// Where the scales of groups of rows go: those of one group after those of another, each padded by itself,
// for as many rows of blocks as there are blocks down the group.
struct GroupScales {
    u32 block_shift;             // a block has 2^block_shift rows
    u32 unit_shift;              // a group counts as a multiple of 2^unit_shift rows
    i64 unit;                    // scales of that many rows
    i64 all;                     // stored, past the last group too

    __device__ __forceinline__ i64 units(i64 rows) const {
        return (rows + ((i64)1 << unit_shift) - 1) >> unit_shift;
    }
    // Rows of blocks of a group, padding included.
    __device__ __forceinline__ i64 block_rows(i64 rows) const {
        return units(rows) << (unit_shift - block_shift);
    }

    // Writes zeros after the scales of `before` units. Each of `blocks` blocks of kThreads threads calls it.
    template <int kThreads, class T>
    __device__ __forceinline__ void clear_rest(T* to, i64 before, i64 block, i64 blocks) const {
        if (!to) return;
        const i64 first = before * unit + block * kThreads + threadIdx.x;
        for (i64 i = first; i < all; i += blocks * kThreads) as_global(to)[i] = T{};
    }
};

// Writes zeros in `rows` rows of `width` bytes, `stride` bytes apart. A whole block of kThreads threads calls
// it.
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

// Writes offsets, where none are given, and aligned sizes; reports sizes and offsets that are wrong. One
// whole warp calls it.
__device__ __forceinline__ void write_offsets(const RowGroups& p) {
    const int lane = threadIdx.x % 32;
    const auto least = [](i64 a, i64 b) { return a < b ? a : b; };
    const bool aligns = p.align > 1;
    i64 before = 0, to = 0;                      // rows of x, and where they are aligned of the results
    u32 wrong = 0;
    for (i64 round = 0; round < p.splits.groups; round += 32) {
        const i64 g = round + lane, size = p.size(g);
        const i64 end = before + warp_prefix_sum(size), start = end - size;
        if (p.splits.load(g) < 0) wrong |= kSplitNegative;
        if (end > p.rows) wrong |= kSplitSum;
        i64 first = least(start, p.rows), end_to = 0;
        if (aligns) {
            const i64 written = p.aligned(least(end, p.rows) - first);
            end_to = to + warp_prefix_sum(written);
            first = end_to - written;
            if (g < p.splits.groups && p.sizes_out) {
                if (p.splits.wide) static_cast<i64*>(p.sizes_out)[g] = written;
                else static_cast<i32*>(p.sizes_out)[g] = (i32)written;
            }
        }
        if (g < p.splits.groups) {
            if (p.offsets && p.offsets[g] != start * p.columns) wrong |= kSplitSum;
            if (p.offsets_out) p.offsets_out[g] = first * p.columns;
        }
        before = least(__shfl_sync(~0u, end, 31), p.rows + 1);
        to = __shfl_sync(~0u, end_to, 31);
    }
    if (lane == 0 && p.offsets_out)
        p.offsets_out[p.splits.groups] = (aligns ? to : least(before, p.rows)) * p.columns;
    report(p.splits.errors, wrong);
}
