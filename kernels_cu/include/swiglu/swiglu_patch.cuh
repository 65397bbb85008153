// Path any computes patches of y or of its gradients from any memory and with any options, all of them
// run-time values.
//
// A block of 256 threads owns 128 x 128 elements of the result, a thread 8 x 8 of them. An element of a
// gradient is da or db, and sigma is computed for either. x and grad are loaded before anything is computed.
#pragma once
#include "swiglu/swiglu.cuh"

// A slice is the elements of a row that are computed at a time: registers allow no more.
constexpr int kSlice = kBackward ? 4 : 8;

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
// Widens a slice of eight elements.
__device__ __forceinline__ void widen_slice(const Eight& from, int slice, float (&v)[kSlice]) {
#pragma unroll
    for (int i = 0; i < kSlice; i += 2) {
        const int at = slice * kSlice + i;
        from[at / kLoad].widen2(at % kLoad / 2, v[i], v[i + 1]);
    }
}

// Loads eight elements of a row that starts again after `wrap` columns, since a patch may have both da and
// db. A loop shifts the elements in: unrolled, these loads would be half of a kernel.
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

// Loads the elements of a row of x, or of bias, that eight elements of the result are made of.
struct Halves {
    Eight part[2];               // a and b; interleaved 16 neighbours (BACKWARD: 8, and part[1] is not used)

    // row: a row of x. left: how many of the result's columns exist; zeros take the place of the others.
    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const IN::storage* row, i64 column,
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
    __device__ __forceinline__ void widen(const SwigluCall& call, int slice, float (&a)[kSlice],
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

// Loads the elements of a row of grad that eight elements of the result are made of.
struct Grads {
    Eight eight;                 // interleaved: four, or two and two

    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const IN::storage* row, i64 column,
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
    __device__ __forceinline__ void widen(const SwigluCall& call, int slice, float (&v)[kSlice]) const {
        if (!call.interleaved()) return widen_slice(eight, slice, v);
        float low, high;
        eight[slice * 2 / kLoad].widen2(slice * 2 % kLoad / 2, low, high);
#pragma unroll
        for (int i = 0; i < kSlice; i++) v[i] = i < 2 ? low : high;
    }
};

// A thread loads these elements for a row of its patch.
struct Source {
    Halves x;
    Grads grad;

    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const PatchPosition& patch, int r) {
        const int left = patch.columns_of(r);
        const i64 row = patch.row + r;
        x.load<kWide>(call, call.x + row * (2 * call.half()), patch.column, left);
        if constexpr (kBackward) grad.load<kWide>(call, call.grad + row * call.half(), patch.column, left);
    }
};

// Finds a and b of a slice of row r, biased and clamped. clipped: bit i for a, bit 8 + i for b.
__device__ __forceinline__ void widen_clamped(const SwigluCall& call, const PatchPosition& patch, int r,
                                              int slice, Halves& in, float (&a)[kSlice], float (&b)[kSlice],
                                              u32& clipped) {
    in.widen(call, slice, a, b);
    const int left = patch.columns_of(r);
    if (const IN::storage* const biases = call.bias && left ? call.bias_of(patch.row + r) : nullptr) {
        Halves bias;
        float of_a[kSlice], of_b[kSlice];
        if (call.has(SwigluCall::kWide)) bias.load<true>(call, biases, patch.column, left);
        else bias.load<false>(call, biases, patch.column, left);
        bias.widen(call, slice, of_a, of_b);
#pragma unroll
        for (int i = 0; i < kSlice; i++) a[i] = add_rn(a[i], of_a[i]), b[i] = add_rn(b[i], of_b[i]);
    }
    clipped = 0;
    if (!call.has(SwigluCall::kClamped)) return;
    const u32 limit = as_bits(call.limit);
#pragma unroll
    for (int i = 0; i < kSlice; i++) {
        const float clamped_a = at_most(a[i], call.limit);
        const float clamped_b = at_least(at_most(b[i], call.limit), call.minus_limit);
        if (kBackward) {             // An element is clipped if it has become a limit; NaN never does.
            if (as_bits(clamped_a) == limit && as_bits(a[i]) != limit) clipped |= 1u << i;
            if ((as_bits(clamped_b) & 0x7fffffffu) == limit && as_bits(b[i]) != as_bits(clamped_b))
                clipped |= 0x100u << i;
        }
        a[i] = clamped_a, b[i] = clamped_b;
    }
}

// Finds sigma of a slice; with gpt_oss b becomes b + 1.
__device__ __forceinline__ void find_sigma(const SwigluCall& call, const float (&a)[kSlice],
                                           float (&b)[kSlice], float (&sigma)[kSlice]) {
#pragma unroll
    for (int i = 0; i < kSlice; i++) sigma[i] = mul_rn(call.alpha, a[i]);
    sigmoids(sigma);
    if (!call.has(SwigluCall::kGptOss)) return;
#pragma unroll
    for (int i = 0; i < kSlice; i++) b[i] = add_rn(b[i], 1.0f);
}

// Computes eight elements of y. prob: the row's weight.
__device__ __forceinline__ void activate(const SwigluCall& call, const PatchPosition& patch, int r,
                                         const float& prob, Source& in, float (&y)[8]) {
    float a[kSlice], b[kSlice], sigma[kSlice];
    u32 clipped;
    widen_clamped(call, patch, r, 0, in.x, a, b, clipped);
    find_sigma(call, a, b, sigma);
#pragma unroll
    for (int i = 0; i < kSlice; i++) y[i] = mul_rn(mul_rn(a[i], sigma[i]), b[i]);
    if (!call.probs) return;
#pragma unroll
    for (int i = 0; i < kSlice; i++) y[i] = mul_rn(y[i], prob);
}

// Computes a slice of the gradients. others: bits of columns that are db, or do not exist.
__device__ __forceinline__ void differentiate_slice(const SwigluCall& call, const float (&a)[kSlice],
                                                    const float (&b)[kSlice], const float (&sigma)[kSlice],
                                                    const float (&grad)[kSlice], u32 all_others, u32 others,
                                                    float (&out)[kSlice]) {
    if (all_others != 0xffu) {
#pragma unroll
        for (int i = 0; i < kSlice; i++) {
            // rest = u * (1 - sigma)
            const float rest = mul_rn(mul_rn(call.alpha, a[i]), fma_rn(sigma[i], -1.0f, 1.0f));
            out[i] = mul_rn(mul_rn(grad[i], b[i]), mul_rn(sigma[i], add_rn(1.0f, rest)));
        }
    }
    if (!all_others) return;
#pragma unroll
    for (int i = 0; i < kSlice; i++)
        if (others >> i & 1) out[i] = mul_rn(grad[i], mul_rn(a[i], sigma[i]));
}

// Stores the sum of a row's terms over the columns of a tile: half a warp has the row's patches.
__device__ __forceinline__ void store_sum(const SwigluCall& call, const PatchPosition& patch, int r,
                                          float total) {
#pragma unroll
    for (int distance = 1; distance < Tile::kColumnPatches; distance *= 2)
        total = add_rn(total, as_float(__shfl_xor_sync(~0u, as_bits(total), distance)));
    const i64 first = patch.column - Tile::patch_column();
    if (Tile::column_patch() == 0 && r < patch.rows_left && (call.interleaved() || first < call.half()))
        call.sums[first / Tile::kColumns * call.rows + patch.row + r] = as_float(f32::narrow(total));
}

// Computes eight elements of the gradient of x.
__device__ __forceinline__ void differentiate(const SwigluCall& call, const PatchPosition& patch, int r,
                                              const float& prob, Source& in, float (&d)[8]) {
    const u32 all_others = patch.not_da(call);
    TreeSum<8> sum;
#pragma unroll
    for (int slice = 0; slice < 8 / kSlice; slice++) {
        const u32 others = all_others >> slice * kSlice;
        float a[kSlice], b[kSlice], sigma[kSlice], grad[kSlice];
        float (&out)[kSlice] = *reinterpret_cast<float(*)[kSlice]>(d + slice * kSlice);
        u32 clipped;
        widen_clamped(call, patch, r, slice, in.x, a, b, clipped);
        in.grad.widen(call, slice, grad);
        find_sigma(call, a, b, sigma);
        if (call.sums) {
#pragma unroll
            for (int i = 0; i < kSlice; i++) {
                const float term = mul_rn(mul_rn(grad[i], mul_rn(a[i], sigma[i])), b[i]);
                sum.add(slice * kSlice + i, others >> i & 1 ? as_float(kAbsentTerm) : term);
            }
        }
        if (call.probs) {
#pragma unroll
            for (int i = 0; i < kSlice; i++) grad[i] = mul_rn(grad[i], prob);
        }
        differentiate_slice(call, a, b, sigma, grad, all_others, others, out);
        if (!call.has(SwigluCall::kClamped)) continue;
        // Gradients of clipped elements are 0 whatever the weight, and those of absent elements must be too:
        // 0 times Inf would be NaN.
        const u32 absent = (0xffu << patch.columns_left & 0xffu) >> slice * kSlice;
        clipped |= absent | absent << 8;
#pragma unroll
        for (int i = 0; i < kSlice; i++)
            if ((others >> i & 1 ? clipped >> 8 : clipped) >> i & 1) out[i] = 0.0f;
    }
    if (call.sums) store_sum(call, patch, r, sum.sum());
}

// Appends a row to the last rows of an array, which has no index at run time: the loop over rows is rolled,
// since unrolled it would be most of a program.
template <class T>
__device__ __forceinline__ void append(T (&rows)[8], const T& row) {
#pragma unroll
    for (int r = 1; r < 8; r++) rows[r - 1] = rows[r];
    rows[7] = row;
}
struct EightValues { float of[8]; };

// use(r, values) is called for each row of the patch. Values of rows and columns that do not exist are 0.
template <class Use>
__device__ __forceinline__ void each_row(const SwigluCall& call, const PatchPosition& patch, Use use) {
    __shared__ float probs[Tile::kRows];
    const i64 row = patch.row - Tile::patch_row() + threadIdx.x;
    if (call.probs && threadIdx.x < Tile::kRows)
        probs[threadIdx.x] = row < call.rows ? call.probs[row] : 1.0f;
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < 8; r++) {
        Source in;
        if (call.has(SwigluCall::kWide)) in.load<true>(call, patch, r);
        else in.load<false>(call, patch, r);
        EightValues values;
        const float& weight = probs[Tile::patch_row() + r];
        if constexpr (kBackward) differentiate(call, patch, r, weight, in, values.of);
        else activate(call, patch, r, weight, in, values.of);
        use(r, values);
    }
}
