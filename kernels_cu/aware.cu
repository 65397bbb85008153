// Scaling-aware transpose (docs/numerics.md, section 4): FP8 with a power-of-two scale for every BLOCK elements of a row becomes FP8 with
// one for every BLOCK elements of a column, stored transposed, without going through a wider type.
//
//   out = narrow(v * s / t), one rounding         s = 2^e, the element's scale; t, a power of two, that of the new block
//   TARGET 0 (column): t = smallest power of two >= max |v| * s / fp8_max over the block (BLOCK rows of a column)
//   TARGET 1 (tile):   t = largest s of a tile's rows (BLOCK x BLOCK) that hold anything but zeros
//   s = 0 (unused rows of `permute`): out = narrow(v * 0), no part of any target
//
// data           FP8 [rows, columns] (IN)                       scales    compact [rows, ceil(columns / BLOCK)]: f32 (BLOCK 128), E8M0 (32)
// out            [columns, rows]; with splits (rows per expert, on the device) flat, [columns, rows of the expert] one after the other
// target_scales  [blocks along the rows of every expert, target_pitch], padded and past the last expert 0
// row_scales     f32, `scales` transposed: of every expert [ceil(columns / BLOCK), rows rounded up to 4], padded and past the last expert
//                with 0, row_scale_rows for each of ceil(columns / BLOCK) in all; or null
//
// A tile is 128 rows x TILE_COLUMNS columns and begins at an expert's first row or a multiple of 128 rows on. Tiles are counted down the
// rows of an expert, then along its strips of TILE_COLUMNS columns, then expert by expert; a block of threads does `run` of them, one after
// the other, while the next one is on its way into shared memory. A warp has 16 columns of the tile and a thread 16 rows x 4 columns, eight
// threads one below the other: what a column's block holds is found by exchanges inside the warp, and they store 128 bytes of a column.
//
// Arithmetic is in f16, relative to the largest scale 2^e_ref of a block's rows. Of v * 2^(e - t) bits are lost only where it is below
// 2^-20 (e4m3fn) and becomes 0 anyway, if f16 has the powers of two that it takes. Blocks of which that is not true, which are rare, take a
// way of their own, element by element.
//   e4m3fn, column: 2^(e - e_ref + kLift), whose products with v are looked at for the target and then multiplied by 2^(e_ref - kLift - t).
//                   kLift makes use of all of f16: the first product, of four bits, loses some only below 2^(e_ref - 27); t >= e_ref - 15
//   e5m2, column:   has no room for a lift; v * (2^(e - e_ref) * 2^(e_ref - t))
//   tile:           v * (2^(e - e_ref) * 2^(e_ref - t)), where t is that of the row with the largest scale unless it holds nothing
//
// Rows of the output begin anywhere: experts have any number of rows. Then the eight threads shift what they have to the next multiples of
// 16 bytes, each with the bytes of the one above. Where a tile is followed by the next one down, the bytes after the last multiple wait in
// shared memory for it.
//
// ALIGNED: 1 where rows of the data allow 16-byte loads. Bytes moved per element: 2, and 8 / BLOCK of f32 scales.
#include "e8m0.cuh"
#include "groups.cuh"
#include "pairs.cuh"
#include "tile.cuh"

struct AwareParams {
    const u8* data;
    const void* scales;
    u8* out;
    void* target_scales;
    float* row_scales;
    Splits splits;               // groups -1: there are none, all rows are one expert's
    i64 rows, columns;
    i64 scale_columns;           // of the compact scales
    i64 target_pitch, target_rows;
    i64 row_scale_rows;
    i64 down;                    // tiles: more than all experts take, if there are splits
    u32 strips, run;
    u32 vector;                  // without ALIGNED: whether rows of the data allow 8-byte loads
};

using Pack = Pairs<IN>;
constexpr bool kMx = BLOCK == 32;
constexpr int kScaleBytes = kMx ? 1 : 4;
constexpr int kTileRows = 128, kWarpColumns = 16;
constexpr int kWarps = TILE_COLUMNS / kWarpColumns, kThreads = kWarps * 32;
constexpr int kRawBytes = kTileRows * TILE_COLUMNS + 16;
constexpr int kAhead = 1;                                            // tiles on their way while one is worked on
constexpr int kColumnBlocks = TILE_COLUMNS / BLOCK, kUnits = kTileRows / BLOCK * kColumnBlocks;     // units: blocks of BLOCK x BLOCK
constexpr int kRowBlocks = kTileRows / BLOCK;
constexpr int kUnitsPerWarp = (kUnits + kWarps - 1) / kWarps, kLaneRows = BLOCK / 32;
constexpr int kPatches = kTileRows / 16;                             // threads below one another
constexpr int kUnitPatches = BLOCK / 16;                             // of them in a unit
// On an H200 a multiprocessor keeps 768 threads in flight, which spill on sm_100 and sm_120 and with the integer conversions.
#if defined(CUPY_FP8_HARDWARE_CVT) && __CUDA_ARCH__ < 1000
constexpr int kThreadsInFlight = ALIGNED ? 768 : 512;
#else
constexpr int kThreadsInFlight = 512;
#endif
constexpr int kBlocks = kThreadsInFlight / kThreads;
static_assert(kMx || BLOCK == 128, "blocks of 32 or 128");

constexpr int kNoScale = 1 << 14;                                    // the exponent of a scale that is no power of two
constexpr int kNothing = -kNoScale;                                  // of no scale at all, or scale 0: v * 0 is what there is
constexpr int kLowest = -127, kHighest = 127;                        // column targets
constexpr int kLift = TARGET == 0 && Pack::kEmax == 8 ? 7 : 0;       // 448 * 2^7 has the largest exponent of f16
constexpr int kMostUp = 15, kMostDown = 24 + kLift;                  // powers of two that f16 has
constexpr int kLeastNormal = -14 - kLift;
constexpr int kUnitGap = 8;                                          // between scale 1 of rows of zeros and the other scales

__device__ __forceinline__ int clamp(int v, int low, int high) { return v < low ? low : v > high ? high : v; }
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

// log2 of a scale, kNoScale where it is no power of two, kNothing of 0.
__device__ __forceinline__ int exponent_of(u32 bits) {
    if (kMx) return bits == kNanE8m0 ? kNoScale : (int)bits - 127;
    if (bits == 0) return kNothing;
    int bias = 127;
    if (bits < 0x00800000u) bits = as_bits(mul_rn(as_float(bits), as_float((127u + 64) << 23))), bias += 64;    // a subnormal
    return bits - 1u < 0x7f7fffffu && !(bits & 0x7fffffu) ? (int)(bits >> 23) - bias : kNoScale;
}

// Where a tile is, and the expert whose it is.
struct Place {
    i64 group_start, group_lines;                                    // rows of the data
    i64 group_down;                                                  // tiles of the expert along its rows
    i64 group_block, group_scales;                                   // its first rows of target scales and of row scales
    i64 tile;                                                        // of group_down
    // What follows for the tile:
    const u8* from;
    const u8* scales;                                                // of its first row and block
    u8* to;                                                          // where its first column goes, the next one group_lines on
    u8* targets;                                                     // the target scale of its first block and column
    u32* row_scales;                                                 // that of its first row and block, or null; the next block a pitch on
    i64 row_scale_pitch;
    u32 strip;
    int lines, columns, scale_blocks;                                // how many rows, columns and blocks along a row there are
    bool lost;                                                       // no expert's
    bool aligned;                                                    // columns go to multiples of 16 bytes
    bool plain;                                                      // target scales: all are there, four of them one store
    bool continued, continues;                                       // by the tile above, by the one below: where columns begin anywhere

    __device__ __forceinline__ i64 start() const { return group_start + tile * kTileRows; }
    __device__ __forceinline__ i64 column() const { return (i64)strip * TILE_COLUMNS; }
    __device__ __forceinline__ bool is_last_down() const { return tile + 1 == group_down; }

    // more: another tile follows in the run.
    __device__ __forceinline__ void settle(const AwareParams& p, bool first, bool more) {
        const i64 first_column = column();
        lines = left_of(group_lines - tile * kTileRows, kTileRows), columns = left_of(p.columns - first_column, TILE_COLUMNS);
        scale_blocks = left_of(p.scale_columns - first_column / BLOCK, kColumnBlocks);
        from = p.data + start() * p.columns + first_column;
        scales = static_cast<const u8*>(p.scales) + (start() * p.scale_columns + first_column / BLOCK) * kScaleBytes;
        to = p.out + group_start * p.columns + first_column * group_lines + tile * kTileRows;
        targets = static_cast<u8*>(p.target_scales) + ((group_block + tile * kRowBlocks) * p.target_pitch + first_column) * kScaleBytes;
        row_scale_pitch = (group_lines + 3) / 4 * 4, row_scales = nullptr;
        if (p.row_scales && !lost)
            row_scales = reinterpret_cast<u32*>(p.row_scales) + group_scales * p.scale_columns + first_column / BLOCK * row_scale_pitch
                         + tile * kTileRows;
        aligned = group_lines % 16 == 0 && reinterpret_cast<u64>(to) % 16 == 0;
        plain = columns == TILE_COLUMNS && p.target_pitch % 4 == 0 && reinterpret_cast<u64>(targets) % (4 * kScaleBytes) == 0;
        continued = !first && tile > 0, continues = more && !is_last_down();
    }

    // To the tile below.
    __device__ __forceinline__ void step_down(const AwareParams& p, bool more) {
        tile++, lines = left_of(group_lines - tile * kTileRows, kTileRows);
        from += kTileRows * p.columns, scales += kTileRows * p.scale_columns * kScaleBytes, to += kTileRows;
        targets += kRowBlocks * p.target_pitch * kScaleBytes;
        if (row_scales) row_scales += kTileRows;
        continued = true, continues = more && !is_last_down();
    }
};

// The runs of kUnit rows, a started one of an expert counting as one, that the experts have which end at or before row `end`; by one warp.
template <int kUnit>
__device__ __forceinline__ i64 count_runs(const Splits& splits, i64 total, i64 end) {
    i64 at = 0, runs = 0;
    for (i64 round = 0; round < splits.groups && at < end; round += 32) {
        i64 size = splits.load(round + threadIdx.x % 32);
        size = size < 0 ? 0 : size > total ? total : size;
        const i64 sum = warp_prefix_sum(size);
        i64 first = at + sum - size, last = at + sum;
        first = first < total ? first : total, last = last < total ? last : total;      // as find_groups cuts them short
        if (last <= end) runs += (last - first + kUnit - 1) / kUnit;
        at += __shfl_sync(~0u, sum, 31);
    }
    return __shfl_sync(~0u, warp_prefix_sum(runs), 31);
}

// The place of a tile, the first one of a run or of an expert; by one warp, before a barrier.
__device__ __forceinline__ void find_place(const AwareParams& p, i64 tile, bool first, bool more, Place* place) {
    GroupTile group{0, 0, p.down, p.rows, 0, false};
    const i64 across = tile / p.strips;
    if (p.splits.groups >= 0) {
        __shared__ GroupTile found;
        find_groups<1, kTileRows, 1>(p.splits, p.rows, across, p.down, tile == 0, &found);
        __syncwarp();
        group = found;
        group.start -= (across - group.group_tile) * kTileRows;
    }
    i64 block = group.group_tile, scales = 0;
    if (p.splits.groups >= 0) {
        if (kMx) block = count_runs<BLOCK>(p.splits, p.rows, group.start);
        else scales = 4 * count_runs<4>(p.splits, p.rows, group.start);
    }
    if (threadIdx.x % 32 == 0) {
        const i64 in_group = tile - group.group_tile * p.strips, strip = in_group / group.group_tiles;
        Place found{};
        found.group_start = group.start, found.group_lines = group.lost ? p.rows - group.start : group.group_lines;
        found.group_down = group.group_tiles, found.group_block = block, found.group_scales = scales;
        found.tile = in_group - strip * group.group_tiles, found.strip = (u32)strip, found.lost = group.lost;
        found.settle(p, first, more);
        *place = found;
    }
}

// The place of the tile after that of `place`; by one warp.
__device__ __forceinline__ void find_next(const AwareParams& p, i64 tile, const Place& place, bool more, Place* next) {
    if (place.is_last_down() && place.strip + 1 == p.strips) return find_place(p, tile, false, more, next);
    if (threadIdx.x % 32 == 0) {
        Place found = place;
        if (!place.is_last_down()) found.step_down(p, more);
        else {
            found.tile = 0, found.strip++;
            found.settle(p, false, more);
        }
        *next = found;
    }
}

// What is known of a unit's scales: the exponent that its elements are computed relative to, and whether
enum UnitFacts : u32 {
    kGeneral = 1,                // f16 does not have all powers of two that it takes
    kExcluded = 2,               // the rows with scale 1 do not count for e_ref, since they are alone with one so large: as a rule a row of
                                 // zeros has scale 1. If one holds anything, the unit is kGeneral
    kWrong = 4,                  // a scale is no power of two
    kUnusual = 8,                // any of these, or scales that were not looked at for them: TARGET 1 knows no row that has the largest
};
struct Unit {
    int e_ref;
    u32 facts;                                                       // and TARGET 1: from bit 8 on, a row of the unit with that scale
};

struct Shared {
    Unit unit[2][kUnits];                                            // by row of blocks, then by column of blocks
    __align__(16) short exponent[2][kColumnBlocks][kTileRows];
    __align__(16) u32 factor[2][kColumnBlocks][kTileRows / 2];       // 2^(e - e_ref) of two rows as f16: NaN for a wrong scale
    __align__(16) uint4 waiting[2][TILE_COLUMNS];                    // of every column, the last 16 rows of the tile above
    Place place[kAhead + 2];
};

// The scales of a tile on their way into shared memory: a warp has those of a unit or two, a lane kLaneRows rows of it.
struct TileScales {
    u32 bits[kUnitsPerWarp][kLaneRows];

    static __device__ __forceinline__ int unit(int n) { return n * kWarps + threadIdx.x / 32; }
    static __device__ __forceinline__ int column_block(int n) { return unit(n) % kColumnBlocks; }
    static __device__ __forceinline__ int row(int n) { return unit(n) / kColumnBlocks * BLOCK + threadIdx.x % 32 * kLaneRows; }
    static __device__ __forceinline__ bool has(int n) { return kUnits % kWarps == 0 || unit(n) < kUnits; }

    __device__ __forceinline__ void load(const AwareParams& p, const Place& place) {
#pragma unroll
        for (int n = 0; n < kUnitsPerWarp; n++) {
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) bits[n][r] = 0;
            if (!has(n) || place.lost || column_block(n) >= place.scale_blocks) continue;
            const i64 at = row(n) * p.scale_columns + column_block(n);
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                if (row(n) + r >= place.lines) continue;
                if constexpr (kMx) bits[n][r] = load_read_only(place.scales + at);
                else bits[n][r] = load_read_only(reinterpret_cast<const u32*>(place.scales) + at + r * p.scale_columns);
            }
        }
    }

    // What they say to shared memory, and the scales themselves to where rows have them.
    __device__ __forceinline__ void write(const AwareParams& p, const Place& place, int slot, Shared& shared) const {
#pragma unroll
        for (int n = 0; n < kUnitsPerWarp; n++) {
            if (!has(n)) continue;
            const int row = TileScales::row(n), block = column_block(n), exist = block < place.scale_blocks ? place.lines - row : 0;
            int e[kLaneRows], most = kNothing, least = kNoScale;
            bool rare = false;
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                e[r] = kNothing;
                if (r >= exist || (!kMx && bits[n][r] == 0)) continue;
                e[r] = (int)(kMx ? bits[n][r] : bits[n][r] >> 23) - 127;
                rare |= kMx ? bits[n][r] == kNanE8m0 : (bits[n][r] & 0x807fffffu) || e[r] < -126 || e[r] > kHighest;
                most = larger(most, e[r]), least = smaller(least, e[r]);
            }
            most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
            rare |= most - least > -kLeastNormal || most - kMostUp <= kLowest || (most == 0 && least < -kUnitGap);
            u16* const factors = reinterpret_cast<u16*>(shared.factor[slot][block]) + row;
            short* const exponents = shared.exponent[slot][block] + row;
            u32 factor[kLaneRows];
            if (__any_sync(~0u, rare)) write_rare(p, n, exist, e, factor, &shared.unit[slot][unit(n)]);
            else {
                u32 facts = 0;
                if constexpr (TARGET == 1) {
                    int at = kLaneRows;
#pragma unroll
                    for (int r = kLaneRows - 1; r >= 0; r--)
                        if (e[r] == most) at = r;
                    const u32 lanes = __ballot_sync(~0u, at < kLaneRows);
                    facts = first_row(lanes, at) << 8;
                }
                if (threadIdx.x % 32 == 0) shared.unit[slot][unit(n)] = {most, facts};
#pragma unroll
                for (int r = 0; r < kLaneRows; r++) factor[r] = e[r] == kNothing ? 0 : (u32)(e[r] - most + 15 + kLift) << 10;
            }
            if constexpr (kMx) factors[0] = (u16)factor[0], exponents[0] = (short)e[0];
            else {
                *reinterpret_cast<uint2*>(factors) = make_uint2(factor[0] | factor[1] << 16, factor[2] | factor[3] << 16);
                *reinterpret_cast<uint2*>(exponents) = make_uint2((u32)e[0] & 0xffffu | (u32)e[1] << 16,
                                                                  (u32)e[2] & 0xffffu | (u32)e[3] << 16);
                // Rows are rounded up to four; what does not exist is 0.
                if (!place.row_scales || exist <= 0) continue;
                u32* const to = place.row_scales + (block * place.row_scale_pitch + row);
                if (reinterpret_cast<u64>(place.row_scales) % 16 == 0)
                    Chunk<f32, 4>{{bits[n][0], bits[n][1], bits[n][2], bits[n][3]}}.store_whole(to);
                else
#pragma unroll
                    for (int r = 0; r < 4; r++) to[r] = bits[n][r];
            }
        }
    }

    // The row of the unit that the first of these lanes has in place `at` of its own.
    static __device__ __forceinline__ u32 first_row(u32 lanes, int at) {
        const int lane = __ffs(lanes) - 1;
        return lane * kLaneRows + (u32)__shfl_sync(~0u, at, lane);
    }

    // For whatever scales, of whatever rows exist.
    __device__ __forceinline__ void write_rare(const AwareParams& p, int n, int exist, int (&e)[kLaneRows], u32 (&factor)[kLaneRows],
                                               Unit* to) const {
        int most = kNothing, least = kNoScale;
        bool wrong = false;
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            e[r] = r < exist ? exponent_of(bits[n][r]) : kNothing;
            wrong |= e[r] == kNoScale;
            most = larger(most, e[r] == kNoScale ? kNothing : e[r]), least = smaller(least, e[r] == kNothing ? kNoScale : e[r]);
        }
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least), wrong = __any_sync(~0u, wrong);
        int e_ref = most == kNothing ? 0 : most;
        bool excludes = false;
        if (most == 0 && least < -kUnitGap) {                        // a row of zeros has scale 1
            int most_but_0 = kNothing, least_but_0 = kNoScale;
#pragma unroll
            for (int r = 0; r < kLaneRows; r++)
                if (e[r] < 0 && e[r] != kNothing) most_but_0 = larger(most_but_0, e[r]), least_but_0 = smaller(least_but_0, e[r]);
            most_but_0 = __reduce_max_sync(~0u, most_but_0), least_but_0 = __reduce_min_sync(~0u, least_but_0);
            excludes = most_but_0 < -kUnitGap;
            if (excludes) e_ref = most_but_0, least = least_but_0;
        }
        if (threadIdx.x % 32 == 0) {
            const bool general = least < e_ref - kMostDown || e_ref - kMostUp <= kLowest;
            *to = {e_ref, (general ? kGeneral : 0u) | (excludes ? kExcluded : 0u) | (wrong ? kWrong : 0u) | kUnusual};
            if (!kMx && wrong) report(p.splits.errors, kScaleNotPowerOfTwo);
        }
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            const bool none = e[r] == kNothing || (excludes && e[r] == 0);
            factor[r] = e[r] == kNoScale ? kNanF16 : none ? 0 : Halves::power(clamp(e[r] - e_ref, -kMostDown, 0) + kLift);
        }
    }
};

// A tile's bytes in shared memory: rows of TILE_COLUMNS, whose pairs of 16-byte units are XOR-swizzled such that the lanes of a warp, which
// read from rows 16 apart, meet no bank twice; the second half of the rows is 16 bytes further on. (Units of a pair stay neighbours:
// copies of 16 bytes from one sector to two places took 6 % longer.)
__device__ __forceinline__ int raw_unit(int row, int unit) { return row * TILE_COLUMNS + (unit ^ (row / 16 * 2 & 6)) * 16 + row / 64 * 16; }

__device__ __forceinline__ void prefetch(const AwareParams& p, const Place& place, u8* raw) {
    constexpr int kRowUnits = TILE_COLUMNS / 16, kEach = kRawBytes / 16 / kThreads, kStep = kThreads / kRowUnits;
    static_assert(kStep == 32, "rows n * 32 on are in the places that raw_unit gives them, by what n alone decides");
    if (place.lost) return;
    const int first = threadIdx.x / kRowUnits, unit = threadIdx.x % kRowUnits, left = left_of(place.columns - unit * 16, 16);
    const int lines = left ? place.lines : 0;
    const i64 step = kStep * p.columns;
    const u8* from = place.from + (first * p.columns + unit * 16);
    const int even = raw_unit(first, unit), odd = even ^ 4 * 16;
#pragma unroll
    for (int n = 0; n < kEach; n++, from += step) {
        const int row = n * kStep + first;
        u8* const to = raw + ((n % 2 ? odd : even) + n * kStep * TILE_COLUMNS + n / 2 * 16);
        if constexpr (ALIGNED) copy_async(to, from, row < lines);
        else {
            const int exist = row < lines ? left : 0;
            Chunk<IN, 16> whole{};
            if (!p.vector) whole = Chunk<IN, 16>::load_partial(from, exist);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!p.vector || exist <= half * 8) continue;
                const Chunk<IN, 8> eight = Chunk<IN, 8>::load(from + half * 8);
                whole.word[2 * half] = eight.word[0], whole.word[2 * half + 1] = eight.word[1];
            }
            store_shared_whole(to, whole.word[0], whole.word[1], whole.word[2], whole.word[3]);
        }
    }
}

// The target that magnitudes |v| * 2^e call for is that of the largest of these. It is found among numbers that are 0 where there is none,
// else (log2 + kTargetBias) << 20 and something below. The largest code is 1.75 * 2^kEmax: a product of up to that mantissa needs its own
// exponent, one above it the next.
constexpr int kTargetBias = 1024;
__device__ __forceinline__ int product_target(u32 bits, int e) {
    constexpr int kFirst = (kLowest + kTargetBias) << 20;
    if (bits >= 0x7f800000u) return (kHighest + kTargetBias) << 20;
    return larger((int)(bits >> 3) + (e - 127 - Pack::kEmax + kTargetBias) * (1 << 20) + 0x3ffff, kFirst);
}

// The code of v * 2^(e - t): 2^60 times the smallest code saturates, 2^-60 times the largest vanishes.
__device__ __forceinline__ u32 moved(u32 code, int e, int t) {
    const u32 power = e == kNothing ? 0 : (u32)(clamp(e - t, -60, 60) + 127) << 23;
    return IN::narrow(mul_rn(IN::widen(code), as_float(power)));
}

// This thread's 16 rows x 4 columns, element by element: for whatever scales. exponents: of these rows. t: log2 of the columns' targets;
// targets of columns are found here.
__device__ __forceinline__ void transform_any(const u8* mine, const short* exponents, int (&t)[4], u32 (&codes)[4][4]) {
    if constexpr (TARGET == 0) {
        int found[4] = {};
#pragma unroll 1
        for (int r = 0; r < 16; r++) {
            const u32 word = *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS);
            if (exponents[r] == kNoScale || exponents[r] == kNothing) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 bits = as_bits(magnitude(IN::widen(word >> c * 8 & 0xffu)));
                if (bits && bits <= 0x7f800000u) found[c] = larger(found[c], product_target(bits, exponents[r]));
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int distance = 1; distance < kUnitPatches; distance *= 2)
                found[c] = larger(found[c], __shfl_xor_sync(~0u, found[c], distance));
            t[c] = found[c] ? (found[c] >> 20) - kTargetBias : 0;
        }
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
        u32 four[4] = {};
#pragma unroll 1
        for (int r = 0; r < 4; r++) {
            const u32 word = *reinterpret_cast<const u32*>(mine + (q * 4 + r) * TILE_COLUMNS);
            const int e = exponents[q * 4 + r];
#pragma unroll
            for (int c = 0; c < 4; c++) four[c] |= (e == kNoScale ? kNanFp8 : moved(word >> c * 8 & 0xffu, e, t[c])) << r * 8;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) codes[c][q] = four[c];
    }
}

// The largest exponent of a row of a unit that holds anything, kNothing if there is none. first_row, column: of the unit, and this lane's
// four columns of it, which lanes `others` share. exponents: of its rows.
__device__ __forceinline__ int find_top(const u8* raw, const short* exponents, int first_row, int column, u32 others) {
    int top = kNothing;
#pragma unroll 1
    for (int r = 0; r < BLOCK; r++) {
        const u32 word = *reinterpret_cast<const u32*>(raw + raw_unit(first_row + r, column / 16) + column % 16);
        const u32 anything = __ballot_sync(~0u, word & 0x7f7f7f7fu) & others;
        if (anything && exponents[r] != kNoScale) top = larger(top, exponents[r]);
    }
    return top;
}

// The bits of a target 2^t.
__device__ __forceinline__ u32 scale_bits(int t) {
    if (kMx) return (u32)(t + 127);
    return t >= -126 ? (u32)(t + 127) << 23 : 1u << (t + 149);
}

__device__ __forceinline__ void clear(u8* to, i64 bytes) {
    const i64 before = -reinterpret_cast<u64>(to) & 15, head = before < bytes ? before : bytes, units = (bytes - head) / 16;
    for (i64 i = threadIdx.x; i < units; i += kThreads) Chunk<IN, 16>{}.store_whole(to + head + i * 16);
    for (i64 i = threadIdx.x; i < head; i += kThreads) to[i] = 0;
    for (i64 i = head + units * 16 + threadIdx.x; i < bytes; i += kThreads) to[i] = 0;
}

// What a tile after the last expert has to do: zeros, of as much as it would have written.
__device__ __forceinline__ void clear_rest(const AwareParams& p, const Place& place) {
    const int columns = left_of(p.columns - place.column(), TILE_COLUMNS);
    clear(p.out + place.start() * p.columns + place.column() * place.lines, (i64)place.lines * columns);
    const i64 first = place.group_block + place.tile * kRowBlocks, end = place.is_last_down() ? p.target_rows : first + kRowBlocks;
    const int pitch = left_of(p.target_pitch - place.column(), TILE_COLUMNS);
    for (i64 row = first; row < end && row < p.target_rows; row++)
        clear(static_cast<u8*>(p.target_scales) + (row * p.target_pitch + place.column()) * kScaleBytes, (i64)pitch * kScaleBytes);
    if (!p.row_scales || place.tile) return;
    const i64 all = (p.row_scale_rows - place.group_scales) * p.scale_columns, each = (all + p.strips - 1) / p.strips;
    const i64 from = place.strip * each, left = all - from;
    if (left > 0) clear(reinterpret_cast<u8*>(p.row_scales + place.group_scales * p.scale_columns + from), (left < each ? left : each) * 4);
}

// Bytes [first, end) of 16 that go to a multiple of 16.
__device__ __forceinline__ void store_some(u8* to, const u32 (&unit)[4], int first, int end) {
    if (first >= end) return;
    const u32 bytes = (1u << end) - (1u << first);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const u32 four = bytes >> 4 * w & 15;
        if (four == 15) *reinterpret_cast<u32*>(to + 4 * w) = unit[w];
        else
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (four >> b & 1) to[4 * w + b] = (u8)(unit[w] >> 8 * b);
    }
}

// The last `shift` of the 16 bytes `above` and the first of these.
__device__ __forceinline__ void shifted(const u32 (&above)[4], const u32 (&own)[4], u32 shift, u32 (&unit)[4]) {
    u32 two[6], one[5];
#pragma unroll
    for (int w = 0; w < 6; w++) {
        const u32 here = w < 4 ? above[w] : own[w - 4], there = w < 2 ? above[w + 2] : own[w - 2];
        two[w] = shift & 8 ? here : there;
    }
#pragma unroll
    for (int w = 0; w < 5; w++) one[w] = shift & 4 ? two[w] : two[w + 1];
#pragma unroll
    for (int w = 0; w < 4; w++) unit[w] = __funnelshift_l(one[w], one[w + 1], (shift & 3) * 8);
}

#ifdef ENTRY_scaling_aware_transpose
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) scaling_aware_transpose(const __grid_constant__ AwareParams p) {
    extern __shared__ __align__(16) u8 dynamic[];                    // kAhead + 1 tiles
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int patch = lane % kPatches, row = patch * 16, lane_column = lane / kPatches * 4;     // 16 rows, and 4 of the warp's columns
    const int column_block = warp * kWarpColumns / BLOCK, unit_index = row / BLOCK * kColumnBlocks + column_block;

    const i64 first_tile = (i64)blockIdx.x * p.run, all_tiles = p.down * p.strips;
    const int run = left_of(all_tiles - first_tile, (int)p.run);
    const auto place_of = [&](int n) -> Place& { return shared.place[n % (kAhead + 2)]; };
    const auto fetch = [&](int n) {
        if (n < run) prefetch(p, place_of(n), dynamic + n % (kAhead + 1) * kRawBytes);
        copy_async_commit();
    };
    if (warp == kWarps - 1) {
        find_place(p, first_tile, true, run > 1, &place_of(0));
        for (int n = 1; n <= kAhead && n < run; n++) {
            __syncwarp();
            find_next(p, first_tile + n, place_of(n - 1), n + 1 < run, &place_of(n));
        }
    }
    __syncthreads();
    TileScales scales;
    scales.load(p, place_of(0));
    for (int n = 0; n < kAhead; n++) fetch(n);

#pragma unroll 1
    for (int n = 0; n < run; n++) {
        const int slot = n % 2;
        const Place& place = place_of(n);
        u8* const raw = dynamic + n % (kAhead + 1) * kRawBytes;
        scales.write(p, place, slot, shared);
        copy_async_wait<kAhead - 1>();
        __syncthreads();
        if (n + 1 < run) scales.load(p, place_of(n + 1));
        fetch(n + kAhead);
        if (warp == kWarps - 1 && n + kAhead + 1 < run)
            find_next(p, first_tile + n + kAhead + 1, place_of(n + kAhead), n + kAhead + 2 < run, &place_of(n + kAhead + 1));
        if (place.lost) {
            clear_rest(p, place);
            continue;
        }

        const u8* const mine = raw + raw_unit(row, warp) + lane_column;      // this thread's four columns of its first row
        const auto holds_anything = [&](int r) { return *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS) & 0x7f7f7f7fu; };
        const Unit unit = shared.unit[slot][unit_index];
        const short* const exponents = &shared.exponent[slot][column_block][row];
        bool general = unit.facts & kGeneral;
        u32 codes[4][4], stored[4];                                  // four rows of a column in a word; the bits of the columns' targets
        int tile_target = 0;
        u32 of_columns[2] = {0x3c003c00u, 0x3c003c00u};              // 2^(e_ref - kLift - t) of two columns

        u32 factors[8];                                              // of two rows
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 four = *reinterpret_cast<const uint4*>(&shared.factor[slot][column_block][row / 2 + 4 * half]);
            factors[4 * half] = four.x, factors[4 * half + 1] = four.y, factors[4 * half + 2] = four.z, factors[4 * half + 3] = four.w;
        }
        if constexpr (TARGET == 1) {
            // Whether the row with the largest scale holds anything: the lanes of a unit look at four bytes of it each.
            const int in_unit = (patch % kUnitPatches * 4 + lane / kPatches) * 4, column = column_block * BLOCK + in_unit;
            const int first_row = row - row % BLOCK;
            const u32 others = (u32)((1ull << kUnitPatches) - 1) * 0x01010101u << patch - patch % kUnitPatches;
            const int with_largest = first_row + (int)(unit.facts >> 8);
            const u32 word = *reinterpret_cast<const u32*>(raw + raw_unit(with_largest, column / 16) + column % 16);
            const bool holds = __ballot_sync(~0u, word & 0x7f7f7f7fu) & others;
            tile_target = unit.e_ref;
            if (__any_sync(~0u, !holds || unit.facts & kUnusual)) {
                tile_target = find_top(raw, exponents - row % BLOCK, first_row, column, others);
                if (tile_target == kNothing) tile_target = 0;
                else {
                    const int k = unit.e_ref - tile_target;
                    general |= k < 0 || k > kMostUp;
                    const u32 power = Halves::power(clamp(k, 0, kMostUp)) * 0x10001u;
#pragma unroll
                    for (int r = 0; r < 8; r++) factors[r] = Halves::times(factors[r], power);
                }
            }
#pragma unroll
            for (int c = 0; c < 4; c++) stored[c] = scale_bits(tile_target);
        }
        u32 values[4][8];                                            // two rows of a column
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const u32 even = *reinterpret_cast<const u32*>(mine + 2 * r * TILE_COLUMNS);
            const u32 odd = *reinterpret_cast<const u32*>(mine + (2 * r + 1) * TILE_COLUMNS);
            const u32 first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
            values[0][r] = Pack::widen(first, 0), values[1][r] = Pack::widen(first, 1);
            values[2][r] = Pack::widen(second, 0), values[3][r] = Pack::widen(second, 1);
        }
        if constexpr (TARGET == 0) {
            if (unit.facts & kExcluded)
#pragma unroll 1
                for (int r = 0; r < 16; r++) general |= exponents[r] == 0 && holds_anything(r);
            u32 top[4] = {};
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int r = 0; r < 8; r++) {
                    const u32 product = Halves::times(values[c][r], factors[r]);
                    top[c] = Halves::raised(top[c], product);
                    if (kLift) values[c][r] = product;
                }
            u32 exponent[2];                                         // of two columns' targets, as f16 has exponents
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 even = __byte_perm(top[2 * half], top[2 * half + 1], 0x5410);
                const u32 odd = __byte_perm(top[2 * half], top[2 * half + 1], 0x7632);
                u32 largest = f16::max_magnitudes<false>(even, odd);
#pragma unroll
                for (int distance = 1; distance < kUnitPatches; distance *= 2)
                    largest = f16::max_magnitudes<false>(largest, __shfl_xor_sync(~0u, largest, distance));
                exponent[half] = (largest + 0x00ff00ffu) & 0xfc00fc00u;
                of_columns[half] = ((Pack::kEmax + 30) << 10) * 0x10001u - exponent[half];
            }
            const u32 zero = (u32)(unit.e_ref - kLift - 15 - Pack::kEmax + 127) << (kMx ? 0 : 23);   // without the exponent as f16 has it
#pragma unroll
            for (int half = 0; half < 2; half++) {
                stored[2 * half] = zero + (kMx ? exponent[half] >> 10 & 31 : (exponent[half] & 0xffffu) << 13);
                stored[2 * half + 1] = zero + (kMx ? exponent[half] >> 26 : (exponent[half] & 0xffff0000u) >> 3);
            }
            // Whether f16 has all the factors: the exponent is kEmax + kLift to that + 15.
            const auto is_out = [](u32 two) {
                return ((two + ((16 - Pack::kEmax - kLift) << 10) * 0x10001u) & 0xc000c000u) != 0x40004000u;
            };
            if (is_out(exponent[0]) || is_out(exponent[1])) {
                u32 anything = 0;                                    // by column
#pragma unroll
                for (int r = 0; r < 16; r++) anything |= holds_anything(r);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const u32 mask = 0xffffu << c % 2 * 16;
                    if (!is_out((exponent[c / 2] & mask) | (0x4000u << 16 - c % 2 * 16))) continue;
                    general |= exponent[c / 2] & mask || anything >> c * 8 & 0xffu;
                    of_columns[c / 2] = (of_columns[c / 2] & ~mask) | (0x3c003c00u & mask);
                    stored[c] = scale_bits(0);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 of_column = __byte_perm(of_columns[c / 2], 0, c % 2 ? 0x3232 : 0x1010);
            const auto scaled = [&](int r) {
                if constexpr (TARGET == 1) return Halves::times(values[c][r], factors[r]);
                else if constexpr (kLift != 0) return Halves::times(values[c][r], of_column);
                else return Halves::times(values[c][r], Halves::times(factors[r], of_column));
            };
#pragma unroll
            for (int q = 0; q < 4; q++) codes[c][q] = Pack::narrow(scaled(2 * q), scaled(2 * q + 1));
        }
        if (__any_sync(~0u, general)) {
            int t[4] = {tile_target, tile_target, tile_target, tile_target};
            transform_any(mine, exponents, t, codes);
#pragma unroll
            for (int c = 0; c < 4; c++) stored[c] = scale_bits(t[c]);
        }

        // Target scales, 0 in the padding.
        const int column = warp * kWarpColumns + lane_column;
        if (patch % kUnitPatches == 0 && row < place.lines) {
            if (!kMx && unit.facts & kWrong)
#pragma unroll
                for (int c = 0; c < 4; c++) stored[c] = kNanF32;
            u8* const to = as_global(place.targets) + ((i64)(row / BLOCK) * p.target_pitch + column) * kScaleBytes;
            if (place.plain) {
                if constexpr (kMx) *reinterpret_cast<u32*>(to) = stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24;
                else Chunk<f32, 4>{{stored[0], stored[1], stored[2], stored[3]}}.store_whole(reinterpret_cast<u32*>(to));
            } else {
                const int left = left_of(p.target_pitch - place.column() - column, 4);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (c >= left) continue;
                    const u32 bits = column + c < place.columns ? stored[c] : 0;
                    if constexpr (kMx) to[c] = (u8)bits;
                    else reinterpret_cast<u32*>(to)[c] = bits;
                }
            }
        }

        // Transposed rows: of the expert, whose matrices follow one another.
        const int lines = place.lines, count = place.columns - column;
        const i64 stride = place.group_lines;
        u8* to = as_global(place.to) + (column * stride + row);
        if (place.aligned) {
#pragma unroll
            for (int c = 0; c < 4; c++, to += stride)
                if (row < lines && c < count) Chunk<IN, 16>{{codes[c][0], codes[c][1], codes[c][2], codes[c][3]}}.store_whole(to);
        } else {
            const bool continued = place.continued, continues = place.continues;
            const bool whole = (patch || continued) && (continues || row + 16 <= lines);     // 16 bytes of every column
            const int source = lane - patch + (patch + kPatches - 1) % kPatches;     // the lane above; the first one's: the last
#pragma unroll
            for (int c = 0; c < 4; c++, to += stride) {
                const u32 shift = reinterpret_cast<u64>(to) & 15;
                u32 above[4], unit[4];
#pragma unroll
                for (int w = 0; w < 4; w++) above[w] = __shfl_sync(~0u, codes[c][w], source);
                if (!continues && patch == 0 && c < count) {         // the end of the last rows
                    shifted(above, codes[c], shift, unit);
                    store_some(to + kTileRows - shift, unit, 0, lines - kTileRows + (int)shift);
                }
                if (continued && patch == 0) {
                    const uint4 four = shared.waiting[slot][column + c];
                    above[0] = four.x, above[1] = four.y, above[2] = four.z, above[3] = four.w;
                }
                shifted(above, codes[c], shift, unit);
                if (c < count) {
                    if (whole) Chunk<IN, 16>{{unit[0], unit[1], unit[2], unit[3]}}.store_whole(to - shift);
                    else store_some(to - shift, unit, patch || continued ? 0 : (int)shift, smaller(lines + (int)shift - row, 16));
                }
            }
            if (continues && patch == kPatches - 1)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    shared.waiting[slot ^ 1][column + c] = make_uint4(codes[c][0], codes[c][1], codes[c][2], codes[c][3]);
        }
    }
}
#endif
