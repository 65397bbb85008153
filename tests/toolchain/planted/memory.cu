// AddressSanitizer and UndefinedBehaviorSanitizer must find errors of bounds, alignment and arithmetic here.
#include "planted.cuh"

#ifdef BUG
constexpr int kSlip = 1;
#else
constexpr int kSlip = 0;
#endif

extern "C" __global__ void __launch_bounds__(kThreads) global_read(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < p.n) p.out[i] = p.in[i + kSlip];  // planted
}

extern "C" __global__ void __launch_bounds__(kThreads) global_write(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < p.n + kSlip) p.out[i] = i;  // planted
}

// This is a template because the compiler treats its static variables differently. It returns a pointer so
// that the array's bound is not visible.
template <int N> __device__ int* shared_words() {
    __shared__ int words[N];
    return words;
}
extern "C" __global__ void __launch_bounds__(kThreads) static_shared(const __grid_constant__ Params p) {
    __shared__ int words[kThreads];
    int *first = words, *second = shared_words<kThreads>();
    const int t = threadIdx.x;
    first[t] = p.in[blockIdx.x * kThreads + t];
    second[t + kSlip] = 2 * first[t];  // planted
    p.out[blockIdx.x * kThreads + t] = second[t + kSlip];
}

extern "C" __global__ void __launch_bounds__(kThreads) dynamic_shared(const __grid_constant__ Params p) {
    extern __shared__ alignas(16) int words[];
    const int t = threadIdx.x;
    words[t + kSlip] = p.in[blockIdx.x * kThreads + t];  // planted
    p.out[blockIdx.x * kThreads + t] = words[t + kSlip];
}

extern "C" __global__ void __launch_bounds__(kThreads) local_array(const __grid_constant__ Params p) {
    int values[8];
    const int t = threadIdx.x;
    for (int k = 0; k < 8 + kSlip; k++) values[k] = t + k;  // planted
    p.out[blockIdx.x * kThreads + t] = values[t & 7];
}

extern "C" __global__ void __launch_bounds__(kThreads) misaligned(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (4 * i + 4 + kSlip <= p.n) {
        const int4 v = *reinterpret_cast<const int4*>(p.in + 4 * i + kSlip);  // planted
        p.out[i] = v.x + v.w;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) misaligned_load(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (4 * i + 4 + kSlip <= p.n) {
        const int4 v = __ldg(reinterpret_cast<const int4*>(p.in + 4 * i + kSlip));  // planted
        p.out[i] = v.x + v.w;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) misaligned_store(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (4 * i + 4 + kSlip <= p.n)
        *reinterpret_cast<int4*>(p.out + 4 * i + kSlip) = make_int4(i, i + 1, i + 2, i + 3);  // planted
}

extern "C" __global__ void __launch_bounds__(kThreads) int_overflow(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
#ifdef BUG
    const long long square = (i + 50000) * (i + 50000);  // planted
#else
    const long long square = (i + 50000ll) * (i + 50000);
#endif
    p.out[i] = (int)(square >> 8);
}

extern "C" __global__ void __launch_bounds__(kThreads) bad_shift(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    p.out[i] = (int)(1u << (i % 32 + kSlip));  // planted
}

__device__ __noinline__ int sum_of(int depth, volatile int* from) {  // planted
    volatile int room[256];
    room[depth % 256] = from[0];
    return depth == 0 ? room[0] : sum_of(depth - 1, room + depth % 256) + from[0];
}
extern "C" __global__ void __launch_bounds__(kThreads) stack_overflow(const __grid_constant__ Params p) {
    volatile int t = threadIdx.x;
#ifdef BUG
    p.out[blockIdx.x * kThreads + t] = sum_of(100000, &t);
#else
    p.out[blockIdx.x * kThreads + t] = sum_of(1, &t) + t;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads) float_to_int(const __grid_constant__ Params p) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    const float value = 3e9f + (float)i;
#ifdef BUG
    p.out[i] = (int)value;  // planted
#else
    p.out[i] = __float2int_rz(value);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads)
    uninitialised_shared(const __grid_constant__ Params p) {
    __shared__ int sum;
    const int t = threadIdx.x;
#ifndef BUG
    if (t == 0) sum = 0;
#endif
    __syncthreads();
    atomicAdd(&sum, p.in[blockIdx.x * kThreads + t]);
    __syncthreads();
    p.out[blockIdx.x * kThreads + t] = sum;
}

// This has no bug. It writes out what shared memory holds before anybody writes it, so that a forgotten
// initialisation shows. Shared memory is written afterwards, so that the next block or launch sees it if it
// is not filled anew.
extern "C" __global__ void __launch_bounds__(kThreads)
    shared_starts_filled(const __grid_constant__ Params p) {
    extern __shared__ int dynamic_words[];
    __shared__ int static_words[kThreads];
    const int t = threadIdx.x;
    p.out[blockIdx.x * kThreads + t] = static_words[t] & dynamic_words[t] & shared_words<kThreads>()[t];
    static_words[t] = dynamic_words[t] = shared_words<kThreads>()[t] = 0;
}
