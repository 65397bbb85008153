// Whole rows in MX blocks (fused/mx_blocks.cuh).
#pragma once
#include "fused/mx_blocks.cuh"
#include "norm/rows.cuh"

struct RowMx {
    __device__ __forceinline__ RowMx(const FusedMxParams&, const RowPosition&) {}
    static __device__ __forceinline__ void store(const FusedMxParams& p, const RowPosition& at,
                                                 float (&y)[kChunks][8]) {
        const u32 amax = p.rule.nan_wins() ? fold_chunks<true>(y) : fold_chunks<false>(y);
        const int own = owned<4>();
        const bool exists = at.column(own % kRowChunks) / kSubblock * kSubblock < at.chunks * 8
            && at.has_row(own / kRowChunks);
        const u32 byte = p.rule.byte(amax);
        const int row = own / kRowChunks;
        store_four(p, at, own, exists ? byte : 0, at.row + row, at.has_row(row));
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            put_codes(p.data, at, c, quantized(y[c], inverse_e8m0(__shfl_sync(~0u, byte, owner(c)))));
    }
    static __device__ __forceinline__ void pad(const FusedMxParams& p, const RowPosition& at, int row) {
        const int own = owned<4>();
        store_four(p, at, own, 0, row, own < kRowChunks);
    }
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    // Stores the bytes of four blocks of chunk `own` as one word, which one of their lanes `has`.
    static __device__ __forceinline__ void store_four(const FusedMxParams& p, const RowPosition& at, int own,
                                                      u32 byte, int row, bool has) {
        const int lane = threadIdx.x % 32;
        u32 word = byte << lane / 4 % 4 * 8;
        word |= __shfl_xor_sync(~0u, word, 4);
        word |= __shfl_xor_sync(~0u, word, 8);
        if (lane / 4 % 4 || !has) return;
        const i64 blocks = (p.call.columns + kSubblock - 1) / kSubblock;
        p.row_scales.store_blocks(0, row, at.column(own % kRowChunks) / kSubblock, word, p.call.rows, blocks);
    }
};
