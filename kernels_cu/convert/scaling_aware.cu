// The scaling-aware transpose (docs/numerics.md, section 4) turns FP8 with a power-of-two scale for every
// BLOCK elements of a row into transposed FP8 with one for every BLOCK of a column, without a wider type.
//
//   out = narrow(v * s / t), rounded once; s = 2^e is the element's scale, and t that of the new block:
//   TARGET 0 (column)  t = smallest power of two >= max |v| * s / fp8_max over BLOCK rows of a column
//   TARGET 1 (tile)    t = largest s of those rows of BLOCK x BLOCK elements that hold anything but zeros
//
// Rounding is to nearest-even, and saturates. A code that is NaN stays NaN, and a scale that is no power of
// two gives NaN. A row with s = 0 (an unused row of `permute`) gives narrow(v * 0) and counts for no target.
//
// data           FP8 [rows, columns] (IN)
// scales         compact [rows, ceil(columns / BLOCK)]: f32 (BLOCK 128), E8M0 (32)
// out            FP8 [columns, rows]; with splits (rows per expert) [columns, rows of the expert] each
// target_scales  [blocks along the rows of every expert, target_pitch]; padding and the rest are 0
// row_scales     null, or `scales` transposed in f32: for every expert [ceil(columns / BLOCK), rows rounded
//                up to 4], row_scale_rows such rows in all; the padding and the rest are 0
//
// A tile is 128 rows x TILE_COLUMNS columns and begins at an expert's first row or a multiple of 128 rows on.
// Tiles are counted down the rows of an expert, then along its strips of TILE_COLUMNS columns, then expert by
// expert. A block of threads takes `tiles` tiles, one after the other, and copies the next one into shared
// memory meanwhile. A warp has 16 columns of the tile, and a thread 16 rows x 4 columns. Eight threads one
// below the other find a column's amax by exchanges inside the warp and store 128 bytes of a column.
//
// An expert of at most 64 (or 32) rows has two (or four) strips in a tile, one below the other (its `stack`).
// Rows of the tile are then rows of the expert modulo 64 or 32, each 128 columns further on. A tile that is
// one unit with one target (TARGET 1 for blocks of 128) never has a stack.
//
// Arithmetic is in f16, relative to the largest scale 2^e_ref of a block's rows. v * 2^(e - t) loses bits
// only where it is below 2^-20 (e4m3fn) and becomes 0 anyway, if f16 has the powers of two that are needed.
// The rare other blocks are computed in f32, element by element.
//   e4m3fn, column   The products v * 2^(e - e_ref + kLift) give the target and are then multiplied by
//                    2^(e_ref - kLift - t). kLift uses all exponents of f16: the first product, of four bits,
//                    loses bits only below 2^(e_ref - 27), and t >= e_ref - 15.
//   e5m2, column     There is no room for a lift: v * (2^(e - e_ref) * 2^(e_ref - t)).
//   tile             v * (2^(e - e_ref) * 2^(e_ref - t)). t is the scale of the row with the largest scale
//                    unless that row holds only zeros.
//
// Experts have any number of rows, so rows of the output begin anywhere. A warp then shifts its columns in
// shared memory to whole sectors. If the block's next tile is the one below, the last rows wait for it. The
// columns of an expert of one row of tiles have no gaps, so such a tile is staged as a whole.
//
// Each define changes registers, shared memory or the inner loop:
//   IN            e4m3fn or e5m2
//   BLOCK         elements that share a scale: 128 (f32 scales) or 32 (E8M0)
//   TARGET        0: column, 1: tile (above)
//   TILE_COLUMNS  128
//   BLOCKS        how many blocks of threads should fit on a multiprocessor: 4 or 3 (docs/lab-notes)
//   ALIGNED       1: rows of the data allow 16-byte asynchronous copies; 0: they go through registers
//   ONE_TILE      1: nothing is split, all columns begin at multiples of 16 bytes, and BLOCKS is 4. A block
//                 has one tile, which needs no search for experts and no shifts: a third of the program.
// It moves 2 bytes per element, and 8 / BLOCK for f32 scales.
#include "groups/scaling_aware_scales.cuh"
#include "groups/scaling_aware_tile.cuh"

constexpr int kUnitPatches = BLOCK / 16;                             // threads below one another in a unit
// A multiprocessor keeps BLOCKS blocks of threads on an H200. With as many, values spill on other GPUs, with
// CUDA 12, and with the integer conversions.
#if defined(CUPY_FP8_HARDWARE_CVT) && __CUDA_ARCH__ < 1000
constexpr bool kFewer = __CUDACC_VER_MAJOR__ < 13 || (!ONE_TILE && __CUDA_ARCH__ < 900);
constexpr int kBlocks = !ALIGNED ? BLOCKS - 1 : kFewer && BLOCKS == 4 ? 3 : BLOCKS;
#else
constexpr int kBlocks = 2;
#endif

// Transforms this thread's 16 rows x 4 columns element by element, for any scales. exponents: log2 of the
// rows' scales. patches: how many threads have the rows of a block. t: log2 of the columns' targets, which
// are found here for TARGET 0.
__device__ __forceinline__ void transform_any(const u8* mine, const short* exponents, int patches,
                                              int (&t)[4], u32 (&codes)[4][4]) {
    if constexpr (TARGET == 0) {
        int found[4] = {};
#pragma unroll 1
        for (int r = 0; r < 16; r++) {
            const u32 word = *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS);
            if (exponents[r] == kNoScale || exponents[r] == kNothing) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 bits = as_bits(magnitude(IN::widen(word >> c * 8 & 0xffu)));
                if (bits && bits <= 0x7f800000u)
                    found[c] = larger(found[c], product_target<IN>(bits, exponents[r]));
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int distance = 1; distance < kUnitPatches; distance *= 2) {
                const int other = __shfl_xor_sync(~0u, found[c], distance < patches ? distance : 0);
                found[c] = larger(found[c], other);
            }
            t[c] = target_of(found[c]);
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
            for (int c = 0; c < 4; c++) {
                const u32 code = e == kNoScale ? kNanFp8 : moved<IN>(word >> c * 8 & 0xffu, e, t[c]);
                four[c] |= code << r * 8;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) codes[c][q] = four[c];
    }
}

// Returns the largest exponent of the rows of a unit that hold anything but zeros, or kNothing. first_row:
// the unit's first row. column: the first of the four columns that this lane tests. others: the lanes that
// test the same row. exponents: log2 of the rows' scales.
__device__ __forceinline__ int find_largest(const u8* raw, const short* exponents, int first_row, int column,
                                            u32 others) {
    int amax = kNothing;
#pragma unroll 1
    for (int r = 0; r < BLOCK; r++) {
        const u8* const at = raw + raw_unit(first_row + r, column / 16) + column % 16;
        const u32 word = *reinterpret_cast<const u32*>(at);
        const u32 anything = __ballot_sync(~0u, word & 0x7f7f7f7fu) & others;
        if (anything && exponents[r] != kNoScale) amax = larger(amax, exponents[r]);
    }
    return amax;
}

#ifdef ENTRY_scaling_aware_transpose
// Transposes the tile at `place`, whose bytes and scales are in shared memory. buffer: which of the two has
// its scales. shifted: room for columns that begin anywhere.
__device__ __forceinline__ void transform_tile(const ScalingAwareParams& p, const Place& place,
                                               Shared& shared, int buffer, u8* raw, u8* shifted) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // This thread has 16 rows of four of the warp's columns.
    const int patch = lane % kPatches, row = patch * 16, lane_column = lane / kPatches * 4;
    const int column_block = warp * kWarpColumns / BLOCK;
    const int unit_index = row / BLOCK * kColumnBlocks + column_block;
    const u8* const mine = raw + raw_unit(row, warp) + lane_column;      // this thread's first row
    const auto holds_anything = [&](int r) {
        return *reinterpret_cast<const u32*>(mine + r * TILE_COLUMNS) & 0x7f7f7f7fu;
    };
    const Unit unit = shared.unit[buffer][unit_index];
    const short* const exponents = &shared.exponent[buffer][column_block][row];
    const int line = place.line_of(row);
    const int column = warp * kWarpColumns + lane_column + place.strip_of(row) * TILE_COLUMNS;
    // So many threads below one another share a target.
    const int patches = kMx ? kUnitPatches : kPatches >> (kStacks ? place.stack : 0);
    bool general = unit.facts & kGeneral;
    u32 codes[4][4], stored[4];              // four rows of a column per word; bits of the columns' targets
    int tile_target = 0;
    u32 of_columns[2] = {0x3c003c00u, 0x3c003c00u};              // 2^(e_ref - kLift - t) of two columns each

    u32 factors[8];                                              // of two rows each
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32* const from = &shared.factor[buffer][column_block][row / 2 + 4 * half];
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        factors[4 * half] = four.x, factors[4 * half + 1] = four.y, factors[4 * half + 2] = four.z,
        factors[4 * half + 3] = four.w;
    }
    if constexpr (TARGET == 1) {
        // Each lane of a unit tests four bytes of the row with the largest scale for anything but zeros.
        const int in_unit = (patch % kUnitPatches * 4 + lane / kPatches) * 4;
        const int column = column_block * BLOCK + in_unit;
        const int first_row = row - row % BLOCK;
        const u32 others = (u32)((1ull << kUnitPatches) - 1) * 0x01010101u << patch - patch % kUnitPatches;
        const int with_largest = first_row + (int)(unit.facts >> 8);
        const u8* const at = raw + raw_unit(with_largest, column / 16) + column % 16;
        const u32 word = *reinterpret_cast<const u32*>(at);
        const bool holds = __ballot_sync(~0u, word & 0x7f7f7f7fu) & others;
        tile_target = unit.e_ref;
        if (__any_sync(~0u, !holds || unit.facts & kUnusual)) {
            tile_target = find_largest(raw, exponents - row % BLOCK, first_row, column, others);
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
        for (int c = 0; c < 4; c++) stored[c] = scale_bits(tile_target, kMx);
    }
    u32 values[4][8];                                            // two rows of a column each
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
        u32 amax[4] = {};
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int r = 0; r < 8; r++) {
                const u32 product = Halves::times(values[c][r], factors[r]);
                amax[c] = Halves::raised(amax[c], product);
                if (kLift) values[c][r] = product;
            }
        u32 exponent[2];                     // exponents of two columns' targets each, as f16 has them
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 even = __byte_perm(amax[2 * half], amax[2 * half + 1], 0x5410);
            const u32 odd = __byte_perm(amax[2 * half], amax[2 * half + 1], 0x7632);
            u32 largest = f16::max_magnitudes<false>(even, odd);
#pragma unroll
            for (int distance = 1; distance < kUnitPatches; distance *= 2) {
                const u32 other = __shfl_xor_sync(~0u, largest, distance < patches ? distance : 0);
                largest = f16::max_magnitudes<false>(largest, other);
            }
            exponent[half] = (largest + 0x00ff00ffu) & 0xfc00fc00u;
            of_columns[half] = ((Pack::kEmax + 30) << 10) * 0x10001u - exponent[half];
        }
        // These bits and the exponent of a target as f16 has it add up to the target.
        const u32 zero = (u32)(unit.e_ref - kLift - 15 - Pack::kEmax + 127) << (kMx ? 0 : 23);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            stored[2 * half] = zero + (kMx ? exponent[half] >> 10 & 31 : (exponent[half] & 0xffffu) << 13);
            stored[2 * half + 1] = zero + (kMx ? exponent[half] >> 26 : (exponent[half] & 0xffff0000u) >> 3);
        }
        // f16 has all the factors if the exponent is kEmax + kLift to kEmax + kLift + 15.
        const auto is_out = [](u32 two) {
            return ((two + ((16 - Pack::kEmax - kLift) << 10) * 0x10001u) & 0xc000c000u) != 0x40004000u;
        };
        if (is_out(exponent[0]) || is_out(exponent[1])) {
            u32 anything = 0;                                    // a byte per column
#pragma unroll
            for (int r = 0; r < 16; r++) anything |= holds_anything(r);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 mask = 0xffffu << c % 2 * 16;
                if (!is_out((exponent[c / 2] & mask) | (0x4000u << 16 - c % 2 * 16))) continue;
                general |= exponent[c / 2] & mask || anything >> c * 8 & 0xffu;
                of_columns[c / 2] = (of_columns[c / 2] & ~mask) | (0x3c003c00u & mask);
                stored[c] = scale_bits(0, kMx);
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
        for (int c = 0; c < 4; c++) stored[c] = scale_bits(t[c], kMx);
    }

    // Target scales in the padding are 0.
    if (line % BLOCK == 0 && line < place.lines) {
        if (!kMx && unit.facts & kWrong << place.strip_of(row))
#pragma unroll
            for (int c = 0; c < 4; c++) stored[c] = kNanF32;
        u8* const targets = as_global(place.targets);
        u8* const to = targets + ((i64)(line / BLOCK) * p.target_pitch + column) * kScaleBytes;
        if (place.plain) {
            u32* const words = reinterpret_cast<u32*>(to);
            if constexpr (kMx) *words = stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24;
            else Chunk<f32, 4>{{stored[0], stored[1], stored[2], stored[3]}}.store_whole(words);
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

    if (ONE_TILE || place.aligned)
        store_aligned(place, codes, line, column, shared.halves + warp * kHalvesBytes);
    else if (place.group_down > 1) store_columns(place, codes, shifted + warp * kShiftedBytes);
    else store_range(place, codes, shifted);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
scaling_aware_transpose(const __grid_constant__ ScalingAwareParams p) {
    extern __shared__ __align__(16) u8 dynamic[];        // It holds kAhead + 1 tiles, then staged columns.
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (ONE_TILE) {
        const u32 strip = blockIdx.x / (u32)p.down;
        Place& place = shared.place[0];
        if (threadIdx.x == 0) {
            Place found = expert_of(p, 0, 0);
            found.tile = blockIdx.x - strip * (u32)p.down, found.strip = strip;
            found.settle(p, true, 1);
            place = found;
        }
        __syncthreads();
        if (strip & (1u << place.stack) - 1) return;                 // Another block has this strip.
        TileScales scales;
        scales.load(p, place);
        prefetch(p, place, dynamic);
        copy_async_commit();
        // For MX with column targets the instructions cost more than they gain.
        if (!kMx || TARGET == 1) fetch_ahead(p);
        scales.write(p, place, 0, shared);
        copy_async_wait();
        __syncthreads();
        transform_tile(p, place, shared, 0, dynamic, nullptr);
        return;
    }
    const i64 first_tile = (i64)blockIdx.x * p.tiles, all_tiles = p.down * p.strips;
    const int tiles = left_of(all_tiles - first_tile, (int)p.tiles);
    const auto place_of = [&](int n) -> Place& { return shared.place[n % (kAhead + 2)]; };
    const auto fetch = [&](int n) {
        if (place_of(n).exists) prefetch(p, place_of(n), dynamic + n % (kAhead + 1) * kRawBytes);
        copy_async_commit();
    };
    const bool finds = warp == kWarps - 1;                           // The last warp finds the places.
    const i64 first_row = first_tile / p.strips;                     // which row of tiles
    u32 next_segment = 0;
    if (p.splits.groups >= 0) {
        if (warp == 0 && blockIdx.x == 0) check_sizes(p.splits, p.rows);
        next_segment = load_segment_word(p, first_row);
    }
    // Group -1: no expert has these rows or any that follow.
    const bool past_groups = (int)__shfl_sync(~0u, next_segment, 1) < 0;
    if (finds) {
        if (past_groups) {
            if (lane == 0) place_of(0).exists = false, place_of(0).past_groups = true;
        } else {
            const Place expert = expert_of(p, first_row, next_segment);
            find_first(p, expert, first_tile, tiles, &place_of(0), &place_of(kAhead + 1));
        }
        for (int n = 1; n <= kAhead; n++) {
            __syncwarp();
            find_next(p, place_of(n - 1), load_next_segment(p, place_of(n - 1), tiles), tiles, &place_of(n));
        }
    }
    __syncthreads();
    TileScales scales;
    if (place_of(0).exists) scales.load(p, place_of(0));
    for (int n = 0; n < kAhead; n++) fetch(n);

    int n = 0;
#pragma unroll 1
    for (; place_of(n).exists && !place_of(n).past_groups; n++) {
        const int buffer = n % 2;
        const Place& place = place_of(n);
        u8* const raw = dynamic + n % (kAhead + 1) * kRawBytes;
        if (finds && n > 0)
            find_next(p, place_of(n + kAhead - 1), next_segment, tiles, &place_of(n + kAhead));
        scales.write(p, place, buffer, shared);
        copy_async_wait<kAhead - 1>();
        __syncthreads();
        if (place_of(n + 1).exists) scales.load(p, place_of(n + 1));
        fetch(n + kAhead);
        if (finds) next_segment = load_next_segment(p, place_of(n + kAhead), tiles);
        transform_tile(p, place, shared, buffer, raw, dynamic + (kAhead + 1) * kRawBytes);
    }
    if (!place_of(n).exists && !place_of(n).past_groups) return;
    // This equals the variable `past_groups`, which would keep a register until here.
    const bool none = !place_of(n).exists;
    const Place rest = none ? expert_of(p, first_row, next_segment) : place_of(n);
    const i64 first = (none ? first_tile : first_tile + rest.offset) - rest.group_tile * p.strips;
    clear_rest(p, rest, first, first + tiles - rest.offset);
}
#endif
