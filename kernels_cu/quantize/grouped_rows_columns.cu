// Groups of rows quantised with an f32 scale for every row, and for every column of each group; sizes are on the device (docs/numerics.md,
// sections 3 and 7).
//
//   factor, scale_inv = of max |x| over the line (include/scale/block_scale.cuh)        data = narrow(fl(x * factor)), or fl(x / scale_inv)
//
// group_quantize_rows   x [rows, columns] -> data as x is, scale_inv for every row: x is read once. A block of threads takes a run of 32 rows of a
//                       group, or of rows of more than kColumns elements its share of them. `team` threads have a row, as few as hold it in
//                       registers, while the next one is on its way; what does not fit is read again, from the L1 or L2.
// group_quantize_lines  every other choice: data as x is or transposed ([columns, m] for each group), scales for rows, columns or both. Two
//                       launches: `phase` 0 raises the maxima of rows and columns in a workspace, phase 1 quantises all from one read. A
//                       block takes 8 panels, 256 x 128 elements (include/tile/warp_tile.cuh). Columns: scale_inv [groups, columns, padded], a group
//                       without rows too; the blocks of phase 1 share that out. The workspace is zero before phase 0: group_find_runs, which
//                       finds the runs of both, clears it.
// What follows the last group is written 0; offsets and aligned sizes as row_groups.cuh says. Elements are divided by scale_inv where the struct's
// `divide` says so. Any shape and address; rows of chunks of 16 bytes of x are read in chunks.
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; profiles and scale layouts are run-time values. Bytes moved per element: rows alone
// sizeof(IN) + 1; otherwise 2 * sizeof(IN) + 1 for each direction.
#include "scale/block_write.cuh"

struct GroupLinesParams {
    BlockParams all;             // fast: rows, slow: columns. rows, panels, square: unused
    RowGroups groups;            // rows alone: `across` blocks share a run
    GroupScales fast, slow;      // slow: unused, and all 0
    u32 *row_tops, *column_tops; // [result rows], [groups, columns]: the largest magnitudes, as f32 bits; or null
    u32 phase;                   // of lines
    u32 team;                    // of rows: threads that have one, 32 to 256
};

#ifdef ENTRY_group_quantize_lines
// 512 threads of 16-bit panels on a multiprocessor, 256 of f32, as the tiles of blocks.cu; where the compiler spills at their registers 256.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1200 || __CUDACC_VER_MAJOR__ < 13)
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 ? 2 : 1;
#endif
static_assert(Tile::kThreads >= Tile::kRows && Tile::kThreads >= Tile::kColumns, "a thread for every line of a tile");

__device__ __forceinline__ void raise_top(u32* top, u32 bits) {
    if (load_relaxed(top) < bits) atomicMax(top, bits);
}

// first_row, first_column: where the maxima of the group's first row and column are.
__device__ __forceinline__ void raise_tops(const GroupLinesParams& p, const Panel<IN>& panel, const TilePosition& at, i64 first_row,
                                           i64 first_column, u32* words) {
    PanelAmax<IN, false> amax;
    if (p.row_tops) {
        amax.template find<true, false>(panel);
        u32 top[1];
        amax.template reduce_rows<32>(top);                          // of the row of this lane; 0 where there is none
        if (top[0]) raise_top(as_global(p.row_tops) + first_row + at.row + Tile::row() + threadIdx.x % 32, top[0]);
    }
    if (!p.column_tops) return;
    amax.template find<false, true>(panel);
    u32 bits[kLaneColumns];
    amax.of_columns(bits);
    *reinterpret_cast<uint4*>(words + Tile::row() / kPanelRows * Tile::kColumns + Tile::column()) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    __syncthreads();
    if (threadIdx.x >= Tile::kColumns) return;
    u32 top = 0;
    for (int panel_row = 0; panel_row < PANELS_DOWN; panel_row++) top = larger(top, words[panel_row * Tile::kColumns + threadIdx.x]);
    if (top) raise_top(as_global(p.column_tops) + first_column + at.column + threadIdx.x, top);
}

// Scales of the columns of all groups, by all blocks.
__device__ __forceinline__ void store_column_scales(const GroupLinesParams& p) {
    const ScaleGrid& to = p.all.slow;
    if (!to.to) return;
    const i64 all = p.groups.splits.groups * to.columns;
    for (i64 i = (i64)blockIdx.x * Tile::kThreads + threadIdx.x; i < all; i += (i64)gridDim.x * Tile::kThreads) {
        const i64 group = i / to.columns, column = i - group * to.columns;
        const bool exists = column < p.all.columns;
        to.to[i] = exists ? p.all.rule.of(load_read_only(p.column_tops + group * p.all.columns + column)).scale_inv : 0.0f;
    }
}

template <bool kWide, How kHow>
__device__ __forceinline__ void write_lines(const BlockParams& p, const Panel<IN>& panel, const Place& place, const RowOperands& rows,
                                            const ColumnOperands& columns, const Outputs& to) {
#pragma unroll
    for (int half = 0; half < 2; half++) write_half_of_both<kWide, kHow>(p, panel, place, rows, columns, half, to);
}

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) group_quantize_lines(const __grid_constant__ GroupLinesParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ BlockParams group;                                    // its matrix
    __shared__ TilePosition at;
    __shared__ RowRun found;
    __shared__ i64 first_row;                                        // of the group, in the results
    if (is_set(p.all.noop)) return;
    if (p.phase == 1) store_column_scales(p);
    const auto move_scales = [&](const RowRun& run) {
        move_to_group(group.fast, p.fast, run.before[0], run.rows);
        first_row = p.all.columns ? run.to / p.all.columns : 0;
    };
    if (!find_group_tile<Tile>(p, group, at, found, move_scales)) return;
    if (group.columns == 0) return;

    const Tile tile{shared};
    // Factors of lines, and their divisors.
    float* const of_rows = reinterpret_cast<float*>(shared + Tile::kBytes), *const of_columns = of_rows + 2 * Tile::kRows;
    const i64 row = at.row + Tile::row(), column = at.column + Tile::column(), first_column = found.group * group.columns;
    const Place place{row * group.columns + column, left_of(group.rows - row, kPanelRows), left_of(group.columns - column, kLaneColumns)};
    Panel<IN> panel;
    const int given_left = left_of(found.given - row, kPanelRows);
    panel.template load<false>(group.x + place.at, group.columns, given_left, place.columns_left, group.vector & 1);
    if (p.phase == 0) {
        raise_tops(p, panel, at, first_row, first_column, reinterpret_cast<u32*>(shared));
        return;
    }
    if (p.row_tops && threadIdx.x < Tile::kRows) {
        const i64 r = at.row + threadIdx.x;
        const bool exists = r < group.rows;
        const BlockScale s = p.all.rule.of(exists ? load_read_only(p.row_tops + first_row + r) : 0);
        if (at.column == 0 && group.fast.has(r, 0)) *group.fast.at(0, r, 0) = exists ? s.scale_inv : 0.0f;
        of_rows[threadIdx.x] = s.factor, of_rows[Tile::kRows + threadIdx.x] = s.scale_inv;
    }
    if (p.column_tops && threadIdx.x < Tile::kColumns) {
        const i64 c = at.column + threadIdx.x;
        const BlockScale s = p.all.rule.of(c < group.columns ? load_read_only(p.column_tops + first_column + c) : 0);
        of_columns[threadIdx.x] = s.factor, of_columns[Tile::kColumns + threadIdx.x] = s.scale_inv;
    }
    __syncthreads();
    const RowOperands rows{of_rows + Tile::row(), of_rows + Tile::kRows + Tile::row()};
    const int fast = group.stored & 3, slow = group.stored >> 2;
    bool quick = !fast || (int)(threadIdx.x % 32) >= place.rows_left || has_quick_quotients(rows.divisors[threadIdx.x % 32]);
    ColumnOperands columns;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        columns.factor[c] = slow ? of_columns[Tile::column() + c] : 0.0f;
        columns.divisor[c] = slow ? of_columns[Tile::kColumns + Tile::column() + c] : 0.0f;
        quick &= !slow || c >= place.columns_left || has_quick_quotients(columns.divisor[c]);
    }
    const bool wide = (fast != 1 || group.vector & 2) && (slow != 1 || group.vector & 4);
    const Outputs to{fast, slow, false, {as_global(group.fast_data), (group.vector & 2) != 0}, {as_global(group.slow_data), (group.vector & 4) != 0},
                     tile, tile};
    if (!p.all.divide && wide) write_lines<true, kMultiply>(group, panel, place, rows, columns, to);
    else if (!p.all.divide) write_lines<false, kMultiply>(group, panel, place, rows, columns, to);
    else if (__all_sync(~0u, quick)) write_lines<false, kDivideQuickly>(group, panel, place, rows, columns, to);
    else divide_panel(group, place, given_left, rows, columns, to);
    if (fast != 2 && slow != 2) return;
    __syncthreads();
    const int columns_of_tile = left_of(group.columns - at.column, Tile::kColumns), rows_of_tile = left_of(group.rows - at.row, Tile::kRows);
    u8* const columns_to = as_global(fast == 2 ? group.fast_data : group.slow_data) + at.column * group.rows + at.row;
    tile.template store<false>(columns_to, group.rows, columns_of_tile, rows_of_tile, group.vector & (fast == 2 ? 2 : 4));
}
#endif

#ifdef ENTRY_group_quantize_rows
// What a block has of a run: row_groups.cuh takes it for a tile. Also in ops/quantize/grouped_rows_columns.py.
struct RunOfRows {
    static constexpr int kRows = 32, kColumns = 8192, kThreads = 256;
};
constexpr int kChunk = 16 / sizeof(IN::storage), kKept = 4;          // elements of a chunk, chunks that a thread keeps of a row
using Source = Chunk<IN, kChunk>;
// 768 threads on a multiprocessor; where the compiler spills at their registers 512.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

// One of x; zeros where it has no elements. vector: it is whole and aligned.
__device__ __forceinline__ Source load_chunk(const IN::storage* x, int left, bool vector) {
    if (vector) return left ? Source::load(x) : Source{};
    return Source::load_partial(x, left);
}

// What a thread keeps of a row, of which there are `left` elements: chunks `stride` elements apart.
struct KeptChunks {
    Source chunk[kKept];

    __device__ __forceinline__ void load(const IN::storage* x, int left, int stride, bool vector) {
#pragma unroll
        for (int i = 0; i < kKept; i++) chunk[i] = load_chunk(x + i * stride, left_of(left - i * stride, kChunk), vector);
    }
};

// Codes of a chunk of a row, `left` of them; wide: as one store.
template <How kHow>
__device__ __forceinline__ void write_chunk(const Source& in, float operand, u8* to, int left, bool wide) {
    Chunk<OUT, kChunk> out;
#pragma unroll
    for (int i = 0; i < kChunk / 2; i++) {
        float lo, hi;
        in.widen2(i, lo, hi);
        if (kHow == kDivide) out.narrow2(i, div_rn(lo, operand), div_rn(hi, operand));
        else out.narrow2(i, mul_rn(lo, operand), mul_rn(hi, operand));
    }
    if (!wide) out.store_partial(to, left);
    else if (left) out.store(to);
}

// Chunks of a row `stride` elements apart, of `left` elements from the first one on, of which x has `given`: all or none. Read when needed.
struct ReadChunks {
    const IN::storage* x;
    u8* to;
    i64 given, left;
    int stride;
    bool vector, wide;

    __device__ __forceinline__ void add_to(Amax<IN>& amax) const {
#pragma unroll 1
        for (i64 c = 0; c < given; c += stride) amax.add(load_chunk(x + c, left_of(given - c, kChunk), vector));
    }
    template <How kHow>
    __device__ __forceinline__ void write(float operand) const {
#pragma unroll 1
        for (i64 c = 0; c < left; c += stride)
            write_chunk<kHow>(load_chunk(x + c, left_of(given - c, kChunk), vector), operand, to + c, left_of(left - c, kChunk), wide);
    }
};

extern "C" __global__ void __launch_bounds__(RunOfRows::kThreads, kBlocks) group_quantize_rows(const __grid_constant__ GroupLinesParams p) {
    __shared__ BlockParams group;                                    // its matrix
    __shared__ TilePosition at;
    __shared__ RowRun found;
    __shared__ u32 tops[2][RunOfRows::kThreads / 32];                // of warps, in rows that take turns
    if (is_set(p.all.noop)) return;
    const auto move_scales = [&](const RowRun& run) { move_to_group(group.fast, p.fast, run.before[0], run.rows); };
    if (!find_group_tile<RunOfRows>(p, group, at, found, move_scales)) return;
    const i64 columns = p.all.columns;
    if (columns == 0) return;

    const int team = (int)p.team, across = (int)p.groups.across, teams = RunOfRows::kThreads / team;
    const int begin = (threadIdx.x & (team - 1)) * kChunk, stride = team * kChunk, warps = team / 32, first_warp = threadIdx.x / team * warps;
    const int left = left_of(columns - begin, kKept * stride);       // of what this thread keeps, and those after it
    const bool vector = p.all.vector & 1, wide = p.all.vector & 2;
    const int given = left_of(found.given - at.row, RunOfRows::kRows), rows = left_of(group.rows - at.row, RunOfRows::kRows);
    const int stored = left_of(group.fast.rows - at.row, RunOfRows::kRows);      // with padding of scales
    // Rows of the run: the blocks that share it, and their teams, take turns.
    const int first = (int)(at.column / RunOfRows::kColumns), step = teams * across;
    const IN::storage* const x = group.x + at.row * columns + begin;
    u8* const data = as_global(group.fast_data) + at.row * columns + begin;
    int row = first + threadIdx.x / team * across;
    KeptChunks next;
    next.load(x + row * columns, row < given ? left : 0, stride, vector);
#pragma unroll 1
    for (int begun = first, turn = 0; begun < stored; begun += step, row += step, turn ^= 1) {
        const KeptChunks kept = next;
        next.load(x + (row + step) * columns, row + step < given ? left : 0, stride, vector);
        const i64 in_row = row * columns, beyond = columns - begin, kept_of_row = kKept * stride;
        const ReadChunks all{x + in_row, data + in_row, row < given ? beyond : 0, beyond, stride, vector, wide};
        const ReadChunks rest{all.x + kept_of_row, all.to + kept_of_row, all.given - kept_of_row, beyond - kept_of_row, stride, vector, wide};
        Amax<IN> amax;
#pragma unroll
        for (const Source& c : kept.chunk) amax.add(c);
        rest.add_to(amax);
        const u32 of_warp = __reduce_max_sync(~0u, amax.f32_bits());
        if (threadIdx.x % 32 == 0) tops[turn][threadIdx.x / 32] = of_warp;
        __syncthreads();
        u32 top = 0;
        for (int w = 0; w < warps; w++) top = larger(top, tops[turn][first_warp + w]);
        const BlockScale s = p.all.rule.quick_of(top);
        const i64 r = at.row + row;
        if (begin == 0 && row < RunOfRows::kRows && group.fast.has(r, 0)) *group.fast.at(0, r, 0) = row < rows ? s.scale_inv : 0.0f;
        if (row >= rows) continue;
        if (p.all.divide) {                                          // rare: without registers for what is kept
            all.write<kDivide>(s.scale_inv);
            continue;
        }
#pragma unroll
        for (int i = 0; i < kKept; i++)
            write_chunk<kMultiply>(kept.chunk[i], s.factor, all.to + i * stride, left_of(left - i * stride, kChunk), wide);
        rest.write<kMultiply>(s.factor);
    }
}
#endif
