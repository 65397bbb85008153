// Each number format (docs/numerics.md, rules 2 to 5) is a struct, named as `tag` in cupy_fp8/formats.py:
//   storage            the unsigned integer that holds one element
//   widen(bits)        the exact f32 value
//   narrow(value)      the code of the nearest value, ties to even. Subnormals are kept, and NaN is one fixed
//                      pattern. FP8 saturates unless kSaturate is false.
//   widen2, narrow2    the same for two elements, the first in the low half, by one instruction if the
//                      chip has it
// sm_89 and later convert FP8 in hardware; older chips, the CPU and -DCUPY_FP8_BITCODE use the integer code.
// Both agree for every input (all 2^32 on an H200).
#pragma once
#include "numerics/arith.cuh"

#if !defined(CUPY_FP8_HOST) && !defined(CUPY_FP8_BITCODE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define CUPY_FP8_HARDWARE_CVT 1
#endif

constexpr u32 kNanF32 = 0x7fc00000u, kNanBf16 = 0x7fc0u, kNanF16 = 0x7e00u, kNanFp8 = 0x7fu, kNanE8m0 = 0xffu;

// Returns the larger magnitudes of two words with two 16-bit halves each. kNan false: NaN in `next` is
// ignored, and `largest` never holds one; true: NaN wins.
template <u32 kInf, bool kNan>
__device__ __forceinline__ u32 max_halves_by_bits(u32 largest, u32 next) {
    u32 result = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
        const u32 t = largest >> shift & 0xffffu, n = next >> shift & 0xffffu;
        result |= ((kNan || n <= kInf) && n > t ? n : t) << shift;
    }
    return result;
}

struct f32 {
    using storage = u32;
    static constexpr u32 kMagnitudes = 0x7fffffffu;
    template <bool kNan>
    static __device__ __forceinline__ u32 max_magnitudes(u32 largest, u32 next) {
        return as_bits(kNan ? max_or_nan(as_float(largest), as_float(next))
                       : max_number(as_float(largest), as_float(next)));
    }
    static __device__ __forceinline__ float widen(u32 bits) { return as_float(bits); }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        return is_nan(value) ? kNanF32 : as_bits(value);
    }
};

// NaN is rare, so one branch tests the pair.
template <class F>
__device__ __forceinline__ u32 narrow2_of(float lo, float hi) {
    u32 pair = F::narrow2_any_nan(lo, hi);
    if (is_nan(lo) | is_nan(hi)) pair = F::narrow(lo) | F::narrow(hi) << 16;
    return pair;
}

struct bf16 {
    using storage = u16;
    static constexpr u32 kMagnitudes = 0x7fff7fffu;
    template <bool kNan>
    static __device__ __forceinline__ u32 max_magnitudes(u32 largest, u32 next) {
#ifdef CUPY_FP8_HOST
        return max_halves_by_bits<0x7f80u, kNan>(largest, next);
#else
        u32 r;
        if (kNan) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(largest), "r"(next));
        else asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(largest), "r"(next));
        return r;
#endif
    }
    static __device__ __forceinline__ float widen(u32 bits) { return as_float(bits << 16); }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = as_bits(value);
        return is_nan(value) ? kNanBf16 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    }
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        lo = as_float(pair << 16);
        hi = as_float(pair & 0xffff0000u);
    }
    // NaN is 0x7fff on the GPU, as the instruction makes it.
    static __device__ __forceinline__ u32 narrow2_any_nan(float lo, float hi) {
#ifdef CUPY_FP8_HOST
        return narrow(lo) | narrow(hi) << 16;
#else
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
        return pair;
#endif
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) { return narrow2_of<bf16>(lo, hi); }
};

struct f16 {
    using storage = u16;
    static constexpr u32 kMagnitudes = 0x7fff7fffu;
    template <bool kNan>
    static __device__ __forceinline__ u32 max_magnitudes(u32 largest, u32 next) {
#ifdef CUPY_FP8_HOST
        return max_halves_by_bits<0x7c00u, kNan>(largest, next);
#else
        u32 r;
        if (kNan) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(largest), "r"(next));
        else asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(largest), "r"(next));
        return r;
#endif
    }
    static __device__ __forceinline__ float widen(u32 bits) {
#ifdef CUPY_FP8_HOST
        const u32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
        if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
        // The factor 2^112 changes the bias and is exact.
        return as_float(sign | as_bits(as_float(magnitude << 13) * as_float(0x77800000u)));
#else
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
        return value;
#endif
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        if (is_nan(value)) return kNanF16;
#ifdef CUPY_FP8_HOST
        const u32 bits = as_bits(value), sign = bits >> 16 & 0x8000u;
        u32 magnitude = bits & 0x7fffffffu;
        // rounds past 65504
        if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
        // Below 2^-14 the ulp is 2^-24.
        if (magnitude < 0x38800000u)
            return sign | (as_bits(as_float(magnitude) + as_float(0x3f000000u)) - 0x3f000000u);
        return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1)) - 0x38000000u) >> 13;
#else
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#endif
    }
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        lo = widen(pair & 0xffffu);
        hi = widen(pair >> 16);
    }
    static __device__ __forceinline__ u32 narrow2_any_nan(float lo, float hi) {
#ifdef CUPY_FP8_HOST
        return narrow(lo) | narrow(hi) << 16;
#else
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
        return pair;
#endif
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) { return narrow2_of<f16>(lo, hi); }
};

// Rounds a magnitude to FP8 by integer instructions (both formats).
//   kMax, kMinNormal   the format's largest value and smallest normal, as f32 bits
//   kMagic             f32 bits of the power of two whose ulp is the format's subnormal step: adding it
//                      rounds to that step
template <int kMantissaBits, int kBias, u32 kMax, u32 kMinNormal, u32 kMagic>
__device__ __forceinline__ u32 round_to_fp8(u32 magnitude) {
    if (magnitude > kMax) magnitude = kMax;
    if (magnitude < kMinNormal) return as_bits(add_rn(as_float(magnitude), as_float(kMagic))) - kMagic;
    constexpr int kShift = 23 - kMantissaBits;
    magnitude += (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
    return (magnitude - ((127u - kBias) << 23)) >> kShift;
}

struct e4m3fn {
    using storage = u8;
    static __device__ __forceinline__ float widen(u32 bits) {
        const u32 magnitude = bits & 0x7fu, sign = (bits & 0x80u) << 24;
        if (magnitude == 0x7fu) return as_float(kNanF32);
        // The factor 2^120 changes the bias and is exact.
        return as_float(sign | as_bits(mul_rn(as_float(magnitude << 20), as_float(0x7b800000u))));
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = as_bits(value), magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return kNanFp8;
        // Values above 464 round to NaN, since the format has no Inf.
        if (!kSaturate && magnitude > 0x43e80000u) return kNanFp8;
        return (bits >> 24 & 0x80u) | round_to_fp8<3, 7, 0x43e00000u, 0x3c800000u, 0x46800000u>(magnitude);
    }
#ifdef CUPY_FP8_HARDWARE_CVT
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
        f16::widen2(halves, lo, hi);
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) {
        if (!kSaturate) return narrow<false>(lo) | narrow<false>(hi) << 8;
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
        return pair;
    }
#else
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        lo = widen(pair & 0xffu);
        hi = widen(pair >> 8 & 0xffu);
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) {
        return narrow<kSaturate>(lo) | narrow<kSaturate>(hi) << 8;
    }
#endif
};

struct e5m2 {
    using storage = u8;
    static __device__ __forceinline__ float widen(u32 bits) { return f16::widen((bits & 0xffu) << 8); }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = as_bits(value), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
        if (magnitude > 0x7f800000u) return kNanFp8;
        // Values from 61440 on round to Inf.
        if (!kSaturate && magnitude >= 0x47700000u) return sign | 0x7cu;
        return sign | round_to_fp8<2, 15, 0x47600000u, 0x38800000u, 0x43000000u>(magnitude);
    }
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        f16::widen2((pair & 0xffu) << 8 | (pair & 0xff00u) << 16, lo, hi);
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) {
#ifdef CUPY_FP8_HARDWARE_CVT
        if (kSaturate) {
            u16 pair;
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
            return pair;
        }
#endif
        return narrow<kSaturate>(lo) | narrow<kSaturate>(hi) << 8;
    }
};

struct e8m0fnu {
    using storage = u8;
    static __device__ __forceinline__ float widen(u32 bits) {
        return as_float(bits == 0 ? 0x00400000u : bits == 0xffu ? kNanF32 : bits << 23);
    }
    // Rounds upwards to a power of two. -0 becomes 0; other negative values, Inf and NaN become NaN.
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = as_bits(value), exponent = bits >> 23, mantissa = bits & 0x7fffffu;
        if (bits == 0x80000000u) return 0;
        // The sign is part of this exponent, so every negative value is here too.
        if (exponent >= 0xffu) return kNanE8m0;
        if (exponent == 0) return mantissa > 0x400000u;
        return exponent + (mantissa != 0);
    }
    static __device__ __forceinline__ void widen2(u32 pair, float& lo, float& hi) {
        lo = widen(pair & 0xffu);
        hi = widen(pair >> 8 & 0xffu);
    }
    template <bool kSaturate = true>
    static __device__ __forceinline__ u32 narrow2(float lo, float hi) { return narrow(lo) | narrow(hi) << 8; }
};
