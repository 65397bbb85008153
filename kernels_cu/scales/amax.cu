// compute_amax (docs/numerics.md, rule 6): out = max |x| in f32, from 0, in one launch that initialises
// nothing; or, for current scaling, out = the scale that this amax calls for (section 1).
//
// NAN_WINS 0: NaN elements are ignored; 1: one NaN makes the result NaN. IN in {bf16, f16, f32}. A fixed grid
// strides over x; each block raises workspace.top, the last one to finish writes out and leaves the workspace
// as it found it (zeros), so that a captured graph replays. Bytes moved per element: sizeof(IN).
#include "memory/elementwise.cuh"
#include "numerics/amax.cuh"
#include "scale/scale.cuh"

struct AmaxWorkspace {           // zero before the first launch, and after each
    u32 top;
    u32 blocks_done;
};

struct AmaxParams {
    const IN::storage* x;        // [n]
    float* out;                  // one element
    AmaxWorkspace* workspace;
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    i64 n;
    float target, eps;           // of the scale, as in compute_scale
    u32 to_scale, pow2;          // to_scale 0: out is the amax itself
    u32 vector;                  // x is 16-byte aligned
};

constexpr int kThreads = 512;
constexpr int kUnroll = 4;

#ifdef ENTRY_compute_amax
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
    const u32 block_top = block_max<kThreads>(amax.f32_bits());
    if (threadIdx.x == 0) {
        atomicMax(&p.workspace->top, block_top);
        __threadfence();
        if (atomicAdd(&p.workspace->blocks_done, 1u) == gridDim.x - 1) {
            __threadfence();
            const u32 top = atomicExch(&p.workspace->top, 0u);
            atomicExch(&p.workspace->blocks_done, 0u);
            const float result = as_float(f32::narrow(as_float(top)));
            *p.out = p.to_scale ? scale_from_amax(result, p.target, p.eps, as_float(kMaxF32), p.pow2)
                                : result;
        }
    }
}
#endif
