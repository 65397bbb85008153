// Sums of floats follow the fixed tree (docs/numerics.md, rule 11), which adds adjacent pairs by index, level
// by level. Absent terms are -0, the neutral element of addition, so a tree of any power-of-two height at a
// multiple of its height computes the same bytes. TreeSum adds up a thread's terms, warp_tree_sum those of a
// warp's lanes, and RunningTreeSum any number of sums that come in order.
#pragma once
#include "numerics/arith.cuh"

constexpr u32 kAbsentTerm = 0x80000000u;                             // -0

// Adds up kTerms terms, a power of two, by the tree. Callers add(i, term) for i = 0, 1, ..., and then sum()
// is complete. Indices are constants after unrolling, so a partial sum is a register that lives only as long
// as needed.
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

// Returns the sum over the lanes of a warp to every lane. The order of the two terms of a sum does not
// matter.
__device__ __forceinline__ float warp_tree_sum(float term) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) term = add_rn(term, __shfl_xor_sync(~0u, term, step));
    return term;
}

// Adds up terms whose number the compiler does not know, by the tree: it is a binary counter. Callers add(0,
// term), add(1, term), ..., and then total(how many) is their sum. A term may be the sum of a subtree, if all
// of them have the same height. It lies in shared memory, since indices of registers must be constants.
struct RunningTreeSum {
    static constexpr int kLevels = 32;                               // for 2^32 terms
    float partial[kLevels];                                          // of 2^level terms each

    __device__ __forceinline__ void add(i64 i, float term) {
        int level = 0;
        for (i64 rest = i; rest & 1; rest >>= 1) term = add_rn(partial[level++], term);
        partial[level] = term;
    }
    // Adds up the levels of the counter, from the lowest to the highest. No terms have the sum +0.
    __device__ __forceinline__ float total(i64 terms) const {
        float sum = as_float(kAbsentTerm);
        int level = 0;
        for (i64 rest = terms; rest; rest >>= 1, level++)
            if (rest & 1) sum = add_rn(partial[level], sum);
        return terms ? sum : 0.0f;
    }
};
