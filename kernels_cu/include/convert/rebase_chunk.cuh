// A chunk of rebase.cu: 16 FP8 elements, multiplied by a power of two in f16 and rounded to FP8 once.
//
// v * 2^k is exact for kLeastExactExponent <= k <= kMostExactExponent. Other k (rare) take several steps,
// whose roundings lose only what becomes 0 anyway.
//
// Changed values are counted two at a time in a word, as the f16 numbers 1024 + count, whose low bits are the
// count. Integers would take two more instructions per word of codes, on the pipeline that conversions need.
#pragma once
#include "memory/chunks.cuh"
#include "scale/power_of_two.cuh"

using Pack = Pairs<IN>;
using Chunk16 = Chunk<IN, 16>;

// All values are multiples of the format's smallest one, whose product is then still a multiple of f16's
// smallest.
constexpr int kLeastExactExponent = Pack::kEmax == 8 ? -15 : -8, kMostExactExponent = 15;
constexpr u32 kFourNan = kNanFp8 * 0x1010101u;

constexpr u32 kNoneChanged = 0x64006400u;
constexpr int kMostChangedValues = 1023;
__device__ __forceinline__ u32 sum_of(u32 counts) { return (counts & 0x3ffu) + (counts >> 16 & 0x3ffu); }

// Returns the largest magnitude of a chunk, as f32 bits. NaN is ignored.
__device__ __forceinline__ u32 largest_magnitude(const Chunk16& chunk) {
    u32 largest = 0;
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            largest = Halves::raised(largest, Pack::widen(chunk.word[w], half));
    const u32 low = largest & 0xffffu, high = largest >> 16;
    return as_bits(f16::widen(low > high ? low : high));
}

// Counts the products that differ from the values of their codes.
__device__ __forceinline__ void count_different(const u32 (&product)[2], u32 codes, u32& changed) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        changed = Halves::plus(changed, Halves::different(product[half], Pack::widen(codes, half)));
}

// Multiplies a chunk by a power of two, held twice in `power`, or by 0. Every product is exact. kCounts:
// counts the values that change.
template <bool kCounts>
__device__ __forceinline__ Chunk16 times_power(const Chunk16& from, u32 power, u32& changed) {
    Chunk16 made;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 product[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            product[half] = Halves::times(Pack::widen(from.word[w], half), power);
        made.word[w] = Pack::narrow(product[0], product[1]);
        if (kCounts) count_different(product, made.word[w], changed);
    }
    return made;
}

// Multiplies a chunk by any 2^k in three steps, and counts the values that change. An inexact product is far
// below half the smallest code, so it becomes 0 and counts as changed; some such products are 0 themselves.
__device__ __forceinline__ Chunk16 times_power_in_steps(const Chunk16& from, int k, u32& changed) {
    Chunk16 made;
    u32 power[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int step = clamp(k, -kMostExactExponent, kMostExactExponent);
        power[i] = Halves::power_pair(step), k -= step;
    }
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 product[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 value = Pack::widen(from.word[w], half);
            product[half] = value;
#pragma unroll
            for (int i = 0; i < 3; i++) product[half] = Halves::times(product[half], power[i]);
            changed = Halves::plus(changed, Halves::different(value, 0));
            changed = Halves::minus(changed, Halves::different(product[half], 0));
        }
        made.word[w] = Pack::narrow(product[0], product[1]);
        count_different(product, made.word[w], changed);
    }
    return made;
}
