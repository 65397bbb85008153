// Quantisation in blocks with f32 scales (docs/numerics.md, section 3).
//
//   factor, scale_inv = of max |x| over the block (include/scale/block_scale.cuh)        data = narrow(fl(x * factor))
//
// Everything here speaks of memory: x is [batch, rows, columns], columns fastest. Blocks along a row are called fast, blocks down a column
// slow; which of them is row-wise is the caller's matter. Data is stored as x is, or transposed: [batch, columns, rows].
//
// quantize_block_rows   blocks of 128 along rows of whole blocks, data as is, 16-byte loads: eight blocks per warp, one below the other or,
//                       where the scales of a row adjoin, one after the other, so that their scales are 32 bytes together. Registers alone.
// quantize_block_tile   blocks of 32, 64 or 128 elements along a line, or of 128 x 128. A warp owns a panel of 32 x 128 elements
//                       (include/tile/warp_tile.cuh); a block of threads PANELS_DOWN x PANELS_ACROSS panels. A row's scale is found inside a warp, a
//                       column's and a square's through shared memory, by as many threads as there are scales: no scale is computed twice.
//                       FAST, SLOW: 0 not wanted, 1 data as is, 2 transposed. SQUARE 1: 128 x 128; FAST is then 1 for data as is, SLOW 2
//                       for transposed data. ALIGNED 1: as defined, and all rows allow the wide accesses of a panel; 0: the struct's
//                       `stored`, `square` and `vector` tell (arrays of any shape and address). DOWN_FIRST: see tile.cuh.
// group_quantize_block  the same of groups of rows whose sizes are on the device, each a matrix of its own: no tile has rows of two. Data are where
//                       their rows are in x, stored transposed [columns, m] for each group; scales of one group follow those of another. What
//                       follows the last group is written 0. Block 0 writes offsets where none are given. With `align` a group is followed by
//                       rows of zeros, quantised as the others are, and block 0 writes the aligned sizes too. Or the same of arrays in a list.
//                       RUN: tiles of a group that a block has, one below the other; more than one where SLOW is 2 and ALIGNED 1, so that few
//                       sectors of the transposed data are stored in parts (include/tile/column_segment.cuh).
// quantize_block_lines  one block per line: all of a row (ALONG_ROWS 1) or of a column (0). A block of threads reads its lines twice. Any
//                       shape and address.
// DIVIDE 1: elements are divided by scale_inv (profile vllm), which takes three instructions for each. Lines: where the struct's `divide` says so.
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; the other profiles, blocks and scale layouts are run-time values. Bytes moved per
// element: sizeof(IN) + 1 + 4 / block, and 1 + 4 / block for a second direction. Padding of scales is written 0.
#ifdef ENTRY_quantize_block_rows
#include "scale/block_params.cuh"
#include "numerics/amax.cuh"
#else
#include "scale/block_write.cuh"
#include "groups/quantize_group.cuh"
#include "tile/column_segment.cuh"
#endif

#if defined(ENTRY_quantize_block_tile) || defined(ENTRY_group_quantize_block)
constexpr bool kFast = !ALIGNED || (FAST && !SQUARE), kSlow = !ALIGNED || SLOW || SQUARE;
static_assert(!kSlow || PANELS_DOWN % 4 == 0, "a block of 128 rows is four panels");
// On an H200 a multiprocessor keeps 512 threads of 16-bit panels in flight, 256 of f32. On sm_120, and of groups with CUDA 12, the compiler
// spills at 512 threads' registers; what 256 cost there has not been measured.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1200 || defined(ENTRY_group_quantize_block) && __CUDACC_VER_MAJOR__ < 13)
constexpr int kMostInFlight = 256;
#else
constexpr int kMostInFlight = sizeof(IN::storage) == 2 ? 512 : 256;
#endif
constexpr int kThreadsInFlight = ALIGNED ? kMostInFlight : Tile::kThreads;
constexpr int kBlocks = kThreadsInFlight > Tile::kThreads ? kThreadsInFlight / Tile::kThreads : 1;
constexpr int kWarps = Tile::kThreads / 32;
#ifdef ENTRY_group_quantize_block
constexpr int kRun = RUN;
#else
constexpr int kRun = 1;
#endif
static_assert(kRun == 1 || (ALIGNED && SLOW == 2), "a run is of transposed data");

// What elements are multiplied by, or what they are divided by.
__device__ __forceinline__ float operand(const BlockScale& s) { return DIVIDE ? s.scale_inv : s.factor; }

// The scales of the panel's rows, all by one warp. reduced: the operands for write_quad, one run of columns after the other; inverses:
// the same of scale_inv, for stores of more than one panel's scales at a time. Scales whose lines adjoin are stored here, 32 to a line.
// Returns whether all divisors of this lane's row have quick quotients.
__device__ __forceinline__ bool find_row_scales(PanelAmax<IN, false>& amax, const BlockParams& p, const TilePosition& at, float* reduced,
                                                float* inverses) {
    const int lane = threadIdx.x % 32;
    u32 top[4];
    amax.template reduce_rows<32 / kRuns>(top);
    *reinterpret_cast<uint4*>(reduced + lane / 8 * kRunStride + lane % 8 * 4) = make_uint4(top[0], top[1], top[2], top[3]);
    __syncwarp();
    const int panels = (int)p.panels, blocks = kRuns / panels;
    const i64 row = at.row + Tile::row() + lane, first = (at.column + Tile::column()) / kPanelColumns * blocks;
    bool quick = true;
#pragma unroll 1
    for (int b = 0; b < blocks; b++) {                               // lane by row
        u32 bits = 0;
        for (int run = b * panels; run < (b + 1) * panels; run++) bits = larger(bits, as_bits(reduced[run * kRunStride + lane]));
        const BlockScale s = p.rule.of(bits);
        const float stored = row < p.rows ? s.scale_inv : 0.0f;
        inverses[b * kRunStride + lane] = stored;
        if (p.fast.to && p.fast.row == 1 && p.fast.has(row, first + b)) *p.fast.at(at.matrix, row, first + b) = stored;
        // Of all its runs, so that nobody needs to know the block. Nobody else reads this lane's.
        for (int run = b * panels; run < (b + 1) * panels; run++) reduced[run * kRunStride + lane] = s.factor;
        quick &= row >= p.rows || has_quick_quotients(s.scale_inv);
    }
    __syncwarp();
    return quick;
}

// Scales whose blocks adjoin: for every row a run as long as the tile is wide.
__device__ __forceinline__ void store_row_scales(const BlockParams& p, const TilePosition& at, const float* inverses) {
    const int blocks = kRuns / (int)p.panels, across = blocks * PANELS_ACROSS;
    const i64 first = at.column / kPanelColumns * blocks;
#pragma unroll 1
    for (int i = threadIdx.x; i < Tile::kRows * across; i += Tile::kThreads) {
        const int r = i / across, b = i % across, warp = b / blocks * PANELS_DOWN + r / kPanelRows;
        if (p.fast.has(at.row + r, first + b))
            *p.fast.at(at.matrix, at.row + r, first + b) = inverses[warp * kRowWords + b % blocks * kRunStride + r % kPanelRows];
    }
}

// The operands of this lane's columns. tops: a word for every column of every panel.
__device__ __forceinline__ void find_column_scales(const PanelAmax<IN, false>& amax, const BlockParams& p, const TilePosition& at, u32* tops,
                                                   float (&columns)[kLaneColumns]) {
    u32 bits[kLaneColumns];
    amax.of_columns(bits);
    const int panels = (int)p.panels, panel = Tile::row() / kPanelRows;
    *reinterpret_cast<uint4*>(tops + panel * Tile::kColumns + Tile::column()) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < PANELS_DOWN / panels * Tile::kColumns; i += Tile::kThreads) {
        const int block = i / Tile::kColumns, column = i % Tile::kColumns;
        u32* of_block = tops + block * panels * Tile::kColumns + column;
        u32 top = 0;
        for (int b = 0; b < panels; b++) top = larger(top, of_block[b * Tile::kColumns]);
        const BlockScale s = p.rule.of(top);
        *of_block = as_bits(operand(s));
        const i64 r = at.row / (panels * kPanelRows) + block, c = at.column + column;
        if (p.slow.to && p.slow.has(r, c)) *p.slow.at(at.matrix, r, c) = c < p.columns ? s.scale_inv : 0.0f;
    }
    __syncthreads();
    const uint4 four = *reinterpret_cast<const uint4*>(tops + panel / panels * panels * Tile::kColumns + Tile::column());
    columns[0] = as_float(four.x), columns[1] = as_float(four.y), columns[2] = as_float(four.z), columns[3] = as_float(four.w);
}

// The scale of the block of rows r and columns c of blocks; after the last one of a line zeros as far as the line is stored.
__device__ __forceinline__ void store_square_scale(const ScaleGrid& to, const BlockParams& p, i64 m, i64 r, i64 c, float scale_inv) {
    const i64 rows = (p.rows + 127) / 128, columns = (p.columns + 127) / 128;
    if (!to.to || r >= rows || c >= columns) return;
    *to.at(m, r, c) = scale_inv;
    if (r + 1 == rows)
        for (i64 i = rows; i < to.rows; i++) *to.at(m, i, c) = 0.0f;
    if (c + 1 == columns)
        for (i64 i = columns; i < to.columns; i++) *to.at(m, r, i) = 0.0f;
}

// The operand of this warp's square, four panels one below the other. tops: a word for every warp.
__device__ __forceinline__ float find_square_scale(const PanelAmax<IN, false>& amax, const BlockParams& p, const TilePosition& at, u32* tops) {
    u32 bits[kLaneColumns], top = 0;
    amax.of_columns(bits);
#pragma unroll
    for (const u32 b : bits) top = larger(top, b);
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    top = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) top = larger(top, tops[threadIdx.x / 128 * 4 + w]);
    const BlockScale s = p.rule.of(top);
    if (threadIdx.x % 128 == 0) {
        const i64 r = (at.row + Tile::row()) / 128, c = (at.column + Tile::column()) / 128;
        store_square_scale(p.fast, p, at.matrix, r, c, s.scale_inv);
        store_square_scale(p.slow, p, at.matrix, r, c, s.scale_inv);
    }
    return operand(s);
}

template <How kHow>
__device__ __forceinline__ void write_panel(const BlockParams& p, const Panel<IN>& panel, const Place& place, const RowOperands& rows,
                                            const ColumnOperands& columns, const Outputs& to) {
    constexpr bool kWide = ALIGNED != 0;
    constexpr bool kOfColumns = kHow == kMultiply && kWide && SLOW == 2 && !(SQUARE && FAST);
    // The directions take turns, so that neither addresses nor widened values live long: in whole panels they would not fit.
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if constexpr (kOfColumns) {
            if (!SQUARE) write_half<true, kWide, kHow>(p, panel, place, rows, columns, to.fast == 1, to.fast == 2, to.fast_target, half, to.fast_tile);
            write_half_of_columns(panel, columns, half, to.slow_tile);
        } else if (to.square) {
            write_half<false, kWide, kHow>(p, panel, place, rows, columns, to.fast == 1, to.slow == 2, to.fast_target, half, to.slow_tile);
        } else if (to.fast == 1 && to.slow == 1) {
            u32 unused[kLaneColumns][4];
#pragma unroll
            for (int quad = half * 4; quad < half * 4 + 4; quad++) {
                write_quad<true, kWide, kHow>(p, panel, place, rows, columns, true, to.fast_target, quad, unused);
                write_quad<false, kWide, kHow>(p, panel, place, rows, columns, true, to.slow_target, quad, unused);
            }
        } else {
            write_half_of_both<kWide, kHow>(p, panel, place, rows, columns, half, to);
        }
    }
}

// Where a tile is in a run of tiles one below the other.
struct InRun {
    int rows_before;
    bool last;
};

// One tile of a matrix, of which x has all rows or, where kPads, the first `given`, and the rest are zeros. kVectorStores: transposed rows allow
// stores of 16 bytes wherever the tile is whole; otherwise `vector` tells.
template <bool kVectorStores, bool kPads>
__device__ __forceinline__ void quantize_tile(const BlockParams& p, const TilePosition& at, i64 given, u8* shared, const InRun& in_run) {
    const int fast = ALIGNED ? FAST : p.stored & 3, slow = ALIGNED ? SLOW : p.stored >> 2;
    const bool square = ALIGNED ? SQUARE : p.square;
    // Shared memory: transposed fast data, transposed slow data, words of rows (twice), words of columns, ends of a run.
    const bool fast_transposed = !square && fast == 2;
    const Tile fast_tile{shared}, slow_tile{fast_transposed ? shared + Tile::kBytes : shared};
    float* const reduced = reinterpret_cast<float*>(slow == 2 ? slow_tile.shared + Tile::kBytes : slow_tile.shared);
    float* const inverses = reduced + kWarps * kRowWords;
    u32* const tops = reinterpret_cast<u32*>(kFast ? inverses + kWarps * kRowWords : reduced);
    u8* const of_run = reinterpret_cast<u8*>(kSlow ? tops + PANELS_DOWN * Tile::kColumns : tops);
    float* const of_warp = reduced + threadIdx.x / 32 * kRowWords;

    const i64 matrix = at.matrix * p.rows * p.columns, row = at.row + Tile::row(), column = at.column + Tile::column();
    const int rows_left = left_of(p.rows - row, kPanelRows);
    int columns_left = left_of(p.columns - column, kLaneColumns);
    if (ALIGNED && columns_left) columns_left = kLaneColumns;

    Panel<IN> panel;
    const Place place{matrix + row * p.columns + column, rows_left, columns_left};
    int given_left = rows_left;
    if constexpr (kPads) given_left = left_of(given - row, kPanelRows);
    panel.template load<ALIGNED != 0>(p.x + place.at, p.columns, given_left, columns_left, p.vector & 1);
    PanelAmax<IN, false> amax;
    amax.template find<kFast, kSlow>(panel);
    float* const inverses_of_warp = inverses + threadIdx.x / 32 * kRowWords;
    float of_columns[kLaneColumns] = {};
    bool quick = true;                                               // whether all divisors have quick quotients
    if (square) {
        const float all = find_square_scale(amax, p, at, tops);
#pragma unroll
        for (float& c : of_columns) c = all;
    } else {
        if constexpr (kFast) quick = find_row_scales(amax, p, at, of_warp, inverses_of_warp) || !fast;
        if constexpr (kSlow) find_column_scales(amax, p, at, tops, of_columns);
    }

    const int run = threadIdx.x % 32 / (32 / kRuns);
    const RowOperands rows{of_warp + run * kRunStride, inverses_of_warp + run / (int)p.panels * kRunStride};
    ColumnOperands columns;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        columns.factor[c] = columns.divisor[c] = of_columns[c];
        if (DIVIDE && kSlow) {
            columns.factor[c] = div_rn(1.0f, of_columns[c]);
            quick &= (!square && !slow) || c >= columns_left || has_quick_quotients(of_columns[c]);
        }
    }
    const Outputs to{fast, slow, square, {as_global(p.fast_data), (p.vector & 2) != 0}, {as_global(p.slow_data), (p.vector & 4) != 0},
                     fast_tile, slow_tile};
    if (!DIVIDE) write_panel<kMultiply>(p, panel, place, rows, columns, to);
    else if (__all_sync(~0u, quick)) write_panel<kDivideQuickly>(p, panel, place, rows, columns, to);
    else divide_panel(p, place, given_left, rows, columns, to);

    const bool blocks_adjoin = kFast && !square && p.fast.to && p.fast.row != 1;
    if (fast_transposed || slow == 2 || blocks_adjoin) __syncthreads();
    if constexpr (kFast)
        if (blocks_adjoin) store_row_scales(p, at, inverses);
    const int columns_of_tile = left_of(p.columns - at.column, Tile::kColumns), rows_of_tile = left_of(p.rows - at.row, Tile::kRows);
    const i64 place_t = matrix + at.column * p.rows + at.row;
    if (fast_transposed) fast_tile.template store<kVectorStores>(as_global(p.fast_data) + place_t, p.rows, columns_of_tile, rows_of_tile, p.vector & 2);
    if constexpr (kRun > 1) {
        u8* const to = as_global(p.slow_data) + place_t;
        const bool single = in_run.rows_before == 0 && in_run.last;
        if (p.vector & 4 && (single || (reinterpret_cast<u64>(to) | (u64)p.rows) % kSector == 0))
            slow_tile.template store<true>(to, p.rows, columns_of_tile, rows_of_tile, true);
        else ColumnRun<Tile>{slow_tile, of_run}.store(to, p.rows, columns_of_tile, rows_of_tile, in_run.rows_before, in_run.last);
    } else if (slow == 2) {
        slow_tile.template store<kVectorStores>(as_global(p.slow_data) + place_t, p.rows, columns_of_tile, rows_of_tile, p.vector & 4);
    }
}
#endif

#ifdef ENTRY_quantize_block_tile
extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) quantize_block_tile(const __grid_constant__ BlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    quantize_tile<ALIGNED != 0, false>(p, TilePosition::of_block<Tile, DOWN_FIRST != 0>(blockIdx.x, p.rows, p.columns), p.rows, shared, {0, true});
}
#endif

#ifdef ENTRY_group_quantize_block
struct GroupBlockParams {
    BlockParams all;             // rows: unused
    RowGroups groups;
    GroupScales fast, slow;
    ArrayList<BlockParams> list;     // in place of groups: `all` has noop alone
};

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) group_quantize_block(const __grid_constant__ GroupBlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ BlockParams group;                                    // its matrix
    const auto move_scales = [&](const RowSegment& found) {
        move_to_group(group.fast, p.fast, found.before[0], found.rows);
        move_to_group(group.slow, p.slow, found.before[1], found.rows);
    };
    quantize_group<Tile, kRun>(p, group, move_scales, [&](const TilePosition& first, const i64& given, int tiles) {
#pragma unroll 1
        for (int tile = 0;; __syncthreads()) {                       // what is shared is read before the next tile's takes its place
            const TilePosition at{0, first.row + tile * Tile::kRows, first.column};
            const InRun in_run{tile * Tile::kRows, tile + 1 == tiles};
            quantize_tile<false, true>(group, at, given, shared, in_run);
            if (kRun == 1 || ++tile == tiles) return;
        }
    });
}
#endif

#ifdef ENTRY_quantize_block_rows
constexpr int kLength = 128, kChunk = 16 / sizeof(IN::storage);      // elements of a block, and of a load; also in ops/quantize/blocks.py
constexpr int kLanes = kLength / kChunk, kAtOnce = 32 / kLanes;      // lanes that share a block, blocks of one load of a warp
constexpr int kWarpBlocks = 8, kLoads = kWarpBlocks / kAtOnce;       // of a warp, whose scales are 32 bytes together
constexpr int kOwners = kLanes / kLoads;                             // lanes that find the same scale
constexpr int kThreads = 128, kWarps = kThreads / 32;                // also in ops/quantize/blocks.py, and kWarpBlocks
using Source = Chunk<IN, kChunk>;

// The largest of all lanes that share a block: that of load i in lanes i * kOwners to i * kOwners + kOwners - 1 of them. Each exchange
// halves the loads that a lane has a part of.
__device__ __forceinline__ u32 reduce_over_lanes(u32 (&top)[kLoads]) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        const int keep = kLoads * distance / kLanes;
        const bool upper = threadIdx.x & distance;
        if (keep == 0) top[0] = IN::max_magnitudes<false>(top[0], __shfl_xor_sync(~0u, top[0], distance));
#pragma unroll
        for (int i = 0; i < keep; i++) {
            const u32 sent = upper ? top[i] : top[i + keep], kept = upper ? top[i + keep] : top[i];
            top[i] = IN::max_magnitudes<false>(kept, __shfl_xor_sync(~0u, sent, distance));
        }
    }
    return top[0];
}

extern "C" __global__ void __launch_bounds__(kThreads) quantize_block_rows(const __grid_constant__ BlockParams p) {
    if (is_set(p.noop)) return;
    const u32 across = (u32)(p.columns / kLength);
    const bool adjoin = p.fast.row != 1;                             // scales of a row; then all blocks of a matrix are one row of them
    const auto warps_of = [](i64 n) { return (u32)((n + kWarpBlocks - 1) / kWarpBlocks); };
    const u32 warps = adjoin ? warps_of(p.rows * across) : warps_of(p.fast.rows) * across;
    const u32 blocks = (warps + kWarps - 1) / kWarps, m = blockIdx.x / blocks, warp = (blockIdx.x - m * blocks) * kWarps + threadIdx.x / 32;
    if (warp >= warps) return;
    const u32 group = adjoin ? warp : warp / across;
    const i64 first = (i64)group * kWarpBlocks, column = adjoin ? 0 : warp - group * across, step = adjoin ? kLength : p.columns;
    const int count = left_of((adjoin ? p.rows * across : p.rows) - first, kWarpBlocks);
    const int stored = adjoin ? count : left_of(p.fast.rows - first, kWarpBlocks);       // with padding

    const int lane = threadIdx.x % 32, in_block = lane % kLanes, of_load = lane / kLanes;
    const i64 at = m * p.rows * p.columns + first * step + column * kLength + of_load * step + in_block * kChunk;
    const auto exists = [&](int load) { return load * kAtOnce + of_load < count; };
    Source chunk[kLoads];
    u32 top[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) chunk[i] = exists(i) ? Source::load(p.x + (at + i * kAtOnce * step)) : Source{};
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        Amax<IN> amax;
        amax.add(chunk[i]);
        top[i] = amax.top;
    }
    const int own = in_block / kOwners * kAtOnce + of_load;          // the block whose scale this lane finds
    // Of DIVIDE div_rn() below may be a call anyway; without it there is none in the kernel.
    const BlockScale s = p.rule.of<DIVIDE != 0>(Amax<IN>{reduce_over_lanes(top)}.f32_bits());
    if (in_block % kOwners == 0 && own < stored)
        as_global(p.fast.to)[m * p.fast.matrix + first + column * p.fast.column + own] = own < count ? s.scale_inv : 0.0f;
    const bool quick = !DIVIDE || __all_sync(~0u, own >= count || has_quick_quotients(s.scale_inv));
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        const int owner = of_load * kLanes + i * kOwners;
        const float factor = __shfl_sync(~0u, s.factor, owner), divisor = DIVIDE ? __shfl_sync(~0u, s.scale_inv, owner) : 0.0f;
        Chunk<OUT, kChunk> out;
#pragma unroll
        for (int e = 0; e < kChunk / 2; e++) {
            float lo, hi;
            chunk[i].widen2(e, lo, hi);
            if (!DIVIDE) out.narrow2(e, mul_rn(lo, factor), mul_rn(hi, factor));
            else if (quick) out.narrow2(e, quick_quotient_of_codes(lo, divisor, factor), quick_quotient_of_codes(hi, divisor, factor));
            else out.narrow2(e, div_rn(lo, divisor), div_rn(hi, divisor));
        }
        if (exists(i)) out.store(p.fast_data + (at + i * kAtOnce * step));
    }
}
#endif

#ifdef ENTRY_quantize_block_lines
static_assert(PANELS_DOWN == 1 || PANELS_ACROSS == 1, "panels in a line");
constexpr bool kAlongRows = ALONG_ROWS;
constexpr int kLines = kAlongRows ? Tile::kRows : Tile::kColumns;    // of a block of threads
constexpr int kStep = kAlongRows ? Tile::kColumns : Tile::kRows;     // elements of them at a time
constexpr int kParts = kAlongRows ? PANELS_ACROSS * kRuns : PANELS_DOWN, kPartStride = kAlongRows ? kRunStride : kLines;

extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1) quantize_block_lines(const __grid_constant__ BlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const bool transposed = p.stored == 2;
    const Tile tile{shared};
    u32* const tops = reinterpret_cast<u32*>(transposed ? shared + Tile::kBytes : shared);           // a word per line of every part
    const i64 lines = kAlongRows ? p.rows : p.columns, length = kAlongRows ? p.columns : p.rows;
    const i64 tiles = (lines + kLines - 1) / kLines, m = blockIdx.x / tiles, first = blockIdx.x % tiles * kLines;
    const i64 matrix = m * p.rows * p.columns;

    Panel<IN> panel;
    const auto load = [&](i64 begin) -> Place {
        const i64 row = (kAlongRows ? first : begin) + Tile::row(), column = (kAlongRows ? begin : first) + Tile::column();
        const Place place{matrix + row * p.columns + column, left_of(p.rows - row, kPanelRows), left_of(p.columns - column, kLaneColumns)};
        panel.template load<false>(p.x + place.at, p.columns, place.rows_left, place.columns_left, p.vector & 1);
        return place;
    };
    u32 top[4] = {};
#pragma unroll 1
    for (i64 begin = 0; begin < length; begin += kStep) {
        load(begin);
        PanelAmax<IN, false> amax;
        amax.template find<kAlongRows, !kAlongRows>(panel);
        u32 bits[4];
        if constexpr (kAlongRows) amax.template reduce_rows<32 / kRuns>(bits);
        else amax.of_columns(bits);
#pragma unroll
        for (int i = 0; i < 4; i++) top[i] = larger(top[i], bits[i]);
    }
    const int lane = threadIdx.x % 32;
    u32* const mine = kAlongRows ? tops + (threadIdx.x / 32 * kRuns + lane / 8) * kPartStride + lane % 8 * 4
                                 : tops + threadIdx.x / 32 * kPartStride + lane * 4;
    *reinterpret_cast<uint4*>(mine) = make_uint4(top[0], top[1], top[2], top[3]);
    __syncthreads();
    const ScaleGrid& to = p.fast;
    for (int i = threadIdx.x; i < kLines; i += Tile::kThreads) {
        u32 bits = 0;
        for (int part = 0; part < kParts; part++) bits = larger(bits, tops[part * kPartStride + i]);
        const BlockScale s = p.rule.of(bits);
        const i64 line = first + i, r = kAlongRows ? line : 0, c = kAlongRows ? 0 : line;
        if (to.has(r, c)) *to.at(m, r, c) = line < lines ? s.scale_inv : 0.0f;
        tops[i] = as_bits(s.factor), tops[kPartStride + i] = as_bits(s.scale_inv);       // where nobody else reads
    }
    __syncthreads();
    const float *const factors = reinterpret_cast<const float*>(tops), *const divisors = factors + kPartStride;
    const RowOperands rows{factors, divisors};
    ColumnOperands columns;
    bool quick = true;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        const int i = kAlongRows ? (int)(threadIdx.x % 32) : Tile::column() + c;
        columns.factor[c] = factors[i], columns.divisor[c] = divisors[i];
        quick &= first + i >= lines || has_quick_quotients(divisors[i]);
    }
    const Target target{p.fast_data, (p.vector & 2) != 0};
    const Outputs outputs{kAlongRows ? (int)p.stored : 0, kAlongRows ? 0 : (int)p.stored, false, target, target, tile, tile};
    const bool divided_quickly = p.divide && __all_sync(~0u, quick);
#pragma unroll 1
    for (i64 begin = 0; begin < length; begin += kStep) {
        const Place place = load(begin);
        if (p.divide && !divided_quickly) divide_panel(p, place, place.rows_left, rows, columns, outputs);
        else
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (divided_quickly)
                    write_half<kAlongRows, false, kDivideQuickly>(p, panel, place, rows, columns, p.stored == 1, transposed, target, half, tile);
                else write_half<kAlongRows, false, kMultiply>(p, panel, place, rows, columns, p.stored == 1, transposed, target, half, tile);
        if (!transposed) continue;
        __syncthreads();
        const i64 row = kAlongRows ? first : begin, column = kAlongRows ? begin : first;
        tile.template store<false>(p.fast_data + matrix + column * p.rows + row, p.rows, left_of(p.columns - column, Tile::kColumns),
                                   left_of(p.rows - row, Tile::kRows), p.vector & 2);
        __syncthreads();
    }
}
#endif
