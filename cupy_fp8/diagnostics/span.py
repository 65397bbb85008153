"""Measures how far apart the scales of the rows of a column-wise block are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..advice import shown
from ..arrays import asnumpy
from ..formats import integer
from ..layouts import cdiv
from ..reference.numerics import widen
from ..results import Quantized, Scaled, facts_table, row_wise
from ..scaled_parts import check_one_piece
from . import pieces
from .losses import spans_of_tiles
from .scale_report import warn_of_unusable

__all__ = ["SpanReport", "Vanished", "scale_span"]


class Vanished(NamedTuple):
    """What becomes ±0 but was not: whole row-blocks, and elements."""

    row_blocks: int
    elements: int


@dataclass(frozen=True, eq=False)
class SpanReport:
    """What `scale_span` found. A tile has the rows of a column-wise block and the columns of a row-wise
    block.

    tile            its shape, (rows, B)
    spans           log2(largest / smallest scale among the rows of a tile that are not all zeros): float32
                    NumPy array by rows and columns of tiles, NaN for tiles without such rows
    largest, median  of the spans; NaN if there are none
    row_blocks      those that are not all zeros and have a valid scale
    elements        those that are neither 0 nor NaN and have a valid scale
    by_tile         what vanishes when all rows of a tile get the largest scale among them (target 'tile')
    by_column       what vanishes when each column of a tile gets the scale that its largest value calls
                    for (target 'column')
    """

    tile: tuple[int, int]
    spans: np.ndarray
    largest: float
    median: float
    row_blocks: int
    elements: int
    by_tile: Vanished
    by_column: Vanished

    def _facts(self) -> dict[str, str]:
        def power(exponent: float) -> str:
            return "unknown" if math.isnan(exponent) else f"2^{exponent:.4g}"

        def lost(v: Vanished) -> str:
            return f"{v.row_blocks:,} row-blocks, {v.elements:,} elements"

        return {"tiles": f"{'×'.join(map(str, self.spans.shape))} tiles of {self.tile[0]}×{self.tile[1]}",
                "largest span": power(self.largest), "median span": power(self.median),
                "not 0": f"{self.row_blocks:,} row-blocks, {self.elements:,} elements",
                "vanish by tile": lost(self.by_tile), "vanish by column": lost(self.by_column)}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"SpanReport({f['tiles']}, scales up to {f['largest span']} apart, median "
                f"{f['median span']}; not 0: {f['not 0']}; "
                f"vanish by tile: {f['vanish by tile']}, by column: {f['vanish by column']})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())


def scale_span(q: Scaled | Quantized, *, block: int | None = None) -> SpanReport:
    """Find how far apart the scales of the rows of a column-wise block are, and which elements would become 0
    there: whether row-wise data survive `scaling_aware_transpose`.

    q : row-wise data in blocks of (1, B), any scales in any layout (of a `Quantized` the row-wise part).
        The rows of column-wise data are those of its `.T`.
    block : rows of a column-wise block; default B.
    Returns a `SpanReport`. Computed on the host, in f64, in pieces of about 2**20 elements.

    An element v under scale s becomes v * s / t, an exact real number, rounded to nearest even: it
    vanishes where |v| * s / t is at most half of FP8's smallest subnormal (the tie goes to 0). t is
    docs/numerics.md section 4's: with target 'tile' the largest s of the tile's rows that hold anything
    but zeros (NaN is something); with 'column' the smallest power of two not below max |v| * s / fp8_max
    over the column's rows, within 2**-127 and 2**127. This holds for any s. `scaling_aware_transpose` takes
    powers of two only, and makes exactly these elements 0. Row-blocks whose scale is NaN, Inf, 0 or negative
    do not count, and `ScaleWarning` tells of them. A NaN does not vanish. Raises TypeError, ValueError
    (blocks that are not row-wise).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.outer([1e-4, 1, 100], np.ones(256)).astype(np.float32)
    >>> report = fp8.diagnostics.scale_span(fp8.quantize_block(x))
    >>> report.spans.tolist(), report.elements, report.by_column
    ([[20.0, 20.0]], 768, Vanished(row_blocks=2, elements=256))
    """
    part = row_wise(q, advice="; q.columnwise.T has its columns as rows")
    check_one_piece(part)
    if part.block is None or part.block[0] != 1:
        had = part.block or "one scale for the tensor"
        raise ValueError(f"q: expected row-wise blocks (1, B), got {had}; those of column-wise data are in "
                         "its .T")
    rows = part.block[1] if block is None else integer(block, "block")
    if rows is None or not 1 <= rows < 2**63:
        raise ValueError("block: expected how many rows share a scale, an integer of 1 or more, "
                         f"got {shown(rows)}")
    s = part.to_layout("compact")
    warn_of_unusable(s.scale_inv)
    codes, scales = asnumpy(s.data), widen(asnumpy(s.scale_inv))
    codes = np.swapaxes(codes, -1, -2) if s.transposed else codes
    tile = int(rows), part.block[1] or max(s.shape[-1], 1)
    spans = np.full((*s.shape[:-2], cdiv(s.shape[-2], rows), scales.shape[-1]), np.nan, np.float32)
    step = max(1, pieces.CHUNK // max(1, tile[0] * scales.shape[-1] * tile[1]))  # rows of tiles per step
    counts = np.zeros(6, np.int64)
    for matrix in np.ndindex(s.shape[:-2]):
        for first in range(0, spans.shape[-2], step):
            piece = slice(first * rows, (first + step) * rows)
            found, count = spans_of_tiles(codes[matrix][piece], scales[matrix][piece], tile)
            spans[matrix][first:first + step] = found
            counts += count
    known = spans[~np.isnan(spans)]
    largest, median = (float(known.max()), float(np.median(known))) if known.size else (math.nan, math.nan)
    row_blocks, elements, *vanished = counts.tolist()
    return SpanReport(tile, spans, largest, median, row_blocks, elements, Vanished(*vanished[:2]),
                      Vanished(*vanished[2:]))
