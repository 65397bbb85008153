// unpermute_backward computes the gradients of unpermute (docs/numerics.md, section 8):
//
//   grad_y[row] = narrow(fl(grad[t] * prob)), and 0 in unused rows
//   dprobs[t, k] = the sum of fl(grad[t] * y[row]) over the columns by the fixed tree
//
// grad IN [tokens, columns], y IN [rows, columns], probs f32 -> grad_y IN [rows, columns], dprobs f32 like
// probs. Products and sums are rounded to f32 and grad_y to IN, nearest-even. NaN becomes the format's one
// NaN. Moves every row of the four arrays once.
//
// A block of 256 threads takes a token, keeps up to 1024 chunks of it in registers and goes through its rows.
// A chunk of the next row is loaded as soon as this row's chunk is used. A warp has 32 consecutive chunks,
// whose sum by shuffles is a subtree of the fixed tree, and so is the sum of 32 such sums. A RunningTreeSum
// adds up the sums of tiles. Rows that allow no 16-byte accesses are moved element by element.
//
// Defines:
//   IN           the format of grad, y and grad_y
#include "numerics/tree_sum.cuh"
#include "moe/routes.cuh"

struct UnpermuteBackwardParams {
    const IN::storage* grad;     // [tokens, columns]
    const IN::storage* y;        // [rows, columns]
    IN::storage* grad_y;         // [rows, columns]
    const float* probs;          // see Routes::prob_at
    float* dprobs;               // shape of probs
    Routes routes;
    i64 columns;
    u32 vector;                  // 1: rows are whole chunks and 16-byte aligned
    u32 step;                    // common divisor, in bytes, of the rows of grad_y
};

constexpr int kCount = 16 / sizeof(IN::storage), kUnits = 4;
constexpr int kTile = kUnits * kThreads;     // chunks in a tile: one per lane of 32 warps
constexpr int kStep = kThreads * kCount;     // columns between a thread's chunks
constexpr int kSlots = 32;                   // slots at a time
constexpr int kMostExperts = 1024;
using RowChunk = Chunk<IN, kCount>;
static_assert(kUnits * kWarps == 32, "one warp adds up a tile's sums");

// warp_tree_sum of kUnits terms at once: lane l gets the sum of term l % kUnits. Fewer steps, since each of
// two lanes gives away half of its terms.
__device__ __forceinline__ float warp_tree_sums(const float (&term)[kUnits]) {
    static_assert(kUnits == 4, "two bits of a lane's number");
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const float first = add_rn(odd ? term[1] : term[0], __shfl_xor_sync(~0u, odd ? term[0] : term[1], 1));
    const float second = add_rn(odd ? term[3] : term[2], __shfl_xor_sync(~0u, odd ? term[2] : term[3], 1));
    float sum = add_rn(upper ? second : first, __shfl_xor_sync(~0u, upper ? first : second, 2));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, step));
    return sum;
}

// Returns part * factor, rounded to the format: the bytes of narrow2, with one test for NaN per chunk.
template <class F>
__device__ __forceinline__ Chunk<F, kCount> scaled(const Chunk<F, kCount>& part, float factor) {
    float value[kCount];
#pragma unroll
    for (int j = 0; j < kCount / 2; j++) {
        part.widen2(j, value[2 * j], value[2 * j + 1]);
        value[2 * j] = mul_rn(value[2 * j], factor);
        value[2 * j + 1] = mul_rn(value[2 * j + 1], factor);
    }
    Chunk<F, kCount> out;
#ifndef CUPY_FP8_HOST
    if constexpr (sizeof(typename F::storage) == 2) {
        u32 amaxes = 0;
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            out.word[j] = F::narrow2_any_nan(value[2 * j], value[2 * j + 1]);
            amaxes = F::template max_magnitudes<true>(amaxes, out.word[j]);
        }
        // NaN wins and is 0x7fff here; no other half has these bits
        if ((amaxes & 0xffffu) != 0x7fffu && amaxes >> 16 != 0x7fffu) return out;
    }
#endif
#pragma unroll
    for (int j = 0; j < kCount / 2; j++) out.narrow2(j, value[2 * j], value[2 * j + 1]);
    return out;
}

struct Shared {
    i32 row[kSlots];
    i64 prob_at[kSlots];
    float prob[kSlots];
    float of_warp[kSlots][32];               // sums of 32 parts of a tile
    RunningTreeSum of_tiles[kSlots];
    u32 routed[kMostExperts / 32];           // one bit per expert
};

// Adds the sums of a tile to those of earlier tiles. Each warp has its own slots.
__device__ __forceinline__ void add_tile(Shared& shared, int slots, i64 tile) {
    for (int k = threadIdx.x / 32; k < slots; k += kWarps) {
        if (shared.row[k] < 0) continue;
        const float sum = warp_tree_sum(shared.of_warp[k][threadIdx.x % 32]);
        if (threadIdx.x % 32 == 0) shared.of_tiles[k].add(tile, sum);
    }
}

// A thread's chunks of a tile. Chunk u begins kStep * u columns after the first.
template <bool kVector>
struct Chunks {
    int left;                    // columns from the first chunk on; whole chunks with kVector

    __device__ __forceinline__ bool has(int u) const { return left > u * kStep; }
    __device__ __forceinline__ RowChunk load(const IN::storage* from, int u) const {
        if (!has(u)) return {};
        return kVector ? RowChunk::load(from + u * kStep)
                       : RowChunk::load_partial(from + u * kStep, left - u * kStep);
    }
    __device__ __forceinline__ void store(IN::storage* to, int u, const RowChunk& part) const {
        if (!has(u)) return;
        if (kVector) part.store_whole(to + u * kStep);
        else part.store_partial(to + u * kStep, left - u * kStep);
    }
    // Returns the sum of the products of two chunks by the tree.
    __device__ __forceinline__ float dot(const RowChunk& a, const RowChunk& b, int u) const {
        TreeSum<kCount> sum;
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
            float a_lo, a_hi, b_lo, b_hi;
            a.widen2(j / 2, a_lo, a_hi);
            b.widen2(j / 2, b_lo, b_hi);
            const bool lo = kVector || u * kStep + j < left, hi = kVector || u * kStep + j + 1 < left;
            sum.add(j, lo ? mul_rn(a_lo, b_lo) : as_float(kAbsentTerm));
            sum.add(j + 1, hi ? mul_rn(a_hi, b_hi) : as_float(kAbsentTerm));
        }
        return has(u) ? sum.sum() : as_float(kAbsentTerm);
    }
};

// Writes a tile's columns of the gradients of these slots' rows, and to shared memory the sums of the rows'
// products with `from`.
template <bool kVector>
__device__ __forceinline__ void do_rows(const UnpermuteBackwardParams& p, Shared& shared, u32 present,
                                        i64 column, int left, const RowChunk (&from)[kUnits]) {
    const Chunks<kVector> chunks{left};
    RowChunk other[kUnits];
    int k = __ffs(present) - 1;
    if (present) {
        const IN::storage* const y = p.y + shared.row[k] * p.columns + column;
#pragma unroll
        for (int u = 0; u < kUnits; u++) other[u] = chunks.load(y, u);
    }
#pragma unroll 1
    while (present) {
        present &= present - 1;
        const int next = present ? __ffs(present) - 1 : k;
        const IN::storage* const y = p.y + shared.row[next] * p.columns + column;
        IN::storage* const to = p.grad_y + shared.row[k] * p.columns + column;
        const float prob = shared.prob[k];
        float sum[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            RowChunk grad = from[u];
#ifndef CUPY_FP8_HOST
            // Widened anew for every row; otherwise the compiler keeps the chunk as f32, in 32 registers.
#pragma unroll
            for (int w = 0; w < RowChunk::kWords; w++) asm volatile("" : "+r"(grad.word[w]));
#endif
            sum[u] = chunks.dot(grad, other[u], u);
            if (kVector && present) other[u] = chunks.load(y, u);    // prefetches the next row
            chunks.store(to, u, scaled(grad, prob));
        }
        const float of_warp = warp_tree_sums(sum);
        if (threadIdx.x % 32 < kUnits)
            shared.of_warp[k][threadIdx.x % 32 * kWarps + threadIdx.x / 32] = of_warp;
        k = next;
        if (!kVector && present) {
#pragma unroll
            for (int u = 0; u < kUnits; u++) other[u] = chunks.load(y, u);
        }
    }
}

// A thread's chunks of a token's gradient, tile by tile.
struct TokenGrad {
    const UnpermuteBackwardParams& p;
    const IN::storage* const grad;           // the token's gradient
    RowChunk chunk[kUnits];

    __device__ __forceinline__ TokenGrad(const UnpermuteBackwardParams& p, i64 token)
        : p(p), grad(p.grad + token * p.columns) {}
    // The thread's first column of a tile.
    static __device__ __forceinline__ i64 column_of(i64 tile) {
        return (tile * kTile + threadIdx.x) * kCount;
    }
    // Columns from it on.
    __device__ __forceinline__ int left_in(i64 tile) const {
        return left_of(p.columns - column_of(tile), kTile * kCount);
    }
    __device__ __forceinline__ void load(i64 tile) {
        const int left = left_in(tile);
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            if (p.vector) chunk[u] = Chunks<true>{left}.load(grad + column_of(tile), u);
            else chunk[u] = Chunks<false>{left}.load(grad + column_of(tile), u);
        }
    }
    __device__ __forceinline__ void multiply(Shared& shared, u32 present, i64 tile) const {
        if (p.vector) do_rows<true>(p, shared, present, column_of(tile), left_in(tile), chunk);
        else do_rows<false>(p, shared, present, column_of(tile), left_in(tile), chunk);
    }
};

// Loads the rows and probs of `slots` slots of a token, from `first` on.
__device__ __forceinline__ void load_slots(const UnpermuteBackwardParams& p, Shared& shared, i64 token,
                                           u32 first, int slots) {
    if ((int)threadIdx.x >= slots) return;
    const i32 row = p.routes.row(token * p.routes.topk + first + threadIdx.x);
    const i64 at = p.routes.prob_at(token, first + threadIdx.x);
    shared.row[threadIdx.x] = row;
    shared.prob_at[threadIdx.x] = at;
    shared.prob[threadIdx.x] = at >= 0 ? load_read_only(p.probs + at) : 0.0f;
}

// Writes the gradients of these slots' probs, and marks their experts.
__device__ __forceinline__ void store_dprobs(const UnpermuteBackwardParams& p, Shared& shared, i64 token,
                                             int slots, i64 tiles) {
    if ((int)threadIdx.x >= slots || shared.prob_at[threadIdx.x] < 0) return;
    const i64 at = shared.prob_at[threadIdx.x];
    p.dprobs[at] = shared.row[threadIdx.x] < 0
        ? 0.0f : as_float(f32::narrow(shared.of_tiles[threadIdx.x].total(tiles)));
    if (p.routes.columns) {
        const u32 expert = (u32)(at - token * p.routes.columns);
        atomicOr(&shared.routed[expert / 32], 1u << expert % 32);
    }
}

// Writes zeros as the gradients of the probs of experts that the token does not go to.
__device__ __forceinline__ void clear_dprobs(const UnpermuteBackwardParams& p, const Shared& shared,
                                             i64 token) {
    for (u32 expert = threadIdx.x; expert < p.routes.columns; expert += kThreads)
        if (!(shared.routed[expert / 32] >> expert % 32 & 1))
            p.dprobs[token * p.routes.columns + expert] = 0.0f;
}

// Writes the gradients of a token's rows and probs. Call from all threads.
__device__ __forceinline__ void do_token(const UnpermuteBackwardParams& p, Shared& shared, i64 token) {
    const i64 chunks = (p.columns + kCount - 1) / kCount, tiles = (chunks + kTile - 1) / kTile;
    TokenGrad grad(p, token);
    grad.load(0);                            // in flight while slots are loaded
    if (p.routes.columns)
        for (int w = threadIdx.x; w < kMostExperts / 32; w += kThreads) shared.routed[w] = 0;
    for (u32 first = 0; first < p.routes.topk; first += kSlots) {
        const int slots = left_of((i64)p.routes.topk - first, kSlots);
        __syncthreads();
        load_slots(p, shared, token, first, slots);
        __syncthreads();
        const int lane = threadIdx.x % 32;
        const u32 present = __ballot_sync(~0u, lane < slots && shared.row[lane] >= 0);
        for (i64 tile = 0; tile < tiles; tile++) {
            if (tiles > 1 && (first > 0 || tile > 0)) grad.load(tile);
            grad.multiply(shared, present, tile);
            __syncthreads();
            add_tile(shared, slots, tile);
            __syncthreads();
        }
        store_dprobs(p, shared, token, slots, tiles);
    }
    if (p.routes.columns) {
        __syncthreads();
        clear_dprobs(p, shared, token);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
unpermute_backward(const __grid_constant__ UnpermuteBackwardParams p) {
    __shared__ Shared shared;
    const i32 own_source = load_own_source(p.routes);
    if (blockIdx.x < p.routes.tokens) do_token(p, shared, blockIdx.x);
    clear_unused(p.routes, own_source, [&](i64 row) {
        u8* const to = reinterpret_cast<u8*>(p.grad_y + row * p.columns);
        clear(to, p.columns * (i64)sizeof(IN::storage), p.step);
    });
}
