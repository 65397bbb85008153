// Stores the transposed rows of several tiles, one below the other, of one thread block, where these rows do
// not begin at sectors of memory. Only the sectors at both ends are written in parts: the bytes after a
// tile's last whole sector wait in shared memory for the next tile, and the bytes before the first whole
// sector for the last tile, when one byte per lane stores both ends.
//
// Columns 32 apart begin at the same byte of a sector, whatever the number of rows, so a warp takes such
// columns together and shifts them by the same number of bytes.
#pragma once
#include "tile/warp_tile.cuh"

template <class Tile>
struct ColumnSegment {
    static constexpr int kColumns = Tile::kColumns, kRows = Tile::kRows, kBytes = 2 * kSector * kColumns;
    // A set: the columns of a tile that begin at the same byte of a sector.
    static constexpr int kSetColumns = kColumns / kSector;
    // 16-byte units per column; columns of a set that a warp loads at a time
    static constexpr int kUnits = kRows / 16, kColumnsAtOnce = 32 / kUnits;
    static constexpr int kSets = kSector / (Tile::kThreads / 32);                // sets per warp
    static_assert(kUnits >= 2 && kSetColumns % kColumnsAtOnce == 0 && kSets * kSetColumns * 2 % 32 == 0,
                  "whole warps");

    const Tile& tile;
    // kBytes, 16-byte aligned; each warp uses only its own columns' part
    u8* shared;

    // to: destination of source column 0 of this tile, rows `stride` bytes apart. columns_left, rows_left: of
    // this tile; rows_before: rows of the thread block's tiles above, all of them whole; last: this is the
    // last tile.
    __device__ __forceinline__ void store(u8* to, i64 stride, int columns_left, int rows_left,
                                          int rows_before, bool last) const {
        const int unit = threadIdx.x % kUnits, first_column = threadIdx.x / 32 * kSets;
        const int member = threadIdx.x % 32 / kUnits;
        const bool first = rows_before == 0;
#pragma unroll 1
        for (int column = first_column; column < first_column + kSets && column < columns_left; column++) {
            u8* row = to + column * stride;
            const int before = before_sector(row), shift = -before & 15, low = unit - (before + 15) / 16;
            const int end = before + rows_left & -kSector;
            const bool whole = 16 * unit >= (first && before ? kSector : 0) && 16 * unit + 16 <= end;
            uint4 lower[kSetColumns / kColumnsAtOnce], upper[kSetColumns / kColumnsAtOnce];
#pragma unroll
            for (int i = 0; i < kSetColumns / kColumnsAtOnce; i++) {
                lower[i] = *unit_of(column + kSector * (member + i * kColumnsAtOnce), low);
                upper[i] = *unit_of(column + kSector * (member + i * kColumnsAtOnce), low + 1);
            }
            switch (shift / 4) {
                case 0: shift_all<0>(lower, upper, shift % 4 * 8); break;
                case 1: shift_all<1>(lower, upper, shift % 4 * 8); break;
                case 2: shift_all<2>(lower, upper, shift % 4 * 8); break;
                default: shift_all<3>(lower, upper, shift % 4 * 8);
            }
            row += kSector * member * stride + 16 * unit - before;
#pragma unroll
            for (int i = 0; i < kSetColumns / kColumnsAtOnce; i++, row += kSector * kColumnsAtOnce * stride)
                if (whole && column + kSector * (member + i * kColumnsAtOnce) < columns_left)
                    *reinterpret_cast<uint4*>(row) = lower[i];
        }
        if (first) keep(head(0), 0);
        if (last) return store_ends(to, stride, columns_left, rows_left, rows_before);
        // all lanes have read the bytes that keep() overwrites
        __syncwarp();
        keep(rest(0), kUnits - 2);
        __syncwarp();
    }

private:
    // Where the first 32 bytes of a column are kept, and its last bytes in the tile above.
    __device__ __forceinline__ u8* head(int column) const { return shared + column * kSector; }
    __device__ __forceinline__ u8* rest(int column) const { return head(kColumns + column); }

    // Returns rows 16 * unit and on of a column. Units -2 and -1 are the bytes kept from the tile above; past
    // the last unit the bytes are arbitrary.
    __device__ __forceinline__ const uint4* unit_of(int column, int unit) const {
        return unit < 0 ? reinterpret_cast<const uint4*>(rest(column)) + (unit + 2)
            : tile.unit_at(column, unit % kUnits);
    }
    // Funnel shift: lower becomes the 16 bytes at word kFirst, byte bits / 8, of lower and upper together.
    template <int kFirst>
    static __device__ __forceinline__ void shift_all(
        uint4 (&lower)[kSetColumns / kColumnsAtOnce], const uint4 (&upper)[kSetColumns / kColumnsAtOnce],
        int bits) {
#pragma unroll
        for (int i = 0; i < kSetColumns / kColumnsAtOnce; i++) {
            const u32 word[8] = {lower[i].x, lower[i].y, lower[i].z, lower[i].w, upper[i].x, upper[i].y,
                                 upper[i].z, upper[i].w};
            lower[i] = make_uint4(__funnelshift_r(word[kFirst], word[kFirst + 1], bits),
                                  __funnelshift_r(word[kFirst + 1], word[kFirst + 2], bits),
                                  __funnelshift_r(word[kFirst + 2], word[kFirst + 3], bits),
                                  __funnelshift_r(word[kFirst + 3], word[kFirst + 4], bits));
        }
    }
    // Keeps two units of all columns of this warp for later tiles.
    __device__ __forceinline__ void keep(u8* to, int first_unit) const {
#pragma unroll
        for (int i = 0; i < kSets * kSetColumns * 2; i += 32) {
            const int which = i + threadIdx.x % 32, unit = which % 2;
            const int column = threadIdx.x / 32 * kSets + which / 2 % kSets;
            const int all = column + which / 2 / kSets * kSector;
            reinterpret_cast<uint4*>(to + all * kSector)[unit] = *tile.unit_at(all, first_unit + unit);
        }
    }

    // Stores the bytes before and after the whole sectors of each column, one byte per lane.
    __device__ __forceinline__ void store_ends(u8* to, i64 stride, int columns_left, int rows_left,
                                               int rows_before) const {
        __syncwarp();
        const int first_column = threadIdx.x / 32 * kSets, rows = left_of(rows_before + rows_left, kSector);
#pragma unroll 1
        for (int column = first_column; column < first_column + kSets && column < columns_left; column++) {
            u8* const begin = to + column * stride;
            const int before = before_sector(begin), missing = -before & kSector - 1;
            const int of_head = missing < rows ? missing : rows;
            const int of_tail = missing < rows ? before + rows_left & kSector - 1 : 0;
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < of_head + of_tail; i += 32) {
                const bool in_head = i < of_head;
                // rows below 0 are among the bytes kept from the tile above
                const int r = in_head ? i : rows_left - of_tail + (i - of_head);
                const u8* from = in_head ? head(column) + r : r < 0 ? rest(column) + kSector + r
                                         : reinterpret_cast<const u8*>(tile.unit_at(column, r / 16)) + r % 16;
                const int step = in_head || r < 0 ? kSector * kSector : kSector * kRows;
                u8* row = begin + (in_head ? r - rows_before : r);
                u8 byte[kSetColumns];
#pragma unroll
                for (int c = 0; c < kSetColumns; c++) byte[c] = from[c * step];
#pragma unroll
                for (int c = 0; c < kSetColumns; c++, row += kSector * stride)
                    if (column + c * kSector < columns_left) *row = byte[c];
            }
        }
    }
};
