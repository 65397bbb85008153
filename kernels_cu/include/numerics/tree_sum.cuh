// Sums of floats by the fixed tree (docs/numerics.md, rule 11), which adds adjacent pairs by index, level by
// level. Absent terms are -0, the neutral element of addition, so padding to a power of two changes no byte,
// and subtrees at multiples of their size may be summed separately. TreeSum adds up a thread's terms,
// warp_tree_sum those of a warp's lanes, and RunningTreeSum any number of sums that come in order.
#pragma once
#include "numerics/arith.cuh"

constexpr u32 kAbsentTerm = 0x80000000u;                             // -0

// Adds up kTerms (a power of two) terms. Call add(i, term) for i = 0, 1, ..., then sum(). Indices are
// constants after unrolling, so a partial sum is a register that lives only as long as needed.
template <int kTerms>
struct TreeSum {
    static constexpr int kLevels = TreeSum<kTerms / 2>::kLevels + 1;
    // Element i: sum of a complete subtree of 2^i terms; the last one is the total.
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

// Returns the sum over a warp's lanes to every lane. Addition is commutative, so all lanes get the same bits.
__device__ __forceinline__ float warp_tree_sum(float term) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) term = add_rn(term, __shfl_xor_sync(~0u, term, step));
    return term;
}

// Adds up terms whose number is not known at compile time: a binary counter of subtree sums. Call add(0,
// term), add(1, term), ..., then total(number of terms). Terms may be sums of subtrees of one common height.
// Place it in shared memory, since registers cannot be indexed.
struct RunningTreeSum {
    static constexpr int kLevels = 32;                               // for 2^32 terms
    float partial[kLevels];                                          // element l: the sum of 2^l terms

    __device__ __forceinline__ void add(i64 i, float term) {
        int level = 0;
        for (i64 rest = i; rest & 1; rest >>= 1) term = add_rn(partial[level++], term);
        partial[level] = term;
    }
    // Adds up the counter's levels, from the lowest to the highest; +0 for no terms.
    __device__ __forceinline__ float total(i64 terms) const {
        float sum = as_float(kAbsentTerm);
        int level = 0;
        for (i64 rest = terms; rest; rest >>= 1, level++)
            if (rest & 1) sum = add_rn(partial[level], sum);
        return terms ? sum : 0.0f;
    }
};
