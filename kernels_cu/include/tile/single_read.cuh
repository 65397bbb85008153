// Current scaling of many matrices from one read: tiles stay in shared memory and registers until their
// matrix's scale is known.
//
// A launch has one thread block per SM, all of them resident (a cooperative launch), and every matrix is cut
// into tiles of 128 x 128 elements. Block b takes tiles b, b + blocks, ... of all matrices in a row. Warps
// are specialised:
//
//   loaders    copy tiles into `stages` stages of shared memory, one after the other as these become free,
//              without waiting for them to arrive
//   publishers find the amax of the tile in a stage, and publish it to all blocks: published[tile] = the
//              launch, and the amax
//   consumers  take a tile from its stage to registers, which frees the stage; wait until the amaxes of all
//              tiles of its matrix have been published; cast it, in both directions. While they wait or cast,
//              the next tile is loaded to registers too, if it is there.
//
// So a block holds stages + 1 tiles. A matrix with no more tiles than that in any block is read once. A block
// loads the tiles of a larger matrix twice: first to publish their amaxes, then to cast them, in reverse
// order for the sake of those that the L2 still holds. Blocks cannot deadlock: a block publishes the amax of
// every tile that it has loaded, and the stages of tiles that it does not cast yet are free at once.
//
// The number of the launch marks every amax, so that those of earlier launches need not be cleared. (Numbers
// wrap around after 2^32 launches, which take days.) The last block to finish counts the launch.
//
// IN in {bf16, f16}, OUT in {e4m3fn, e5m2}. A kernel supplies a class Tensors, which knows its matrices:
//   struct Ahead                          what a lane knows of the tile that it finds next
//   bool find(u32 tile, Ahead&, Visit& to)        by a whole warp: describes the tile in shared memory (kind:
//                                                 kClear, or 0); false: nothing
//   void first_tile(const Visit&, u32 launch, u32 amax, float scale)
//                                                 by one thread, once per matrix that has a tile
//   void clear(const Visit&)              by all consumers: a tile of kind kClear
//   void last(u32 launch)                 by all consumers of the last block to finish
#pragma once
#include "scale/cast.cuh"
#include "memory/barriers.cuh"
#include "scale/scale.cuh"
#include "tile/tile.cuh"

struct SingleRead {
    u32* state;                  // launches so far, and blocks that have finished this one; zero before the
                                 // first launch
    u64* published;              // [tiles]: the launch, then the amax (f32 bits); zero before the first
                                 // launch
    u32 tiles;                   // of all matrices
    u32 stages;                  // 1 to kMostStages
    TensorScaleRule rule;
};

// A tile, and what a block does with it.
enum VisitKind : u32 { kPublish = 1, kCast = 2, kClear = 4, kEnd = 8 };
struct Visit {
    const IN::storage* x;        // its first element
    u8 *data, *data_t;           // destinations of the tile; null: that direction is not written
    i64 rows, columns;           // of the matrix
    i64 matrix;                  // index of the matrix
    u32 tile, first, tiles;      // index among all tiles; the matrix's first tile and its number of tiles
    // x has `given` rows of the tile; the others are zeros. The tile has rows_left rows and columns_left
    // columns.
    int given, rows_left, columns_left;
    u32 vector;                  // rows of data_t allow 16-byte stores
    u32 kind;
};

using SingleReadTile = ByteTile<128, 128>;
constexpr int kConsumers = SingleReadTile::kThreads, kPublishers = 64, kLoaders = 64;
constexpr int kSingleReadThreads = kConsumers + kPublishers + kLoaders;
constexpr int kMostStages = 6, kVisits = kMostStages + 2;              // two more tiles are in registers
constexpr int kTileSide = 128, kUnit = 16 / sizeof(IN::storage);     // elements of a 16-byte load
// the same number in ops/quantize/single_read.py
constexpr int kStageBytes = kTileSide * kTileSide * sizeof(IN::storage);
static_assert(sizeof(IN::storage) == 2, "a patch of 8 x 8 elements is 32 registers");

struct SingleReadShared {
    PhaseBarrier full[kMostStages], empty[kMostStages];
    Visit visit[kVisits];        // tile n of this block in [n % kVisits], until the consumers have cast it
    Visit found[kLoaders / 32];
    u32 amaxes[2][kPublishers / 32], warp_amaxes[kConsumers / 32];
    u32 launch, is_last;
};
static_assert(sizeof(SingleReadShared) + 128 * (kLoaders / 32) <= 2048,
              "also in ops/quantize/single_read.py; 128: what find() has per warp");

// Cursor in the ring of stages and visits.
struct StageCursor {
    u32 stage = 0, visit = 0, parity;

    explicit __device__ __forceinline__ StageCursor(u32 parity) : parity(parity) {}
    __device__ __forceinline__ void advance(u32 stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
        if (++visit == kVisits) visit = 0;
    }
};

__device__ __forceinline__ u64 in_launch(u32 launch, u32 amax) { return (u64)launch << 32 | amax; }
__device__ __forceinline__ bool is_of(u64 published, u32 launch) { return (u32)(published >> 32) == launch; }

// Requests a loader's part of a tile. Absent elements become zeros.
__device__ __forceinline__ void copy_tile(const Visit& found, int loader, u8* stage) {
    constexpr int kUnits = kTileSide / kUnit, kStep = kLoaders / kUnits, kCopies = kTileSide / kStep;
    const int row = loader / kUnits, unit = loader % kUnits;
    const i64 columns = found.columns, step = kStep * columns;
    const IN::storage* from = found.x + row * columns + unit * kUnit;
    u8* const to = stage + loader * 16;
    if (found.given == kTileSide && found.columns_left == kTileSide) {
#pragma unroll
        for (int i = 0; i < kCopies; i++, from += step) copy_async(to + i * kLoaders * 16, from);
        return;
    }
    const int rows = unit * kUnit < found.columns_left ? found.given - row : 0;
#pragma unroll 1
    for (int i = 0; i < kCopies; i++, from += step) {
        const bool exists = i * kStep < rows;
        copy_async(to + i * kLoaders * 16, exists ? from : found.x, exists);
    }
}

// Hands a visit over to the publishers and consumers. Call from one whole warp.
__device__ __forceinline__ void hand_over(const Visit& found, u32 kind, Visit& to, PhaseBarrier* full) {
    static_assert(sizeof(Visit) % sizeof(u64) == 0 && sizeof(Visit) <= 32 * sizeof(u64), "a word per lane");
    const int lane = threadIdx.x % 32;
    if (lane < (int)(sizeof(Visit) / sizeof(u64)))
        reinterpret_cast<u64*>(&to)[lane] = reinterpret_cast<const u64*>(&found)[lane];
    __syncwarp();
    if (lane == 0) to.kind = kind;
    // every lane arrives for the word that it has written
    arrive(full);
}

template <class Tensors>
__device__ __forceinline__ void load_tiles(const Tensors& tensors, const SingleRead& p,
                                           SingleReadShared& shared, u8* stages) {
    const int loader = threadIdx.x - kConsumers - kPublishers, warp = loader / 32;
    Visit& found = shared.found[warp];
    typename Tensors::Ahead ahead;
    StageCursor at(1);
    const auto issue = [&](u32 kind) {
        wait_for_end(shared.empty + at.stage, at.parity);
        if (kind & (kPublish | kCast)) copy_tile(found, loader, stages + at.stage * kStageBytes);
        arrive_after_copies(shared.full + at.stage);
        if (warp == 0) hand_over(found, kind, shared.visit[at.visit], shared.full + at.stage);
        __syncwarp();
        at.advance(p.stages);
    };
    const u32 blocks = gridDim.x, most = (p.stages + 1) * blocks;
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += blocks) {
        if (!tensors.find(tile, ahead, found)) continue;
        if (found.kind == kClear || found.tiles <= most) {
            issue(found.kind == kClear ? kClear : kPublish | kCast);
            continue;
        }
        const u32 begin = tile, end = found.first + found.tiles;
        for (;;) {
            issue(kPublish);
            if (end - tile <= blocks) break;
            tile += blocks;
            tensors.find(tile, ahead, found);
        }
        for (u32 back = tile;; back -= blocks) {
            if (back != tile) tensors.find(back, ahead, found);
            issue(kCast);
            if (back == begin) break;
        }
    }
    issue(kEnd);
}

__device__ __forceinline__ void publish_tiles(const SingleRead& p, SingleReadShared& shared,
                                              const u8* stages) {
    const int thread = threadIdx.x - kConsumers, warp = thread / 32;
    u32 odd = 0;
    for (StageCursor at(0);; at.advance(p.stages)) {
        wait_for_end(shared.full + at.stage, at.parity);
        const u32 kind = shared.visit[at.visit].kind;
        if (kind == kEnd) return;
        if (kind & kPublish) {
            Amax<IN> amax;
            const u8* const from = stages + at.stage * kStageBytes + thread * 16;
#pragma unroll 8
            for (int i = 0; i < kStageBytes; i += kPublishers * 16)
                amax.add(Chunk<IN, kUnit>::load_shared(from + i));
            const u32 warp_amax = __reduce_max_sync(~0u, amax.f32_bits());
            odd ^= 1;
            if (thread % 32 == 0) shared.amaxes[odd][warp] = warp_amax;
            sync_some<1, kPublishers>();
            if (thread == 0) {
                u32 all = warp_amax;
                for (int w = 1; w < kPublishers / 32; w++)
                    all = all > shared.amaxes[odd][w] ? all : shared.amaxes[odd][w];
                store_relaxed(p.published + shared.visit[at.visit].tile, in_launch(shared.launch, all));
            }
        }
        __syncwarp();
        if (thread % 32 == 0) arrive(shared.empty + at.stage);
    }
}

// Returns the amax of a matrix, once those of all its tiles have been published. Call from all consumers.
__device__ __forceinline__ u32 wait_for_amax(const SingleRead& p, SingleReadShared& shared,
                                             const Visit& visit) {
    constexpr int kLoadsInFlight = 4;
    const u32 launch = shared.launch, tiles = visit.tiles;
    const u64* const published = p.published + visit.first;
    const auto pause = [] { __nanosleep(20); };
    // The last tiles' amaxes are usually published last: one warp polls for these before all ask for the
    // others, to keep load off the L2.
    if (threadIdx.x < 32) {
        if (threadIdx.x < tiles)
            while (!is_of(load_relaxed(published + tiles - 1 - threadIdx.x), launch)) pause();
        __syncwarp();
    }
    sync_some<2, kConsumers>();
    u32 amax = 0;
    for (u32 i = threadIdx.x; i < tiles; i += kLoadsInFlight * kConsumers) {
        u64 value[kLoadsInFlight];
        for (;;) {
            bool all = true;
#pragma unroll
            for (int u = 0; u < kLoadsInFlight; u++)
                value[u] = i + u * kConsumers < tiles ? load_relaxed(published + i + u * kConsumers)
                    : in_launch(launch, 0);
#pragma unroll
            for (int u = 0; u < kLoadsInFlight; u++) all = all && is_of(value[u], launch);
            if (all) break;
            pause();
        }
#pragma unroll
        for (int u = 0; u < kLoadsInFlight; u++) amax = amax > (u32)value[u] ? amax : (u32)value[u];
    }
    __syncwarp();
    const BlockMax<kConsumers> shared_amax{shared.warp_amaxes};
    shared_amax.put(amax);
    sync_some<2, kConsumers>();
    const u32 lane = threadIdx.x % 32;
    return __reduce_max_sync(~0u, lane < kConsumers / 32 ? shared.warp_amaxes[lane] : 0u);
}

// A consumer's patch of the tile that it casts next.
struct NextPatch {
    const SingleRead& p;
    SingleReadShared& shared;
    const u8* stages;
    StageCursor at{0};                                               // of the tile
    Chunk<IN, 8> rows[8];

    __device__ __forceinline__ void wait() const { wait_for_end(shared.full + at.stage, at.parity); }
    __device__ __forceinline__ bool is_there() const {
        return __all_sync(~0u, has_ended(shared.full + at.stage, at.parity));
    }
    // Takes the patch from its stage, which becomes free.
    __device__ __forceinline__ void take() {
        const int row = SingleReadTile::patch_row(), column = SingleReadTile::patch_column();
        const u8* const from = stages + at.stage * kStageBytes
            + (row * kTileSide + column) * sizeof(IN::storage);
        const u32 kind = shared.visit[at.visit].kind;
        if (kind & kCast)
#pragma unroll
            for (int r = 0; r < 8; r++)
                rows[r] = Chunk<IN, 8>::load_shared(from + r * kTileSide * sizeof(IN::storage));
        __syncwarp();
        if (kind != kEnd && threadIdx.x % 32 == 0) arrive(shared.empty + at.stage);
        at.advance(p.stages);
    }
    __device__ __forceinline__ bool take_if_there() {
        const bool there = is_there();
        if (there) take();
        return there;
    }
};

// Casts a consumer's patch, and stores the tile in the directions of its visit. Call from all consumers.
__device__ __forceinline__ void store_cast(const Visit& visit, const Chunk<IN, 8> (&in)[8], float scale,
                                           const SingleReadTile& tile) {
    const int row = SingleReadTile::patch_row(), column = SingleReadTile::patch_column();
    const i64 columns = visit.columns;
    const int rows_here = visit.data && column < visit.columns_left ? visit.rows_left - row : 0;
    u8* const to = visit.data ? as_global(visit.data) + row * columns + column : nullptr;
    Chunk<OUT, 8> patch[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        patch[r] = scale_and_narrow(in[r], scale);
        if (r < rows_here) patch[r].store(to + r * columns);
    }
    if (!visit.data_t) return;
    tile.write_patch(patch);
    sync_some<2, kConsumers>();
    const i64 rows = visit.rows;
    u8* const to_t = as_global(visit.data_t);
    if (!visit.vector) return tile.store_ragged(to_t, rows, visit.columns_left, visit.rows_left);
    const int rows_left = visit.rows_left, columns_left = visit.columns_left;
#pragma unroll
    for (int unit = 0; unit < SingleReadTile::kUnits<16>; unit++) {
        const int to_row = SingleReadTile::column<16>(unit), to_column = SingleReadTile::row<16>();
        if (to_row < columns_left && to_column < rows_left)
            tile.read<OUT, 16>(unit).store_whole(to_t + to_row * rows + to_column);
    }
}

template <class Tensors>
__device__ __forceinline__ void cast_tiles(const Tensors& tensors, const SingleRead& p,
                                           SingleReadShared& shared, const u8* stages, u8* staging) {
    NextPatch next{p, shared, stages};
    bool taken = false;
    // `known`: first tile of the matrix that amax and scale belong to
    u32 visit_at = 0, known = ~0u, amax = 0;
    float scale = 0.0f;
    for (;; visit_at = visit_at + 1 == kVisits ? 0 : visit_at + 1) {
        if (!taken) {
            next.wait();
            next.take();
        }
        Chunk<IN, 8> in[8];
#pragma unroll
        for (int r = 0; r < 8; r++) in[r] = next.rows[r];
        const Visit& visit = shared.visit[visit_at];
        const u32 kind = visit.kind;
        if (kind == kEnd) return;
        taken = next.take_if_there();
        if (kind == kClear) tensors.clear(visit);
        if (!(kind & kCast)) continue;
        if (visit.first != known) {
            known = visit.first;
            amax = wait_for_amax(p, shared, visit);
            scale = p.rule.scale_of(as_float(amax));
            if (!taken) taken = next.take_if_there();
        } else if (visit.data_t) {
            sync_some<2, kConsumers>();                              // all have read the tile before
        }
        if (threadIdx.x == 0 && visit.tile == visit.first)
            tensors.first_tile(visit, shared.launch, amax, scale);
        store_cast(visit, in, scale, SingleReadTile{staging});
    }
}

// All work of a block of kSingleReadThreads. memory: p.stages stages, then 16 KB; 16-byte aligned.
template <class Tensors>
__device__ __forceinline__ void cast_single_read(const Tensors& tensors, const SingleRead& p, u8* memory) {
    __shared__ SingleReadShared shared;
    if (threadIdx.x < p.stages) {
        // the loaders arrive with their copies, and one warp for the visit that describes these
        init_phases(shared.full + threadIdx.x, kLoaders + 32);
        init_phases(shared.empty + threadIdx.x, (kConsumers + kPublishers) / 32);
    }
    if (threadIdx.x == 0) {
        const u32 launches = load_relaxed(p.state) + 1;
        shared.launch = launches ? launches : 1;                     // 0 marks what was never published
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers + kPublishers) return load_tiles(tensors, p, shared, memory);
    if (threadIdx.x >= kConsumers) return publish_tiles(p, shared, memory);
    cast_tiles(tensors, p, shared, memory, memory + p.stages * kStageBytes);
    if (threadIdx.x == 0) shared.is_last = is_last_block(p.state + 1, gridDim.x);
    sync_some<2, kConsumers>();
    if (!shared.is_last) return;
    tensors.last(shared.launch);
    if (threadIdx.x == 0) {
        atomicExch(p.state + 1, 0u);
        atomicExch(p.state, shared.launch);
    }
}
