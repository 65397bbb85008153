"""How scales of blocks are stored: shapes and padding (pure arithmetic; the bytes are in docs/layouts.md).

A direction's scales form, per matrix, a grid of `outer` lines by `blocks` scales along each line: for row-wise blocks (1, B) the lines are
the M rows and the blocks run along K, for column-wise blocks (B, 1) the lines are the K columns and the blocks run along M.
"""

from __future__ import annotations

from typing import NamedTuple

SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4      # the tile of `swizzled`: 128 lines x 4 blocks in 512 consecutive bytes


class ScaleGrid(NamedTuple):
    """The scales of one direction of a […, M, K] array."""

    batch: tuple[int, ...]
    outer: int
    blocks: int
    columnwise: bool


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def scale_grid(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> ScaleGrid:
    """The grid of 1-D blocks: (1, B) along rows, (B, 1) along columns; (1, None): one block per row.

    >>> scale_grid((4, 100, 64), (32, 1))
    ScaleGrid(batch=(4,), outer=64, blocks=4, columnwise=True)
    """
    *batch, rows, columns = shape
    if block[0] == 1:
        return ScaleGrid(tuple(batch), rows, cdiv(columns, block[1] or max(columns, 1)), False)
    assert block[1] == 1
    return ScaleGrid(tuple(batch), columns, cdiv(rows, block[0] or max(rows, 1)), True)


def compact_shape(grid: ScaleGrid) -> tuple[int, ...]:
    """Row-wise […, M, blocks], column-wise […, blocks, K].

    >>> compact_shape(scale_grid((100, 64), (1, 32))), compact_shape(scale_grid((100, 64), (32, 1)))
    ((100, 2), (4, 64))
    """
    return (*grid.batch, grid.blocks, grid.outer) if grid.columnwise else (*grid.batch, grid.outer, grid.blocks)


def swizzled_shape(grid: ScaleGrid) -> tuple[int, ...]:
    """[…, lines rounded up to 128, blocks rounded up to 4], whatever the direction; within it the bytes lie in tiles of 128 x 4.

    >>> swizzled_shape(scale_grid((100, 64), (1, 32)))
    (128, 4)
    """
    return (*grid.batch, round_up(grid.outer, SWIZZLE_ROWS), round_up(grid.blocks, SWIZZLE_COLUMNS))
