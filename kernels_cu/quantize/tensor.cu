// Per-tensor scaling (docs/numerics.md, section 1): x is widened to f32, multiplied by the scale, rounded to
// FP8.
//
//   data      = narrow(fl(x * scale))       scale_inv = fl(1 / scale)       amax = max(amax, max |x|)
//   data_t    = data with its last two axes swapped
//
// cast            x [n] -> data [n]. Registers only; bytes moved per element: sizeof(IN) + 1.
// cast_transpose  x [batch, rows, columns] -> data, and data_t [batch, columns, rows]; one thread block per
//                 tile, a thread per 8 x 8 elements (cast_tile.cuh). Bytes moved per element: sizeof(IN) + 1
//                 per direction. A tile has TILE_ROWS x TILE_COLUMNS elements; for both outputs 256 x 256:
//                 one thread block per SM, and long separate phases of loads and stores. DOWN_FIRST: see
//                 tile.cuh. DBIAS 1: also writes the sum of x down each column of the tile, before scaling,
//                 by the fixed tree (tree_sum.cuh); bias_gradient.cu adds up the tiles. Without sums there
//                 are registers for more threads. WHOLE 1: every row of x and data allows chunked access,
//                 every row of data_t 16-byte stores, and there are whole patches only. Large tiles have no
//                 registers for other paths, and small ones are up to 6 % faster without them. WHOLE 0: the
//                 struct decides. DIRECTIONS: with WHOLE, what is written: 1 data, 2 data_t, 3 both. 0
//                 without WHOLE: null pointers decide.
// Both write scale_inv and raise amax themselves. IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}. There is at
// least one block of threads, so that an empty array gets its scale_inv. Speed and what was tried:
// docs/lab-notes.
#include "memory/elementwise.cuh"
#ifdef ENTRY_cast_transpose
#include "tile/cast_tile.cuh"
#else
#include "scale/cast.cuh"
#endif

struct CastParams {
    const IN::storage* x;
    OUT::storage* data;          // or null
    OUT::storage* data_t;        // or null
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second destination, or null
    float* amax;                 // one element, raised to the amax; or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    float* column_sums;          // cast_transpose with DBIAS: [batch, tiles down, columns]
    i64 n;                       // elements of x
    i64 rows, columns;           // cast_transpose: of each matrix
    float scale_value;
    u32 reverse;                 // 1: thread blocks take the array from its end
    u32 aligned;                 // cast_transpose: every row of x and data allows chunked access
    u32 vector;                  // cast: x and data are aligned to their chunks; cast_transpose: every row of
                                 // data_t allows 16-byte stores

    // After a pass over x from its beginning (current scaling) the L2 still holds its end, so thread blocks
    // start there.
    __device__ __forceinline__ i64 block() const { return reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }
    __device__ __forceinline__ float load_scale() const { return scale ? *scale : scale_value; }
#ifdef ENTRY_cast_transpose
    constexpr __device__ __forceinline__ bool rowwise() const {
        return DIRECTIONS ? DIRECTIONS & 1 : data != nullptr;
    }
    constexpr __device__ __forceinline__ bool columnwise() const {
        return DIRECTIONS ? DIRECTIONS & 2 : data_t != nullptr;
    }
#endif
    __device__ __forceinline__ void write_inverse(float value) const {
        if (blockIdx.x == 0 && threadIdx.x == 0) write_scale_inv(value, scale_inv, scale_inv_copy);
    }
};

#ifdef ENTRY_cast
extern "C" __global__ void __launch_bounds__(kElementwiseThreads) cast(const __grid_constant__ CastParams p) {
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_inverse(scale);
    // in flight beside the loads of x, so that nothing waits for it later
    const i32 amax_before = p.amax && threadIdx.x == 0 ? load_relaxed(p.amax) : 0;
    ElementwiseChunks<IN, OUT> in(p.x, p.n, p.vector, p.block());
    Amax<IN> amax;
#pragma unroll
    for (const auto& chunk : in.chunk) amax.add(chunk);
    if (p.amax) {
        const u32 block_amax = block_max<kElementwiseThreads>(amax.f32_bits());
        if (threadIdx.x == 0) raise_amax(p.amax, block_amax, amax_before);
    }
    in.store(p.data, [&](const decltype(in)::Source& chunk) { return scale_and_narrow(chunk, scale); });
}
#endif

#ifdef ENTRY_cast_transpose
// 1024 threads per SM on an H200: more would leave too few registers for eight loads in flight, fewer too few
// loads. f32 and sums need more registers, and so do most sums whatever the path, all of them with the
// allocator of CUDA 12.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && (!DBIAS || __CUDACC_VER_MAJOR__ >= 13)
constexpr bool kIsF32 = kLoads == 2;
constexpr int kThreadsInFlight =
    !WHOLE ? (kIsF32 || DBIAS ? 512 : 1024) : !DBIAS ? 1024 : DIRECTIONS != 3 ? 768
    : kIsF32 ? 512 : 1024;
constexpr int kBlocks = kThreadsInFlight / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
cast_transpose(const __grid_constant__ CastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const float scale = p.load_scale();
    p.write_inverse(scale);
    if (p.n == 0) {
        if (p.amax && threadIdx.x == 0) raise_amax(p.amax, 0, load_relaxed(p.amax));
        return;
    }
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(p.block(), p.rows, p.columns);
    if (WHOLE) cast_tile<2>(p, at, scale, shared);
    else if (p.aligned) cast_tile<1>(p, at, scale, shared);
    else cast_tile<0>(p, at, scale, shared);
}
#endif
