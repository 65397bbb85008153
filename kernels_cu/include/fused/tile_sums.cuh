// Gradients of the weights of rows are sums over columns (docs/numerics.md, rule 11). Every tile has stored
// its own sums; the last block of a row of tiles to finish adds them up, without another launch.
#pragma once
#include "fused/stream_shape.cuh"
#include "numerics/amax.cuh"
#include "numerics/tree_sum.cuh"

// Returns the sum of a row's sums, of which there are `tiles`, `stride` floats from one another. Other blocks
// have stored them, so they come from the L2. Two rounds are a subtree, and there are four at most:
// ops/quantize/swiglu_launches.py leaves more tiles to another launch.
__device__ __forceinline__ float sum_over_tiles(const float* from, i64 stride, int tiles) {
    // With 32, rows of MX spill on sm_90.
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

// Hides from the compiler where a number is from: what is found from it takes no registers before.
template <class T>
__device__ __forceinline__ T found_anew(T v) {
#ifndef CUPY_FP8_HOST
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(v));
    else asm volatile("" : "+r"(v));
#endif
    return v;
}

// Writes the gradients of the weights of a block's rows, in the last block that has these, a thread for each
// row: few tiles are one for each block, or two (ops/quantize/swiglu_launches.py). A loop over rows would
// cost the main loop instructions. The whole block calls it, at its end.
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
        // On path any, tiles of db alone have none.
        const u32 blocks = kPath == Path::any ? sums : across;
        if (block_again() - row * across >= blocks || !is_last_block(last, call.done + row, blocks)) return;
        const i64 at = (i64)row * (found_anew(tiles) * Tile::kRows) + thread_again();
        if (thread_again() < (int)tiles * Tile::kRows && at < rows)
            call.dprobs[at] = as_float(f32::narrow(sum_over_tiles(call.sums + at, rows, (int)sums)));
    }
}
