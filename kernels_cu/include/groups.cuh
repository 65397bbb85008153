// Groups of consecutive lines (or blocks of elements) whose sizes only the device knows, stored one after the other in whole tiles.
// A block of threads finds the groups of its tiles by a scan over all sizes: one warp, kPerLane sizes per lane and round.
#pragma once
#include "errors.cuh"
#include "memory.cuh"

struct Splits {
    const void* sizes;           // [groups] i32, or i64 where `wide`; in elements
    i64 groups;
    u32* errors;                 // the device's word
    u32 wide;

    __device__ __forceinline__ i64 load(i64 i) const {
        if (i >= groups) return 0;
        return wide ? load_read_only(static_cast<const i64*>(sizes) + i) : load_read_only(static_cast<const i32*>(sizes) + i);
    }
};

// What belongs to one tile.
struct GroupTile {
    i64 start;                   // its first line
    i64 group_tile, group_tiles; // the first tile of its group, and how many the group has
    i64 group_lines;             // of its group; of a lost one, that no group covers
    int lines;                   // how many of its lines there are
    bool lost;                   // no group's: past the last one. `lines` are then those that no group covers
};

__device__ __forceinline__ i64 warp_prefix_sum(i64 value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_up_sync(~0u, value, step);
        if ((int)(threadIdx.x % 32) >= step) value += other;
    }
    return value;
}

// Tiles first to first + kTiles - 1 of `tiles`, in shared memory; by one whole warp, before a barrier. A line is kElements elements of
// a size (a started one counts), a tile kLines lines; there are `total` lines. A negative size counts as 0, a group that goes past
// `total` ends there; `check`: report these, and lines left over, to the device's word.
template <int kElements, int kLines, int kTiles>
__device__ __forceinline__ void find_groups(const Splits& splits, i64 total, i64 first, i64 tiles, bool check, GroupTile* found) {
    constexpr int kPerLane = 4;
    const int lane = threadIdx.x % 32;
    i64 round_start = 0, round_tile = 0;                             // lines and tiles before this round's groups
    bool negative = false;
    for (i64 round = 0; round < splits.groups && (check || round_tile < first + kTiles); round += 32 * kPerLane) {
        i64 size[kPerLane], lines = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 elements = splits.load(round + lane * kPerLane + u);
            negative |= elements < 0;
            const i64 whole = elements > 0 ? (elements - 1) / kElements + 1 : 0;
            size[u] = whole > total ? total + 1 : whole;             // sums stay small, and still differ from total
            lines += size[u];
        }
        const i64 end = warp_prefix_sum(lines);
        i64 start = round_start + end - lines, own_tiles = 0;
        start = start < total ? start : total;
        i64 at = start;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            if (size[u] > total - at) size[u] = total - at;
            own_tiles += (size[u] + kLines - 1) / kLines;
            at += size[u];
        }
        const i64 end_tile = warp_prefix_sum(own_tiles);
        i64 tile = round_tile + end_tile - own_tiles;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 group_tiles = (size[u] + kLines - 1) / kLines;
            // This group's among the tiles that are looked for.
            const int end_here = left_of(tile + group_tiles - first, kTiles);
#pragma unroll 1
            for (int t = left_of(tile - first, kTiles); t < end_here; t++) {
                const i64 lines_before = (first + t - tile) * kLines;
                found[t] = {start + lines_before, tile, group_tiles, size[u], left_of(size[u] - lines_before, kLines), false};
            }
            tile += group_tiles;
            start += size[u];
        }
        round_start += __shfl_sync(~0u, end, 31);
        round_tile += __shfl_sync(~0u, end_tile, 31);
    }
    if (lane < kTiles && first + lane >= round_tile) {
        const i64 start = round_start + (first + lane - round_tile) * kLines;
        found[lane] = {start, round_tile, tiles - round_tile, total - round_start, left_of(total - start, kLines), true};
    }
    if (!check) return;
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (lane == 0) report(splits.errors, (any_negative ? kSplitNegative : 0u) | (round_start != total ? kSplitSum : 0u));
}
