// The sources y = (c * i) * w + b, and their gradients (docs/numerics.md, section 16). In f32, each operation
// rounded; row by row:
//
//   z = x [+ residual]                  c = z, or z - mean (layer)
//   i = 1 / sqrt(sum(c * c) / K + eps)  y = (c * i) * w [+ b]
//   n = c * i, gw = grad * w            dx = i * ((gw - n * c2) - c1) [+ residual]
//
// c2 is the mean of gw * n, c1 that of gw, or 0 (rms). Sums follow the fixed tree.
// NORMS: the calls that a program serves: rms and layer, that store no more than rstd beside their result;
// residual, rms with a residual (and its sum); or every.
#pragma once
#include "fused/program.cuh"
#include "numerics/tree_sum.cuh"

enum class Norms { rms, residual, layer, every };
constexpr Norms kNorms = Norms::NORMS;
// True if means are 0.
constexpr bool kRms = kNorms <= Norms::residual;

struct SourceCall {
    static constexpr u32 kLayer = 1, kWeightF32 = 2, kRoundBf16 = 4, kWide = 8, kRoundF16 = 16;
    // Rows have one part, and no weights of their own.
    static constexpr const float* probs = nullptr;
    static constexpr float* sums = nullptr;
    static __device__ constexpr bool interleaved() { return false; }

    const IN::storage* x;        // [rows, columns]
    const IN::storage* grad;     // BACKWARD: [rows, columns]
    const IN::storage* residual; // [rows, columns], added to x, BACKWARD to the gradient; or null
    const void* weight;          // [columns] of IN, or f32 (kWeightF32)
    const void* bias;            // the same; or null
    const float* rstd;           // BACKWARD: [rows], or null: found from x
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    IN::storage* summed;         // x + residual [rows, columns]; or null
    IN::storage* normed;         // y [rows, columns]; or null
    float* rstd_out;             // [rows], or null
    float* statistics;           // paths any and plain: mean, i, c1 and c2 of each row [4, rows]
    // BACKWARD: sums of grad * n and of grad over some rows [blocks of rows, columns]; or null
    float *weight_sums, *bias_sums;
    u32* progress;               // path plain: struct Progress
    i64 rows, columns;
    i64 all_rows;                // path rows: with those that have only padding of scales
    float columns_f32, columns_inverse;          // columns, and 1 / that, rounded
    float eps;
    float weight_offset;         // -0 changes no bit
    // kWide: every row of x, grad, residual, summed and normed, weight and bias allow 16-byte accesses, and
    // every row of as-is data 8-byte stores
    u32 flags;
    u32 rows_per_block;          // path rows
    u32 row_step;                // path rows of y: blocks with that many rows, and how far apart these are
    u32 lead;                    // path plain: how many bands ahead statistics are found
    // path plain: segments of 256 columns of a row and parts of a band, and 2^16 or 2^24 over these, plus 1
    u32 segments, parts, segments_inverse, parts_inverse;
    u32 patience;                // path plain: how often a block looks for statistics before it finds them

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ i64 half() const { return columns; }  // of the only part
    __device__ __forceinline__ bool is_layer() const {
        return kNorms == Norms::layer || (kNorms == Norms::every && has(kLayer));
    }
    __device__ __forceinline__ bool has_residual() const {
        return kNorms == Norms::residual || (kNorms == Norms::every && residual);
    }
    __device__ __forceinline__ bool rounds() const {
        return kNorms == Norms::every && has(kRoundBf16 | kRoundF16);
    }
};

constexpr int kParts = 1, kArrays = kBackward ? 3 : 2;

// What a row's elements have in common.
struct RowStatistics { float mean, rstd, mean_grad, mean_product; };

struct Source {
    static constexpr bool kGated = false;
    static constexpr int kHalves = 1;

    // Divides a sum over the columns of a row. Sums that are not extreme need no division
    // (numerics/arith.cuh).
    static __device__ __forceinline__ float mean(const SourceCall& call, float sum) {
        return is_moderate_sum(sum) ? quick_quotient(sum, call.columns_f32, call.columns_inverse)
                                    : div_rn(sum, call.columns_f32);
    }
    // 1 / sqrt(squares / columns + eps)
    static __device__ __forceinline__ float rstd(const SourceCall& call, float squares) {
        if (is_moderate_sum(squares) && as_bits(call.eps) < as_bits(1e18f))
            return reciprocal(sqrt_rn(add_rn(quick_quotient(squares, call.columns_f32, call.columns_inverse),
                                             call.eps)));
        return div_rn(1.0f, sqrt_rn(add_rn(div_rn(squares, call.columns_f32), call.eps)));
    }
    // True between 2^-60 and 2^60.
    static __device__ __forceinline__ bool is_moderate_sum(float sum) {
        return (as_bits(sum) & 0x7fffffffu) - (67u << 23) < 120u << 23;
    }
    static __device__ __forceinline__ float centred(float z, const RowStatistics& of) {
        return kRms ? z : sub_rn(z, of.mean);
    }
    static __device__ __forceinline__ float normed(float z, const RowStatistics& of) {
        return mul_rn(centred(z, of), of.rstd);
    }
    // bias: -0 where there is none.
    static __device__ __forceinline__ float value(float z, const RowStatistics& of, float weight,
                                                  float bias) {
        return value_of_centred(centred(z, of), of, weight, bias);
    }
    static __device__ __forceinline__ float value_of_centred(float c, const RowStatistics& of, float weight,
                                                             float bias) {
        const float y = mul_rn(mul_rn(c, of.rstd), weight);
        return kRms ? y : add_rn(y, bias);
    }
    static __device__ __forceinline__ float gradient(float z, float grad, const RowStatistics& of,
                                                     float weight) {
        const float rest = sub_rn(mul_rn(grad, weight), mul_rn(normed(z, of), of.mean_product));
        return mul_rn(of.rstd, kRms ? rest : sub_rn(rest, of.mean_grad));
    }
};

// ---- eight elements of a row ----
// Rounds to a 16-bit format and widens again. Which NaN it is makes no difference.
template <class F>
__device__ __forceinline__ void round_eight(float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) F::widen2(F::narrow2_any_nan(v[i], v[i + 1]), v[i], v[i + 1]);
}
template <>
__device__ __forceinline__ void round_eight<f32>(float (&)[8]) {}
// Rounds y where the call asks for it.
__device__ __forceinline__ void round_through(const SourceCall& call, float (&y)[8]) {
    if (!call.rounds()) return;
    if (call.has(SourceCall::kRoundBf16)) round_eight<bf16>(y);
    else round_eight<f16>(y);
}

// Narrows eight elements to a 16-bit format. NaN is rare, so one branch tests all of them.
template <class F>
__device__ __forceinline__ void narrow_eight(const float (&v)[8], u32 (&words)[4]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        words[i] = F::narrow2_any_nan(v[2 * i], v[2 * i + 1]);
        largest = F::template max_magnitudes<true>(largest, words[i] & F::kMagnitudes);
    }
#ifndef CUPY_FP8_HOST
    // The instruction makes 0x7fff of a NaN.
    if (!(largest + 0x00010001u & 0x80008000u)) return;
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        const u32 first = words[0] & 0xffffu;
        const u32 narrow = (first & 0x7fffu) == 0x7fffu ? F::narrow(as_float(kNanF32)) : first;
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = words[w] >> 16 | (w < 3 ? words[w + 1] : narrow) << 16;
    }
#endif
}
// Stores `count` of eight elements. kAll: all of them, or none.
template <bool kAll, class F>
__device__ __forceinline__ void store_eight(typename F::storage* to, const float (&v)[8], int count) {
    constexpr int kStore = 16 / sizeof(typename F::storage);
    Chunk<F, kStore> chunks[8 / kStore];
    if constexpr (kStore == 8) {
        narrow_eight<F>(v, chunks[0].word);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) chunks[i / kStore].word[i % kStore] = F::narrow(v[i]);
    }
#pragma unroll
    for (int s = 0; s < 8 / kStore; s++) {
        if (!kAll) chunks[s].store_partial(to + s * kStore, count - s * kStore);
        else if (count) chunks[s].store_whole(to + s * kStore);
    }
}

// z of eight elements of x; `residual` is 0 without one. The sum goes to call.summed.
template <bool kAll>
__device__ __forceinline__ void add_residual(const SourceCall& call, const float (&residual)[8], i64 at,
                                             int count, float (&z)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) z[i] = add_rn(z[i], residual[i]);
    if (call.summed) store_eight<kAll, IN>(call.summed + at, z, count);
    if (call.rounds()) round_eight<IN>(z);
}

// Loads eight neighbours of the weight or the bias from column `at` on, as f32. left: how many there are.
template <bool kAll>
__device__ __forceinline__ void load_weights(const SourceCall& call, const void* from, i64 at, int left,
                                             float (&v)[8]) {
    if (call.has(SourceCall::kWeightF32)) {
        const float* const f = static_cast<const float*>(from) + at;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = 0.0f;
        if (kAll && left) {
            const auto low = Chunk<f32, 4>::load(reinterpret_cast<const u32*>(f));
            const auto high = Chunk<f32, 4>::load(reinterpret_cast<const u32*>(f + 4));
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = as_float(low.word[i]), v[4 + i] = as_float(high.word[i]);
        }
        if (!kAll)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < left) v[i] = f[i];
        return;
    }
    Eight raw;
    load_eight<kAll>(raw, static_cast<const IN::storage*>(from) + at, left);
    widen_eight(raw, v);
}
// The weight with its offset, and the bias, or -0.
template <bool kAll>
__device__ __forceinline__ void load_weight(const SourceCall& call, i64 at, int left, float (&v)[8]) {
    load_weights<kAll>(call, call.weight, at, left, v);
#pragma unroll
    for (float& w : v) w = add_rn(w, call.weight_offset);
}
template <bool kAll>
__device__ __forceinline__ void load_bias(const SourceCall& call, i64 at, int left, float (&v)[8]) {
    if (call.bias) return load_weights<kAll>(call, call.bias, at, left, v);
#pragma unroll
    for (float& b : v) b = -0.0f;
}

// Returns the sum of f(i) over the first `count` of eight elements.
template <class F>
__device__ __forceinline__ float sum_of_eight(int count, F f) {
    TreeSum<8> sum;
#pragma unroll
    for (int i = 0; i < 8; i++) sum.add(i, i < count ? f(i) : as_float(kAbsentTerm));
    return sum.sum();
}

// ---- path any ----
#include "fused/patch_position.cuh"

// A thread loads these elements for a row of its patch.
struct SourceRow {
    Eight array[kArrays];        // x, BACKWARD grad, residual

    template <bool kWide>
    __device__ __forceinline__ void load(const SourceCall& call, const PatchPosition& patch, int r) {
        const i64 at = (patch.row + r) * call.columns + patch.column;
        const int count = patch.columns_of(r);
        load_eight<kWide>(array[0], call.x + at, count);
        if constexpr (kBackward) load_eight<kWide>(array[1], call.grad + at, count);
        if (call.residual) load_eight<kWide>(array[kArrays - 1], call.residual + at, count);
    }
    __device__ __forceinline__ void compute(const SourceCall& call, const PatchPosition& patch, int r,
                                            const float&, float (&values)[8]) const {
        const int count = patch.columns_of(r);
        const i64 row = count ? patch.row + r : 0, at = row * call.columns + patch.column;
        RowStatistics of{0.0f, 0.0f, 0.0f, 0.0f};
        if (count) of = {call.statistics[row], call.statistics[call.rows + row], 0.0f, 0.0f};
        float z[8], w[8], residual[8];
        widen_eight(array[0], z);
        load_weight<false>(call, patch.column, patch.columns_left, w);
        if (call.residual) widen_eight(array[kArrays - 1], residual);
        if constexpr (kBackward) {
            if (count) of.mean_grad = call.statistics[2 * call.rows + row];
            if (count) of.mean_product = call.statistics[3 * call.rows + row];
            float grad[8];
            widen_eight(array[1], grad);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                values[i] = Source::gradient(z[i], grad[i], of, w[i]);
                if (call.residual) values[i] = add_rn(values[i], residual[i]);
            }
        } else {
            float b[8];
            load_bias<false>(call, patch.column, patch.columns_left, b);
            if (call.residual) add_residual<false>(call, residual, at, count, z);
#pragma unroll
            for (int i = 0; i < 8; i++) values[i] = Source::value(z[i], of, w[i], b[i]);
            round_through(call, values);
            if (call.normed) store_eight<false, IN>(call.normed + at, values, count);
        }
        // Absent elements may not raise an amax: a mean, a bias or NaN makes them other than 0.
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i >= count) values[i] = 0.0f;
    }
};
