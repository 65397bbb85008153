// Products of 128 of K are added to f32 sums, times their scales (matmul/wgmma.cu).
#pragma once
#include "matmul/wgmma_block.cuh"

// Returns 0. The assembler does not know that all lanes have the same value.
__device__ __forceinline__ u32 zero_of_lane() {
#ifdef CUPY_FP8_HOST
    return 0;
#else
    u32 lanes_below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes_below));
    return lanes_below >> 31;
#endif
}

// In kBlocks, the scales of B that the columns of a tile have: those of two rows of blocks. They are read one
// block of K ahead, into registers of lanes. (To move them to registers of the warp, the assembler would wait
// for them before it starts the last products of a block: 12 % of the speed.)
struct BlockScales {
    const float* at;
    i64 second, step;              // to the second row of blocks, and to the next 128 of K
    float next[2];

    __device__ __forceinline__ BlockScales(const Product& p, const QueuedTile& t) : step(t.b_scale_block) {
        const int row = t.column / kScaleBlock, last = (int)(p.n - 1) / kScaleBlock;
        at = t.b_scale + row * p.b.scale_row + zero_of_lane();
        second = row < last ? p.b.scale_row : 0;
        if (kScaling == kBlocks && t.blocks > 0) read();
    }
    __device__ __forceinline__ void read() {
        next[0] = load_read_only(at);
        next[1] = load_read_only(at + second);
        at += step;
    }
};

// The scales of a lane's two rows of A, read while the tensor core works; in kBlocks times those of B.
struct RowScales {
    static constexpr int kCount = kScaling == kBlocks ? kTileColumns / kChunk : 1;
    float low[kCount], high[kCount];
    bool exact = true;             // No lane of the warp has a product of scales that f32 cannot hold well.

    // at_low, at_high: of the rows in the stage. column: the tile's. of_b: of its two rows of blocks
    __device__ __forceinline__ RowScales(const Stage& stage, int at_low, int at_high, int column,
                                         const float (&of_b)[2]) {
        const float a_low = stage.a[at_low], a_high = stage.a[at_high];
        low[0] = a_low;
        high[0] = a_high;
        if constexpr (kScaling == kBlocks) {
            bool normal = true;
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                low[i] = mul_rn(a_low, of_column(column, i, of_b));
                high[i] = mul_rn(a_high, of_column(column, i, of_b));
                normal &= is_normal(low[i]) & is_normal(high[i]);
            }
            exact = __all_sync(~0u, normal);
        }
    }
    // Multiplies by the scales of A, so that those of B are left: one after the other, f32 holds the results.
    __device__ __forceinline__ void multiply_by_rows(float (&products)[kTileColumns / 2], float a_low,
                                                     float a_high, int column, const float (&of_b)[2]) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++)
            products[i] = mul_rn(products[i], i % 4 < 2 ? a_low : a_high);
#pragma unroll
        for (int i = 0; i < kCount; i++) low[i] = high[i] = of_column(column, i, of_b);
    }

private:
    // The scale of B that the i-th 64 columns of a tile have.
    static __device__ __forceinline__ float of_column(int column, int i, const float (&of_b)[2]) {
        return column % kScaleBlock + i * kChunk < kScaleBlock ? of_b[0] : of_b[1];
    }
    static __device__ __forceinline__ bool is_normal(float value) {
        return (as_bits(value) & 0x7f800000u) - 0x00800000u < 0x7f000000u;
    }
};

// The scales of a lane's columns of B (not in kBlocks). In kVectors the first ones are read while the tensor
// core works; there are no registers for more.
struct ColumnScales {
    static constexpr int kEarly = kScaling == kVectors ? 4 : 0;
    const float2* at;
    float2 early[kEarly + 1];

    __device__ __forceinline__ explicit ColumnScales(const Stage& stage)
        : at(reinterpret_cast<const float2*>(stage.b) + threadIdx.x % 4) {
#pragma unroll
        for (int i = 0; i < kEarly; i++) early[i] = at[4 * i];
    }
    // Returns the scales that lane l needs for columns 8 * i + l % 4 * 2 and the next one.
    __device__ __forceinline__ float2 operator[](int i) const { return i < kEarly ? early[i] : at[4 * i]; }
};

// Adds the products of 128 of K, times their scales. release() says that the stage is not needed any more.
template <class Release>
__device__ __forceinline__ void add_products(float (&sums)[kTileColumns / 2],
                                             const float (&products)[kTileColumns / 2],
                                             const RowScales& rows, const ColumnScales& columns, bool is_last,
                                             const Release& release) {
    if constexpr (kScaling == kBlocks) {
        release();
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++)
            sums[i] = fma_rn(i % 4 < 2 ? rows.low[2 * i / kChunk] : rows.high[2 * i / kChunk], products[i],
                             sums[i]);
    } else if constexpr (kScaling == kVectors) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i += 4) {
            const float2 b = columns[i / 4];
            sums[i] = fma_rn(rows.low[0], mul_rn(b.x, products[i]), sums[i]);
            sums[i + 1] = fma_rn(rows.low[0], mul_rn(b.y, products[i + 1]), sums[i + 1]);
            sums[i + 2] = fma_rn(rows.high[0], mul_rn(b.x, products[i + 2]), sums[i + 2]);
            sums[i + 3] = fma_rn(rows.high[0], mul_rn(b.y, products[i + 3]), sums[i + 3]);
        }
        release();
    } else {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = add_rn(sums[i], products[i]);
        if (is_last) {
#pragma unroll
            for (int i = 0; i < kTileColumns / 2; i += 4) {
                const float2 b = columns[i / 4];
                sums[i] = mul_rn(rows.low[0], mul_rn(b.x, sums[i]));
                sums[i + 1] = mul_rn(rows.low[0], mul_rn(b.y, sums[i + 1]));
                sums[i + 2] = mul_rn(rows.high[0], mul_rn(b.x, sums[i + 2]));
                sums[i + 3] = mul_rn(rows.high[0], mul_rn(b.y, sums[i + 3]));
            }
        }
        release();
    }
}
