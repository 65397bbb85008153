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
// An expert of at most 64 rows or 32 has two or four strips in a tile, one below the other (its `stack`): rows of the tile are then rows of
// the expert modulo 64 or 32, 128 columns further on for each. Not where a tile is one unit with one target (TARGET 1 of blocks of 128).
//
// Arithmetic is in f16, relative to the largest scale 2^e_ref of a block's rows. Of v * 2^(e - t) bits are lost only where it is below
// 2^-20 (e4m3fn) and becomes 0 anyway, if f16 has the powers of two that it takes. Blocks of which that is not true, which are rare, take a
// way of their own, element by element.
//   e4m3fn, column: 2^(e - e_ref + kLift), whose products with v are looked at for the target and then multiplied by 2^(e_ref - kLift - t).
//                   kLift makes use of all of f16: the first product, of four bits, loses some only below 2^(e_ref - 27); t >= e_ref - 15
//   e5m2, column:   has no room for a lift; v * (2^(e - e_ref) * 2^(e_ref - t))
//   tile:           v * (2^(e - e_ref) * 2^(e_ref - t)), where t is that of the row with the largest scale unless it holds nothing
//
// Rows of the output begin anywhere: experts have any number of rows. Then a warp shifts its columns in shared memory to whole sectors. Where
// a tile is followed by the next one down, its last rows wait there for it. An expert of one row of tiles has columns without gaps between
// them: its tiles are put together in shared memory.
//
// ALIGNED: 1 where rows of the data allow 16-byte loads. RUNS: 0 where nothing is split, all columns are known to begin at multiples of 16 bytes,
// and four blocks of threads share a multiprocessor: then a block has one tile. Bytes moved per element: 2, and 8 / BLOCK of f32 scales.
#include "groups/scaling_aware_store.cuh"
#include "numerics/e8m0.cuh"
#include "numerics/fp8_pairs.cuh"

using Pack = Pairs<IN>;
constexpr int kRawBytes = kTileRows * TILE_COLUMNS + 16;             // of a tile, see raw_unit()
constexpr int kAhead = 1;                                            // tiles on their way while one is worked on
constexpr int kUnitsPerWarp = (kUnits + kWarps - 1) / kWarps, kLaneRows = BLOCK / 32;
constexpr int kUnitPatches = BLOCK / 16;                             // threads below one another in a unit
// Blocks of threads that a multiprocessor keeps, on an H200 BLOCKS; with as many values spill on other GPUs, with CUDA 12 and with the
// integer conversions.
#if defined(CUPY_FP8_HARDWARE_CVT) && __CUDA_ARCH__ < 1000
constexpr bool kFewer = __CUDACC_VER_MAJOR__ < 13 || (RUNS && __CUDA_ARCH__ < 900);
constexpr int kBlocks = !ALIGNED ? BLOCKS - 1 : kFewer && BLOCKS == 4 ? 3 : BLOCKS;
#else
constexpr int kBlocks = 2;
#endif

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

// What is known of a unit's scales: the exponent that its elements are computed relative to, and whether
enum UnitFacts : u32 {
    kGeneral = 1,                // f16 does not have all powers of two that it takes
    kExcluded = 2,               // the rows with scale 1 do not count for e_ref, since they are alone with one so large: as a rule a row of
                                 // zeros has scale 1. If one holds anything, the unit is kGeneral
    kWrong = 16,                 // a scale is no power of two, of the first strip; the next three bits: of the others
    kUnusual = 4,                // any of these, or scales that were not looked at for them: TARGET 1 knows no row that has the largest
};
struct Unit {
    int e_ref;
    u32 facts;                                                       // and TARGET 1: from bit 8 on, a row of the unit with that scale
};

struct Shared {
    Unit unit[2][kUnits];                                            // by row of blocks, then by column of blocks
    __align__(16) short exponent[2][kColumnBlocks][kTileRows];
    __align__(16) u32 factor[2][kColumnBlocks][kTileRows / 2];       // 2^(e - e_ref) of two rows as f16: NaN for a wrong scale
    Place place[kAhead + 2];
    __align__(16) u8 halves[kWaits ? kWarps * kHalvesBytes : 16];    // of sectors, see store_aligned()
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
            const int line = place.line_of(row(n)), block = column_block(n) + place.strip_of(row(n)) * kColumnBlocks;
            if (!has(n) || place.lost || block >= place.scale_blocks) continue;
            const i64 at = line * p.scale_columns + block;
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                if (line + r >= place.lines) continue;
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
            const int row = TileScales::row(n), line = place.line_of(row), block = column_block(n) + place.strip_of(row) * kColumnBlocks;
            const int exist = block < place.scale_blocks ? place.lines - line : 0;
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
            u16* const factors = reinterpret_cast<u16*>(shared.factor[slot][column_block(n)]) + row;
            short* const exponents = shared.exponent[slot][column_block(n)] + row;
            u32 factor[kLaneRows];
            if (__any_sync(~0u, rare)) write_rare(p, place, n, exist, e, factor, &shared.unit[slot][unit(n)]);
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
                u32* const to = place.row_scales + (block * place.row_scale_pitch + line);
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
    __device__ __forceinline__ void write_rare(const AwareParams& p, const Place& place, int n, int exist, int (&e)[kLaneRows],
                                               u32 (&factor)[kLaneRows], Unit* to) const {
        int most = kNothing, least = kNoScale;
        bool wrong = false;
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            e[r] = r < exist ? exponent_of(bits[n][r]) : kNothing;
            wrong |= e[r] == kNoScale;
            most = larger(most, e[r] == kNoScale ? kNothing : e[r]), least = smaller(least, e[r] == kNothing ? kNoScale : e[r]);
        }
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
        const u32 wrong_lanes = __ballot_sync(~0u, wrong);
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
            u32 facts = (general ? kGeneral : 0u) | (excludes ? kExcluded : 0u) | kUnusual;
#pragma unroll
            for (int part = 0; part < 4; part++)                     // a lane has rows of one strip
                if (wrong_lanes >> part * 8 & 0xffu) facts |= kWrong << place.strip_of(part * 8 * kLaneRows);
            *to = {e_ref, facts};
            if (!kMx && wrong_lanes) report(p.splits.errors, kScaleNotPowerOfTwo);
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

template <bool kStacked>
__device__ __forceinline__ void prefetch_rows(const AwareParams& p, const Place& place, u8* raw) {
    constexpr int kRowUnits = TILE_COLUMNS / 16, kEach = kTileRows * kRowUnits / kThreads, kStep = kThreads / kRowUnits;
    static_assert(kStep == 32, "rows n * 32 on are in the places that raw_unit gives them, by what n alone decides");
    const int first = threadIdx.x / kRowUnits, unit = threadIdx.x % kRowUnits;
    const int stack = kStacked ? place.stack : 0, left = place.columns - unit * 16, lines = kStacked || left > 0 ? place.lines - first : 0;
    // From every other 32 rows of the tile to the next ones, and from those.
    const i64 down = kStep * p.columns, next = stack == 2 ? TILE_COLUMNS : down;
    const i64 after = stack == 0 ? down : stack == 1 ? TILE_COLUMNS - down : TILE_COLUMNS;
    const u8* from = place.from + (first * p.columns + unit * 16);
    const int even = raw_unit(first, unit), odd = even ^ 4 * 16;
#pragma unroll
    for (int n = 0; n < kEach; from += n % 2 ? after : next, n++) {
        const int columns = kStacked ? left - place.strip_of(n * kStep) * TILE_COLUMNS : left;
        const bool exists = (kStacked ? place.line_of(n * kStep) : n * kStep) < lines && (!kStacked || columns > 0);
        u8* const to = raw + ((n % 2 ? odd : even) + n * kStep * TILE_COLUMNS + n / 2 * 16);
        if constexpr (ALIGNED) copy_async(to, from, exists);
        else {
            const int exist = exists ? left_of(columns, 16) : 0;
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

__device__ __forceinline__ void prefetch(const AwareParams& p, const Place& place, u8* raw) {
    if (place.lost) return;
    if (ALIGNED && (!kStacks || place.stack == 0)) prefetch_rows<false>(p, place, raw);      // with fewer instructions
    else prefetch_rows<kStacks>(p, place, raw);
}

// The bytes of the tile that a later block has, to the L2: as many blocks from this one that they wait there only shortly.
__device__ __forceinline__ void fetch_ahead(const AwareParams& p) {
    const u32 block = blockIdx.x + p.ahead, strip = block / (u32)p.down;
    if (block >= gridDim.x) return;
    const i64 row = (i64)(block - strip * (u32)p.down) * kTileRows + threadIdx.x, column = (i64)strip * TILE_COLUMNS;
    if (threadIdx.x < kTileRows && row < p.rows) fetch_to_l2(p.data + (row * p.columns + column), left_of(p.columns - column, TILE_COLUMNS));
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

// This thread's 16 rows x 4 columns, element by element: for whatever scales. exponents: of these rows. patches: threads that have the rows
// of a block. t: log2 of the columns' targets; targets of columns are found here.
__device__ __forceinline__ void transform_any(const u8* mine, const short* exponents, int patches, int (&t)[4], u32 (&codes)[4][4]) {
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
                found[c] = larger(found[c], __shfl_xor_sync(~0u, found[c], distance < patches ? distance : 0));
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

#ifdef ENTRY_scaling_aware_transpose
// The tile at `place`, whose bytes and scales are in shared memory. slot: of the scales. shifted: room for columns that begin anywhere.
__device__ __forceinline__ void transform_tile(const AwareParams& p, const Place& place, Shared& shared, int slot, u8* raw, u8* shifted) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int patch = lane % kPatches, row = patch * 16, lane_column = lane / kPatches * 4;     // 16 rows, and 4 of the warp's columns
    const int column_block = warp * kWarpColumns / BLOCK, unit_index = row / BLOCK * kColumnBlocks + column_block;
    const u8* const mine = raw + raw_unit(row, warp) + lane_column;      // this thread's four columns of its first row
    const auto holds_anything = [&](int r) { return *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS) & 0x7f7f7f7fu; };
    const Unit unit = shared.unit[slot][unit_index];
    const short* const exponents = &shared.exponent[slot][column_block][row];
    const int line = place.line_of(row), column = warp * kWarpColumns + lane_column + place.strip_of(row) * TILE_COLUMNS;
    const int patches = kMx ? kUnitPatches : kPatches >> (kStacks ? place.stack : 0);        // of a block's rows
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
                largest = f16::max_magnitudes<false>(largest, __shfl_xor_sync(~0u, largest, distance < patches ? distance : 0));
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
        transform_any(mine, exponents, patches, t, codes);
#pragma unroll
        for (int c = 0; c < 4; c++) stored[c] = scale_bits(t[c]);
    }

    // Target scales, 0 in the padding.
    if (line % BLOCK == 0 && line < place.lines) {
        if (!kMx && unit.facts & kWrong << place.strip_of(row))
#pragma unroll
            for (int c = 0; c < 4; c++) stored[c] = kNanF32;
        u8* const to = as_global(place.targets) + ((i64)(line / BLOCK) * p.target_pitch + column) * kScaleBytes;
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
    if (!RUNS || place.aligned) store_aligned(place, codes, line, column, shared.halves + warp * kHalvesBytes);
    else if (place.group_down > 1) store_columns(place, codes, shifted + warp * kShiftedBytes);
    else store_flat(place, codes, shifted);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) scaling_aware_transpose(const __grid_constant__ AwareParams p) {
    extern __shared__ __align__(16) u8 dynamic[];                    // kAhead + 1 tiles, and columns of kColumnBytes; or one tile
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (!RUNS) {
        const u32 strip = blockIdx.x / (u32)p.down;
        Place& place = shared.place[0];
        if (threadIdx.x == 0) {
            Place found = find_expert(p, 0, 0);
            found.tile = blockIdx.x - strip * (u32)p.down, found.strip = strip;
            found.settle(p, true, 1);
            place = found;
        }
        __syncthreads();
        if (strip & (1u << place.stack) - 1) return;                 // another block has it
        TileScales scales;
        scales.load(p, place);
        prefetch(p, place, dynamic);
        copy_async_commit();
        if (!kMx || TARGET == 1) fetch_ahead(p);                     // of columns of MX the instructions cost more than is gained
        scales.write(p, place, 0, shared);
        copy_async_wait();
        __syncthreads();
        transform_tile(p, place, shared, 0, dynamic, nullptr);
        return;
    }
    const i64 first_tile = (i64)blockIdx.x * p.run, all_tiles = p.down * p.strips;
    const int run = left_of(all_tiles - first_tile, (int)p.run);
    const auto place_of = [&](int n) -> Place& { return shared.place[n % (kAhead + 2)]; };
    const auto fetch = [&](int n) {
        if (place_of(n).exists) prefetch(p, place_of(n), dynamic + n % (kAhead + 1) * kRawBytes);
        copy_async_commit();
    };
    const bool finds = warp == kWarps - 1;                           // this warp finds the places
    const i64 first_row = first_tile / p.strips;                     // of tiles
    u32 next_record = 0;
    if (p.splits.groups >= 0) {
        if (warp == 0 && blockIdx.x == 0) check_sizes(p.splits, p.rows);
        next_record = load_record(p, first_row);
    }
    const bool lost = (int)__shfl_sync(~0u, next_record, 1) < 0;     // group -1: no expert's, and so are all that follow
    if (finds) {
        if (lost) {
            if (lane == 0) place_of(0).exists = false, place_of(0).lost = true;
        } else find_first(p, find_expert(p, first_row, next_record), first_tile, run, &place_of(0), &place_of(kAhead + 1));
        for (int n = 1; n <= kAhead; n++) {
            __syncwarp();
            find_next(p, place_of(n - 1), load_next_record(p, place_of(n - 1), run), run, &place_of(n));
        }
    }
    __syncthreads();
    TileScales scales;
    if (place_of(0).exists) scales.load(p, place_of(0));
    for (int n = 0; n < kAhead; n++) fetch(n);

    int n = 0;
#pragma unroll 1
    for (; place_of(n).exists && !place_of(n).lost; n++) {
        const int slot = n % 2;
        const Place& place = place_of(n);
        u8* const raw = dynamic + n % (kAhead + 1) * kRawBytes;
        if (finds && n > 0) find_next(p, place_of(n + kAhead - 1), next_record, run, &place_of(n + kAhead));
        scales.write(p, place, slot, shared);
        copy_async_wait<kAhead - 1>();
        __syncthreads();
        if (place_of(n + 1).exists) scales.load(p, place_of(n + 1));
        fetch(n + kAhead);
        if (finds) next_record = load_next_record(p, place_of(n + kAhead), run);
        transform_tile(p, place, shared, slot, raw, dynamic + (kAhead + 1) * kRawBytes);
    }
    if (!place_of(n).exists && !place_of(n).lost) return;
    const bool none = !place_of(n).exists;                           // `lost`, which would take a register until here
    const Place rest = none ? find_expert(p, first_row, next_record) : place_of(n);
    const i64 first = (none ? first_tile : first_tile + rest.offset) - rest.group_tile * p.strips;
    clear_rest(p, rest, first, first + run - rest.offset);
}
#endif
