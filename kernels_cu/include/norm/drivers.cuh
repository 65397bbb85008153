// Chooses the way through rows for a program's path.
#pragma once
#include "norm/tiles.cuh"
#if BACKWARD
#include "norm/gradient_rows.cuh"
#else
#include "norm/value_rows.cuh"
#endif

// LayerNorm alone has fewer threads (ops/quantize/norm_launches.py has this number).
constexpr int kLayerThreads = 256;
constexpr bool kOfRows = kPath == Path::rows;
constexpr int kNormThreads = kOfRows ? kNorms == Norms::layer ? kLayerThreads : kMostRowThreads
    : kTiled ? kStreamThreads : kThreads;
// So many blocks share a multiprocessor: of whole rows of y more than the compiler aims at, of tiles where
// they do not spill.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
constexpr bool kFewRegisters = false;                                // The compiler takes more.
#else
constexpr bool kFewRegisters = true;
#endif
constexpr int kLayerBlocks = kFewRegisters ? 3 : 2;
// Tiles: two blocks where the compiler does not spill with 64 registers a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kTwoTiles = kBackward ? kRms && (kFewRegisters || kScaling != Scaling::mx_blocks)
    : kNorms == Norms::rms || (kNorms == Norms::residual && kScaling == Scaling::one_scale);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kTwoTiles = kNorms == Norms::rms && !kBackward && kScaling != Scaling::mx_blocks;
#else
constexpr bool kTwoTiles = kNorms == Norms::rms && !kBackward;
#endif
constexpr int kRmsBlocks = kNorms == Norms::residual && kScaling == Scaling::mx_blocks ? 1 : 2;
constexpr int kNormBlocks = kOfRows && !kBackward ? kRms ? kRmsBlocks
        : kNorms == Norms::layer ? kLayerBlocks : 1
    : kTiled && kTwoTiles ? 2 : 1;

template <class OfRows, class OfTiles, class OfPatches, class Params, class... More>
__device__ __forceinline__ u32 norm(const Params& p, const SourceCall& call, More... more) {
    if constexpr (kPath == Path::any) return patches<OfPatches>(p, call, more...);
    else if constexpr (kTiled) return norm_tiles<OfTiles>(p, call, more...);
    else return norm_rows<OfRows>(p, call, more...);
}
