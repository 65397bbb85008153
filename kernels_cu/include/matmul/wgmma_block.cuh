// Shared by the warps of a block of matmul/wgmma.cu: shape of its work, shared memory and parameters.
#pragma once
#include "matmul/cluster.cuh"
#include "matmul/store_tile.cuh"
#include "matmul/tile_queue.cuh"

enum Scaling { kRows, kBlocks, kVectors };
constexpr Scaling kScaling = SCALING;
constexpr bool kSizesOfK = SIZES_OF_K, kAdds = ADDS;
static_assert(kSizesOfK || !kAdds, "gradients alone are added so");

// The blocks of a cluster have the same rows and consecutive columns: they share A. With ADDS, what a tile is
// added to takes the place of a stage.
constexpr int kTileRows = 192, kTileColumns = 128, kStages = kAdds ? 3 : 4, kThreads = 512;
constexpr int kRowsCopied = kTileRows / kClusterBlocks;    // of A, by one block for both
constexpr int kPartRows = 64;                      // per warpgroup; a tile's later parts may be empty
constexpr int kParts = kTileRows / kPartRows, kWarpsOfPart = kPartRows / kRowsOfWarp;
constexpr int kRowsOut = kSizesOfK ? kPartRows : kRowsOfWarp;      // rows of a box that are stored at once
// staged boxes per part: f32 results use them twice, but with ADDS all are there at once
constexpr int kPartBoxes = kAdds ? 2 * kStagedBoxes : kStagedBoxes;
constexpr int kConsumers = kParts * kWarpsOfPart;  // warps that multiply
// Places in the queue, one of which holds the tile in progress. Where clusters take tiles dynamically, few
// should wait; with sizes of K, tiles may be small.
constexpr int kQueue = kSizesOfK ? 4 : 2;
// A warpgroup that multiplies holds the sums and the products, 128 registers.
constexpr int kRegisters = 152, kOtherRegisters = 56;
constexpr int kMaps = kQueue;                      // a tile stays in the queue until it is multiplied

// Scales of 128 of K, of rows of A and of B (not in kBlocks). Those of A begin at `a_shift`, since copies
// begin at multiples of 16 bytes.
struct alignas(16) Stage {
    float a[kTileRows + 4], b[kTileColumns];
};

// boxes are 1024-byte aligned
struct Shared {
    u8 a[kStages][kTileRows * kBoxBytes];
    u8 b[kStages][kTileColumns * kBoxBytes];
    u8 staged[kParts][kPartBoxes * kStagedBoxBytes];
    TensorMap map;                                 // of a group, while it is written
    Stage stages[kStages];
    QueuedTile tiles[kQueue];
    Ring<kStages> ring;
    Ring<kQueue> queue;
    Ring<1> leaving[kParts];                       // a part's results in `staged`; with ADDS it is empty when
                                                   // what they are added to is there
    Ring<kQueue> numbered;                         // a cluster's next tiles, in `numbers`
    int numbers[kQueue];
};
static_assert(sizeof(Shared) <= (kAdds ? 226560 : 218880), "what ops/matmul/wgmma.py asks for");

struct WgmmaParams {
    TensorMap a_map, b_map;        // of all rows; with sizes of K, only the boxes for the groups' own maps. A
                                   // box of A has the rows that one block of a cluster copies for all.
    TensorMap a_part_map;          // in boxes of kPartRows; not with sizes of K
    TensorMap out_map;             // of D, in boxes of kRowsOut rows and 128 bytes
    TensorMap out_part_map;        // in boxes of kPartRows; not with sizes of K
    Product product;
    TensorMap* maps;               // [blocks of the grid, kMaps, 2] of groups, for sizes of K
    u32* taken;                    // tiles taken, and clusters done, or null. Both are 0 again at the end.
    // 1: the copy engine copies scales too: those of neighbouring rows of A (kVectors: and of B) are
    // adjacent, and all lines of scales begin at multiples of 16 bytes
    u32 copies_scales;
    u32 copies_out;                // 1: D is stored by out_map
};
