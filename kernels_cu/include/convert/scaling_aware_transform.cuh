// Computes a tile's codes and target scales, by the arithmetic that scaling_aware.cu explains.
#pragma once
#include "convert/scaling_aware_load.cuh"
#include "convert/scaling_aware_scales.cuh"

constexpr int kUnitPatches = BLOCK / 16;                             // threads in a unit's column of patches

// A thread's patch: 16 rows of four of its warp's columns, in shared memory.
struct Patch {
    int warp, lane;
    int index;                   // index in the column of patches
    int row, column;             // first row in the tile, first column in the warp's columns
    int column_block;            // index of its unit along the tile's row
    const u8* codes;             // its first row
    const short* exponents;      // log2 of its rows' scales
    Unit unit;
    int patches;                 // patches below one another that share a target

    __device__ __forceinline__ Patch(const ExpertTile& tile, const Shared& shared, int buffer, const u8* raw)
        : warp(threadIdx.x / 32), lane(threadIdx.x % 32), index(lane % kPatches), row(index * 16),
          column(lane / kPatches * 4), column_block(warp * kWarpColumns / BLOCK),
          codes(raw + raw_unit(row, warp) + column), exponents(&shared.exponent[buffer][column_block][row]),
          unit(shared.unit[buffer][row / BLOCK * kColumnBlocks + column_block]),
          patches(kMx ? kUnitPatches : kPatches >> (kStacks ? tile.stack : 0)) {}

    // Returns the four codes of a row.
    __device__ __forceinline__ u32 word(int r) const {
        return *reinterpret_cast<const u32*>(codes + r * TILE_COLUMNS);
    }
    // Returns the magnitudes of a row's codes.
    __device__ __forceinline__ u32 magnitudes(int r) const { return word(r) & 0x7f7f7f7fu; }
};

// factors of two of the patch's rows per word, as f16, relative to the unit's e_ref
using Factors = u32[8];
// two rows of a column of a patch per word, as f16
using Values = u32[4][8];

// targets of a patch's columns
struct Targets {
    u32 stored[4];                                               // bits of the target scales
    u32 of_columns[2] = {0x3c003c00u, 0x3c003c00u};              // 2^(e_ref - kLift - t) of two columns each
    int of_tile = 0;                                             // TARGET 1: log2 of the unit's target
    bool general;                // f16 lacks some factor, so the patch is computed in f32
};

// Finds the targets of a patch's columns for any scales. t: log2 of the targets.
__device__ __forceinline__ void find_any_targets(const Patch& patch, int (&t)[4]) {
    int found[4] = {};
#pragma unroll 1
    for (int r = 0; r < 16; r++) {
        const u32 word = patch.word(r);
        if (patch.exponents[r] == kNoScale || patch.exponents[r] == kNothing) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 bits = as_bits(magnitude(IN::widen(word >> c * 8 & 0xffu)));
            if (bits && bits <= 0x7f800000u)
                found[c] = larger(found[c], product_target<IN>(bits, patch.exponents[r]));
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int distance = 1; distance < kUnitPatches; distance *= 2) {
            const int other = __shfl_xor_sync(~0u, found[c], distance < patch.patches ? distance : 0);
            found[c] = larger(found[c], other);
        }
        t[c] = target_of(found[c]);
    }
}

// Transforms a patch element by element, for any scales. t: log2 of the columns' targets, which TARGET 0
// computes here.
__device__ __forceinline__ void transform_any(const Patch& patch, int (&t)[4], Codes& codes) {
    if constexpr (TARGET == 0) find_any_targets(patch, t);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        u32 four[4] = {};
#pragma unroll 1
        for (int r = 0; r < 4; r++) {
            const u32 word = patch.word(q * 4 + r);
            const int e = patch.exponents[q * 4 + r];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 code = e == kNoScale ? kNanFp8 : moved<IN>(word >> c * 8 & 0xffu, e, t[c]);
                four[c] |= code << r * 8;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) codes[c][q] = four[c];
    }
}

__device__ __forceinline__ void load_factors(const Shared& shared, int buffer, const Patch& patch,
                                             Factors& factors) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32* const from = &shared.factor[buffer][patch.column_block][patch.row / 2 + 4 * half];
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        factors[4 * half] = four.x, factors[4 * half + 1] = four.y, factors[4 * half + 2] = four.z,
        factors[4 * half + 3] = four.w;
    }
}

__device__ __forceinline__ void load_values(const Patch& patch, Values& values) {
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const u32 even = patch.word(2 * r), odd = patch.word(2 * r + 1);
        const u32 first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
        values[0][r] = Pack::widen(first, 0), values[1][r] = Pack::widen(first, 1);
        values[2][r] = Pack::widen(second, 0), values[3][r] = Pack::widen(second, 1);
    }
}

// ---- TARGET 1: a target for each unit ----
// Returns the largest exponent of a unit's rows that hold anything but zeros, or kNothing. first_row: the
// unit's first row. column: first of the four columns that this lane tests. row_lanes: the lanes that test
// the same row. exponents: log2 of the rows' scales.
__device__ __forceinline__ int find_largest(const u8* raw, const short* exponents, int first_row, int column,
                                            u32 row_lanes) {
    int amax = kNothing;
#pragma unroll 1
    for (int r = 0; r < BLOCK; r++) {
        const u8* const at = raw + raw_unit(first_row + r, column / 16) + column % 16;
        const u32 word = *reinterpret_cast<const u32*>(at);
        const u32 anything = __ballot_sync(~0u, word & 0x7f7f7f7fu) & row_lanes;
        if (anything && exponents[r] != kNoScale) amax = larger<int>(amax, exponents[r]);
    }
    return amax;
}

// Finds the target of the patch's unit, and makes the factors relative to it. Each lane of the unit tests
// four bytes of the row with the largest scale for anything but zeros.
__device__ __forceinline__ void find_unit_target(const u8* raw, const Patch& patch, Factors& factors,
                                                 Targets& targets) {
    const int in_unit = (patch.index % kUnitPatches * 4 + patch.lane / kPatches) * 4;
    const int column = patch.column_block * BLOCK + in_unit;
    const int first_row = patch.row - patch.row % BLOCK;
    const u32 row_lanes = (u32)((1ull << kUnitPatches) - 1) * 0x01010101u
                          << patch.index - patch.index % kUnitPatches;
    const int with_largest = first_row + (int)(patch.unit.facts >> 8);
    const u8* const at = raw + raw_unit(with_largest, column / 16) + column % 16;
    const u32 word = *reinterpret_cast<const u32*>(at);
    const bool holds = __ballot_sync(~0u, word & 0x7f7f7f7fu) & row_lanes;
    targets.of_tile = patch.unit.e_ref;
    if (__any_sync(~0u, !holds || patch.unit.facts & kUnusual)) {
        const short* const exponents = patch.exponents - patch.row % BLOCK;
        targets.of_tile = find_largest(raw, exponents, first_row, column, row_lanes);
        if (targets.of_tile == kNothing) targets.of_tile = 0;
        else {
            const int k = patch.unit.e_ref - targets.of_tile;
            targets.general |= k < 0 || k > kMostDoublings;
            const u32 power = Halves::power(clamp(k, 0, kMostDoublings)) * 0x10001u;
#pragma unroll
            for (int r = 0; r < 8; r++) factors[r] = Halves::times(factors[r], power);
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) targets.stored[c] = scale_bits(targets.of_tile, kMx);
}

// ---- TARGET 0: a target for each column ----
// Computes the target exponents of two columns each, in f16's exponent bits. With a lift, values become
// products.
__device__ __forceinline__ void find_target_exponents(const Patch& patch, const Factors& factors,
                                                      Values& values, u32 (&exponent)[2]) {
    u32 amax[4] = {};
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const u32 product = Halves::times(values[c][r], factors[r]);
            amax[c] = Halves::raised(amax[c], product);
            if (kLift) values[c][r] = product;
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 even = __byte_perm(amax[2 * half], amax[2 * half + 1], 0x5410);
        const u32 odd = __byte_perm(amax[2 * half], amax[2 * half + 1], 0x7632);
        u32 largest = f16::max_magnitudes<false>(even, odd);
#pragma unroll
        for (int distance = 1; distance < kUnitPatches; distance *= 2) {
            const u32 other = __shfl_xor_sync(~0u, largest, distance < patch.patches ? distance : 0);
            largest = f16::max_magnitudes<false>(largest, other);
        }
        exponent[half] = (largest + 0x00ff00ffu) & 0xfc00fc00u;
    }
}

// Returns true if f16 lacks the factor of one of two columns. It has the factors for exponents kEmax + kLift
// to kEmax + kLift + 15.
__device__ __forceinline__ bool is_out(u32 exponents) {
    return ((exponents + ((16 - Pack::kEmax - kLift) << 10) * 0x10001u) & 0xc000c000u) != 0x40004000u;
}

// Columns of zeros whose factor f16 lacks get the target 1; other such columns are computed in f32.
__device__ __forceinline__ void replace_targets(const Patch& patch, const u32 (&exponent)[2],
                                                Targets& targets) {
    u32 anything = 0;                                            // one byte per column
#pragma unroll
    for (int r = 0; r < 16; r++) anything |= patch.magnitudes(r);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const u32 mask = 0xffffu << c % 2 * 16;
        if (!is_out((exponent[c / 2] & mask) | (0x4000u << 16 - c % 2 * 16))) continue;
        targets.general |= exponent[c / 2] & mask || anything >> c * 8 & 0xffu;
        targets.of_columns[c / 2] = (targets.of_columns[c / 2] & ~mask) | (0x3c003c00u & mask);
        targets.stored[c] = scale_bits(0, kMx);
    }
}

__device__ __forceinline__ void find_column_targets(const Patch& patch, const Factors& factors,
                                                    Values& values, Targets& targets) {
    if (patch.unit.facts & kExcluded)
#pragma unroll 1
        for (int r = 0; r < 16; r++) targets.general |= patch.exponents[r] == 0 && patch.magnitudes(r);
    u32 exponent[2];
    find_target_exponents(patch, factors, values, exponent);
    // Added to a target's f16 exponent, this gives the bits of the target.
    const u32 zero = (u32)(patch.unit.e_ref - kLift - 15 - Pack::kEmax + 127) << (kMx ? 0 : 23);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 two = exponent[half];
        targets.of_columns[half] = ((Pack::kEmax + 30) << 10) * 0x10001u - two;
        targets.stored[2 * half] = zero + (kMx ? two >> 10 & 31 : (two & 0xffffu) << 13);
        targets.stored[2 * half + 1] = zero + (kMx ? two >> 26 : (two & 0xffff0000u) >> 3);
    }
    if (is_out(exponent[0]) || is_out(exponent[1])) replace_targets(patch, exponent, targets);
}

// ---- both ----
// Multiplies the values of a patch and rounds them to codes.
__device__ __forceinline__ void narrow_codes(const Values& values, const Factors& factors,
                                             const Targets& targets, Codes& codes) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const u32 of_column = __byte_perm(targets.of_columns[c / 2], 0, c % 2 ? 0x3232 : 0x1010);
        const auto scaled = [&](int r) {
            if constexpr (TARGET == 1) return Halves::times(values[c][r], factors[r]);
            else if constexpr (kLift != 0) return Halves::times(values[c][r], of_column);
            else return Halves::times(values[c][r], Halves::times(factors[r], of_column));
        };
#pragma unroll
        for (int q = 0; q < 4; q++) codes[c][q] = Pack::narrow(scaled(2 * q), scaled(2 * q + 1));
    }
}

// Stores the target scales of a patch's columns; 0 in the padding. row, column: of the patch, in its strip
// and in the tile's columns.
__device__ __forceinline__ void store_targets(const ScalingAwareParams& p, const ExpertTile& tile, int row,
                                              int column, const u32 (&stored)[4]) {
    u8* const targets = as_global(tile.targets);
    u8* const to = targets + ((i64)(row / BLOCK) * p.target_pitch + column) * kScaleBytes;
    if (tile.whole_targets) {
        u32* const words = reinterpret_cast<u32*>(to);
        if constexpr (kMx) *words = stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24;
        else Chunk<f32, 4>{{stored[0], stored[1], stored[2], stored[3]}}.store_whole(words);
    } else {
        const int left = left_of(p.target_pitch - tile.column() - column, 4);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (c >= left) continue;
            const u32 bits = column + c < tile.columns ? stored[c] : 0;
            if constexpr (kMx) to[c] = (u8)bits;
            else reinterpret_cast<u32*>(to)[c] = bits;
        }
    }
}

// Transposes a tile whose bytes and scales are in shared memory. buffer: index of its scales, 0 or 1.
// shifted: room for columns that begin anywhere.
__device__ __forceinline__ void transform_tile(const ScalingAwareParams& p, const ExpertTile& tile,
                                               Shared& shared, int buffer, u8* raw, u8* shifted) {
    if constexpr (GATHER) store_rows(p, tile, raw);
    const Patch patch(tile, shared, buffer, raw);
    const int row = tile.row_in_strip(patch.row);
    const int column = patch.warp * kWarpColumns + patch.column + tile.strip_of(patch.row) * TILE_COLUMNS;
    Targets targets;
    targets.general = patch.unit.facts & kGeneral;
    Factors factors;
    load_factors(shared, buffer, patch, factors);
    if constexpr (TARGET == 1) find_unit_target(raw, patch, factors, targets);
    Values values;
    load_values(patch, values);
    if constexpr (TARGET == 0) find_column_targets(patch, factors, values, targets);
    Codes codes;
    narrow_codes(values, factors, targets, codes);
    if (__any_sync(~0u, targets.general)) {
        int t[4] = {targets.of_tile, targets.of_tile, targets.of_tile, targets.of_tile};
        transform_any(patch, t, codes);
#pragma unroll
        for (int c = 0; c < 4; c++) targets.stored[c] = scale_bits(t[c], kMx);
    }
    if (row % BLOCK == 0 && row < tile.rows) {
        if (!kMx && patch.unit.facts & kWrong << tile.strip_of(patch.row))
#pragma unroll
            for (int c = 0; c < 4; c++) targets.stored[c] = kNanF32;
        store_targets(p, tile, row, column, targets.stored);
    }
    if (ONE_TILE || tile.aligned)
        store_aligned(tile, codes, row, column, shared.halves + patch.warp * kHalvesBytes);
    else if (tile.group_down > 1) store_columns(tile, codes, shifted + patch.warp * kShiftedBytes);
    else store_range(tile, codes, shifted);
}
