// This kernel gives FP8 data with power-of-two scales other blocks of power-of-two scales (docs/numerics.md,
// section 4), without a wider type:
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
// A tile is 1024 chunks of 16 bytes, 2^chunks_log2 of them side by side (at most 256). A thread has four of
// them, one below the other, whose loads are all in flight. A block of threads has a region: a tile that
// holds whole new blocks, or all tiles of a new block that is larger. It finds the targets of all tiles, then
// transforms them, beginning with the last one, which is still in registers. The others are read again,
// mostly from the L2.
//
// Arithmetic is in f16: v * 2^k, k = e - t, is exact for kExact <= k <= 15. Chunks with another k, which are
// rare, take several steps, whose roundings lose only what becomes 0 anyway. Chunks that hold nothing but
// zeros and NaN have any k.
//
// Defines:
//   IN       the format of the data
//   ALIGNED  1: rows of data and out are whole chunks at multiples of 16 bytes; 0: bytes are moved one by
//            one, which takes registers
// The types of scales and the shapes of blocks cost branches that all threads take alike. It moves 2 bytes
// per element, and the scales.
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

// A multiprocessor keeps so many blocks of threads: as many as have registers for everything.
#ifdef CUPY_FP8_HOST
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = ALIGNED && __CUDACC_VER_MAJOR__ >= 13 ? 4 : 3;
#endif

using Pack = Pairs<IN>;
using Chunk16 = Chunk<IN, 16>;

struct RebaseParams {
    const IN::storage* data;
    IN::storage* out;
    const void* scales;
    void* new_scales;
    u64* changed;
    u32* errors;
    i64 rows, columns;                               // shape of a matrix
    i64 row_stride, column_stride, matrix_stride;    // step from a scale to the one below, to the right, and
                                                     // in the next matrix
    i64 new_row_stride, new_column_stride, new_matrix_stride;
    i64 new_rows, new_columns;                       // shape of the grid of new blocks
    i64 pad_rows, pad_columns;                       // rows and columns of padding that follow it
    u32 down, across;                                // regions of a matrix
    u32 row_shift, column_shift;                     // log2 of the extents of an old block
    u32 new_row_shift, new_column_shift;             // log2 of the extents of a new block
    u32 chunks_log2;                                 // chunks along a row of a tile
    u32 targets_down_log2, targets_across_log2;      // new blocks of a tile
    u32 steps_down, steps_across;                    // tiles of a region
    u32 lanes_log2;                                  // neighbouring lanes whose chunks share a target
    u32 f32_scales, new_f32_scales;                  // 1: f32, 0: E8M0
};

struct Shared {
    int found[kMostTargets];                         // see product_target()
    u32 wrong[kMostTargets];                         // 1: an f32 scale is no power of two
    u32 changed[kWarps];
};

__device__ __forceinline__ u32 tile_rows_log2(const RebaseParams& p) { return kTileLog2 - p.chunks_log2; }

// A region and the place of its first element.
struct Region {
    u32 matrix;
    i64 row, column;

    __device__ __forceinline__ explicit Region(const RebaseParams& p) {
        const u32 row_of_regions = blockIdx.x / p.across;
        matrix = row_of_regions / p.down;
        row = (i64)(row_of_regions - matrix * p.down) * p.steps_down << tile_rows_log2(p);
        column = (i64)(blockIdx.x - row_of_regions * p.across) * p.steps_across << (p.chunks_log2 + 4);
    }
};

// Where a thread's chunks of a tile are. Chunk u is down(p, u) rows below the tile's first one.
struct ThreadChunks {
    i64 first, below;            // chunk 0, counted in elements of all matrices, and the step to the next one
    i64 block_row, block_column; // the old block of the tile's first row and of this thread's columns
    i64 rows_left;               // rows that exist from the tile's first one on
    int columns_left;            // elements of a chunk that exist

    __device__ __forceinline__ ThreadChunks(const RebaseParams& p, const Region& region, u32 step) {
        const u32 step_down = p.steps_across == 1 ? step : step / p.steps_across;
        const u32 step_across = step - step_down * p.steps_across;
        const i64 row = region.row + ((i64)step_down << tile_rows_log2(p));
        const i64 column = region.column + (((i64)step_across << p.chunks_log2) + across(p)) * 16;
        first = (region.matrix * p.rows + row + down(p, 0)) * p.columns + column;
        below = (kThreads >> p.chunks_log2) * p.columns;
        block_row = row >> p.row_shift, block_column = column >> p.column_shift;
        rows_left = p.rows - row;
        columns_left = left_of(p.columns - column, 16);
    }
    static __device__ __forceinline__ u32 down(const RebaseParams& p, int u) {
        return (u * kThreads + threadIdx.x) >> p.chunks_log2;
    }
    static __device__ __forceinline__ u32 across(const RebaseParams& p) {
        return threadIdx.x & ((1u << p.chunks_log2) - 1);
    }
    // Returns which target of the tile chunk u has.
    static __device__ __forceinline__ u32 target(const RebaseParams& p, int u) {
        const u32 row = down(p, u) >> (tile_rows_log2(p) - p.targets_down_log2);
        return row << p.targets_across_log2 | across(p) >> (p.chunks_log2 - p.targets_across_log2);
    }
    // Returns how many elements of chunk u exist.
    __device__ __forceinline__ int left(const RebaseParams& p, int u) const {
        return down(p, u) < rows_left ? columns_left : 0;
    }
};

// A thread's chunks of a tile, and their scales.
struct LoadedChunks {
    Chunk16 chunk[kEach];
    // log2 of each chunk's scale, kNoScale, or kNothing where no value depends on it.
    int exponent[kEach];

    // The tile's rows are whole old blocks, or in one, so a chunk's block is found from the tile's.
    template <class Scale>
    static __device__ __forceinline__ void load_scales(const RebaseParams& p, const Region& region,
                                                       const ThreadChunks& chunks, u32 (&bits)[kEach]) {
        const auto* const scales = static_cast<const typename Scale::storage*>(p.scales)
            + (region.matrix * p.matrix_stride + chunks.block_row * p.row_stride
               + chunks.block_column * p.column_stride);
#pragma unroll
        for (int u = 0; u < kEach; u++) {
            const u32 block = ThreadChunks::down(p, u) >> (p.row_shift < kTileLog2 ? p.row_shift : kTileLog2);
            bits[u] = chunks.left(p, u) ? load_read_only(scales + block * p.row_stride) : 0;
        }
    }

    // Loads the chunks and finds their exponents. All loads are in flight before the first scale is used.
    __device__ __forceinline__ void load(const RebaseParams& p, const Region& region,
                                         const ThreadChunks& chunks) {
        const auto* from = p.data + chunks.first;
#pragma unroll
        for (int u = 0; u < kEach; u++, from += chunks.below) {
            if constexpr (!ALIGNED) chunk[u] = Chunk16::load_partial(from, chunks.left(p, u));
            else if (chunks.left(p, u)) chunk[u] = Chunk16::load(from);
            else chunk[u] = {};
        }
        u32 bits[kEach];
        if (p.f32_scales) load_scales<f32>(p, region, chunks, bits);
        else load_scales<e8m0fnu>(p, region, chunks, bits);
#pragma unroll
        for (int u = 0; u < kEach; u++) exponent[u] = exponent_of(bits[u], !p.f32_scales);
    }

    // Raises the targets of the chunks in shared memory. Exponents that no value depends on become kNothing.
    __device__ __forceinline__ void find(const RebaseParams& p, Shared& shared) {
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
                if (p.f32_scales) atomicOr(&shared.wrong[ThreadChunks::target(p, u)], 1u);
            } else if (bits == 0) exponent[u] = kNothing;
            else if (exponent[u] != kNothing) found[u] = product_target<IN>(bits, exponent[u]);
        }
        if (p.targets_down_log2 == 0) {                                 // A thread's chunks share a target.
#pragma unroll
            for (int u = 1; u < kEach; u++) found[0] = larger(found[0], found[u]);
            raise<1>(p, shared, found);
        } else raise<kEach>(p, shared, found);
    }

    // Transforms the chunks and stores them. Returns how many values of this thread changed.
    __device__ __forceinline__ u32 transform(const RebaseParams& p, const ThreadChunks& chunks,
                                             const Shared& shared) const {
        u32 changed = 0;                                             // two counts
        auto* to = p.out + chunks.first;
#pragma unroll
        for (int u = 0; u < kEach; u++, to += chunks.below) {
            const int k = exponent[u] - target_of(shared.found[ThreadChunks::target(p, u)]);
            Chunk16 made;
            if (exponent[u] == kNoScale) {
#pragma unroll
                for (int w = 0; w < 4; w++) made.word[w] = kFourNan;
            } else if (exponent[u] == kNothing || (k >= kExact && k <= 15)) {
                const u32 power = exponent[u] == kNothing ? 0 : Halves::power(k) * 0x10001u;
                changed += p.changed ? scaled<true>(chunk[u], power, made)
                                     : scaled<false>(chunk[u], power, made);
            } else changed += scaled_in_steps(chunk[u], k, made);
            if constexpr (!ALIGNED) made.store_partial(to, chunks.left(p, u));
            else if (chunks.left(p, u)) made.store_whole(to);
        }
        return (changed & 0xffffu) + (changed >> 16);
    }

private:
    // Raises the targets of the first kCount chunks to the largest that this thread and the lanes beside it
    // have found.
    template <int kCount>
    static __device__ __forceinline__ void raise(const RebaseParams& p, Shared& shared, int (&found)[kEach]) {
#pragma unroll 1
        for (u32 distance = 1; distance < 1u << p.lanes_log2; distance *= 2)
#pragma unroll
            for (int u = 0; u < kCount; u++)
                found[u] = larger(found[u], __shfl_xor_sync(~0u, found[u], distance));
        if (threadIdx.x & ((1u << p.lanes_log2) - 1)) return;
#pragma unroll
        for (int u = 0; u < kCount; u++)
            if (found[u]) atomicMax(&shared.found[ThreadChunks::target(p, u)], found[u]);
    }

    // Multiplies a chunk by a power of two, two of which are in `power`, or by 0. Every product is exact.
    // Returns how many values changed, as two counts.
    template <bool kCounts>
    static __device__ __forceinline__ u32 scaled(const Chunk16& from, u32 power, Chunk16& made) {
        u32 changed = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 first = Halves::times(Pack::widen(from.word[w], 0), power);
            const u32 second = Halves::times(Pack::widen(from.word[w], 1), power);
            made.word[w] = Pack::narrow(first, second);
            if (kCounts) changed += Halves::different(first, Pack::widen(made.word[w], 0))
                                    + Halves::different(second, Pack::widen(made.word[w], 1));
        }
        return changed;
    }

    // Multiplies a chunk by any 2^k in three steps. A product that is not exact is far below half the
    // smallest code, so it becomes 0, and its value changed. Some such products are 0 themselves.
    static __device__ __forceinline__ u32 scaled_in_steps(const Chunk16& from, int k, Chunk16& made) {
        u32 power[3], changed = 0;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int step = clamp(k, -15, 15);
            power[i] = Halves::power(step) * 0x10001u, k -= step;
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            u32 product[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 value = Pack::widen(from.word[w], half);
                product[half] = value;
#pragma unroll
                for (int i = 0; i < 3; i++) product[half] = Halves::times(product[half], power[i]);
                changed += Halves::different(value, 0) - Halves::different(product[half], 0);
            }
            made.word[w] = Pack::narrow(product[0], product[1]);
#pragma unroll
            for (int half = 0; half < 2; half++)
                changed += Halves::different(product[half], Pack::widen(made.word[w], half));
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
    const u32 count = 1u << (p.targets_down_log2 + p.targets_across_log2);
    const bool down_first = p.new_row_stride == 1;
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
        const u32 down = down_first ? i & ((1u << p.targets_down_log2) - 1) : i >> p.targets_across_log2;
        const u32 across = down_first ? i >> p.targets_down_log2 : i & ((1u << p.targets_across_log2) - 1);
        const i64 row = (region.row >> p.new_row_shift) + down;
        const i64 column = (region.column >> p.new_column_shift) + across;
        if (row >= p.new_rows || column >= p.new_columns) continue;
        const u32 target = down << p.targets_across_log2 | across;
        u32 bits = scale_bits(target_of(shared.found[target]), !p.new_f32_scales);
        if (shared.wrong[target]) {
            bits = p.new_f32_scales ? kNanF32 : kNanE8m0;
            report(p.errors, kScaleNotPowerOfTwo);
        }
        store_scale(p, region.matrix, row, column, bits);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
rebase_scales(const __grid_constant__ RebaseParams p) {
    __shared__ Shared shared;
    const Region region(p);
    const u32 steps = p.steps_down * p.steps_across;
    LoadedChunks loaded;
    u32 changed = 0;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        loaded.load(p, region, ThreadChunks(p, region, step));
        if (step == 0) {                                             // while the first loads are in flight
            for (u32 i = threadIdx.x; i < kMostTargets; i += kThreads)
                shared.found[i] = 0, shared.wrong[i] = 0;
            __syncthreads();
        }
        loaded.find(p, shared);
    }
    __syncthreads();
    store_scales(p, region, shared);
#pragma unroll 1
    for (u32 step = steps; step-- > 0;) {
        const ThreadChunks chunks(p, region, step);
        if (step != steps - 1) loaded.load(p, region, chunks);
        changed += loaded.transform(p, chunks, shared);
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
