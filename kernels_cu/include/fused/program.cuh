// A fused quantiser computes values from its inputs and quantises them, from one read: SwiGLU, activations,
// their gradients. It has three parts:
//
//   source    what is read and computed (include/source); named by a .cu file
//   driver    goes through the tiles of the result (drivers.cuh), with rows in shared memory (stream.cuh), in
//             registers (rows.cuh), or from any memory (patch.cuh)
//   scaling   finds scales, and stores codes and scales: one_scale.cuh, f32_blocks.cuh, mx_blocks.cuh
//
// A source declares these (shortest example: source/unary.cuh):
//
//   SourceCall  a call's arguments. Drivers read its x, grad, probs, noop, sums, rows and columns, half(),
//               interleaved() and has(kWide); of gated sources also done and dprobs. Null constants stand for
//               what a source does not have.
//   Source      the formulas (source/gate.cuh)
//   kParts, kArrays                 results and operands per element
//   SourceRow                       rows on path any (patch.cuh)
//   OptionStream<SourceCall>        rows with options, if the source has programs for these (stream.cuh)
//
// Defines of every program: IN, the format of x; OUT, that of the quantised data; SCALING, the scaling;
// BACKWARD 1, the result is the gradient of x, in the layout of x, from grad, the gradient of y; PATH, one of
// the values of Path.
#pragma once
#include "memory/chunks.cuh"
#include "tile/tile.cuh"

// The calls that a program serves. Fewer choices at run time mean fewer instructions: with all of them, an
// H200 stalled on instruction fetch. cupy_fp8/ops/quantize/fused.py chooses a call's path.
enum class Path {
    any,        // every call: any alignment, every option, tiles with both parts of a gradient, division by
                // scale_inv
    rows,       // halves of x side by side, without options; rows that allow wide accesses; for gradients of
                // two parts an H that is a multiple of a tile's columns; row-wise data alone
    tiles,      // the same calls, with column-wise data
    plain,      // the same calls, in every direction
    options,    // rows that allow wide accesses; every option but per-expert biases, in every direction
    experts,    // the same, with per-expert biases
    wide,       // options and experts in one program, for types other than bf16 to e4m3
    quotients,  // wide, with elements divided by scale_inv (profile vllm)
};
constexpr Path kPath = Path::PATH;
enum class Scaling { one_scale, f32_blocks, mx_blocks, none };
constexpr Scaling kScaling = Scaling::SCALING;
constexpr bool kOneScale = kScaling == Scaling::one_scale;
constexpr bool kBackward = BACKWARD;
constexpr bool kOptions = kPath >= Path::options, kExperts = kPath >= Path::experts;
// the program also serves calls without experts
constexpr bool kMaybeExperts = kPath >= Path::wide;
// Sources whose programs spill where those of others just fit; they get fewer thread blocks
// (stream_shape.cuh).
template <class Any> constexpr bool kTakesRegisters = false;
// a thread block computes a whole tile at a time
constexpr bool kTiled = kPath >= Path::tiles;

using Tile = ByteTile<128, 128>;
constexpr int kThreads = Tile::kThreads;
// kLoad elements per load; kLoads loads make eight elements
constexpr int kLoad = 16 / sizeof(IN::storage), kLoads = 8 / kLoad;
using Eight = Chunk<IN, kLoad>[kLoads];

__device__ __forceinline__ void widen_eight(const Eight& from, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) from[i / kLoad].widen2(i % kLoad / 2, v[i], v[i + 1]);
}
// Loads `left` of eight adjacent elements, and zeros for the others.
template <bool kWide>
__device__ __forceinline__ void load_eight(Eight& to, const IN::storage* from, int left) {
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
        if (!kWide) to[l] = Chunk<IN, kLoad>::load_partial(from + l * kLoad, left - l * kLoad);
        else if (left) to[l] = Chunk<IN, kLoad>::load(from + l * kLoad);
        else to[l] = {};
    }
}
