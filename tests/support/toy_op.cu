// scale_rows: out[m, k] = narrow(fl(widen(x[m, k]) * scale[m])), the example of CONTRIBUTING.md.
//
// x [rows, columns] of IN and scale [rows] of f32 give out [rows, columns] of OUT. One thread computes one
// element, which is short rather than fast. Values beyond OUT's maximum become the maximum, NaN becomes 0x7F.
// Bytes moved per element: sizeof(IN) + sizeof(OUT).
#include "numerics/formats.cuh"

struct ScaleRowsParams {
    const IN::storage* x;
    const float* scale;
    OUT::storage* out;
    i64 n, columns;              // elements in all, and in a row
};

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ ScaleRowsParams p) {
    const i64 i = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (i < p.n) p.out[i] = OUT::narrow(mul_rn(IN::widen(p.x[i]), p.scale[i / p.columns]));
}
