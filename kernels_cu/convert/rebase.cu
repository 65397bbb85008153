// This kernel gives FP8 data with power-of-two scales other blocks of power-of-two scales (docs/numerics.md,
// section 5), without a wider type:
//
//   out = narrow(v * s / t), rounded once; s = 2^e is the element's scale, and t that of its new block:
//   t   = smallest power of two >= max |v| * s / fp8_max over the new block
//
// Rounding is to nearest-even, and saturates. A code that is NaN stays NaN, and a scale that is no power of
// two gives NaN. A block with s = 0 gives narrow(v * 0) and counts for no target.
//
// data        FP8 [batch, rows, columns] (IN), and out likewise
// scales      f32 or E8M0, at strides; one for the tensor has strides of 0
// new_scales  f32 or E8M0, at strides. Padding (gemm_ready) is 0.
// changed     null, or a counter that is raised by the number of values that are not what they were
//
// The scale of (row, column) is that of the block (row >> row_shift, column >> column_shift). Blocks have 32
// or more columns, so the 16 elements of a chunk share both scales. Old blocks may be smaller or larger than
// new ones.
//
// A tile is 1024 chunks of 16 bytes, 2^chunks_log2 of them side by side, and a thread has four of them, whose
// loads are all in flight. A block of threads has a region: a tile that holds whole new blocks, or the tiles
// of a new block that is larger. It finds the targets of all tiles, then transforms them, beginning with the
// last one, which is still in registers. The others are read again, mostly from the L2.
//
// Arithmetic is in f16: v * 2^k, k = e - t, is exact for kExact <= k <= 15. Chunks with another k, which are
// rare, are computed in f32, element by element. Chunks that hold nothing but zeros and NaN have any k.
//
// IN, the format of the data, is the only define: the types of scales and the shapes of blocks cost branches
// that all threads take alike. It moves 2 bytes per element, and the scales.
#include "memory/errors.cuh"
#include "memory/chunks.cuh"
#include "scale/power_of_two.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kEach = 4;                                             // chunks of a thread in a tile
constexpr int kTileLog2 = 10;                                        // chunks in a tile
static_assert(kThreads * kEach == 1 << kTileLog2, "every chunk of a tile has a thread");
constexpr int kMostTargets = (1 << kTileLog2) / 2;                   // A new block has two chunks or more.
// All values are multiples of the smallest one, which f16 has down to this power of two.
constexpr int kExact = Pairs<IN>::kEmax == 8 ? -15 : -8;
constexpr u32 kFourNan = kNanFp8 * 0x1010101u;

using Pack = Pairs<IN>;
using Chunk16 = Chunk<IN, 16>;

struct RebaseParams {
    const IN::storage* data;
    IN::storage* out;
    const void* scales;
    void* new_scales;
    u64* changed;
    u32* errors;
    i64 rows, columns;                               // of a matrix
    i64 row_stride, column_stride, matrix_stride;    // from a scale to the one below, to the right, in the
                                                     // next matrix
    i64 new_row_stride, new_column_stride, new_matrix_stride;
    i64 new_rows, new_columns;                       // of the grid of new blocks
    i64 pad_rows, pad_columns;                       // rows and columns of padding that follow it
    i64 down, across;                                // regions of a matrix
    u32 row_shift, column_shift;                     // log2 of the extents of an old block
    u32 new_row_shift, new_column_shift;             // and of a new block
    u32 chunks_log2;                                 // chunks along a row of a tile
    u32 steps_down, steps_across;                    // tiles of a region
    u32 lanes_log2;                                  // neighbouring lanes whose chunks share a target
    u32 together;                                    // 1: so do all chunks of a thread
    u32 vector;                                      // 1: rows of data and out allow chunked access
    u32 f32_scales, new_f32_scales;                  // 1: f32, 0: E8M0
};

#ifdef ENTRY_rebase_scales
struct Shared {
    int found[kMostTargets];                         // see product_target()
    u32 wrong[kMostTargets];                         // 1: an f32 scale is no power of two
    u32 changed[kWarps];
};

// Where the tiles of a region are, and which targets they have.
struct Region {
    i64 matrix, row, column;
    u32 rows_log2, columns_log2;                     // log2 of a tile's targets, down and across

    __device__ __forceinline__ explicit Region(const RebaseParams& p) {
        const i64 line = blockIdx.x / p.across;
        matrix = line / p.down;
        row = (line - matrix * p.down) * p.steps_down << tile_rows_log2(p);
        column = ((i64)blockIdx.x - line * p.across) * p.steps_across << (p.chunks_log2 + 4);
        rows_log2 = over(tile_rows_log2(p), p.new_row_shift);
        columns_log2 = over(p.chunks_log2 + 4, p.new_column_shift);
    }
    static __device__ __forceinline__ u32 tile_rows_log2(const RebaseParams& p) {
        return kTileLog2 - p.chunks_log2;
    }
    // Returns the target of chunk i of a tile.
    __device__ __forceinline__ u32 target(const RebaseParams& p, u32 i) const {
        const u32 down = (i >> p.chunks_log2) >> (tile_rows_log2(p) - rows_log2);
        const u32 across = (i & ((1u << p.chunks_log2) - 1)) >> (p.chunks_log2 - columns_log2);
        return down << columns_log2 | across;
    }

private:
    static __device__ __forceinline__ u32 over(u32 tile, u32 block) { return tile > block ? tile - block : 0; }
};

// A thread's part of a tile.
struct Part {
    Chunk16 chunk[kEach];
    // log2 of each chunk's scale, kNoScale, or kNothing where no value depends on it.
    int exponent[kEach];

    static __device__ __forceinline__ u32 index(int u) { return u * kThreads + threadIdx.x; }

    // Calls each(u, row, column, left) for every chunk: its place in the matrix, and how many of its elements
    // exist.
    template <class Each>
    static __device__ __forceinline__ void for_each(const RebaseParams& p, const Region& region, u32 step,
                                                    Each each) {
        const u32 down = step / p.steps_across, across = step - down * p.steps_across;
        const i64 row = region.row + ((i64)down << Region::tile_rows_log2(p));
        const i64 column = region.column + ((i64)across << (p.chunks_log2 + 4));
#pragma unroll
        for (int u = 0; u < kEach; u++) {
            const i64 r = row + (index(u) >> p.chunks_log2);
            const i64 c = column + (i64)(index(u) & ((1u << p.chunks_log2) - 1)) * 16;
            each(u, r, c, r < p.rows ? left_of(p.columns - c, 16) : 0);
        }
    }

    template <class Scale>
    static __device__ __forceinline__ void load_scales(const RebaseParams& p, const Region& region, u32 step,
                                                       u32 (&bits)[kEach]) {
        const auto* const scales = static_cast<const typename Scale::storage*>(p.scales)
            + region.matrix * p.matrix_stride;
        for_each(p, region, step, [&](int u, i64 row, i64 column, int left) {
            const i64 at = (row >> p.row_shift) * p.row_stride + (column >> p.column_shift) * p.column_stride;
            bits[u] = left ? load_read_only(scales + at) : 0;
        });
    }

    // Loads the chunks and finds their exponents. All loads are in flight before the first scale is used.
    __device__ __forceinline__ void load(const RebaseParams& p, const Region& region, u32 step) {
        const auto* const data = p.data + region.matrix * p.rows * p.columns;
        for_each(p, region, step, [&](int u, i64 row, i64 column, int left) {
            const auto* const from = data + (row * p.columns + column);
            if (!p.vector) chunk[u] = Chunk16::load_partial(from, left);
            else if (left) chunk[u] = Chunk16::load(from);
            else chunk[u] = {};
        });
        u32 bits[kEach];
        if (p.f32_scales) load_scales<f32>(p, region, step, bits);
        else load_scales<e8m0fnu>(p, region, step, bits);
#pragma unroll
        for (int u = 0; u < kEach; u++) exponent[u] = exponent_of(bits[u], !p.f32_scales);
    }

    // Raises the targets of the chunks in shared memory. Exponents that no value depends on become kNothing.
    __device__ __forceinline__ void find(const RebaseParams& p, const Region& region, Shared& shared) {
        int found[kEach];
#pragma unroll
        for (int u = 0; u < kEach; u++) {
            u32 largest = 0;
#pragma unroll
            for (int w = 0; w < 4; w++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    largest = Halves::raised(largest, Pack::widen(chunk[u].word[w], half));
            const u32 low = largest & 0xffffu, high = largest >> 16;
            const u32 bits = as_bits(f16::widen(low > high ? low : high));
            found[u] = 0;
            if (exponent[u] == kNoScale) {
                if (p.f32_scales) atomicOr(&shared.wrong[region.target(p, index(u))], 1u);
            } else if (bits == 0) exponent[u] = kNothing;
            else if (exponent[u] != kNothing) found[u] = product_target<IN>(bits, exponent[u]);
        }
        if (p.together) {
#pragma unroll
            for (int u = 1; u < kEach; u++) found[0] = larger(found[0], found[u]);
            raise(p, region, shared, 0, found[0]);
        } else {
#pragma unroll
            for (int u = 0; u < kEach; u++) raise(p, region, shared, u, found[u]);
        }
    }

    // Transforms the chunks and stores them. Returns how many values of this thread changed.
    __device__ __forceinline__ u32 transform(const RebaseParams& p, const Region& region, u32 step,
                                             const Shared& shared) {
        u32 changed = 0;                                             // two counts
        auto* const out = p.out + region.matrix * p.rows * p.columns;
        for_each(p, region, step, [&](int u, i64 row, i64 column, int left) {
            const int t = target_of(shared.found[region.target(p, index(u))]);
            const int k = exponent[u] - t;
            Chunk16 made;
            if (exponent[u] == kNoScale) {
#pragma unroll
                for (int w = 0; w < 4; w++) made.word[w] = kFourNan;
            } else if (exponent[u] == kNothing || (k >= kExact && k <= 15)) {
                const u32 power = exponent[u] == kNothing ? 0 : Halves::power(k);
                changed += p.changed ? scaled<true>(chunk[u], power, made) : scaled<false>(chunk[u], power,
                                                                                           made);
            } else changed += scaled_by_any(chunk[u], exponent[u], t, made);
            auto* const to = out + (row * p.columns + column);
            if (!p.vector) made.store_partial(to, left);
            else if (left) made.store_whole(to);
        });
        return (changed & 0xffffu) + (changed >> 16);
    }

private:
    // Raises the target of chunk u to the largest that this thread and the lanes beside it have found.
    static __device__ __forceinline__ void raise(const RebaseParams& p, const Region& region, Shared& shared,
                                                 int u, int found) {
        for (u32 distance = 1; distance < 1u << p.lanes_log2; distance *= 2)
            found = larger(found, __shfl_xor_sync(~0u, found, distance));
        if (found && !(threadIdx.x & ((1u << p.lanes_log2) - 1)))
            atomicMax(&shared.found[region.target(p, index(u))], found);
    }

    // Multiplies a chunk by a power of two that f16 has, as f16 bits. Every product is exact. Returns how
    // many values changed, as two counts.
    template <bool kCounts>
    static __device__ __forceinline__ u32 scaled(const Chunk16& from, u32 power, Chunk16& made) {
        const u32 both = power * 0x10001u;
        u32 changed = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 first = Halves::times(Pack::widen(from.word[w], 0), both);
            const u32 second = Halves::times(Pack::widen(from.word[w], 1), both);
            made.word[w] = Pack::narrow(first, second);
            if (kCounts) changed += Halves::different(first, Pack::widen(made.word[w], 0))
                                    + Halves::different(second, Pack::widen(made.word[w], 1));
        }
        return changed;
    }

    // Does the same for any exponent, element by element, in f32.
    static __device__ __forceinline__ u32 scaled_by_any(const Chunk16& from, int e, int t, Chunk16& made) {
        u32 changed = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            made.word[w] = 0;
#pragma unroll 1
            for (int shift = 0; shift < 32; shift += 8) {
                const float value = moved_value<IN>(from.word[w] >> shift & 0xffu, e, t);
                const u32 code = IN::narrow(value);
                made.word[w] |= code << shift;
                changed += !is_nan(value) && as_bits(value) != as_bits(IN::widen(code));
            }
        }
        return changed;
    }
};

// Stores the scale of a new block, and zeros in the padding that follows it.
__device__ __forceinline__ void store_scale(const RebaseParams& p, i64 matrix, i64 row, i64 column,
                                            u32 bits) {
    const auto store = [&](i64 r, i64 c, u32 value) {
        const i64 at = matrix * p.new_matrix_stride + r * p.new_row_stride + c * p.new_column_stride;
        if (p.new_f32_scales) static_cast<u32*>(p.new_scales)[at] = value;
        else static_cast<u8*>(p.new_scales)[at] = (u8)value;
    };
    store(row, column, bits);
    if (row == p.new_rows - 1)
        for (i64 i = 1; i <= p.pad_rows; i++) store(row + i, column, 0);
    if (column == p.new_columns - 1)
        for (i64 i = 1; i <= p.pad_columns; i++) store(row, column + i, 0);
}

// Stores the scales of a region's new blocks. Neighbouring threads have neighbouring scales.
__device__ __forceinline__ void store_scales(const RebaseParams& p, const Region& region,
                                             const Shared& shared) {
    const u32 count = 1u << (region.rows_log2 + region.columns_log2);
    const bool down_first = p.new_row_stride == 1;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u32 down = down_first ? i & ((1u << region.rows_log2) - 1) : i >> region.columns_log2;
        const u32 across = down_first ? i >> region.rows_log2 : i & ((1u << region.columns_log2) - 1);
        const i64 row = (region.row >> p.new_row_shift) + down;
        const i64 column = (region.column >> p.new_column_shift) + across;
        if (row >= p.new_rows || column >= p.new_columns) continue;
        const u32 target = down << region.columns_log2 | across;
        u32 bits = scale_bits(target_of(shared.found[target]), !p.new_f32_scales);
        if (shared.wrong[target]) {
            bits = p.new_f32_scales ? kNanF32 : kNanE8m0;
            report(p.errors, kScaleNotPowerOfTwo);
        }
        store_scale(p, region.matrix, row, column, bits);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) rebase_scales(const __grid_constant__ RebaseParams p) {
    __shared__ Shared shared;
    const Region region(p);
    const u32 steps = p.steps_down * p.steps_across;
    Part part;
    part.load(p, region, 0);
    for (u32 i = threadIdx.x; i < kMostTargets; i += kThreads) shared.found[i] = 0, shared.wrong[i] = 0;
    __syncthreads();
    part.find(p, region, shared);
#pragma unroll 1
    for (u32 step = 1; step < steps; step++) {
        part.load(p, region, step);
        part.find(p, region, shared);
    }
    __syncthreads();
    store_scales(p, region, shared);
    u32 changed = part.transform(p, region, steps - 1, shared);
#pragma unroll 1
    for (u32 step = steps - 1; step-- > 0;) {
        part.load(p, region, step);
        changed += part.transform(p, region, step, shared);
    }
    if (!p.changed) return;
    changed = __reduce_add_sync(~0u, changed);
    if (threadIdx.x % 32 == 0) shared.changed[threadIdx.x / 32] = changed;
    __syncthreads();
    if (threadIdx.x) return;
    u64 sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) sum += shared.changed[warp];
    if (sum) atomicAdd(p.changed, sum);
}
#endif
