// A thread block quantises its tile of a group of rows, or of an array in a list, with block scales. Here it
// finds its matrix and tile, and clears the rows outside all groups.
#pragma once
#include "groups/row_groups.cuh"

// ---- arrays in a list ----
// Each array is a batch of matrices, without groups of rows. Packed by ops/quantize/tensor_list_blocks.py.
template <class Params>
struct ListedArray {
    Params array;                // noop: unused
    u32 first;                   // first thread block of the array in the launch
    u32 across, down;            // tiles of a matrix
};

template <class Params>
struct ArrayList {
    const ListedArray<Params>* arrays;                   // null: no list
    const u32* array_of;         // array of each thread block

    // Writes the matrix of this thread block and its place there to shared memory. Call from one whole warp.
    template <class Tile>
    __device__ __forceinline__ void find(Params& matrix, TilePosition& at) const {
        constexpr int kWords = sizeof(Params) / sizeof(u64);
        static_assert(sizeof(Params) % sizeof(u64) == 0 && kWords <= 32, "a word per lane");
        const ListedArray<Params>* const from = arrays + load_read_only(array_of + blockIdx.x);
        const u32 block = blockIdx.x - load_read_only(&from->first);
        const u32 across = load_read_only(&from->across), down = load_read_only(&from->down);
        const u32 word = threadIdx.x;
        if (word < kWords)
            reinterpret_cast<u64*>(&matrix)[word] =
                load_read_only(reinterpret_cast<const u64*>(&from->array) + word);
        __syncwarp();
        if (threadIdx.x != 0) return;
        const u32 row_of_tiles = block / across, index = row_of_tiles / down;
        at = {0, (i64)(row_of_tiles - index * down) * Tile::kRows,
              (i64)(block - row_of_tiles * across) * Tile::kColumns};
        if (index == 0) return;
        const i64 before = index * matrix.rows * matrix.columns;
        matrix.x += before;
        if (matrix.rows_data) matrix.rows_data += before;
        if (matrix.columns_data) matrix.columns_data += before;
        if (matrix.along_rows.to) matrix.along_rows.to += index * matrix.along_rows.matrix;
        if (matrix.along_columns.to) matrix.along_columns.to += index * matrix.along_columns.matrix;
    }
};

// ---- groups of rows ----
// Turns `group`, in shared memory with the parameters of all groups, into those of one group as a matrix of
// the results. Call from one thread. move_scales: see quantize_group().
template <class Matrix, class MoveScales>
__device__ __forceinline__ void point_at_group(Matrix& group, const RowSegment& found,
                                               MoveScales move_scales) {
    group.rows = found.rows;
    group.x += found.start;
    if (group.rows_data) group.rows_data += found.result_start;
    if (group.columns_data) group.columns_data += found.result_start;
    move_scales(found);
    // transposed data have rows of found.rows bytes
    const auto allows_wide = [&](const u8* data) {
        return found.rows % 16 == 0 && reinterpret_cast<u64>(data) % 16 == 0;
    };
    if ((group.stored & 3) == 2 && !allows_wide(group.rows_data)) group.vector &= ~2u;
    if (group.stored >> 2 == 2 && !allows_wide(group.columns_data)) group.vector &= ~4u;
}

// Clears this thread block's share of the data outside all groups, and of the scales past the last group. The
// same bytes are cleared in both directions, since rows outside groups have no layout. column: the thread
// block's first one.
template <class Tile, class Params, class Matrix>
__device__ __forceinline__ void clear_past_groups(const Params& p, const Matrix& group,
                                                  const RowSegment& found, u32 across, i64 column) {
    constexpr int kThreads = Tile::kThreads;
    const int width = left_of(p.all.columns - column, Tile::kColumns);
    const auto clear = [&](u8* data) {
        if (data) clear_rows<kThreads>(as_global(data) + column, found.rows, width, p.all.columns);
    };
    clear(group.rows_data);
    clear(group.columns_data);
    const i64 share = found.index * p.groups.across + across, shares = gridDim.x - (blockIdx.x - share);
    p.along_rows.template clear_rest<kThreads>(p.all.along_rows.to, found.units_before[0], share, shares);
    p.along_columns.template clear_rest<kThreads>(p.all.along_columns.to, found.units_before[1], share,
                                                  shares);
}

// Writes to shared memory this thread block's group as a matrix of the results, and its tile (the first of up
// to kTiles tiles, one below the other). Call from all threads; ends after a barrier. Returns false if there
// is no tile. A thread block whose rows belong to no group clears its share of the results.
template <class Tile, int kTiles = 1, class Params, class Matrix, class MoveScales>
__device__ __forceinline__ bool find_group_tile(const Params& p, Matrix& group, TilePosition& at,
                                                RowSegment& found, MoveScales move_scales) {
    constexpr u32 kSegmentRows = kTiles * Tile::kRows;
    static_assert((kSegmentRows & kSegmentRows - 1) == 0, "find_segment takes the logarithm");
    constexpr u32 kSegmentRowsLog2 = log2_of(kSegmentRows);
    const u32 segment = blockIdx.x / p.groups.across, across = blockIdx.x - segment * p.groups.across;
    const i64 column = (i64)across * Tile::kColumns;
    if (threadIdx.x < 32) {
        static_assert(sizeof(Matrix) % sizeof(u32) == 0, "copied by words");
        for (u32 i = threadIdx.x; i < sizeof(Matrix) / sizeof(u32); i += 32)
            reinterpret_cast<u32*>(&group)[i] = reinterpret_cast<const u32*>(&p.all)[i];
        const u32 first_shift = p.along_rows.unit_shift, second_shift = p.along_columns.unit_shift;
        if (p.groups.segments) load_segment(p.groups, segment, found);
        else find_segment<true, true>(p.groups, segment, kSegmentRowsLog2, first_shift, second_shift, found);
        if (threadIdx.x == 0) {
            at = {0, found.index * kSegmentRows, column};
            point_at_group(group, found, move_scales);
        }
        if (blockIdx.x == 0) write_offsets(p.groups);
    }
    __syncthreads();
    if (found.group >= 0) return found.rows != 0;
    clear_past_groups<Tile>(p, group, found, across, column);
    return false;
}

// Quantises this thread block's tiles of a group of rows, or of an array in a list.
//   p            the parameters: `all` describes an array. Beside it are `groups`, with `along_rows` and
//                `along_columns` (places of the scales of each direction), or `list`.
//   group        room in shared memory for the parameters of one matrix
//   move_scales  move_scales(found) moves the addresses of scales to those of the group
//   quantize     quantize(at, given, tiles) quantises `tiles` tiles from that place down: kTiles, or fewer at
//                the end of the matrix, or one for an array in a list. x has `given` rows of the matrix; the
//                rest are zeros.
template <class Tile, int kTiles = 1, class Params, class Matrix, class MoveScales, class Quantize>
__device__ __forceinline__ void quantize_group(const Params& p, Matrix& group, MoveScales move_scales,
                                               Quantize quantize) {
    __shared__ TilePosition at;
    __shared__ RowSegment found;
    if (is_set(p.all.noop)) return;
    if (p.list.arrays) {
        if (threadIdx.x < 32) p.list.template find<Tile>(group, at);
        if (threadIdx.x == 0) found.rows_in_x = group.rows;
        __syncthreads();
    } else if (!find_group_tile<Tile, kTiles>(p, group, at, found, move_scales)) return;
    const bool single = kTiles == 1 || p.list.arrays;
    const int rows = left_of(group.rows - at.row, kTiles * Tile::kRows);
    const int tiles = single ? 1 : (rows + Tile::kRows - 1) / Tile::kRows;
    quantize(at, found.rows_in_x, tiles);
}
