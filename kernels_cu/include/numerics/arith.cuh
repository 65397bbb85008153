// The f32 operations that produce values (docs/numerics.md, rule 1): correctly rounded, subnormals kept,
// never contracted. CuPy compiles with -ftz=true, so a plain `a * b` flushes subnormals, but inline PTX keeps
// its own modifiers. Every operation on the way to an output byte goes through these functions; a test looks
// for .ftz in the PTX of every kernel.
#pragma once
#include "numerics/types.cuh"

#ifdef CUPY_FP8_HOST
__device__ __forceinline__ float mul_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float add_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float div_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ float sqrt_rn(float a) { return __builtin_sqrtf(a); }
__device__ __forceinline__ float reciprocal(float d) { return 1.0f / d; }
__device__ __forceinline__ float corrected_quotient(float a, float s, float r, float q) {
    return __builtin_fmaf(-__builtin_fmaf(s, q, -a), r, q);
}
__device__ __forceinline__ float absolute(float a) { return __builtin_fabsf(a); }
__device__ __forceinline__ u32 with_sign_turned(u32 bits) { return bits ^ 0x80000000u; }
__device__ __forceinline__ bool has_bits(float a, u32 bits) { return as_bits(a) == bits; }
__device__ __forceinline__ bool is_nan(float a) { return a != a; }
__device__ __forceinline__ bool is_less(float a, float b) { return a < b; }
__device__ __forceinline__ float one_unless_at_most_zero(float a) { return a <= 0.0f ? 0.0f : 1.0f; }
// Returns the operand that is not NaN, like PTX max.f32. Both are magnitudes, so the order of zeros does not
// matter.
__device__ __forceinline__ float max_number(float a, float b) {
    return a != a ? b : (b != b || a > b ? a : b);
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    return as_float(as_bits(a) > as_bits(b) ? as_bits(a) : as_bits(b));
}
// Returns NaN if either operand is NaN.
__device__ __forceinline__ float at_most(float a, float b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ float at_least(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ u32 raised_magnitude(u32 largest, float v) {
    return as_bits(max_number(as_float(largest), __builtin_fabsf(v)));
}
template <int kCount>
__device__ __forceinline__ bool all_below(const float (&v)[kCount], float limit) {
    for (const float each : v)
        if (!(__builtin_fabsf(each) < limit)) return false;
    return true;
}
__device__ __forceinline__ void mark_above(u32& marks, u32 mark, float v, float limit) {
    if (v > limit) marks |= mark;
}
__device__ __forceinline__ bool none_beyond(const float (&a)[8], const float (&b)[8], float limit) {
    for (int i = 0; i < 8; i++)
        if (a[i] > limit || __builtin_fabsf(b[i]) > limit) return false;
    return true;
}
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
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
__device__ __forceinline__ float sqrt_rn(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
// Returns 1 / d, correctly rounded, for 1 <= |d| < 2^126: the instructions of rcp.rn without its range test.
// One Newton step takes every estimate within an ulp to the nearest float (tests/numerics/test_sigmoid.py
// tries all), except for 0.5 as the reciprocal of 2^k * (2 - 2^-23); rcp.approx never gives that estimate,
// since rcp.rn would be wrong too.
__device__ __forceinline__ float reciprocal(float d) {
    float r;
    asm("{\n\t.reg .f32 e;\n\trcp.approx.ftz.f32 %0, %1;\n\tneg.f32 e, %1;\n\t"
        "fma.rn.f32 e, e, %0, 0f3F800000;\n\tfma.rn.f32 %0, e, %0, %0;\n\t}"
        : "=&f"(r) : "f"(d));
    return r;
}
// Returns q + (a - s * q) * r, with the exact remainder. The sign is flipped in assembly too, since the
// compiler would use neg.ftz.f32.
__device__ __forceinline__ float corrected_quotient(float a, float s, float r, float q) {
    asm("{\n\t.reg .f32 n;\n\tneg.f32 n, %1;\n\tfma.rn.f32 n, %2, %0, n;\n\t"
        "neg.f32 n, n;\n\tfma.rn.f32 %0, n, %3, %0;\n\t}"
        : "+f"(q) : "f"(a), "f"(s), "f"(r));
    return q;
}
// Returns |a| as a float. From an integer mask NVRTC would make abs.ftz.f32.
__device__ __forceinline__ float absolute(float a) {
    float r;
    asm("abs.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
// In assembly for the same reason: where the bits are those of a float, NVRTC makes neg.ftz.f32 of the first
// and setp.eq.ftz.f32 of the second.
__device__ __forceinline__ u32 with_sign_turned(u32 bits) {
    u32 r;
    asm("xor.b32 %0, %1, 0x80000000;" : "=r"(r) : "r"(bits));
    return r;
}
__device__ __forceinline__ bool has_bits(float a, u32 bits) {
    u32 equal;
    asm("{\n\t.reg .pred q;\n\tsetp.eq.u32 q, %1, %2;\n\tselp.u32 %0, 1, 0, q;\n\t}"
        : "=r"(equal) : "r"(as_bits(a)), "r"(bits));
    return equal;
}
// Bits are compared, because a comparison of floats would be compiled with .ftz.
__device__ __forceinline__ bool is_nan(float a) { return (as_bits(a) & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_less(float a, float b) {
    const i32 a_bits = (i32)as_bits(a), b_bits = (i32)as_bits(b);
    const i32 a_order = a_bits < 0 ? -(a_bits & 0x7fffffff) : a_bits;
    const i32 b_order = b_bits < 0 ? -(b_bits & 0x7fffffff) : b_bits;
    return !is_nan(a) && !is_nan(b) && a_order < b_order;            // -0 == +0
}
// Returns 0 for a <= 0, otherwise 1 (also for NaN).
__device__ __forceinline__ float one_unless_at_most_zero(float a) {
    u32 r;
    asm("{\n\t.reg .pred q;\n\tsetp.gtu.f32 q, %1, 0f00000000;\n\t"
        "selp.b32 %0, 0x3f800000, 0, q;\n\t}" : "=r"(r) : "r"(as_bits(a)));
    return as_float(r);
}
// Operands are passed as integers: NVRTC 12.9 uses abs.ftz.f32 where an integer-masked magnitude becomes a
// float operand.
__device__ __forceinline__ float max_number(float a, float b) {
    u32 r;
    asm("max.f32 %0, %1, %2;" : "=r"(r) : "r"(as_bits(a)), "r"(as_bits(b)));
    return as_float(r);
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
    u32 r;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(r) : "r"(as_bits(a)), "r"(as_bits(b)));
    return as_float(r);
}
// Returns NaN if either operand is NaN.
__device__ __forceinline__ float at_most(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float at_least(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// Returns max_number(largest, |v|) as bits: one instruction.
__device__ __forceinline__ u32 raised_magnitude(u32 largest, float v) {
    asm("{\n\t.reg .f32 m;\n\tabs.f32 m, %1;\n\tmax.f32 %0, %0, m;\n\t}" : "+r"(largest) : "f"(v));
    return largest;
}
// Returns true if every |v| is below limit; false for NaN. One instruction per value.
__device__ __forceinline__ bool all_below(const float (&v)[4], float limit) {
    u32 all;
    asm("{\n\t.reg .pred q;\n\t.reg .f32 m;\n\t"
        "abs.f32 m, %1;\n\tsetp.lt.f32 q, m, %5;\n\tabs.f32 m, %2;\n\tsetp.lt.and.f32 q, m, %5, q;\n\t"
        "abs.f32 m, %3;\n\tsetp.lt.and.f32 q, m, %5, q;\n\tabs.f32 m, %4;\n\tsetp.lt.and.f32 q, m, %5, q;\n\t"
        "selp.u32 %0, 1, 0, q;\n\t}"
        : "=r"(all) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(limit));
    return all;
}
__device__ __forceinline__ bool all_below(const float (&v)[8], float limit) {
    return all_below({v[0], v[1], v[2], v[3]}, limit) & all_below({v[4], v[5], v[6], v[7]}, limit);
}
// marks |= mark if v > limit (false for NaN).
__device__ __forceinline__ void mark_above(u32& marks, u32 mark, float v, float limit) {
    asm("{\n\t.reg .pred q;\n\tsetp.gt.f32 q, %1, %2;\n\t@q or.b32 %0, %0, %3;\n\t}"
        : "+r"(marks) : "r"(as_bits(v)), "f"(limit), "r"(mark));
}
// none_beyond(): true if no a and no |b| is above limit; NaN is not above. One instruction per value.
__device__ __forceinline__ u32 none_beyond_of_four(float a, float b, float c, float d, float limit) {
    u32 none;
    asm("{\n\t.reg .pred q;\n\t"
        "setp.leu.f32 q, %1, %5;\n\tsetp.leu.and.f32 q, %2, %5, q;\n\tsetp.leu.and.f32 q, %3, %5, q;\n\t"
        "setp.leu.and.f32 q, %4, %5, q;\n\tselp.u32 %0, 1, 0, q;\n\t}"
        : "=r"(none) : "f"(a), "f"(b), "f"(c), "f"(d), "f"(limit));
    return none;
}
__device__ __forceinline__ u32 no_magnitude_beyond_of_four(float a, float b, float c, float d, float limit) {
    u32 none;
    asm("{\n\t.reg .pred q;\n\t.reg .f32 m;\n\t"
        "abs.f32 m, %1;\n\tsetp.leu.f32 q, m, %5;\n\tabs.f32 m, %2;\n\tsetp.leu.and.f32 q, m, %5, q;\n\t"
        "abs.f32 m, %3;\n\tsetp.leu.and.f32 q, m, %5, q;\n\t"
        "abs.f32 m, %4;\n\tsetp.leu.and.f32 q, m, %5, q;\n\t"
        "selp.u32 %0, 1, 0, q;\n\t}"
        : "=r"(none) : "f"(a), "f"(b), "f"(c), "f"(d), "f"(limit));
    return none;
}
__device__ __forceinline__ bool none_beyond(const float (&a)[8], const float (&b)[8], float limit) {
    return none_beyond_of_four(a[0], a[1], a[2], a[3], limit)
           & none_beyond_of_four(a[4], a[5], a[6], a[7], limit)
           & no_magnitude_beyond_of_four(b[0], b[1], b[2], b[3], limit)
           & no_magnitude_beyond_of_four(b[4], b[5], b[6], b[7], limit);
}
#endif

// Returns a - b, rounded once.
__device__ __forceinline__ float sub_rn(float a, float b) { return fma_rn(b, -1.0f, a); }

// Returns true for a finite value above zero.
__device__ __forceinline__ bool is_positive_number(float a) { return as_bits(a) - 1u < 0x7f7fffffu; }
__device__ __forceinline__ bool is_infinite(float a) { return (as_bits(a) & 0x7fffffffu) == 0x7f800000u; }
__device__ __forceinline__ float magnitude(float a) { return as_float(as_bits(a) & 0x7fffffffu); }

// Returns a / s, correctly rounded: div.rn itself makes two corrections by exact remainders once it has a
// reciprocal. Remainders are negated so that -0 stays -0. r: fl(1 / s). With has_quick_quotients(s), a
// quotient whose remainder underflows is below 2^-40 and thus 0 in every FP8 format; for other s the result
// may be wrong.
__device__ __forceinline__ float quick_quotient(float a, float s, float r) {
    return corrected_quotient(a, s, r, corrected_quotient(a, s, r, mul_rn(a, r)));
}
// Returns a value with the same FP8 code as a / s, for which one correction suffices. Tried for every
// significand of s with the four nearest floats a on either side of every value at which the code changes;
// tests/numerics/test_sigmoid.py repeats that for some s.
__device__ __forceinline__ float quick_quotient_of_codes(float a, float s, float r) {
    return corrected_quotient(a, s, r, mul_rn(a, r));
}
// True for 2^-80 <= s < 2^100.
__device__ __forceinline__ bool has_quick_quotients(float s) {
    return as_bits(s) - 0x17800000u < 0x5a000000u;
}
