// Changes the blocks of FP8 data with power-of-two scales (docs/numerics.md, section 4) without a wider type:
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
// changed     null, or a counter that is raised by the number of values that change
//
// The scale of (row, column) is that of the block (row >> row_shift, column >> column_shift). Blocks have 32
// or more columns, so the 16 elements of a chunk share both scales. Old blocks may be smaller or larger than
// new ones.
//
// A tile is 1024 chunks of 16 bytes, 2^chunks_log2 of them side by side (at most 256); a thread has four of
// them, one below the other, all loads in flight. A thread block has a region: a tile that holds whole new
// blocks, or all tiles of a larger new block. It finds the targets of all tiles, then transforms them,
// beginning with the last one, which is still in registers; the others are read again, mostly from the L2.
//
// Products v * 2^k, k = e - t, are exact in f16 for the usual k (rebase_chunk.cuh). A thread whose chunks all
// have such a k multiplies them without further tests. Chunks of nothing but zeros and NaN count as such.
//
// Defines:
//   IN       the format of the data
//   ALIGNED  1: rows of data and out are whole chunks at multiples of 16 bytes; 0: byte by byte, which takes
//            registers
// The types of scales and the shapes of blocks cost uniform branches. Bytes moved per element: 2, plus the
// scales.
#include "memory/errors.cuh"
#include "convert/rebase_chunk.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunksPerThread = 4;                                  // per thread and tile
constexpr int kTileLog2 = 10;                                        // log2 of the chunks per tile
static_assert(kThreads * kChunksPerThread == 1 << kTileLog2, "every chunk of a tile has a thread");
static_assert(kChunksPerThread * 16 <= kMostChangedValues, "the changed values of a thread can be counted");
constexpr int kMostTargets = (1 << kTileLog2) / 2;                   // a new block has two chunks or more

// thread blocks per SM, as limited by registers
#ifdef CUPY_FP8_HOST
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = ALIGNED ? 4 : 3;
#endif

struct RebaseParams {
    const IN::storage* data;
    IN::storage* out;
    const void* scales;
    void* new_scales;
    u64* changed;
    u32* errors;
    i64 rows, columns;                               // shape of a matrix
    i64 row_stride, column_stride, matrix_stride;    // strides of the scales: down, to the right, to the next
                                                     // matrix
    i64 new_row_stride, new_column_stride, new_matrix_stride;
    i64 new_rows, new_columns;                       // shape of the grid of new blocks
    i64 pad_rows, pad_columns;                       // padding of that grid
    u32 down, across;                                // regions per matrix
    u32 row_shift, column_shift;                     // log2 of an old block's extents
    u32 new_row_shift, new_column_shift;             // log2 of a new block's extents
    u32 chunks_log2;                                 // log2 of the chunks along a row of a tile
    u32 targets_down_log2, targets_across_log2;      // log2 of the new blocks in a tile
    u32 steps_down, steps_across;                    // tiles per region
    u32 lanes_log2;                                  // log2 of neighbouring lanes that share a target
    u32 f32_scales, new_f32_scales;                  // 1: f32, 0: E8M0
};

struct Shared {
    int found[kMostTargets];                         // see product_target()
    u32 wrong[kMostTargets];                         // 1: an f32 scale is no power of two
    u32 changed[kWarps];
};

__device__ __forceinline__ u32 tile_rows_log2(const RebaseParams& p) { return kTileLog2 - p.chunks_log2; }

// A thread block's region, by its first element.
struct Region {
    u32 matrix;
    i64 row, column;

    __device__ __forceinline__ explicit Region(const RebaseParams& p) {
        const u32 row_of_regions = blockIdx.x / p.across;
        matrix = row_of_regions < p.down ? 0 : row_of_regions / p.down;
        row = (i64)(row_of_regions - matrix * p.down) * p.steps_down << tile_rows_log2(p);
        column = (i64)(blockIdx.x - row_of_regions * p.across) * p.steps_across << (p.chunks_log2 + 4);
    }
};

// A thread's chunks of a tile. Chunk u is u * step() rows below the first one.
struct ThreadChunks {
    i64 first, below;            // chunk 0, in elements of all matrices; distance between chunks
    i64 block_row, block_column; // old block of the tile's first row and of this thread's columns
    u32 row, across;             // chunk 0 in the tile
    u32 rows_left;               // existing rows of the tile; 0 if this thread's columns do not exist
    int columns_left;            // existing elements of a chunk

    ThreadChunks() = default;
    __device__ __forceinline__ ThreadChunks(const RebaseParams& p, const Region& region, u32 tile) {
        const u32 tile_down = p.steps_across == 1 ? tile : tile / p.steps_across;
        const u32 tile_across = tile - tile_down * p.steps_across;
        row = threadIdx.x >> p.chunks_log2, across = threadIdx.x & ((1u << p.chunks_log2) - 1);
        const i64 first_row = region.row + ((i64)tile_down << tile_rows_log2(p));
        const i64 column = region.column + (((i64)tile_across << p.chunks_log2) + across) * 16;
        first = (region.matrix * p.rows + first_row + row) * p.columns + column;
        below = step(p) * p.columns;
        block_row = first_row >> p.row_shift, block_column = column >> p.column_shift;
        columns_left = left_of(p.columns - column, 16);
        rows_left = columns_left ? left_of(p.rows - first_row, 1 << kTileLog2) : 0;
    }
    static __device__ __forceinline__ u32 step(const RebaseParams& p) { return kThreads >> p.chunks_log2; }
    // Row of the tile of chunk u.
    __device__ __forceinline__ u32 row_of(const RebaseParams& p, int u) const { return row + u * step(p); }
    __device__ __forceinline__ bool exists(const RebaseParams& p, int u) const {
        return row_of(p, u) < rows_left;
    }
    // Existing elements of chunk u.
    __device__ __forceinline__ int left(const RebaseParams& p, int u) const {
        return exists(p, u) ? columns_left : 0;
    }
    // Index of chunk u's target in the tile.
    __device__ __forceinline__ u32 target(const RebaseParams& p, int u) const {
        const u32 down = row_of(p, u) >> (tile_rows_log2(p) - p.targets_down_log2);
        return down << p.targets_across_log2 | across >> (p.chunks_log2 - p.targets_across_log2);
    }
    // Exponent of chunk u's target.
    __device__ __forceinline__ int target_exponent(const RebaseParams& p, const Shared& shared, int u) const {
        return target_of(shared.found[target(p, u)]);
    }
};

// A thread's chunks of a tile, loaded and transformed.
struct LoadedChunks {
    Chunk16 chunk[kChunksPerThread];
    // log2 of each chunk's scale, kNoScale, or kNothing where no value depends on it
    int exponent[kChunksPerThread];

    // Loads the chunks and finds their exponents. All loads are in flight before the first scale is used.
    __device__ __forceinline__ void load(const RebaseParams& p, const Region& region,
                                         const ThreadChunks& chunks) {
        const auto* from = p.data + chunks.first;
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++, from += chunks.below) {
            if constexpr (!ALIGNED) chunk[u] = Chunk16::load_partial(from, chunks.left(p, u));
            else if (chunks.exists(p, u)) chunk[u] = Chunk16::load(from);
            else chunk[u] = {};
        }
        if (p.f32_scales) load_scales<f32>(p, region, chunks);
        else load_scales<e8m0fnu>(p, region, chunks);
    }

    // Raises the targets of the chunks in shared memory. Exponents that no value depends on become kNothing.
    __device__ __forceinline__ void find(const RebaseParams& p, const ThreadChunks& chunks, Shared& shared) {
        int found[kChunksPerThread];
        bool wrong = false;
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++) {
            const u32 bits = largest_magnitude(chunk[u]);
            const bool scaled = exponent[u] != kNoScale;
            wrong |= !scaled;
            if (scaled && bits == 0) exponent[u] = kNothing;
            found[u] = scaled && exponent[u] != kNothing ? product_target<IN>(bits, exponent[u]) : 0;
        }
        if (wrong && p.f32_scales)
#pragma unroll
            for (int u = 0; u < kChunksPerThread; u++)
                if (exponent[u] == kNoScale) atomicOr(&shared.wrong[chunks.target(p, u)], 1u);
        if (p.targets_down_log2 == 0) {                                 // a thread's chunks share a target
#pragma unroll
            for (int u = 1; u < kChunksPerThread; u++) found[0] = larger(found[0], found[u]);
            raise<1>(p, chunks, shared, found);
        } else raise<kChunksPerThread>(p, chunks, shared, found);
    }

    // Transforms the chunks (in place) and stores them. Returns how many values of this thread changed, if
    // p.changed asks for it.
    __device__ __forceinline__ u32 transform(const RebaseParams& p, const ThreadChunks& chunks,
                                             const Shared& shared) {
        int k[kChunksPerThread];
        bool exact = true;
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++) {
            k[u] = exponent[u] - chunks.target_exponent(p, shared, u);
            exact &= exponent[u] == kNothing || (k[u] >= kLeastExactExponent && k[u] <= kMostExactExponent);
        }
        u32 changed = kNoneChanged;
        if (!exact) transform_any(p, chunks, shared, changed);
        else if (p.changed) transform_exact<true>(p, chunks, k, changed);
        else transform_exact<false>(p, chunks, k, changed);
        return sum_of(changed);
    }

private:
    // The tile's rows are whole old blocks, or inside one, so a chunk's block follows from the tile's.
    template <class Scale>
    __device__ __forceinline__ void load_scales(const RebaseParams& p, const Region& region,
                                                const ThreadChunks& chunks) {
        const auto* const scales = static_cast<const typename Scale::storage*>(p.scales)
            + (region.matrix * p.matrix_stride + chunks.block_row * p.row_stride
               + chunks.block_column * p.column_stride);
        const u32 shift = p.row_shift < kTileLog2 ? p.row_shift : kTileLog2;
        u32 bits[kChunksPerThread];
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++) {
            const u32 block = chunks.row_of(p, u) >> shift;
            bits[u] = chunks.exists(p, u) ? load_read_only(scales + block * p.row_stride) : 0;
        }
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++) exponent[u] = exponent_of(bits[u], sizeof(*scales) == 1);
    }

    // Raises the targets of the first kCount chunks to the maximum over this thread and its neighbouring
    // lanes.
    template <int kCount>
    static __device__ __forceinline__ void raise(const RebaseParams& p, const ThreadChunks& chunks,
                                                 Shared& shared, int (&found)[kChunksPerThread]) {
#pragma unroll 1
        for (u32 distance = 1; distance < 1u << p.lanes_log2; distance *= 2)
#pragma unroll
            for (int u = 0; u < kCount; u++)
                found[u] = larger(found[u], __shfl_xor_sync(~0u, found[u], distance));
        if (threadIdx.x & ((1u << p.lanes_log2) - 1)) return;
#pragma unroll
        for (int u = 0; u < kCount; u++) atomicMax(&shared.found[chunks.target(p, u)], found[u]);
    }

    // Transforms chunks whose products are exact.
    template <bool kCounts>
    __device__ __forceinline__ void transform_exact(const RebaseParams& p, const ThreadChunks& chunks,
                                                    const int (&k)[kChunksPerThread], u32& changed) const {
        auto* to = p.out + chunks.first;
#pragma unroll
        for (int u = 0; u < kChunksPerThread; u++, to += chunks.below)
            store(p, chunks, u, to, times_power<kCounts>(chunk[u], Halves::power_pair(k[u]), changed));
    }
    // fallback for any chunks (rare): one at a time, through chunk 0
    __device__ __forceinline__ void transform_any(const RebaseParams& p, const ThreadChunks& chunks,
                                                  const Shared& shared, u32& changed) {
        auto* to = p.out + chunks.first;
#pragma unroll 1
        for (int u = 0; u < kChunksPerThread; u++, to += chunks.below) {
            Chunk16 made;
            if (exponent[0] == kNoScale) made = {{kFourNan, kFourNan, kFourNan, kFourNan}};
            else if (exponent[0] == kNothing) made = times_power<true>(chunk[0], 0, changed);
            else made = times_power_in_steps(chunk[0], exponent[0] - chunks.target_exponent(p, shared, u),
                                             changed);
            store(p, chunks, u, to, made);
#pragma unroll
            for (int i = 1; i < kChunksPerThread; i++) chunk[i - 1] = chunk[i], exponent[i - 1] = exponent[i];
        }
    }
    static __device__ __forceinline__ void store(const RebaseParams& p, const ThreadChunks& chunks, int u,
                                                 IN::storage* to, const Chunk16& made) {
        if constexpr (!ALIGNED) made.store_partial(to, chunks.left(p, u));
        else if (chunks.exists(p, u)) made.store_whole(to);
    }
};

// Stores the scale of a new block, and zeros in the padding after it.
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

// Stores the scales of a region's new blocks, neighbouring threads neighbouring scales.
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
    const u32 tiles = p.steps_down * p.steps_across;
    ThreadChunks chunks;
    LoadedChunks loaded;
    u32 changed = 0;
#pragma unroll 1
    for (u32 tile = 0; tile < tiles; tile++) {
        chunks = ThreadChunks(p, region, tile);
        loaded.load(p, region, chunks);
        if (tile == 0) {                                             // while the first loads are in flight
#pragma unroll
            for (u32 i = 0; i < kMostTargets; i += kThreads)
                shared.found[threadIdx.x + i] = 0, shared.wrong[threadIdx.x + i] = 0;
            __syncthreads();
        }
        loaded.find(p, chunks, shared);
    }
    __syncthreads();
#pragma unroll 1
    for (u32 tile = tiles; tile-- > 0;) {
        if (tile != tiles - 1) {
            chunks = ThreadChunks(p, region, tile);
            loaded.load(p, region, chunks);
        }
        changed += loaded.transform(p, chunks, shared);
    }
    store_scales(p, region, shared);
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
