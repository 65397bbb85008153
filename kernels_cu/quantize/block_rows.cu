// Quantisation in blocks of 128 along rows of memory with f32 scales (docs/numerics.md, section 3): whole
// blocks, data in the order of x.
//
//   factor, scale_inv = of max |x| over the block (scale/block_scale.cuh)    data = narrow(fl(x * factor))
//
// A warp has eight blocks, one below the other or, where the scales of a row are adjacent, one after the
// other, so that their scales are 32 contiguous bytes. 16-byte loads; registers only. Bytes moved per
// element: sizeof(IN) + 1 + 4 / 128.
// DIVIDE 1: elements are divided by scale_inv (profile vllm): three instructions per element.
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; other profiles and scale layouts are run-time values.
// Padding of scales is written 0.
#include "scale/block_params.cuh"
#include "scale/block_codes.cuh"
#include "numerics/amax.cuh"

// kLength elements per block, kChunk elements per load; the same numbers in ops/quantize/blocks.py.
constexpr int kLength = 128, kChunk = 16 / sizeof(IN::storage);
// kLanes lanes share a block, so one load of a warp covers kBlocksPerLoad blocks.
constexpr int kLanes = kLength / kChunk, kBlocksPerLoad = 32 / kLanes;
// the eight scales of a warp are 32 contiguous bytes
constexpr int kWarpBlocks = 8, kLoads = kWarpBlocks / kBlocksPerLoad;
constexpr int kOwners = kLanes / kLoads;                             // lanes that compute the same scale
// kThreads, kWarps and kWarpBlocks: the same in ops/quantize/blocks.py
constexpr int kThreads = 128, kWarps = kThreads / 32;
using Source = Chunk<IN, kChunk>;

// A warp's blocks.
struct WarpBlocks {
    u32 matrix;
    i64 first, column;           // the first block's row within its column of blocks, and that column
    i64 step;                    // elements between blocks
    int count, stored;           // existing blocks, and stored scales, padding included

    // Returns false if this warp has no blocks.
    __device__ __forceinline__ bool find(const BlockParams& p) {
        const u32 across = (u32)(p.columns / kLength);
        // Where the scales of a row are adjacent, all blocks of a matrix count as one row of blocks.
        const bool adjoin = p.along_rows.row != 1;
        const auto warps_of = [](i64 n) { return (u32)((n + kWarpBlocks - 1) / kWarpBlocks); };
        const u32 warps = adjoin ? warps_of(p.rows * across) : warps_of(p.along_rows.rows) * across;
        const u32 thread_blocks = (warps + kWarps - 1) / kWarps;
        matrix = blockIdx.x / thread_blocks;
        const u32 warp = (blockIdx.x - matrix * thread_blocks) * kWarps + threadIdx.x / 32;
        if (warp >= warps) return false;
        const u32 group = adjoin ? warp : warp / across;
        first = (i64)group * kWarpBlocks, column = adjoin ? 0 : warp - group * across;
        step = adjoin ? kLength : p.columns;
        count = left_of((adjoin ? p.rows * across : p.rows) - first, kWarpBlocks);
        stored = adjoin ? count : left_of(p.along_rows.rows - first, kWarpBlocks);
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
quantize_block_rows(const __grid_constant__ BlockParams p) {
    if (is_set(p.noop)) return;
    WarpBlocks blocks;
    if (!blocks.find(p)) return;
    const i64 m = blocks.matrix, first = blocks.first, column = blocks.column, step = blocks.step;
    const int count = blocks.count;
    const int lane = threadIdx.x % 32, in_block = lane % kLanes, of_load = lane / kLanes;
    const i64 at = m * p.rows * p.columns + first * step + column * kLength + of_load * step
        + in_block * kChunk;
    const auto exists = [&](int load) { return load * kBlocksPerLoad + of_load < count; };
    Source chunk[kLoads];
    u32 largest[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++)
        chunk[i] = exists(i) ? Source::load(p.x + (at + i * kBlocksPerLoad * step)) : Source{};
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        Amax<IN> amax;
        amax.add(chunk[i]);
        largest[i] = amax.largest;
    }
    const int own = in_block / kOwners * kBlocksPerLoad + of_load;   // block whose scale this lane computes
    // With DIVIDE, div_rn() below may be a call anyway; otherwise the kernel contains no call.
    halve_down<kLanes / 2, kLoads / 2>(largest, IN::max_magnitudes<false>);
    const BlockScale s = p.rule.of<DIVIDE != 0>(Amax<IN>{largest[0]}.f32_bits());
    if (in_block % kOwners == 0 && own < blocks.stored)
        as_global(p.along_rows.to)[m * p.along_rows.matrix + first + column * p.along_rows.column + own] =
            own < count ? s.scale_inv : 0.0f;
    const bool quick = !DIVIDE || __all_sync(~0u, own >= count || has_quick_quotients(s.scale_inv));
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        const int owner = of_load * kLanes + i * kOwners;
        const float factor = __shfl_sync(~0u, s.factor, owner);
        const float divisor = DIVIDE ? __shfl_sync(~0u, s.scale_inv, owner) : 0.0f;
        const auto out = quantized(chunk[i], factor, divisor, quick);
        if (exists(i)) out.store(p.rows_data + (at + i * kBlocksPerLoad * step));
    }
}
