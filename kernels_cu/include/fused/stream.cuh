// Computes rows of results in chunks of eight elements. x and grad come through shared memory (cp.async):
// copies in flight take no registers, and fetch the next tile while this one is stored.
//
// A block of kStreamThreads threads owns 128 columns of each part of the result, and several tiles of 128
// rows one below the other. A thread reads only elements that it has copied itself, so it waits only for its
// own copies. Absent rows and columns are zeros.
#pragma once
#include "fused/chunks.cuh"

// A thread's shared memory: kStages rows of kArrays arrays.
class StagedRows {
public:
    // rows from this thread's next one to the end
    int left;

    // Waits, after the last group, for the copies requested beyond it, before another thread block gets the
    // shared memory.
    static __device__ __forceinline__ void finish() { copy_async_wait(); }
    // Weights of the thread block's rows in shared memory; 1 without probs.
    static __device__ __forceinline__ float* shared_probs() {
        __shared__ __align__(16) float probs[kMostRows];
        return probs;
    }

protected:
    i64 half;
    u8* staged;                                                      // this thread's part of the stages
    const IN::storage *x, *grad;                                     // next row to request
    int stage;                                                       // of the group's first row
    const SourceCall& call;

    __device__ __forceinline__ StagedRows(const SourceCall& call, u8* shared)
        : half(call.half()), staged(shared + threadIdx.x * 16), stage(0), call(call) {}
    __device__ __forceinline__ u8* stage_of(int r, int array) const {
        const int number = kThreadRows % kStages ? (stage + r) % kStages : r % kStages;
        return staged + number * kStageBytes + array * (kLoads * kLoadBytes);
    }
    __device__ __forceinline__ void read(int r, int array, Eight& to) const {
#pragma unroll
        for (int l = 0; l < kLoads; l++)
            to[l] = Chunk<IN, kLoad>::load_shared(stage_of(r, array) + l * kLoadBytes);
    }
    // Returns true if row r of a request exists, and how many rows below it the next one is.
    __device__ __forceinline__ bool exists(int r) const {
        return left > r / kThreadRows * kStepRows + r % kThreadRows * kRowStride;
    }
    static __device__ __forceinline__ int rows_to_next(int r) {
        return (r + 1) % kThreadRows ? kRowStride : kStepRows - (kThreadRows - 1) * kRowStride;
    }
};

// Multiplies eight elements of y by their row's weight. With one scale, which is bound by instructions,
// skipped where rows have no weights.
template <class S>
__device__ __forceinline__ void multiply_by_weight(const SourceCall& call, const float* of_row,
                                                   float (&y)[8]) {
    if (kOneScale && !call.probs) return;
    const float weight = *of_row;
#pragma unroll
    for (float& v : y) v = S::weighted(v, weight);
}

// Rows of calls without options. `left` is 0 where the columns do not exist. S: the Source.
template <class S>
class Stream : public StagedRows {
public:
    // at: the thread block's first tile.
    __device__ __forceinline__ Stream(const SourceCall& call, const TilePosition& at, int tiles, u8* shared)
        : StagedRows(call, shared) {
        const i64 row = at.row + row_in_step(0), column = at.column + Tile::patch_column();
        left = column < half ? left_of(call.rows - row, tiles * Tile::kRows - row_in_step(0)) : 0;
        x = call.x + row * (S::kHalves * half) + column;
        if constexpr (kBackward) grad = call.grad + row * half + column;
        request(0);
        if (kStages > kRowsPerRequest) request(kRowsPerRequest);
        const i64 own = at.row + threadIdx.x;
        shared_probs()[threadIdx.x] = call.probs && own < call.rows ? call.probs[own] : 1.0f;
        __syncthreads();
    }
    // Computes the rows of a group, calling use(r, values) for each. at: the thread block's tile; step: index
    // of the group in it; weights: those of the group's rows.
    template <class Use>
    __device__ __forceinline__ void each(const StreamPosition& at, int step, const float* weights, Use use) {
        u32 sums[kThreadRows];
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            if (r % kRowsPerRequest == 0) copy_async_wait<(kStages > kRowsPerRequest)>();
            float v[kArrays][8], terms[8], values[kParts][8];
            read_row(r, v, terms);
            if (r % kRowsPerRequest == kRowsPerRequest - 1) request(r + 1 - kRowsPerRequest + kStages);
            if constexpr (kBackward) {
                sums[r] = as_bits(compute<S>(call.sums, weights[r * kRowStride], v, terms, values));
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) values[0][i] = S::value(v, i, terms[i]);
                if (!kWeighsScales) multiply_by_weight<S>(call, weights + r * kRowStride, values[0]);
            }
            use(r, values);
        }
        stage = (stage + kThreadRows) % kStages;
        if constexpr (kBackward) {
            if (call.sums)
                store_sums(call, sums, at.tile().row + step * kStepRows + row_in_step(0), kRowStride,
                           at.across, left);
        }
        left -= kStepRows;
    }

private:
    __device__ __forceinline__ void read_row(int r, float (&v)[kArrays][8], float (&terms)[8]) const {
        Eight raw;
        read(r, 0, raw);
        widen_eight(raw, v[0]);
#pragma unroll
        for (int i = 0; i < 8; i++) terms[i] = v[0][i];
        S::terms(terms, raw);
#pragma unroll
        for (int k = 1; k < kArrays; k++) {
            read(r, k, raw);
            widen_eight(raw, v[k]);
        }
    }
    // Requests kRowsPerRequest rows from r on, of this or the following groups.
    __device__ __forceinline__ void request(int begin) {
        // through the L1 where a thread's copies are halves of sectors
        constexpr bool kThroughL1 = kLoads > 1;
        // f32 re-reads it: with one more value in registers its gradients spill on sm_120 (CUDA 12)
        const i64 half = kLoads > 1 ? call.half() : this->half;
#pragma unroll
        for (int r = begin; r < begin + kRowsPerRequest; r++) {
            const bool exist = exists(r);
            const int rows = rows_to_next(r);
#pragma unroll
            for (int l = 0; l < kLoads; l++)
#pragma unroll
                for (int k = 0; k < S::kHalves; k++)
                    copy_async<kThroughL1>(stage_of(r, k) + l * kLoadBytes,
                                           x + k * this->half + l * kLoad, exist);
            x += rows * (S::kHalves * half);
            pin(x);
            if constexpr (kBackward) {
#pragma unroll
                for (int l = 0; l < kLoads; l++)
                    copy_async<kThroughL1>(stage_of(r, S::kHalves) + l * kLoadBytes, grad + l * kLoad,
                                           exist);
                grad += rows * half;
                pin(grad);
            }
        }
        copy_async_commit();
    }
};

// Rows of calls with options; optional in a source.
template <class Call> class OptionStream;
