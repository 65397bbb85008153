// topk_gate_backward: gradient of the logits, from those of the weights and of the sums of scores
// (docs/numerics.md, section 14).
//
//   logits IN [tokens, experts], indices i32 [tokens, k], grad f32 [tokens, k], score_grads f32 [sequences,
//   experts] or none -> out IN [tokens, experts]
//
// One warp per token, whose scores it recomputes. Slots look up their scores, and add their gradients to
// those of experts, in shared memory. Reads the logits and writes as much. Defines: see gate_row.cuh.
#include "moe/gate_row.cuh"

struct GateBackwardParams {
    const IN::storage* logits;   // [tokens, experts]
    const i32* indices;          // [tokens, k]
    const float* grad;           // [tokens, k]
    const float* score_grads;    // [sequences, experts], or null
    IN::storage* out;            // [tokens, experts]
    i64 tokens, length;          // length: tokens of a sequence
    u32 experts, k;
    float factor;
    u32 normalize;               // 1: weights were divided by their sum
    u32 vector;                  // 1: rows of logits and of the result are whole accesses
};

struct OfWarp {
    alignas(16) float score[kMostExperts];
    alignas(16) float grad[kMostExperts];
};

// Writes the gradients of scores by slots to shared memory, in place of the scores.
__device__ __forceinline__ void add_slots(const GateBackwardParams& p, i64 token, OfWarp& shared) {
    const int lane = lane_index();
    i32 chosen[kSlotsOfLane];
    Slots grad, score;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) {
        const u32 slot = lane + i * kLanes;
        const i64 at = token * p.k + slot;
        const i32 given = slot < p.k ? load_read_only(p.indices + at) : -1;
        const bool exists = given >= 0 && given < (i32)p.experts;
        chosen[i] = exists ? given : -1;
        grad[i] = exists ? mul_rn(load_read_only(p.grad + at), p.factor) : 0.0f;
        score[i] = exists ? shared.score[given] : 0.0f;
    }
    if (p.normalize) {
        const float divisor = add_rn(sum_of_slots(score, p.k), kEpsilon);
        Slots part;
#pragma unroll
        for (int i = 0; i < kSlotsOfLane; i++) part[i] = mul_rn(grad[i], div_rn(score[i], divisor));
        const float through_sum = sum_of_slots(part, p.k);
#pragma unroll
        for (int i = 0; i < kSlotsOfLane; i++) grad[i] = div_rn(sub_rn(grad[i], through_sum), divisor);
    }
    // slots of one expert add up in their order
    const u32 alike = __match_any_sync(~0u, chosen[0] < 0 ? -1 - lane : chosen[0]);
    if (p.k <= kLanes && __all_sync(~0u, alike == 1u << lane)) {
        if (chosen[0] >= 0) shared.grad[chosen[0]] = add_rn(0.0f, grad[0]);
        __syncwarp();
        return;
    }
    for (u32 slot = 0; slot < p.k; slot++) {
        if (lane == (int)(slot % kLanes)) {
            const i32 expert = slot < kLanes ? chosen[0] : chosen[1];
            if (expert >= 0)
                shared.grad[expert] = add_rn(shared.grad[expert], slot < kLanes ? grad[0] : grad[1]);
        }
        __syncwarp();
    }
}

// Adds to the scores' gradients what follows from the gradients `a` of shares of scores.
__device__ __forceinline__ void add_shares(const Row& s, Row& a, Row& h) {
    if constexpr (kScore != Score::softmax) {
        const float divisor = add_rn(sum_of_row(s), kEpsilon);
        Row share;
#pragma unroll
        for (int i = 0; i < kCount; i++) share[i] = s[i];
        divide_all(share, divisor, divides_quickly(s, divisor));
#pragma unroll
        for (int i = 0; i < kCount; i++) share[i] = mul_rn(a[i], share[i]);
        const float through_sum = sum_of_row(share);
#pragma unroll
        for (int i = 0; i < kCount; i++) a[i] = sub_rn(a[i], through_sum);
        one_by_one(a, DividedBy{divisor});
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) h[i] = add_rn(h[i], a[i]);
}

// Turns gradients of scores into those of logits.
__device__ __forceinline__ void through_scores(const Row& l, const Row& s, Row& h) {
    if constexpr (kScore == Score::softmax) {
        Row part;
#pragma unroll
        for (int i = 0; i < kCount; i++) part[i] = mul_rn(h[i], s[i]);
        const float through_sum = sum_of_row(part);
#pragma unroll
        for (int i = 0; i < kCount; i++) h[i] = mul_rn(s[i], sub_rn(h[i], through_sum));
    } else if constexpr (kScore == Score::sigmoid) {
#pragma unroll
        for (int i = 0; i < kCount; i++) h[i] = mul_rn(h[i], mul_rn(s[i], sub_rn(1.0f, s[i])));
    } else {
        Row half;
#pragma unroll
        for (int i = 0; i < kCount; i++) half[i] = l[i];
        sigmas(half);
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const bool none = as_bits(s[i]) == 0;
            const float slope = div_rn(mul_rn(0.5f, half[i]), none ? 1.0f : s[i]);
            h[i] = none ? 0.0f : mul_rn(h[i], slope);
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) h[i] = is_nan(l[i]) ? 0.0f : h[i];
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
topk_gate_backward(const __grid_constant__ GateBackwardParams p) {
    __shared__ OfWarp of_warp[kWarps];
    OfWarp& shared = of_warp[threadIdx.x / kLanes];
    const i64 token = (i64)blockIdx.x * kWarps + threadIdx.x / kLanes;
    if (token >= p.tokens) return;
    Row l, s, h;
    load_row<IN>(p.logits + token * p.experts, p.experts, p.vector, l);
    scores_of(l, s);
    put_row(shared.score, s);
#pragma unroll
    for (int i = 0; i < kCount; i++) h[i] = 0.0f;
    put_row(shared.grad, h);
    __syncwarp();
    add_slots(p, token, shared);
    const int first = lane_index() * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) h[i] = shared.grad[first + i];
    if (p.score_grads) {
        const float* const grads = p.score_grads + token / p.length * p.experts;
        Row a;
#pragma unroll
        for (int i = 0; i < kCount; i++)
            a[i] = first + i < (int)p.experts ? load_read_only(grads + first + i) : 0.0f;
        add_shares(s, a, h);
    }
    through_scores(l, s, h);
    store_row<IN>(p.out + token * p.experts, p.experts, p.vector, h);
}
