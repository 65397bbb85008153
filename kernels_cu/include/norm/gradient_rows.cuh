// Path rows of gradients (norm/rows.cuh): pairs of rows, and the sums of columns over the rows of a block.
#pragma once
#include "norm/rows.cuh"

// Sums of columns over the rows of a block, a pair of rows after the other: RunningTreeSum of eight columns,
// but that the last pair is not kept.
struct ColumnCounter {
    ThreadFloats levels;

    __device__ __forceinline__ void add(u32 pair, int j, float (&v)[8]) const {
        int level = j;
        for (u32 rest = pair; rest & 1; rest >>= 1, level += kRowChunks) add_to(v, level);
        levels.put(level, v);
    }
    // v: of the last pair. Adds the levels of the counter, from the lowest to the highest.
    __device__ __forceinline__ void store(u32 pair, int j, float (&v)[8], float* to) const {
        int level = j;
        for (u32 rest = pair; rest; rest >>= 1, level += kRowChunks)
            if (rest & 1) add_to(v, level);
        store_eight<true, f32>(reinterpret_cast<u32*>(to), v, 8);
    }

private:
    __device__ __forceinline__ void add_to(float (&v)[8], int level) const {
        float lower[8];
        levels.get(level, lower);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = add_rn(lower[i], v[i]);
    }
};

// Adds term(chunk, i) of a pair of rows. more: others follow in the block; if not, the sums are stored.
template <class Term>
__device__ __forceinline__ void add_rows(const ColumnCounter& counter, const RowPosition& at, bool more,
                                         u32 pair, float* to, Term term) {
#pragma unroll
    for (int j = 0; j < kRowChunks; j++) {
        if (!at.has_column(j)) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = term(j, i);
            if (at.has_row(1)) v[i] = add_rn(v[i], term(kRowChunks + j, i));
        }
        if (more) counter.add(pair, j, v);
        else counter.store(pair, j, v, to + at.at(j));
    }
}

// Returns a sum of each chunk: of grad * weight, times n (kProducts) or not.
template <bool kProducts>
__device__ __forceinline__ void sum_gradients(const RowPosition& at, const ThreadFloats& weights,
                                              const float (&z)[kChunks][8], const float (&grad)[kChunks][8],
                                              const RowStatistics (&of)[kRowsAtOnce],
                                              float (&sums)[kChunks]) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        float w[8];
        weights.get(c % kRowChunks, w);
        TreeSum<8> sum;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float gw = mul_rn(grad[c][i], w[i]);
            sum.add(i, kProducts ? mul_rn(gw, Source::normed(z[c][i], of[c / kRowChunks])) : gw);
        }
        sums[c] = at.has_column(c % kRowChunks) ? sum.sum() : as_float(kAbsentTerm);
    }
}
// Finds the means that gradients need.
__device__ __forceinline__ void find_means(const SourceCall& call, const RowPosition& at,
                                           const ThreadFloats& weights, const float (&z)[kChunks][8],
                                           const float (&grad)[kChunks][8], RowTotals& totals,
                                           RowStatistics (&of)[kRowsAtOnce]) {
    const auto mean = [&](float sum) { return Source::mean(call, sum); };
    float sums[kChunks], found[kRowsAtOnce];
    sum_gradients<true>(at, weights, z, grad, of, sums);
    totals.find(sums, mean, found);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) of[r].mean_product = found[r];
    if (!call.is_layer()) return;
    sum_gradients<false>(at, weights, z, grad, of, sums);
    totals.find(sums, mean, found);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) of[r].mean_grad = found[r];
}
// Replaces z by its gradients. What does not exist is 0, or NaN as all of the row.
__device__ __forceinline__ void find_gradients(const SourceCall& call, const RowPosition& at,
                                               const NextRows& next, const ThreadFloats& weights,
                                               const float (&grad)[kChunks][8],
                                               const RowStatistics (&of)[kRowsAtOnce],
                                               float (&z)[kChunks][8]) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        float w[8], residual[8];
        weights.get(c % kRowChunks, w);
        if (call.has_residual()) next.read(at, NextRows::kResidual, c, residual);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            z[c][i] = Source::gradient(z[c][i], grad[c][i], of[c / kRowChunks], w[i]);
            if (call.has_residual()) z[c][i] = add_rn(z[c][i], residual[i]);
            if (!kRms && !at.has(c)) z[c][i] = 0.0f;
        }
    }
}

// Loads given ones, 0 where there are none.
__device__ __forceinline__ void load_rstd(const SourceCall& call, const RowPosition& at,
                                          float (&rstd)[kRowsAtOnce]) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++)
        rstd[r] = call.rstd && at.left > r ? load_read_only(call.rstd + at.row + r) : 0.0f;
}

// The gradients of weight and bias over the rows of the block.
struct GradientSums {
    ColumnCounter of_weight, of_bias;

    // weights: what comes before in shared memory. The last pair of rows takes no level.
    __device__ __forceinline__ GradientSums(const SourceCall& call, const ThreadFloats& weights)
        : of_weight{{weights.end(kRowChunks)}},
          of_bias{{of_weight.levels.end((31 - __clz((int)call.rows_per_block / 2)) * kRowChunks)}} {}
    // more: other rows follow in the block.
    __device__ __forceinline__ void add(const SourceCall& call, const RowPosition& at, bool more, u32 pair,
                                        const float (&z)[kChunks][8], const float (&grad)[kChunks][8],
                                        const RowStatistics (&of)[kRowsAtOnce]) const {
        const i64 to = (i64)blockIdx.x * call.columns + (int)threadIdx.x * 8;
        const auto product = [&](int c, int i) {
            return mul_rn(grad[c][i], Source::normed(z[c][i], of[c / kRowChunks]));
        };
        if (call.weight_sums) add_rows(of_weight, at, more, pair, call.weight_sums + to, product);
        if (!kRms && call.bias_sums)
            add_rows(of_bias, at, more, pair, call.bias_sums + to,
                     [&](int c, int i) { return grad[c][i]; });
    }
};

// The gradients of every row of the block. Returns the thread's amax, as bits.
template <class Output, class Params, class... More>
__device__ __forceinline__ u32 norm_rows(const Params& p, const SourceCall& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    RowPosition at(call);
    const NextRows next(shared);
    next.request(call, at);
    const ThreadFloats weights{next.end(call)};
    const GradientSums sums(call, weights);
    keep_weights(call, at, weights);
    RowTotals totals;
    Output output(p, at, more...);
    float next_rstd[kRowsAtOnce];
    load_rstd(call, at, next_rstd);
#pragma unroll 1
    for (u32 pair = 0; at.left > 0; pair++) {
        copy_async_wait();
        float z[kChunks][8], grad[kChunks][8];
#pragma unroll
        for (int c = 0; c < kChunks; c++) next.read(at, 0, c, z[c]), next.read(at, 1, c, grad[c]);
        RowPosition following = at;
        following.advance();
        if (following.left > 0 && !call.has_residual()) next.request(call, following);
        RowStatistics of[kRowsAtOnce];
        const float rstd[kRowsAtOnce] = {next_rstd[0], next_rstd[kRowsAtOnce - 1]};
        load_rstd(call, following, next_rstd);
        find_statistics(call, at, z, totals, call.rstd, rstd, of);
        find_means(call, at, weights, z, grad, totals, of);
        sums.add(call, at, following.left > 0, pair, z, grad, of);
        find_gradients(call, at, next, weights, grad, of, z);
        if (following.left > 0 && call.has_residual()) next.request(call, following);
        output.store(p, at, z);
        at.row = following.row, at.left = following.left;
    }
    pad_rows(output, p, call, at);
    return output.amax();
}
