// CUDA's built-in vector types, with the sizes and alignments they have on the GPU.
#pragma once
#include <stdint.h>

// always_inline, because the return address that the runtime reports must lie in the kernel, and unused
// functions must cost nothing.
#define HOST_INLINE static inline __attribute__((always_inline, unused))

extern "C" [[noreturn]] __attribute__((visibility("default"), format(printf, 1, 2)))
void host_fail(const char* format, ...);

// A GPU faults if an address is no multiple of the access size; most CPUs do not.
template <class T> HOST_INLINE void host_check_aligned(const T* memory) {
    if (reinterpret_cast<uintptr_t>(memory) % alignof(T))
        host_fail("access of %u bytes: address %p is not a multiple of %u", (unsigned)sizeof(T),
                  (const void*)memory, (unsigned)alignof(T));
}

#define HOST_VECTOR_TYPE(T, name)                                             \
    struct alignas(8) name##2 {                                               \
        T x, y;                                                               \
        inline __attribute__((always_inline)) name##2& operator=(const name##2& v) { \
            host_check_aligned(this);                                         \
            x = v.x, y = v.y;                                                 \
            return *this;                                                     \
        }                                                                     \
    };                                                                        \
    struct alignas(4) name##3 { T x, y, z; };                                 \
    struct alignas(16) name##4 {                                              \
        T x, y, z, w;                                                         \
        inline __attribute__((always_inline)) name##4& operator=(const name##4& v) { \
            host_check_aligned(this);                                         \
            x = v.x, y = v.y, z = v.z, w = v.w;                               \
            return *this;                                                     \
        }                                                                     \
    };                                                                        \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

HOST_VECTOR_TYPE(int, int)
HOST_VECTOR_TYPE(unsigned int, uint)
HOST_VECTOR_TYPE(float, float)
#undef HOST_VECTOR_TYPE
