"""Bias gradients: sums of the column sums per tile from cast_transpose. Kernel:
kernels_cu/quantize/bias_gradient.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...arrays import Array, address
from ...kernels import Kernel, Launch, Variant, grid_size, shapes
from ...layouts import cdiv

_SUM_ROWS = Kernel("quantize/bias_gradient", "sum_rows", block=256)
_WARPS = 8          # warps per thread block, each adding its own rows
_ROWS = (8, 32)     # rows per warp: fewer → fewer loads per thread, more → fewer launches
_MOST = _WARPS * _ROWS[-1]
_COLUMNS_AT_ONCE = 32


class ColumnSums:
    """Adds per-tile column sums of matrices of this shape into a bias gradient. partial: memory for
    `partial_sums` partial sums."""

    def __init__(self, shape: tuple[int, ...], dbias_at: int, partial: Array) -> None:
        self.matrices, self.rows, self.columns = math.prod(shape[:-2]), shape[-2], shape[-1]
        self._dbias_at, self._partial_at = dbias_at, address(partial)

    def tiles_at(self, tile_rows: int) -> int:
        """Return the address where cast_transpose writes the sums of its tiles: the gradient itself if there
        is only one row of tiles."""
        return self._partial_at if cdiv(self.rows, tile_rows) > 1 else self._dbias_at

    def launches(self, x: Array, tile_rows: int, noop_at: int) -> Iterator[Launch]:
        """Yield the launches that add up the sums of the tiles, 256 at a time. Without rows there are no
        tiles, and the sums are 0."""
        rows, at = cdiv(self.rows, tile_rows), self._partial_at
        while rows != 1 and self.matrices * self.columns:
            left = max(1, cdiv(rows, _MOST))
            to = at + 4 * self.matrices * rows * self.columns if left > 1 else self._dbias_at
            grid = grid_size(cdiv(self.columns, _COLUMNS_AT_ONCE) * left * self.matrices, x.shape)
            variant = _SUM_ROWS.variant(ROWS=_ROWS[rows > _WARPS * _ROWS[0]])
            yield variant.bind(x, grid, src=at, dst=to, noop=noop_at, rows=rows, columns=self.columns)
            rows, at = left, to


def partial_sums(shape: tuple[int, ...], tile_rows: int = shapes.SMALL.rows) -> int:
    """Return the number of partial sums that all launches write for an array of this shape."""
    rows, total = cdiv(shape[-2], tile_rows), 0
    while rows > 1:
        total += rows
        rows = cdiv(rows, _MOST)
    return math.prod(shape[:-2]) * total * shape[-1]


def variants() -> Iterator[Variant]:
    """Yields every variant that bias gradients may launch."""
    for rows in _ROWS:
        yield _SUM_ROWS.variant(ROWS=rows)
