// Stores the sums of a warpgroup as elements of D (see warpgroup_products.cuh for their layout).
#pragma once
#include "matmul/problem.cuh"
#include "matmul/tensor_copy.cuh"

// Returns two elements, the first in the low half. NaN is as the chip makes it.
__device__ __forceinline__ u32 narrow_pair(u32 type, float lo, float hi) {
    return type == kOutBf16 ? bf16::narrow2_any_nan(lo, hi) : f16::narrow2_any_nan(lo, hi);
}

// Stores a warp's 16 × 16 elements of 16 bits to shared memory: sums 4 * i to 4 * i + 7. They are two chunks
// of 16 bytes in each of 16 rows of a box; `chunk` is the first one.
template <u32 kType>
__device__ __forceinline__ void store_16x16(u8* box, int chunk, const float* sums) {
    const int lane = threadIdx.x % 32;
    const u32 words[4] = {narrow_pair(kType, sums[0], sums[1]), narrow_pair(kType, sums[2], sums[3]),
                          narrow_pair(kType, sums[4], sums[5]), narrow_pair(kType, sums[6], sums[7])};
    const auto at = [&](int row, int c) { return box + row * kBoxBytes + (c ^ row % 8) * 16; };
#ifdef CUPY_FP8_HOST
    for (int i = 0; i < 4; i++)
        *reinterpret_cast<u32*>(at(lane / 4 + i % 2 * 8, chunk + i / 2) + lane % 4 * 4) = words[i];
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(at(lane % 16, chunk + lane / 16))), "r"(words[0]), "r"(words[1]),
                    "r"(words[2]), "r"(words[3]) : "memory");
#endif
}

// A warpgroup's results are staged in two boxes of 64 rows and 128 bytes, one after the other, and stored
// whole, or 16 rows at a time. `staged`: a warp's rows of the first box.
constexpr int kRowsOfWarp = 16;
constexpr int kStagedBoxes = 2, kStagedBoxBytes = 4 * kRowsOfWarp * kBoxBytes;

// Stages all columns as 16-bit elements.
template <u32 kType, int kColumns>
__device__ __forceinline__ void stage_rows(const float (&sums)[kColumns / 2], u8* staged) {
    static_assert(kColumns * 2 == kStagedBoxes * kBoxBytes, "as many boxes");
#pragma unroll
    for (int c = 0; c < kColumns; c += 16)
        store_16x16<kType>(staged + c / 64 * kStagedBoxBytes, c % 64 / 8, sums + c / 2);
}

// Stages sums as f32: 64 columns from kFirst on.
template <int kFirst, int kColumns>
__device__ __forceinline__ void stage_sums(const float (&sums)[kColumns / 2], u8* staged) {
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u8* const at = staged + i / 4 * kStagedBoxBytes + row * kBoxBytes
                       + ((i % 4 * 2 + lane % 4 / 2) ^ row) * 16 + lane % 2 * 8;
        const float* const own = sums + kFirst / 2 + 4 * i;
        *reinterpret_cast<float2*>(at) = make_float2(own[0], own[1]);
        *reinterpret_cast<float2*>(at + 8 * kBoxBytes) = make_float2(own[2], own[3]);
    }
}

// Adds sums to all staged columns.
template <int kColumns>
__device__ __forceinline__ void add_to_staged(const float (&sums)[kColumns / 2], u8* staged) {
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 8; i++) {
        u8* const at = staged + i / 4 * kStagedBoxBytes + row * kBoxBytes
                       + ((i % 4 * 2 + lane % 4 / 2) ^ row) * 16 + lane % 2 * 8;
        const auto add = [](u8* to, float first, float second) {
            float2& pair = *reinterpret_cast<float2*>(to);
            pair = make_float2(add_rn(pair.x, first), add_rn(pair.y, second));
        };
        add(at, sums[4 * i], sums[4 * i + 1]);
        add(at + 8 * kBoxBytes, sums[4 * i + 2], sums[4 * i + 3]);
    }
}

// Destination of a warp: its first row of D, and which elements exist from there on.
struct WarpRows {
    u8* out;                       // first element of the warp's first row
    i64 pitch;                     // elements between rows
    int rows, columns;
};

// Adds fewer rows than a box has to D, whose rows begin at multiples of 16 bytes: each lane starts the copies
// of one row. (Loading the old values would take longer than the products.)
template <int kColumns>
__device__ __forceinline__ void add_rows_out(const WarpRows& to, const float (&sums)[kColumns / 2],
                                             u8* staged) {
    constexpr int kBoxColumns = kBoxBytes / 4;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kColumns; first += kBoxColumns) {
        u8* const box = staged + first / kBoxColumns % kStagedBoxes * kStagedBoxBytes;
        copy_out_wait_read<kStagedBoxes - 1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBoxColumns / 8; i++) {
            u8* const at = box + lane / 4 * kBoxBytes + (8 * i + lane % 4 * 2) * 4;
            const float* const own = sums + first / 2 + 4 * i;
            *reinterpret_cast<float2*>(at) = make_float2(own[0], own[1]);
            *reinterpret_cast<float2*>(at + 8 * kBoxBytes) = make_float2(own[2], own[3]);
        }
        publish_to_copies();
        __syncwarp();
        const int left = to.columns - first;
        if (lane < to.rows && left > 0)
            add_bytes_out(reinterpret_cast<float*>(to.out) + lane * to.pitch + first,
                          box + lane * kBoxBytes, (left < kBoxColumns ? left : kBoxColumns) * 4);
        copy_out_commit();
    }
    copy_out_wait_read<0>();
    __syncwarp();
}

// Loads two adjacent floats. pairs: by one load. both: the second one exists.
__device__ __forceinline__ float2 load_two(const float* at, bool pairs, bool both) {
    if (pairs) return *reinterpret_cast<const float2*>(at);
    return make_float2(at[0], both ? at[1] : 0);
}
__device__ __forceinline__ void store_two(float* at, float2 values, bool pairs, bool both) {
    if (pairs) {
        *reinterpret_cast<float2*>(at) = values;
    } else {
        at[0] = values.x;
        if (both) at[1] = values.y;
    }
}

// Stores a warp's rows at any address with any number of columns, or adds them to f32. pairs: two adjacent
// elements per store.
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
                if (add) {
                    const float2 before = load_two(at, pairs, both);
                    low = add_rn(before.x, low);
                    high = add_rn(before.y, high);
                }
                store_two(at, make_float2(low, high), pairs, both);
            } else {
                const u32 words = narrow_pair(type, low, high);
                u16* const at = reinterpret_cast<u16*>(out) + column;
                if (pairs && both) {
                    *reinterpret_cast<u32*>(at) = words;
                } else {
                    at[0] = (u16)words;
                    if (both) at[1] = (u16)(words >> 16);
                }
            }
        }
    }
}
