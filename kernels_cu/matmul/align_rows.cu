// Copies rows of bytes, which follow one another from any address on, to rows that begin at multiples of 16
// bytes, as tensor copies read them (matmul/wgmma.cu). A warp copies a row. It moves 2 bytes per byte.
#include "matmul/any_bytes.cuh"

struct AlignRowsParams {
    const u8* from;
    u8* to;                        // Each row has 16 * chunks bytes; those past its end become 0.
    i64 rows, row_bytes, chunks;
};

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
align_rows(const __grid_constant__ AlignRowsParams p) {
    const i64 row = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const u8* const from = p.from + row * p.row_bytes;
    uint4* const to = reinterpret_cast<uint4*>(p.to) + row * p.chunks;
#pragma unroll 4
    for (i64 chunk = threadIdx.x % 32; chunk < p.chunks; chunk += 32) {
        const i64 at = chunk * kChunkBytes;
        const int bytes = left_of(p.row_bytes - at, kChunkBytes);
        to[chunk] = load_16(from + at, bytes, has_neighbours(at, p.row_bytes));
    }
}
