// The value-producing f32 operations (docs/numerics.md, rule 1): each correctly rounded, subnormals kept, never contracted.
// CuPy compiles with -ftz=true, so a plain `a * b` flushes subnormals; inline PTX keeps its own modifiers. Every operation on
// the path to an output byte goes through these names (a test looks for .ftz in the PTX of every kernel).
#pragma once
#include "types.cuh"

#ifdef CUPY_FP8_HOST
__device__ __forceinline__ float mul_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float add_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float div_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float corrected_quotient(float a, float s, float r, float q) {
    return __builtin_fmaf(-__builtin_fmaf(s, q, -a), r, q);
}
__device__ __forceinline__ bool is_nan(float a) { return a != a; }
__device__ __forceinline__ bool is_less(float a, float b) { return a < b; }
// The operand that is not NaN, as PTX max.f32 does; both operands are magnitudes here, so the order of zeros never matters.
__device__ __forceinline__ float max_number(float a, float b) { return a != a ? b : (b != b || a > b ? a : b); }
#else
__device__ __forceinline__ float mul_rn(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float add_rn(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float div_rn(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// q + (a - s * q) * r, with the exact remainder. In assembly to the end: of a sign that is turned outside of it the compiler makes
// neg.ftz.f32.
__device__ __forceinline__ float corrected_quotient(float a, float s, float r, float q) {
    asm("{\n\t.reg .f32 n;\n\tneg.f32 n, %1;\n\tfma.rn.f32 n, %2, %0, n;\n\tneg.f32 n, n;\n\tfma.rn.f32 %0, n, %3, %0;\n\t}"
        : "+f"(q) : "f"(a), "f"(s), "f"(r));
    return q;
}
// On the bits: a comparison of floats would be compiled with .ftz.
__device__ __forceinline__ bool is_nan(float a) { return (as_bits(a) & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_less(float a, float b) {
    const i32 a_bits = (i32)as_bits(a), b_bits = (i32)as_bits(b);
    const i32 a_order = a_bits < 0 ? -(a_bits & 0x7fffffff) : a_bits, b_order = b_bits < 0 ? -(b_bits & 0x7fffffff) : b_bits;
    return !is_nan(a) && !is_nan(b) && a_order < b_order;            // zeros of both signs are 0
}
// Operands as integers: where a magnitude, an integer mask, becomes a float operand, NVRTC 12.9 makes it abs.ftz.f32.
__device__ __forceinline__ float max_number(float a, float b) {
    u32 r;
    asm("max.f32 %0, %1, %2;" : "=r"(r) : "r"(as_bits(a)), "r"(as_bits(b)));
    return as_float(r);
}
#endif

// Finite and above zero: no other value has these bits.
__device__ __forceinline__ bool is_positive_number(float a) { return as_bits(a) - 1u < 0x7f7fffffu; }
__device__ __forceinline__ bool is_infinite(float a) { return (as_bits(a) & 0x7fffffffu) == 0x7f800000u; }
__device__ __forceinline__ float magnitude(float a) { return as_float(as_bits(a) & 0x7fffffffu); }

// a / s, correctly rounded like div_rn: what div.rn itself does once it has a reciprocal, two corrections by exact remainders. (Negated
// remainders: so -0 stays -0.) r: fl(1 / s). Where has_quick_quotients(s), a quotient whose remainder underflows is below 2^-40: 0 in every
// FP8 format; elsewhere it may be wrong.
__device__ __forceinline__ float quick_quotient(float a, float s, float r) {
    return corrected_quotient(a, s, r, corrected_quotient(a, s, r, mul_rn(a, r)));
}
__device__ __forceinline__ bool has_quick_quotients(float s) { return as_bits(s) - 0x17800000u < 0x5a000000u; }   // 2^-80 <= s < 2^100
