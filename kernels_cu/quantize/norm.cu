// RMSNorm and LayerNorm of rows, and their gradients, quantised from one read (docs/numerics.md, section 16;
// source/norm.cuh):
//
//   y = (c * i) * w [+ b]        dx = i * ((grad * w - n * c2) - c1) [+ residual]
//
// Paths: rows    whole rows in registers, row-wise results (norm/rows.cuh). blockDim.x:
//                ops/quantize/norm_launches.py
//        plain   tiles in every direction (norm/tiles.cuh), by 512 threads
//        any     every call: after norm_statistics, a block of 256 threads for each tile of 128 x 128
//
// norm_cast, norm_block, norm_mx   quantise by the scalings of include/fused
// norm_array                       SCALING none: gradients as DX
// norm_statistics                  mean, i, c1 and c2 of each row, a block of 256 threads for a row at a time
// norm_column_sums                 after norm_statistics: sums of grad * n and of grad over 128 rows, by the
//                                  fixed tree; a block of 256 threads for 32 columns, 16 rows each
//
// Bytes moved per element: what is read, once (path any: twice, with sums over rows three times), and what is
// written. include/fused/program.cuh has the defines.
#include "source/norm.cuh"

#if defined(ENTRY_norm_statistics) || defined(ENTRY_norm_column_sums)
#include "norm/statistics.cuh"
struct NormStatisticsParams {
    SourceCall call;
};
#endif

#ifdef ENTRY_norm_statistics
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
norm_statistics(const __grid_constant__ NormStatisticsParams p) { find_statistics(p.call); }
#endif

#ifdef ENTRY_norm_column_sums
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
norm_column_sums(const __grid_constant__ NormStatisticsParams p) { sum_columns(p.call); }
#endif

#if !defined(ENTRY_norm_statistics) && !defined(ENTRY_norm_column_sums)
#if defined(ENTRY_norm_cast)
#include "norm/row_cast.cuh"
#elif defined(ENTRY_norm_block)
#include "norm/row_blocks.cuh"
#elif defined(ENTRY_norm_mx)
#include "norm/row_mx.cuh"
#else
#include "norm/arrays.cuh"
#endif
#include "norm/drivers.cuh"
#endif

#ifdef ENTRY_norm_cast
extern "C" __global__ void __launch_bounds__(kNormThreads, kNormBlocks)
norm_cast(const __grid_constant__ FusedCastParams p) {
    if (is_set(p.call.noop)) return;
    const float scale = begin_cast(p);
    finish_cast<kNormThreads>(p, norm<RowCast, StreamCast, PatchCast>(p, p.call, scale), (int)blockDim.x);
}
#endif

#ifdef ENTRY_norm_block
extern "C" __global__ void __launch_bounds__(kNormThreads, kNormBlocks)
norm_block(const __grid_constant__ FusedBlockParams p) {
    if (!is_set(p.call.noop)) norm<RowBlocks, StreamBlocks, PatchBlocks>(p, p.call);
}
#endif

#ifdef ENTRY_norm_mx
extern "C" __global__ void __launch_bounds__(kNormThreads, kNormBlocks)
norm_mx(const __grid_constant__ FusedMxParams p) {
    if (!is_set(p.call.noop)) norm<RowMx, StreamMx, PatchMx>(p, p.call);
}
#endif

#ifdef ENTRY_norm_array
extern "C" __global__ void __launch_bounds__(kNormThreads, kNormBlocks)
norm_array(const __grid_constant__ NormArrayParams p) {
    if (!is_set(p.call.noop)) norm<RowArray, RowArray, PatchArray>(p, p.call);
}
#endif
