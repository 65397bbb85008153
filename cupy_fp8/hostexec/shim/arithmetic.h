// Bit operations and exactly defined arithmetic of CUDA's device library.
// Only functions whose result the GPU defines to the last bit are here; approximations (__expf, rsqrtf, ...)
// are left out on purpose, so that a kernel using one does not compile on the host.
#pragma once

// ---- bits ----
HOST_INLINE unsigned __float_as_uint(float v) { return (unsigned)host_to_bits(v); }
HOST_INLINE int __float_as_int(float v) { return (int)host_to_bits(v); }
HOST_INLINE float __uint_as_float(unsigned v) { return host_from_bits<float>(v); }
HOST_INLINE float __int_as_float(int v) { return host_from_bits<float>((unsigned)v); }
HOST_INLINE long long __double_as_longlong(double v) { return (long long)host_to_bits(v); }
HOST_INLINE double __longlong_as_double(long long v) { return host_from_bits<double>((uint64_t)v); }

HOST_INLINE int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
HOST_INLINE int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
HOST_INLINE int __ffs(int v) { return __builtin_ffs(v); }
HOST_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
HOST_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
HOST_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
HOST_INLINE unsigned __brev(unsigned v) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (v >> i & 1) << (31 - i);
    return result;
}
HOST_INLINE unsigned long long __brevll(unsigned long long v) {
    return (unsigned long long)__brev((unsigned)v) << 32 | __brev((unsigned)(v >> 32));
}
// prmt: nibble i of the selector picks a byte of {high, low}; bit 3 of the nibble replicates that byte's
// sign instead.
HOST_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> (4 * i) & 15;
        unsigned byte = (unsigned)(bytes >> (8 * (pick & 7))) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
HOST_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
HOST_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
HOST_INLINE unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return shift >= 32 ? low : (unsigned)(((uint64_t)high << 32 | low) << shift >> 32);
}
HOST_INLINE unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return shift >= 32 ? high : (unsigned)(((uint64_t)high << 32 | low) >> shift);
}
HOST_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
HOST_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
HOST_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
HOST_INLINE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }

// ---- float arithmetic, one rounding each (kernels are compiled with -ffp-contract=off) ----
HOST_INLINE float __fadd_rn(float a, float b) { return a + b; }
HOST_INLINE float __fsub_rn(float a, float b) { return a - b; }
HOST_INLINE float __fmul_rn(float a, float b) { return a * b; }
HOST_INLINE float __fdiv_rn(float a, float b) { return a / b; }
HOST_INLINE float __frcp_rn(float a) { return 1.0f / a; }
HOST_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
HOST_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HOST_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HOST_INLINE float sqrtf(float a) { return __builtin_sqrtf(a); }
HOST_INLINE double __dadd_rn(double a, double b) { return a + b; }
HOST_INLINE double __dmul_rn(double a, double b) { return a * b; }
HOST_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
HOST_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
HOST_INLINE float fabsf(float a) { return __builtin_fabsf(a); }
HOST_INLINE double fabs(double a) { return __builtin_fabs(a); }
HOST_INLINE float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
HOST_INLINE float rintf(float a) { return __builtin_rintf(a); }
HOST_INLINE float floorf(float a) { return __builtin_floorf(a); }
HOST_INLINE float ceilf(float a) { return __builtin_ceilf(a); }
HOST_INLINE float truncf(float a) { return __builtin_truncf(a); }
HOST_INLINE float ldexpf(float a, int e) { return __builtin_ldexpf(a, e); }
HOST_INLINE bool isnan(float a) { return a != a; }
HOST_INLINE bool isinf(float a) { return __builtin_isinf(a); }
HOST_INLINE bool isfinite(float a) { return __builtin_isfinite(a); }

// ---- conversions: out-of-range values saturate, NaN becomes 0 (a plain C++ cast is undefined there) ----
#define HOST_FLOAT_TO(name, From, To, round, low, high, lowest, highest) \
    HOST_INLINE To name(From v) {                                                \
        return v != v ? (To)0 : v <= low ? lowest : v >= high ? highest : (To)round(v); \
    }
#define HOST_FLOAT_TO_32(suffix, f_round, d_round)                                                         \
    HOST_FLOAT_TO(__float2int_##suffix, float, int, f_round, -0x1p31f, 0x1p31f, INT32_MIN, INT32_MAX) \
    HOST_FLOAT_TO(__float2uint_##suffix, float, unsigned, f_round, 0.0f, 0x1p32f, 0u, UINT32_MAX)  \
    HOST_FLOAT_TO(__double2int_##suffix, double, int, d_round, -0x1p31, 0x1p31 - 1, INT32_MIN, INT32_MAX)
HOST_FLOAT_TO_32(rn, __builtin_rintf, __builtin_rint)
HOST_FLOAT_TO_32(rz, __builtin_truncf, __builtin_trunc)
HOST_FLOAT_TO_32(ru, __builtin_ceilf, __builtin_ceil)
HOST_FLOAT_TO_32(rd, __builtin_floorf, __builtin_floor)
HOST_FLOAT_TO(__float2ll_rn, float, long long, __builtin_rintf,
              -0x1p63f, 0x1p63f, INT64_MIN, INT64_MAX)
HOST_FLOAT_TO(__float2ll_rz, float, long long, __builtin_truncf,
              -0x1p63f, 0x1p63f, INT64_MIN, INT64_MAX)
#undef HOST_FLOAT_TO_32
#undef HOST_FLOAT_TO
HOST_INLINE float __int2float_rn(int v) { return (float)v; }
HOST_INLINE float __uint2float_rn(unsigned v) { return (float)v; }
HOST_INLINE float __ll2float_rn(long long v) { return (float)v; }
HOST_INLINE float __ull2float_rn(unsigned long long v) { return (float)v; }
HOST_INLINE float __double2float_rn(double v) { return (float)v; }
HOST_INLINE float __saturatef(float v) { return v != v ? 0.0f : v < 0.0f ? 0.0f : v > 1.0f ? 1.0f : v; }

// ---- minimum and maximum: the operand that is not NaN, -0 below +0, two NaNs give 0x7fffffff ----
HOST_INLINE float fmaxf(float a, float b) {
    if (a != a) return b != b ? __uint_as_float(0x7fffffffu) : b;
    if (b != b) return a;
    if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
    return a > b ? a : b;
}
HOST_INLINE float fminf(float a, float b) {
    if (a != a) return b != b ? __uint_as_float(0x7fffffffu) : b;
    if (b != b) return a;
    if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
    return a < b ? a : b;
}
#define HOST_MIN_MAX(A, B, R)                                                        \
    HOST_INLINE R min(A a, B b) { return (R)b < (R)a ? (R)b : (R)a; }                \
    HOST_INLINE R max(A a, B b) { return (R)b > (R)a ? (R)b : (R)a; }
HOST_MIN_MAX(int, int, int)
HOST_MIN_MAX(unsigned, unsigned, unsigned)
HOST_MIN_MAX(int, unsigned, unsigned)
HOST_MIN_MAX(unsigned, int, unsigned)
HOST_MIN_MAX(long, long, long)
HOST_MIN_MAX(unsigned long, unsigned long, unsigned long)
HOST_MIN_MAX(long long, long long, long long)
HOST_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
HOST_MIN_MAX(double, double, double)
#undef HOST_MIN_MAX
HOST_INLINE float min(float a, float b) { return fminf(a, b); }
HOST_INLINE float max(float a, float b) { return fmaxf(a, b); }
HOST_INLINE int abs(int v) { return v < 0 ? -v : v; }
HOST_INLINE long long llabs(long long v) { return v < 0 ? -v : v; }
HOST_INLINE float abs(float v) { return __builtin_fabsf(v); }
