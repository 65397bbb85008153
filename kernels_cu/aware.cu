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
// row_scales     f32 [ceil(columns / BLOCK), row_pitch]: `scales` transposed, padded with 0; or null
//
// A block of threads has a tile of 128 rows x TILE_COLUMNS columns, which begins at an expert's first row or 128 rows on; a thread
// 8 x 8 elements (include/tile.cuh). All of them share ALIGNED: 1 where rows of the data allow 8-byte loads. Rows of the output begin
// anywhere (experts have any number of rows): store_unaligned. Bytes moved per element: 2, and 8 / BLOCK of f32 scales.
//
// Products v * s span more than f32 does. Of the eight rows of a thread they are computed relative to the largest scale e_ref among them:
// exact wherever their scales differ by less than 2^kSpan. Wider patches, which hardly occur, go element by element.
#include "e8m0.cuh"
#include "groups.cuh"
#include "pairs.cuh"
#include "tile.cuh"

struct AwareParams {
    const IN::storage* data;
    const void* scales;
    u8* out;
    void* target_scales;
    float* row_scales;
    Splits splits;               // groups -1: there are none, all rows are one expert's
    i64 rows, columns;
    i64 scale_columns;           // of the compact scales
    i64 target_pitch, target_rows;
    i64 row_pitch;
    u32 down, across;            // tiles
};

using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;
using Line = Chunk<IN, 8>;
constexpr bool kMx = BLOCK == 32;
constexpr int kRowBlocks = TILE_ROWS / BLOCK, kColumnBlocks = TILE_COLUMNS / BLOCK, kBlockLanes = BLOCK / 8;
#ifdef CUPY_FP8_HARDWARE_CVT
constexpr int kThreadsInFlight = 1024;                               // per multiprocessor, at least
#else
constexpr int kThreadsInFlight = 512;                                // the integer conversions take more registers
#endif
constexpr int kThreads = Tile::kThreads, kBlocks = kThreadsInFlight / kThreads;
static_assert(TILE_ROWS == 128 && (kMx || BLOCK == 128), "a tile of an expert is a row of 128 x 1 blocks");

constexpr int kNoScale = 1 << 20;                                    // the exponent of a scale that is no power of two
constexpr int kNothing = -kNoScale;                                  // of no scale at all
constexpr int kBias = 1024;                                          // a target's exponent in shared memory is positive: 0 is none
constexpr int kLowest = -127, kHighest = 127;                        // column targets

using Two = Pair<IN>;

__device__ __forceinline__ int clamp(int v, int low, int high) { return v < low ? low : v > high ? high : v; }
__device__ __forceinline__ u32 codes_of(const Line& line, int pair) { return line.word[pair / 2] >> pair % 2 * 16 & 0xffffu; }
__device__ __forceinline__ bool holds_anything(const Line& line) { return (line.word[0] | line.word[1]) & 0x7f7f7f7fu; }

// log2 of a scale, kNoScale where it is no power of two.
__device__ __forceinline__ int exponent_of_f32(u32 bits) {
    int bias = 127;
    if (bits < 0x00800000u) bits = as_bits(mul_rn(as_float(bits), as_float((127u + 64) << 23))), bias += 64;    // a subnormal, or 0
    return bits - 1u < 0x7f7fffffu && !(bits & 0x7fffffu) ? (int)(bits >> 23) - bias : kNoScale;
}
__device__ __forceinline__ int exponent_of_e8m0(u32 byte) { return byte == kNanE8m0 ? kNoScale : (int)byte - 127; }

// The column target (its exponent, biased) that a magnitude |v| * 2^d in f32 bits, not 0, calls for, d relative to the exponent e. The
// largest code is 1.75 * 2^kEmax: a product of up to that mantissa needs its own exponent, one above it the next.
__device__ __forceinline__ int target_of(u32 bits, int e) {
    if (bits >= 0x7f800000u) return kHighest + kBias;
    return clamp((int)(bits + 0x1fffffu >> 23) - 127 - Two::kEmax + e, kLowest, kHighest) + kBias;
}
// log2 of a target.
__device__ __forceinline__ int target_exponent(int stored) { return stored ? stored - kBias : 0; }

// Where a tile is, and the expert whose it is.
struct Place {
    i64 start, group_start, group_lines;                             // rows of the data
    i64 block;                                                       // its first row of target scales
    int lines;                                                       // rows of the tile
    bool lost;                                                       // no expert's

    __device__ __forceinline__ const IN::storage* at(const AwareParams& p, int row, i64 column) const {
        return p.data + (start + row) * p.columns + column;
    }
};

// How many blocks of BLOCK rows the experts have that end at or before row `end`; by one warp.
__device__ __forceinline__ i64 count_blocks(const Splits& splits, i64 total, i64 end) {
    i64 at = 0, blocks = 0;
    for (i64 round = 0; round < splits.groups && at < end; round += 32) {
        i64 size = splits.load(round + threadIdx.x % 32);
        size = size < 0 ? 0 : size > total ? total : size;
        const i64 sum = warp_prefix_sum(size);
        i64 first = at + sum - size, last = at + sum;
        first = first < total ? first : total, last = last < total ? last : total;      // as find_groups cuts them short
        if (last <= end) blocks += (last - first + BLOCK - 1) / BLOCK;
        at += __shfl_sync(~0u, sum, 31);
    }
    return __shfl_sync(~0u, warp_prefix_sum(blocks), 31);
}

// By one warp, before a barrier.
__device__ __forceinline__ void find_place(const AwareParams& p, i64 tile, Place* place) {
    if (p.splits.groups < 0) {
        const i64 start = tile * TILE_ROWS;
        if (threadIdx.x == 0) *place = {start, 0, p.rows, tile * kRowBlocks, left_of(p.rows - start, TILE_ROWS), false};
        return;
    }
    __shared__ GroupTile found;
    find_groups<1, TILE_ROWS, 1>(p.splits, p.rows, tile, p.down, blockIdx.x == 0, &found);
    __syncwarp();
    const GroupTile group = found;
    const i64 in_group = tile - group.group_tile, group_start = group.start - in_group * TILE_ROWS;
    i64 block = tile;
    if (kMx) block = count_blocks(p.splits, p.rows, group_start) + in_group * kRowBlocks;
    if (threadIdx.x == 0) *place = {group.start, group_start, group.group_lines, block, group.lines, group.lost};
}

// Stores the transposed rows of a tile that begin at any address: whole aligned 16-byte units by some threads, the up to 30 bytes beside
// them by others, a byte each. to: where source column 0 goes; rows `stride` bytes apart, rows_left bytes long.
__device__ __forceinline__ void store_unaligned(const Tile& tile, u8* to, i64 stride, int columns_left, int rows_left) {
    constexpr int kUnits = TILE_ROWS / 16;
    for (int i = threadIdx.x; i < columns_left * kUnits; i += kThreads) {
        const int column = i / kUnits;
        u8* row = to + column * stride;
        const int first = (int)(-reinterpret_cast<u64>(row) & 15) + i % kUnits * 16;                // source row of the unit's first byte
        if (first + 16 > rows_left) continue;
        u32 word[6];
#pragma unroll
        for (int c = 0; c < 3; c++) {
            const u64 chunk = tile.chunk_at(column, first / 8 + c);
            word[2 * c] = (u32)chunk, word[2 * c + 1] = (u32)(chunk >> 32);
        }
        const bool second = first & 4;
        const int shift = first % 4 * 8;
        Chunk<IN, 16> unit;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 low = second ? word[w + 1] : word[w], high = second ? word[w + 2] : word[w + 1];
            unit.word[w] = (u32)(((u64)high << 32 | low) >> shift);
        }
        unit.store_whole(row + first);
    }
    for (int i = threadIdx.x; i < columns_left * 16; i += kThreads) {
        const int column = i / 16;
        u8* row = to + column * stride;
        const int before = (int)(-reinterpret_cast<u64>(row) & 15), head = before < rows_left ? before : rows_left;
        const int edges = head + (rows_left - head) % 16;
        for (int edge = i % 16; edge < edges; edge += 16) {
            const int r = edge < head ? edge : rows_left - edges + edge;
            row[r] = *tile.byte_at(r, column);
        }
    }
}

#ifdef ENTRY_scaling_aware_transpose
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) scaling_aware_transpose(const __grid_constant__ AwareParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) int exponents[kColumnBlocks][TILE_ROWS];
    constexpr int kTargets = kRowBlocks * (TARGET ? kColumnBlocks : TILE_COLUMNS);
    __shared__ int targets[kTargets];                                // of columns: column % 8 first, then column / 8
    __shared__ u32 wrong[kColumnBlocks];                             // whether a scale is no power of two
    // Read anew where it is needed: registers are short.
    __shared__ Place place;
    const Tile tile{shared};
    const u32 line = blockIdx.x / (DOWN_FIRST ? p.down : p.across), in_line = blockIdx.x - line * (DOWN_FIRST ? p.down : p.across);
    const u32 tile_row = DOWN_FIRST ? in_line : line;
    const i64 first_column = (i64)(DOWN_FIRST ? line : in_line) * TILE_COLUMNS;
    const int columns_of_tile = left_of(p.columns - first_column, TILE_COLUMNS);
    if (threadIdx.x < 32) find_place(p, tile_row, &place);
    __syncthreads();

    // Everything that is read, at once.
    const int patch_row = Tile::patch_row(), patch_column = Tile::patch_column();
    const int rows_left = place.lost ? 0 : left_of(place.lines - patch_row, 8);
    int columns_left = left_of(columns_of_tile - patch_column, 8);
    if (ALIGNED && columns_left) columns_left = 8;
    Line patch[8];
    Tile::load_patch(patch, place.at(p, patch_row, first_column + patch_column), p.columns, rows_left, columns_left, ALIGNED != 0);
    const i64 first_block = first_column / BLOCK;
#pragma unroll
    for (int i = threadIdx.x; i < kColumnBlocks * TILE_ROWS; i += kThreads) {
        const int r = i / kColumnBlocks, b = i % kColumnBlocks;
        int e = 0;
        if (r < place.lines && first_block + b < p.scale_columns) {
            const i64 at = (place.start + r) * p.scale_columns + first_block + b;
            if constexpr (kMx) e = exponent_of_e8m0(load_read_only(static_cast<const u8*>(p.scales) + at));
            else {
                const u32 bits = load_read_only(static_cast<const u32*>(p.scales) + at);
                e = exponent_of_f32(bits);
                if (e == kNoScale) report(p.splits.errors, kScaleNotPowerOfTwo);
                if (p.row_scales) p.row_scales[(first_block + b) * p.row_pitch + place.start + r] = as_float(bits);
            }
        }
        exponents[b][r] = e;
    }
    for (int i = threadIdx.x; i < kTargets; i += kThreads) targets[i] = 0;
    if (threadIdx.x < kColumnBlocks) {
        wrong[threadIdx.x] = 0;
        if (p.row_scales && place.lines && place.start + place.lines == p.rows && first_block + threadIdx.x < p.scale_columns)
#pragma unroll 1
            for (i64 r = p.rows; r < p.row_pitch; r++) p.row_scales[(first_block + threadIdx.x) * p.row_pitch + r] = as_float(0);
    }
    __syncthreads();

    // What this thread's rows call for.
    const int column_block = patch_column / BLOCK, row_block = patch_row / BLOCK;
    int e[8], e_ref = kNothing;
    bool is_wrong = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 four = *reinterpret_cast<const uint4*>(&exponents[column_block][patch_row + 4 * half]);
        e[4 * half] = (int)four.x, e[4 * half + 1] = (int)four.y, e[4 * half + 2] = (int)four.z, e[4 * half + 3] = (int)four.w;
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        is_wrong |= e[r] == kNoScale;
        if (e[r] != kNoScale && holds_anything(patch[r]) && e[r] > e_ref) e_ref = e[r];
    }
    if (!kMx && is_wrong) atomicOr(&wrong[column_block], 1u);

    if constexpr (TARGET == 1) {
        int top = e_ref == kNothing ? 0 : e_ref + kBias;
#pragma unroll
        for (int distance = 1; distance < kBlockLanes; distance *= 2) {
            const int other = __shfl_xor_sync(~0u, top, distance);
            top = other > top ? other : top;
        }
        int* target = &targets[row_block * kColumnBlocks + column_block];
        if (threadIdx.x % kBlockLanes == 0 && top) atomicMax(target, top);
        __syncthreads();
        const int t = target_exponent(*target);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            // Rows of zeros may have any scale.
            const int k = clamp(e[r] - t, Two::kLow, 0);
            const Two factor = e[r] == kNoScale ? Two::nan() : Two::power(k, k);
            u32 codes[4];
#pragma unroll
            for (int c = 0; c < 4; c++) codes[c] = Two::widen(codes_of(patch[r], c)).times(factor).narrow();
            patch[r] = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
        }
        tile.write_patch(patch);
    } else {
        int* const target = &targets[row_block * TILE_COLUMNS + Tile::column_patch()];              // of column c: [c * kColumnPatches]
        bool wide = false;
        Two factor[8];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int d = clamp(e[r] - e_ref, -Two::kSpan, 0);
            wide |= e[r] < e_ref - Two::kSpan && holds_anything(patch[r]);
            factor[r] = e[r] == kNoScale ? Two::nan() : Two::power(d, d);
        }
        if (!wide) {
            Two top[4]{};
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) top[c].raise(Two::widen(codes_of(patch[r], c)).times(factor[r]));
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const u32 bits = top[c / 2].f32_bits(c % 2);
                if (!bits) continue;
                const int t = target_of(bits, e_ref);
                wide |= t - kBias < e_ref - Two::kHigh;              // the factor of this column may be too large
                atomicMax(target + c * Tile::kColumnPatches, t);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < rows_left * 8; i++) {
                const int r = i / 8, c = i % 8, power = exponents[column_block][patch_row + r];
                if (c >= columns_left) continue;
                const u32 bits = as_bits(magnitude(IN::widen(*place.at(p, patch_row + r, first_column + patch_column + c))));
                if (bits && bits <= 0x7f800000u && power != kNoScale) atomicMax(target + c * Tile::kColumnPatches, target_of(bits, power));
            }
        }
        __syncthreads();
        if (!wide) {
            Two of_columns[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int lo = e_ref - target_exponent(target[2 * c * Tile::kColumnPatches]);
                const int hi = e_ref - target_exponent(target[(2 * c + 1) * Tile::kColumnPatches]);
                of_columns[c] = Two::power(clamp(lo, Two::kLow, Two::kHigh), clamp(hi, Two::kLow, Two::kHigh));
            }
#pragma unroll
            for (int r = 0; r < 8; r++) {
                u32 codes[4];
#pragma unroll
                for (int c = 0; c < 4; c++) codes[c] = Two::widen(codes_of(patch[r], c)).times(factor[r]).times(of_columns[c]).narrow();
                patch[r] = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
            }
            tile.write_patch(patch);
        } else {
#pragma unroll 1
            for (int i = 0; i < rows_left * 8; i++) {
                const int r = i / 8, c = i % 8, power = exponents[column_block][patch_row + r];
                if (c >= columns_left) continue;
                // 2^60 times the smallest code saturates, 2^-60 times the largest vanishes.
                const int k = clamp(power - target_exponent(target[c * Tile::kColumnPatches]), -60, 60);
                const float v = IN::widen(*place.at(p, patch_row + r, first_column + patch_column + c));
                const u32 code = power == kNoScale ? kNanFp8 : IN::narrow(mul_rn(v, as_float((u32)(k + 127) << 23)));
                *tile.byte_at(patch_row + r, patch_column + c) = (u8)code;
            }
        }
    }

    // Target scales: this tile's rows of them, 0 in the padding.
    for (int i = threadIdx.x; i < kRowBlocks * TILE_COLUMNS; i += kThreads) {
        const int b = i / TILE_COLUMNS, c = i % TILE_COLUMNS;
        const i64 column = first_column + c;
        if (column >= p.target_pitch || place.block + b >= p.target_rows || (!place.lost && b * BLOCK >= place.lines)) continue;
        const int t = target_exponent(targets[TARGET ? b * kColumnBlocks + c / BLOCK
                                                     : b * TILE_COLUMNS + c % 8 * Tile::kColumnPatches + c / 8]);
        const bool absent = place.lost || column >= p.columns;
        const i64 at = (place.block + b) * p.target_pitch + column;
        if constexpr (kMx) static_cast<u8*>(p.target_scales)[at] = (u8)(absent ? 0 : t + 127);
        else {
            const u32 bits = wrong[c / BLOCK] ? kNanF32 : t >= -126 ? (u32)(t + 127) << 23 : 1u << (t + 149);
            static_cast<u32*>(p.target_scales)[at] = absent ? 0 : bits;
        }
    }

    // Transposed rows: of the expert, whose matrices follow one another.
    u8* to = p.out + place.group_start * p.columns + first_column * place.group_lines + (place.start - place.group_start);
    if (place.lost) {
        to = p.out + place.start * p.columns + first_column * place.lines;
        for (int i = threadIdx.x; i < place.lines * columns_of_tile; i += kThreads) to[i] = 0;
        return;
    }
    __syncthreads();
    if (place.group_lines % 16 == 0 && reinterpret_cast<u64>(to) % 16 == 0) {
#pragma unroll
        for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
            const int column = Tile::column<16>(unit), row = Tile::row<16>();
            if (column < columns_of_tile && row < place.lines)
                tile.read<IN, 16>(unit).store_whole(to + column * place.group_lines + row);
        }
    } else {
        store_unaligned(tile, to, place.group_lines, columns_of_tile, place.lines);
    }
}
#endif
