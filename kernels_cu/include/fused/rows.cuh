// Rows of calls without options, through registers. A tile of y, or one of each part of a gradient, comes
// from one read and one term, without branches.
#pragma once
#include "fused/patch_position.cuh"
#include "numerics/tree_sum.cuh"

// rows in flight during the computation of one, with one scale
constexpr int kRowsAhead = sizeof(IN::storage) == 2 && kBackward ? 2 : 1;

// A thread's elements for a row of its patch.
struct RawRow {
    Eight array[kArrays];        // a, b and (BACKWARD) grad
};

// Reduces kCount values of every lane over the four lanes of a subblock; each lane is left with one of them,
// the owned()-th. Each exchange halves the values of which a lane has a part.
template <int kCount, class Combine>
__device__ __forceinline__ u32 fold(const u32 (&v)[kCount], Combine combine) {
    static_assert(kCount == 2 || kCount == 4, "at most one for each lane");
    const bool upper = threadIdx.x & 1, upper_pair = threadIdx.x & 2;
    u32 kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
        const u32 sent = upper ? v[i] : v[i + kCount / 2], own = upper ? v[i + kCount / 2] : v[i];
        kept[i] = combine(own, __shfl_xor_sync(~0u, sent, 1));
    }
    if (kCount == 2) return combine(kept[0], __shfl_xor_sync(~0u, kept[0], 2));
    const u32 sent = upper_pair ? kept[0] : kept[kCount / 2 - 1];
    const u32 own = upper_pair ? kept[kCount / 2 - 1] : kept[0];
    return combine(own, __shfl_xor_sync(~0u, sent, 2));
}
template <int kCount>
__device__ __forceinline__ int owned() {
    return kCount == 2 ? threadIdx.x % 2 : threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2;
}
// The lane of this lane's subblock that owns value i of four.
__device__ __forceinline__ int owner(int i) { return threadIdx.x % 32 / 4 * 4 + i / 2 + i % 2 * 2; }

// Makes the compiler compute v here instead of at its use.
__device__ __forceinline__ void pin(float (&v)[8]) {
#ifndef CUPY_FP8_HOST
#pragma unroll
    for (float& each : v) asm volatile("" : "+f"(each));
#endif
}

// Computes eight elements' values in calls without options. Returns the sum of the terms of dp if these are
// wanted. weight: 1 without probs, which changes no bit.
template <class S>
__device__ __forceinline__ float compute(const float* sums, float weight, float (&v)[kArrays][8],
                                         const float (&terms)[8], float (&values)[kParts][8]) {
    if constexpr (!kBackward) {
#pragma unroll
        for (int i = 0; i < 8; i++) values[0][i] = S::weighted(S::value(v, i, terms[i]), weight);
        return 0.0f;
    } else {
        TreeSum<8> sum;
        S::gradients(v, terms, [](float a) { return a; }, sums, weight,
                          [&](int i, float term) { sum.add(i, term); }, values);
        return sums ? sum.sum() : 0.0f;
    }
}

__device__ __forceinline__ u32 add_bits(u32 v, u32 w) { return as_bits(add_rn(as_float(v), as_float(w))); }
// Stores the sums of kRows rows over the columns of tile `tile` across: row, row + row_stride, ... left:
// existing rows from `row` on.
template <int kRows>
__device__ __forceinline__ void store_sums(const SourceCall& call, const u32 (&sums)[kRows], i64 row,
                                           int row_stride, i64 tile, int left) {
    float total = as_float(fold(sums, add_bits));
#pragma unroll
    for (int distance = 4; distance < Tile::kColumnPatches; distance *= 2)
        total = add_rn(total, as_float(__shfl_xor_sync(~0u, as_bits(total), distance)));
    const int r = owned<kRows>() * row_stride;
    if (Tile::column_patch() < kRows && r < left)
        call.sums[tile * call.rows + row + r] = as_float(f32::narrow(total));
}

// Iterates over the rows of a patch in groups of kRows, with kAhead rows in flight during the computation of
// one. An absent row repeats the row that its registers hold, with weight 0: what is not NaN becomes 0.
// (Gradients without weights are not multiplied by anything: a repeated row is in the same maxima already.)
template <class S, int kRows, int kAhead>
class Rows {
public:
    __device__ __forceinline__ Rows(const SourceCall& call, const PatchPosition& patch)
        : left(patch.columns_left ? patch.rows_left : 0), half(call.half()),
          a(call.x + patch.row * (S::kHalves * half) + patch.column) {
        static_assert(kRows % kAhead == 0, "a row takes the registers of the one that is kAhead above it");
        if constexpr (kBackward) grad = call.grad + patch.row * half + patch.column;
        const i64 row = patch.row - Tile::patch_row() + threadIdx.x;
        const bool exists = row < call.rows;
        const float prob = call.probs && threadIdx.x < Tile::kRows && exists ? call.probs[row]
            : exists ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            raw[i] = {};
            load(0, i, raw[i]);
        }
        float* const probs = shared_probs();
        if (threadIdx.x < Tile::kRows) probs[threadIdx.x] = prob;
        __syncthreads();
    }
    // Calls use(r, values) for the rows of a group. Take groups in order.
    template <class Use>
    __device__ __forceinline__ void each(const SourceCall& call, const PatchPosition& patch, int group,
                                         Use use) {
        const float* const first_prob = shared_probs() + Tile::patch_row() + group * kRows;
        const auto prob = Chunk<f32, kRows>::load_shared(reinterpret_cast<const u8*>(first_prob));
        u32 sums[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            RawRow& in = raw[r % kAhead];
            float v[kArrays][8], terms[8], values[kParts][8];
#pragma unroll
            for (int k = 0; k < kArrays; k++) widen_eight(in.array[k], v[k]);
            if constexpr (kBackward) pin(v[S::kHalves]);
#pragma unroll
            for (int k = 0; k < S::kHalves; k++) pin(v[k]);
            load(group * kRows, r + kAhead, in);             // past the patch no row exists
#pragma unroll
            for (int i = 0; i < 8; i++) terms[i] = v[0][i];
            S::terms(terms);
            sums[r] = as_bits(compute<S>(call.sums, as_float(prob.word[r]), v, terms, values));
            use(r, values);
        }
        a += kRows * S::kHalves * half;
        if constexpr (kBackward) {
            grad += kRows * half;
            const i64 row = patch.row + group * kRows;
            if (call.sums)
                store_sums(call, sums, row, 1, patch.column / Tile::kColumns, left - group * kRows);
        }
    }

private:
    // existing rows; 0 if the columns do not exist
    int left;
    i64 half;
    const IN::storage* a;                                            // the next row to be loaded
    const IN::storage* grad;
    RawRow raw[kAhead];

    static __device__ __forceinline__ float* shared_probs() {
        __shared__ __align__(16) float probs[Tile::kRows];
        return probs;
    }
    __device__ __forceinline__ void load(int first, int r, RawRow& to) {
        const bool exists = first + r < left;
#pragma unroll
        for (int k = 0; k < S::kHalves; k++)
            load(to.array[k], a + r * (S::kHalves * half) + k * half, exists);
        if constexpr (kBackward) load(to.array[S::kHalves], grad + r * half, exists);
    }
    static __device__ __forceinline__ void load(Eight& to, const IN::storage* from, bool exists) {
#pragma unroll
        for (int l = 0; l < kLoads; l++) {
            if (exists) to[l] = Chunk<IN, kLoad>::load(from + l * kLoad);
        }
    }
};
