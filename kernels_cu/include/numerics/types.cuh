// Fixed-width integers and bit casts: NVRTC has no <cstdint>, and every CUDA header costs compile time.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_bits(float value) { return __float_as_uint(value); }
// For integers; for floats see at_least() and at_most() in arith.cuh.
template <class T>
__device__ __forceinline__ T larger(T a, T b) { return a > b ? a : b; }
template <class T>
__device__ __forceinline__ T smaller(T a, T b) { return a < b ? a : b; }
// align: a power of two.
template <class T>
__device__ __forceinline__ T aligned_up(T n, T align) { return (n + align - 1) & (T)(0 - align); }
