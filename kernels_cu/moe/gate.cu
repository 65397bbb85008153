// topk_gate selects k experts for each token (docs/numerics.md, section 14):
//
//   logits IN [tokens, experts] -> indices i32 [tokens, k], weights f32 [tokens, k], counts i32 [sequences,
//   experts], and, if they are wanted, scores f32 [tokens, experts] and score_sums f32 [sequences, experts]
//
// One warp per token; selection: gate_select.cuh.
//
// A thread block takes segments: consecutive tokens of one sequence. It counts in shared memory, then adds to
// the sequence's counts, which are zero before and after a launch and are written out by the sequence's last
// thread block. There are several copies of the counts, to reduce contention between blocks that end
// together. Sums of scores over a warp's tokens, a segment, kSegments segments are subtrees of the fixed
// tree; the last block of each adds them up.
//
// The logits are read once. Given indices of no expert count as -1. Defines: see gate_row.cuh.
#include "memory/errors.cuh"
#include "moe/gate_select.cuh"
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
    float* of_segments;          // [sequences, segments, experts], [sequences, parts, experts]: partial sums
    u32* counted;                // [copies, sequences, experts]; zero before and after a launch
    u32* done;                   // [sequences] and [sequences, parts] blocks done; likewise
    u32* errors;                 // the device's sticky error word
    i64 length;                  // tokens per sequence
    u32 segments, parts;         // per sequence: segments, and parts of kSegments segments each
    u32 blocks, rounds;          // blocks per sequence; segments per block, fewer in the last one
    u32 copies;                  // copies of the counts, at most kMostCopies
    u32 experts, k;
    u32 groups, group_topk;      // groups 0: no groups
    u32 group_terms;             // experts of a group that make up its score
    u32 group_lanes;             // lanes per group: a power of two, or 0: groups are not whole lanes
    float factor;
    u32 normalize;               // 1: weights add up to `factor`
    u32 wide;                    // 1: given indices are i64
    u32 vector;                  // 1: rows of logits are whole loads
    u32 vector_scores;           // 1: rows of scores are whole stores
    u32 vector_bias;             // 1: the bias is whole loads
};

constexpr int kTokens = 2, kSegment = kWarps * kTokens;  // tokens of a segment per warp, per block
constexpr int kSegments = 32;                            // segments per part
constexpr u32 kMostCopies = 8;
constexpr u32 kKept = ~0u;                               // marks a kept group; no number has these bits

struct Shared {
    u32 count[kMostExperts];
    OfWarp warp[kWarps];
    bool last;
};
static_assert(sizeof(Shared) <= 48 << 10, "static shared memory");

// ---- selection ----
__device__ __forceinline__ float candidate_of(u32 order) {
    return order ? from_order(order) : as_float(kMinusInfinity);
}
__device__ __forceinline__ u32 order_of_sum(float sum) {
    return order_of(is_nan(sum) ? as_float(kMinusInfinity) : sum);
}

// Returns the order of the sum of a group's largest candidates, in shared memory from `order` on.
__device__ __forceinline__ u32 order_of_group(const u32* order, u32 size, u32 terms) {
    u32 before = kKept, at = 0;                          // the last term and its place
    float sum = as_float(kAbsentTerm);
    for (u32 term = 0; term < terms; term++) {
        u32 best = 0, best_at = 0;
        for (u32 i = 0; i < size; i++) {
            const u32 each = order[i];
            const bool follows = each < before || (each == before && i > at);
            if (follows && each > best) best = each, best_at = i;
        }
        sum = add_rn(sum, candidate_of(best));
        before = best, at = best_at;
    }
    return order_of_sum(sum);
}

// The same for the group that this lane and its neighbours have in registers.
__device__ __forceinline__ u32 order_of_group(const u32 (&order)[kCount], u32 lanes, u32 terms) {
    const u32 lane = lane_index(), first = lane / lanes * lanes;
    const u32 lanes_before = (1u << lane) - (1u << first);           // lanes of the group
    u32 left[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) left[i] = order[i];
    float sum = as_float(kAbsentTerm);
#pragma unroll 1
    for (u32 term = 0; term < terms; term++) {
        const u32 largest = largest_of_lane(left);
        u32 top = largest;
        for (u32 step = 1; step < lanes; step *= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
        if (!(__ballot_sync(~0u, largest == top) & lanes_before) && largest == top) take(left, top);
        sum = add_rn(sum, candidate_of(top));
    }
    return order_of_sum(sum);
}

// Removes the experts of groups that are not kept from the candidates. of_group: shared memory for the warp's
// groups.
__device__ __forceinline__ void keep_groups(const GateParams& p, OfWarp& shared, u32* of_group,
                                            u32 (&order)[kCount]) {
    const u32 lane = lane_index(), size = p.experts / p.groups;
    const u32 per_lane = (p.groups + kLanes - 1) / kLanes;
    const u32 first = smaller(lane * per_lane, p.groups), end = smaller(first + per_lane, p.groups);
    const u32 group_of_lane = p.group_lanes ? smaller(lane / p.group_lanes, p.groups - 1) : 0;
    if (p.group_lanes) {
        const u32 found = order_of_group(order, p.group_lanes, p.group_terms);
        if (lane == group_of_lane * p.group_lanes) of_group[group_of_lane] = found;
        __syncwarp();
    } else {
        for (u32 group = first; group < end; group++)
            of_group[group] = order_of_group(shared.order + group * size, size, p.group_terms);
    }
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
        const u32 group = p.group_lanes ? group_of_lane : smaller(expert, p.experts - 1) / size;
        if (of_group[group] != kKept) order[i] = 0;
    }
    put_orders(shared.order, order);
    __syncwarp();
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
// What selection compares, as integers of the same order. NaN and -Inf have a score of 0, which few others
// have.
__device__ __forceinline__ void orders_of(const GateParams& p, const Row& l, const Row& s,
                                          u32 (&order)[kCount]) {
    if (p.bias) {
        Row bias;
        load_row<f32>(reinterpret_cast<const u32*>(p.bias), p.experts, p.vector_bias, bias);
#pragma unroll
        for (int i = 0; i < kCount; i++) order[i] = order_of(add_rn(s[i], bias[i]));
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) order[i] = with_sign_turned(as_bits(s[i]));
    }
    bool rare = false;
#pragma unroll
    for (int i = 0; i < kCount; i++) rare |= as_bits(s[i]) == 0;
    if (!rare) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (has_bits(l[i], kMinusInfinity)) order[i] = order_of(as_float(kMinusInfinity));
        if (is_nan(l[i])) order[i] = 0;
    }
}

// Writes a token's results, except its share of the sums. l: its logits; s: its scores.
__device__ __forceinline__ void do_token(const GateParams& p, Shared& all, i64 token, u32* of_group,
                                         const Row& l, const Row& s) {
    OfWarp& shared = all.warp[threadIdx.x / kLanes];
    const int lane = lane_index();
    __syncwarp();                                        // the token before has been read
    put_row(shared.score, s);
    if (p.scores) store_row<f32>(reinterpret_cast<u32*>(p.scores) + token * p.experts, p.experts,
                                 p.vector_scores, s);
    i32 chosen[kSlotsOfLane] = {-1, -1};
    if (p.given) {
        replay(p, token, chosen);
        __syncwarp();
    } else {
        u32 order[kCount];
        orders_of(p, l, s, order);
        put_orders(shared.order, order);
        __syncwarp();
        if (p.groups) keep_groups(p, shared, of_group, order);
        select(p.k, shared, order, chosen);
    }
    Slots score;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) score[i] = chosen[i] >= 0 ? shared.score[chosen[i]] : 0.0f;
    const float divisor = p.normalize ? add_rn(sum_of_slots(score, p.k), kEpsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++) {
        const u32 slot = lane + i * kLanes;
        if (slot >= p.k) break;
        const i64 at = token * p.k + slot;
        p.indices[at] = chosen[i];
        p.weights[at] = as_float(f32::narrow(mul_rn(div_rn(score[i], divisor), p.factor)));
        if (chosen[i] >= 0) atomicAdd(&all.count[chosen[i]], 1u);
    }
}

// ---- sums ----
// Returns the sum of up to kLoads sums of an expert, one after the other in memory, by the tree.
constexpr int kLoads = 16, kSums = 2 * kLoads;
__device__ __forceinline__ float sum_of_loads(const float* from, u32 experts, int number) {
    float term[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++)
        term[i] = as_float(i < number ? (u32)load_relaxed(from + (i64)i * experts) : kAbsentTerm);
    TreeSum<kLoads> sum;
#pragma unroll
    for (int i = 0; i < kLoads; i++) sum.add(i, term[i]);
    return sum.sum();
}

// The same for up to kSums of them: more loads in flight would take too many registers.
__device__ __forceinline__ float sum_of(const float* from, u32 experts, int number) {
    float sum = as_float(kAbsentTerm);
#pragma unroll 1
    for (int first = 0; first < number; first += kLoads) {
        const float next = sum_of_loads(from + (i64)first * experts, experts, number - first);
        sum = first ? add_rn(sum, next) : next;
    }
    return sum;
}

// Writes the sums over a segment, and in the last block of a part those of the part. sum: over the warp's
// tokens.
__device__ __forceinline__ void add_up_scores(const GateParams& p, Shared& shared, u32 sequence, u32 segment,
                                              const Row& sum) {
    const i64 sequences = gridDim.x / p.blocks;
    __syncwarp();                                        // the last token's scores have been read
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
    if (!is_last_block(shared.last, p.done + sequences + sequence * p.parts + part, of_part)) return;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads)
        parts[(i64)part * p.experts + expert] =
            sum_of(segments + (i64)part * kSegments * p.experts + expert, p.experts, of_part);
}

// Returns the sum of the copies of an expert's count, and zeroes them.
__device__ __forceinline__ u32 taken_counts(const GateParams& p, i64 stride, i64 at) {
    u32 count[kMostCopies], sum = 0;
#pragma unroll
    for (u32 i = 0; i < kMostCopies; i++)
        count[i] = i < p.copies ? atomicExch(p.counted + i * stride + at, 0u) : 0;
#pragma unroll
    for (const u32 each : count) sum += each;
    return sum;
}

// Writes a sequence's results, once all of its blocks are done. Running sums are in the warps' shared memory.
constexpr int kRunning = sizeof(OfWarp) * kWarps / sizeof(RunningTreeSum);
__device__ __forceinline__ void finish(const GateParams& p, Shared& shared, u32 sequence) {
    const i64 sequences = gridDim.x / p.blocks;
    const float* const parts = p.of_segments + (sequences * p.segments + (i64)sequence * p.parts) * p.experts;
    RunningTreeSum* const running = reinterpret_cast<RunningTreeSum*>(shared.warp) + threadIdx.x;
    const u32 threads = p.parts <= kSums || kRunning > kThreads ? kThreads : kRunning;
    if (threadIdx.x >= threads) return;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += threads) {
        const i64 at = (i64)sequence * p.experts + expert;
        p.counts[at] = (i32)taken_counts(p, sequences * p.experts, at);
        if (!p.score_sums) continue;
        float sum;
        if (p.parts <= kSums) {
            sum = sum_of(parts + expert, p.experts, p.parts);
        } else {
            const int rounds = (p.parts + kSums - 1) / kSums;
            for (int round = 0; round < rounds; round++)
                running->add(round, sum_of(
                    parts + (i64)round * kSums * p.experts + expert, p.experts,
                    left_of((i64)p.parts - round * kSums, kSums)));
            sum = running->total(rounds);
        }
        p.score_sums[at] = as_float(f32::narrow(p.length ? sum : 0.0f));
    }
}

// Writes a segment's tokens and sums.
__device__ __forceinline__ void do_segment(const GateParams& p, Shared& shared, u32* of_groups, u32 sequence,
                                           u32 segment) {
    const u32 warp = threadIdx.x / kLanes;
    const i64 before = sequence * p.length;
    Row sum;
#pragma unroll
    for (int k = 0; k < kCount; k++) sum[k] = as_float(kAbsentTerm);
#pragma unroll 1
    for (int i = 0; i < kTokens; i++) {
        const i64 token = (i64)segment * kSegment + warp * kTokens + i;
        // the vote shows the compiler that the warp is converged
        if (!__any_sync(~0u, token < p.length)) break;
        Row l, s;
        load_row<IN>(p.logits + (before + token) * p.experts, p.experts, p.vector, l);
        scores_of(l, s);
        do_token(p, shared, before + token, of_groups + warp * p.groups, l, s);
        if (!p.score_sums) continue;
        shares_of(s);
#pragma unroll
        for (int k = 0; k < kCount; k++) sum[k] = add_rn(sum[k], s[k]);
    }
    if (p.score_sums) add_up_scores(p, shared, sequence, segment, sum);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
topk_gate(const __grid_constant__ GateParams p) {
    __shared__ Shared shared;
    extern __shared__ u32 of_groups[];                   // [kWarps, groups]
    const u32 sequence = blockIdx.x / p.blocks, block = blockIdx.x - sequence * p.blocks;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads) shared.count[expert] = 0;
    __syncthreads();
    const u32 end = smaller((block + 1) * p.rounds, p.segments);
#pragma unroll 1
    for (u32 segment = block * p.rounds; segment < end; segment++)
        do_segment(p, shared, of_groups, sequence, segment);
    __syncthreads();
    u32* const counted = p.counted + (i64)(blockIdx.x % p.copies) * (gridDim.x / p.blocks) * p.experts;
    for (u32 expert = threadIdx.x; expert < p.experts; expert += kThreads)
        if (shared.count[expert])
            atomicAdd(counted + (i64)sequence * p.experts + expert, shared.count[expert]);
    if (is_last_block(shared.last, p.done + sequence, p.blocks)) finish(p, shared, sequence);
}
