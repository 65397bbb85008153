// OPTIONS 1: rows that allow wide accesses, and whatever else: bias, clamp, the form `gpt_oss`, a0 b0 a1 b1 ..., gradients whose H is no
// multiple of a tile's columns. What these need beside gate_stream.cuh, to eight elements of a row at a time. Options are uniform, one
// branch for eight elements, or none at all: without clamp the limit is Inf, without gpt_oss alpha is 1 and -0 is added to b, which changes
// no bit.
//
// Results of gradients lie in two parts of each row. [da | db]: the tile of da and that of db. Interleaved: two neighbouring tiles of da0
// db0 da1 db1 ..., and of 128 columns of grad a thread has four of the first 64 and the same four of the others: then its eight columns of
// either part are neighbours, loads and stores are whole, and all that follows is the same for both orders.
#pragma once

__device__ __forceinline__ bool adjoin(const Gate& g) { return BACKWARD && g.interleaved(); }
// Columns from the first part of a result to the second.
__device__ __forceinline__ i64 apart(const Gate& g) { return adjoin(g) ? Tile::kColumns : g.half(); }
// The column after the last of a part.
__device__ __forceinline__ i64 end_of(const Gate& g, int part) {
    return BACKWARD && part == 0 && !g.interleaved() ? g.half() : g.columns;
}

// The biases that all rows have, of a block's columns, of a and b, in an order in which a thread has four after four. As f32; forward in
// blocks with transposed data as they come: there the chips with the least shared memory (99 KB) have none left.
class Biases {
#if defined(ENTRY_swiglu_block) && !BACKWARD
    using Kept = IN;
#else
    using Kept = f32;
#endif
    static constexpr int kHalf = Tile::kColumns / 2;
    static __device__ __forceinline__ Kept::storage* kept() {
        __shared__ __align__(16) Kept::storage biases[2 * Tile::kColumns];
        return biases;
    }
    static __device__ __forceinline__ u32 keep(f32, u32 bits) { return as_bits(IN::widen(bits)); }
    template <class F>
    static __device__ __forceinline__ u32 keep(F, u32 bits) { return bits; }

public:
    // column: the block's first of y. Call __syncthreads() before add().
    static __device__ __forceinline__ void load(const Gate& g, i64 column) {
        if (!shares(g) || threadIdx.x >= 2 * Tile::kColumns) return;
        const int part = threadIdx.x / Tile::kColumns, e = threadIdx.x % Tile::kColumns;
        const i64 at = column + (adjoin(g) ? e : e % kHalf / 4 * 8 + e / kHalf * 4 + e % 4);
        const bool exists = at < g.half();
        kept()[threadIdx.x] = (Kept::storage)(exists ? keep(Kept{}, g.bias[g.interleaved() ? 2 * at + part : part * g.half() + at]) : 0);
    }
    // This thread's. The address of what is shared would be found anew, slowly, wherever it is used: so it is kept.
    __device__ __forceinline__ Biases() {
        const Kept::storage* const mine = kept() + Tile::column_patch() * 4;
#ifdef CUPY_FP8_HOST
        from = mine;
#else
        from = (u32)__cvta_generic_to_shared(mine);
        asm volatile("" : "+r"(from));
#endif
    }
    // part: of a, or of b. Rows that do not exist are no longer 0 then.
    __device__ __forceinline__ void add(const Gate& g, int part, float (&v)[8]) const {
        if (!shares(g)) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto four = load(part * Tile::kColumns + half * kHalf);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float low, high;
                four.widen2(i, low, high);
                float& first = v[half * 4 + 2 * i];
                float& second = v[half * 4 + 2 * i + 1];
                first = add_rn(first, low), second = add_rn(second, high);
            }
        }
    }

private:
    using Four = Chunk<Kept, 4>;

    static __device__ __forceinline__ bool shares(const Gate& g) { return g.bias && !g.experts; }
#ifdef CUPY_FP8_HOST
    const Kept::storage* from;

    __device__ __forceinline__ Four load(int at) const { return Four::load_shared(reinterpret_cast<const u8*>(from + at)); }
#else
    u32 from;

    __device__ __forceinline__ Four load(int at) const {
        Four four;
        const u32 address = from + at * (int)sizeof(Kept::storage);
        if constexpr (Four::kWords == 4)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(four.word[0]), "=r"(four.word[1]), "=r"(four.word[2]), "=r"(four.word[3]) : "r"(address));
        else asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(four.word[0]), "=r"(four.word[1]) : "r"(address));
        return four;
    }
#endif
};

// Where |a| is below it, alpha * |a| is below kQuickSigmoid.
constexpr float kQuickGptOss = 51.0f;

// What gpt_oss adds to b.
__device__ __forceinline__ float one(const Gate& g) { return g.has(Gate::kGptOss) ? 1.0f : -0.0f; }

#if BACKWARD
// a and b clamped where an element is beyond the limit, which is rare. Bit i: of a; bit 8 + i: of b.
__device__ __forceinline__ u32 clip(const Gate& g, float (&a)[8], float (&b)[8]) {
    if (__builtin_expect(none_beyond(a, b, g.limit), 1)) return 0;
    u32 clipped = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        mark_above(clipped, 1u << i, a[i], g.limit), mark_above(clipped, 0x100u << i, magnitude(b[i]), g.limit);
        a[i] = at_most(a[i], g.limit), b[i] = at_least(at_most(b[i], g.limit), g.minus_limit);
    }
    return clipped;
}

// da and db of eight elements, in the order of their parts. sums: of the terms of dp, over four elements and four; interleaved these are of
// either part.
__device__ __forceinline__ void gradients(const Gate& g, float prob, const float (&a)[8], const float (&b)[8], float (&grad)[8],
                                          const float (&sigma)[8], u32 clipped, float (&values)[2][8], float (&sums)[2]) {
    float silu[8];
#pragma unroll
    for (int i = 0; i < 8; i++) silu[i] = mul_rn(a[i], sigma[i]);
    if (g.sums) {
        TreeSum<4> halves[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            halves[i / 4].add(i % 4, mul_rn(mul_rn(grad[i], silu[i]), b[i]));
            grad[i] = mul_rn(grad[i], prob);
        }
        sums[0] = halves[0].sum(), sums[1] = halves[1].sum();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float rest = mul_rn(mul_rn(g.alpha, a[i]), fma_rn(sigma[i], -1.0f, 1.0f));                // u * (1 - sigma)
        values[0][i] = mul_rn(mul_rn(grad[i], b[i]), mul_rn(sigma[i], add_rn(1.0f, rest)));
        values[1][i] = mul_rn(grad[i], silu[i]);
    }
    if (__builtin_expect(clipped, 0)) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (clipped >> i & 1) values[i / 8][i % 8] = 0.0f;
    }
    if (!g.interleaved()) return;
    float paired[2][8];
#pragma unroll
    for (int i = 0; i < 16; i++) paired[i / 8][i % 8] = values[i % 2][i / 2];
#pragma unroll
    for (int i = 0; i < 16; i++) values[i / 8][i % 8] = paired[i / 8][i % 8];
}
#endif
