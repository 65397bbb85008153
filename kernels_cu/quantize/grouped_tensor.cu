// Per-tensor scaling of groups of consecutive rows, each with its own scale; sizes are on the device
// (docs/numerics.md, sections 1 and 7).
//
//   data = narrow(fl(x * scale[g]))    data_t = each group's data transposed    scale_inv = fl(1 / scale)
//   amax = max(amax, max |x|)
//
// group_cast_transpose  x [rows, columns] -> data [rows, columns], and data_t flat: each group's [columns,
//                       m], where its data are. Every group is cut into tiles of TILE_ROWS x TILE_COLUMNS
//                       elements, one per thread block, as in cast_transpose (include/tile/cast_tile.cuh).
//                       Its first warp finds the tile by a scan over the sizes, unless group_find_segments
//                       has found it. What follows the last group is written as 0, by tiles of its own. Block
//                       0 also writes scale_inv of every group, and the offsets where none are given. Either
//                       output may be absent (null). With `align` every group is padded there with rows of
//                       zeros, cast like the others, and block 0 writes the aligned sizes too.
// group_cast_current    the same with the scale from each group's own amax, found from the same read
//                       (include/tile/single_read.cuh) where groups fit into the SMs; tiles of 128 x 128
//                       elements, whose segments have been found. For x and data all of whose rows allow
//                       chunked access.
// IN, OUT                  {bf16, f16, f32}, {e4m3fn, e5m2}: formats of x and data. group_cast_current:
//                          16-bit x alone.
// TILE_ROWS, TILE_COLUMNS  one thread per 8 x 8 elements of a tile, and shared memory for its codes.
// LARGE                    1: every row of x and data allows chunked access, and the segments have been
//                          found; no code for anything else, which leaves registers for large tiles. Thread
//                          blocks take further tiles after their first one, since the grid is smaller than
//                          the number of tiles that groups of any sizes may need.
// DBIAS                    0: the column sums of cast_tile.cuh are for other kernels.
// Bytes moved per element: sizeof(IN) + outputs.
#ifdef ENTRY_group_cast_current
#include "tile/single_read.cuh"
#else
#include "tile/cast_tile.cuh"
#endif
#include "groups/row_groups.cuh"

#ifdef ENTRY_group_cast_transpose
struct GroupCastParams {
    const IN::storage* x;
    u8* data;                    // or null
    u8* data_t;                  // or null
    const float* scale;          // [groups]
    float* scale_inv;            // [groups]
    float* amax;                 // [groups], raised, or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    RowGroups groups;
    u32 aligned;                 // every row of x and data allows chunked access
    u32 reverse;                 // 1: start with the last rows, which the L2 holds after the amax
    u32 tiles;                   // for groups of any sizes; grids are smaller if segments are known
};

// A group, and a thread block's tile of it.
struct GroupTensor {
    const IN::storage* x;
    u8 *data, *data_t;           // or null
    float* amax;
    i64 given, rows, columns;    // the group's rows in x, rows written
    RowSegment found;
    TilePosition at;
    u32 aligned, vector;
    u32 in_x;                    // 1: x has all written rows of the tile
    u32 next;                    // the thread block's next tile, numbered like thread blocks
};

// View of a group for cast_tile(). For whole tiles x and columns are in registers, so that loads do not wait
// for them; the other paths have no registers left.
template <class X, class Columns>
struct GroupView {
    X x;
    Columns columns;
    SharedOutput data, data_t;
    SharedMember<i64> given, rows;
    SharedMember<float*> amax;
    SharedMember<u32> vector;

    __device__ __forceinline__ GroupView(X x, Columns columns, const GroupTensor& t)
        : x(x), columns(columns), data{&t.data}, data_t{&t.data_t}, given{&t.given}, rows{&t.rows},
          amax{&t.amax}, vector{&t.vector} {}
    __device__ __forceinline__ bool rowwise() const { return *data.at; }
    __device__ __forceinline__ bool columnwise() const { return *data_t.at; }
};
template <class X, class Columns>
constexpr bool kPads<GroupView<X, Columns>> = true;

constexpr u32 kTileRowsLog2 = log2_of(TILE_ROWS);

// 1024 threads per SM on an H200, as in tensor.cu: everything fits into the 64 registers that each thread
// then has.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kBlocks = (kLoads == 2 || !LARGE ? 512 : 1024) / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

// Writes zeros to the tile of rows that no group has: the same bytes of both outputs, whose layouts mean
// nothing there.
__device__ __forceinline__ void clear_tile(const GroupTensor& t) {
    const int width = left_of(t.columns - t.at.column, TILE_COLUMNS);
    if (t.data) clear_rows<Tile::kThreads>(as_global(t.data) + t.at.column, t.rows, width, t.columns);
    if (t.data_t) clear_rows<Tile::kThreads>(as_global(t.data_t) + t.at.column, t.rows, width, t.columns);
}

// Describes a tile, numbered like thread blocks. Call from one warp. ahead: the segment of the thread block's
// next tile, copied while the block casts this one.
__device__ __forceinline__ void find_tile(const GroupCastParams& p, u32 own, RowSegment& ahead,
                                          GroupTensor& tensor) {
    const u32 tile = p.reverse ? p.tiles - 1 - own : own, segment = tile / p.groups.across;
    const u32 next = own + gridDim.x, lane = threadIdx.x % 32;
    if (LARGE) {
        if (own == blockIdx.x) {
            load_segment(p.groups, segment, tensor.found);
        } else {
            copy_async_wait();
            __syncwarp();
            if (lane < kSegmentWords)
                reinterpret_cast<u32*>(&tensor.found)[lane] = reinterpret_cast<const u32*>(&ahead)[lane];
            __syncwarp();
        }
        if (next < p.tiles && lane < kSegmentWords / 4) {
            const u32 next_segment = (p.reverse ? p.tiles - 1 - next : next) / p.groups.across;
            copy_async(reinterpret_cast<u8*>(&ahead) + lane * 16,
                       reinterpret_cast<const u8*>(p.groups.segments + next_segment) + lane * 16);
        }
    } else {
        find_segment<false, true>(p.groups, segment, kTileRowsLog2, 0, 0, tensor.found);
    }
    if (lane != 0) return;
    const i64 group = tensor.found.group, to = tensor.found.result_start;
    tensor.given = tensor.found.rows_in_x, tensor.rows = tensor.found.rows, tensor.columns = p.groups.columns;
    tensor.x = p.x + tensor.found.start;
    tensor.data = p.data ? p.data + to : nullptr;
    tensor.data_t = p.data_t ? p.data_t + to : nullptr;
    tensor.amax = p.amax && group >= 0 ? p.amax + group : nullptr;
    tensor.aligned = p.aligned;
    tensor.at = {0, tensor.found.index * TILE_ROWS, (i64)(tile - segment * p.groups.across) * TILE_COLUMNS};
    tensor.vector = tensor.rows % 16 == 0 && reinterpret_cast<u64>(tensor.data_t) % 16 == 0;
    tensor.in_x = tensor.given == tensor.rows || tensor.at.row + TILE_ROWS <= tensor.given;
    tensor.next = next;
}

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
group_cast_transpose(const __grid_constant__ GroupCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ GroupTensor tensor;  // in shared memory, since the tile needs all registers
    __shared__ __align__(16) RowSegment ahead;
    if (is_set(p.noop)) return;
#pragma unroll 1
    for (u32 own = blockIdx.x;;) {
        if (threadIdx.x < 32) find_tile(p, own, ahead, tensor);
        __syncthreads();
        if (tensor.rows > 0 && tensor.columns > 0) {
            // in flight together with the loads of x
            const float scale = tensor.found.group < 0 ? 0.0f : load_read_only(p.scale + tensor.found.group);
            const TilePosition at = {0, tensor.at.row, tensor.at.column};
            const GroupView<const IN::storage*, i64> whole(tensor.x, tensor.columns, tensor);
            using SharedX = SharedMember<const IN::storage*>;
            const GroupView<SharedX, SharedMember<i64>> any({&tensor.x}, {&tensor.columns}, tensor);
            if (tensor.found.group < 0) clear_tile(tensor);
            else if (tensor.aligned && tensor.vector && tensor.in_x) cast_tile<2>(whole, at, scale, shared);
            else if (LARGE || tensor.aligned) cast_tile<1>(any, at, scale, shared);
            else cast_tile<0>(any, at, scale, shared);
        }
        own = tensor.next;
        if (!LARGE || own >= p.tiles) break;
        __syncthreads();
    }
    if (blockIdx.x > 0) return;
    for (i64 g = threadIdx.x; g < p.groups.splits.groups; g += Tile::kThreads) {
        write_scale_inv(p.scale[g], p.scale_inv + g, nullptr);
        if (p.amax) raise_amax(p.amax + g, 0, load_relaxed(p.amax + g));
    }
    if (threadIdx.x < 32) write_offsets(p.groups);
}
#endif

#ifdef ENTRY_group_cast_current
struct GroupCurrentParams {
    const IN::storage* x;
    u8* data;                    // or null
    u8* data_t;                  // or null
    float* scale_inv;            // [groups]
    float* amax;                 // [groups], raised, or null
    const float* noop;           // one element: 1.0 = write nothing; or null
    u64* amax_of_launch;         // [groups] with a tile: the launch, then the amax; initially zero
    RowGroups groups;
    SingleRead single_read;
};

struct GroupTensors {
    const GroupCurrentParams& p;
    // step from a thread block's tile to its next: whole segments, and further tiles
    u32 segments_per_step, tiles_per_step;

    explicit __device__ __forceinline__ GroupTensors(const GroupCurrentParams& p)
        : p(p), segments_per_step(gridDim.x / p.groups.across), tiles_per_step(gridDim.x % p.groups.across) {}

    // The search reads ahead: the next tile's segment, the place `at` along the segment's rows, and this
    // lane's word of the segment's record.
    struct Ahead {
        u32 tile = ~0u, segment, at, word;
    };

    __device__ __forceinline__ u32 word_of(u32 tile, u32 segment) const {
        const RowSegment* const found = p.groups.segments + (tile < p.single_read.tiles ? segment : 0);
        const u32* const from = reinterpret_cast<const u32*>(found);
        return threadIdx.x % 32 < kSegmentWords ? load_read_only(from + threadIdx.x % 32) : 0;
    }
    __device__ __forceinline__ bool find(u32 tile, Ahead& ahead, Visit& to) const {
        __shared__ RowSegment by_warp[kLoaders / 32];
        RowSegment& found = by_warp[threadIdx.x / 32 % (kLoaders / 32)];
        if (ahead.tile != tile) {
            ahead.segment = tile / p.groups.across, ahead.at = tile - ahead.segment * p.groups.across;
            ahead.word = word_of(tile, ahead.segment);
        }
        const u32 segment = ahead.segment, across = ahead.at;
        if (threadIdx.x % 32 < kSegmentWords) reinterpret_cast<u32*>(&found)[threadIdx.x % 32] = ahead.word;
        __syncwarp();
        ahead.tile = tile + gridDim.x, ahead.segment += segments_per_step, ahead.at += tiles_per_step;
        if (ahead.at >= p.groups.across) ahead.segment++, ahead.at -= p.groups.across;
        ahead.word = word_of(ahead.tile, ahead.segment);
        if (threadIdx.x % 32 == 0) {
            const bool past_groups = found.group < 0;
            const i64 columns = p.groups.columns, column = (i64)across * kTileSide;
            const i64 row = past_groups ? 0 : found.index * kTileSide;
            const i64 in_group = row * columns + column;
            const i64 in_group_t = past_groups ? in_group : column * found.rows + row;
            u8* const data_t = p.data_t ? p.data_t + found.result_start + in_group_t : nullptr;
            u8* const data = p.data ? p.data + found.result_start + in_group : nullptr;
            const u32 first = (segment - (u32)found.index) * p.groups.across;
            const u32 tiles = (u32)((found.rows + kTileSide - 1) / kTileSide) * p.groups.across;
            const u32 vector = found.rows % 16 == 0 && reinterpret_cast<u64>(data_t) % 16 == 0;
            to = {p.x + found.start + in_group, data, data_t, found.rows, columns, found.group, tile, first,
                  tiles, left_of(found.rows_in_x - row, kTileSide), left_of(found.rows - row, kTileSide),
                  left_of(columns - column, kTileSide), vector, past_groups ? (u32)kClear : 0};
        }
        __syncwarp();
        return to.rows > 0;
    }
    __device__ __forceinline__ void first_tile(const Visit& visit, u32 launch, u32 amax, float) const {
        store_relaxed(p.amax_of_launch + visit.matrix, in_launch(launch, amax));
    }
    __device__ __forceinline__ void clear(const Visit& visit) const {
        const int rows = visit.rows_left, width = visit.columns_left;
        if (visit.data) clear_rows<kConsumers>(as_global(visit.data), rows, width, visit.columns);
        if (visit.data_t) clear_rows<kConsumers>(as_global(visit.data_t), rows, width, visit.columns);
    }
    // Writes the scales of all groups, including those without a tile.
    __device__ __forceinline__ void last(u32 launch) const {
        for (i64 g = threadIdx.x; g < p.groups.splits.groups; g += kConsumers) {
            const u64 published = load_relaxed(p.amax_of_launch + g);
            const u32 amax = is_of(published, launch) ? (u32)published : 0;
            write_scale_inv(p.single_read.rule.scale_of(as_float(amax)), p.scale_inv + g, nullptr);
            if (p.amax) raise_amax(p.amax + g, amax, load_relaxed(p.amax + g));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kSingleReadThreads)
group_cast_current(const __grid_constant__ GroupCurrentParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    if (blockIdx.x == 0 && threadIdx.x < 32) write_offsets(p.groups);
    cast_single_read(GroupTensors(p), p.single_read, shared);
}
#endif
