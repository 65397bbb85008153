// Whole rows in blocks with f32 scales (fused/f32_blocks.cuh).
#pragma once
#include "fused/f32_blocks.cuh"
#include "norm/rows.cuh"

struct RowBlocks {
    // of chunk owned<4>() in rows of the same columns, from row 0 on; null but in the first lanes of a block
    float* scales;

    __device__ __forceinline__ RowBlocks(const FusedBlockParams& p, const RowPosition& at) : scales(nullptr) {
        const int chunk = owned<4>(), lane = threadIdx.x % 32;
        const i64 block = at.column(chunk % kRowChunks) / kSubblock >> p.subblocks_per_block / 2;
        if (!(lane / 4 & (p.subblocks_per_block - 1)) && block < p.row_scales.columns)
            scales = p.row_scales.at(0, chunk / kRowChunks, block);
    }
    __device__ __forceinline__ void store(const FusedBlockParams& p, const RowPosition& at,
                                          float (&y)[kChunks][8]) {
        u32 amax = fold_chunks<false>(y);
        // Without branches: at distance 0 a lane finds itself.
        amax = larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 1 ? 4 : 0));
        amax = larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 2 ? 8 : 0));
        const BlockScale s = p.rule.quick_of(amax);
        const int row = owned<4>() / kRowChunks;
        if (scales && at.has_row(row)) scales[at.row * p.row_scales.row] = s.scale_inv;
        const float own = operand(p, s);
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            put_codes(p.data, at, c, quantized(p, y[c], broadcast(own, c)));
    }
    __device__ __forceinline__ void pad(const FusedBlockParams& p, const RowPosition&, int row) const {
        if (scales && owned<4>() < kRowChunks) scales[row * p.row_scales.row] = 0.0f;
    }
    static __device__ __forceinline__ u32 amax() { return 0; }
};
