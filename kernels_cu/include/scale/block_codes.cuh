// Codes of elements by the scale of their block (docs/numerics.md, section 3). IN, OUT and DIVIDE are the
// kernel's defines.
#pragma once
#include "scale/block_scale.cuh"

// Returns the codes of a chunk. quick: with DIVIDE, the divisor has quick quotients.
template <int kCount>
__device__ __forceinline__ Chunk<OUT, kCount> quantized(const Chunk<IN, kCount>& in, float factor,
                                                        float divisor, bool quick) {
    Chunk<OUT, kCount> out;
#pragma unroll
    for (int e = 0; e < kCount / 2; e++) {
        float lo, hi;
        in.widen2(e, lo, hi);
        if (!DIVIDE) out.narrow2(e, mul_rn(lo, factor), mul_rn(hi, factor));
        else if (quick)
            out.narrow2(e, quick_quotient_of_codes(lo, divisor, factor),
                        quick_quotient_of_codes(hi, divisor, factor));
        else out.narrow2(e, div_rn(lo, divisor), div_rn(hi, divisor));
    }
    return out;
}
