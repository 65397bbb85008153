// Common to all per-tensor casts (docs/numerics.md, section 1). IN and OUT are the kernel's formats.
#pragma once
#include "numerics/amax.cuh"

template <int kCount>
__device__ __forceinline__ Chunk<OUT, kCount> scale_and_narrow(const Chunk<IN, kCount>& in, float scale) {
    return converted<OUT>(in, [&](float v, int) { return mul_rn(v, scale); });
}

// Stores 1 / scale. Call from one thread of the grid. copy: a second destination, or null.
__device__ __forceinline__ void write_scale_inv(float scale, float* to, float* copy) {
    const float inverse = as_float(f32::narrow(div_rn(1.0f, scale)));
    *to = inverse;
    if (copy) *copy = inverse;
}
