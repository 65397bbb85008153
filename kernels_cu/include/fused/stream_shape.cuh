// This file says how many rows, threads and tiles stream.cuh has in flight, and where a block of threads is.
#pragma once
#include "fused/program.cuh"

// A thread has chunks of eight elements of a row. In every step of a block its threads have a group of rows:
// a whole tile where columns have scales (kTiled).
constexpr int kStreamThreads = kTiled ? 512 : 256;
// A thread has so many rows and chunks of a group.
constexpr int kThreadRows = kTiled ? 4 : 4 / kParts, kThreadChunks = kThreadRows * kParts;
constexpr int kPatches = kStreamThreads / Tile::kColumnPatches;      // threads below one another
// A group has kStepRows rows, and a tile has kSteps groups.
constexpr int kStepRows = kPatches * kThreadRows, kSteps = Tile::kRows / kStepRows;
// A thread's rows are so many rows apart. They are adjacent where they are transposed.
constexpr int kRowStride = kTiled ? 1 : kPatches;
// kStages rows of a thread have shared memory (ops/quantize/fused.py has their bytes), and
// kRowsPerRequest rows are requested together.
constexpr int kStages = (sizeof(IN::storage) == 2 ? 4 : 2) / (kTiled && kArrays > 2 ? 2 : 1);
constexpr int kRowsPerRequest = (kStages + 1) / 2;
constexpr int kLoadBytes = kStreamThreads * 16;
constexpr int kStageBytes = kArrays * kLoads * kLoadBytes;
static_assert(kThreadRows % kRowsPerRequest == 0,
              "rows are requested in the patch of those that have been read");
// A multiprocessor has 32 warps where an element has two operands. With three it has 24 row-wise, 16
// otherwise. Quotients take more registers, and so do blocks of f32 with options. An activation whose
// programs spill gets fewer blocks here.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kRowwiseBlocks = 4 - kBackward - (kBackward && kTakesRegisters<Source>);
#else
constexpr int kRowwiseBlocks = kBackward ? 2 : sizeof(IN::storage) == 4 ? 3 : 4;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// With two the compiler spills.
constexpr bool kOneBlockOfTiles =
    kBackward || (kScaling == Scaling::f32_blocks && kTakesRegisters<Source>);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kOneBlockOfTiles =
    kBackward && kScaling == Scaling::mx_blocks && kTakesRegisters<Source>;
#else
constexpr bool kOneBlockOfTiles = false;
#endif
constexpr int kStreamBlocks = kPath == Path::quotients ? 1
    : !kTiled ? kRowwiseBlocks
    : kArrays > 2 || kOneBlockOfTiles || (kOptions && !kOneScale && sizeof(IN::storage) == 4) ? 1 : 2;

// A block of threads has at most so many rows, since the weight of each is in shared memory: as many as
// threads, where shared memory suffices (ops/quantize/fused.py has the same rule). Forward in f32 blocks with
// transposed data the chips with the least shared memory (99 KB) have none left beside biases.
constexpr bool kIsShort = kScaling == Scaling::f32_blocks && !kBackward;
constexpr int kMostRows = !(kOptions && kIsShort) ? kStreamThreads
    : kStreamThreads / (sizeof(IN::storage) == 4 ? 2 : 1) / (1 + kExperts);

// True if y is not multiplied by the weights of rows: the scales are.
constexpr bool kWeighsScales = kPath == Path::rows && !kOneScale && !kBackward && Source::kGated;

// Returns which row of a step this thread's row r is.
__device__ __forceinline__ int row_in_step(int r) {
    const int patch = threadIdx.x / Tile::kColumnPatches;
    return (kTiled ? patch * kThreadRows : patch) + r * kRowStride;
}
// Makes the compiler find other addresses from this one by addition; it would multiply anew for each.
template <class T>
__device__ __forceinline__ void pin(T*& p) {
#ifndef CUPY_FP8_HOST
    asm volatile("" : "+l"(p));
#endif
}

// Returns true if the parts of a result are neighbouring tiles.
__device__ __forceinline__ bool parts_are_adjacent(const SourceCall& call) {
    return kParts > 1 && call.interleaved();
}
// Returns the distance in columns from the first part of a result to the second.
__device__ __forceinline__ i64 columns_between_parts(const SourceCall& call) {
    return parts_are_adjacent(call) ? Tile::kColumns : call.half();
}
// Returns the column after the last of a part.
__device__ __forceinline__ i64 end_of(const SourceCall& call, int part) {
    return kParts > 1 && part == 0 && !call.interleaved() ? call.half() : call.columns;
}

// Says where a block's tile is, counted in tiles. Blocks follow rows of tiles, and each has some tiles, one
// below the other.
struct StreamPosition {
    u32 down, across;

    __device__ __forceinline__ StreamPosition(const SourceCall& call, u32 tiles) {
        const u32 all = (u32)((call.half() + Tile::kColumns - 1) / Tile::kColumns);
        const u32 row = all ? blockIdx.x / all : 0;
        down = row * tiles, across = blockIdx.x - row * all;
    }
    __device__ __forceinline__ TilePosition tile() const {
        return {0, (i64)down * Tile::kRows, (i64)across * Tile::kColumns};
    }
    // Goes to the block's next tile, where there is one. tiles: a power of two.
    __device__ __forceinline__ bool advance(const SourceCall& call, u32 tiles) {
        down++;
#ifndef CUPY_FP8_HOST
        // The compiler then keeps nothing derived from `across` in registers from tile to tile.
        asm volatile("" : "+r"(across));
#endif
        return down & (tiles - 1) && (i64)down * Tile::kRows < call.rows;
    }
    // Returns the first tile of its results.
    __device__ __forceinline__ TilePosition results(const SourceCall& call) const {
        const int columns = parts_are_adjacent(call) ? 2 * Tile::kColumns : Tile::kColumns;
        return {0, (i64)down * Tile::kRows, (i64)across * columns};
    }
};
