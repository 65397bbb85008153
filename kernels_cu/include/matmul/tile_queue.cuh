// A queue in shared memory has the tiles that a block works on. One warp finds them ahead of the others.
#pragma once
#include "matmul/problem.cuh"
#include "matmul/tensor_copy.cuh"

// Describes a tile of D to the warps that copy and multiply.
struct QueuedTile {
    const TensorMap *a_map, *b_map;
    const float *a_scale, *b_scale;    // of the group's first row
    i64 a_scale_block, b_scale_block;  // from one 128 of K to the next
    int a_row, b_row;                  // where the copy engine finds the tile's first rows; a_row: also of D
    int group;
    int row, column;                   // within the group's D
    int rows;                          // that exist
    int blocks;                        // of 128 of K; -1: no more tiles
    int a_shift;                       // of the scales of A in a stage
};

// Returns how many columns D has from the tile's first one on. 0 or less: the tile has none.
__device__ __forceinline__ int columns_left(const Product& p, const QueuedTile& t) {
    return (int)p.n - t.column;
}

// The places of a ring are filled and emptied in turn. Each time `full` and `empty` end a phase.
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

// A warp keeps its position in a ring here.
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
    // Returns true if the position is full. It does not wait.
    __device__ __forceinline__ bool is_full(Ring<kPlaces>& ring) const {
        return has_ended(&ring.full[at], parity);
    }
    __device__ __forceinline__ void wait_empty(Ring<kPlaces>& ring) const {
        wait_for_end(&ring.empty[at], parity ^ 1);
    }
};

// A warp goes through the queue with this. next() gives back the last tile, and waits for the next one, which
// stays where it is until then.
template <int kPlaces>
struct TileReader {
    const QueuedTile* tiles;
    Ring<kPlaces>& queue;
    u32 turn = ~0u;                // How many tiles came before: one register for place and phase.
    int blocks = 0;                // of the tile

    __device__ __forceinline__ TileReader(const QueuedTile (&all)[kPlaces], Ring<kPlaces>& their_queue)
        : tiles(all), queue(their_queue) {}
    __device__ __forceinline__ const QueuedTile& tile() const { return tiles[turn % kPlaces]; }
    __device__ __forceinline__ bool next() {
        __syncwarp();                              // All lanes have read the last tile.
        if (turn != ~0u && threadIdx.x % 32 == 0) arrive(&queue.empty[turn % kPlaces]);
        turn++;
        wait_for_end(&queue.full[turn % kPlaces], turn / kPlaces % 2);
        blocks = __shfl_sync(~0u, tile().blocks, 0);               // The compiler knows that all lanes agree.
        return blocks >= 0;
    }
};
