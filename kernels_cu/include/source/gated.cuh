// The source y = (act(a) * b) * p: a and b are halves of a row of x, p is its weight. Options: biases, clamp,
// gpt_oss and interleaved x. Activation: declared before this is included.
#pragma once
#include "source/any_kind.cuh"
#include "source/gate.cuh"

// arguments of a call
struct SourceCall {
    static constexpr u32 kClamped = 1, kGptOss = 2, kInterleaved = 4, kWide = 8, kKinds = 16;
    static constexpr u32 kNone = ~0u;

    const IN::storage* x;        // [rows, 2 H]: a then b in each row, or a0 b0 a1 b1 ... (kInterleaved)
    const IN::storage* grad;     // BACKWARD: [rows, H]
    const IN::storage* bias;     // [2 H], in the order of x; with `experts` [E, 2 H]; or null
    // [rows, rounded up to whole tiles]: the expert whose bias each row has, or kNone; null: one bias for all
    const u32* experts;
    const float* probs;          // [rows], or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    // BACKWARD: grad * dy / dp summed over the columns of a tile, [tiles across, rows]; or null
    float* sums;
    float* dprobs;               // with `done`: the gradient of probs [rows]
    // finished blocks per row of blocks; zero before and after a launch. null: another launch adds up the
    // sums
    u32* done;
    i64 rows, columns;           // of the result, which has H or 2 H columns
    float limit, minus_limit;    // a <= limit, -limit <= b <= limit; infinite without kClamped
    float alpha;                 // of terms(alpha * a): 1, or 1.702 with kGptOss, where b is b + 1
    // kWide: every row of x, grad and bias allows 16-byte loads (interleaved grad: loads of 4 elements), and
    // every row of as-is data 8-byte stores. Plus kKinds * the activation's number
    u32 flags;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ Kind kind() const { return (Kind)(flags / kKinds); }
    __device__ __forceinline__ bool interleaved() const { return has(kInterleaved); }
    __device__ __forceinline__ i64 half() const { return kBackward ? columns / 2 : columns; }        // H
    __device__ __forceinline__ i64 wrap() const { return interleaved() ? columns : half(); }
    // Returns the biases of a row, or null.
    __device__ __forceinline__ const IN::storage* bias_of(i64 row) const {
        if (!experts) return bias;
        const u32 expert = load_read_only(experts + row);
        return expert == kNone ? nullptr : bias + expert * (2 * half());
    }
};

using Source = Gate<Activation, true>;
constexpr int kParts = Source::kParts, kArrays = Source::kArrays;

// Separates sixteen elements a0, b0, a1, b1, ... into eight of a and eight of b.
__device__ __forceinline__ void separate(Eight (&part)[2]) {
    // kWords words per half, kWordsPerLoad per load
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
