// Chooses the way through rows for a program's path.
#pragma once
#include "norm/tiles.cuh"
#if BACKWARD
#include "norm/gradient_rows.cuh"
#else
#include "norm/value_rows.cuh"
#endif

constexpr int kNormThreads = kPath == Path::rows ? kMostRowThreads : kTiled ? kStreamThreads : kThreads;
// Two blocks of y with every option would spill.
constexpr int kNormBlocks = kTiled && (kBackward || kNorms == Norms::rms) ? kStreamBlocks : 1;

template <class OfRows, class OfTiles, class OfPatches, class Params, class... More>
__device__ __forceinline__ u32 norm(const Params& p, const SourceCall& call, More... more) {
    if constexpr (kPath == Path::any) return patches<OfPatches>(p, call, more...);
    else if constexpr (kTiled) return norm_tiles<OfTiles>(p, call, more...);
    else return norm_rows<OfRows>(p, call, more...);
}
