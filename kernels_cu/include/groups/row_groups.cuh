// Groups of consecutive lines (or blocks of elements) whose sizes only the device knows, stored one after the other in whole tiles.
// A block of threads finds the groups of its tiles by a scan over all sizes: one warp, kPerLane sizes per lane and round. find_groups: tiles of
// lines or of blocks of elements; find_run: runs of rows of groups that are matrices of their own, whose scales have places to be counted.
// Others wait for it, so before a launch of many blocks another one (row_segments.cu) finds all runs: load_run.
// quantize_group: what a block does for such a group, or for one of a list of arrays.
#pragma once
#include "memory/errors.cuh"
#include "memory/chunks.cuh"
#include "tile/tile.cuh"

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
// `total` ends there; `check`: report these to the device's word.
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
            size[u] = whole > total ? total + 1 : whole;             // sums stay small, and still exceed total
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
                found[t] = {start + lines_before, tile, group_tiles, left_of(size[u] - lines_before, kLines), false};
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
    if (lane == 0) report(splits.errors, (any_negative ? kSplitNegative : 0u) | (round_start > total ? kSplitSum : 0u));
}

// Notes sizes that are wrong, of groups of `total` lines; by one whole warp.
__device__ __forceinline__ void check_sizes(const Splits& splits, i64 total) {
    bool negative = false;
    i64 lines = 0;                                                   // at most total + 1 of a group, and of all before this round
    for (i64 round = 0; round < splits.groups; round += 32) {
        const i64 size = splits.load(round + threadIdx.x % 32);
        negative |= size < 0;
        lines += __shfl_sync(~0u, warp_prefix_sum(size < 0 ? 0 : size > total ? total + 1 : size), 31);
        lines = lines > total ? total + 1 : lines;
    }
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (threadIdx.x % 32 == 0) report(splits.errors, (any_negative ? kSplitNegative : 0u) | (lines > total ? kSplitSum : 0u));
}

// ---- groups of rows, each a matrix of its own ----
struct RowRun;
// Groups of the rows of an array x [rows, columns], each followed in the results by rows of zeros to a multiple of `align` (1: by none). Facts
// of the device made harmless: a negative size counts as 0, a group that goes past the last row ends there, one whose given offset is not
// that of a row, or leads out of the array, is left out.
struct RowGroups {
    const i64* offsets;          // [groups + 1], in elements, or null: sums of the sizes. Given only with align 1
    i64* offsets_out;            // [groups + 1], of the results, or null
    void* sizes_out;             // [groups], as wide as the sizes: rows of each in the results; or null
    Splits splits;
    i64 rows, columns;           // of x
    i64 result_rows;             // of the results: enough for any sizes
    u32 across;                  // tiles along a row
    u32 align;                   // a power of two
    const RowRun* runs;          // of the results; or null: a block finds its own

    __device__ __forceinline__ i64 aligned(i64 size) const { return (size + align - 1) & -(i64)align; }
    __device__ __forceinline__ i64 size(i64 group) const {
        const i64 n = splits.load(group);
        return n < 0 ? 0 : n > rows ? rows + 1 : n;                  // sums stay small, and still differ from rows
    }
};

// A run of rows of a group; or of those that no group has, which follow the last one.
struct RowRun {
    i64 group;                   // -1: none
    i64 start;                   // the first element of the group in x
    i64 to;                      // and in the results; of no group's rows, of this run
    i64 given;                   // rows of the group in x
    i64 rows;                    // and in the results; of no group's, of this run
    i64 run;                     // which one of the group's, or of those that no group has
    i64 before[2];               // how many units there are in all groups before this one
};

// By one whole warp: the run-th run of kRunRows rows, of the results where kAligns, else of x, in shared memory. shifts: units of 2^shift rows,
// of which a group has as many as its rows start; counted where kCounts.
template <int kRunRows, bool kCounts, bool kAligns>
__device__ __forceinline__ void find_run(const RowGroups& p, i64 run, u32 first_shift, u32 second_shift, RowRun& found) {
    constexpr int kPerLane = 4;
    const int lane = threadIdx.x % 32;
    const auto least = [](i64 a, i64 b) { return a < b ? a : b; };
    // Unsigned, for fewer instructions: with a few more NVRTC no longer advances a pointer from row to row of the tile that
    // follows, but keeps the offsets of its 32 rows, in 64 registers.
    const auto units = [](i64 rows, u32 shift) { return (i64)(((u64)rows + ((u64)1 << shift) - 1) >> shift); };
    const auto runs_of = [](i64 rows) { return (i64)(((u64)rows + kRunRows - 1) / kRunRows); };
    const auto in_results = [&](i64 size) { return kAligns ? p.aligned(size) : size; };
    i64 round_start = 0, round_run = 0, round_units[2] = {};         // before this round's groups
    i64 to = 0;                                                      // this lane's part of the rows of the results before
    bool reached = false;
    for (i64 round = 0; round < p.splits.groups && !reached; round += 32 * kPerLane) {
        i64 size[kPerLane], rows = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) rows += size[u] = p.size(round + lane * kPerLane + u);
        const i64 end = warp_prefix_sum(rows);
        i64 start = least(round_start + end - rows, p.rows), at = start, runs = 0, own_units[2] = {};
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            size[u] = least(size[u], p.rows - at);
            at += size[u];
            const i64 written = in_results(size[u]);
            if (kAligns) to += written;
            runs += runs_of(written);
            if (kCounts) own_units[0] += units(written, first_shift), own_units[1] += units(written, second_shift);
        }
        const i64 end_run = warp_prefix_sum(runs);
        i64 own_run = round_run + end_run - runs, before[2] = {}, end_units[2] = {};
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                end_units[i] = warp_prefix_sum(own_units[i]);
                before[i] = round_units[i] + end_units[i] - own_units[i];
            }
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 written = in_results(size[u]), own_runs = runs_of(written);
            if (run >= own_run && run < own_run + own_runs) {
                found.group = round + lane * kPerLane + u, found.start = start * p.columns, found.given = size[u], found.run = run - own_run;
                found.before[0] = before[0], found.before[1] = before[1];
            }
            own_run += own_runs;
            start += size[u];
            if (kCounts) before[0] += units(written, first_shift), before[1] += units(written, second_shift);
        }
        round_start = least(round_start + __shfl_sync(~0u, end, 31), p.rows);
        round_run += __shfl_sync(~0u, end_run, 31);
        reached = run < round_run;
        if (kCounts)
#pragma unroll
            for (int i = 0; i < 2; i++) round_units[i] += __shfl_sync(~0u, end_units[i], 31);
    }
    __syncwarp();
    const bool aligns = kAligns && p.align > 1;
    if (aligns) {                                                    // here, where the registers of the other sums are free
        if (reached) {
            to = 0;
            for (i64 g = lane; g < found.group; g += 32) to += p.aligned(p.size(g));     // none of them ends short: x has rows beyond
        }
        to = __shfl_sync(~0u, warp_prefix_sum(to), 31);
    }
    if (lane != 0) return;
    if (!reached) {
        const i64 all = kAligns ? p.result_rows : p.rows, own_run = run - round_run;
        to = least((aligns ? to : round_start) + own_run * kRunRows, all);
        found = {-1, 0, to * p.columns, 0, left_of(all - to, kRunRows), own_run, {round_units[0], round_units[1]}};
        return;
    }
    found.rows = in_results(found.given);
    found.to = aligns ? to * p.columns : found.start;
    if (!p.offsets) return;
    found.start = found.to = p.offsets[found.group];
    if (found.start < 0 || found.start > (p.rows - found.rows) * p.columns || (p.columns && found.start % p.columns))
        found.start = found.to = 0, found.rows = 0;
}

constexpr u32 kRunWords = sizeof(RowRun) / sizeof(u32);
static_assert(kRunWords == 16, "half a warp; also in calls/row_segments.py");
// The same that find_run() has found before.
__device__ __forceinline__ void load_run(const RowGroups& p, i64 run, RowRun& found) {
    if (threadIdx.x % 32 < kRunWords)
        reinterpret_cast<u32*>(&found)[threadIdx.x % 32] = load_read_only(reinterpret_cast<const u32*>(p.runs + run) + threadIdx.x % 32);
    __syncwarp();
}

// Where the scales of groups of rows go: those of one group after those of another, each padded by itself, for as many rows of blocks as there
// are blocks down the group.
struct GroupScales {
    u32 block_shift;             // a block has 2^block_shift rows
    u32 unit_shift;              // a group counts as a multiple of 2^unit_shift rows
    i64 unit;                    // scales of that many rows
    i64 all;                     // stored, past the last group too

    __device__ __forceinline__ i64 units(i64 rows) const { return (rows + ((i64)1 << unit_shift) - 1) >> unit_shift; }
    // Rows of blocks of a group, padding included.
    __device__ __forceinline__ i64 block_rows(i64 rows) const { return units(rows) << (unit_shift - block_shift); }

    // By one of `blocks` blocks of kThreads: zeros after the scales of `before` units.
    template <int kThreads, class T>
    __device__ __forceinline__ void clear_rest(T* to, i64 before, i64 block, i64 blocks) const {
        if (!to) return;
        for (i64 i = before * unit + block * kThreads + threadIdx.x; i < all; i += blocks * kThreads) as_global(to)[i] = T{};
    }
};

// By a whole block of kThreads: zeros in `rows` rows of `width` bytes, `stride` bytes apart.
template <int kThreads>
__device__ __forceinline__ void clear_rows(u8* to, i64 rows, int width, i64 stride) {
    const bool whole = (reinterpret_cast<u64>(to) | (u64)stride | (u64)width) % 16 == 0;
    const int step = whole ? 16 : 1, across = width / step;
    for (int i = threadIdx.x; i < (int)rows * across; i += kThreads) {
        u8* const at = to + i / across * stride + i % across * step;
        if (whole) Chunk<e8m0fnu, 16>{}.store_whole(at);
        else *at = 0;
    }
}

// By one whole warp: offsets, where none are given, and aligned sizes. Notes sizes and offsets that are wrong.
__device__ __forceinline__ void write_offsets(const RowGroups& p) {
    const int lane = threadIdx.x % 32;
    const auto least = [](i64 a, i64 b) { return a < b ? a : b; };
    const bool aligns = p.align > 1;
    i64 before = 0, to = 0;                                          // rows of x, and where they are aligned of the results
    u32 wrong = 0;
    for (i64 round = 0; round < p.splits.groups; round += 32) {
        const i64 g = round + lane, size = p.size(g), end = before + warp_prefix_sum(size), start = end - size;
        if (p.splits.load(g) < 0) wrong |= kSplitNegative;
        if (end > p.rows) wrong |= kSplitSum;
        i64 first = least(start, p.rows), end_to = 0;
        if (aligns) {
            const i64 written = p.aligned(least(end, p.rows) - first);
            end_to = to + warp_prefix_sum(written);
            first = end_to - written;
            if (g < p.splits.groups && p.sizes_out) {
                if (p.splits.wide) static_cast<i64*>(p.sizes_out)[g] = written;
                else static_cast<i32*>(p.sizes_out)[g] = (i32)written;
            }
        }
        if (g < p.splits.groups) {
            if (p.offsets && p.offsets[g] != start * p.columns) wrong |= kSplitSum;
            if (p.offsets_out) p.offsets_out[g] = first * p.columns;
        }
        before = least(__shfl_sync(~0u, end, 31), p.rows + 1);
        to = __shfl_sync(~0u, end_to, 31);
    }
    if (lane == 0 && p.offsets_out) p.offsets_out[p.splits.groups] = (aligns ? to : least(before, p.rows)) * p.columns;
    report(p.splits.errors, wrong);
}

// ---- arrays in a list, each a batch of matrices of its own, without groups of rows ----
// One array; ops/quantize/tensor_list_blocks.py packs it.
template <class Params>
struct ListedArray {
    Params array;                // noop: unused
    u32 first;                   // block of the launch: the array's first
    u32 across, down;            // tiles of a matrix
};

template <class Params>
struct ArrayList {
    const ListedArray<Params>* arrays;                               // null: there is no list
    const u32* array_of;         // of every block: which array it belongs to

    // By one whole warp: the matrix and the place in it that this block has, in shared memory.
    template <class Tile>
    __device__ __forceinline__ void find(Params& matrix, TilePosition& at) const {
        constexpr int kWords = sizeof(Params) / sizeof(u64);
        static_assert(sizeof(Params) % sizeof(u64) == 0 && kWords <= 32, "a word per lane");
        const ListedArray<Params>* const from = arrays + load_read_only(array_of + blockIdx.x);
        const u32 block = blockIdx.x - load_read_only(&from->first);
        const u32 across = load_read_only(&from->across), down = load_read_only(&from->down);
        if (threadIdx.x < kWords)
            reinterpret_cast<u64*>(&matrix)[threadIdx.x] = load_read_only(reinterpret_cast<const u64*>(&from->array) + threadIdx.x);
        __syncwarp();
        if (threadIdx.x != 0) return;
        const u32 line = block / across, index = line / down;
        at = {0, (i64)(line - index * down) * Tile::kRows, (i64)(block - line * across) * Tile::kColumns};
        if (index == 0) return;
        const i64 before = index * matrix.rows * matrix.columns;
        matrix.x += before;
        if (matrix.fast_data) matrix.fast_data += before;
        if (matrix.slow_data) matrix.slow_data += before;
        if (matrix.fast.to) matrix.fast.to += index * matrix.fast.matrix;
        if (matrix.slow.to) matrix.slow.to += index * matrix.slow.matrix;
    }
};

// By a whole block: the group's matrix, as the results have it, and the tile of it (the first of up to kRun) that this block has, in shared
// memory, after a barrier. False: there is none, and what no group has is cleared.
template <class Tile, int kRun = 1, class Params, class Matrix, class MoveScales>
__device__ __forceinline__ bool find_group_tile(const Params& p, Matrix& group, TilePosition& at, RowRun& found, MoveScales move_scales) {
    const u32 run = blockIdx.x / p.groups.across, across = blockIdx.x - run * p.groups.across;
    const i64 column = (i64)across * Tile::kColumns;
    if (threadIdx.x < 32) {
        static_assert(sizeof(Matrix) % sizeof(u32) == 0, "copied by words");
        for (u32 i = threadIdx.x; i < sizeof(Matrix) / sizeof(u32); i += 32)
            reinterpret_cast<u32*>(&group)[i] = reinterpret_cast<const u32*>(&p.all)[i];
        if (p.groups.runs) load_run(p.groups, run, found);
        else find_run<kRun * Tile::kRows, true, true>(p.groups, run, p.fast.unit_shift, p.slow.unit_shift, found);
        if (threadIdx.x == 0) {
            at = {0, found.run * (kRun * Tile::kRows), column};
            group.rows = found.rows;
            group.x += found.start;
            if (group.fast_data) group.fast_data += found.to;
            if (group.slow_data) group.slow_data += found.to;
            move_scales(found);
            // What is stored transposed has rows of found.rows bytes.
            const auto allows_wide = [&](const u8* data) { return found.rows % 16 == 0 && reinterpret_cast<u64>(data) % 16 == 0; };
            if ((group.stored & 3) == 2 && !allows_wide(group.fast_data)) group.vector &= ~2u;
            if (group.stored >> 2 == 2 && !allows_wide(group.slow_data)) group.vector &= ~4u;
        }
        if (blockIdx.x == 0) write_offsets(p.groups);
    }
    __syncthreads();
    if (found.group >= 0) return found.rows != 0;
    // Zeros in what no group has: the same bytes whatever the direction, since rows of no group have no layout; and all scales.
    const int width = left_of(p.all.columns - column, Tile::kColumns);
    if (group.fast_data) clear_rows<Tile::kThreads>(as_global(group.fast_data) + column, found.rows, width, p.all.columns);
    if (group.slow_data) clear_rows<Tile::kThreads>(as_global(group.slow_data) + column, found.rows, width, p.all.columns);
    const i64 part = found.run * p.groups.across + across, parts = gridDim.x - (blockIdx.x - part);
    p.fast.template clear_rest<Tile::kThreads>(p.all.fast.to, found.before[0], part, parts);
    p.slow.template clear_rest<Tile::kThreads>(p.all.slow.to, found.before[1], part, parts);
    return false;
}

// The part of a block of threads in quantising groups of rows, or a list of arrays, in blocks that have scales of their own. p: `all`, the
// members that describe an array, `groups`, and `fast` and `slow`, where either direction's scales go, or `list`; group: room in shared
// memory for the members of one matrix. move_scales(found): moves a group's scales to where they go; quantize(at, given, tiles): the tiles from
// that place down, as many of kRun as the matrix has, of which x has `given` rows, and the rest are zeros; of a list one.
template <class Tile, int kRun = 1, class Params, class Matrix, class MoveScales, class Quantize>
__device__ __forceinline__ void quantize_group(const Params& p, Matrix& group, MoveScales move_scales, Quantize quantize) {
    __shared__ TilePosition at;
    __shared__ RowRun found;
    if (is_set(p.all.noop)) return;
    if (p.list.arrays) {
        if (threadIdx.x < 32) p.list.template find<Tile>(group, at);
        if (threadIdx.x == 0) found.given = group.rows;
        __syncthreads();
    } else if (!find_group_tile<Tile, kRun>(p, group, at, found, move_scales)) return;
    const int tiles = kRun == 1 || p.list.arrays ? 1 : (left_of(group.rows - at.row, kRun * Tile::kRows) + Tile::kRows - 1) / Tile::kRows;
    quantize(at, found.given, tiles);
}
