// Two neighbouring FP8 elements, multiplied by powers of two in whatever arithmetic is fast and still rounds only once, when they are
// narrowed again.
#pragma once
#include "formats.cuh"

// Two neighbouring elements, how they are computed with, and which factors 2^k there are: kLow <= k <= kHigh. A product v * 2^d is exact
// for -kSpan <= d <= 0.
template <class F> struct Pair;

// f32 holds any v * 2^d of eight rows that differ by less than 2^90.
template <> struct Pair<e5m2> {
    static constexpr int kEmax = 15, kSpan = 90, kLow = -126, kHigh = 127;
    float lo, hi;

    static __device__ __forceinline__ Pair widen(u32 codes) {
        Pair v;
        e5m2::widen2(codes, v.lo, v.hi);
        return v;
    }
    static __device__ __forceinline__ Pair power(int k_lo, int k_hi) {
        return {as_float((u32)(k_lo + 127) << 23), as_float((u32)(k_hi + 127) << 23)};
    }
    static __device__ __forceinline__ Pair nan() { return {as_float(kNanF32), as_float(kNanF32)}; }
    __device__ __forceinline__ Pair times(const Pair& f) const { return {mul_rn(lo, f.lo), mul_rn(hi, f.hi)}; }
    __device__ __forceinline__ void raise(const Pair& v) { lo = max_number(lo, magnitude(v.lo)), hi = max_number(hi, magnitude(v.hi)); }
    __device__ __forceinline__ u32 narrow() const { return e5m2::narrow2(lo, hi); }
    __device__ __forceinline__ u32 f32_bits(int i) const { return as_bits(i ? hi : lo); }
};

// f16: half the instructions. The narrowing after it is the only rounding that counts: a product that f16 does not hold is below 2^-20,
// far below half of the smallest e4m3.
template <> struct Pair<e4m3fn> {
    static constexpr int kEmax = 8, kSpan = 14, kLow = -24, kHigh = 15;
    u32 halves;

    static __device__ __forceinline__ Pair widen(u32 codes) {
#ifdef CUPY_FP8_HARDWARE_CVT
        Pair v;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v.halves) : "h"((u16)codes));
        return v;
#else
        float lo, hi;
        e4m3fn::widen2(codes, lo, hi);
        return {f16::narrow2(lo, hi)};
#endif
    }
    static __device__ __forceinline__ u32 half(int k) { return k >= -14 ? (u32)(k + 15) << 10 : 1u << (k + 24); }
    static __device__ __forceinline__ Pair power(int k_lo, int k_hi) { return {half(k_lo) | half(k_hi) << 16}; }
    static __device__ __forceinline__ Pair nan() { return {kNanF16 * 0x10001u}; }
    __device__ __forceinline__ Pair times(const Pair& f) const {
#ifdef CUPY_FP8_HOST
        float lo, hi, f_lo, f_hi;
        f16::widen2(halves, lo, hi);
        f16::widen2(f.halves, f_lo, f_hi);
        return {f16::narrow2(mul_rn(lo, f_lo), mul_rn(hi, f_hi))};
#else
        Pair v;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v.halves) : "r"(halves), "r"(f.halves));
        return v;
#endif
    }
    __device__ __forceinline__ void raise(const Pair& v) { halves = f16::max_magnitudes<false>(halves, v.halves & f16::kMagnitudes); }
    __device__ __forceinline__ u32 narrow() const {
#ifdef CUPY_FP8_HARDWARE_CVT
        u16 codes;
        asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(halves));
        return codes;
#else
        float lo, hi;
        f16::widen2(halves, lo, hi);
        return e4m3fn::narrow2(lo, hi);
#endif
    }
    __device__ __forceinline__ u32 f32_bits(int i) const { return as_bits(f16::widen(i ? halves >> 16 : halves & 0xffffu)); }
};
