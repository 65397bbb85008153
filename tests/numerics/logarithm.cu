// These kernels compute functions of kernels_cu/include/numerics/logarithm.cuh over every float that a test
// likes (tests/numerics/test_logarithm.py). FUNCTION 0 is log(x) for x >= 1, 1 is log1p(x) for 0 <= x <= 1, 2
// is log(1 + x) near one, 3 is sqrt(x), and 4 is x - 1 by a subtraction.
#include "numerics/logarithm.cuh"

struct LogarithmParams {
    const float* in;
    float* out;
    long long n;
};

__device__ __forceinline__ float function_of(float x) {
    if (FUNCTION == 0) return log_from_one(x);
    if (FUNCTION == 1) return log1p_of_unit(x);
    if (FUNCTION == 2) return log_near_one(x);
    return FUNCTION == 3 ? sqrt_rn(x) : sub_rn(x, 1.0f);
}

extern "C" __global__ void logarithm_of(const __grid_constant__ LogarithmParams p) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += step)
        p.out[i] = function_of(p.in[i]);
}
