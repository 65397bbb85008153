// Sizes of groups, which only the device knows.
#pragma once
#include "memory/errors.cuh"
#include "tile/tile.cuh"

// Loads a size of i32, or of i64 if `wide`.
__device__ __forceinline__ i64 load_size(const void* sizes, u32 wide, i64 i) {
    if (wide) return load_read_only(static_cast<const i64*>(sizes) + i);
    return load_read_only(static_cast<const i32*>(sizes) + i);
}

struct Splits {
    const void* sizes;           // [groups] i32, or i64 if `wide`; in elements
    i64 groups;
    u32* errors;                 // the device's sticky error word
    u32 wide;

    __device__ __forceinline__ i64 load(i64 i) const {
        return i < groups ? load_size(sizes, wide, i) : 0;
    }
    // Stores a size in a copy of the sizes, in their type.
    __device__ __forceinline__ void store(void* copy, i64 i, i64 size) const {
        if (wide) static_cast<i64*>(copy)[i] = size;
        else static_cast<i32*>(copy)[i] = (i32)size;
    }
};

__device__ constexpr u32 log2_of(u32 power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

__device__ __forceinline__ i64 warp_prefix_sum(i64 value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_up_sync(~0u, value, step);
        if ((int)(threadIdx.x % 32) >= step) value += other;
    }
    return value;
}

// Reports negative sizes, and sizes whose sum exceeds `total`. Call from one whole warp.
__device__ __forceinline__ void check_sizes(const Splits& splits, i64 total) {
    bool negative = false;
    i64 sum = 0;                                 // clamped to total + 1 after every round
    for (i64 round = 0; round < splits.groups; round += 32) {
        const i64 size = splits.load(round + threadIdx.x % 32);
        negative |= size < 0;
        sum += __shfl_sync(~0u, warp_prefix_sum(size < 0 ? 0 : size > total ? total + 1 : size), 31);
        sum = sum > total ? total + 1 : sum;
    }
    const u32 any_negative = __ballot_sync(~0u, negative);
    if (threadIdx.x % 32 == 0)
        report(splits.errors, (any_negative ? kSplitNegative : 0u) | (sum > total ? kSplitSum : 0u));
}

// Copies the sizes that a result is laid out by. Call from one whole warp.
__device__ __forceinline__ void copy_sizes(const Splits& splits, void* copy) {
    for (i64 g = threadIdx.x % 32; g < splits.groups; g += 32) splits.store(copy, g, splits.load(g));
}

// Reports sizes that differ from `own`, those an operand is laid out by (may be null). Call from one whole
// warp.
__device__ __forceinline__ void compare_sizes(const Splits& splits, const void* own, u32 wide) {
    if (!own) return;
    bool differs = false;
    for (i64 g = threadIdx.x % 32; g < splits.groups; g += 32)
        differs |= splits.load(g) != load_size(own, wide, g);
    if (differs) report(splits.errors, kSplitOther);
}

// Reports offsets [groups + 1] (may be null) of rows of `columns` elements that do not match the sizes. Not
// meaningful for sizes that check_sizes reports. Call from one whole warp.
__device__ __forceinline__ void compare_offsets(const Splits& splits, const i64* offsets, i64 columns,
                                                i64 total) {
    if (!offsets) return;
    bool differs = false;
    i64 sum = 0;                                 // clamped as in check_sizes
    for (i64 round = 0; round <= splits.groups; round += 32) {
        const i64 g = round + threadIdx.x % 32;
        i64 size = splits.load(g);
        size = size < 0 ? 0 : size > total ? total + 1 : size;
        const i64 end = warp_prefix_sum(size), start = sum + end - size;
        if (g <= splits.groups && start <= total) differs |= load_read_only(offsets + g) != start * columns;
        sum += __shfl_sync(~0u, end, 31);
        sum = sum > total ? total + 1 : sum;
    }
    if (differs) report(splits.errors, kSplitOther);
}
