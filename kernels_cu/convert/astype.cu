// Changing the type or the order of elements (docs/numerics.md, rules 2 to 5 and 10).
//
// convert    src [n] -> dst [n]: narrow(widen(src)), or narrow(fl(widen(src) * scale_inv)) where a scale_inv is given
//            (astype, dequantize). IN, OUT: any of the formats; SATURATE 0: FP8 overflow gives NaN / Inf instead of the maximum.
//            Registers only; bytes moved per element: sizeof(IN) + sizeof(OUT).
// transpose  src [batch, rows, columns] of one-byte IN -> dst [batch, columns, rows]: the bytes themselves where OUT is IN, else
//            converted as above (dequantizing an array that is stored transposed). One block per TILE_ROWS x TILE_COLUMNS tile, a
//            thread for each 8 x 8 elements. ALIGNED 1: both bits of `vector` are set, and no code is made for anything else (large
//            tiles have no registers for it). DOWN_FIRST: see tile.cuh. Bytes moved per element: 1 + sizeof(OUT).
// Speed and what was tried: docs/performance.md.
#include "memory/elementwise.cuh"
#include "tile/tile.cuh"

struct ConvertParams {
    const IN::storage* src;
    OUT::storage* dst;
    const float* scale_inv;      // one element, or null: no multiplication
    i64 n;
    i64 rows, columns;           // transpose: of each source matrix
    u32 vector;                  // bit 0: src allows chunked access in every row; bit 1: dst; convert needs both
};

template <int kCount>
__device__ __forceinline__ Chunk<OUT, kCount> convert_chunk(const Chunk<IN, kCount>& in, bool scaled, float scale_inv) {
    Chunk<OUT, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
        float lo, hi;
        in.widen2(i, lo, hi);
        if (scaled) lo = mul_rn(lo, scale_inv), hi = mul_rn(hi, scale_inv);
        out.template narrow2<SATURATE != 0>(i, lo, hi);
    }
    return out;
}

#ifdef ENTRY_convert
extern "C" __global__ void __launch_bounds__(kFlatThreads) convert(const __grid_constant__ ConvertParams p) {
    const bool scaled = p.scale_inv;
    const float scale_inv = scaled ? *p.scale_inv : 1.0f;
    FlatChunks<IN, OUT> in(p.src, p.n, p.vector == 3);
    in.store(p.dst, [&](const decltype(in)::Source& chunk) { return convert_chunk(chunk, scaled, scale_inv); });
}
#endif

#ifdef ENTRY_transpose
// What a run of source bytes becomes: converted values, or the bytes themselves.
template <class In, class Out>
struct Conversion {
    bool scaled;
    float scale_inv;
    __device__ __forceinline__ Conversion(const ConvertParams& p) : scaled(p.scale_inv), scale_inv(scaled ? *p.scale_inv : 1.0f) {}
    template <int kCount>
    __device__ __forceinline__ Chunk<Out, kCount> operator()(const Chunk<In, kCount>& in) const {
        return convert_chunk(in, scaled, scale_inv);
    }
};
template <class In>
struct Conversion<In, In> {
    __device__ __forceinline__ Conversion(const ConvertParams&) {}
    template <int kCount>
    __device__ __forceinline__ Chunk<In, kCount> operator()(const Chunk<In, kCount>& in) const { return in; }
};

extern "C" __global__ void __launch_bounds__(ByteTile<TILE_ROWS, TILE_COLUMNS>::kThreads) transpose(const __grid_constant__ ConvertParams p) {
    using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;
    extern __shared__ __align__(16) u8 shared[];
    const Tile tile{shared};
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.rows, p.columns);
    const i64 matrix = at.matrix * p.rows * p.columns;
    const i64 row = at.row + Tile::patch_row(), column = at.column + Tile::patch_column();
    const bool vector_in = ALIGNED || p.vector & 1, vector_out = ALIGNED || p.vector & 2;
    int rows_left = left_of(p.rows - row, 8), columns_left = left_of(p.columns - column, 8);
    if (ALIGNED) rows_left = columns_left = rows_left && columns_left ? 8 : 0;           // whole patches: one predicate for all
    Chunk<IN, 8> patch[8];
    Tile::load_patch(patch, p.src + matrix + row * p.columns + column, p.columns, rows_left, columns_left, vector_in);
    tile.write_patch(patch);
    __syncthreads();
    const Conversion<IN, OUT> conversion{p};
    constexpr int kStore = 16 / sizeof(OUT::storage);                // elements of a 16-byte store
    if (kStore == 16 && !vector_out) {
        tile.store_ragged(reinterpret_cast<u8*>(p.dst) + matrix + at.column * p.rows + at.row, p.rows,
                          left_of(p.columns - at.column, TILE_COLUMNS), left_of(p.rows - at.row, TILE_ROWS));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<kStore>; unit++) {
        const i64 to_row = at.column + Tile::column<kStore>(unit), to_column = at.row + Tile::row<kStore>();
        const int left = to_row < p.columns ? left_of(p.rows - to_column, kStore) : 0;
        const Chunk<OUT, kStore> out = conversion(tile.read<IN, kStore>(unit));
        OUT::storage* to = p.dst + matrix + to_row * p.rows + to_column;
        if (!vector_out) out.store_partial(to, left);
        else if (left > 0) out.store_whole(to);
    }
}
#endif
