// compute_amax (docs/numerics.md, rule 6): the amax of an array, or the scale that follows from it:
//
//   out = max(0, |x[0]|, ..., |x[n - 1]|)               to_scale 0
//   out = the scale of this amax, as compute_scale      to_scale 1 (current scaling, section 1)
//
// x [n] IN -> out f32 [1]. The amax is exact, since f32 holds every value of IN. NaN: see NAN_WINS. Bytes
// moved per element: sizeof(IN).
//
// A fixed grid of blocks of 512 threads strides over x. Each block raises workspace.amax. The last block to
// finish writes out and leaves zeros in the workspace, so one launch suffices, initialises nothing, and can
// be replayed in a captured graph.
//
// Defines:
//   IN           bf16, f16 or f32: the format is in every instruction of the loop
//   NAN_WINS     0: NaN elements are ignored; 1: one NaN makes the result NaN. Each has its own maximum
//                instruction.
#include "memory/elementwise.cuh"
#include "numerics/amax.cuh"
#include "scale/scale.cuh"

struct AmaxParams {
    const IN::storage* x;        // [n]
    float* out;                  // one element
    AmaxOfBlocks* workspace;
    const float* noop;           // one element: 1.0 = write nothing; or null
    i64 n;
    TensorScaleRule rule;
    u32 to_scale;                // 0: out is the amax itself
    u32 vector;                  // 1: x is 16-byte aligned
};

constexpr int kThreads = 512;
constexpr int kUnroll = 4;

extern "C" __global__ void __launch_bounds__(kThreads) compute_amax(const __grid_constant__ AmaxParams p) {
    if (is_set(p.noop)) return;
    constexpr int kChunk = 16 / sizeof(IN::storage);
    constexpr i64 kStep = (i64)kThreads * kChunk, kBlock = kUnroll * kStep;
    Amax<IN, NAN_WINS != 0> amax;
    for (i64 start = blockIdx.x * kBlock; start < p.n; start += gridDim.x * kBlock) {
        const i64 first = start + threadIdx.x * kChunk;
        if (p.vector && start + kBlock <= p.n) {
            Chunk<IN, kChunk> c[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; u++) c[u] = Chunk<IN, kChunk>::load(p.x + first + u * kStep);
#pragma unroll
            for (int u = 0; u < kUnroll; u++) amax.add(c[u]);
        } else {
#pragma unroll 1
            for (int u = 0; u < kUnroll; u++)
                amax.add(Chunk<IN, kChunk>::load_partial(p.x + first + u * kStep,
                                                         left_of(p.n - first - u * kStep, kChunk)));
        }
    }
    const u32 block_amax = block_max<kThreads>(amax.f32_bits());
    float of_all;
    if (threadIdx.x == 0 && p.workspace->add(block_amax, gridDim.x, of_all)) {
        const float result = as_float(f32::narrow(of_all));
        *p.out = p.to_scale ? p.rule.scale_of(result) : result;
    }
}
