// Arithmetic on pairs of FP8 elements, as pairs of f16: f16 holds every e4m3fn and e5m2 value, and pairs take
// half the instructions of f32. A word holds two elements, the first in the low half.
#pragma once
#include "numerics/formats.cuh"

struct Halves {
    // Rounds to nearest-even and keeps subnormals.
    static __device__ __forceinline__ u32 times(u32 a, u32 b) {
#ifdef CUPY_FP8_HOST
        float a_lo, a_hi, b_lo, b_hi;
        f16::widen2(a, a_lo, a_hi);
        f16::widen2(b, b_lo, b_hi);
        return f16::narrow2(mul_rn(a_lo, b_lo), mul_rn(a_hi, b_hi));
#else
        u32 r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
#endif
    }
    // Returns the larger of the magnitudes in `largest` and those of `next`. NaN in `next` is ignored.
    static __device__ __forceinline__ u32 raised(u32 largest, u32 next) {
#ifndef CUPY_FP8_HOST
        asm("abs.f16x2 %0, %0;" : "+r"(next));
#else
        next &= f16::kMagnitudes;
#endif
        return f16::max_magnitudes<false>(largest, next);
    }
    // Rounds to nearest-even.
    static __device__ __forceinline__ u32 plus(u32 a, u32 b) {
#ifdef CUPY_FP8_HOST
        float a_lo, a_hi, b_lo, b_hi;
        f16::widen2(a, a_lo, a_hi);
        f16::widen2(b, b_lo, b_hi);
        return f16::narrow2(a_lo + b_lo, a_hi + b_hi);
#else
        u32 r;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
#endif
    }
    static __device__ __forceinline__ u32 minus(u32 a, u32 b) { return plus(a, b ^ 0x80008000u); }
    // Returns 1.0 in each half where the values differ, and 0 where they are equal or one is NaN.
    static __device__ __forceinline__ u32 different(u32 a, u32 b) {
#ifdef CUPY_FP8_HOST
        float a_lo, a_hi, b_lo, b_hi;
        f16::widen2(a, a_lo, a_hi);
        f16::widen2(b, b_lo, b_hi);
        return f16::narrow2(a_lo < b_lo || a_lo > b_lo, a_hi < b_hi || a_hi > b_hi);
#else
        u32 r;
        asm("set.ne.f16x2.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
#endif
    }
    // Returns 2^k for -24 <= k <= 15.
    static __device__ __forceinline__ u32 power(int k) {
        return k >= -14 ? (u32)(k + 15) << 10 : 1u << (k + 24);
    }
    // Returns 2^k in both halves for k <= 15, and 0 for k < -24.
    static __device__ __forceinline__ u32 power_pair(int k) {
        const float power = as_float((u32)larger(k + 127, 0) << 23);
        return f16::narrow2_any_nan(power, power);
    }
};

// widen(word, half) widens two of a word's four codes; narrow() turns four f16 into a word of codes and
// saturates. The largest finite value is 1.75 * 2^kEmax. kInf: the format has infinities.
template <class F> struct Pairs;
template <class F>
__device__ __forceinline__ u32 narrow_halves(u32 pair) {
    float lo, hi;
    f16::widen2(pair, lo, hi);
    return F::narrow2(lo, hi);
}

template <> struct Pairs<e4m3fn> {
    static constexpr int kEmax = 8;
    static constexpr bool kInf = false;
    static __device__ __forceinline__ u32 widen(u32 word, int half) {
#ifdef CUPY_FP8_HARDWARE_CVT
        u32 halves;
        if (half)
            asm("{\n\t.reg .b16 lo, hi;\n\tmov.b32 {lo, hi}, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, hi;\n\t}"
                : "=r"(halves) : "r"(word));
        else
            asm("{\n\t.reg .b16 lo, hi;\n\tmov.b32 {lo, hi}, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, lo;\n\t}"
                : "=r"(halves) : "r"(word));
        return halves;
#else
        float lo, hi;
        e4m3fn::widen2(half ? word >> 16 : word & 0xffffu, lo, hi);
        return f16::narrow2(lo, hi);
#endif
    }
    static __device__ __forceinline__ u32 narrow(u32 first, u32 second) {
#ifdef CUPY_FP8_HARDWARE_CVT
        u32 word;
        asm("{\n\t.reg .b16 lo, hi;\n\tcvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n\t"
            "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n\tmov.b32 %0, {lo, hi};\n\t}"
            : "=r"(word) : "r"(first), "r"(second));
        return word;
#else
        return narrow_halves<e4m3fn>(first) | narrow_halves<e4m3fn>(second) << 16;
#endif
    }
};

// An e5m2 code is the upper byte of its f16.
template <> struct Pairs<e5m2> {
    static constexpr int kEmax = 15;
    static constexpr bool kInf = true;
    static __device__ __forceinline__ u32 widen(u32 word, int half) {
        return __byte_perm(word, 0, half ? 0x3424 : 0x1404);
    }
    static __device__ __forceinline__ u32 narrow(u32 first, u32 second) {
#ifdef CUPY_FP8_HARDWARE_CVT
        u32 word;
        asm("{\n\t.reg .b16 lo, hi;\n\tcvt.rn.satfinite.e5m2x2.f16x2 lo, %1;\n\t"
            "cvt.rn.satfinite.e5m2x2.f16x2 hi, %2;\n\tmov.b32 %0, {lo, hi};\n\t}"
            : "=r"(word) : "r"(first), "r"(second));
        return word;
#else
        return narrow_halves<e5m2>(first) | narrow_halves<e5m2>(second) << 16;
#endif
    }
};
