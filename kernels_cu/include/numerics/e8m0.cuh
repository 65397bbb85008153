// E8M0 scales of MX blocks (docs/numerics.md, section 2): the scale byte of an amax, the factor that a byte
// means, and where bytes go.
#pragma once
#include "memory/chunks.cuh"
#include "scale/swizzle.cuh"

// How an amax becomes a scale byte. One formula for all modes, so that the mode costs nothing:
//   t = amax * factor        e = max((bits of t + round) >> 23 - bias, 0)
// rceil: factor 1 / max and round 0x7fffff, the next power of two upwards. floor: factor 2^-emax. ceil and
// even: factor 1, bias emax, and round 0x7fffff or half of FP8's last mantissa bit.
struct ScaleRule {
    float factor;
    u32 round;
    i32 bias;
    u32 not_finite;              // e of a block whose amax is Inf or NaN: 254 (profile te) or 255 (torchao)

    // Whether NaN counts in an amax.
    __device__ __forceinline__ bool nan_wins() const { return not_finite == kNanE8m0; }

    __device__ __forceinline__ u32 byte(u32 amax_bits) const {
        const u32 t = as_bits(mul_rn(as_float(amax_bits), factor));
        const i32 e = (i32)((t + round) >> 23) - bias;
        if (amax_bits >= 0x7f800000u) return not_finite;
        // up to 2^-127 the byte is 0 in every mode
        return t <= 0x00400000u || e < 0 ? 0 : (u32)e;
    }
};

// 2^(127 - e): what elements are multiplied by.
__device__ __forceinline__ float inverse_e8m0(u32 e) {
    return as_float(e < 254 ? (254 - e) << 23 : e == 254 ? 0x00400000u : kNanF32);
}

// Where the scales of one direction go. A matrix has lines of blocks: its rows, or (column-wise blocks) its
// columns.
struct ScaleTarget {
    u8* to;                      // null: nowhere
    i64 matrix;                  // bytes of a matrix's scales
    i64 line, block;             // compact: strides in bytes, one of them 1; swizzled: 0 and the tiles along
                                 // a line

    __device__ __forceinline__ bool swizzled() const { return line == 0; }
    // Whether the scales of neighbouring lines, rather than of neighbouring blocks, are neighbours.
    __device__ __forceinline__ bool lines_adjoin() const { return line == 1; }
    __device__ __forceinline__ u8* at(i64 m, i64 l, i64 b) const {
        return as_global(to) + m * matrix + (swizzled() ? swizzled_at(l, b, block) : l * line + b * block);
    }
    // The bytes of `word`: blocks b to b + 3 of line l, b a multiple of 4, absent ones 0. A matrix has
    // `lines` by `blocks`.
    __device__ __forceinline__ void store_blocks(i64 m, i64 l, i64 b, u32 word, i64 lines, i64 blocks) const {
        const i64 stored = swizzled() ? (lines + 127) / 128 * 128 : lines;
        if (l < stored && b < blocks) store_run(at(m, l, b), word, swizzled() ? 4 : left_of(blocks - b, 4));
    }
    // The bytes of `word`: lines l to l + 3 of block b, where lines adjoin.
    __device__ __forceinline__ void store_lines(i64 m, i64 l, i64 b, u32 word, i64 lines, i64 blocks) const {
        if (b < blocks) store_run(at(m, l, b), word, left_of(lines - l, 4));
    }

private:
    static __device__ __forceinline__ void store_run(u8* p, u32 word, int count) {
        if (count == 4 && reinterpret_cast<u64>(p) % 4 == 0) {
            *reinterpret_cast<u32*>(p) = word;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) p[i] = (u8)(word >> 8 * i);
    }
};
