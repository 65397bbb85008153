// Products of FP8 fragments by mma.sync with f16 operands, for sm_80 and later. f16 holds every e4m3fn and
// e5m2 value, and products of two of them are exact in f32.
//
// A fragment is 16 rows by 32 of K; a lane has four words of it, each of four adjacent bytes along K. The
// tensor core adds all products of 16 of K, so the order of K within these does not matter, as long as A and
// B have the same one: the first two bytes of a word are taken for elements 2t and 2t + 1, the other two for
// elements 2t + 8 and 2t + 9 (t: lane % 4).
#pragma once
#include "numerics/fp8_pairs.cuh"

constexpr int kFragmentRows = 16, kFragmentK = 32;

#ifdef CUPY_FP8_HOST
// Gives the lane the values of others: `first` and each `step` further.
template <int kCount>
__device__ __forceinline__ void host_exchange(u64 value, int first, int step, u64 (&found)[kCount]) {
    const HostCollective* op = host_collective(~0u, HOST_SHUFFLE, value);
    for (int i = 0; i < kCount; i++) found[i] = op->value[first + i * step];
}
#endif

// ldmatrix: loads four matrices of 8 rows of 16 bytes from shared memory. Lane 8 * i + r passes the address
// of row r of matrix i; lane l gets word l % 4 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], const u8* row) {
#ifdef CUPY_FP8_HOST
    u64 rows[4];
    const int lane = threadIdx.x % 32;
    host_exchange((u64)row, lane / 4, 8, rows);
    for (int i = 0; i < 4; i++) words[i] = reinterpret_cast<const u32*>(rows[i])[lane % 4];
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row)) : "memory");
#endif
}

#ifdef CUPY_FP8_HOST
// Returns sum + a.lo * b.lo + a.hi * b.hi.
__device__ __forceinline__ float add_dot(float sum, u32 a, u32 b) {
    float a_lo, a_hi, b_lo, b_hi;
    f16::widen2(a, a_lo, a_hi);
    f16::widen2(b, b_lo, b_hi);
    return add_rn(add_rn(sum, mul_rn(a_lo, b_lo)), mul_rn(a_hi, b_hi));     // products are exact
}
#endif

// Adds the products of 16 rows of A and 8 rows of B over 16 of K. Lane l has rows l / 4 and l / 4 + 8 of A,
// row l / 4 of B, and the sums of its rows of A with rows l % 4 * 2 and l % 4 * 2 + 1 of B. Call from one
// whole warp.
__device__ __forceinline__ void add_products(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef CUPY_FP8_HOST
    u64 low[4], high[4], of_b[8];
    const int lane = threadIdx.x % 32;
    host_exchange((u64)a[1] << 32 | a[0], lane / 4 * 4, 1, low);
    host_exchange((u64)a[3] << 32 | a[2], lane / 4 * 4, 1, high);
    host_exchange((u64)b1 << 32 | b0, lane % 4 * 8, 1, of_b);
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < 4; t++) {
            const int shift = i / 2 * 32;
            const u64 b = of_b[i % 2 * 4 + t];
            sums[i] = add_dot(sums[i], (u32)(low[t] >> shift), (u32)b);
            sums[i] = add_dot(sums[i], (u32)(high[t] >> shift), (u32)(b >> 32));
        }
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// 16 rows of A and 32 of K, widened to f16: operands of two instructions.
struct FragmentOfA {
    u32 halves[2][4];

    // row: address of the lane's row (lane % 16) and chunk (K from lane / 16 * 16 on).
    template <class F>
    __device__ __forceinline__ void load(const u8* row) {
        u32 words[4];
        load_matrices(words, row);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            halves[i / 2][i % 2] = Pairs<F>::widen(words[i], 0);
            halves[i / 2][i % 2 + 2] = Pairs<F>::widen(words[i], 1);
        }
    }
};

// 16 rows of B and 32 of K, widened to f16: operands of two instructions per 8 rows.
struct FragmentOfB {
    u32 halves[2][2][2];           // by 8 rows, by 16 of K

    // row: address of the lane's row (lane / 16 * 8 + lane % 8) and chunk (K from lane / 8 % 2 * 16 on).
    template <class F>
    __device__ __forceinline__ void load(const u8* row) {
        u32 words[4];
        load_matrices(words, row);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            halves[i / 2][i % 2][0] = Pairs<F>::widen(words[i], 0);
            halves[i / 2][i % 2][1] = Pairs<F>::widen(words[i], 1);
        }
    }
};
