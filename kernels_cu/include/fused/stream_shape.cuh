// Rows, threads and tiles in flight in stream.cuh, and the position of a thread block.
#pragma once
#include "fused/program.cuh"

// A chunk is eight elements of a row. In each step the threads of a block have a group of rows: a whole tile
// where columns have scales (kTiled).
constexpr int kStreamThreads = kTiled ? 512 : 256;
// rows and chunks of a group per thread
constexpr int kThreadRows = kTiled ? 4 : 4 / kParts, kThreadChunks = kThreadRows * kParts;
constexpr int kPatches = kStreamThreads / Tile::kColumnPatches;      // threads in a column of patches
// rows per group, groups per tile
constexpr int kStepRows = kPatches * kThreadRows, kSteps = Tile::kRows / kStepRows;
// distance between a thread's rows: adjacent if transposed
constexpr int kRowStride = kTiled ? 1 : kPatches;
// kStages rows per thread fit in shared memory (ops/quantize/fused.py has their bytes); kRowsPerRequest rows
// are requested together.
constexpr int kStages = (sizeof(IN::storage) == 2 ? 4 : 2) / (kTiled && kArrays > 2 ? 2 : 1);
constexpr int kRowsPerRequest = (kStages + 1) / 2;
constexpr int kLoadBytes = kStreamThreads * 16;
constexpr int kStageBytes = kArrays * kLoads * kLoadBytes;
static_assert(kThreadRows % kRowsPerRequest == 0,
              "rows are requested in the patch of those that have been read");
// An SM has 32 warps where an element has two operands; with three it has 24 row-wise, 16 otherwise.
// Quotients take more registers, and so do f32 blocks with options. An activation whose programs spill gets
// fewer thread blocks here.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kRowwiseBlocks = 4 - kBackward - (kBackward && kTakesRegisters<Source>);
#else
constexpr int kRowwiseBlocks = kBackward ? 2 : sizeof(IN::storage) == 4 ? 3 : 4;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// with two the compiler spills
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

// Most rows per thread block, limited by their weights in shared memory: one row per thread, where shared
// memory suffices (the same rule in ops/quantize/fused.py). Forward in f32 blocks with transposed data, chips
// with the least shared memory (99 KB) have none left beside biases.
constexpr bool kIsShort = kScaling == Scaling::f32_blocks && !kBackward;
constexpr int kMostRows = !(kOptions && kIsShort) ? kStreamThreads
    : kStreamThreads / (sizeof(IN::storage) == 4 ? 2 : 1) / (1 + kExperts);

// the scales are multiplied by the rows' weights, instead of y
constexpr bool kWeighsScales = kPath == Path::rows && !kOneScale && !kBackward && Source::kGated;

// Returns the row within a step of this thread's row r.
__device__ __forceinline__ int row_in_step(int r) {
    const int patch = threadIdx.x / Tile::kColumnPatches;
    return (kTiled ? patch * kThreadRows : patch) + r * kRowStride;
}
// Makes the compiler derive other addresses from this one by addition; it would multiply anew for each.
template <class T>
__device__ __forceinline__ void pin(T*& p) {
#ifndef CUPY_FP8_HOST
    asm volatile("" : "+l"(p));
#endif
}

// Returns true if the parts of a result are adjacent tiles.
__device__ __forceinline__ bool parts_are_adjacent(const SourceCall& call) {
    return kParts > 1 && call.interleaved();
}
// Distance in columns from the first part of a result to the second.
__device__ __forceinline__ i64 columns_between_parts(const SourceCall& call) {
    return parts_are_adjacent(call) ? Tile::kColumns : call.half();
}
// The column after the last of a part.
__device__ __forceinline__ i64 end_of(const SourceCall& call, int part) {
    return kParts > 1 && part == 0 && !call.interleaved() ? call.half() : call.columns;
}

// A thread block's tile, counted in tiles. Thread blocks follow rows of tiles; each has several tiles, one
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
    // Moves to the thread block's next tile; false if there is none. tiles: a power of two.
    __device__ __forceinline__ bool advance(const SourceCall& call, u32 tiles) {
        down++;
#ifndef CUPY_FP8_HOST
        // keeps nothing derived from `across` in registers from tile to tile
        asm volatile("" : "+r"(across));
#endif
        return down & (tiles - 1) && (i64)down * Tile::kRows < call.rows;
    }
    // The first tile of its results.
    __device__ __forceinline__ TilePosition results(const SourceCall& call) const {
        const int columns = parts_are_adjacent(call) ? 2 * Tile::kColumns : Tile::kColumns;
        return {0, (i64)down * Tile::kRows, (i64)across * columns};
    }
};
