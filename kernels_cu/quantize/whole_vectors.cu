// Quantisation with an f32 scale for every row of memory, or for every column: the vectors of this file
// (docs/numerics.md, section 3).
//
//   factor, scale_inv = of max |x| over the vector (scale/block_scale.cuh)
//   data = narrow(fl(x * factor))
//
// A block of threads reads its vectors, rows (ALONG_ROWS 1) or columns (0), twice: for the largest magnitude,
// then to write data, as they are or transposed. It has WARP_TILES_DOWN x WARP_TILES_ACROSS warp tiles
// (include/tile/warp_tile.cuh) and takes any shape and address. Bytes moved per element: 2 sizeof(IN) + 1.
// With the struct's `divide`, elements are divided by scale_inv (profile vllm). IN in {bf16, f16, f32}, OUT
// in {e4m3fn, e5m2}; profiles and scale layouts are run-time values. Padding of scales is written 0.
#include "scale/block_write.cuh"

#ifdef ENTRY_quantize_whole_vectors
static_assert(WARP_TILES_DOWN == 1 || WARP_TILES_ACROSS == 1, "warp tiles along one axis");
constexpr bool kAlongRows = ALONG_ROWS;
constexpr int kVectors = kAlongRows ? Tile::kRows : Tile::kColumns;    // of a block of threads
constexpr int kStep = kAlongRows ? Tile::kColumns : Tile::kRows;     // elements of them at a time
constexpr int kParts = kAlongRows ? WARP_TILES_ACROSS * kSegments : WARP_TILES_DOWN;
constexpr int kPartStride = kAlongRows ? kSegmentStride : kVectors;

extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1)
quantize_whole_vectors(const __grid_constant__ BlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    if (is_set(p.noop)) return;
    const bool transposed = p.stored == 2;
    const Tile tile{shared};
    // Each part has a word for every row or column of the block.
    u32* const amaxes = reinterpret_cast<u32*>(transposed ? shared + Tile::kBytes : shared);
    const i64 vectors = kAlongRows ? p.rows : p.columns, length = kAlongRows ? p.columns : p.rows;
    const i64 tiles = (vectors + kVectors - 1) / kVectors, m = blockIdx.x / tiles;
    const i64 first = blockIdx.x % tiles * kVectors;
    const i64 matrix = m * p.rows * p.columns;

    WarpTile<IN> warp_tile;
    const auto load = [&](i64 begin) -> Place {
        const i64 row = (kAlongRows ? first : begin) + Tile::row();
        const i64 column = (kAlongRows ? begin : first) + Tile::column();
        const Place place{matrix + row * p.columns + column, left_of(p.rows - row, kWarpTileRows),
                          left_of(p.columns - column, kLaneColumns)};
        warp_tile.template load<false>(p.x + place.at, p.columns, place.rows_left, place.columns_left,
                                       p.vector & 1);
        return place;
    };
    u32 largest[4] = {};
#pragma unroll 1
    for (i64 begin = 0; begin < length; begin += kStep) {
        load(begin);
        WarpTileAmax<IN, false> amax;
        amax.template find<kAlongRows, !kAlongRows>(warp_tile);
        u32 bits[4];
        if constexpr (kAlongRows) amax.template reduce_rows<32 / kSegments>(bits);
        else amax.of_columns(bits);
#pragma unroll
        for (int i = 0; i < 4; i++) largest[i] = larger(largest[i], bits[i]);
    }
    const int lane = threadIdx.x % 32;
    const int part = kAlongRows ? threadIdx.x / 32 * kSegments + lane / 8 : threadIdx.x / 32;
    u32* const mine = amaxes + part * kPartStride + (kAlongRows ? lane % 8 : lane) * 4;
    *reinterpret_cast<uint4*>(mine) = make_uint4(largest[0], largest[1], largest[2], largest[3]);
    __syncthreads();
    const ScaleGrid& to = p.along_rows;
    for (int i = threadIdx.x; i < kVectors; i += Tile::kThreads) {
        u32 bits = 0;
        for (int part = 0; part < kParts; part++) bits = larger(bits, amaxes[part * kPartStride + i]);
        const BlockScale s = p.rule.of(bits);
        const i64 vector = first + i, r = kAlongRows ? vector : 0, c = kAlongRows ? 0 : vector;
        if (to.has(r, c)) *to.at(m, r, c) = vector < vectors ? s.scale_inv : 0.0f;
        // Only this thread reads these two words before the next barrier.
        amaxes[i] = as_bits(s.factor), amaxes[kPartStride + i] = as_bits(s.scale_inv);
    }
    __syncthreads();
    const float *const factors = reinterpret_cast<const float*>(amaxes),
                *const divisors = factors + kPartStride;
    const RowOperands rows{factors, divisors};
    ColumnOperands columns;
    bool quick = true;
#pragma unroll
    for (int c = 0; c < kLaneColumns; c++) {
        const int i = kAlongRows ? (int)(threadIdx.x % 32) : Tile::column() + c;
        columns.factor[c] = factors[i], columns.divisor[c] = divisors[i];
        quick &= first + i >= vectors || has_quick_quotients(divisors[i]);
    }
    const Destination to_data = Destination::of((int)p.stored, p.rows_data, (p.vector & 2) != 0, tile);
    const Destination nowhere = Destination::of(0, p.rows_data, false, tile);
    const Destinations destinations{kAlongRows ? to_data : nowhere, kAlongRows ? nowhere : to_data};
    const bool divided_quickly = p.divide && __all_sync(~0u, quick);
#pragma unroll 1
    for (i64 begin = 0; begin < length; begin += kStep) {
        const Place place = load(begin);
        const WarpTileWriter writer{p, warp_tile, place, rows, columns};
        if (!p.divide) writer.write<false, kMultiply>(destinations);
        else if (divided_quickly) writer.write<false, kDivideQuickly>(destinations);
        else writer.divide(destinations, place.rows_left);
        if (!transposed) continue;
        __syncthreads();
        const i64 row = kAlongRows ? first : begin, column = kAlongRows ? begin : first;
        tile.template store<false>(p.rows_data + matrix + column * p.rows + row, p.rows,
                                   left_of(p.columns - column, Tile::kColumns),
                                   left_of(p.rows - row, Tile::kRows), p.vector & 2);
        __syncthreads();
    }
}
#endif
