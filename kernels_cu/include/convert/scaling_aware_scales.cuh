// Scales of a tile, for the scaling-aware transpose (scaling_aware.cu): loads them and computes f16 factors.
#pragma once
#include "convert/scaling_aware_store.cuh"
#include "numerics/e8m0.cuh"
#include "scale/power_of_two.cuh"

using Pack = Pairs<IN>;
constexpr int kTilesAhead = 1;                           // tiles in flight beside the current one
// Plus the tile before, which some warps still use. GATHER: all of a thread block's tiles, and one past the
// last, for which it searches too.
constexpr int kMostTiles = 4, kTilePlaces = kTilesAhead + (GATHER ? kMostTiles + 1 : 2);
constexpr int kUnitsPerWarp = (kUnits + kWarps - 1) / kWarps, kLaneRows = BLOCK / 32;

constexpr int kLift = TARGET == 0 && Pack::kEmax == 8 ? 7 : 0;      // 448 * 2^7 has f16's largest exponent
constexpr int kMostDoublings = 15, kMostHalvings = 24 + kLift;       // powers of two that f16 has
constexpr int kLeastNormal = -14 - kLift;
constexpr int kUnitGap = 8;                              // between scale 1 of rows of zeros and other scales

// Facts about a unit's scales. e_ref: the exponent that its elements are computed relative to.
enum UnitFacts : u32 {
    kGeneral = 1,                // f16 lacks some power of two that the unit needs
    // Rows with scale 1 do not count for e_ref, because all other scales are far smaller, and a row of zeros
    // usually has scale 1. If such a row holds anything but zeros, the unit is kGeneral.
    kExcluded = 2,
    // Another fact holds or was not examined. With TARGET 1 no row with the largest scale is known then.
    kUnusual = 4,
    // A scale of the first strip is no power of two; the next three bits are those of the other strips.
    kWrong = 16,
};
struct Unit {
    int e_ref;
    u32 facts;                   // UnitFacts; with TARGET 1, bits from 8 on: a row with scale 2^e_ref
};

struct Shared {
    Unit unit[2][kUnits];                                // ordered by row of blocks, then by column of blocks
    __align__(16) short exponent[2][kColumnBlocks][kTileRows];
    // 2^(e - e_ref) of two rows per word, as f16; NaN for a wrong scale
    __align__(16) u32 factor[2][kColumnBlocks][kTileRows / 2];
    ExpertTile tile[kTilePlaces];
    __align__(16) u8 halves[kWaits ? kWarps * kHalvesBytes : 16];    // halves of sectors, see store_aligned()
};

// The scales of a tile in registers, until they go to shared memory. A warp has the scales of one or two
// units, a lane kLaneRows rows of each.
struct TileScales {
    u32 bits[kUnitsPerWarp][kLaneRows];

    static __device__ __forceinline__ int unit(int n) { return n * kWarps + threadIdx.x / 32; }
    static __device__ __forceinline__ int column_block(int n) { return unit(n) % kColumnBlocks; }
    static __device__ __forceinline__ int row(int n) {
        return unit(n) / kColumnBlocks * BLOCK + threadIdx.x % 32 * kLaneRows;
    }
    static __device__ __forceinline__ bool has(int n) { return kUnits % kWarps == 0 || unit(n) < kUnits; }

    // Loads the scales of a tile; absent ones are 0.
    __device__ __forceinline__ void load(const ScalingAwareParams& p, const ExpertTile& tile) {
#pragma unroll
        for (int n = 0; n < kUnitsPerWarp; n++) {
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) bits[n][r] = 0;
            const int first = tile.row_in_strip(row(n));
            const int block = column_block(n) + tile.strip_of(row(n)) * kColumnBlocks;
            if (!has(n) || tile.past_groups || block >= tile.scale_blocks) continue;
            const i64 at = first * p.scale_row + block * p.scale_block;
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                if (first + r >= tile.rows) continue;
                if constexpr (kMx) bits[n][r] = load_read_only(tile.scales + at);
                else
                    bits[n][r] = load_read_only(reinterpret_cast<const u32*>(tile.scales) + at
                                                + r * p.scale_row);
            }
        }
    }

    // Writes factors and exponents to shared memory, and the scales to the row-wise result.
    __device__ __forceinline__ void write(const ScalingAwareParams& p, const ExpertTile& tile, int buffer,
                                          Shared& shared) const {
#pragma unroll
        for (int n = 0; n < kUnitsPerWarp; n++) {
            if (!has(n)) continue;
            const int row = TileScales::row(n), first = tile.row_in_strip(row);
            const int block = column_block(n) + tile.strip_of(row) * kColumnBlocks;
            const int exist = block < tile.scale_blocks ? tile.rows - first : 0;
            int e[kLaneRows], most;
            u32 factor[kLaneRows];
            Unit* const to = &shared.unit[buffer][unit(n)];
            if (find_exponents(n, exist, e, most)) write_unusual(p, tile, n, exist, e, factor, to);
            else write_usual(e, most, factor, to);
            u16* const factors = reinterpret_cast<u16*>(shared.factor[buffer][column_block(n)]) + row;
            short* const exponents = shared.exponent[buffer][column_block(n)] + row;
            if constexpr (kMx) factors[0] = (u16)factor[0], exponents[0] = (short)e[0];
            else {
                *reinterpret_cast<uint2*>(factors) =
                    make_uint2(factor[0] | factor[1] << 16, factor[2] | factor[3] << 16);
                *reinterpret_cast<uint2*>(exponents) =
                    make_uint2((u32)e[0] & 0xffffu | (u32)e[1] << 16, (u32)e[2] & 0xffffu | (u32)e[3] << 16);
                if (tile.row_scales && exist > 0) store_row_scales(tile, n, block, first);
            }
        }
    }

private:
    // Finds log2 of this lane's scales of unit n, and the unit's largest one. Returns true unless all scales
    // are powers of two whose factors f16 represents. exist: existing rows from the lane's first on.
    __device__ __forceinline__ bool find_exponents(int n, int exist, int (&e)[kLaneRows], int& most) const {
        int least = kNoScale;
        bool unusual = false;
        most = kNothing;
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            e[r] = kNothing;
            if (r >= exist || (!kMx && bits[n][r] == 0)) continue;
            e[r] = (int)(kMx ? bits[n][r] : bits[n][r] >> 23) - 127;
            unusual |= kMx ? bits[n][r] == kNanE8m0
                           : (bits[n][r] & 0x807fffffu) || e[r] < -126 || e[r] > kHighest;
            most = larger(most, e[r]), least = smaller(least, e[r]);
        }
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
        unusual |= most - least > -kLeastNormal || most - kMostDoublings <= kLowest
                   || (most == 0 && least < -kUnitGap);
        return __any_sync(~0u, unusual);
    }

    // Writes the facts of a unit and computes its factors, unless find_exponents() returns true.
    static __device__ __forceinline__ void write_usual(const int (&e)[kLaneRows], int most,
                                                       u32 (&factor)[kLaneRows], Unit* to) {
        u32 facts = 0;
        if constexpr (TARGET == 1) {
            int at = kLaneRows;
#pragma unroll
            for (int r = kLaneRows - 1; r >= 0; r--)
                if (e[r] == most) at = r;
            const u32 lanes = __ballot_sync(~0u, at < kLaneRows);
            facts = first_row(lanes, at) << 8;
        }
        if (threadIdx.x % 32 == 0) *to = {most, facts};
#pragma unroll
        for (int r = 0; r < kLaneRows; r++)
            factor[r] = e[r] == kNothing ? 0 : (u32)(e[r] - most + 15 + kLift) << 10;
    }

    // Returns the unit's row for row `at` of the first of these lanes.
    static __device__ __forceinline__ u32 first_row(u32 lanes, int at) {
        const int lane = __ffs(lanes) - 1;
        return lane * kLaneRows + (u32)__shfl_sync(~0u, at, lane);
    }

    // Stores this lane's scales of a block to the row-wise result: rows rounded up to four, with scale 0 for
    // absent ones. first: the lane's first row in its strip.
    __device__ __forceinline__ void store_row_scales(const ExpertTile& tile, int n, int block,
                                                     int first) const {
        u32* const to = tile.row_scales + (block * tile.row_scale_pitch + first);
        if (reinterpret_cast<u64>(tile.row_scales) % 16 == 0)
            Chunk<f32, 4>{{bits[n][0], bits[n][1], bits[n][2], bits[n][3]}}.store_whole(to);
        else
#pragma unroll
            for (int r = 0; r < 4; r++) to[r] = bits[n][r];
    }

    // Writes the facts of a unit and computes its factors, for any scales and any number of rows.
    __device__ __forceinline__ void write_unusual(const ScalingAwareParams& p, const ExpertTile& tile, int n,
                                                  int exist, int (&e)[kLaneRows], u32 (&factor)[kLaneRows],
                                                  Unit* to) const {
        int most = kNothing, least = kNoScale;
        bool wrong = false;
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            e[r] = r < exist ? exponent_of(bits[n][r], kMx) : kNothing;
            wrong |= e[r] == kNoScale;
            most = larger(most, e[r] == kNoScale ? kNothing : e[r]);
            least = smaller(least, e[r] == kNothing ? kNoScale : e[r]);
        }
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
        const u32 wrong_lanes = __ballot_sync(~0u, wrong);
        int e_ref = most == kNothing ? 0 : most;
        const bool excludes = most == 0 && least < -kUnitGap && exclude_scale_1(e, e_ref, least);
        if (threadIdx.x % 32 == 0) {
            const bool general = least < e_ref - kMostHalvings || e_ref - kMostDoublings <= kLowest;
            u32 facts = (general ? kGeneral : 0u) | (excludes ? kExcluded : 0u) | kUnusual;
#pragma unroll
            for (int part = 0; part < 4; part++)                     // a lane's rows are of one strip
                if (wrong_lanes >> part * 8 & 0xffu) facts |= kWrong << tile.strip_of(part * 8 * kLaneRows);
            *to = {e_ref, facts};
            if (!kMx && wrong_lanes) report(p.splits.errors, kScaleNotPowerOfTwo);
        }
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            const bool none = e[r] == kNothing || (excludes && e[r] == 0);
            const int power = clamp(e[r] - e_ref, -kMostHalvings, 0) + kLift;
            factor[r] = e[r] == kNoScale ? kNanF16 : none ? 0 : Halves::power(power);
        }
    }

    // If 1 is the largest scale (usually that of rows of zeros): finds the largest and the least exponent of
    // the other rows. Returns true, and makes these the unit's, if that largest one is far smaller.
    static __device__ __forceinline__ bool exclude_scale_1(const int (&e)[kLaneRows], int& e_ref,
                                                           int& least) {
        int most_but_0 = kNothing, least_but_0 = kNoScale;
#pragma unroll
        for (int r = 0; r < kLaneRows; r++)
            if (e[r] < 0 && e[r] != kNothing) {
                most_but_0 = larger(most_but_0, e[r]);
                least_but_0 = smaller(least_but_0, e[r]);
            }
        most_but_0 = __reduce_max_sync(~0u, most_but_0);
        least_but_0 = __reduce_min_sync(~0u, least_but_0);
        const bool excludes = most_but_0 < -kUnitGap;
        if (excludes) e_ref = most_but_0, least = least_but_0;
        return excludes;
    }
};
