// The scale of an amax (docs/numerics.md, section 1): the factor that brings the amax to `target`, the
// largest value of the FP8 format (times 2^-margin).
#pragma once
#include "numerics/arith.cuh"

constexpr u32 kMaxF32 = 0x7f7fffffu;                                 // FLT_MAX

// Returns fl(target / amax) for a finite amax above zero; `largest` where that overflows.
__device__ __forceinline__ float scale_to(float target, float amax, float largest) {
    const float scale = div_rn(target, amax);
    return is_infinite(scale) ? largest : scale;
}

// Returns the largest power of two not above a finite v >= 0, by clearing the mantissa. A subnormal's leading
// one, in its mantissa, stays; 0 stays 0.
__device__ __forceinline__ float floor_to_power_of_two(float v) {
    const u32 bits = as_bits(v);
    if (bits >> 23) return as_float(bits & 0xff800000u);
    return as_float(bits ? 0x80000000u >> __clz((int)bits) : 0u);
}

// The rule of compute_scale and of current scaling; members are set by TensorScaleRule in
// ops/scales/scale.py.
struct TensorScaleRule {
    float target;                // fl(largest FP8 value * 2^-margin)
    float eps;                   // finite, 0 or more
    u32 pow2;                    // 1: scales are powers of two

    // Returns the scale of any amax; 1 for 0, Inf and NaN.
    __device__ __forceinline__ float scale_of(float amax) const {
        if (is_less(amax, eps)) amax = eps;
        if (!is_positive_number(amax)) return 1.0f;
        const float scale = scale_to(target, amax, as_float(kMaxF32));
        return pow2 ? floor_to_power_of_two(scale) : scale;
    }
};
