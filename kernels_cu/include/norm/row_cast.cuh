// Whole rows with one scale (fused/one_scale.cuh).
#pragma once
#include "fused/one_scale.cuh"
#include "norm/rows.cuh"

struct RowCast {
    const float scale;
    const bool raises;           // an amax is wanted
    u32 largest = 0;

    __device__ __forceinline__ RowCast(const FusedCastParams& p, const RowPosition&, float scale)
        : scale(scale), raises(p.amax || p.workspace) {}
    __device__ __forceinline__ void store(const FusedCastParams& p, const RowPosition& at,
                                          const float (&y)[kChunks][8]) {
        if (raises)
#pragma unroll
            for (int c = 0; c < kChunks; c++) largest = raised_by(largest, y[c]);
        if (!p.data) return;
#pragma unroll
        for (int c = 0; c < kChunks; c++) put_codes(p.data, at, c, quantized(y[c], scale));
    }
    static __device__ __forceinline__ void pad(const FusedCastParams&, const RowPosition&, int) {}
    __device__ __forceinline__ u32 amax() const { return largest; }
};
