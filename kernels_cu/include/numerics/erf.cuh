// Tails of the normal distribution, and erf (docs/numerics.md, section 13): fixed sequences of correctly
// rounded f32 operations, which NumPy repeats (cupy_fp8/reference/numerics.py):
//
//   Phi(-t) = 2^(e(t) * t - 1), e of degree 7        = p(f) * 2^n, n = nearest integer, p of degree 5
//   erf(x) = x + x * R(x * x) for |x| < 1, else +-(1 - 2 * Phi(-sqrt(2) * |x|))
#pragma once
#include "numerics/arith.cuh"

// From here on n is -127 and p(f) 1, and the tail is +0; below, it is positive.
constexpr u32 kTailEnd = 0x413038aau;                                // 11.0138
// 1.5 * 2^23 - 1: kTailToInteger + (v + 1) holds v, rounded to an integer, in the low bits.
constexpr float kTailToInteger = 12582911.0f;
constexpr u32 kSqrt2 = 0x3fb504f3u;

// Returns min(|a|, kTailEnd); NaN stays NaN.
__device__ __forceinline__ float tail_argument(float a) { return at_most(absolute(a), as_float(kTailEnd)); }

// Returns -Phi(-t) for 0 <= t <= kTailEnd; any number for NaN. The sign is in the constants, which changes no
// bit. n is added to the exponent bits, so that below 2^-126 results fall linearly to 0.
__device__ __forceinline__ float minus_normal_tail(float t) {
    float e = fma_rn(as_float(0xb598770du), t, as_float(0x379bb6d0u));
    e = fma_rn(e, t, as_float(0xb8b3a842u));
    e = fma_rn(e, t, as_float(0xb9c83ea7u));
    e = fma_rn(e, t, as_float(0x3bf1f2b7u));
    e = fma_rn(e, t, as_float(0xbd57ebe1u));
    e = fma_rn(e, t, as_float(0xbeeb1436u));
    e = fma_rn(e, t, as_float(0xbf9357a8u));
    const float shifted = fma_rn(e, t, kTailToInteger);              // n in the low bits
    const float f = fma_rn(e, t, sub_rn(kTailToInteger, shifted));
    float p = fma_rn(as_float(0xbaaded2cu), f, as_float(0xbc1e7457u));
    p = fma_rn(p, f, as_float(0xbd635b6cu));
    p = fma_rn(p, f, as_float(0xbe75fce1u));
    p = fma_rn(p, f, as_float(0xbf317215u));
    p = fma_rn(p, f, -1.0f);
    return as_float(as_bits(p) + (as_bits(shifted) << 23));
}

// Returns erf(x) for any f32.
__device__ __forceinline__ float erf_of(float x) {
    const u32 size = as_bits(x) & 0x7fffffffu, sign = as_bits(x) & 0x80000000u;
    if (size - 0x3f800000u <= 0x40000000u) {                         // |x| >= 1, not NaN
        const float tail = minus_normal_tail(tail_argument(mul_rn(x, as_float(kSqrt2))));
        return as_float(as_bits(fma_rn(2.0f, tail, 1.0f)) | sign);
    }
    const float square = mul_rn(x, x);
    float r = fma_rn(as_float(0xba13a34eu), square, as_float(0x3ba1243fu));
    r = fma_rn(r, square, as_float(0xbcdad1c4u));
    r = fma_rn(r, square, as_float(0x3de7049fu));
    r = fma_rn(r, square, as_float(0xbec0933au));
    r = fma_rn(r, square, as_float(0x3e0375d1u));
    return fma_rn(r, x, x);
}
