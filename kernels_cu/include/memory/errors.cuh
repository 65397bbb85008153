// Every device has a sticky word of errors in facts that only the device knows (split sizes, indices, ...). A
// kernel goes on with a harmless reading of a wrong fact and sets a bit. Python looks only when it is asked
// to (cupy_fp8.device_errors).
#pragma once
#include "numerics/types.cuh"

// The bits of cupy_fp8.kernels.errors.Fact (a test compares them).
constexpr u32 kSplitNegative = 1u << 0, kSplitSum = 1u << 1, kScaleNotPowerOfTwo = 1u << 2,
              kOffsetOverflow = 1u << 3, kOrder = 1u << 4,
              kRouteExpert = 1u << 5, kRouteBound = 1u << 6, kSplitStart = 1u << 7,
              kSplitOther = 1u << 8, kGateExpert = 1u << 9, kRankLate = 1u << 10;

// One thread that knows of the error calls it.
__device__ __forceinline__ void report(u32* errors, u32 bits) {
    if (bits) atomicOr(errors, bits);
}
