// A warp writes the codes of its warp tile with this, in kernels of blocks with f32 scales. IN and OUT are
// the kernel's formats; its file explains WARP_TILES_DOWN and WARP_TILES_ACROSS.
#pragma once
#include "scale/block_params.cuh"
#include "groups/row_groups.cuh"
#include "tile/warp_tile.cuh"

using Tile = WarpTiles<WARP_TILES_DOWN, WARP_TILES_ACROSS>;

constexpr int kSubblocks = kWarpTileColumns / 32; // subblocks of 32 elements in a row of a warp tile
// Subblocks are so many words apart in shared memory, which is free of bank conflicts.
constexpr int kSubblockStride = kWarpTileRows + 4;
// A warp has so many words for the scales of every row of every subblock.
constexpr int kRowWords = kSubblocks * kSubblockStride;


// Elements are multiplied by a factor, or divided: by quick_quotient_of_codes() where all divisors of a warp
// allow that, since a choice for every few elements takes longer than it saves.
enum How { kMultiply, kDivideQuickly, kDivide };

// Rows have these operands: factors, or divisors and their reciprocals.
struct RowOperands {
    const float *factors, *divisors;

    static __device__ __forceinline__ void load(const float* from, float (&four)[4]) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
    }
};
// This lane's columns have these operands.
struct ColumnOperands {
    float factor[kLaneColumns], divisor[kLaneColumns];
};

// Returns four codes in a word.
template <How kHow>
__device__ __forceinline__ u32 scaled_codes(const float (&v)[4], const float (&factor)[4],
                                            const float (&divisor)[4]) {
    return narrowed<OUT>(v, [&](float each, int i) {
        return kHow == kMultiply ? mul_rn(each, factor[i])
               : kHow == kDivideQuickly ? quick_quotient_of_codes(each, divisor[i], factor[i])
               : div_rn(each, divisor[i]);
    }).word[0];
}

// Says where the codes of one set of operands go: to `data` in the order of x (as_is), transposed to the tile
// in shared memory, to both, or nowhere. wide: `data` allows stores of 4 bytes.
struct Destination {
    bool as_is, transposed;
    u8* data;
    bool wide;
    Tile tile;

    // stored: 0 nowhere, 1 in the order of x, 2 transposed.
    static __device__ __forceinline__ Destination of(int stored, u8* data, bool wide, const Tile& tile) {
        return {stored == 1, stored == 2, data, wide, tile};
    }
};

// The operands of rows and those of columns give codes for these destinations.
struct Destinations {
    Destination of_rows, of_columns;
};

// Writes the codes of a warp tile.
struct WarpTileWriter {
    const BlockParams& p;
    const WarpTile<IN>& warp_tile;
    const WarpTilePosition& position;
    const RowOperands& rows;
    const ColumnOperands& columns;

    // Finds the codes of rows 4 * quad to 4 * quad + 3, stores them in the order of x if `to` wants that, and
    // transposes them into words[column][quad % 4]. kAlongRows: `rows` has an operand for every row;
    // otherwise `columns` has one for each of the lane's columns.
    template <bool kAlongRows, bool kWide, How kHow>
    __device__ __forceinline__ void write_quad(const Destination& to, int quad,
                                               u32 (&words)[kLaneColumns][4]) const {
        float factor[4] = {}, divisor[4] = {};
        if (kAlongRows) RowOperands::load(rows.factors + quad * 4, factor);
        if (kAlongRows && kHow != kMultiply) RowOperands::load(rows.divisors + quad * 4, divisor);
        u32 codes[4];
        u8* at = to.data + (position.at + quad * 4 * p.columns);
#pragma unroll
        for (int i = 0; i < 4; i++, at += p.columns) {
            const int r = quad * 4 + i;
            float v[kLaneColumns];
            warp_tile.row[r].widen2(0, v[0], v[1]);
            warp_tile.row[r].widen2(1, v[2], v[3]);
            if constexpr (kAlongRows)
                codes[i] = scaled_codes<kHow>(v, {factor[i], factor[i], factor[i], factor[i]},
                                              {divisor[i], divisor[i], divisor[i], divisor[i]});
            else codes[i] = scaled_codes<kHow>(v, columns.factor, columns.divisor);
            if (!to.as_is) continue;
            const int left = r < position.rows_left ? position.columns_left : 0;
            const Chunk<OUT, 4> out{{codes[i]}};
            if (!kWide && !to.wide) out.store_partial(at, left);
            else if (left) out.store(at);
        }
        u32 column[kLaneColumns];
        transpose_4x4(codes[0], codes[1], codes[2], codes[3], column);
#pragma unroll
        for (int c = 0; c < kLaneColumns; c++) words[c][quad % 4] = column[c];
    }

    // Writes sixteen rows, of which each column has 16 bytes of a transposed row.
    template <bool kAlongRows, bool kWide, How kHow>
    __device__ __forceinline__ void write_half(const Destination& to, int half) const {
        if (!to.as_is && !to.transposed) return;
        u32 words[kLaneColumns][4];
#pragma unroll
        for (int quad = half * 4; quad < half * 4 + 4; quad++)
            write_quad<kAlongRows, kWide, kHow>(to, quad, words);
        if (to.transposed) to.tile.write(half, words);
    }

    // Writes sixteen rows, multiplied by the factors of their columns, for transposed data alone: elements
    // that are narrowed together come from one column, so that nothing is left to transpose.
    __device__ __forceinline__ void write_half_of_columns(const Tile& tile, int half) const {
        u32 words[kLaneColumns][4];
#pragma unroll
        for (int quad = 0; quad < 4; quad++) {
            float v[4][kLaneColumns];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const auto& chunk = warp_tile.row[half * 16 + quad * 4 + i];
                chunk.widen2(0, v[i][0], v[i][1]);
                chunk.widen2(1, v[i][2], v[i][3]);
            }
#pragma unroll
            for (int c = 0; c < kLaneColumns; c++) {
                Chunk<OUT, 4> out;
                out.narrow2(0, mul_rn(v[0][c], columns.factor[c]), mul_rn(v[1][c], columns.factor[c]));
                out.narrow2(1, mul_rn(v[2][c], columns.factor[c]), mul_rn(v[3][c], columns.factor[c]));
                words[c][quad] = out.word[0];
            }
        }
        tile.write(half, words);
    }

    // Writes all rows for both operands. These take turns by halves, so that addresses and widened values
    // live briefly: those of a whole warp tile would not fit in registers.
    template <bool kWide, How kHow>
    __device__ __forceinline__ void write(const Destinations& to) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            write_half<true, kWide, kHow>(to.of_rows, half);
            write_half<false, kWide, kHow>(to.of_columns, half);
        }
    }

    // Writes all codes of a warp tile whose divisors have no quick quotients. It reads x, of which given_left
    // rows exist, again. This is rare, and divisions take the compiler longer than anything else here, so
    // that the loop has only four: those of a lane's columns of one row for one set of operands.
    __device__ __forceinline__ void divide(const Destinations& to, int given_left) const {
#pragma unroll 1
        for (int i = 0; i < 2 * kWarpTileRows; i++) {
            const int row = i / 2;
            const bool of_rows = i % 2 == 0;
            const Destination destination = of_rows ? to.of_rows : to.of_columns;
            if (!destination.as_is && !destination.transposed) continue;
            const i64 at = position.at + row * p.columns;
            const int given = row < given_left ? position.columns_left : 0;
            const auto chunk = WarpTile<IN>::RowChunk::load_partial(p.x + at, given);
            float v[kLaneColumns], divisor[kLaneColumns];
            chunk.widen2(0, v[0], v[1]);
            chunk.widen2(1, v[2], v[3]);
#pragma unroll
            for (int c = 0; c < kLaneColumns; c++)
                divisor[c] = of_rows ? rows.divisors[row] : columns.divisor[c];
            const Chunk<OUT, kLaneColumns> out{{scaled_codes<kDivide>(v, divisor, divisor)}};
            if (destination.as_is && row < position.rows_left)
                out.store_partial(destination.data + at, position.columns_left);
            if (!destination.transposed) continue;
#pragma unroll
            for (int c = 0; c < kLaneColumns; c++)
                *destination.tile.byte_at(Tile::column() + c, Tile::row() + row) = (u8)(out.word[0] >> 8 * c);
        }
    }
};

// Moves a grid of scales to the part that belongs to a group.
__device__ __forceinline__ void move_to_group(ScaleGrid& grid, const GroupScales& scales, i64 before,
                                              i64 rows) {
    if (!grid.to) return;
    grid.to += before * scales.unit;
    grid.rows = scales.block_rows(rows);
    if (grid.row == 1) grid.column = grid.rows;
}
