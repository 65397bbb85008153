// The statistics of rows of any length and alignment, for path any: a block of threads finds those of a row
// at a time, and reads the row once for every sum.
#pragma once
#include "numerics/grid_sum.cuh"
#include "source/norm.cuh"

constexpr int kStatisticsThreads = 256;

class RowSums {
public:
    __device__ __forceinline__ RowSums(const SourceCall& call, GridSum<kStatisticsThreads>& shared)
        : call(call), shared(shared) {}

    // Returns the sum of term(i, z, grad) over the elements of a row to all threads. eight(k, z, grad): eight
    // elements.
    template <class Term>
    __device__ __forceinline__ float operator()(i64 row, Term term) const {
        const i64 chunks = (call.columns + 7) / 8;
        const i64 rounds = (chunks + kStatisticsThreads - 1) / kStatisticsThreads;
#pragma unroll 1
        for (i64 round = 0; round < rounds; round++) {
            const i64 column = (round * kStatisticsThreads + threadIdx.x) * 8;
            const int count = left_of(call.columns - column, 8);
            float z[8], grad[8], w[8];
            load(row, column, count, z, grad, w);
            const float sum = shared.of_block(sum_of_eight(
                count, [&](int i) { return term(z[i], BACKWARD ? mul_rn(grad[i], w[i]) : 0.0f); }));
            if (threadIdx.x == 0) shared.running.add(round, sum);
        }
        __shared__ float total;
        if (threadIdx.x == 0) total = shared.running.total(rounds);
        __syncthreads();
        return total;
    }

private:
    const SourceCall& call;
    GridSum<kStatisticsThreads>& shared;

    __device__ __forceinline__ void load(i64 row, i64 column, int count, float (&z)[8], float (&grad)[8],
                                         float (&w)[8]) const {
        const i64 at = row * call.columns + column;
        Eight raw;
        load_eight<false>(raw, call.x + at, count);
        widen_eight(raw, z);
        if constexpr (kBackward) {
            load_eight<false>(raw, call.grad + at, count);
            widen_eight(raw, grad);
            load_weight<false>(call, column, count, w);
        } else if (call.residual) {
            float residual[8];
            load_eight<false>(raw, call.residual + at, count);
            widen_eight(raw, residual);
#pragma unroll
            for (int i = 0; i < 8; i++) z[i] = add_rn(z[i], residual[i]);
            if (call.rounds()) round_eight<IN>(z);
        }
    }
};

// Finds the statistics of rows, a block of threads for each.
__device__ __forceinline__ void find_statistics(const SourceCall& call) {
    if (is_set(call.noop)) return;
    __shared__ GridSum<kStatisticsThreads> shared;
    const RowSums sums(call, shared);
#pragma unroll 1
    for (i64 row = blockIdx.x; row < call.rows; row += gridDim.x) {
        RowStatistics of{0.0f, 0.0f, 0.0f, 0.0f};
        if (call.has(SourceCall::kLayer))
            of.mean = Source::mean(call, sums(row, [](float z, float) { return z; }));
        if (kBackward && call.rstd) of.rstd = call.rstd[row];
        else
            of.rstd = Source::rstd(call, sums(row, [&](float z, float) {
                const float c = sub_rn(z, of.mean);
                return mul_rn(c, c);
            }));
        if constexpr (kBackward) {
            of.mean_product = Source::mean(
                call, sums(row, [&](float z, float gw) { return mul_rn(gw, Source::normed(z, of)); }));
            if (call.has(SourceCall::kLayer))
                of.mean_grad = Source::mean(call, sums(row, [](float, float gw) { return gw; }));
        }
        if (threadIdx.x != 0) continue;
        const float all[4] = {of.mean, of.rstd, of.mean_grad, of.mean_product};
#pragma unroll
        for (int i = 0; i < 2 + 2 * kBackward; i++) call.statistics[i * call.rows + row] = all[i];
        if (call.rstd_out) call.rstd_out[row] = as_float(f32::narrow(of.rstd));
    }
}

// Adds up 128 rows of 32 columns.
__device__ __forceinline__ void sum_columns(const SourceCall& call) {
    if (is_set(call.noop)) return;
    constexpr int kColumns = 32, kWarps = kStatisticsThreads / 32, kRows = 16;
    __shared__ float shared[2][kWarps][kColumns];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 across = (call.columns + kColumns - 1) / kColumns, band = blockIdx.x / across;
    const i64 column = (blockIdx.x - band * across) * kColumns + lane;
    const i64 row = band * (kWarps * kRows) + warp * kRows;
    const int left = column < call.columns ? left_of(call.rows - row, kRows) : 0;
    TreeSum<kRows> sums[2];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        float terms[2] = {as_float(kAbsentTerm), as_float(kAbsentTerm)};
        if (r < left) {
            const i64 at = (row + r) * call.columns + column;
            const float z = IN::widen(call.x[at]), grad = IN::widen(call.grad[at]);
            const float* const statistics = call.statistics + row + r;
            const RowStatistics of{statistics[0], statistics[call.rows], 0.0f, 0.0f};
            terms[0] = mul_rn(grad, Source::normed(z, of)), terms[1] = grad;
        }
        sums[0].add(r, terms[0]), sums[1].add(r, terms[1]);
    }
    shared[0][warp][lane] = sums[0].sum(), shared[1][warp][lane] = sums[1].sum();
    __syncthreads();
    if (warp > 1 || column >= call.columns) return;
    float* const to = warp ? call.bias_sums : call.weight_sums;
    TreeSum<kWarps> total;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total.add(w, shared[warp][w][lane]);
    if (to) to[band * call.columns + column] = as_float(f32::narrow(total.sum()));
}
