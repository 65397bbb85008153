// Blocks with f32 scales (docs/numerics.md, section 3; scale/block_scale.cuh); column-wise data are
// transposed.
//
// Launch and bytes moved: as in one_scale.cuh, plus 4 bytes per block for its scale. Every path but any
// streams.
#pragma once
#include "fused/block_amaxes.cuh"
#include "fused/drivers.cuh"
#include "scale/block_scale.cuh"

static_assert(kScaling == Scaling::f32_blocks);

struct FusedBlockParams {
    SourceCall call;
    u8 *data, *data_t;           // or null
    ScaleGrid row_scales, column_scales;             // of row-wise and column-wise blocks
    BlockRule rule;
    u32 subblocks_per_block;     // block length in subblocks of 32 elements: 1, 2 or 4
    u32 vector;                  // every row of data_t allows 16-byte stores
    u32 tiles;                   // tiles per thread block, one below the other, where rows stream
    u32 divides;                 // path any: elements are divided by scale_inv, not multiplied by the scale
};

__device__ __forceinline__ bool divides(const FusedBlockParams& p) {
    return kPath == Path::any ? p.divides : kPath == Path::quotients;
}
__device__ __forceinline__ float operand(const FusedBlockParams& p, const BlockScale& s) {
    return divides(p) ? s.scale_inv : s.factor;
}
__device__ __forceinline__ float scaled(const FusedBlockParams& p, float v, float by) {
    return divides(p) ? div_rn(v, by) : mul_rn(v, by);
}
__device__ __forceinline__ Chunk<OUT, 8> quantized(const FusedBlockParams& p, const float (&y)[8],
                                                   float by) {
    return narrowed<OUT>(y, [&](float v, int) { return scaled(p, v, by); });
}
// Quantises a chunk with one operand per column.
__device__ __forceinline__ Chunk<OUT, 8> quantized(const FusedBlockParams& p, const float (&y)[8],
                                                   const float (&by)[8]) {
    return narrowed<OUT>(y, [&](float v, int i) { return scaled(p, v, by[i]); });
}

// ---- streamed rows ----
// Scales along rows. A block is one, two or four subblocks of four lanes. A lane writes the scale of the
// chunk that it owns.
struct BlockRowScales {
    u32 at_scale;                // its index from p.row_scales.to on; the op refuses 2^32 scales
    int given;                   // rows from this one to the end
    // gradients with options: the block lies in the first part, in the other
    bool has, has_other;

    // at: position of the tile's results.
    __device__ __forceinline__ BlockRowScales(const FusedBlockParams& p, const TilePosition& at, int thread)
        : BlockRowScales(
              p, at.row + thread / Tile::kColumnPatches * kThreadRows + thread % 2 * 2 + thread / 2 % 2,
              at.column + thread % Tile::kColumnPatches / (kSubblock / 8) * kSubblock) {}
    // row: of the chunk that this lane owns; column: of its subblock.
    __device__ __forceinline__ BlockRowScales(const FusedBlockParams& p, i64 row, i64 column) {
        const i64 subblock = column / kSubblock, block = subblock >> p.subblocks_per_block / 2;
        if constexpr (kOptions && kBackward) {
            this->has = column < end_of(p.call, 0);
            has_other = column + columns_between_parts(p.call) < end_of(p.call, 1);
        }
        const bool has = p.data && !(subblock & (p.subblocks_per_block - 1)) && block < p.row_scales.columns;
        const i64 rows = p.call.rows - row;
        given = !has ? -kRowLimit : rows < kRowLimit ? (int)rows : kRowLimit;
        at_scale = (u32)(row * p.row_scales.row + block * p.row_scales.column);
    }
    // Moves down by this many rows.
    __device__ __forceinline__ void advance(const FusedBlockParams& p, int rows) {
        at_scale += (u32)(rows * p.row_scales.row);
        given -= rows;
    }
    // Returns the operand that multiplies (or divides) the elements of this lane's chunk. columns: offset of
    // the chunk to the right of this one.
    __device__ __forceinline__ float scale(const FusedBlockParams& p, const float (&y)[4][8],
                                           i64 columns = 0) const {
        const BlockScale s = p.rule.quick_of(amax(p, y));
        if (!(kOptions && kBackward) || (columns ? has_other : has)) store(p, s, columns);
        return operand(p, s);
    }
    // The same for u, before multiplication by the rows' weights. If all scales are powers of two and no
    // number is extreme, the weight is multiplied into the scale: a product with a power of two is rounded
    // only where FP8 makes it 0.
    __device__ __forceinline__ float scale_weighted(const FusedBlockParams& p, float (&u)[4][8],
                                                    const float* weights) const {
        const float weight = weights[row_of(owned<4>()) * kRowStride];
        const u32 weighted = as_bits(mul_rn(as_float(amax(p, u)), weight)) & 0x7fffffffu;
        if (!divides(p) && __all_sync(~0u, p.rule.is_quick(weighted) && is_moderate(weight))) {
            const BlockScale s = p.rule.quick(weighted);
            store(p, s, 0);
            return mul_rn(weight, s.factor);
        }
        multiply_chunks(u, weights);
        return scale(p, u);
    }

private:
    static constexpr int kRowLimit = 1 << 16;                        // more than a thread block's rows

    static __device__ __forceinline__ u32 amax(const FusedBlockParams& p, const float (&y)[4][8]) {
        u32 amax = fold_chunks<false>(y);
        // no branches: at distance 0 a lane reads itself
        amax = larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 1 ? 4 : 0));
        return larger(amax, __shfl_xor_sync(~0u, amax, p.subblocks_per_block > 2 ? 8 : 0));
    }
    __device__ __forceinline__ void store(const FusedBlockParams& p, const BlockScale& s, i64 columns) const {
        const u32 further = columns
            ? (u32)((columns / kSubblock >> p.subblocks_per_block / 2) * p.row_scales.column) : 0;
        if (given > (int)(p.call.rows - p.row_scales.rows))
            as_global(p.row_scales.to)[at_scale + further] = given > 0 ? s.scale_inv : 0.0f;
    }
};

// Stores the transposed tile, quantised column by column.
__device__ __forceinline__ void quantize_columns(const FusedBlockParams& p, const TilePosition& at,
                                                 const float (&y)[4][8], const i64& end,
                                                 const ColumnAmaxes& amaxes, const Tile& tile) {
    const SourceCall& call = p.call;
    amaxes.write<false>(y);
    __syncthreads();
    const int thread = thread_again();
    const int subblock = ColumnAmaxes::subblock(thread);
    const int column = ColumnAmaxes::column(thread);
    u32 amax = amaxes.read(subblock, column);
    if (p.subblocks_per_block > 1) amax = larger(amax, __shfl_xor_sync(~0u, amax, 8));
    if (p.subblocks_per_block > 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, 16));
    const BlockScale s = p.rule.quick_of(amax);
    amaxes.put(subblock, column, operand(p, s));
    const i64 to_block = (at.row / kSubblock + subblock) >> p.subblocks_per_block / 2;
    const i64 to_column = at.column + column;
    const bool first = !(subblock & (p.subblocks_per_block - 1));
    if constexpr (kOptions) {
        // Wide rows need no padding; the other part may begin past the end.
        if (first && p.column_scales.has(to_block, to_column) && to_column < end)
            *p.column_scales.at(0, to_block, to_column) = s.scale_inv;
    } else {
        if (first && p.column_scales.has(to_block, to_column))
            *p.column_scales.at(0, to_block, to_column) = to_column < call.columns ? s.scale_inv : 0.0f;
    }
    __syncthreads();
    float by[8];
    amaxes.operands(by);
    Chunk<OUT, 8> codes[4];
#pragma unroll
    for (int r = 0; r < 4; r++) codes[r] = quantized(p, y[r], by);
    write_rows(tile, row_in_step(0), codes);
    __syncthreads();
    store_tile(call, at, end, tile, p.data_t, p.vector);
}

// Stores four chunks in the order of y. by: operand of the chunk that this lane owns.
__device__ __forceinline__ void store_quantized(const FusedBlockParams& p, u8* data,
                                                const ChunkPosition& position, int left,
                                                const float (&four)[4][8], float by) {
    store_chunks(p.call, data, position, left,
                 [&](int chunk) { return quantized(p, four[chunk], broadcast(by, chunk)); });
}

// A group of rows: the values of a thread's chunks.
struct OptionBlocks {
    const ColumnAmaxes amaxes;
    const Tile tile;
    float y[kThreadChunks][8];

    // behind: shared memory after the stages.
    __device__ __forceinline__ OptionBlocks(const FusedBlockParams&, u8* behind)
        : amaxes{reinterpret_cast<u32*>(behind)}, tile{behind + ColumnAmaxes::kWords * 4} {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8], int) { keep(y, r, values); }
    template <class Rows>
    __device__ __forceinline__ void store(const FusedBlockParams& p, const StreamPosition& at,
                                          const Rows& rows) {
        const SourceCall& call = p.call;
        clear_absent_rows(y, rows.left + kStepRows);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const auto& four = four_chunks(y, part);
            const i64 columns = part * columns_between_parts(call);
            if (p.data) {
                // nothing derived from `thread` takes registers before this
                const int thread = thread_again();
                const float by = BlockRowScales(p, at.results(call), thread).scale(p, four, columns);
                const ChunkPosition position(call, at.results(call), thread);
                store_quantized(p, p.data + columns, position, rows.left_in(part, rows.left + kStepRows),
                                four, by);
            }
            if (p.data_t)
                quantize_columns(p, moved(at.results(call), columns), four, end_of(call, part), amaxes, tile);
        }
    }
    static __device__ __forceinline__ u32 amax() { return 0; }
};

struct StreamBlocks {
    static constexpr bool kWholeTiles = kTiled;
    const ColumnAmaxes amaxes;
    const Tile tile;
    BlockRowScales scales;
    float y[kThreadChunks][8];

    // first: the thread block's first tile.
    __device__ __forceinline__ StreamBlocks(const FusedBlockParams& p, const TilePosition& first, u8* behind)
        : amaxes{reinterpret_cast<u32*>(behind)}, tile{behind + ColumnAmaxes::kWords * 4},
          scales(p, first.row + row_in_step(row_of(owned<4>())),
                 first.column + part_of(owned<4>()) * p.call.half() +
                     Tile::column_patch() / (kSubblock / 8) * kSubblock) {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8]) { keep(y, r, values); }
    __device__ __forceinline__ void store(const FusedBlockParams& p, const StreamPosition& at, int,
                                          const ChunkPosition& position, int left, const float* weights) {
        if constexpr (!kTiled) {
            auto& four = four_chunks(y, 0);
            const float by = kWeighsScales ? scales.scale_weighted(p, four, weights)
                                           : scales.scale(p, four);
            store_quantized(p, p.data, position, left, four, by);
        } else {
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                const auto& four = four_chunks(y, part);
                const i64 columns = part * p.call.half();
                if (p.data) {
                    const float by = scales.scale(p, four, columns);
                    store_quantized(p, p.data + columns, position, left, four, by);
                }
                if (kPath == Path::tiles || p.data_t)
                    quantize_columns(p, moved(at.tile(), columns), four, p.call.columns, amaxes, tile);
            }
        }
    }
    __device__ __forceinline__ void advance(const FusedBlockParams& p) { scales.advance(p, kStepRows); }
    static __device__ __forceinline__ u32 amax() { return 0; }
};

// ---- path any ----
// stride of the subblocks of a warp's rows, in words; padded against bank conflicts
constexpr int kSubblockStride = 16 + 4;

// Quantises a tile column by column. amaxes: [16][128] words.
__device__ __forceinline__ void quantize_columns(const FusedBlockParams& p, const TilePosition& at,
                                                 const float (&y)[8][8], u32* amaxes, const Tile& tile) {
    const SourceCall& call = p.call;
    const int blocks = kSubblocks / (int)p.subblocks_per_block;
    const int patches = (int)p.subblocks_per_block * (kSubblock / 8);
    PatchAmaxes amax;
    amax.find_columns<false>(y);
    store_column_amaxes(amaxes, amax.column);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < blocks * Tile::kColumns; i += kThreads) {
        const int b = i / Tile::kColumns, c = i % Tile::kColumns;
        const BlockScale s = p.rule.quick_of(column_amax(amaxes, b * patches, patches, c));
        amaxes[b * patches * Tile::kColumns + c] = as_bits(operand(p, s));
        const i64 to_block = at.row / Tile::kRows * blocks + b, to_column = at.column + c;
        if (p.column_scales.has(to_block, to_column))
            *p.column_scales.at(0, to_block, to_column) = to_column < call.columns ? s.scale_inv : 0.0f;
    }
    __syncthreads();
    float by[8];
    load_floats(amaxes + Tile::row_patch() / patches * patches * Tile::kColumns + Tile::patch_column(), by);
    Chunk<OUT, 8> patch[8];
#pragma unroll
    for (int r = 0; r < 8; r++) patch[r] = quantized(p, y[r], by);
    tile.write_patch(patch);
    __syncthreads();
    store_transposed(call, at, tile, p.data_t, p.vector);
}

// Computes and stores the scales of a warp's 16 rows. of_rows: their amaxes, subblock by subblock; replaced
// by the operands, one for every subblock of a block, so that readers index by subblock. Only this lane reads
// and writes its blocks.
__device__ __forceinline__ void find_row_scales(const FusedBlockParams& p, const TilePosition& at,
                                                float* of_rows) {
    const int lane = threadIdx.x % 32, subblocks = (int)p.subblocks_per_block;
    const int blocks = kSubblocks / subblocks;
#pragma unroll 1
    for (int i = lane; i < 16 * blocks; i += 32) {                   // one block per lane
        const int r = i % 16, b = i / 16;
        u32 bits = 0;
        for (int k = b * subblocks; k < (b + 1) * subblocks; k++) {
            const u32 other = as_bits(of_rows[k * kSubblockStride + r]);
            bits = larger(other, bits);
        }
        const BlockScale s = p.rule.of(bits);
        for (int k = b * subblocks; k < (b + 1) * subblocks; k++)
            of_rows[k * kSubblockStride + r] = operand(p, s);
        const i64 to_row = at.row + threadIdx.x / 32 * 16 + r;
        const i64 to_block = at.column / Tile::kColumns * blocks + b;
        if (p.row_scales.has(to_row, to_block))
            *p.row_scales.at(0, to_row, to_block) = to_row < p.call.rows ? s.scale_inv : 0.0f;
    }
}

class PatchBlocks {
public:
    __device__ __forceinline__ explicit PatchBlocks(const FusedBlockParams&) {}
    __device__ __forceinline__ void take(const FusedBlockParams&, const PatchPosition&, int,
                                         const EightValues& values) {
        append(rows, values);
    }
    __device__ __forceinline__ void store(const FusedBlockParams& p, const TilePosition& at,
                                          const PatchPosition& patch) const {
        extern __shared__ __align__(16) u8 shared[];
        __shared__ __align__(16) u32 amaxes[Tile::kRowPatches * Tile::kColumns];
        __shared__ __align__(16) float of_rows[kWarps][kSubblocks * kSubblockStride];
        float y[8][8];
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int c = 0; c < 8; c++) y[r][c] = rows[r].of[c];
        PatchAmaxes amax;
        if (p.data) {
            float* const of_warp = of_rows[threadIdx.x / 32];
            amax.find_rows<false>(y);
            amax.reduce_rows();
            const int subblock = Tile::column_patch() / (kSubblock / 8), row = threadIdx.x % 32 / 16 * 8;
            float* const owned = of_warp + subblock * kSubblockStride + row + PatchAmaxes::owned();
            owned[0] = as_float(amax.row[0]), owned[1] = as_float(amax.row[1]);
            __syncwarp();
            find_row_scales(p, at, of_warp);
            __syncwarp();
            float by[8];
            load_floats(of_warp + subblock * kSubblockStride + row, by);
#pragma unroll
            for (int r = 0; r < 8; r++) store_row(p.call, patch, p.data, r, quantized(p, y[r], by[r]));
        }
        if (p.data_t) quantize_columns(p, at, y, amaxes, Tile{shared});
    }
    static __device__ __forceinline__ u32 amax() { return 0; }

private:
    EightValues rows[8] = {};
};

constexpr int kFusedThreads = kPath == Path::any ? kThreads : kStreamThreads;
constexpr int kFusedBlocks = kPath == Path::any ? kBlocks : kStreamBlocks;

// Computes values and quantises them.
template <class Params>
__device__ __forceinline__ void quantize(const Params& p) {
    if (is_set(p.call.noop)) return;
    if constexpr (kOptions) stream_with_options<OptionBlocks>(p, p.call);
    else if constexpr (kPath == Path::any) patches<PatchBlocks>(p, p.call);
    else stream<StreamBlocks>(p, p.call);
    add_up_sums(p.call, p.tiles);
}
