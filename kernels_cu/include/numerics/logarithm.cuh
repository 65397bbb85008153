// log and log1p (docs/numerics.md, section 14): fixed sequences of correctly rounded f32 operations, which
// NumPy repeats (cupy_fp8/reference/numerics.py).
#pragma once
#include "numerics/arith.cuh"

constexpr u32 kSqrtHalf = 0x3f3504f3u, kSqrt2LessOne = 0x3ed413cdu, kLn2 = 0x3f317218u;

// Returns log(1 + t) for sqrt(1/2) - 1 <= t <= sqrt(2) - 1.
__device__ __forceinline__ float log_near_one(float t) {
    float q = fma_rn(as_float(0x3db2e9ecu), t, as_float(0xbe1286fdu));
    q = fma_rn(q, t, as_float(0x3e18c38fu));
    q = fma_rn(q, t, as_float(0xbe29ae10u));
    q = fma_rn(q, t, as_float(0x3e4c693eu));
    q = fma_rn(q, t, as_float(0xbe80024fu));
    q = fma_rn(q, t, as_float(0x3eaaab7au));
    q = fma_rn(q, t, as_float(0xbefffffdu));
    return fma_rn(mul_rn(t, t), q, t);
}

// Returns n as f32, exactly, for n < 2^23.
__device__ __forceinline__ float small_integer(u32 n) {
    return add_rn(as_float(0x4b000000u | n), -8388608.0f);
}

// Returns log(x) of a normal number x >= 1.
__device__ __forceinline__ float log_from_one(float x) {
    const u32 exponent = (as_bits(x) - kSqrtHalf) >> 23;
    const float reduced = as_float(as_bits(x) - (exponent << 23));
    return fma_rn(small_integer(exponent), as_float(kLn2), log_near_one(add_rn(reduced, -1.0f)));
}

// Returns log(1 + y) for 0 <= y <= 1.
__device__ __forceinline__ float log1p_of_unit(float y) {
    const bool lower = as_bits(y) < kSqrt2LessOne;
    const float t = lower ? y : mul_rn(add_rn(y, -1.0f), 0.5f), found = log_near_one(t);
    return lower ? found : add_rn(as_float(kLn2), found);
}
