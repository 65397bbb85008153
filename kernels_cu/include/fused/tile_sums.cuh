// Gradients of the rows' weights: sums over columns (docs/numerics.md, rule 11). Every tile has stored its
// own sums; the last thread block of a row of tiles to finish adds them up, without another launch.
#pragma once
#include "fused/stream_shape.cuh"
#include "numerics/amax.cuh"
#include "numerics/tree_sum.cuh"

// Returns the sum of a row's `tiles` sums, `stride` floats apart, which other thread blocks have stored (so
// they are read from the L2). Two rounds are a subtree, and there are at most four:
// ops/quantize/swiglu_launches.py leaves more tiles to another launch.
__device__ __forceinline__ float sum_over_tiles(const float* from, i64 stride, int tiles) {
    // with 32, rows of MX spill on sm_90
    constexpr int kLoadsInFlight = 16;
    float sum = as_float(kAbsentTerm), even = sum;
#pragma unroll 1
    for (int first = 0; first < tiles; first += kLoadsInFlight) {
        float term[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; i++) {
            term[i] = as_float(first + i < tiles ? (u32)load_relaxed(from) : kAbsentTerm);
            from += stride;
            pin(from);
        }
        TreeSum<kLoadsInFlight> of_round;
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; i++) of_round.add(i, term[i]);
        const bool odd = first & kLoadsInFlight;
        if (odd) sum = add_rn(sum, add_rn(even, of_round.sum()));
        even = odd ? as_float(kAbsentTerm) : of_round.sum();
    }
    return add_rn(sum, even);
}

// Hides the origin of a value from the compiler, so that nothing derived from it takes registers earlier.
template <class T>
__device__ __forceinline__ T found_anew(T v) {
#ifndef CUPY_FP8_HOST
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(v));
    else asm volatile("" : "+r"(v));
#endif
    return v;
}

// Writes the gradients of the weights of a thread block's rows, in the last thread block that has these rows,
// one thread per row: thread blocks have one tile, or two (ops/quantize/swiglu_launches.py). A loop over rows
// would cost the main loop instructions. Call from all threads, at the end.
template <class Call>
__device__ __forceinline__ void add_up_sums(const Call& call, u32 tiles) {
    if constexpr (kBackward && Source::kGated) {
        if (!call.done) return;
        __shared__ bool last;
        const auto in_tiles = [](i64 n) { return (u32)((n + Tile::kColumns - 1) / Tile::kColumns); };
        const i64 half = found_anew(call.half()), rows = found_anew(call.rows);
        const u32 sums = in_tiles(call.interleaved() ? 2 * half : half);
        const u32 across = in_tiles(kPath == Path::any ? 2 * half : half);
        const u32 row = block_again() / across;
        // on path any, tiles of db alone have no sums
        const u32 blocks = kPath == Path::any ? sums : across;
        if (block_again() - row * across >= blocks || !is_last_block(last, call.done + row, blocks)) return;
        const i64 at = (i64)row * (found_anew(tiles) * Tile::kRows) + thread_again();
        if (thread_again() < (int)tiles * Tile::kRows && at < rows)
            call.dprobs[at] = as_float(f32::narrow(sum_over_tiles(call.sums + at, rows, (int)sums)));
    }
}
