// Kernel arguments of casts with f32 block scales. IN is the kernel's format. (quantize_block_rows reads no
// member from `subblocks_per_block` on.)
#pragma once
#include "scale/block_scale.cuh"

struct BlockParams {
    const IN::storage* x;
    const float* noop;           // one element: 1.0 = write nothing; or null
    u8 *rows_data, *columns_data;            // squares: as is, transposed
    ScaleGrid along_rows, along_columns;     // squares: two places for the same scales
    i64 rows, columns;           // of each matrix
    BlockRule rule;
    u32 subblocks_per_block;     // length of a block in subblocks of 32 elements: 1, 2 or 4
    // defines in programs with ALIGNED: the next three
    u32 divide;                  // 1: elements are divided by scale_inv
    u32 square;                  // 1: blocks are 128 x 128
    u32 stored;                  // ALONG_ROWS | ALONG_COLUMNS << 2; of whole vectors 1 in the order of x, 2
                                 // transposed
    u32 vector;                  // bit 0, without ALIGNED: every row of x allows loads of four elements. Bits
                                 // 1 and 2 (of whole vectors bit 1): the data along rows and along columns
                                 // allow stores of 4 bytes in the order of x, of 16 bytes transposed.
};
