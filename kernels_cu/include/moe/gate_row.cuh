// A token's logits and scores in the gate's kernels (docs/numerics.md, section 14). One warp per token,
// kCount consecutive experts per lane. An absent expert has a NaN logit, which is no candidate.
//
// Defines of these kernels:
//   IN      the format of the logits
//   SCORE   softmax, sigmoid or sqrtsoftplus
// COUNT   experts per lane: a power of two up to 32
#pragma once
#include "memory/chunks.cuh"
#include "numerics/logarithm.cuh"
#include "numerics/sigmoid.cuh"
#include "numerics/tree_sum.cuh"

enum class Score { softmax, sigmoid, sqrtsoftplus };
constexpr Score kScore = Score::SCORE;
constexpr int kCount = COUNT, kLanes = 32, kMostExperts = kLanes * kCount;
// 16 warps, or fewer with many experts, for the sake of shared memory
constexpr int kWarps = kCount <= 4 ? 16 : 64 / kCount, kThreads = kWarps * kLanes;
// 64 registers per thread, more with many experts; these spill with 64.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocksOfEight = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kBlocksOfEight = 3;
#else
constexpr int kBlocksOfEight = 4;
#endif
constexpr int kBlocks = kCount <= 4 ? 2 : kCount > 8 ? 1 : kBlocksOfEight;
constexpr u32 kMinusInfinity = 0xff800000u, kInfinity = 0x7f800000u;
constexpr float kEpsilon = 1e-20f;                       // added to sums of scores before they divide

using Row = float[kCount];                               // one number per expert of the lane

__device__ __forceinline__ int lane_index() { return threadIdx.x % kLanes; }

// ---- rows in memory ----
// Elements per load or store in format F.
template <class F>
constexpr int kWidest = 16 / (int)sizeof(typename F::storage);
template <class F>
constexpr int kAtOnce = kCount < kWidest<F> ? kCount : kWidest<F>;

// Loads a row in format F. vector: rows consist of whole, aligned loads.
template <class F>
__device__ __forceinline__ void load_row(const typename F::storage* row, u32 experts, bool vector,
                                            Row& l) {
    const u32 first = lane_index() * kCount;
    constexpr int kLoad = kAtOnce<F>;
    if constexpr (kLoad >= 2) {
        if (vector) {
#pragma unroll
            for (int i = 0; i < kCount; i += kLoad) {
                Chunk<F, kLoad> chunk;
#pragma unroll
                for (u32& word : chunk.word) word = ~0u;             // NaN in every format of logits
                if (first + i < experts) chunk = chunk.load(row + first + i);
#pragma unroll
                for (int k = 0; k < kLoad; k += 2) chunk.widen2(k / 2, l[i + k], l[i + k + 1]);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; i++)
        l[i] = first + i < experts ? F::widen(load_read_only(row + first + i)) : as_float(0x7fc00000u);
}

// Stores a row in format F.
template <class F>
__device__ __forceinline__ void store_row(typename F::storage* row, u32 experts, bool vector, const Row& v) {
    constexpr int kStore = kAtOnce<F>;
    const u32 first = lane_index() * kCount;
    if constexpr (kStore >= 2) {
        if (vector) {
#pragma unroll
            for (int i = 0; i < kCount; i += kStore) {
                Chunk<F, kStore> chunk;
#pragma unroll
                for (int k = 0; k < kStore; k += 2) chunk.narrow2(k / 2, v[i + k], v[i + k + 1]);
                if (first + i < experts) chunk.store(row + first + i);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; i++)
        if (first + i < experts) row[first + i] = F::narrow(v[i]);
}

// ---- sums and maxima ----
// Returns the sum over all experts to every lane.
__device__ __forceinline__ float sum_of_row(const Row& v) {
    if constexpr (kCount == 1) return warp_tree_sum(v[0]);
    TreeSum<kCount < 2 ? 2 : kCount> sum;
#pragma unroll
    for (int i = 0; i < kCount; i++) sum.add(i, v[i]);
    return warp_tree_sum(sum.sum());
}

// Integers in the order of the numbers; NaN is 0, below all of them.
__device__ __forceinline__ u32 order_of(float v) {
    const u32 b = as_bits(v);
    return is_nan(v) ? 0u : (i32)b < 0 ? ~b : with_sign_turned(b);
}
__device__ __forceinline__ float from_order(u32 order) {
    return as_float((i32)order < 0 ? with_sign_turned(order) : ~order);
}

// Returns the largest number of a row to every lane; a negative NaN if there is none.
__device__ __forceinline__ float largest_of_row(const Row& v) {
    float largest = v[0];
#pragma unroll
    for (int i = 1; i < kCount; i++) largest = max_number(largest, v[i]);
    return from_order(__reduce_max_sync(~0u, order_of(largest)));
}

// ---- functions of a lane's whole row ----
// The path for rare values is a loop that rotates the array by one element per step: registers cannot be
// indexed, and unrolled the loop would be most of a kernel.
template <class Function>
__device__ __forceinline__ void one_by_one(Row& v, Function function) {
#pragma unroll 1
    for (int i = 0; i < kCount; i++) {
        const float first = function(v[0]);
#pragma unroll
        for (int k = 1; k < kCount; k++) v[k - 1] = v[k];
        v[kCount - 1] = first;
    }
}

// Replaces each magnitude by exp(-a), and NaN by 0. Those from 60 to 104, whose results are small or
// subnormal, are rare; beyond, the result is 0.
constexpr u32 kRareExp = 0x42700000u, kZeroExp = 0x42d00000u;
struct ExpOfMinus {
    __device__ __forceinline__ float operator()(float a) const {
        return as_bits(a) >= kZeroExp ? 0.0f : exp_of_minus(a);
    }
};
// Returns true if none of the rare ones occurred.
__device__ __forceinline__ bool exps_of_minus(Row& a) {
    bool rare = false;
#pragma unroll
    for (int i = 0; i < kCount; i++) rare |= as_bits(a[i]) - kRareExp < kZeroExp - kRareExp;
    if (__builtin_expect(rare, 0)) {
        one_by_one(a, ExpOfMinus());
        return false;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const ReducedExp e(a[i]);
        const float found = as_float(as_bits(e.p) + (e.shifted << 23));
        a[i] = as_bits(a[i]) >= kZeroExp ? 0.0f : found;
    }
    return true;
}

// Replaces each v >= 0 by v / d, d > 0. Quick quotients have exact remainders for usual magnitudes.
struct DividedBy {
    float d;
    __device__ __forceinline__ float operator()(float v) const { return div_rn(v, d); }
};
// quick: 2^-67 <= d < 2^16, and each v is 0 or 2^-87 <= v < 2^30.
__device__ __forceinline__ void divide_all(Row& v, float d, bool quick) {
    if (__builtin_expect(!quick, 0)) {
        one_by_one(v, DividedBy{d});
        return;
    }
    const float r = div_rn(1.0f, d);
#pragma unroll
    for (int i = 0; i < kCount; i++) v[i] = quick_quotient(v[i], d, r);
}

__device__ __forceinline__ bool divides_quickly(const Row& v, float d) {
    bool quick = as_bits(d) - 0x1e000000u < 0x47800000u - 0x1e000000u;
#pragma unroll
    for (int i = 0; i < kCount; i++)
        quick &= as_bits(v[i]) == 0 || as_bits(v[i]) - 0x14000000u < 0x4e800000u - 0x14000000u;
    return quick;
}

// ---- scores ----
// x[e] = exp(l[e] - m), m the largest logit. Returns true if each x is 0 or at least exp(-60) > 2^-87.
__device__ __forceinline__ bool softmax_terms(const Row& l, float m, Row& x) {
#pragma unroll
    for (int i = 0; i < kCount; i++) x[i] = absolute(sub_rn(m, l[i]));
    const bool usual = exps_of_minus(x);
    if ((i32)as_bits(m) >= (i32)kInfinity) {             // a NaN m is negative
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = has_bits(l[i], kInfinity) ? 1.0f : 0.0f;
    }
    return usual;
}

// Divides x by its sum, which is between 1 and the number of experts, unless all are 0.
__device__ __forceinline__ void softmax_of_terms(Row& x, float sum, bool usual) {
    divide_all(x, as_bits(sum) ? sum : 1.0f, usual);
}

struct Sigmoid {
    __device__ __forceinline__ float operator()(float a) const { return sigmoid(a); }
};
// Replaces each number by its sigma; NaN stays or becomes 0.
__device__ __forceinline__ void sigmas(Row& v) {
    bool quick = true;
#pragma unroll
    for (int i = 0; i < kCount; i++) quick &= as_bits(magnitude(v[i])) < 0x42ae0000u || is_nan(v[i]);    // 87
    if (__builtin_expect(!quick, 0)) {
        one_by_one(v, Sigmoid());
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) v[i] = quick_sigmoid(v[i]);
}

__device__ __forceinline__ void scores_of(const Row& l, Row& s) {
    if constexpr (kScore == Score::softmax) {
        const bool usual = softmax_terms(l, largest_of_row(l), s);
        softmax_of_terms(s, sum_of_row(s), usual);
        return;
    }
    if constexpr (kScore == Score::sigmoid) {
#pragma unroll
        for (int i = 0; i < kCount; i++) s[i] = l[i];
        sigmas(s);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) s[i] = absolute(l[i]);
        exps_of_minus(s);
#pragma unroll
        for (int i = 0; i < kCount; i++)
            s[i] = sqrt_rn(add_rn((i32)as_bits(l[i]) > 0 ? l[i] : 0.0f, log1p_of_unit(s[i])));
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) s[i] = is_nan(l[i]) ? 0.0f : s[i];
}

// Normalises scores to sum 1; the auxiliary loss takes their mean.
__device__ __forceinline__ void shares_of(Row& s) {
    if constexpr (kScore == Score::softmax) return;
    const float sum = add_rn(sum_of_row(s), kEpsilon);
    divide_all(s, sum, divides_quickly(s, sum));
}

// ---- slots ----
constexpr int kMostSlots = 64, kSlotsOfLane = kMostSlots / kLanes;
using Slots = float[kSlotsOfLane];                       // slots lane and lane + 32 of a lane

// Returns the sum over the first k slots to every lane.
__device__ __forceinline__ float sum_of_slots(const Slots& v, u32 k) {
    const int lane = lane_index();
    const float sum = warp_tree_sum(lane < (int)k ? v[0] : as_float(kAbsentTerm));
    if (k <= kLanes) return sum;
    return add_rn(sum, warp_tree_sum(lane + kLanes < (int)k ? v[1] : as_float(kAbsentTerm)));
}

// Writes a warp's numbers to shared memory, by expert.
__device__ __forceinline__ void put_row(float* shared, const Row& v) {
    const int first = lane_index() * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) shared[first + i] = v[i];
}
