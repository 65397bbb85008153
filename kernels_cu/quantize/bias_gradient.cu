// Bias gradients (docs/numerics.md, section 1): adds up the sums that cast_transpose has found tile by tile,
// by the same tree.
//
// sum_rows  src [batch, rows, columns] f32 -> dst [batch, ceil(rows / (8 ROWS)), columns], each the sum of up
//           to 8 ROWS rows by the fixed tree (tree_sum.cuh); no rows give one row of +0. A block takes 32
//           columns (whole 128-byte lines), each thread ROWS rows of one column, all in flight. Bytes moved
//           per element: 4; launch-bound for the few rows that there are.
#include "numerics/tree_sum.cuh"
#include "memory/chunks.cuh"

struct SumRowsParams {
    const float* src;
    float* dst;
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    i64 rows, columns;
};

// A block takes 32 columns and eight segments of ROWS rows.
constexpr int kColumns = 32, kSegments = 8;

extern "C" __global__ void __launch_bounds__(kColumns * kSegments)
sum_rows(const __grid_constant__ SumRowsParams p) {
    if (is_set(p.noop)) return;
    __shared__ float shared[kSegments][kColumns];
    const int lane = threadIdx.x % kColumns, segment = threadIdx.x / kColumns;
    const i64 across = (p.columns + kColumns - 1) / kColumns, to_row = blockIdx.x / across;
    const i64 column = (blockIdx.x - to_row * across) * kColumns + lane;
    const i64 groups = p.rows > kSegments * ROWS ? (p.rows + kSegments * ROWS - 1) / (kSegments * ROWS) : 1;
    const i64 matrix = to_row / groups;
    const i64 row = (to_row - matrix * groups) * (kSegments * ROWS) + segment * ROWS;
    const float* from = p.src + (matrix * p.rows + row) * p.columns + column;
    const int left = column < p.columns ? left_of(p.rows - row, ROWS) : 0;
    float term[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) term[r] = r < left ? from[r * p.columns] : as_float(kAbsentTerm);
    TreeSum<ROWS> sum;
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum.add(r, term[r]);
    shared[segment][lane] = sum.sum();
    __syncthreads();
    if (segment != 0 || column >= p.columns) return;
    TreeSum<kSegments> total;
#pragma unroll
    for (int r = 0; r < kSegments; r++) total.add(r, shared[r][lane]);
    p.dst[to_row * p.columns + column] = p.rows ? as_float(f32::narrow(total.sum())) : 0.0f;
}
