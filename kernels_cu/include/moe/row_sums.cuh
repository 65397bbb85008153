// Sums of a token's rows (docs/numerics.md, section 8). IN is the rows' format.
#pragma once
#include "memory/chunks.cuh"
#include "numerics/tree_sum.cuh"

constexpr int kCount = 16 / sizeof(IN::storage);
using RowChunk = Chunk<IN, kCount>;

// Sums of kCount columns by one thread.
struct ChunkSums {
    float sum[kCount];

    __device__ __forceinline__ ChunkSums() {
#pragma unroll
        for (float& each : sum) each = as_float(kAbsentTerm);
    }
    __device__ __forceinline__ void add(const RowChunk& part, float prob) {
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            float lo, hi;
            part.widen2(j, lo, hi);
            sum[2 * j] = add_rn(sum[2 * j], mul_rn(lo, prob));
            sum[2 * j + 1] = add_rn(sum[2 * j + 1], mul_rn(hi, prob));
        }
    }
    // Returns the rounded sums; 0 without rows.
    __device__ __forceinline__ RowChunk narrow(int rows) const {
        RowChunk out;
#pragma unroll
        for (int j = 0; j < kCount / 2; j++)
            out.narrow2(j, rows ? sum[2 * j] : 0.0f, rows ? sum[2 * j + 1] : 0.0f);
        return out;
    }
};
