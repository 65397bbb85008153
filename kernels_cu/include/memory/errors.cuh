// Each device has a sticky error word for facts that only the device knows (split sizes, indices, ...). On a
// wrong fact a kernel sets a bit and continues with a harmless reading of it. Python reads the word only on
// request (cupy_fp8.device_errors).
#pragma once
#include "numerics/types.cuh"

// bits of cupy_fp8.kernels.errors.Fact (compared by a test)
constexpr u32 kSplitNegative = 1u << 0, kSplitSum = 1u << 1, kScaleNotPowerOfTwo = 1u << 2,
              kOffsetOverflow = 1u << 3, kOrder = 1u << 4,
              kRouteExpert = 1u << 5, kRouteBound = 1u << 6, kSplitStart = 1u << 7,
              kSplitOther = 1u << 8, kGateExpert = 1u << 9, kRankLate = 1u << 10;

// Call from one of the threads that see the error.
__device__ __forceinline__ void report(u32* errors, u32 bits) {
    if (bits) atomicOr(errors, bits);
}
