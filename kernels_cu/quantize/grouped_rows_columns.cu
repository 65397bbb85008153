// Quantisation of groups of rows with an f32 scale per row, or per column of each group; sizes are on the
// device (docs/numerics.md, sections 3 and 7).
//
//   factor, scale_inv = of max |x| over the row or column (include/scale/block_scale.cuh)
//   data = narrow(fl(x * factor)), or fl(x / scale_inv)
//
// group_quantize_rows: x [rows, columns] -> data in the order of x, scale_inv per row; x is read once.
//     A thread block takes a segment of 32 rows of a group or, of rows of more than kColumns elements, its
//     share of them. `team` threads have a row, as few as hold it in registers while the next row is being
//     loaded; what does not fit is read again, from the L1 or L2.
// group_quantize_whole_vectors: every other choice: data in the order of x or transposed (per group
//     [columns, m]), scales of rows, columns or both. Two launches: `phase` 0 raises the maxima of rows and
//     columns in a workspace, phase 1 quantises all from one read. A thread block takes 8 warp tiles, 256 x
//     128 elements (include/tile/warp_tile.cuh). Columns: scale_inv [groups, columns, padded], also for a
//     group without rows; the thread blocks of phase 1 share that work. The workspace is zero before phase 0:
//     group_find_segments, which finds the segments of both, clears it.
// What follows the last group is written 0; offsets and aligned sizes as in row_groups.cuh. Elements are
// divided by scale_inv if the struct's `divide` is set. Any shape and address; rows of x that are whole
// chunks of 16 bytes are read in chunks.
// IN, OUT                     {bf16, f16, f32}, {e4m3fn, e5m2}: formats of x and data.
// WARP_TILES_DOWN, WARP_TILES_ACROSS  warp tiles per thread block of the second kernel: always 8, 1.
// Profiles and scale layouts are run-time values. Bytes moved per element: rows alone sizeof(IN) + 1;
// otherwise 2 * sizeof(IN) + 1 for each direction.
#include "groups/quantize_group.cuh"
#include "scale/block_write.cuh"

struct GroupVectorsParams {
    BlockParams all;             // rows, subblocks_per_block, square: unused
    RowGroups groups;            // rows alone: `across` thread blocks share a segment
    GroupScales along_rows, along_columns;      // along_columns: unused, and all 0
    u32* row_amaxes;             // [result rows] amaxes as f32 bits; or null
    u32* column_amaxes;          // [groups, columns], or null
    u32 phase;                   // of group_quantize_whole_vectors
    u32 team;                    // of group_quantize_rows: threads per row, 32 to 256
};

#ifdef ENTRY_group_quantize_whole_vectors
// 512 threads per SM with 16-bit warp tiles, 256 with f32, as in blocks.cu; also 256 where the compiler
// spills at the registers of 512.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1200 || __CUDACC_VER_MAJOR__ < 13)
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 ? 2 : 1;
#endif
static_assert(Tile::kThreads >= Tile::kRows && Tile::kThreads >= Tile::kColumns,
              "a thread for every row and every column of a tile");

__device__ __forceinline__ void raise_amax_bits(u32* amax, u32 bits) {
    if (load_relaxed(amax) < bits) atomicMax(amax, bits);
}

// Raises the maxima of a warp tile's rows and columns. first_row, first_column: indices of the group's first
// row and column in the workspace.
__device__ __forceinline__ void raise_amaxes(const GroupVectorsParams& p, const WarpTile<IN>& warp_tile,
                                             const TilePosition& at, i64 first_row, i64 first_column,
                                             u32* words) {
    WarpTileAmax<IN, false> amax;
    if (p.row_amaxes) {
        amax.template find<true, false>(warp_tile);
        u32 largest[1];
        amax.template reduce_rows<32>(largest);  // amax of this lane's row, 0 if there is none
        const i64 row = at.row + Tile::row() + threadIdx.x % 32;
        if (largest[0]) raise_amax_bits(as_global(p.row_amaxes) + first_row + row, largest[0]);
    }
    if (!p.column_amaxes) return;
    amax.template find<false, true>(warp_tile);
    u32 bits[kLaneColumns];
    amax.of_columns(bits);
    *reinterpret_cast<uint4*>(words + Tile::row() / kWarpTileRows * Tile::kColumns + Tile::column()) =
        make_uint4(bits[0], bits[1], bits[2], bits[3]);
    __syncthreads();
    if (threadIdx.x >= Tile::kColumns) return;
    u32 largest = 0;
    for (int down = 0; down < WARP_TILES_DOWN; down++)
        largest = larger(largest, words[down * Tile::kColumns + threadIdx.x]);
    if (largest)
        raise_amax_bits(as_global(p.column_amaxes) + first_column + at.column + threadIdx.x, largest);
}

// Stores the scales of the columns of all groups. Call from all thread blocks.
__device__ __forceinline__ void store_column_scales(const GroupVectorsParams& p) {
    const ScaleGrid& to = p.all.along_columns;
    if (!to.to) return;
    const i64 all = p.groups.splits.groups * to.columns;
    const i64 threads = (i64)gridDim.x * Tile::kThreads;
    for (i64 i = (i64)blockIdx.x * Tile::kThreads + threadIdx.x; i < all; i += threads) {
        const i64 group = i / to.columns, column = i - group * to.columns;
        const u32* const amax = p.column_amaxes + group * p.all.columns + column;
        to.to[i] = column < p.all.columns ? p.all.rule.of(load_read_only(amax)).scale_inv : 0.0f;
    }
}

// Shared memory: factors and divisors of a tile's rows, then those of its columns.
struct TileFactors {
    float *of_rows, *of_columns;

    explicit __device__ __forceinline__ TileFactors(u8* shared)
        : of_rows(reinterpret_cast<float*>(shared)), of_columns(of_rows + 2 * Tile::kRows) {}

    // Computes them from the maxima, and stores the scales of rows. Call from all threads, before a barrier.
    __device__ __forceinline__ void find(const GroupVectorsParams& p, const BlockParams& group,
                                         const TilePosition& at, i64 first_row, i64 first_column) const {
        if (p.row_amaxes && threadIdx.x < Tile::kRows) {
            const i64 r = at.row + threadIdx.x;
            const bool exists = r < group.rows;
            const BlockScale s = p.all.rule.of(exists ? load_read_only(p.row_amaxes + first_row + r) : 0);
            if (at.column == 0 && group.along_rows.has(r, 0))
                *group.along_rows.at(0, r, 0) = exists ? s.scale_inv : 0.0f;
            of_rows[threadIdx.x] = s.factor, of_rows[Tile::kRows + threadIdx.x] = s.scale_inv;
        }
        if (p.column_amaxes && threadIdx.x < Tile::kColumns) {
            const i64 c = at.column + threadIdx.x;
            const bool exists = c < group.columns;
            const u32 amax = exists ? load_read_only(p.column_amaxes + first_column + c) : 0;
            const BlockScale s = p.all.rule.of(amax);
            of_columns[threadIdx.x] = s.factor, of_columns[Tile::kColumns + threadIdx.x] = s.scale_inv;
        }
    }
};

// Writes the data of a warp tile from the factors of its tile. Returns true if part of them are in `tile`.
__device__ __forceinline__ bool write_warp_tile(const BlockParams& group, const WarpTile<IN>& warp_tile,
                                                const WarpTilePosition& position, int given_left,
                                                const TileFactors& factors, const Tile& tile) {
    const float *const of_rows = factors.of_rows, *const of_columns = factors.of_columns;
    const RowOperands rows{of_rows + Tile::row(), of_rows + Tile::kRows + Tile::row()};
    const int along_rows = group.stored & 3, along_columns = group.stored >> 2;
    bool quick = !along_rows || (int)(threadIdx.x % 32) >= position.rows_left ||
                 has_quick_quotients(rows.divisors[threadIdx.x % 32]);
    ColumnOperands columns;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        columns.factor[c] = along_columns ? of_columns[Tile::column() + c] : 0.0f;
        columns.divisor[c] = along_columns ? of_columns[Tile::kColumns + Tile::column() + c] : 0.0f;
        quick &= !along_columns || c >= position.columns_left || has_quick_quotients(columns.divisor[c]);
    }
    const bool wide_rows = group.vector & 2, wide_columns = group.vector & 4;
    const Destinations to{
        Destination::of(along_rows, as_global(group.rows_data), wide_rows, tile),
        Destination::of(along_columns, as_global(group.columns_data), wide_columns, tile)};
    const BlockWriter writer{group, warp_tile, position, rows, columns};
    const bool wide = (along_rows != 1 || wide_rows) && (along_columns != 1 || wide_columns);
    if (!group.divide && wide) writer.by<kMultiply>().write<true>(to);
    else if (!group.divide) writer.by<kMultiply>().write<false>(to);
    else if (__all_sync(~0u, quick)) writer.by<kDivideQuickly>().write<false>(to);
    else writer.divide(to, given_left);
    return along_rows == 2 || along_columns == 2;
}

// Stores a tile's transposed data, those of rows or those of columns.
__device__ __forceinline__ void store_tile(const BlockParams& group, const TilePosition& at,
                                           const Tile& tile) {
    const bool of_rows = (group.stored & 3) == 2;
    const int columns_of_tile = left_of(group.columns - at.column, Tile::kColumns);
    const int rows_of_tile = left_of(group.rows - at.row, Tile::kRows);
    u8* const data_t = as_global(of_rows ? group.rows_data : group.columns_data);
    tile.template store<false>(data_t + at.column * group.rows + at.row, group.rows, columns_of_tile,
                               rows_of_tile, group.vector & (of_rows ? 2 : 4));
}

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
group_quantize_whole_vectors(const __grid_constant__ GroupVectorsParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ BlockParams group;                                    // its matrix
    __shared__ TilePosition at;
    __shared__ RowSegment found;
    __shared__ i64 first_row;                                        // of the group, in the results
    if (is_set(p.all.noop)) return;
    if (p.phase == 1) store_column_scales(p);
    const auto move_scales = [&](const RowSegment& segment) {
        move_to_group(group.along_rows, p.along_rows, segment.units_before[0], segment.rows);
        first_row = p.all.columns ? segment.result_start / p.all.columns : 0;
    };
    if (!find_group_tile<Tile>(p, group, at, found, move_scales)) return;
    if (group.columns == 0) return;

    const i64 row = at.row + Tile::row(), column = at.column + Tile::column();
    const i64 first_column = found.group * group.columns;
    const WarpTilePosition position{row * group.columns + column, left_of(group.rows - row, kWarpTileRows),
                              left_of(group.columns - column, kLaneColumns)};
    WarpTile<IN> warp_tile;
    const int given_left = left_of(found.rows_in_x - row, kWarpTileRows);
    warp_tile.template load<false>(group.x + position.at, group.columns, given_left, position.columns_left,
                                   group.vector & 1);
    if (p.phase == 0) {
        raise_amaxes(p, warp_tile, at, first_row, first_column, reinterpret_cast<u32*>(shared));
        return;
    }
    const Tile tile{shared};
    const TileFactors factors(shared + Tile::kBytes);
    factors.find(p, group, at, first_row, first_column);
    __syncthreads();
    if (!write_warp_tile(group, warp_tile, position, given_left, factors, tile)) return;
    __syncthreads();
    store_tile(group, at, tile);
}
#endif

#ifdef ENTRY_group_quantize_rows
// A thread block's share of a segment, which find_group_tile() treats as a tile. The same numbers in
// ops/quantize/grouped_blocks.py.
struct SegmentOfRows {
    static constexpr int kRows = 32, kColumns = 8192, kThreads = 256;
};
// kChunk elements per chunk; kChunksInRegisters chunks of a row per thread.
constexpr int kChunk = 16 / sizeof(IN::storage), kChunksInRegisters = 4;
using Source = Chunk<IN, kChunk>;
// 768 threads per SM; 512 where the compiler spills at the registers of 768.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

// Loads a chunk of x; zeros where it has no elements. vector: the chunk is whole and aligned.
__device__ __forceinline__ Source load_chunk(const IN::storage* x, int left, bool vector) {
    if (vector) return left ? Source::load(x) : Source{};
    return Source::load_partial(x, left);
}

// Writes the `left` codes of a chunk of a row; wide: by one store.
template <How kHow>
__device__ __forceinline__ void write_chunk(const Source& in, float operand, u8* to, int left, bool wide) {
    const auto out = converted<OUT>(in, [&](float v, int) {
        return kHow == kDivide ? div_rn(v, operand) : mul_rn(v, operand);
    });
    if (!wide) out.store_partial(to, left);
    else if (left) out.store(to);
}

// Chunks of a row that a thread holds, `stride` elements apart. left: existing elements of the row.
struct HeldChunks {
    Source chunk[kChunksInRegisters];

    __device__ __forceinline__ void load(const IN::storage* x, int left, int stride, bool vector) {
#pragma unroll
        for (int i = 0; i < kChunksInRegisters; i++)
            chunk[i] = load_chunk(x + i * stride, left_of(left - i * stride, kChunk), vector);
    }
    __device__ __forceinline__ void write(float factor, u8* to, int left, int stride, bool wide) const {
#pragma unroll
        for (int i = 0; i < kChunksInRegisters; i++)
            write_chunk<kMultiply>(chunk[i], factor, to + i * stride, left_of(left - i * stride, kChunk),
                                   wide);
    }
};

// Chunks of a row that are read when needed, `stride` elements apart, of `left` elements from the first one
// on; x has `given` of these: all or none.
struct ReadChunks {
    const IN::storage* x;
    u8* to;
    i64 given, left;
    int stride;
    bool vector, wide;

    // Returns the chunks after `count` elements.
    __device__ __forceinline__ ReadChunks after(i64 count) const {
        return {x + count, to + count, given - count, left - count, stride, vector, wide};
    }
    __device__ __forceinline__ void add_to(Amax<IN>& amax) const {
#pragma unroll 1
        for (i64 c = 0; c < given; c += stride)
            amax.add(load_chunk(x + c, left_of(given - c, kChunk), vector));
    }
    template <How kHow>
    __device__ __forceinline__ void write(float operand) const {
#pragma unroll 1
        for (i64 c = 0; c < left; c += stride)
            write_chunk<kHow>(load_chunk(x + c, left_of(given - c, kChunk), vector), operand, to + c,
                              left_of(left - c, kChunk), wide);
    }
};

// Returns the amax of this thread's team's row. of_warps: words for the warps of a thread block, all of which
// call it.
__device__ __forceinline__ u32 row_amax(const Amax<IN>& amax, u32* of_warps, int first_warp, int warps) {
    const u32 of_warp = __reduce_max_sync(~0u, amax.f32_bits());
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    u32 largest = 0;
    for (int w = 0; w < warps; w++) largest = larger(largest, of_warps[first_warp + w]);
    return largest;
}

// Stores the scale of row r of a group, or padding for an absent row.
__device__ __forceinline__ void store_scale(const BlockParams& group, i64 r, bool exists,
                                            const BlockScale& s) {
    if (group.along_rows.has(r, 0)) *group.along_rows.at(0, r, 0) = exists ? s.scale_inv : 0.0f;
}

// Writes a row: this thread's chunks, or those that it holds and the rest.
__device__ __forceinline__ void write_row(bool divide, const BlockScale& s, const HeldChunks& held, int left,
                                          const ReadChunks& all, const ReadChunks& rest) {
    if (divide) {                                // rare, so it reads the row again
        all.write<kDivide>(s.scale_inv);
        return;
    }
    held.write(s.factor, all.to, left, all.stride, all.wide);
    rest.write<kMultiply>(s.factor);
}

extern "C" __global__ void __launch_bounds__(SegmentOfRows::kThreads, kBlocks)
group_quantize_rows(const __grid_constant__ GroupVectorsParams p) {
    __shared__ BlockParams group;                                    // its matrix
    __shared__ TilePosition at;
    __shared__ RowSegment found;
    __shared__ u32 amaxes[2][SegmentOfRows::kThreads / 32];          // of warps; alternating between rows
    if (is_set(p.all.noop)) return;
    const auto move_scales = [&](const RowSegment& segment) {
        move_to_group(group.along_rows, p.along_rows, segment.units_before[0], segment.rows);
    };
    if (!find_group_tile<SegmentOfRows>(p, group, at, found, move_scales)) return;
    const i64 columns = p.all.columns;
    if (columns == 0) return;

    const int team = (int)p.team, across = (int)p.groups.across, teams = SegmentOfRows::kThreads / team;
    const int begin = (threadIdx.x & (team - 1)) * kChunk, stride = team * kChunk;
    const int warps = team / 32, first_warp = threadIdx.x / team * warps;
    const int left = left_of(columns - begin, kChunksInRegisters * stride);    // of the held chunks
    const bool vector = p.all.vector & 1, wide = p.all.vector & 2;
    const int given = left_of(found.rows_in_x - at.row, SegmentOfRows::kRows);
    const int rows = left_of(group.rows - at.row, SegmentOfRows::kRows);
    // stored scales of rows, padding included
    const int stored = left_of(group.along_rows.rows - at.row, SegmentOfRows::kRows);
    // The segment's rows are taken in turns by the thread blocks that share it, and their teams.
    const int first = (int)(at.column / SegmentOfRows::kColumns), step = teams * across;
    const IN::storage* const x = group.x + at.row * columns + begin;
    u8* const to = as_global(group.rows_data) + at.row * columns + begin;
    int row = first + threadIdx.x / team * across;
    HeldChunks next;
    next.load(x + row * columns, row < given ? left : 0, stride, vector);
#pragma unroll 1
    for (int begun = first, turn = 0; begun < stored; begun += step, row += step, turn ^= 1) {
        const HeldChunks held = next;
        next.load(x + (row + step) * columns, row + step < given ? left : 0, stride, vector);
        const i64 in_row = row * columns, of_row = columns - begin;
        const ReadChunks all{x + in_row, to + in_row, row < given ? of_row : 0, of_row, stride, vector, wide};
        const ReadChunks rest = all.after(kChunksInRegisters * stride);
        Amax<IN> amax;
#pragma unroll
        for (const Source& c : held.chunk) amax.add(c);
        rest.add_to(amax);
        const BlockScale s = p.all.rule.quick_of(row_amax(amax, amaxes[turn], first_warp, warps));
        if (begin == 0 && row < SegmentOfRows::kRows) store_scale(group, at.row + row, row < rows, s);
        if (row < rows) write_row(p.all.divide, s, held, left, all, rest);
    }
}
#endif
