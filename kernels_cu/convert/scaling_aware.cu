// The scaling-aware transpose (docs/numerics.md, section 4): from FP8 with a power-of-two scale per BLOCK
// elements of a row to transposed FP8 with one per BLOCK elements of a column, without a wider type.
//
//   out = narrow(v * s / t), rounded once; s = 2^e is the element's scale, and t that of the new block:
//   TARGET 0 (column)  t = smallest power of two >= max |v| * s / fp8_max over BLOCK rows of a column
//   TARGET 1 (tile)    t = largest s of those rows of BLOCK x BLOCK elements that hold anything but zeros
//
// Rounding is to nearest-even, and saturates. A code that is NaN stays NaN, and a scale that is no power of
// two gives NaN. A row with s = 0 (an unused row of `permute`) gives narrow(v * 0) and counts for no target.
//
// data           FP8 [rows, columns] (IN)
// scales         f32 (BLOCK 128) or E8M0 (32), at any strides: compact [rows, ceil(columns / BLOCK)], or
//                gemm_ready [ceil(columns / BLOCK), rows rounded up to 4]
// out            FP8 [columns, rows]; with splits (rows per expert) [columns, rows of the expert] each
// target_scales  [blocks along the rows of every expert, target_pitch]; padding and the rest are 0
// row_scales     null, or `scales` transposed in f32: per expert [ceil(columns / BLOCK), rows rounded up to
//                4], row_scale_rows such rows in all; the padding and the rest are 0
//
// A tile is 128 rows x TILE_COLUMNS columns and begins at an expert's first row plus a multiple of 128. Tiles
// are counted down the rows of an expert, then along its strips of TILE_COLUMNS columns, then expert by
// expert. A thread block takes `tiles` consecutive tiles, and copies the next one to shared memory meanwhile.
// A warp has 16 columns of the tile, a thread 16 rows x 4 columns. Eight threads one below the other find a
// column's amax by shuffles and store 128 bytes of a column.
//
// An expert of at most 64 (or 32) rows has two (or four) strips in a tile, one below the other (its `stack`):
// rows of the tile are then rows of the expert modulo 64 or 32, in successive strips. A tile that is one unit
// with one target (TARGET 1 for blocks of 128) never has a stack.
//
// Arithmetic is in f16, relative to the largest scale 2^e_ref of a block's rows. v * 2^(e - t) loses bits
// only where it is below 2^-20 (e4m3fn) and becomes 0 anyway, if f16 has the powers of two that are needed.
// Other blocks (rare) are computed in f32, element by element.
//   e4m3fn, column   The products v * 2^(e - e_ref + kLift) give the target and are then multiplied by
//                    2^(e_ref - kLift - t). kLift uses all exponents of f16: the first product, of four bits,
//                    loses bits only below 2^(e_ref - 27), and t >= e_ref - 15.
//   e5m2, column     No room for a lift: v * (2^(e - e_ref) * 2^(e_ref - t)).
//   tile             v * (2^(e - e_ref) * 2^(e_ref - t)). t is the scale of the row with the largest scale
//                    unless that row holds only zeros.
//
// Experts have any number of rows, so rows of the output begin anywhere. A warp then shifts its columns in
// shared memory to whole sectors; if the thread block's next tile is the one below, the last rows wait for
// it. The columns of an expert of one row of tiles have no gaps, so such a tile is staged as a whole.
//
// Each define changes registers, shared memory or the inner loop:
//   IN            e4m3fn or e5m2
//   BLOCK         elements that share a scale: 128 (f32 scales) or 32 (E8M0)
//   TARGET        0: column, 1: tile (above)
//   TILE_COLUMNS  128
//   BLOCKS        thread blocks that should fit on an SM: 4 or 3 (docs/lab-notes)
//   ALIGNED       1: rows of the data allow 16-byte asynchronous copies; 0: they go through registers
//   ONE_TILE      1: no splits, all columns begin at multiples of 16 bytes, and BLOCKS is 4. One tile per
//                 thread block, without search for experts and shifts: a third of the program.
//   GATHER        1: the data are those of tokens, from which a routing makes the experts' rows; these are
//                 written too. (Their scales are permuted before, by permute.cu.)
// Bytes moved per element: 2, plus 8 / BLOCK for f32 scales.
#include "convert/scaling_aware_transform.cuh"

// BLOCKS thread blocks per SM on an H200. On other GPUs, with CUDA 12, and with the integer conversions, that
// would spill.
#if defined(CUPY_FP8_HARDWARE_CVT) && __CUDA_ARCH__ < 1000
constexpr bool kFewerBlocks = __CUDACC_VER_MAJOR__ < 13 || (!ONE_TILE && __CUDA_ARCH__ < 900);
constexpr int kBlocks = !ALIGNED ? BLOCKS - 1 : kFewerBlocks && BLOCKS == 4 ? 3 : BLOCKS;
#else
constexpr int kBlocks = 2;
#endif

// Transposes the thread block's only tile.
__device__ __forceinline__ void transpose_one_tile(const ScalingAwareParams& p, Shared& shared, u8* dynamic) {
    const u32 strip = blockIdx.x / (u32)p.down;
    ExpertTile& tile = shared.tile[0];
    if (threadIdx.x == 0) {
        ExpertTile found = expert_of(p, 0, 0);
        found.index = blockIdx.x - strip * (u32)p.down, found.strip = strip;
        found.settle(p, 1);
        tile = found;
    }
    __syncthreads();
    if (strip & (1u << tile.stack) - 1) return;                      // another thread block has this strip
    TileScales scales;
    scales.load(p, tile);
    prefetch(p, tile, dynamic, Sources());
    copy_async_commit();
    // for MX with column targets the prefetch costs more than it gains
    if (!kMx || TARGET == 1) fetch_ahead(p);
    scales.write(p, tile, 0, shared);
    copy_async_wait();
    __syncthreads();
    transform_tile(p, tile, shared, 0, dynamic, nullptr);
}

// A thread block's tiles, one after the other. Their descriptions are in shared memory.
struct BlockTiles {
    const ScalingAwareParams& p;
    Shared& shared;
    u8* const dynamic;           // kTilesAhead + 1 tiles, then staged columns
    const i64 first;             // index of the first tile among all tiles
    const i64 first_row;         // its row of tiles
    const int tiles;             // tiles of the thread block

    __device__ __forceinline__ ExpertTile& at(int n) const { return shared.tile[n % kTilePlaces]; }
    __device__ __forceinline__ u8* bytes_of(int n) const {
        return dynamic + n % (kTilesAhead + 1) * kRawBytes;
    }

    __device__ __forceinline__ void fetch(int n, const Sources& sources) const {
        if (at(n).exists) prefetch(p, at(n), bytes_of(n), sources);
        copy_async_commit();
    }
    __device__ __forceinline__ u32 load_segment_after(int n) const {
        return load_next_segment(p, at(n), tiles);
    }
    __device__ __forceinline__ void find_after(int n, u32 segment_word) const {
        find_next(p, at(n), segment_word, tiles, &at(n + 1));
    }

    // Finds the first kTilesAhead + 1 tiles. Call from one whole warp. segment_word: of the first tile's
    // segment. past_groups: the first tile and all that follow are past the last expert.
    __device__ __forceinline__ void find_first_tiles(u32 segment_word, bool past_groups) const {
        if (past_groups) {
            if (threadIdx.x % 32 == 0) at(0).exists = false, at(0).past_groups = true;
        } else {
            const ExpertTile expert = expert_of(p, first_row, segment_word);
            find_first(p, expert, first, tiles, &at(0), &at(kTilePlaces - 1));
        }
        for (int n = 1; n <= kTilesAhead; n++) {
            __syncwarp();
            find_after(n - 1, load_segment_after(n - 1));
        }
    }

    // Transposes the tiles of experts, and returns how many there were. finds: this warp finds tiles.
    // segment_word: a word of a segment; replaced if this warp loads another one.
    __device__ __forceinline__ int transpose(bool finds, u32& segment_word) const {
        TileScales scales;
        if (at(0).exists) scales.load(p, at(0));
        Sources sources;
        for (int n = 0; n < kTilesAhead; n++) {
            sources.load(p, at(n));
            fetch(n, sources);
        }
        sources.load(p, at(kTilesAhead));
        int n = 0;
#pragma unroll 1
        for (; at(n).exists && !at(n).past_groups; n++) {
            const int buffer = n % 2;
            if (finds && n > 0) find_after(n + kTilesAhead - 1, segment_word);
            scales.write(p, at(n), buffer, shared);
            copy_async_wait<kTilesAhead - 1>();
            __syncthreads();
            if (at(n + 1).exists) scales.load(p, at(n + 1));
            fetch(n + kTilesAhead, sources);
            sources.load(p, at(n + kTilesAhead + 1));
            if (finds) segment_word = load_segment_after(n + kTilesAhead);
            transform_tile(p, at(n), shared, buffer, bytes_of(n), dynamic + (kTilesAhead + 1) * kRawBytes);
        }
        return n;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
scaling_aware_transpose(const __grid_constant__ ScalingAwareParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared shared;
    if constexpr (ONE_TILE) return transpose_one_tile(p, shared, dynamic);
    const int warp = threadIdx.x / 32;
    // GATHER: thread blocks are counted down the rows of all experts, then along the strips, so that the
    // tokens' bytes of a strip stay in the L2 for all their rows.
    const u32 blocks_down = GATHER ? (u32)((p.down + p.tiles - 1) / p.tiles) : 1;
    const u32 strip = blockIdx.x / blocks_down;
    const i64 first_tile = (GATHER ? blockIdx.x - strip * blocks_down : (i64)blockIdx.x) * p.tiles;
    const i64 first_row = GATHER ? first_tile : first_tile / p.strips;
    const int tiles = left_of((GATHER ? p.down : p.down * p.strips) - first_tile, (int)p.tiles);
    const BlockTiles block{p, shared, dynamic, first_tile, first_row, tiles};
    const bool finds = !GATHER && warp == kWarps - 1;                // the last warp finds the tiles
    u32 segment_word = 0;
    if (p.splits.groups >= 0) {
        if (warp == 0 && blockIdx.x == 0) {
            check_sizes(p.splits, p.rows);
            copy_sizes(p.splits, p.sizes_out);
        }
        if (!GATHER) segment_word = load_segment_word(p, first_row);
    }
    // group -1: past the last expert
    const bool past_groups = (int)__shfl_sync(~0u, segment_word, 1) < 0;
    if (finds) block.find_first_tiles(segment_word, past_groups);
    if (GATHER && warp < kTilePlaces) find_below(p, strip, first_row, warp, tiles, &block.at(warp));
    __syncthreads();
    const int n = block.transpose(finds, segment_word);
    if (!block.at(n).exists && !block.at(n).past_groups) return;
    // Equal to `past_groups`, which would keep a register until here.
    const bool none = !block.at(n).exists;
    const ExpertTile rest = none ? expert_of(p, first_row, segment_word) : block.at(n);
    i64 first = none ? first_tile : first_tile + rest.offset;
    if (GATHER) first += strip * (p.down - rest.group_tile) - rest.group_tile;
    else first -= rest.group_tile * p.strips;
    clear_rest(p, rest, first, first + tiles - rest.offset);
}
