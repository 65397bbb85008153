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

// Stores a warp's 16 × 16 elements of 16 bits to shared memory: sums 4 * i to 4 * i + 7. They are two chunks
// of 16 bytes of 16 rows of a box; `chunk` is the first one.
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
template <u32 kType, int kColumns>
__device__ __forceinline__ void stage_rows(const float (&sums)[kColumns / 2], u8* staged) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 16)
        store_16x16<kType>(staged + c / 64 * (16 * kBoxBytes), c % 64 / 8, sums + c / 2);
}

// Where a warp's 16 rows begin in the matrices of a map.
struct PlaceOut {
    const TensorMap& map;
    int matrix, row, column;
};

// A warp's 16 rows of 16-bit elements leave by a copy for each 64 columns. `staged` is the warp's own, at a
// multiple of 1024, with room for them.
template <int kColumns, bool kReadLate>
__device__ __forceinline__ void copy_rows_out(const PlaceOut& to, const float (&sums)[kColumns / 2], u32 type,
                                              u8* staged) {
    copy_out_wait_read<0>();
    __syncwarp();
    if (type == kOutBf16) stage_rows<kOutBf16, kColumns>(sums, staged);
    else stage_rows<kOutF16, kColumns>(sums, staged);
    publish_to_copies();
    __syncwarp();
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int i = 0; i < kColumns / 64; i++)
        copy_box_out<false, kReadLate>(&to.map, staged + i * (16 * kBoxBytes), to.matrix, to.row,
                                       to.column + i * 64);
    copy_out_commit();
}

// Its sums as they are leave by a copy for each 32 columns, or are added to what D has. They take twice the
// room, so a box waits until the one before it at the same place was read.
template <int kColumns, bool kAdds, bool kReadLate>
__device__ __forceinline__ void copy_sums_out(const PlaceOut& to, const float (&sums)[kColumns / 2],
                                              u8* staged) {
    constexpr int kPlaces = kColumns / 64;
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 32; i++) {
        u8* const box = staged + i % kPlaces * (16 * kBoxBytes);
        copy_out_wait_read<kPlaces - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u8* const at = box + row * kBoxBytes + ((2 * j + lane % 4 / 2) ^ row) * 16 + lane % 2 * 8;
            const float* const own = sums + 16 * i + 4 * j;
            *reinterpret_cast<float2*>(at) = make_float2(own[0], own[1]);
            *reinterpret_cast<float2*>(at + 8 * kBoxBytes) = make_float2(own[2], own[3]);
        }
        publish_to_copies();
        __syncwarp();
        if (lane == 0) copy_box_out<kAdds, kReadLate>(&to.map, box, to.matrix, to.row, to.column + i * 32);
        copy_out_commit();
    }
}

// Where a warp stores: its first row of D, and which elements exist from there.
struct WarpRows {
    u8* out;                       // the first element of the warp's first row
    i64 pitch;                     // elements from row to row
    int rows, columns;
};

// Adds fewer rows than a box has to D, whose rows begin at multiples of 16 bytes: each lane starts the copies
// of one row. (To load what is there would take longer than the products.)
template <int kColumns>
__device__ __forceinline__ void add_rows_out(const WarpRows& to, const float (&sums)[kColumns / 2],
                                             u8* staged) {
    constexpr int kPart = kColumns / 2, kRowBytes = kPart * 4;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        copy_out_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPart / 8; i++) {
            u8* const at = staged + lane / 4 * kRowBytes + (8 * i + lane % 4 * 2) * 4;
            const float* const own = sums + part * kPart / 2 + 4 * i;
            *reinterpret_cast<float2*>(at) = make_float2(own[0], own[1]);
            *reinterpret_cast<float2*>(at + 8 * kRowBytes) = make_float2(own[2], own[3]);
        }
        publish_to_copies();
        __syncwarp();
        const int left = to.columns - part * kPart;
        if (lane < to.rows && left > 0)
            add_bytes_out(reinterpret_cast<float*>(to.out) + lane * to.pitch + part * kPart,
                          staged + lane * kRowBytes, (left < kPart ? left : kPart) * 4);
        copy_out_commit();
    }
    copy_out_wait_read<0>();       // copy_sums_out() does not wait for the last two commits.
}

// Two neighbours; pairs: as one. both: the second one exists.
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
