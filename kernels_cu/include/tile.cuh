// Transposing bytes through shared memory. A tile is kRows x kColumns bytes; each thread owns a patch of 8 rows x 8 columns, which
// it transposes in registers (prmt) and writes as eight 8-byte pieces of transposed rows. The 8-byte columns of the shared tile
// are XOR-swizzled by patch, so that neither those writes nor the 16-byte reads of whole transposed rows conflict in banks.
#pragma once
#include "memory.cuh"

template <int kTileRows, int kTileColumns>
struct ByteTile {
    static constexpr int kRows = kTileRows, kColumns = kTileColumns;
    static constexpr int kRowPatches = kRows / 8, kColumnPatches = kColumns / 8, kThreads = kRowPatches * kColumnPatches;
    static_assert(kRowPatches >= 16 && kColumnPatches >= 16, "the swizzle is free of bank conflicts from 128 on");
    static_assert((kRows & (kRows - 1)) == 0 && kThreads <= 1024, "powers of two, one thread per patch");

    u8* shared;                                                      // kRows * kColumns bytes, 16-byte aligned

    // This thread's patch of the source tile: neighbouring threads take neighbouring columns.
    static __device__ __forceinline__ int patch_row() { return threadIdx.x / kColumnPatches * 8; }
    static __device__ __forceinline__ int patch_column() { return threadIdx.x % kColumnPatches * 8; }

    // line[r]: the eight bytes of source row patch_row() + r. Call __syncthreads() before read().
    template <class F>
    __device__ __forceinline__ void write_patch(const Chunk<F, 8> (&line)[8]) const {
        static_assert(sizeof(typename F::storage) == 1, "a tile of bytes");
        const int row_patch = threadIdx.x / kColumnPatches, column_patch = threadIdx.x % kColumnPatches;
        u8* to = shared + column_patch * 8 * kRows + swizzle(row_patch, column_patch) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 top[4], bottom[4];
            transpose_4x4(line[0].word[half], line[1].word[half], line[2].word[half], line[3].word[half], top);
            transpose_4x4(line[4].word[half], line[5].word[half], line[6].word[half], line[7].word[half], bottom);
#pragma unroll
            for (int k = 0; k < 4; k++) *reinterpret_cast<uint2*>(to + (half * 4 + k) * kRows) = make_uint2(top[k], bottom[k]);
        }
    }
    // Reading back: transposed rows in units of kBytes (4, 8 or 16), neighbouring threads neighbouring units of a row. A thread
    // reads kUnits<kBytes> of them: unit i holds source rows row() to row() + kBytes - 1 of source column column(i).
    template <int kBytes> static constexpr int kUnits = kRows * kColumns / kBytes / kThreads;
    template <int kBytes>
    static __device__ __forceinline__ int column(int unit) { return (unit * kThreads + threadIdx.x) / (kRows / kBytes); }
    template <int kBytes>
    static __device__ __forceinline__ int row() { return threadIdx.x % (kRows / kBytes) * kBytes; }
    template <class F, int kBytes>
    __device__ __forceinline__ Chunk<F, kBytes> read(int unit) const {
        const int at = row<kBytes>(), chunk = swizzle(at / 8, column<kBytes>(unit) / 8);
        const u8* line = shared + column<kBytes>(unit) * kRows;
        if constexpr (kBytes < 16) return Chunk<F, kBytes>::load_shared(line + chunk * 8 + at % 8);
        else {
            const Chunk<F, 16> c = Chunk<F, 16>::load_shared(line + chunk / 2 * 16);
            return chunk & 1 ? Chunk<F, 16>{{c.word[2], c.word[3], c.word[0], c.word[1]}} : c;
        }
    }

private:
    // Where the 8-byte chunk of source rows 8 * row_patch and on lies in its transposed row.
    static __device__ __forceinline__ int swizzle(int row_patch, int column_patch) { return row_patch ^ column_patch % kRowPatches; }

    static __device__ __forceinline__ void transpose_4x4(u32 a, u32 b, u32 c, u32 d, u32 (&out)[4]) {
        const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
        const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
        out[0] = __byte_perm(ab_low, cd_low, 0x5410);
        out[1] = __byte_perm(ab_low, cd_low, 0x7632);
        out[2] = __byte_perm(ab_high, cd_high, 0x5410);
        out[3] = __byte_perm(ab_high, cd_high, 0x7632);
    }
};

// Where block blockIdx.x of a batch of [rows, columns] matrices works, one matrix after the other: along rows of tiles, or down
// columns of tiles (kDownFirst), which makes neighbouring blocks write neighbouring parts of the transposed rows.
struct TilePosition {
    i64 matrix, row, column;

    template <class Tile, bool kDownFirst>
    static __device__ __forceinline__ TilePosition of_block(i64 rows, i64 columns) {
        const i64 across = (columns + Tile::kColumns - 1) / Tile::kColumns, down = (rows + Tile::kRows - 1) / Tile::kRows;
        const i64 run = kDownFirst ? down : across, line = blockIdx.x / run, in_run = blockIdx.x - line * run;
        const i64 lines = kDownFirst ? across : down, matrix = line / lines, in_matrix = line - matrix * lines;
        return {matrix, (kDownFirst ? in_run : in_matrix) * Tile::kRows, (kDownFirst ? in_matrix : in_run) * Tile::kColumns};
    }
};
