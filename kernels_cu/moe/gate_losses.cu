// Losses for training a gate, and their gradients (docs/numerics.md, section 14).
//
// load_balance_loss  counts i32, score_sums f32 [items] -> loss f32 [1], grad f32 [items]; items: sequences *
//                    experts. One thread per item.
// z_loss             logits IN [tokens, experts] -> loss f32 [1], grad IN [tokens, experts]. One warp per
//                    token. Defines: see gate_row.cuh; SCORE is softmax.
#include "numerics/grid_sum.cuh"

#ifdef ENTRY_load_balance_loss
#include "numerics/formats.cuh"
#include "numerics/logarithm.cuh"

struct LoadBalanceParams {
    const i32* counts;
    const float* score_sums;
    float* loss;
    float* grad;
    float* of_blocks;            // one sum per block
    u32* done;                   // blocks done; zero before and after a launch
    i64 items;
    float factor;
};

constexpr int kThreads = 256;

// Returns n rounded to f32.
__device__ __forceinline__ float rounded_integer(u32 n) {
    return fma_rn(small_integer(n >> 12), 4096.0f, small_integer(n & 0xfffu));
}

extern "C" __global__ void __launch_bounds__(kThreads)
load_balance_loss(const __grid_constant__ LoadBalanceParams p) {
    __shared__ GridSum<kThreads> shared;
    const i64 item = (i64)blockIdx.x * kThreads + threadIdx.x;
    float term = as_float(kAbsentTerm), total;
    if (item < p.items) {
        const float count = rounded_integer((u32)larger(p.counts[item], 0));
        p.grad[item] = as_float(f32::narrow(mul_rn(p.factor, count)));
        term = mul_rn(count, p.score_sums[item]);
    }
    if (shared.add(term, p.of_blocks, p.done, total))
        *p.loss = as_float(f32::narrow(mul_rn(p.factor, total)));
}
#endif

#ifdef ENTRY_z_loss
#include "moe/gate_row.cuh"

struct ZLossParams {
    const IN::storage* logits;
    float* loss;
    IN::storage* grad;
    float* of_blocks;            // one sum per block
    u32* done;                   // blocks done; zero before and after a launch
    i64 tokens;
    u32 experts;
    u32 vector;                  // 1: rows of logits and of the gradient are whole accesses
    float mean, slope;           // coeff / tokens and 2 * coeff / tokens
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
z_loss(const __grid_constant__ ZLossParams p) {
    __shared__ GridSum<kThreads> shared;
    __shared__ float term[kWarps];
    const i64 token = (i64)blockIdx.x * kWarps + threadIdx.x / kLanes;
    float square = as_float(kAbsentTerm);
    if (token < p.tokens) {
        Row l, x;
        load_row<IN>(p.logits + token * p.experts, p.experts, p.vector, l);
        const float m = largest_of_row(l);
        const bool usual = softmax_terms(l, m, x);
        const float sum = sum_of_row(x);
        const float z = is_nan(m) || is_infinite(m) ? 0.0f
                                                    : add_rn(m, log_from_one(as_bits(sum) ? sum : 1.0f));
        softmax_of_terms(x, sum, usual);
        const float slope = mul_rn(p.slope, z);
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = mul_rn(slope, x[i]);
        store_row<IN>(p.grad + token * p.experts, p.experts, p.vector, x);
        square = mul_rn(z, z);
    }
    if (threadIdx.x % kLanes == 0) term[threadIdx.x / kLanes] = square;
    __syncthreads();
    const float of_thread = threadIdx.x < kWarps ? term[threadIdx.x] : as_float(kAbsentTerm);
    float total;
    if (shared.add(of_thread, p.of_blocks, p.done, total))
        *p.loss = as_float(f32::narrow(mul_rn(p.mean, p.tokens ? total : 0.0f)));
}
#endif
