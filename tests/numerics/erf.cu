// These kernels compute functions of kernels_cu/include/numerics/erf.cuh and tanh.cuh, and of the activations
// in kernels_cu/include/source, over every float that a test likes (tests/numerics/test_erf.py). FUNCTION
// counts them from 0: erf, tanh, Phi(-|a|), gelu, its derivative, gelu_tanh, its derivative.
#define IN f32
#define OUT e4m3fn
#define SCALING one_scale
#define BACKWARD 1
#define PATH any
#include "source/any_kind.cuh"
#include "numerics/tanh.cuh"

struct ErfParams {
    const float* in;
    float* out;
    long long n;                 // a multiple of 8
};

template <class Act>
__device__ __forceinline__ void activate(float (&a)[8], bool derivative) {
    float terms[8];
    for (int k = 0; k < 8; k++) terms[k] = a[k];
    Act::terms(terms);
    for (int k = 0; k < 8; k++)
        a[k] = derivative ? Act::derivative(a[k], terms[k]) : Act::activation(a[k], terms[k]);
}

extern "C" __global__ void erf_of_all(const __grid_constant__ ErfParams p) {
    const long long step = (long long)gridDim.x * blockDim.x * 8;
    for (long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < p.n; i += step) {
        float a[8];
        for (int k = 0; k < 8; k++) a[k] = p.in[i + k];
        if (FUNCTION == 3 || FUNCTION == 4) activate<Gelu>(a, FUNCTION == 4);
        else if (FUNCTION >= 5) activate<GeluTanh>(a, FUNCTION == 6);
        else
            for (int k = 0; k < 8; k++)
                a[k] = FUNCTION == 0 ? erf_of(a[k]) : FUNCTION == 1 ? tanh_of(a[k])
                    : mul_rn(minus_normal_tail(tail_argument(a[k])), -1.0f);
        for (int k = 0; k < 8; k++) p.out[i + k] = a[k];
    }
}
