// Copies of a tile's bytes to shared memory, for the scaling-aware transpose (scaling_aware.cu).
#pragma once
#include "convert/scaling_aware_experts.cuh"

constexpr int kRawBytes = kTileRows * TILE_COLUMNS + 16;             // one tile; see raw_unit()

// Returns the place of a tile's 16-byte unit in shared memory. A row has TILE_COLUMNS bytes; pairs of units
// are XOR-swizzled so that a warp's lanes, which read rows 16 apart, have no bank conflicts. The second half
// of the rows is shifted by 16 bytes. Units of a pair stay adjacent: copying a sector's two halves to
// different places took 6 % longer.
__device__ __forceinline__ int raw_unit(int row, int unit) {
    return row * TILE_COLUMNS + (unit ^ (row / 16 * 2 & 6)) * 16 + row / 64 * 16;
}

constexpr int kRowUnits = TILE_COLUMNS / 16, kStep = kThreads / kRowUnits;
constexpr int kUnitsPerThread = kTileRows / kStep;

// GATHER: source tokens of this thread's units, loaded while the tile before is copied.
struct Sources {
    i32 slot[kUnitsPerThread];

    __device__ __forceinline__ void load(const ScalingAwareParams& p, const ExpertTile& tile) {
        if constexpr (GATHER)
#pragma unroll
            for (int n = 0; n < kUnitsPerThread; n++) {
                const int row = threadIdx.x / kRowUnits + tile.row_in_strip(n * kStep);
                slot[n] = -1;
                if (tile.exists && !tile.past_groups && row < tile.rows)
                    slot[n] = load_read_only(p.gathered.sources + tile.start() + row);
            }
    }
    // Returns the token of unit n; p.gathered.tokens or more if there is none (slots are below 2^31).
    __device__ __forceinline__ u32 token(const ScalingAwareParams& p, int n) const {
        return (u32)((u64)(u32)slot[n] * p.gathered.multiplier >> p.gathered.shift);
    }
};

// Starts the copies of this thread's units. Absent units and rows become zeros. kStacked: strips may be
// stacked.
template <bool kStacked>
__device__ __forceinline__ void prefetch_rows(const ScalingAwareParams& p, const ExpertTile& tile, u8* raw,
                                              const Sources& sources) {
    static_assert(kStep == 32, "the places of a thread's units differ by what n alone decides");
    const int first = threadIdx.x / kRowUnits, unit = threadIdx.x % kRowUnits;
    const int stack = kStacked ? tile.stack : 0, left = tile.columns - unit * 16;
    const int rows = kStacked || left > 0 ? tile.rows - first : 0;
    // Steps in memory between groups of 32 rows of the tile: `next` from even to odd ones, `after` from odd
    // to even.
    const i64 down = kStep * p.columns, next = stack == 2 ? TILE_COLUMNS : down;
    const i64 after = stack == 0 ? down : stack == 1 ? TILE_COLUMNS - down : TILE_COLUMNS;
    const u8* from = tile.from + ((GATHER ? 0 : first * p.columns) + unit * 16);
    const int even = raw_unit(first, unit), odd = even ^ 4 * 16;
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; n++) {
        const int columns = kStacked ? left - tile.strip_of(n * kStep) * TILE_COLUMNS : left;
        const int row = kStacked ? tile.row_in_strip(n * kStep) : n * kStep;
        bool exists = row < rows && (!kStacked || columns > 0);
        const u8* at = from;
        if constexpr (GATHER) {
            const u32 token = sources.token(p, n);
            exists &= token < p.gathered.tokens;
            at += token * p.columns + (kStacked ? tile.strip_of(n * kStep) * TILE_COLUMNS : 0);
        } else {
            from += n % 2 ? after : next;
        }
        u8* const to = raw + ((n % 2 ? odd : even) + n * kStep * TILE_COLUMNS + n / 2 * 16);
        if constexpr (ALIGNED) copy_async(to, at, exists);
        else {
            const int exist = exists ? left_of(columns, 16) : 0;
            Chunk<IN, 16> whole{};
            if (!p.vector) whole = Chunk<IN, 16>::load_partial(at, exist);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!p.vector || exist <= half * 8) continue;
                const Chunk<IN, 8> eight = Chunk<IN, 8>::load(at + half * 8);
                whole.word[2 * half] = eight.word[0], whole.word[2 * half + 1] = eight.word[1];
            }
            store_shared_whole(to, whole.word[0], whole.word[1], whole.word[2], whole.word[3]);
        }
    }
}

// Starts the copy of a tile to shared memory.
__device__ __forceinline__ void prefetch(const ScalingAwareParams& p, const ExpertTile& tile, u8* raw,
                                         const Sources& sources) {
    if (tile.past_groups) return;
    // fewer instructions without stacks
    if (ALIGNED && (!kStacks || tile.stack == 0)) prefetch_rows<false>(p, tile, raw, sources);
    else prefetch_rows<kStacks>(p, tile, raw, sources);
}

// GATHER: writes the tile's rows from shared memory; each thread those that it has copied.
__device__ __forceinline__ void store_rows(const ScalingAwareParams& p, const ExpertTile& tile,
                                           const u8* raw) {
    const int first = threadIdx.x / kRowUnits, unit = threadIdx.x % kRowUnits;
    u8* const to = p.gathered.to + ((tile.start() + first) * p.columns + tile.column() + unit * 16);
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; n++) {
        const int row = tile.row_in_strip(n * kStep), strip = tile.strip_of(n * kStep) * TILE_COLUMNS;
        const int left = first + row < tile.rows ? tile.columns - strip - unit * 16 : 0;
        const Chunk<IN, 16> codes = Chunk<IN, 16>::load_shared(raw + raw_unit(first + n * kStep, unit));
        if (!ALIGNED) codes.store_partial(to + (row * p.columns + strip), left_of(left, 16));
        else if (left > 0) codes.template store_whole<true>(to + (row * p.columns + strip));
    }
}

// Prefetches the tile of a later thread block into the L2; that block is near enough that the bytes do not
// stay there long.
__device__ __forceinline__ void fetch_ahead(const ScalingAwareParams& p) {
    const u32 block = blockIdx.x + p.ahead, strip = block / (u32)p.down;
    if (block >= gridDim.x) return;
    const i64 row = (i64)(block - strip * (u32)p.down) * kTileRows + threadIdx.x;
    const i64 column = (i64)strip * TILE_COLUMNS;
    if (threadIdx.x < kTileRows && row < p.rows)
        fetch_to_l2(p.data + (row * p.columns + column), left_of(p.columns - column, TILE_COLUMNS));
}
