// SwiGLU, or its gradients, and quantisation from one read (docs/numerics.md, section 9).
//
//   y = ((a * sigma(a)) * b) * p                 in f32, each operation rounded; (a, b) of x, p one weight per row or none
//   data, scale_inv of y                         per tensor (section 1), MX (section 2), or in blocks of 32, 64 or 128 (section 3)
//
// What y is, from which memory: include/gate.cuh. BACKWARD 1: the gradient of x takes the place of y.
//
// A block of 256 threads owns 128 x 128 elements of y, a thread 8 x 8 of them; what has scales of columns it keeps in registers until these
// are known.
//
// PLAIN 1: the calls that include/gate_rows.cuh has; of gradients a block then writes two tiles, that of da and that of db. What needs no
// more than a row (one scale; row-wise blocks alone, which are PLAIN 2) is finished with it. PLAIN 0: every call, what it wants is told at
// run time; it loads all it needs of x (256 bytes of 16-bit formats) before it computes, and keeps all of y.
//
// swiglu_cast   one scale; column-wise data transposed. To find current scaling's scale first: the amax of all blocks, and from the last
//               one the scale; nothing else is written (but the sums of dprobs).
// swiglu_block  f32 scales (include/block_scale.cuh), column-wise data transposed. DIVIDE 1: elements are divided by scale_inv (vllm).
// swiglu_mx     E8M0 scales (include/e8m0.cuh) of 32 elements, column-wise data as y.
//
// IN in {bf16, f16, f32}, OUT in {e4m3fn, e5m2}; directions, forms, layouts, alignment and whatever else is in the structs is told at run
// time.
// Bytes moved per element of y: 2 sizeof(IN), and 1 + its part of a scale per direction. BACKWARD: of grad 3 sizeof(IN), 2 and scales;
// PLAIN 0 reads what both da and db are made of twice, in blocks that are neighbours as far as the L2 is concerned.
#include "block_scale.cuh"
#include "cast.cuh"
#include "e8m0.cuh"
#if PLAIN
#include "gate_rows.cuh"
#else
#include "gate.cuh"
#endif

constexpr int kWarps = kThreads / 32;
// On a multiprocessor, for 128 registers. Gradients in f32 do not fit these, on sm_120 other kernels do not either.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = sizeof(IN::storage) == 2 && !BACKWARD ? 2 : 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kBlocks = (PLAIN || sizeof(IN::storage) == 4) && BACKWARD ? 1 : 2;      // conversions by integers take more
#else
constexpr int kBlocks = sizeof(IN::storage) == 2 || !BACKWARD ? 2 : 1;
#endif
// PLAIN swiglu_cast keeps only codes of four rows, and PLAIN 2 four lines: they take no more registers than these blocks leave. On an H200
// more blocks are faster than more rows on their way (docs/performance.md).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kCastBlocks = !PLAIN ? kBlocks : BACKWARD ? 2 : sizeof(IN::storage) == 2 ? 4 : 3;
constexpr int kLineBlocks = PLAIN == 2 && sizeof(IN::storage) == 2 && !BACKWARD ? 3 : kBlocks;
#else
constexpr int kCastBlocks = !PLAIN ? kBlocks : BACKWARD ? 2 : 3, kLineBlocks = kBlocks;
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

#if PLAIN
// Where the rows of a patch go that are stored as y is, group by group.
struct RowStore {
    u8* to;                      // of the first row of a group
    i64 half;
    int left;

    __device__ __forceinline__ RowStore(const Gate& g, const Place& place, u8* data)
        : to(data), half(g.half()), left(data && place.columns_left ? place.rows_left : 0) {
        if (left) to += place.row * g.columns + place.column;
    }
    // Row r of the group that starts with row `first`.
    __device__ __forceinline__ void put(int first, int r, int part, const Chunk<OUT, 8>& codes) const {
        if (first + r < left) codes.store(to + (r * kParts + part) * half);
    }
    __device__ __forceinline__ void advance(int rows) {
        if (left) to += rows * kParts * half;
    }
};
// Of a block, along rows of tiles. (In 32 bits: there are no more tiles than blocks. A division of i64 is a call, which costs registers.)
__device__ __forceinline__ TilePosition position(const Gate& g, u32 block) {
    const u32 across = (u32)((g.half() + Tile::kColumns - 1) / Tile::kColumns), line = across ? block / across : 0;
    return {0, (i64)line * Tile::kRows, (i64)(block - line * across) * Tile::kColumns};
}
// Found once more, where what has been found before would take registers until here.
__device__ __forceinline__ TilePosition position_again(const Gate& g) {
    u32 block = blockIdx.x;
#ifndef CUPY_FP8_HOST
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
#endif
    return position(g, block);
}
__device__ __forceinline__ TilePosition moved(const TilePosition& at, i64 columns) { return {at.matrix, at.row, at.column + columns}; }
#endif

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

#if PLAIN
// The upper or lower four rows of a patch of Tile::write_patch().
__device__ __forceinline__ void write_half_patch(const Tile& tile, int group, const Chunk<OUT, 8> (&line)[4]) {
    u8* const to = tile.byte_at(Tile::patch_row() + group * 4, Tile::patch_column());
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 columns[4];
        transpose_4x4(line[0].word[w], line[1].word[w], line[2].word[w], line[3].word[w], columns);
#pragma unroll
        for (int k = 0; k < 4; k++) *reinterpret_cast<u32*>(to + (w * 4 + k) * Tile::kRows) = columns[k];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCastBlocks) swiglu_cast(const __grid_constant__ SwigluCastParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
    const float scale = p.scale ? *p.scale : p.scale_value;
    if (!p.found && blockIdx.x == 0 && threadIdx.x == 0) write_scale_inv(scale, p.scale_inv, p.scale_inv_copy);
    u32 top = 0;
#if PLAIN
    const auto at = position(g, blockIdx.x);
    const Place place(g, at);
    RowStore store(g, place, p.data);
    constexpr int kRows = 4;
    Rows<kRows, kRowsAhead, false> rows(g, place);
#pragma unroll 1
    for (int group = 0; group < 8 / kRows; group++) {
        Chunk<OUT, 8> lines[kParts][kRows];
        rows.each(g, place, group, [&](int r, const float(&values)[kParts][8]) {
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
        for (int part = 0; part < kParts; part++) write_half_patch(Tile{shared + part * Tile::kRows * Tile::kColumns}, group, lines[part]);
    }
    if (p.data_t) {
        __syncthreads();
#pragma unroll
        for (int part = 0; part < kParts; part++)
            store_transposed(g, moved(at, part * g.half()), Tile{shared + part * Tile::kRows * Tile::kColumns}, p.data_t, p.vector);
    }
#else
    const auto at = g.rows && g.columns ? TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns) : TilePosition{};
    const Place place(g, at);
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
#endif
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

#if PLAIN
__device__ __forceinline__ u32 larger_bits(u32 v, u32 w) { return v > w ? v : w; }

// Four runs of eight elements beside those of the other lanes: of a part four rows, or as many of each part as make four. Group by group
// `first` moves on.
struct Lines {
    int first, part;             // row and part of line 0
    bool both;

    __device__ __forceinline__ int rows() const { return both ? 4 / kParts : 4; }
    __device__ __forceinline__ int row(int line) const { return first + (both ? line % (4 / kParts) : line); }
    __device__ __forceinline__ int part_of(int line) const { return both ? line / (4 / kParts) : part; }
};
// Their largest magnitudes over the lanes of a run: of each lane that of line owned<4>().
template <bool kNan>
__device__ __forceinline__ u32 fold_lines(const float (&y)[4][8]) {
    u32 tops[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        tops[i] = 0;
#pragma unroll
        for (const float v : y[i]) tops[i] = larger<kNan>(tops[i], v);
    }
    return fold(tops, larger_bits);
}

// Rows of a patch in shared memory, 16 bytes of every thread beside each other: db until da has left the registers, and two rows of da,
// for which there are no registers while the last rows are computed.
struct Aside {
    static constexpr int kRow = 8 * 4 * kThreads, kOfDa = 2;         // bytes; rows of da, its first, before those of db
    u8* shared;

    __device__ __forceinline__ void put(int row, const float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            store_shared_whole(at(row, i), as_bits(v[i]), as_bits(v[i + 1]), as_bits(v[i + 2]), as_bits(v[i + 3]));
    }
    __device__ __forceinline__ void get(int row, float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const uint4 bits = *reinterpret_cast<const uint4*>(at(row, i));
            v[i] = as_float(bits.x), v[i + 1] = as_float(bits.y), v[i + 2] = as_float(bits.z), v[i + 3] = as_float(bits.w);
        }
    }
    __device__ __forceinline__ void get_db(float (&y)[8][8]) const {
#pragma unroll
        for (int r = 0; r < 8; r++) get(kOfDa + r, y[r]);
    }

private:
    __device__ __forceinline__ u8* at(int row, int i) const { return shared + row * kRow + (i / 4 * kThreads + threadIdx.x) * 16; }
};

// All of a patch: y, or da, and db aside.
template <bool kZeros>
__device__ __forceinline__ void compute_patch(const Gate& g, const Place& place, const Aside& aside, float (&y)[8][8]) {
    constexpr int kRows = 4;
    Rows<kRows, kRowsAheadKept, kZeros> rows(g, place);
#pragma unroll
    for (int group = 0; group < 8 / kRows; group++) {
        rows.each(g, place, group, [&](int r, const float(&values)[kParts][8]) {
            const int row = group * kRows + r;
            if (BACKWARD && row < Aside::kOfDa) aside.put(row, values[0]);
            else
#pragma unroll
                for (int i = 0; i < 8; i++) y[row][i] = values[0][i];
            if (BACKWARD) aside.put(Aside::kOfDa + row, values[kParts - 1]);
        });
    }
    if (BACKWARD)
#pragma unroll
        for (int r = 0; r < Aside::kOfDa; r++) aside.get(r, y[r]);
}
// use(lines, values, where they go) for all of a patch as it is computed.
template <class Use>
__device__ __forceinline__ void each_lines(const Gate& g, const TilePosition& at, u8* data, Use&& use) {
    constexpr int kRows = 4 / kParts;
    const Place place(g, at);
    RowStore store(g, place, data);
    Rows<kRows, kRowsAhead, false> rows(g, place);
#pragma unroll 1
    for (int first = 0; first < 8; first += kRows) {
        float y[4][8];
        rows.each(g, place, first / kRows, [&](int r, const float(&values)[kParts][8]) {
#pragma unroll
            for (int part = 0; part < kParts; part++)
#pragma unroll
                for (int i = 0; i < 8; i++) y[part * kRows + r][i] = values[part][i];
        });
        use(Lines{first, 0, true}, y, store);
        store.advance(kRows);
    }
}
// The same of a part that has been computed.
template <class Use>
__device__ __forceinline__ void each_lines(const Gate& g, const TilePosition& at, u8* data, int part, const float (&y)[8][8], Use&& use) {
    RowStore store(g, Place(g, at), data);
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
        use(Lines{first, part, false}, *reinterpret_cast<const float(*)[4][8]>(&y[first]), store);
        store.advance(4);
    }
}
#endif

// The maxima of the columns of every row of patches: [16][128] words.
__device__ __forceinline__ void store_column_tops(u32* tops, const u32 (&column)[8]) {
    u32* to = tops + Tile::row_patch() * Tile::kColumns + Tile::patch_column();
    *reinterpret_cast<uint4*>(to) = make_uint4(column[0], column[1], column[2], column[3]);
    *reinterpret_cast<uint4*>(to + 4) = make_uint4(column[4], column[5], column[6], column[7]);
}
__device__ __forceinline__ u32 column_top(const u32* tops, int first, int patches, int column) {
    u32 top = 0;
    for (int i = first; i < first + patches; i += kRun / 8)          // whole runs: their loads wait together
#pragma unroll
        for (int u = 0; u < kRun / 8; u++) {
            const u32 other = tops[(i + u) * Tile::kColumns + column];
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

#if PLAIN
// Scales and codes of lines. A block is one to four runs of four lanes; a lane writes the scale of the line that it owns.
struct BlockLines {
    const SwigluBlockParams& p;
    u32 at_scale;                // where it goes, from p.fast.to on: the host refuses 2^32 scales
    int stored, given;           // the first row of a group from which there is no scale, or one without elements

    // lines: of the first group.
    __device__ __forceinline__ BlockLines(const SwigluBlockParams& p, const TilePosition& at, const Lines& lines) : p(p) {
        const int own = owned<4>();
        const i64 row = at.row + Tile::patch_row() + lines.row(own);
        const i64 run = (at.column + lines.part_of(own) * p.gate.half()) / kRun + Tile::column_patch() / (kRun / 8);
        const i64 block = run >> p.runs / 2;
        const bool has = p.data && !(run & (p.runs - 1)) && block < p.fast.columns;
        stored = has ? left_of(p.fast.rows - row, 8) : 0, given = left_of(p.gate.rows - row, 8);
        at_scale = (u32)(row * p.fast.row + block * p.fast.column);
    }
    __device__ __forceinline__ void operator()(const Lines& lines, const float (&y)[4][8], const RowStore& store) {
        u32 top = fold_lines<false>(y);
        if (p.runs > 1) top = larger_bits(top, __shfl_xor_sync(~0u, top, 4));
        if (p.runs > 2) top = larger_bits(top, __shfl_xor_sync(~0u, top, 8));
        const BlockScale s = p.rule.quick_of(top);
        if (lines.first < stored) as_global(p.fast.to)[at_scale] = lines.first < given ? s.scale_inv : 0.0f;
        at_scale += (u32)(lines.rows() * p.fast.row);
#pragma unroll
        for (int line = 0; line < 4; line++) {
            const float by = as_float(__shfl_sync(~0u, as_bits(operand(s)), owner(line)));
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, scaled(y[line][2 * i], by), scaled(y[line][2 * i + 1], by));
            store.put(lines.first, lines.row(line) - lines.first, lines.part_of(line), codes);
        }
    }
};
#endif

// The transposed tile, column by column. tops: [16][128] words.
__device__ __forceinline__ void quantise_columns(const SwigluBlockParams& p, const TilePosition& at, const float (&y)[8][8], u32* tops,
                                                 const Tile& tile) {
    const Gate& g = p.gate;
    const int blocks = kRuns / (int)p.runs, patches = (int)p.runs * (kRun / 8);
    PatchTops top;
    top.find_columns<false>(y);
    store_column_tops(tops, top.column);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < blocks * Tile::kColumns; i += kThreads) {
        const int b = i / Tile::kColumns, c = i % Tile::kColumns;
        const BlockScale s = p.rule.quick_of(column_top(tops, b * patches, patches, c));
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
    tile.write_patch(patch);
    __syncthreads();
    store_transposed(g, at, tile, p.data_t, p.vector);
}

extern "C" __global__ void __launch_bounds__(kThreads, kLineBlocks) swiglu_block(const __grid_constant__ SwigluBlockParams p) {
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
#if PLAIN == 2
    const auto at = position(g, blockIdx.x);
    each_lines(g, at, p.data, BlockLines(p, at, Lines{0, 0, true}));
#else
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
#if PLAIN
    const auto at = position(g, blockIdx.x);
    const Aside aside{shared};                                       // da's rows where the tile will be
    static_assert(Aside::kOfDa * Aside::kRow == Tile::kRows * Tile::kColumns, "no more of da, no db");
    float y[8][8];
    compute_patch<false>(g, Place(g, at), aside, y);
#pragma unroll 1
    for (int part = 0; part < kParts; part++) {
        if (part) aside.get_db(y);
        const auto at = position_again(g);
        if (p.data) each_lines(g, at, p.data, part, y, BlockLines(p, at, Lines{0, part, false}));
        quantise_columns(p, moved(at, part * g.half()), y, tops, Tile{shared});
    }
#else
    __shared__ __align__(16) float of_rows[kWarps][kRuns * kRunStride];
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns);
    const Place place(g, at);
    float y[8][8];
    each_row(g, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const int lane = threadIdx.x % 32, blocks = kRuns / (int)p.runs;
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
    if (p.data_t) quantise_columns(p, at, y, tops, Tile{shared});
#endif
#endif
}
#endif

#ifdef ENTRY_swiglu_mx
struct SwigluMxParams {
    Gate gate;
    u8 *data, *slow_data;        // row-wise and column-wise; or null
    ScaleTarget fast, slow;
    ScaleRule rule;
};

// The 32 rows of each run down the columns; of_columns: a line per run.
__device__ __forceinline__ void quantise_columns(const SwigluMxParams& p, const TilePosition& at, const Place& place,
                                                 const float (&y)[8][8], u32* tops, u8* of_columns) {
    const Gate& g = p.gate;
    const i64 column_blocks = (g.rows + kRun - 1) / kRun;
    PatchTops top;
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
#if PLAIN
    const RowStore store(g, place, p.slow_data);
#endif
#pragma unroll
    for (int r = 0; r < 8; r++) {
        Chunk<OUT, 8> codes;
#pragma unroll
        for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[r][2 * i], by[2 * i]), mul_rn(y[r][2 * i + 1], by[2 * i + 1]));
#if PLAIN
        store.put(0, r, 0, codes);
#else
        store_row(g, place, p.slow_data, r, codes);
#endif
    }
}

// The bytes of scales, behind a __syncthreads(). A word per thread: four blocks of a row; four blocks of a column (swizzled), or a block of
// four columns.
__device__ __forceinline__ void store_scales(const SwigluMxParams& p, const TilePosition& at, const u8* of_rows, const u8* of_columns) {
    const Gate& g = p.gate;
    const i64 row_blocks = (g.columns + kRun - 1) / kRun, column_blocks = (g.rows + kRun - 1) / kRun;
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

#if PLAIN
// Scales and codes of lines. of_rows: a word per row and part; a lane writes the byte of the line that it owns.
struct MxLines {
    const SwigluMxParams& p;
    u8* to;                      // of the byte
    int given;                   // the first row of a group from which there is none

    // lines: of the first group.
    __device__ __forceinline__ MxLines(const SwigluMxParams& p, const TilePosition& at, const Lines& lines, u8* of_rows) : p(p) {
        const int run = Tile::column_patch() / (kRun / 8), own = owned<4>(), row = Tile::patch_row() + lines.row(own);
        const bool has = at.column + lines.part_of(own) * p.gate.half() + run * kRun < p.gate.columns;
        given = has ? left_of(p.gate.rows - at.row - row, 8) : 0;
        to = of_rows + (lines.part_of(own) * Tile::kRows + row) * kRuns + run;
    }
    __device__ __forceinline__ void operator()(const Lines& lines, const float (&y)[4][8], const RowStore& store) {
        const u32 byte = p.rule.byte(p.rule.nan_wins() ? fold_lines<true>(y) : fold_lines<false>(y));
        to[lines.first * kRuns] = lines.first < given ? (u8)byte : 0;
        const u32 inverse = as_bits(inverse_e8m0(byte));
#pragma unroll
        for (int line = 0; line < 4; line++) {
            const float by = as_float(__shfl_sync(~0u, inverse, owner(line)));
            Chunk<OUT, 8> codes;
#pragma unroll
            for (int i = 0; i < 4; i++) codes.narrow2(i, mul_rn(y[line][2 * i], by), mul_rn(y[line][2 * i + 1], by));
            store.put(lines.first, lines.row(line) - lines.first, lines.part_of(line), codes);
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kLineBlocks) swiglu_mx(const __grid_constant__ SwigluMxParams p) {
    const Gate& g = p.gate;
    if (is_set(g.noop)) return;
#if PLAIN
    __shared__ __align__(16) u8 of_rows[kParts][Tile::kRows * kRuns];                        // a word per row
    const auto at = position(g, blockIdx.x);
#endif
#if PLAIN == 2
    each_lines(g, at, p.data, MxLines(p, at, Lines{0, 0, true}, of_rows[0]));
    __syncthreads();                                                 // of_rows is other warps' below
    for (int part = 0; part < kParts; part++) store_scales(p, moved(at, part * g.half()), of_rows[part], nullptr);
#else
    __shared__ __align__(16) u32 tops[Tile::kRowPatches * Tile::kColumns];
    __shared__ __align__(16) u8 of_columns[kRuns * Tile::kColumns];      // a line per 32 rows
#if PLAIN
    extern __shared__ __align__(16) u8 shared[];
    const Aside aside{shared};
    float y[8][8];
    compute_patch<true>(g, Place(g, at), aside, y);
#pragma unroll 1
    for (int part = 0; part < kParts; part++) {
        if (part) aside.get_db(y);
        const auto at = position_again(g);
        if (p.data) each_lines(g, at, p.data, part, y, MxLines(p, at, Lines{0, part, false}, of_rows[0]));
        const auto to = moved(at, part * g.half());
        quantise_columns(p, to, Place(g, to), y, tops, of_columns);
        store_scales(p, to, of_rows[part], of_columns);
    }
#else
    __shared__ __align__(16) u8 of_rows[Tile::kRows * kRuns];        // a word per row
    const auto at = TilePosition::of_block<Tile, false>(blockIdx.x, g.rows, g.columns);
    const Place place(g, at);
    float y[8][8];
    each_row(g, place, [&](int r, const float(&v)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) y[r][c] = v[c];
    });
    PatchTops top;
    const i64 row_blocks = (g.columns + kRun - 1) / kRun;
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
    if (p.slow_data) quantise_columns(p, at, place, y, tops, of_columns);
    else __syncthreads();                                            // of_rows is other warps' below
    store_scales(p, at, of_rows, of_columns);
#endif
#endif
}
#endif
