// Chooses the way through rows for a program's path.
#pragma once
#include "norm/tiles.cuh"
#if BACKWARD
#include "norm/gradient_rows.cuh"
#else
#include "norm/value_rows.cuh"
#endif

constexpr int kNormThreads = kPath == Path::rows ? kMostRowThreads : kTiled ? kStreamThreads : kThreads;
// Whole rows in registers: of y so that more blocks share a multiprocessor than the compiler aims at. Two
// blocks of y's tiles with every option would spill.
constexpr int kNormBlocks = kPath == Path::rows && !kBackward ? 1 + kRms
    : kTiled && (kBackward || kRms) ? kStreamBlocks : 1;

template <class OfRows, class OfTiles, class OfPatches, class Params, class... More>
__device__ __forceinline__ u32 norm(const Params& p, const SourceCall& call, More... more) {
    if constexpr (kPath == Path::any) return patches<OfPatches>(p, call, more...);
    else if constexpr (kTiled) return norm_tiles<OfTiles>(p, call, more...);
    else return norm_rows<OfRows>(p, call, more...);
}
