// sum_rows computes bias gradients (docs/numerics.md, section 1): it adds up, by the same tree, the sums per
// tile from cast_transpose.
//
// sum_rows  src [batch, rows, columns] f32 -> dst [batch, ceil(rows / (8 ROWS)), columns], each the sum of up
//           to 8 ROWS rows by the fixed tree (tree_sum.cuh); no rows give one row of +0. A block takes 32
//           columns (whole 128-byte lines), each thread ROWS rows of one column, all in flight. Bytes moved
//           per element: 4; launch-bound for the few rows that there are.
//
// Defines:
//   ROWS    rows per thread: 8, or 32 for many rows
#include "numerics/tree_sum.cuh"
#include "memory/chunks.cuh"

struct SumRowsParams {
    const float* src;
    float* dst;
    const float* noop;           // one element: 1.0 = write nothing; or null
    i64 rows, columns;
};

// A thread block has 32 columns and kWarps * ROWS rows: a warp has ROWS rows of all columns.
constexpr int kColumns = 32, kWarps = 8;

extern "C" __global__ void __launch_bounds__(kColumns * kWarps)
sum_rows(const __grid_constant__ SumRowsParams p) {
    if (is_set(p.noop)) return;
    __shared__ float shared[kWarps][kColumns];
    const int lane = threadIdx.x % kColumns, warp = threadIdx.x / kColumns;
    const i64 across = (p.columns + kColumns - 1) / kColumns, to_row = blockIdx.x / across;
    const i64 column = (blockIdx.x - to_row * across) * kColumns + lane;
    const i64 groups = p.rows > kWarps * ROWS ? (p.rows + kWarps * ROWS - 1) / (kWarps * ROWS) : 1;
    const i64 matrix = to_row / groups;
    const i64 row = (to_row - matrix * groups) * (kWarps * ROWS) + warp * ROWS;
    const float* from = p.src + (matrix * p.rows + row) * p.columns + column;
    const int left = column < p.columns ? left_of(p.rows - row, ROWS) : 0;
    float term[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) term[r] = r < left ? from[r * p.columns] : as_float(kAbsentTerm);
    TreeSum<ROWS> sum;
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum.add(r, term[r]);
    shared[warp][lane] = sum.sum();
    __syncthreads();
    if (warp != 0 || column >= p.columns) return;
    TreeSum<kWarps> total;
#pragma unroll
    for (int r = 0; r < kWarps; r++) total.add(r, shared[r][lane]);
    p.dst[to_row * p.columns + column] = p.rows ? as_float(f32::narrow(total.sum())) : 0.0f;
}
