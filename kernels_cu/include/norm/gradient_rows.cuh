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

// The gradients of every row of the block. Returns the thread's amax, as bits.
template <class Output, class Params, class... More>
__device__ __forceinline__ u32 norm_rows(const Params& p, const SourceCall& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    RowPosition at(call);
    NextRows next(call, at, shared);
    next.request(call, at);
    // The last pair of rows takes no level.
    const int levels = 31 - __clz((int)call.rows_per_block / 2);
    const ThreadFloats weights{next.end(call)};
    const ColumnCounter weight_sums{{weights.end(kRowChunks)}};
    const ColumnCounter bias_sums{{weight_sums.levels.end(levels * kRowChunks)}};
    keep_weights(call, at, weights);
    RowTotals totals;
    Output output(p, at, more...);
    // Given ones of the next rows.
    const bool given = call.rstd;
    float next_rstd[kRowsAtOnce];
    const auto load_rstd = [&](const RowPosition& of) {
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++)
            next_rstd[r] = given && of.left > r ? load_read_only(call.rstd + of.row + r) : 0.0f;
    };
    load_rstd(at);
    const i64 sums_at = (i64)blockIdx.x * call.columns + (int)threadIdx.x * 8;
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
        load_rstd(following);
        find_statistics(call, at, z, totals, given, rstd, of);
        float sums[kChunks], found[kRowsAtOnce];
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            float w[8];
            weights.get(c % kRowChunks, w);
            TreeSum<8> sum;
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum.add(i, mul_rn(mul_rn(grad[c][i], w[i]), Source::normed(z[c][i], of[c / kRowChunks])));
            sums[c] = at.has_column(c % kRowChunks) ? sum.sum() : as_float(kAbsentTerm);
        }
        const auto mean = [&](float sum) { return Source::mean(call, sum); };
        totals.find(sums, mean, found);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) of[r].mean_product = found[r];
        if (call.is_layer()) {
#pragma unroll
            for (int c = 0; c < kChunks; c++) {
                float w[8];
                weights.get(c % kRowChunks, w);
                TreeSum<8> sum;
#pragma unroll
                for (int i = 0; i < 8; i++) sum.add(i, mul_rn(grad[c][i], w[i]));
                sums[c] = at.has_column(c % kRowChunks) ? sum.sum() : as_float(kAbsentTerm);
            }
            totals.find(sums, mean, found);
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; r++) of[r].mean_grad = found[r];
        }
        if (call.weight_sums)
            add_rows(weight_sums, at, following.left > 0, pair, call.weight_sums + sums_at, [&](int c, int i) {
                return mul_rn(grad[c][i], Source::normed(z[c][i], of[c / kRowChunks]));
            });
        if (!kRms && call.bias_sums)
            add_rows(bias_sums, at, following.left > 0, pair, call.bias_sums + sums_at,
                     [&](int c, int i) { return grad[c][i]; });
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            float w[8];
            weights.get(c % kRowChunks, w);
            // What does not exist is 0, or NaN as all of the row.
#pragma unroll
            for (int i = 0; i < 8; i++) {
                z[c][i] = Source::gradient(z[c][i], grad[c][i], of[c / kRowChunks], w[i]);
                if (!kRms && !at.has(c)) z[c][i] = 0.0f;
            }
            if (!call.has_residual()) continue;
            float residual[8];
            next.read(at, NextRows::kResidual, c, residual);
#pragma unroll
            for (int i = 0; i < 8; i++) z[c][i] = add_rn(z[c][i], residual[i]);
        }
        if (following.left > 0 && call.has_residual()) next.request(call, following);
        output.store(p, at, z);
        at.row = following.row, at.left = following.left;
    }
    at.padding += at.left;                                           // The last pair had one row.
#pragma unroll 1
    for (; at.padding > 0; at.padding -= kRowsAtOnce, at.row += kRowsAtOnce) output.pad(p, at);
    return output.amax();
}
