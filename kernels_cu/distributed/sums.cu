// send_sums adds up the rows of each token that another rank sent, and returns the sum there
// (distributed/windows.cuh; docs/numerics.md, section 15):
//
//   window of rank s [me * region + i] = narrow(sum of y[row]) over the rows of token s * region + i, the
//                                        last row first
//
// y IN [rows, columns]; rows are added up as in unpermute. The gradients of the token's probs go with them:
// f32 [topk], 0 for a slot without a row here.
//
// A warp takes a token and up to 128 chunks of 16 bytes of its columns. It finds the token's rows from the
// last one on, two at a time, with four chunks of each in flight. Every row is read once.
//
// Defines:
//   IN      the format of y
#include "moe/row_sums.cuh"
#include "distributed/windows.cuh"

struct SendSumsParams {
    Windows windows;
    const IN::storage* y;
    const u32* probs;            // [rows] f32 gradients of the rows' probs, or null
    i64 to, probs_to;            // window offsets of sums [ranks * region, columns], gradients [.., topk]
    Routes routes;               // of `region` tokens of each rank
    const i32* counts;           // [ranks] tokens received from each
    i64 region, columns;
    u32 pieces;                  // pieces per row
    u32 vector;                  // 1: rows are whole chunks and 16-byte aligned
};

constexpr int kRows = 2;         // rows of a token in flight
// threads of a block for which registers suffice; launches choose the number (distributed/exchange.py)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kMostThreads = 256;
#else
constexpr int kMostThreads = 512;
#endif

// Returns a token's last row before `before`, or -1. Call from the whole warp.
__device__ __forceinline__ i32 last_row(const Routes& routes, i64 token, i32 before) {
    i32 last = -1;
    for (u32 k = threadIdx.x % 32; k < routes.topk; k += 32) {
        const i32 row = (i32)routes.row(token * routes.topk + k);
        if (row < before && row > last) last = row;
    }
    return __reduce_max_sync(~0u, last);
}

template <bool kVector>
__device__ __forceinline__ void sum_piece(const SendSumsParams& p, i64 token, IN::storage* to, u32 piece) {
    const i64 chunks = (p.columns + kCount - 1) / kCount, first = (i64)piece * kPieceItems + threadIdx.x % 32;
    ChunkSums sums[kItems];
    i32 row[kRows], last = 0x7fffffff;
    int rows = 0;
#pragma unroll 1
    do {
#pragma unroll
        for (int r = 0; r < kRows; r++)
            if (last >= 0) row[r] = last = last_row(p.routes, token, last);
            else row[r] = -1;
        RowChunk part[kRows][kItems];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
#pragma unroll
            for (int u = 0; u < kItems; u++) {
                const i64 chunk = first + 32 * u, column = chunk * kCount;
                const IN::storage* const from = p.y + row[r] * p.columns + column;
                if (row[r] >= 0 && chunk < chunks)
                    part[r][u] = kVector ? RowChunk::load(from)
                                         : RowChunk::load_partial(from, left_of(p.columns - column, kCount));
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            rows += row[r] >= 0;
#pragma unroll
            for (int u = 0; u < kItems; u++)
                if (row[r] >= 0 && first + 32 * u < chunks) sums[u].add(part[r][u], 1.0f);
        }
    } while (last >= 0);
#pragma unroll
    for (int u = 0; u < kItems; u++) {
        const i64 column = (first + 32 * u) * kCount;
        if (column >= p.columns) break;
        if (kVector) sums[u].narrow(rows).store_whole(to + column);
        else sums[u].narrow(rows).store_partial(to + column, left_of(p.columns - column, kCount));
    }
}

__device__ __forceinline__ void send_probs(const SendSumsParams& p, i64 token, u32* to) {
    for (u32 k = threadIdx.x % 32; k < p.routes.topk; k += 32) {
        const i64 row = p.routes.row(token * p.routes.topk + k);
        to[k] = row < 0 ? 0 : load_read_only(p.probs + row);
    }
}

extern "C" __global__ void __launch_bounds__(kMostThreads, 1)
send_sums(const __grid_constant__ SendSumsParams p) {
    Exchange exchange(p.windows);
    const bool fine = exchange.begin();
    const u32 end = turns(p.windows, p.counts);
    for (WarpUnits unit(p.pieces); fine && unit.row < end; unit.next()) {
        const Turn turn(p.windows, unit.row);
        if ((i32)turn.i >= load_read_only(p.counts + turn.to)) continue;
        u8* const window = exchange.window(turn.to);
        const i64 token = turn.to * p.region + turn.i, at = landing(p.windows, p.region, turn);
        IN::storage* const row = reinterpret_cast<IN::storage*>(window + p.to) + at * p.columns;
        if (p.vector) sum_piece<true>(p, token, row, unit.piece);
        else sum_piece<false>(p, token, row, unit.piece);
        if (p.probs && unit.piece == 0)
            send_probs(p, token, reinterpret_cast<u32*>(window + p.probs_to) + at * p.routes.topk);
    }
    exchange.end(fine);
}
