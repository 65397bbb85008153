// Patches of y = ((a * sigma(a)) * b) * p, or of its gradients, from x (docs/numerics.md, section 9): what swiglu_tensor.cu quantises.
//
// A block of 256 threads owns 128 x 128 elements of the result, a thread 8 x 8 of them. Macros: IN; BACKWARD 1: the result is the gradient
// of x, laid out as x is, found from grad, the gradient of y. An element is then da or db; sigma is computed for either.
#pragma once
#define PATH_NUMBER_any 0
#define PATH_NUMBER_rows 1
#define PATH_NUMBER_tiles 2
#define PATH_NUMBER_options 3
#define PATH_NUMBER_experts 4
#define PATH_NUMBER_wide 5
#define PATH_NUMBER_quotients 6
#define PATH_PASTE(a, b) a##b
#define PATH_EXPAND(a, b) PATH_PASTE(a, b)
#define PATH_NUMBER PATH_EXPAND(PATH_NUMBER_, PATH)
#define PLAIN (PATH_NUMBER == 0 ? 0 : PATH_NUMBER == 1 ? 2 : 1)
#define OPTIONS (PATH_NUMBER > 2)
#define EXPERTS (PATH_NUMBER > 3)
#define MAYBE_EXPERTS (PATH_NUMBER > 4)
#define DIVIDE (PATH_NUMBER == 6)
#include "numerics/column_sum.cuh"
#include "numerics/sigmoid.cuh"
#include "tile/tile.cuh"

struct SwigluCall {
    static constexpr u32 kClamped = 1, kGptOss = 2, kInterleaved = 4, kWide = 8;
    static constexpr u32 kNone = ~0u;

    const IN::storage* x;        // [rows, 2 H]: a then b in each row, or a0 b0 a1 b1 ... (kInterleaved)
    const IN::storage* grad;     // BACKWARD: [rows, H]
    const IN::storage* bias;     // [2 H], in the order of x; with `experts` [E, 2 H]; or null
    const u32* experts;          // [rows, rounded up to whole tiles]: whose bias each row has, or kNone; or null: all have the same
    const float* probs;          // [rows], or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    float* sums;                 // BACKWARD: of grad * dy / dp over the columns of a tile, [tiles across, rows]; or null
    i64 rows, columns;           // of the result: H columns, or 2 H
    float limit, minus_limit;    // kClamped: a <= limit, -limit <= b <= limit
    float alpha;                 // sigma's argument is alpha * a: 1, or 1.702 with kGptOss, where b is b + 1
    u32 flags;                   // kWide: every row of x, grad and bias allows 16-byte loads (interleaved grad: of 4 elements), every row
                                 // of as-is data 8-byte stores

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ bool interleaved() const { return has(kInterleaved); }
    __device__ __forceinline__ i64 half() const { return BACKWARD ? columns / 2 : columns; }         // H
    __device__ __forceinline__ i64 wrap() const { return interleaved() ? columns : half(); }
    // Of a row, where there are biases; null: it has none.
    __device__ __forceinline__ const IN::storage* bias_of(i64 row) const {
        if (!experts) return bias;
        const u32 expert = load_read_only(experts + row);
        return expert == kNone ? nullptr : bias + expert * (2 * half());
    }
};

using Tile = ByteTile<128, 128>;
constexpr int kThreads = Tile::kThreads;
constexpr int kLoad = 16 / sizeof(IN::storage), kLoads = 8 / kLoad;  // elements of a load; loads of eight elements
constexpr int kRowsAtOnce = sizeof(IN::storage) == 2 && !BACKWARD ? 8 : 2;       // whose loads are in flight
constexpr int kPart = BACKWARD ? 4 : 8;                              // elements of a row that are computed at a time: what registers allow
using Eight = Chunk<IN, kLoad>[kLoads];

// A thread's patch.
struct Place {
    i64 row, column;
    int rows_left, columns_left;

    __device__ __forceinline__ Place(const SwigluCall& call, const TilePosition& at)
        : row(at.row + Tile::patch_row()), column(at.column + Tile::patch_column()) {
        rows_left = left_of(call.rows - row, 8), columns_left = left_of(call.columns - column, 8);
    }
    // Which of the eight columns are db, or do not exist: bit by bit.
    __device__ __forceinline__ u32 others(const SwigluCall& call) const {
        if (call.interleaved()) return 0xaau | (0xffu << columns_left & 0xffu);
        return 0xffu << left_of(call.half() - column, 8) & 0xffu;
    }
};

// kLoads chunks: `left` of eight neighbours, zeros instead of the others.
template <bool kWide>
__device__ __forceinline__ void load_eight(Eight& to, const IN::storage* from, int left) {
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
        if (!kWide) to[l] = Chunk<IN, kLoad>::load_partial(from + l * kLoad, left - l * kLoad);
        else if (left) to[l] = Chunk<IN, kLoad>::load(from + l * kLoad);
        else to[l] = {};
    }
}
// The part-th run of kPart of eight.
__device__ __forceinline__ void widen_part(const Eight& from, int part, float (&v)[kPart]) {
#pragma unroll
    for (int i = 0; i < kPart; i += 2) {
        const int at = part * kPart + i;
        from[at / kLoad].widen2(at % kLoad / 2, v[i], v[i + 1]);
    }
}

// The same of gradients: a patch may have both da and db, after whose `wrap` columns the row starts again. A loop, since unrolled all of
// these would be half of a kernel; elements enter at the top.
__device__ __forceinline__ void gather(Eight& to, const IN::storage* row, i64 wrap, i64 column, int left) {
    constexpr int kOfLoad = Chunk<IN, kLoad>::kWords, kWords = kLoads * kOfLoad;
    u32 word[kWords + 1] = {};
#pragma unroll 1
    for (int i = 0; i < 8; i++, column++) {
        word[kWords] = i < left ? row[column < wrap ? column : column - wrap] : 0;
#pragma unroll
        for (int w = 0; w < kWords; w++) word[w] = sizeof(IN::storage) == 4 ? word[w + 1] : word[w] >> 16 | word[w + 1] << 16;
    }
#pragma unroll
    for (int w = 0; w < kWords; w++) to[w / kOfLoad].word[w % kOfLoad] = word[w];
}

// Sixteen elements a0, b0, a1, b1, ... become eight of a and eight of b.
__device__ __forceinline__ void separate(Eight (&part)[2]) {
    constexpr int kWords = 8 / Chunk<IN, kLoad>::kPerWord, kOfLoad = Chunk<IN, kLoad>::kWords;       // of a half; of a load
    u32 word[2 * kWords];
#pragma unroll
    for (int w = 0; w < 2 * kWords; w++) word[w] = part[w / kWords][w % kWords / kOfLoad].word[w % kOfLoad];
#pragma unroll
    for (int w = 0; w < kWords; w++) {
        u32 a = word[2 * w], b = word[2 * w + 1];
        if (sizeof(IN::storage) == 2) {
            a = __byte_perm(word[2 * w], word[2 * w + 1], 0x5410);
            b = __byte_perm(word[2 * w], word[2 * w + 1], 0x7632);
        }
        part[0][w / kOfLoad].word[w % kOfLoad] = a, part[1][w / kOfLoad].word[w % kOfLoad] = b;
    }
}

// Of a row of x, or of bias, what eight elements of the result are made of.
struct Halves {
    Eight part[2];               // a, b; interleaved 16 elements that follow one another (BACKWARD: 8, and part[1] is not used)

    // row: of x. left: how many of the result's columns exist; what does not becomes zeros.
    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const IN::storage* row, i64 column, int left) {
        const bool interleaved = call.interleaved();
        const i64 half = call.half();
        if (!BACKWARD) {
            const IN::storage* const from = row + (interleaved ? 2 * column : column);
            load_eight<kWide>(part[0], from, interleaved ? left_of(2 * left, 8) : left);
            load_eight<kWide>(part[1], from + (interleaved ? 8 : half), interleaved ? left_of(2 * left - 8, 8) : left);
        } else if (!kWide) {
            gather(part[0], row, call.wrap(), column, left);
            gather(part[1], row + half, call.wrap(), column, interleaved ? 0 : left);
        } else {
            const i64 at = interleaved || column < half ? column : column - half;
            load_eight<true>(part[0], row + at, left);
            load_eight<true>(part[1], row + half + at, interleaved ? 0 : left);
        }
    }
    __device__ __forceinline__ void widen(const SwigluCall& call, int of_eight, float (&a)[kPart], float (&b)[kPart]) {
        if (!BACKWARD && call.interleaved()) separate(part);
        widen_part(part[0], of_eight, a);
        widen_part(part[1], of_eight, b);
        if (BACKWARD && call.interleaved()) {                           // a pair has both its elements' a and b
#pragma unroll
            for (int i = 0; i < kPart; i += 2) b[i] = b[i + 1] = a[i + 1], a[i + 1] = a[i];
        }
    }
};

#if BACKWARD
// Of a row of grad.
struct Grads {
    Eight part;                  // interleaved: four, or two and two

    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const IN::storage* row, i64 column, int left) {
        const bool interleaved = call.interleaved();
        if (!kWide) {
            gather(part, row, call.wrap(), interleaved ? column / 2 : column, interleaved ? left / 2 : left);
        } else if (!interleaved) {
            load_eight<true>(part, row + (column < call.half() ? column : column - call.half()), left);
        } else {
#pragma unroll
            for (auto& c : part) c = {};
            if (!left) return;
            const auto four = Chunk<IN, 4>::load(row + column / 2);
#pragma unroll
            for (int w = 0; w < Chunk<IN, 4>::kWords; w++) part[0].word[w] = four.word[w];
        }
    }
    __device__ __forceinline__ void widen(const SwigluCall& call, int of_eight, float (&v)[kPart]) const {
        if (call.interleaved()) {
            float lo, hi;
            part[of_eight * 2 / kLoad].widen2(of_eight * 2 % kLoad / 2, lo, hi);
            v[0] = v[1] = lo, v[2] = v[3] = hi;
        } else {
            widen_part(part, of_eight, v);
        }
    }
};
#endif

// What is loaded for a row of a patch.
struct Source {
    Halves x;
#if BACKWARD
    Grads grad;
#endif

    template <bool kWide>
    __device__ __forceinline__ void load(const SwigluCall& call, const Place& place, int r) {
        const int left = r < place.rows_left ? place.columns_left : 0;
        const i64 row = place.row + r;
        x.load<kWide>(call, call.x + row * (2 * call.half()), place.column, left);
#if BACKWARD
        grad.load<kWide>(call, call.grad + row * call.half(), place.column, left);
#endif
    }
};

// a and b of a part of row r, biased and clamped. clipped: bit i of a, bit 8 + i of b.
__device__ __forceinline__ void widen_clamped(const SwigluCall& call, const Place& place, int r, int part, Halves& in, float (&a)[kPart],
                                              float (&b)[kPart], u32& clipped) {
    in.widen(call, part, a, b);
    const int left = r < place.rows_left ? place.columns_left : 0;
    if (const IN::storage* const biases = call.bias && left ? call.bias_of(place.row + r) : nullptr) {
        Halves bias;
        float of_a[kPart], of_b[kPart];
        if (call.has(SwigluCall::kWide)) bias.load<true>(call, biases, place.column, left);
        else bias.load<false>(call, biases, place.column, left);
        bias.widen(call, part, of_a, of_b);
#pragma unroll
        for (int i = 0; i < kPart; i++) a[i] = add_rn(a[i], of_a[i]), b[i] = add_rn(b[i], of_b[i]);
    }
    clipped = 0;
    if (!call.has(SwigluCall::kClamped)) return;
#pragma unroll
    for (int i = 0; i < kPart; i++) {
        const float clamped_a = at_most(a[i], call.limit), clamped_b = at_least(at_most(b[i], call.limit), call.minus_limit);
        if (BACKWARD) {                                              // NaN is not: clipped is what has become a limit
            if (as_bits(clamped_a) == as_bits(call.limit) && as_bits(a[i]) != as_bits(call.limit)) clipped |= 1u << i;
            if ((as_bits(clamped_b) & 0x7fffffffu) == as_bits(call.limit) && as_bits(b[i]) != as_bits(clamped_b)) clipped |= 0x100u << i;
        }
        a[i] = clamped_a, b[i] = clamped_b;
    }
}

// Eight elements of the result. prob: of the row.
#if !BACKWARD
__device__ __forceinline__ void activate(const SwigluCall& call, const Place& place, int r, const float& prob, Source& in, float (&y)[8]) {
    float a[8], b[8], sigma[8];
    u32 clipped;
    widen_clamped(call, place, r, 0, in.x, a, b, clipped);
#pragma unroll
    for (int i = 0; i < 8; i++) sigma[i] = mul_rn(call.alpha, a[i]);
    sigmoids(sigma);
    if (call.has(SwigluCall::kGptOss)) {
#pragma unroll
        for (int i = 0; i < 8; i++) b[i] = add_rn(b[i], 1.0f);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = mul_rn(mul_rn(a[i], sigma[i]), b[i]);
    if (call.probs) {
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = mul_rn(y[i], prob);
    }
}
#else
__device__ __forceinline__ void activate(const SwigluCall& call, const Place& place, int r, const float& prob, Source& in, float (&d)[8]) {
    const u32 all_others = place.others(call);
    TreeSum<8> sum;
#pragma unroll
    for (int part = 0; part < 8 / kPart; part++) {
        const u32 others = all_others >> part * kPart;
        float a[kPart], b[kPart], sigma[kPart], grad[kPart];
        float (&out)[kPart] = *reinterpret_cast<float(*)[kPart]>(d + part * kPart);
        u32 clipped;
        widen_clamped(call, place, r, part, in.x, a, b, clipped);
        in.grad.widen(call, part, grad);
#pragma unroll
        for (int i = 0; i < kPart; i++) sigma[i] = mul_rn(call.alpha, a[i]);
        sigmoids(sigma);
        if (call.has(SwigluCall::kGptOss)) {
#pragma unroll
            for (int i = 0; i < kPart; i++) b[i] = add_rn(b[i], 1.0f);
        }
        if (call.sums) {
#pragma unroll
            for (int i = 0; i < kPart; i++) {
                const float term = mul_rn(mul_rn(grad[i], mul_rn(a[i], sigma[i])), b[i]);
                sum.add(part * kPart + i, others >> i & 1 ? as_float(kAbsentTerm) : term);
            }
        }
        if (call.probs) {
#pragma unroll
            for (int i = 0; i < kPart; i++) grad[i] = mul_rn(grad[i], prob);
        }
        if (all_others != 0xffu) {
#pragma unroll
            for (int i = 0; i < kPart; i++) {
                const float rest = mul_rn(mul_rn(call.alpha, a[i]), fma_rn(sigma[i], -1.0f, 1.0f));      // u * (1 - sigma)
                out[i] = mul_rn(mul_rn(grad[i], b[i]), mul_rn(sigma[i], add_rn(1.0f, rest)));
            }
        }
        if (all_others) {
#pragma unroll
            for (int i = 0; i < kPart; i++)
                if (others >> i & 1) out[i] = mul_rn(grad[i], mul_rn(a[i], sigma[i]));
        }
        if (call.has(SwigluCall::kClamped)) {
            // What is clipped is 0 whatever the weight, and what does not exist must be so too: 0 times Inf would be NaN.
            const u32 absent = (0xffu << place.columns_left & 0xffu) >> part * kPart;
            clipped |= absent | absent << 8;
#pragma unroll
            for (int i = 0; i < kPart; i++)
                if ((others >> i & 1 ? clipped >> 8 : clipped) >> i & 1) out[i] = 0.0f;
        }
    }
    if (!call.sums) return;
    float total = sum.sum();
#pragma unroll
    for (int distance = 1; distance < Tile::kColumnPatches; distance *= 2)           // the other patches of the row: half a warp
        total = add_rn(total, as_float(__shfl_xor_sync(~0u, as_bits(total), distance)));
    const i64 first = place.column - Tile::patch_column();
    if (Tile::column_patch() == 0 && r < place.rows_left && (call.interleaved() || first < call.half()))
        call.sums[first / Tile::kColumns * call.rows + place.row + r] = as_float(f32::narrow(total));
}
#endif

template <bool kWide>
__device__ __forceinline__ void load_rows(const SwigluCall& call, const Place& place, int first, Source (&in)[kRowsAtOnce]) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) in[r].template load<kWide>(call, place, first + r);
}

// use(r, values) of each row of the patch. What does not exist is 0.
template <class Use>
__device__ __forceinline__ void each_row(const SwigluCall& call, const Place& place, Use use) {
    __shared__ float probs[Tile::kRows];
    const i64 row = place.row - Tile::patch_row() + threadIdx.x;
    const float prob = call.probs && threadIdx.x < Tile::kRows && row < call.rows ? call.probs[row] : 1.0f;
#pragma unroll
    for (int first = 0; first < 8; first += kRowsAtOnce) {
        Source in[kRowsAtOnce];
        if (call.has(SwigluCall::kWide)) load_rows<true>(call, place, first, in);
        else load_rows<false>(call, place, first, in);
        if (first == 0 && call.probs) {                                 // x is on its way
            if (threadIdx.x < Tile::kRows) probs[threadIdx.x] = prob;
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) {
            float values[8];
            activate(call, place, first + r, probs[Tile::patch_row() + first + r], in[r], values);
            use(first + r, values);
        }
    }
}
