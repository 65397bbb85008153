// SwiGLU, or its gradients, and quantisation from one read (docs/numerics.md, section 9).
//
//   y = ((a * sigma(a)) * b) * p                 in f32, each operation rounded; (a, b) of x, p one weight per row or none
//   data, scale_inv of y                         per tensor (section 1), MX (section 2), or in blocks of 32, 64 or 128 (section 3)
//
// What y is, from which memory: include/gate.cuh. BACKWARD 1: the gradient of x takes the place of y.
//
// A block of 256 threads owns 128 x 128 elements of y, a thread 8 x 8 of them: it loads all it needs of x (256 bytes, 16 at a time, of
// 16-bit formats) before it computes, and keeps y in registers until amaxes and scales are known.
//
// swiglu_cast   one scale; column-wise data transposed. To find current scaling's scale first: the amax of all blocks, and from the last
//               one the scale; nothing else is written.
// swiglu_block  f32 scales (include/block_scale.cuh), column-wise data transposed. DIVIDE 1: elements are divided by scale_inv (vllm).
// swiglu_mx     E8M0 scales (include/e8m0.cuh) of 32 elements, column-wise data as y.
//
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; directions, forms, layouts, alignment and whatever else is in the structs is told at run
// time.
// Bytes moved per element of y: 2 sizeof(IN), and 1 + its part of a scale per direction. BACKWARD: of grad 3 sizeof(IN), 2 and scales; what
// both da and db are made of is read twice, by blocks that are neighbours as far as the L2 is concerned.
#include "block_scale.cuh"
#include "cast.cuh"
#include "e8m0.cuh"
#include "gate.cuh"

constexpr int kWarps = kThreads / 32;
// On a multiprocessor, for 128 registers. Gradients in f32 do not fit these, on sm_120 other kernels do not either.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = sizeof(IN::storage) == 2 && !BACKWARD ? 2 : 1;
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 || !BACKWARD ? 2 : 1;
#endif
constexpr int kRun = 32, kRuns = Tile::kColumns / kRun;              // of elements along a row; the smallest block

// Row r of the patch, stored as y is.
__device__ __forceinline__ void store_row(const Gate& g, const Place& place, u8* data, int r, const Chunk<OUT, 8>& codes) {
    if (r >= place.rows_left) return;
    u8* to = data + (place.row + r) * g.columns + place.column;
    if (!g.has(Gate::kWide)) codes.store_partial(to, place.columns_left);
    else if (place.columns_left) codes.store(to);
}

// The transposed tile, behind a __syncthreads(). vector: every transposed row allows 16-byte stores.
__device__ __forceinline__ void store_transposed(const Gate& g, const TilePosition& at, const Tile& tile, u8* data, bool vector) {
    if (!vector) {
        tile.store_ragged(data + at.column * g.rows + at.row, g.rows, left_of(g.columns - at.column, Tile::kColumns),
                          left_of(g.rows - at.row, Tile::kRows));
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit++) {
        const i64 row = at.column + Tile::column<16>(unit), column = at.row + Tile::row<16>();
        if (row < g.columns && column < g.rows) tile.read<OUT, 16>(unit).store_whole(data + row * g.rows + column);
    }
}

#ifdef ENTRY_swiglu_cast
struct SwigluCastParams {
    Gate gate;
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
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) swiglu_cast(const __grid_constant__ SwigluCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
    const auto at = g.rows && g.columns ? TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns) : TilePosition{};
    const Place place(g, at);
    const float scale = p.scale ? *p.scale : p.scale_value;
    if (!p.found && blockIdx.x == 0 && threadIdx.x == 0) write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
    u32 top = 0;
    Chunk<OUT, 8> patch[8];
    each_row(g, place, [&](int r, const float(&y)[8]) {
#pragma unroll
        for (const float v : y) top = raised_magnitude(top, v);
#pragma unroll
        for (int i = 0; i < 4; i++) patch[r].narrow2(i, mul_rn(y[2 * i], scale), mul_rn(y[2 * i + 1], scale));
        if (p.data) store_row(g, place, p.data, r, patch[r]);
    });
    if (p.data_t) {
        const Tile tile{shared};
        tile.write_patch(patch);
        __syncthreads();
        store_transposed(g, at, tile, p.data_t, p.vector);
    }
    if (!p.amax && !p.found) return;
    top = block_max<kThreads>(top);
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

#if defined(ENTRY_swiglu_block) || defined(ENTRY_swiglu_mx)
// The largest magnitudes of the rows and columns of a patch, as bits.
template <bool kNan>
__device__ __forceinline__ u32 larger(u32 top, float v) {
    if (!kNan) return raised_magnitude(top, v);
    const u32 bits = as_bits(magnitude(v));
    return bits > top ? bits : top;
}

struct PatchTops {
    u32 row[8], column[8];

    template <bool kNan>
    __device__ __forceinline__ void find_rows(const float (&y)[8][8]) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            row[r] = 0;
#pragma unroll
            for (int c = 0; c < 8; c++) row[r] = larger<kNan>(row[r], y[r][c]);
        }
    }
    template <bool kNan>
    __device__ __forceinline__ void find_columns(const float (&y)[8][8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            column[c] = 0;
#pragma unroll
            for (int r = 0; r < 8; r++) column[c] = larger<kNan>(column[c], y[r][c]);
        }
    }
    // Over the four lanes of a run: afterwards row[0] and row[1] are whole, those of rows owned() and the next. Each exchange halves the
    // rows that a lane has a part of.
    __device__ __forceinline__ void reduce_rows() {
        halve<1, 4>();
        halve<2, 2>();
    }
    static __device__ __forceinline__ int owned() { return threadIdx.x % 2 * 4 + threadIdx.x / 2 % 2 * 2; }

private:
    template <int kDistance, int kKeep>
    __device__ __forceinline__ void halve() {
        const bool upper = threadIdx.x & kDistance;
#pragma unroll
        for (int i = 0; i < kKeep; i++) {
            const u32 sent = upper ? row[i] : row[i + kKeep], kept = upper ? row[i + kKeep] : row[i];
            const u32 other = __shfl_xor_sync(~0u, sent, kDistance);
            row[i] = kept > other ? kept : other;                    // NaNs are there only where they win
        }
    }
};

// The maxima of the columns of every row of patches: [16][128] words.
__device__ __forceinline__ void store_column_tops(u32* tops, const u32 (&column)[8]) {
    u32* to = tops + Tile::row_patch() * Tile::kColumns + Tile::patch_column();
    *reinterpret_cast<uint4*>(to) = make_uint4(column[0], column[1], column[2], column[3]);
    *reinterpret_cast<uint4*>(to + 4) = make_uint4(column[4], column[5], column[6], column[7]);
}
__device__ __forceinline__ u32 column_top(const u32* tops, int first, int patches, int column) {
    u32 top = 0;
    for (int i = first; i < first + patches; i++) {
        const u32 other = tops[i * Tile::kColumns + column];
        top = other > top ? other : top;
    }
    return top;
}

// Eight floats of shared memory, 16-byte aligned.
__device__ __forceinline__ void load_floats(const void* from, float (&v)[8]) {
    const uint4 low = reinterpret_cast<const uint4*>(from)[0], high = reinterpret_cast<const uint4*>(from)[1];
    const u32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = as_float(bits[i]);
}
#endif

#ifdef ENTRY_swiglu_block
struct SwigluBlockParams {
    Gate gate;
    u8 *data, *data_t;           // or null
    ScaleGrid fast, slow;        // of row-wise and column-wise blocks
    BlockRule rule;
    u32 runs;                    // of 32 elements in a block: 1, 2 or 4
    u32 vector;                  // every row of data_t allows 16-byte stores
};

constexpr int kRunStride = 16 + 4;                                   // words: a warp's rows, without conflicts of banks

__device__ __forceinline__ float operand(const BlockScale& s) { return DIVIDE ? s.scale_inv : s.factor; }
__device__ __forceinline__ float scaled(float v, float by) { return DIVIDE ? div_rn(v, by) : mul_rn(v, by); }

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) swiglu_block(const __grid_constant__ SwigluBlockParams p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
    __shared__ __align__(16) float of_rows[kWarps][kRuns * kRunStride];
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns);
    const Place place(g, at);
    float y[8][8];
    each_row(g, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const int lane = threadIdx.x % 32, blocks = kRuns / (int)p.runs, patches = (int)p.runs * (kRun / 8);
    if (p.data) {
        float* const mine = of_rows[threadIdx.x / 32];               // of the 16 rows of this warp, run by run
        top.find_rows<false>(y);
        top.reduce_rows();
        const int run = Tile::column_patch() / (kRun / 8), row = lane / 16 * 8;
        float* const owned = mine + run * kRunStride + row + PatchTops::owned();
        owned[0] = as_float(top.row[0]), owned[1] = as_float(top.row[1]);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * blocks; i += 32) {               // a lane per block
            const int r = i % 16, b = i / 16;
            u32 bits = 0;
            for (int k = b * (int)p.runs; k < (b + 1) * (int)p.runs; k++) {
                const u32 other = as_bits(mine[k * kRunStride + r]);
                bits = other > bits ? other : bits;
            }
            const BlockScale s = p.rule.of(bits);
            // Of all its runs, so that nobody needs to know the block. Nobody else reads this lane's.
            for (int k = b * (int)p.runs; k < (b + 1) * (int)p.runs; k++) mine[k * kRunStride + r] = operand(s);
            const i64 to_row = at.row + threadIdx.x / 32 * 16 + r, to_block = at.column / Tile::kColumns * blocks + b;
            if (p.fast.has(to_row, to_block)) *p.fast.at(0, to_row, to_block) = to_row < g.rows ? s.scale_inv : 0.0f;
        }
        __syncwarp();
        float by[8];
        load_floats(mine + run * kRunStride + row, by);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, scaled(y[r][2 * i], by[r]), scaled(y[r][2 * i + 1], by[r]));
            store_row(g, place, p.data, r, codes);
        }
    }
    if (p.data_t) {
        top.find_columns<false>(y);
        store_column_tops(tops, top.column);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < blocks * Tile::kColumns; i += kThreads) {
            const int b = i / Tile::kColumns, c = i % Tile::kColumns;
            const BlockScale s = p.rule.of(column_top(tops, b * patches, patches, c));
            tops[b * patches * Tile::kColumns + c] = as_bits(operand(s));
            const i64 to_block = at.row / Tile::kRows * blocks + b, to_column = at.column + c;
            if (p.slow.has(to_block, to_column)) *p.slow.at(0, to_block, to_column) = to_column < g.columns ? s.scale_inv : 0.0f;
        }
        __syncthreads();
        float by[8];
        load_floats(tops + Tile::row_patch() / patches * patches * Tile::kColumns + Tile::patch_column(), by);
        Chunk<OUT, 8> patch[8];
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) patch[r].narrow2(i, scaled(y[r][2 * i], by[2 * i]), scaled(y[r][2 * i + 1], by[2 * i + 1]));
        const Tile tile{shared};
        tile.write_patch(patch);
        __syncthreads();
        store_transposed(g, at, tile, p.data_t, p.vector);
    }
}
#endif

#ifdef ENTRY_swiglu_mx
struct SwigluMxParams {
    Gate gate;
    u8 *data, *slow_data;        // row-wise and column-wise; or null
    ScaleTarget fast, slow;
    ScaleRule rule;
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) swiglu_mx(const __grid_constant__ SwigluMxParams p) {
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
    __shared__ __align__(16) u8 of_rows[Tile::kRows * kRuns], of_columns[kRuns * Tile::kColumns];    // a word per row; a line per 32 rows
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns);
    const Place place(g, at);
    float y[8][8];
    each_row(g, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const i64 row_blocks = (g.columns + kRun - 1) / kRun, column_blocks = (g.rows + kRun - 1) / kRun;
    if (p.data) {
        if (p.rule.nan_wins()) top.find_rows<true>(y);
        else top.find_rows<false>(y);
        top.reduce_rows();
        const int run = Tile::column_patch() / (kRun / 8);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = Tile::patch_row() + PatchTops::owned() + i;
            const bool exists = at.row + row < g.rows && at.column / kRun + run < row_blocks;
            of_rows[row * kRuns + run] = exists ? (u8)p.rule.byte(top.row[i]) : 0;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float by = inverse_e8m0(of_rows[(Tile::patch_row() + r) * kRuns + run]);
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by), mul_rn(y[r][2 * i + 1], by));
            store_row(g, place, p.data, r, codes);
        }
    }
    if (p.slow_data) {
        if (p.rule.nan_wins()) top.find_columns<true>(y);
        else top.find_columns<false>(y);
        store_column_tops(tops, top.column);
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < kRuns * Tile::kColumns; i += kThreads) {
            const int b = i / Tile::kColumns, c = i % Tile::kColumns;
            const bool exists = at.column + c < g.columns && at.row / kRun + b < column_blocks;
            of_columns[i] = exists ? (u8)p.rule.byte(column_top(tops, b * (kRun / 8), kRun / 8, c)) : 0;
        }
        __syncthreads();
        const uint2 bytes =
            *reinterpret_cast<const uint2*>(of_columns + Tile::row_patch() / (kRun / 8) * Tile::kColumns + Tile::patch_column());
        float by[8];
#pragma unroll
        for (int c = 0; c < 8; c++) by[c] = inverse_e8m0((c < 4 ? bytes.x : bytes.y) >> c % 4 * 8 & 0xffu);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by[2 * i]), mul_rn(y[r][2 * i + 1], by[2 * i + 1]));
            store_row(g, place, p.slow_data, r, codes);
        }
    } else {
        __syncthreads();                                             // of_rows is other warps' below
    }
    // A word per thread: four blocks of a row; four blocks of a column (swizzled), or a block of four columns.
    const int word = threadIdx.x, swizzled_line = word % 4 * 32 + word / 4 % 32;
    if (p.data && word < Tile::kRows) {
        const int line = p.fast.swizzled() ? swizzled_line : word;
        p.fast.store_blocks(0, at.row + line, at.column / kRun, reinterpret_cast<const u32*>(of_rows)[line], g.rows, row_blocks);
    }
    if (p.slow_data && word < Tile::kColumns) {
        if (p.slow.swizzled()) {
            u32 blocks = 0;
#pragma unroll
            for (int b = 0; b < kRuns; b++) blocks |= (u32)of_columns[b * Tile::kColumns + swizzled_line] << 8 * b;
            p.slow.store_blocks(0, at.column + swizzled_line, at.row / kRun, blocks, g.columns, column_blocks);
        } else {
            const int b = word / 32, c = word % 32 * 4;
            p.slow.store_lines(0, at.column + c, at.row / kRun + b, reinterpret_cast<const u32*>(of_columns)[word], g.columns,
                               column_blocks);
        }
    }
}
#endif
