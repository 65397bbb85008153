// Included before every kernel: CUDA C++ for the host executor, without any of NVIDIA's headers.
//
// `__shared__` is not a macro: build.py replaces it in the preprocessed text, because `extern __shared__ T
// name[];` (dynamic shared memory) and `__shared__ T name[N];` need different declarations.
#pragma once
#define CUPY_FP8_HOST 1

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "host_abi.h"

#undef __noinline__
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (*const_cast<const uint3*>(&host_thread->thread_index))
#define blockIdx (*const_cast<const uint3*>(&host_block.block_index))
#define blockDim (*const_cast<const uint3*>(&host_block.block_dim))
#define gridDim (*const_cast<const uint3*>(&host_block.grid_dim))

#undef assert
#define assert(condition) ((condition) ? (void)0 : host_fail("assertion failed: %s", #condition))

template <int Size> struct HostBits;
template <> struct HostBits<1> { using type = uint8_t; };
template <> struct HostBits<2> { using type = uint16_t; };
template <> struct HostBits<4> { using type = uint32_t; };
template <> struct HostBits<8> { using type = uint64_t; };
template <class T> using host_bits_t = typename HostBits<sizeof(T)>::type;

// Bit casts between a value and an integer. memcpy would need variables in memory, which AddressSanitizer
// poisons and checks at every call: kernels are then slower to compile and to run.
template <class T> HOST_INLINE uint64_t host_to_bits(T value) {
    return __builtin_bit_cast(host_bits_t<T>, value);
}
template <class T> HOST_INLINE T host_from_bits(uint64_t bits) {
    return __builtin_bit_cast(T, (host_bits_t<T>)bits);
}

#include "arithmetic.h"
#include "synchronisation.h"
#include "atomics.h"
#include "async_copy.h"

// The single by-value parameter of a kernel.
template <class Function> struct HostParams {
    static_assert(sizeof(Function) == 0, "a kernel must take exactly one parameter, a struct by value");
};
template <class P> struct HostParams<void (*)(P)> { using type = P; };
