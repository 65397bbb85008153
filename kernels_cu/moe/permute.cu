// permute copies tokens to their experts' rows, by the map from route.cu (docs/numerics.md, section 8):
//
//   to[row_map[t, k]] = from[t] for each slot k of token t; unused rows are 0
//
// from u8 [tokens, row_bytes], row_map i32 [tokens, topk] -> to u8 [rows, row_bytes]. A second array (compact
// scales) moves alike, and so do probs, f32 with an element per slot. Only bytes move. gemm_ready scales are
// f32 at any strides -> [columns, rows rounded up to 4], whose padding is 0.
//
// A block of 256 threads reads whole tokens of up to 8 KB (or part of a longer one) once and stores them topk
// times. Each thread has four 16-byte loads in flight, and the row indices of eight slots. Thread blocks for
// scales are spread among those for data, so that their latencies are hidden behind stores of data. Rows that
// allow no 16-byte accesses are moved in words of 4, 2 or 1 bytes. Every row of `from` and of `to` is moved
// once. No defines.
//
// gemm_ready scales are gathered by row instead, because a token's scales would be single words in `to`. A
// warp takes 32 rows and 16 columns, so that a column's scales are 128 bytes.
#include "moe/routes.cuh"

// Rows that move, and how thread blocks share them.
struct Rows {
    const u8* from;
    u8* to;
    i64 row_bytes;
    u32 step;                    // common divisor of addresses and sizes, in bytes: 16, 4, 2 or 1
    u32 lanes_log2;              // log2 of the threads per token
    u32 tokens_per_block;        // 1 if several thread blocks share a token
    u32 across;                  // thread blocks per token
    u32 row_share;               // bytes of a row per thread block; a multiple of 16 if they share a row
    u32 blocks;
};

// f32 scales whose rows become contiguous: scale (token, column) is from[token * token_step + column *
// column_step].
struct GemmReadyScales {
    const u32* from;
    u32* to;                     // [columns, pitch]
    i64 token_step, column_step;
    i64 pitch;                   // rows rounded up to 4
    u32 columns;
    u32 vector;                  // 1: four columns of a token are one 16-byte load
};

struct PermuteParams {
    Rows data, scales;
    GemmReadyScales gemm_ready;  // columns 0: `scales` describes them, or there are none
    u32 scale_blocks;            // thread blocks that move scales
    u32 every_log2;              // log2 of n: every n-th thread block is one of these, while there are any
    const u32* probs;            // f32: see Routes::prob_at
    u32* rows_probs;             // [rows] f32, or null
    Routes routes;
};

// What a thread block moves.
struct Share {
    bool is_of_scales;
    u32 block;                   // index among the thread blocks that move scales, or among the others

    __device__ __forceinline__ Share(const PermuteParams& p, u32 index) {
        const u32 turn = index >> p.every_log2;
        is_of_scales = turn < p.scale_blocks && (index + 1) >> p.every_log2 != turn;
        block = is_of_scales ? turn : index - smaller(turn, p.scale_blocks);
    }
};

constexpr int kUnits = 4, kSlots = 8;    // loads in flight per thread; slots whose rows are loaded at once
constexpr int kPieceColumns = 16;        // gemm_ready scales in flight per lane

template <class T>
__device__ __forceinline__ void scatter_pieces(const Rows& rows, const Routes& routes, i64 first, int count,
                                               i64 column, int width) {
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

// block: index among the thread blocks that share `rows`.
__device__ __forceinline__ void scatter(const Rows& rows, const Routes& routes, u32 block) {
    const u32 group = block / rows.across;
    const i64 first = (i64)group * rows.tokens_per_block;
    const i64 column = (i64)(block - group * rows.across) * rows.row_share;
    const int count = left_of(routes.tokens - first, rows.tokens_per_block);
    const int width = left_of(rows.row_bytes - column, rows.row_share);
    if (rows.step == 16) scatter_pieces<Unit>(rows, routes, first, count, column, width);
    else if (rows.step == 4) scatter_pieces<u32>(rows, routes, first, count, column, width);
    else if (rows.step == 2) scatter_pieces<u16>(rows, routes, first, count, column, width);
    else scatter_pieces<u8>(rows, routes, first, count, column, width);
}

// Moves the scales of 32 rows, one per lane, and of kPieceColumns columns. Unused rows and padding get zeros.
// piece: index along a row, then by 32 rows.
__device__ __forceinline__ void gather_scales(const GemmReadyScales& scales, const Routes& routes,
                                              i64 piece) {
    const u32 across = (scales.columns + kPieceColumns - 1) / kPieceColumns;
    const i64 group = piece / across, first = (piece - group * across) * kPieceColumns;
    const i64 row = group * 32 + threadIdx.x % 32;
    if (row >= scales.pitch) return;
    const i64 token = row < routes.rows ? routes.token_of(row) : -1;
    const int count = left_of(scales.columns - first, kPieceColumns);
    u32 scale[kPieceColumns] = {};
    if (token >= 0) {
        const u32* const from = scales.from + (token * scales.token_step + first * scales.column_step);
        if (scales.vector) {
#pragma unroll
            for (int c = 0; c < kPieceColumns; c += 4) {
                if (c >= count) continue;
                const auto four = Chunk<f32, 4>::load(from + c);
                scale[c] = four.word[0], scale[c + 1] = four.word[1];
                scale[c + 2] = four.word[2], scale[c + 3] = four.word[3];
            }
        } else {
#pragma unroll
            for (int c = 0; c < kPieceColumns; c++)
                if (c < count) scale[c] = load_read_only(from + c * scales.column_step);
        }
    }
    u32* const to = scales.to + (first * scales.pitch + row);
#pragma unroll
    for (int c = 0; c < kPieceColumns; c++)
        if (c < count) to[c * scales.pitch] = scale[c];
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) permute(const __grid_constant__ PermuteParams p) {
    const i32 own_source = load_own_source(p.routes);
    {
        const Share share(p, blockIdx.x);
        const Rows rows = share.is_of_scales ? p.scales : p.data;
        if (share.block < rows.blocks) scatter(rows, p.routes, share.block);
    }
    const Share share(p, block_again());             // recomputed here, so that it takes no registers before
    if (share.is_of_scales && p.gemm_ready.columns)
        gather_scales(p.gemm_ready, p.routes, (i64)share.block * kWarps + threadIdx.x / 32);
    if (p.rows_probs && !share.is_of_scales && share.block % p.data.across == 0) {
        const i64 first = (i64)(share.block / p.data.across) * p.data.tokens_per_block;
        const int count = left_of(p.routes.tokens - first, p.data.tokens_per_block);
        move_probs(p.routes, p.probs, p.rows_probs, first, count, threadIdx.x, kThreads);
    }
    clear_unused(p.routes, own_source, [&](i64 row) {
        clear(p.data.to + row * p.data.row_bytes, p.data.row_bytes, p.data.step);
        if (p.scales.to) clear(p.scales.to + row * p.scales.row_bytes, p.scales.row_bytes, p.scales.step);
        if (p.rows_probs && threadIdx.x == 0) p.rows_probs[row] = 0;
    });
}
