// Tokens to their experts' rows and back, by the map that route.cu made (docs/numerics.md, section 8).
//
// permute            from [tokens, row_bytes] -> to [rows, row_bytes]: token t to row row_map[t, k] for each slot k; rows that nobody is in
//                    are 0. The same for a second array (scales) and for probs, which have an element per slot.
// unpermute          y [rows, columns] -> out [tokens, columns] = narrow(sum of fl(y[row] * prob)) over a token's rows, the last row first;
//                    and probs' gradients gathered: to_slots[t, k] = from_rows[row_map[t, k]], or 0.
// unpermute_backward grad [tokens, columns], y -> grad_y[row] = narrow(fl(grad[t] * prob)), 0 where nobody is; dprobs[t, k] = the sum of
//                    fl(grad[t] * y[row]) over the columns by the fixed tree.
//
// permute reads a token once and stores it topk times: a block takes whole tokens of up to 32 KB (or a part of a longer one), each thread
// four 16-byte loads in flight. Further blocks write zeros where `sources` says that nobody is. Nothing is cleared before.
// unpermute: a block sorts its tokens' routes in shared memory, then each thread has the same columns of eight rows in flight.
// unpermute_backward: a block takes a token, keeps up to 1024 chunks of it in registers and goes through its rows; 32 neighbouring chunks
// are a warp's, whose sum by shuffles is a subtree of the fixed tree, as is that of 32 such sums; these meet in a binary counter.
// Rows that allow no 16-byte accesses are moved in words of 4, 2 or 1 bytes, or element by element.
//
// A row outside of what there is counts as none. Bytes moved: every row named above once; permute's source once, not once per slot.
#include "column_sum.cuh"
#include "memory.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostRoutes = 1024;                                    // of a block of unpermute
constexpr int kPadRows = 32;                                         // that a block looks at for rows to clear

struct Routes {
    const i32* row_map;          // [tokens, topk]
    const i32* sources;          // [rows], -1: nobody's
    const i32* experts;          // [tokens, topk] of a mask
    i64 tokens, rows;
    u32 topk;
    u32 columns;                 // of probs that are found by expert: the number of experts; 0: they are found by slot

    // The row of a slot, or -1.
    __device__ __forceinline__ i64 row(i64 slot) const {
        const i64 row = load_read_only(row_map + slot);
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
__device__ __forceinline__ void store_piece(u8* to, const Unit& piece) { piece.store_whole(to); }
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

// By a whole block: clear_row(row) for each of kPadRows rows from `first` on that nobody is in.
template <class Clear>
__device__ __forceinline__ void clear_unused(const Routes& routes, i64 first, Clear clear_row) {
    const i64 own = first + threadIdx.x % 32;
    u32 unused = __ballot_sync(~0u, own < routes.rows && load_read_only(routes.sources + own) < 0);
    for (; unused; unused &= unused - 1) clear_row(first + __ffs(unused) - 1);
}

#ifdef ENTRY_permute
struct Rows {
    const u8* from;
    u8* to;                      // null: there are none
    i64 row_bytes;
    u32 step;                    // bytes that everything is a multiple of: 16, 4, 2 or 1
};

struct PermuteParams {
    Rows data, scales;
    const u32* probs;            // f32: see Routes
    u32* rows_probs;             // [rows] f32, or null
    Routes routes;
    u32 token_blocks;            // further ones clear
    u32 tokens_per_block;        // 1 where a token is taken by several blocks
    u32 across;                  // blocks that share a token
    u32 segment;                 // bytes of a row of data that a block takes: row_bytes, or where `across` is more than 1 a multiple of 16
};

constexpr int kUnits = 4;

template <class T>
__device__ __forceinline__ void scatter_pieces(const Rows& rows, const Routes& routes, i64 first, int count, i64 column, int width) {
    const int across = width / (int)sizeof(T), pieces = count * across;
    const i32* const row_map = routes.row_map + first * routes.topk;
    for (int base = threadIdx.x; base < pieces; base += kUnits * kThreads) {
        T piece[kUnits];
        int slot[kUnits], at[kUnits];                                // the token's first slot; bytes into `column`
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            const int i = base + u * kThreads, token = i < pieces ? i / across : 0;
            slot[u] = token * (int)routes.topk;
            at[u] = i < pieces ? (i - token * across) * (int)sizeof(T) : -1;
            if (at[u] >= 0) piece[u] = load_piece<T>(rows.from + (first + token) * rows.row_bytes + column + at[u]);
        }
#pragma unroll 2
        for (int k = 0; k < (int)routes.topk; k++) {
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                if (at[u] < 0) continue;
                const i64 row = load_read_only(row_map + slot[u] + k);
                if (row >= 0 && row < routes.rows) store_piece(rows.to + row * rows.row_bytes + column + at[u], piece[u]);
            }
        }
    }
}

__device__ __forceinline__ void scatter(const Rows& rows, const Routes& routes, i64 first, int count, i64 column, int width) {
    if (rows.step == 16) scatter_pieces<Unit>(rows, routes, first, count, column, width);
    else if (rows.step == 4) scatter_pieces<u32>(rows, routes, first, count, column, width);
    else if (rows.step == 2) scatter_pieces<u16>(rows, routes, first, count, column, width);
    else scatter_pieces<u8>(rows, routes, first, count, column, width);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) permute(const __grid_constant__ PermuteParams p) {
    if (blockIdx.x >= p.token_blocks) {
        clear_unused(p.routes, (i64)(blockIdx.x - p.token_blocks) * kPadRows, [&](i64 row) {
            clear(p.data.to + row * p.data.row_bytes, p.data.row_bytes, p.data.step);
            if (p.scales.to) clear(p.scales.to + row * p.scales.row_bytes, p.scales.row_bytes, p.scales.step);
            if (p.rows_probs && threadIdx.x == 0) p.rows_probs[row] = 0;
        });
        return;
    }
    const u32 run = blockIdx.x / p.across, part = blockIdx.x - run * p.across;
    const i64 first = (i64)run * p.tokens_per_block, column = (i64)part * p.segment;
    const int count = left_of(p.routes.tokens - first, p.tokens_per_block);
    scatter(p.data, p.routes, first, count, column, left_of(p.data.row_bytes - column, p.segment));
    if (part != 0) return;
    if (p.scales.to) scatter(p.scales, p.routes, first, count, 0, (int)p.scales.row_bytes);
    if (!p.rows_probs) return;
    for (int i = threadIdx.x; i < count * (int)p.routes.topk; i += kThreads) {
        const int token = i / (int)p.routes.topk;
        const i64 row = p.routes.row(first * p.routes.topk + i), at = p.routes.prob_at(first + token, i - token * p.routes.topk);
        if (row >= 0) p.rows_probs[row] = at < 0 ? 0 : load_read_only(p.probs + at);
    }
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
struct Route { i32 row; float prob; };

extern "C" __global__ void __launch_bounds__(kThreads, 3) unpermute(const __grid_constant__ UnpermuteParams p) {
    __shared__ i32 given[kMostRoutes];
    __shared__ Route sorted[kMostRoutes];                            // of each token the last row first; then those that are nowhere
    const int topk = (int)p.routes.topk;
    const u32 run = blockIdx.x / p.across, part = blockIdx.x - run * p.across;
    const i64 first = (i64)run * p.tokens_per_block, first_chunk = (i64)part * p.segment, chunks = (p.columns + kCount - 1) / kCount;
    const int count = left_of(p.routes.tokens - first, p.tokens_per_block), slots = count * topk;
    for (int i = threadIdx.x; i < slots; i += kThreads) given[i] = (i32)p.routes.row(first * topk + i);
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += kThreads) {
        const int token = i / topk, own = token * topk;
        const i32 row = given[i];
        const i64 at = p.probs && row >= 0 ? p.routes.prob_at(first + token, i - own) : -1;
        const float prob = !p.probs ? 1.0f : at < 0 ? 0.0f : load_read_only(p.probs + at);
        int rank = 0;
        for (int j = own; j < own + topk; j++) rank += given[j] > row || (given[j] == row && j < i);
        sorted[own + rank] = {row, prob};
        if (p.to_slots && part == 0) p.to_slots[first * topk + i] = row < 0 ? 0 : load_read_only(p.from_rows + row);
    }
    __syncthreads();

    const int across = left_of(chunks - first_chunk, p.segment);
    for (int i = threadIdx.x; i < count * across; i += kThreads) {
        const int token = i / across;
        const i64 column = (first_chunk + (i - token * across)) * kCount;
        const int left = left_of(p.columns - column, kCount);
        const Route* const route = sorted + token * topk;
        float sum[kCount];
#pragma unroll
        for (int j = 0; j < kCount; j++) sum[j] = as_float(kAbsentTerm);
        int n = 0;
        while (n < topk && route[n].row >= 0) {
            Part part[kInFlight];
#pragma unroll
            for (int u = 0; u < kInFlight; u++) {
                part[u] = {};
                if (n + u >= topk || route[n + u].row < 0) continue;
                const IN::storage* const from = p.y + route[n + u].row * p.columns + column;
                part[u] = p.vector ? Part::load(from) : Part::load_partial(from, left);
            }
#pragma unroll
            for (int u = 0; u < kInFlight; u++) {
                if (n >= topk || route[n].row < 0) continue;
                const float prob = route[n++].prob;
#pragma unroll
                for (int j = 0; j < kCount / 2; j++) {
                    float lo, hi;
                    part[u].widen2(j, lo, hi);
                    sum[2 * j] = add_rn(sum[2 * j], mul_rn(lo, prob));
                    sum[2 * j + 1] = add_rn(sum[2 * j + 1], mul_rn(hi, prob));
                }
            }
        }
        Part out;
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            if (n == 0) sum[2 * j] = sum[2 * j + 1] = 0.0f;
            out.narrow2(j, sum[2 * j], sum[2 * j + 1]);
        }
        IN::storage* const to = p.out + (first + token) * p.columns + column;
        if (p.vector) out.store_whole(to);
        else out.store_partial(to, left);
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
    u32 token_blocks;            // a token each; further ones clear
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

// Over the lanes of a warp, each of which gets the sum: the order of two terms of a sum does not matter.
__device__ __forceinline__ float warp_tree_sum(float term) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) term = add_rn(term, __shfl_xor_sync(~0u, term, step));
    return term;
}

// The next kCount elements, of which `left` exist (which may be negative): zeros for others.
__device__ __forceinline__ Part load(const UnpermuteBackwardParams& p, const IN::storage* from, int left) {
    if (left <= 0) return {};
    return p.vector ? Part::load(from) : Part::load_partial(from, left);
}

struct Shared {
    i64 row[kSlots];
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

extern "C" __global__ void __launch_bounds__(kThreads, 3) unpermute_backward(const __grid_constant__ UnpermuteBackwardParams p) {
    if (blockIdx.x >= p.token_blocks) {
        const i64 row_bytes = p.columns * sizeof(IN::storage);
        clear_unused(p.routes, (i64)(blockIdx.x - p.token_blocks) * kPadRows,
                     [&](i64 row) { clear(reinterpret_cast<u8*>(p.grad_y + row * p.columns), row_bytes, p.step); });
        return;
    }
    __shared__ Shared shared;
    const i64 token = blockIdx.x, chunks = (p.columns + kCount - 1) / kCount, tiles = (chunks + kTile - 1) / kTile;
    const IN::storage* const grad = p.grad + token * p.columns;
    if (p.routes.columns)
        for (int w = threadIdx.x; w < kMostExperts / 32; w += kThreads) shared.routed[w] = 0;
    for (u32 first = 0; first < p.routes.topk; first += kSlots) {
        const int slots = left_of((i64)p.routes.topk - first, kSlots);
        __syncthreads();
        if ((int)threadIdx.x < slots) {
            const i64 row = p.routes.row(token * p.routes.topk + first + threadIdx.x);
            const i64 at = p.routes.prob_at(token, first + threadIdx.x);
            shared.row[threadIdx.x] = row;
            shared.prob_at[threadIdx.x] = at;
            shared.prob[threadIdx.x] = row >= 0 && at >= 0 ? load_read_only(p.probs + at) : 0.0f;
        }
        __syncthreads();
        for (i64 tile = 0; tile < tiles; tile++) {
            // From the thread's first column of the tile on; chunk u is u * kStep later.
            const i64 column = (tile * kTile + threadIdx.x) * kCount;
            const int rest = left_of(p.columns - column, kTile * kCount);
            const int chunks_of_warp = left_of(chunks - tile * kTile - (threadIdx.x & ~31u), kTile);
            Part from[kUnits];
#pragma unroll
            for (int u = 0; u < kUnits; u++) from[u] = load(p, grad + column + u * kStep, rest - u * kStep);
#pragma unroll 1
            for (int k = 0; k < slots; k++) {
                const i64 row = shared.row[k];
                if (row < 0) continue;
                const float prob = shared.prob[k];
                const IN::storage* const y = p.y + row * p.columns + column;
                IN::storage* const to = p.grad_y + row * p.columns + column;
                Part other[kUnits];
#pragma unroll
                for (int u = 0; u < kUnits; u++) other[u] = load(p, y + u * kStep, rest - u * kStep);
#pragma unroll
                for (int u = 0; u < kUnits; u++) {
                    float* const of_warp = &shared.of_warp[k][u * kWarps + threadIdx.x / 32];
                    if (u * kThreads >= chunks_of_warp) {            // none of them; whole warps
                        if (threadIdx.x % 32 == 0) *of_warp = as_float(kAbsentTerm);
                        continue;
                    }
                    const int left = rest - u * kStep;
                    Part out;
                    TreeSum<kCount> sum;
#pragma unroll
                    for (int j = 0; j < kCount / 2; j++) {
                        float lo, hi, y_lo, y_hi;
                        from[u].widen2(j, lo, hi);
                        other[u].widen2(j, y_lo, y_hi);
                        out.narrow2(j, mul_rn(lo, prob), mul_rn(hi, prob));
                        sum.add(2 * j, 2 * j < left ? mul_rn(lo, y_lo) : as_float(kAbsentTerm));
                        sum.add(2 * j + 1, 2 * j + 1 < left ? mul_rn(hi, y_hi) : as_float(kAbsentTerm));
                    }
                    const float total_of_warp = warp_tree_sum(sum.sum());
                    if (threadIdx.x % 32 == 0) *of_warp = total_of_warp;
                    if (left <= 0) continue;
                    if (p.vector) out.store_whole(to + u * kStep);
                    else out.store_partial(to + u * kStep, left);
                }
            }
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
    if (!p.routes.columns) return;
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < p.routes.columns; expert += kThreads)
        if (!(shared.routed[expert / 32] >> expert % 32 & 1)) p.dprobs[token * p.routes.columns + expert] = 0.0f;
}
#endif
