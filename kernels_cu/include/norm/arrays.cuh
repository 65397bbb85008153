// Gradients that are not quantised, but stored as DX (OUT is any format of FP8).
#pragma once
#include "fused/drivers.cuh"
#include "norm/rows.cuh"

static_assert(kScaling == Scaling::none && kBackward);

struct NormArrayParams {
    SourceCall call;
    DX::storage* dx;             // [rows, columns]
};

struct RowArray {
    __device__ __forceinline__ RowArray(const NormArrayParams&, const RowPosition&) {}
    static __device__ __forceinline__ void store(const NormArrayParams& p, const RowPosition& at,
                                                 const float (&dx)[kChunks][8]) {
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            store_eight<true, DX>(p.dx + at.first() + at.at(c), dx[c], at.has(c) ? 8 : 0);
    }
    static __device__ __forceinline__ void pad(const NormArrayParams&, const RowPosition&, int) {}
    static __device__ __forceinline__ u32 amax() { return 0; }
};

struct PatchArray {
    __device__ __forceinline__ explicit PatchArray(const NormArrayParams&) {}
    __device__ __forceinline__ void take(const NormArrayParams& p, const PatchPosition& patch, int r,
                                         const EightValues& dx) const {
        store_eight<false, DX>(p.dx + (patch.row + r) * p.call.columns + patch.column, dx.of,
                               patch.columns_of(r));
    }
    __device__ __forceinline__ void store(const NormArrayParams&, const TilePosition&,
                                          const PatchPosition&) {}
    static __device__ __forceinline__ u32 amax() { return 0; }
};
