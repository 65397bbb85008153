// Statistics of the rows of bands of tiles, found ahead (norm/tiles.cuh).
//
// A band's rows are shared out into as many parts as it has tiles. A block finds that part of the band that
// comes `lead` later, which is its tile's; the first blocks find that of their own band too.
// GPUs start blocks in their order, so others find the statistics that a block needs before it starts; should
// they not come, it finds those of its band itself, which are the same.
#pragma once
#include "fused/drivers.cuh"
#include "source/norm.cuh"

// A statistic of a row, in the order of RowStatistics, and the launch that has stored it: whoever reads both
// at once needs no other flag.
struct Progress {                // zero before the first launch
    u32 launches;                // that are done
    u32 blocks_done;             // of this launch
    u64 statistics[1];           // [4, rows]; of RMSNorm those that are not 0
};

// The compiler of CUDA 12 takes more registers.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
constexpr bool kFewRegisters = false;
#else
constexpr bool kFewRegisters = true;
#endif
// Two blocks share a multiprocessor where the compiler does not spill with 64 registers a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kTwoTiles = kBackward ? kRms && (kFewRegisters || kScaling != Scaling::mx_blocks)
    : kNorms == Norms::rms || (kNorms == Norms::residual && kScaling == Scaling::one_scale);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kTwoTiles = kNorms == Norms::rms && !kBackward && kScaling != Scaling::mx_blocks;
#else
constexpr bool kTwoTiles = kNorms == Norms::rms && !kBackward;
#endif
// segments of 32 chunks that a warp sums up at a time, as many as registers allow; warps of a block
constexpr int kSegmentsAtOnce = kTwoTiles && (kBackward || kNorms == Norms::residual) ? 2 : 4;
constexpr int kTileWarps = kStreamThreads / 32;
// segments of a part, at most: those of 128 short rows, or of one row of 2^15 columns
constexpr int kMostSegments = 256;

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
          launch(load_relaxed(&progress.launches) + 1) {}

    // Finds this block's parts, and waits for the statistics of its band. The whole block calls it.
    __device__ __forceinline__ void find_and_wait(u32 band, u32 part) {
        // First the part of the block's own band, if nobody has found it ahead; then the one ahead: while its
        // rows come, the statistics of the own band do. Should they not come, all parts of that band.
        constexpr u32 kOwn = 0, kAhead = 1;
#pragma unroll 1
        for (u32 step = band < call.lead ? kOwn : kAhead; step <= kAhead + call.parts; step++) {
            const bool ahead = step == kAhead;
            const u32 own_part = step > kAhead ? step - kAhead - 1 : part;
            const bool has_come = find(band + (ahead ? call.lead : 0), own_part,
                                       [&] { return !ahead || wait(band); });
            if (ahead && has_come) return;
            __syncthreads();                                         // The next part uses the same memory.
        }
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
    const u32 launch;

    static __device__ constexpr bool is_stored(int i) {
        return i < 2 + 2 * kBackward && (!kRms || i % 2 == 1);
    }
    // The first row of a part, from its band's on: part * 128 / parts.
    __device__ __forceinline__ int first_row(u32 part) const {
        return (int)((u64)(part * Tile::kRows) * call.parts_inverse >> 24);
    }
    __device__ __forceinline__ u64* place(int i, i64 row) const {
        return progress.statistics + i * call.rows + row;
    }
    // Waits for the statistics of a row of the band, each of 128 threads for one. False: they do not come.
    __device__ __forceinline__ bool wait(u32 band) const {
        const i64 row = (i64)band * Tile::kRows + threadIdx.x;
        if (threadIdx.x >= Tile::kRows) return true;
        // An absent row has n = -0, so that its products are absent terms.
        band_statistics()[threadIdx.x] = {0.0f, -0.0f, 0.0f, 0.0f};
        if (row >= call.rows) return true;
        for (u32 looks = 0; looks <= call.patience; looks++) {
            float all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            bool has_come = true;
            u64 found[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_stored(i)) found[i] = load_relaxed(place(i, row));
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_stored(i))
                    has_come &= (u32)(found[i] >> 32) == launch, all[i] = as_float((u32)found[i]);
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
            store_relaxed(reinterpret_cast<u32*>(call.rstd_out + row), f32::narrow(of.rstd));
    }

    // A thread's chunks of some segments. Those of a part lie row after row; warps take them in turns.
    struct Segments {
        const SourceCall& call;
        const int all;
        Eight x[kSegmentsAtOnce], other[kSegmentsAtOnce];

        __device__ __forceinline__ Segments(const SourceCall& call, int rows)
            : call(call), all(rows * of_row()) {}
        __device__ __forceinline__ int of_row() const { return (int)call.segments; }
        __device__ __forceinline__ int columns() const { return (int)call.columns; }
        __device__ __forceinline__ int turns() const { return (all + kTileWarps - 1) / kTileWarps; }
        __device__ __forceinline__ int at(int turn) const {
            return turn * kTileWarps + (int)threadIdx.x / 32;
        }
        // at / of_row, since at * of_row < 2^16.
        __device__ __forceinline__ int row(int turn) const {
            return (int)((u32)at(turn) * call.segments_inverse >> 16);
        }
        __device__ __forceinline__ int column(int turn) const {
            return (at(turn) - row(turn) * of_row()) * 256 + (int)threadIdx.x % 32 * 8;
        }
        // first_row: where the part's first row begins.
        __device__ __forceinline__ void load(int first, i64 first_row) {
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) {
                const int turn = first + s, chunk = row(turn) * columns() + column(turn);
                const int eight = at(turn) < all && column(turn) < columns() ? 8 : 0;
                load_eight<true>(x[s], call.x + first_row + chunk, eight);
                if (kBackward) load_eight<true>(other[s], call.grad + first_row + chunk, eight);
                else if (call.has_residual())
                    load_eight<true>(other[s], call.residual + first_row + chunk, eight);
            }
#ifndef CUPY_FP8_HOST
            // All of them are requested before anything waits.
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++)
#pragma unroll
                for (auto& each : x[s])
#pragma unroll
                    for (u32& word : each.word) asm volatile("" : "+r"(word));
#endif
        }
        // Returns the sum of term(row, z, grad * weight) over a chunk, as bits.
        template <class Term>
        __device__ __forceinline__ u32 sum(int first, int s, Term term) const {
            const int turn = first + s;
            if (turn >= turns()) return kAbsentTerm;
            const bool exists = column(turn) < columns();
            float z[8], v[8];
            widen_eight(x[s], z);
            if (kBackward) {
                float w[8];
                widen_eight(other[s], v);
                load_weight<true>(call, column(turn), exists ? 8 : 0, w);
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
            for (int i = 0; i < 8; i++) sum.add(i, term(row(turn), z[i], kBackward ? v[i] : 0.0f));
            // Squares are not negative: +0 adds up as absent terms do.
            return exists || (kRms && !kBackward) ? as_bits(sum.sum()) : kAbsentTerm;
        }
    };

    // Adds up term(k, z, grad * weight) over the columns of `count` rows from `row` on. done(k, sum): called
    // in one lane for each row. between(): called once, while elements come. Returns true if all of them did.
    template <class Term, class Done, class Between>
    __device__ __forceinline__ bool add_up(i64 row, int count, Term term, Done done, Between between) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Segments own(call, count);
        bool result = true, called = false;
#pragma unroll 1
        for (int first = 0; first < own.turns() || !called; first += kSegmentsAtOnce) {
            own.load(first, row * call.columns);
            if (!called) result = between();
            called = true;
            u32 sums[kSegmentsAtOnce];
#pragma unroll
            for (int s = 0; s < kSegmentsAtOnce; s++) sums[s] = own.sum(first, s, term);
            float sum = as_float(fold(sums, add_bits));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, step));
            const int folded = own.at(first + owned<kSegmentsAtOnce>());
            if (lane < kSegmentsAtOnce && folded < own.all) of_segments()[folded] = sum;
        }
        result = __syncthreads_and(result);
#pragma unroll 1
        for (int k = warp; k < count; k += kTileWarps) {
            TreeSum<4> sum;
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum.add(i, 4 * lane + i < own.of_row() ? of_segments()[k * own.of_row() + 4 * lane + i]
                                                     : as_float(kAbsentTerm));
            const float total = warp_tree_sum(sum.sum());
            if (lane == 0) done(k, total);
        }
        return result;
    }

    // Finds and stores the statistics of a part of a band. Returns true if between() did in every thread.
    template <class Between>
    __device__ __forceinline__ bool find(u32 band, u32 part, Between between) const {
        const int first = first_row(part);
        const i64 row = (i64)band * Tile::kRows + first;
        const int count = left_of(call.rows - row, first_row(part + 1) - first);
        if constexpr (kRms && !kBackward) {
            const auto done = [&](int k, float sum) {
                store(row + k, {0.0f, Source::rstd(call, sum), 0.0f, 0.0f});
            };
            return add_up(row, count, [](int, float z, float) { return mul_rn(z, z); }, done, between);
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
            if (kBackward && call.rstd && (int)threadIdx.x < count)
                of.rstd = call.rstd[row + threadIdx.x];
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
            add_up(row, count, square,
                   [&](int r, float sum) { of_rows[r].rstd = Source::rstd(call, sum); }, no);
            __syncthreads();
        }
        if constexpr (kBackward) return find_means(row, count, of_rows, between);
        if ((int)threadIdx.x < count) store(row + threadIdx.x, of_rows[threadIdx.x]);
        return __syncthreads_and(between());
    }
    // Finds the means that gradients need, and stores all statistics.
    template <class Between>
    __device__ __forceinline__ bool find_means(i64 row, int count, RowStatistics* of_rows,
                                               Between between) const {
        if (call.is_layer()) {
            add_up(row, count, [](int, float, float gw) { return gw; },
                   [&](int r, float sum) { of_rows[r].mean_grad = Source::mean(call, sum); },
                   [] { return true; });
            __syncthreads();
        }
        const auto product = [&](int r, float z, float gw) {
            return mul_rn(gw, Source::normed(z, of_rows[r]));
        };
        const auto done = [&](int r, float sum) {
            of_rows[r].mean_product = Source::mean(call, sum);
            store(row + r, of_rows[r]);
        };
        return add_up(row, count, product, done, between);
    }
    static __device__ __forceinline__ float* of_segments() {
        __shared__ float sums[kMostSegments];
        return sums;
    }
};
