// Power-of-two scales, and the scaling-aware rule for the scale of a new block (docs/numerics.md, section 4):
// the smallest power of two under which all values of the block fit. Exponents are log2 of scales.
#pragma once
#include "numerics/fp8_pairs.cuh"

constexpr int kNoScale = 1 << 14;                     // a scale that is no power of two
constexpr int kNothing = -kNoScale;                   // no scale, or scale 0: the result is v * 0
constexpr int kLowest = -127, kHighest = 127;                        // exponents of new blocks

__device__ __forceinline__ int clamp(int v, int low, int high) { return v < low ? low : v > high ? high : v; }

// Returns log2 of a scale, kNoScale if it is no power of two, or kNothing for 0. bits: an E8M0 byte or f32.
__device__ __forceinline__ int exponent_of(u32 bits, bool e8m0) {
    if (e8m0) return bits == kNanE8m0 ? kNoScale : (int)bits - 127;
    if (bits == 0) return kNothing;
    int bias = 127;
    if (bits < 0x00800000u) {                            // subnormal
        bits = as_bits(mul_rn(as_float(bits), as_float((127u + 64) << 23)));
        bias += 64;
    }
    return bits - 1u < 0x7f7fffffu && !(bits & 0x7fffffu) ? (int)(bits >> 23) - bias : kNoScale;
}

// Returns the bits of the scale 2^t, an E8M0 byte or f32.
__device__ __forceinline__ u32 scale_bits(int t, bool e8m0) {
    if (e8m0) return (u32)(t + 127);
    return t >= -126 ? (u32)(t + 127) << 23 : 1u << (t + 149);
}

// The largest of the magnitudes |v| * 2^e decides the target, the exponent of the new block. Magnitudes are
// compared as integers: 0 if there is none, else (log2 + kTargetBias) << 20 plus lower bits. The largest code
// is 1.75 * 2^kEmax, so a product with a mantissa up to 1.75 needs its own exponent, and one above it the
// next. bits: |v| as f32, neither 0 nor NaN.
constexpr int kTargetBias = 1024;
template <class F>
__device__ __forceinline__ int product_target(u32 bits, int e) {
    constexpr int kFirst = (kLowest + kTargetBias) << 20;
    const int found = (int)(bits >> 3) + (e - 127 - Pairs<F>::kEmax + kTargetBias) * (1 << 20) + 0x3ffff;
    if (Pairs<F>::kInf && bits >= 0x7f800000u) return (kHighest + kTargetBias) << 20;
    return larger(found, kFirst);
}
__device__ __forceinline__ int target_of(int found) { return found ? (found >> 20) - kTargetBias : 0; }

// Returns the code of v * 2^(e - t). The exponent is clamped to +-60: 2^60 times the smallest code saturates,
// and 2^-60 times the largest is 0.
template <class F>
__device__ __forceinline__ u32 moved(u32 code, int e, int t) {
    const u32 power = e == kNothing ? 0 : (u32)(clamp(e - t, -60, 60) + 127) << 23;
    return F::narrow(mul_rn(F::widen(code), as_float(power)));
}
