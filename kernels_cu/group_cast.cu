// Per-tensor scaling of groups of consecutive rows, each with its own scale; sizes are on the device (docs/numerics.md, sections 1 and 7).
//
//   data = narrow(fl(x * scale[g]))    data_t = each group's data transposed    scale_inv = fl(1 / scale)    amax = max(amax, max |x|)
//
// group_cast_transpose  x [rows, columns] -> data [rows, columns], and data_t flat: each group's [columns, m], where its data are. Every group is cut
//                       into tiles of TILE_ROWS x TILE_COLUMNS elements, and a block of threads casts one, as cast_transpose does
//                       (cast_tile.cuh); its first warp finds which by a scan over the sizes. What follows the last group is written as 0, by
//                       tiles of its own. Block 0 also writes scale_inv of every group, and the offsets where none are given. Either output
//                       may be absent (null). LARGE 1: every row of x and data allows chunked access, and no code is made for anything else.
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}. Bytes moved per element: sizeof(IN) + outputs.
// Facts of the device made harmless: a negative size counts as 0, a group that goes past the last row ends there, one whose given offset
// is not that of a row, or leads out of the arrays, is left out.
#include "cast_tile.cuh"
#include "groups.cuh"

struct GroupCastParams {
    const IN::storage* x;
    u8* data;                    // or null
    u8* data_t;                  // or null
    const float* scale;          // [groups]
    float* scale_inv;            // [groups]
    float* amax;                 // [groups], raised, or null
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    const i64* offsets;          // [groups + 1], in elements, or null: sums of the sizes
    i64* offsets_out;            // [groups + 1], or null
    Splits splits;
    i64 rows, columns;
    u32 across;                  // tiles along a row
    u32 aligned;                 // every row of x and data allows chunked access
};

// A group, or part of it, as cast_tile takes a matrix.
struct GroupTensor {
    const IN::storage* x;
    u8* data;
    u8* data_t;
    float* amax;
    i64 rows, columns;
    i64 index, start, tile;      // of the group: -1: none; its first element; which of its tiles along the rows
    TilePosition at;
    float scale;
    u32 aligned, vector;

    __device__ __forceinline__ bool rowwise() const { return data; }
    __device__ __forceinline__ bool columnwise() const { return data_t; }
    // The compiler has to be told that what a struct in shared memory points to is global.
    static __device__ __forceinline__ u8* global(u8* p) {
#ifdef CUPY_FP8_HOST
        return p;
#else
        return static_cast<u8*>(__cvta_global_to_generic(__cvta_generic_to_global(p)));
#endif
    }
};

// As in cast.cu: 1024 threads per multiprocessor on an H200, where everything fits into the 64 registers that leaves each.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kBlocks = (kLoads == 2 || !LARGE ? 512 : 1024) / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

__device__ __forceinline__ i64 size_of(const GroupCastParams& p, i64 group) {
    const i64 size = p.splits.load(group);
    return size < 0 ? 0 : size > p.rows ? p.rows + 1 : size;         // sums stay small, and still differ from rows
}
__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// By one whole warp: the group of the tile-th run of TILE_ROWS rows.
__device__ __forceinline__ void find_tile(const GroupCastParams& p, i64 tile, GroupTensor& found) {
    constexpr int kPerLane = 4;
    const int lane = threadIdx.x % 32;
    i64 round_start = 0, round_tile = 0;                             // rows and tiles before this round's groups
    for (i64 round = 0; round < p.splits.groups && round_tile <= tile; round += 32 * kPerLane) {
        i64 size[kPerLane], rows = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) rows += size[u] = size_of(p, round + lane * kPerLane + u);
        const i64 end = warp_prefix_sum(rows);
        i64 start = smaller(round_start + end - rows, p.rows), at = start, tiles = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            size[u] = smaller(size[u], p.rows - at);
            at += size[u];
            tiles += (size[u] + TILE_ROWS - 1) / TILE_ROWS;
        }
        const i64 end_tile = warp_prefix_sum(tiles);
        i64 own_tile = round_tile + end_tile - tiles;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const i64 own_tiles = (size[u] + TILE_ROWS - 1) / TILE_ROWS;
            if (tile >= own_tile && tile < own_tile + own_tiles) {
                found.index = round + lane * kPerLane + u;
                found.start = start * p.columns, found.rows = size[u], found.tile = tile - own_tile;
            }
            own_tile += own_tiles;
            start += size[u];
        }
        round_start = smaller(round_start + __shfl_sync(~0u, end, 31), p.rows);
        round_tile += __shfl_sync(~0u, end_tile, 31);
    }
    if (lane == 0 && tile >= round_tile) {                           // past the last group
        const i64 start = round_start + (tile - round_tile) * TILE_ROWS;
        found.index = -1, found.start = start * p.columns, found.rows = left_of(p.rows - start, TILE_ROWS), found.tile = 0;
    }
}

// Zeros in the tile of rows that no group has: the same bytes of both outputs, whose layouts mean nothing there.
__device__ __forceinline__ void clear_tile(const GroupTensor& t, i64 column) {
    const int width = left_of(t.columns - column, TILE_COLUMNS), lines = (int)t.rows;
    const bool whole = t.columns % 16 == 0 && (reinterpret_cast<u64>(t.data) | reinterpret_cast<u64>(t.data_t)) % 16 == 0;
    const int step = whole ? 16 : 1, across = width / step;
    for (int i = threadIdx.x; i < lines * across; i += Tile::kThreads) {
        const i64 at = t.start + i / across * t.columns + column + i % across * step;
#pragma unroll
        for (int output = 0; output < 2; output++) {
            u8* to = output ? t.data_t : t.data;
            if (!to) continue;
            if (whole) Chunk<e8m0fnu, 16>{}.store_whole(t.global(to) + at);
            else t.global(to)[at] = 0;
        }
    }
}

// By a whole block: what there is one of for each group. Notes sizes and offsets that are wrong.
__device__ __forceinline__ void write_groups(const GroupCastParams& p) {
    for (i64 g = threadIdx.x; g < p.splits.groups; g += Tile::kThreads) {
        write_scale_inv(p.scale[g], p.scale_inv + g, nullptr);
        if (p.amax) raise_amax(p.amax + g, 0, load_relaxed(p.amax + g));
    }
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    i64 before = 0;
    u32 wrong = 0;
    for (i64 round = 0; round < p.splits.groups; round += 32) {
        const i64 g = round + lane, size = size_of(p, g), end = before + warp_prefix_sum(size), start = end - size;
        if (p.splits.load(g) < 0) wrong |= kSplitNegative;
        if (end > p.rows) wrong |= kSplitSum;
        if (g < p.splits.groups) {
            if (p.offsets && p.offsets[g] != start * p.columns) wrong |= kSplitSum;
            if (p.offsets_out) p.offsets_out[g] = smaller(start, p.rows) * p.columns;
        }
        before = smaller(__shfl_sync(~0u, end, 31), p.rows + 1);
    }
    if (lane == 0 && p.offsets_out) p.offsets_out[p.splits.groups] = smaller(before, p.rows) * p.columns;
    report(p.splits.errors, wrong);
}

#ifdef ENTRY_group_cast_transpose
extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks) group_cast_transpose(const __grid_constant__ GroupCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ GroupTensor tensor;                                   // not in registers, of which the tile needs all
    if (is_set(p.noop)) return;
    if (threadIdx.x < 32) {
        const u32 run = blockIdx.x / p.across;
        find_tile(p, run, tensor);
        __syncwarp();
        if (threadIdx.x == 0) {
            const i64 group = tensor.index;
            if (group >= 0 && p.offsets) {
                tensor.start = p.offsets[group];
                if (tensor.start < 0 || tensor.start > (p.rows - tensor.rows) * p.columns || (p.columns && tensor.start % p.columns))
                    tensor.start = 0, tensor.rows = 0;
            }
            const i64 start = group >= 0 ? tensor.start : 0;         // clear_tile() counts from the beginning
            tensor.columns = p.columns;
            tensor.x = p.x + start;
            tensor.data = p.data ? p.data + start : nullptr;
            tensor.data_t = p.data_t ? p.data_t + start : nullptr;
            tensor.amax = p.amax && group >= 0 ? p.amax + group : nullptr;
            tensor.aligned = p.aligned;
            tensor.at = {0, tensor.tile * TILE_ROWS, (i64)(blockIdx.x - run * p.across) * TILE_COLUMNS};
            tensor.scale = group >= 0 ? p.scale[group] : 0.0f;
            tensor.vector = tensor.rows % 16 == 0 && reinterpret_cast<u64>(tensor.data_t) % 16 == 0;
        }
    }
    __syncthreads();
    if (tensor.rows > 0 && tensor.columns > 0) {
        if (tensor.index < 0) clear_tile(tensor, tensor.at.column);
        else if (tensor.aligned && tensor.vector) cast_tile<2>(tensor, tensor.at, tensor.scale, shared);
        else if (LARGE || tensor.aligned) cast_tile<1>(tensor, tensor.at, tensor.scale, shared);
        else cast_tile<0>(tensor, tensor.at, tensor.scale, shared);
    }
    if (blockIdx.x == 0) write_groups(p);
}
#endif
