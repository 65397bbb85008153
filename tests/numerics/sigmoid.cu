// Functions of kernels_cu/include/numerics/sigmoid.cuh over every float that a test likes (tests/numerics/test_sigmoid.py): FUNCTION 0 exp(-a), 1 sigma(a),
// 2 sigma(a) as eight neighbours get it, 3 the reciprocal, 4 that of any number from 1 on; and 5 of
// kernels_cu/include/scale/block_scale.cuh the quotient of two neighbours.
#include "scale/block_scale.cuh"
#include "numerics/sigmoid.cuh"

struct SigmoidParams {
    const float* in;
    float* out;
    long long n;                 // a multiple of 8
};

extern "C" __global__ void sigmoid_of(const __grid_constant__ SigmoidParams p) {
    for (long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < p.n; i += (long long)gridDim.x * blockDim.x * 8) {
        float a[8];
        for (int k = 0; k < 8; k++) a[k] = p.in[i + k];
        if (FUNCTION == 2) sigmoids(a);
        else if (FUNCTION == 5)
            for (int k = 0; k < 8; k += 2) a[k] = positive_quotient(a[k], a[k + 1]);
        else
            for (int k = 0; k < 8; k++) a[k] = FUNCTION == 0 ? exp_of_minus(a[k]) : FUNCTION == 1 ? sigmoid(a[k])
                                                     : FUNCTION == 3 ? reciprocal(a[k]) : reciprocal_from_one(a[k]);
        for (int k = 0; k < 8; k++) p.out[i + k] = a[k];
    }
}
