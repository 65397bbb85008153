// This file says what a call of SwiGLU with quantisation (docs/numerics.md, section 9) asks for, and which
// program serves it.
//
//   y = ((a * sigma(a)) * b) * p        in f32, each operation rounded
//
// a and b are halves of a row of x, p is its weight.
//
// Defines, of every program: IN, the format of x; OUT, that of the quantised data; BACKWARD 1, the result is
// the gradient of x, laid out as x is, found from grad, the gradient of y; PATH, one of the values of Path.
#pragma once
#include "numerics/tree_sum.cuh"
#include "numerics/sigmoid.cuh"
#include "tile/tile.cuh"

// The calls that a program can serve. The fewer choices it makes at run time, the fewer instructions it has:
// with all of them an H200 waited for instructions. cupy_fp8/ops/quantize/swiglu_launches.py chooses the path
// of a call.
enum class Path {
    any,        // every call: any alignment, every option, blocks of both da and db, division by scale_inv
    rows,       // x = [a | b] without bias, clamp and gpt_oss; rows that allow wide accesses; for gradients
                // an H that is a multiple of a tile's columns; row-wise data alone
    tiles,      // the same calls, with column-wise data
    options,    // rows that allow wide accesses, and every option but biases of experts, in every direction
    experts,    // the same with biases of each expert's own
    wide,       // options and experts; types other than bf16 to e4m3 have this one program for both
    quotients,  // the same, with elements divided by scale_inv (profile vllm)
};
constexpr Path kPath = Path::PATH;
constexpr bool kBackward = BACKWARD;
constexpr bool kOptions = kPath >= Path::options, kExperts = kPath >= Path::experts;
// True if the program also serves calls without experts.
constexpr bool kMaybeExperts = kPath >= Path::wide;
// True if a block of threads computes a whole tile at a time.
constexpr bool kTiled = kPath >= Path::tiles;
constexpr int kParts = 1 + kBackward;                                // results: y, or da and db

// The members say what a call asks for.
struct SwigluCall {
    static constexpr u32 kClamped = 1, kGptOss = 2, kInterleaved = 4, kWide = 8;
    static constexpr u32 kNone = ~0u;

    const IN::storage* x;        // [rows, 2 H]: a then b in each row, or a0 b0 a1 b1 ... (kInterleaved)
    const IN::storage* grad;     // BACKWARD: [rows, H]
    const IN::storage* bias;     // [2 H], in the order of x; with `experts` [E, 2 H]; or null
    // [rows, rounded up to whole tiles]: whose bias each row has, or kNone; null: all have the same
    const u32* experts;
    const float* probs;          // [rows], or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    // BACKWARD: grad * dy / dp summed over the columns of a tile, [tiles across, rows]; or null
    float* sums;
    i64 rows, columns;           // of the result, which has H or 2 H columns
    float limit, minus_limit;    // a <= limit, -limit <= b <= limit; infinite without kClamped
    float alpha;                 // sigma's argument is alpha * a: 1, or 1.702 with kGptOss, where b is b + 1
    // kWide: every row of x, grad and bias allows 16-byte loads (interleaved grad: loads of 4 elements), and
    // every row of as-is data 8-byte stores
    u32 flags;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ bool interleaved() const { return has(kInterleaved); }
    __device__ __forceinline__ i64 half() const { return kBackward ? columns / 2 : columns; }        // H
    __device__ __forceinline__ i64 wrap() const { return interleaved() ? columns : half(); }
    // Returns the biases of a row; null where it has none.
    __device__ __forceinline__ const IN::storage* bias_of(i64 row) const {
        if (!experts) return bias;
        const u32 expert = load_read_only(experts + row);
        return expert == kNone ? nullptr : bias + expert * (2 * half());
    }
};

using Tile = ByteTile<128, 128>;
constexpr int kThreads = Tile::kThreads;
// A load has kLoad elements, and eight elements are kLoads loads.
constexpr int kLoad = 16 / sizeof(IN::storage), kLoads = 8 / kLoad;
using Eight = Chunk<IN, kLoad>[kLoads];

// Says where a thread's patch of 8 x 8 elements lies.
struct PatchPosition {
    i64 row, column;
    int rows_left, columns_left;

    __device__ __forceinline__ PatchPosition(const SwigluCall& call, const TilePosition& at)
        : row(at.row + Tile::patch_row()), column(at.column + Tile::patch_column()) {
        rows_left = left_of(call.rows - row, 8), columns_left = left_of(call.columns - column, 8);
    }
    // Sets the bit of each of the eight columns that is db or does not exist.
    __device__ __forceinline__ u32 not_da(const SwigluCall& call) const {
        if (call.interleaved()) return 0xaau | (0xffu << columns_left & 0xffu);
        return 0xffu << left_of(call.half() - column, 8) & 0xffu;
    }
    __device__ __forceinline__ int columns_of(int r) const { return r < rows_left ? columns_left : 0; }
};

__device__ __forceinline__ void widen_eight(const Eight& from, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) from[i / kLoad].widen2(i % kLoad / 2, v[i], v[i + 1]);
}

// Separates sixteen elements a0, b0, a1, b1, ... into eight of a and eight of b.
__device__ __forceinline__ void separate(Eight (&part)[2]) {
    // A half has kWords words, and a load kWordsPerLoad.
    constexpr int kWords = 8 / Chunk<IN, kLoad>::kPerWord, kWordsPerLoad = Chunk<IN, kLoad>::kWords;
    u32 word[2 * kWords];
#pragma unroll
    for (int w = 0; w < 2 * kWords; w++)
        word[w] = part[w / kWords][w % kWords / kWordsPerLoad].word[w % kWordsPerLoad];
#pragma unroll
    for (int w = 0; w < kWords; w++) {
        u32 a = word[2 * w], b = word[2 * w + 1];
        if (sizeof(IN::storage) == 2) {
            a = __byte_perm(word[2 * w], word[2 * w + 1], 0x5410);
            b = __byte_perm(word[2 * w], word[2 * w + 1], 0x7632);
        }
        part[0][w / kWordsPerLoad].word[w % kWordsPerLoad] = a;
        part[1][w / kWordsPerLoad].word[w % kWordsPerLoad] = b;
    }
}
