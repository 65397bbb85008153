// These are CUDA's built-in vector types, with the sizes and alignments they have on the GPU.
#pragma once

#define HOST_VECTOR_TYPE(T, name)                                             \
    struct alignas(8) name##2 { T x, y; };                                    \
    struct alignas(4) name##3 { T x, y, z; };                                 \
    struct alignas(16) name##4 { T x, y, z, w; };                             \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

HOST_VECTOR_TYPE(int, int)
HOST_VECTOR_TYPE(unsigned int, uint)
HOST_VECTOR_TYPE(float, float)
#undef HOST_VECTOR_TYPE
