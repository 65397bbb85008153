// The warps of a block of matmul/wgmma.cu share these: the shape of its work, shared memory and parameters.
#pragma once
#include "matmul/tile_queue.cuh"

enum Scaling { kRows, kBlocks, kVectors };
constexpr Scaling kScaling = SCALING;
constexpr bool kSizesOfK = SIZES_OF_K;

constexpr int kTileRows = 128, kTileColumns = 192, kStages = 4, kThreads = 384, kQueue = 4;
constexpr int kHalfRows = kTileRows / 2;           // of a warpgroup; a tile's second half may be empty
constexpr int kChunk = 64;                         // columns of B that share a scale in kBlocks
constexpr int kConsumers = 8;                      // warps that multiply
// A warpgroup that multiplies holds the sums and the products, 192 registers. (With 224 in kVectors, the
// assembler loads many scales of B before the first additions, which then wait: 5 % of the speed.)
constexpr int kRegisters = kScaling == kVectors ? 216 : 224, kOtherRegisters = 56;
constexpr int kStagedBytes = 16 * kTileColumns * 2;  // a warp's rows on their way to D
// The copy engine may still read the maps of tiles in the queue and of tiles in the ring.
constexpr int kMaps = kQueue + kStages + 2;

// The scales of 128 of K, of rows of A and of B (not in kBlocks). Those of A begin at `a_shift`, since copies
// begin at multiples of 16 bytes.
struct alignas(16) Stage {
    float a[kTileRows + 4], b[kTileColumns];
};

// Boxes begin at multiples of 1024 bytes.
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
static_assert(sizeof(Shared) == 218816, "what ops/matmul/wgmma.py asks for");

struct WgmmaParams {
    TensorMap a_map, b_map;        // of all rows; with sizes of K, the boxes of groups' own maps
    TensorMap a_half_map;          // in boxes of half the rows; not with sizes of K
    TensorMap out_map;             // of D, in boxes of 16 rows and 128 bytes
    Product product;
    TensorMap* maps;               // [blocks of the grid, kMaps, 2] of groups, for sizes of K
    // Whether the copy engine copies scales too: those of neighbouring rows of A (kVectors: and of B) are
    // neighbours, and all lines of scales begin at multiples of 16 bytes.
    u32 copies_scales;
    u32 copies_out;                // Whether D leaves by out_map.
};

__device__ __forceinline__ int at_most(int value, int end) { return value < end ? value : end; }
