// The warps of a block of matmul/wgmma.cu share these: the shape of its work, shared memory and parameters.
#pragma once
#include "matmul/cluster.cuh"
#include "matmul/store_tile.cuh"
#include "matmul/tile_queue.cuh"

enum Scaling { kRows, kBlocks, kVectors };
constexpr Scaling kScaling = SCALING;
constexpr bool kSizesOfK = SIZES_OF_K, kAdds = ADDS;
static_assert(kSizesOfK || !kAdds, "gradients alone are added so");

// The blocks of a cluster have the same rows, and columns that follow one another: they share A.
// With ADDS what a tile is added to takes the place of a stage.
constexpr int kTileRows = 192, kTileColumns = 128, kStages = kAdds ? 3 : 4, kThreads = 512;
constexpr int kRowsCopied = kTileRows / kClusterBlocks;    // of A, by one block for both
constexpr int kPartRows = 64;                      // of a warpgroup; a tile's later parts may be empty
constexpr int kParts = kTileRows / kPartRows, kWarpsOfPart = kPartRows / kRowsOfWarp;
constexpr int kRowsOut = kSizesOfK ? kPartRows : kRowsOfWarp;      // of a box that leaves
// Staged boxes of a part: f32 results take them twice, but with ADDS all are there at once.
constexpr int kPartBoxes = kAdds ? 2 * kStagedBoxes : kStagedBoxes;
constexpr int kConsumers = kParts * kWarpsOfPart;  // warps that multiply
// Places in the queue, of which one has the tile that is multiplied. Clusters take tiles of rows as they need
// them, so few should wait; with sizes of K they may be small.
constexpr int kQueue = kSizesOfK ? 4 : 2;
// A warpgroup that multiplies holds the sums and the products, 128 registers.
constexpr int kRegisters = 152, kOtherRegisters = 56;
constexpr int kMaps = kQueue;                      // A tile stays in the queue until it is multiplied.

// A stage has the scales of 128 of K, of rows of A and of B (not in kBlocks). Those of A begin at `a_shift`,
// since copies begin at multiples of 16 bytes.
struct alignas(16) Stage {
    float a[kTileRows + 4], b[kTileColumns];
};

// Boxes begin at multiples of 1024 bytes.
struct Shared {
    u8 a[kStages][kTileRows * kBoxBytes];
    u8 b[kStages][kTileColumns * kBoxBytes];
    u8 staged[kParts][kPartBoxes * kStagedBoxBytes];
    TensorMap map;                                 // of a group, while it is written
    Stage stages[kStages];
    QueuedTile tiles[kQueue];
    Ring<kStages> ring;
    Ring<kQueue> queue;
    Ring<1> leaving[kParts];                       // of a part's results, in `staged`; with ADDS it is
                                                   // empty when what they are added to is there
    Ring<kQueue> numbered;                         // of a cluster's next tiles, in `numbers`
    int numbers[kQueue];
};
static_assert(sizeof(Shared) <= (kAdds ? 226560 : 218880), "what ops/matmul/wgmma.py asks for");

struct WgmmaParams {
    TensorMap a_map, b_map;        // of all rows; with sizes of K, the boxes of groups' own maps. A box of A
                                   // has the rows that one block of a cluster copies for all.
    TensorMap a_part_map;          // in boxes of kPartRows; not with sizes of K
    TensorMap out_map;             // of D, in boxes of kRowsOut rows and 128 bytes
    TensorMap out_part_map;        // in boxes of kPartRows; not with sizes of K
    Product product;
    TensorMap* maps;               // [blocks of the grid, kMaps, 2] of groups, for sizes of K
    u32* taken;                    // Not with sizes of K: tiles that were taken, and clusters that are done.
                                   // Both are 0 again at the end.
    // Whether the copy engine copies scales too: those of neighbouring rows of A (kVectors: and of B) are
    // neighbours, and all lines of scales begin at multiples of 16 bytes.
    u32 copies_scales;
    u32 copies_out;                // Whether D leaves by out_map.
};
