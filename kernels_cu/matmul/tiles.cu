// Products of FP8 matrices on any GPU from sm_80 on, one per group: D = A · Bᵀ (matmul/problem.cuh), for any
// extents, addresses and pitches.
//
// A block of 256 threads computes one tile of D. The grid covers the most tiles that there can be, since only
// the device knows the sizes of groups; thread blocks past the last tile return at once. Three stages of 128
// of K are copied to shared memory while earlier ones are multiplied: 16 bytes at a time where rows begin at
// multiples of 16 bytes, else by plain loads. A warp widens its fragments to f16, which is exact, and adds
// the products of 128 of K in the tensor core. These sums, times the scales of A and B, are added to f32
// registers. (The tensor core rounds towards zero, so long sums within it would be too small.)
//
// A row of a stage is 128 bytes, and chunk c of row r lies at c ^ r % 8, so that ldmatrix reads its eight
// rows without bank conflicts.
//
// TILE_ROWS     128, or 32 for groups of few rows
// SIZES_OF_K    0: sizes of groups are rows of A; 1: lengths of K
#include "matmul/any_bytes.cuh"
#include "matmul/mma.cuh"
#include "matmul/problem.cuh"

constexpr bool kSizesOfK = SIZES_OF_K;
constexpr int kTileRows = TILE_ROWS, kTileColumns = 128, kThreads = 256, kWarps = kThreads / 32;
// Three stages take all shared memory of sm_89; with sizes of K the description of a tile is there too.
constexpr int kStages = kSizesOfK ? 2 : 3;
constexpr int kWarpRows = 32, kWarpsDown = kTileRows / kWarpRows;
constexpr int kWarpColumns = kTileColumns * kWarpsDown / kWarps;
constexpr int kDown = kWarpRows / kFragmentRows, kAcross = kWarpColumns / kFragmentRows;
constexpr int kChunks = kScaleBlock / kChunkBytes;
constexpr int kThreadRows = kThreads / kChunks;    // rows that the threads copy at a time
static_assert(kTileRows % kWarpRows == 0 && kAcross > 0, "warps cover the tile");

struct Stage {
    u8 a[kTileRows * kScaleBlock], b[kTileColumns * kScaleBlock];
    float a_scale[kTileRows], b_scale[kTileColumns];
};

// ---- copies ----
// A thread's chunks of one operand's rows of the tile.
struct TileRows {
    const u8* first;
    i64 pitch;
    int rows;                      // existing rows of the tile
    bool wide;                     // all begin at multiples of 16 bytes

    __device__ __forceinline__ TileRows(const Operand& operand, const GroupStart& group, i64 row, i64 all)
        : pitch(operand.pitch_of(group)), rows(left_of(all - row, kTileRows > kTileColumns ? kTileRows
                                                                                         : kTileColumns)) {
        const u8* const group_first = operand.first(group);
        wide = (((u64)group_first | (u64)pitch) & (kChunkBytes - 1)) == 0;
        first = group_first + (row + threadIdx.x / kChunks) * pitch + threadIdx.x % kChunks * kChunkBytes;
    }
    // Copies the bytes from `k` on, of rows of `k_end`; absent ones become 0.
    template <int kRows>
    __device__ __forceinline__ void copy(u8* to, i64 k, i64 k_end) const {
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        const i64 at = k + chunk * kChunkBytes;
        const int bytes = left_of(k_end - at, kChunkBytes);
        u8* const shared = to + row * kScaleBlock + (chunk ^ row % 8) * kChunkBytes;
#pragma unroll
        for (int r = 0; r < kRows; r += kThreadRows) {
            const int existing = row + r < rows ? bytes : 0;
            const u8* const from = first + r * pitch + k;
            if (wide) {
                copy_async_part<kChunkBytes>(shared + r * kScaleBlock, from, existing);
            } else {
                const bool inner = has_neighbours(at, k_end);
                *reinterpret_cast<uint4*>(shared + r * kScaleBlock) = load_16(from, existing, inner);
            }
        }
    }
};

// The scales of one row of A or of B, copied by this thread.
struct CopiedScales {
    const float* next;
    i64 step;                      // to the next 128 of K
    u32 bytes;                     // 0 if the row does not exist
    int at;                        // place in the stage; -1: this thread copies none

    __device__ __forceinline__ CopiedScales(const Product& p, const ProductTile& tile) {
        const int thread = threadIdx.x;
        const bool of_b = thread >= kThreads - kTileColumns;
        const Operand& operand = of_b ? p.b : p.a;
        const i64 row = of_b ? tile.column + thread - (kThreads - kTileColumns) : tile.row + thread;
        at = of_b ? kTileRows + thread - (kThreads - kTileColumns) : thread < kTileRows ? thread : -1;
        bytes = row < (of_b ? p.n : tile.rows) ? 4 : 0;
        next = operand.first_scale(tile.at) + (row >> operand.scale_shift) * operand.scale_row;
        step = operand.scale_block_of(tile.at);
    }
    __device__ __forceinline__ void copy_next(Stage& stage) {
        if (at < 0) return;
        copy_async_part<4>(stage.a_scale + at, next, bytes);
        next += step;
    }
};

// ---- products ----
struct WarpSums { float of[kDown][2 * kAcross][4]; };

// Adds the products of a stage, of which `k` elements of K exist, times their scales. row, column: the warp's
// first ones in the tile.
template <class A, class B>
__device__ __forceinline__ void add_stage(WarpSums& sums, const Stage& stage, int row, int column, int k) {
    const int lane = threadIdx.x % 32;
    const u8* const a = stage.a + (row + lane % 16) * kScaleBlock;
    const u8* const b = stage.b + (column + lane / 16 * 8 + lane % 8) * kScaleBlock;
    WarpSums products = {};
#pragma unroll
    for (int step = 0; step < kScaleBlock / kFragmentK; step++) {
        if (step * kFragmentK >= k) break;
        FragmentOfA of_a[kDown];
#pragma unroll
        for (int i = 0; i < kDown; i++)
            of_a[i].load<A>(a + i * kFragmentRows * kScaleBlock
                            + ((2 * step + lane / 16) ^ lane % 8) * kChunkBytes);
#pragma unroll
        for (int j = 0; j < kAcross; j++) {
            FragmentOfB of_b;
            of_b.load<B>(b + j * kFragmentRows * kScaleBlock
                         + ((2 * step + lane / 8 % 2) ^ lane % 8) * kChunkBytes);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int eight = 0; eight < 2; eight++)
#pragma unroll
                    for (int i = 0; i < kDown; i++)
                        add_products(products.of[i][2 * j + eight], of_a[i].halves[half],
                                     of_b.halves[eight][half][0], of_b.halves[eight][half][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < kDown; i++) {
        const float* const a_scale = stage.a_scale + row + i * kFragmentRows + lane / 4;
        const float low = a_scale[0], high = a_scale[8];
#pragma unroll
        for (int j = 0; j < 2 * kAcross; j++) {
            const float* const b_scale = stage.b_scale + column + 8 * j + lane % 4 * 2;
            const float2 across = *reinterpret_cast<const float2*>(b_scale);
            float (&to)[4] = sums.of[i][j];
            const float (&from)[4] = products.of[i][j];
            // one scale after the other: their product may not be an f32
            to[0] = fma_rn(mul_rn(from[0], low), across.x, to[0]);
            to[1] = fma_rn(mul_rn(from[1], low), across.y, to[1]);
            to[2] = fma_rn(mul_rn(from[2], high), across.x, to[2]);
            to[3] = fma_rn(mul_rn(from[3], high), across.y, to[3]);
        }
    }
}

// ---- D ----
// Stores two adjacent elements, of which `count` exist. first: place of the first one in D.
__device__ __forceinline__ void store_pair(const Product& p, i64 first, int count, bool whole, float lo,
                                           float hi) {
    if (p.out_type == kOutF32) {
        float* const out = reinterpret_cast<float*>(p.out) + first;
        if (p.accumulate) {
            lo = add_rn(out[0], lo);
            if (count > 1) hi = add_rn(out[1], hi);
        }
        if (whole && count > 1) {
            *reinterpret_cast<float2*>(out) = make_float2(lo, hi);
            return;
        }
        out[0] = lo;
        if (count > 1) out[1] = hi;
        return;
    }
    u16* const out = reinterpret_cast<u16*>(p.out) + first;
    const u32 pair = p.out_type == kOutBf16 ? bf16::narrow2(lo, hi) : f16::narrow2(lo, hi);
    if (whole && count > 1) {
        *reinterpret_cast<u32*>(out) = pair;
        return;
    }
    out[0] = (u16)pair;
    if (count > 1) out[1] = (u16)(pair >> 16);
}

__device__ __forceinline__ void store(const Product& p, const ProductTile& tile, const WarpSums& sums,
                                      int row, int column) {
    const int lane = threadIdx.x % 32;
    const i64 group_first = tile.at.group * p.out_group + tile.at.start * p.out_start;
    const bool biased = p.has_bias(tile.at.group);
    const i64 bias_first = tile.at.group * p.bias_group;
    const u32 element = p.out_type == kOutF32 ? 4 : 2;
    const bool whole = ((u64)p.out + group_first * element) % (2 * element) == 0 && p.n % 2 == 0;
#pragma unroll
    for (int j = 0; j < 2 * kAcross; j++) {
        const i64 at = tile.column + column + 8 * j + lane % 4 * 2;
        const int count = left_of(p.n - at, 2);
        float lo = 0, hi = 0;
        if (biased && count > 0) lo = p.bias_of(bias_first + at);
        if (biased && count > 1) hi = p.bias_of(bias_first + at + 1);
#pragma unroll
        for (int i = 0; i < 2 * kDown; i++) {
            const i64 of_d = tile.row + row + 8 * i + lane / 4;
            const float (&pair)[4] = sums.of[i / 2][j];
            if (count == 0 || of_d >= tile.rows) continue;
            const float weight = biased ? p.bias_weight(tile.at.start + of_d) : 0.0f;
            const float left = biased ? fma_rn(weight, lo, pair[i % 2 * 2]) : pair[i % 2 * 2];
            const float right = biased ? fma_rn(weight, hi, pair[i % 2 * 2 + 1]) : pair[i % 2 * 2 + 1];
            store_pair(p, group_first + of_d * p.n + at, count, whole, left, right);
        }
    }
}

// ---- the kernel ----
// Finds a tile by its index. The walk's state is not needed after this.
__device__ __forceinline__ bool find_tile(const Product& p, i64 number, ProductTile& tile) {
    TileWalk<kSizesOfK, kTileRows, kTileColumns> walk(p);
    if (!walk.find(number)) return false;
    tile = walk.tile;
    if (kSizesOfK && threadIdx.x == 0 && !p.keeps_promise(tile.at)) report(p.splits.errors, kSplitStart);
    return true;
}

// Call from all threads. warp: the thread's own.
__device__ __forceinline__ void compute_tile(const Product& p, const ProductTile& tile, Stage* stages,
                                             int warp) {
    if (tile.k == 0 && p.accumulate && !p.bias) return;                // nothing to add
    const int row = warp % kWarpsDown * kWarpRows, column = warp / kWarpsDown * kWarpColumns;
    const bool has_part = tile.row + row < tile.rows && tile.column + column < p.n;
    const TileRows a(p.a, tile.at, tile.row, tile.rows), b(p.b, tile.at, tile.column, p.n);
    CopiedScales scales(p, tile);
    const auto copy = [&](i64 block) {
        Stage& stage = stages[block % kStages];
        a.copy<kTileRows>(stage.a, block * kScaleBlock, tile.k);
        b.copy<kTileColumns>(stage.b, block * kScaleBlock, tile.k);
        scales.copy_next(stage);
    };
    const i64 blocks = (tile.k + kScaleBlock - 1) / kScaleBlock;
    for (int block = 0; block < kStages - 1; block++) {
        if (block < blocks) copy(block);
        copy_async_commit();
    }
    WarpSums sums = {};
    for (i64 block = 0; block < blocks; block++) {
        copy_async_wait<kStages - 2>();
        __syncthreads();                           // the stage is filled, and nobody reads the one before it
        if (block + kStages - 1 < blocks) copy(block + kStages - 1);
        copy_async_commit();
        if (!has_part) continue;
        const Stage& stage = stages[block % kStages];
        const int k = left_of(tile.k - block * kScaleBlock, kScaleBlock);
        if (p.a.e5m2) {
            if (p.b.e5m2) add_stage<e5m2, e5m2>(sums, stage, row, column, k);
            else add_stage<e5m2, e4m3fn>(sums, stage, row, column, k);
        } else {
            if (p.b.e5m2) add_stage<e4m3fn, e5m2>(sums, stage, row, column, k);
            else add_stage<e4m3fn, e4m3fn>(sums, stage, row, column, k);
        }
    }
    if (has_part) store(p, tile, sums, row, column);
}

extern "C" __global__ void __launch_bounds__(kThreads, kTileRows == 128 ? 1 : 2)
product_tiles(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) u8 shared[];
    Stage* const stages = reinterpret_cast<Stage*>(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);            // shows the compiler: uniform
    if constexpr (kSizesOfK) {                     // the grid is small where another launch has most groups
        // the tile's description is in shared memory, since all registers are taken
        __shared__ ProductTile tile;
        __shared__ i64 number;
        for (i64 next = blockIdx.x;; next = number + gridDim.x) {
            ProductTile found;
            if (!find_tile(p, next, found)) break;
            __syncthreads();                       // nobody reads the last tile and its stages any more
            if (threadIdx.x == 0) {
                tile = found;
                number = next;
            }
            __syncthreads();
            compute_tile(p, tile, stages, warp);
        }
    } else {
        ProductTile tile;
        if (find_tile(p, blockIdx.x, tile)) compute_tile(p, tile, stages, warp);
    }
    // The same check at the beginning makes products of SIZES_OF_K 3 % slower on Hopper.
    if (blockIdx.x == 0 && warp == 0) p.check();
}
