// Functions of CUDA's device library that kernels and tests call: bit operations and conversions that the GPU
// defines to the last bit. Other float arithmetic goes through numerics/arith.cuh. Approximations (__expf,
// rsqrtf, ...) must not be added, so that a kernel using one does not compile on the host.
#pragma once

HOST_INLINE unsigned __float_as_uint(float v) { return (unsigned)host_to_bits(v); }
HOST_INLINE float __uint_as_float(unsigned v) { return host_from_bits<float>(v); }
HOST_INLINE long long __double_as_longlong(double v) { return (long long)host_to_bits(v); }
HOST_INLINE double __longlong_as_double(long long v) { return host_from_bits<double>((uint64_t)v); }

HOST_INLINE int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
HOST_INLINE int __ffs(int v) { return __builtin_ffs(v); }
HOST_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
// prmt: nibble i of the selector picks a byte of {high, low}; bit 3 of the nibble replicates that byte's sign
// instead.
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

HOST_INLINE double fabs(double a) { return __builtin_fabs(a); }
// Out-of-range values saturate and NaN becomes 0; a plain C++ cast is undefined there.
HOST_INLINE int __float2int_rz(float v) {
    return v != v ? 0 : v <= -0x1p31f ? INT32_MIN : v >= 0x1p31f ? INT32_MAX : (int)v;
}
