// Writes the codes of a warp tile, in kernels of blocks. IN and OUT are the kernel's formats; WARP_TILES_DOWN
// and WARP_TILES_ACROSS are explained in its file.
#pragma once
#include "tile/warp_tile.cuh"

using Tile = WarpTiles<WARP_TILES_DOWN, WARP_TILES_ACROSS>;

// Destination of the codes of one set of operands: `data` in the order of x (as_is), the tile in shared
// memory (transposed), both, or none. wide: `data` allows stores of 4 bytes.
struct Destination {
    bool as_is, transposed;
    u8* data;
    bool wide;
    Tile tile;

    // stored: 0 nowhere, 1 in the order of x, 2 transposed
    static __device__ __forceinline__ Destination of(int stored, u8* data, bool wide, const Tile& tile) {
        return {stored == 1, stored == 2, data, wide, tile};
    }
};

// Destinations of the codes by the operands of rows, and by those of columns.
struct Destinations {
    Destination of_rows, of_columns;
};

// Operands: quad<kAlongRows>(n) returns the operands of rows 4 * n to 4 * n + 3; its codes(v, i) returns the
// codes of four elements v of row i in a word. kAlongRows: one operand per row; otherwise one for each of the
// lane's columns. columns: of the matrix.
template <class Operands>
struct WarpTileWriter {
    const i64& columns;
    const WarpTile<IN>& warp_tile;
    const WarpTilePosition& position;
    const Operands operands;

    // Computes the codes of rows 4 * quad to 4 * quad + 3, stores them in the order of x if `to` says so, and
    // transposes them into words[column][quad % 4].
    template <bool kAlongRows, bool kWide>
    __device__ __forceinline__ void write_quad(const Destination& to, int quad,
                                               u32 (&words)[kLaneColumns][4]) const {
        const auto of_quad = operands.template quad<kAlongRows>(quad);
        u32 codes[4];
        u8* at = to.data + (position.at + quad * 4 * columns);
#pragma unroll
        for (int i = 0; i < 4; i++, at += columns) {
            const int r = quad * 4 + i;
            float v[kLaneColumns];
            warp_tile.row[r].widen2(0, v[0], v[1]);
            warp_tile.row[r].widen2(1, v[2], v[3]);
            codes[i] = of_quad.codes(v, i);
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

    // Writes sixteen rows: 16 bytes of a transposed row per column.
    template <bool kAlongRows, bool kWide>
    __device__ __forceinline__ void write_half(const Destination& to, int half) const {
        if (!to.as_is && !to.transposed) return;
        u32 words[kLaneColumns][4];
#pragma unroll
        for (int quad = half * 4; quad < half * 4 + 4; quad++)
            write_quad<kAlongRows, kWide>(to, quad, words);
        if (to.transposed) to.tile.write(half, words);
    }

    // Writes all rows for both sets of operands, in turns by halves, so that addresses and widened values are
    // short-lived: those of a whole warp tile would not fit in registers.
    template <bool kWide>
    __device__ __forceinline__ void write(const Destinations& to) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            write_half<true, kWide>(to.of_rows, half);
            write_half<false, kWide>(to.of_columns, half);
        }
    }

    // The same for destinations known at compile time (kWide): if nothing is transposed, turns are by quads.
    template <bool kWide>
    __device__ __forceinline__ void write_known(const Destinations& to) const {
        if (!kWide || !to.of_rows.as_is || !to.of_columns.as_is) return write<kWide>(to);
        u32 unused[kLaneColumns][4];
#pragma unroll
        for (int quad = 0; quad < kWarpTileRows / 4; quad++) {
            write_quad<true, kWide>(to.of_rows, quad, unused);
            write_quad<false, kWide>(to.of_columns, quad, unused);
        }
    }
};
