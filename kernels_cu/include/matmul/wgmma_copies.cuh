// Warps of matmul/wgmma.cu that copy: operands and their scales to stages, results to D.
#pragma once
#include "matmul/wgmma_block.cuh"

// ---- the warp that copies A and B ----
// Starts the copies of the scales of a tile, one block of K after the other.
struct ScaleCopies {
    const float *a, *b;
    i64 a_step, b_step;
    u32 a_bytes, b_bytes;

    __device__ __forceinline__ ScaleCopies(const Product& p, const QueuedTile& t)
        : a(t.a_scale + t.row - t.a_shift), b(t.b_scale), a_step(t.a_scale_block), b_step(t.b_scale_block) {
        // lines are whole multiples of 16 bytes, so copies stay inside them
        a_bytes = (smaller(t.a_shift + t.rows, kTileRows + 4) + 3) / 4 * 16;
        const int columns = columns_left(p, t);
        b_bytes = columns <= 0 ? 0 : (smaller(columns, kTileColumns) + 3) / 4 * 16;
        b += t.column;
    }
    __device__ __forceinline__ u32 bytes() const { return a_bytes + (kScaling == kBlocks ? 0 : b_bytes); }
    __device__ __forceinline__ void start(Stage& stage, PhaseBarrier* full) {
        copy_bytes(stage.a, a, a_bytes, full);
        a += a_step;
        if (b_bytes == 0 || kScaling == kBlocks) return;
        copy_bytes(stage.b, b, b_bytes, full);
        b += b_step;
    }
};

__device__ __forceinline__ void copy_stages(const WgmmaParams& p, Shared& shared) {
    TileReader reader(shared.tiles, shared.queue);
    RingPosition<kStages> position;
    const int rank = cluster_rank();
    while (reader.next()) {
        const QueuedTile& t = reader.tile();
        if (threadIdx.x % 32 == 0) {
            ScaleCopies scales(p.product, t);
            // The tile is copied by parts where only one or two of them exist. With sizes of K, groups' maps
            // have one box.
            const int parts = (t.rows + kPartRows - 1) / kPartRows;
            const bool in_parts = !kSizesOfK && parts <= kClusterBlocks;
            const TensorMap* const a_map = in_parts ? &p.a_part_map : t.a_map;
            const int first = rank * (in_parts ? kPartRows : kRowsCopied);
            const bool copies_a = !in_parts || rank < parts, copies_b = columns_left(p.product, t) > 0;
            const u32 bytes = ((in_parts ? parts * kPartRows : kTileRows) + (copies_b ? kTileColumns : 0))
                              * kBoxBytes + (p.copies_scales ? scales.bytes() : 0);
            if (kSizesOfK && reader.blocks > 0) {
                acquire_map(t.a_map);
                acquire_map(t.b_map);
            }
            for (int block = 0; block < reader.blocks; block++) {
                position.wait_empty(shared.ring);
                PhaseBarrier* const full = &shared.ring.full[position.at];
                arrive_expecting(full, bytes);
                if (copies_a)
                    copy_box_to_cluster(shared.a[position.at] + first * kBoxBytes, a_map, t.a_row + first,
                                        block * kBoxBytes, full);
                if (copies_b) copy_box(shared.b[position.at], t.b_map, t.b_row, block * kBoxBytes, full);
                if (p.copies_scales) scales.start(shared.stages[position.at], full);
                position.next();
            }
        }
    }
}

// ---- the warp that copies scales one by one, where the copy engine cannot ----
__device__ __forceinline__ i64 scale_of(const Operand& operand, i64 row) {
    return (row >> operand.scale_shift) * operand.scale_row;
}

// Rows beyond the last one get its scale. Scales of whole rows are needed with the last block of K alone.
__device__ __forceinline__ void copy_scales(const Product& p, Shared& shared) {
    constexpr int kRowsEach = kTileRows / 32, kColumnsEach = kTileColumns / 32;
    TileReader reader(shared.tiles, shared.queue);
    RingPosition<kStages> position;
    const int lane = threadIdx.x % 32;
    while (reader.next()) {
        const QueuedTile& t = reader.tile();
        const int last_row = t.row + t.rows - 1, last_column = (int)p.n - 1;
        const float *a_at = t.a_scale, *b_at = t.b_scale;
        for (int block = 0; block < reader.blocks; block++) {
            position.wait_empty(shared.ring);
            Stage& stage = shared.stages[position.at];
            if (kScaling != kRows || block + 1 == reader.blocks) {
#pragma unroll
                for (int i = 0; i < kRowsEach; i++)
                    copy_async_part<4>(&stage.a[32 * i + lane],
                                       a_at + scale_of(p.a, smaller(t.row + 32 * i + lane, last_row)), 4);
                if constexpr (kScaling != kBlocks) {
#pragma unroll
                    for (int i = 0; i < kColumnsEach; i++)
                        copy_async_part<4>(
                            &stage.b[32 * i + lane],
                            b_at + scale_of(p.b, smaller(t.column + 32 * i + lane, last_column)), 4);
                }
            }
            arrive_after_copies(&shared.ring.full[position.at]);
            position.next();
            if (kScaling != kRows) {
                a_at += t.a_scale_block;
                b_at += t.b_scale_block;
            }
        }
    }
}

// ---- the warp that copies results to D ----
// Returns true if a tile changes D.
__device__ __forceinline__ bool has_results(const Product& p, const QueuedTile& t) {
    return columns_left(p, t) > 0 && !(t.blocks == 0 && p.accumulate && !p.bias);
}

// Returns true if tensor copies store a box, or a warp's `rows` existing rows of it. Where a group has fewer
// rows left than a box, the copy would overwrite those of the next one. (A gradient ends where its map does.)
__device__ __forceinline__ bool leaves_in_boxes(int rows) { return rows >= (kSizesOfK ? 1 : kRowsOut); }

// Starts the copies of a part's boxes, with first element (row, column) of D. rows: existing ones.
__device__ __forceinline__ void copy_part_out(const WgmmaParams& p, const u8* staged, int matrix, int row,
                                              int column, int rows) {
    const int lane = threadIdx.x % 32, box = lane % kPartBoxes;
    const bool whole = !kSizesOfK && rows >= kPartRows;
    const int first_row = lane / kPartBoxes * (whole ? kPartRows : kRowsOut);
    if (first_row >= kPartRows || !leaves_in_boxes(rows - first_row)) return;
    const TensorMap* const map = whole ? &p.out_part_map : &p.out_map;
    const u8* const from = staged + box * kStagedBoxBytes + first_row * kBoxBytes;
    column += box * kBoxBytes / (p.product.out_type == kOutF32 ? 4 : 2);
    const bool adds = !kAdds && p.product.accumulate;
    if (adds) copy_box_out<true>(map, from, matrix, row + first_row, column);
    else copy_box_out<false>(map, from, matrix, row + first_row, column);
}

// Arrives once per warp, after all its lanes.
__device__ __forceinline__ void arrive_together(PhaseBarrier* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// ADDS: starts the copies of what a tile is added to. Absent parts count as there at once.
__device__ __forceinline__ void fetch_results(const WgmmaParams& p, Shared& shared, const QueuedTile& t) {
    constexpr int kBoxColumns = kBoxBytes / 4;
    if (threadIdx.x % 32 != 0) return;
    const int rows = has_results(p.product, t) ? t.rows : 0;
    const int across = smaller((columns_left(p.product, t) + kBoxColumns - 1) / kBoxColumns, kPartBoxes);
    for (int part = 0; part < kParts; part++) {
        const int row = part * kPartRows, boxes = row < rows ? across : 0;
        PhaseBarrier* const there = &shared.leaving[part].empty[0];
        arrive_expecting(there, boxes * kStagedBoxBytes);
        for (int box = 0; box < boxes; box++)
            copy_box_of(shared.staged[part] + box * kStagedBoxBytes, &p.out_map, t.group, t.a_row + row,
                        t.column + box * kBoxColumns, there);
    }
}

// ADDS: a tile's results are stored once they are added to the old values, and make room for the next tile's.
__device__ __forceinline__ void exchange_results(const WgmmaParams& p, Shared& shared) {
    TileReader reader(shared.tiles, shared.queue);
    while (reader.next()) {
        const QueuedTile& t = reader.tile();
        copy_out_wait_read<0>();
        __syncwarp();
        fetch_results(p, shared, t);
        const int rows = has_results(p.product, t) ? t.rows : 0;
        for (int part = 0; part < kParts; part++) {
            const int first_row = part * kPartRows;
            wait_for_end(&shared.leaving[part].full[0], reader.turn % 2);
            publish_to_copies();                   // once for all warps that added
            copy_part_out(p, shared.staged[part], t.group, t.a_row + first_row, t.column, rows - first_row);
            copy_out_commit();
        }
    }
    copy_out_wait();
}

// 16-bit results fill the boxes of a part once, f32 results twice. Every tile counts, even if nothing is
// stored, so that its number gives the phase.
__device__ __forceinline__ void copy_results(const WgmmaParams& p, Shared& shared) {
    const bool in_f32 = p.product.out_type == kOutF32;
    const int steps = kParts * (in_f32 ? 2 : 1);
    TileReader reader(shared.tiles, shared.queue);
    while (reader.next()) {
        const QueuedTile& t = reader.tile();
        const int rows = has_results(p.product, t) ? t.rows : 0;
        for (int step = 0; step < steps; step++) {
            const int part = step % kParts, half = step / kParts, first_row = part * kPartRows;
            wait_for_end(&shared.leaving[part].full[0], (in_f32 ? half : reader.turn) % 2);
            publish_to_copies();                   // once for all warps that stored
            copy_part_out(p, shared.staged[part], kSizesOfK ? t.group : 0, t.a_row + first_row,
                          t.column + half * (kTileColumns / 2), rows - first_row);
            copy_out_commit();
            if (step == 0) continue;
            // this step's copies may go on; those of the step before have read `staged`
            copy_out_wait_read<1>();
            arrive_together(&shared.leaving[(step - 1) % kParts].empty[0]);
        }
        copy_out_wait_read<0>();
        arrive_together(&shared.leaving[kParts - 1].empty[0]);
    }
    copy_out_wait();
}
