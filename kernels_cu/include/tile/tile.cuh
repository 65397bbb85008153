// Transposition of bytes through shared memory. A tile is kRows x kColumns bytes; each thread transposes a
// patch of 8 rows x 8 columns in registers (prmt) and writes it as eight 8-byte pieces of transposed rows.
// The 8-byte columns of the shared tile are XOR-swizzled by patch, so that neither those writes nor the
// 16-byte reads of whole transposed rows have bank conflicts.
#pragma once
#include "memory/chunks.cuh"

// Transposes 4 x 4 bytes: byte i of words a, b, c and d, in that order, becomes out[i].
__device__ __forceinline__ void transpose_4x4(u32 a, u32 b, u32 c, u32 d, u32 (&out)[4]) {
    const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab_low, cd_low, 0x5410);
    out[1] = __byte_perm(ab_low, cd_low, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410);
    out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// bytes per sector: the L2 takes parts of sectors at a fraction of its speed
constexpr int kSector = 32;
// Bytes of p's sector that lie before p.
__device__ __forceinline__ int before_sector(const u8* p) {
    return (int)(reinterpret_cast<u64>(p) & kSector - 1);
}

// Returns the eight bytes of two chunks from byte `first` (0 to 7) on.
__device__ __forceinline__ uint2 bytes_of_two(uint2 low, uint2 high, int first) {
    const bool second = first & 4;
    const u32 a = second ? low.y : low.x, b = second ? high.x : low.y, c = second ? high.y : high.x;
    return make_uint2(__funnelshift_r(a, b, first % 4 * 8), __funnelshift_r(b, c, first % 4 * 8));
}
__device__ __forceinline__ u8 byte_of(uint2 chunk, int row) {
    return (u8)((row & 4 ? chunk.y : chunk.x) >> (row & 3) * 8);
}

// Bytes from p to the next multiple of 8.
__device__ __forceinline__ int before_multiple_of_8(const u8* p) {
    return (int)(-reinterpret_cast<u64>(p) & 7);
}

// First step of store_ragged_rows(): 8 shifted bytes at a time.
template <int kRows, int kColumns, int kThreads, class ChunkAt>
__device__ __forceinline__ void store_ragged_words(u8* to, i64 stride, int columns_left, int rows_left,
                                                   ChunkAt chunk_at) {
    constexpr int kChunks = kRows / 8, kStep = kThreads / kChunks, kInFlight = 4;
    static_assert(kThreads % kChunks == 0, "a thread has the same chunk of every column it takes");
    static_assert(kColumns % (kInFlight * kStep) == 0,
                  "which are columns of the tile, whether they exist or not");
    // no byte after the last chunk is used
    const int chunk = threadIdx.x % kChunks, next = (chunk + 1) % kChunks;
#pragma unroll 1
    for (int column = threadIdx.x / kChunks; column < columns_left; column += kInFlight * kStep) {
        uint2 low[kInFlight], high[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; u++)
            low[u] = chunk_at(column + u * kStep, chunk), high[u] = chunk_at(column + u * kStep, next);
        u8* row = to + column * stride;
#pragma unroll
        for (int u = 0; u < kInFlight; u++, row += kStep * stride) {
            const int head = before_multiple_of_8(row), first = head + 8 * chunk;
            if (column + u * kStep >= columns_left || first + 8 > rows_left) continue;
            *reinterpret_cast<uint2*>(row + first) = bytes_of_two(low[u], high[u], head);
        }
    }
}

// Second step: the bytes of each row before the first multiple of 8 and from the last one on (8 of a whole
// tile), one per thread.
template <int kRows, int kColumns, int kThreads, class ChunkAt>
__device__ __forceinline__ void store_ragged_ends(u8* to, i64 stride, int columns_left, int rows_left,
                                                  ChunkAt chunk_at) {
    constexpr int kChunks = kRows / 8, kEndStep = kThreads / 8;
    constexpr int kEnds = kColumns % (4 * kEndStep) == 0 ? 4 : kColumns % (2 * kEndStep) == 0 ? 2 : 1;
#pragma unroll 1
    for (int column = threadIdx.x / 8; column < columns_left; column += kEnds * kEndStep) {
        u8* const first = to + column * stride;
        bool more = true;
#pragma unroll 1
        for (int i = threadIdx.x % 8; more; i += 8) {
            int at[kEnds];
            u8 byte[kEnds];
            more = false;
            u8* row = first;
#pragma unroll
            for (int u = 0; u < kEnds; u++, row += kEndStep * stride) {
                const int before = before_multiple_of_8(row), head = smaller(before, rows_left);
                const int left = head + (rows_left - head) % 8 - i;
                at[u] = i < head ? i : rows_left - left;
                if (left <= 0 || column + u * kEndStep >= columns_left) at[u] = kRows;
                more |= left > 8;
                byte[u] = byte_of(chunk_at(column + u * kEndStep, at[u] / 8 % kChunks), at[u]);
            }
            row = first;
#pragma unroll
            for (int u = 0; u < kEnds; u++, row += kEndStep * stride)
                if (at[u] < kRows) row[at[u]] = byte[u];
        }
    }
}

// Stores transposed rows of a tile that do not start at multiples of 16 bytes. to: destination of source
// column 0; rows `stride` bytes apart; only the first columns_left source columns and rows_left source rows
// exist. chunk_at(column, chunk): source rows 8 * chunk and on of any source column of the tile.
template <int kRows, int kColumns, int kThreads, class ChunkAt>
__device__ __forceinline__ void store_ragged_rows(u8* to, i64 stride, int columns_left, int rows_left,
                                                  ChunkAt chunk_at) {
    store_ragged_words<kRows, kColumns, kThreads>(to, stride, columns_left, rows_left, chunk_at);
    store_ragged_ends<kRows, kColumns, kThreads>(to, stride, columns_left, rows_left, chunk_at);
}

// The same by whole sectors of memory, a warp per column. The bytes before and after these (32 of a whole
// tile) are one store of a byte per lane. More instructions and fewer stores of parts of sectors, which pays
// where many warps are in flight.
template <int kRows, int kColumns, int kThreads, class ChunkAt>
__device__ __forceinline__ void store_ragged_rows_by_sectors(u8* to, i64 stride, int columns_left,
                                                             int rows_left, ChunkAt chunk_at) {
    constexpr int kChunks = kRows / 8, kStep = kThreads / 32, kInFlight = 4;
    static_assert(kChunks == 32, "a chunk for every lane");
    static_assert(kColumns % (kInFlight * kStep) == 0, "columns of the tile, whether they exist or not");
    const auto until_sector = [](const u8* row) { return (int)(-reinterpret_cast<u64>(row) & kSector - 1); };
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int column = threadIdx.x / 32; column < columns_left; column += kInFlight * kStep) {
        u8* const first = to + column * stride;
        uint2 low[kInFlight], high[kInFlight];
        u8* row = first;
#pragma unroll
        for (int u = 0; u < kInFlight; u++, row += kStep * stride) {
            const int from = lane + until_sector(row) / 8;          // no byte past the last chunk is used
            low[u] = chunk_at(column + u * kStep, from % kChunks),
            high[u] = chunk_at(column + u * kStep, (from + 1) % kChunks);
        }
        row = first;
#pragma unroll
        for (int u = 0; u < kInFlight; u++, row += kStep * stride) {
            const bool exists = column + u * kStep < columns_left;
            const int before = until_sector(row), at = before + 8 * lane;
            if (exists && at + 8 <= before + (rows_left - before & -kSector))
                *reinterpret_cast<uint2*>(row + at) = bytes_of_two(low[u], high[u], before % 8);
            const int head = smaller(before, rows_left);
            const int ends = exists ? head + (rows_left - head) % kSector : 0;
            const auto store_byte = [&](int i) {
                const int r = i < head ? i : rows_left - ends + i, owner = r / 8 - before / 8;
                const uint2 bytes = {__shfl_sync(~0u, low[u].x, owner), __shfl_sync(~0u, low[u].y, owner)};
                if (i < ends) row[r] = byte_of(bytes, r);
            };
            store_byte(lane);
            if (ends > 32) store_byte(thread_again() % 32 + 32);
        }
    }
}

template <int kTileRows, int kTileColumns>
struct ByteTile {
    static constexpr int kRows = kTileRows, kColumns = kTileColumns;
    static constexpr int kRowPatches = kRows / 8, kColumnPatches = kColumns / 8;
    static constexpr int kThreads = kRowPatches * kColumnPatches;
    static_assert(kRowPatches >= 16 && kColumnPatches >= 16,
                  "the swizzle is free of bank conflicts from 128 on");
    static_assert((kRows & (kRows - 1)) == 0 && kThreads <= 1024, "powers of two, one thread per patch");

    // kRows * kColumns bytes of shared memory, 16-byte aligned.
    u8* shared;

    // Position of this thread's patch in the source tile: neighbouring threads take neighbouring columns.
    static __device__ __forceinline__ int row_patch() { return threadIdx.x / kColumnPatches; }
    static __device__ __forceinline__ int column_patch() { return threadIdx.x % kColumnPatches; }
    static __device__ __forceinline__ int patch_row() { return row_patch() * 8; }
    static __device__ __forceinline__ int patch_column() { return column_patch() * 8; }

    // Loads the patch whose first element is at `from`; zeros where only rows_left and columns_left of 8
    // exist. vector: every row allows chunked access. columns: a reference, since by value the compiler
    // multiplies anew for every row.
    template <class F>
    static __device__ __forceinline__ void load_patch(Chunk<F, 8> (&patch)[8],
                                                      const typename F::storage* from, const i64& columns,
                                                      int rows_left, int columns_left, bool vector) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const int left = r < rows_left ? columns_left : 0;
            if (!vector) patch[r] = Chunk<F, 8>::load_partial(from + r * columns, left);
            else if (left > 0) patch[r] = Chunk<F, 8>::load(from + r * columns);
            else patch[r] = {};
        }
    }
    // Writes this thread's patch. rows[r]: the eight bytes of source row patch_row() + r. Call
    // __syncthreads() before read().
    template <class F>
    __device__ __forceinline__ void write_patch(const Chunk<F, 8> (&rows)[8]) const {
        static_assert(sizeof(typename F::storage) == 1, "a tile of bytes");
        u8* to = shared + column_patch() * 8 * kRows + swizzle(row_patch(), column_patch()) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 top[4], bottom[4];
            transpose_4x4(rows[0].word[half], rows[1].word[half], rows[2].word[half], rows[3].word[half],
                          top);
            transpose_4x4(rows[4].word[half], rows[5].word[half], rows[6].word[half], rows[7].word[half],
                          bottom);
#pragma unroll
            for (int k = 0; k < 4; k++)
                *reinterpret_cast<uint2*>(to + (half * 4 + k) * kRows) = make_uint2(top[k], bottom[k]);
        }
    }
    // Transposed rows are read back in units of kBytes (4, 8 or 16), neighbouring threads reading
    // neighbouring units of a row. A thread reads kUnits<kBytes> of them: unit i holds source rows row() to
    // row() + kBytes - 1 of source column column(i).
    template <int kBytes> static constexpr int kUnits = kRows * kColumns / kBytes / kThreads;
    template <int kBytes>
    static __device__ __forceinline__ int column(int unit) {
        return (unit * kThreads + threadIdx.x) / (kRows / kBytes);
    }
    template <int kBytes>
    static __device__ __forceinline__ int row() { return threadIdx.x % (kRows / kBytes) * kBytes; }
    template <class F, int kBytes>
    __device__ __forceinline__ Chunk<F, kBytes> read(int unit) const {
        const int at = row<kBytes>(), chunk = swizzle(at / 8, column<kBytes>(unit) / 8);
        const u8* const row_t = shared + column<kBytes>(unit) * kRows;
        if constexpr (kBytes < 16) return Chunk<F, kBytes>::load_shared(row_t + chunk * 8 + at % 8);
        else {
            const Chunk<F, 16> c = Chunk<F, 16>::load_shared(row_t + chunk / 2 * 16);
            return chunk & 1 ? Chunk<F, 16>{{c.word[2], c.word[3], c.word[0], c.word[1]}} : c;
        }
    }
    // Stores the tile's transposed rows by store_ragged_rows() or, with kBySectors,
    // store_ragged_rows_by_sectors().
    template <bool kBySectors = false>
    __device__ __forceinline__ void store_ragged(u8* to, i64 stride, int columns_left, int rows_left) const {
        const auto chunks = [&](int column, int row_patch) { return chunk_at(column, row_patch); };
        if constexpr (kBySectors)
            store_ragged_rows_by_sectors<kRows, kColumns, kThreads>(to, stride, columns_left, rows_left,
                                                                    chunks);
        else store_ragged_rows<kRows, kColumns, kThreads>(to, stride, columns_left, rows_left, chunks);
    }

    // Returns source rows 8 * row_patch and on of a source column.
    __device__ __forceinline__ uint2 chunk_at(int column, int row_patch) const {
        return *reinterpret_cast<const uint2*>(shared + column * kRows + swizzle(row_patch, column / 8) * 8);
    }
    // Address of a single byte, by its source row and column.
    __device__ __forceinline__ u8* byte_at(int row, int column) const {
        return shared + column * kRows + swizzle(row / 8, column / 8) * 8 + row % 8;
    }

private:
    // Place, within its transposed row, of the 8-byte chunk of source rows 8 * row_patch and on.
    static __device__ __forceinline__ int swizzle(int row_patch, int column_patch) {
        return row_patch ^ column_patch % kRowPatches;
    }
};

// Position of the block-th thread block in a batch of [rows, columns] matrices, one matrix after the other:
// along rows of tiles, or down columns of tiles (kDownFirst), so that neighbouring thread blocks write
// neighbouring parts of the transposed rows.
struct TilePosition {
    i64 matrix, row, column;

    template <class Tile, bool kDownFirst>
    static __device__ __forceinline__ TilePosition of_block(i64 block, i64 rows, i64 columns) {
        const i64 across = (columns + Tile::kColumns - 1) / Tile::kColumns;
        const i64 down = (rows + Tile::kRows - 1) / Tile::kRows;
        // a strip: a row of tiles, or with kDownFirst a column of tiles
        const i64 per_strip = kDownFirst ? down : across, strips = kDownFirst ? across : down;
        const i64 strip = block / per_strip, in_strip = block - strip * per_strip;
        const i64 matrix = strip / strips, in_matrix = strip - matrix * strips;
        return {matrix, (kDownFirst ? in_strip : in_matrix) * Tile::kRows,
                (kDownFirst ? in_matrix : in_strip) * Tile::kColumns};
    }
};
