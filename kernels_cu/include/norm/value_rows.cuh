// Path rows of y (norm/rows.cuh).
#pragma once
#include "norm/rows.cuh"

// True if weights have biases beside them in shared memory.
__device__ __forceinline__ bool has_biases(const SourceCall& call) {
    return kNorms == Norms::layer || (kNorms == Norms::every && call.bias);
}
__device__ __forceinline__ void keep_biases(const SourceCall& call, const RowPosition& at,
                                            const ThreadFloats& biases) {
    if (!has_biases(call)) return;
#pragma unroll
    for (int j = 0; j < kRowChunks; j++) {
        float v[8];
        load_bias<true>(call, at.column(j), at.has_column(j) ? 8 : 0, v);
        biases.put(j, v);
    }
}
// Replaces z - mean by y. Where there is no column, weight and bias are 0, and so is y (or NaN, as all of the
// row).
__device__ __forceinline__ void find_values(const SourceCall& call, const RowPosition& at,
                                            const ThreadFloats& weights, const ThreadFloats& biases,
                                            const RowStatistics& of, float (&z)[kChunks][8]) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        float w[8], b[8];
        weights.get(c, w);
#pragma unroll
        for (float& each : b) each = -0.0f;
        if (has_biases(call)) biases.get(c, b);
#pragma unroll
        for (int i = 0; i < 8; i++) z[c][i] = Source::value_of_centred(z[c][i], of, w[i], b[i]);
        round_through(call, z[c]);
        if (kNorms == Norms::every && call.normed)
            store_eight<true, IN>(call.normed + at.first() + at.at(c), z[c], at.has_column(c) ? 8 : 0);
    }
}

// y of every row of the block. Returns the thread's amax, as bits.
template <class Output, class Params, class... More>
__device__ __forceinline__ u32 norm_rows(const Params& p, const SourceCall& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    RowPosition at(call);
    const NextRows next(shared);
    next.request(call, at);
    const ThreadFloats weights{next.end(call)}, biases{weights.end(kRowChunks)};
    keep_weights(call, at, weights);
    keep_biases(call, at, biases);
    RowTotals totals;
    Output output(p, at, more...);
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
            add_residual<true>(call, residual, at.first() + at.at(c), at.has(c) ? 8 : 0, z[c]);
        }
        RowPosition following = at;
        following.advance();
        if (following.left > 0) next.request(call, following);
        RowStatistics of[1];
        find_statistics(call, at, z, totals, false, {0.0f}, of);
        if (call.rstd_out && threadIdx.x == 0) call.rstd_out[at.row] = as_float(f32::narrow(of[0].rstd));
        find_values(call, at, weights, biases, of[0], z);
        output.store(p, at, z);
        at.row = following.row, at.left = following.left;
    }
    pad_rows(output, p, call, at);
    return output.amax();
}
