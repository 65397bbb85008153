// MX quantisation (docs/numerics.md, section 2): blocks of 32 consecutive elements share an E8M0 scale, the
// byte e.
//
//   e = scale byte of max |x| over the block          data = narrow(fl(x * 2^(127 - e)))
//
// Names refer to memory: x is [batch, rows, columns], columns fastest. Blocks lie along rows or along columns
// of memory; the caller knows which of these are row-wise. Data are stored in the order of x, or transposed:
// [batch, columns, rows].
//
// quantize_mx_rows   Blocks along rows, data in the order of x, compact scales, columns a multiple of 32.
//                    Elementwise: a lane has 16 bytes of x, a block 4 (16-bit x) or 8 (f32) lanes, which
//                    exchange their amaxes.
// quantize_mx_tile   Anything else. A warp has a tile of 32 x 128 elements in registers (tile/warp_tile.cuh),
//                    a thread block WARP_TILES_DOWN x WARP_TILES_ACROSS of them, whose transposed data it
//                    gathers in shared memory, so that whole sectors are stored.
// group_quantize_mx  The same for groups of rows, or a list of arrays, like group_quantize_block (blocks.cu).
//
// Defines, each for programs whose speed it decides:
//   ALIGNED     1: all rows allow the wide accesses of a warp tile. 0: one program for any array, controlled
//               by the struct's `stored` (up to ALONG_ROWS and ALONG_COLUMNS) and `vector`.
//   ALONG_ROWS, ALONG_COLUMNS  storage of the data of blocks along rows and along columns: 0 none, 1 in the
//               order of x, 2 transposed.
//   DOWN_FIRST  the order of tiles (tile/tile.cuh).
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; mode, profile and scale layout are run-time values, which
// cost nothing. Bytes moved per element: sizeof(IN), and 1 + 1/32 per direction. Padding of swizzled scales
// is written 0.
#include "scale/cast.cuh"
#include "numerics/e8m0.cuh"
#include "memory/elementwise.cuh"
#include "groups/quantize_group.cuh"

struct MxParams {
    const IN::storage* x;
    const float* noop;           // one element: 1.0 = write nothing; or null
    u8 *rows_data, *columns_data;
    ScaleDestination along_rows, along_columns;
    i64 n;                       // elements of x
    i64 rows, columns;           // of each matrix
    MXScaleRule rule;
    u32 square;                  // 1: blocks are 32 x 32: one scale for both directions; stored, or
                                 // ALONG_ROWS and ALONG_COLUMNS, select how data are stored
    u32 stored;                  // tile without ALIGNED: ALONG_ROWS | ALONG_COLUMNS << 2
    u32 vector;                  // rows: x and data are aligned to their chunks. tile without ALIGNED: bit 0,
                                 // every row of x allows loads of four elements; bits 1 and 2, the data along
                                 // rows and along columns allow stores of 4 bytes (order of x) or 16 bytes
                                 // (transposed)
};

constexpr int kBlock = 32;

#ifdef ENTRY_quantize_mx_rows
constexpr int kChunk = kElementwiseChunk<IN, OUT>, kLanes = kBlock / kChunk;

// Returns the amax of this lane's chunk's block, as f32 bits.
template <bool kNan>
__device__ __forceinline__ u32 block_amax(const Chunk<IN, kChunk>& chunk) {
    Amax<IN, kNan> amax;
    amax.add(chunk);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
        amax.largest = IN::max_magnitudes<kNan>(amax.largest, __shfl_xor_sync(~0u, amax.largest, distance));
    return amax.f32_bits();
}

extern "C" __global__ void __launch_bounds__(kElementwiseThreads)
quantize_mx_rows(const __grid_constant__ MxParams p) {
    if (is_set(p.noop)) return;
    constexpr int kBlocksAtOnce = kElementwiseThreads / kLanes;             // whose scales are adjacent
    __shared__ __align__(4) u8 staged[kElementwiseUnroll * kBlocksAtOnce];
    const ElementwiseChunks<IN, OUT> in(p.x, p.n, p.vector);
    u32 e[kElementwiseUnroll];
#pragma unroll
    for (int u = 0; u < kElementwiseUnroll; u++)
        e[u] = p.rule.byte(p.rule.nan_wins() ? block_amax<true>(in.chunk[u])
                                             : block_amax<false>(in.chunk[u]));
#pragma unroll
    for (int u = 0; u < kElementwiseUnroll; u++) {
        const auto out = scale_and_narrow(in.chunk[u], inverse_e8m0(e[u]));
        if (in.whole) out.store(p.rows_data + in.at(u));
        else out.store_partial(p.rows_data + in.at(u), in.left(u));
        if (threadIdx.x % kLanes == 0) staged[u * kBlocksAtOnce + threadIdx.x / kLanes] = (u8)e[u];
    }
    // Scales are stored as whole sectors: to the L2 four bytes are as much work as 32. Rows are contiguous,
    // so all scales count as one row.
    __syncthreads();
    if (threadIdx.x >= kElementwiseUnroll * kBlocksAtOnce / 4) return;
    const i64 block = (i64)blockIdx.x * (kElementwiseUnroll * kBlocksAtOnce) + threadIdx.x * 4;
    p.along_rows.store_blocks(0, 0, block, reinterpret_cast<const u32*>(staged)[threadIdx.x], 1,
                              p.n / kBlock);
}
#endif

#if defined(ENTRY_quantize_mx_tile) || defined(ENTRY_group_quantize_mx)
#include "tile/warp_tile_write.cuh"

constexpr int kScaleBytes = Tile::kBytes / kBlock;                   // of one direction, staged
// The swizzled layout needs tiles of 128 rows and columns; smaller tiles have compact scales only.
constexpr bool kSwizzles = WARP_TILES_DOWN % 4 == 0;

constexpr int kLanes = kBlock / kLaneColumns;                        // lanes that share a block along a row
// On an H200 an SM keeps 512 threads with 16-bit warp tiles in flight, 256 with f32. On other GPUs neither
// both directions with one transposed nor groups fit the registers of 512 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#ifdef ENTRY_group_quantize_mx
constexpr bool kFits512Threads = false;
#else
constexpr bool kFits512Threads = ALONG_ROWS + ALONG_COLUMNS < 3 || ALONG_ROWS == ALONG_COLUMNS;
#endif
#else
constexpr bool kFits512Threads = true;
#endif
constexpr int kThreadsInFlight =
    ALIGNED ? sizeof(IN::storage) == 2 && kFits512Threads ? 512 : 256 : Tile::kThreads;
constexpr int kBlocks = kThreadsInFlight > Tile::kThreads ? kThreadsInFlight / Tile::kThreads : 1;

// A lane's scale bytes of a warp tile: those of the four rows whose maxima it has, and those of its four
// columns; 0 for absent rows and columns.
struct Scales {
    u32 rows = 0, columns = 0;
};

// Keeps the first `count` bytes of a word.
__device__ __forceinline__ u32 first_bytes(u32 word, int count) {
    return count >= 4 ? word : count > 0 ? word & (1u << 8 * count) - 1 : 0;
}

template <bool kNan>
__device__ __forceinline__ Scales find_scales(const WarpTile<IN>& warp_tile, const MxParams& p, int rows_left,
                                              int columns_left) {
    constexpr bool kAlongRows = !ALIGNED || ALONG_ROWS, kAlongColumns = !ALIGNED || ALONG_COLUMNS;
    WarpTileAmax<IN, kNan> amax;
    amax.template find<kAlongRows, kAlongColumns>(warp_tile);
    Scales e;
    u32 bits[4];
    if constexpr (kAlongColumns) {
        amax.of_columns(bits);
        if (p.square) {
            u32 largest = 0;
#pragma unroll
            for (const u32 b : bits) largest = larger(b, largest);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const u32 other = __shfl_xor_sync(~0u, largest, distance);
                largest = larger(other, largest);
            }
            const u32 everywhere = p.rule.byte(largest) * 0x01010101u;
            e.rows = first_bytes(everywhere, rows_left - threadIdx.x % kLanes * 4);
            e.columns = first_bytes(everywhere, columns_left);
            return e;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) e.columns |= p.rule.byte(bits[i]) << 8 * i;
    }
    if constexpr (kAlongRows) {
        amax.template reduce_rows<kLanes>(bits);
#pragma unroll
        for (int i = 0; i < 4; i++) e.rows |= p.rule.byte(bits[i]) << 8 * i;
    }
    return e;
}

// operands of a warp tile, for WarpTileWriter
struct MxOperands {
    const Scales& e;

    template <bool kAlongRows>
    struct Quad {
        float scale[kLaneColumns];

        __device__ __forceinline__ u32 codes(const float (&v)[4], int i) const {
            return narrowed<OUT>(v, [&](float each, int c) {
                return mul_rn(each, scale[kAlongRows ? i : c]);
            }).word[0];
        }
    };
    template <bool kAlongRows>
    __device__ __forceinline__ Quad<kAlongRows> quad(int n) const {
        u32 bytes = e.columns;
        if (kAlongRows) bytes = __shfl_sync(~0u, e.rows, threadIdx.x % 32 / kLanes * kLanes + n);
        Quad<kAlongRows> four;
#pragma unroll
        for (int c = 0; c < kLaneColumns; c++) four.scale[c] = inverse_e8m0(bytes >> 8 * c & 0xffu);
        return four;
    }
};

// Storage of the data of blocks along rows and along columns: 0 none, 1 in the order of x, 2 transposed.
struct Stored {
    int along_rows, along_columns;

    static __device__ __forceinline__ Stored of(const MxParams& p) {
        if (ALIGNED) return {ALONG_ROWS, ALONG_COLUMNS};
        return {(int)(p.stored & (ALONG_ROWS == 2 ? 3 : ALONG_ROWS)),
                (int)(p.stored >> 2 & (ALONG_COLUMNS == 2 ? 3 : ALONG_COLUMNS))};
    }
};

// Shared memory of a tile.
struct TileMemory {
    Tile of_rows, of_columns;    // transposed data of blocks along rows, and along columns
    u8* column_scales;           // kColumns bytes per warp tile down
    u32* row_scales;             // a word per row and warp tile across

    __device__ __forceinline__ TileMemory(u8* shared, const Stored& stored)
        : of_rows{shared}, of_columns{stored.along_rows == 2 ? shared + Tile::kBytes : shared} {
        column_scales = stored.along_columns == 2 ? of_columns.shared + Tile::kBytes : of_columns.shared;
        row_scales = reinterpret_cast<u32*>(column_scales + kScaleBytes);
    }
};

// Scales of a tile, stored in pieces as long as the tile allows, since to the L2 four bytes are as much work
// as 32; shared memory gathers what is spread over lanes or warps.
struct TileScales {
    const MxParams& p;
    const TilePosition& at;
    const TileMemory& memory;
    i64 row_blocks, column_blocks;           // blocks per row and per column of the matrix
    bool stage_rows, stage_columns;

    __device__ __forceinline__ TileScales(const MxParams& p, const TilePosition& at, const TileMemory& memory)
        : p(p), at(at), memory(memory), row_blocks((p.columns + kBlock - 1) / kBlock),
          column_blocks((p.rows + kBlock - 1) / kBlock),
          stage_rows(p.along_rows.to && !p.along_rows.lines_adjoin()),
          stage_columns(kSwizzles && p.along_columns.to && !p.along_columns.lines_adjoin()) {}

    // Stores the scales of a warp tile, or leaves them in shared memory. Along rows a lane has the scales of
    // four rows of one block or, after an exchange, of four blocks of one row; along columns those of four
    // columns of one block, and four warps have four blocks of a column.
    __device__ __forceinline__ void put(const Scales& e) const {
        const int group = threadIdx.x % 32 / kLanes, first = threadIdx.x % kLanes * 4;
        const int across = Tile::column() / kWarpTileColumns, down = Tile::row() / kWarpTileRows;
        const i64 row = at.row + Tile::row(), column = at.column + Tile::column();
        if (stage_rows)
            memory.row_scales[(Tile::row() + first + group) * WARP_TILES_ACROSS + across] =
                transpose_across_lanes(e.rows);
        else if (p.along_rows.to)
            p.along_rows.store_lines(at.matrix, row + first,
                                     column / kWarpTileColumns * (kWarpTileColumns / kBlock) + group, e.rows,
                                     p.rows, row_blocks);
        if (stage_columns)
            *reinterpret_cast<u32*>(memory.column_scales + down * Tile::kColumns + Tile::column()) =
                e.columns;
        else if (p.along_columns.to)
            p.along_columns.store_lines(at.matrix, column, row / kBlock, e.columns, p.columns, column_blocks);
    }

    // Stores what is in shared memory, a word per thread, in the order of memory.
    __device__ __forceinline__ void store() const {
        const int word = threadIdx.x, swizzled_line = word / 128 * 128 + word % 4 * 32 + word / 4 % 32;
        if (stage_rows) {
            const bool swizzled = kSwizzles && p.along_rows.swizzled();
            const int line = swizzled ? word / (128 * WARP_TILES_ACROSS) * 128 + swizzled_line % 128
                                      : word / WARP_TILES_ACROSS;
            const int across = swizzled ? word / 128 % WARP_TILES_ACROSS : word % WARP_TILES_ACROSS;
            p.along_rows.store_blocks(at.matrix, at.row + line, at.column / kBlock + across * 4,
                                      memory.row_scales[line * WARP_TILES_ACROSS + across], p.rows,
                                      row_blocks);
        }
        if (stage_columns) {
            const int line = (p.along_columns.swizzled() ? swizzled_line : word) % Tile::kColumns;
            const int first = word / Tile::kColumns * 4;
            u32 blocks = 0;
#pragma unroll
            for (int b = 0; b < 4; b++)
                blocks |= (u32)memory.column_scales[(first + b) * Tile::kColumns + line] << 8 * b;
            p.along_columns.store_blocks(at.matrix, at.column + line, at.row / kBlock + first, blocks,
                                         p.columns, column_blocks);
        }
    }
};

// Quantises one tile of a matrix. x has all its rows or, with kPads, the first `given`; the other rows are
// zeros. kVectorStores: transposed rows allow stores of 16 bytes wherever the tile is whole; otherwise
// `vector` decides.
template <bool kVectorStores, bool kPads>
__device__ __forceinline__ void quantize_tile(const MxParams& p, const TilePosition& at, i64 given,
                                              u8* shared) {
    const Stored stored = Stored::of(p);
    const TileMemory memory(shared, stored);
    const i64 matrix = at.matrix * p.rows * p.columns, row = at.row + Tile::row();
    const i64 column = at.column + Tile::column();
    const int rows_left = left_of(p.rows - row, kWarpTileRows);
    int columns_left = left_of(p.columns - column, kLaneColumns);
    if (ALIGNED && columns_left) columns_left = kLaneColumns;
    int given_left = rows_left;
    if constexpr (kPads) given_left = left_of(given - row, kWarpTileRows);

    WarpTile<IN> warp_tile;
    const WarpTilePosition position{matrix + row * p.columns + column, rows_left, columns_left};
    warp_tile.template load<ALIGNED != 0>(p.x + position.at, p.columns, given_left, columns_left,
                                          p.vector & 1);
    const Scales e = p.rule.nan_wins() ? find_scales<true>(warp_tile, p, rows_left, columns_left)
                                       : find_scales<false>(warp_tile, p, rows_left, columns_left);
    const WarpTileWriter<MxOperands> writer{p.columns, warp_tile, position, {e}};
    writer.write_known<ALIGNED != 0>(
        {Destination::of(stored.along_rows, as_global(p.rows_data), p.vector & 2, memory.of_rows),
         Destination::of(stored.along_columns, as_global(p.columns_data), p.vector & 4, memory.of_columns)});
    const TileScales scales(p, at, memory);
    scales.put(e);
    const bool rows_transposed = stored.along_rows == 2, columns_transposed = stored.along_columns == 2;
    if (rows_transposed || columns_transposed || scales.stage_rows || scales.stage_columns) __syncthreads();
    const int columns_of_tile = left_of(p.columns - at.column, Tile::kColumns);
    const int rows_of_tile = left_of(p.rows - at.row, Tile::kRows);
    const i64 place_t = matrix + at.column * p.rows + at.row;
    if (rows_transposed)
        memory.of_rows.template store<kVectorStores>(as_global(p.rows_data) + place_t, p.rows,
                                                     columns_of_tile, rows_of_tile, p.vector & 2);
    if (columns_transposed)
        memory.of_columns.template store<kVectorStores>(as_global(p.columns_data) + place_t, p.rows,
                                                        columns_of_tile, rows_of_tile, p.vector & 4);
    scales.store();
}
#endif

#ifdef ENTRY_quantize_mx_tile
extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
quantize_mx_tile(const __grid_constant__ MxParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const auto at = TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.rows, p.columns);
    quantize_tile<ALIGNED != 0, false>(p, at, p.rows, shared);
}
#endif

#ifdef ENTRY_group_quantize_mx
struct GroupMxParams {
    MxParams all;                // n and rows: unused
    RowGroups groups;
    GroupScales along_rows, along_columns;
    ArrayList<MxParams> list;     // instead of groups: only noop of `all` is used
};

__device__ __forceinline__ void move_to_group(ScaleDestination& destination, const GroupScales& scales,
                                              i64 before) {
    if (destination.to) destination.to += before * scales.unit;
}

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
group_quantize_mx(const __grid_constant__ GroupMxParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ MxParams group;                                       // its matrix
    const auto move_scales = [&](const RowSegment& found) {
        move_to_group(group.along_rows, p.along_rows, found.units_before[0]);
        move_to_group(group.along_columns, p.along_columns, found.units_before[1]);
        if (group.along_columns.swizzled()) group.along_columns.block = p.along_columns.units(found.rows);
    };
    quantize_group<Tile>(p, group, move_scales,
                         [&](const TilePosition& at, i64 given, int) { quantize_tile<false,
                                                                      true>(group, at, given, shared); });
}
#endif
