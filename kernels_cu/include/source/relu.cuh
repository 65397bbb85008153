// The activations relu(a) = max(a, 0) and relu2(a) = relu(a)^2, which need no terms. NaN stays NaN.
#pragma once
#include "fused/program.cuh"

struct Relu {
    template <int kCount>
    static __device__ __forceinline__ void terms(float (&)[kCount]) {}
    static __device__ __forceinline__ void terms(float (&)[8], const Eight&) {}
    static __device__ __forceinline__ float activation(float a, float) { return at_least(a, 0.0f); }
    static __device__ __forceinline__ float derivative(float a, float) { return one_unless_at_most_zero(a); }
};

struct Relu2 : Relu {
    static __device__ __forceinline__ float activation(float a, float) {
        const float r = at_least(a, 0.0f);
        return mul_rn(r, r);
    }
    // bounded: Inf times a gradient of 0 would be NaN
    static __device__ __forceinline__ float derivative(float a, float) {
        return at_most(mul_rn(at_least(a, 0.0f), 2.0f), as_float(0x7f7fffffu));
    }
};
