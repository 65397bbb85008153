// Amaxes of blocks, for f32_blocks.cuh and mx_blocks.cuh.
#pragma once
#include "fused/store.cuh"
#include "fused/stream.cuh"

// A subblock, the smallest block: kSubblock elements along a row or a column. Larger blocks are two or four.
constexpr int kSubblock = 32, kSubblocks = Tile::kColumns / kSubblock;

template <bool kNan>
__device__ __forceinline__ u32 raised(u32 amax, float v) {
    if (!kNan) return raised_magnitude(amax, v);
    const u32 bits = as_bits(magnitude(v));
    return larger(bits, amax);
}

// Loads eight floats of shared memory, 16-byte aligned.
__device__ __forceinline__ void load_floats(const void* from, float (&v)[8]) {
    const uint4 low = reinterpret_cast<const uint4*>(from)[0], high = reinterpret_cast<const uint4*>(from)[1];
    const u32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = as_float(bits[i]);
}

// ---- chunks of stream.cuh ----
// Keeps the values of row r.
__device__ __forceinline__ void keep(float (&y)[kThreadChunks][8], int r, const float (&values)[kParts][8]) {
#pragma unroll
    for (int part = 0; part < kParts; part++)
#pragma unroll
        for (int i = 0; i < 8; i++) y[part * kThreadRows + r][i] = values[part][i];
}
// With options: clears absent rows, which hold only biases. left: existing rows.
__device__ __forceinline__ void clear_absent_rows(float (&y)[kThreadChunks][8], int left) {
    if (kBackward || left >= kThreadRows) return;
#pragma unroll
    for (int r = 0; r < kThreadRows; r++)
        if (r >= left)
#pragma unroll
            for (float& v : y[r]) v = 0.0f;
}

// Reduces four chunks over the lanes of a subblock; each lane gets the amax of chunk owned<4>().
template <bool kNan>
__device__ __forceinline__ u32 fold_chunks(const float (&y)[4][8]) {
    u32 amaxes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        amaxes[i] = 0;
#pragma unroll
        for (const float v : y[i]) amaxes[i] = raised<kNan>(amaxes[i], v);
    }
    return fold(amaxes, larger<u32>);
}
// Broadcasts the value of this chunk's owner to the lanes of its subblock.
__device__ __forceinline__ float broadcast(float own, int chunk) {
    return as_float(__shfl_sync(~0u, as_bits(own), owner(chunk)));
}

// Column amaxes of a tile in shared memory; a thread has four rows. Laid out so that the 32 rows of a
// subblock have no bank conflicts.
struct ColumnAmaxes {
    static constexpr int kWordsPerSubblock = 8 * Tile::kColumns + 8;
    static constexpr int kWords = Tile::kRows / 32 * kWordsPerSubblock;
    u32* words;

    // Call __syncthreads() before read().
    template <bool kNan>
    __device__ __forceinline__ void write(const float (&y)[4][8]) const {
        u32 amax[8];
#pragma unroll
        for (int c = 0; c < 8; c++)
            amax[c] = raised<kNan>(raised<kNan>(raised<kNan>(raised<kNan>(0, y[0][c]), y[1][c]), y[2][c]),
                                   y[3][c]);
        const int thread = thread_again();
        u32* const to = at(thread / Tile::kColumnPatches) + thread % Tile::kColumnPatches * 8;
        store_shared_whole(to, amax[0], amax[1], amax[2], amax[3]);
        store_shared_whole(to + 4, amax[4], amax[5], amax[6], amax[7]);
    }
    // One subblock of one column per thread: lanes 8 apart have the column's four subblocks.
    static __device__ __forceinline__ int subblock(int thread) { return thread % 32 / 8; }
    static __device__ __forceinline__ int column(int thread) { return thread / 32 * 8 + thread % 8; }
    __device__ __forceinline__ u32 read(int subblock, int column) const {
        u32 amax = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) amax = larger(amax, at(subblock * 8)[i * Tile::kColumns + column]);
        return amax;
    }
    // Stores a float for a subblock and column in a word that only this thread has read. Call __syncthreads()
    // before operands().
    __device__ __forceinline__ void put(int subblock, int column, float v) const {
        at(subblock * 8)[column] = as_bits(v);
    }
    // Loads the floats for this thread's rows and columns.
    __device__ __forceinline__ void operands(float (&by)[8]) const {
        load_floats(at(threadIdx.x / Tile::kColumnPatches / 8 * 8) + Tile::patch_column(), by);
    }

private:
    __device__ __forceinline__ u32* at(int four_rows) const {
        return words + four_rows / 8 * kWordsPerSubblock + four_rows % 8 * Tile::kColumns;
    }
};

// ---- patches of patch.cuh ----
// Amaxes of the rows and columns of a patch, as bits.
struct PatchAmaxes {
    u32 row[8], column[8];

    template <bool kNan>
    __device__ __forceinline__ void find_rows(const float (&y)[8][8]) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            row[r] = 0;
#pragma unroll
            for (int c = 0; c < 8; c++) row[r] = raised<kNan>(row[r], y[r][c]);
        }
    }
    template <bool kNan>
    __device__ __forceinline__ void find_columns(const float (&y)[8][8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            column[c] = 0;
#pragma unroll
            for (int r = 0; r < 8; r++) column[c] = raised<kNan>(column[c], y[r][c]);
        }
    }
    // Reduces over the four lanes of a subblock; row[0] and row[1] are then the complete amaxes of rows
    // owned() and owned() + 1. Each exchange halves the rows of which a lane has a part.
    __device__ __forceinline__ void reduce_rows() {
        halve<1, 4>(row, larger<u32>);
        halve<2, 2>(row, larger<u32>);
    }
    static __device__ __forceinline__ int owned() { return threadIdx.x % 2 * 4 + threadIdx.x / 2 % 2 * 2; }
};

// Stores the column amaxes of every row of patches: [16][128] words.
__device__ __forceinline__ void store_column_amaxes(u32* amaxes, const u32 (&column)[8]) {
    u32* to = amaxes + Tile::row_patch() * Tile::kColumns + Tile::patch_column();
    *reinterpret_cast<uint4*>(to) = make_uint4(column[0], column[1], column[2], column[3]);
    *reinterpret_cast<uint4*>(to + 4) = make_uint4(column[4], column[5], column[6], column[7]);
}
__device__ __forceinline__ u32 column_amax(const u32* amaxes, int first, int patches, int column) {
    u32 amax = 0;
    // the loads of a subblock are in flight together
    for (int i = first; i < first + patches; i += kSubblock / 8)
#pragma unroll
        for (int u = 0; u < kSubblock / 8; u++) {
            const u32 other = amaxes[(i + u) * Tile::kColumns + column];
            amax = larger(other, amax);
        }
    return amax;
}
