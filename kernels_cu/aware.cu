// Scaling-aware transpose (docs/numerics.md, section 4): FP8 with a power-of-two scale for every BLOCK elements of a row becomes FP8 with
// one for every BLOCK elements of a column, stored transposed, without going through a wider type.
//
//   out = narrow(v * s / t), one rounding         s = 2^e, the element's scale; t, a power of two, that of the new block
//   TARGET 0 (column): t = smallest power of two >= max |v| * s / fp8_max over the block (BLOCK rows of a column)
//   TARGET 1 (tile):   t = largest s of a tile's rows (BLOCK x BLOCK) that hold anything but zeros
//
// data           FP8 [rows, columns] (IN)                       scales    compact [rows, ceil(columns / BLOCK)]: f32 (BLOCK 128), E8M0 (32)
// out            [columns, rows]; with splits (rows per expert, on the device) flat, [columns, rows of the expert] one after the other
// target_scales  [blocks along the rows of every expert, target_pitch], padded and past the last expert 0
// row_scales     f32, `scales` transposed: of every expert [ceil(columns / BLOCK), rows rounded up to 4], padded and past the last expert
//                with 0, row_scale_rows for each of ceil(columns / BLOCK) in all; or null
//
// A tile is 128 rows x TILE_COLUMNS columns and begins at an expert's first row or a multiple of 128 rows on. Tiles are counted down the
// rows of an expert, then along its strips of TILE_COLUMNS columns, then expert by expert; a block of threads does `run` of them, one after
// the other, while the next one is on its way into shared memory. A warp has 16 columns of the tile and a thread 16 rows x 4 columns, so
// that what a column's block holds is found by exchanges inside the warp.
//
// Arithmetic is in f16, relative to the largest scale 2^e_ref of a block's rows: v * 2^(e - t) is rounded only where it is below 2^-20 and
// becomes 0 anyway, if f16 has 2^(e - e_ref) (e - e_ref >= -24), 2^(e_ref - t) (<= 15) and their product. Blocks of which that is not
// true, which are rare, take a way of their own, element by element.
//
// Rows of the output begin anywhere: experts have any number of rows. So a transposed row is shifted in registers such that it begins in
// shared memory where its address modulo 32 says, and 16 aligned bytes of memory are 16 bytes there. Where a tile is followed by the next
// one down, the up to 31 bytes after the last multiple of 32 wait there for it: then every store is a part of a whole sector.
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
constexpr int kTileRows = 128, kWarpColumns = 16;
constexpr int kWarps = TILE_COLUMNS / kWarpColumns, kThreads = kWarps * 32;
constexpr int kRawBytes = kTileRows * TILE_COLUMNS + 16;
constexpr int kAhead = 1;                                            // tiles on their way while one is worked on
constexpr int kColumnBlocks = TILE_COLUMNS / BLOCK, kUnits = kTileRows / BLOCK * kColumnBlocks;     // units: blocks of BLOCK x BLOCK
constexpr int kRowBlocks = kTileRows / BLOCK;
constexpr int kUnitsPerWarp = (kUnits + kWarps - 1) / kWarps, kLaneRows = BLOCK / 32;
constexpr int kUnitLanes = BLOCK / 16 * 4;                           // threads that share a unit in a warp: 16 rows and 4 columns each
// On an H200 a multiprocessor keeps 768 threads in flight, which spill on sm_100 and sm_120 and with the integer conversions.
#if defined(CUPY_FP8_HARDWARE_CVT) && __CUDA_ARCH__ < 1000
constexpr int kThreadsInFlight = ALIGNED ? 768 : 512;
#else
constexpr int kThreadsInFlight = 512;
#endif
constexpr int kBlocks = kThreadsInFlight / kThreads;
static_assert(kMx || BLOCK == 128, "blocks of 32 or 128");

constexpr int kNoScale = 1 << 14;                                    // the exponent of a scale that is no power of two
constexpr int kNothing = -kNoScale;                                  // of no scale at all
constexpr int kLowest = -127, kHighest = 127;                        // column targets
constexpr int kMostUp = 15, kMostDown = 24;                          // powers of two that f16 has
constexpr int kUnitGap = 8;                                          // between scale 1 of rows of zeros and the other scales

__device__ __forceinline__ int clamp(int v, int low, int high) { return v < low ? low : v > high ? high : v; }
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

// log2 of a scale, kNoScale where it is no power of two.
__device__ __forceinline__ int exponent_of(u32 bits) {
    if (kMx) return bits == kNanE8m0 ? kNoScale : (int)bits - 127;
    int bias = 127;
    if (bits < 0x00800000u) bits = as_bits(mul_rn(as_float(bits), as_float((127u + 64) << 23))), bias += 64;    // a subnormal, or 0
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
    u32* row_scales;                                                 // that of its first row and block, or null; the next block's a pitch on
    i64 row_scale_pitch;
    u32 strip;
    int lines, columns, scale_blocks;                                // how many rows, columns and blocks along a row there are
    bool lost;                                                       // no expert's
    bool aligned;                                                    // columns go to multiples of 16 bytes
    bool adjoins;                                                    // columns follow one another in memory: the expert has but these rows
    bool continued, continues;                                       // by the tile above, by the one below: stored where columns begin anywhere

    __device__ __forceinline__ i64 start() const { return group_start + tile * kTileRows; }
    __device__ __forceinline__ i64 column() const { return (i64)strip * TILE_COLUMNS; }
    __device__ __forceinline__ bool is_last_down() const { return tile + 1 == group_down; }

    // more: another tile follows in the run.
    __device__ __forceinline__ void settle(const AwareParams& p, bool first, bool more) {
        constexpr int kScaleBytes = kMx ? 1 : 4;
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
        adjoins = group_down == 1, aligned = group_lines % 16 == 0 && reinterpret_cast<u64>(to) % 16 == 0;
        continued = !first && tile > 0, continues = more && !is_last_down();
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
        found.tile++;
        if (place.is_last_down()) found.tile = 0, found.strip++;
        found.settle(p, false, more);
        *next = found;
    }
}

// What is known of a unit's scales: the exponent that its elements are computed relative to, and whether
enum UnitFacts : u32 {
    kGeneral = 1,                // f16 does not have all powers of two that it takes
    kExcluded = 2,               // the rows with scale 1 do not count for e_ref, since they are alone with one so large: as a rule a row of
                                 // zeros has scale 1. If one holds anything, the unit is kGeneral
    kWrong = 4,                  // a scale is no power of two
};
struct Unit {
    int e_ref;
    u32 facts;
};

struct Shared {
    Unit unit[2][kUnits];                                            // by row of blocks, then by column of blocks
    __align__(16) short exponent[2][kColumnBlocks][kTileRows];
    __align__(16) u32 factor[2][kColumnBlocks][kTileRows / 2];       // 2^(e - e_ref) of two rows as f16: NaN for a wrong scale
    int top[2][kUnits];                                              // TARGET 1: largest exponent of a row that holds anything
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
        const int lane = threadIdx.x % 32, lines = place.lines, blocks = place.scale_blocks;
        u32* const row_scales = place.row_scales;
#pragma unroll
        for (int n = 0; n < kUnitsPerWarp; n++) {
            if (!has(n)) continue;
            const int row = TileScales::row(n), block = column_block(n), exist = block < blocks ? lines - row : 0;
            int e[kLaneRows], most = kNothing, least = kNoScale;
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
            if (most == 0 && least < -kUnitGap) {                    // a row of zeros has scale 1
                int most_but_0 = kNothing, least_but_0 = kNoScale;
#pragma unroll
                for (int r = 0; r < kLaneRows; r++)
                    if (e[r] < 0 && e[r] != kNothing) most_but_0 = larger(most_but_0, e[r]), least_but_0 = smaller(least_but_0, e[r]);
                most_but_0 = __reduce_max_sync(~0u, most_but_0), least_but_0 = __reduce_min_sync(~0u, least_but_0);
                excludes = most_but_0 < -kUnitGap;
                if (excludes) e_ref = most_but_0, least = least_but_0;
            }
            if (lane == 0) {
                const bool general = least < e_ref - kMostDown || e_ref - kMostUp < kLowest;
                shared.unit[slot][unit(n)] = {e_ref, (general ? kGeneral : 0u) | (excludes ? kExcluded : 0u) | (wrong ? kWrong : 0u)};
                if (TARGET) shared.top[slot][unit(n)] = kNothing;
                if (!kMx && wrong) report(p.splits.errors, kScaleNotPowerOfTwo);
            }
            u32 factor[kLaneRows];
#pragma unroll
            for (int r = 0; r < kLaneRows; r++)
                factor[r] = e[r] == kNoScale ? kNanF16 : excludes && e[r] == 0 ? 0 : Halves::power(clamp(e[r] - e_ref, -kMostDown, 0));
            u16* const factors = reinterpret_cast<u16*>(shared.factor[slot][block]) + row;
            short* const exponents = shared.exponent[slot][block] + row;
            if constexpr (kMx) factors[0] = (u16)factor[0], exponents[0] = (short)e[0];
            else {
                *reinterpret_cast<uint2*>(factors) = make_uint2(factor[0] | factor[1] << 16, factor[2] | factor[3] << 16);
                *reinterpret_cast<uint2*>(exponents) = make_uint2((u32)e[0] & 0xffffu | (u32)e[1] << 16, (u32)e[2] & 0xffffu | (u32)e[3] << 16);
                // Rows are rounded up to four; what does not exist is 0.
                if (!row_scales || exist <= 0) continue;
                u32* const to = row_scales + (block * place.row_scale_pitch + row);
                if (reinterpret_cast<u64>(row_scales) % 16 == 0) Chunk<f32, 4>{{bits[n][0], bits[n][1], bits[n][2], bits[n][3]}}.store_whole(to);
                else
#pragma unroll
                    for (int r = 0; r < 4; r++) to[r] = bits[n][r];
            }
        }
    }
};

// A tile's bytes in shared memory: rows of TILE_COLUMNS, whose pairs of 16-byte units are XOR-swizzled such that the lanes of a warp, which
// read from rows 16 apart, meet no bank twice; the second half of the rows is 16 bytes further on. (Units of a pair stay neighbours:
// copies of 16 bytes from one sector to two places took 6 % longer.)
__device__ __forceinline__ int raw_unit(int row, int unit) { return row * TILE_COLUMNS + (unit ^ (row / 16 * 2 & 6)) * 16 + row / 64 * 16; }

__device__ __forceinline__ void prefetch(const AwareParams& p, const Place& place, u8* raw) {
    constexpr int kRowUnits = TILE_COLUMNS / 16, kEach = kRawBytes / 16 / kThreads, kStep = kThreads / kRowUnits;
    if (place.lost) return;
    const int first = threadIdx.x / kRowUnits, unit = threadIdx.x % kRowUnits, left = left_of(place.columns - unit * 16, 16);
    const int lines = left ? place.lines : 0;
    const i64 step = kStep * p.columns;
    const u8* from = place.from + (first * p.columns + unit * 16);
#pragma unroll
    for (int n = 0; n < kEach; n++, from += step) {
        const int row = n * kStep + first;
        u8* const to = raw + raw_unit(row, unit);
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

// The code of v * 2^k: 2^60 times the smallest code saturates, 2^-60 times the largest vanishes.
__device__ __forceinline__ u32 moved(u32 code, int k) {
    return IN::narrow(mul_rn(IN::widen(code), as_float((u32)(clamp(k, -60, 60) + 127) << 23)));
}

// This thread's 16 rows x 4 columns where they are in shared memory, element by element: for whatever scales. exponents: of these rows. t:
// log2 of the columns' targets; targets of columns are found here.
__device__ __forceinline__ void transform_in_place(u8* mine, const short* exponents, int (&t)[4]) {
    if constexpr (TARGET == 0) {
        int found[4] = {};
#pragma unroll 1
        for (int r = 0; r < 16; r++) {
            const u32 word = *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS);
            if (exponents[r] == kNoScale) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 bits = as_bits(magnitude(IN::widen(word >> c * 8 & 0xffu)));
                if (bits && bits <= 0x7f800000u) found[c] = larger(found[c], product_target(bits, exponents[r]));
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int distance = 4; distance < kUnitLanes; distance *= 2) found[c] = larger(found[c], __shfl_xor_sync(~0u, found[c], distance));
            t[c] = found[c] ? (found[c] >> 20) - kTargetBias : 0;
        }
    }
#pragma unroll 1
    for (int r = 0; r < 16; r++) {
        u32& word = *reinterpret_cast<u32*>(mine + r * TILE_COLUMNS);
        u32 codes = 0;
#pragma unroll
        for (int c = 0; c < 4; c++)
            codes |= (exponents[r] == kNoScale ? kNanFp8 : moved(word >> c * 8 & 0xffu, exponents[r] - t[c])) << c * 8;
        word = codes;
    }
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
    const int pitch = left_of(p.target_pitch - place.column(), TILE_COLUMNS), size = kMx ? 1 : 4;
    for (i64 row = first; row < end && row < p.target_rows; row++)
        clear(static_cast<u8*>(p.target_scales) + (row * p.target_pitch + place.column()) * size, (i64)pitch * size);
    if (!p.row_scales || place.tile) return;
    const i64 all = (p.row_scale_rows - place.group_scales) * p.scale_columns, each = (all + p.strips - 1) / p.strips;
    const i64 from = place.strip * each, left = all - from;
    if (left > 0) clear(reinterpret_cast<u8*>(p.row_scales + place.group_scales * p.scale_columns + from), (left < each ? left : each) * 4);
}

// The 16 columns of a warp, transposed, in shared memory, as they go to memory: a column's bytes begin where the address of its first one
// modulo 32 says, so that 16 aligned bytes there are 16 bytes here. What waits of the tile above is before them.
struct Columns {
    static constexpr int kWords = 41;                                // of a column, and one more every four: no conflicts of banks
    static constexpr int kBytes = kWarps * (kWarpColumns * kWords + kWarpColumns / 4) * 4;
    u32* words;                                                      // the warp's
    u8* to;                                                          // where its first column goes
    i64 stride;                                                      // from one to the next
    int count, lines;

    __device__ __forceinline__ u8* at(int c) const { return to + c * stride; }
    // The address of its first row modulo 32.
    __device__ __forceinline__ int phase(int c) const { return (int)((u32)reinterpret_cast<u64>(to) + (u32)c * (u32)stride) & 31; }
    __device__ __forceinline__ u32* column(int c) const { return words + c * kWords + c / 4; }
    __device__ __forceinline__ u8 byte(int c, int position) const { return reinterpret_cast<const u8*>(column(c))[position]; }
    // position: phase(c) + row, a multiple of 16.
    __device__ __forceinline__ Chunk<IN, 16> unit(int c, int position) const {
        const u32* at = column(c) + position / 4;
        return {{at[0], at[1], at[2], at[3]}};
    }

    // Columns that begin at multiples of 16 bytes.
    __device__ __forceinline__ void store_aligned() const {
        const int row = threadIdx.x % 8 * 16, first = threadIdx.x % 32 / 8;
        if (row >= lines) return;
        u8* to_column = at(first);
        const u32* from = column(first) + row / 4;
#pragma unroll
        for (int n = 0; n < kWarpColumns / 4; n++, to_column += 4 * stride, from += 4 * kWords + 1) {
            if (n * 4 + first >= count) continue;
            const u32* unit = from + ((u32)reinterpret_cast<u64>(to_column) & 16) / 4;
            Chunk<IN, 16>{{unit[0], unit[1], unit[2], unit[3]}}.store_whole(to_column + row);
        }
    }

    // Columns that follow one another, as one run of bytes.
    __device__ __forceinline__ void store_adjoining() const {
        const u32 lane = threadIdx.x % 32, first = (u32)reinterpret_cast<u64>(to), rows = (u32)lines, bytes = rows * count;
        const u32 reciprocal = (1u << 20) / rows + 1;                // at / rows, exactly: at < 2^11, rows <= 2^7
        const u32 before = -first & 15, head = before < bytes ? before : bytes, tail = (bytes - head) % 16;
        for (u32 at = head + lane * 16; at + 16 <= bytes; at += 32 * 16) {
            u32 c = at * reciprocal >> 20, column_start = c * rows;
            Chunk<IN, 16> whole = unit(c, ((first + column_start) & 31) + at - column_start);
            while (column_start + rows < at + 16) {                  // the rest is of the next column
                column_start += rows;
                const Chunk<IN, 16> next = unit(++c, (int)((first + column_start) & 31) - (int)(column_start - at));
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int kept = (int)(column_start - at) - 4 * w;
                    const u32 mask = __funnelshift_lc(~0u, 0, kept > 0 ? kept * 8 : 0);
                    whole.word[w] = (whole.word[w] & mask) | (next.word[w] & ~mask);
                }
            }
            whole.store_whole(to + at);
        }
        const u32 edge = lane % 16, at = lane < 16 ? edge : bytes - tail + edge;
        if (edge >= (lane < 16 ? head : tail)) return;
        const u32 c = at * reciprocal >> 20;
        to[at] = byte(c, phase(c) + at - c * rows);
    }

    // Columns that begin anywhere. continued: what waits of the tile above is stored as well. continues: what comes after the last
    // multiple of 32 bytes waits.
    __device__ __forceinline__ void store(bool continued, bool continues) const {
        const int lane = threadIdx.x % 32, first = lane / 8, position = lane % 8 * 16, least = continued ? -31 : 0;
        u8* to_column = at(first);
        const u32* from = column(first) + position / 4;
#pragma unroll
        for (int n = 0; n < kWarpColumns / 4; n++, to_column += 4 * stride, from += 4 * kWords + 1) {
            const int row = position - ((int)reinterpret_cast<u64>(to_column) & 31);
            if (n * 4 + first < count && row + 16 <= lines && row >= least)
                Chunk<IN, 16>{{from[0], from[1], from[2], from[3]}}.store_whole(to_column + row);
        }
        if (continued && continues) return;
        if (!continues && lane < count) {                            // there may be one more
            const int row = kTileRows - phase(lane);
            if (row + 16 <= lines) unit(lane, kTileRows).store_whole(at(lane) + row);
        }
        // Bytes that no whole unit has.
#pragma unroll 1
        for (int c = lane / 16; c < count; c += 2) {
            const int position = phase(c), before = -position & 15, head = continued ? 0 : before < lines ? before : lines;
            const int tail = continues ? 0 : (lines + 16 - (continued ? before : head)) % 16, edge = lane % 16;
            if (edge < head) at(c)[edge] = byte(c, position + edge);
            if (edge < tail) at(c)[lines - tail + edge] = byte(c, position + lines - tail + edge);
        }
    }
    // The tile below begins with what waits.
    __device__ __forceinline__ void carry_waiting() const {
        u32* const word = column(threadIdx.x % 32 / 8) + threadIdx.x % 8;
        u32 waiting[4];
#pragma unroll
        for (int n = 0; n < 4; n++) waiting[n] = word[n * (4 * kWords + 1) + kTileRows / 4];
#pragma unroll
        for (int n = 0; n < 4; n++) word[n * (4 * kWords + 1)] = waiting[n];
    }
};

#ifdef ENTRY_scaling_aware_transpose
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) scaling_aware_transpose(const __grid_constant__ AwareParams p) {
    extern __shared__ __align__(16) u8 dynamic[];                    // kAhead + 1 tiles, and the warps' Columns
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int patch = lane / 4, row = patch * 16, lane_column = lane % 4 * 4;                   // 16 rows, and 4 of the warp's columns
    u32* const columns = reinterpret_cast<u32*>(dynamic + (kAhead + 1) * kRawBytes + warp * (Columns::kBytes / kWarps));
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
    u32 last[4] = {};                                                // of the tile before: this thread's last four rows of its columns

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

        u8* const mine = raw + raw_unit(row, warp) + lane_column;    // this thread's four columns of its first row
        // Four rows of a column in a word.
        const auto load = [&](u32 (&codes)[4][4]) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                u32 word[4], column[4];
#pragma unroll
                for (int r = 0; r < 4; r++) word[r] = *reinterpret_cast<const u32*>(mine + (q * 4 + r) * TILE_COLUMNS);
                transpose_4x4(word[0], word[1], word[2], word[3], column);
#pragma unroll
                for (int c = 0; c < 4; c++) codes[c][q] = column[c];
            }
        };
        const auto holds_anything = [&](int r) { return *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS) & 0x7f7f7f7fu; };
        const Unit unit = shared.unit[slot][unit_index];
        const short* const exponents = &shared.exponent[slot][column_block][row];
        bool general = unit.facts & kGeneral;
        int t[4];                                                    // log2 of the columns' targets
        u32 codes[4][4];
        load(codes);

        u32 of_columns[2];                                           // 2^(e_ref - t) of two columns
        if constexpr (TARGET == 1) {
            int top = kNothing;
#pragma unroll
            for (int r = 0; r < 16; r++)
                if (exponents[r] != kNoScale && holds_anything(r)) top = larger(top, exponents[r]);
#pragma unroll
            for (int distance = 1; distance < kUnitLanes; distance *= 2) top = larger(top, __shfl_xor_sync(~0u, top, distance));
            if (lane % kUnitLanes == 0 && top != kNothing) atomicMax(&shared.top[slot][unit_index], top);
            __syncthreads();
            top = shared.top[slot][unit_index];
            if (top == kNothing) top = 0, of_columns[0] = Halves::power(0);
            else {
                const int k = unit.e_ref - top;
                general |= k < 0 || k > kMostUp;
                of_columns[0] = Halves::power(clamp(k, 0, kMostUp));
            }
            of_columns[0] |= of_columns[0] << 16;
            of_columns[1] = of_columns[0];
#pragma unroll
            for (int c = 0; c < 4; c++) t[c] = top;
        }
        {
            u32 values[4][8], factors[8];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 four = *reinterpret_cast<const uint4*>(&shared.factor[slot][column_block][row / 2 + 4 * half]);
                factors[4 * half] = four.x, factors[4 * half + 1] = four.y, factors[4 * half + 2] = four.z, factors[4 * half + 3] = four.w;
            }
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int r = 0; r < 8; r++) values[c][r] = Pack::widen(codes[c][r / 2], r % 2);
            if constexpr (TARGET == 0) {
                if (unit.facts & kExcluded)
#pragma unroll 1
                    for (int r = 0; r < 16; r++) general |= exponents[r] == 0 && holds_anything(r);
                u32 top[4] = {};
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int r = 0; r < 8; r++) top[c] = Halves::raised(top[c], Halves::times(values[c][r], factors[r]));
                u32 exponent[2];                                     // of two columns' targets, as f16 has exponents
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 even = __byte_perm(top[2 * half], top[2 * half + 1], 0x5410);
                    const u32 odd = __byte_perm(top[2 * half], top[2 * half + 1], 0x7632);
                    u32 largest = f16::max_magnitudes<false>(even, odd);
#pragma unroll
                    for (int distance = 4; distance < kUnitLanes; distance *= 2)
                        largest = f16::max_magnitudes<false>(largest, __shfl_xor_sync(~0u, largest, distance));
                    exponent[half] = (largest + 0x00ff00ffu) & 0xfc00fc00u;
                    of_columns[half] = ((Pack::kEmax + 30) << 10) * 0x10001u - exponent[half];
                }
                // Whether f16 has all the factors: the exponent is kEmax to 30.
                const auto is_out = [](u32 two) { return ((two + ((16 - Pack::kEmax) << 10) * 0x10001u) & 0xc000c000u) != 0x40004000u; };
#pragma unroll
                for (int c = 0; c < 4; c++) t[c] = unit.e_ref + (int)(exponent[c / 2] >> c % 2 * 16 + 10 & 31) - 15 - Pack::kEmax;
                if (is_out(exponent[0]) || is_out(exponent[1])) {
                    u32 anything = 0;                                // by column
#pragma unroll
                    for (int r = 0; r < 16; r++) anything |= holds_anything(r);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const u32 mask = 0xffffu << c % 2 * 16;
                        if (!is_out((exponent[c / 2] & mask) | (0x3c00u << 16 - c % 2 * 16))) continue;
                        general |= exponent[c / 2] & mask || anything >> c * 8 & 0xffu;
                        of_columns[c / 2] = (of_columns[c / 2] & ~mask) | (0x3c003c00u & mask);
                        t[c] = 0;
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 of_column = __byte_perm(of_columns[c / 2], 0, c % 2 ? 0x3232 : 0x1010);
#pragma unroll
                for (int q = 0; q < 4; q++)
                    codes[c][q] = Pack::narrow(Halves::times(values[c][2 * q], Halves::times(factors[2 * q], of_column)),
                                               Halves::times(values[c][2 * q + 1], Halves::times(factors[2 * q + 1], of_column)));
            }
        }
        if (__any_sync(~0u, general)) {
            transform_in_place(mine, exponents, t);
            load(codes);
        }

        // Target scales, 0 in the padding.
        const int column = warp * kWarpColumns + lane_column;
        if (lane % kUnitLanes < 4 && row < place.lines) {
            u32 stored[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 bits = t[c] >= -126 ? (u32)(t[c] + 127) << 23 : 1u << (t[c] + 149);
                stored[c] = kMx ? (u32)(t[c] + 127) : unit.facts & kWrong ? kNanF32 : bits;
                if (column + c >= place.columns) stored[c] = 0;
            }
            const i64 left = p.target_pitch - place.column() - column, at = (i64)(row / BLOCK) * p.target_pitch + column;
            if constexpr (kMx) {
                u8* const to = place.targets + at;
                if (left >= 4 && reinterpret_cast<u64>(to) % 4 == 0)
                    *reinterpret_cast<u32*>(to) = stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24;
                else
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (c < left) to[c] = (u8)stored[c];
            } else {
                u32* const to = reinterpret_cast<u32*>(place.targets) + at;
                if (left >= 4 && reinterpret_cast<u64>(to) % 16 == 0)
                    Chunk<f32, 4>{{stored[0], stored[1], stored[2], stored[3]}}.store_whole(to);
                else
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (c < left) to[c] = stored[c];
            }
        }

        // Transposed rows: of the expert, whose matrices follow one another.
        const Columns to{columns, place.to + warp * kWarpColumns * place.group_lines, place.group_lines,
                         left_of(place.columns - warp * kWarpColumns, kWarpColumns), place.lines};
        const bool aligned = place.aligned, continued = place.continued;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int phase = to.phase(lane_column + c);
            u32* const words = to.column(lane_column + c) + (phase / 4 + patch * 4);
            if (aligned) {
#pragma unroll
                for (int q = 0; q < 4; q++) words[q] = codes[c][q];
                continue;
            }
            // Bytes are shifted to where addresses have them.
            const u32 above = __shfl_sync(~0u, patch == 7 && continued ? last[c] : codes[c][3], (lane + 28) % 32);
#pragma unroll
            for (int q = 0; q < 4; q++) words[q] = __funnelshift_l(q ? codes[c][q - 1] : above, codes[c][q], phase * 8);
            if (patch == 7) words[4] = codes[c][3] >> (32 - phase % 4 * 8) % 32;       // the bytes that the shift has left over, if any
            last[c] = codes[c][3];
        }
        __syncwarp();
        if (aligned) to.store_aligned();
        else if (place.adjoins) to.store_adjoining();
        else {
            const bool continues = place.continues;
            to.store(continued, continues);
            if (continues) {
                __syncwarp();
                to.carry_waiting();
            }
        }
    }
}
#endif
