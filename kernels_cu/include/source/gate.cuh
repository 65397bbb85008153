// Formulas of sources that are an activation: act(a), or act(a) * b of the halves a and b of a row of x
// (docs/numerics.md, section 9). In f32, each operation rounded:
//
//   y = act(a) [* b] [* p]              p: the row's weight
//   da = (g [* b]) * act'(a)            g: the gradient of y, times p
//   db = g * act(a)                     dp = the sum of (g * act(a)) * b, where g is not yet times p
//
// An activation is a struct of functions. act and act' of a are computed from a term, such as sigma(a); terms
// of several elements are found together:
//   terms(v)                   replaces each v by its term: four or eight elements (path any, rows.cuh)
//   terms(v, raw)              the same for eight; raw: their bits in x, for a quicker test (stream.cuh)
//   terms_of(a, alpha, is_scaled, v)        v receives the terms of alpha * a; is_scaled: alpha is not 1. For
//                              gated sources with programs for options (gpt_oss: a * f(alpha * a) instead of
//                              a * f(a))
//   activation(a, term), derivative(alpha * a, term)
// Path any has those of any_kind.cuh, for every activation.
// act(0) is 0, since absent elements are zeros and count for every amax. Values and gradients of finite
// numbers are finite or Inf, never NaN: intermediate overflows are bounded.
#pragma once
#include "fused/program.cuh"

// Act: an activation. kIsGated: a row of x has two halves.
template <class Act, bool kIsGated>
struct Gate : Act {
    static constexpr bool kGated = kIsGated;
    static constexpr int kHalves = 1 + kGated;
    // parts of the result: y, or the gradients of both halves
    static constexpr int kParts = kBackward ? kHalves : 1;
    // inputs per element: both halves, and grad
    static constexpr int kArrays = kHalves + kBackward;

    // v: a, b and grad of several elements; i: index of this element
    template <class V>
    static __device__ __forceinline__ float gated(float act, const V& v, int i) {
        if constexpr (kGated) return mul_rn(act, v[1][i]);
        else return act;
    }
    template <class V>
    static __device__ __forceinline__ float value(const V& v, int i, float term) {
        return gated(Act::activation(v[0][i], term), v, i);
    }
    // Only gated sources have weights; 1 where rows have none, which changes no bit.
    static __device__ __forceinline__ float weighted(float y, float weight) {
        return kGated ? mul_rn(y, weight) : y;
    }
    template <class V>
    static __device__ __forceinline__ float gradient_a(const V& v, int i, float argument, float term) {
        return mul_rn(gated(v[kHalves][i], v, i), Act::derivative(argument, term));
    }
    static __device__ __forceinline__ float gradient_b(float grad, float act) { return mul_rn(grad, act); }
    template <class V>
    static __device__ __forceinline__ float gradient_weight(const V& v, int i, float act) {
        return gated(mul_rn(v[kHalves][i], act), v, i);
    }

    // Computes the gradients of eight elements. argument(a) is alpha * a. has_sums: rows have weights, and
    // add(i, term of dp) is called for each element.
    template <class Argument, class Add>
    static __device__ __forceinline__ void gradients(float (&v)[kArrays][8], const float (&terms)[8],
                                                     Argument argument, bool has_sums, float weight, Add add,
                                                     float (&values)[kParts][8]) {
        float act[8];
#pragma unroll
        for (int i = 0; i < 8; i++) act[i] = Act::activation(v[0][i], terms[i]);
        if (has_sums) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                add(i, gradient_weight(v, i, act[i]));
                v[kHalves][i] = mul_rn(v[kHalves][i], weight);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            values[0][i] = gradient_a(v, i, argument(v[0][i]), terms[i]);
            if constexpr (kGated) values[1][i] = gradient_b(v[kHalves][i], act[i]);
        }
    }
};
template <class Act, bool kIsGated>
constexpr bool kTakesRegisters<Gate<Act, kIsGated>> = kTakesRegisters<Act>;
