// Path any: one program for every activation, chosen by the call (SourceCall::kind()).
#pragma once
#include "source/gelu.cuh"
#include "source/gelu_tanh.cuh"
#include "source/relu.cuh"
#include "source/silu.cuh"

// in the order of KINDS in cupy_fp8/ops/quantize/fused.py
enum class Kind : u32 { silu, gelu, gelu_tanh, relu, relu2 };
// The define ACT of path any; drivers of other paths, declared there too, need an activation.
struct AnyKind : Silu {};

// act(a) and (BACKWARD) act'(a) of some elements. kIsScaled: of a * f(alpha * a) instead of a * f(a).
template <class Act, bool kIsScaled, int kCount>
__device__ __forceinline__ void evaluate_one(float alpha, const float (&a)[kCount], float (&act)[kCount],
                                             float (&slope)[kCount]) {
    float argument[kCount], terms[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) terms[i] = argument[i] = kIsScaled ? mul_rn(alpha, a[i]) : a[i];
    Act::terms(terms);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        act[i] = Act::activation(a[i], terms[i]);
        if (kBackward) slope[i] = Act::derivative(argument[i], terms[i]);
    }
}
template <bool kIsScaled, int kCount>
__device__ __forceinline__ void evaluate(Kind kind, float alpha, const float (&a)[kCount],
                                         float (&act)[kCount], float (&slope)[kCount]) {
    switch (kind) {
        case Kind::silu: return evaluate_one<Silu, kIsScaled>(alpha, a, act, slope);
        case Kind::gelu: return evaluate_one<Gelu, false>(alpha, a, act, slope);
        case Kind::gelu_tanh: return evaluate_one<GeluTanh, false>(alpha, a, act, slope);
        case Kind::relu: return evaluate_one<Relu, false>(alpha, a, act, slope);
        default: return evaluate_one<Relu2, false>(alpha, a, act, slope);
    }
}
