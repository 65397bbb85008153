// quantize_permute quantises each token once, in blocks of 128 with f32 scales (docs/numerics.md, section 3),
// and writes the codes to all its rows (section 8):
//
//   rows = permute(quantize_block(x), routing)
//
// x IN [tokens, columns], row_map i32 [tokens, topk] -> to OUT [rows, columns], scales f32 [ceil(columns /
// 128), rows rounded up to 4], and f32 probs as permute.cu moves them. Unused rows and padding are 0.
//
// A warp has two units of 512 elements of a token, whose codes stay in registers: a lane has 16 consecutive
// elements of each, so that eight lanes share a block and every store has 16 bytes. Each lane loads one
// slot's row, stores its block's scale there, and broadcasts the row. Every thread block clears unused rows
// too (moe/routes.cuh).
//
// With many rows per token that would be many stores of 4 bytes. Then the tokens' scales are stored
// compactly, and permute.cu moves them and the probs to the rows in a launch of its own.
//
// DIVIDE 1: elements are divided by scale_inv (profile vllm).
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; other profiles are run-time values. Bytes moved: x, and one
// per element of a row.
#include "moe/routes.cuh"
#include "numerics/amax.cuh"
#include "scale/block_codes.cuh"

struct QuantizePermuteParams {
    const IN::storage* x;
    u8* to;
    float* scales;
    float* token_scales;         // [tokens, ceil(columns / 128)], moved by another launch; or null
    i64 columns;
    i64 pitch;                   // rows rounded up to 4
    u32 pairs;                   // warps per token; at least 1
    u32 warps;                   // warps with work
    u32 vector;                  // 1: rows of x and of the result allow accesses of 16 bytes
    const u32* probs;            // f32: see Routes::prob_at
    u32* rows_probs;             // [rows] f32, or null
    BlockRule rule;
    Routes routes;
};

constexpr int kLength = 128, kLaneElements = 16, kLanes = kLength / kLaneElements;
constexpr int kUnitElements = 32 * kLaneElements, kUnits = 2;
constexpr int kChunk = 16 / sizeof(IN::storage), kChunks = kLaneElements / kChunk;
using Source = Chunk<IN, kChunk>;
using Codes = Chunk<OUT, kLaneElements>;

// A lane's elements of a unit.
struct Elements {
    Source chunk[kChunks];

    // exist: how many of them exist.
    __device__ __forceinline__ void load(const IN::storage* from, int exist, bool vector) {
#pragma unroll
        for (int i = 0; i < kChunks; i++) {
            if (vector) chunk[i] = exist ? Source::load(from + i * kChunk) : Source{};
            else chunk[i] = Source::load_partial(from + i * kChunk, exist - i * kChunk);
        }
    }
    __device__ __forceinline__ u32 largest() const {
        Amax<IN> amax;
#pragma unroll
        for (int i = 0; i < kChunks; i++) amax.add(chunk[i]);
        return amax.largest;
    }
    __device__ __forceinline__ Codes codes(float factor, float divisor, bool quick) const {
        Codes all;
#pragma unroll
        for (int i = 0; i < kChunks; i++) {
            const auto some = quantized(chunk[i], factor, divisor, quick);
#pragma unroll
            for (int w = 0; w < Codes::kWords / kChunks; w++)
                all.word[i * (Codes::kWords / kChunks) + w] = some.word[w];
        }
        return all;
    }
};

// Scales per token.
__device__ __forceinline__ i64 blocks_of(const QuantizePermuteParams& p) {
    return (p.columns + kLength - 1) / kLength;
}

// A token. Each lane has loaded the row of one of the first kLanes slots.
struct Token {
    const QuantizePermuteParams& p;
    const u32 index;
    const i32 first_row;

    __device__ __forceinline__ Token(const QuantizePermuteParams& params, u32 token)
        : p(params), index(token), first_row(row_of(threadIdx.x % kLanes)) {}

    __device__ __forceinline__ i32 row_of(int k) const {
        return k < (int)p.routes.topk ? p.routes.row((i64)index * p.routes.topk + k) : -1;
    }
    // Stores the lane's codes and their block's scale to all rows. exist: valid codes, from the first on.
    __device__ __forceinline__ void store(i64 column, int exist, const Codes& codes, float scale_inv) const {
        const int in_block = threadIdx.x % kLanes, topk = (int)p.routes.topk;
        const bool has_scale = column - in_block * kLaneElements < p.columns;
        if (p.token_scales && has_scale && in_block == 0)
            p.token_scales[index * blocks_of(p) + column / kLength] = scale_inv;
        float* const scales = p.scales + column / kLength * p.pitch;
#pragma unroll 1
        for (int k = 0; k < topk; k += kLanes) {
            const i32 own = k == 0 ? first_row : row_of(k + in_block);
            if (own >= 0 && has_scale && !p.token_scales) scales[own] = scale_inv;
#pragma unroll
            for (int j = 0; j < kLanes; j++) {
                if (k + j >= topk) break;
                const i32 row = __shfl_sync(~0u, own, j);
                if (row < 0 || exist == 0) continue;
                u8* const to = p.to + row * p.columns + column;
                if (p.vector) codes.store_whole<true>(to);
                else codes.store_partial(to, exist);
            }
        }
    }
};

// Quantises a pair of units of a token, and stores them.
__device__ __forceinline__ void move_pair(const Token& token, u32 pair) {
    const QuantizePermuteParams& p = token.p;
    const int lane = threadIdx.x % 32, in_block = lane % kLanes;
    const i64 first = (i64)pair * (kUnits * kUnitElements) + lane * kLaneElements;
    const IN::storage* const from = p.x + token.index * p.columns + first;
    Elements unit[kUnits];
    u32 largest[kUnits];
    int exist[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        exist[u] = left_of(p.columns - first - u * kUnitElements, kLaneElements);
        unit[u].load(from + u * kUnitElements, exist[u], p.vector);
    }
#pragma unroll
    for (int u = 0; u < kUnits; u++) largest[u] = unit[u].largest();
    // The lower half of a block's lanes computes the scale of the first unit's block, the upper half the
    // other.
    static_assert(kUnits == 2, "two halves");
    halve_down<kLanes / 2, 1>(largest, IN::max_magnitudes<false>);
    const BlockScale s = p.rule.of<DIVIDE != 0>(Amax<IN>{largest[0]}.f32_bits());
    const bool quick = !DIVIDE || __all_sync(~0u, has_quick_quotients(s.scale_inv));
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        const int owner = lane - in_block + u * (kLanes / 2);
        const float scale_inv = __shfl_sync(~0u, s.scale_inv, owner);
        const Codes codes = unit[u].codes(__shfl_sync(~0u, s.factor, owner), scale_inv, quick);
        token.store(first + u * kUnitElements, exist[u], codes, scale_inv);
    }
}

// From sm_100 on, and with f32 anywhere, values would spill with as many thread blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = sizeof(IN::storage) == 4 ? 3 : 4;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
quantize_permute(const __grid_constant__ QuantizePermuteParams p) {
    const i32 own_source = load_own_source(p.routes);
    const i64 warp = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
    if (warp < p.warps) {
        const u32 token = (u32)warp / p.pairs, pair = (u32)warp - token * p.pairs;
        move_pair(Token(p, token), pair);
        if (p.rows_probs && pair == 0)
            move_probs(p.routes, p.probs, p.rows_probs, token, 1, threadIdx.x % 32, 32);
    }
    const auto clear_scales = [&](i64 row) {
        if (p.token_scales) return;
        for (i64 block = threadIdx.x; block < blocks_of(p); block += kThreads)
            p.scales[block * p.pitch + row] = 0;
    };
    if (blockIdx.x == 0)
        for (i64 row = p.routes.rows; row < p.pitch; row++) clear_scales(row);
    clear_unused(p.routes, own_source, [&](i64 row) {
        clear(p.to + row * p.columns, p.columns, p.vector ? 16 : 1);
        clear_scales(row);
        if (p.rows_probs && threadIdx.x == 0) p.rows_probs[row] = 0;
    });
}
