"""Bias gradients: the sums down columns that cast_transpose leaves tile by tile, added up. Kernel: kernels_cu/quantize/bias_gradient.cu."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from ...arrays import Array, empty_beside
from ...calls import validate
from ...formats import float32
from ...kernels import Kernel, Variant, grid_size, tiles
from ...layouts import cdiv

_SUM_ROWS = Kernel("quantize/bias_gradient", "sum_rows")
_RUNS = 8                   # of rows in a block
_ROWS = (8, 32)             # of a run: few for fewer loads per thread, or many for fewer launches
_MOST = _RUNS * _ROWS[-1]
_COLUMNS_AT_ONCE = 32
_THREADS = 256


class ColumnSums:
    """The way from tiles to a bias gradient, and the memory that it takes."""

    def __init__(self, x: Array, dbias: Array, partial: Array | None = None, shape: tuple[int, ...] | None = None) -> None:
        """partial: that of an earlier ColumnSums of the same shape, for launches that a graph has captured keep on using it. shape: of what
        is summed, where that is not x."""
        self.dbias_at = validate.address(dbias)
        shape = x.shape if shape is None else shape
        self.matrices, self.rows, self.columns = math.prod(shape[:-2]), shape[-2], shape[-1]
        lines, total = cdiv(self.rows, tiles.SMALL.rows), 0
        while lines > 1:
            total += lines
            lines = cdiv(lines, _MOST)
        self.partial = empty_beside(x, (self.matrices * total * self.columns,), float32) if partial is None else partial
        self._partial_at = validate.address(self.partial)

    def tiles_at(self, tile_rows: int) -> int:
        """Where cast_transpose writes the sums of its tiles: with one tile above another these are not the end of it."""
        return self._partial_at if cdiv(self.rows, tile_rows) > 1 else self.dbias_at

    def finish(self, x: Array, tile_rows: int, noop_at: int) -> None:
        """Adds up what the tiles have left, in as few launches as there are powers of 256 in their number. Without rows there are no
        tiles, and the sums are 0."""
        lines, at = cdiv(self.rows, tile_rows), self._partial_at
        while lines != 1 and self.matrices * self.columns:
            left = max(1, cdiv(lines, _MOST))
            to = at + 4 * self.matrices * lines * self.columns if left > 1 else self.dbias_at
            grid = grid_size(cdiv(self.columns, _COLUMNS_AT_ONCE) * left * self.matrices, x.shape)
            _sum_rows_variant(_ROWS[lines > _RUNS * _ROWS[0]]).launch(x, grid, at, to, noop_at, lines, self.columns)
            lines, at = left, to


@functools.cache
def _sum_rows_variant(rows: int) -> Variant:
    return _SUM_ROWS.variant(block=_THREADS, ROWS=rows)


def variants() -> Iterator[Variant]:
    """Every variant that bias gradients may launch."""
    for rows in _ROWS:
        yield _sum_rows_variant(rows)
