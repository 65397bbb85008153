// Per-tensor scaling (docs/numerics.md, section 1): x is widened to f32, multiplied by the scale, rounded to FP8.
//
//   data      = narrow(fl(x * scale))                 scale_inv = fl(1 / scale)           amax = max(amax, max |x|)
//   data_t    = data with its last two axes swapped
//
// cast            x [n] -> data [n]. Registers only; bytes moved per element: sizeof(IN) + 1.
// cast_transpose  x [batch, rows, columns] -> data (ROWWISE 1) and data_t [batch, columns, rows] (COLUMNWISE 1); one block per tile of
//                 TILE_ROWS x TILE_COLUMNS elements, a thread for each 8 x 8 of them. Bytes moved per element: sizeof(IN) + ROWWISE + COLUMNWISE.
//                 ALIGNED 1: every row of x and data allows chunked access; 2: and every row of data_t 16-byte stores, and there are
//                 whole patches only (large tiles have no registers for other paths).
//                 Both outputs want 256 x 256 tiles: one block per SM, long separate load and store phases. DOWN_FIRST: see tile.cuh.
//                 DBIAS 1: also the sum of x down each column of the tile, before scaling, by the fixed tree (column_sum.cuh); dbias.cu adds
//                 up the tiles.
// Both write scale_inv and raise amax themselves. IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}. At least one block, so that an
// empty array gets its scale_inv. Speed and what was tried: docs/performance.md.
#include "cast.cuh"
#include "column_sum.cuh"
#include "flat.cuh"
#include "tile.cuh"

struct CastParams {
    const IN::storage* x;
    OUT::storage* data;          // cast_transpose without ROWWISE: not written
    OUT::storage* data_t;        // cast, cast_transpose without COLUMNWISE: not written
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    float* column_sums;          // cast_transpose with DBIAS: [batch, tiles down, columns]
    i64 n;                       // elements of x
    i64 rows, columns;           // cast_transpose: of each matrix
    float scale_value;
    u32 reverse;                 // 1: blocks take the array from its end
    u32 vector;                  // cast: x and data are aligned to their chunks; cast_transpose: every row of data_t allows 16-byte stores

    // After a pass over x from its beginning (current scaling) its end is what the L2 still holds: start there.
    __device__ __forceinline__ i64 block() const { return reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }
    __device__ __forceinline__ float load_scale() const { return scale ? *scale : scale_value; }
    __device__ __forceinline__ void write_inverse(float value) const {
        if (blockIdx.x == 0 && threadIdx.x == 0) write_scale_inv(value, scale_inv, scale_inv_copy);
    }
};

#ifdef ENTRY_cast
extern "C" __global__ void __launch_bounds__(kFlatThreads) cast(const __grid_constant__ CastParams p) {
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_inverse(scale);
    const i32 amax_before = p.amax && threadIdx.x == 0 ? load_relaxed(p.amax) : 0;       // now, beside the loads of x: no waiting later
    FlatChunks<IN, OUT> in(p.x, p.n, p.vector, p.block());
    Amax<IN> amax;
#pragma unroll
    for (const auto& chunk : in.chunk) amax.add(chunk);
    if (p.amax) {
        const u32 top = block_max<kFlatThreads>(amax.f32_bits());
        if (threadIdx.x == 0) raise_amax(p.amax, top, amax_before);
    }
    in.store(p.data, [&](const decltype(in)::Source& chunk) { return scale_and_narrow(chunk, scale); });
}
#endif

#ifdef ENTRY_cast_transpose
constexpr int kLoad = 16 / sizeof(IN::storage);                      // elements per 16-byte load
constexpr int kLoads = 8 / kLoad;                                    // loads per patch row
// Loads in flight per thread; the sums of DBIAS leave registers for half as many on Blackwell.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kInFlight = DBIAS ? 4 : 8;
#else
constexpr int kInFlight = 8;
#endif
constexpr int kRowsAtOnce = kInFlight / kLoads;
constexpr u32 kAbsentWord = sizeof(IN::storage) == 4 ? kAbsentTerm : kAbsentTerm >> 16 | kAbsentTerm;

using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;

// The sums down the columns of the tile: eight of this thread's patch, added to those of the patches above and below it.
struct PatchSums {
    TreeSum<8> column[8];

    __device__ __forceinline__ void add(int row, int load, const Chunk<IN, kLoad>& in) {
#pragma unroll
        for (int i = 0; i < kLoad / 2; i++) {
            float lo, hi;
            in.widen2(i, lo, hi);
            column[load * kLoad + 2 * i].add(row, lo);
            column[load * kLoad + 2 * i + 1].add(row, hi);
        }
    }
    // sums: [pairs of row patches, columns of the tile] in shared memory. The other patch of a pair is 16 lanes away: each thread adds up
    // half of the columns.
    __device__ __forceinline__ void share(float* sums) const {
        static_assert(!DBIAS || Tile::kColumnPatches == 16, "half a warp per row of patches");
        const bool lower = Tile::row_patch() % 2;
        float pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float upper_half = column[i].sum(), lower_half = column[4 + i].sum();
            const float other = __shfl_xor_sync(~0u, lower ? upper_half : lower_half, 16);
            pair[i] = add_rn(lower ? lower_half : upper_half, other);
        }
        store_shared_whole(sums + Tile::row_patch() / 2 * TILE_COLUMNS + Tile::patch_column() + lower * 4, as_bits(pair[0]),
                           as_bits(pair[1]), as_bits(pair[2]), as_bits(pair[3]));
    }
    static __device__ __forceinline__ void write(const float* sums, float* to, i64 columns_left) {
        if ((int)threadIdx.x >= TILE_COLUMNS || threadIdx.x >= columns_left) return;
        TreeSum<Tile::kRowPatches / 2> column;
#pragma unroll
        for (int r = 0; r < Tile::kRowPatches / 2; r++) column.add(r, sums[r * TILE_COLUMNS + threadIdx.x]);
        to[threadIdx.x] = as_float(f32::narrow(column.sum()));
    }
};

// 1024 threads per multiprocessor on an H200: more would leave too few registers for eight loads in flight, fewer too few loads. (All paths
// with f32 or sums need more registers, so do most sums, and all of them with the allocator of CUDA 12.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && (!DBIAS || __CUDACC_VER_MAJOR__ >= 13)
constexpr int kResident = (kLoads == 2 || DBIAS) && ALIGNED < 2 ? 512 : !DBIAS ? 1024 : !COLUMNWISE || !ROWWISE ? 768 : kLoads == 2 ? 512 : 1024;
constexpr int kBlocks = kResident / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) cast_transpose(const __grid_constant__ CastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_inverse(scale);
    if (p.n == 0) {
        if (p.amax && threadIdx.x == 0) raise_amax(p.amax, 0, load_relaxed(p.amax));
        return;
    }
    const Tile tile{shared};
    auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(p.block(), p.rows, p.columns);
    __shared__ TilePosition shared_at;                               // six registers fewer while the sums need them
    if (DBIAS && threadIdx.x == 0) shared_at = at;
    const i64 row = at.row + Tile::patch_row(), column = at.column + Tile::patch_column();
    int rows_left = left_of(p.rows - row, 8), columns_left = left_of(p.columns - column, 8);
    if (ALIGNED == 2) rows_left = columns_left = rows_left && columns_left ? 8 : 0;      // whole patches: one predicate for all
    const i64 patch_at = (at.matrix * p.rows + row) * p.columns + column;
    Chunk<OUT, 8> patch[8];
    Amax<IN> amax;
    PatchSums sums;
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
                if (DBIAS && first + r >= rows_left)
#pragma unroll
                    for (u32& word : in[r][l].word) word = kAbsentWord;
            }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) {
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                amax.add(in[r][l]);
                if (DBIAS) sums.add(first + r, l, in[r][l]);
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
    if (COLUMNWISE) tile.write_patch(patch);
    float* const shared_sums = reinterpret_cast<float*>(shared + COLUMNWISE * TILE_ROWS * TILE_COLUMNS);
    if (DBIAS) sums.share(shared_sums);
    __shared__ u32 per_warp[Tile::kThreads / 32];
    const BlockMax<Tile::kThreads> top{per_warp};
    if (DBIAS && p.amax) top.put(amax.f32_bits());                   // sums leave no register for it; without them, later is cheaper
    if (COLUMNWISE || DBIAS) __syncthreads();
    if (DBIAS) at = shared_at;
    if (COLUMNWISE && ALIGNED < 2 && !p.vector) {
        tile.store_ragged(p.data_t + (at.matrix * p.columns + at.column) * p.rows + at.row, p.rows, left_of(p.columns - at.column, TILE_COLUMNS),
                          left_of(p.rows - at.row, TILE_ROWS));
    } else if (COLUMNWISE) {
#pragma unroll
        for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
            const i64 to_row = at.column + Tile::column<16>(unit), to_column = at.row + Tile::row<16>();
            if (to_row < p.columns && to_column < p.rows)
                tile.read<OUT, 16>(unit).store(p.data_t + (at.matrix * p.columns + to_row) * p.rows + to_column);
        }
    }
    if (DBIAS) {
        const i64 tiles_down = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
        PatchSums::write(shared_sums, p.column_sums + (at.matrix * tiles_down + at.row / TILE_ROWS) * p.columns + at.column, p.columns - at.column);
    }
    if (p.amax) {
        if (!DBIAS) {
            top.put(amax.f32_bits());
            __syncthreads();
        }
        const u32 amax_bits = top.get();
        if (threadIdx.x == 0) raise_amax(p.amax, amax_bits, load_relaxed(p.amax));
    }
}
#endif
