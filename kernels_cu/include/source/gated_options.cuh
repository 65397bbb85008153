// Options of gated sources: bias, clamp, gpt_oss, interleaved x (a0 b0 a1 b1 ...), and gradients whose H is
// no multiple of a tile's columns; rows allow wide accesses. Options are uniform over threads, so each costs
// one branch per eight elements, or none: without clamp the limit is Inf; without gpt_oss alpha is 1, and -0
// is added to b, which changes no bit.
//
// Gradients lie in two parts of each row. [da | db]: a tile of da and one of db. Interleaved: two
// neighbouring tiles of da0 db0 da1 db1 ...; of 128 columns of grad a thread has four of the first 64 and the
// same four of the others, so that its eight columns of either part are adjacent, loads and stores are whole,
// and all that follows is the same for both orders.
#pragma once
#include "fused/stream_shape.cuh"
#include "source/gated.cuh"
#include "numerics/tree_sum.cuh"

template <bool, class A, class B> struct Either { using Type = A; };
template <class A, class B> struct Either<false, A, B> { using Type = B; };

// Shared memory holds the biases of the thread block's columns, of a and b, ordered so that a thread's come
// in fours. With experts: the biases of the first row's expert, then those of the last row's; rows of other
// experts are rare. Stored as f32, or unconverted where shared memory is short.
class Biases {
    using Stored = Either<kIsShort, IN, f32>::Type;
    static constexpr int kHalf = Tile::kColumns / 2, kBiasesPerExpert = 2 * Tile::kColumns;
    static constexpr u32 kMinusZero = 1u << (8 * sizeof(IN::storage) - 1);        // adding it changes no bit
    static __device__ __forceinline__ Stored::storage* shared_biases() {
        __shared__ __align__(16) Stored::storage biases[(1 + kExperts) * kBiasesPerExpert];
        return biases;
    }
    static __device__ __forceinline__ u32 to_stored(f32, u32 bits) { return as_bits(IN::widen(bits)); }
    template <class F>
    static __device__ __forceinline__ u32 to_stored(F, u32 bits) { return bits; }

public:
    // The two experts whose biases are in shared memory.
    static __device__ __forceinline__ u32* experts() {
        __shared__ u32 experts[2];
        return experts;
    }
    // Loads a tile's biases. Call __syncthreads() before add(), and before loading another tile's.
    static __device__ __forceinline__ void load(const SourceCall& call, const TilePosition& tile) {
        const int last = threadIdx.x / kBiasesPerExpert;
        const int part = threadIdx.x / Tile::kColumns % 2;
        const int e = threadIdx.x % Tile::kColumns;
        if (last > kExperts || !(kExperts || call.bias)) return;
        const i64 at = tile.column
            + (parts_are_adjacent(call) ? e : e % kHalf / 4 * 8 + e / kHalf * 4 + e % 4);
        const IN::storage* from = call.bias;
        if constexpr (kExperts) {
            const i64 row = tile.row + last * (Tile::kRows - 1);
            from = tile.row < call.rows ? call.bias_of(row) : nullptr;
            if (part + e == 0 && tile.row < call.rows && (!kMaybeExperts || call.experts))
                experts()[last] = load_read_only(call.experts + row);
        }
        const bool exists = from && at < call.half();
        const u32 bits =
            exists ? from[call.interleaved() ? 2 * at + part : part * call.half() + at] : kMinusZero;
        shared_biases()[threadIdx.x] = (Stored::storage)to_stored(Stored{}, bits);
    }
    // Keeps the address of this thread's biases in a register, which the compiler would recompute for every
    // use.
    __device__ __forceinline__ Biases() {
        if constexpr (kOptions) {
            const Stored::storage* const own_biases = shared_biases() + Tile::column_patch() * 4;
#ifdef CUPY_FP8_HOST
            from = own_biases;
#else
            from = shared_address(own_biases);
            asm volatile("" : "+r"(from));
#endif
        }
    }
    // Adds the biases. part: 0 for a, 1 for b; last: those of the last row's expert. Absent rows are then no
    // longer 0.
    __device__ __forceinline__ void add(const SourceCall& call, int part, bool last, float (&v)[8]) const {
        if (!kExperts && !call.bias) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto four = load(last * kBiasesPerExpert + part * Tile::kColumns + half * kHalf);
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
    using Four = Chunk<Stored, 4>;
#ifdef CUPY_FP8_HOST
    const Stored::storage* from;

    __device__ __forceinline__ Four load(int at) const {
        return Four::load_shared(reinterpret_cast<const u8*>(from + at));
    }
#else
    u32 from;

    __device__ __forceinline__ Four load(int at) const {
        Four four;
        const u32 address = from + at * (int)sizeof(Stored::storage);
        if constexpr (Four::kWords == 4)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(four.word[0]), "=r"(four.word[1]), "=r"(four.word[2]), "=r"(four.word[3])
                         : "r"(address));
        else
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(four.word[0]), "=r"(four.word[1]) : "r"(address));
        return four;
    }
#endif
};

// Returns what gpt_oss adds to b; -0 without it.
__device__ __forceinline__ float one(const SourceCall& call) {
    return call.has(SourceCall::kGptOss) ? 1.0f : -0.0f;
}

// Clamps a and b. An element beyond the limit is rare. Returns bit i for a, bit 8 + i for b.
__device__ __forceinline__ u32 clip(const SourceCall& call, float (&a)[8], float (&b)[8]) {
    if (__builtin_expect(none_beyond(a, b, call.limit), 1)) return 0;
    u32 clipped = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        mark_above(clipped, 1u << i, a[i], call.limit);
        mark_above(clipped, 0x100u << i, magnitude(b[i]), call.limit);
        a[i] = at_most(a[i], call.limit), b[i] = at_least(at_most(b[i], call.limit), call.minus_limit);
    }
    return clipped;
}

// Computes da and db of eight elements, in the order of their parts. sums: the terms of dp, added up by
// fours; interleaved: the sums of each part.
__device__ __forceinline__ void gradients(const SourceCall& call, float weight, float (&v)[kArrays][8],
                                          const float (&terms)[8], u32 clipped, float (&values)[kParts][8],
                                          float (&sums)[2]) {
    TreeSum<4> halves[2];
    Source::gradients(v, terms, [&](float a) { return mul_rn(call.alpha, a); }, call.sums, weight,
                      [&](int i, float term) { halves[i / 4].add(i % 4, term); }, values);
    if (call.sums) sums[0] = halves[0].sum(), sums[1] = halves[1].sum();
    if (__builtin_expect(clipped, 0)) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (clipped >> i & 1) values[i / 8][i % 8] = 0.0f;
    }
    if (!call.interleaved()) return;
    float paired[2][8];
#pragma unroll
    for (int i = 0; i < 16; i++) paired[i / 8][i % 8] = values[i % 2][i / 2];
#pragma unroll
    for (int i = 0; i < 16; i++) values[i / 8][i % 8] = paired[i / 8][i % 8];
}
