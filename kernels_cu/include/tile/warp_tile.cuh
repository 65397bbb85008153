// A warp tile: 32 rows x 128 columns of a matrix, in the registers of one warp. Lane l has columns 4l to 4l +
// 3 of all 32 rows, so a lane finds the amaxes of its columns alone, lanes exchange those of rows, and both
// come from one read. All 32 loads are in flight before the first use.
#pragma once
#include "numerics/amax.cuh"
#include "tile/tile.cuh"

constexpr int kWarpTileRows = 32, kWarpTileColumns = 128, kLaneColumns = 4;

template <class F>
struct WarpTile {
    using RowChunk = Chunk<F, kLaneColumns>;
    RowChunk row[kWarpTileRows];

    // from: this lane's first column of the warp tile's first row; rows_left rows and columns_left columns
    // exist, the others become zeros. kVector: every row allows chunked access (and columns_left is 0 or
    // all); otherwise `vector` decides.
    template <bool kVector>
    __device__ __forceinline__ void load(const typename F::storage* from, i64 stride, int rows_left,
                                         int columns_left, bool vector) {
        if ((kVector || vector) && rows_left == kWarpTileRows && columns_left == kLaneColumns) {
#pragma unroll
            for (int r = 0; r < kWarpTileRows; r++, from += stride) row[r] = RowChunk::load(from);
            return;
        }
#pragma unroll
        for (int r = 0; r < kWarpTileRows; r++, from += stride) {
            const int left = r < rows_left ? columns_left : 0;
            if (!kVector) row[r] = RowChunk::load_partial(from, left);
            else if (left) row[r] = RowChunk::load(from);
            else row[r] = {};
        }
    }
};

// Position of a warp tile in its array.
struct WarpTilePosition {
    i64 at;                      // this lane's first element
    int rows_left, columns_left;
};

// Amaxes of a warp tile's rows and columns. Rows of 16-bit formats are kept in pairs, one per half of a word.
template <class F, bool kNan>
struct WarpTileAmax {
    static constexpr bool kPairs = sizeof(typename F::storage) == 2;
    static constexpr int kWords = kPairs ? kWarpTileRows / 2 : kWarpTileRows;
    u32 row[kWords];                                                 // over this lane's columns
    u32 column[WarpTile<F>::RowChunk::kWords];

    template <bool kOfRows, bool kOfColumns>
    __device__ __forceinline__ void find(const WarpTile<F>& warp_tile) {
        using RowChunk = typename WarpTile<F>::RowChunk;
#pragma unroll
        for (u32& c : column) c = 0;
#pragma unroll
        for (int r = 0; r < kWarpTileRows; r++) {
            u32 of_row = 0;
#pragma unroll
            for (int w = 0; w < RowChunk::kWords; w++) {
                const u32 magnitudes = warp_tile.row[r].word[w] & F::kMagnitudes;
                if (kOfColumns) column[w] = larger(column[w], magnitudes);
                if (kOfRows) of_row = larger(of_row, magnitudes);
            }
            if (!kOfRows) continue;
            if (!kPairs) row[r] = of_row;
            else if (r % 2 == 0) row[r / 2] = of_row;
            else
                row[r / 2] = larger(__byte_perm(row[r / 2], of_row, 0x5410),
                                    __byte_perm(row[r / 2], of_row, 0x7632));
        }
    }
    // Reduces over groups of kLanes neighbouring lanes. Each exchange halves the rows of which a lane has a
    // part, so that afterwards lane i of a group holds the complete maxima of rows i * kRowsPerLane to i *
    // kRowsPerLane + kRowsPerLane - 1, as f32 bits.
    template <int kLanes> static constexpr int kRowsPerLane = kWarpTileRows / kLanes;
    template <int kLanes>
    __device__ __forceinline__ void reduce_rows(u32 (&owned)[kRowsPerLane<kLanes>]) {
        halve_down<kLanes / 2, kWords / 2>(row, larger);
        if constexpr (kWords < kLanes) {                             // the last pair of rows is in both lanes
            owned[0] = widened(threadIdx.x & 1 ? row[0] >> 16 : row[0] & 0xffffu);
        } else {
#pragma unroll
            for (int i = 0; i < kRowsPerLane<kLanes>; i++)
                owned[i] = kPairs ? widened(row[i / 2] >> i % 2 * 16 & 0xffffu) : row[i];
        }
    }
    // Returns the amaxes of this lane's columns, as f32 bits.
    __device__ __forceinline__ void of_columns(u32 (&bits)[kLaneColumns]) const {
#pragma unroll
        for (int i = 0; i < kLaneColumns; i++)
            bits[i] = kPairs ? widened(column[i / 2] >> i % 2 * 16 & 0xffffu) : column[i];
    }

private:
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
        return F::template max_magnitudes<kNan>(a, b);
    }
    static __device__ __forceinline__ u32 widened(u32 magnitude) { return as_bits(F::widen(magnitude)); }
};

// Transposes a 4 x 4 matrix of bytes held by lanes l, l + 8, l + 16 and l + 24, one word each.
__device__ __forceinline__ u32 transpose_across_lanes(u32 word) {
    const bool odd = threadIdx.x & 8, upper = threadIdx.x & 16;
    u32 other = __shfl_xor_sync(~0u, word, 16);
    word = upper ? __byte_perm(other, word, 0x7632) : __byte_perm(word, other, 0x5410);
    other = __shfl_xor_sync(~0u, word, 8);
    return odd ? __byte_perm(word, other, 0x3715) : __byte_perm(word, other, 0x6240);
}

// Shared memory for the FP8 bytes of a block's kTilesDown x kTilesAcross warp tiles, until they are stored as
// transposed rows. A column of the tile is kRows consecutive bytes, its 16-byte units XOR-swizzled by column
// against bank conflicts of writes and reads.
template <int kTilesDown, int kTilesAcross>
struct WarpTiles {
    static constexpr int kRows = kWarpTileRows * kTilesDown, kColumns = kWarpTileColumns * kTilesAcross;
    static constexpr int kThreads = 32 * kTilesDown * kTilesAcross, kBytes = kRows * kColumns;
    static_assert((kRows & (kRows - 1)) == 0 && kThreads <= 1024,
                  "a power of two of rows, one warp per warp tile");

    u8* shared;                                                      // kBytes, 16-byte aligned

    // First row of this warp's warp tile in the tile, and this lane's first column.
    static __device__ __forceinline__ int row() { return threadIdx.x / 32 % kTilesDown * kWarpTileRows; }
    static __device__ __forceinline__ int column() {
        return threadIdx.x / 32 / kTilesDown * kWarpTileColumns + threadIdx.x % 32 * kLaneColumns;
    }

    // Writes half of this warp's rows. words[c]: rows row() + 16 * half and on, four per word, of column() +
    // c. Call __syncthreads() before storing.
    __device__ __forceinline__ void write(int half, const u32 (&words)[kLaneColumns][4]) const {
#pragma unroll
        for (int c = 0; c < kLaneColumns; c++)
            *reinterpret_cast<uint4*>(shared + at(column() + c, row() / 16 + half)) =
                make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
    }
    // Stores the tile's columns as rows of `to` (destination of column 0), `stride` bytes apart; columns_left
    // columns and rows_left rows exist. vector: rows_left and every row of `to` are multiples of 16 bytes.
    template <bool kVector>
    __device__ __forceinline__ void store(u8* to, i64 stride, int columns_left, int rows_left,
                                          bool vector) const {
        if (!kVector && !vector) {
            store_ragged_rows<kRows, kColumns, kThreads>(to, stride, columns_left, rows_left,
                                                         [&](int column, int chunk) {
                return *reinterpret_cast<const uint2*>(shared + at(column, chunk / 2) + chunk % 2 * 8);
            });
            return;
        }
        // All loads before the stores, so that addresses they share are computed once.
        constexpr int kStep = kThreads / kUnits, kUnitsPerThread = kColumns / kStep;
        constexpr int kPeriod = kStep < kSwizzlePeriod ? kSwizzlePeriod / kStep : 1;
        static_assert(kStep % kSwizzlePeriod == 0 || kSwizzlePeriod % kStep == 0,
                      "all columns of a thread are swizzled alike, or every kPeriod-th");
        const int unit = threadIdx.x % kUnits, first = threadIdx.x / kUnits;
        uint4 loaded[kUnitsPerThread];
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; i++)
            loaded[i] = unit_at(first + i % kPeriod * kStep, unit)[i / kPeriod * kPeriod * kStep * kUnits];
        const int columns = unit * 16 < rows_left ? columns_left : 0;
        u8* row = to + first * stride + unit * 16;
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; i++, row += kStep * stride)
            if (first + i * kStep < columns) *reinterpret_cast<uint4*>(row) = loaded[i];
    }
    // Address of a single byte.
    __device__ __forceinline__ u8* byte_at(int column, int tile_row) const {
        return shared + at(column, tile_row / 16) + tile_row % 16;
    }
    // Columns kSwizzlePeriod apart are swizzled alike: their units are kSwizzlePeriod * kUnits units apart.
    static constexpr int kSwizzlePeriod = 32;
    // Address of rows 16 * unit and on of a column.
    __device__ __forceinline__ const uint4* unit_at(int column, int unit) const {
        return reinterpret_cast<const uint4*>(shared + at(column, unit));
    }

private:
    static constexpr int kUnits = kRows / 16;                        // per column
    static __device__ __forceinline__ int at(int column, int unit) {
        constexpr int kLanesPerPeriod = kSwizzlePeriod / kLaneColumns;
        constexpr int kMasks = kUnits < kLanesPerPeriod ? kUnits : kLanesPerPeriod;
        return column * kRows + (unit ^ (u32)column / kLaneColumns % kMasks) * 16;
    }
};
