// Cast of one tile of a matrix by a thread block, in both directions from one read (tensor.cu,
// tensor_list.cu, grouped_tensor.cu). Defines: IN, OUT, TILE_ROWS, TILE_COLUMNS, and DBIAS 1 (column sums
// before scaling). cast_tile() does all of it. Kernels may also call its steps, which read these members of
// the tensor p:
//   find_patch      rows, columns; `given` if kPads<Tensor>
//   load_rows       x, columns
//   cast_rows       rowwise(), data, columns
//   store_columns   data_t, rows, columns; `vector` if kAligned < 2
//   cast_tile       all of these, columnwise(), amax; column_sums if DBIAS
// kAligned 0: element by element. 1: every row of x and data allows chunked access. 2: so does every row of
// data_t (16-byte stores), and all patches are whole and in x, so `vector` is not read.
#pragma once
#include "scale/cast.cuh"
#include "numerics/tree_sum.cuh"
#include "tile/tile.cuh"

constexpr int kLoad = 16 / sizeof(IN::storage);                      // elements per 16-byte load
constexpr int kLoads = 8 / kLoad;                                    // loads per patch row
// Loads in flight per thread; the sums of DBIAS leave registers for half of them on Blackwell.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kInFlight = DBIAS ? 4 : 8;
#else
constexpr int kInFlight = 8;
#endif
constexpr int kRowsAtOnce = kInFlight / kLoads;
constexpr u32 kAbsentWord = sizeof(IN::storage) == 4 ? kAbsentTerm : kAbsentTerm >> 16 | kAbsentTerm;

using Tile = ByteTile<TILE_ROWS, TILE_COLUMNS>;

// Column sums of the tile: eight sums of this thread's patch, then of the patches above and below it.
struct PatchSums {
    TreeSum<8> column[8];

    __device__ __forceinline__ void add(int row, int load, const Chunk<IN, kLoad>& in) {
#pragma unroll
        for (int i = 0; i < kLoad / 2; i++) {
            float lo, hi;
            in.widen2(i, lo, hi);
            column[load * kLoad + 2 * i].add(row, lo);
            column[load * kLoad + 2 * i + 1].add(row, hi);
        }
    }
    // sums: [pairs of row patches, columns of the tile] in shared memory. The other patch of a pair is 16
    // lanes away; each thread adds up half of the columns.
    __device__ __forceinline__ void share(float* sums) const {
        static_assert(!DBIAS || Tile::kColumnPatches == 16, "half a warp per row of patches");
        const bool lower = Tile::row_patch() % 2;
        float pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float upper_half = column[i].sum(), lower_half = column[4 + i].sum();
            const float other = __shfl_xor_sync(~0u, lower ? upper_half : lower_half, 16);
            pair[i] = add_rn(lower ? lower_half : upper_half, other);
        }
        store_shared_whole(sums + Tile::row_patch() / 2 * TILE_COLUMNS + Tile::patch_column() + lower * 4,
                           as_bits(pair[0]), as_bits(pair[1]), as_bits(pair[2]), as_bits(pair[3]));
    }
    static __device__ __forceinline__ void write(const float* sums, float* to, i64 columns_left) {
        if ((int)threadIdx.x >= TILE_COLUMNS || threadIdx.x >= columns_left) return;
        TreeSum<Tile::kRowPatches / 2> column;
#pragma unroll
        for (int r = 0; r < Tile::kRowPatches / 2; r++) column.add(r, sums[r * TILE_COLUMNS + threadIdx.x]);
        to[threadIdx.x] = as_float(f32::narrow(column.sum()));
    }
};

// True if a Tensor may have fewer rows in x (`given`) than are written; the rest are zeros.
template <class Tensor>
constexpr bool kPads = false;

// A tensor's members stay in shared memory until they are used: the tile needs all registers.
template <class T>
struct SharedMember {
    const T* at;
    __device__ __forceinline__ operator T() const { return *at; }
};
struct SharedOutput {
    u8* const* at;               // address of a pointer to global memory (as the compiler must be told), or
                                 // of null: not written
};
__device__ __forceinline__ u8* operator+(const SharedOutput& p, i64 offset) {
    return as_global(*p.at) + offset;
}

// A thread's patch of 8 x 8 elements in x, and the rows and columns that exist in the results and
// (given_left) in x.
struct CastPatch {
    i64 at;
    int rows_left, columns_left, given_left;
};

// Returns this thread's patch of the tile at `at`.
template <int kAligned, class Tensor>
__device__ __forceinline__ CastPatch find_patch(const Tensor& p, const TilePosition& at) {
    const i64 row = at.row + Tile::patch_row(), column = at.column + Tile::patch_column();
    int rows_left = left_of(p.rows - row, 8), columns_left = left_of(p.columns - column, 8);
    // Patches are whole, so one predicate serves all loads.
    if (kAligned == 2) rows_left = columns_left = rows_left && columns_left ? 8 : 0;
    int given_left = rows_left;
    if constexpr (kPads<Tensor> && kAligned < 2) given_left = left_of(p.given - row, 8);
    return {(at.matrix * p.rows + row) * p.columns + column, rows_left, columns_left, given_left};
}

using CastInput = Chunk<IN, kLoad>[kRowsAtOnce][kLoads];

// Loads kRowsAtOnce rows of a patch; absent rows are zeros.
template <int kAligned, class Tensor>
__device__ __forceinline__ void load_rows(const Tensor& p, const CastPatch& patch, int first,
                                          CastInput& in) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++)
#pragma unroll
        for (int l = 0; l < kLoads; l++) {
            const IN::storage* from = p.x + patch.at + (first + r) * p.columns + l * kLoad;
            const int left = first + r < patch.given_left ? patch.columns_left - l * kLoad : 0;
            if (!kAligned) in[r][l] = Chunk<IN, kLoad>::load_partial(from, left);
            else if (left > 0) in[r][l] = Chunk<IN, kLoad>::load(from);
            else in[r][l] = {};
            if (DBIAS && first + r >= patch.rows_left)
#pragma unroll
                for (u32& word : in[r][l].word) word = kAbsentWord;
        }
}

// Casts these rows to `codes`, stores them row-wise, and adds them to the amax and the column sums.
template <int kAligned, class Tensor>
__device__ __forceinline__ void cast_rows(const Tensor& p, const CastPatch& patch, int first,
                                          const CastInput& in, float scale, Chunk<OUT, 8> (&codes)[8],
                                          Amax<IN>& amax, PatchSums& sums) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) {
#pragma unroll
        for (int l = 0; l < kLoads; l++) {
            amax.add(in[r][l]);
            if (DBIAS) sums.add(first + r, l, in[r][l]);
            const auto out = scale_and_narrow(in[r][l], scale);
#pragma unroll
            for (int w = 0; w < out.kWords; w++) codes[first + r].word[l * out.kWords + w] = out.word[w];
        }
        if (p.rowwise() && first + r < patch.rows_left) {
            OUT::storage* to = p.data + patch.at + (first + r) * p.columns;
            if (!kAligned) codes[first + r].store_partial(to, patch.columns_left);
            else if (patch.columns_left > 0) codes[first + r].store(to);
        }
    }
}

// Stores the columns of a tile as rows of data_t.
template <int kAligned, class Tensor>
__device__ __forceinline__ void store_columns(const Tensor& p, const Tile& tile, const TilePosition& at) {
    if (kAligned < 2 && !p.vector) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || __CUDACC_VER_MAJOR__ < 13)
        // with more threads the compiler spills
        constexpr bool kBySectors = Tile::kRows == 256 && Tile::kThreads == 512;
#else
        constexpr bool kBySectors = Tile::kRows == 256;
#endif
        tile.template store_ragged<kBySectors>(
            p.data_t + (at.matrix * p.columns + at.column) * p.rows + at.row, p.rows,
            left_of(p.columns - at.column, TILE_COLUMNS), left_of(p.rows - at.row, TILE_ROWS));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
        const i64 to_row = at.column + Tile::column<16>(unit), to_column = at.row + Tile::row<16>();
        if (to_row < p.columns && to_column < p.rows)
            tile.read<OUT, 16>(unit).store(p.data_t + (at.matrix * p.columns + to_row) * p.rows + to_column);
    }
}

// Casts the tile at `at`. rowwise() and columnwise() of p select the directions. shared: the tile, then the
// sums.
template <int kAligned, class Tensor>
__device__ __forceinline__ void cast_tile(const Tensor& p, TilePosition at, float scale, u8* shared) {
    const Tile tile{shared};
    // In shared memory the position frees six registers while the sums need them.
    __shared__ TilePosition shared_at;
    if (DBIAS && threadIdx.x == 0) shared_at = at;
    const CastPatch patch = find_patch<kAligned>(p, at);
    Chunk<OUT, 8> codes[8];
    Amax<IN> amax;
    PatchSums sums;
#pragma unroll
    for (int first = 0; first < 8; first += kRowsAtOnce) {
        CastInput in;
        load_rows<kAligned>(p, patch, first, in);
        cast_rows<kAligned>(p, patch, first, in, scale, codes, amax, sums);
    }
    if (p.columnwise()) tile.write_patch(codes);
    float* const shared_sums = reinterpret_cast<float*>(shared + p.columnwise() * TILE_ROWS * TILE_COLUMNS);
    if (DBIAS) sums.share(shared_sums);
    __shared__ u32 per_warp[Tile::kThreads / 32];
    const BlockMax<Tile::kThreads> block_amax{per_warp};
    // The sums of DBIAS leave no register for the amax until later; without them, later is cheaper.
    if (DBIAS && p.amax) block_amax.put(amax.f32_bits());
    if (p.columnwise() || DBIAS) __syncthreads();
    if (DBIAS) at = shared_at;
    if (p.columnwise()) store_columns<kAligned>(p, tile, at);
    if constexpr (DBIAS != 0) {
        const i64 tiles_down = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
        const i64 of_tile = at.matrix * tiles_down + at.row / TILE_ROWS;
        PatchSums::write(shared_sums, p.column_sums + of_tile * p.columns + at.column, p.columns - at.column);
    }
    if (!p.amax) return;
    if (!DBIAS) {
        block_amax.put(amax.f32_bits());
        __syncthreads();
    }
    const u32 amax_bits = block_amax.get();
    if (threadIdx.x == 0) raise_amax(p.amax, amax_bits, load_relaxed(p.amax));
}
