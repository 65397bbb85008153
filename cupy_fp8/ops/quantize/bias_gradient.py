"""Bias gradients: adds up the column sums that cast_transpose writes for each tile. Kernel:
kernels_cu/quantize/bias_gradient.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...arrays import Array, address, empty_beside
from ...formats import float32
from ...kernels import Kernel, Launch, Variant, grid_size, shapes
from ...layouts import cdiv

_SUM_ROWS = Kernel("quantize/bias_gradient", "sum_rows", block=256)
_SEGMENTS = 8                   # row segments in a block
_ROWS = (8, 32)             # of a segment: few mean fewer loads per thread, many fewer launches
_MOST = _SEGMENTS * _ROWS[-1]
_COLUMNS_AT_ONCE = 32


class ColumnSums:
    """Adds per-tile column sums into a bias gradient; owns the memory of the partial sums."""

    def __init__(self, x: Array, dbias_at: int, partial: Array | None = None,
                 shape: tuple[int, ...] | None = None) -> None:
        """partial: the memory of an earlier ColumnSums of the same shape, which captured launches keep using.
        shape: the shape of what is summed, if that is not x."""
        self._dbias_at = dbias_at
        shape = x.shape if shape is None else shape
        self.matrices, self.rows, self.columns = math.prod(shape[:-2]), shape[-2], shape[-1]
        self.partial = empty_beside(x, (partial_sums(shape),), float32) if partial is None else partial
        self._partial_at = address(self.partial)

    def tiles_at(self, tile_rows: int) -> int:
        """The address where cast_transpose writes the sums of its tiles: the gradient itself if no tile is
        above another."""
        return self._partial_at if cdiv(self.rows, tile_rows) > 1 else self._dbias_at

    def launches(self, x: Array, tile_rows: int, noop_at: int) -> Iterator[Launch]:
        """Adds up the sums of the tiles. Each launch adds 256 of them at a time, so few launches are needed.
        Without rows there are no tiles, and the sums are 0."""
        lines, at = cdiv(self.rows, tile_rows), self._partial_at
        while lines != 1 and self.matrices * self.columns:
            left = max(1, cdiv(lines, _MOST))
            to = at + 4 * self.matrices * lines * self.columns if left > 1 else self._dbias_at
            grid = grid_size(cdiv(self.columns, _COLUMNS_AT_ONCE) * left * self.matrices, x.shape)
            variant = _SUM_ROWS.variant(ROWS=_ROWS[lines > _SEGMENTS * _ROWS[0]])
            yield variant.bind(x, grid, src=at, dst=to, noop=noop_at, rows=lines, columns=self.columns)
            lines, at = left, to


def partial_sums(shape: tuple[int, ...]) -> int:
    """How many partial sums all launches together write for an array of this shape."""
    lines, total = cdiv(shape[-2], shapes.SMALL.rows), 0
    while lines > 1:
        total += lines
        lines = cdiv(lines, _MOST)
    return math.prod(shape[:-2]) * total * shape[-1]


def variants() -> Iterator[Variant]:
    """Every variant that bias gradients may launch."""
    for rows in _ROWS:
        yield _SUM_ROWS.variant(ROWS=rows)
