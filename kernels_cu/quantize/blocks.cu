// Quantisation in blocks of 32, 64 or 128 elements, or of 128 x 128, with f32 scales (docs/numerics.md,
// section 3).
//
//   factor, scale_inv = of max |x| over the block (scale/block_scale.cuh)    data = narrow(fl(x * factor))
//
// Names refer to memory: x is [batch, rows, columns], columns fastest. Blocks lie along rows or along columns
// of memory; the caller knows which of these are row-wise. Data are stored in the order of x, or transposed:
// [batch, columns, rows].
//
// quantize_block_tile   A warp has a tile of 32 x 128 elements in registers (tile/warp_tile.cuh), a thread
//                       block WARP_TILES_DOWN x WARP_TILES_ACROSS of them. A row's scale is found inside a
//                       warp, a column's and a square's through shared memory, by one thread per scale. No
//                       scale is computed twice.
// group_quantize_block  The same for groups of rows, each a matrix of its own, or for a list of arrays. The
//                       sizes of groups are on the device. No tile has rows of two groups. Data stay where
//                       their rows are in x; each group's transposed data are [columns, m], and its scales
//                       follow those of the group before. What follows the last group is written 0. The first
//                       thread block writes offsets where none are given. With `align`, groups are padded
//                       with rows of zeros, which are quantised like the others, and the first thread block
//                       also writes the aligned sizes.
//
// Defines, each for programs whose speed it decides:
//   ALIGNED     1: all rows allow the wide accesses of a warp tile, no element is divided, and the defines
//               below hold. 0: one program for any array, controlled by the struct's `stored`, `square`,
//               `vector` and `divide` (profile vllm, three instructions per element).
//   ALONG_ROWS, ALONG_COLUMNS
//               how the data of blocks along rows and along columns are stored: 0 not at all, 1 in the order
//               of x, 2 transposed. For squares ALONG_ROWS 1 means data in the order of x, ALONG_COLUMNS 2
//               transposed data.
//   SQUARE      1: blocks are 128 x 128.
//   TILES_PER_BLOCK
//               tiles of a group per thread block, one below the other: more than one where ALONG_COLUMNS is
//               2, so that few sectors of transposed data are written in parts (tile/column_segment.cuh).
//   DOWN_FIRST  the order of tiles (tile/tile.cuh).
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; profiles, lengths of blocks and scale layouts are run-time
// values. Bytes moved per element: sizeof(IN), and 1 + 4 / block per direction. Padding of scales is written
// 0.
#include "scale/block_write.cuh"
#include "groups/quantize_group.cuh"
#include "tile/column_segment.cuh"

constexpr bool kAlongRows = !ALIGNED || (ALONG_ROWS && !SQUARE);
constexpr bool kAlongColumns = !ALIGNED || ALONG_COLUMNS || SQUARE;
static_assert(!kAlongColumns || WARP_TILES_DOWN % 4 == 0, "a block of 128 rows is four warp tiles");
// On an H200 an SM keeps 512 threads with 16-bit inputs in flight, 256 with f32. On sm_120, and for groups
// with CUDA 12, the compiler spills at the registers of 512 threads.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ >= 1200 || defined(ENTRY_group_quantize_block) && __CUDACC_VER_MAJOR__ < 13)
constexpr int kMostThreadsInFlight = 256;
#else
constexpr int kMostThreadsInFlight = sizeof(IN::storage) == 2 ? 512 : 256;
#endif
constexpr int kThreadsInFlight = ALIGNED ? kMostThreadsInFlight : Tile::kThreads;
constexpr int kBlocks = kThreadsInFlight > Tile::kThreads ? kThreadsInFlight / Tile::kThreads : 1;
constexpr int kWarps = Tile::kThreads / 32;
#ifdef ENTRY_group_quantize_block
constexpr int kTilesPerBlock = TILES_PER_BLOCK;
#else
constexpr int kTilesPerBlock = 1;
#endif
static_assert(kTilesPerBlock == 1 || (ALIGNED && ALONG_COLUMNS == 2),
              "several tiles share the ends of transposed columns");

// Returns true if elements are divided by scale_inv instead of multiplied by the factor.
__device__ __forceinline__ bool divides(const BlockParams& p) { return !ALIGNED && p.divide; }
__device__ __forceinline__ float operand(const BlockParams& p, const BlockScale& s) {
    return divides(p) ? s.scale_inv : s.factor;
}

// Computes the scales of the warp tile's rows, by one warp. reduced: receives the operands for write_quad,
// one subblock of columns after the other; inverses: receives scale_inv, from which store_row_scales() stores
// those of several warp tiles at a time. Adjacent scales of neighbouring rows are stored here, 32 together.
// Returns true if all divisors of this lane's row have quick quotients.
__device__ __forceinline__ bool find_row_scales(WarpTileAmax<IN, false>& amax, const BlockParams& p,
                                                const TilePosition& at, float* reduced, float* inverses) {
    const int lane = threadIdx.x % 32;
    u32 largest[4];
    amax.template reduce_rows<32 / kSubblocks>(largest);
    *reinterpret_cast<uint4*>(reduced + lane / 8 * kSubblockStride + lane % 8 * 4) =
        make_uint4(largest[0], largest[1], largest[2], largest[3]);
    __syncwarp();
    const int subblocks = (int)p.subblocks_per_block, blocks = kSubblocks / subblocks;
    const i64 row = at.row + Tile::row() + lane;
    const i64 first = (at.column + Tile::column()) / kWarpTileColumns * blocks;
    bool quick = true;
#pragma unroll 1
    for (int b = 0; b < blocks; b++) {                               // one row per lane
        u32 bits = 0;
        for (int subblock = b * subblocks; subblock < (b + 1) * subblocks; subblock++)
            bits = larger(bits, as_bits(reduced[subblock * kSubblockStride + lane]));
        const BlockScale s = p.rule.of(bits);
        const float stored = row < p.rows ? s.scale_inv : 0.0f;
        inverses[b * kSubblockStride + lane] = stored;
        if (p.along_rows.to && p.along_rows.row == 1 && p.along_rows.has(row, first + b))
            *p.along_rows.at(at.matrix, row, first + b) = stored;
        // One copy of the factor per subblock of the block, so that readers index by subblock. Only this lane
        // owns the row, so there is no race.
        for (int subblock = b * subblocks; subblock < (b + 1) * subblocks; subblock++)
            reduced[subblock * kSubblockStride + lane] = s.factor;
        quick &= row >= p.rows || has_quick_quotients(s.scale_inv);
    }
    __syncwarp();
    return quick;
}

// Stores adjacent scales of neighbouring blocks of a row: for every row those of the whole tile's width.
__device__ __forceinline__ void store_row_scales(const BlockParams& p, const TilePosition& at,
                                                 const float* inverses) {
    const int blocks = kSubblocks / (int)p.subblocks_per_block, across = blocks * WARP_TILES_ACROSS;
    const i64 first = at.column / kWarpTileColumns * blocks;
#pragma unroll 1
    for (int i = threadIdx.x; i < Tile::kRows * across; i += Tile::kThreads) {
        const int r = i / across, b = i % across, warp = b / blocks * WARP_TILES_DOWN + r / kWarpTileRows;
        if (p.along_rows.has(at.row + r, first + b))
            *p.along_rows.at(at.matrix, at.row + r, first + b) =
                inverses[warp * kRowWords + b % blocks * kSubblockStride + r % kWarpTileRows];
    }
}

// Computes the operands of this lane's columns. amaxes: shared memory, a word per column of every warp tile.
__device__ __forceinline__ void find_column_scales(const WarpTileAmax<IN, false>& amax, const BlockParams& p,
                                                   const TilePosition& at, u32* amaxes,
                                                   float (&columns)[kLaneColumns]) {
    u32 bits[kLaneColumns];
    amax.of_columns(bits);
    const int subblocks = (int)p.subblocks_per_block, down = Tile::row() / kWarpTileRows;
    *reinterpret_cast<uint4*>(amaxes + down * Tile::kColumns + Tile::column()) =
        make_uint4(bits[0], bits[1], bits[2], bits[3]);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < WARP_TILES_DOWN / subblocks * Tile::kColumns; i += Tile::kThreads) {
        const int block = i / Tile::kColumns, column = i % Tile::kColumns;
        u32* of_block = amaxes + block * subblocks * Tile::kColumns + column;
        u32 largest = 0;
        for (int b = 0; b < subblocks; b++) largest = larger(largest, of_block[b * Tile::kColumns]);
        const BlockScale s = p.rule.of(largest);
        *of_block = as_bits(operand(p, s));
        const i64 r = at.row / (subblocks * kWarpTileRows) + block, c = at.column + column;
        if (p.along_columns.to && p.along_columns.has(r, c))
            *p.along_columns.at(at.matrix, r, c) = c < p.columns ? s.scale_inv : 0.0f;
    }
    __syncthreads();
    const uint4 four = *reinterpret_cast<const uint4*>(amaxes + down / subblocks * subblocks * Tile::kColumns
                                                       + Tile::column());
    columns[0] = as_float(four.x), columns[1] = as_float(four.y);
    columns[2] = as_float(four.z), columns[3] = as_float(four.w);
}

// Stores the scale of block (r, c) of a matrix. The last block of a row or column also stores the zeros of
// the padding after it.
__device__ __forceinline__ void store_square_scale(const ScaleGrid& to, const BlockParams& p, i64 m, i64 r,
                                                   i64 c, float scale_inv) {
    const i64 rows = (p.rows + 127) / 128, columns = (p.columns + 127) / 128;
    if (!to.to || r >= rows || c >= columns) return;
    *to.at(m, r, c) = scale_inv;
    if (r + 1 == rows)
        for (i64 i = rows; i < to.rows; i++) *to.at(m, i, c) = 0.0f;
    if (c + 1 == columns)
        for (i64 i = columns; i < to.columns; i++) *to.at(m, r, i) = 0.0f;
}

// Returns the operand of this warp's square: four warp tiles one below the other. amaxes: shared memory, a
// word per warp.
__device__ __forceinline__ float find_square_scale(const WarpTileAmax<IN, false>& amax, const BlockParams& p,
                                                   const TilePosition& at, u32* amaxes) {
    u32 bits[kLaneColumns], largest = 0;
    amax.of_columns(bits);
#pragma unroll
    for (const u32 b : bits) largest = larger(largest, b);
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) amaxes[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) largest = larger(largest, amaxes[threadIdx.x / 128 * 4 + w]);
    const BlockScale s = p.rule.of(largest);
    if (threadIdx.x % 128 == 0) {
        const i64 r = (at.row + Tile::row()) / 128, c = (at.column + Tile::column()) / 128;
        store_square_scale(p.along_rows, p, at.matrix, r, c, s.scale_inv);
        store_square_scale(p.along_columns, p, at.matrix, r, c, s.scale_inv);
    }
    return operand(p, s);
}

// Storage of the data of blocks along rows and along columns: 0 none, 1 in the order of x, 2 transposed.
// square: `along_rows` stands for data in the order of x, `along_columns` for transposed data.
struct Stored {
    int along_rows, along_columns;
    bool square;

    static __device__ __forceinline__ Stored of(const BlockParams& p) {
        if (ALIGNED) return {ALONG_ROWS, ALONG_COLUMNS, SQUARE != 0};
        return {(int)(p.stored & 3), (int)(p.stored >> 2), p.square != 0};
    }
    __device__ __forceinline__ bool rows_transposed() const { return !square && along_rows == 2; }
};

// Shared memory of a tile.
struct TileMemory {
    Tile of_rows, of_columns;    // transposed data of blocks along rows, and along columns
    float *reduced, *inverses;   // a word per row of every warp tile (find_row_scales)
    u32* amaxes;                 // a word per column of every warp tile
    u8* column_ends;             // ends of transposed columns (ColumnSegment)

    __device__ __forceinline__ TileMemory(u8* shared, const Stored& stored)
        : of_rows{shared}, of_columns{stored.rows_transposed() ? shared + Tile::kBytes : shared} {
        u8* const words = stored.along_columns == 2 ? of_columns.shared + Tile::kBytes : of_columns.shared;
        reduced = reinterpret_cast<float*>(words);
        inverses = reduced + kWarps * kRowWords;
        amaxes = reinterpret_cast<u32*>(kAlongRows ? inverses + kWarps * kRowWords : reduced);
        column_ends =
            reinterpret_cast<u8*>(kAlongColumns ? amaxes + WARP_TILES_DOWN * Tile::kColumns : amaxes);
    }
};

// Operands of a warp tile. quick: all divisors of this lane have quick quotients.
struct Operands {
    RowOperands rows;
    ColumnOperands columns;
    bool quick;
};

// Computes the scales of a tile, stores those that are not stored together at the end, and returns the
// operands. Call from all threads.
__device__ __forceinline__ Operands find_operands(const BlockParams& p, const TilePosition& at,
                                                  const WarpTile<IN>& warp_tile, int columns_left,
                                                  const Stored& stored, const TileMemory& memory) {
    WarpTileAmax<IN, false> amax;
    amax.template find<kAlongRows, kAlongColumns>(warp_tile);
    const int warp = threadIdx.x / 32, subblock = threadIdx.x % 32 / (32 / kSubblocks);
    float* const reduced = memory.reduced + warp * kRowWords;
    float* const inverses = memory.inverses + warp * kRowWords;
    float of_columns[kLaneColumns] = {};
    bool quick = true;
    if (stored.square) {
        const float all = find_square_scale(amax, p, at, memory.amaxes);
#pragma unroll
        for (float& c : of_columns) c = all;
    } else {
        if constexpr (kAlongRows)
            quick = find_row_scales(amax, p, at, reduced, inverses) || !stored.along_rows;
        if constexpr (kAlongColumns) find_column_scales(amax, p, at, memory.amaxes, of_columns);
    }
    const RowOperands rows{reduced + subblock * kSubblockStride,
                           inverses + subblock / (int)p.subblocks_per_block * kSubblockStride};
    ColumnOperands columns;
    const bool has_columns = stored.square || stored.along_columns;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        columns.factor[c] = columns.divisor[c] = of_columns[c];
        if (kAlongColumns && divides(p)) {
            columns.factor[c] = div_rn(1.0f, of_columns[c]);
            quick &= !has_columns || c >= columns_left || has_quick_quotients(of_columns[c]);
        }
    }
    return {rows, columns, quick};
}

// Writes a warp tile by multiplications, or by divisions with quick quotients.
template <How kHow>
__device__ __forceinline__ void write_warp_tile(const BlockWriter& writer, const Destinations& to) {
    constexpr bool kWide = ALIGNED != 0;
    const auto by = writer.by<kHow>();
    if constexpr (kHow == kMultiply && kWide && ALONG_COLUMNS == 2 && !(SQUARE && ALONG_ROWS)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            by.template write_half<true, kWide>(to.of_rows, half);
            writer.write_half_of_columns(to.of_columns.tile, half);
        }
    } else {
        by.template write_known<kWide>(to);
    }
}

// Position of a tile among the tiles of a thread block, one below the other.
struct PositionInSegment {
    int rows_before;
    bool last;
};

// Stores what all warps have left in shared memory: adjacent scales, and transposed data. kVectorStores: see
// quantize_tile.
template <bool kVectorStores>
__device__ __forceinline__ void store_tile(const BlockParams& p, const TilePosition& at, const Stored& stored,
                                           const TileMemory& memory, const PositionInSegment& in_segment) {
    const bool blocks_adjoin = kAlongRows && !stored.square && p.along_rows.to && p.along_rows.row != 1;
    if (stored.rows_transposed() || stored.along_columns == 2 || blocks_adjoin) __syncthreads();
    if constexpr (kAlongRows)
        if (blocks_adjoin) store_row_scales(p, at, memory.inverses);
    const int columns_of_tile = left_of(p.columns - at.column, Tile::kColumns);
    const int rows_of_tile = left_of(p.rows - at.row, Tile::kRows);
    const i64 place_t = at.matrix * p.rows * p.columns + at.column * p.rows + at.row;
    if (stored.rows_transposed())
        memory.of_rows.template store<kVectorStores>(as_global(p.rows_data) + place_t, p.rows,
                                                     columns_of_tile, rows_of_tile, p.vector & 2);
    if (stored.along_columns != 2) return;
    u8* const to = as_global(p.columns_data) + place_t;
    const bool vector = p.vector & 4, single = in_segment.rows_before == 0 && in_segment.last;
    if constexpr (kTilesPerBlock == 1)
        memory.of_columns.template store<kVectorStores>(to, p.rows, columns_of_tile, rows_of_tile, vector);
    else if (vector && (single || (reinterpret_cast<u64>(to) | (u64)p.rows) % kSector == 0))
        memory.of_columns.template store<true>(to, p.rows, columns_of_tile, rows_of_tile, true);
    else
        ColumnSegment<Tile>{memory.of_columns, memory.column_ends}.store(
            to, p.rows, columns_of_tile, rows_of_tile, in_segment.rows_before, in_segment.last);
}

// Quantises one tile of a matrix. x has all its rows or, with kPads, the first `given`; the other rows are
// zeros. kVectorStores: transposed rows allow stores of 16 bytes wherever the tile is whole; otherwise
// `vector` decides.
template <bool kVectorStores, bool kPads>
__device__ __forceinline__ void quantize_tile(const BlockParams& p, const TilePosition& at, i64 given,
                                              u8* shared, const PositionInSegment& in_segment) {
    const Stored stored = Stored::of(p);
    const TileMemory memory(shared, stored);
    const i64 row = at.row + Tile::row(), column = at.column + Tile::column();
    const int rows_left = left_of(p.rows - row, kWarpTileRows);
    int columns_left = left_of(p.columns - column, kLaneColumns);
    if (ALIGNED && columns_left) columns_left = kLaneColumns;
    const WarpTilePosition position{at.matrix * p.rows * p.columns + row * p.columns + column, rows_left,
                              columns_left};
    int given_left = rows_left;
    if constexpr (kPads) given_left = left_of(given - row, kWarpTileRows);

    WarpTile<IN> warp_tile;
    warp_tile.template load<ALIGNED != 0>(p.x + position.at, p.columns, given_left, columns_left,
                                          p.vector & 1);
    const Operands operands = find_operands(p, at, warp_tile, columns_left, stored, memory);
    const BlockWriter writer{p, warp_tile, position, operands.rows, operands.columns};
    u8 *const rows_data = as_global(p.rows_data), *const columns_data = as_global(p.columns_data);
    const bool wide_rows = p.vector & 2, wide_columns = p.vector & 4;
    // A square has operands of columns, for both destinations.
    const Destinations to = stored.square ?
        Destinations{Destination::of(0, rows_data, wide_rows, memory.of_rows),
                     {stored.along_rows == 1, stored.along_columns == 2, rows_data, wide_rows,
                      memory.of_columns}} :
        Destinations{Destination::of(stored.along_rows, rows_data, wide_rows, memory.of_rows),
                     Destination::of(stored.along_columns, columns_data, wide_columns, memory.of_columns)};
    if (!divides(p)) write_warp_tile<kMultiply>(writer, to);
    else if (__all_sync(~0u, operands.quick)) write_warp_tile<kDivideQuickly>(writer, to);
    else writer.divide(to, given_left);
    store_tile<kVectorStores>(p, at, stored, memory, in_segment);
}

#ifdef ENTRY_quantize_block_tile
extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
quantize_block_tile(const __grid_constant__ BlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.rows, p.columns);
    quantize_tile<ALIGNED != 0, false>(p, at, p.rows, shared, {0, true});
}
#endif

#ifdef ENTRY_group_quantize_block
struct GroupBlockParams {
    BlockParams all;             // rows: unused
    RowGroups groups;
    GroupScales along_rows, along_columns;
    ArrayList<BlockParams> list;     // instead of groups: only noop of `all` is used
};

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
group_quantize_block(const __grid_constant__ GroupBlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ BlockParams group;                                    // its matrix
    const auto move_scales = [&](const RowSegment& found) {
        move_to_group(group.along_rows, p.along_rows, found.units_before[0], found.rows);
        move_to_group(group.along_columns, p.along_columns, found.units_before[1], found.rows);
    };
    const auto quantize = [&](const TilePosition& first, const i64& given, int tiles) {
#pragma unroll 1
        // all threads have read this tile's shared memory before the next tile overwrites it
        for (int tile = 0;; __syncthreads()) {
            const TilePosition at{0, first.row + tile * Tile::kRows, first.column};
            const PositionInSegment in_segment{tile * Tile::kRows, tile + 1 == tiles};
            quantize_tile<false, true>(group, at, given, shared, in_segment);
            if (kTilesPerBlock == 1 || ++tile == tiles) return;
        }
    };
    quantize_group<Tile, kTilesPerBlock>(p, group, move_scales, quantize);
}
#endif
