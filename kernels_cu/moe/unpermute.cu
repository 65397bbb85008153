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
// eight rows in flight. Programs that know the number of slots (RowPipeline) load the next eight while adding
// these up; if tokens have few rows, these are of several columns. Rows that allow no 16-byte accesses are
// read element by element.
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
    i64 at;                      // byte offset of its row in y
    float prob;
};

// Routes of a thread block's tokens.
struct Sorted {
    Route route[kMostRoutes];    // [tokens, topk]
    i32 rows[kThreads];          // of each token

    // Returns the most rows of any of `tokens` tokens. Call from whole warps.
    __device__ __forceinline__ i32 most(int tokens) const {
        i32 own = 0;
        for (int token = threadIdx.x % 32; token < tokens; token += 32)
            own = rows[token] > own ? rows[token] : own;
        return __reduce_max_sync(~0u, own);
    }
};

// Returns the sums of a chunk of columns over the rows of a token. left: existing columns.
template <bool kVector>
__device__ __forceinline__ RowChunk sum_rows(const UnpermuteParams& p, const Route* route, int rows,
                                             i64 column, int left) {
    constexpr int kFewInFlight = kVector ? 4 : 2;
    const u8* const y = reinterpret_cast<const u8*>(p.y + column);
    const auto load = [&](const Route& from) {
        const IN::storage* const row = reinterpret_cast<const IN::storage*>(y + from.at);
        return kVector ? RowChunk::load(row) : RowChunk::load_partial(row, left);
    };
    ChunkSums sums;
    int n = 0;
#pragma unroll 1
    for (; kVector && n + kInFlight <= rows; n += kInFlight) {
        RowChunk part[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; u++) part[u] = load(route[n + u]);
#pragma unroll
        for (int u = 0; u < kInFlight; u++) sums.add(part[u], route[n + u].prob);
    }
#pragma unroll 1
    for (; n < rows; n += kFewInFlight) {
        RowChunk part[kFewInFlight];
#pragma unroll
        for (int u = 0; u < kFewInFlight; u++)
            if (n + u < rows) part[u] = load(route[n + u]);
#pragma unroll
        for (int u = 0; u < kFewInFlight; u++)
            if (n + u < rows) sums.add(part[u], route[n + u].prob);
    }
    return sums.narrow(rows);
}

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
    // row come last, as copies of the one before. given: room for the rows in the order of slots. Returns
    // true if every route of the thread block has a row. Ends with a barrier.
    __device__ __forceinline__ bool sort(const UnpermuteParams& p, i32* given, Sorted& sorted) const {
        const int topk = TOPK ? TOPK : (int)p.routes.topk, slots = count * topk;
        // Probs of the first kThreads routes are loaded before their rows are known, to save latency.
        float own_prob = 1.0f;
        sorted.rows[threadIdx.x] = 0;
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
            int rank = 0, rows = 0;
            i32 first_row = row;
            for (int j = own; j < own + topk; j++) {
                rank += given[j] > row || (given[j] == row && j < i);
                rows += given[j] >= 0;
                if (given[j] >= 0 && (u32)given[j] < (u32)first_row) first_row = given[j];
            }
            const i32 loaded = row >= 0 ? row : rows ? first_row : 0;
            sorted.route[own + rank] = {loaded * p.columns * (i64)sizeof(IN::storage), prob};
            if (i == own) sorted.rows[token] = rows;
            if (p.to_slots && writes_slots)
                p.to_slots[first * topk + i] = row < 0 ? 0 : load_read_only(p.from_rows + row);
        }
        return __syncthreads_and(own_here);
    }
};

#if TOPK
// Adds up whole chunks of tokens that have at most kMost rows (kAll: exactly kMost), by all threads of a
// block. While a thread adds up the chunks of up to kInFlight rows, the next ones are in flight, so that the
// memory is never idle. (For a row that a token lacks it loads another one of the token again, from the L1:
// loads under a condition would wait for each other.)
template <int kMost, bool kAll>
struct RowPipeline {
    static constexpr int kChunksAtOnce = kInFlight / kMost;                 // chunks per thread at a time
    static constexpr int kStep = kChunksAtOnce * kThreads;
    using Rows = RowChunk[kChunksAtOnce][kMost];
    const UnpermuteParams& p;
    const Sorted& sorted;        // the routes of the block's tokens
    const i64 first_token, first_chunk;
    const int chunks, end;       // chunks of a token from first_chunk on; chunks of all tokens
    const u32 inverse;           // 2^32 / chunks, rounded up

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
    // Exact, since i * chunks is below 2^32. A division takes so long that loads come late.
    __device__ __forceinline__ int token_of(int i) const {
        return chunks == 1 ? i : (int)((u64)(u32)i * inverse >> 32);
    }
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
            for (int u = 0; u < kMost; u++) {
                const u8* const from = y + sorted.route[token * TOPK + u].at;
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
            const int rows = kAll ? kMost : sorted.rows[token];
            ChunkSums sums;
#pragma unroll
            for (int u = 0; u < kMost; u++)
                if (u < rows) sums.add(part[c][u], sorted.route[token * TOPK + u].prob);
            sums.narrow(rows).store_whole(p.out + (first_token + token) * p.columns + column_of(i, token));
        }
    }
};

template <int kMost, bool kAll>
__device__ __forceinline__ void add_up(const UnpermuteParams& p, const Sorted& sorted, i64 first_token,
                                       int tokens, i64 first_chunk, int chunks) {
    if (chunks)
        RowPipeline<kMost, kAll>{p, sorted, first_token, first_chunk, chunks, tokens * chunks,
                                 0xffffffffu / (u32)chunks + 1}.run();
}
#endif

// TOPK 1, 2, 4, 6 or 8: each token has TOPK slots, and rows are whole chunks. 0: all other calls.
extern "C" __global__ void __launch_bounds__(kThreads, TOPK ? 2 : 3)
unpermute(const __grid_constant__ UnpermuteParams p) {
    __shared__ i32 given[kMostRoutes];
    __shared__ Sorted sorted;
    const u32 group = blockIdx.x / p.across, part = blockIdx.x - group * p.across;
    const i64 first = (i64)group * p.tokens_per_block, first_chunk = (i64)part * p.row_share;
    const i64 chunks = (p.columns + kCount - 1) / kCount;
    const int count = left_of(p.routes.tokens - first, p.tokens_per_block);
    [[maybe_unused]] const bool all_here = BlockTokens{first, count, part == 0}.sort(p, given, sorted);

    const int across = left_of(chunks - first_chunk, p.row_share);
#if TOPK
    if (all_here) return add_up<TOPK, true>(p, sorted, first, count, first_chunk, across);
    const int most = sorted.most(count);
    if (TOPK > 1 && most == 1) return add_up<1, false>(p, sorted, first, count, first_chunk, across);
    if (TOPK > 2 && most == 2) return add_up<2, false>(p, sorted, first, count, first_chunk, across);
    if (TOPK > 4 && most && most <= 4) return add_up<4, false>(p, sorted, first, count, first_chunk, across);
    if (most) return add_up<TOPK, false>(p, sorted, first, count, first_chunk, across);
#endif
    for (int i = threadIdx.x; i < count * across; i += kThreads) {
        const int token = count == 1 ? 0 : i / across;
        const i64 column = (first_chunk + (i - token * across)) * kCount;
        const Route* const route = sorted.route + token * (int)p.routes.topk;
        const int rows = sorted.rows[token];
        IN::storage* const to = p.out + (first + token) * p.columns + column;
        if (p.vector) {
            sum_rows<true>(p, route, rows, column, kCount).store_whole(to);
        } else {
            const int left = left_of(p.columns - column, kCount);
            sum_rows<false>(p, route, rows, column, left).store_partial(to, left);
        }
    }
}
