// Path rows of y (norm/rows.cuh).
#pragma once
#include "norm/rows.cuh"

// y of every row of the block. Returns the thread's amax, as bits.
template <class Output, class Params, class... More>
__device__ __forceinline__ u32 norm_rows(const Params& p, const SourceCall& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    RowPosition at(call);
    NextRows next(call, at, shared);
    next.request(call, at);
    const ThreadFloats weights{next.end(call)}, biases{weights.end(kRowChunks)};
    const bool has_bias = kNorms == Norms::layer || (kNorms == Norms::every && call.bias);
    keep_weights(call, at, weights);
#pragma unroll
    for (int j = 0; j < kRowChunks; j++) {
        if (!has_bias) break;
        float v[8];
        load_bias<true>(call, at.column(j), at.has_column(j) ? 8 : 0, v);
        biases.put(j, v);
    }
    RowTotals totals;
    Output output(p, at, more...);
    i64 first = at.first();
#pragma unroll 1
    while (at.left > 0) {
        copy_async_wait();
        float z[kChunks][8];
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            next.read(at, 0, c, z[c]);
            if (!call.has_residual()) continue;
            float residual[8];
            next.read(at, NextRows::kResidual, c, residual);
            add_residual<true>(call, residual, first + at.at(c), at.has(c) ? 8 : 0, z[c]);
        }
        if (at.left > 1) next.request(call, at);
        RowStatistics of[1];
        find_statistics(call, at, z, totals, false, {0.0f}, of);
        if (call.rstd_out && threadIdx.x == 0) call.rstd_out[at.row] = as_float(f32::narrow(of[0].rstd));
        // Where there is no column, weight and bias are 0, and so is y (or NaN, as all of the row).
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            float w[8], b[8];
            weights.get(c, w);
#pragma unroll
            for (float& each : b) each = -0.0f;
            if (has_bias) biases.get(c, b);
#pragma unroll
            for (int i = 0; i < 8; i++) z[c][i] = Source::value(z[c][i], of[0], w[i], b[i]);
            round_through(call, z[c]);
            if (kNorms == Norms::every && call.normed)
                store_eight<true, IN>(call.normed + first + at.at(c), z[c], at.has_column(c) ? 8 : 0);
        }
        output.store(p, at, z);
        first += at.step() * call.columns;
        at.advance();
    }
#pragma unroll 1
    for (; at.padding > 0; at.padding--, at.row += at.step()) output.pad(p, at);
    return output.amax();
}
