// All per-tensor casts include this (docs/numerics.md, section 1). IN and OUT are the kernel's formats.
#pragma once
#include "numerics/amax.cuh"

template <int kCount>
__device__ __forceinline__ Chunk<OUT, kCount> scale_and_narrow(const Chunk<IN, kCount>& in, float scale) {
    Chunk<OUT, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
        float lo, hi;
        in.widen2(i, lo, hi);
        out.narrow2(i, mul_rn(lo, scale), mul_rn(hi, scale));
    }
    return out;
}

// Stores 1 / scale; one thread of the grid calls it. copy: a second destination, or null.
__device__ __forceinline__ void write_scale_inv(float scale, float* to, float* copy) {
    const float inverse = as_float(f32::narrow(div_rn(1.0f, scale)));
    *to = inverse;
    if (copy) *copy = inverse;
}
