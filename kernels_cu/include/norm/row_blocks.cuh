// Whole rows in blocks with f32 scales (fused/f32_blocks.cuh).
#pragma once
#include "fused/f32_blocks.cuh"
#include "norm/rows.cuh"

struct RowBlocks {
    RowCodes codes;
    float* scale;                // of the block of chunk owned<4>(); null but in the first lanes of the block

    __device__ __forceinline__ RowBlocks(const FusedBlockParams& p, const RowPosition& at)
        : codes(p.data, at), scale(nullptr) {
        const int chunk = owned<4>(), lane = threadIdx.x % 32;
        const i64 row = at.row + chunk / kRowChunks;
        const i64 block = at.column(chunk % kRowChunks) / kSubblock >> p.subblocks_per_block / 2;
        if (!(lane / 4 & (p.subblocks_per_block - 1)) && block < p.row_scales.columns)
            scale = p.row_scales.at(0, row, block);
    }
    __device__ __forceinline__ void store(const FusedBlockParams& p, const RowPosition& at,
                                          float (&y)[kChunks][8]) {
        u32 amax = fold_chunks<false>(y);
        // Without branches: at distance 0 a lane finds itself.
        amax = larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 1 ? 4 : 0));
        amax = larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 2 ? 8 : 0));
        const BlockScale s = p.rule.quick_of(amax);
        const bool exists = at.has_row(owned<4>() / kRowChunks);
        if (scale && (exists || at.padding)) *scale = exists ? s.scale_inv : 0.0f;
        const float own = operand(p, s);
#pragma unroll
        for (int c = 0; c < kChunks; c++) codes.put(at, c, quantized(p, y[c], broadcast(own, c)));
        codes.advance(at);
        advance(p, at);
    }
    __device__ __forceinline__ void pad(const FusedBlockParams& p, const RowPosition& at) {
        const int row = owned<4>() / kRowChunks;
        if (scale && row < at.padding) *scale = 0.0f;
        advance(p, at);
    }
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    __device__ __forceinline__ void advance(const FusedBlockParams& p, const RowPosition& at) {
        if (scale) scale += at.step() * p.row_scales.row;
    }
};
