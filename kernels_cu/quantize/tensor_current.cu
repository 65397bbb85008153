// Current scaling in one launch and one read, for tensors that fit into the multiprocessors
// (docs/numerics.md, section 1).
//
// cast_current  x [n] -> amax -> scale -> data [n], scale_inv, and amax raised: the bytes of compute_amax and
//               cast, one after the other. Every block keeps what it has read: kHeld rounds of chunks in
//               registers, the rest in shared memory. Each block publishes its amax and waits for those of
//               all others, so all blocks must be resident (a cooperative launch).
//
// In round r block b reads chunks (r * blocks + b) * kThreads and on, neighbouring threads neighbouring
// chunks. There is one block per multiprocessor. Bytes moved per element: sizeof(IN) + 1. Speed and what was
// tried: docs/lab-notes.
#include "scale/cast.cuh"
#include "scale/scale.cuh"

struct CastCurrentParams {
    const IN::storage* x;        // 16-byte aligned
    OUT::storage* data;          // aligned to a chunk
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    u32* workspace;              // launches so far, then what each block told; zero before the first launch,
                                 // always for as many blocks
    i64 n;
    float target, eps;           // of the scale, as in compute_scale
    u32 pow2;
    u32 rounds;                  // at most kHeld and what shared memory holds
};

// At least as many threads as a GPU has multiprocessors, with 64 registers each. Both are also in
// ops/quantize/tensor_current.py.
#ifdef CUPY_FP8_HOST
constexpr int kThreads = 256;
#else
constexpr int kThreads = 1024;
#endif
constexpr int kHeld = 8;                                             // chunks of a thread in registers
constexpr int kCount = 16 / sizeof(IN::storage);
constexpr u32 kMark = 0x80000000u;                                   // no amax has the sign bit

// Waits for the amax that a block tells in this launch: the mark changes its value from launch to launch.
__device__ __forceinline__ u32 wait_for(const u32* told, u32 mark) {
    for (;;) {
        const u32 value = load_relaxed(told);
        if ((value & kMark) == mark) return value & ~kMark;
#ifdef CUPY_FP8_HOST
        host_yield();
#endif
    }
}

#ifdef ENTRY_cast_current
extern "C" __global__ void __launch_bounds__(kThreads)
cast_current(const __grid_constant__ CastCurrentParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 shared_amax, launches;
    if (is_set(p.noop)) return;
    if (threadIdx.x == 0) shared_amax = 0, launches = load_relaxed(p.workspace);
    using Source = Chunk<IN, kCount>;
    const i64 first = ((i64)blockIdx.x * kThreads + threadIdx.x) * kCount;
    const i64 step = (i64)gridDim.x * kThreads * kCount;
    // The first thread of the grid takes the elements after the last whole chunk.
    const i64 whole = p.n / kCount * kCount;
    const int left = blockIdx.x == 0 && threadIdx.x == 0 ? (int)(p.n - whole) : 0;
    u8* const mine = shared + threadIdx.x * 16;

#pragma unroll 1
    for (int r = kHeld; r < (int)p.rounds; r++)
        if (first + r * step < whole)
            copy_async(mine + (r - kHeld) * (kThreads * 16), p.x + first + r * step);
    Source held[kHeld];
#pragma unroll
    for (int r = 0; r < kHeld; r++)
        held[r] = first + r * step < whole ? Source::load(p.x + first + r * step) : Source{};
    const Source tail = Source::load_partial(p.x + whole, left);
    Amax<IN> amax;
    amax.add(tail);
#pragma unroll
    for (int r = 0; r < kHeld; r++) amax.add(held[r]);
    copy_async_wait();
#pragma unroll 1
    for (int r = kHeld; r < (int)p.rounds; r++)
        if (first + r * step < whole) amax.add(Source::load_shared(mine + (r - kHeld) * (kThreads * 16)));

    u32* const told = p.workspace + 1;
    // The barrier of block_max() makes `launches` visible.
    const u32 block_amax = block_max<kThreads>(amax.f32_bits()), mark = launches & 1 ? 0u : kMark;
    if (threadIdx.x == 0) atomicExch(&told[blockIdx.x], block_amax | mark);
    // A thread waits for each block, in whole warps.
    if (threadIdx.x < (gridDim.x + 31) / 32 * 32) {
        const u32 tensor_amax =
            __reduce_max_sync(~0u, threadIdx.x < gridDim.x ? wait_for(&told[threadIdx.x], mark)
                                          : 0u);
        if (threadIdx.x % 32 == 0) atomicMax(&shared_amax, tensor_amax);
    }
    __syncthreads();
    const u32 tensor_amax = shared_amax;
    const float scale = scale_from_amax(as_float(tensor_amax), p.target, p.eps, as_float(kMaxF32), p.pow2);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        // All blocks have told their amax, so all have read the number of launches.
        atomicExch(p.workspace, launches + 1);
        write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
        if (p.amax) raise_amax(p.amax, tensor_amax, load_relaxed(p.amax));
    }

#pragma unroll
    for (int r = 0; r < kHeld; r++)
        if (first + r * step < whole) scale_and_narrow(held[r], scale).store(p.data + first + r * step);
    scale_and_narrow(tail, scale).store_partial(p.data + whole, left);
#pragma unroll 1
    for (int r = kHeld; r < (int)p.rounds; r++)
        if (first + r * step < whole)
            scale_and_narrow(Source::load_shared(mine + (r - kHeld) * (kThreads * 16)), scale).store(p.data
                + first + r * step);
}
#endif
