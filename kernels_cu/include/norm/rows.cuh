// Path rows: whole rows in registers, from one read. A block of threads goes through some rows, one after the
// other: the next ones come into shared memory (cp.async) while those before them are computed and stored. A
// thread reads the elements that it has copied itself.
//
// A thread has kRowChunks chunks of eight elements of a row, blockDim.x chunks from one another, of
// kRowsAtOnce rows at a time.
#pragma once
#include "fused/rows.cuh"
#include "source/norm.cuh"

constexpr int kRowsAtOnce = kBackward ? 2 : 1, kRowChunks = kBackward ? 2 : 4;
constexpr int kChunks = kRowsAtOnce * kRowChunks;
static_assert(kChunks == 4, "fold() gives each of four lanes a chunk");
// ops/quantize/norm_launches.py has these numbers too.
constexpr int kMostRowThreads = 512;

// The columns of a thread, and the rows of its block. Those of gradients adjoin, since they are summed up.
// Those of y lie far apart; the last blocks have one each, so that all multiprocessors end together.
struct RowPosition {
    int row;                     // the first of kRowsAtOnce
    int left;                    // how many rows of the block exist from this one on
    int step;                    // from these rows to the next
    int chunks;                  // of a row; none where no row exists

    // The first rows of the block.
    __device__ __forceinline__ explicit RowPosition(const SourceCall& call)
        : row(blockIdx.x), left(1), step(kBackward ? kRowsAtOnce : (int)call.row_step) {
        if (kBackward) {
            row *= call.rows_per_block;
            left = left_of(call.rows - row, (int)call.rows_per_block);
        } else if (blockIdx.x < call.row_step) {
            left = smaller((int)((u32)(call.rows - row - 1) / call.row_step) + 1, (int)call.rows_per_block);
        } else {
            row += call.row_step * (call.rows_per_block - 1);
        }
        chunks = left ? (int)(call.columns / 8) : 0;
    }
    __device__ __forceinline__ int column(int j) const {
        return (j * (int)blockDim.x + (int)threadIdx.x) * 8;
    }
    __device__ __forceinline__ bool has_column(int j) const { return column(j) < chunks * 8; }
    __device__ __forceinline__ bool has_row(int r) const { return r == 0 || r < left; }
    __device__ __forceinline__ bool has(int chunk) const {
        return has_row(chunk / kRowChunks) && has_column(chunk % kRowChunks);
    }
    // Where the thread's first element of these rows lies, and a chunk from there on.
    __device__ __forceinline__ i64 first() const { return row * (i64)(chunks * 8) + (int)threadIdx.x * 8; }
    __device__ __forceinline__ i64 at(int chunk) const {
        return chunk / kRowChunks * (i64)(chunks * 8) + chunk % kRowChunks * (int)blockDim.x * 8;
    }
    __device__ __forceinline__ void advance() { row += step, left -= kRowsAtOnce; }
};

// The next rows, in shared memory: x, BACKWARD grad, residual.
class NextRows {
public:
    __device__ __forceinline__ explicit NextRows(u8* shared) : shared(shared + threadIdx.x * 16) {}
    // What follows in shared memory.
    __device__ __forceinline__ u8* end(const SourceCall& call) const {
        return shared - threadIdx.x * 16
            + (1 + kBackward + call.has_residual()) * (kChunks * kLoads * 16) * (int)blockDim.x;
    }
    __device__ __forceinline__ void request(const SourceCall& call, const RowPosition& at) const {
        request_array(at, 0, call.x);
        if constexpr (kBackward) request_array(at, 1, call.grad);
        if (call.has_residual()) request_array(at, 1 + kBackward, call.residual);
        copy_async_commit();
    }
    // Zeros where a chunk does not exist.
    __device__ __forceinline__ void read(const RowPosition& at, int array, int chunk, float (&v)[8]) const {
        Eight raw;
#pragma unroll
        for (int l = 0; l < kLoads; l++) {
            raw[l] = {};
            if (at.has(chunk)) raw[l] = Chunk<IN, kLoad>::load_shared(place(array, chunk, l));
        }
        widen_eight(raw, v);
    }
    static constexpr int kResidual = 1 + kBackward;

private:
    u8* shared;                                                      // this thread's part

    __device__ __forceinline__ u8* place(int array, int chunk, int load) const {
        return shared + ((array * kChunks + chunk) * kLoads + load) * 16 * (int)blockDim.x;
    }
    __device__ __forceinline__ void request_array(const RowPosition& at, int array,
                                                  const IN::storage* from) const {
        from += at.first();
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            if (at.has(c))
#pragma unroll
                for (int l = 0; l < kLoads; l++)
                    copy_async<(kLoads > 1)>(place(array, c, l), from + at.at(c) + l * kLoad);
    }
};

// A thread's floats in shared memory: eight for each `index`, which no other thread reads.
struct ThreadFloats {
    u8* shared;

    __device__ __forceinline__ void put(int index, const float (&v)[8]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared_whole(place(index, half), as_bits(v[half * 4]), as_bits(v[half * 4 + 1]),
                               as_bits(v[half * 4 + 2]), as_bits(v[half * 4 + 3]));
    }
    __device__ __forceinline__ void get(int index, float (&v)[8]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto four = Chunk<f32, 4>::load_shared(place(index, half));
#pragma unroll
            for (int i = 0; i < 4; i++) v[half * 4 + i] = as_float(four.word[i]);
        }
    }
    // the first byte after `count` of them
    __device__ __forceinline__ u8* end(int count) const { return shared + count * 32 * (int)blockDim.x; }

private:
    __device__ __forceinline__ u8* place(int index, int half) const {
        return shared + ((index * 2 + half) * (int)blockDim.x + (int)threadIdx.x) * 16;
    }
};
// The weights of a thread's columns, 0 where there are none.
__device__ __forceinline__ void keep_weights(const SourceCall& call, const RowPosition& at,
                                             const ThreadFloats& weights) {
#pragma unroll
    for (int j = 0; j < kRowChunks; j++) {
        float v[8];
        load_weight<true>(call, at.column(j), at.has_column(j) ? 8 : 0, v);
        weights.put(j, v);
    }
}

// Sums over rows' elements, by the tree: those of 32 neighbouring chunks in a warp, and these segments by
// every warp of the block. Two sets of segments take turns, so that a sum has one barrier.
class RowTotals {
public:
    __device__ __forceinline__ RowTotals() : turn(0) {
        for (int i = threadIdx.x; i < 2 * kSegments; i += blockDim.x) shared()[i] = as_float(kAbsentTerm);
        __syncthreads();
    }
    // sums: a sum of each of this thread's chunks, -0 where it does not exist. Returns finish(sum) of the
    // rows.
    template <class Finish>
    __device__ __forceinline__ void find(const float (&sums)[kChunks], Finish finish,
                                         float (&totals)[kRowsAtOnce]) {
        u32 bits[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; c++) bits[c] = as_bits(sums[c]);
        float own = rest_of_warp(fold(bits, add_bits));              // of chunk owned<4>()
        if (blockDim.x == 32) {
            // Chunks 0 and 1 are owned by lanes that are 2 apart, 0 and 2 by lanes that are 1 apart.
            own = add_rn(own, __shfl_xor_sync(~0u, own, 2));
            if (!kBackward) own = add_rn(own, __shfl_xor_sync(~0u, own, 1));
            exchange(finish(own), totals);
            return;
        }
        float* const segments = shared() + turn * kSegments;
        const int chunk = owned<4>();
        // The segments of a row follow one another.
        if (threadIdx.x % 32 < 4)
            segments[chunk / kRowChunks * kRowSegments + chunk % kRowChunks * (int)(blockDim.x / 32) +
                     threadIdx.x / 32] = own;
        turn ^= 1;
        __syncthreads();
        const int lane = threadIdx.x % 32;
        if constexpr (kBackward) {
            const u32 rows[2] = {as_bits(segments[lane]), as_bits(segments[kRowSegments + lane])};
            own = rest_of_warp(fold(rows, add_bits));
        } else {
            own = warp_tree_sum(add_rn(segments[2 * lane], segments[2 * lane + 1]));
        }
        exchange(finish(own), totals);
    }

private:
    static constexpr int kRowSegments = kMostRowThreads / 32 * kRowChunks;
    static constexpr int kSegments = kRowsAtOnce * kRowSegments;
    static_assert(kRowSegments == (kBackward ? 32 : 64), "a lane has one, or two");
    int turn;

    static __device__ __forceinline__ float* shared() {
        __shared__ __align__(16) float segments[2 * kSegments];
        return segments;
    }
    // Adds up the lanes that own the same chunk.
    static __device__ __forceinline__ float rest_of_warp(u32 of_four_lanes) {
        float sum = as_float(of_four_lanes);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum = add_rn(sum, __shfl_xor_sync(~0u, sum, step));
        return sum;
    }
    // own: of row threadIdx.x % kRowsAtOnce.
    static __device__ __forceinline__ void exchange(float own, float (&totals)[kRowsAtOnce]) {
        totals[0] = own;
        if constexpr (kBackward) {
            const float other = __shfl_xor_sync(~0u, own, 1);
            const bool second = threadIdx.x & 1;
            totals[0] = second ? other : own, totals[1] = second ? own : other;
        }
    }
};

// Returns a sum of each chunk: of term(chunk, i) over its elements.
template <class Term>
__device__ __forceinline__ void sum_chunks(const RowPosition& at, Term term, float (&sums)[kChunks]) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        TreeSum<8> sum;
#pragma unroll
        for (int i = 0; i < 8; i++) sum.add(i, term(c, i));
        sums[c] = at.has_column(c % kRowChunks) ? sum.sum() : as_float(kAbsentTerm);
    }
}

// Mean and 1 / sigma of the rows of z. given: 1 / sigma is `rstd`. Without gradients, z becomes z - mean.
__device__ __forceinline__ void find_statistics(const SourceCall& call, const RowPosition& at,
                                                float (&z)[kChunks][8], RowTotals& totals, bool given,
                                                const float (&rstd)[kRowsAtOnce],
                                                RowStatistics (&of)[kRowsAtOnce]) {
    float sums[kChunks], found[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) of[r] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (call.is_layer()) {
        sum_chunks(at, [&](int c, int i) { return z[c][i]; }, sums);
        totals.find(sums, [&](float sum) { return Source::mean(call, sum); }, found);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) of[r].mean = found[r];
        if (!kBackward)
#pragma unroll
            for (auto& chunk : z)
#pragma unroll
                for (float& each : chunk) each = Source::centred(each, of[0]);
    }
    if (given) {
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; r++) of[r].rstd = rstd[r];
        return;
    }
    sum_chunks(at, [&](int c, int i) {
        const float centred = kBackward ? Source::centred(z[c][i], of[c / kRowChunks]) : z[c][i];
        return mul_rn(centred, centred);
    }, sums);
    totals.find(sums, [&](float sum) { return Source::rstd(call, sum); }, found);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) of[r].rstd = found[r];
}

// Stores a thread's codes.
__device__ __forceinline__ void put_codes(u8* data, const RowPosition& at, int chunk,
                                          const Chunk<OUT, 8>& codes) {
    if (at.has(chunk)) codes.store(data + at.first() + at.at(chunk));
}

// The rows behind the last have only scales, which are 0.
template <class Output, class Params>
__device__ __forceinline__ void pad_rows(const Output& output, const Params& p, const SourceCall& call,
                                         const RowPosition& at) {
#pragma unroll 1
    for (i64 row = call.rows + blockIdx.x; row < call.all_rows; row += gridDim.x)
        output.pad(p, at, (int)row);
}
