// The sums of a warpgroup become elements of D (see warpgroup_products.cuh for who has which).
#pragma once
#include "matmul/problem.cuh"
#include "matmul/tensor_copy.cuh"

// Two elements, the first in the low half. A NaN is whatever the chip makes of it.
__device__ __forceinline__ u32 narrow_pair(u32 type, float lo, float hi) {
#ifdef CUPY_FP8_HOST
    return type == kOutBf16 ? bf16::narrow2(lo, hi) : f16::narrow2(lo, hi);
#else
    u32 pair;
    if (type == kOutBf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
#endif
}

// Stores a warp's 16 × 16 elements of 16 bits to shared memory: sums 4 * i to 4 * i + 7.
__device__ __forceinline__ void store_16x16(u8* shared, int pitch, const float* sums, u32 type) {
    const int lane = threadIdx.x % 32;
    const u32 words[4] = {narrow_pair(type, sums[0], sums[1]), narrow_pair(type, sums[2], sums[3]),
                          narrow_pair(type, sums[4], sums[5]), narrow_pair(type, sums[6], sums[7])};
#ifdef CUPY_FP8_HOST
    u8* const first = shared + lane / 4 * pitch + lane % 4 * 4;
    for (int i = 0; i < 4; i++)
        *reinterpret_cast<u32*>(first + i % 2 * 8 * pitch + i / 2 * 16) = words[i];
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(shared + lane % 16 * pitch + lane / 16 * 16)), "r"(words[0]),
                    "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
#endif
}

// Where a warp stores: its first row of D, and which elements exist from there.
struct WarpRows {
    u8* out;                       // the first element of the warp's first row
    i64 pitch;                     // elements from row to row
    int rows, columns;
};

// Rows leave by one copy each, so the elements beyond the last row and column stay as they are. Rows begin at
// multiples of 16 bytes. `staged` is the warp's own, with rows of kColumns * 2 + 16 bytes.
template <int kColumns>
__device__ __forceinline__ void copy_rows_16(const WarpRows& to, const float (&sums)[kColumns / 2], u32 type,
                                             u8* staged) {
    constexpr int kPitch = kColumns * 2 + 16;      // 16 bytes more: no bank conflicts
    const int lane = threadIdx.x % 32;
    copy_out_wait_read();
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) store_16x16(staged + c * 2, kPitch, sums + c / 2, type);
    publish_to_copies();
    __syncwarp();
    const int columns = to.columns < kColumns ? to.columns : kColumns;
    if (lane < 16 && lane < to.rows && columns > 0)
        copy_out(to.out + lane * to.pitch * 2, staged + lane * kPitch, columns * 2);
    copy_out_commit();
}

// Any address and any number of columns; also adds to f32. pairs: two neighbours are stored as one.
template <int kColumns>
__device__ __forceinline__ void store_sums(const WarpRows& to, const float (&sums)[kColumns / 2], u32 type,
                                           bool add, bool pairs) {
    const int lane = threadIdx.x % 32, first = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane / 4 + half * 8;
        if (row >= to.rows) continue;
        u8* const out = to.out + row * to.pitch * (type == kOutF32 ? 4 : 2);
#pragma unroll
        for (int i = 0; i < kColumns / 8; i++) {
            const int column = 8 * i + first;
            float low = sums[4 * i + 2 * half], high = sums[4 * i + 2 * half + 1];
            if (column >= to.columns) continue;
            const bool both = column + 1 < to.columns;
            if (type == kOutF32) {
                float* const at = reinterpret_cast<float*>(out) + column;
                if (pairs) {
                    float2* const pair = reinterpret_cast<float2*>(at);
                    if (add) {
                        const float2 before = *pair;
                        low = add_rn(before.x, low);
                        high = add_rn(before.y, high);
                    }
                    *pair = make_float2(low, high);
                } else {
                    at[0] = add ? add_rn(at[0], low) : low;
                    if (both) at[1] = add ? add_rn(at[1], high) : high;
                }
            } else {
                const u32 words = narrow_pair(type, low, high);
                u16* const at = reinterpret_cast<u16*>(out) + column;
                at[0] = (u16)words;
                if (both) at[1] = (u16)(words >> 16);
            }
        }
    }
}
