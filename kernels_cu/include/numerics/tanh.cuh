// tanh (docs/numerics.md, section 13): a fixed sequence of correctly rounded f32 operations, which NumPy
// repeats (cupy_fp8/reference/numerics.py):
//
//   tanh(u) = u + (R(u * u) * (u * u)) * u for |u| < 0.55, else +-(1 - 2 * sigma(-2 * |u|))
#pragma once
#include "numerics/sigmoid.cuh"

// Returns tanh(u) for any f32.
__device__ __forceinline__ float tanh_of(float u) {
    const u32 size = as_bits(u) & 0x7fffffffu, sign = as_bits(u) & 0x80000000u;
    if (size - 0x3f0ccccdu <= 0x7f800000u - 0x3f0ccccdu) {           // |u| >= 0.55, not NaN
        const float tail = sigmoid(mul_rn(absolute(u), -2.0f));
        return as_float(as_bits(fma_rn(-2.0f, tail, 1.0f)) | sign);
    }
    const float square = mul_rn(u, u);
    float r = fma_rn(as_float(0x3c86a8bbu), square, as_float(0xbd57be9bu));
    r = fma_rn(r, square, as_float(0x3e08677eu));
    r = fma_rn(r, square, as_float(0xbeaaaa29u));
    return as_float(as_bits(fma_rn(mul_rn(r, square), u, u)) | sign);                // -0 stays -0
}
