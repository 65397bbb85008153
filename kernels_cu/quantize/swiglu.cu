// SwiGLU, other gated activations and their gradients, quantised from one read (docs/numerics.md, sections 9
// and 13):
//
//   y = (act(a) * b) * p                a and b: halves of a row of x, p: its weight
//
// Parts and defines: include/fused/program.cuh. ACT: the activation, as in activation.cu. Bytes moved per
// element of y: 2 sizeof(IN), and 1 per direction; for gradients, per element of grad: 3 sizeof(IN), and 2
// per direction.
#include "source/any_kind.cuh"
using Activation = ACT;
#include "source/gated.cuh"
#include "source/gated_patch.cuh"
#include "source/gated_stream.cuh"

#ifdef ENTRY_swiglu_cast
#include "fused/one_scale.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
swiglu_cast(const __grid_constant__ FusedCastParams p) { quantize(p); }
#endif

#ifdef ENTRY_swiglu_block
#include "fused/f32_blocks.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
swiglu_block(const __grid_constant__ FusedBlockParams p) { quantize(p); }
#endif

#ifdef ENTRY_swiglu_mx
#include "fused/mx_blocks.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
swiglu_mx(const __grid_constant__ FusedMxParams p) { quantize(p); }
#endif
