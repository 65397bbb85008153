// E8M0 scales of MX blocks (docs/numerics.md, section 2): the scale byte of an amax, the factor of a byte,
// and where bytes are stored.
#pragma once
#include "memory/chunks.cuh"
#include "scale/swizzle.cuh"

// Turns an amax into a scale byte. All modes share one formula, so that the mode costs nothing:
//   t = amax * factor        e = max((bits of t + round) >> 23 - bias, 0)
// rceil has factor 1 / max, and round 0x7fffff, which gives the next power of two upwards. floor has factor
// 2^-emax. ceil and even have factor 1, bias emax, and round 0x7fffff or half of FP8's last mantissa bit.
struct MXScaleRule {
    float factor;
    u32 round;
    i32 bias;
    u32 not_finite;              // e of a block whose amax is Inf or NaN: 254 (profile te) or 255 (torchao)

    // Returns true if one NaN makes the block's amax NaN.
    __device__ __forceinline__ bool nan_wins() const { return not_finite == kNanE8m0; }

    __device__ __forceinline__ u32 byte(u32 amax_bits) const {
        const u32 t = as_bits(mul_rn(as_float(amax_bits), factor));
        const i32 e = (i32)((t + round) >> 23) - bias;
        if (amax_bits >= 0x7f800000u) return not_finite;
        // Up to 2^-127 the byte is 0 in every mode.
        return t <= 0x00400000u || e < 0 ? 0 : (u32)e;
    }
};

// Returns the factor for elements, 2^(127 - e).
__device__ __forceinline__ float inverse_e8m0(u32 e) {
    return as_float(e < 254 ? (254 - e) << 23 : e == 254 ? 0x00400000u : kNanF32);
}

// Destination of the scales of one direction. A line of blocks is a row of the matrix, or a column for
// column-wise blocks.
struct ScaleDestination {
    u8* to;                      // null: scales are not written
    i64 matrix;                  // bytes per matrix
    i64 line, block;             // compact: strides in bytes, one of which is 1; swizzled: 0, and tiles per
                                 // line

    __device__ __forceinline__ bool swizzled() const { return line == 0; }
    // True if scales of neighbouring lines are adjacent, rather than those of neighbouring blocks.
    __device__ __forceinline__ bool lines_adjoin() const { return line == 1; }
    __device__ __forceinline__ u8* at(i64 m, i64 l, i64 b) const {
        return as_global(to) + m * matrix + (swizzled() ? swizzled_at(l, b, block) : l * line + b * block);
    }
    // Stores the bytes of `word` as the scales of blocks b to b + 3 of line l. b is a multiple of 4, and
    // bytes of absent blocks are 0. The matrix has `lines` lines of `blocks` blocks.
    __device__ __forceinline__ void store_blocks(i64 m, i64 l, i64 b, u32 word, i64 lines, i64 blocks) const {
        const i64 stored = swizzled() ? (lines + 127) / 128 * 128 : lines;
        if (l < stored && b < blocks) store_bytes(at(m, l, b), word, swizzled() ? 4 : left_of(blocks - b, 4));
    }
    // Stores the bytes of `word` as the scales of block b of lines l to l + 3. Requires lines_adjoin().
    __device__ __forceinline__ void store_lines(i64 m, i64 l, i64 b, u32 word, i64 lines, i64 blocks) const {
        if (b < blocks) store_bytes(at(m, l, b), word, left_of(lines - l, 4));
    }

private:
    static __device__ __forceinline__ void store_bytes(u8* p, u32 word, int count) {
        if (count == 4 && reinterpret_cast<u64>(p) % 4 == 0) {
            *reinterpret_cast<u32*>(p) = word;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) p[i] = (u8)(word >> 8 * i);
    }
};
