// Groups stored one after the other in whole tiles. One warp of a block finds the groups of the block's tiles
// by a scan over all sizes, which only the device knows.
//
// A tile is kUnits units; a unit is kElements elements of a size, rounded up. For swizzled scales a unit is a
// line of the scale grid, or one of its blocks.
#pragma once
#include "groups/splits.cuh"

// A tile and its group.
struct GroupTile {
    i64 start;                   // first unit of the tile
    i64 group_tile, group_tiles; // the group's first tile, and its tiles
    int units;                   // existing units of the tile
    bool past_groups;            // the tile follows the last group; its units belong to none
};

// A lane's groups in a round of the scan.
template <int kElements, int kUnits>
struct TiledGroups {
    static constexpr int kCount = 4;
    i64 size[kCount];            // in units

    // Loads the sizes and returns their sum. A negative size counts as 0, and sets `negative`.
    __device__ __forceinline__ i64 load(const Splits& splits, i64 round, i64 total, bool& negative) {
        i64 sum = 0;
#pragma unroll
        for (int u = 0; u < kCount; u++) {
            const i64 elements = splits.load(round + threadIdx.x % 32 * kCount + u);
            negative |= elements < 0;
            const i64 whole = elements > 0 ? (elements - 1) / kElements + 1 : 0;
            size[u] = whole > total ? total + 1 : whole;     // sums stay small and still exceed total
            sum += size[u];
        }
        return sum;
    }
    static __device__ __forceinline__ i64 tiles_of(i64 units) { return (units + kUnits - 1) / kUnits; }

    // Clamps groups that go past `total`. Returns the number of tiles of all of them. start: first unit of
    // the first group.
    __device__ __forceinline__ i64 clamp_to(i64 total, i64 start) {
        i64 tiles = 0;
#pragma unroll
        for (int u = 0; u < kCount; u++) {
            if (size[u] > total - start) size[u] = total - start;
            tiles += tiles_of(size[u]);
            start += size[u];
        }
        return tiles;
    }

    // Writes the groups' tiles that are among tiles first to first + kTiles - 1. start, tile: first unit and
    // first tile of the first group.
    template <int kTiles>
    __device__ __forceinline__ void write(i64 start, i64 tile, i64 first, GroupTile* found) const {
#pragma unroll
        for (int u = 0; u < kCount; u++) {
            const i64 group_tiles = tiles_of(size[u]);
            const int end_here = left_of(tile + group_tiles - first, kTiles);
#pragma unroll 1
            for (int t = left_of(tile - first, kTiles); t < end_here; t++) {
                const i64 units_before = (first + t - tile) * kUnits;
                const int left = left_of(size[u] - units_before, kUnits);
                found[t] = {start + units_before, tile, group_tiles, left, false};
            }
            tile += group_tiles;
            start += size[u];
        }
    }
};

// Writes tiles first to first + kTiles - 1 of `tiles` to shared memory. Call from one whole warp, before a
// barrier. Groups have at most `total` units together: a negative size counts as 0, and a group that goes
// past `total` ends there. check: reports such sizes.
template <int kElements, int kUnits, int kTiles>
__device__ __forceinline__ void find_groups(const Splits& splits, i64 total, i64 first, i64 tiles, bool check,
                                            GroupTile* found) {
    using Groups = TiledGroups<kElements, kUnits>;
    const int lane = threadIdx.x % 32;
    i64 round_start = 0, round_tile = 0;                 // units and tiles in all earlier rounds
    bool negative = false;
    constexpr i64 kPerRound = 32 * Groups::kCount;
    for (i64 round = 0; round < splits.groups && (check || round_tile < first + kTiles); round += kPerRound) {
        Groups groups;
        const i64 units = groups.load(splits, round, total, negative);
        const i64 end = warp_prefix_sum(units);
        i64 start = round_start + end - units;
        start = smaller(start, total);
        const i64 own_tiles = groups.clamp_to(total, start), end_tile = warp_prefix_sum(own_tiles);
        groups.template write<kTiles>(start, round_tile + end_tile - own_tiles, first, found);
        round_start += __shfl_sync(~0u, end, 31);
        round_tile += __shfl_sync(~0u, end_tile, 31);
    }
    if (lane < kTiles && first + lane >= round_tile) {
        const i64 start = round_start + (first + lane - round_tile) * kUnits;
        found[lane] = {start, round_tile, tiles - round_tile, left_of(total - start, kUnits), true};
    }
    if (!check) return;
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (lane == 0)
        report(splits.errors, (any_negative ? kSplitNegative : 0u) | (round_start > total ? kSplitSum : 0u));
}
