// Products of FP8 matrices, D = A · Bᵀ, one for each group. A has M rows and B has N rows; the rows of both run
// along K, and so do their bytes. Sizes of groups are either rows of A ("m") or lengths of K ("k"), and only
// the device may know them.
#pragma once
#include "groups/splits.cuh"

constexpr int kScaleBlock = 128;   // A scale of a block belongs to so many elements of K.

// Where a group begins: the sums of the sizes of all groups before it, as they are and rounded up.
struct GroupStart {
    i64 group;
    i64 start;                     // the sum of the sizes
    i64 padded;                    // of the sizes, each rounded up to 4
    i64 blocks;                    // of the sizes in blocks of 128, each rounded up
    i64 size;                      // of this group
};

// FP8 rows and their scales. The first row of group g, and its first scale, lie so many bytes and f32 scales
// from the pointers:
//     g * group_bytes + start * start_bytes
//     g * scale_group + start * scale_start + padded * scale_padded + blocks * scale_blocks
struct Operand {
    const u8* data;
    const float* scale;
    i64 group_bytes, start_bytes;
    i64 pitch;                     // bytes from row to row; 0: the group's size
    i64 scale_group, scale_start, scale_padded, scale_blocks;
    i64 scale_row;                 // scales from row to row, or from 128 rows to the next 128
    i64 scale_block;               // from one 128 of K to the next; -1: the group's size rounded up to 4

    __device__ __forceinline__ const u8* first(const GroupStart& g) const {
        return data + g.group * group_bytes + g.start * start_bytes;
    }
    __device__ __forceinline__ i64 pitch_of(const GroupStart& g) const { return pitch ? pitch : g.size; }
    __device__ __forceinline__ const float* first_scale(const GroupStart& g) const {
        return scale + g.group * scale_group + g.start * scale_start + g.padded * scale_padded
               + g.blocks * scale_blocks;
    }
    __device__ __forceinline__ i64 scale_block_of(const GroupStart& g) const {
        return scale_block >= 0 ? scale_block : (g.size + 3) / 4 * 4;
    }
};

struct Product {
    Operand a, b;
    Splits splits;                 // without sizes: all groups are total / groups large
    u8* out;
    const u8* bias;                // [n], or null; the sums get it before they are rounded
    i64 out_group, out_start;      // elements to a group's first row: g * out_group + start * out_start
    i64 total;                     // of all sizes: what the arrays have room for
    i64 m, n, k;                   // m: of "k", k: of "m"; the other one is the group's size
    u32 out_type;                  // OutType
    u32 bias_type;
    u32 accumulate;                // add to f32 `out`
};

enum OutType : u32 { kOutBf16, kOutF16, kOutF32 };

// A tile of D, and the group that it belongs to.
struct ProductTile {
    GroupStart at;
    i64 row, column;               // the tile's first ones, within the group's D
    i64 rows;                      // of the group's D
    i64 k;                         // elements of K that the group's products have
};

// Walks over the tiles of all groups in order. Every warp that takes part walks on its own, all lanes together,
// and asks for tiles in ascending order. Rows of A after the last group belong to none: they become a group
// without K, so that D is 0 there.
template <bool kSizesOfK, int kTileRows, int kTileColumns>
class TileWalk {
public:
    __device__ __forceinline__ explicit TileWalk(const Product& p)
        : splits(p.splits), total(p.total), m(p.m), k(p.k),
          column_tiles((p.n + kTileColumns - 1) / kTileColumns),
          each(p.splits.sizes ? 0 : p.splits.groups ? p.total / p.splits.groups : 0),
          zero_rest(!kSizesOfK && !p.accumulate) {}

    // Returns whether there is such a tile.
    __device__ __forceinline__ bool find(i64 wanted) {
        while (wanted >= tiles_loaded)
            if (!load_groups()) return false;
        if (wanted >= group_end) select_group(wanted);
        place(wanted - group_first);
        return true;
    }

    ProductTile tile;

private:
    static constexpr int kBand = 16;   // Row tiles that share columns of B, which then come from the L2.

    Splits splits;
    i64 total, m, k, column_tiles, each;
    bool zero_rest;
    i64 next_group = 0, tiles_loaded = 0;
    GroupStart round = {0, 0, 0, 0, 0};   // the sums before the next 32 groups
    GroupStart own = {0, 0, 0, 0, 0};     // this lane's group, of the 32 loaded last
    i64 own_first = 0;                    // its first tile
    i64 group_first = 0, group_end = 0;   // tiles of the group of `tile`

    __device__ __forceinline__ i64 tiles_of(i64 size) const {
        const i64 rows = kSizesOfK ? m : size;
        return (rows + kTileRows - 1) / kTileRows * column_tiles;
    }
    __device__ __forceinline__ i64 size_of(i64 group) const {
        if (group >= splits.groups) return 0;
        const i64 size = splits.sizes ? splits.load(group) : each;
        return size < 0 ? 0 : size > total ? total + 1 : size;   // Sums stay small and still exceed total.
    }
    // Loads the next 32 groups, a lane each. After the last one come the rows of no group.
    __device__ __forceinline__ bool load_groups() {
        if (next_group > splits.groups || (next_group == splits.groups && !zero_rest)) return false;
        const i64 group = next_group + threadIdx.x % 32;
        const bool is_rest = zero_rest && group == splits.groups;
        i64 size = size_of(group);
        const i64 end = warp_prefix_sum(size);
        const i64 start = end - size + round.start < total ? end - size + round.start : total;
        if (size > total - start || is_rest) size = total - start;
        const i64 padded = warp_prefix_sum((size + 3) / 4 * 4);
        const i64 blocks = warp_prefix_sum((size + kScaleBlock - 1) / kScaleBlock);
        const i64 tiles = group < splits.groups || is_rest ? tiles_of(size) : 0;
        const i64 end_tile = warp_prefix_sum(tiles);
        own = {group, start, round.padded + padded - (size + 3) / 4 * 4,
               round.blocks + blocks - (size + kScaleBlock - 1) / kScaleBlock, size};
        own_first = tiles_loaded + end_tile - tiles;
        round.start += __shfl_sync(~0u, end, 31);
        round.start = round.start < total ? round.start : total;
        round.padded += __shfl_sync(~0u, padded, 31);
        round.blocks += __shfl_sync(~0u, blocks, 31);
        tiles_loaded += __shfl_sync(~0u, end_tile, 31);
        next_group += 32;
        return true;
    }
    __device__ __forceinline__ void select_group(i64 wanted) {
        const int lane = 31 - __clz((int)__ballot_sync(~0u, own_first <= wanted));
        tile.at = {__shfl_sync(~0u, own.group, lane), __shfl_sync(~0u, own.start, lane),
                   __shfl_sync(~0u, own.padded, lane), __shfl_sync(~0u, own.blocks, lane),
                   __shfl_sync(~0u, own.size, lane)};
        group_first = __shfl_sync(~0u, own_first, lane);
        group_end = group_first + tiles_of(tile.at.size);
        tile.rows = kSizesOfK ? m : tile.at.size;
        tile.k = kSizesOfK ? tile.at.size : tile.at.group < splits.groups ? k : 0;
    }
    // Tiles go down a band of rows, then to the next columns.
    __device__ __forceinline__ void place(i64 tile_in_group) {
        const i64 row_tiles = (tile.rows + kTileRows - 1) / kTileRows;
        const i64 band = tile_in_group / (kBand * column_tiles);
        const i64 left = row_tiles - band * kBand, height = left < kBand ? left : kBand;
        const i64 in_band = tile_in_group - band * kBand * column_tiles;
        tile.row = (band * kBand + in_band % height) * kTileRows;
        tile.column = in_band / height * kTileColumns;
    }
};
