// The scaling-aware transpose (scaling_aware.cu) stores the columns of a tile here, wherever they begin.
#pragma once
#include "groups/scaling_aware_place.cuh"

constexpr int kColumnBytes = kTileRows + kSector;        // a staged column and rows of the tile above
// True if parts of sectors wait: for the other part in the tile below, or until the block's last tile, when
// another block stores the other part as well, so that the L2 still has the sector. Four blocks per
// multiprocessor leave no shared memory for it, and MX gains nothing.
constexpr bool kWaits = BLOCKS < 4 && !kMx;
constexpr int kFirstBytes = kWaits ? kSector : 0;        // the first rows of a column of the block's tiles
constexpr int kShiftedBytes = kWarpColumns * (kColumnBytes + kFirstBytes);                   // per warp
constexpr int kHalvesBytes = kWarpColumns * 16;                                              // per warp
static_assert(kWarps * kShiftedBytes >= kTileRows * TILE_COLUMNS + 32, "room for what store_range() makes");

// A thread's part of a tile: 16 rows of four columns.
using Codes = u32[4][4];

// Stores columns that begin at multiples of 16 bytes. line, column: place of this thread's first code in the
// expert. If the last 16 bytes of a tile's column are half a sector, they wait in `halves` for the other
// half, which the tile below has. `halves` has 16 bytes for each of the warp's columns.
__device__ __forceinline__ void store_aligned(const Place& place, const Codes& codes, int line, int column,
                                              u8* halves) {
    const i64 stride = place.group_lines;
    const int columns = line < place.lines ? place.columns - column : 0;
    u8* to = as_global(place.to) + (column * stride + line);
    if (!kWaits || !(place.above || place.continues)) {
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
            if (place.continues)
                store_shared_whole(waiting + c * 16, unit.word[0], unit.word[1], unit.word[2], unit.word[3]);
            else if (stores) unit.store_whole(to);
            stores = place.above && column + c < place.columns, at = to - kTileRows, unit = above;
        }
        if (stores) unit.store_whole(at);
    }
}

enum Part { kStart, kEnd, kStartAndEnd };

// Stores the parts of sectors at the start of `columns` columns, at their end, or at both if the columns are
// whole sectors long. It stores two columns at a time, a byte per lane, `bytes` at most. The columns are
// `stride` bytes apart in memory and staged in `stage`. to: where the first column's rows of this tile go.
// first_row: where those of the block's first tile go. first_rows: where the latter are in shared memory.
template <Part kPart>
__device__ __forceinline__ void store_parts(u8* to, u8* first_row, int lines, i64 stride, int columns,
                                            const u8* stage, const u8* first_rows, int lane, u32 bytes) {
    constexpr int kPitch = kWaits ? kFirstBytes : kColumnBytes;
    u8* edge = kPart == kEnd ? to + lines : first_row;
    const u8 *start = first_rows, *end = stage + kSector + lines;
#pragma unroll 1
    for (int c = 0; c < columns; c += 2) {
        u8 *at[2], byte[2];
        bool has[2];
#pragma unroll
        for (int i = 0; i < 2; i++, edge += stride, start += kPitch, end += kColumnBytes) {
            const int before = before_sector(edge), offset = lane - before;
            const bool ends = kPart == kEnd || (kPart == kStartAndEnd && offset < 0);
            at[i] = as_global(reinterpret_cast<u8*>((reinterpret_cast<u64>(edge) & -(u64)kSector) | lane));
            if (kPart == kStartAndEnd && ends) at[i] += to + lines - first_row;
            has[i] = c + i < columns && (before || kPart == kEnd);
            if (kPart != kStartAndEnd) has[i] &= (u32)(ends ? -1 - offset : offset) < bytes;
            if (has[i]) byte[i] = (ends ? end : start)[offset];
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (has[i]) *at[i] = byte[i];
    }
}

// Stores columns that begin at any byte, group_lines bytes apart. It stores whole sectors of memory, since
// the L2 takes parts of them at a fraction of its speed. The warp stages the columns in its own `stage`. If
// the block's next tile is the one below, the last 32 rows wait there for it. If parts of sectors wait, the
// first 32 rows of the block's tiles are behind them.
__device__ __forceinline__ void store_columns(const Place& place, const Codes& codes, u8* stage) {
    const u32 thread = thread_again();
    const int first_column = thread / 32 * kWarpColumns, lane = thread % 32;
    const int patch = lane % kPatches, own = lane / kPatches * 4;
    const int lines = place.lines, columns = left_of(place.columns - first_column, kWarpColumns);
    const i64 stride = place.group_lines;
    const bool continued = place.above, continues = place.continues;
    u8* const to = as_global(place.to) + first_column * stride;
    u8* const staged = stage + own * kColumnBytes + kSector + patch * 16;
#pragma unroll
    for (int c = 0; c < 4; c++)
        store_shared_whole(staged + c * kColumnBytes, codes[c][0], codes[c][1], codes[c][2], codes[c][3]);
    if (kWaits && !continued && patch < 2) {
        u8* const first = stage + kWarpColumns * kColumnBytes + own * kFirstBytes + patch * 16;
#pragma unroll
        for (int c = 0; c < 4; c++)
            store_shared_whole(first + c * kFirstBytes, codes[c][0], codes[c][1], codes[c][2], codes[c][3]);
    }
    __syncwarp();
    const int sector = patch / 2 * kSector;
    u8* column = to + own * stride;
#pragma unroll
    for (int c = 0; c < 4; c++, column += stride) {
        const int before = before_sector(column), first = continued ? 0 : before;
        const u32* const from = reinterpret_cast<const u32*>(staged + (c * kColumnBytes - (before + 3 & ~3)));
        u32 words[5];
#pragma unroll
        for (int w = 0; w < 5; w++) words[w] = from[w];
        Chunk<IN, 16> unit;
#pragma unroll
        for (int w = 0; w < 4; w++) unit.word[w] = __funnelshift_r(words[w], words[w + 1], (-before & 3) * 8);
        if (sector >= first && sector + kSector <= before + lines && own + c < columns)
            unit.store_whole(column - before + patch * 16);
    }
    u8* const first_row = to - place.above * kTileRows;
    const u8* const first_rows = kWaits ? stage + kWarpColumns * kColumnBytes : stage + kSector;
    const u32 most = continued || lines > kSector ? kSector : lines;
    if (kWaits && !continues && lines % kSector == 0) {
        store_parts<kStartAndEnd>(to, first_row, lines, stride, columns, stage, first_rows, lane, kSector);
    } else {
        if (kWaits ? !continues : !continued)
            store_parts<kStart>(to, first_row, lines, stride, columns, stage, first_rows, lane, most);
        if (!continues)
            store_parts<kEnd>(to, first_row, lines, stride, columns, stage, first_rows, lane, most);
    }
    __syncwarp();
    if (continues && patch >= kPatches - 2)
#pragma unroll
        for (int c = 0; c < 4; c++)
            store_shared_whole(staged + c * kColumnBytes - kTileRows, codes[c][0], codes[c][1], codes[c][2],
                               codes[c][3]);
}

// Stores columns that follow one another without gaps, as they do in an expert of one row of tiles. The whole
// block of threads stages them in shared memory in the order of global memory, and stores units of 16 bytes.
__device__ __forceinline__ void store_range(const Place& place, const Codes& codes, u8* stage) {
    const int lane = threadIdx.x % 32, row = lane % kPatches * 16, line = place.line_of(row);
    const int lines = place.lines, left = lines - line;
    const int column = threadIdx.x / 32 * kWarpColumns + lane / kPatches * 4
                       + place.strip_of(row) * TILE_COLUMNS;
    // The columns are bytes [before, end) of the units.
    const int before = (int)(reinterpret_cast<u64>(place.to) & 15), end = before + place.columns * lines;
    u8* const to = as_global(place.to) - before;
    // This is the place of the thread's first code: of its first row and its first column.
    const int first = before + column * lines + line;
    if (lines < 4) {
        if (line == 0)
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int r = 0; r < 3; r++)
                    if (r < lines) stage[first + c * lines + r] = (u8)(codes[c][0] >> 8 * r);
    } else {
        // The first word of a column also holds the end of the column before, which is there after a barrier.
        u32 above[4];
#pragma unroll
        for (int c = 0; c < 4; c++) above[c] = __shfl_up_sync(~0u, codes[c][3], 1);
        if (left > 0)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int at = first + c * lines, shift = (at & 3) * 8, end = left + (at & 3);
                u32* const words = reinterpret_cast<u32*>(stage + (at & ~3));
                if (line || shift == 0) words[0] = __funnelshift_l(above[c], codes[c][0], shift);
#pragma unroll
                for (int w = 1; w < 4; w++)
                    if (end > 4 * w) words[w] = __funnelshift_l(codes[c][w - 1], codes[c][w], shift);
                if (left <= 16 && end > 16) words[4] = __funnelshift_l(codes[c][3], 0, shift);
            }
        __syncthreads();
        if (line == 0)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int at = first + c * lines, shift = (at & 3) * 8;
                u32* const word = reinterpret_cast<u32*>(stage + (at & ~3));
                if (shift) *word = codes[c][0] << shift | (*word & (1u << shift) - 1);
            }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTileRows * TILE_COLUMNS / 16 / kThreads + 1; n++) {
        const int at = ((int)threadIdx.x + n * kThreads + (before != 0)) * 16;
        if (at + 16 <= end) Chunk<IN, 16>::load_shared(stage + at).store_whole(to + at);
    }
    // The first and the last unit share bytes with neighbours in memory, so a lane stores each byte.
    if (threadIdx.x >= 32) return;
    const int at = lane < 16 ? lane : end / 16 * 16 + lane % 16;
    if (at < end && (lane < 16 ? before && at >= before : before == 0 || end >= 16)) to[at] = stage[at];
}
