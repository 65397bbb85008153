// Queue of a thread block's tiles in shared memory. One warp finds them ahead of the others.
#pragma once
#include "matmul/problem.cuh"
#include "matmul/tensor_copy.cuh"

// A tile of D for the warps that copy and multiply.
struct QueuedTile {
    const TensorMap *a_map, *b_map;
    const float *a_scale, *b_scale;    // of the group's first row
    i64 a_scale_block, b_scale_block;  // from one 128 of K to the next
    int a_row, b_row;                  // the tile's first rows in the copied matrices; a_row: also in D
    int group;
    int row, column;                   // within the group's D
    int rows;                          // existing rows
    int blocks;                        // blocks of 128 of K; -1: no more tiles
    int a_shift;                       // offset of the scales of A in a stage
};

// Columns of D from the tile's first one on; 0 or less: the tile has none.
__device__ __forceinline__ int columns_left(const Product& p, const QueuedTile& t) {
    return (int)p.n - t.column;
}

// Ring buffer: places are filled and emptied in turn; `full` and `empty` end a phase each time.
template <int kPlaces>
struct Ring {
    PhaseBarrier full[kPlaces], empty[kPlaces];

    __device__ __forceinline__ void init(u32 fillers, u32 users) {
        for (int i = 0; i < kPlaces; i++) {
            init_phases(&full[i], fillers);
            init_phases(&empty[i], users);
        }
    }
};

// A warp's position in a ring.
template <int kPlaces>
struct RingPosition {
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == kPlaces) {
            at = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void wait_full(Ring<kPlaces>& ring) const {
        wait_for_end(&ring.full[at], parity);
    }
    // Returns true if the position is full, without waiting.
    __device__ __forceinline__ bool is_full(Ring<kPlaces>& ring) const {
        return has_ended(&ring.full[at], parity);
    }
    __device__ __forceinline__ void wait_empty(Ring<kPlaces>& ring) const {
        wait_for_end(&ring.empty[at], parity ^ 1);
    }
};

// One warp's cursor in the tile queue. next() releases the last tile and waits for the next one, which stays
// in place until then.
template <int kPlaces>
struct TileReader {
    const QueuedTile* tiles;
    Ring<kPlaces>& queue;
    u32 turn = ~0u;                // number of tiles before: one register for place and phase
    int blocks = 0;                // of the tile

    __device__ __forceinline__ TileReader(const QueuedTile (&all)[kPlaces], Ring<kPlaces>& their_queue)
        : tiles(all), queue(their_queue) {}
    __device__ __forceinline__ const QueuedTile& tile() const { return tiles[turn % kPlaces]; }
    __device__ __forceinline__ bool next() {
        __syncwarp();                              // all lanes have read the last tile
        if (turn != ~0u && threadIdx.x % 32 == 0) arrive(&queue.empty[turn % kPlaces]);
        turn++;
        wait_for_end(&queue.full[turn % kPlaces], turn / kPlaces % 2);
        blocks = __shfl_sync(~0u, tile().blocks, 0);               // shows the compiler: uniform
        return blocks >= 0;
    }
};
