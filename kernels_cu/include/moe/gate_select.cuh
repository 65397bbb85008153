// Selection of the k best of a token's experts by a warp (docs/numerics.md, section 14).
//
// Candidates are compared as integers of the same order; 0 is no candidate. The k-th largest of the lanes'
// maxima is a lower bound of the k largest. Few experts reach it, in few lanes: each lane takes one of them
// and counts those that precede it. Where more remain than there are lanes, the warp finds one after the
// other. Ties go to the smaller index.
#pragma once
#include "moe/gate_row.cuh"

struct OfWarp {
    alignas(16) u32 order[kMostExperts];                 // of what selection compares; 0: no candidate
    alignas(16) float score[kMostExperts];
    alignas(16) u64 key[kLanes];                         // of those that reach the bound, in any order
    i32 slot[kMostSlots];                                // experts, the best first
    u8 lane[kLanes];                                     // lanes with an expert that reaches the bound
};

// Writes a lane's integers to shared memory.
__device__ __forceinline__ void put_orders(u32 (&shared)[kMostExperts], const u32 (&order)[kCount]) {
    const int first = lane_index() * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) shared[first + i] = order[i];
}

__device__ __forceinline__ u32 largest_of_lane(const u32 (&order)[kCount]) {
    u32 largest = order[0];
#pragma unroll
    for (int i = 1; i < kCount; i++) largest = larger(largest, order[i]);
    return largest;
}

// Removes the first of a lane's integers that equals `top` from the candidates. Returns its index.
__device__ __forceinline__ int take(u32 (&order)[kCount], u32 top) {
    int taken = -1;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (taken >= 0 || order[i] != top) continue;
        order[i] = 0, taken = i;
    }
    return taken;
}

// Returns the k-th largest of the lanes' maxima (equal ones count once), at least 1.
__device__ __forceinline__ u32 bound_of(u32 k, u32 largest) {
    u32 top = 0;
#pragma unroll 8
    for (u32 round = 0; round < k; round++) {
        top = __reduce_max_sync(~0u, largest);
        largest = largest == top ? 0 : largest;
    }
    return larger(top, 1u);
}

// Keys are distinct; the larger one goes first.
__device__ __forceinline__ u64 key_of(u32 order, u32 expert) { return (u64)order << 32 | ~expert; }

// Writes the keys of the experts that reach the bound, and 0 for the other lanes. Returns how many experts
// reach it; those beyond the number of lanes get no key.
__device__ __forceinline__ u32 find_keys(u32 bound, u32 largest, OfWarp& shared) {
    const u32 lane = lane_index(), lanes_before = (1u << lane) - 1;
    const u32 lanes = __ballot_sync(~0u, largest >= bound), experts = __popc(lanes) * kCount;
    if (largest >= bound) shared.lane[__popc(lanes & lanes_before)] = (u8)lane;
    shared.key[lane] = 0;
    __syncwarp();
    u32 found = 0;
#pragma unroll 1
    for (u32 first = 0; first < experts; first += kLanes) {
        const u32 i = first + lane, expert = shared.lane[i / kCount] * kCount + i % kCount;
        const u32 order = i < experts ? shared.order[expert] : 0;
        const u32 all = __ballot_sync(~0u, order >= bound), at = found + __popc(all & lanes_before);
        if (order >= bound && at < kLanes) shared.key[at] = key_of(order, expert);
        found += __popc(all);
    }
    __syncwarp();
    return found;
}

// Ranks the first `found` keys, and writes the experts of the k largest to their slots.
__device__ __forceinline__ void rank_keys(u32 k, u32 found, OfWarp& shared) {
    const u64 key = shared.key[lane_index()];
    u32 rank = 0;
#pragma unroll 1
    for (u32 first = 0; first < found; first += 4)
#pragma unroll
        for (u32 i = 0; i < 4; i++) rank += shared.key[first + i] > key;
    if (key && rank < k) shared.slot[rank] = (i32)~(u32)key;
}

// Writes the slots of the k largest, one after the other. Returns their number.
__device__ __forceinline__ u32 rank_by_rounds(u32 k, OfWarp& shared, u32 (&order)[kCount]) {
    const u32 lane = lane_index();
    u32 round = 0;
#pragma unroll 1
    for (; round < k; round++) {
        const u32 largest = largest_of_lane(order), top = __reduce_max_sync(~0u, largest);
        if (top == 0) break;
        if ((int)lane == __ffs((int)__ballot_sync(~0u, largest == top)) - 1)
            shared.slot[round] = (i32)lane * kCount + take(order, top);
    }
    return round;
}

// Finds the k largest. shared.order: the same integers. Past the last candidate `chosen` is unchanged.
__device__ __forceinline__ void select(u32 k, OfWarp& shared, u32 (&order)[kCount],
                                       i32 (&chosen)[kSlotsOfLane]) {
    const u32 lane = lane_index(), largest = largest_of_lane(order);
    u32 found = k <= kLanes ? find_keys(bound_of(k, largest), largest, shared) : ~0u;
    if (found <= kLanes) {
        rank_keys(k, found, shared);
        found = smaller(found, k);
    } else {
        found = rank_by_rounds(k, shared, order);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; i++)
        if (lane + i * kLanes < found) chosen[i] = shared.slot[lane + i * kLanes];
}
