// Changes of the type or the order of elements (docs/numerics.md, rules 2 to 5 and 10).
//
//   convert:    dst[i] = narrow(widen(src[i])), or narrow(fl(widen(src[i]) * scale_inv)) with a scale_inv
//   transpose:  dst[b, j, i] = src[b, i, j], for bytes
//
// convert    src [n] IN -> dst [n] OUT; scale_inv f32 [1] or null. Two chunks of 16 bytes (of the wider type)
//            per thread, both loads in flight; no shared memory. Bytes moved per element: sizeof(IN) +
//            sizeof(OUT).
// transpose  src [batch, rows, columns] u8 -> dst [batch, columns, rows] u8. A thread block transposes a tile
//            of TILE_ROWS x TILE_COLUMNS in shared memory, and a thread 8 x 8 elements of it in registers, so
//            that both arrays are accessed along their rows. Bytes moved per element: 2.
//
// Rounding: nearest-even. NaN becomes the format's one NaN. Zeros keep their sign; subnormals are kept.
//
// Defines of convert:
//   IN, OUT      the formats, any of the six; a program per pair, since conversions are instructions
// Defines of transpose:
//   TILE_ROWS, TILE_COLUMNS, DOWN_FIRST   the tile and the order of tiles (tile.cuh)
//   ALIGNED      1: both bits of `vector` are set; no code for other calls, which would take the registers
//                that large tiles need
// Measured speed and what was tried: docs/lab-notes.
#include "memory/elementwise.cuh"
#include "tile/tile.cuh"

#ifdef ENTRY_convert
struct ConvertParams {
    const IN::storage* src;
    OUT::storage* dst;
    const float* scale_inv;      // one element, or null: no multiplication
    i64 n;
    u32 vector;                  // 1: both arrays are aligned to their chunks
    u32 saturate;                // 0: FP8 overflow gives NaN or Inf instead of the maximum
};

// Only these formats depend on `saturate`.
template <class F> constexpr bool kMaySaturate = false;
template <> constexpr bool kMaySaturate<e4m3fn> = true;
template <> constexpr bool kMaySaturate<e5m2> = true;

template <bool kSaturate>
struct Conversion {
    bool scaled;
    float scale_inv;

    template <int kCount>
    __device__ __forceinline__ Chunk<OUT, kCount> operator()(const Chunk<IN, kCount>& in) const {
        Chunk<OUT, kCount> out;
#pragma unroll
        for (int i = 0; i < kCount / 2; i++) {
            float lo, hi;
            in.widen2(i, lo, hi);
            if (scaled) lo = mul_rn(lo, scale_inv), hi = mul_rn(hi, scale_inv);
            out.template narrow2<kSaturate>(i, lo, hi);
        }
        return out;
    }
};

extern "C" __global__ void __launch_bounds__(kElementwiseThreads)
convert(const __grid_constant__ ConvertParams p) {
    const bool scaled = p.scale_inv;
    const float scale_inv = scaled ? *p.scale_inv : 1.0f;
    const ElementwiseChunks<IN, OUT> in(p.src, p.n, p.vector);
    if (!kMaySaturate<OUT> || p.saturate) in.store(p.dst, Conversion<true>{scaled, scale_inv});
    else in.store(p.dst, Conversion<!kMaySaturate<OUT>>{scaled, scale_inv});
}
#endif

#ifdef ENTRY_transpose
struct TransposeParams {
    const u8* src;
    u8* dst;
    i64 rows, columns;           // shape of each source matrix
    u32 vector;                  // bit 0: every row of src allows 8-byte loads; bit 1: of dst, 16-byte stores
};

using Byte = e4m3fn;             // stands for every one-byte format: nothing is converted

extern "C" __global__ void __launch_bounds__(ByteTile<TILE_ROWS, TILE_COLUMNS>::kThreads)
transpose(const __grid_constant__ TransposeParams p) {
    using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;
    extern __shared__ __align__(16) u8 shared[];
    const Tile tile{shared};
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.rows, p.columns);
    const i64 matrix = at.matrix * p.rows * p.columns;
    const i64 row = at.row + Tile::patch_row(), column = at.column + Tile::patch_column();
    const bool vector_in = ALIGNED || p.vector & 1, vector_out = ALIGNED || p.vector & 2;
    int rows_left = left_of(p.rows - row, 8), columns_left = left_of(p.columns - column, 8);
    // patches are whole or absent, so one predicate decides
    if (ALIGNED) rows_left = columns_left = rows_left && columns_left ? 8 : 0;
    Chunk<Byte, 8> patch[8];
    Tile::load_patch(patch, p.src + matrix + row * p.columns + column, p.columns, rows_left, columns_left,
                     vector_in);
    tile.write_patch(patch);
    __syncthreads();
    if (!vector_out) {
        tile.store_ragged(p.dst + matrix + at.column * p.rows + at.row, p.rows,
                          left_of(p.columns - at.column, TILE_COLUMNS), left_of(p.rows - at.row, TILE_ROWS));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
        const i64 to_row = at.column + Tile::column<16>(unit), to_column = at.row + Tile::row<16>();
        const Chunk<Byte, 16> bytes = tile.read<Byte, 16>(unit);
        if (to_row < p.columns && to_column < p.rows)
            bytes.store_whole(p.dst + matrix + to_row * p.rows + to_column);
    }
}
#endif
