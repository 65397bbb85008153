// exp and the logistic function sigma (docs/numerics.md, section 9): a fixed sequence of correctly rounded
// f32 operations, which NumPy repeats (cupy_fp8/reference/numerics.py):
//
//   n = nearest integer of x * log2 e        r = x - n * ln 2        exp(x) = p(r) * 2^n, p of degree 5
//   sigma(a) = 1 / (1 + exp(-a))
//
// Every function takes a and computes exp(-a); the signs are in the constants, which changes no bit.
#pragma once
#include "numerics/arith.cuh"

// 1.5 * 2^23: for |v| < 2^22, kToInteger + v holds v, rounded to an integer, in the low bits.
constexpr float kToInteger = 12582912.0f;
constexpr u32 kToIntegerBits = 0x4b400000u;

// p(r), and n in the low bits of `shifted`, for |a| <= 104
struct ReducedExp {
    float p;
    u32 shifted;

    __device__ __forceinline__ explicit ReducedExp(float a) {
        const float t = fma_rn(a, as_float(0xbfb8aa3bu), kToInteger);            // -log2 e
        const float n = add_rn(t, -kToInteger);
        // r here is -r of the formula. ln 2 is split in two parts; the first step is exact.
        float r = fma_rn(n, as_float(0x3f317218u), a);
        r = fma_rn(n, as_float(0xb102e308u), r);
        p = fma_rn(as_float(0xbc076c36u), r, as_float(0x3d2ba173u));
        p = fma_rn(p, r, as_float(0xbe2aae85u));
        p = fma_rn(p, r, as_float(0x3efffed3u));
        p = fma_rn(p, r, as_float(0xbf7ffff7u));
        p = fma_rn(p, r, 1.0f);
        shifted = as_bits(t);
    }
};

// Returns 2^n for -126 <= n <= 127.
__device__ __forceinline__ float power_of_two(i32 n) { return as_float((u32)(n + 127) << 23); }

// Returns exp(-a) for any f32. Multiplies by 2^n in two steps, so that a subnormal result is rounded once.
// Past the clamp the result is 0 or Inf; NaN is not clamped.
__device__ __forceinline__ float exp_of_minus(float a) {
    if (is_less(a, -89.0f)) a = -89.0f;
    if (is_less(104.0f, a)) a = 104.0f;
    const ReducedExp e(a);
    const i32 n = is_nan(a) ? 0 : (i32)(e.shifted - kToIntegerBits), half = n >> 1;
    return mul_rn(mul_rn(e.p, power_of_two(half)), power_of_two(n - half));
}

// Returns 1 / d, correctly rounded, for d >= 1 or NaN. A division would be a call, which costs every kernel
// registers.
__device__ __forceinline__ float reciprocal_from_one(float d) {
    if (as_bits(d) < 0x7e800000u) return reciprocal(d);              // 2^126
    if (as_bits(d) >= 0x7f800000u) return is_nan(d) ? d : 0.0f;
    // The result is subnormal: n units of 2^-149, at most 2^23, up to the last bit; in a tie the remainder
    // decides.
    const float small = mul_rn(d, as_float(0x1f800000u)), r = reciprocal(small);                // d * 2^-64
    const i32 remainder = (i32)as_bits(fma_rn(mul_rn(small, -1.0f), r, 1.0f));
    // multiplies by 2^85 and adds 2^23 to round
    const float n = mul_rn(r, as_float(0x6a000000u)), shifted = add_rn(n, 8388608.0f);
    const u32 rest = as_bits(add_rn(n, mul_rn(add_rn(shifted, -8388608.0f), -1.0f)));
    u32 units = as_bits(shifted) - as_bits(8388608.0f);
    if (rest == 0x3f000000u && remainder > 0) units++;               // n is 0.5 above `shifted`
    if (rest == 0xbf000000u && remainder < 0) units--;
    return as_float(units);
}

// Returns sigma(a) for any f32.
__device__ __forceinline__ float sigmoid(float a) {
    return reciprocal_from_one(add_rn(1.0f, exp_of_minus(a)));
}

// Returns sigma(a) for |a| < 87: exp(-a) and its reciprocal are normal there, so n is added to the exponent
// bits, and reciprocal() needs no range test.
constexpr float kQuickSigmoid = 87.0f;
__device__ __forceinline__ float quick_sigmoid(float a) {
    const ReducedExp e(a);
    return reciprocal(add_rn(1.0f, as_float(as_bits(e.p) + (e.shifted << 23))));
}

// Replaces each a by sigma(a). quick: every |a| is below kQuickSigmoid. The rare large values and NaN go
// through a loop that rotates the array by one element per step: registers cannot be indexed, and unrolled
// the loop would be most of a kernel.
template <int kCount>
__device__ __forceinline__ void sigmoids(float (&a)[kCount], bool quick) {
    if (__builtin_expect(quick, 1)) {
#pragma unroll
        for (float& v : a) v = quick_sigmoid(v);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kCount; i++) {
        const float first = sigmoid(a[0]);
#pragma unroll
        for (int k = 1; k < kCount; k++) a[k - 1] = a[k];
        a[kCount - 1] = first;
    }
}
template <int kCount>
__device__ __forceinline__ void sigmoids(float (&a)[kCount]) { sigmoids(a, all_below(a, kQuickSigmoid)); }
