// Exchanges of rows between ranks (distributed/windows.cuh; docs/numerics.md, section 15), without
// arithmetic.
//
// send_tokens   Each token goes once to each rank that a routing by rank assigns it to: the i-th row of rank
//               d, token t = sources[offsets[d] + i] / topk, becomes row me * region + i of the arrays in d's
//               window. Up to three arrays move: data, scales at any strides, probs; or the experts of
//               tokens, and the rows that each slot's result will have. It can also send the number of
//               tokens, and receive the number that came from each rank.
// send_rows     Each row of a routing of received tokens returns to the rank that sent the token: to row
//               back[slot] there, and its value of `probs` beside it.
//
// A warp copies pieces of up to 2 KB. Neighbouring warps send to different ranks, to keep all links busy.
// Every row is read once, and stored once to a window. No defines.
#include "distributed/windows.cuh"

// threads of a block for which registers suffice; launches choose the number (distributed/exchange.py)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kMostThreads = 512;
#else
constexpr int kMostThreads = 1024;
#endif

// An array whose rows move.
struct Part {
    const u8* from;
    i64 to;                      // offset in a window
    i64 row_bytes;               // in a window
    i64 row_step, item_step;     // bytes between rows of `from`, and between items
    u32 step;                    // bytes per item: 16, 4, 2 or 1
    u32 pieces;                  // pieces per row
};

struct SendTokensParams {
    Windows windows;
    Part data, scales, probs;    // pieces 0: none
    Routes routes;               // by rank
    const i32* splits;           // [ranks] tokens for each rank
    const i64* offsets;          // [ranks + 1]
    i64 region;                  // rows of a window for each rank
    i64 sizes;                   // offset in a window of the number of tokens from each rank, i32 [ranks]
    i32* counts;                 // [ranks] these numbers; null: not exchanged
};

struct SendRowsParams {
    Windows windows;
    Part data;
    const u32* probs;            // [rows] f32, or null
    i64 probs_to;                // their offset in a window
    Routes routes;               // by expert, of `region` tokens of each rank
    const i32* back;             // [tokens, topk] rows in the window of the rank that sent the token
    const i32* arrived;          // [tokens, topk] this rank's experts, or -1
    i64 region;
};

__device__ __forceinline__ void send_part(const Part& part, u8* window, i64 from, i64 to, u32 piece) {
    copy_piece(window + part.to + to * part.row_bytes, part.from + from * part.row_step, part.row_bytes,
               part.step, part.item_step, piece);
}

__device__ __forceinline__ void send_all_tokens(const SendTokensParams& p, const Exchange& exchange) {
    const u32 data = p.data.pieces, scales = data + p.scales.pieces, pieces = scales + p.probs.pieces;
    if (pieces == 0) return;
    const u32 end = turns(p.windows, p.splits);
    for (WarpUnits unit(pieces); unit.row < end; unit.next()) {
        const Turn turn(p.windows, unit.row);
        if ((i32)turn.i >= load_read_only(p.splits + turn.to)) continue;
        const i64 token = p.routes.token_of(load_read_only(p.offsets + turn.to) + turn.i);
        if (token < 0) continue;
        u8* const window = exchange.window(turn.to);
        const i64 at = landing(p.windows, p.region, turn);
        if (unit.piece < data) send_part(p.data, window, token, at, unit.piece);
        else if (unit.piece < scales) send_part(p.scales, window, token, at, unit.piece - data);
        else send_part(p.probs, window, token, at, unit.piece - scales);
    }
}

#ifdef ENTRY_send_tokens
extern "C" __global__ void __launch_bounds__(kMostThreads)
send_tokens(const __grid_constant__ SendTokensParams p) {
    Exchange exchange(p.windows);
    const int ranks = p.windows.ranks;
    const bool fine = exchange.begin();
    if (fine) {
        send_all_tokens(p, exchange);
        if (p.counts && !p.windows.staged && blockIdx.x == 0)
            for (int to = threadIdx.x; to < ranks; to += blockDim.x)
                reinterpret_cast<i32*>(exchange.window(to) + p.sizes)[p.windows.me] = p.splits[to];
    }
    if (exchange.end(fine) && p.counts)
        for (int rank = threadIdx.x; rank < ranks; rank += blockDim.x)
            p.counts[rank] = reinterpret_cast<const i32*>(exchange.window(p.windows.me) + p.sizes)[rank];
}
#endif

// Returns the rank that a slot came from.
__device__ __forceinline__ int sender_of(const SendRowsParams& p, i64 slot) {
    return (int)((u32)slot / p.routes.topk / (u32)p.region);
}

// Zeros for slots whose rows were beyond the routing's bound; windows still hold an earlier exchange's rows.
__device__ __forceinline__ void send_zeros(const SendRowsParams& p, const Exchange& exchange) {
    const i64 slots = p.routes.tokens * p.routes.topk, step = (i64)gridDim.x * blockDim.x;
    for (i64 slot = (i64)blockIdx.x * blockDim.x + threadIdx.x; slot < slots; slot += step) {
        const i64 to = load_read_only(p.back + slot);
        if (to < 0 || load_read_only(p.arrived + slot) < 0 || p.routes.row(slot) >= 0) continue;
        u8* const window = exchange.window(sender_of(p, slot));
        for (i64 i = 0; i < p.data.row_bytes; i++) window[p.data.to + to * p.data.row_bytes + i] = 0;
        if (p.probs) reinterpret_cast<u32*>(window + p.probs_to)[to] = 0;
    }
}

#ifdef ENTRY_send_rows
extern "C" __global__ void __launch_bounds__(kMostThreads)
send_rows(const __grid_constant__ SendRowsParams p) {
    Exchange exchange(p.windows);
    const bool fine = exchange.begin();
    const u32 pieces = p.data.pieces > 1 ? p.data.pieces : 1;
    for (WarpUnits unit(pieces); fine && unit.row < p.routes.rows; unit.next()) {
        const i32 slot = load_read_only(p.routes.sources + unit.row);
        if (slot < 0) continue;
        const i64 to = load_read_only(p.back + slot);
        if (to < 0) continue;
        u8* const window = exchange.window(sender_of(p, slot));
        send_part(p.data, window, unit.row, to, unit.piece);
        if (p.probs && unit.piece == 0 && threadIdx.x % 32 == 0)
            reinterpret_cast<u32*>(window + p.probs_to)[to] = load_read_only(p.probs + unit.row);
    }
    if (fine) send_zeros(p, exchange);
    exchange.end(fine);
}
#endif
