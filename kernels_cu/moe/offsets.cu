// splits_to_offsets turns sizes of groups into offsets (docs/numerics.md, section 6), for up to 16 outputs:
//
//   to[lead + i] = stride * (sizes[0] + ... + sizes[i])        and to[0] = 0 with a lead
//
// sizes i32 or i64 [n] -> to i32 or i64 [n], or [n + 1] with a lead. A negative size counts as 0, and an
// offset that an output cannot hold becomes its largest value; both set a bit in the device's sticky word.
// Moves the sizes once (twice with totals) and every output once, 4 or 8 adjacent bytes per lane.
//
// A block of 512 threads takes a tile of 1024 sizes. Each warp scans its sizes by shuffles. After one
// barrier, every warp adds up the sums of its tile's earlier warps and of all earlier tiles. With one tile
// only latency counts: there is one load before the barrier, and a thread block per output, so that no SM
// writes more than one. With a few tiles a thread block adds up all sizes before its own, which costs less
// than a second launch. With many tiles a first launch (without outputs) leaves each tile's total in
// `totals`, and each thread block of a second launch adds up the totals and writes all outputs.
//
// Sums saturate at 2^63, one more than any offset. That is associative for terms of 0 or more, so the order
// of additions does not matter. No defines.
#include "groups/row_groups.cuh"

struct Output {
    void* to;                    // [n] or, with a lead, [n + 1]
    u64 stride;
    u64 limit;                   // the largest sum whose product with stride fits
    u32 wide;                    // 1: i64; 0: i32
    u32 lead;                    // 1: `to` begins with a 0
};

constexpr int kOutputs = 16;     // outputs per launch

struct OffsetsParams {
    Splits splits;
    u64* totals;                 // [tiles], or null
    u32 tiles;
    u32 outputs;                 // 0: the launch writes the totals
    u32 outputs_per_block;
    Output output[kOutputs];
};

constexpr int kThreads = 512, kWarps = kThreads / 32, kItems = 2, kTile = kThreads * kItems;
constexpr int kInFlight = 8;     // loads in flight per thread, of sizes or totals before its tile
// thread blocks per SM. Three help with many sizes on an H200. On sm_120 CUDA 12's compiler spills with
// three.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 2;
#endif
constexpr u64 kSaturated = 1ull << 63;
constexpr u64 kSmall = (1ull << 32) / (32 * kItems);     // a warp's sum of smaller terms fits 32 bits

__device__ __forceinline__ u32 plus(u32 a, u32 b) { return a + b; }
__device__ __forceinline__ u64 plus(u64 a, u64 b) {      // terms are at most kSaturated
    const u64 sum = a + b;
    return (a | sum) & kSaturated ? kSaturated : sum;
}

// Inclusive sums over a warp's items. Item 0 of all lanes comes before item 1.
template <class T>
__device__ __forceinline__ void warp_prefix_sums(T (&item)[kItems]) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int u = 0; u < kItems; u++) {
            const T other = __shfl_up_sync(~0u, item[u], step);
            if ((int)(threadIdx.x % 32) >= step) item[u] = plus(item[u], other);
        }
#pragma unroll
    for (int u = 1; u < kItems; u++) item[u] = plus(item[u], __shfl_sync(~0u, item[u - 1], 31));
}

__device__ __forceinline__ u64 warp_sum(u64 term) {
    if (__all_sync(~0u, term < kSmall)) return __reduce_add_sync(~0u, (u32)term);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) term = plus(term, __shfl_xor_sync(~0u, term, step));
    return term;
}

__device__ __forceinline__ u64 none_if_negative(i64 size) { return size > 0 ? size : 0; }

// Returns this thread's share of the sum of load(0), ..., load(count - 1).
template <class Load>
__device__ __forceinline__ u64 thread_sum(i64 count, Load load) {
    u64 sum = 0;
    for (i64 start = threadIdx.x; start < count; start += kInFlight * kThreads) {
        u64 term[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; u++)
            term[u] = start + u * kThreads < count ? load(start + u * kThreads) : 0;
#pragma unroll
        for (int u = 0; u < kInFlight; u++) sum = plus(sum, term[u]);
    }
    return sum;
}

// Writes this thread's offsets, from its sums. first: index of its first item. Returns true if an offset
// overflows.
template <class T>
__device__ __forceinline__ bool write(const Output& output, u64 largest, const u64 (&sum)[kItems], i64 first,
                                      i64 n) {
    T* const to = static_cast<T*>(output.to) + output.lead;
    bool overflow = false;
#pragma unroll
    for (int u = 0; u < kItems; u++) {
        const i64 i = first + u * 32;
        const bool fits = sum[u] <= output.limit;
        if (i >= n) continue;
        to[i] = (T)(fits ? sum[u] * output.stride : largest);
        overflow |= !fits;
    }
    if (output.lead && first == 0) to[-1] = 0;
    return overflow;
}

// Returns this thread's share of the sum of all sizes before the tile that begins at tile_start.
__device__ __forceinline__ u64 sum_before(const OffsetsParams& p, u32 tile, i64 tile_start) {
    if (p.totals) return thread_sum(tile, [&](i64 i) { return load_read_only(p.totals + i); });
    return thread_sum(tile_start, [&](i64 i) { return none_if_negative(p.splits.load(i)); });
}

// Turns a warp's sizes into inclusive sums. Returns kSplitNegative if one of this thread's is negative, or
// else 0.
__device__ __forceinline__ u32 add_up_warp(const i64 (&size)[kItems], u64 (&sum)[kItems]) {
    bool small = true;
    u32 wrong = 0;
#pragma unroll
    for (int u = 0; u < kItems; u++) {
        sum[u] = none_if_negative(size[u]);
        small &= sum[u] < kSmall;
        if (size[u] < 0) wrong = kSplitNegative;
    }
    if (__all_sync(~0u, small)) {                            // a third of the instructions
        u32 narrow[kItems];
#pragma unroll
        for (int u = 0; u < kItems; u++) narrow[u] = (u32)sum[u];
        warp_prefix_sums(narrow);
#pragma unroll
        for (int u = 0; u < kItems; u++) sum[u] = narrow[u];
    } else {
        warp_prefix_sums(sum);
    }
    return wrong;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
splits_to_offsets(const __grid_constant__ OffsetsParams p) {
    // per warp: sum of its sizes in the tile, and its share of the sum of all sizes before the tile
    __shared__ u64 in_tile[kWarps], before_tile[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 part = p.tiles == 1 ? blockIdx.x : blockIdx.x / p.tiles, tile = blockIdx.x - part * p.tiles;
    const i64 n = p.splits.groups, tile_start = (i64)tile * kTile;
    const i64 first = tile_start + warp * (32 * kItems) + lane;
    i64 size[kItems];
#pragma unroll
    for (int u = 0; u < kItems; u++) size[u] = p.splits.load(first + u * 32);
    const u64 before = p.outputs && tile ? warp_sum(sum_before(p, tile, tile_start)) : 0;
    u64 sum[kItems];
    u32 wrong = add_up_warp(size, sum);
    if (lane == 31) in_tile[warp] = sum[kItems - 1], before_tile[warp] = before;
    __syncthreads();

    const u64 of_warp = lane < kWarps ? in_tile[lane] : 0, of_earlier = lane < kWarps ? before_tile[lane] : 0;
    if (p.outputs == 0) {
        const u64 total = warp_sum(of_warp);
        if (threadIdx.x == 0) p.totals[tile] = total;
        return;
    }
    const u64 start = warp_sum(plus(lane < warp ? of_warp : 0, of_earlier));
#pragma unroll
    for (int u = 0; u < kItems; u++) sum[u] = plus(start, sum[u]);
    const u32 begin = part * p.outputs_per_block, end = begin + p.outputs_per_block;
#pragma unroll 1
    for (u32 o = begin; o < end && o < p.outputs; o++) {
        const Output& output = p.output[o];
        const bool overflow = output.wide ? write<i64>(output, ~0ull >> 1, sum, first, n)
                                          : write<i32>(output, ~0u >> 1, sum, first, n);
        if (overflow) wrong |= kOffsetOverflow;
    }
    wrong = __reduce_or_sync(~0u, wrong);
    if (lane == 0) report(p.splits.errors, wrong);
}
