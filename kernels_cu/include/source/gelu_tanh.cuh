// The activation gelu_tanh(a) = (a / 2) * (1 + tanh u) = a * sigma(2 u); terms are sigma
// (numerics/sigmoid.cuh). No tanh, and no cancellation where it is near -1.
#pragma once
#include "fused/program.cuh"
#include "numerics/sigmoid.cuh"

// 2 u = a * (k + kCubic * a^2), k = 2 * sqrt(2 / pi), kCubic = 0.044715 * k
constexpr u32 kLinear = 0x3fcc422au, kCubic = 0x3d922279u, kCubicTimes3 = 0x3e5b33b6u;

struct GeluTanh {
    template <int kCount>
    static __device__ __forceinline__ void terms(float (&v)[kCount]) {
#pragma unroll
        for (float& a : v) a = mul_rn(a, fma_rn(mul_rn(a, a), as_float(kCubic), as_float(kLinear)));
        sigmoids(v);
    }
    static __device__ __forceinline__ void terms(float (&v)[8], const Eight&) { terms(v); }
    static __device__ __forceinline__ float activation(float a, float sigma) { return mul_rn(a, sigma); }
    // sigma + (a * (sigma * (1 - sigma))) * (2 u)'. The square is bounded: past the bound sigma * (1 - sigma)
    // is 0, and 0 * Inf would be NaN.
    static __device__ __forceinline__ float derivative(float a, float sigma) {
        const float square = at_most(mul_rn(a, a), 128.0f);
        const float slope = fma_rn(square, as_float(kCubicTimes3), as_float(kLinear));
        const float rest = mul_rn(sigma, fma_rn(sigma, -1.0f, 1.0f));
        return fma_rn(mul_rn(a, rest), slope, sigma);
    }
};
