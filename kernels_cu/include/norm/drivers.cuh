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
// So many blocks share a multiprocessor: of whole rows of y more than the compiler aims at.
constexpr int kLayerBlocks = kFewRegisters ? 3 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kRmsBlocks =
    kNorms == Norms::residual || (kScaling == Scaling::mx_blocks && !kFewRegisters) ? 1 : 2;
#else
constexpr int kRmsBlocks = kScaling == Scaling::mx_blocks && !kFewRegisters ? 1 : 2;
#endif
constexpr int kNormBlocks = kOfRows && !kBackward ? kRms ? kRmsBlocks
        : kNorms == Norms::layer ? kLayerBlocks : 1
    : kTiled && kTwoTiles ? 2 : 1;

template <class OfRows, class OfTiles, class OfPatches, class Params, class... More>
__device__ __forceinline__ u32 norm(const Params& p, const SourceCall& call, More... more) {
    if constexpr (kPath == Path::any) return patches<OfPatches>(p, call, more...);
    else if constexpr (kTiled) return norm_tiles<OfTiles>(p, call, more...);
    else return norm_rows<OfRows>(p, call, more...);
}
