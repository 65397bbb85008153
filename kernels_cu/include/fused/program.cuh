// A fused quantiser computes values from what it reads and quantises them, from one read: SwiGLU,
// activations, their gradients. It has three pieces:
//
//   a source    says what is read and what is computed (include/source); a .cu file names it
//   a driver    goes through the tiles of the result (drivers.cuh), with rows in shared memory (stream.cuh),
//               in registers (rows.cuh), or from any memory (patch.cuh)
//   a scaling   finds scales, and stores codes and scales: one_scale.cuh, f32_blocks.cuh, mx_blocks.cuh
//
// A source declares these, of which source/unary.cuh is the shortest example:
//
//   SourceCall  what a call asks for. Drivers read its x, grad, probs, noop, sums, rows and columns, half(),
//               interleaved() and has(kWide), of gated sources done and dprobs too. Null constants stand for
//               what a source does not have.
//   Source      the formulas (source/gate.cuh)
//   kParts, kArrays                 how many results and operands an element has
//   SourceRow                       rows on path any (patch.cuh)
//   OptionStream<SourceCall>        rows with options, if the source has programs for these (stream.cuh)
//
// Defines, of every program: IN, the format of x; OUT, that of the quantised data; SCALING, the scaling;
// BACKWARD 1, the result is the gradient of x, laid out as x is, found from grad, the gradient of y; PATH,
// one of the values of Path.
#pragma once
#include "memory/chunks.cuh"
#include "tile/tile.cuh"

// The calls that a program can serve. The fewer choices it makes at run time, the fewer instructions it has:
// with all of them an H200 waited for instructions. cupy_fp8/ops/quantize/fused.py chooses the path of a
// call.
enum class Path {
    any,        // every call: any alignment, every option, blocks of both parts of a gradient, division by
                // scale_inv
    rows,       // halves of x side by side, without options; rows that allow wide accesses; for gradients of
                // two parts an H that is a multiple of a tile's columns; row-wise data alone
    tiles,      // the same calls, with column-wise data
    plain,      // the same calls, in every direction
    options,    // rows that allow wide accesses, and every option but biases of experts, in every direction
    experts,    // the same with biases of each expert's own
    wide,       // options and experts; types other than bf16 to e4m3 have this one program for both
    quotients,  // the same, with elements divided by scale_inv (profile vllm)
};
constexpr Path kPath = Path::PATH;
enum class Scaling { one_scale, f32_blocks, mx_blocks, none };
constexpr Scaling kScaling = Scaling::SCALING;
constexpr bool kOneScale = kScaling == Scaling::one_scale;
constexpr bool kBackward = BACKWARD;
constexpr bool kOptions = kPath >= Path::options, kExperts = kPath >= Path::experts;
// True if the program also serves calls without experts.
constexpr bool kMaybeExperts = kPath >= Path::wide;
// True of a source whose programs spill where those of others just fit: they get fewer blocks
// (stream_shape.cuh).
template <class Any> constexpr bool kTakesRegisters = false;
// True if a block of threads computes a whole tile at a time.
constexpr bool kTiled = kPath >= Path::tiles;

using Tile = ByteTile<128, 128>;
constexpr int kThreads = Tile::kThreads;
// A load has kLoad elements, and eight elements are kLoads loads.
constexpr int kLoad = 16 / sizeof(IN::storage), kLoads = 8 / kLoad;
using Eight = Chunk<IN, kLoad>[kLoads];

__device__ __forceinline__ void widen_eight(const Eight& from, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) from[i / kLoad].widen2(i % kLoad / 2, v[i], v[i + 1]);
}
// Loads `left` of eight neighbours, and zeros in place of the others.
template <bool kWide>
__device__ __forceinline__ void load_eight(Eight& to, const IN::storage* from, int left) {
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
        if (!kWide) to[l] = Chunk<IN, kLoad>::load_partial(from + l * kLoad, left - l * kLoad);
        else if (left) to[l] = Chunk<IN, kLoad>::load(from + l * kLoad);
        else to[l] = {};
    }
}
