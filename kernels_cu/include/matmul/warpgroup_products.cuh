// Warpgroup MMA (wgmma) for sm_90a: four consecutive warps multiply 64 rows of A by kColumns rows of B. Both
// operands lie in shared memory with rows of 128 bytes, as copy_box() writes them.
//
// Lane l of warp w has the sums of rows 16 * w + l / 4 (sum[4 * i], sum[4 * i + 1]) and 8 rows below
// (sum[4 * i + 2], sum[4 * i + 3]), columns 8 * i + l % 4 * 2 and the next one.
#pragma once
#include "matmul/tensor_copy.cuh"

// types of A and B in PTX
#define PTX_TYPE_e4m3fn "e4m3"
#define PTX_TYPE_e5m2 "e5m2"
#define PTX_TYPE_OF(tag) PTX_TYPE_##tag
#define PTX_TYPE(tag) PTX_TYPE_OF(tag)

// Returns the low half of an operand's descriptor: its address in units of 16 bytes (18 bits within the
// block's own memory). The high half says that rows of 128 bytes are swizzled, and that 8 of them are 1024
// bytes.
__device__ __forceinline__ u32 operand_at(const u8* shared) { return shared_address(shared) >> 4 | 1u << 16; }

#ifndef CUPY_FP8_HOST
#define OPERAND_HIGH "0x40000040"

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)

// Adds the products of 32 of K. accumulate false: the sums start at 0.
template <int kColumns>
__device__ __forceinline__ void multiply_32(float (&d)[kColumns / 2], u32 a, u32 b, int accumulate);

template <>
__device__ __forceinline__ void multiply_32<128>(float (&d)[64], u32 a, u32 b, int accumulate) {
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0; "
            "mov.b64 a, {%64, " OPERAND_HIGH "}; mov.b64 b, {%65, " OPERAND_HIGH "}; "
            "wgmma.mma_async.sync.aligned.m64n128k32.f32." PTX_TYPE(IN_A) "." PTX_TYPE(IN_B) " "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "a, b, p, 1, 1;}"
            : SUMS_16(d, 0), SUMS_16(d, 16), SUMS_16(d, 32), SUMS_16(d, 48)
            : "r"(a), "r"(b), "r"(accumulate));
}
#endif

// Keeps the compiler from moving accesses to the sums across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&sums)[kCount]) {
#ifndef CUPY_FP8_HOST
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(sums[i]) :: "memory");
#endif
}

// Starts the products of 128 of K, which replace the sums. Ended by finish_products().
template <int kColumns>
__device__ __forceinline__ void start_products(float (&sums)[kColumns / 2], u32 a_at, u32 b_at) {
#ifndef CUPY_FP8_HOST
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) multiply_32<kColumns>(sums, a_at + 2 * i, b_at + 2 * i, i != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for the products of start_products(). rows, columns: existing ones; on the CPU, products of the
// others are NaN.
template <int kColumns>
__device__ __forceinline__ void finish_products(float (&sums)[kColumns / 2], const u8* a, const u8* b,
                                                int rows, int columns) {
#ifdef CUPY_FP8_HOST
    // The CPU reads shared memory as late as the hardware may.
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float of_a[2][kBoxBytes];
    const auto at = [](int r, int byte) { return r * kBoxBytes + ((byte / 16) ^ (r % 8)) * 16 + byte % 16; };
    for (int half = 0; half < 2 && row + 8 * half < rows; half++)
        for (int i = 0; i < kBoxBytes; i++) of_a[half][i] = IN_A::widen(a[at(row + 8 * half, i)]);
    for (int c = 0; c < kColumns / 4; c++) {
        const int b_row = c / 2 * 8 + column + c % 2;
        float of_b[kBoxBytes];
        for (int i = 0; i < kBoxBytes && row < rows && b_row < columns; i++)
            of_b[i] = IN_B::widen(b[at(b_row, i)]);
        for (int half = 0; half < 2; half++) {
            double sum = row + 8 * half < rows && b_row < columns ? 0.0 : (double)as_float(0x7fc00000u);
            for (int i = 0; i < kBoxBytes && sum == sum; i++) sum += (double)of_a[half][i] * of_b[i];
            sums[c / 2 * 4 + half * 2 + c % 2] = (float)sum;
        }
    }
    __syncwarp();
#else
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
#endif
}

// Moves registers between warpgroups (setmaxnreg). Call from every warp of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifndef CUPY_FP8_HOST
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifndef CUPY_FP8_HOST
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}
