// f32 scales of blocks (docs/numerics.md, section 3): the scale of an amax in every profile, and where scales go.
#pragma once
#include "memory.cuh"
#include "scale.cuh"

// What an element is multiplied by, and what is stored.
struct BlockScale {
    float factor, scale_inv;
};

// How the amax a of a block becomes its scale. A profile is one quotient, rounded to a power of two or not, and the other number from it:
//   q = target / a, or a / target        other = 1 / q, or a / target, or a * reciprocal
// The host turns profiles into flags (cupy_fp8/ops/blocks.py), so that one code has two divisions whatever they are.
struct BlockRule {
    static constexpr u32 kAmaxFirst = 1;                             // q = a / target is scale_inv; otherwise q = target / a is the factor
    static constexpr u32 kGuarded = 2;                               // 1 where a is 0 or Inf; `largest` where target / a overflows
    static constexpr u32 kRoundDown = 4, kRoundUp = 8;               // q to a power of two
    static constexpr u32 kQuickLeast = 27u << 23, kQuickMost = 227u << 23;       // 2^-100 and 2^100, as bits
    static constexpr u32 kOtherQuotient = 16, kOtherProduct = 32;    // the other number is a / target, a * reciprocal

    float target, reciprocal;                                        // the FP8 format's maximum, and fl(1 / it)
    float eps;                                                       // a is at least this
    float largest;
    u32 low, high;                                                   // what rounding up stays within, as f32 bits
    u32 flags;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }

    // As of(). Where q = target / a is rounded down to a power of two, of numbers that are not extreme, that is the difference of exponents,
    // one less where a's significand is the larger one: then the quotient is too far below a power of two to be rounded to it.
    __device__ __forceinline__ BlockScale quick_of(u32 amax_bits) const {
        const u32 a = amax_bits < as_bits(eps) ? as_bits(eps) : amax_bits;
        if (flags != (kGuarded | kRoundDown) || a - kQuickLeast >= kQuickMost - kQuickLeast) return of(amax_bits);
        const u32 factor = ((as_bits(target) - a) & 0xff800000u) + (127u << 23);
        return {as_float(factor), as_float((254u << 23) - factor)};
    }

    __device__ __forceinline__ BlockScale of(u32 amax_bits) const {
        // Magnitudes order like their bits.
        const float a = amax_bits < as_bits(eps) ? eps : as_float(amax_bits);
        const bool amax_first = has(kAmaxFirst), quotient = has(kOtherQuotient);
        float q = div_rn(amax_first ? a : target, amax_first ? target : a);
        if (has(kGuarded)) q = !is_positive_number(a) ? 1.0f : is_infinite(q) ? largest : q;
        if (has(kRoundDown)) q = floor_to_power_of_two(q);
        if (has(kRoundUp)) {
            const u32 bits = as_bits(q), up = (bits + 0x7fffffu) & 0xff800000u;
            q = as_float(bits <= low ? low : up < high ? up : high);
        }
        float other = div_rn(quotient ? a : 1.0f, quotient ? target : q);
        if (has(kOtherProduct)) other = mul_rn(a, reciprocal);
        return amax_first ? BlockScale{other, q} : BlockScale{q, other};
    }
};

// Where the scales of one direction go, by rows and columns of blocks of x as it lies in memory. Strides in elements, one of them 1.
// rows, columns: what is stored of a matrix, padding included.
struct ScaleGrid {
    float* to;                                                       // null: nowhere
    i64 matrix, row, column;
    i64 rows, columns;

    __device__ __forceinline__ bool has(i64 r, i64 c) const { return r < rows && c < columns; }
    __device__ __forceinline__ float* at(i64 m, i64 r, i64 c) const { return as_global(to) + m * matrix + r * row + c * column; }
};
