// Assigns each route (a slot of a token) a row, sorted by expert (docs/numerics.md, section 8):
//
//   row_map[t, k] = start of its expert + number of earlier routes of this expert, or -1
//   sources[row] = t * topk + k, or -1 for an unused row; each expert starts at a multiple of `align`
//
// route_count  assignment [tokens, topk] i32 or i64, or u8 [tokens, experts] (a mask) -> counts u32 [experts,
//              blocks (padded to 4)]: the routes of each expert in each block's tokens. A mask also gives
//              experts i32 [tokens, topk].
// route_rank   assignment (or experts, for a mask), counts -> row_map i32 [tokens, topk], sources i32 [rows],
//              splits i32 [experts], aligned_splits i32 [experts], offsets i64 [experts + 1].
//
// In both kernels a block of 256 threads takes the same consecutive tokens, and each of its warps consecutive
// ones of them. A block of route_rank adds up the counts of the blocks before it, an expert per warp and
// step, so that nothing is left between launches and no block waits for another. Counts come from the L2. Its
// warps count their own routes in shared memory. A scan of these counts over experts and warps gives the row
// of each warp's first route of each expert. A second pass over the warp's routes, 32 at a time, ranks the
// routes of one expert in their order by __match_any_sync, so that nothing depends on the schedule. A single
// block counts for itself, without route_count. There are at most kMostBlocks blocks: a warp's lanes load one
// block's count each at once.
//
// Wrong facts on the device are harmless: an index of no expert counts as dropped, a mask's experts beyond
// `topk` are left out, and rows past the bound are not assigned. The assignment is read two or three times,
// after the first time from the L2; row_map and sources are written once. No defines.
#include "memory/errors.cuh"
#include "memory/chunks.cuh"

struct RouteParams {
    const void* assignment;      // [tokens, topk] i32, i64, or u8 [tokens, experts] (a mask)
    i32* experts;                // [tokens, topk], for a mask
    u32* counts;                 // [experts, pitch]; null: a single block, which counts for itself
    i32* row_map;                // [tokens, topk]
    i32* sources;                // [rows]
    i32* splits;                 // [experts]
    i32* aligned_splits;         // [experts]
    i64* offsets;                // [experts + 1]
    u32* errors;                 // the device's sticky error word
    i64 tokens;
    u32 topk, num_experts, rows, align;
    u32 warp_tokens;             // tokens per warp
    u32 pitch;                   // number of blocks, rounded up to 4
    u32 wide;                    // 1: indices are i64
    u32 mask;                    // 1: the assignment is a mask; 2: a mask with a slot per expert
};

constexpr int kThreads = 256, kWarps = kThreads / 32, kMostExperts = 1024, kMostBlocks = 128;

// This warp's tokens, and its routes: `begin` to `end` of all tokens * topk routes.
struct WarpRoutes {
    i64 first_token, end_token, begin, end;
    __device__ __forceinline__ explicit WarpRoutes(const RouteParams& p) {
        const i64 first = ((i64)blockIdx.x * kWarps + threadIdx.x / 32) * p.warp_tokens;
        const i64 last = first + p.warp_tokens;
        first_token = first < p.tokens ? first : p.tokens;
        end_token = last < p.tokens ? last : p.tokens;
        begin = first_token * p.topk;
        end = end_token * p.topk;
    }
};

// Returns the expert of a route, or -1 if it is dropped. Sets `wrong` for an index of no expert.
__device__ __forceinline__ i32 load_expert(const RouteParams& p, i64 route, bool& wrong) {
    i64 expert;
    if (p.mask) expert = p.experts[route];
    else if (p.wide) expert = load_read_only(static_cast<const i64*>(p.assignment) + route);
    else expert = load_read_only(static_cast<const i32*>(p.assignment) + route);
    wrong |= expert < -1 || expert >= (i64)p.num_experts;
    return expert >= 0 && expert < (i64)p.num_experts ? (i32)expert : -1;
}

// Loads a lane's experts of the kRoutesPerLane * 32 routes from `first` on, all loads in flight; -1 past the
// warp's last route.
constexpr int kRoutesPerLane = 4;
__device__ __forceinline__ void load_experts(const RouteParams& p, const WarpRoutes& routes, i64 first,
                                             i32 (&expert)[kRoutesPerLane], bool& wrong) {
#pragma unroll
    for (int u = 0; u < kRoutesPerLane; u++) {
        const i64 route = first + u * 32 + threadIdx.x % 32;
        expert[u] = route < routes.end ? load_expert(p, route, wrong) : -1;
    }
}
// Counts the experts of the warp's routes. `expert`: those of the first routes, replaced by those of the
// last. The next ones are loaded while these are counted.
__device__ __forceinline__ void count_experts(const RouteParams& p, const WarpRoutes& routes,
                                              i32 (&expert)[kRoutesPerLane], bool& wrong, u32* count) {
    for (i64 first = routes.begin; first < routes.end; first += kRoutesPerLane * 32) {
        i32 next[kRoutesPerLane] = {-1, -1, -1, -1};
        const bool more = first + kRoutesPerLane * 32 < routes.end;
        if (more) load_experts(p, routes, first + kRoutesPerLane * 32, next, wrong);
#pragma unroll
        for (int u = 0; u < kRoutesPerLane; u++)
            if (expert[u] >= 0) atomicAdd(&count[expert[u]], 1u);
        if (!more) break;
#pragma unroll
        for (int u = 0; u < kRoutesPerLane; u++) expert[u] = next[u];
    }
}

#ifdef ENTRY_route_count
// Writes the experts of a mask's tokens to their slots, in ascending order, one token per warp at a time.
// Returns true if a token has more than topk experts.
__device__ __forceinline__ bool list_experts(const RouteParams& p, u32* count) {
    const WarpRoutes routes(p);
    const u32 lane = threadIdx.x % 32, before = (1u << lane) - 1;
    const bool slot_for_each = p.mask == 2;
    bool too_many = false;
    for (i64 token = routes.first_token; token < routes.end_token; token++) {
        const u8* chosen = static_cast<const u8*>(p.assignment) + token * p.num_experts;
        i32* slots = p.experts + token * p.topk;
        u32 used = 0;
        for (u32 first = 0; first < p.num_experts; first += 32) {
            const u32 expert = first + lane;
            const bool here = expert < p.num_experts && load_read_only(chosen + expert) != 0;
            const u32 all = __ballot_sync(~0u, here);
            const u32 slot = slot_for_each ? expert : used + __popc(all & before);
            if (here && slot < p.topk) {
                slots[slot] = (i32)expert;
                atomicAdd(&count[expert], 1u);
            } else if (slot_for_each && expert < p.num_experts) {
                slots[expert] = -1;
            }
            used += __popc(all);
        }
        too_many |= used > p.topk;
        if (!slot_for_each)
            for (u32 slot = used + lane; slot < p.topk; slot += 32) slots[slot] = -1;
    }
    return too_many;
}

extern "C" __global__ void __launch_bounds__(kThreads) route_count(const __grid_constant__ RouteParams p) {
    __shared__ u32 count[kMostExperts];
    for (u32 expert = threadIdx.x; expert < p.num_experts; expert += kThreads) count[expert] = 0;
    __syncthreads();
    if (p.mask) {
        if (list_experts(p, count) && threadIdx.x % 32 == 0) report(p.errors, kRouteBound);
    } else {
        const WarpRoutes routes(p);
        bool wrong = false;                                  // reported by route_rank
        i32 expert[kRoutesPerLane];
        load_experts(p, routes, routes.begin, expert, wrong);
        count_experts(p, routes, expert, wrong, count);
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < p.num_experts; expert += kThreads)
        p.counts[(i64)expert * p.pitch + blockIdx.x] = count[expert];
}
#endif

#ifdef ENTRY_route_rank
struct Shared {
    u32 warp[kWarps][kMostExperts];  // routes of a warp, later the row of its next route
    u32 before[kMostExperts];        // routes of earlier blocks, later the expert's first row
    u32 total[kMostExperts];         // routes of all blocks
    u32 scan[kWarps];
};

// Returns the sum of the counts of blocks first to first + 3 that are before `end`. Counts after the last
// block are never written.
__device__ __forceinline__ u32 sum_of_first(const uint4& c, u32 first, u32 end) {
    return (first < end ? c.x : 0) + (first + 1 < end ? c.y : 0) + (first + 2 < end ? c.z : 0)
           + (first + 3 < end ? c.w : 0);
}

// Adds up for each expert the counts of the blocks before this one, and those of all blocks, with the counts
// of kBatch experts in flight per warp.
template <int kBatch>
__device__ __forceinline__ void add_counts(const RouteParams& p, Shared& shared) {
    const u32 first = threadIdx.x % 32 * 4;
    for (u32 batch = threadIdx.x / 32; batch < p.num_experts; batch += kBatch * kWarps) {
        uint4 count[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
            const u32 expert = batch + u * kWarps;
            count[u] = make_uint4(0, 0, 0, 0);
            if (expert < p.num_experts && first < p.pitch)
                count[u] = *reinterpret_cast<const uint4*>(p.counts + (i64)expert * p.pitch + first);
        }
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
            const u32 expert = batch + u * kWarps;
            if (expert >= p.num_experts) continue;
            const u32 all_before = __reduce_add_sync(~0u, sum_of_first(count[u], first, blockIdx.x));
            const u32 all = __reduce_add_sync(~0u, sum_of_first(count[u], first, gridDim.x));
            if (first == 0) shared.before[expert] = all_before, shared.total[expert] = all;
        }
    }
}

// Returns the inclusive sum over the threads of a block. Contains __syncthreads().
__device__ __forceinline__ u32 block_prefix_sum(u32 value, u32* scan, u32& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();                                 // other warps may still read an earlier call's sums
    if (lane == 31) scan[warp] = value;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
        if (w < warp) value += scan[w];
        total += scan[w];
    }
    return value;
}

// Turns the counts of routes into rows: shared.before gets the first row of each expert, and shared.warp the
// row of each warp's first route of it. Block 0 writes the arrays of experts. Returns the row after the last
// expert.
__device__ __forceinline__ u32 place_experts(const RouteParams& p, Shared& shared) {
    u32 end = 0;                                             // end of the experts of earlier rounds
    for (u32 first = 0; first < p.num_experts; first += kThreads) {
        const u32 expert = first + threadIdx.x;
        u32 total = 0, next = 0, aligned = 0;
        if (expert < p.num_experts) {
            if (p.counts) {
                total = shared.total[expert];
                next = shared.before[expert];
            } else {
#pragma unroll
                for (int w = 0; w < kWarps; w++) total += shared.warp[w][expert];
                shared.total[expert] = total;
            }
            aligned = aligned_up(total, p.align);
        }
        u32 round = 0;
        const u32 start = end + block_prefix_sum(aligned, shared.scan, round) - aligned;
        end += round;
        if (expert >= p.num_experts) continue;
        shared.before[expert] = start;
        next += start;
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            const u32 count = shared.warp[w][expert];
            shared.warp[w][expert] = next;
            next += count;
        }
        if (blockIdx.x == 0) {
            const u32 begin = smaller(start, p.rows), stop = smaller(start + aligned, p.rows);
            p.splits[expert] = (i32)smaller(total, p.rows - begin);
            p.aligned_splits[expert] = (i32)(stop - begin);
            p.offsets[expert] = begin;
            if (expert + 1 == p.num_experts) p.offsets[p.num_experts] = stop;
        }
    }
    return end;
}

// Assigns rows to 32 routes of a warp. route: this lane's route. expert: its expert, or -1. same_expert: the
// lanes whose routes have this expert. next_row: the row of the warp's next route of each expert. Returns
// true if the row of this lane's route is past the bound.
__device__ __forceinline__ bool give_rows(const RouteParams& p, const WarpRoutes& routes, i64 route,
                                          i32 expert, u32 same_expert, u32* next_row) {
    const u32 earlier_lanes = (1u << threadIdx.x % 32) - 1, rank = __popc(same_expert & earlier_lanes);
    const u32 next = expert >= 0 ? next_row[expert] : 0;
    __syncwarp();
    if (expert >= 0 && rank == 0) next_row[expert] = next + __popc(same_expert);
    __syncwarp();
    if (route >= routes.end) return false;
    const bool fits = expert >= 0 && next + rank < p.rows;
    p.row_map[route] = fits ? (i32)(next + rank) : -1;
    if (fits) p.sources[next + rank] = (i32)route;
    return expert >= 0 && !fits;
}

// Assigns rows to a warp's routes. held: the experts of the last routes counted. Returns true if the row of a
// route of this lane is past the bound.
__device__ __forceinline__ bool rank_routes(const RouteParams& p, const WarpRoutes& routes,
                                            i32 (&held)[kRoutesPerLane], bool& wrong, u32* next_row) {
    bool past_bound = false;
    const bool all_held = routes.end - routes.begin <= kRoutesPerLane * 32;    // still in registers
    for (i64 first = routes.begin; first < routes.end; first += kRoutesPerLane * 32) {
        if (!all_held) load_experts(p, routes, first, held, wrong);
        u32 same_expert[kRoutesPerLane];
#pragma unroll
        for (int u = 0; u < kRoutesPerLane; u++)
            same_expert[u] = first + u * 32 < routes.end ? __match_any_sync(~0u, held[u]) : 0;
#pragma unroll
        for (int u = 0; u < kRoutesPerLane; u++) {
            if (first + u * 32 >= routes.end) break;         // the whole warp exits
            const i64 route = first + u * 32 + threadIdx.x % 32;
            past_bound |= give_rows(p, routes, route, held[u], same_expert[u], next_row);
        }
    }
    return past_bound;
}

// Marks the unused rows at the end of each expert, and those from `end` on, after the last expert.
__device__ __forceinline__ void mark_unused(const RouteParams& p, const Shared& shared, u32 end) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 expert = blockIdx.x * kWarps + warp; expert < p.num_experts; expert += gridDim.x * kWarps) {
        const u32 start = shared.before[expert], total = shared.total[expert];
        const u32 begin = start + total, stop = start + aligned_up(total, p.align);
        for (u32 row = begin + lane; row < stop; row += 32)
            if (row < p.rows) p.sources[row] = -1;
    }
    for (i64 row = (i64)end + blockIdx.x * kThreads + threadIdx.x; row < p.rows;
         row += (i64)gridDim.x * kThreads)
        p.sources[row] = -1;
}

// One block per SM suffices. Without this bound the compiler makes room for five and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 1) route_rank(const __grid_constant__ RouteParams p) {
    __shared__ Shared shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const WarpRoutes routes(p);
    bool wrong = false;
    i32 held[kRoutesPerLane];                                // in flight while counts are loaded
    load_experts(p, routes, routes.begin, held, wrong);
    for (u32 expert = lane; expert < p.num_experts; expert += 32) shared.warp[warp][expert] = 0;
    __syncwarp();
    if (p.counts && p.num_experts <= 8 * kWarps) add_counts<8>(p, shared);
    else if (p.counts) add_counts<16>(p, shared);
    count_experts(p, routes, held, wrong, shared.warp[warp]);
    __syncthreads();
    const u32 end = place_experts(p, shared);
    __syncthreads();
    const bool past_bound = rank_routes(p, routes, held, wrong, shared.warp[warp]);
    mark_unused(p, shared, end);
    report(p.errors, (wrong ? kRouteExpert : 0u) | (past_bound ? kRouteBound : 0u));
}
#endif
