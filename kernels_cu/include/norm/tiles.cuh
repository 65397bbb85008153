// Path plain: tiles of 128 x 128 elements, in every direction, from one read of memory. The statistics of a
// row take all its columns, so the rows of a band of tiles are read before, and come from the L2 when the
// tiles are. Every block of threads finds the statistics of a part of a band that comes later, then
// quantises its tile: on an H200 that is faster than two launches, which read everything twice from memory
// (docs/lab-notes).
//
// A band has as many parts as it has tiles, each a few whole rows. Block b finds part b + lead, the first
// blocks part b too. GPUs start blocks in their order, so others find the statistics that a block needs
// before it starts; should they not come, it finds those of its band itself, which are the same.
#pragma once
#include "fused/drivers.cuh"
#include "source/norm.cuh"

static_assert(!kTiled || sizeof(IN::storage) == 2, "four rows of a thread are staged at once");

struct Progress {                // zero before the first launch of a grid
    u64 blocks_done;             // of all launches
    u32 parts_done[1];           // of each band, of all launches
};

// Bytes of a tile of one array in shared memory.
constexpr int kTileBytes = Tile::kRows * Tile::kColumns * 2;
// A warp sums up so many segments of 32 chunks at a time.
constexpr int kSegmentsAtOnce = 4;
// A part has at most so many segments: those of 128 rows, of a row of 2^15 columns, or of the rows between.
constexpr int kMostSegments = 256;

__device__ __forceinline__ u32 load_acquire(const u32* word) {
#ifdef CUPY_FP8_HOST
    return host_load_acquire(word);
#else
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
#endif
}
__device__ __forceinline__ void add_release(u32* word) {
#ifdef CUPY_FP8_HOST
    __threadfence();
    atomicAdd(word, 1u);
#else
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(word) : "memory");
#endif
}

// The tile's elements, copied to shared memory, of which a thread reads what it has copied.
struct StagedTile {
    u8* shared;                  // this thread's part

    __device__ __forceinline__ void request(const SourceCall& call, const TilePosition& tile) const {
        const i64 row = tile.row + row_in_step(0), column = tile.column + Tile::patch_column();
        const int left = column < call.columns ? left_of(call.rows - row, kThreadRows) : 0;
        const i64 at = row * call.columns + column;
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            const i64 of_row = at + r * call.columns;
            copy_async(place(r, 0), call.x + of_row, r < left);
            if constexpr (kBackward) copy_async(place(r, 1), call.grad + of_row, r < left);
            if (call.has_residual()) copy_async(place(r, 1 + kBackward), call.residual + of_row, r < left);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void read(int r, int array, float (&v)[8]) const {
        const Eight raw{Chunk<IN, kLoad>::load_shared(place(r, array))};
        widen_eight(raw, v);
    }

private:
    __device__ __forceinline__ u8* place(int r, int array) const {
        return shared + array * kTileBytes + r * (kStreamThreads * 16);
    }
};

// Statistics of the rows of a band, in shared memory.
__device__ __forceinline__ RowStatistics* band_statistics() {
    __shared__ __align__(16) RowStatistics rows[Tile::kRows];
    return rows;
}

// Finds the statistics of parts of bands.
class Ahead {
public:
    __device__ __forceinline__ explicit Ahead(const SourceCall& call)
        : call(call), progress(*reinterpret_cast<Progress*>(call.progress)),
          across((u32)((call.columns + Tile::kColumns - 1) / Tile::kColumns)) {}

    // Finds this block's parts, and waits for the statistics of its band. The whole block calls it.
    __device__ __forceinline__ void find_and_wait(u32 band) const {
        bool has_come = false;
        const auto look = [&](u32 patience) { has_come = has_come || wait(band, patience); };
        const u32 own = blockIdx.x, later = own + call.lead;
        if (own < call.lead) publish(own, [] {});
        // While the rows of the later part come, the statistics of the band do.
        if (later < gridDim.x) publish(later, [&] { if (kNorms == Norms::rms) look(own < call.lead ? 0 : 1); });
        look(call.patience);
        if (!__syncthreads_and(has_come)) {
#pragma unroll 1
            for (u32 part = band * across; part < (band + 1) * across; part++) find(part, [] {});
            __syncthreads();
            load_statistics(band);
            __syncthreads();
        }
    }
    // Call it once this block has waited and published.
    __device__ __forceinline__ void finish() const {
        if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&progress.blocks_done), 1ull);
    }

private:
    const SourceCall& call;
    Progress& progress;
    const u32 across;

    // Returns true once the statistics of the row that this thread loads have come.
    __device__ __forceinline__ bool wait(u32 band, u32 patience) const {
        if (threadIdx.x >= Tile::kRows) return true;
        // Blocks that run are not done, so this is the number of launches before.
        const u32 launches = (u32)(load_relaxed(&progress.blocks_done) / gridDim.x);
        for (u32 looks = 0; looks < patience; looks++) {
            if ((i32)(load_acquire(&progress.parts_done[band]) - (launches + 1) * across) >= 0) {
                load_statistics(band);
                return true;
            }
#ifdef CUPY_FP8_HOST
            host_yield();
#endif
        }
        return false;
    }
    // Other blocks have stored them, so they come from the L2.
    __device__ __forceinline__ void load_statistics(u32 band) const {
        const i64 row = (i64)band * Tile::kRows + threadIdx.x;
        if (threadIdx.x >= Tile::kRows) return;
        float all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2 + 2 * kBackward; i++)
            if (row < call.rows && is_stored(i))
                all[i] = as_float((u32)load_relaxed(call.statistics + i * call.rows + row));
        band_statistics()[threadIdx.x] = {all[0], all[1], all[2], all[3]};
    }
    // Means are 0 without LayerNorm.
    static __device__ __forceinline__ bool is_stored(int i) { return kNorms != Norms::rms || i % 2 == 1; }

    template <class Between>
    __device__ __forceinline__ void publish(u32 part, Between between) const {
        find(part, between);
        __syncthreads();
        if (threadIdx.x == 0) add_release(&progress.parts_done[part / across]);
    }

    // Adds up term(row, z, grad * weight) over the columns of `count` rows from `row` on, into totals().
    // between(): called once, while elements come.
    template <class Term, class Between>
    __device__ __forceinline__ void add_up(i64 row, int count, Term term, Between between) const {
        const int chunks = (int)(call.columns / 8), segments = (chunks + 31) / 32, all = count * segments;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        bool called = false;
#pragma unroll 1
        for (int first = warp * kSegmentsAtOnce; first < all || !called;
             first += kStreamThreads / 32 * kSegmentsAtOnce) {
            Eight x[kSegmentsAtOnce], other[kSegmentsAtOnce];
            int r = first / segments, chunk = (first - r * segments) * 32 + lane;
            int rows[kSegmentsAtOnce], at[kSegmentsAtOnce];
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) {
                rows[s] = r, at[s] = r < count && chunk < chunks ? chunk * 8 : -1;
                const i64 from = (row + r) * call.columns + chunk * 8;
                const int eight = at[s] < 0 ? 0 : 8;
                load_eight<true>(x[s], call.x + from, eight);
                if (kBackward) load_eight<true>(other[s], call.grad + from, eight);
                else if (call.has_residual()) load_eight<true>(other[s], call.residual + from, eight);
                chunk += 32;
                if (chunk >= segments * 32) chunk -= segments * 32, r++;
            }
#ifndef CUPY_FP8_HOST
            // All of them are requested before anything waits.
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++)
#pragma unroll
                for (auto& load : x[s])
#pragma unroll
                    for (u32& word : load.word) asm volatile("" : "+r"(word));
#endif
            if (!called) between();
            called = true;
            u32 sums[kSegmentsAtOnce];
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) {
                float z[8], v[8];
                widen_eight(x[s], z);
                if (kBackward) {
                    float w[8];
                    widen_eight(other[s], v);
                    load_weight<true>(call, at[s], at[s] < 0 ? 0 : 8, w);
#pragma unroll
                    for (int i = 0; i < 8; i++) v[i] = mul_rn(v[i], w[i]);
                } else if (call.has_residual()) {
                    widen_eight(other[s], v);
#pragma unroll
                    for (int i = 0; i < 8; i++) z[i] = add_rn(z[i], v[i]);
                    if (call.rounds()) round_eight<IN>(z);
                }
                TreeSum<8> sum;
#pragma unroll
                for (int i = 0; i < 8; i++) sum.add(i, term(rows[s], z[i], kBackward ? v[i] : 0.0f));
                sums[s] = at[s] < 0 ? kAbsentTerm : as_bits(sum.sum());
            }
            float sum = as_float(fold(sums, add_bits));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, step));
            if (lane < kSegmentsAtOnce && first + owned<kSegmentsAtOnce>() < all)
                of_segments()[first + owned<kSegmentsAtOnce>()] = sum;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < count; i += kStreamThreads / 32) {
            TreeSum<4> sum;
#pragma unroll
            for (int k = 0; k < 4; k++)
                sum.add(k, 4 * lane + k < segments ? of_segments()[i * segments + 4 * lane + k]
                                                   : as_float(kAbsentTerm));
            const float total = warp_tree_sum(sum.sum());
            if (lane == 0) totals()[i] = total;
        }
        __syncthreads();
    }

    template <class Between>
    __device__ __forceinline__ void find(u32 part, Between between) const {
        const u32 band = part / across, of_band = part - band * across;
        const u32 begin = of_band * Tile::kRows / across, end = (of_band + 1) * Tile::kRows / across;
        const i64 row = (i64)band * Tile::kRows + begin;
        const int count = left_of(call.rows - row, (int)(end - begin)), own = threadIdx.x;
        __shared__ RowStatistics of_rows[Tile::kRows];
        const auto share = [&](const RowStatistics& of) {
            if (own < Tile::kRows) of_rows[own] = of;
            __syncthreads();
        };
        const bool has_row = own < count;
        RowStatistics of{0.0f, 0.0f, 0.0f, 0.0f};
        if (call.is_layer()) {
            add_up(row, count, [&](int, float z, float) { return z; }, [] {});
            if (has_row) of.mean = Source::mean(call, totals()[own]);
        }
        if (kNorms != Norms::rms) share(of);
        if (kBackward && call.rstd) {
            if (has_row) of.rstd = call.rstd[row + own];
        } else {
            const auto square = [&](int r, float z, float) {
                const float centred = kNorms == Norms::rms ? z : Source::centred(z, of_rows[r]);
                return mul_rn(centred, centred);
            };
            if constexpr (kBackward) add_up(row, count, square, [] {});
            else add_up(row, count, square, between);
            if (has_row) of.rstd = Source::rstd(call, totals()[own]);
        }
        if constexpr (kBackward) {
            share(of);
            add_up(row, count, [&](int r, float z, float gw) {
                return mul_rn(gw, Source::normed(z, of_rows[r]));
            }, between);
            if (has_row) of.mean_product = Source::mean(call, totals()[own]);
            if (call.is_layer()) {
                __syncthreads();
                add_up(row, count, [&](int, float, float gw) { return gw; }, [] {});
                if (has_row) of.mean_grad = Source::mean(call, totals()[own]);
            }
        }
        if (!has_row) return;
        const float all[4] = {of.mean, of.rstd, of.mean_grad, of.mean_product};
#pragma unroll
        for (int i = 0; i < 2 + 2 * kBackward; i++)
            if (is_stored(i)) store_relaxed(call.statistics + i * call.rows + row + own, all[i]);
        if (call.rstd_out) store_relaxed(call.rstd_out + row + own, as_float(f32::narrow(of.rstd)));
    }
    // Two blocks may store the same statistic.
    static __device__ __forceinline__ void store_relaxed(float* to, float v) {
#ifdef CUPY_FP8_HOST
        host_store_relaxed(reinterpret_cast<u32*>(to), as_bits(v));
#else
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(as_bits(v)) : "memory");
#endif
    }
    static __device__ __forceinline__ float* of_segments() {
        __shared__ float sums[kMostSegments];
        return sums;
    }
    static __device__ __forceinline__ float* totals() {
        __shared__ float of_rows[Tile::kRows];
        return of_rows;
    }
};

// Adds up terms(r, eight of them) of a tile's rows, column by column, into a row of sums.
template <class Terms>
__device__ __forceinline__ void sum_columns(const SourceCall& call, const TilePosition& tile, float* of_warps,
                                            Terms terms, float* to) {
    const int left = left_of(call.rows - tile.row - row_in_step(0), kThreadRows);
    TreeSum<kThreadRows> sums[8];
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
        float eight[8];
        terms(r, eight);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i].add(r, r < left ? eight[i] : as_float(kAbsentTerm));
    }
    static_assert(Tile::kColumnPatches == 16, "a warp has eight rows");
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float sum = add_rn(sums[i].sum(), __shfl_xor_sync(~0u, sums[i].sum(), 16));
        if (threadIdx.x % 32 < 16) of_warps[threadIdx.x / 32 * Tile::kColumns + Tile::patch_column() + i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < Tile::kColumns && tile.column + threadIdx.x < call.columns) {
        TreeSum<kStreamThreads / 32> sum;
#pragma unroll
        for (int w = 0; w < kStreamThreads / 32; w++) sum.add(w, of_warps[w * Tile::kColumns + threadIdx.x]);
        to[tile.row / Tile::kRows * call.columns + tile.column + threadIdx.x] = as_float(f32::narrow(sum.sum()));
    }
    __syncthreads();
}
// The gradients of weight and bias over a tile's rows.
__device__ __forceinline__ void sum_gradients(const SourceCall& call, const TilePosition& tile,
                                              const StagedTile& staged) {
    __shared__ __align__(16) float of_warps[kStreamThreads / 32 * Tile::kColumns];
    if (call.weight_sums)
        sum_columns(call, tile, of_warps, [&](int r, float (&terms)[8]) {
            const RowStatistics of = band_statistics()[row_in_step(0) + r];
            float z[8];
            staged.read(r, 0, z), staged.read(r, 1, terms);
#pragma unroll
            for (int i = 0; i < 8; i++) terms[i] = mul_rn(terms[i], Source::normed(z[i], of));
        }, call.weight_sums);
    if (kNorms != Norms::rms && call.bias_sums)
        sum_columns(call, tile, of_warps, [&](int r, float (&terms)[8]) { staged.read(r, 1, terms); },
                    call.bias_sums);
}

template <class Output, class Params, class... More>
__device__ __forceinline__ u32 norm_tiles(const Params& p, const SourceCall& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    StreamPosition at(call, 1);
    const TilePosition tile = at.tile();
    const StagedTile staged{shared + threadIdx.x * 16};
    staged.request(call, tile);
    const Ahead ahead(call);
    ahead.find_and_wait(at.down);
    ahead.finish();
    copy_async_wait();
    if constexpr (kBackward) sum_gradients(call, tile, staged);
    const i64 column = tile.column + Tile::patch_column();
    const int own_columns = column < call.columns ? 8 : 0;
    float w[8];
    load_weight<true>(call, column, own_columns, w);
    Output output(p, tile, shared + (1 + kBackward + call.has_residual()) * kTileBytes, more...);
    const int left = own_columns ? left_of(call.rows - tile.row - row_in_step(0), kThreadRows) : 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
        const RowStatistics of = band_statistics()[row_in_step(0) + r];
        const i64 to = (tile.row + row_in_step(r)) * call.columns + column;
        float values[1][8], z[8], other[8];
        staged.read(r, 0, z);
        if constexpr (kBackward) {
            staged.read(r, 1, other);
#pragma unroll
            for (int i = 0; i < 8; i++) values[0][i] = Source::gradient(z[i], other[i], of, w[i]);
            if (call.has_residual()) {
                staged.read(r, 2, other);
#pragma unroll
                for (int i = 0; i < 8; i++) values[0][i] = add_rn(values[0][i], other[i]);
            }
        } else {
            const int count = r < left ? 8 : 0;
            if (call.has_residual()) {
                staged.read(r, 1, other);
                add_residual<true>(call, other, to, count, z);
            }
            if (kNorms != Norms::rms) load_bias<true>(call, column, own_columns, other);
#pragma unroll
            for (int i = 0; i < 8; i++) values[0][i] = Source::value(z[i], of, w[i], other[i]);
            round_through(call, values[0]);
            if (kNorms == Norms::every && call.normed) store_eight<true, IN>(call.normed + to, values[0], count);
        }
        if (r >= left)
#pragma unroll
            for (float& each : values[0]) each = 0.0f;
        output.take(r, values);
    }
    const ChunkPosition position(call, tile);
    output.store(p, at, 0, position, left, nullptr);
    return output.amax();
}
