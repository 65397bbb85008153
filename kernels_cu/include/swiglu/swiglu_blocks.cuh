// Blocks of y, or of its gradients, with scales of their own: what swiglu_blocks.cu and swiglu_mx.cu share.
#pragma once
#include "swiglu/swiglu_store.cuh"

constexpr int kRun = 32, kRuns = Tile::kColumns / kRun;              // of elements along a row; the smallest block

template <bool kNan>
__device__ __forceinline__ u32 larger(u32 top, float v) {
    if (!kNan) return raised_magnitude(top, v);
    const u32 bits = as_bits(magnitude(v));
    return bits > top ? bits : top;
}

__device__ __forceinline__ u32 larger_bits(u32 v, u32 w) { return v > w ? v : w; }

// Eight floats of shared memory, 16-byte aligned.
__device__ __forceinline__ void load_floats(const void* from, float (&v)[8]) {
    const uint4 low = reinterpret_cast<const uint4*>(from)[0], high = reinterpret_cast<const uint4*>(from)[1];
    const u32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = as_float(bits[i]);
}

#if PLAIN
// Their largest magnitudes over the lanes of a run: of each lane that of line owned<4>().
template <bool kNan>
__device__ __forceinline__ u32 fold_lines(const float (&y)[4][8]) {
    u32 tops[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        tops[i] = 0;
#pragma unroll
        for (const float v : y[i]) tops[i] = larger<kNan>(tops[i], v);
    }
    return fold(tops, larger_bits);
}
// What this lane has for the line that it owns, to all lanes of its run.
__device__ __forceinline__ float broadcast(float own, int line) { return as_float(__shfl_sync(~0u, as_bits(own), owner(line))); }

#include "swiglu/swiglu_stream.cuh"
#else
// The largest magnitudes of the rows and columns of a patch, as bits.
struct PatchTops {
    u32 row[8], column[8];

    template <bool kNan>
    __device__ __forceinline__ void find_rows(const float (&y)[8][8]) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            row[r] = 0;
#pragma unroll
            for (int c = 0; c < 8; c++) row[r] = larger<kNan>(row[r], y[r][c]);
        }
    }
    template <bool kNan>
    __device__ __forceinline__ void find_columns(const float (&y)[8][8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            column[c] = 0;
#pragma unroll
            for (int r = 0; r < 8; r++) column[c] = larger<kNan>(column[c], y[r][c]);
        }
    }
    // Over the four lanes of a run: afterwards row[0] and row[1] are whole, those of rows owned() and the next. Each exchange halves the
    // rows that a lane has a part of.
    __device__ __forceinline__ void reduce_rows() {
        halve<1, 4>();
        halve<2, 2>();
    }
    static __device__ __forceinline__ int owned() { return threadIdx.x % 2 * 4 + threadIdx.x / 2 % 2 * 2; }

private:
    template <int kDistance, int kKeep>
    __device__ __forceinline__ void halve() {
        const bool upper = threadIdx.x & kDistance;
#pragma unroll
        for (int i = 0; i < kKeep; i++) {
            const u32 sent = upper ? row[i] : row[i + kKeep], kept = upper ? row[i + kKeep] : row[i];
            const u32 other = __shfl_xor_sync(~0u, sent, kDistance);
            row[i] = kept > other ? kept : other;                    // NaNs are there only where they win
        }
    }
};

// The maxima of the columns of every row of patches: [16][128] words.
__device__ __forceinline__ void store_column_tops(u32* tops, const u32 (&column)[8]) {
    u32* to = tops + Tile::row_patch() * Tile::kColumns + Tile::patch_column();
    *reinterpret_cast<uint4*>(to) = make_uint4(column[0], column[1], column[2], column[3]);
    *reinterpret_cast<uint4*>(to + 4) = make_uint4(column[4], column[5], column[6], column[7]);
}
__device__ __forceinline__ u32 column_top(const u32* tops, int first, int patches, int column) {
    u32 top = 0;
    for (int i = first; i < first + patches; i += kRun / 8)          // whole runs: their loads wait together
#pragma unroll
        for (int u = 0; u < kRun / 8; u++) {
            const u32 other = tops[(i + u) * Tile::kColumns + column];
            top = other > top ? other : top;
        }
    return top;
}
#endif
