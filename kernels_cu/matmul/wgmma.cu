// Products of FP8 matrices on Hopper (sm_90a), one per group: D = A · Bᵀ (matmul/problem.cuh).
//
// Thread blocks are persistent and have four warpgroups. The producer warps, in the first one, find tiles,
// copy 128 of K of A and B, with their scales, into a ring of stages, and copy results to D
// (matmul/wgmma_copies.cuh). Each of the consumer warpgroups multiplies 64 rows of A by all columns of a
// tile: the tensor core sums 128 products, which are then added, times their scales, to f32 registers. (It
// keeps about 14 bits below the largest addend, so longer sums would lose more.) They leave results that fill
// boxes in shared memory and go on with the next tile.
//
// Two thread blocks are a cluster, with neighbouring tiles. Each copies half of A, for both, and its own B,
// because the L2 gives too few bytes for all. A stage is free when all warps of both blocks have used it.
//
// IN_A, IN_B    the FP8 formats
// SIZES_OF_K    0: sizes of groups are rows of A; 1: lengths of K
// ADDS          1: D is f32, and what a tile is added to is loaded to shared memory while the products are
//               computed, and stored from there with them. (A copy that adds reaches two thirds of the
//               memory's speed.)
// SCALING       kRows: one scale per row of A and of B, or for all; they multiply at the end
//               kBlocks: A has one per row and 128 of K, B one per 128 rows and 128 of K
//               kVectors: both have one per row and 128 of K
#include "matmul/scaled_sums.cuh"
#include "matmul/warpgroup_products.cuh"
#include "matmul/wgmma_copies.cuh"

// ---- the warp that finds tiles ----
// Indices of a cluster's tiles. Tiles take different times, and other kernels may hold multiprocessors, so
// each cluster fetches its next one dynamically: its first block does, and tells both. Without `taken`, for
// tiles too short for that, clusters take turns.
struct TileNumbers {
    u32* const taken;
    const int lane = threadIdx.x % 32, rank = cluster_rank(), clusters = gridDim.x / kClusterBlocks;
    int number = -1;               // the last one
    RingPosition<kQueue> position;

    __device__ __forceinline__ explicit TileNumbers(u32* of_launch) : taken(of_launch) {}
    __device__ __forceinline__ int next(Shared& shared) {
        if (number < 0) return number = blockIdx.x / kClusterBlocks;
        if (!taken) return number += clusters;
        PhaseBarrier* const full = &shared.numbered.full[position.at];
        if (lane == 0) {
            arrive_expecting(full, sizeof(int));
            if (rank == 0) {
                position.wait_empty(shared.numbered);
                const int found = clusters + (int)atomicAdd(taken, 1u);
                for (int to = 0; to < kClusterBlocks; to++)
                    send(&shared.numbers[position.at], found, full, to);
            }
            position.wait_full(shared.numbered);
            number = shared.numbers[position.at];
            arrive_at(&shared.numbered.empty[position.at], 0);
        }
        position.next();
        return number = __shfl_sync(~0u, number, 0);
    }
    // Call from each cluster after its last tile. The last cluster clears the words, since nobody takes a
    // number any more.
    __device__ __forceinline__ void end() {
        if (!taken || rank != 0 || lane != 0) return;
        if (atomicAdd(taken + 1, 1u) != (u32)clusters - 1) return;
        atomicExch(taken, 0u);
        atomicExch(taken + 1, 0u);
    }
};

// Writes the map of an operand's rows of a group, or of their copy, for sizes of K.
__device__ __forceinline__ void write_map_of(const Operand& operand, const GroupStart& group, i64 rows,
                                             const TensorMap& all, TensorMap* map, Shared& shared) {
    const bool copied = operand.is_copied(group);
    const u8* const from = copied ? operand.copy_of(group, rows) : operand.first(group);
    const i64 pitch = copied ? Operand::copied_chunks(group) * 16 : operand.pitch_of(group);
    write_map(map, &shared.map, all, from, group.size, rows, pitch);
}

// Describes a tile, except its blocks of K, for the warps that copy and multiply. own_maps: its group's, for
// sizes of K.
__device__ __forceinline__ void describe(const WgmmaParams& p, const ProductTile& tile, int rank,
                                         const TensorMap* own_maps, QueuedTile& t) {
    const Product& product = p.product;
    t.a_map = kSizesOfK ? &own_maps[0] : &p.a_map;
    t.b_map = kSizesOfK ? &own_maps[1] : &p.b_map;
    t.a_scale = product.a.first_scale(tile.at);
    t.b_scale = product.b.first_scale(tile.at);
    t.a_scale_block = product.a.scale_block_of(tile.at);
    t.b_scale_block = product.b.scale_block_of(tile.at);
    t.a_row = (int)((kSizesOfK ? 0 : tile.at.start) + tile.row);
    t.column = (int)tile.column + rank * kTileColumns;
    t.b_row = (int)(kSizesOfK ? 0 : tile.at.group * product.n) + t.column;
    t.group = (int)tile.at.group;
    t.row = (int)tile.row;
    t.rows = (int)(tile.end - tile.row);
    t.a_shift = p.copies_scales ? (int)((u64)(t.a_scale + tile.row) / 4 % 4) : 0;
}

__device__ __forceinline__ void find_tiles(const WgmmaParams& p, Shared& shared) {
    using Walk = TileWalk<kSizesOfK, kTileRows, kTileColumns * kClusterBlocks, i32, kPartRows>;
    const Product& product = p.product;
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    Walk walk(product);
    RingPosition<kQueue> position;
    TileNumbers numbers(p.taken);
    // this block's maps
    TensorMap* const own_maps = kSizesOfK ? p.maps + blockIdx.x * (kMaps * 2) : nullptr;
    int mapped = -1;                               // group of the maps written last
    int map = 0;
    if (blockIdx.x == 0) product.check();
    for (;;) {
        position.wait_empty(shared.queue);
        const bool found = walk.find(numbers.next(shared));
        const ProductTile& tile = walk.tile;
        if (kSizesOfK && found && lane == 0 && !product.keeps_promise(tile.at))
            report(product.splits.errors, kSplitStart);
        if (kSizesOfK && found && tile.k > 0 && mapped != (int)tile.at.group) {
            mapped = (int)tile.at.group;
            map = map + 1 == kMaps ? 0 : map + 1;
            write_map_of(product.a, tile.at, product.m, p.a_map, &own_maps[2 * map], shared);
            write_map_of(product.b, tile.at, product.n, p.b_map, &own_maps[2 * map + 1], shared);
        }
        __syncwarp();                              // no lane still waits when the position is filled
        if (lane == 0) {
            QueuedTile& t = shared.tiles[position.at];
            t.blocks = found ? (int)((tile.k + kScaleBlock - 1) / kScaleBlock) : -1;
            if (found) describe(p, tile, rank, &own_maps[2 * map], t);
            arrive(&shared.queue.full[position.at]);
        }
        __syncwarp();
        position.next();
        if (!found) break;
    }
    numbers.end();
}

// ---- the warps that multiply ----
// A consumer warp, with its sums of a tile.
struct Multiplier {
    const WgmmaParams& params;
    Shared& shared;
    const int warp;                // index among the consumer warps
    const int lane = threadIdx.x % 32;
    // Descriptors of the operands at the first stage. They come from a shuffle, so that the assembler keeps
    // them, instead of computing them anew before each block's first products.
    const u32 a_operand, b_operand;
    RingPosition<kStages> position;
    bool is_full = false;          // an early look found the stage at `position` full; false: not known
    int rows, columns;             // of the tile
    int a_first, a_last;           // A's scales in a stage: of the lane's first row, of the last row
    float sums[kTileColumns / 2];

    __device__ __forceinline__ Multiplier(const WgmmaParams& p, Shared& memory, int own_warp)
        : params(p), shared(memory), warp(own_warp),
          a_operand(__shfl_sync(~0u, operand_at(memory.a[0] + own_warp / 4 * kPartRows * kBoxBytes), 0)),
          b_operand(__shfl_sync(~0u, operand_at(memory.b[0]), 0)) {
        // The assembler does not know that the phase is uniform, so it keeps it in a lane register, where it
        // is needed each time a stage is tested.
        position.parity = __shfl_sync(~0u, zero_of_lane(), 0);
    }
    __device__ __forceinline__ int part() const { return warp / kWarpsOfPart; }
    __device__ __forceinline__ int first_row() const {
        return part() * kPartRows + warp % kWarpsOfPart * kRowsOfWarp;
    }
    __device__ __forceinline__ bool has_work(const QueuedTile& t) const {
        return t.rows > part() * kPartRows && columns_left(params.product, t) > 0;
    }
    __device__ __forceinline__ void release(int at) {
        __syncwarp();
        if (lane < kClusterBlocks) arrive_at(&shared.ring.empty[at], lane);
    }
    // Skips the stages of a tile in which this warpgroup has no rows.
    __device__ __forceinline__ void skip(int blocks) {
        for (int block = 0; block < blocks; block++) {
            position.wait_full(shared.ring);
            release(position.at);
            position.next();
        }
        is_full = false;
    }
    // Sums all blocks of K. The loop is unrolled over the stages, so that their addresses are constants; the
    // switch enters it at the stage where the last tile ended.
    __device__ __forceinline__ void multiply(const QueuedTile& t, int blocks) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = 0;
        ScaleOfB of_b(params.product, t);
        int left = blocks;
        rows = t.rows;
        columns = columns_left(params.product, t);
        a_first = t.a_shift + first_row() + lane / 4;
        a_last = t.a_shift + rows - 1;
        if (left == 0) return;
        switch (position.at) {
            for (;;) {
                case 0: if (add<0>(of_b, left)) return;
                case 1: if (add<1>(of_b, left)) return;
                case 2: if (add<2>(of_b, left)) return;
                default: if (kStages > 3 && add<kStages - 1>(of_b, left)) return;
            }
        }
    }
    // Adds the products of the block at stage kAt, which is `position`. Returns true if it is the last one.
    template <int kAt>
    __device__ __forceinline__ bool add(ScaleOfB& of_b, int& left) {
        static_assert(kStages == 3 || kStages == 4, "multiply() has as many copies");
        position.at = kAt;
        if (!is_full) position.wait_full(shared.ring);
        float products[kTileColumns / 2];
        start_products<kTileColumns>(products, a_operand + kAt * (kTileRows * kBoxBytes / 16),
                                     b_operand + kAt * (kTileColumns * kBoxBytes / 16));
        const bool is_last = --left == 0;
        const Stage& stage = shared.stages[kAt];
        // In kBlocks the choice is per warp, over all its rows; absent rows have no scales in a stage and use
        // the last one's.
        const int at_low = kScaling == kBlocks ? smaller(a_first, a_last) : a_first;
        const int at_high = kScaling == kBlocks ? smaller(a_first + 8, a_last) : a_first + 8;
        LaneRowScales scales(stage, at_low, at_high, of_b.next);
        if (kScaling == kBlocks && !is_last) of_b.read();
        position.next();
        is_full = position.is_full(shared.ring);              // asked while the tensor core works
        finish_products<kTileColumns>(products, shared.a[kAt] + part() * kPartRows * kBoxBytes, shared.b[kAt],
                                      rows - part() * kPartRows, columns);
        if (!scales.exact)
            scales.multiply_by_rows(products, stage.a[at_low], stage.a[at_high]);
        add_products(sums, products, scales, stage, is_last, [this] { release(kAt); });
        return is_last;
    }
    // A lane loads four values, which others need too. (With all 32 that it needs itself, the assembler no
    // longer keeps uses of scales behind the products that they should overlap.)
    __device__ __forceinline__ void add_bias(const QueuedTile& t) {
        const Product& p = params.product;
        const int last = columns_left(p, t) - 1, last_row = t.rows - first_row() - 1;
        const i64 row = t.a_row + first_row(), first = t.group * p.bias_group + t.column;
        const float low_weight = p.bias_weight(row + smaller(lane / 4, last_row));
        const float high_weight = p.bias_weight(row + smaller(lane / 4 + 8, last_row));
        float own[kTileColumns / 32];
#pragma unroll
        for (int i = 0; i < kTileColumns / 32; i++)
            own[i] = p.bias_of(first + smaller(32 * i + lane, last));
#pragma unroll
        for (int i = 0; i < kTileColumns / 4; i++) {
            const float bias = __shfl_sync(~0u, own[i / 8], i / 2 % 4 * 8 + lane % 4 * 2 + i % 2);
            const int low = i / 2 * 4 + i % 2;                 // sum of the lane's first row
            sums[low] = fma_rn(low_weight, bias, sums[low]);
            sums[low + 2] = fma_rn(high_weight, bias, sums[low + 2]);
        }
    }
    // Writes the warp's results to shared memory, for copy_results(). Fewer rows than a box, and those of a D
    // without a map, are stored or added directly.
    __device__ __forceinline__ void store(const QueuedTile& t, u32 turn) {
        const Product& p = params.product;
        const int own_rows = has_results(p, t) ? t.rows - first_row() : 0;
        if (!kSizesOfK && own_rows > 0 && p.has_bias(t.group)) add_bias(t);        // gradients have none
        if constexpr (kAdds) {
            wait_for_end(&shared.leaving[part()].empty[0], turn % 2);
            if (own_rows > 0) add_to_staged<kTileColumns>(sums, staged());
            arrive_together(&shared.leaving[part()].full[0]);
            return;
        }
        if (params.copies_out) {
            const bool boxed = leaves_in_boxes(own_rows);
            if (p.out_type == kOutF32) {
                hand_over(0, [&] { if (boxed) stage_sums<0, kTileColumns>(sums, staged()); });
                hand_over(1, [&] { if (boxed) stage_sums<kTileColumns / 2, kTileColumns>(sums, staged()); });
            } else {
                hand_over(turn, [&] {
                    if (boxed && p.out_type == kOutBf16) stage_rows<kOutBf16, kTileColumns>(sums, staged());
                    else if (boxed) stage_rows<kOutF16, kTileColumns>(sums, staged());
                });
            }
            if (boxed) return;
        }
        if (own_rows <= 0) return;
        const u64 out_bytes = p.out_type == kOutF32 ? 4 : 2;
        const i64 element = t.group * p.out_group + (i64)(t.a_row + first_row()) * p.n + t.column;
        const WarpRows to = {p.out + element * out_bytes, p.n, own_rows, columns_left(p, t)};
        if (params.copies_out && p.accumulate) {
            add_rows_out<kTileColumns>(to, sums, staged());
        } else {
            const bool pairs = ((u64)p.out | (u64)(p.n * out_bytes)) % 8 == 0;
            store_sums<kTileColumns>(to, sums, p.out_type, p.accumulate, pairs);
        }
    }
    // Calls write() once the results of the phase before have been read.
    template <class Write>
    __device__ __forceinline__ void hand_over(u32 phase, const Write& write) {
        wait_for_end(&shared.leaving[part()].empty[0], phase % 2 ^ 1);
        write();
        arrive_together(&shared.leaving[part()].full[0]);
    }
    // The warp's rows of the first box.
    __device__ __forceinline__ u8* staged() const {
        return shared.staged[part()] + warp % kWarpsOfPart * (kRowsOfWarp * kBoxBytes);
    }
};

__device__ __forceinline__ void multiply_tiles(const WgmmaParams& p, Shared& shared) {
    Multiplier own(p, shared, __shfl_sync(~0u, threadIdx.x / 32, 0) - 4);
    TileReader reader(shared.tiles, shared.queue);
    while (reader.next()) {
        const QueuedTile& t = reader.tile();
        if (own.has_work(t)) own.multiply(t, reader.blocks);
        else own.skip(reader.blocks);
        own.store(t, reader.turn);
        // Reconverge all lanes: otherwise the compiler keeps no addresses of stages in uniform registers, and
        // every wgmma waits for four moves.
        __syncwarp();
    }
    copy_out_wait();
}

extern "C" __global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 1)
wgmma_products(const __grid_constant__ WgmmaParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        // lanes that copy scales arrive too
        shared.ring.init(p.copies_scales ? 1 : 1 + 32, kClusterBlocks * kConsumers);
        shared.queue.init(1, (p.copies_scales ? 1 : 2) + (p.copies_out ? 1 : 0) + kConsumers);
        for (int part = 0; part < kParts; part++) shared.leaving[part].init(kWarpsOfPart, 1);
        shared.numbered.init(1, kClusterBlocks);
#ifndef CUPY_FP8_HOST
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    sync_cluster();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= 4) {
        take_registers<kRegisters>();
        multiply_tiles(p, shared);
    } else {
        give_registers<kOtherRegisters>();
        if (warp == 0) copy_stages(p, shared);
        else if (warp == 3) find_tiles(p, shared);
        else if (warp == 1 && !p.copies_scales) copy_scales(p.product, shared);
        else if (warp == 2 && kAdds) exchange_results(p, shared);
        else if (warp == 2 && p.copies_out) copy_results(p, shared);
    }
    // no block exits while the other one arrives at its barriers
    __syncwarp();
    sync_cluster();
}
