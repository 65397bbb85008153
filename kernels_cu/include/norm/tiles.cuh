// Path plain: tiles of 128 x 128 elements, in every direction, from one read of memory. The statistics of a
// row take all its columns, so the rows of a band of tiles are read before, and come from the L2 when the
// tiles are. Every block of threads finds the statistics of a part of a band that comes later, then
// quantises its tile: on an H200 that is faster than two launches, which read everything twice from memory
// (docs/lab-notes). norm/ahead.cuh says how.
#pragma once
#include "norm/ahead.cuh"

static_assert(!kTiled || sizeof(IN::storage) == 2, "four rows of a thread are staged at once");

// Bytes of a tile of one array in shared memory.
constexpr int kTileBytes = Tile::kRows * Tile::kColumns * 2;

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

// Sums of terms over a tile's rows, column by column. An absent row's terms are -0.
class TileSums {
public:
    __device__ __forceinline__ void add(int r, int i, float term) { own[i].add(r, term); }
    // Stores a row of sums. The whole block calls it.
    __device__ __forceinline__ void store(const SourceCall& call, const TilePosition& tile, float* to) const {
        __shared__ __align__(16) float of_warps[kTileWarps][Tile::kColumns];
        static_assert(Tile::kColumnPatches == 16, "a warp has eight rows");
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float sum = add_rn(own[i].sum(), __shfl_xor_sync(~0u, own[i].sum(), 16));
            if (threadIdx.x % 32 < 16) of_warps[threadIdx.x / 32][Tile::patch_column() + i] = sum;
        }
        __syncthreads();
        if (threadIdx.x < Tile::kColumns && tile.column + threadIdx.x < call.columns) {
            TreeSum<kTileWarps> sum;
#pragma unroll
            for (int w = 0; w < kTileWarps; w++) sum.add(w, of_warps[w][threadIdx.x]);
            const i64 at = tile.row / Tile::kRows * call.columns + tile.column + threadIdx.x;
            to[at] = as_float(f32::narrow(sum.sum()));
        }
        __syncthreads();
    }

private:
    TreeSum<kThreadRows> own[8];
};
// Outputs in blocks keep a thread's values until they have an amax, and leave no registers for sums.
constexpr bool kSumsFirst = kBackward && kScaling != Scaling::one_scale;

// The gradients of weight and bias over a tile's rows.
struct TileGradientSums {
    TileSums of_weight, of_bias;

    __device__ __forceinline__ void add(int r, int i, bool exists, float z, float grad,
                                        const RowStatistics& of) {
        of_weight.add(r, i, mul_rn(grad, Source::normed(z, of)));
        if (!kRms) of_bias.add(r, i, exists ? grad : as_float(kAbsentTerm));
    }
    __device__ __forceinline__ void store(const SourceCall& call, const TilePosition& tile) const {
        if (call.weight_sums) of_weight.store(call, tile, call.weight_sums);
        if (!kRms && call.bias_sums) of_bias.store(call, tile, call.bias_sums);
    }
};

// The values of row r of a thread.
__device__ __forceinline__ void find_values(const SourceCall& call, const TilePosition& tile,
                                            const StagedTile& staged, const float (&w)[8], int r, bool exists,
                                            TileGradientSums& sums, float (&values)[8]) {
    const RowStatistics of = band_statistics()[row_in_step(r)];
    const i64 to = (tile.row + row_in_step(r)) * call.columns + tile.column + Tile::patch_column();
    float z[8], other[8];
    staged.read(r, 0, z);
    if constexpr (kBackward) {
        staged.read(r, 1, other);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            values[i] = Source::gradient(z[i], other[i], of, w[i]);
            if (!kSumsFirst) sums.add(r, i, exists, z[i], other[i], of);
        }
        if (call.has_residual()) {
            staged.read(r, 2, other);
#pragma unroll
            for (int i = 0; i < 8; i++) values[i] = add_rn(values[i], other[i]);
        }
    } else {
        if (call.has_residual()) {
            staged.read(r, 1, other);
            add_residual<true>(call, other, to, exists ? 8 : 0, z);
        }
        if (!kRms) TileWeights::get(1, other);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = Source::value(z[i], of, w[i], other[i]);
        round_through(call, values);
        if (kNorms == Norms::every && call.normed)
            store_eight<true, IN>(call.normed + to, values, exists ? 8 : 0);
    }
    // What does not exist is 0, or NaN by a weight; only a bias or amaxes that keep NaN would be seen.
    if ((kBackward || !kRms || kScaling == Scaling::mx_blocks) && !exists)
#pragma unroll
        for (float& each : values) each = 0.0f;
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
    const int left = own_columns ? left_of(call.rows - tile.row - row_in_step(0), kThreadRows) : 0;
    TileGradientSums sums;
    if constexpr (kSumsFirst) {
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            float z[8], grad[8];
            staged.read(r, 0, z), staged.read(r, 1, grad);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sums.add(r, i, r < left, z[i], grad[i], band_statistics()[row_in_step(r)]);
        }
        sums.store(call, tile);
    }
    float w[8];
    TileWeights::get(0, w);
    // The output's memory has the residual of gradients before.
    Output output(p, tile, shared + (1 + (kBackward || call.has_residual())) * kTileBytes, more...);
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
        float values[1][8];
        find_values(call, tile, staged, w, r, r < left, sums, values[0]);
        output.take(r, values);
    }
    if (kBackward && !kSumsFirst) sums.store(call, tile);
    if (kBackward && call.has_residual()) __syncthreads();
    const ChunkPosition position(call, tile);
    output.store(p, at, 0, position, left, nullptr);
    ahead.end(counted);
    return output.amax();
}
