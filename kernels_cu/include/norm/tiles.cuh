// Path plain: tiles of 128 x 128 elements, in every direction, from one read of memory. The statistics of a
// row take all its columns, so the rows of a band of tiles are read before, and come from the L2 when the
// tiles are. Every block of threads finds the statistics of a part of a band that comes later, then
// quantises its tile: on an H200 that is faster than two launches, which read everything twice from memory
// (docs/lab-notes).
//
// A band has as many parts as it has tiles: part i has its rows i, i + parts, … A block finds that part of
// the band that comes `lead` later, which is its tile's; the first blocks find that of their own band too.
// GPUs start blocks in their order, so others find the statistics that a block needs
// before it starts; should they not come, it finds those of its band itself, which are the same.
#pragma once
#include "fused/drivers.cuh"
#include "source/norm.cuh"

static_assert(!kTiled || sizeof(IN::storage) == 2, "four rows of a thread are staged at once");

// A statistic of a row, in the order of RowStatistics, and the launch that has stored it: whoever reads both at
// once needs no other flag.
struct Progress {                // zero before the first launch
    u32 launches;                // that are done
    u32 blocks_done;             // of this launch
    u64 statistics[1];           // [4, rows]; of RMSNorm those that are not 0
};

// Bytes of a tile of one array in shared memory.
constexpr int kTileBytes = Tile::kRows * Tile::kColumns * 2;
// A warp sums up so many segments of 32 chunks at a time.
constexpr int kSegmentsAtOnce = 4, kTileWarps = kStreamThreads / 32;
// A part has at most so many segments: those of 128 rows, of a row of 2^15 columns, or of the rows between.
constexpr int kMostSegments = 256;

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

// Weights, then biases of the tile's columns, in shared memory. Call __syncthreads() before get().
struct TileWeights {
    static __device__ __forceinline__ float* shared() {
        __shared__ __align__(16) float of_columns[(2 - kRms) * Tile::kColumns];
        return of_columns;
    }
    static __device__ __forceinline__ void load(const SourceCall& call, i64 column) {
        const int own = threadIdx.x;
        if (own >= Tile::kColumns) return;
        const bool exists = column + own < call.columns;
        shared()[own] = exists ? add_rn(one(call, call.weight, column + own), call.weight_offset) : 0.0f;
        if (kRms || kBackward) return;
        shared()[Tile::kColumns + own] = exists && call.bias ? one(call, call.bias, column + own) : -0.0f;
    }
    static __device__ __forceinline__ void get(int which, float (&v)[8]) {
        const float* const from = shared() + which * Tile::kColumns + Tile::patch_column();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto four = Chunk<f32, 4>::load_shared(reinterpret_cast<const u8*>(from + half * 4));
#pragma unroll
            for (int i = 0; i < 4; i++) v[half * 4 + i] = as_float(four.word[i]);
        }
    }

private:
    static __device__ __forceinline__ float one(const SourceCall& call, const void* from, i64 at) {
        if (call.has(SourceCall::kWeightF32)) return load_read_only(static_cast<const float*>(from) + at);
        return IN::widen(load_read_only(static_cast<const IN::storage*>(from) + at));
    }
};

// Finds the statistics of parts of bands.
class Ahead {
public:
    __device__ __forceinline__ explicit Ahead(const SourceCall& call)
        : call(call), progress(*reinterpret_cast<Progress*>(call.progress)),
          launch(load_relaxed(&progress.launches) + 1),
          across((u32)((call.columns + Tile::kColumns - 1) / Tile::kColumns)) {}

    // Finds this block's parts, and waits for the statistics of its band. The whole block calls it.
    __device__ __forceinline__ void find_and_wait(u32 band, u32 part) {
        const auto nothing = [] { return true; };
        if (band < call.lead) find(band, part, nothing);
        // While the rows of the later part come, the statistics of the band do.
        const auto look = [&] { return wait(band); };
        const bool exists = (i64)(band + call.lead) * Tile::kRows < call.rows;
        const bool has_come = exists ? find(band + call.lead, part, look) : __syncthreads_and(look());
        if (has_come) return;
#pragma unroll 1
        for (u32 each = 0; each < across; each++) find(band, each, nothing);
        __syncthreads();
        wait(band);
        __syncthreads();
    }
    // Call it once this block has found its parts and waited; the result goes to end().
    __device__ __forceinline__ u32 count() const {
        return threadIdx.x == 0 ? atomicAdd(&progress.blocks_done, 1u) : 0;
    }
    // The last block ends the launch.
    __device__ __forceinline__ void end(u32 counted) const {
        if (threadIdx.x != 0 || counted != gridDim.x - 1) return;
        atomicExch(&progress.blocks_done, 0u);
        atomicExch(&progress.launches, launch);
    }

private:
    const SourceCall& call;
    Progress& progress;
    const u32 launch, across;

    static __device__ constexpr bool is_stored(int i) {
        return i < 2 + 2 * kBackward && (!kRms || i % 2 == 1);
    }
    __device__ __forceinline__ u64* place(int i, i64 row) const {
        return progress.statistics + i * call.rows + row;
    }
    // Waits for the statistics of a row of the band, each of 128 threads for one. False: they do not come.
    __device__ __forceinline__ bool wait(u32 band) const {
        const i64 row = (i64)band * Tile::kRows + threadIdx.x;
        if (threadIdx.x >= Tile::kRows || row >= call.rows) return true;
        for (u32 looks = 0; looks <= call.patience; looks++) {
            float all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            bool has_come = true;
            u64 found[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_stored(i)) found[i] = load_relaxed(place(i, row));
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_stored(i)) has_come &= (u32)(found[i] >> 32) == launch, all[i] = as_float((u32)found[i]);
            band_statistics()[threadIdx.x] = {all[0], all[1], all[2], all[3]};
            if (has_come) return true;
#ifdef CUPY_FP8_HOST
            host_yield();
#endif
        }
        return false;
    }
    __device__ __forceinline__ void store(i64 row, const RowStatistics& of) const {
        const float all[4] = {of.mean, of.rstd, of.mean_grad, of.mean_product};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (is_stored(i)) store_relaxed(place(i, row), (u64)launch << 32 | as_bits(all[i]));
        // Two blocks may store the same.
        if (call.rstd_out)
            atomicExch(reinterpret_cast<u32*>(call.rstd_out + row), as_bits(as_float(f32::narrow(of.rstd))));
    }

    // Adds up term(k, z, grad * weight) over the columns of `count` rows, `across` rows from one another:
    // done(k, sum) is called in one lane for each row. between(): called once, while elements come. Returns
    // true if between() did in every thread.
    template <class Term, class Done, class Between>
    __device__ __forceinline__ bool add_up(i64 row, int count, Term term, Done done, Between between) const {
        const int chunks = (int)(call.columns / 8), segments = (chunks + 31) / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // A warp has 2^turns segments of a row, kTileWarps from one another.
        const int turns = segments <= kTileWarps ? 0 : segments <= 2 * kTileWarps ? 1 : segments <= 4 * kTileWarps ? 2 : 3;
        const i64 from = row * call.columns + (int)threadIdx.x * 8, to_next = across * call.columns;
        bool result = true, called = false;
#pragma unroll 1
        for (int first = 0; first < count << turns || !called; first += kSegmentsAtOnce) {
            Eight x[kSegmentsAtOnce], other[kSegmentsAtOnce];
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) {
                const int k = first + s >> turns, turn = first + s & (1 << turns) - 1;
                const int eight = k < count && turn * kStreamThreads + (int)threadIdx.x < chunks ? 8 : 0;
                const i64 at = from + k * to_next + turn * (kStreamThreads * 8);
                load_eight<true>(x[s], call.x + at, eight);
                if (kBackward) load_eight<true>(other[s], call.grad + at, eight);
                else if (call.has_residual()) load_eight<true>(other[s], call.residual + at, eight);
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
            if (!called) result = between();
            called = true;
            u32 sums[kSegmentsAtOnce];
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) {
                const int k = first + s >> turns, turn = first + s & (1 << turns) - 1;
                const int column = (turn * kStreamThreads + (int)threadIdx.x) * 8;
                float z[8], v[8];
                widen_eight(x[s], z);
                if (kBackward) {
                    float w[8];
                    widen_eight(other[s], v);
                    load_weight<true>(call, column, column < call.columns ? 8 : 0, w);
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
                for (int i = 0; i < 8; i++) sum.add(i, term(k, z[i], kBackward ? v[i] : 0.0f));
                sums[s] = column < call.columns ? as_bits(sum.sum()) : kAbsentTerm;
            }
            float sum = as_float(fold(sums, add_bits));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, step));
            const int own = first + owned<kSegmentsAtOnce>();
            const int segment = (own & (1 << turns) - 1) * kTileWarps + warp;
            if (lane < kSegmentsAtOnce && own >> turns < count && segment < segments)
                of_segments()[(own >> turns) * segments + segment] = sum;
        }
        result = __syncthreads_and(result);
#pragma unroll 1
        for (int k = warp; k < count; k += kTileWarps) {
            TreeSum<4> sum;
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum.add(i, 4 * lane + i < segments ? of_segments()[k * segments + 4 * lane + i]
                                                   : as_float(kAbsentTerm));
            const float total = warp_tree_sum(sum.sum());
            if (lane == 0) done(k, total);
        }
        return result;
    }

    // Finds and stores the statistics of a part of a band. Returns true if between() did in every thread.
    template <class Between>
    __device__ __forceinline__ bool find(u32 band, u32 part, Between between) const {
        const i64 row = (i64)band * Tile::kRows + part;
        const int rows = left_of(call.rows - row, Tile::kRows - (int)part);
        int count = 0;
        for (int r = 0; r < rows; r += (int)across) count++;
        if constexpr (kRms && !kBackward) {
            return add_up(row, count, [](int, float z, float) { return mul_rn(z, z); },
                          [&](int k, float sum) { store(row + k * across, {0.0f, Source::rstd(call, sum), 0.0f, 0.0f}); },
                          between);
        } else {
            return find_by_sums(row, count, between);
        }
    }
    // The same by several sums, one after the other.
    template <class Between>
    __device__ __forceinline__ bool find_by_sums(i64 row, int count, Between between) const {
        __shared__ RowStatistics of_rows[Tile::kRows];
        const auto no = [] { return true; };
        __syncthreads();
        if (threadIdx.x < Tile::kRows) {
            RowStatistics of{0.0f, 0.0f, 0.0f, 0.0f};
            if (kBackward && call.rstd && (int)threadIdx.x < count) of.rstd = call.rstd[row + threadIdx.x * across];
            of_rows[threadIdx.x] = of;
        }
        __syncthreads();
        if (call.is_layer()) {
            add_up(row, count, [](int, float z, float) { return z; },
                   [&](int r, float sum) { of_rows[r].mean = Source::mean(call, sum); }, no);
            __syncthreads();
        }
        if (!kBackward || !call.rstd) {
            const auto square = [&](int r, float z, float) {
                const float centred = Source::centred(z, of_rows[r]);
                return mul_rn(centred, centred);
            };
            add_up(row, count, square, [&](int r, float sum) { of_rows[r].rstd = Source::rstd(call, sum); }, no);
            __syncthreads();
        }
        if constexpr (kBackward) {
            if (call.is_layer()) {
                add_up(row, count, [](int, float, float gw) { return gw; },
                       [&](int r, float sum) { of_rows[r].mean_grad = Source::mean(call, sum); }, no);
                __syncthreads();
            }
            return add_up(row, count,
                          [&](int r, float z, float gw) { return mul_rn(gw, Source::normed(z, of_rows[r])); },
                          [&](int r, float sum) {
                              of_rows[r].mean_product = Source::mean(call, sum);
                              store(row + r * across, of_rows[r]);
                          }, between);
        } else {
            if ((int)threadIdx.x < count) store(row + threadIdx.x * across, of_rows[threadIdx.x]);
            return __syncthreads_and(between());
        }
    }
    static __device__ __forceinline__ float* of_segments() {
        __shared__ float sums[kMostSegments];
        return sums;
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
    if (!kRms && call.bias_sums)
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
    const i64 column = tile.column + Tile::patch_column();
    const int own_columns = column < call.columns ? 8 : 0;
    Ahead ahead(call);
    TileWeights::load(call, tile.column);
    ahead.find_and_wait(at.down, at.across);
    const u32 counted = ahead.count();
    copy_async_wait();
    if constexpr (kBackward) sum_gradients(call, tile, staged);
    float w[8];
    TileWeights::get(0, w);
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
            if (!kRms) TileWeights::get(1, other);
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
    ahead.end(counted);
    return output.amax();
}
