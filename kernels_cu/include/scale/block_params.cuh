// These members tell kernels of blocks with f32 scales about an array. IN is the kernel's format.
// (quantize_block_rows reads no member from `block_segments` on.)
#pragma once
#include "scale/block_scale.cuh"

struct BlockParams {
    const IN::storage* x;
    const float* noop;           // one element: 1.0 there means that nothing is written; or null
    u8 *rows_data, *columns_data;            // squares: as is, transposed
    ScaleGrid along_rows, along_columns;     // squares: two places for the same scales
    i64 rows, columns;           // of each matrix
    BlockRule rule;
    u32 block_segments;          // length of a block in segments of 32 elements: 1, 2 or 4
    u32 divide;                  // 1: elements are divided by scale_inv (tile without ALIGNED, lines)
    u32 square;                  // tile without ALIGNED: 1 for blocks of 128 x 128
    u32 stored;                  // tile without ALIGNED: ALONG_ROWS | ALONG_COLUMNS << 2; lines: 1 as x is,
                                 // 2 transposed
    u32 vector;                  // without ALIGNED: bit 0, every row of x allows loads of four elements; bits
                                 // 1 and 2 (lines: bit 1), the data along rows and along columns allow stores
                                 // of 4 bytes as x is, of 16 bytes transposed
};
