// The slots of tokens, from experts of all ranks to rows (docs/numerics.md, section 15). Rank r has experts r
// * local to (r + 1) * local - 1. One thread per slot. No defines.
//
// rank_slots      experts i32 or i64 [tokens, topk] -> experts i32, and ranks i32: the rank of a slot's
//                 expert; -1 where an earlier slot of the token has the same rank, or there is no expert
// arrived_slots   experts of the tokens received, i32 [ranks * region, topk] -> the same as indices of this
//                 rank's experts, 0 to local - 1; -1: another rank's, none, or no token. Also copies `back`,
//                 and computes the rows in which this rank's own tokens return: returned = rank * region +
//                 number of earlier tokens for that rank
// returned_probs  gradients of probs received, f32 [ranks * region, topk] -> [tokens, topk]
#include "memory/errors.cuh"
#include "memory/chunks.cuh"

constexpr int kThreads = 256;

struct RankSlotsParams {
    const void* assignment;
    i32 *experts, *ranks;
    u32* errors;
    i64 tokens;
    u32 topk, num_experts, local, wide;
};

struct ArrivedSlotsParams {
    const i32* experts;          // [ranks * region, topk] of the tokens received
    const i32* counts;           // [ranks] tokens received from each
    const i32* back;             // [ranks * region, topk], or null
    i32* own;                    // [ranks * region, topk]
    i32* back_kept;              // [ranks * region, topk]
    const i32* sent;             // [tokens, topk] experts of this rank's tokens
    const i32* row_map;          // [tokens, topk] their rows by rank
    const i64* offsets;          // [ranks + 1] of these rows
    i32* returned;               // [tokens, topk]
    i64 tokens, region;
    u32 topk, ranks, me, local;
};

struct ReturnedProbsParams {
    const i32* experts;          // [tokens, topk]
    const i32* returned;         // [tokens, topk]
    const u32* came;             // [rows, topk] f32
    u32* probs;                  // [tokens, topk] f32
    i64 tokens, rows;
    u32 topk, local;
};

__device__ __forceinline__ i64 own_slot() { return (i64)blockIdx.x * kThreads + threadIdx.x; }

// Returns the first slot of the token whose expert is of the same rank as that of this slot.
__device__ __forceinline__ i64 first_of_rank(const i32* experts, i64 slot, u32 topk, u32 local) {
    const u32 rank = (u32)experts[slot] / local;
    i64 first = slot / topk * topk;
    while (experts[first] < 0 || (u32)experts[first] / local != rank) first++;
    return first;
}

__device__ __forceinline__ i32 expert_at(const RankSlotsParams& p, i64 slot, bool& wrong) {
    const i64 given = p.wide ? static_cast<const i64*>(p.assignment)[slot]
                             : static_cast<const i32*>(p.assignment)[slot];
    wrong = given < -1 || given >= p.num_experts;
    return wrong ? -1 : (i32)given;
}

#ifdef ENTRY_rank_slots
extern "C" __global__ void __launch_bounds__(kThreads)
rank_slots(const __grid_constant__ RankSlotsParams p) {
    const i64 slot = own_slot();
    if (slot >= p.tokens * p.topk) return;
    bool wrong, other;
    const i32 expert = expert_at(p, slot, wrong);
    if (wrong) report(p.errors, kRouteExpert);
    i32 rank = expert < 0 ? -1 : (i32)((u32)expert / p.local);
    for (i64 before = slot / p.topk * p.topk; before < slot && rank >= 0; before++) {
        const i32 earlier = expert_at(p, before, other);
        if (earlier >= 0 && (i32)((u32)earlier / p.local) == rank) rank = -1;
    }
    p.experts[slot] = expert;
    p.ranks[slot] = rank;
}
#endif

#ifdef ENTRY_arrived_slots
extern "C" __global__ void __launch_bounds__(kThreads)
arrived_slots(const __grid_constant__ ArrivedSlotsParams p) {
    const i64 slot = own_slot();
    if (slot < p.tokens * p.topk) {
        const i32 row = p.row_map[slot];
        const u32 rank = (u32)p.sent[slot] / p.local;
        p.returned[slot] = row < 0 ? -1 : (i32)(rank * p.region + row - p.offsets[rank]);
    }
    if (slot >= p.ranks * p.region * p.topk) return;
    const i64 token = slot / p.topk, rank = token / p.region;
    const bool came = token - rank * p.region < p.counts[rank];
    const i32 expert = came ? p.experts[slot] - (i32)(p.me * p.local) : -1;
    p.own[slot] = (u32)expert < p.local ? expert : -1;
    if (p.back) p.back_kept[slot] = came ? p.back[slot] : -1;
}
#endif

#ifdef ENTRY_returned_probs
extern "C" __global__ void __launch_bounds__(kThreads)
returned_probs(const __grid_constant__ ReturnedProbsParams p) {
    const i64 slot = own_slot();
    if (slot >= p.tokens * p.topk) return;
    u32 prob = 0;
    if (p.experts[slot] >= 0) {
        const i32 row = p.returned[first_of_rank(p.experts, slot, p.topk, p.local)];
        if (row >= 0 && row < p.rows) prob = load_read_only(p.came + row * p.topk + slot % p.topk);
    }
    p.probs[slot] = prob;
}
#endif
