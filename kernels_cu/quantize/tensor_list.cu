// Per-tensor scaling of a list of matrices of any shapes in one launch, each with its own scale
// (docs/numerics.md, section 1).
//
//   data = narrow(fl(x * scale))      data_t = data transposed      scale_inv = fl(1 / scale)
//   amax = max(amax, max |x|)
//
// A table has a record per matrix, and the index of its record for each thread block: one load, instead of a
// search over prefix sums, which would wait for several in sequence.
//
// multi_cast_transpose  Every matrix is cut into tiles of TILE_ROWS x TILE_COLUMNS elements, one per thread
//                       block, as in cast_transpose (cast_tile.cuh). Records of few matrices are passed as
//                       kernel arguments. Either output may be absent (null). Bytes moved per element:
//                       sizeof(IN) + outputs.
// multi_amax_scale      Current scaling: computes the scale from each matrix's own amax, before
//                       multi_cast_transpose, on the same table. The thread blocks of a matrix take equal
//                       shares of its elements. The last one to finish writes the scale, and leaves zeros in
//                       the workspace, so that a captured graph replays. Bytes moved per element: sizeof(IN).
// multi_cast_current    Current scaling from one read, of matrices that fit into the SMs (single_read.cuh),
//                       on the same table: the thread blocks of a matrix are its tiles of 128 x 128 elements.
//                       For matrices all of whose rows allow chunked access.
//
// An empty matrix has a thread block too, which writes its scale_inv.
//
// Defines:
//   IN, OUT      {bf16, f16, f32}, {e4m3fn, e5m2}: formats of x and data. multi_amax_scale has no OUT.
//   TILE_ROWS, TILE_COLUMNS   the tile of multi_cast_transpose
//   DBIAS        0 for multi_cast_transpose: the column sums of cast_tile.cuh are for other kernels.
#include "memory/elementwise.cuh"
#include "scale/scale.cuh"
#ifdef ENTRY_multi_cast_transpose
#include "tile/cast_tile.cuh"
#elif defined(ENTRY_multi_cast_current)
#include "tile/single_read.cuh"
#else
#include "numerics/amax.cuh"
#endif

// Record of one matrix, packed by ops/quantize/tensor_list.py.
struct alignas(16) MultiTensor {
    const IN::storage* x;        // [rows, columns]
    u8* data;                    // [rows, columns], or null: not written
    u8* data_t;                  // [columns, rows], or null: not written
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second destination, or null
    float* amax;                 // one element, raised to the amax; or null
    i64 rows, columns;
    i64 first_block;             // of the launch: the first of this matrix's `blocks` thread blocks
    u32 blocks;
    float scale_value;
    u32 aligned;                 // every row of x and of data allows chunked access
    u32 vector;                  // every row of data_t allows 16-byte stores
};
static_assert(sizeof(MultiTensor) == 96, "as ops/quantize/tensor_list.py packs it");

#ifdef ENTRY_multi_cast_transpose
constexpr int kRecordsInArguments = 8;                               // read by ops/quantize/tensor_list.py

struct MultiCastParams {
    const MultiTensor* tensors;
    const u32* tensor_of;        // [blocks]
    const float* noop;           // one element: 1.0 = write nothing; or null
    u32 reverse;                 // 1: start at the end of the list, which the L2 holds after multi_amax_scale
    u32 each;                    // thread blocks per matrix if equal for all (tensor_of is then unused), or 0
    u32 number;                  // matrices, if their records are in argument_records (`tensors` is then
                                 // unused), or 0
    MultiTensor argument_records[kRecordsInArguments];
};

// View of a matrix for cast_tile().
struct TensorView {
    const IN::storage* x;
    i64 columns;
    SharedOutput data, data_t;
    SharedMember<i64> rows;
    SharedMember<float*> amax;
    SharedMember<u32> vector;
    __device__ __forceinline__ bool rowwise() const { return *data.at; }
    __device__ __forceinline__ bool columnwise() const { return *data_t.at; }
};

// Large tiles have registers for one path only: aligned matrices without partial patches.
constexpr bool kWhole = TILE_ROWS * TILE_COLUMNS > 128 * 128;

// the numbers of thread blocks of tensor.cu
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = (kLoads == 2 ? 512 : 1024) / Tile::kThreads;
#else
constexpr int kBlocks = 1;
#endif

extern "C" __global__ void __launch_bounds__(Tile::kThreads, kBlocks)
multi_cast_transpose(const __grid_constant__ MultiCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ MultiTensor tensor;                                   // the tile needs all registers
    if (is_set(p.noop)) return;
    const i64 block = p.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    constexpr int kWords = sizeof(MultiTensor) / 16;
    if (threadIdx.x < kWords) {
        const u32 index = p.each ? (u32)block / p.each : load_read_only(p.tensor_of + block);
        const auto words = [index](const MultiTensor* tensors) {
            return reinterpret_cast<const uint4*>(tensors + index) + threadIdx.x;
        };
        reinterpret_cast<uint4*>(&tensor)[threadIdx.x] =
            p.number ? *words(p.argument_records) : load_read_only(words(p.tensors));
    }
    __syncthreads();
    const float scale = tensor.scale ? *tensor.scale : tensor.scale_value;
    const i64 tile = block - tensor.first_block;
    if (tile == 0 && threadIdx.x == 0) write_scale_inv(scale, tensor.scale_inv, tensor.scale_inv_copy);
    if (tensor.rows == 0 || tensor.columns == 0) {
        if (tensor.amax && threadIdx.x == 0) raise_amax(tensor.amax, 0, load_relaxed(tensor.amax));
        return;
    }
    const u32 across = (u32)((tensor.columns + TILE_COLUMNS - 1) / TILE_COLUMNS), down = (u32)tile / across;
    const TilePosition at = {0, (i64)down * TILE_ROWS, (i64)((u32)tile - down * across) * TILE_COLUMNS};
    const TensorView view = {tensor.x,       tensor.columns, {&tensor.data},  {&tensor.data_t},
                             {&tensor.rows}, {&tensor.amax}, {&tensor.vector}};
    if (kWhole) cast_tile<2>(view, at, scale, shared);
    else if (tensor.aligned) cast_tile<1>(view, at, scale, shared);
    else cast_tile<0>(view, at, scale, shared);
}
#endif

#ifdef ENTRY_multi_amax_scale
struct MultiAmaxParams {
    const MultiTensor* tensors;
    const u32* tensor_of;        // [blocks]
    const float* noop;           // one element: 1.0 = write nothing; or null
    AmaxOfBlocks* workspace;     // [matrices]
    float* scale;                // [matrices]
    TensorScaleRule rule;
};

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
multi_amax_scale(const __grid_constant__ MultiAmaxParams p) {
    if (is_set(p.noop)) return;
    constexpr i64 kStep = (i64)kThreads * 16 / sizeof(IN::storage);
    const u32 index = load_read_only(p.tensor_of + blockIdx.x);
    const MultiTensor& tensor = p.tensors[index];
    const i64 n = tensor.rows * tensor.columns, blocks = tensor.blocks;
    const i64 share = ((n + blocks - 1) / blocks + kStep - 1) / kStep * kStep;
    const i64 begin = (blockIdx.x - tensor.first_block) * share;
    const i64 end = begin + share < n ? begin + share : n;
    Amax<IN> amax;
    if (begin < end) add_elements<kThreads>(amax, tensor.x + begin, end - begin);
    const u32 block_amax = block_max<kThreads>(amax.f32_bits());
    float of_matrix;
    if (threadIdx.x == 0 && p.workspace[index].add(block_amax, tensor.blocks, of_matrix))
        p.scale[index] = p.rule.scale_of(of_matrix);
}
#endif

#ifdef ENTRY_multi_cast_current
struct MultiCurrentParams {
    const MultiTensor* tensors;
    const u32* tensor_of;        // [tiles]
    const float* noop;           // one element: 1.0 = write nothing; or null
    SingleRead single_read;
};

struct ListedTensors {
    static constexpr u32 kTensorWords = sizeof(MultiTensor) / sizeof(u64);
    const MultiTensor* tensors;
    const u32* tensor_of;
    u32 tiles;

    // The search reads ahead: a lane has its word of the record of the next tile, and knows the record after
    // it.
    struct Ahead {
        u32 tile = ~0u, index, next_index;
        u64 word;
    };

    __device__ __forceinline__ u32 index_of(u32 tile, u32 tiles) const {
        return load_read_only(tensor_of + (tile < tiles ? tile : 0));
    }
    __device__ __forceinline__ u64 word_of(u32 index) const {
        const u64* const from = reinterpret_cast<const u64*>(tensors + index);
        return threadIdx.x % 32 < kTensorWords ? load_read_only(from + threadIdx.x % 32) : 0;
    }
    __device__ __forceinline__ bool find(u32 tile, Ahead& ahead, Visit& to) const {
        __shared__ MultiTensor by_warp[kLoaders / 32];
        MultiTensor& t = by_warp[threadIdx.x / 32 % (kLoaders / 32)];
        if (ahead.tile != tile) {
            ahead.index = index_of(tile, tiles), ahead.next_index = index_of(tile + gridDim.x, tiles);
            ahead.word = word_of(ahead.index);
        }
        if (threadIdx.x % 32 < kTensorWords) reinterpret_cast<u64*>(&t)[threadIdx.x % 32] = ahead.word;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            const u32 first = (u32)t.first_block, in_matrix = tile - first;
            const u32 across = (u32)((t.columns + kTileSide - 1) / kTileSide);
            const u32 down = across ? in_matrix / across : 0;
            const i64 row = (i64)down * kTileSide, column = (i64)(in_matrix - down * across) * kTileSide;
            const int rows = left_of(t.rows - row, kTileSide);
            const i64 at = row * t.columns + column;
            to = {t.x + at, t.data ? t.data + at : nullptr,
                  t.data_t ? t.data_t + column * t.rows + row : nullptr, t.rows, t.columns, ahead.index, tile,
                  first, t.blocks, rows, rows, left_of(t.columns - column, kTileSide), t.vector, 0};
        }
        ahead.tile = tile + gridDim.x, ahead.index = ahead.next_index;
        ahead.word = word_of(ahead.index), ahead.next_index = index_of(tile + 2 * gridDim.x, tiles);
        __syncwarp();
        return true;
    }
    __device__ __forceinline__ void first_tile(const Visit& visit, u32, u32 amax, float scale) const {
        const MultiTensor& t = tensors[visit.matrix];
        write_scale_inv(scale, t.scale_inv, t.scale_inv_copy);
        if (t.amax) raise_amax(t.amax, amax, load_relaxed(t.amax));
    }
    __device__ __forceinline__ void clear(const Visit&) const {}
    __device__ __forceinline__ void last(u32) const {}
};

extern "C" __global__ void __launch_bounds__(kSingleReadThreads)
multi_cast_current(const __grid_constant__ MultiCurrentParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    cast_single_read(ListedTensors{p.tensors, p.tensor_of, p.single_read.tiles}, p.single_read, shared);
}
#endif
