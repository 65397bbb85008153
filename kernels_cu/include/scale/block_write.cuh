// Writes a warp tile's codes, in kernels with f32 block scales.
#pragma once
#include "scale/block_params.cuh"
#include "groups/row_groups.cuh"
#include "tile/warp_tile_write.cuh"

constexpr int kSubblocks = kWarpTileColumns / 32; // subblocks of 32 elements in a row of a warp tile
// stride of subblocks in shared memory, in words; padded against bank conflicts
constexpr int kSubblockStride = kWarpTileRows + 4;
// words per warp for the scales of every row of every subblock
constexpr int kRowWords = kSubblocks * kSubblockStride;

// Elements are multiplied by a factor, or divided; by quick_quotient_of_codes() where all divisors of a warp
// allow it (a choice for every few elements would take longer than it saves).
enum How { kMultiply, kDivideQuickly, kDivide };

// operands of rows: factors, or divisors and their reciprocals
struct RowOperands {
    const float *factors, *divisors;

    static __device__ __forceinline__ void load(const float* from, float (&four)[4]) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
    }
};
// operands of this lane's columns
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

// operands of a warp tile, for WarpTileWriter
template <How kHow>
struct BlockOperands {
    const RowOperands& rows;
    const ColumnOperands& columns;

    struct OfRows {
        float factor[4] = {}, divisor[4] = {};

        __device__ __forceinline__ u32 codes(const float (&v)[4], int i) const {
            return scaled_codes<kHow>(v, {factor[i], factor[i], factor[i], factor[i]},
                                      {divisor[i], divisor[i], divisor[i], divisor[i]});
        }
    };
    struct OfColumns {
        const ColumnOperands& columns;

        __device__ __forceinline__ u32 codes(const float (&v)[4], int) const {
            return scaled_codes<kHow>(v, columns.factor, columns.divisor);
        }
    };
    template <bool kAlongRows>
    __device__ __forceinline__ auto quad(int n) const {
        if constexpr (kAlongRows) {
            OfRows four;
            RowOperands::load(rows.factors + n * 4, four.factor);
            if (kHow != kMultiply) RowOperands::load(rows.divisors + n * 4, four.divisor);
            return four;
        } else {
            return OfColumns{columns};
        }
    }
};

// Writes the codes of a warp tile.
struct BlockWriter {
    const BlockParams& p;
    const WarpTile<IN>& warp_tile;
    const WarpTilePosition& position;
    const RowOperands& rows;
    const ColumnOperands& columns;

    template <How kHow>
    __device__ __forceinline__ WarpTileWriter<BlockOperands<kHow>> by() const {
        return {p.columns, warp_tile, position, {rows, columns}};
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

    // Writes all codes of a warp tile whose divisors have no quick quotients (rare). Reads x, of which
    // given_left rows exist, again. Divisions take the compiler longer than anything else here, so the loop
    // body has only four: those of a lane's columns in one row, for one set of operands.
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

// Moves a grid of scales to a group's part.
__device__ __forceinline__ void move_to_group(ScaleGrid& grid, const GroupScales& scales, i64 before,
                                              i64 rows) {
    if (!grid.to) return;
    grid.to += before * scales.unit;
    grid.rows = scales.block_rows(rows);
    if (grid.row == 1) grid.column = grid.rows;
}
