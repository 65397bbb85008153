// One scale for all values (docs/numerics.md, section 1); column-wise data are transposed.
//
//   data = cast(y * scale)        amax = max(amax, max |y|)
//
// For current scaling, a first launch finds the amax over all blocks, and the last block to finish stores the
// scale; it writes nothing else (but dprobs).
//
// Launch: path any: a block of 256 threads per tile of 128 x 128 elements of the result; otherwise a thread
// block for a tile of each part of the result, or for several of these one below the other (`tiles`), with
// 512 threads where rows stream through shared memory (stream.cuh). Path rows, and path tiles of gradients,
// take rows through registers.
//
// Bytes moved: what the source reads, and 1 per element and direction. Path any reads the inputs of both
// parts of a gradient twice, in thread blocks that run close enough together to share the L2.
#pragma once
#include "fused/drivers.cuh"
#include "scale/scale.cuh"

static_assert(kOneScale);
constexpr bool kStreamed =
    kOptions || kPath == Path::plain || (kPath == Path::tiles && !kBackward);
constexpr int kFusedThreads = kStreamed ? kStreamThreads : kThreads;
// Path rows keeps only the codes of four rows, and takes no more registers than this many thread blocks
// leave. On an H200 more thread blocks are faster than more rows in flight (docs/lab-notes).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kRowsBlocks = kBackward ? 2 : sizeof(IN::storage) == 2 ? 4 : 3;
#else
constexpr int kRowsBlocks = kBackward ? 2 : 3;
#endif
constexpr int kFusedBlocks = kStreamed ? kStreamBlocks : kPath == Path::any ? kBlocks : kRowsBlocks;

struct FusedCastParams {
    SourceCall call;
    u8 *data, *data_t;           // or null
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second destination, or null
    float* amax;                 // one element, raised to the amax; or null
    AmaxOfBlocks* workspace;     // to find a scale; or null
    float* found_scale;          // destination of the scale found
    float scale_value;
    TensorScaleRule rule;        // of found_scale
    u32 vector;                  // every row of data_t allows 16-byte stores
    u32 tiles;                   // tiles per thread block, one below the other, where rows stream
};

__device__ __forceinline__ u32 raised_by(u32 amax, const float (&values)[8]) {
#pragma unroll
    for (const float v : values) amax = raised_magnitude(amax, v);
    return amax;
}
__device__ __forceinline__ Chunk<OUT, 8> quantized(const float (&values)[8], float scale) {
    return narrowed<OUT>(values, [&](float v, int) { return mul_rn(v, scale); });
}

// Casts values as they are computed, and keeps their codes.
template <int kCount>
struct CastCodes {
    const float scale;
    u32 largest = 0;
    Chunk<OUT, 8> codes[kParts][kCount];

    __device__ __forceinline__ explicit CastCodes(float scale) : scale(scale) {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8]) {
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            largest = raised_by(largest, values[part]);
            codes[part][r] = quantized(values[part], scale);
        }
    }
    __device__ __forceinline__ u32 amax() const { return largest; }
};

class OptionCast : public CastCodes<kThreadRows> {
public:
    // behind: shared memory after the stages.
    __device__ __forceinline__ OptionCast(const FusedCastParams&, u8* behind, float scale)
        : CastCodes(scale), behind(behind) {}
    __device__ __forceinline__ void take(int r, const float (&values)[kParts][8], int left) {
        const u32 before = largest;
        CastCodes::take(r, values);
        // absent rows hold only biases
        if (!kBackward && r >= left) largest = before;
    }
    template <class Rows>
    __device__ __forceinline__ void store(const FusedCastParams& p, const StreamPosition& at,
                                          const Rows& rows) const {
        const SourceCall& call = p.call;
        if (p.data) {
            const ChunkPosition position(call, at.results(call), thread_again());
#pragma unroll
            for (int part = 0; part < kParts; part++)
                store_chunks(call, p.data + part * columns_between_parts(call), position,
                             rows.left_in(part, rows.left + kStepRows),
                             [&](int chunk) { return codes[part][chunk]; });
        }
        if (!p.data_t) return;
        const auto tile = [&](int part) { return Tile{behind + part * Tile::kRows * Tile::kColumns}; };
        __syncthreads();                                             // all threads have stored the last tile
#pragma unroll
        for (int part = 0; part < kParts; part++) write_rows(tile(part), row_in_step(0), codes[part]);
        __syncthreads();
#pragma unroll
        for (int part = 0; part < kParts; part++)
            store_tile(call, moved(at.results(call), part * columns_between_parts(call)), end_of(call, part),
                       tile(part), p.data_t, p.vector);
    }

private:
    u8* behind;
};

class StreamCast : public CastCodes<kThreadRows> {
public:
    static constexpr bool kWholeTiles = true;

    __device__ __forceinline__ StreamCast(const FusedCastParams&, const TilePosition&, u8* behind,
                                          float scale)
        : CastCodes(scale), tile{behind} {}
    __device__ __forceinline__ void store(const FusedCastParams& p, const StreamPosition& at, int,
                                          const ChunkPosition& position, int left, const float*) const {
        const SourceCall& call = p.call;
        if (p.data) store_chunks(call, p.data, position, left, [&](int chunk) { return codes[0][chunk]; });
        if (!p.data_t) return;
        __syncthreads();                                             // all threads have stored the last tile
        write_rows(tile, row_in_step(0), codes[0]);
        __syncthreads();
        store_tile(call, at.tile(), call.columns, tile, p.data_t, p.vector);
    }
    __device__ __forceinline__ void advance(const FusedCastParams&) {}

private:
    const Tile tile;
};

class PatchCast {
public:
    __device__ __forceinline__ PatchCast(const FusedCastParams&, float scale) : scale(scale) {}
    __device__ __forceinline__ void take(const FusedCastParams& p, const PatchPosition& patch, int r,
                                         const EightValues& values) {
        largest = raised_by(largest, values.of);
        const Chunk<OUT, 8> of_row = quantized(values.of, scale);
        if (p.data) store_row(p.call, patch, p.data, r, of_row);
        append(codes, of_row);
    }
    __device__ __forceinline__ void store(const FusedCastParams& p, const TilePosition& at,
                                          const PatchPosition&) const {
        extern __shared__ __align__(16) u8 shared[];
        if (!p.data_t) return;
        const Tile tile{shared};
        tile.write_patch(codes);
        __syncthreads();
        store_transposed(p.call, at, tile, p.data_t, p.vector);
    }
    __device__ __forceinline__ u32 amax() const { return largest; }

private:
    const float scale;
    u32 largest = 0;
    Chunk<OUT, 8> codes[8];
};

// Casts a thread block's tiles whose rows come through registers: y row-wise alone, or gradients in either
// direction. Returns the thread's amax, as bits.
template <class S>
__device__ __forceinline__ u32 cast_rows(const FusedCastParams& p, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const SourceCall& call = p.call;
    u32 amax = 0;
    const auto at = position(call, blockIdx.x);
    const PatchPosition patch(call, at);
    RowStore store(call, patch, p.data);
    constexpr int kRows = 4;
    Rows<S, kRows, kRowsAhead> rows(call, patch);
#pragma unroll 1
    for (int group = 0; group < 8 / kRows; group++) {
        Chunk<OUT, 8> codes[kParts][kRows];
        rows.each(call, patch, group, [&](int r, const float (&values)[kParts][8]) {
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                amax = raised_by(amax, values[part]);
                // The chunk is a variable of its own: where integer conversions write into codes[][]
                // directly, NVRTC for sm_80 leaves the loop over rows rolled, and the arrays in local memory.
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

// Returns the scale, and stores its reciprocal.
__device__ __forceinline__ float begin_cast(const FusedCastParams& p) {
    const float scale = p.scale ? *p.scale : p.scale_value;
    if (!p.workspace && blockIdx.x == 0 && threadIdx.x == 0)
        write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
    return scale;
}
// Raises the call's amax buffers by a thread's amax. kThreads: upper bound of the block size `threads`.
template <int kThreads>
__device__ __forceinline__ void finish_cast(const FusedCastParams& p, u32 amax, int threads = kThreads) {
    if (!p.amax && !p.workspace) return;
    amax = block_max<kThreads>(amax, threads);
    if (threadIdx.x != 0) return;
    if (p.amax) raise_amax(p.amax, amax, load_relaxed(p.amax));
    float of_all;
    if (p.workspace && p.workspace->add(amax, gridDim.x, of_all)) *p.found_scale = p.rule.scale_of(of_all);
}

// Computes values and casts them.
template <class Params>
__device__ __forceinline__ void quantize(const Params& p) {
    if (is_set(p.call.noop)) return;
    const float scale = begin_cast(p);
    u32 amax;
    if constexpr (kOptions) amax = stream_with_options<OptionCast>(p, p.call, scale);
    else if constexpr (kStreamed) amax = stream<StreamCast>(p, p.call, scale);
    else if constexpr (kPath == Path::any) amax = patches<PatchCast>(p, p.call, scale);
    else amax = cast_rows<Source>(p, scale);
    add_up_sums(p.call, p.tiles);
    finish_cast<kFusedThreads>(p, amax);
}
