// SwiGLU, or its gradients, and quantisation from one read (docs/numerics.md, section 9).
//
//   y = ((a * sigma(a)) * b) * p                 in f32, each operation rounded; (a, b) of x, p one weight per row or none
//   data, scale_inv of y                         per tensor (section 1), MX (section 2), or in blocks of 32, 64 or 128 (section 3)
//
// What y is, from which memory: include/swiglu/swiglu.cuh. BACKWARD 1: the gradient of x takes the place of y.
//
// A block of 256 threads owns 128 x 128 elements of y, a thread 8 x 8 of them; what has scales of columns it keeps in registers until these
// are known.
//
// PLAIN 1: the calls that include/swiglu/swiglu_rows.cuh has; of gradients a block then writes two tiles, that of da and that of db. What needs no
// more than a row is finished with it. OPTIONS 1 (with PLAIN 1): every call with rows that allow wide accesses (include/swiglu/swiglu_options.cuh),
// but for quotients, and for blocks of both da and db. PLAIN 0: every call, what it wants is told at run time; it loads all it needs of x
// (256 bytes of 16-bit formats) before it computes, and keeps all of y.
//
// swiglu_cast   one scale; column-wise data transposed. To find current scaling's scale first: the amax of all blocks, and from the last
//               one the scale; nothing else is written (but the sums of dprobs).
//
// PLAIN 2 is y row-wise alone. PLAIN 1 of y, in other directions, is by 512 threads, through whose shared memory rows stream
// (include/swiglu/swiglu_stream.cuh), as they do in swiglu_blocks.cu and swiglu_mx.cu: blocks with scales of their own. So is OPTIONS 1, in every
// direction.
//
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; directions, forms, layouts, alignment and whatever else is in the structs is told at run
// time.
// Bytes moved per element of y: 2 sizeof(IN), and 1 + its part of a scale per direction. BACKWARD: of grad 3 sizeof(IN), 2 and scales;
// PLAIN 0 reads what both da and db are made of twice, in blocks that are neighbours as far as the L2 is concerned.
#include "swiglu/swiglu.cuh"
#define STREAMED (PLAIN == 1 && (!BACKWARD || OPTIONS))
#if STREAMED
#include "swiglu/swiglu_blocks.cuh"
#else
#include "swiglu/swiglu_store.cuh"
#endif
#include "scale/scale.cuh"

#ifdef ENTRY_swiglu_cast
// PLAIN swiglu_cast keeps only codes of four rows: it takes no more registers than these blocks leave. On an H200 more blocks are faster
// than more rows on their way (docs/performance.md).
#if STREAMED
constexpr int kCastThreads = kLineThreads, kCastBlocks = kLineBlocks;
#else
constexpr int kCastThreads = kThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kCastBlocks = !PLAIN ? kBlocks : BACKWARD ? 2 : sizeof(IN::storage) == 2 ? 4 : 3;
#else
constexpr int kCastBlocks = !PLAIN ? kBlocks : BACKWARD ? 2 : 3;
#endif
#endif

struct SwigluCastParams {
    SwigluCall call;
    u8 *data, *data_t;           // or null
    const float* scale;          // one element, or null: scale_value
    float* scale_inv;            // one element
    float* scale_inv_copy;       // a second place for it, or null
    float* amax;                 // one element, raised, or null
    u32* found;                  // to find a scale: the amax so far and the blocks that have finished, zero before and after; or null
    float* found_scale;          // where it goes
    float scale_value;
    float target, eps;           // of it, as in compute_scale
    u32 pow2;
    u32 vector;                  // every row of data_t allows 16-byte stores
    u32 tiles;                   // of a block, one below the other, where rows stream
};

extern "C" __global__ void __launch_bounds__(kCastThreads, kCastBlocks) swiglu_cast(const __grid_constant__ SwigluCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const SwigluCall& call = p.call;
    if (is_set(call.noop)) return;
    const float scale = p.scale ? *p.scale : p.scale_value;
    if (!p.found && blockIdx.x == 0 && threadIdx.x == 0) write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
    u32 top = 0;
#if STREAMED && OPTIONS
    StreamPosition at(call, p.tiles);
    Stream rows(call, at.tile(), p.tiles, shared);
    const float* weights = Stream::shared_probs() + line_row(0);
#pragma unroll 1
    for (bool more = at.down * (i64)Tile::kRows < call.rows; more; more = at.advance(call, p.tiles), weights += kStepRows) {
        Chunk<OUT, 8> lines[kParts][kLineRows];
#if BACKWARD
        u32 sums[kParts][kLineRows];
#endif
        rows.each(at, [&](int r, float(&v)[kArrays][8], const float(&sigma)[8]) {
            float y[kParts][8];
#if BACKWARD
            rows.gradients(call, r, weights[r * kApart], v, sigma, y, sums);
#else
#pragma unroll
            for (int i = 0; i < 8; i++) y[0][i] = mul_rn(v[0][i], v[1][i]);
            if (call.probs) {
                const float weight = weights[r * kApart];
#pragma unroll
                for (int i = 0; i < 8; i++) y[0][i] = mul_rn(y[0][i], weight);
            }
#endif
            const u32 before = top;
#pragma unroll
            for (int part = 0; part < kParts; part++) {
#pragma unroll
                for (const float each : y[part]) top = raised_magnitude(top, each);
#pragma unroll
                for (int i = 0; i < 4; i++) lines[part][r].narrow2(i, mul_rn(y[part][2 * i], scale), mul_rn(y[part][2 * i + 1], scale));
            }
            if (!BACKWARD && r >= rows.left) top = before;           // biases alone
        });
#if BACKWARD
        rows.store_sums(call, at, sums);
#endif
        if (p.data) {
            const LineStore store(call, at.results(call), thread_again());
#pragma unroll
            for (int part = 0; part < kParts; part++)
                store_lines(call, p.data + part * apart(call), store, rows.left_in(part, rows.left), [&](int line) { return lines[part][line]; });
        }
        rows.left -= kStepRows;
        if (p.data_t) {
            const auto tile = [&](int part) { return Tile{shared + kStages * kStageBytes + part * Tile::kRows * Tile::kColumns}; };
            __syncthreads();                                         // all have stored the tile before
#pragma unroll
            for (int part = 0; part < kParts; part++) write_four_rows(tile(part), line_row(0), lines[part]);
            __syncthreads();
#pragma unroll
            for (int part = 0; part < kParts; part++)
                store_tile(call, moved(at.results(call), part * apart(call)), end_of(call, part), tile(part), p.data_t, p.vector);
        }
    }
    Stream::finish();
#elif STREAMED
    StreamPosition at(call, p.tiles);
    const auto first = at.tile();
    Stream rows(call, first, p.tiles, shared);
    LineStore store(call, first);
    const Tile tile{shared + kStages * kStageBytes};
    const float* weights = Stream::shared_probs() + line_row(0);
    const int steps = (left_of(call.rows - first.row, (int)p.tiles * Tile::kRows) + kStepRows - 1) / kStepRows;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        Chunk<OUT, 8> lines[kLineRows];
        rows.each(at, [&](int r, float(&v)[kArrays][8], const float(&sigma)[8]) {
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] = mul_rn(mul_rn(v[0][i], sigma[i]), v[1][i]);
            if (call.probs) {
                const float weight = weights[r * kApart];
#pragma unroll
                for (int i = 0; i < 8; i++) y[i] = mul_rn(y[i], weight);
            }
#pragma unroll
            for (const float each : y) top = raised_magnitude(top, each);
#pragma unroll
            for (int i = 0; i < 4; i++) lines[r].narrow2(i, mul_rn(y[2 * i], scale), mul_rn(y[2 * i + 1], scale));
        });
        if (p.data) store_lines(call, p.data, store, rows.left, [&](int line) { return lines[line]; });
        rows.left -= kStepRows;
        if (p.data_t) {
            __syncthreads();                                         // all have stored the tile before
            write_four_rows(tile, line_row(0), lines);
            __syncthreads();
            store_tile(call, at.tile(), call.columns, tile, p.data_t, p.vector);
        }
        at.down++;
        store.advance(call);
        weights += kStepRows;
    }
    Stream::finish();
#elif PLAIN
    const auto at = position(call, blockIdx.x);
    const Place place(call, at);
    RowStore store(call, place, p.data);
    constexpr int kRows = 4;
    Rows<kRows, kRowsAhead> rows(call, place);
#pragma unroll 1
    for (int group = 0; group < 8 / kRows; group++) {
        Chunk<OUT, 8> lines[kParts][kRows];
        rows.each(call, place, group, [&](int r, const float(&values)[kParts][8]) {
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                Chunk<OUT, 8>& codes = lines[part][r];
#pragma unroll
                for (const float v : values[part]) top = raised_magnitude(top, v);
#pragma unroll
                for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(values[part][2 * i], scale), mul_rn(values[part][2 * i + 1], scale));
                store.put(group * kRows, r, part, codes);
            }
        });
        store.advance(kRows);
        if (!p.data_t) continue;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const Tile tile{shared + part * Tile::kRows * Tile::kColumns};
            write_half_patch(tile.byte_at(Tile::patch_row() + group * kRows, Tile::patch_column()), lines[part]);
        }
    }
    if (p.data_t) {
        __syncthreads();
#pragma unroll
        for (int part = 0; part < kParts; part++)
            store_transposed(call, moved(at, part * call.half()), Tile{shared + part * Tile::kRows * Tile::kColumns}, p.data_t, p.vector);
    }
#else
    const auto at = call.rows && call.columns ? TilePosition::of_block<Tile, false>(blockIdx.x, call.rows, call.columns) : TilePosition{};
    const Place place(call, at);
    Chunk<OUT, 8> patch[8];
    each_row(call, place, [&](int r, const float(&y)[8]) {
#pragma unroll
        for (const float v : y) top = raised_magnitude(top, v);
#pragma unroll
        for (int i = 0; i < 4; i++) patch[r].narrow2(i, mul_rn(y[2 * i], scale), mul_rn(y[2 * i + 1], scale));
        if (p.data) store_row(call, place, p.data, r, patch[r]);
    });
    if (p.data_t) {
        const Tile tile{shared};
        tile.write_patch(patch);
        __syncthreads();
        store_transposed(call, at, tile, p.data_t, p.vector);
    }
#endif
    if (!p.amax && !p.found) return;
    top = block_max<kCastThreads>(top);
    if (threadIdx.x != 0) return;
    if (p.amax) raise_amax(p.amax, top, load_relaxed(p.amax));
    if (!p.found) return;
    atomicMax(&p.found[0], top);
    __threadfence();
    if (atomicAdd(&p.found[1], 1u) != gridDim.x - 1) return;
    __threadfence();
    const float amax = as_float(atomicExch(&p.found[0], 0u));
    atomicExch(&p.found[1], 0u);
    *p.found_scale = scale_from_amax(amax, p.target, p.eps, as_float(kMaxF32), p.pow2);
}
#endif
