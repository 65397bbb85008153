// Stores the columns of a tile at any alignment, for the scaling-aware transpose (scaling_aware.cu).
#pragma once
#include "convert/scaling_aware_experts.cuh"

constexpr int kColumnBytes = kTileRows + kSector;        // a staged column, and rows of the tile above
// Parts of sectors wait in shared memory: for the other part, in the tile below, or for the thread block's
// last tile, when another thread block stores the other part as well, so that the L2 still has the sector.
// Four blocks per SM leave no shared memory for that, and MX gains nothing.
constexpr bool kWaits = BLOCKS < 4 && !kMx;
constexpr int kFirstBytes = kWaits ? kSector : 0;        // first rows of a column of the thread block's tiles
constexpr int kShiftedBytes = kWarpColumns * (kColumnBytes + kFirstBytes);                   // per warp
constexpr int kHalvesBytes = kWarpColumns * 16;                                              // per warp
static_assert(kWarps * kShiftedBytes >= kTileRows * TILE_COLUMNS + 32, "room for what store_range() makes");

// 16 rows of four columns per thread
using Codes = u32[4][4];

// Stores columns that begin at multiples of 16 bytes. row, column: this thread's first code, within the
// expert's strips and columns. If the last 16 bytes of a tile's column are half a sector, they wait in
// `halves` (16 bytes per column of the warp) for the other half, from the tile below.
__device__ __forceinline__ void store_aligned(const ExpertTile& tile, const Codes& codes, int row, int column,
                                              u8* halves) {
    const i64 stride = tile.group_rows;
    const int columns = row < tile.rows ? tile.columns - column : 0;
    u8* to = as_global(tile.to) + (column * stride + row);
    if (!kWaits || !(tile.above || tile.continues)) {
#pragma unroll
        for (int c = 0; c < 4; c++, to += stride)
            if (c < columns)
                Chunk<IN, 16>{{codes[c][0], codes[c][1], codes[c][2], codes[c][3]}}.store_whole(to);
        return;
    }
    const int lane = threadIdx.x % 32;
    const bool last = lane % kPatches == kPatches - 1;
    u8* const waiting = halves + lane / kPatches * 64;
#pragma unroll
    for (int c = 0; c < 4; c++, to += stride) {
        Chunk<IN, 16> unit{{codes[c][0], codes[c][1], codes[c][2], codes[c][3]}};
        bool stores = c < columns;
        u8* at = to;
        if (last && reinterpret_cast<u64>(to) % kSector == 0) {
            const Chunk<IN, 16> above = Chunk<IN, 16>::load_shared(waiting + c * 16);
            if (tile.continues)
                store_shared_whole(waiting + c * 16, unit.word[0], unit.word[1], unit.word[2], unit.word[3]);
            else if (stores) unit.store_whole(to);
            stores = tile.above && column + c < tile.columns, at = to - kTileRows, unit = above;
        }
        if (stores) unit.store_whole(at);
    }
}

// Stores a column's 16 codes to shared memory.
__device__ __forceinline__ void stage_column(u8* to, const u32 (&codes)[4]) {
    store_shared_whole(to, codes[0], codes[1], codes[2], codes[3]);
}

// Stages a warp's columns, which begin at any byte, in shared memory for store_columns().
struct WarpColumns {
    u8* to;                      // destination of the first column's rows of this tile
    u8* stage;                   // the staged columns
    i64 stride;                  // bytes between columns in memory
    int rows, columns;           // existing ones
    int lane;
    // The rows of the thread block's first tile, whose parts of sectors the last tile stores: destination of
    // those in the first column, and their place in shared memory.
    u8* first_row;
    const u8* first_rows;

    // Stores whole sectors of this thread's columns. column: destination of the first one. staged: its staged
    // codes. own: its index among the warp's columns. continued: the rows above are staged, too.
    __device__ __forceinline__ void store_sectors(u8* column, const u8* staged, int own,
                                                  bool continued) const {
        const int patch = lane % kPatches, sector = patch / 2 * kSector;
#pragma unroll
        for (int c = 0; c < 4; c++, column += stride) {
            const int before = before_sector(column), first = continued ? 0 : before;
            const u32* const from =
                reinterpret_cast<const u32*>(staged + (c * kColumnBytes - (before + 3 & ~3)));
            u32 words[5];
#pragma unroll
            for (int w = 0; w < 5; w++) words[w] = from[w];
            Chunk<IN, 16> unit;
#pragma unroll
            for (int w = 0; w < 4; w++)
                unit.word[w] = __funnelshift_r(words[w], words[w + 1], (-before & 3) * 8);
            if (sector >= first && sector + kSector <= before + rows && own + c < columns)
                unit.store_whole(column - before + patch * 16);
        }
    }

    enum Ends { kStart, kEnd, kStartAndEnd };

    // Stores the parts of sectors at the start of the columns, at their end, or at both if the columns are
    // whole sectors long; two columns at a time, a byte per lane, `bytes` at most.
    template <Ends kEnds>
    __device__ __forceinline__ void store_parts(u32 bytes) const {
        constexpr int kPitch = kWaits ? kFirstBytes : kColumnBytes;
        u8* edge = kEnds == kEnd ? to + rows : first_row;
        const u8 *start = first_rows, *end = stage + kSector + rows;
#pragma unroll 1
        for (int c = 0; c < columns; c += 2) {
            u8 *at[2], byte[2];
            bool has[2];
#pragma unroll
            for (int i = 0; i < 2; i++, edge += stride, start += kPitch, end += kColumnBytes) {
                const int before = before_sector(edge), offset = lane - before;
                const bool ends = kEnds == kEnd || (kEnds == kStartAndEnd && offset < 0);
                const u64 sector = reinterpret_cast<u64>(edge) & -(u64)kSector;
                at[i] = as_global(reinterpret_cast<u8*>(sector | lane));
                if (kEnds == kStartAndEnd && ends) at[i] += to + rows - first_row;
                has[i] = c + i < columns && (before || kEnds == kEnd);
                if (kEnds != kStartAndEnd) has[i] &= (u32)(ends ? -1 - offset : offset) < bytes;
                if (has[i]) byte[i] = (ends ? end : start)[offset];
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (has[i]) *at[i] = byte[i];
        }
    }

    // Stores the parts of sectors that no other tile of the thread block stores.
    __device__ __forceinline__ void store_ends(bool continued, bool continues) const {
        const u32 most = continued || rows > kSector ? kSector : rows;
        if (kWaits && !continues && rows % kSector == 0) {
            store_parts<kStartAndEnd>(kSector);
        } else {
            if (kWaits ? !continues : !continued) store_parts<kStart>(most);
            if (!continues) store_parts<kEnd>(most);
        }
    }
};

// Stores columns that begin at any byte, group_rows bytes apart, by whole sectors, since the L2 takes parts
// of them at a fraction of its speed. The warp stages the columns in its own `stage`. If the thread block's
// next tile is the one below, the last 32 rows wait there for it. If parts of sectors wait, the first 32 rows
// of the thread block's tiles follow them.
__device__ __forceinline__ void store_columns(const ExpertTile& tile, const Codes& codes, u8* stage) {
    const u32 thread = thread_again();
    const int first_column = thread / 32 * kWarpColumns, lane = thread % 32;
    const int patch = lane % kPatches, own = lane / kPatches * 4;
    const int rows = tile.rows, columns = left_of(tile.columns - first_column, kWarpColumns);
    const i64 stride = tile.group_rows;
    const bool continued = tile.above, continues = tile.continues;
    u8* const to = as_global(tile.to) + first_column * stride;
    u8* const staged = stage + own * kColumnBytes + kSector + patch * 16;
#pragma unroll
    for (int c = 0; c < 4; c++) stage_column(staged + c * kColumnBytes, codes[c]);
    if (kWaits && !continued && patch < 2) {
        u8* const first = stage + kWarpColumns * kColumnBytes + own * kFirstBytes + patch * 16;
#pragma unroll
        for (int c = 0; c < 4; c++) stage_column(first + c * kFirstBytes, codes[c]);
    }
    __syncwarp();
    const u8* const first_rows = kWaits ? stage + kWarpColumns * kColumnBytes : stage + kSector;
    const WarpColumns warp{to, stage, stride, rows, columns, lane, to - tile.above * kTileRows, first_rows};
    warp.store_sectors(to + own * stride, staged, own, continued);
    warp.store_ends(continued, continues);
    __syncwarp();
    if (continues && patch >= kPatches - 2)
#pragma unroll
        for (int c = 0; c < 4; c++) stage_column(staged + c * kColumnBytes - kTileRows, codes[c]);
}

// Stages this thread's codes of columns of three rows at most, byte by byte. The first code goes to
// stage[first]; row: its row.
__device__ __forceinline__ void stage_bytes(const Codes& codes, u8* stage, int first, int row, int rows) {
    if (row == 0)
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int r = 0; r < 3; r++)
                if (r < rows) stage[first + c * rows + r] = (u8)(codes[c][0] >> 8 * r);
}

// Stages this thread's codes of columns of four rows or more, word by word. Contains __syncthreads(), because
// the first word of a column also holds the end of the column before.
__device__ __forceinline__ void stage_words(const Codes& codes, u8* stage, int first, int row, int rows) {
    const int left = rows - row;
    u32 above[4];
#pragma unroll
    for (int c = 0; c < 4; c++) above[c] = __shfl_up_sync(~0u, codes[c][3], 1);
    if (left > 0)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int at = first + c * rows, shift = (at & 3) * 8, end = left + (at & 3);
            u32* const words = reinterpret_cast<u32*>(stage + (at & ~3));
            if (row || shift == 0) words[0] = __funnelshift_l(above[c], codes[c][0], shift);
#pragma unroll
            for (int w = 1; w < 4; w++)
                if (end > 4 * w) words[w] = __funnelshift_l(codes[c][w - 1], codes[c][w], shift);
            if (left <= 16 && end > 16) words[4] = __funnelshift_l(codes[c][3], 0, shift);
        }
    __syncthreads();
    if (row == 0)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int at = first + c * rows, shift = (at & 3) * 8;
            u32* const word = reinterpret_cast<u32*>(stage + (at & ~3));
            if (shift) *word = codes[c][0] << shift | (*word & (1u << shift) - 1);
        }
}

// Stores columns without gaps between them (an expert of one row of tiles). The whole thread block stages
// them in shared memory in the order of global memory, and stores units of 16 bytes.
__device__ __forceinline__ void store_range(const ExpertTile& tile, const Codes& codes, u8* stage) {
    const int lane = threadIdx.x % 32, tile_row = lane % kPatches * 16, row = tile.row_in_strip(tile_row);
    const int rows = tile.rows;
    const int column = threadIdx.x / 32 * kWarpColumns + lane / kPatches * 4
                       + tile.strip_of(tile_row) * TILE_COLUMNS;
    // the columns are bytes [before, end) of the units
    const int before = (int)(reinterpret_cast<u64>(tile.to) & 15), end = before + tile.columns * rows;
    u8* const to = as_global(tile.to) - before;
    const int first = before + column * rows + row;
    if (rows < 4) stage_bytes(codes, stage, first, row, rows);
    else stage_words(codes, stage, first, row, rows);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTileRows * TILE_COLUMNS / 16 / kThreads + 1; n++) {
        const int at = ((int)threadIdx.x + n * kThreads + (before != 0)) * 16;
        if (at + 16 <= end) Chunk<IN, 16>::load_shared(stage + at).store_whole(to + at);
    }
    // The first and the last unit share bytes with neighbours in memory, so a lane stores single bytes.
    if (threadIdx.x >= 32) return;
    const int at = lane < 16 ? lane : end / 16 * 16 + lane % 16;
    if (at < end && (lane < 16 ? before && at >= before : before == 0 || end >= 16)) to[at] = stage[at];
}
