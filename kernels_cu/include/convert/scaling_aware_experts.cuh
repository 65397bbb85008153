// Parameters of the scaling-aware transpose (scaling_aware.cu, which explains the defines), and the search
// for a thread block's tiles and experts.
#pragma once
#include "groups/row_groups.cuh"

// GATHER: each row is a copy of a token, or zeros; the rows are written too.
struct GatheredRows {
    const i32* sources;          // [all rows]: token * topk + slot, or -1
    u8* to;                      // the rows
    u32 tokens;
    u32 multiplier, shift;       // token = slot * multiplier >> shift, for slots below 2^31
};

struct ScalingAwareParams {
    const u8* data;
    const void* scales;
    u8* out;
    void* target_scales;
    float* row_scales;
    const RowSegment* segments;  // with splits: the segment of each row of tiles, from an earlier launch
    Splits splits;               // groups -1: no splits, one expert has all rows
    void* sizes_out;             // [groups]: copy of the sizes, in their type
    i64 rows, columns;
    i64 scale_columns;           // scales per row
    i64 scale_row, scale_block;  // strides: to the next row's scale, and to the next block's
    i64 target_pitch, target_rows;
    i64 row_scale_rows;
    i64 down;                    // rows of tiles; with splits an upper bound
    u32 strips;                  // strips of TILE_COLUMNS columns
    u32 tiles;                   // consecutive tiles per thread block
    u32 vector;                  // without ALIGNED: 1 = rows of the data allow 8-byte loads
    u32 ahead;                   // ONE_TILE: fetch_ahead() prefetches the tile this many thread blocks ahead
    GatheredRows gathered;       // GATHER
};

constexpr bool kMx = BLOCK == 32;
constexpr int kScaleBytes = kMx ? 1 : 4;
constexpr int kTileRows = 128, kWarpColumns = 16;
constexpr int kWarps = TILE_COLUMNS / kWarpColumns, kThreads = kWarps * 32;
constexpr int kColumnBlocks = TILE_COLUMNS / BLOCK, kRowBlocks = kTileRows / BLOCK;
constexpr int kUnits = kRowBlocks * kColumnBlocks;                   // blocks of BLOCK x BLOCK
constexpr int kPatches = kTileRows / 16;                             // threads in a column of patches
constexpr bool kStacks = (kMx || TARGET == 0) && !GATHER;
static_assert(kMx || BLOCK == 128, "blocks of 32 or 128");

// A tile of an expert, and its place in memory.
struct ExpertTile {
    i64 group_start, group_rows;    // the expert's first row in the data, and its rows
    i64 group_tile, group_down;      // rows of tiles before the expert, and its own
    i64 group_block, group_scales;   // the expert's first rows of target scales and of row scales
    int stack;                       // log2 of the strips stacked in a tile
    i64 index;                       // row of tiles within the expert, below group_down
    int offset;                      // index among the thread block's tiles, counted as if none were stacked
    bool exists;                     // the thread block has such a tile
    // computed from these by settle():
    const u8* from;                  // GATHER: of token 0
    const u8* scales;                // scale of the tile's first row and block
    u8* to;                          // destination of its first column; columns are group_rows bytes apart
    u8* targets;                     // target scale of its first block and column
    u32* row_scales;                 // destination of the scale of its first row and block, or null
    i64 row_scale_pitch;             // stride to the next block's scale
    u32 strip;
    int rows, columns;               // existing rows and columns
    int scale_blocks;                // existing blocks along a row
    bool past_groups;                // follows the last expert
    bool aligned;                    // columns begin at multiples of 16 bytes
    bool whole_targets;              // all target scales exist, and four of them can be stored at once
    int above;                       // the thread block's tiles above it in the same columns
    bool continues;                  // the thread block's next tile is the one below

    __device__ __forceinline__ i64 start() const { return group_start + index * kTileRows; }
    __device__ __forceinline__ i64 column() const { return (i64)strip * TILE_COLUMNS; }
    __device__ __forceinline__ bool is_last_down() const { return index + 1 == group_down; }
    // Strips in the tile.
    __device__ __forceinline__ u32 own_strips(const ScalingAwareParams& p) const {
        const u32 left = p.strips - strip;
        return left >> stack ? 1u << stack : left;
    }
    __device__ __forceinline__ bool is_last(const ScalingAwareParams& p) const {
        return is_last_down() && strip + own_strips(p) == p.strips;
    }
    __device__ __forceinline__ int next_offset(const ScalingAwareParams& p) const {
        return offset + (int)own_strips(p);
    }
    // Stacked strips lie below one another in a tile. Returns the row within its strip of a row of the tile.
    __device__ __forceinline__ int row_in_strip(int row) const {
        return kStacks ? row & (kTileRows >> stack) - 1 : row;
    }
    // Returns the strip, within the tile, of a row of the tile.
    __device__ __forceinline__ int strip_of(int row) const {
        return kStacks ? (int)(((u32)row << stack) / kTileRows) : 0;
    }

    // Computes everything that follows from the expert, the index and the strip. tiles: tiles of the thread
    // block.
    __device__ __forceinline__ void settle(const ScalingAwareParams& p, int tiles) {
        const i64 first_column = column();
        rows = left_of(group_rows - index * kTileRows, kTileRows);
        columns = left_of(p.columns - first_column, TILE_COLUMNS << stack);
        scale_blocks = left_of(p.scale_columns - first_column / BLOCK, kColumnBlocks << stack);
        from = p.data + (GATHER ? 0 : start() * p.columns) + first_column;
        scales = static_cast<const u8*>(p.scales);
        scales += (start() * p.scale_row + first_column / BLOCK * p.scale_block) * kScaleBytes;
        to = p.out + group_start * p.columns + first_column * group_rows + index * kTileRows;
        targets = static_cast<u8*>(p.target_scales);
        targets += ((group_block + index * kRowBlocks) * p.target_pitch + first_column) * kScaleBytes;
        row_scale_pitch = (group_rows + 3) / 4 * 4, row_scales = nullptr;
        if (p.row_scales && !past_groups)
            row_scales = reinterpret_cast<u32*>(p.row_scales) + group_scales * p.scale_columns
                         + first_column / BLOCK * row_scale_pitch + index * kTileRows;
        aligned = ((u64)group_rows | reinterpret_cast<u64>(to)) % 16 == 0;
        whole_targets = columns == TILE_COLUMNS << stack && p.target_pitch % 4 == 0
                        && reinterpret_cast<u64>(targets) % (4 * kScaleBytes) == 0;
        exists = true, above = 0, continues = offset + 1 < tiles && !is_last_down();
    }

    // Moves to the tile below.
    __device__ __forceinline__ void step_down(const ScalingAwareParams& p, int tiles) {
        index++, offset++, rows = left_of(group_rows - index * kTileRows, kTileRows);
        from += kTileRows * p.columns, scales += kTileRows * p.scale_row * kScaleBytes, to += kTileRows;
        targets += kRowBlocks * p.target_pitch * kScaleBytes;
        if (row_scales) row_scales += kTileRows;
        above++, continues = offset + 1 < tiles && !is_last_down();
    }
};

// Loads the RowSegment of a row of tiles, a word per lane. Call from one whole warp.
__device__ __forceinline__ u32 load_segment_word(const ScalingAwareParams& p, i64 row_of_tiles) {
    static_assert(sizeof(RowSegment) == 16 * sizeof(u32), "half a warp");
    return threadIdx.x % 32 < 16
               ? load_read_only(reinterpret_cast<const u32*>(p.segments + row_of_tiles) + threadIdx.x % 32)
               : 0;
}

// Returns the expert of this row of tiles. Call from one whole warp. segment_word: a word of the segment per
// lane.
__device__ __forceinline__ ExpertTile expert_of(const ScalingAwareParams& p, i64 row_of_tiles,
                                                u32 segment_word) {
    ExpertTile found{};
    found.group_rows = p.rows, found.group_down = p.down;
    const auto stack_of = [](i64 rows) {
        return !kStacks || rows > kTileRows / 2 ? 0 : rows > kTileRows / 4 ? 1 : 2;
    };
    if (p.splits.groups < 0) {
        found.stack = stack_of(p.rows);
        return found;
    }
    RowSegment segment;
    const auto member = [&](int n) {
        return (i64)((u64)__shfl_sync(~0u, segment_word, 2 * n + 1) << 32
                     | __shfl_sync(~0u, segment_word, 2 * n));
    };
    segment.group = member(0), segment.start = member(1);
    segment.rows_in_x = member(3), segment.index = member(5);
    segment.units_before[0] = member(6), segment.units_before[1] = member(7);
    found.group_tile = row_of_tiles - segment.index, found.group_scales = 4 * segment.units_before[1];
    found.group_block = kMx ? segment.units_before[0] : found.group_tile;
    found.past_groups = segment.group < 0;
    if (found.past_groups) {                                         // result_start holds its rows
        found.group_start = p.segments[found.group_tile].result_start;
        found.group_rows = p.rows - found.group_start, found.group_down = p.down - found.group_tile;
    } else {
        found.group_start = segment.start, found.group_rows = segment.rows_in_x;
        found.group_down = (segment.rows_in_x + kTileRows - 1) / kTileRows;
        found.stack = stack_of(segment.rows_in_x);
    }
    return found;
}

// Loads the segment that find_next() needs, a word per lane.
__device__ __forceinline__ u32 load_next_segment(const ScalingAwareParams& p, const ExpertTile& tile,
                                                 int tiles) {
    const bool needed = tile.exists && tile.is_last(p) && tile.next_offset(p) < tiles;
    return needed ? load_segment_word(p, tile.group_tile + tile.group_down) : 0;
}

// Finds the thread block's tile after `tile`, if there is one. Call from one whole warp. tiles: tiles of the
// thread block.
__device__ __forceinline__ void find_next(const ScalingAwareParams& p, const ExpertTile& tile,
                                          u32 segment_word, int tiles, ExpertTile* next) {
    const bool exists = tile.exists && tile.next_offset(p) < tiles, of_next = exists && tile.is_last(p);
    ExpertTile found = of_next ? expert_of(p, tile.group_tile + tile.group_down, segment_word) : tile;
    if (threadIdx.x % 32 != 0) return;
    if (!exists) {
        next->exists = next->past_groups = false;
        return;
    }
    if (!tile.is_last_down()) found.step_down(p, tiles);
    else {
        found.offset = tile.next_offset(p), found.index = 0;
        found.strip = of_next ? 0 : tile.strip + (1u << tile.stack);
        found.settle(p, tiles);
    }
    *next = found;
}

// GATHER: finds tile `offset` of a thread block's tiles, which are consecutive rows of tiles of one strip.
// Call from one whole warp.
__device__ __forceinline__ void find_below(const ScalingAwareParams& p, u32 strip, i64 first_row, int offset,
                                           int tiles, ExpertTile* to) {
    const i64 row = first_row + offset;
    ExpertTile found{};
    if (offset < tiles) {
        found = expert_of(p, row, load_segment_word(p, row));
        found.index = row - found.group_tile, found.strip = strip, found.offset = offset;
        found.settle(p, tiles);
        found.above = (int)smaller((i64)offset, found.index);
    }
    if (threadIdx.x % 32 == 0) *to = found;
}

// Finds the thread block's first tile: `index` is its index among all tiles, `found` its expert. Call from
// one whole warp. before: room for the tile that begins the stack of strips, if another thread block has it.
__device__ __forceinline__ void find_first(const ScalingAwareParams& p, ExpertTile found, i64 index,
                                           int tiles, ExpertTile* first, ExpertTile* before) {
    const i64 in_group = index - found.group_tile * p.strips, strip = in_group / found.group_down;
    // A stack belongs to the thread block that has its first strip.
    const int strips_before = (int)strip & (1 << found.stack) - 1;
    found.index = in_group - strip * found.group_down;
    found.strip = (u32)strip - strips_before, found.offset = -strips_before;
    if (threadIdx.x % 32 == 0) {
        found.settle(p, tiles);
        *(strips_before ? before : first) = found;
    }
    __syncwarp();
    if (strips_before) find_next(p, *before, load_next_segment(p, *before, tiles), tiles, first);
}

__device__ __forceinline__ void clear(u8* to, i64 bytes) {
    const i64 before = -reinterpret_cast<u64>(to) & 15, head = before < bytes ? before : bytes;
    const i64 units = (bytes - head) / 16;
    for (i64 i = threadIdx.x; i < units; i += kThreads) Chunk<IN, 16>{}.store_whole(to + head + i * 16);
    for (i64 i = threadIdx.x; i < head; i += kThreads) to[i] = 0;
    for (i64 i = head + units * 16 + threadIdx.x; i < bytes; i += kThreads) to[i] = 0;
}

// Writes zeros to what no expert covers: the share of tiles first to end - 1, after the last expert. tile:
// the first one after the last expert.
__device__ __forceinline__ void clear_rest(const ScalingAwareParams& p, const ExpertTile& tile, i64 first,
                                           i64 end) {
    const i64 rest = (p.down - tile.group_tile) * p.strips;
    const auto clear_part = [&](u8* to, i64 bytes) {
        const i64 each = (bytes + rest - 1) / rest + 15 & -16, from = first * each, left = bytes - from;
        const i64 most = (end - first) * each;
        if (left > 0) clear(to + from, left < most ? left : most);
    };
    clear_part(p.out + tile.group_start * p.columns, (p.rows - tile.group_start) * p.columns);
    if (GATHER)
        clear_part(p.gathered.to + tile.group_start * p.columns, (p.rows - tile.group_start) * p.columns);
    clear_part(static_cast<u8*>(p.target_scales) + tile.group_block * p.target_pitch * kScaleBytes,
               (p.target_rows - tile.group_block) * p.target_pitch * kScaleBytes);
    if (p.row_scales)
        clear_part(reinterpret_cast<u8*>(p.row_scales + tile.group_scales * p.scale_columns),
                   (p.row_scale_rows - tile.group_scales) * p.scale_columns * 4);
}
