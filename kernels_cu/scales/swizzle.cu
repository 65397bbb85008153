// Changes of the layout of E8M0 scales (docs/layouts.md), without arithmetic:
//
//   swizzle_scales:    swizzled[swizzled_at(line, block)] = compact[line, block], and 0 in the padding
//   unswizzle_scales:  compact[line, block] = swizzled[swizzled_at(line, block)]
//
// compact   u8 [batch, lines, blocks], or [batch, blocks, lines] with ADJACENT 1. A line is a row of the
//           scale grid for row-wise blocks, and a column for column-wise blocks.
// swizzled  u8, tiles of 128 lines x 4 blocks (include/scale/swizzle.cuh). Lines are padded to 128 and blocks
//           to 4. The padding is written as 0 and never read.
//
// A block of 64 threads takes 8 tiles of the same 128 lines: 4 KB, with 64 bytes in flight per thread. With
// ADJACENT 0 a thread has four units of 16 swizzled bytes, each from 4 compact lines. 8 lanes share a 32-byte
// sector of a compact line, and 4 lanes have 64 adjacent swizzled bytes. With ADJACENT 1 a thread transposes
// 16 lines x 4 blocks in registers and gathers them in shared memory, so that both arrays are accessed in
// whole sectors. Such arrays are small and only latency counts: there is one launch, and a thread has all its
// loads in flight at once. Bytes moved per scale: 2.
//
// Defines:
//   ADJACENT     what is adjacent in compact memory. 0: the blocks of a line; lines are `stride` bytes apart.
//                1: the lines (column-wise scales, which are stored [blocks, lines]).
//   WORDS        1: with ADJACENT 0 all compact words of four blocks exist and are aligned; no code for other
//                calls, which would take many more registers for the same loads in flight.
//   GROUPED      1: groups of lines, 2: groups of blocks have sizes on the device
//                (include/groups/group_tiles.cuh). Each group is a swizzled matrix of its own, one after the
//                other in the rows (1) or the bytes (2) of the result. The result past the last group is 0,
//                and so are compact scales that no group has. 0: no search for groups and no barrier after
//                it, which would add latency.
#include "groups/group_tiles.cuh"
#include "scale/swizzle.cuh"
#include "tile/tile.cuh"

struct LayoutParams {
    u8* compact;
    u8* swizzled;                // 16-byte aligned
    Splits splits;
    i64 lines, blocks;           // shape of each compact matrix
    i64 stride;                  // bytes between its lines, or between its blocks with ADJACENT 1
    i64 tiles;                   // tiles along a line of the swizzled matrix
    u32 down;                    // rows of tiles in the swizzled matrix, of 128 lines each
    u32 across;                  // thread blocks along a row of tiles
};

constexpr int kThreads = 64, kTiles = 8;
// Thread blocks per SM. Without this bound compilers make room for more and spill instead of having all loads
// in flight.
constexpr int kBlocks = 8;
constexpr int kUnits = kTiles * (int)kSwizzleTile / 16 / kThreads;   // units of 16 swizzled bytes per thread
// Four blocks of lines i, i + 32, i + 64 and i + 96, a word each.
using Unit = Chunk<e8m0fnu, 16>;

struct ScaleTile {
    i64 compact;                 // offset of its first scale
    i64 swizzled;                // offset of its first byte
    int lines, blocks;           // existing lines and blocks
    bool exists, past_groups;    // the swizzled matrix has the tile; it follows the last group
};

// A thread block's 8 tiles from `first` on.
struct Tiles {
    const LayoutParams& p;
    const GroupTile* groups;     // in shared memory
    i64 matrix, first;           // first of the thread block's tiles, counted along a row of tiles
    u32 tile_row;

    __device__ __forceinline__ Tiles(const LayoutParams& p, GroupTile* groups) : p(p), groups(groups) {
        const u32 row_of_tiles = blockIdx.x / p.across;
        first = (i64)(blockIdx.x - row_of_tiles * p.across) * kTiles;
        matrix = GROUPED ? 0 : row_of_tiles / p.down;
        tile_row = GROUPED ? row_of_tiles : row_of_tiles - (u32)matrix * p.down;
    }
    __device__ __forceinline__ ScaleTile operator[](int t) const {
        i64 line = (i64)tile_row * kSwizzleLines, block = (first + t) * kSwizzleBlocks;
        i64 tile = (matrix * p.down + tile_row) * p.tiles + first + t;
        int lines = left_of(p.lines - line, kSwizzleLines);
        int blocks = left_of(p.blocks - block, kSwizzleBlocks);
        bool past_groups = false;
        if (GROUPED == 1)
            line = groups[0].start, lines = groups[0].units, past_groups = groups[0].past_groups;
        if (GROUPED == 2) {
            const GroupTile& group = groups[t];
            block = group.start, blocks = group.units, past_groups = group.past_groups;
            tile = group.group_tile * p.down + tile_row * group.group_tiles + (first + t - group.group_tile);
        }
        const i64 in_matrix = ADJACENT ? block * p.stride + line : line * p.stride + block;
        const i64 compact = matrix * p.lines * p.blocks + in_matrix;
        return {compact, tile * kSwizzleTile, lines, blocks, first + t < p.tiles && tile_row < p.down,
                past_groups};
    }
};

// Finds the groups of the thread block's tiles, for all its threads. Block 0 also checks all sizes.
__device__ __forceinline__ void find_groups_of_tiles(const Tiles& tiles, GroupTile* groups) {
    if (!GROUPED) return;
    if (threadIdx.x < 32) {
        const LayoutParams& p = tiles.p;
        const bool check = blockIdx.x == 0;
        if (GROUPED == 1)
            find_groups<1, kSwizzleLines, 1>(p.splits, p.lines, tiles.tile_row, p.down, check, groups);
        else
            find_groups<32, kSwizzleBlocks, kTiles>(p.splits, p.blocks, tiles.first, p.tiles, check, groups);
    }
    __syncthreads();
}

__device__ __forceinline__ bool is_aligned(const u8* p, int bytes) {
    return reinterpret_cast<u64>(p) % bytes == 0;
}

__device__ __forceinline__ Unit load_unit(const LayoutParams& p, const ScaleTile& tile, int line) {
    const bool exists = tile.blocks && line < tile.lines && !tile.past_groups;
    return exists ? Unit::load(p.swizzled + tile.swizzled + line * 16) : Unit{};
}

// ---- ADJACENT 0 ----
// A thread's 16 words belong to lines of one tile, 8 lines apart. Word m is word m / 4 of unit m % 4.
constexpr int kWords = 4 * kUnits, kStep = 128 / kWords;
__device__ __forceinline__ int row_tile() { return threadIdx.x % kTiles; }
__device__ __forceinline__ int row_line(int word) { return threadIdx.x / kTiles + word * kStep; }

__device__ __forceinline__ bool are_words(const u8* line, i64 stride, int blocks) {
    return blocks == kSwizzleBlocks && is_aligned(line, 4) && stride % 4 == 0;
}
// from, to: the tile's first line. kWhole: every word is aligned and has four blocks.
template <bool kWhole>
__device__ __forceinline__ void load_rows(const u8* from, i64 stride, int lines, int blocks,
                                          Unit (&unit)[kUnits]) {
    const u32 mask = ~0u >> 8 * (4 - blocks);
    const u8* line = from + row_line(0) * stride;
#pragma unroll
    for (int m = 0; m < kWords; m++, line += kStep * stride) {
        const bool there = row_line(m) < lines;
        u32& word = unit[m % kUnits].word[m / kUnits];
        word = 0;
        if (kWhole) {
            if (there) word = load_read_only(reinterpret_cast<const u32*>(line));
        } else {
            // Absent bytes are loaded from an existing address and masked: there are too few predicates for
            // this many loads at once.
            const u8* at = there ? line : from;
#pragma unroll
            for (int b = 0; b < 4; b++) word |= (u32)load_read_only(at + (b < blocks ? b : 0)) << 8 * b;
            word = there ? word & mask : 0u;
        }
    }
}
template <bool kWhole>
__device__ __forceinline__ void store_rows(const Unit (&unit)[kUnits], u8* to, i64 stride, int lines,
                                           int blocks) {
    u8* line = to + row_line(0) * stride;
#pragma unroll
    for (int m = 0; m < kWords; m++, line += kStep * stride) {
        const Chunk<e8m0fnu, 4> word{{unit[m % kUnits].word[m / kUnits]}};
        if (row_line(m) >= lines) continue;
        if (kWhole) word.store(line);
        else word.store_partial(line, blocks);
    }
}

// ---- ADJACENT 1: swizzled tiles in shared memory ----
// Each half of a tile is padded by 16 bytes, so that eight lanes, which write words of 8 x 16 lines of four
// tiles, have no bank conflicts.
constexpr int kHalfWords = 64 + 4, kTileWords = 2 * kHalfWords;
__device__ __forceinline__ u32* unit_in_shared(u32* shared, int tile, int line) {
    return shared + tile * kTileWords + line / 16 * kHalfWords + line % 16 * 4;
}
// A warp has a whole swizzled tile, this thread one unit of it.
__device__ __forceinline__ int whole_tile(int unit) { return (threadIdx.x + unit * kThreads) / 32; }
__device__ __forceinline__ int whole_line() { return threadIdx.x % 32; }
// This thread has 16 adjacent lines x 4 blocks of the compact tiles.
__device__ __forceinline__ int part_tile() { return threadIdx.x / 8; }
__device__ __forceinline__ int part_line() { return threadIdx.x % 8 * 16; }
// Returns the word of line part_line() + line.
__device__ __forceinline__ u32* part_in_shared(u32* shared, int line) {
    const int at = part_line() + line;
    return unit_in_shared(shared, part_tile(), at % 32) + at / 32;
}

#ifdef ENTRY_swizzle_scales
// Swizzles scales whose lines are `stride` bytes apart.
__device__ __forceinline__ void swizzle_lines(const LayoutParams& p, const Tiles& tiles) {
    const ScaleTile tile = tiles[row_tile()];
    const u8* from = p.compact + tile.compact;
    Unit unit[kUnits]{};
    if (tile.lines && tile.blocks && !tile.past_groups) {
        if (WORDS || are_words(from, p.stride, tile.blocks))
            load_rows<true>(from, p.stride, tile.lines, kSwizzleBlocks, unit);
        else load_rows<WORDS != 0>(from, p.stride, tile.lines, tile.blocks, unit);
    }
    if (!tile.exists) return;
#pragma unroll
    for (int u = 0; u < kUnits; u++) unit[u].store(p.swizzled + tile.swizzled + row_line(u) * 16);
}

// Loads this thread's 16 lines of a tile, block by block.
__device__ __forceinline__ void load_adjacent(const LayoutParams& p, const ScaleTile& part,
                                              Unit (&block)[kSwizzleBlocks]) {
    const u8* from = p.compact + part.compact + part_line();
    const int lines = part.past_groups ? 0 : left_of(part.lines - part_line(), 16);
    if (lines == 16 && is_aligned(from, 16) && p.stride % 16 == 0) {
#pragma unroll
        for (int b = 0; b < kSwizzleBlocks; b++)
            block[b] = b < part.blocks ? Unit::load(from + b * p.stride) : Unit{};
    } else {
#pragma unroll
        for (int b = 0; b < kSwizzleBlocks; b++)
            block[b] = Unit::load_partial(from + b * p.stride, b < part.blocks ? lines : 0);
    }
}

// Swizzles scales whose lines are adjacent. shared: room for the swizzled tiles.
__device__ __forceinline__ void swizzle_adjacent(const LayoutParams& p, const Tiles& tiles, u32* shared) {
    Unit block[kSwizzleBlocks];
    load_adjacent(p, tiles[part_tile()], block);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 word[4];
        transpose_4x4(block[0].word[w], block[1].word[w], block[2].word[w], block[3].word[w], word);
#pragma unroll
        for (int i = 0; i < 4; i++) *part_in_shared(shared, 4 * w + i) = word[i];
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        const ScaleTile tile = tiles[whole_tile(u)];
        const u32* const words = unit_in_shared(shared, whole_tile(u), whole_line());
        const Unit unit = Unit::load_shared(reinterpret_cast<const u8*>(words));
        if (tile.exists) unit.store(p.swizzled + tile.swizzled + whole_line() * 16);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
swizzle_scales(const __grid_constant__ LayoutParams p) {
    __shared__ GroupTile groups[kTiles];
    const Tiles tiles(p, groups);
    find_groups_of_tiles(tiles, groups);
    if constexpr (ADJACENT == 0) {
        swizzle_lines(p, tiles);
    } else {
        __shared__ __align__(16) u32 shared[kTiles * kTileWords];
        swizzle_adjacent(p, tiles, shared);
    }
}
#endif

#ifdef ENTRY_unswizzle_scales
// Writes compact scales whose lines are `stride` bytes apart.
__device__ __forceinline__ void unswizzle_lines(const LayoutParams& p, const Tiles& tiles) {
    const ScaleTile tile = tiles[row_tile()];
    Unit unit[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++) unit[u] = load_unit(p, tile, row_line(u));
    u8* to = p.compact + tile.compact;
    if (are_words(to, p.stride, tile.blocks))
        store_rows<true>(unit, to, p.stride, tile.lines, kSwizzleBlocks);
    else store_rows<false>(unit, to, p.stride, tile.lines, tile.blocks);
}

// Stores this thread's 16 lines of a tile, block by block.
__device__ __forceinline__ void store_adjacent(const LayoutParams& p, const ScaleTile& part,
                                               const Unit (&block)[kSwizzleBlocks]) {
    u8* to = p.compact + part.compact + part_line();
    const int lines = left_of(part.lines - part_line(), 16);
    const bool whole = lines == 16 && is_aligned(to, 16) && p.stride % 16 == 0;
#pragma unroll
    for (int b = 0; b < kSwizzleBlocks; b++) {
        if (b >= part.blocks) break;
        if (whole) block[b].store(to + b * p.stride);
        else block[b].store_partial(to + b * p.stride, lines);
    }
}

// Writes compact scales whose lines are adjacent. shared: room for the swizzled tiles.
__device__ __forceinline__ void unswizzle_adjacent(const LayoutParams& p, const Tiles& tiles, u32* shared) {
    Unit unit[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++) unit[u] = load_unit(p, tiles[whole_tile(u)], whole_line());
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        u32* const words = unit_in_shared(shared, whole_tile(u), whole_line());
        unit[u].store(reinterpret_cast<u8*>(words));
    }
    __syncthreads();
    Unit block[kSwizzleBlocks];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 byte[4];
        transpose_4x4(*part_in_shared(shared, 4 * w), *part_in_shared(shared, 4 * w + 1),
                      *part_in_shared(shared, 4 * w + 2), *part_in_shared(shared, 4 * w + 3), byte);
#pragma unroll
        for (int b = 0; b < kSwizzleBlocks; b++) block[b].word[w] = byte[b];
    }
    store_adjacent(p, tiles[part_tile()], block);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
unswizzle_scales(const __grid_constant__ LayoutParams p) {
    __shared__ GroupTile groups[kTiles];
    const Tiles tiles(p, groups);
    find_groups_of_tiles(tiles, groups);
    if constexpr (ADJACENT == 0) {
        unswizzle_lines(p, tiles);
    } else {
        __shared__ __align__(16) u32 shared[kTiles * kTileWords];
        unswizzle_adjacent(p, tiles, shared);
    }
}
#endif
