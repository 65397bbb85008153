// The activation gelu(a) = a * Phi(a), Phi the normal distribution (numerics/erf.cuh). One tail serves both
// signs: with t = |a| and q = Phi(-t) it is max(a, 0) - t * q. Terms are -q; t is bounded where q is 0, so
// that -Inf gives 0. No branch, no division: two thirds of the instructions of (a / 2) * (1 + erf), without
// the cancellation of 1 + erf(-x).
#pragma once
#include "fused/program.cuh"
#include "numerics/erf.cuh"

struct Gelu;
template <> constexpr bool kTakesRegisters<Gelu> = true;

struct Gelu {
    template <int kCount>
    static __device__ __forceinline__ void terms(float (&v)[kCount]) {
#pragma unroll
        for (float& each : v) each = minus_normal_tail(tail_argument(each));
    }
    static __device__ __forceinline__ void terms(float (&v)[8], const Eight&) { terms(v); }
    static __device__ __forceinline__ float activation(float a, float term) {
        return fma_rn(tail_argument(a), term, at_least(a, 0.0f));
    }
    // Phi(a) + a * phi(a) is q * g(t) for a < 0, and 1 - q * g(t) otherwise, with g(t) = 1 - t * phi(t) / q.
    static __device__ __forceinline__ float derivative(float a, float term) {
        const float t = tail_argument(a);
        float minus_g = fma_rn(as_float(0x364633a7u), t, as_float(0xb834635fu));
        minus_g = fma_rn(minus_g, t, as_float(0x38d52948u));
        minus_g = fma_rn(minus_g, t, as_float(0x3b0303eeu));
        minus_g = fma_rn(minus_g, t, as_float(0xbcaf5a51u));
        minus_g = fma_rn(minus_g, t, as_float(0x3de1d94eu));
        minus_g = fma_rn(minus_g, t, as_float(0x3f22e3b6u));
        minus_g = fma_rn(minus_g, t, as_float(0x3f4c440au));
        minus_g = fma_rn(minus_g, t, -1.0f);
        const float product = mul_rn(term, minus_g);
        return (i32)as_bits(a) < 0 ? product : fma_rn(product, -1.0f, 1.0f);
    }
};
