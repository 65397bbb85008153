// Tokens to their experts' rows and back, by the map that route.cu made (docs/numerics.md, section 8).
//
// permute            from [tokens, row_bytes] -> to [rows, row_bytes]: token t to row row_map[t, k] for each slot k; rows that nobody is in
//                    are 0. The same for a second array (scales) and for probs, which have an element per slot.
// unpermute          y [rows, columns] -> out [tokens, columns] = narrow(sum of fl(y[row] * prob)) over a token's rows, the last row first;
//                    and probs' gradients gathered: to_slots[t, k] = from_rows[row_map[t, k]], or 0.
// unpermute_backward grad [tokens, columns], y -> grad_y[row] = narrow(fl(grad[t] * prob)), 0 where nobody is; dprobs[t, k] = the sum of
//                    fl(grad[t] * y[row]) over the columns by the fixed tree.
//
// permute reads a token once and stores it topk times: a block takes whole tokens of up to 8 KB (or a part of a longer one), each thread
// four 16-byte loads in flight, and with them the rows of eight slots. Scales are the work of blocks behind those of data.
// unpermute: a block sorts its tokens' routes in shared memory, then each thread has the same columns of eight rows in flight, and where
// programs are made for so many routes (RowPipeline) the next eight while it adds these up.
// unpermute_backward: a block takes a token, keeps up to 1024 chunks of it in registers and goes through its rows; a chunk of the next row
// is on its way as soon as this row's is used. 32 neighbouring chunks are a warp's, whose sum by shuffles is a subtree of the fixed
// tree, as is that of 32 such sums; these meet in a binary counter.
// permute and unpermute_backward: each block also writes zeros to every gridDim.x-th row if `sources` says that nobody is there, so that
// all have the same share of these, wherever they are; where these may be many, blocks of their own do. Nothing is cleared before.
// Rows that allow no 16-byte accesses are moved in words of 4, 2 or 1 bytes, or element by element.
//
// A row outside of what there is counts as none. Bytes moved: every row named above once; permute's source once, not once per slot.
#include "numerics/column_sum.cuh"
#include "memory/chunks.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostRoutes = 1024;                                    // of a block of unpermute

struct Routes {
    const i32* row_map;          // [tokens, topk]
    const i32* sources;          // [rows], -1: nobody's
    const i32* experts;          // [tokens, topk] of a mask
    i64 tokens, rows;
    u32 topk;
    u32 columns;                 // of probs that are found by expert: the number of experts; 0: they are found by slot
    u32 clearing;                // the first of the blocks that clear 32 neighbouring rows each; 0: there are none, every block clears some

    // The row of a slot, or -1.
    __device__ __forceinline__ i32 row(i64 slot) const {
        const i32 row = load_read_only(row_map + slot);
        return row >= 0 && row < rows ? row : -1;
    }
    // Where the prob of slot k of a token is, or -1.
    __device__ __forceinline__ i64 prob_at(i64 token, u32 k) const {
        const i64 slot = token * topk + k;
        if (!columns) return slot;
        const u32 expert = (u32)load_read_only(experts + slot);
        return expert < columns ? token * columns + expert : -1;
    }
};

using Unit = Chunk<e8m0fnu, 16>;
template <class T> __device__ __forceinline__ T load_piece(const u8* from) { return load_read_only(reinterpret_cast<const T*>(from)); }
template <> __device__ __forceinline__ Unit load_piece<Unit>(const u8* from) { return Unit::load(from); }
__device__ __forceinline__ void store_piece(u8* to, const Unit& piece) { piece.store_whole<true>(to); }
template <class T> __device__ __forceinline__ void store_piece(u8* to, T piece) { *reinterpret_cast<T*>(to) = piece; }

// By a whole block: zeros.
template <class T>
__device__ __forceinline__ void clear_pieces(u8* to, i64 bytes) {
    for (i64 at = (i64)threadIdx.x * sizeof(T); at < bytes; at += kThreads * sizeof(T)) store_piece(to + at, T{});
}
__device__ __forceinline__ void clear(u8* to, i64 bytes, u32 step) {
    if (step == 16) clear_pieces<Unit>(to, bytes);
    else if (step == 4) clear_pieces<u32>(to, bytes);
    else if (step == 2) clear_pieces<u16>(to, bytes);
    else clear_pieces<u8>(to, bytes);
}

// A warp's lanes: 32 neighbours of a block that does nothing else, or rows blockIdx.x, blockIdx.x + gridDim.x, ..., whose number is at most 32:
// the grid is as large as that takes.
__device__ __forceinline__ i64 row_to_look_at(const Routes& routes, u32 lane) {
    if (routes.clearing) return ((i64)blockIdx.x - routes.clearing) * 32 + lane;
    return (i64)lane * gridDim.x + blockIdx.x;
}
// Who is in the lane's: loaded early, looked at late.
__device__ __forceinline__ i32 load_own_source(const Routes& routes) {
    const i64 own = row_to_look_at(routes, threadIdx.x % 32);
    return own >= 0 && own < routes.rows ? load_read_only(routes.sources + own) : 0;
}
// By a whole block: clear_row(row) for each of these rows that nobody is in.
template <class Clear>
__device__ __forceinline__ void clear_unused(const Routes& routes, i32 own_source, Clear clear_row) {
#ifndef CUPY_FP8_HOST
    asm volatile("" : "+r"(own_source));                             // or the compiler would look at once, and wait for the load
#endif
    for (u32 unused = __ballot_sync(~0u, own_source < 0); unused; unused &= unused - 1)
        clear_row(row_to_look_at(routes, __ffs(unused) - 1));
}

#ifdef ENTRY_permute
// Rows that move, and how blocks share them.
struct Rows {
    const u8* from;
    u8* to;
    i64 row_bytes;
    u32 step;                    // bytes that everything is a multiple of: 16, 4, 2 or 1
    u32 lanes_log2;              // of the threads that share a token
    u32 tokens_per_block;        // 1 where a token is taken by several blocks
    u32 across;                  // blocks that share a token
    u32 segment;                 // bytes of a row that a block takes: row_bytes, or where `across` is more than 1 a multiple of 16
    u32 blocks;
};

struct PermuteParams {
    Rows data, scales;
    const u32* probs;            // f32: see Routes
    u32* rows_probs;             // [rows] f32, or null
    Routes routes;
};

constexpr int kUnits = 4, kSlots = 8;                                // of a thread at a time

template <class T>
__device__ __forceinline__ void scatter_pieces(const Rows& rows, const Routes& routes, i64 first, int count, i64 column, int width) {
    const int lanes = 1 << rows.lanes_log2, pieces = width / (int)sizeof(T), topk = (int)routes.topk;
    const i64 bound = routes.rows;
    for (int token = threadIdx.x >> rows.lanes_log2; token < count; token += kThreads >> rows.lanes_log2) {
        const u8* const from = rows.from + (first + token) * rows.row_bytes + column;
        const i32* const row_map = routes.row_map + (first + token) * topk;
        for (int base = threadIdx.x & (lanes - 1); base < pieces; base += kUnits * lanes) {
            const int at = base * (int)sizeof(T), step = lanes * (int)sizeof(T);
            T piece[kUnits];
#pragma unroll
            for (int u = 0; u < kUnits; u++)
                if (base + u * lanes < pieces) piece[u] = load_piece<T>(from + at + u * step);
#pragma unroll 1
            for (int k = 0; k < topk; k += kSlots) {
                i32 row[kSlots];
#pragma unroll
                for (int j = 0; j < kSlots; j++) row[j] = k + j < topk ? load_read_only(row_map + k + j) : -1;
#pragma unroll
                for (int j = 0; j < kSlots; j++) {
                    if (row[j] < 0 || row[j] >= bound) continue;
                    u8* const to = rows.to + row[j] * rows.row_bytes + column + at;
#pragma unroll
                    for (int u = 0; u < kUnits; u++)
                        if (base + u * lanes < pieces) store_piece(to + u * step, piece[u]);
                }
            }
        }
    }
}

// The block-th block of those that share `rows`.
__device__ __forceinline__ void scatter(const Rows& rows, const Routes& routes, u32 block) {
    const u32 run = block / rows.across;
    const i64 first = (i64)run * rows.tokens_per_block, column = (i64)(block - run * rows.across) * rows.segment;
    const int count = left_of(routes.tokens - first, rows.tokens_per_block), width = left_of(rows.row_bytes - column, rows.segment);
    if (rows.step == 16) scatter_pieces<Unit>(rows, routes, first, count, column, width);
    else if (rows.step == 4) scatter_pieces<u32>(rows, routes, first, count, column, width);
    else if (rows.step == 2) scatter_pieces<u16>(rows, routes, first, count, column, width);
    else scatter_pieces<u8>(rows, routes, first, count, column, width);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) permute(const __grid_constant__ PermuteParams p) {
    const i32 own_source = load_own_source(p.routes);
    const bool second = blockIdx.x >= p.data.blocks;
    const u32 block = second ? blockIdx.x - p.data.blocks : blockIdx.x;
    const Rows rows = second ? p.scales : p.data;
    if (block < rows.blocks) scatter(rows, p.routes, block);
    if (p.rows_probs && !second && block % rows.across == 0) {
        const i64 first = (i64)(block / rows.across) * rows.tokens_per_block;
        const int slots = left_of(p.routes.tokens - first, rows.tokens_per_block) * (int)p.routes.topk;
        for (int i = threadIdx.x; i < slots; i += kThreads) {
            const int token = i / (int)p.routes.topk;
            const i64 row = p.routes.row(first * p.routes.topk + i), at = p.routes.prob_at(first + token, i - token * p.routes.topk);
            if (row >= 0) p.rows_probs[row] = at < 0 ? 0 : load_read_only(p.probs + at);
        }
    }
    clear_unused(p.routes, own_source, [&](i64 row) {
        clear(p.data.to + row * p.data.row_bytes, p.data.row_bytes, p.data.step);
        if (p.scales.to) clear(p.scales.to + row * p.scales.row_bytes, p.scales.row_bytes, p.scales.step);
        if (p.rows_probs && threadIdx.x == 0) p.rows_probs[row] = 0;
    });
}
#endif

#ifdef ENTRY_unpermute
struct UnpermuteParams {
    const IN::storage* y;
    IN::storage* out;
    const float* probs;          // see Routes; null: ones
    const u32* from_rows;        // [rows] f32
    u32* to_slots;               // [tokens, topk] f32, or null
    Routes routes;
    i64 columns;
    u32 tokens_per_block;        // 1 where a token is taken by several blocks
    u32 across;                  // blocks that share a token
    u32 segment;                 // chunks of a row that a block takes
    u32 vector;                  // rows are whole chunks, 16-byte aligned
};

constexpr int kCount = 16 / sizeof(IN::storage), kInFlight = 8;
using Part = Chunk<IN, kCount>;
struct Route {
    i64 at;                      // where its row begins, in bytes from y on; -1: nowhere
    float prob;
};

// The sums of kCount columns, to which rows are added.
struct Sums {
    float sum[kCount];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (float& each : sum) each = as_float(kAbsentTerm);
    }
    __device__ __forceinline__ void add(const Part& part, float prob) {
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            float lo, hi;
            part.widen2(j, lo, hi);
            sum[2 * j] = add_rn(sum[2 * j], mul_rn(lo, prob));
            sum[2 * j + 1] = add_rn(sum[2 * j + 1], mul_rn(hi, prob));
        }
    }
    // Rounded; of no rows 0.
    __device__ __forceinline__ Part narrow(int rows) const {
        Part out;
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) out.narrow2(j, rows ? sum[2 * j] : 0.0f, rows ? sum[2 * j + 1] : 0.0f);
        return out;
    }
};

// The columns from p.y + column on, `left` of which exist, of the first rows of a token.
template <bool kVector>
__device__ __forceinline__ Part sum_rows(const UnpermuteParams& p, const Route* route, i64 column, int left) {
    constexpr int kFewInFlight = kVector ? 4 : 2;
    const int topk = (int)p.routes.topk;
    const u8* const y = reinterpret_cast<const u8*>(p.y + column);
    const auto load = [&](const Route& from) {
        const IN::storage* const row = reinterpret_cast<const IN::storage*>(y + from.at);
        return kVector ? Part::load(row) : Part::load_partial(row, left);
    };
    Sums sums;
    int n = 0;
#pragma unroll 1
    for (; kVector && n + kInFlight <= topk && route[n + kInFlight - 1].at >= 0; n += kInFlight) {
        Part part[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; u++) part[u] = load(route[n + u]);
#pragma unroll
        for (int u = 0; u < kInFlight; u++) sums.add(part[u], route[n + u].prob);
    }
#pragma unroll 1
    for (; n < topk && route[n].at >= 0; n += kFewInFlight) {
        Part part[kFewInFlight];
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
// By a whole block: whole chunks of tokens all of whose routes are somewhere. A chunk each of up to kInFlight rows is on its way while those
// before are added up: warps that wait for what they add leave the memory idle.
struct RowPipeline {
    static constexpr int kTogether = kInFlight / TOPK, kStep = kTogether * kThreads;       // chunks of a thread; of a block
    using Rows = Part[kTogether][TOPK];
    const UnpermuteParams& p;
    const Route* const routes;   // of the block's tokens
    const i64 first_token, first_chunk;
    const int chunks, end;       // of a token, from first_chunk on; of all

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
    __device__ __forceinline__ i64 column_of(int i, int token) const { return (first_chunk + (i - token * chunks)) * kCount; }
    __device__ __forceinline__ void request(int first, Rows& part) const {
#pragma unroll
        for (int c = 0; c < kTogether; c++) {
            const int i = first + c * kThreads;
            if (i >= end) break;
            const int token = token_of(i);
            const u8* const y = reinterpret_cast<const u8*>(p.y + column_of(i, token));
#pragma unroll
            for (int u = 0; u < TOPK; u++) part[c][u] = Part::load(reinterpret_cast<const IN::storage*>(y + routes[token * TOPK + u].at));
        }
    }
    __device__ __forceinline__ void add(int first, const Rows& part) const {
#pragma unroll
        for (int c = 0; c < kTogether; c++) {
            const int i = first + c * kThreads;
            if (i >= end) break;
            const int token = token_of(i);
            Sums sums;
#pragma unroll
            for (int u = 0; u < TOPK; u++) sums.add(part[c][u], routes[token * TOPK + u].prob);
            sums.narrow(TOPK).store_whole(p.out + (first_token + token) * p.columns + column_of(i, token));
        }
    }
};
#endif

// TOPK 1, 2, 4, 6, 8: of whole chunks, and so many routes for each token. 0: any.
extern "C" __global__ void __launch_bounds__(kThreads, TOPK ? 2 : 3) unpermute(const __grid_constant__ UnpermuteParams p) {
    __shared__ i32 given[kMostRoutes];
    __shared__ Route sorted[kMostRoutes];                            // of each token the last row first; then those that are nowhere
    const int topk = (int)p.routes.topk;
    const u32 run = blockIdx.x / p.across, part = blockIdx.x - run * p.across;
    const i64 first = (i64)run * p.tokens_per_block, first_chunk = (i64)part * p.segment, chunks = (p.columns + kCount - 1) / kCount;
    const int count = left_of(p.routes.tokens - first, p.tokens_per_block), slots = count * topk;
    // Of the first kThreads routes, before it is known which are nowhere.
    float own_prob = 1.0f;
    for (int i = threadIdx.x; i < slots; i += kThreads) {
        given[i] = (i32)p.routes.row(first * topk + i);
        if (p.probs && i < kThreads) {
            const int token = i / topk;
            const i64 at = p.routes.prob_at(first + token, i - token * topk);
            own_prob = at < 0 ? 0.0f : load_read_only(p.probs + at);
        }
    }
    __syncthreads();
    bool own_here = true;
    for (int i = threadIdx.x; i < slots; i += kThreads) {
        const int token = i / topk, own = token * topk;
        const i32 row = given[i];
        float prob = own_prob;
        if (p.probs && i >= kThreads) {
            const i64 at = p.routes.prob_at(first + token, i - own);
            prob = at < 0 ? 0.0f : load_read_only(p.probs + at);
        }
        own_here = own_here && row >= 0;
        int rank = 0;
        for (int j = own; j < own + topk; j++) rank += given[j] > row || (given[j] == row && j < i);
        sorted[own + rank] = {row < 0 ? -1 : row * p.columns * (i64)sizeof(IN::storage), prob};
        if (p.to_slots && part == 0) p.to_slots[first * topk + i] = row < 0 ? 0 : load_read_only(p.from_rows + row);
    }
    [[maybe_unused]] const bool all_here = __syncthreads_and(own_here);

    const int across = left_of(chunks - first_chunk, p.segment);
#if TOPK
    if (all_here) return RowPipeline{p, sorted, first, first_chunk, across, count * across}.run();
#endif
    for (int i = threadIdx.x; i < count * across; i += kThreads) {
        const int token = count == 1 ? 0 : i / across;
        const i64 column = (first_chunk + (i - token * across)) * kCount;
        const Route* const route = sorted + token * topk;
        IN::storage* const to = p.out + (first + token) * p.columns + column;
        if (p.vector) {
            sum_rows<true>(p, route, column, kCount).store_whole(to);
        } else {
            const int left = left_of(p.columns - column, kCount);
            sum_rows<false>(p, route, column, left).store_partial(to, left);
        }
    }
}
#endif

#ifdef ENTRY_unpermute_backward
struct UnpermuteBackwardParams {
    const IN::storage* grad;     // [tokens, columns]
    const IN::storage* y;        // [rows, columns]
    IN::storage* grad_y;         // [rows, columns]
    const float* probs;          // see Routes
    float* dprobs;               // of the same shape
    Routes routes;
    i64 columns;
    u32 vector;                  // rows are whole chunks, 16-byte aligned
    u32 step;                    // bytes that rows of grad_y are a multiple of
};

constexpr int kCount = 16 / sizeof(IN::storage), kUnits = 4;
constexpr int kTile = kUnits * kThreads;                             // chunks of a tile: 32 warps' worth
constexpr int kStep = kThreads * kCount;                             // columns from one of a thread's chunks to the next
constexpr int kSlots = 32;                                           // slots at a time
constexpr int kLevels = 32;                                          // of the binary counter: 2^32 tiles
constexpr int kMostExperts = 1024;
using Part = Chunk<IN, kCount>;
static_assert(kUnits * kWarps == 32, "a tile's sums are a warp's");

#ifndef CUPY_FP8_HOST
// Nearest-even; NaN as the instruction makes it, 0x7fff.
template <class F> __device__ __forceinline__ u32 narrow_pair(float lo, float hi);
template <> __device__ __forceinline__ u32 narrow_pair<bf16>(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
template <> __device__ __forceinline__ u32 narrow_pair<f16>(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#endif

// Over the lanes of a warp, each of which gets the sum: the order of two terms of a sum does not matter.
__device__ __forceinline__ float warp_tree_sum(float term) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) term = add_rn(term, __shfl_xor_sync(~0u, term, step));
    return term;
}

// The same of kUnits terms at once: lane l gets the sum of the l % kUnits-th, in fewer steps, since each of two lanes gives away half of
// what it has.
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

// part * factor rounded to the format: narrow2 of pairs, but with one test for NaN for the whole chunk.
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
        u32 top = 0;
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            out.word[j] = narrow_pair<F>(value[2 * j], value[2 * j + 1]);
            top = F::template max_magnitudes<true>(top, out.word[j]);
        }
        // NaN wins, as 0x7fff: no other half has these bits.
        if ((top & 0xffffu) != 0x7fffu && top >> 16 != 0x7fffu) return out;
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
    float of_warp[kSlots][32];                                       // a tile's sums
    float of_tiles[kSlots][kLevels];                                 // sums of 2^level tiles each
    u32 routed[kMostExperts / 32];                                   // a bit for each expert
};

// The sums of a tile, added to those of earlier tiles: this warp's slots.
__device__ __forceinline__ void add_tile(Shared& shared, int slots, i64 tile) {
    for (int k = threadIdx.x / 32; k < slots; k += kWarps) {
        if (shared.row[k] < 0) continue;
        float sum = warp_tree_sum(shared.of_warp[k][threadIdx.x % 32]);
        if (threadIdx.x % 32) continue;
        int level = 0;
        for (i64 rest = tile; rest & 1; rest >>= 1) sum = add_rn(shared.of_tiles[k][level++], sum);
        shared.of_tiles[k][level] = sum;
    }
}

// The sum over `tiles` tiles: what is left in the counter, short runs first.
__device__ __forceinline__ float total(const Shared& shared, int k, i64 tiles) {
    float sum = as_float(kAbsentTerm);
    int level = 0;
    for (i64 rest = tiles; rest; rest >>= 1, level++)
        if (rest & 1) sum = add_rn(shared.of_tiles[k][level], sum);
    return tiles ? as_float(f32::narrow(sum)) : 0.0f;
}

// A thread's chunks of a tile: u-th from `column` + u * kStep on.
template <bool kVector>
struct Chunks {
    int left;                    // columns from `column` on: of kVector whole chunks

    __device__ __forceinline__ bool has(int u) const { return left > u * kStep; }
    __device__ __forceinline__ Part load(const IN::storage* from, int u) const {
        if (!has(u)) return {};
        return kVector ? Part::load(from + u * kStep) : Part::load_partial(from + u * kStep, left - u * kStep);
    }
    __device__ __forceinline__ void store(IN::storage* to, int u, const Part& part) const {
        if (!has(u)) return;
        if (kVector) part.store_whole(to + u * kStep);
        else part.store_partial(to + u * kStep, left - u * kStep);
    }
    // The tree over the products of two chunks.
    __device__ __forceinline__ float dot(const Part& a, const Part& b, int u) const {
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

// A tile's columns of the rows of these slots: their gradients and, in shared memory, the sums of their products with `from`.
template <bool kVector>
__device__ __forceinline__ void do_rows(const UnpermuteBackwardParams& p, Shared& shared, u32 present, i64 column, int left,
                                        const Part (&from)[kUnits]) {
    const Chunks<kVector> chunks{left};
    Part other[kUnits];
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
            Part grad = from[u];
#ifndef CUPY_FP8_HOST
            // Widened row by row: as f32, which the compiler would keep, all of them are 32 registers.
#pragma unroll
            for (int w = 0; w < Part::kWords; w++) asm volatile("" : "+r"(grad.word[w]));
#endif
            sum[u] = chunks.dot(grad, other[u], u);
            if (kVector && present) other[u] = chunks.load(y, u);    // on its way during what follows
            chunks.store(to, u, scaled(grad, prob));
        }
        const float of_warp = warp_tree_sums(sum);
        if (threadIdx.x % 32 < kUnits) shared.of_warp[k][threadIdx.x % 32 * kWarps + threadIdx.x / 32] = of_warp;
        k = next;
        if (!kVector && present) {
#pragma unroll
            for (int u = 0; u < kUnits; u++) other[u] = chunks.load(y, u);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) unpermute_backward(const __grid_constant__ UnpermuteBackwardParams p) {
    __shared__ Shared shared;
    const i32 own_source = load_own_source(p.routes);
    const auto clear_share = [&] {
        clear_unused(p.routes, own_source, [&](i64 row) {
            clear(reinterpret_cast<u8*>(p.grad_y + row * p.columns), p.columns * (i64)sizeof(IN::storage), p.step);
        });
    };
    const i64 token = blockIdx.x, chunks = (p.columns + kCount - 1) / kCount, tiles = (chunks + kTile - 1) / kTile;
    if (token >= p.routes.tokens) return clear_share();
    const IN::storage* const grad = p.grad + token * p.columns;
    Part from[kUnits];
    // The thread's first column of a tile, and how many there are from it on; its chunks of grad.
    const auto column_of = [&](i64 tile) { return (tile * kTile + threadIdx.x) * kCount; };
    const auto left_in = [&](i64 tile) { return left_of(p.columns - column_of(tile), kTile * kCount); };
    const auto load_grad = [&](i64 tile) {
        const int left = left_in(tile);
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            if (p.vector) from[u] = Chunks<true>{left}.load(grad + column_of(tile), u);
            else from[u] = Chunks<false>{left}.load(grad + column_of(tile), u);
        }
    };
    load_grad(0);                                                    // on its way while slots are
    if (p.routes.columns)
        for (int w = threadIdx.x; w < kMostExperts / 32; w += kThreads) shared.routed[w] = 0;
    for (u32 first = 0; first < p.routes.topk; first += kSlots) {
        const int slots = left_of((i64)p.routes.topk - first, kSlots);
        __syncthreads();
        if ((int)threadIdx.x < slots) {
            const i32 row = p.routes.row(token * p.routes.topk + first + threadIdx.x);
            const i64 at = p.routes.prob_at(token, first + threadIdx.x);
            shared.row[threadIdx.x] = row;
            shared.prob_at[threadIdx.x] = at;
            shared.prob[threadIdx.x] = at >= 0 ? load_read_only(p.probs + at) : 0.0f;
        }
        __syncthreads();
        const int lane = threadIdx.x % 32;
        const u32 present = __ballot_sync(~0u, lane < slots && shared.row[lane] >= 0);
        for (i64 tile = 0; tile < tiles; tile++) {
            if (tiles > 1 && (first > 0 || tile > 0)) load_grad(tile);
            if (p.vector) do_rows<true>(p, shared, present, column_of(tile), left_in(tile), from);
            else do_rows<false>(p, shared, present, column_of(tile), left_in(tile), from);
            __syncthreads();
            add_tile(shared, slots, tile);
            __syncthreads();
        }
        if ((int)threadIdx.x < slots && shared.prob_at[threadIdx.x] >= 0) {
            const i64 at = shared.prob_at[threadIdx.x];
            p.dprobs[at] = shared.row[threadIdx.x] < 0 ? 0.0f : total(shared, threadIdx.x, tiles);
            if (p.routes.columns) {
                const u32 expert = (u32)(at - token * p.routes.columns);
                atomicOr(&shared.routed[expert / 32], 1u << expert % 32);
            }
        }
    }
    if (p.routes.columns) {
        __syncthreads();
        for (u32 expert = threadIdx.x; expert < p.routes.columns; expert += kThreads)
            if (!(shared.routed[expert / 32] >> expert % 32 & 1)) p.dprobs[token * p.routes.columns + expert] = 0.0f;
    }
    clear_share();
}
#endif
