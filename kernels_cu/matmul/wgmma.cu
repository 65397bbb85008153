// Products of FP8 matrices on Hopper (sm_90a), one for each group: D = A · Bᵀ (matmul/problem.cuh).
//
// Persistent blocks of three warpgroups. The warps of the first one find tiles, and copy 128 of K of A and B,
// with their scales, into a ring of stages. Each of the other two multiplies 64 rows of A by all columns of
// the tile: the tensor core sums 128 products, which are then added, times their scales, to f32 registers.
// (It keeps about 14 bits below the largest addend, so longer sums would lose more.)
//
// IN_A, IN_B    the FP8 formats
// SIZES_OF_K    0: sizes of groups are rows of A; 1: lengths of K
// SCALING       kRows: one scale for each row of A and of B, or for all; they multiply at the end
//               kBlocks: A has one for 128 of K in each row, B one for 128 rows of it and 128 of K
//               kVectors: both have one for 128 of K in each row
#include "matmul/scaled_sums.cuh"
#include "matmul/store_tile.cuh"
#include "matmul/warpgroup_products.cuh"

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
        if (kSizesOfK && found && lane == 0 && !product.keeps_promise(tile.at))
            report(product.splits.errors, kSplitStart);
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
                t.a_row = (int)((kSizesOfK ? 0 : tile.at.start) + tile.row);
                t.b_row = (int)((kSizesOfK ? 0 : tile.at.group * product.n) + tile.column);
                t.matrix = kSizesOfK ? (int)tile.at.group : 0;
                t.row = (int)tile.row;
                t.column = (int)tile.column;
                t.rows = (int)tile.rows;
                t.columns = (u32)(product.n - tile.column);
                t.a_shift = p.copies_scales ? (int)((u64)(t.a_scale + tile.row) / 4 % 4) : 0;
            }
            arrive(&shared.queue.full[place.at]);
        }
        __syncwarp();
        place.next();
        if (!found) return;
    }
}

// ---- the warp that copies A and B ----
// The copies of the scales of a tile, one block of K after the other.
struct ScaleCopies {
    const float *a, *b;
    i64 a_step, b_step;
    u32 a_bytes, b_bytes;

    __device__ __forceinline__ ScaleCopies(const Product& p, const QueuedTile& t)
        : a(t.a_scale + t.row - t.a_shift), b(t.b_scale), a_step(t.a_scale_block), b_step(t.b_scale_block) {
        // Lines are whole multiples of 16 bytes, so these are not left.
        a_bytes = (at_most(t.a_shift + t.rows - t.row, kTileRows + 4) + 3) / 4 * 16;
        b_bytes = (at_most((int)t.columns, kTileColumns) + 3) / 4 * 16;
        b += t.column;
    }
    __device__ __forceinline__ u32 bytes() const { return a_bytes + (kScaling == kBlocks ? 0 : b_bytes); }
    __device__ __forceinline__ void start(Stage& stage, PhaseBarrier* full) {
        copy_bytes(stage.a, a, a_bytes, full);
        a += a_step;
        if (kScaling == kBlocks) return;
        copy_bytes(stage.b, b, b_bytes, full);
        b += b_step;
    }
};

__device__ __forceinline__ void copy_stages(const WgmmaParams& p, Shared& shared) {
    TileReader reader(shared.tiles, shared.queue);
    Place<kStages> place;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        if (threadIdx.x % 32 == 0) {
            ScaleCopies scales(p.product, t);
            // A tile whose second half is empty. With sizes of K, groups' maps have one box.
            const bool is_half = !kSizesOfK && t.rows - t.row <= kHalfRows;
            const TensorMap* const a_map = is_half ? &p.a_half_map : t.a_map;
            const u32 bytes = ((is_half ? kHalfRows : kTileRows) + kTileColumns) * kBoxBytes
                              + (p.copies_scales ? scales.bytes() : 0);
            if (kSizesOfK && t.blocks > 0) {
                acquire_map(t.a_map);
                acquire_map(t.b_map);
            }
            for (int block = 0; block < t.blocks; block++) {
                place.wait_empty(shared.ring);
                PhaseBarrier* const full = &shared.ring.full[place.at];
                arrive_expecting(full, bytes);
                copy_box(shared.a[place.at], a_map, t.a_row, block * kBoxBytes, full);
                copy_box(shared.b[place.at], t.b_map, t.b_row, block * kBoxBytes, full);
                if (p.copies_scales) scales.start(shared.stages[place.at], full);
                place.next();
            }
        }
        __syncwarp();
    }
}

// ---- the warp that copies scales one by one, where the copy engine does not ----
__device__ __forceinline__ void copy_scale(float* shared, const float* from) {
#ifdef CUPY_FP8_HOST
    host_cp_async(shared, from, 4, 4);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"(shared_address(shared)), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ i64 scale_of(const Operand& operand, i64 row) {
    return (row >> operand.scale_shift) * operand.scale_row;
}

// Rows beyond the last one get its scale. Those of whole rows are needed with the last block of K alone.
__device__ __forceinline__ void copy_scales(const Product& p, Shared& shared) {
    constexpr int kRowsEach = kTileRows / 32, kColumnsEach = kTileColumns / 32;
    TileReader reader(shared.tiles, shared.queue);
    Place<kStages> place;
    const int lane = threadIdx.x % 32;
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        const int last_row = t.rows - 1, last_column = (int)p.n - 1;
        const float *a_at = t.a_scale, *b_at = t.b_scale;
        for (int block = 0; block < t.blocks; block++) {
            place.wait_empty(shared.ring);
            Stage& stage = shared.stages[place.at];
            if (kScaling != kRows || block + 1 == t.blocks) {
#pragma unroll
                for (int i = 0; i < kRowsEach; i++)
                    copy_scale(&stage.a[32 * i + lane],
                               a_at + scale_of(p.a, at_most(t.row + 32 * i + lane, last_row)));
                if constexpr (kScaling != kBlocks) {
#pragma unroll
                    for (int i = 0; i < kColumnsEach; i++)
                        copy_scale(&stage.b[32 * i + lane],
                                   b_at + scale_of(p.b, at_most(t.column + 32 * i + lane, last_column)));
                }
            }
            arrive_after_copies(&shared.ring.full[place.at]);
            place.next();
            if (kScaling != kRows) {
                a_at += t.a_scale_block;
                b_at += t.b_scale_block;
            }
        }
    }
}

// ---- the warps that multiply ----
// A warp that multiplies, and the sums of a tile.
struct Multiplier {
    const WgmmaParams& params;
    Shared& shared;
    const int warp;                // of those that multiply
    const int lane = threadIdx.x % 32;
    Place<kStages> place;
    bool is_full = false;          // An early look found the stage at `place` full; else it is not known.
    float sums[kTileColumns / 2];

    __device__ __forceinline__ Multiplier(const WgmmaParams& p, Shared& memory, int own_warp)
        : params(p), shared(memory), warp(own_warp) {}
    __device__ __forceinline__ int half() const { return warp / 4; }
    __device__ __forceinline__ int first_row() const { return half() * kHalfRows + warp % 4 * 16; }
    __device__ __forceinline__ void release(int at) {
        __syncwarp();
        if (lane == 0) arrive(&shared.ring.empty[at]);
    }
    // Stages of a tile in which no row of this warpgroup exists.
    __device__ __forceinline__ void skip(const QueuedTile& t) {
        for (int block = 0; block < t.blocks; block++) {
            place.wait_full(shared.ring);
            release(place.at);
            place.next();
        }
        is_full = false;
    }
    // Sums all blocks of K. The loop is unrolled over the stages, so that their addresses are constants. The
    // switch enters it at the stage where the last tile ended.
    __device__ __forceinline__ void multiply(const QueuedTile& t) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = 0;
        BlockScales of_blocks(params.product, t);
        int left = t.blocks;
        if (left == 0) return;
        switch (place.at) {
            for (;;) {
                case 0: if (add<0>(t, of_blocks, left)) return;
                case 1: if (add<1>(t, of_blocks, left)) return;
                case 2: if (add<2>(t, of_blocks, left)) return;
                default: if (add<3>(t, of_blocks, left)) return;
            }
        }
    }
    // Adds the products of the block at stage kAt, which is `place`. Returns whether it is the last one.
    template <int kAt>
    __device__ __forceinline__ bool add(const QueuedTile& t, BlockScales& of_blocks, int& left) {
        static_assert(kStages == 4, "multiply() has as many copies");
        place.at = kAt;
        if (!is_full) place.wait_full(shared.ring);
        const u8* const a = shared.a[kAt] + half() * kHalfRows * kBoxBytes;
        const u8* const b = shared.b[kAt];
        float products[kTileColumns / 2];
        start_products<kTileColumns>(products, a, b);
        const float of_b[2] = {of_blocks.next[0], of_blocks.next[1]};
        const bool is_last = --left == 0;
        if (kScaling == kBlocks && !is_last) of_blocks.read();
        const Stage& stage = shared.stages[kAt];
        // In kBlocks all rows of a warp decide how it multiplies, and a stage has no scales of those that do
        // not exist: they get the last one's.
        const int row = t.a_shift + first_row() + lane / 4, last = t.a_shift + t.rows - t.row - 1;
        const int at_low = kScaling == kBlocks ? at_most(row, last) : row;
        const int at_high = kScaling == kBlocks ? at_most(row + 8, last) : row + 8;
        RowScales scales(stage, at_low, at_high, t.column, of_b);
        place.next();
        is_full = place.is_full(shared.ring);              // asked while the tensor core works
        const ColumnScales columns(stage);
        finish_products<kTileColumns>(products, a, b, t.rows - t.row - half() * kHalfRows, (int)t.columns);
        if (!scales.exact)
            scales.multiply_by_rows(products, stage.a[at_low], stage.a[at_high], t.column, of_b);
        add_products(sums, products, scales, columns, is_last, [this] { release(kAt); });
        return is_last;
    }
    __device__ __forceinline__ void store(const QueuedTile& t) {
        const Product& p = params.product;
        const u64 out_bytes = p.out_type == kOutF32 ? 4 : 2;
        const int rows = t.rows - t.row - first_row();
        if (rows <= 0 || (t.blocks == 0 && p.accumulate)) return;
        u8* const staged = shared.staged[warp];
        // A box has 16 rows. Where the group has fewer left, it would overwrite those of the next one.
        if (params.copies_out && rows >= 16) {
            const PlaceOut to = {params.out_map, t.matrix, t.a_row + first_row(), t.column};
            // Gradients of many groups are more than the L2 has room for, and nobody reads them soon.
            if (p.out_type != kOutF32) copy_rows_out<kTileColumns, kSizesOfK>(to, sums, p.out_type, staged);
            else if (p.accumulate) copy_sums_out<kTileColumns, true, kSizesOfK>(to, sums, staged);
            else copy_sums_out<kTileColumns, false, kSizesOfK>(to, sums, staged);
            return;
        }
        const i64 element = t.matrix * p.out_group + (i64)(t.a_row + first_row()) * p.n + t.column;
        const WarpRows to = {p.out + element * out_bytes, p.n, rows, (int)t.columns};
        if (params.copies_out && p.accumulate) {
            add_rows_out<kTileColumns>(to, sums, staged);
        } else {
            const bool pairs = ((u64)p.out | (u64)(p.n * out_bytes)) % 8 == 0;
            store_sums<kTileColumns>(to, sums, p.out_type, p.accumulate, pairs);
        }
    }
};

__device__ __forceinline__ void multiply_tiles(const WgmmaParams& p, Shared& shared) {
    Multiplier own(p, shared, __shfl_sync(~0u, threadIdx.x / 32, 0) - 4);
    TileReader reader(shared.tiles, shared.queue);
    while (reader.next()) {
        const QueuedTile& t = reader.tile;
        if (t.rows - t.row <= own.half() * kHalfRows) {
            own.skip(t);
            continue;
        }
        own.multiply(t);
        own.store(t);
        // All lanes together again: else the compiler keeps the addresses of stages in no uniform registers,
        // and every wgmma waits for four moves.
        __syncwarp();
    }
    copy_out_wait();
}

#ifdef ENTRY_wgmma_products
extern "C" __global__ void __launch_bounds__(kThreads, 1)
wgmma_products(const __grid_constant__ WgmmaParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.ring.init(p.copies_scales ? 1 : 1 + 32, kConsumers);    // Lanes that copy scales arrive too.
        shared.queue.init(1, (p.copies_scales ? 1 : 2) + kConsumers);
#ifndef CUPY_FP8_HOST
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= 4) {
        take_registers<kRegisters>();
        multiply_tiles(p, shared);
    } else {
        give_registers<kOtherRegisters>();
        if (warp == 0) copy_stages(p, shared);
        else if (warp == 3) find_tiles(p, shared);
        else if (warp == 1 && !p.copies_scales) copy_scales(p.product, shared);
    }
}
#endif
