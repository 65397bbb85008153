// Path any of gated sources: the rows of a patch (fused/patch.cuh).
#pragma once
#include "source/gated.cuh"
#include "fused/patch_position.cuh"
#include "numerics/tree_sum.cuh"

// elements of a row per step; registers allow no more
constexpr int kSlice = kBackward ? 4 : 8;

// Widens a slice of eight elements.
__device__ __forceinline__ void widen_slice(const Eight& from, int slice, float (&v)[kSlice]) {
#pragma unroll
    for (int i = 0; i < kSlice; i += 2) {
        const int at = slice * kSlice + i;
        from[at / kLoad].widen2(at % kLoad / 2, v[i], v[i + 1]);
    }
}

// Loads eight elements of a row that wraps around after `wrap` columns, since a patch may have both da and
// db. A loop shifts the elements in; unrolled, these loads would be half of a kernel.
__device__ __forceinline__ void gather(Eight& to, const IN::storage* row, i64 wrap, i64 column, int left) {
    constexpr int kWordsPerLoad = Chunk<IN, kLoad>::kWords, kWords = kLoads * kWordsPerLoad;
    u32 word[kWords + 1] = {};
#pragma unroll 1
    for (int i = 0; i < 8; i++, column++) {
        word[kWords] = i < left ? row[column < wrap ? column : column - wrap] : 0;
#pragma unroll
        for (int w = 0; w < kWords; w++)
            word[w] = sizeof(IN::storage) == 4 ? word[w + 1] : word[w] >> 16 | word[w + 1] << 16;
    }
#pragma unroll
    for (int w = 0; w < kWords; w++) to[w / kWordsPerLoad].word[w % kWordsPerLoad] = word[w];
}

// The elements of a row of x, or of bias, for eight elements of the result.
struct Halves {
    Eight part[2];               // a and b; interleaved 16 neighbours (BACKWARD: 8, and part[1] is not used)

    // row: a row of x. left: how many of the result's columns exist; the others are zeros.
    template <bool kWide>
    __device__ __forceinline__ void load(const SourceCall& call, const IN::storage* row, i64 column,
                                         int left) {
        const bool interleaved = call.interleaved();
        const i64 half = call.half();
        if constexpr (!kBackward) {
            const IN::storage* const from = row + (interleaved ? 2 * column : column);
            load_eight<kWide>(part[0], from, interleaved ? left_of(2 * left, 8) : left);
            load_eight<kWide>(part[1], from + (interleaved ? 8 : half),
                              interleaved ? left_of(2 * left - 8, 8) : left);
        } else if constexpr (!kWide) {
            gather(part[0], row, call.wrap(), column, left);
            gather(part[1], row + half, call.wrap(), column, interleaved ? 0 : left);
        } else {
            const i64 at = interleaved || column < half ? column : column - half;
            load_eight<true>(part[0], row + at, left);
            load_eight<true>(part[1], row + half + at, interleaved ? 0 : left);
        }
    }
    __device__ __forceinline__ void widen(const SourceCall& call, int slice, float (&a)[kSlice],
                                          float (&b)[kSlice]) {
        if (!kBackward && call.interleaved()) separate(part);
        widen_slice(part[0], slice, a);
        widen_slice(part[1], slice, b);
        if (kBackward && call.interleaved()) {                       // a pair has both its elements' a and b
#pragma unroll
            for (int i = 0; i < kSlice; i += 2) b[i] = b[i + 1] = a[i + 1], a[i + 1] = a[i];
        }
    }
};

// The elements of a row of grad for eight elements of the result.
struct Grads {
    Eight eight;                 // interleaved: four, or two and two

    template <bool kWide>
    __device__ __forceinline__ void load(const SourceCall& call, const IN::storage* row, i64 column,
                                         int left) {
        const bool interleaved = call.interleaved();
        if constexpr (!kWide) {
            gather(eight, row, call.wrap(), interleaved ? column / 2 : column, interleaved ? left / 2 : left);
        } else if (!interleaved) {
            load_eight<true>(eight, row + (column < call.half() ? column : column - call.half()), left);
        } else {
#pragma unroll
            for (auto& c : eight) c = {};
            if (!left) return;
            const auto four = Chunk<IN, 4>::load(row + column / 2);
#pragma unroll
            for (int w = 0; w < Chunk<IN, 4>::kWords; w++) eight[0].word[w] = four.word[w];
        }
    }
    __device__ __forceinline__ void widen(const SourceCall& call, int slice, float (&v)[kSlice]) const {
        if (!call.interleaved()) return widen_slice(eight, slice, v);
        float low, high;
        eight[slice * 2 / kLoad].widen2(slice * 2 % kLoad / 2, low, high);
#pragma unroll
        for (int i = 0; i < kSlice; i++) v[i] = i < 2 ? low : high;
    }
};

// Stores the sum of a row's terms over the columns of a tile; half a warp has the row's patches.
__device__ __forceinline__ void store_sum(const SourceCall& call, const PatchPosition& patch, int r,
                                          float total) {
#pragma unroll
    for (int distance = 1; distance < Tile::kColumnPatches; distance *= 2)
        total = add_rn(total, as_float(__shfl_xor_sync(~0u, as_bits(total), distance)));
    const i64 first = patch.column - Tile::patch_column();
    if (Tile::column_patch() == 0 && r < patch.rows_left && (call.interleaved() || first < call.half()))
        call.sums[first / Tile::kColumns * call.rows + patch.row + r] = as_float(f32::narrow(total));
}

// A slice of a row: a, b and (BACKWARD) grad, biased and clamped, with act(a) and (BACKWARD) act'(a).
// clipped: bit i for a, bit 8 + i for b.
struct Slice {
    float v[kArrays][kSlice], act[kSlice], slope[kSlice];
    u32 clipped = 0;

    __device__ __forceinline__ void add_bias(const SourceCall& call, const IN::storage* biases, i64 column,
                                             int left, int slice) {
        Halves bias;
        float of_a[kSlice], of_b[kSlice];
        if (call.has(SourceCall::kWide)) bias.load<true>(call, biases, column, left);
        else bias.load<false>(call, biases, column, left);
        bias.widen(call, slice, of_a, of_b);
#pragma unroll
        for (int i = 0; i < kSlice; i++)
            v[0][i] = add_rn(v[0][i], of_a[i]), v[1][i] = add_rn(v[1][i], of_b[i]);
    }
    __device__ __forceinline__ void clamp(const SourceCall& call) {
        const u32 limit = as_bits(call.limit);
#pragma unroll
        for (int i = 0; i < kSlice; i++) {
            float &a = v[0][i], &b = v[1][i];
            const float clamped_a = at_most(a, call.limit);
            const float clamped_b = at_least(at_most(b, call.limit), call.minus_limit);
            if (kBackward) {         // clipped elements equal a limit; NaN never does
                if (as_bits(clamped_a) == limit && as_bits(a) != limit) clipped |= 1u << i;
                if ((as_bits(clamped_b) & 0x7fffffffu) == limit && as_bits(b) != as_bits(clamped_b))
                    clipped |= 0x100u << i;
            }
            a = clamped_a, b = clamped_b;
        }
    }
    // Computes act(a) and its derivative; with gpt_oss b becomes b + 1.
    __device__ __forceinline__ void evaluate(const SourceCall& call) {
        ::evaluate<true>(call.kind(), call.alpha, v[0], act, slope);
        if (!call.has(SourceCall::kGptOss)) return;
#pragma unroll
        for (int i = 0; i < kSlice; i++) v[1][i] = add_rn(v[1][i], 1.0f);
    }
    // Computes the gradients. others: bits of columns that are db or absent; all_others: those of all slices.
    __device__ __forceinline__ void gradients(u32 all_others, u32 others, float (&out)[kSlice]) const {
        if (all_others != 0xffu) {
#pragma unroll
            for (int i = 0; i < kSlice; i++)
                out[i] = mul_rn(Source::gated(v[kArrays - 1][i], v, i), slope[i]);
        }
        if (!all_others) return;
#pragma unroll
        for (int i = 0; i < kSlice; i++)
            if (others >> i & 1) out[i] = Source::gradient_b(v[kArrays - 1][i], act[i]);
    }
};

// A thread's elements for a row of its patch.
struct SourceRow {
    Halves x;
    Grads grad;

    template <bool kWide>
    __device__ __forceinline__ void load(const SourceCall& call, const PatchPosition& patch, int r) {
        const int left = patch.columns_of(r);
        const i64 row = patch.row + r;
        x.load<kWide>(call, call.x + row * (2 * call.half()), patch.column, left);
        if constexpr (kBackward) grad.load<kWide>(call, call.grad + row * call.half(), patch.column, left);
    }
    __device__ __forceinline__ void compute(const SourceCall& call, const PatchPosition& patch, int r,
                                            const float& weight, float (&values)[8]) {
        if constexpr (kBackward) differentiate(call, patch, r, weight, values);
        else activate(call, patch, r, weight, values);
    }

private:
    __device__ __forceinline__ Slice widened(const SourceCall& call, const PatchPosition& patch, int r,
                                             int slice) {
        Slice s;
        x.widen(call, slice, s.v[0], s.v[1]);
        const int left = patch.columns_of(r);
        if (const IN::storage* const biases = call.bias && left ? call.bias_of(patch.row + r) : nullptr)
            s.add_bias(call, biases, patch.column, left, slice);
        if (call.has(SourceCall::kClamped)) s.clamp(call);
        if constexpr (kBackward) grad.widen(call, slice, s.v[kArrays - 1]);
        s.evaluate(call);
        return s;
    }
    // Computes eight elements of y.
    __device__ __forceinline__ void activate(const SourceCall& call, const PatchPosition& patch, int r,
                                             const float& weight, float (&y)[8]) {
        const Slice s = widened(call, patch, r, 0);
#pragma unroll
        for (int i = 0; i < kSlice; i++) y[i] = Source::gated(s.act[i], s.v, i);
        if (!call.probs) return;
#pragma unroll
        for (int i = 0; i < kSlice; i++) y[i] = mul_rn(y[i], weight);
    }
    // Computes eight elements of the gradient of x.
    __device__ __forceinline__ void differentiate(const SourceCall& call, const PatchPosition& patch, int r,
                                                  const float& weight, float (&d)[8]) {
        const u32 all_others = not_a(call, patch);
        TreeSum<8> sum;
#pragma unroll
        for (int slice = 0; slice < 8 / kSlice; slice++) {
            const u32 others = all_others >> slice * kSlice;
            float (&out)[kSlice] = *reinterpret_cast<float(*)[kSlice]>(d + slice * kSlice);
            Slice s = widened(call, patch, r, slice);
            if (call.sums) {
#pragma unroll
                for (int i = 0; i < kSlice; i++) {
                    const float term = Source::gradient_weight(s.v, i, s.act[i]);
                    sum.add(slice * kSlice + i, others >> i & 1 ? as_float(kAbsentTerm) : term);
                }
            }
            if (call.probs) {
#pragma unroll
                for (int i = 0; i < kSlice; i++)
                    s.v[kArrays - 1][i] = mul_rn(s.v[kArrays - 1][i], weight);
            }
            s.gradients(all_others, others, out);
            if (!call.has(SourceCall::kClamped)) continue;
            // Gradients of clipped elements are 0 whatever the weight, and so must those of absent ones be: 0
            // * Inf would be NaN.
            const u32 absent = (0xffu << patch.columns_left & 0xffu) >> slice * kSlice;
            const u32 zeros = s.clipped | absent | absent << 8;
#pragma unroll
            for (int i = 0; i < kSlice; i++)
                if ((others >> i & 1 ? zeros >> 8 : zeros) >> i & 1) out[i] = 0.0f;
        }
        if (call.sums) store_sum(call, patch, r, sum.sum());
    }
    // A bit for each of the eight columns that is db or absent.
    static __device__ __forceinline__ u32 not_a(const SourceCall& call, const PatchPosition& patch) {
        if (call.interleaved()) return 0xaau | (0xffu << patch.columns_left & 0xffu);
        return 0xffu << left_of(call.half() - patch.column, 8) & 0xffu;
    }
};
