// This kernel does current scaling in one launch and one read, for tensors that fit into the multiprocessors
// (docs/numerics.md, section 1).
//
// cast_current  x [n] -> amax -> scale -> data [n], scale_inv, and amax raised: the bytes of compute_amax and
//               cast, one after the other. Every block keeps what it has read: kChunksInRegisters rounds of
//               chunks in registers, the rest in shared memory. Each block publishes its amax and waits for
//               those of all others, so all blocks must be resident (a cooperative launch).
//
// In round r block b reads chunks (r * blocks + b) * kThreads and on, neighbouring threads neighbouring
// chunks. There is one block per multiprocessor. It moves sizeof(IN) + 1 bytes per element. docs/lab-notes
// has the measured speed and what was tried.
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
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    u32* workspace;              // launches so far, then the amax that each block published; zero before the
                                 // first launch, always for as many blocks
    i64 n;
    TensorScaleRule rule;
    u32 rounds;                  // at most kChunksInRegisters and what shared memory holds
};

// A block has at least as many threads as a GPU has multiprocessors, with 64 registers each.
// ops/quantize/tensor_current.py has both numbers too.
#ifdef CUPY_FP8_HOST
constexpr int kThreads = 256;
#else
constexpr int kThreads = 1024;
#endif
constexpr int kChunksInRegisters = 8;                                // of a thread
constexpr int kCount = 16 / sizeof(IN::storage);
constexpr u32 kMark = 0x80000000u;                                   // no amax has the sign bit

// Waits for the amax that a block publishes in this launch: the mark changes its value from launch to launch.
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

// A thread keeps its elements of x here: `held` in registers, the chunks of further rounds in shared memory,
// and in the first thread of the grid those after the last whole chunk.
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

// Publishes the amax of this block to all blocks, and raises `tensor_amax` in shared memory to that of all.
__device__ __forceinline__ void exchange_amaxes(const CastCurrentParams& p, u32 block_amax, u32 mark,
                                                u32& tensor_amax) {
    u32* const published = p.workspace + 1;
    if (threadIdx.x == 0) atomicExch(&published[blockIdx.x], block_amax | mark);
    // A thread waits for each block, in whole warps.
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
    // The barrier of block_max() makes `launches` visible.
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
