// Current scaling in one launch and one read, for tensors that fit into the SMs (docs/numerics.md, section
// 1).
//
// cast_current  x [n] -> amax -> scale -> data [n], scale_inv, and amax raised: the bytes of compute_amax and
//               cast, one after the other. Every thread block keeps what it has read: kChunksInRegisters
//               rounds of chunks in registers, the rest in shared memory. Each publishes its amax and waits
//               for those of all others, so all must be resident (a cooperative launch).
//
// In round r block b reads chunks (r * blocks + b) * kThreads and on, neighbouring threads neighbouring
// chunks. One thread block per SM. Bytes moved per element: sizeof(IN) + 1. Measured speed and what was
// tried: docs/lab-notes.
//
// Defines:
//   IN       bf16, f16 or f32: the format of x
//   OUT      e4m3fn or e5m2: the format of data
#include "scale/cast.cuh"
#include "scale/scale.cuh"

struct CastCurrentParams {
    const IN::storage* x;        // 16-byte aligned
    OUT::storage* data;          // aligned to a chunk
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second destination, or null
    float* amax;                 // one element, raised to the amax; or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    u32* workspace;              // launches so far, then the published amax of each thread block; zero before
                                 // the first launch; always used with the same number of thread blocks
    i64 n;
    TensorScaleRule rule;
    u32 rounds;                  // at most kChunksInRegisters and what shared memory holds
};

// At least as many threads per block as a GPU has SMs, with 64 registers each; both numbers are in
// ops/quantize/tensor_current.py too.
#ifdef CUPY_FP8_HOST
constexpr int kThreads = 256;
#else
constexpr int kThreads = 1024;
#endif
constexpr int kChunksInRegisters = 8;                                // per thread
constexpr int kCount = 16 / sizeof(IN::storage);
constexpr u32 kMark = 0x80000000u;                                   // no amax has the sign bit

// Waits for the amax that a block publishes in this launch: the mark alternates from launch to launch.
__device__ __forceinline__ u32 wait_for_amax(const u32* published, u32 mark) {
    for (;;) {
        const u32 value = load_relaxed(published);
        if ((value & kMark) == mark) return value & ~kMark;
#ifdef CUPY_FP8_HOST
        host_yield();
#endif
    }
}

using Source = Chunk<IN, kCount>;

// A thread's elements of x: `held` in registers, the chunks of further rounds in shared memory, and in the
// first thread of the grid those after the last whole chunk.
struct ThreadElements {
    const CastCurrentParams& p;
    u8* const in_shared;
    const i64 first = ((i64)blockIdx.x * kThreads + threadIdx.x) * kCount;
    const i64 step = (i64)gridDim.x * kThreads * kCount;
    const i64 whole = p.n / kCount * kCount;
    const int left = blockIdx.x == 0 && threadIdx.x == 0 ? (int)(p.n - whole) : 0;
    Source held[kChunksInRegisters], tail;

    __device__ __forceinline__ ThreadElements(const CastCurrentParams& p, u8* shared)
        : p(p), in_shared(shared + threadIdx.x * 16) {}
    __device__ __forceinline__ bool has(int round) const { return first + round * step < whole; }
    __device__ __forceinline__ u8* shared_chunk(int round) const {
        return in_shared + (round - kChunksInRegisters) * (kThreads * 16);
    }
    // Loads all elements, and returns their amax as f32 bits.
    __device__ __forceinline__ u32 load() {
#pragma unroll 1
        for (int r = kChunksInRegisters; r < (int)p.rounds; r++)
            if (has(r)) copy_async(shared_chunk(r), p.x + first + r * step);
#pragma unroll
        for (int r = 0; r < kChunksInRegisters; r++)
            held[r] = has(r) ? Source::load(p.x + first + r * step) : Source{};
        tail = Source::load_partial(p.x + whole, left);
        Amax<IN> amax;
        amax.add(tail);
#pragma unroll
        for (int r = 0; r < kChunksInRegisters; r++) amax.add(held[r]);
        copy_async_wait();
#pragma unroll 1
        for (int r = kChunksInRegisters; r < (int)p.rounds; r++)
            if (has(r)) amax.add(Source::load_shared(shared_chunk(r)));
        return amax.f32_bits();
    }
    __device__ __forceinline__ void cast(float scale) const {
#pragma unroll
        for (int r = 0; r < kChunksInRegisters; r++)
            if (has(r)) scale_and_narrow(held[r], scale).store(p.data + first + r * step);
        scale_and_narrow(tail, scale).store_partial(p.data + whole, left);
#pragma unroll 1
        for (int r = kChunksInRegisters; r < (int)p.rounds; r++)
            if (has(r))
                scale_and_narrow(Source::load_shared(shared_chunk(r)), scale)
                    .store(p.data + first + r * step);
    }
};

// Publishes this block's amax to all blocks, and raises `tensor_amax` in shared memory to the maximum of all.
__device__ __forceinline__ void exchange_amaxes(const CastCurrentParams& p, u32 block_amax, u32 mark,
                                                u32& tensor_amax) {
    u32* const published = p.workspace + 1;
    if (threadIdx.x == 0) atomicExch(&published[blockIdx.x], block_amax | mark);
    // one thread per block to wait for, in whole warps
    if (threadIdx.x < (gridDim.x + 31) / 32 * 32) {
        const u32 warp_amax =
            __reduce_max_sync(~0u, threadIdx.x < gridDim.x ? wait_for_amax(&published[threadIdx.x], mark)
                                                           : 0u);
        if (threadIdx.x % 32 == 0) atomicMax(&tensor_amax, warp_amax);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads)
cast_current(const __grid_constant__ CastCurrentParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 shared_amax, launches;
    if (is_set(p.noop)) return;
    if (threadIdx.x == 0) shared_amax = 0, launches = load_relaxed(p.workspace);
    ThreadElements elements(p, shared);
    const u32 thread_amax = elements.load();
    // the barrier of block_max() makes `launches` visible
    const u32 block_amax = block_max<kThreads>(thread_amax), mark = launches & 1 ? 0u : kMark;
    exchange_amaxes(p, block_amax, mark, shared_amax);
    const u32 tensor_amax = shared_amax;
    const float scale = p.rule.scale_of(as_float(tensor_amax));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        // All blocks have published their amax, so all have read the number of launches.
        atomicExch(p.workspace, launches + 1);
        write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
        if (p.amax) raise_amax(p.amax, tensor_amax, load_relaxed(p.amax));
    }
    elements.cast(scale);
}
