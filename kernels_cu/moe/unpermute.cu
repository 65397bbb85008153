// unpermute adds up each token's weighted rows (docs/numerics.md, section 8):
//
//   out[t] = narrow(sum of fl(y[row] * prob)) over the rows of token t, the last row first, or 0 without rows
//   to_slots[t, k] = from_rows[row_map[t, k]], or 0: the gradients of probs
//
// y IN [rows, columns], probs f32 (see Routes::prob_at) or null, row_map i32 [tokens, topk] -> out IN
// [tokens, columns]. Every product and every sum is rounded to f32, and the result once more to IN,
// nearest-even. Its NaN is the format's one NaN. A sum starts from -0, so that zeros keep their sign. Moves
// one row of y per route, and the result.
//
// A block of 256 threads sorts its tokens' routes in shared memory. Then each thread has the same columns of
// eight rows in flight. Programs that know the number of routes (RowPipeline) load the next eight while
// adding these up. Rows that allow no 16-byte accesses are read element by element.
//
// Defines:
//   IN           the format of y and out
//   TOPK         1, 2, 4, 6 or 8 slots per token, kept in registers by RowPipeline; 0: any number
#include "moe/row_sums.cuh"
#include "moe/routes.cuh"

struct UnpermuteParams {
    const IN::storage* y;
    IN::storage* out;
    const float* probs;          // see Routes::prob_at; null: all are 1
    const u32* from_rows;        // [rows] f32
    u32* to_slots;               // [tokens, topk] f32, or null
    Routes routes;
    i64 columns;
    u32 tokens_per_block;        // 1 if several thread blocks share a token
    u32 across;                  // thread blocks per token
    u32 row_share;               // chunks of a row per thread block
    u32 vector;                  // 1: rows are whole chunks and 16-byte aligned
};

constexpr int kInFlight = 8;
constexpr int kMostRoutes = 1024;        // per block
struct Route {
    i64 at;                      // byte offset of its row in y; -1: none
    float prob;
};

// Returns the sums of a chunk of columns over the rows of a token. left: existing columns.
template <bool kVector>
__device__ __forceinline__ RowChunk sum_rows(const UnpermuteParams& p, const Route* route, i64 column,
                                             int left) {
    constexpr int kFewInFlight = kVector ? 4 : 2;
    const int topk = (int)p.routes.topk;
    const u8* const y = reinterpret_cast<const u8*>(p.y + column);
    const auto load = [&](const Route& from) {
        const IN::storage* const row = reinterpret_cast<const IN::storage*>(y + from.at);
        return kVector ? RowChunk::load(row) : RowChunk::load_partial(row, left);
    };
    ChunkSums sums;
    int n = 0;
#pragma unroll 1
    for (; kVector && n + kInFlight <= topk && route[n + kInFlight - 1].at >= 0; n += kInFlight) {
        RowChunk part[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; u++) part[u] = load(route[n + u]);
#pragma unroll
        for (int u = 0; u < kInFlight; u++) sums.add(part[u], route[n + u].prob);
    }
#pragma unroll 1
    for (; n < topk && route[n].at >= 0; n += kFewInFlight) {
        RowChunk part[kFewInFlight];
        bool here[kFewInFlight];
#pragma unroll
        for (int u = 0; u < kFewInFlight; u++) {
            here[u] = n + u < topk && route[n + u].at >= 0;
            if (here[u]) part[u] = load(route[n + u]);
        }
#pragma unroll
        for (int u = 0; u < kFewInFlight; u++)
            if (here[u]) sums.add(part[u], route[n + u].prob);
    }
    return sums.narrow(n);
}

#if TOPK
// Adds up whole chunks of tokens that have a row for every slot, by all threads of a block. While a thread
// adds up the chunks of up to kInFlight rows, the next ones are in flight, so that the memory is never idle.
struct RowPipeline {
    static constexpr int kChunksAtOnce = kInFlight / TOPK;                  // chunks per thread at a time
    static constexpr int kStep = kChunksAtOnce * kThreads;
    using Rows = RowChunk[kChunksAtOnce][TOPK];
    const UnpermuteParams& p;
    const Route* const routes;   // the routes of the block's tokens
    const i64 first_token, first_chunk;
    const int chunks, end;       // chunks of a token from first_chunk on; chunks of all tokens

    __device__ __forceinline__ void run() const {
        Rows part[2];
        int i = threadIdx.x;
        request(i, part[0]);
#pragma unroll 1
        while (i < end) {
            request(i + kStep, part[1]);
            add(i, part[0]);
            i += kStep;
            if (i >= end) break;
            request(i + kStep, part[0]);
            add(i, part[1]);
            i += kStep;
        }
    }

private:
    __device__ __forceinline__ int token_of(int i) const { return i < chunks ? 0 : i / chunks; }
    __device__ __forceinline__ i64 column_of(int i, int token) const {
        return (first_chunk + (i - token * chunks)) * kCount;
    }
    __device__ __forceinline__ void request(int first, Rows& part) const {
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; c++) {
            const int i = first + c * kThreads;
            if (i >= end) break;
            const int token = token_of(i);
            const u8* const y = reinterpret_cast<const u8*>(p.y + column_of(i, token));
#pragma unroll
            for (int u = 0; u < TOPK; u++) {
                const u8* const from = y + routes[token * TOPK + u].at;
                part[c][u] = RowChunk::load(reinterpret_cast<const IN::storage*>(from));
            }
        }
    }
    __device__ __forceinline__ void add(int first, const Rows& part) const {
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; c++) {
            const int i = first + c * kThreads;
            if (i >= end) break;
            const int token = token_of(i);
            ChunkSums sums;
#pragma unroll
            for (int u = 0; u < TOPK; u++) sums.add(part[c][u], routes[token * TOPK + u].prob);
            sums.narrow(TOPK).store_whole(p.out + (first_token + token) * p.columns + column_of(i, token));
        }
    }
};
#endif

// The tokens of a thread block.
struct BlockTokens {
    i64 first;                   // the first token
    int count;                   // existing tokens
    bool writes_slots;           // first of the thread blocks that share a token

    // Returns the prob of one of the thread block's slots.
    static __device__ __forceinline__ float load_prob(const UnpermuteParams& p, i64 token, int slot) {
        const i64 at = p.routes.prob_at(token, slot);
        return at < 0 ? 0.0f : load_read_only(p.probs + at);
    }

    // Writes the tokens' routes to shared memory: a token's last row comes first, and its routes without a
    // row come last. given: room for the rows in the order of slots. Returns true if every route of the
    // thread block has a row. Ends with a barrier.
    __device__ __forceinline__ bool sort(const UnpermuteParams& p, i32* given, Route* sorted) const {
        const int topk = (int)p.routes.topk, slots = count * topk;
        // Probs of the first kThreads routes are loaded before their rows are known, to save latency.
        float own_prob = 1.0f;
        for (int i = threadIdx.x; i < slots; i += kThreads) {
            given[i] = (i32)p.routes.row(first * topk + i);
            if (p.probs && i < kThreads) {
                const int token = i / topk;
                own_prob = load_prob(p, first + token, i - token * topk);
            }
        }
        __syncthreads();
        bool own_here = true;
        for (int i = threadIdx.x; i < slots; i += kThreads) {
            const int token = i / topk, own = token * topk;
            const i32 row = given[i];
            float prob = own_prob;
            if (p.probs && i >= kThreads) prob = load_prob(p, first + token, i - own);
            own_here = own_here && row >= 0;
            int rank = 0;
            for (int j = own; j < own + topk; j++) rank += given[j] > row || (given[j] == row && j < i);
            sorted[own + rank] = {row < 0 ? -1 : row * p.columns * (i64)sizeof(IN::storage), prob};
            if (p.to_slots && writes_slots)
                p.to_slots[first * topk + i] = row < 0 ? 0 : load_read_only(p.from_rows + row);
        }
        return __syncthreads_and(own_here);
    }
};

// TOPK 1, 2, 4, 6 or 8: each token has TOPK routes, and rows are whole chunks. 0: all other calls.
extern "C" __global__ void __launch_bounds__(kThreads, TOPK ? 2 : 3)
unpermute(const __grid_constant__ UnpermuteParams p) {
    __shared__ i32 given[kMostRoutes];
    __shared__ Route sorted[kMostRoutes];
    const u32 group = blockIdx.x / p.across, part = blockIdx.x - group * p.across;
    const i64 first = (i64)group * p.tokens_per_block, first_chunk = (i64)part * p.row_share;
    const i64 chunks = (p.columns + kCount - 1) / kCount;
    const int count = left_of(p.routes.tokens - first, p.tokens_per_block);
    [[maybe_unused]] const bool all_here = BlockTokens{first, count, part == 0}.sort(p, given, sorted);

    const int across = left_of(chunks - first_chunk, p.row_share);
#if TOPK
    if (all_here) return RowPipeline{p, sorted, first, first_chunk, across, count * across}.run();
#endif
    for (int i = threadIdx.x; i < count * across; i += kThreads) {
        const int token = count == 1 ? 0 : i / across;
        const i64 column = (first_chunk + (i - token * across)) * kCount;
        const Route* const route = sorted + token * (int)p.routes.topk;
        IN::storage* const to = p.out + (first + token) * p.columns + column;
        if (p.vector) {
            sum_rows<true>(p, route, column, kCount).store_whole(to);
        } else {
            const int left = left_of(p.columns - column, kCount);
            sum_rows<false>(p, route, column, left).store_partial(to, left);
        }
    }
}
