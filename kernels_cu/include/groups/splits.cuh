// Sizes of groups that only the device knows. Groups are stored one after the other in whole tiles. One warp
// of a block finds the groups of the block's tiles by a scan over all sizes.
#pragma once
#include "memory/errors.cuh"
#include "tile/tile.cuh"

struct Splits {
    const void* sizes;           // [groups] i32, or i64 if `wide`; in elements
    i64 groups;
    u32* errors;                 // the device's sticky word
    u32 wide;

    __device__ __forceinline__ i64 load(i64 i) const {
        if (i >= groups) return 0;
        if (wide) return load_read_only(static_cast<const i64*>(sizes) + i);
        return load_read_only(static_cast<const i32*>(sizes) + i);
    }
};

__device__ constexpr u32 log2_of(u32 power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

// A tile and its group.
struct GroupTile {
    i64 start;                   // the tile's first line
    i64 group_tile, group_tiles; // the group's first tile, and how many tiles the group has
    int lines;                   // how many of the tile's lines exist
    bool past_groups;            // the tile follows the last group; no group has its lines
};

__device__ __forceinline__ i64 warp_prefix_sum(i64 value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_up_sync(~0u, value, step);
        if ((int)(threadIdx.x % 32) >= step) value += other;
    }
    return value;
}

// Writes tiles first to first + kTiles - 1 of `tiles` to shared memory. One whole warp calls it, before a
// barrier. A line is kElements elements of a size, rounded up, and a tile is kLines lines. All groups have at
// most `total` lines: a negative size counts as 0, and a group that goes past `total` ends there. check:
// reports such sizes.
template <int kElements, int kLines, int kTiles>
__device__ __forceinline__ void find_groups(const Splits& splits, i64 total, i64 first, i64 tiles, bool check,
                                            GroupTile* found) {
    constexpr int kPerLane = 4;
    const int lane = threadIdx.x % 32;
    i64 round_start = 0, round_tile = 0;                 // lines and tiles in all earlier rounds
    bool negative = false;
    constexpr i64 kPerRound = 32 * kPerLane;
    for (i64 round = 0; round < splits.groups && (check || round_tile < first + kTiles); round += kPerRound) {
        i64 size[kPerLane], lines = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 elements = splits.load(round + lane * kPerLane + u);
            negative |= elements < 0;
            const i64 whole = elements > 0 ? (elements - 1) / kElements + 1 : 0;
            size[u] = whole > total ? total + 1 : whole;     // Sums stay small and still exceed total.
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
            // These are the group's tiles among those that the block needs.
            const int end_here = left_of(tile + group_tiles - first, kTiles);
#pragma unroll 1
            for (int t = left_of(tile - first, kTiles); t < end_here; t++) {
                const i64 lines_before = (first + t - tile) * kLines;
                const int left = left_of(size[u] - lines_before, kLines);
                found[t] = {start + lines_before, tile, group_tiles, left, false};
            }
            tile += group_tiles;
            start += size[u];
        }
        round_start += __shfl_sync(~0u, end, 31);
        round_tile += __shfl_sync(~0u, end_tile, 31);
    }
    if (lane < kTiles && first + lane >= round_tile) {
        const i64 start = round_start + (first + lane - round_tile) * kLines;
        found[lane] = {start, round_tile, tiles - round_tile, left_of(total - start, kLines), true};
    }
    if (!check) return;
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (lane == 0)
        report(splits.errors, (any_negative ? kSplitNegative : 0u) | (round_start > total ? kSplitSum : 0u));
}

// Reports negative sizes, and sizes that add up to more than `total`. One whole warp calls it.
__device__ __forceinline__ void check_sizes(const Splits& splits, i64 total) {
    bool negative = false;
    i64 lines = 0;                               // clamped to total + 1 after every round
    for (i64 round = 0; round < splits.groups; round += 32) {
        const i64 size = splits.load(round + threadIdx.x % 32);
        negative |= size < 0;
        lines += __shfl_sync(~0u, warp_prefix_sum(size < 0 ? 0 : size > total ? total + 1 : size), 31);
        lines = lines > total ? total + 1 : lines;
    }
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (threadIdx.x % 32 == 0)
        report(splits.errors, (any_negative ? kSplitNegative : 0u) | (lines > total ? kSplitSum : 0u));
}
