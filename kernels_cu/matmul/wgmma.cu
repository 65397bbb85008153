// Products of FP8 matrices on Hopper (sm_90a), one for each group: D = A · Bᵀ (matmul/problem.cuh).
//
// Persistent blocks of three warpgroups. The warps of the first one find tiles, copy 128 of K of A and B into a
// ring of stages, and read the scales that belong there. Each of the other two multiplies 64 rows of A by all
// columns of the tile: the tensor core sums 128 products, which are then added, times their scales, to f32
// registers. (It keeps about 14 bits below the largest addend, so longer sums would lose more.)
//
// IN_A, IN_B    the FP8 formats
// SIZES_OF_K    0: sizes of groups are rows of A; 1: lengths of K
// SCALING       kRows: one scale for each row of A and of B, or for all; they multiply at the end
//               kBlocks: A has one for 128 of K in each row, B one for 128 rows of it and 128 of K
//               kVectors: both have one for 128 of K in each row
#include "matmul/store_tile.cuh"
#include "matmul/tile_queue.cuh"
#include "matmul/warpgroup_products.cuh"

enum Scaling { kRows, kBlocks, kVectors };
constexpr Scaling kScaling = SCALING;
constexpr bool kSizesOfK = SIZES_OF_K;

constexpr int kTileRows = 128, kTileColumns = 192, kStages = 4, kThreads = 384, kQueue = 4;
constexpr int kHalfRows = kTileRows / 2;           // of a warpgroup; a tile's second half may be empty
constexpr int kChunk = 64, kChunks = kTileColumns / kChunk;  // columns of B that have one scale in kBlocks
constexpr int kConsumers = 8, kScaleWarps = kScaling == kBlocks ? 1 : 2;
// A warpgroup that multiplies holds the sums and the products, 192 registers.
constexpr int kRegisters = kScaling == kVectors ? 224 : 216, kOtherRegisters = 504 - 2 * kRegisters;
constexpr int kStagedBytes = 16 * (kTileColumns * 2 + 16);   // a warp's rows on their way to D
// The copy engine may still read the maps of tiles in the queue and of tiles in the ring.
constexpr int kMaps = kQueue + kStages + 2;

struct Stage {
    // kBlocks: the product of both scales, by 64 columns of B and row of A. Else the scales of A, then of B.
    float scales[kScaling == kBlocks ? kChunks * kTileRows : kTileRows + kTileColumns];
};

struct Shared {
    u8 a[kStages][kTileRows * kBoxBytes];
    u8 b[kStages][kTileColumns * kBoxBytes];
    u8 staged[kConsumers][kStagedBytes];
    TensorMap map;                                 // of a group, while it is written
    Stage stages[kStages];
    QueuedTile tiles[kQueue];
    Ring<kStages> ring;
    Ring<kQueue> queue;
};

struct WgmmaParams {
    TensorMap a_map, b_map;        // of all rows; with sizes of K, the boxes of groups' own maps
    Product product;
    TensorMap* maps;               // [blocks of the grid, kMaps, 2] of groups, for sizes of K
};

// ---- the warp that finds tiles ----
__device__ __forceinline__ void find_tiles(const WgmmaParams& p, Shared& shared) {
    using Walk = TileWalk<kSizesOfK, kTileRows, kTileColumns, i32>;
    const Product& product = p.product;
    const int lane = threadIdx.x % 32;
    Walk walk(product);
    Place<kQueue> place;
    // The maps of this block.
    TensorMap* const own_maps = kSizesOfK ? p.maps + blockIdx.x * (kMaps * 2) : nullptr;
    int mapped = -1;                               // the group that maps were written for last
    int map = 0;
    if (blockIdx.x == 0 && product.splits.sizes) check_sizes(product.splits, product.total);
    for (i32 wanted = blockIdx.x;; wanted += gridDim.x) {
        const bool found = walk.find(wanted);
        const ProductTile& tile = walk.tile;
        if (kSizesOfK && found && tile.k > 0 && mapped != (int)tile.at.group) {
            mapped = (int)tile.at.group;
            map = map + 1 == kMaps ? 0 : map + 1;
            write_map(&own_maps[2 * map], &shared.map, p.a_map, product.a.first(tile.at), tile.k, product.m,
                      product.a.pitch_of(tile.at));
            write_map(&own_maps[2 * map + 1], &shared.map, p.b_map, product.b.first(tile.at), tile.k,
                      product.n, product.b.pitch_of(tile.at));
        }
        place.wait_empty(shared.queue);
        __syncwarp();                              // No lane still waits when the place is filled.
        if (lane == 0) {
            QueuedTile& t = shared.tiles[place.at];
            t.blocks = found ? (int)((tile.k + kScaleBlock - 1) / kScaleBlock) : -1;
            if (found) {
                t.a_map = kSizesOfK ? &own_maps[2 * map] : &p.a_map;
                t.b_map = kSizesOfK ? &own_maps[2 * map + 1] : &p.b_map;
                t.a_scale = product.a.first_scale(tile.at);
                t.b_scale = product.b.first_scale(tile.at);
                t.a_scale_block = product.a.scale_block_of(tile.at);
                t.b_scale_block = product.b.scale_block_of(tile.at);
                t.out = product.out + (tile.at.group * product.out_group + tile.at.start * product.out_start)
                                          * (product.out_type == kOutF32 ? 4 : 2);
                t.a_row = (int)((kSizesOfK ? 0 : tile.at.start) + tile.row);
                t.b_row = (int)((kSizesOfK ? 0 : tile.at.group * product.n) + tile.column);
                t.row = (int)tile.row;
                t.column = (int)tile.column;
                t.rows = (int)tile.rows;
                t.columns = (u32)(product.n - tile.column);
            }
            arrive(&shared.queue.full[place.at]);
        }
        __syncwarp();
        place.next();
        if (!found) return;
    }
}

// A warp's way through the queue: next() gives the next tile's copy, which is the warp's own.
struct TileReader {
    Shared& shared;
    Place<kQueue> place;
    QueuedTile tile;

    __device__ __forceinline__ explicit TileReader(Shared& all) : shared(all) {}
    __device__ __forceinline__ bool next() {
        place.wait_full(shared.queue);
        tile = shared.tiles[place.at];
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.queue.empty[place.at]);
        place.next();
        return tile.blocks >= 0;
    }
};

// ---- the warp that copies A and B ----
__device__ __forceinline__ void copy_stages(Shared& shared) {
    TileReader reader(shared);
    Place<kStages> place;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        if (threadIdx.x % 32 == 0) {
            const bool both_halves = t.rows - t.row > kHalfRows;
            if (kSizesOfK && t.blocks > 0) {
                acquire_map(t.a_map);
                acquire_map(t.b_map);
            }
            for (int block = 0; block < t.blocks; block++) {
                place.wait_empty(shared.ring);
                PhaseBarrier* const full = &shared.ring.full[place.at];
                arrive_expecting(full, (kTileColumns + (both_halves ? kTileRows : kHalfRows)) * kBoxBytes);
                u8* const a = shared.a[place.at];
                const int k = block * kBoxBytes;
                copy_box(a, t.a_map, t.a_row, k, full);
                if (both_halves) copy_box(a + kHalfRows * kBoxBytes, t.a_map, t.a_row + kHalfRows, k, full);
                copy_box(shared.b[place.at], t.b_map, t.b_row, k, full);
                place.next();
            }
        }
        __syncwarp();
    }
}

// ---- the warps that read scales ----
__device__ __forceinline__ int at_most_int(int value, int end) { return value < end ? value : end; }

// Reads the scales of one block of K ahead, into registers; they go to shared memory when the stage is empty.
// kCount: how many each lane has. load(block, i) reads the i-th one, and store(stage, i, value) stores it.
template <int kCount, class Load, class Store>
__device__ __forceinline__ void scale_stages(Shared& shared, Place<kStages>& place, int first, int blocks,
                                             const Load& load, const Store& store) {
    float next[kCount];
    if (first < blocks) {
#pragma unroll
        for (int i = 0; i < kCount; i++) next[i] = load(first, i);
    }
    for (int block = 0; block < blocks; block++) {
        float now[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) now[i] = next[i];
        if (block >= first && block + 1 < blocks) {
#pragma unroll
            for (int i = 0; i < kCount; i++) next[i] = load(block + 1, i);
        }
        place.wait_empty(shared.ring);
        if (block >= first) {
#pragma unroll
            for (int i = 0; i < kCount; i++) store(shared.stages[place.at], i, now[i]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.ring.full[place.at]);
        place.next();
    }
}

__device__ __forceinline__ void read_block_scales(const Product& p, Shared& shared) {
    constexpr int kRowsEach = kTileRows / 32;
    TileReader reader(shared);
    Place<kStages> place;
    const int lane = threadIdx.x % 32;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        const int last_row = t.rows - t.row - 1, last = (int)(p.n - 1) / kScaleBlock;
        const float* a_at[kRowsEach];
        const float* b_at[kChunks];
#pragma unroll
        for (int i = 0; i < kRowsEach; i++)
            a_at[i] = t.a_scale + (t.row + at_most_int(32 * i + lane, last_row)) * p.a.scale_row;
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            b_at[c] = t.b_scale + at_most_int((t.column + c * kChunk) / kScaleBlock, last) * p.b.scale_row;
        const auto load = [&](int block, int i) {
            return i < kRowsEach ? load_read_only(a_at[i < kRowsEach ? i : 0] + block * t.a_scale_block)
                                 : load_read_only(b_at[i < kRowsEach ? 0 : i - kRowsEach] + block * t.b_scale_block);
        };
        float of_rows[kRowsEach];
        const auto store = [&](Stage& stage, int i, float value) {
            if (i < kRowsEach) {
                of_rows[i < kRowsEach ? i : 0] = value;
                return;
            }
#pragma unroll
            for (int r = 0; r < kRowsEach; r++)
                stage.scales[(i - kRowsEach) * kTileRows + 32 * r + lane] = mul_rn(of_rows[r], value);
        };
        scale_stages<kRowsEach + kChunks>(shared, place, 0, t.blocks, load, store);
    }
}

// The scales of one operand's rows. Those of whole rows are needed with the last block of K alone.
template <bool kOfA>
__device__ __forceinline__ void read_row_scales(const Operand& operand, Shared& shared) {
    constexpr int kCount = (kOfA ? kTileRows : kTileColumns) / 32, kFirst = kOfA ? 0 : kTileRows;
    TileReader reader(shared);
    Place<kStages> place;
    const int lane = threadIdx.x % 32;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        const int last = (kOfA ? t.rows - t.row : (int)t.columns) - 1;
        const float* const at = (kOfA ? t.a_scale : t.b_scale) + (kOfA ? t.row : t.column) * operand.scale_row;
        const i64 step = kScaling == kRows ? 0 : kOfA ? t.a_scale_block : t.b_scale_block;
        const auto load = [&](int block, int i) {
            return load_read_only(at + at_most_int(32 * i + lane, last) * operand.scale_row + block * step);
        };
        const auto store = [&](Stage& stage, int i, float value) {
            stage.scales[kFirst + 32 * i + lane] = value;
        };
        scale_stages<kCount>(shared, place, kScaling == kRows ? t.blocks - 1 : 0, t.blocks, load, store);
    }
}

// ---- the warps that multiply ----
// Adds the products of 128 of K, times their scales. row: the lane's first row of the tile. release() says that
// the stage is not needed any more.
template <class Release>
__device__ __forceinline__ void add_products(float (&sums)[kTileColumns / 2],
                                             const float (&products)[kTileColumns / 2], const Stage& stage,
                                             int row, bool is_last, const Release& release) {
    const float2* const b_scales = reinterpret_cast<const float2*>(stage.scales + kTileRows) + threadIdx.x % 4;
    if constexpr (kScaling == kBlocks) {
        float low[kChunks], high[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            low[c] = stage.scales[c * kTileRows + row];
            high[c] = stage.scales[c * kTileRows + row + 8];
        }
        release();
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++)
            sums[i] = fma_rn(i % 4 < 2 ? low[2 * i / kChunk] : high[2 * i / kChunk], products[i], sums[i]);
    } else if constexpr (kScaling == kVectors) {
        const float low = stage.scales[row], high = stage.scales[row + 8];
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i += 4) {
            const float2 b = b_scales[i];
            sums[i] = fma_rn(low, mul_rn(b.x, products[i]), sums[i]);
            sums[i + 1] = fma_rn(low, mul_rn(b.y, products[i + 1]), sums[i + 1]);
            sums[i + 2] = fma_rn(high, mul_rn(b.x, products[i + 2]), sums[i + 2]);
            sums[i + 3] = fma_rn(high, mul_rn(b.y, products[i + 3]), sums[i + 3]);
        }
        release();
    } else {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = add_rn(sums[i], products[i]);
        if (is_last) {
            const float low = stage.scales[row], high = stage.scales[row + 8];
#pragma unroll
            for (int i = 0; i < kTileColumns / 2; i += 4) {
                const float2 b = b_scales[i];
                sums[i] = mul_rn(low, mul_rn(b.x, sums[i]));
                sums[i + 1] = mul_rn(low, mul_rn(b.y, sums[i + 1]));
                sums[i + 2] = mul_rn(high, mul_rn(b.x, sums[i + 2]));
                sums[i + 3] = mul_rn(high, mul_rn(b.y, sums[i + 3]));
            }
        }
        release();
    }
}

__device__ __forceinline__ void multiply(const Product& p, Shared& shared) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const int first_row = warp / 4 * kHalfRows + warp % 4 * 16;    // of this warp, in the tile
    const u64 out_bytes = p.out_type == kOutF32 ? 4 : 2;
    const bool in_16_bytes = ((u64)p.out | (u64)(p.n * out_bytes)) % 16 == 0;
    const bool pairs = ((u64)p.out | (u64)(p.n * out_bytes)) % 8 == 0;
    TileReader reader(shared);
    Place<kStages> place;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        const int left = t.rows - t.row;
        const auto release = [&] {
            __syncwarp();
            if (lane == 0) arrive(&shared.ring.empty[place.at]);
        };
        if (left <= warp / 4 * kHalfRows) {                        // No row of this warpgroup exists.
            for (int block = 0; block < t.blocks; block++) {
                place.wait_full(shared.ring);
                release();
                place.next();
            }
            continue;
        }
        float sums[kTileColumns / 2];
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = 0;
        for (int block = 0; block < t.blocks; block++) {
            place.wait_full(shared.ring);
            const u8* const a = shared.a[place.at] + warp / 4 * kHalfRows * kBoxBytes;
            const u8* const b = shared.b[place.at];
            float products[kTileColumns / 2];
            start_products<kTileColumns>(products, a, b);
            finish_products<kTileColumns>(products, a, b);
            add_products(sums, products, shared.stages[place.at], first_row + lane / 4, block + 1 == t.blocks,
                         release);
            place.next();
        }
        if (p.accumulate && t.blocks == 0) continue;
        const i64 element = (i64)(t.row + first_row) * p.n + t.column;
        const WarpRows to = {t.out + element * out_bytes, p.n, left - first_row, (int)t.columns};
        if (p.out_type != kOutF32 && in_16_bytes)
            copy_rows_16<kTileColumns>(to, sums, p.out_type, shared.staged[warp]);
        else
            store_sums<kTileColumns>(to, sums, p.out_type, p.accumulate, pairs);
    }
    copy_out_wait();
}

#ifdef ENTRY_wgmma_products
extern "C" __global__ void __launch_bounds__(kThreads, 1)
wgmma_products(const __grid_constant__ WgmmaParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(1 + kScaleWarps, kConsumers);
        shared.queue.init(1, 1 + kScaleWarps + kConsumers);
#ifndef CUPY_FP8_HOST
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp >= 4) {
        take_registers<kRegisters>();
        multiply(p.product, shared);
    } else {
        give_registers<kOtherRegisters>();
        if (warp == 0) copy_stages(shared);
        else if (warp == 3) find_tiles(p, shared);
        else if (kScaling == kBlocks && warp == 1) read_block_scales(p.product, shared);
        else if (kScaling != kBlocks && warp == 1) read_row_scales<true>(p.product.a, shared);
        else if (kScaling != kBlocks) read_row_scales<false>(p.product.b, shared);
    }
}
#endif
