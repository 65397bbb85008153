// These kernels compute functions of kernels_cu/include/numerics/sigmoid.cuh over every float that a test
// likes (tests/numerics/test_sigmoid.py). FUNCTION 0 is exp(-a), 1 is sigma(a), 2 is sigma(a) as eight
// neighbours get it, 3 is the reciprocal, 4 is that of any number from 1 on, and 5 is the quotient of two
// neighbours, of kernels_cu/include/scale/block_scale.cuh.
#include "scale/block_scale.cuh"
#include "numerics/sigmoid.cuh"

struct SigmoidParams {
    const float* in;
    float* out;
    long long n;                 // a multiple of 8
};

__device__ __forceinline__ float function_of(float a) {
    if (FUNCTION == 0) return exp_of_minus(a);
    if (FUNCTION == 1) return sigmoid(a);
    return FUNCTION == 3 ? reciprocal(a) : reciprocal_from_one(a);
}

extern "C" __global__ void sigmoid_of(const __grid_constant__ SigmoidParams p) {
    const long long step = (long long)gridDim.x * blockDim.x * 8;
    for (long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < p.n; i += step) {
        float a[8];
        for (int k = 0; k < 8; k++) a[k] = p.in[i + k];
        if (FUNCTION == 2) sigmoids(a);
        else if (FUNCTION == 5)
            for (int k = 0; k < 8; k += 2) a[k] = positive_quotient(a[k], a[k + 1]);
        else
            for (int k = 0; k < 8; k++) a[k] = function_of(a[k]);
        for (int k = 0; k < 8; k++) p.out[i + k] = a[k];
    }
}
