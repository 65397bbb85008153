// Per-tensor scaling (docs/numerics.md, section 1): x is widened to f32, multiplied by the scale, rounded to FP8.
//
//   data      = narrow(fl(x * scale))                 scale_inv = fl(1 / scale)           amax = max(amax, max |x|)
//   data_t    = data with its last two axes swapped
//
// cast            x [n] -> data [n]. Registers only; bytes moved per element: sizeof(IN) + 1.
// cast_transpose  x [batch, rows, columns] -> data (ROWWISE 1) and data_t [batch, columns, rows]; one block per tile of
//                 TILE_ROWS x TILE_COLUMNS elements, a thread for each 8 x 8 of them. Bytes moved per element: sizeof(IN) + 1 + ROWWISE.
//                 ALIGNED 1: every row of x and data allows chunked access; 2: and every row of data_t 16-byte stores (large tiles have
//                 no registers for other paths).
//                 Both outputs want 256 x 256 tiles: one block per SM, long separate load and store phases. DOWN_FIRST: see tile.cuh.
// Both write scale_inv and raise amax themselves. IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}. At least one block, so that an
// empty array gets its scale_inv. Speed and what was tried: docs/performance.md.
#include "flat.cuh"
#include "reduce.cuh"
#include "tile.cuh"

struct CastParams {
    const IN::storage* x;
    OUT::storage* data;          // cast_transpose without ROWWISE: not written
    OUT::storage* data_t;        // cast: not written
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    i64 n;                       // elements of x
    i64 rows, columns;           // cast_transpose: of each matrix
    float scale_value;
    u32 reverse;                 // 1: blocks take the array from its end
    u32 vector;                  // cast: x and data are aligned to their chunks; cast_transpose: every row of data_t allows 16-byte stores

    // After a pass over x from its beginning (current scaling) its end is what the L2 still holds: start there.
    __device__ __forceinline__ i64 block() const { return reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }
    __device__ __forceinline__ float load_scale() const { return scale ? *scale : scale_value; }
    __device__ __forceinline__ void write_scale_inv(float value) const {
        if (blockIdx.x != 0 || threadIdx.x != 0) return;
        const float inverse = as_float(f32::narrow(div_rn(1.0f, value)));
        *scale_inv = inverse;
        if (scale_inv_copy) *scale_inv_copy = inverse;
    }
    // look() returns the buffer as it was at some earlier time: it only grows.
    template <int kThreads, class Look>
    __device__ __forceinline__ void raise(const Amax<IN>& seen, Look look) const {
        if (!amax) return;
        const u32 top = block_max<kThreads>(seen.f32_bits());
        if (threadIdx.x == 0) raise_amax(amax, top, look());
    }
    template <int kThreads>
    __device__ __forceinline__ void raise(const Amax<IN>& seen) const {
        raise<kThreads>(seen, [&] { return load_relaxed(amax); });
    }
};

template <int kCount>
__device__ __forceinline__ Chunk<OUT, kCount> scale_and_narrow(const Chunk<IN, kCount>& in, float scale) {
    Chunk<OUT, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
        float lo, hi;
        in.widen2(i, lo, hi);
        out.narrow2(i, mul_rn(lo, scale), mul_rn(hi, scale));
    }
    return out;
}

#ifdef ENTRY_cast
extern "C" __global__ void __launch_bounds__(kFlatThreads) cast(const __grid_constant__ CastParams p) {
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_scale_inv(scale);
    const i32 amax_before = p.amax && threadIdx.x == 0 ? load_relaxed(p.amax) : 0;       // now, beside the loads of x: no waiting later
    FlatChunks<IN, OUT> in(p.x, p.n, p.vector, p.block());
    Amax<IN> amax;
#pragma unroll
    for (const auto& chunk : in.chunk) amax.add(chunk);
    p.raise<kFlatThreads>(amax, [&] { return amax_before; });
    in.store(p.data, [&](const decltype(in)::Source& chunk) { return scale_and_narrow(chunk, scale); });
}
#endif

#ifdef ENTRY_cast_transpose
constexpr int kLoad = 16 / sizeof(IN::storage);                      // elements per 16-byte load
constexpr int kLoads = 8 / kLoad;                                    // loads per patch row
constexpr int kRowsAtOnce = 8 / kLoads;                              // patch rows in flight: eight loads, 32 registers

using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;

// 1024 threads per multiprocessor on an H200: more would leave too few registers for eight loads in flight, fewer too few loads.
// (f32 with all paths needs more registers.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = (kLoads == 2 && ALIGNED < 2 ? 512 : 1024) / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) cast_transpose(const __grid_constant__ CastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_scale_inv(scale);
    if (p.n == 0) {
        p.raise<Tile::kThreads>({});
        return;
    }
    const Tile tile{shared};
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(p.block(), p.rows, p.columns);
    const i64 matrix = at.matrix * p.rows * p.columns;
    const i64 row = at.row + Tile::patch_row(), column = at.column + Tile::patch_column();
    int rows_left = left_of(p.rows - row, 8), columns_left = left_of(p.columns - column, 8);
    if (ALIGNED == 2) rows_left = columns_left = rows_left && columns_left ? 8 : 0;      // whole patches: one predicate for all
    const i64 patch_at = matrix + row * p.columns + column;
    Chunk<OUT, 8> patch[8];
    Amax<IN> amax;
#pragma unroll
    for (int first = 0; first < 8; first += kRowsAtOnce) {
        Chunk<IN, kLoad> in[kRowsAtOnce][kLoads];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++)
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                const IN::storage* from = p.x + patch_at + (first + r) * p.columns + l * kLoad;
                const int left = first + r < rows_left ? columns_left - l * kLoad : 0;
                if (!ALIGNED) in[r][l] = Chunk<IN, kLoad>::load_partial(from, left);
                else if (left > 0) in[r][l] = Chunk<IN, kLoad>::load(from);
                else in[r][l] = {};
            }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) {
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                amax.add(in[r][l]);
                const auto out = scale_and_narrow(in[r][l], scale);
#pragma unroll
                for (int w = 0; w < out.kWords; w++) patch[first + r].word[l * out.kWords + w] = out.word[w];
            }
            if (ROWWISE && first + r < rows_left) {
                OUT::storage* to = p.data + patch_at + (first + r) * p.columns;
                if (!ALIGNED) patch[first + r].store_partial(to, columns_left);
                else if (columns_left > 0) patch[first + r].store(to);
            }
        }
    }
    tile.write_patch(patch);
    __syncthreads();
    if (ALIGNED < 2 && !p.vector) {
        tile.store_ragged(p.data_t + matrix + at.column * p.rows + at.row, p.rows, left_of(p.columns - at.column, TILE_COLUMNS),
                          left_of(p.rows - at.row, TILE_ROWS));
    } else {
#pragma unroll
        for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
            const i64 to_row = at.column + Tile::column<16>(unit), to_column = at.row + Tile::row<16>();
            if (to_row < p.columns && to_column < p.rows)
                tile.read<OUT, 16>(unit).store(p.data_t + matrix + to_row * p.rows + to_column);
        }
    }
    p.raise<Tile::kThreads>(amax);
}
#endif
