// This kernel computes SwiGLU or its gradients and quantises them with one scale, from one read
// (docs/numerics.md, sections 9 and 1); column-wise data are transposed. include/swiglu/swiglu.cuh says what
// is computed, which programs there are, and what their defines mean: IN, OUT, BACKWARD and PATH.
//
// swiglu_cast   data = cast(y * scale), amax = max(amax, max |y|). To find current scaling's scale first it
//               finds the amax of all blocks, and the last one to finish stores the scale; nothing else is
//               written then (but the sums of dprobs).
//
// Launch: path any: a block of 256 threads for each tile of 128 x 128 elements of the result; otherwise a
// block for a tile of y, or for those of da and of db, or for some of these one below the other (`tiles`), by
// 512 threads where rows stream through shared memory (include/swiglu/swiglu_stream.cuh). Path rows, and path
// tiles of gradients, take rows through registers.
//
// Bytes moved per element of y: 2 sizeof(IN), and 1 per direction. BACKWARD, per element of grad: 3
// sizeof(IN), and 2 per direction; path any reads what both da and db are made of twice, in blocks that are
// neighbours as far as the L2 is concerned.
#include "scale/scale.cuh"
#include "swiglu/swiglu_store.cuh"
#include "swiglu/swiglu_stream.cuh"

constexpr bool kStreamed = kOptions || (kPath == Path::tiles && !kBackward);
constexpr int kCastThreads = kStreamed ? kStreamThreads : kThreads;
// Path rows keeps only the codes of four rows, and takes no more registers than these blocks leave. On an
// H200 more blocks are faster than more rows in flight (docs/lab-notes).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kRowsBlocks = kBackward ? 2 : sizeof(IN::storage) == 2 ? 4 : 3;
#else
constexpr int kRowsBlocks = kBackward ? 2 : 3;
#endif
constexpr int kCastBlocks = kStreamed ? kStreamBlocks : kPath == Path::any ? kBlocks : kRowsBlocks;

struct SwigluCastParams {
    SwigluCall call;
    u8 *data, *data_t;           // or null
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    AmaxOfBlocks* workspace;     // to find a scale; or null
    float* found_scale;          // where it goes
    float scale_value;
    TensorScaleRule rule;        // of found_scale
    u32 vector;                  // every row of data_t allows 16-byte stores
    u32 tiles;                   // of a block, one below the other, where rows stream
};

__device__ __forceinline__ u32 raised_by(u32 amax, const float (&values)[8]) {
#pragma unroll
    for (const float v : values) amax = raised_magnitude(amax, v);
    return amax;
}
__device__ __forceinline__ Chunk<OUT, 8> quantized(const float (&values)[8], float scale) {
    return narrowed<OUT>(values, [&](float v, int) { return mul_rn(v, scale); });
}

// Multiplies eight elements of y by the weight of their row, if rows have weights.
__device__ __forceinline__ void multiply_by_weight(const SwigluCall& call, const float* of_row,
                                                   float (&y)[8]) {
    if (!call.probs) return;
    const float weight = *of_row;
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = mul_rn(y[i], weight);
}

// With options: stores the codes of a tile as they are.
__device__ __forceinline__ void store_codes(const SwigluCastParams& p, const StreamPosition& at,
                                            const Stream& rows,
                                            const Chunk<OUT, 8> (&codes)[kParts][kThreadRows]) {
    const ChunkPosition position(p.call, at.results(p.call), thread_again());
#pragma unroll
    for (int part = 0; part < kParts; part++)
        store_chunks(p.call, p.data + part * columns_between_parts(p.call), position,
                     rows.left_in(part, rows.left),
                     [&](int chunk) { return codes[part][chunk]; });
}
// Stores them transposed, through shared memory behind the stages.
__device__ __forceinline__ void store_codes_t(const SwigluCastParams& p, const StreamPosition& at,
                                              const Chunk<OUT, 8> (&codes)[kParts][kThreadRows],
                                              u8* shared) {
    const SwigluCall& call = p.call;
    const auto tile = [&](int part) {
        return Tile{shared + kStages * kStageBytes + part * Tile::kRows * Tile::kColumns};
    };
    __syncthreads();                                                 // All threads have stored the last tile.
#pragma unroll
    for (int part = 0; part < kParts; part++) write_rows(tile(part), row_in_step(0), codes[part]);
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; part++)
        store_tile(call, moved(at.results(call), part * columns_between_parts(call)), end_of(call, part),
                   tile(part),
                   p.data_t, p.vector);
}

// Each of the following functions casts the tiles of a block and returns the thread's amax, as bits.
__device__ __forceinline__ u32 cast_with_options(const SwigluCastParams& p, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    u32 amax = 0;
    StreamPosition at(call, p.tiles);
    Stream rows(call, at.tile(), p.tiles, shared);
    const float* weights = Stream::shared_probs() + row_in_step(0);
#pragma unroll 1
    for (bool more = at.down * (i64)Tile::kRows < call.rows; more;
         more = at.advance(call, p.tiles), weights += kStepRows) {
        Chunk<OUT, 8> codes[kParts][kThreadRows];
        u32 sums[2][kThreadRows];
        rows.each(at, [&](int r, float(&v)[kArrays][8], const float(&sigma)[8]) {
            float y[2][8];
            if constexpr (kBackward) {
                rows.gradients(r, weights[r * kRowStride], v, sigma, y, sums);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) y[0][i] = mul_rn(v[0][i], v[1][i]);
                multiply_by_weight(call, weights + r * kRowStride, y[0]);
            }
            const u32 before = amax;
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                amax = raised_by(amax, y[part]);
                codes[part][r] = quantized(y[part], scale);
            }
            // A row that does not exist has only biases.
            if (!kBackward && r >= rows.left) amax = before;
        });
        if constexpr (kBackward) rows.store_sums(at, sums);
        if (p.data) store_codes(p, at, rows, codes);
        rows.left -= kStepRows;
        if (p.data_t) store_codes_t(p, at, codes, shared);
    }
    Stream::finish();
    return amax;
}

// Casts y in both directions, or column-wise alone.
__device__ __forceinline__ u32 cast_tiles(const SwigluCastParams& p, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    u32 amax = 0;
    StreamPosition at(call, p.tiles);
    const auto first = at.tile();
    Stream rows(call, first, p.tiles, shared);
    ChunkPosition position(call, first);
    const Tile tile{shared + kStages * kStageBytes};
    const float* weights = Stream::shared_probs() + row_in_step(0);
    const int rows_left = left_of(call.rows - first.row, (int)p.tiles * Tile::kRows);
    const int steps = (rows_left + kStepRows - 1) / kStepRows;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        Chunk<OUT, 8> codes[kThreadRows];
        rows.each(at, [&](int r, float(&v)[kArrays][8], const float(&sigma)[8]) {
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] = mul_rn(mul_rn(v[0][i], sigma[i]), v[1][i]);
            multiply_by_weight(call, weights + r * kRowStride, y);
            amax = raised_by(amax, y);
            codes[r] = quantized(y, scale);
        });
        if (p.data) store_chunks(call, p.data, position, rows.left, [&](int chunk) { return codes[chunk]; });
        rows.left -= kStepRows;
        if (p.data_t) {
            __syncthreads();                                         // All threads have stored the last tile.
            write_rows(tile, row_in_step(0), codes);
            __syncthreads();
            store_tile(call, at.tile(), call.columns, tile, p.data_t, p.vector);
        }
        at.down++;
        position.advance(call);
        weights += kStepRows;
    }
    Stream::finish();
    return amax;
}

// Casts y row-wise alone, or gradients in either direction.
__device__ __forceinline__ u32 cast_rows(const SwigluCastParams& p, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    u32 amax = 0;
    const auto at = position(call, blockIdx.x);
    const PatchPosition patch(call, at);
    RowStore store(call, patch, p.data);
    constexpr int kRows = 4;
    Rows<kRows, kRowsAhead> rows(call, patch);
#pragma unroll 1
    for (int group = 0; group < 8 / kRows; group++) {
        Chunk<OUT, 8> codes[kParts][kRows];
        rows.each(call, patch, group, [&](int r, const float(&values)[2][8]) {
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                amax = raised_by(amax, values[part]);
                // The chunk is a variable of its own, since NVRTC for sm_80 leaves the loop over rows rolled,
                // and the arrays in local memory, where integer conversions write into codes[][] directly.
                const Chunk<OUT, 8> of_row = quantized(values[part], scale);
                codes[part][r] = of_row;
                store.put(group * kRows, r, part, of_row);
            }
        });
        store.advance(kRows);
        if (!p.data_t) continue;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const Tile tile{shared + part * Tile::kRows * Tile::kColumns};
            write_half_patch(tile.byte_at(Tile::patch_row() + group * kRows, Tile::patch_column()),
                             codes[part]);
        }
    }
    if (!p.data_t) return amax;
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; part++)
        store_transposed(call, moved(at, part * call.half()),
                         Tile{shared + part * Tile::kRows * Tile::kColumns}, p.data_t, p.vector);
    return amax;
}

__device__ __forceinline__ u32 cast_any(const SwigluCastParams& p, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    u32 amax = 0;
    const bool empty = !call.rows || !call.columns;
    const auto at =
        empty ? TilePosition{} : TilePosition::of_block<Tile, false>(blockIdx.x, call.rows, call.columns);
    const PatchPosition patch(call, at);
    Chunk<OUT, 8> patch_codes[8];
    each_row(call, patch, [&](int r, const EightValues& y) {
        amax = raised_by(amax, y.of);
        const Chunk<OUT, 8> codes = quantized(y.of, scale);
        if (p.data) store_row(call, patch, p.data, r, codes);
        append(patch_codes, codes);
    });
    if (p.data_t) {
        const Tile tile{shared};
        tile.write_patch(patch_codes);
        __syncthreads();
        store_transposed(call, at, tile, p.data_t, p.vector);
    }
    return amax;
}

extern "C" __global__ void __launch_bounds__(kCastThreads, kCastBlocks)
swiglu_cast(const __grid_constant__ SwigluCastParams p) {
    if (is_set(p.call.noop)) return;
    const float scale = p.scale ? *p.scale : p.scale_value;
    if (!p.workspace && blockIdx.x == 0 && threadIdx.x == 0)
        write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
    u32 amax;
    if constexpr (kOptions) amax = cast_with_options(p, scale);
    else if constexpr (kStreamed) amax = cast_tiles(p, scale);
    else if constexpr (kPath == Path::any) amax = cast_any(p, scale);
    else amax = cast_rows(p, scale);
    if (!p.amax && !p.workspace) return;
    amax = block_max<kCastThreads>(amax);
    if (threadIdx.x != 0) return;
    if (p.amax) raise_amax(p.amax, amax, load_relaxed(p.amax));
    float of_all;
    if (p.workspace && p.workspace->add(amax, gridDim.x, of_all)) *p.found_scale = p.rule.scale_of(of_all);
}
