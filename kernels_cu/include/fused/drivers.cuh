// Drivers: the ways through the tiles of a result. Each hands the values of rows to an output of the scaling,
// which quantises and stores them:
//
//   Output(p, …)              p: the kernel's parameters
//   take(…, values)           takes eight values of a row: those of the result's kParts parts
//   store(p, …)               stores what it has taken: of a tile, of a group of rows, or of a patch
//
// Outputs get p anew each time: with references to it, programs with options spilled on sm_100. Rows through
// registers have a driver of their own (cast_rows in one_scale.cuh).
#pragma once
#include "fused/patch_position.cuh"
#include "fused/stream.cuh"
#include "fused/tile_sums.cuh"

// the stages come first in dynamic shared memory
constexpr int kStreamBytes = kStages * kStageBytes;

// Paths from options on: every tile of a thread block, in every direction. Call: SourceCall, of a source that
// declares an OptionStream.
template <class Output, class Call, class Params, class... More>
__device__ __forceinline__ u32 stream_with_options(const Params& p, const Call& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    StreamPosition at(call, p.tiles);
    OptionStream<Call> rows(call, at.tile(), p.tiles, shared);
    Output output(p, shared + kStreamBytes, more...);
    const float* const first_weight = StagedRows::shared_probs() + row_in_step(0);
    const float* weights = first_weight;
#pragma unroll 1
    for (bool more_tiles = at.down * (i64)Tile::kRows < call.rows; more_tiles;
         more_tiles = at.advance(call, p.tiles), weights += kStepRows) {
        // f32 blocks have no register to keep this from tile to tile; the others have none to recompute it.
        if (kScaling == Scaling::f32_blocks) weights = first_weight + at.down % p.tiles * Tile::kRows;
        rows.each(at, weights, [&](int r, const float (&values)[kParts][8]) {
            output.take(r, values, rows.left);
        });
        output.store(p, at, rows);
    }
    StagedRows::finish();
    return output.amax();
}

// Paths rows, tiles and plain: every group of rows of a thread block; a tile where columns have scales.
template <class Output, class Call, class Params, class... More>
__device__ __forceinline__ u32 stream(const Params& p, const Call& call, More... more) {
    extern __shared__ __align__(16) u8 shared[];
    StreamPosition at(call, p.tiles);
    const auto first = at.tile();
    Stream<Source> rows(call, first, p.tiles, shared);
    ChunkPosition position(call, first);
    Output output(p, first, shared + kStreamBytes, more...);
    const float* weights = StagedRows::shared_probs() + row_in_step(0);
    const int rows_left = left_of(call.rows - first.row, (int)p.tiles * Tile::kRows);
    constexpr int kRounding = Output::kWholeTiles ? Tile::kRows : kStepRows;
    const int steps = (rows_left + kRounding - 1) / kRounding * (kRounding / kStepRows);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        rows.each(at, Output::kWholeTiles ? step % kSteps : step, weights,
                  [&](int r, const float (&values)[kParts][8]) { output.take(r, values); });
        output.store(p, at, step, position, rows.left + kStepRows, weights);
        if (Output::kWholeTiles && step % kSteps == kSteps - 1) at.down++;
        position.advance(call), output.advance(p);
        weights += kStepRows;
    }
    StagedRows::finish();
    return output.amax();
}

// Path any: one patch per thread.
template <class Output, class Call, class Params, class... More>
__device__ __forceinline__ u32 patches(const Params& p, const Call& call, More... more) {
    // With one scale, one thread block is launched even if there are no elements.
    const bool empty = kOneScale && (!call.rows || !call.columns);
    const auto at =
        empty ? TilePosition{} : TilePosition::of_block<Tile, false>(blockIdx.x, call.rows, call.columns);
    const PatchPosition patch(call, at);
    Output output(p, more...);
    each_row(call, patch, [&](int r, const EightValues& values) { output.take(p, patch, r, values); });
    output.store(p, at, patch);
    return output.amax();
}
