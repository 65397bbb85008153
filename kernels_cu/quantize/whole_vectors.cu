// Quantisation with an f32 scale per row of memory, or per column: the vectors of this file
// (docs/numerics.md, section 3).
//
//   factor, scale_inv = of max |x| over the vector (scale/block_scale.cuh)
//   data = narrow(fl(x * factor))
//
// A thread block reads its vectors, rows (ALONG_ROWS 1) or columns (0), twice: for the amax, then to write
// data, in the order of x or transposed. It has WARP_TILES_DOWN x WARP_TILES_ACROSS warp tiles
// (include/tile/warp_tile.cuh) and takes any shape and address. Bytes moved per element: 2 sizeof(IN) + 1.
// With the struct's `divide`, elements are divided by scale_inv (profile vllm). IN in {bf16, f16, f32}, OUT
// in {e4m3fn, e5m2}; profiles and scale layouts are run-time values. Padding of scales is written 0.
#include "scale/block_write.cuh"

static_assert(WARP_TILES_DOWN == 1 || WARP_TILES_ACROSS == 1, "warp tiles along one axis");
constexpr bool kAlongRows = ALONG_ROWS;
constexpr int kVectors = kAlongRows ? Tile::kRows : Tile::kColumns;    // vectors per thread block
constexpr int kStep = kAlongRows ? Tile::kColumns : Tile::kRows;     // elements of them per step
constexpr int kParts = kAlongRows ? WARP_TILES_ACROSS * kSubblocks : WARP_TILES_DOWN;
constexpr int kPartStride = kAlongRows ? kSubblockStride : kVectors;

// A thread block's vectors.
struct BlockOfVectors {
    i64 matrix, first;           // the matrix, and its first row or column of this thread block

    static __device__ __forceinline__ BlockOfVectors of(const BlockParams& p) {
        const i64 tiles = (vectors(p) + kVectors - 1) / kVectors;
        return {blockIdx.x / tiles, blockIdx.x % tiles * kVectors};
    }
    static __device__ __forceinline__ i64 vectors(const BlockParams& p) {
        return kAlongRows ? p.rows : p.columns;
    }
    static __device__ __forceinline__ i64 length(const BlockParams& p) {
        return kAlongRows ? p.columns : p.rows;
    }
    // First row and column of the tile with the vectors' elements from `begin` on.
    __device__ __forceinline__ i64 row(i64 begin) const { return kAlongRows ? first : begin; }
    __device__ __forceinline__ i64 column(i64 begin) const { return kAlongRows ? begin : first; }

    __device__ __forceinline__ WarpTilePosition load(const BlockParams& p, i64 begin,
                                                  WarpTile<IN>& warp_tile) const {
        const i64 r = row(begin) + Tile::row(), c = column(begin) + Tile::column();
        const WarpTilePosition position{matrix * p.rows * p.columns + r * p.columns + c,
                                  left_of(p.rows - r, kWarpTileRows), left_of(p.columns - c, kLaneColumns)};
        warp_tile.template load<false>(p.x + position.at, p.columns, position.rows_left,
                                       position.columns_left, p.vector & 1);
        return position;
    }
};

// Reads the vectors, and leaves the amaxes of their parts in `amaxes`: kPartStride words per part.
__device__ __forceinline__ void find_amaxes(const BlockParams& p, const BlockOfVectors& block, u32* amaxes) {
    u32 largest[4] = {};
#pragma unroll 1
    for (i64 begin = 0; begin < BlockOfVectors::length(p); begin += kStep) {
        WarpTile<IN> warp_tile;
        block.load(p, begin, warp_tile);
        WarpTileAmax<IN, false> amax;
        amax.template find<kAlongRows, !kAlongRows>(warp_tile);
        u32 bits[4];
        if constexpr (kAlongRows) amax.template reduce_rows<32 / kSubblocks>(bits);
        else amax.of_columns(bits);
#pragma unroll
        for (int i = 0; i < 4; i++) largest[i] = larger(largest[i], bits[i]);
    }
    const int lane = threadIdx.x % 32;
    const int part = kAlongRows ? threadIdx.x / 32 * kSubblocks + lane / 8 : threadIdx.x / 32;
    u32* const own_amaxes = amaxes + part * kPartStride + (kAlongRows ? lane % 8 : lane) * 4;
    *reinterpret_cast<uint4*>(own_amaxes) = make_uint4(largest[0], largest[1], largest[2], largest[3]);
}

// Computes and stores the scales of the vectors, and replaces their amaxes by the factors and, kPartStride
// words further, the divisors.
__device__ __forceinline__ void find_scales(const BlockParams& p, const BlockOfVectors& block, u32* amaxes) {
    const ScaleGrid& to = p.along_rows;
    for (int i = threadIdx.x; i < kVectors; i += Tile::kThreads) {
        u32 bits = 0;
        for (int part = 0; part < kParts; part++) bits = larger(bits, amaxes[part * kPartStride + i]);
        const BlockScale s = p.rule.of(bits);
        const i64 vector = block.first + i, r = kAlongRows ? vector : 0, c = kAlongRows ? 0 : vector;
        if (to.has(r, c))
            *to.at(block.matrix, r, c) = vector < BlockOfVectors::vectors(p) ? s.scale_inv : 0.0f;
        // Only this thread reads these two words before the next barrier.
        amaxes[i] = as_bits(s.factor), amaxes[kPartStride + i] = as_bits(s.scale_inv);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1)
quantize_whole_vectors(const __grid_constant__ BlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const bool transposed = p.stored == 2;
    const Tile tile{shared};
    u32* const amaxes = reinterpret_cast<u32*>(transposed ? shared + Tile::kBytes : shared);
    const auto block = BlockOfVectors::of(p);
    find_amaxes(p, block, amaxes);
    __syncthreads();
    find_scales(p, block, amaxes);
    __syncthreads();
    const float* const factors = reinterpret_cast<const float*>(amaxes);
    const RowOperands rows{factors, factors + kPartStride};
    ColumnOperands columns;
    bool quick = true;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        const int i = kAlongRows ? (int)(threadIdx.x % 32) : Tile::column() + c;
        columns.factor[c] = rows.factors[i], columns.divisor[c] = rows.divisors[i];
        quick &= block.first + i >= BlockOfVectors::vectors(p) || has_quick_quotients(rows.divisors[i]);
    }
    quick = p.divide && __all_sync(~0u, quick);
    const Destination to_data = Destination::of((int)p.stored, p.rows_data, (p.vector & 2) != 0, tile);
    const Destination nowhere = Destination::of(0, p.rows_data, false, tile);
    const Destinations to{kAlongRows ? to_data : nowhere, kAlongRows ? nowhere : to_data};
#pragma unroll 1
    for (i64 begin = 0; begin < BlockOfVectors::length(p); begin += kStep) {
        WarpTile<IN> warp_tile;
        const WarpTilePosition position = block.load(p, begin, warp_tile);
        const BlockWriter writer{p, warp_tile, position, rows, columns};
        if (!p.divide) writer.by<kMultiply>().write<false>(to);
        else if (quick) writer.by<kDivideQuickly>().write<false>(to);
        else writer.divide(to, position.rows_left);
        if (!transposed) continue;
        __syncthreads();
        const i64 row = block.row(begin), column = block.column(begin);
        tile.template store<false>(p.rows_data + block.matrix * p.rows * p.columns + column * p.rows + row,
                                   p.rows, left_of(p.columns - column, Tile::kColumns),
                                   left_of(p.rows - row, Tile::kRows), p.vector & 2);
        __syncthreads();
    }
}
