// How a warp selects the k best of a token's experts (docs/numerics.md, section 14).
//
// What selection compares is given as integers of the same order, 0 for no candidate, and each lane sorts its
// own into shared memory. In each round the warp finds the largest of all, and the first lane that has it
// takes it from its list. Which experts these were is found at the end, by a lane for each slot. Ties go to
// the smaller index, since lanes and ranks have the order of experts.
#pragma once
#include "moe/gate_row.cuh"

// What a slot takes: a number's order, and its rank among its lane's, which begin at the lane's first expert.
struct alignas(8) Taken {
    u32 order, rank;
};
struct OfWarp {
    alignas(16) u32 order[kMostExperts];                 // of what selection compares; 0: no candidate
    alignas(16) u32 sorted[kMostExperts];                // each lane's, the largest first
    alignas(16) float score[kMostExperts];
    Taken taken[kMostSlots];
};

// Writes a lane's integers to shared memory.
__device__ __forceinline__ void put_orders(u32 (&shared)[kMostExperts], const u32 (&order)[kCount]) {
    const int first = lane_index() * kCount;
#pragma unroll
    for (int i = 0; i < kCount; i++) shared[first + i] = order[i];
}

// Sorts a lane's integers, the largest first, by Batcher's network.
template <int kFirst, int kNumber, int kStep>
__device__ __forceinline__ void merge(u32 (&v)[kCount]) {
    if constexpr (kStep * 2 < kNumber) {
        merge<kFirst, kNumber, kStep * 2>(v);
        merge<kFirst + kStep, kNumber, kStep * 2>(v);
    }
    constexpr int kBegin = kStep * 2 < kNumber ? kFirst + kStep : kFirst;
#pragma unroll
    for (int i = kBegin; i + kStep < kFirst + kNumber; i += kStep * 2) {
        const u32 a = v[i], b = v[i + kStep];
        v[i] = larger(a, b), v[i + kStep] = smaller(a, b);
    }
}
template <int kFirst, int kNumber>
__device__ __forceinline__ void sort(u32 (&v)[kCount]) {
    if constexpr (kNumber > 1) {
        sort<kFirst, kNumber / 2>(v);
        sort<kFirst + kNumber / 2, kNumber / 2>(v);
        merge<kFirst, kNumber, 1>(v);
    }
}

// Returns the expert that has the order `top` and, among its lane's, this rank.
__device__ __forceinline__ i32 expert_of(const OfWarp& shared, Taken taken) {
    const u32 first = taken.rank / kCount * kCount;
    u32 order[kCount], before = first;                   // ranks before those that are equal
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        order[i] = shared.order[first + i];
        before += order[i] > taken.order;
    }
    u32 expert = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const bool equal = order[i] == taken.order;
        if (equal && before == taken.rank) expert = first + i;
        before += equal;
    }
    return (i32)expert;
}

// Finds the k largest, one after the other. chosen: -1 past the last candidate.
__device__ __forceinline__ void select(u32 k, OfWarp& shared, u32 (&order)[kCount],
                                       i32 (&chosen)[kSlotsOfLane]) {
    const u32 lane = lane_index(), lanes_before = (1u << lane) - 1;
    sort<0, kCount>(order);
    put_orders(shared.sorted, order);
    u32 largest = order[0], rank = lane * kCount, found = 0;
#pragma unroll 1
    for (; found < k; found++) {
        const u32 top = __reduce_max_sync(~0u, largest);
        if (top == 0) break;
        const u32 all = __ballot_sync(~0u, largest == top);
        if (largest == top && !(all & lanes_before)) {
            shared.taken[found] = {top, rank++};
            largest = rank % kCount ? shared.sorted[rank] : 0;
        }
    }
    __syncwarp();
    if (lane < found) chosen[0] = expert_of(shared, shared.taken[lane]);
    if (found > kLanes && lane + kLanes < found) chosen[1] = expert_of(shared, shared.taken[lane + kLanes]);
}
