// Adds the products of 128 of K, times their scales, to f32 sums (matmul/wgmma.cu).
#pragma once
#include "matmul/wgmma_block.cuh"

// Returns 0 by way of a lane register, so that the assembler does not see that the value is uniform.
__device__ __forceinline__ u32 zero_of_lane() {
#ifdef CUPY_FP8_HOST
    return 0;
#else
    u32 lanes_below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes_below));
    return lanes_below >> 31;
#endif
}

// kBlocks: the scale of B of all columns of a tile, read one block of K ahead into registers of lanes. (To
// move it to a uniform register, the assembler would wait for it before it starts the last products of a
// block, which costs tiles of 192 columns 12 % of their speed.)
struct ScaleOfB {
    const float* at;
    i64 step;                      // to the next 128 of K
    float next;

    __device__ __forceinline__ ScaleOfB(const Product& p, const QueuedTile& t) : step(t.b_scale_block) {
        static_assert(kTileColumns == kScaleBlock, "a tile has one scale");
        at = t.b_scale + t.column / kScaleBlock * p.b.scale_row + zero_of_lane();
        if (kScaling == kBlocks && t.blocks > 0) read();
    }
    __device__ __forceinline__ void read() {
        next = load_read_only(at);
        at += step;
    }
};

// Scales of a lane's two rows of A, read while the tensor core works. In kBlocks they are multiplied by that
// of B.
struct LaneRowScales {
    float low, high;
    float of_b;
    bool exact = true;             // no lane of the warp has a product of scales that is not normal in f32

    // at_low, at_high: places of the rows in the stage
    __device__ __forceinline__ LaneRowScales(const Stage& stage, int at_low, int at_high, float scale_of_b)
        : low(stage.a[at_low]), high(stage.a[at_high]), of_b(scale_of_b) {
        if constexpr (kScaling == kBlocks) {
            low = mul_rn(low, of_b);
            high = mul_rn(high, of_b);
            exact = __all_sync(~0u, is_normal(low) & is_normal(high));
        }
    }
    // Multiplies by the scales of A, leaving those of B: one after the other, the results stay within f32.
    __device__ __forceinline__ void multiply_by_rows(float (&products)[kTileColumns / 2], float a_low,
                                                     float a_high) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++)
            products[i] = mul_rn(products[i], i % 4 < 2 ? a_low : a_high);
        low = high = of_b;
    }

private:
    static __device__ __forceinline__ bool is_normal(float value) {
        return (as_bits(value) & 0x7f800000u) - 0x00800000u < 0x7f000000u;
    }
};

// Returns a lane's scales for columns 8 * i + lane % 4 * 2 and the next one (not in kBlocks).
__device__ __forceinline__ float2 scales_of_columns(const Stage& stage, int i) {
    return reinterpret_cast<const float2*>(stage.b)[4 * i + threadIdx.x % 4];
}

// Adds the products of 128 of K, times their scales. release(): called once the stage is no longer needed.
template <class Release>
__device__ __forceinline__ void add_products(float (&sums)[kTileColumns / 2],
                                             const float (&products)[kTileColumns / 2],
                                             const LaneRowScales& rows, const Stage& stage, bool is_last,
                                             const Release& release) {
    if constexpr (kScaling == kBlocks) {
        release();
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++)
            sums[i] = fma_rn(i % 4 < 2 ? rows.low : rows.high, products[i], sums[i]);
    } else if constexpr (kScaling == kVectors) {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i += 4) {
            const float2 b = scales_of_columns(stage, i / 4);
            sums[i] = fma_rn(rows.low, mul_rn(b.x, products[i]), sums[i]);
            sums[i + 1] = fma_rn(rows.low, mul_rn(b.y, products[i + 1]), sums[i + 1]);
            sums[i + 2] = fma_rn(rows.high, mul_rn(b.x, products[i + 2]), sums[i + 2]);
            sums[i + 3] = fma_rn(rows.high, mul_rn(b.y, products[i + 3]), sums[i + 3]);
        }
        release();
    } else {
#pragma unroll
        for (int i = 0; i < kTileColumns / 2; i++) sums[i] = add_rn(sums[i], products[i]);
        if (is_last) {
#pragma unroll
            for (int i = 0; i < kTileColumns / 2; i += 4) {
                const float2 b = scales_of_columns(stage, i / 4);
                sums[i] = mul_rn(rows.low, mul_rn(b.x, sums[i]));
                sums[i + 1] = mul_rn(rows.low, mul_rn(b.y, sums[i + 1]));
                sums[i + 2] = mul_rn(rows.high, mul_rn(b.x, sums[i + 2]));
                sums[i + 3] = mul_rn(rows.high, mul_rn(b.y, sums[i + 3]));
            }
        }
        release();
    }
}
