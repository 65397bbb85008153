// CUDA's built-in vector types, with the sizes and alignments they have on the GPU.
#pragma once

#define HOST_VECTOR_TYPE(T, name, a1, a2, a3, a4)                             \
    struct alignas(a1) name##1 { T x; };                                      \
    struct alignas(a2) name##2 { T x, y; };                                   \
    struct alignas(a3) name##3 { T x, y, z; };                                \
    struct alignas(a4) name##4 { T x, y, z, w; };                             \
    static inline name##1 make_##name##1(T x) { return {x}; }                 \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

HOST_VECTOR_TYPE(signed char, char, 1, 2, 1, 4)
HOST_VECTOR_TYPE(unsigned char, uchar, 1, 2, 1, 4)
HOST_VECTOR_TYPE(short, short, 2, 4, 2, 8)
HOST_VECTOR_TYPE(unsigned short, ushort, 2, 4, 2, 8)
HOST_VECTOR_TYPE(int, int, 4, 8, 4, 16)
HOST_VECTOR_TYPE(unsigned int, uint, 4, 8, 4, 16)
HOST_VECTOR_TYPE(long long, longlong, 8, 16, 8, 16)
HOST_VECTOR_TYPE(unsigned long long, ulonglong, 8, 16, 8, 16)
HOST_VECTOR_TYPE(float, float, 4, 8, 4, 16)
HOST_VECTOR_TYPE(double, double, 8, 16, 8, 16)
#undef HOST_VECTOR_TYPE

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
