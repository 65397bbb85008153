// Row and part of each chunk of stream.cuh, and stores of chunks.
#pragma once
#include "fused/store.cuh"
#include "fused/stream_shape.cuh"

// Position of chunks stored in the order of y, in elements, so that two arrays share it.
struct ChunkPosition {
    i64 at;                      // of the first chunk of a group

    __device__ __forceinline__ ChunkPosition(const SourceCall& call, const TilePosition& to)
        : at((to.row + row_in_step(0)) * call.columns + to.column + Tile::patch_column()) {}
    // Computes a tile's position when the tile is stored; until then it takes no registers.
    __device__ __forceinline__ ChunkPosition(const SourceCall& call, const TilePosition& to, int thread)
        : at((to.row + thread / Tile::kColumnPatches * kThreadRows) * call.columns + to.column +
             thread % Tile::kColumnPatches * 8) {}
    __device__ __forceinline__ void advance(const SourceCall& call) { at += kStepRows * call.columns; }
};

// Chunk i of a group belongs to row i % kThreadRows, and to da or db.
__device__ __forceinline__ int row_of(int chunk) { return chunk % kThreadRows; }
__device__ __forceinline__ int part_of(int chunk) { return chunk / kThreadRows; }
// The four chunks of a part, or all chunks if there are four.
__device__ __forceinline__ float (&four_chunks(float (&y)[kThreadChunks][8], int part))[4][8] {
    return *reinterpret_cast<float(*)[4][8]>(&y[part * 4]);
}

// Returns true if a weight may be multiplied into a scale: its product with the scale of an amax between
// 2^-60 and 2^60 is a normal number.
__device__ __forceinline__ bool is_moderate(float weight) {
    return (as_bits(weight) & 0x7fffffffu) - (87u << 23) < 80u << 23;
}
// Returns true if an amax lies between 2^-60 and 2^60.
__device__ __forceinline__ bool is_moderate_amax(u32 bits) { return bits - (67u << 23) < 120u << 23; }
__device__ __forceinline__ void multiply_chunks(float (&u)[4][8], const float* weights) {
#pragma unroll
    for (int chunk = 0; chunk < 4; chunk++) {
        const float weight = weights[row_of(chunk) * kRowStride];
#pragma unroll
        for (float& v : u[chunk]) v = mul_rn(v, weight);
    }
}

// Stores codes(chunk) of four chunks to `data`. left: existing rows from the group's first on.
template <class Codes>
__device__ __forceinline__ void store_chunks(const SourceCall& call, u8* data, const ChunkPosition& position,
                                             int left, Codes codes) {
    constexpr int kPartsAtOnce = 4 / kThreadRows;                    // da and db, or one of them
    const i64 half = call.half();
    u8* to = data + position.at;
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
        Chunk<OUT, 8> of_row[kPartsAtOnce];
#pragma unroll
        for (int part = 0; part < kPartsAtOnce; part++) of_row[part] = codes(part * kThreadRows + r);
        pin(to);
        if (r * kRowStride < left) {
#pragma unroll
            for (int part = 0; part < kPartsAtOnce; part++) of_row[part].store(as_global(to + part * half));
        }
        to += kRowStride * kParts * half;
    }
}

// Writes the codes of a thread's four rows of a tile (kTiled), the first of which is `row`.
template <int kRows>
__device__ __forceinline__ void write_rows(const Tile& tile, int row, const Chunk<OUT, 8> (&codes)[kRows]) {
    if constexpr (kRows == 4) write_half_patch(tile.byte_at(row, Tile::patch_column()), codes);
}
// Stores the transposed tile like store_transposed(), with kStreamThreads. end: the column after the last.
__device__ __forceinline__ void store_tile(const SourceCall& call, const TilePosition& at, const i64& end,
                                           const Tile& tile, u8* data, bool vector) {
    if (!vector) {
        store_ragged_rows<Tile::kRows, Tile::kColumns, kStreamThreads>(
            data + at.column * call.rows + at.row, call.rows, left_of(end - at.column, Tile::kColumns),
            left_of(call.rows - at.row, Tile::kRows),
            [&](int column, int patch) { return tile.chunk_at(column, patch); });
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit += kStreamThreads / kThreads) {
        const i64 row = at.column + Tile::column<16>(unit), column = at.row + Tile::row<16>();
        if (row < end && column < call.rows)
            tile.read<OUT, 16>(unit).store_whole(data + row * call.rows + column);
    }
}
