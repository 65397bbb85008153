// Path any: patches of results from any memory and with any options, all of them run-time values.
//
// A block of 256 threads owns 128 x 128 elements of the result, a thread 8 x 8 of them. An element of a
// gradient belongs to one part or the other; the same term is computed for both. x and grad are loaded before
// anything is computed.
//
// The source declares SourceRow: load() loads a thread's inputs for a row of its patch, and compute()
// computes the eight values.
#pragma once
#include "fused/patch_position.cuh"

// Shift register of rows, for arrays that cannot be indexed at run time: the loop over rows is rolled, since
// unrolled it would be most of a program.
template <class T>
__device__ __forceinline__ void append(T (&rows)[8], const T& row) {
#pragma unroll
    for (int r = 1; r < 8; r++) rows[r - 1] = rows[r];
    rows[7] = row;
}
struct EightValues { float of[8]; };

// Calls use(r, values) for each row of the patch. Values of absent rows and columns are 0.
template <class Use>
__device__ __forceinline__ void each_row(const SourceCall& call, const PatchPosition& patch, Use use) {
    __shared__ float probs[Tile::kRows];
    const i64 row = patch.row - Tile::patch_row() + threadIdx.x;
    if (call.probs && threadIdx.x < Tile::kRows)
        probs[threadIdx.x] = row < call.rows ? call.probs[row] : 1.0f;
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < 8; r++) {
        SourceRow in;
        if (call.has(SourceCall::kWide)) in.load<true>(call, patch, r);
        else in.load<false>(call, patch, r);
        EightValues values;
        in.compute(call, patch, r, probs[Tile::patch_row() + r], values.of);
        use(r, values);
    }
}
