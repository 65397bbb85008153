// The activation silu(a) = a * sigma(a); terms are sigma (numerics/sigmoid.cuh).
#pragma once
#include "fused/program.cuh"
#include "numerics/sigmoid.cuh"

// bits of kQuickSigmoid
__device__ constexpr u32 quick_limit(bf16) { return 0x42aeu; }
__device__ constexpr u32 quick_limit(f16) { return 0x5570u; }
__device__ constexpr u32 quick_limit(f32) { return 0; }
// Returns the larger magnitude of each half, with an arbitrary sign; NaN is above all.
__device__ __forceinline__ u32 larger_halves(bf16, u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    return bf16::max_magnitudes<true>(a & bf16::kMagnitudes, b & bf16::kMagnitudes);
#endif
}
__device__ __forceinline__ u32 larger_halves(f16, u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    return f16::max_magnitudes<true>(a & f16::kMagnitudes, b & f16::kMagnitudes);
#endif
}
__device__ __forceinline__ u32 larger_halves(f32, u32 a, u32 b) { return a; }
// Returns true if every |a| is below kQuickSigmoid, from the bits of two 16-bit values at a time.
__device__ __forceinline__ bool all_quick(const Eight& raw) {
    if (sizeof(IN::storage) == 4) {
        float a[8];
        widen_eight(raw, a);
        return all_below(a, kQuickSigmoid);
    }
    using Load = Chunk<IN, kLoad>;
    u32 amax = raw[0].word[0];
#pragma unroll
    for (int i = 1; i < 8 / Load::kPerWord; i++)
        amax = larger_halves(IN{}, amax, raw[i / Load::kWords].word[i % Load::kWords]);
    return !((amax & 0x7fff7fffu) + (0x8000u - quick_limit(IN{})) * 0x10001u & 0x80008000u);
}

// 1.702 * 51 < kQuickSigmoid
constexpr float kQuickGptOss = 51.0f;

struct Silu {
    template <int kCount>
    static __device__ __forceinline__ void terms(float (&v)[kCount]) { sigmoids(v); }
    // v is raw, widened.
    static __device__ __forceinline__ void terms(float (&v)[8], const Eight& raw) {
        sigmoids(v, all_quick(raw));
    }
    static __device__ __forceinline__ void terms_of(const float (&a)[8], float alpha, bool is_scaled,
                                                    float (&v)[8]) {
        const bool quick = all_below(a, is_scaled ? kQuickGptOss : kQuickSigmoid);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = mul_rn(alpha, a[i]);
        sigmoids(v, quick);
    }
    static __device__ __forceinline__ float activation(float a, float sigma) { return mul_rn(a, sigma); }
    static __device__ __forceinline__ float derivative(float v, float sigma) {
        const float rest = mul_rn(v, fma_rn(sigma, -1.0f, 1.0f));    // v * (1 - sigma)
        return mul_rn(sigma, add_rn(1.0f, rest));
    }
};
