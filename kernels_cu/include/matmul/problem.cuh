// Products of FP8 matrices, D = A · Bᵀ, one per group. A has M rows and B has N rows, both along K, which is
// contiguous. Sizes of groups are rows of A ("m") or lengths of K ("k"); they may be known to the device
// alone.
#pragma once
#include "groups/splits.cuh"

constexpr int kScaleBlock = 128;   // elements of K per block scale

// Start of a group: sums of the sizes of all groups before it, as they are and rounded up.
struct GroupStart {
    i64 group;
    i64 start;                     // the sum of the sizes
    i64 padded;                    // sum of the sizes, each rounded up to 4
    i64 blocks;                    // sum of the sizes in blocks of 128, each rounded up
    i64 size;                      // of this group
};

// FP8 rows and their scales. Offsets of group g's first row (bytes) and first scale (f32 elements) from the
// pointers:
//     g * group_bytes + start * start_bytes
//     g * scale_group + start * scale_start + padded * scale_padded + blocks * scale_blocks
struct Operand {
    const u8* data;
    const float* scale;
    i64 group_bytes, start_bytes;
    i64 pitch;                     // bytes between rows; 0: the group's size
    i64 scale_group, scale_start, scale_padded, scale_blocks;
    i64 scale_row;                 // scales between rows, or between blocks of 128 rows
    i64 scale_block;               // scales between blocks of K; -1: the group's size rounded up to 4
    u32 scale_shift;               // log2 of the rows per scale
    u32 e5m2;                      // 1: e5m2; 0: e4m3fn
    const void* own_sizes;         // [groups] sizes it is laid out by; null: those of `splits`, or none
    u32 own_wide;                  // 1: own_sizes are i64; 0: i32
    u8* copies;                    // copies of groups of "k" that tensor copies (TMA) cannot read
                                   // (matmul/align_rows.cu); null: none
    const i64* own_offsets;        // [groups + 1] elements before each group of a Grouped; or null

    __device__ __forceinline__ const u8* first(const GroupStart& g) const {
        return data + g.group * group_bytes + g.start * start_bytes;
    }
    __device__ __forceinline__ i64 pitch_of(const GroupStart& g) const { return pitch ? pitch : g.size; }
    // Returns true if tensor copies can read a group's rows: they begin at multiples of 16 bytes.
    __device__ __forceinline__ bool in_16_bytes(const GroupStart& g) const {
        return (((u64)first(g) | (u64)pitch_of(g)) & 15) == 0;
    }
    __device__ __forceinline__ bool is_copied(const GroupStart& g) const {
        return copies && g.size > 0 && !in_16_bytes(g);
    }
    // Rows of a copied group are whole chunks of 16 bytes. Copies do not overlap: each begins 15 bytes later
    // per group before it, rounded up.
    static __device__ __forceinline__ i64 copied_chunks(const GroupStart& g) { return (g.size + 15) / 16; }
    __device__ __forceinline__ u8* copy_of(const GroupStart& g, i64 rows) const {
        return copies + (g.start + 15 * g.group + 15) / 16 * 16 * rows;
    }
    __device__ __forceinline__ const float* first_scale(const GroupStart& g) const {
        return scale + g.group * scale_group + g.start * scale_start + g.padded * scale_padded
               + g.blocks * scale_blocks;
    }
    __device__ __forceinline__ i64 scale_block_of(const GroupStart& g) const {
        return scale_block >= 0 ? scale_block : (g.size + 3) / 4 * 4;
    }
};

// The groups may be shared by two launches: one for those that tensor copies can read, one for the rest.
enum Share : u32 { kAllGroups, kGroupsIn16Bytes, kOtherGroups };

enum OutType : u32 { kOutBf16, kOutF16, kOutF32 };

struct Product {
    Operand a, b;
    Splits splits;                 // without sizes: each group has total / groups
    u8* out;
    const u8* bias;                // [n] per group, or null; added to the sums before rounding
    const float* bias_weights;     // [total]: weights of the bias per row; null: 1
    i64 bias_group;                // elements between the biases of groups; 0: one for all
    i64 out_group, out_start;      // element of a group's first row: g * out_group + start * out_start
    i64 total;                     // of all sizes: the room of the arrays
    i64 m, n, k;                   // "k": m, n fixed; "m": n, k fixed; the other one is the group's size
    u32 out_type;                  // OutType
    u32 bias_type;
    u32 accumulate;                // add to f32 `out`
    u32 share;                     // Share: groups that this launch computes
    u32 whole_blocks;              // of "k": groups begin at multiples of 128; otherwise their D is 0
    u32 align_mask;                // of "k": D is 0 for groups with these bits set in start or size

    // False for rows of no group, whose D stays 0.
    __device__ __forceinline__ bool has_bias(i64 group) const { return bias && group < splits.groups; }
    __device__ __forceinline__ float bias_of(i64 element) const {
        if (bias_type == kOutF32) return reinterpret_cast<const float*>(bias)[element];
        const u32 bits = reinterpret_cast<const u16*>(bias)[element];
        return bias_type == kOutBf16 ? bf16::widen(bits) : f16::widen(bits);
    }
    // row: over all groups
    __device__ __forceinline__ float bias_weight(i64 row) const {
        return bias_weights ? bias_weights[row] : 1.0f;
    }
    // Reports wrong sizes, and sizes that differ from those an operand is laid out by. Call from one whole
    // warp. Rows of "m" have k elements, and those before the transposition of "k" m or n: one of m and k is
    // 0.
    __device__ __forceinline__ void check() const {
        if (!splits.sizes) return;
        check_sizes(splits, total);
        compare_sizes(splits, a.own_sizes, a.own_wide);
        compare_sizes(splits, b.own_sizes, b.own_wide);
        compare_offsets(splits, a.own_offsets, m + k, total);
        compare_offsets(splits, b.own_offsets, n, total);
    }
    // False for a group that breaks a promise: its scales lie elsewhere, or tensor copies cannot read its
    // rows. It is computed with K = 0, and the kernel reports it.
    __device__ __forceinline__ bool keeps_promise(const GroupStart& g) const {
        const bool aligned = (((u32)g.start | (u32)g.size) & align_mask) == 0;
        return g.size == 0 || (aligned && (!whole_blocks || g.blocks * kScaleBlock == g.start));
    }
    __device__ __forceinline__ bool computes(const GroupStart& g) const {
        return share == kAllGroups
               || (g.size == 0 || (a.in_16_bytes(g) && b.in_16_bytes(g))) == (share == kGroupsIn16Bytes);
    }
};

// Iterator over groups in order, each with a number of items. Each participating warp has its own, used by
// all lanes together, and asks for items in ascending order. Index: i32 if all sizes and numbers of items
// fit, else i64.
//
// Items::of(p, group)  items of a group
// Items::rest(p)       true if the rows of A after the last group are a group too
template <class Items, class Index>
class GroupWalk {
public:
    __device__ __forceinline__ explicit GroupWalk(const Product& product)
        : p(product), has_rest(Items::rest(product)) {}

    // Returns true if the item exists.
    __device__ __forceinline__ bool find(Index wanted) {
        while (wanted >= items_loaded)
            if (!load_groups()) return false;
        if (wanted >= end) select_group(wanted);
        return true;
    }

    const Product& p;
    GroupStart at;                     // of the item found last
    Index first = 0, end = 0;          // items of its group

private:
    struct Sums { Index start, padded, blocks; };

    const bool has_rest;
    Index next_group = 0, items_loaded = 0;
    Sums round = {0, 0, 0};            // sums before the next 32 groups
    Sums own = {0, 0, 0};              // sums before this lane's group, of the 32 loaded last
    Index own_size = 0, own_first = 0; // its size and its first item

    __device__ __forceinline__ Index size_of(Index group) const {
        if (group >= p.splits.groups) return 0;
        const i64 size = p.splits.sizes ? p.splits.load(group) : p.total / p.splits.groups;
        return (Index)(size < 0 ? 0 : size > p.total ? p.total : size);
    }

    // Loads the next 32 groups, one per lane. After the last one come the rows of no group.
    __device__ __forceinline__ bool load_groups() {
        const Index groups = (Index)p.splits.groups, total = (Index)p.total;
        if (next_group > groups || (next_group == groups && !has_rest)) return false;
        const Index group = next_group + threadIdx.x % 32;
        const bool is_rest = has_rest && group == groups;
        Index size = size_of(group);
        const i64 end_of = warp_prefix_sum((i64)size) + round.start;   // 32 sizes: no overflow in 64 bits
        const Index start = (Index)(end_of - size < total ? end_of - size : total);
        if (size > total - start || is_rest) size = total - start;
        const Index blocks_of = (size + kScaleBlock - 1) / kScaleBlock, padded_of = (size + 3) / 4 * 4;
        const i64 padded = warp_prefix_sum((i64)padded_of), blocks = warp_prefix_sum((i64)blocks_of);
        own = {start, (Index)(round.padded + padded - padded_of), (Index)(round.blocks + blocks - blocks_of)};
        own_size = size;
        const bool exists = group < groups || is_rest;
        const Index items = exists ? (Index)Items::of(p, start_of(group, own, size)) : 0;
        const i64 end_item = warp_prefix_sum((i64)items);
        own_first = items_loaded + (Index)end_item - items;
        const i64 all = __shfl_sync(~0u, end_of, 31);
        round = {(Index)(all < total ? all : total), (Index)(round.padded + __shfl_sync(~0u, padded, 31)),
                 (Index)(round.blocks + __shfl_sync(~0u, blocks, 31))};
        items_loaded += (Index)__shfl_sync(~0u, end_item, 31);
        next_group += 32;
        return true;
    }
    static __device__ __forceinline__ GroupStart start_of(Index group, const Sums& sums, Index size) {
        return {group, sums.start, sums.padded, sums.blocks, size};
    }
    __device__ __forceinline__ void select_group(Index wanted) {
        const int lane = 31 - __clz((int)__ballot_sync(~0u, own_first <= wanted));
        const Index group = next_group - 32 + lane, size = __shfl_sync(~0u, own_size, lane);
        const Sums sums = {__shfl_sync(~0u, own.start, lane), __shfl_sync(~0u, own.padded, lane),
                           __shfl_sync(~0u, own.blocks, lane)};
        at = start_of(group, sums, size);
        first = __shfl_sync(~0u, own_first, lane);
        end = first + (Index)Items::of(p, at);
    }
};

// A tile of D, and its group.
struct ProductTile {
    GroupStart at;
    i64 row, column;               // the tile's first ones, within the group's D
    i64 rows;                      // of the group's D
    i64 end;                       // the row after the tile's last one
    i64 k;                         // elements of K of the group
};

// Iterator over the tiles of all groups. Rows of A after the last group are a group with K = 0, so that their
// D is 0.
//
// Where a last tile would have kPartRows rows or fewer, it takes kPartRows more from the tile before it: one
// part takes nearly as long as two.
template <bool kSizesOfK, int kTileRows, int kTileColumns, class Index = i64, int kPartRows = 0>
class TileWalk {
public:
    __device__ __forceinline__ explicit TileWalk(const Product& product)
        : groups(product), column_tiles(Tiles::across(product)) {}

    // Returns true if the tile exists.
    __device__ __forceinline__ bool find(Index wanted) {
        if (!groups.find(wanted)) return false;
        const Product& p = groups.p;
        tile.at = groups.at;
        tile.rows = kSizesOfK ? p.m : tile.at.size;
        if (kSizesOfK) tile.k = p.keeps_promise(tile.at) ? tile.at.size : 0;
        else tile.k = tile.at.group < p.splits.groups ? p.k : 0;
        place(wanted - groups.first);
        return true;
    }

    ProductTile tile;

private:
    // row tiles that share columns of B, which then come from the L2
    static constexpr int kBand = kTileRows > 128 ? 11 : 16;

    struct Tiles {
        static __device__ __forceinline__ Index across(const Product& p) {
            return (Index)((p.n + kTileColumns - 1) / kTileColumns);
        }
        static __device__ __forceinline__ Index of(const Product& p, const GroupStart& g) {
            const Index rows = (Index)(kSizesOfK ? p.m : g.size);
            return p.computes(g) ? (rows + kTileRows - 1) / kTileRows * across(p) : 0;
        }
        static __device__ __forceinline__ bool rest(const Product& p) {
            return !kSizesOfK && !p.accumulate && p.share != kOtherGroups;
        }
    };

    GroupWalk<Tiles, Index> groups;
    const Index column_tiles;

    // Tiles go down a band of rows, then to the next columns.
    __device__ __forceinline__ void place(Index in_group) {
        const Index row_tiles = ((Index)tile.rows + kTileRows - 1) / kTileRows;
        const Index band = in_group / (kBand * column_tiles);
        const Index in_band = in_group - band * kBand * column_tiles;
        const Index height = smaller<Index>(row_tiles - band * kBand, kBand), column = in_band / height;
        const Index index = band * kBand + in_band - column * height;
        const Index in_last = (Index)tile.rows - (row_tiles - 1) * kTileRows;
        const Index given = in_last <= kPartRows && row_tiles > 1 ? kPartRows : 0;
        tile.row = (i64)(index * kTileRows - (index == row_tiles - 1 ? given : 0));
        const Index end = (index + 1) * kTileRows - (index == row_tiles - 2 ? given : 0);
        tile.end = (i64)smaller<Index>((Index)tile.rows, end);
        tile.column = (i64)column * kTileColumns;
    }
};
