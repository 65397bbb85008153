// topk_gate chooses k experts for each token (docs/numerics.md, section 14):
//
//   logits IN [tokens, experts] -> indices i32 [tokens, k], weights f32 [tokens, k], counts i32 [sequences,
//   experts], and, if they are wanted, scores f32 [tokens, experts] and score_sums f32 [sequences, experts]
//
// A warp takes a token. What selection compares becomes integers of the same order, which lie in shared
// memory; a lane knows the largest of its own. In each round the warp finds the largest of all, the first
// lane that has it, and there the first expert; the lanes then read that lane's integers, to find the largest
// of the others. So ties go to the smaller index, and nothing depends on how many experts a lane has.
//
// A block takes consecutive tokens of one sequence, a segment. It counts in shared memory, then adds to
// counts of the sequence, which are zero before and after a launch; the sequence's last block hands them out.
// Sums of scores over a warp's tokens, a segment, kSegments segments are subtrees of the fixed tree; the last
// block of each adds them up.
//
// The logits are read once. Indices that are given and no experts count as -1. Defines: see gate_row.cuh.
#include "memory/errors.cuh"
#include "moe/gate_row.cuh"
#include "numerics/amax.cuh"

struct GateParams {
    const IN::storage* logits;   // [tokens, experts]
    const float* bias;           // [experts], or null
    const void* given;           // i32 or i64 [tokens, k] to replay, or null
    i32* indices;                // [tokens, k]
    float* weights;              // [tokens, k]
    i32* counts;                 // [sequences, experts]
    float* scores;               // [tokens, experts], or null
    float* score_sums;           // [sequences, experts], or null
    float* of_segments;          // [sequences, segments, experts] and [sequences, parts, experts], for sums
    u32* counted;                // [sequences, experts]; zero before and after a launch
    u32* done;                   // [sequences] and [sequences, parts] blocks done; the same
    u32* errors;                 // the device's word
    i64 length;                  // tokens of a sequence
    u32 segments, parts;         // of a sequence: segments, and kSegments of them each
    u32 experts, k;
    u32 groups, group_topk;      // groups: 0: none
    u32 group_terms;             // how many of a group's experts make its score
    float factor;
    u32 normalize;               // 1: weights add up to `factor`
    u32 wide;                    // 1: given indices are i64
    u32 vector;                  // 1: rows of logits are whole loads
    u32 vector_scores;           // 1: rows of scores are whole stores
};

constexpr int kTokens = 2, kSegment = kWarps * kTokens;  // tokens of a warp, of a block
constexpr int kSegments = 16, kSumsAtOnce = 32;
constexpr u32 kKept = ~0u;                               // marks a group that is kept; no number has it

struct OfWarp {
    alignas(16) u32 order[kMostExperts];                 // of what selection compares; 0: no candidate
    alignas(16) float score[kMostExperts];
};
struct Shared {
    u32 count[kMostExperts];
    OfWarp warp[kWarps];
    bool last;
};
static_assert(sizeof(Shared) <= 48 << 10, "static shared memory");

// ---- selection ----
__device__ __forceinline__ u32 largest_order(const u32 (&order)[kCount]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) largest = larger(largest, order[i]);
    return largest;
}

// Writes the order of each expert to shared memory.
__device__ __forceinline__ void put_orders(OfWarp& shared, const u32 (&order)[kCount]) {
    const int first = lane_index() * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) shared.order[first + i] = order[i];
    __syncwarp();
}

// Returns the order of the sum of a group's largest candidates, in shared memory from `order` on.
__device__ __forceinline__ u32 order_of_group(const u32* order, u32 size, u32 terms) {
    u32 before = kKept, at = 0;                          // the last term and where it was
    float sum = as_float(kAbsentTerm);
    for (u32 term = 0; term < terms; term++) {
        u32 best = 0, best_at = 0;
        for (u32 i = 0; i < size; i++) {
            const u32 each = order[i];
            const bool follows = each < before || (each == before && i > at);
            if (follows && each > best) best = each, best_at = i;
        }
        sum = add_rn(sum, best ? from_order(best) : as_float(kMinusInfinity));
        before = best, at = best_at;
    }
    return is_nan(sum) ? order_of(as_float(kMinusInfinity)) : order_of(sum);
}

// Takes the experts of groups that are not kept out of the candidates. of_group: shared memory for the warp's
// groups.
__device__ __forceinline__ void keep_groups(const GateParams& p, OfWarp& shared, u32* of_group,
                                            u32 (&order)[kCount]) {
    const u32 lane = lane_index(), size = p.experts / p.groups;
    const u32 per_lane = (p.groups + kLanes - 1) / kLanes;
    const u32 first = smaller(lane * per_lane, p.groups), end = smaller(first + per_lane, p.groups);
    for (u32 group = first; group < end; group++)
        of_group[group] = order_of_group(shared.order + group * size, size, p.group_terms);
    for (u32 kept = 0; kept < p.group_topk; kept++) {
        u32 best = 0, at = 0;
        for (u32 group = first; group < end; group++)
            if (of_group[group] != kKept && of_group[group] > best) best = of_group[group], at = group;
        const u32 top = __reduce_max_sync(~0u, best);
        if ((int)lane == __ffs((int)__ballot_sync(~0u, best == top)) - 1) of_group[at] = kKept;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const u32 expert = lane * kCount + i;
        if (expert >= p.experts || of_group[expert / size] != kKept) order[i] = 0;
    }
    put_orders(shared, order);
}

// Finds the k largest, one after the other. chosen: -1 past the last candidate.
__device__ __forceinline__ void select(u32 k, OfWarp& shared, u32 largest, i32 (&chosen)[kSlotsOfLane]) {
    const int lane = lane_index(), within = lane % kCount;
#pragma unroll 1
    for (u32 slot = 0; slot < k; slot++) {
        const u32 top = __reduce_max_sync(~0u, largest);
        if (top == 0) return;
        const int from = __ffs((int)__ballot_sync(~0u, largest == top)) - 1;
        u32* const at = shared.order + from * kCount + within;
        u32 each = *at;
        const int first = __ffs((int)__ballot_sync(~0u, each == top)) - 1;
        if (within == first) each = 0;
        const u32 rest = __reduce_max_sync(~0u, each);
        __syncwarp();                                    // All lanes have read it.
        if (lane == first) *at = 0;
        if (lane == from) largest = rest;
        if (lane == (int)(slot % kLanes)) chosen[slot < kLanes ? 0 : 1] = from * kCount + first;
        __syncwarp();
    }
}

__device__ __forceinline__ void replay(const GateParams& p, i64 token, i32 (&chosen)[kSlotsOfLane]) {
    bool wrong = false;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) {
        const u32 slot = lane_index() + i * kLanes;
        if (slot >= p.k) continue;
        const i64 at = token * p.k + slot;
        const i64 expert = p.wide ? load_read_only(static_cast<const i64*>(p.given) + at)
                                  : (i64)load_read_only(static_cast<const i32*>(p.given) + at);
        const bool exists = expert >= 0 && expert < (i64)p.experts;
        wrong |= !exists && expert != -1;
        chosen[i] = exists ? (i32)expert : -1;
    }
    if (wrong) report(p.errors, kGateExpert);
}

// ---- tokens ----
// Writes all of a token but its share of the sums. l: its logits; s: its scores.
__device__ __forceinline__ void do_token(const GateParams& p, Shared& all, i64 token, u32* of_group,
                                         const Row& l, const Row& s) {
    OfWarp& shared = all.warp[threadIdx.x / kLanes];
    const int lane = lane_index();
    __syncwarp();                                        // The token before has been read.
    put_row(shared.score, s);
    if (p.scores) store_row<f32>(reinterpret_cast<u32*>(p.scores) + token * p.experts, p.experts,
                                 p.vector_scores, s);
    i32 chosen[kSlotsOfLane] = {-1, -1};
    if (p.given) {
        replay(p, token, chosen);
        __syncwarp();
    } else {
        u32 order[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int expert = lane * kCount + i;
            order[i] = as_bits(s[i]) | 0x80000000u;
            if (p.bias) order[i] = order_of(expert < (int)p.experts
                                            ? add_rn(s[i], load_read_only(p.bias + expert)) : 0.0f);
            if (as_bits(l[i]) == kMinusInfinity) order[i] = order_of(l[i]);
            if (is_nan(l[i])) order[i] = 0;
        }
        put_orders(shared, order);
        if (p.groups) keep_groups(p, shared, of_group, order);
        select(p.k, shared, largest_order(order), chosen);
    }
    Slots score;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) score[i] = chosen[i] >= 0 ? shared.score[chosen[i]] : 0.0f;
    const float divisor = p.normalize ? add_rn(sum_of_slots(score, p.k), kEpsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) {
        const u32 slot = lane + i * kLanes;
        if (slot >= p.k) continue;
        const i64 at = token * p.k + slot;
        p.indices[at] = chosen[i];
        p.weights[at] = as_float(f32::narrow(mul_rn(div_rn(score[i], divisor), p.factor)));
        if (chosen[i] >= 0) atomicAdd(&all.count[chosen[i]], 1u);
    }
}

// ---- sums ----
// Returns true in the last of so many blocks to call it. The whole block calls it.
__device__ __forceinline__ bool is_last(Shared& shared, u32* done, u32 blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.last = is_last_block(done, blocks);
        if (shared.last) atomicExch(done, 0u);
    }
    __syncthreads();
    return shared.last;
}

// Returns the sum of `number` sums of an expert, one after the other in memory, by the tree. kMost: loads
// in flight.
template <int kMost>
__device__ __forceinline__ float sum_of(const float* from, u32 experts, int number) {
    float term[kMost];
#pragma unroll
    for (int i = 0; i < kMost; i++)
        term[i] = as_float(i < number ? (u32)load_relaxed(from + (i64)i * experts) : kAbsentTerm);
    TreeSum<kMost> sum;
#pragma unroll
    for (int i = 0; i < kMost; i++) sum.add(i, term[i]);
    return sum.sum();
}

// Writes the sums over a segment, and in the last block of a part those of the part. sum: of the warp's
// tokens.
__device__ __forceinline__ void add_up_scores(const GateParams& p, Shared& shared, u32 sequence, u32 segment,
                                              const Row& sum) {
    const i64 sequences = gridDim.x / p.segments;
    put_row(shared.warp[threadIdx.x / kLanes].score, sum);
    __syncthreads();
    float* const segments = p.of_segments + (i64)sequence * p.segments * p.experts;
    float* const parts = p.of_segments + (sequences * p.segments + (i64)sequence * p.parts) * p.experts;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads) {
        TreeSum<kWarps> of_segment;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) of_segment.add(warp, shared.warp[warp].score[expert]);
        segments[(i64)segment * p.experts + expert] = of_segment.sum();
    }
    const u32 part = segment / kSegments;
    const int of_part = left_of((i64)p.segments - part * kSegments, kSegments);
    if (!is_last(shared, p.done + sequences + sequence * p.parts + part, of_part)) return;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads)
        parts[(i64)part * p.experts + expert] =
            sum_of<kSegments>(segments + (i64)part * kSegments * p.experts + expert, p.experts, of_part);
}

// Writes what a sequence has, once all of its blocks are done.
__device__ __forceinline__ void finish(const GateParams& p, Shared& shared, u32 sequence) {
    const i64 sequences = gridDim.x / p.segments;
    const float* const parts = p.of_segments + (sequences * p.segments + (i64)sequence * p.parts) * p.experts;
    RunningTreeSum* const running = reinterpret_cast<RunningTreeSum*>(shared.warp) + threadIdx.x;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads) {
        const i64 at = (i64)sequence * p.experts + expert;
        p.counts[at] = (i32)atomicExch(p.counted + at, 0u);
        if (!p.score_sums) continue;
        float sum;
        if (p.parts <= kSumsAtOnce) {
            sum = sum_of<kSumsAtOnce>(parts + expert, p.experts, p.parts);
        } else {
            const int rounds = (p.parts + kSumsAtOnce - 1) / kSumsAtOnce;
            for (int round = 0; round < rounds; round++)
                running->add(round, sum_of<kSumsAtOnce>(
                    parts + (i64)round * kSumsAtOnce * p.experts + expert, p.experts,
                    left_of((i64)p.parts - round * kSumsAtOnce, kSumsAtOnce)));
            sum = running->total(rounds);
        }
        p.score_sums[at] = as_float(f32::narrow(p.length ? sum : 0.0f));
    }
}
constexpr int kWithExpert = kThreads < kMostExperts ? kThreads : kMostExperts;
static_assert(sizeof(OfWarp) * kWarps >= sizeof(RunningTreeSum) * kWithExpert,
              "a running sum for each thread that has an expert");

extern "C" __global__ void __launch_bounds__(kThreads, kCount <= 8 ? 2 : 1)
topk_gate(const __grid_constant__ GateParams p) {
    __shared__ Shared shared;
    extern __shared__ u32 of_groups[];                   // [kWarps, groups]
    const u32 sequence = blockIdx.x / p.segments, segment = blockIdx.x - sequence * p.segments;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads) shared.count[expert] = 0;
    __syncthreads();
    const u32 warp = threadIdx.x / kLanes;
    const i64 in_sequence = (i64)segment * kSegment + warp * kTokens, before = sequence * p.length;
    Row sum;
#pragma unroll 1
    for (int i = 0; i < kTokens; i++) {
        const i64 token = in_sequence + i;
        Row s;
        if (token < p.length) {
            Row l;
            load_logits<IN>(p.logits + (before + token) * p.experts, p.experts, p.vector, l);
            scores_of(l, s);
            do_token(p, shared, before + token, of_groups + warp * p.groups, l, s);
            if (p.score_sums) shares_of(s);
        } else {
#pragma unroll
            for (int k = 0; k < kCount; k++) s[k] = as_float(kAbsentTerm);
        }
        if (!p.score_sums) continue;
#pragma unroll
        for (int k = 0; k < kCount; k++) sum[k] = i == 0 ? s[k] : add_rn(sum[k], s[k]);
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads)
        if (shared.count[expert])
            atomicAdd(p.counted + (i64)sequence * p.experts + expert, shared.count[expert]);
    if (p.score_sums) add_up_scores(p, shared, sequence, segment, sum);
    if (is_last(shared, p.done + sequence, p.segments)) finish(p, shared, sequence);
}
