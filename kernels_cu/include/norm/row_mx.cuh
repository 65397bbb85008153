// Whole rows in MX blocks (fused/mx_blocks.cuh).
#pragma once
#include "fused/mx_blocks.cuh"
#include "norm/rows.cuh"

struct RowMx {
    RowCodes codes;

    __device__ __forceinline__ RowMx(const FusedMxParams& p, const RowPosition& at) : codes(p.data, at) {}
    __device__ __forceinline__ void store(const FusedMxParams& p, const RowPosition& at,
                                          float (&y)[kChunks][8]) {
        const u32 amax = p.rule.nan_wins() ? fold_chunks<true>(y) : fold_chunks<false>(y);
        const int own = owned<4>();
        const bool exists = at.column(own % kRowChunks) / kSubblock * kSubblock < at.chunks * 8
            && at.has_row(own / kRowChunks);
        const u32 byte = p.rule.byte(amax);
        store_four(p, at, own, exists ? byte : 0);
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            codes.put(at, c, quantized(y[c], inverse_e8m0(__shfl_sync(~0u, byte, owner(c)))));
        codes.advance(at);
    }
    __device__ __forceinline__ void pad(const FusedMxParams& p, const RowPosition& at) const {
        store_four(p, at, owned<4>(), 0);
    }
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    // Stores the bytes of four blocks of chunk `own` as one word.
    static __device__ __forceinline__ void store_four(const FusedMxParams& p, const RowPosition& at, int own,
                                                      u32 byte) {
        const int lane = threadIdx.x % 32;
        u32 word = byte << lane / 4 % 4 * 8;
        word |= __shfl_xor_sync(~0u, word, 4);
        word |= __shfl_xor_sync(~0u, word, 8);
        if (lane / 4 % 4) return;
        const i64 blocks = (p.call.columns + kSubblock - 1) / kSubblock;
        p.row_scales.store_blocks(0, at.row + own / kRowChunks, at.column(own % kRowChunks) / kSubblock, word,
                                  p.call.rows, blocks);
    }
};
