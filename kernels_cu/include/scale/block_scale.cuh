// f32 scales of blocks (docs/numerics.md, section 3): BlockRule computes the scale of an amax in every
// profile; ScaleGrid is the destination of scales.
#pragma once
#include "memory/chunks.cuh"
#include "scale/scale.cuh"

// Elements are multiplied by `factor`; scale_inv is stored.
struct BlockScale {
    float factor, scale_inv;
};

// Returns a / b, correctly rounded, for operands >= 0, except 0 / 0 and Inf / Inf. div.rn contains a call,
// which costs every kernel registers; quotients of significands need none.
__device__ __forceinline__ float positive_quotient(float a, float b) {
    if (as_bits(a) == 0 || is_infinite(b)) return 0.0f;
    if (as_bits(b) == 0 || is_infinite(a)) return as_float(0x7f800000u);
    const auto times_2_24 = [](float v) {
        return as_bits(v) < 0x00800000u ? as_bits(mul_rn(v, 16777216.0f)) : as_bits(v) + (24u << 23);
    };
    // exponents may exceed those of f32
    const u32 a_bits = times_2_24(a), b_bits = times_2_24(b);
    const float m = as_float((a_bits & 0x7fffffu) | 0x3f800000u);
    const float n = as_float((b_bits & 0x7fffffu) | 0x3f800000u);
    const float q = quick_quotient(m, n, reciprocal(n));
    const u32 bits = as_bits(q);
    const i32 moved = (i32)(a_bits >> 23) - (i32)(b_bits >> 23), exponent = (i32)(bits >> 23) + moved;
    if (exponent >= 255) return as_float(0x7f800000u);
    if (exponent > 0) return as_float(bits + ((u32)moved << 23));
    // A subnormal result is rounded again, to units of 2^-149; in a tie of that rounding the remainder
    // decides.
    const u32 dropped = (u32)(1 - exponent), significand = (bits & 0x7fffffu) | 0x800000u;
    if (dropped > 24) return 0.0f;
    const i32 remainder = (i32)as_bits(fma_rn(mul_rn(n, -1.0f), q, m));
    const u32 units = significand >> dropped, rest = significand & ((1u << dropped) - 1);
    const u32 tie = 1u << (dropped - 1);
    const bool up = rest > tie || (rest == tie && (remainder > 0 || (remainder == 0 && (units & 1))));
    return as_float(units + up);
}

// How the amax a of a block becomes its scale. A profile is one quotient q, which may be rounded to a power
// of two, and a second number found from it:
//   q = target / a, or a / target            other = 1 / q, or a / target, or a * reciprocal
// Python turns profiles into flags (cupy_fp8/ops/quantize/blocks.py), so that one code with two divisions
// serves all of them.
struct BlockRule {
    // set: q = a / target is scale_inv; clear: q = target / a is the factor
    static constexpr u32 kAmaxFirst = 1;
    // q is 1 where a is 0 or Inf, and `largest` where target / a overflows.
    static constexpr u32 kGuarded = 2;
    static constexpr u32 kRoundDown = 4, kRoundUp = 8;               // q is rounded to a power of two
    static constexpr u32 kLeastQuickAmax = 67u << 23, kMostQuickAmax = 187u << 23;   // bits of 2^-60 and 2^60
    // the other number is a / target, or a * reciprocal
    static constexpr u32 kOtherQuotient = 16, kOtherProduct = 32;

    // largest value of the FP8 format, and fl(1 / target)
    float target, reciprocal;
    float eps;                                                       // lower bound of a
    float largest;
    // bounds of results that are rounded up, as f32 bits
    u32 low, high;
    u32 flags;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }

    // Returns the same as of(). If q = target / a is rounded down to a power of two and no number is extreme,
    // its exponent is the difference of exponents, less one if a's significand is the larger one (the
    // quotient is then too far below a power of two to be rounded to it).
    __device__ __forceinline__ BlockScale quick_of(u32 amax_bits) const {
        return is_quick(amax_bits) ? quick(amax_bits) : of<false>(amax_bits);
    }
    __device__ __forceinline__ bool is_quick(u32 amax_bits) const {
        return flags == (kGuarded | kRoundDown)
            && raised(amax_bits) - kLeastQuickAmax < kMostQuickAmax - kLeastQuickAmax;
    }
    __device__ __forceinline__ BlockScale quick(u32 amax_bits) const {
        const u32 factor = ((as_bits(target) - raised(amax_bits)) & 0xff800000u) + (127u << 23);
        return {as_float(factor), as_float((254u << 23) - factor)};
    }
    // Returns max(amax, eps). Magnitudes have the order of their bits.
    __device__ __forceinline__ u32 raised(u32 amax_bits) const {
        return amax_bits < as_bits(eps) ? as_bits(eps) : amax_bits;
    }

    // Returns the scale of any amax. kCalls: divisions may be calls.
    template <bool kCalls = true>
    __device__ __forceinline__ BlockScale of(u32 amax_bits) const {
        const auto divide = [](float v, float by) { return kCalls ? div_rn(v, by)
                                                   : positive_quotient(v, by); };
        const float a = as_float(raised(amax_bits));
        const bool amax_first = has(kAmaxFirst), quotient = has(kOtherQuotient);
        float q = divide(amax_first ? a : target, amax_first ? target : a);
        if (has(kGuarded)) q = !is_positive_number(a) ? 1.0f : is_infinite(q) ? largest : q;
        if (has(kRoundDown)) q = floor_to_power_of_two(q);
        if (has(kRoundUp)) {
            const u32 bits = as_bits(q), up = (bits + 0x7fffffu) & 0xff800000u;
            q = as_float(bits <= low ? low : up < high ? up : high);
        }
        float other = divide(quotient ? a : 1.0f, quotient ? target : q);
        if (has(kOtherProduct)) other = mul_rn(a, reciprocal);
        return amax_first ? BlockScale{other, q} : BlockScale{q, other};
    }
};

// Destination of the scales of one direction, indexed by rows and columns of blocks of x as it lies in
// memory. Strides in elements, one of which is 1. rows, columns: stored extents per matrix, padding included.
struct ScaleGrid {
    float* to;                                                       // null: nowhere
    i64 matrix, row, column;
    i64 rows, columns;

    __device__ __forceinline__ bool has(i64 r, i64 c) const { return r < rows && c < columns; }
    __device__ __forceinline__ float* at(i64 m, i64 r, i64 c) const {
        return as_global(to) + m * matrix + r * row + c * column;
    }
};
