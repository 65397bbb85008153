// Scales of current scaling for groups of consecutive rows, whose sizes are on the device (docs/numerics.md,
// sections 1 and 7).
//
//   m = max |x| of the group      scale = as compute_scale finds it from m      amax = max(amax, m)
//
// group_amax_scale  x [rows, columns] -> scale [groups], and amax raised (unless null), before
//                   group_cast_transpose. Every group is cut into segments of kSegmentRows rows, and a
//                   segment into shares of 64 KB, one per thread block. Its first warp finds the segment by a
//                   scan over the sizes, unless group_find_segments has found it. The last thread block to
//                   finish writes every scale, those of empty groups too, and leaves zeros in the workspace,
//                   so that a captured graph replays.
// IN in {bf16, f16, f32}. Bytes moved per element: sizeof(IN).
#include "groups/row_groups.cuh"
#include "numerics/amax.cuh"
#include "scale/scale.cuh"

struct GroupAmaxParams {
    const IN::storage* x;
    u32* workspace;              // blocks done, then the amax of each group; zero before and after a launch
    float* scale;                // [groups]
    float* amax;                 // [groups], raised, or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    RowGroups groups;            // across: thread blocks that share a segment
    TensorScaleRule rule;
};

constexpr int kThreads = 256;
constexpr int kSegmentRows = 64;        // the size of a share is in ops/quantize/grouped_tensor.py too
constexpr u32 kSegmentRowsLog2 = log2_of(kSegmentRows);
constexpr int kShareElements = (64 << 10) / sizeof(IN::storage);

extern "C" __global__ void __launch_bounds__(kThreads)
group_amax_scale(const __grid_constant__ GroupAmaxParams p) {
    __shared__ RowSegment found;
    __shared__ bool last;
    if (is_set(p.noop)) return;
    u32* const amaxes = p.workspace + 1;
    const u32 segment = blockIdx.x / p.groups.across, share = blockIdx.x - segment * p.groups.across;
    if (threadIdx.x < 32) {
        if (p.groups.segments) load_segment(p.groups, segment, found);
        else find_segment<false, false>(p.groups, segment, kSegmentRowsLog2, 0, 0, found);
    }
    __syncthreads();
    const i64 before = found.index * kSegmentRows;
    const i64 elements = left_of(found.rows - before, kSegmentRows) * p.groups.columns;
    const int own_elements =
        found.group < 0 ? 0 : left_of(elements - (i64)share * kShareElements, kShareElements);
    Amax<IN> amax;
    const i64 in_group = before * p.groups.columns + (i64)share * kShareElements;
    if (own_elements) add_elements<kThreads>(amax, p.x + found.start + in_group, own_elements);
    const u32 share_amax = block_max<kThreads>(amax.f32_bits());
    if (threadIdx.x == 0) {
        if (own_elements && load_relaxed(amaxes + found.group) < share_amax)
            atomicMax(amaxes + found.group, share_amax);
        last = is_last_block(p.workspace, gridDim.x);
    }
    __syncthreads();
    if (!last) return;
    for (i64 g = threadIdx.x; g < p.groups.splits.groups; g += kThreads) {
        const u32 of_group = atomicExch(amaxes + g, 0u);
        p.scale[g] = p.rule.scale_of(as_float(of_group));
        if (p.amax) raise_amax(p.amax + g, of_group, load_relaxed(p.amax + g));
    }
    if (threadIdx.x == 0) atomicExch(p.workspace, 0u);
}
