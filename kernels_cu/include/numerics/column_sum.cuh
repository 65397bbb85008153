// Sums down columns follow the fixed tree (docs/numerics.md, rule 11), which adds adjacent pairs by index,
// level by level. Absent terms are -0, the neutral element of addition, so a tree of any power-of-two height
// at a multiple of its height computes the same bytes.
#pragma once
#include "numerics/arith.cuh"

constexpr u32 kAbsentTerm = 0x80000000u;                             // -0

// The tree over kTerms terms, a power of two. Callers add(i, term) for i = 0, 1, ..., and then sum() is
// complete. Indices are constants after unrolling, so a partial sum is a register that lives only as long as
// needed.
template <int kTerms>
struct TreeSum {
    static constexpr int kLevels = TreeSum<kTerms / 2>::kLevels + 1;
    // Each is the sum of a subtree of one height. The last one is the sum of all.
    float partial[kLevels];

    __device__ __forceinline__ void add(int i, float term) {
        int level = 0;
#pragma unroll
        for (int rest = i; rest & 1; rest >>= 1) term = add_rn(partial[level++], term);
        partial[level] = term;
    }
    __device__ __forceinline__ float sum() const { return partial[kLevels - 1]; }
};
template <> struct TreeSum<1> { static constexpr int kLevels = 1; };
