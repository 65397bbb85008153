// Patches of 8 x 8 elements of the result: on path any, and where rows come through registers.
#pragma once
#include "fused/program.cuh"

// Position of a thread's patch.
struct PatchPosition {
    i64 row, column;
    int rows_left, columns_left;

    __device__ __forceinline__ PatchPosition(const SourceCall& call, const TilePosition& at)
        : row(at.row + Tile::patch_row()), column(at.column + Tile::patch_column()) {
        rows_left = left_of(call.rows - row, 8), columns_left = left_of(call.columns - column, 8);
    }
    __device__ __forceinline__ int columns_of(int r) const { return r < rows_left ? columns_left : 0; }
};
