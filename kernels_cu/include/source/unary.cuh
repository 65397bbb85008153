// The source y = act(x). Activation: declared before this is included.
#pragma once
#include "source/any_kind.cuh"
#include "source/gate.cuh"

struct SourceCall {
    static constexpr u32 kWide = 8, kKinds = 16;
    // no weights, one part
    static constexpr const float* probs = nullptr;
    static constexpr float* sums = nullptr;
    static __device__ constexpr bool interleaved() { return false; }

    const IN::storage* x;        // [rows, columns]
    const IN::storage* grad;     // BACKWARD: [rows, columns]
    const float* noop;           // one element: 1.0 = write nothing; or null
    i64 rows, columns;
    // kWide: every row of x and grad allows 16-byte loads, and every row of as-is data 8-byte stores. Plus
    // kKinds * the activation's number
    u32 flags;

    __device__ __forceinline__ bool has(u32 flag) const { return flags & flag; }
    __device__ __forceinline__ Kind kind() const { return (Kind)(flags / kKinds); }
    __device__ __forceinline__ i64 half() const { return columns; }  // of the only part
};

using Source = Gate<Activation, false>;
constexpr int kParts = Source::kParts, kArrays = Source::kArrays;

#include "fused/patch_position.cuh"

// A thread's elements for a row of its patch.
struct SourceRow {
    Eight array[kArrays];        // x and (BACKWARD) grad

    template <bool kWide>
    __device__ __forceinline__ void load(const SourceCall& call, const PatchPosition& patch, int r) {
        const i64 at = (patch.row + r) * call.columns + patch.column;
        load_eight<kWide>(array[0], call.x + at, patch.columns_of(r));
        if constexpr (kBackward) load_eight<kWide>(array[1], call.grad + at, patch.columns_of(r));
    }
    __device__ __forceinline__ void compute(const SourceCall& call, const PatchPosition&, int, const float&,
                                            float (&values)[8]) const {
        float v[kArrays][8], slope[8];
#pragma unroll
        for (int k = 0; k < kArrays; k++) widen_eight(array[k], v[k]);
        evaluate<false>(call.kind(), 1.0f, v[0], values, slope);
        if constexpr (kBackward) {
#pragma unroll
            for (int i = 0; i < 8; i++) values[i] = mul_rn(v[1][i], slope[i]);
        }
    }
};
