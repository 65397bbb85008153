// error_sums computes the sums behind diagnostics.error, like error_sums in cupy_fp8/diagnostics/losses.py,
// where they are defined.
//
//   x [n] IN, values [n] VALUE, codes [n] FP8 -> sums f64 [blocks, kSums]
//
// Each block writes a row of partial sums, in the order of ErrorSums; Python adds the rows up. The grid is
// fixed, so equal inputs give equal sums. Everything is f64, and no byte of a result depends on it, so the
// compiler may contract.
//
// Defines:
//   IN, VALUE    bf16, f16, f32 or f64
//   LOCAL        1: also the noise of runs (32 elements, one per lane of a warp), without each run's largest
//                element and its outliers
#include "numerics/formats.cuh"

struct f64 {
    using storage = u64;
};

struct ErrorParams {
    const IN::storage* x;            // [n]
    const VALUE::storage* values;    // [n], dequantised
    const u8* codes;                 // [n], or null: only values are known
    double* sums;                    // [blocks, kSums]
    i64 n;
    float maximum, bound;            // largest value of the codes, and the bound beyond which values overflow
    u32 top, smallest_normal;        // codes of the maximum and of the smallest normal number
    u32 tie_overflows;               // 1: the bound itself overflows
};

constexpr int kThreads = 256;
constexpr int kAdded = LOCAL ? 11 : 9, kSums = kAdded + 2;           // the last two are maxima

// Returns the exact value; a plain conversion of f32 would be compiled with .ftz and lose subnormals.
__device__ __forceinline__ double wide(float value) {
#ifdef CUPY_FP8_HOST
    return value;
#else
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
#endif
}
template <class F>
__device__ __forceinline__ double value_of(typename F::storage bits) {
    if constexpr (sizeof(bits) == 8) return __longlong_as_double((i64)bits);
    else return wide(F::widen(bits));
}
__device__ __forceinline__ bool is_finite(double value) {
    return (__double_as_longlong(value) >> 52 & 0x7ff) != 0x7ff;
}

#if LOCAL
__device__ __forceinline__ double warp_sum(double term) {
    for (int step = 1; step < 32; step *= 2) term += __shfl_xor_sync(~0u, term, step);
    return term;
}
#endif

#if LOCAL
constexpr int kOutlier = 4;                      // OUTLIER in losses.py
// Lower median of the 11-bit exponents of the lanes that have one, bit by bit.
__device__ __forceinline__ int median_exponent(int exponent, bool has_one) {
    u32 left = __ballot_sync(~0u, has_one);
    int below = (__popc(left) - 1) / 2, median = 0;
    for (int bit = 10; bit >= 0; bit--) {
        const u32 ones = __ballot_sync(~0u, exponent >> bit & 1) & left, zeros = left & ~ones;
        const bool is_one = below >= __popc(zeros);
        if (is_one) below -= __popc(zeros);
        left = is_one ? ones : zeros;
        median |= (int)is_one << bit;
    }
    return median;
}
#endif

struct ErrorSums {
    double signal = 0, noise = 0;
    u32 saturated = 0, underflowed = 0, nan = 0, nonfinite = 0, normal = 0, subnormal = 0;
    double squares = 0, largest_of_normal = 0, largest = 0;
#if LOCAL
    double of_runs = 0;
    u32 runs = 0;

    // Adds a run, one element per lane (zeros past the end): its noise over its signal, without the first
    // element of the largest magnitude and without outliers. Call from every lane.
    __device__ __forceinline__ void add_run(double magnitude, double gap) {
        double most = magnitude;
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_xor_sync(~0u, most, step);
            most = other > most ? other : most;
        }
        const int lane = threadIdx.x % 32;
        const bool first = __ffs(__ballot_sync(~0u, magnitude == most)) == lane + 1;
        const int exponent = (int)(__double_as_longlong(magnitude) >> 52);
        const int median = median_exponent(exponent, magnitude > 0);
        const bool left_out = first || exponent >= median + kOutlier;
        const double run_signal = warp_sum(left_out ? 0 : magnitude * magnitude);
        const double run_noise = warp_sum(left_out ? 0 : gap * gap);
        if (lane || !(run_signal > 0)) return;
        runs++;
        of_runs += run_noise < run_signal ? run_noise / run_signal : 1;
    }
#endif

    struct Element {
        double magnitude, gap;
    };
    __device__ __forceinline__ Element add(const ErrorParams& p, i64 i) {
        const double x = value_of<IN>(p.x[i]), v = value_of<VALUE>(p.values[i]);
        const bool finite = is_finite(x), came_back = is_finite(v);
        const double magnitude = finite ? fabs(x) : 0, kept = fabs(v);
        const double infinity = __longlong_as_double(0x7ffll << 52);
        const double gap = !finite ? 0 : came_back ? fabs(v - x) : infinity;
        const double relative = magnitude > 0 ? gap / magnitude : 0;
        signal += magnitude * magnitude;
        noise += gap * gap;
        underflowed += magnitude > 0 && v == 0;
        nan += v != v;
        nonfinite += !finite;
        largest = relative > largest ? relative : largest;
        if (p.codes) add_precision(p, p.codes[i] & 0x7fu, magnitude, kept, came_back, relative);
        return {magnitude, gap};
    }

    // Lists the sums, one per column. Counts are exact as doubles.
    __device__ __forceinline__ void list(double (&columns)[kSums]) const {
        const double all[kSums] = {signal, noise, (double)saturated, (double)underflowed, (double)nan,
                                   (double)nonfinite, (double)normal, (double)subnormal, squares,
#if LOCAL
                                   of_runs, (double)runs,
#endif
                                   largest_of_normal, largest};
#pragma unroll
        for (int k = 0; k < kSums; k++) columns[k] = all[k];
    }

private:
    __device__ __forceinline__ void add_precision(const ErrorParams& p, u32 code, double magnitude,
                                                  double kept, bool came_back, double relative) {
        // The bound on |v| is the maximum times the element's own scale_inv. For f32 x both products are
        // exact.
        const double left = magnitude * wide(p.maximum), right = kept * wide(p.bound);
        const bool overflowed = code == p.top && (p.tie_overflows ? left >= right : left > right);
        saturated += overflowed;
        if (!came_back || overflowed || !(magnitude > 0) || kept == 0) return;
        const bool is_normal = code > p.smallest_normal || (code == p.smallest_normal && magnitude >= kept);
        subnormal += !is_normal;
        if (!is_normal) return;
        normal++;
        squares += relative * relative;
        largest_of_normal = relative > largest_of_normal ? relative : largest_of_normal;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2) error_sums(const __grid_constant__ ErrorParams p) {
    __shared__ double shared[kThreads];
    ErrorSums sums;
#if LOCAL
    const i64 end = (p.n + 31) / 32 * 32;                            // the same for the lanes of a warp
#else
    const i64 end = p.n;
#endif
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < end; i += (i64)gridDim.x * kThreads) {
#if LOCAL
        ErrorSums::Element element = {0, 0};
        if (i < p.n) element = sums.add(p, i);
        sums.add_run(element.magnitude, element.gap);
#else
        sums.add(p, i);
#endif
    }
    double columns[kSums];
    sums.list(columns);
#pragma unroll
    for (int k = 0; k < kSums; k++) {
        shared[threadIdx.x] = columns[k];
        __syncthreads();
        for (int half = kThreads / 2; half; half /= 2) {
            if (threadIdx.x < half) {
                const double a = shared[threadIdx.x], b = shared[threadIdx.x + half];
                shared[threadIdx.x] = k < kAdded ? a + b : a > b ? a : b;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) p.sums[(i64)blockIdx.x * kSums + k] = shared[0];
        __syncthreads();
    }
}
