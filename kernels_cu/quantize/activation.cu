// Activations and their gradients, quantised from one read (docs/numerics.md, section 13):
//
//   y = act(x)        dx = grad * act'(x)
//
// Parts and defines: include/fused/program.cuh. ACT: the activation, a struct of include/source; AnyKind on
// path any. Bytes moved per element: sizeof(IN), twice that for gradients, and 1 per direction.
#include "source/any_kind.cuh"
using Activation = ACT;
#include "source/unary.cuh"

#ifdef ENTRY_activation_cast
#include "fused/one_scale.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
activation_cast(const __grid_constant__ FusedCastParams p) { quantize(p); }
#endif

#ifdef ENTRY_activation_block
#include "fused/f32_blocks.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
activation_block(const __grid_constant__ FusedBlockParams p) { quantize(p); }
#endif

#ifdef ENTRY_activation_mx
#include "fused/mx_blocks.cuh"
extern "C" __global__ void __launch_bounds__(kFusedThreads, kFusedBlocks)
activation_mx(const __grid_constant__ FusedMxParams p) { quantize(p); }
#endif
