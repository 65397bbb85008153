"""Measures how much quantisation changed a tensor and each of its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from . import backend
from .arrays import Array, asnumpy, contiguous
from .formats import FP8_DTYPES, INPUT_DTYPES, float32, names
from .layouts import cdiv
from .losses import count_per_block, error_sums, finite_magnitude, log2_of_scales, losses, spans_of_tiles
from .ops.convert.astype import astype, transpose
from .reference.numerics import widen
from .results import Quantized, Scaled

__all__ = ["BlockReport", "ErrorReport", "SpanReport", "Vanished", "blocks", "error", "scale_span"]

#: Elements that are processed at a time. Their f64 intermediates are eight arrays of 8 MB.
CHUNK = 1 << 20

_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True)
class ErrorReport:
    """What `error` measured. x is the original, v the dequantised value; counts are of elements.

    elements            all of them
    sqnr_db             10 log10(Σ x² / Σ (v − x)²) over finite x: inf without any error, −inf where a finite
                        x came back as NaN or Inf
    max_relative_error  max |v − x| / |x| over finite nonzero x (an underflow is 1.0); 0.0 where there are
                        none
    saturated           finite x that overflowed: rounded with unlimited exponent, |x| / scale_inv is beyond
                        the format's maximum, so that without saturation it would be NaN (E4M3) or Inf (E5M2).
                        None where only values are known
    underflowed         finite nonzero x (also subnormal) with v = 0
    nan                 NaN in v
    nonfinite           NaN or Inf in x (these take no part in the two errors)
    """

    elements: int
    sqnr_db: float
    max_relative_error: float
    saturated: int | None
    underflowed: int
    nan: int
    nonfinite: int

    def _facts(self) -> dict[str, str]:
        saturated = "unknown" if self.saturated is None else f"{self.saturated:,}"
        return {"SQNR": f"{self.sqnr_db:.2f} dB", "max relative error": f"{self.max_relative_error:.3g}",
                "saturated": saturated, "underflowed": f"{self.underflowed:,}",
                "NaN": f"{self.nan:,}", "non-finite in x": f"{self.nonfinite:,}",
                "elements": f"{self.elements:,}"}

    def __repr__(self) -> str:
        f = self._facts()
        tail = f", {f['non-finite in x']} non-finite in x" if self.nonfinite else ""
        return (f"ErrorReport(SQNR {f['SQNR']}, max relative error {f['max relative error']}; of "
                f"{f['elements']} elements "
                f"{f['saturated']} saturated, {f['underflowed']} underflowed, {f['NaN']} NaN{tail})")

    def _repr_html_(self) -> str:
        return _html(self._facts())


@dataclass(frozen=True, eq=False)
class BlockReport:
    """What `blocks` counted. Arrays of the kind of x with an entry for each block, by rows and columns of
    blocks of the logical matrix.

    block               the shape of a block
    saturated           finite x that overflowed, as in `ErrorReport`: int32
    underflowed         finite nonzero x with v = 0: int32
    nan                 NaN in v: int32
    exponents           log2 of scale_inv: float32, NaN where scale_inv is NaN
    """

    block: tuple[int | None, int | None]
    saturated: Array
    underflowed: Array
    nan: Array
    exponents: Array

    def _facts(self) -> dict[str, str]:
        exponents = asnumpy(self.exponents)
        known = exponents[np.isfinite(exponents)]
        span = "unknown" if known.size == 0 else f"{known.min():g} … {known.max():g}"
        return {"blocks": "×".join(map(str, exponents.shape)),
                **{f"with {name}": f"{int(asnumpy(a != 0).sum()):,}" for name, a in (
                    ("saturated", self.saturated), ("underflowed", self.underflowed), ("NaN", self.nan))},
                "log2 scale_inv": span}

    def __repr__(self) -> str:
        f = self._facts()
        return (f"BlockReport({f['blocks']} blocks: {f['with saturated']} with saturated elements, "
                f"{f['with underflowed']} with "
                f"underflowed ones, {f['with NaN']} with NaN; log2 scale_inv {f['log2 scale_inv']})")

    def _repr_html_(self) -> str:
        return _html(self._facts())


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
    largest, median of the spans; NaN if there are none
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
        return _html(self._facts())


def error(x: Array, q: Any) -> ErrorReport:
    """Compare a tensor with its quantised form.

    x : the original: bfloat16, float16, float32 or float64 array of any shape.
    q : its `Scaled` or `Quantized` (the row-wise part where there is one), or an array of x's shape: FP8
        (unscaled), or dequantised values in any of x's dtypes (`saturated` is then unknown). Of the same kind
        (NumPy or CuPy) as x.
    Returns an `ErrorReport`, whose fields say exactly what is counted.

    Values are compared and summed in f64. x and v are exact there; squares and sums are rounded, so their
    last digits may differ between NumPy and CuPy. Besides one f32 copy of the dequantised values, memory
    stays bounded: 2**20 elements are processed at a time. `saturated` compares |x| with the dequantised
    maximum: exact up to the rounding of scale_inv (1e-7 of the bound). CuPy flushes f32 subnormals to zero
    when it widens them, so on a GPU |x| below 2**-126 counts as zero. Raises TypeError (dtypes, mixed kinds),
    ValueError (shapes).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([1.0, -3.3, 500.0, 1e-4])
    >>> fp8.diagnostics.error(x, fp8.quantize_tensor(x, 1.0))
    ErrorReport(SQNR 19.66 dB, max relative error 1; of 4 elements 1 saturated, 1 underflowed, 0 NaN)
    """
    xp = _module(x)
    values, codes = _values_and_codes(q, xp)
    _same_shape(x, values)
    flat, flat_values = (contiguous(a).reshape(-1) for a in (x, values))
    flat_codes = None if codes is None else codes.reshape(-1)
    partial = [error_sums(xp, flat[i:i + CHUNK], flat_values[i:i + CHUNK],
                        None if flat_codes is None else flat_codes[i:i + CHUNK])
               for i in range(0, x.size, CHUNK)]
    if not partial:
        return ErrorReport(0, math.inf, 0.0, None if codes is None else 0, 0, 0, 0)
    table = xp.stack(partial)           # one transfer at the end: nothing before it waits for the GPU
    table = table if xp is np else table.get()
    signal, noise, saturated, underflowed, nan, nonfinite = table[:, :-1].sum(axis=0).tolist()
    return ErrorReport(int(x.size), _decibels(signal, noise), float(table[:, -1].max()),
                       None if codes is None else int(saturated), int(underflowed), int(nan), int(nonfinite))


def blocks(x: Array, q: Scaled | Quantized) -> BlockReport:
    """Count for each block what `error` counts for the whole tensor, and show each block's scale.

    x : the original: bfloat16, float16, float32 or float64 array [..., M, K].
    q : the quantised x, with a scale per block in any layout (for a `Quantized` its row-wise part, if there
        is one), of the same kind (NumPy or CuPy) as x.
    Returns a `BlockReport` with arrays [..., M, ceil(K / B)] for row-wise blocks (1, B), and [..., ceil(M /
    B), K] for column-wise ones. Values are compared in f64, in pieces of about 2**20 elements, with the
    caveats of `error`. Raises TypeError (dtypes, mixed kinds), ValueError (shapes, data with one scale).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> codes = np.full((1, 64), 0x7E, np.uint8).view(fp8.float8_e4m3fn)
    >>> scale_inv = np.array([[127, 120]], np.uint8).view(fp8.float8_e8m0fnu)
    >>> q = fp8.Scaled(codes, scale_inv, (1, 64), block=(1, 32), scale_layout="compact")
    >>> fp8.diagnostics.blocks(np.full((1, 64), 448, np.float32), q)
    BlockReport(1×2 blocks: 1 with saturated elements, 0 with underflowed ones, 0 with NaN; log2 scale_inv -7
    … 0)
    """
    xp = _module(x)
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}")
    s = q if isinstance(q, Scaled) else q._any
    if s.block is None:
        raise ValueError("q: expected data with a scale per block, got one scale for the tensor; use error")
    values, codes = _values_and_codes(s, xp)
    _same_shape(x, values)
    assert codes is not None
    extents = [min(block or max(extent, 1), max(extent, 1))
               for block, extent in zip(s.block, x.shape[-2:], strict=True)]
    exponents = log2_of_scales(xp, s.to_layout("compact").scale_inv)
    # Scales of 2-D blocks follow the order in which the data are stored.
    if s.transposed and 1 not in s.block:
        exponents = exponents.swapaxes(-1, -2)
    counts = xp.zeros((3, *exponents.shape), np.int32)
    step = max(1, CHUNK // max(1, x.shape[-1] * extents[0]))            # rows of blocks at a time
    for matrix in np.ndindex(x.shape[:-2]):
        for first in range(0, exponents.shape[-2], step):
            rows = slice(first * extents[0], (first + step) * extents[0])
            piece, v = x[matrix][rows].astype(np.float64), values[matrix][rows].astype(np.float64)
            for kind, found in enumerate(losses(xp, finite_magnitude(xp, piece), v, codes[matrix][rows])):
                there = (kind, *matrix, slice(first, first + step))
                counts[there] = count_per_block(xp, found, *extents)
    return BlockReport(s.block, counts[0], counts[1], counts[2], exponents)


def scale_span(q: Scaled | Quantized, *, block: int | None = None) -> SpanReport:
    """Find how far apart the scales of the rows in a column-wise block are, and which elements would become 0
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
    do not count. A NaN does not vanish. Raises TypeError, ValueError (blocks that are not row-wise).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.outer([1e-4, 1, 100], np.ones(256)).astype(np.float32)
    >>> report = fp8.diagnostics.scale_span(fp8.quantize_block(x))
    >>> report.spans.tolist(), report.elements, report.by_column
    ([[20.0, 20.0]], 768, Vanished(row_blocks=2, elements=256))
    """
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}")
    part = q if isinstance(q, Scaled) else q.rowwise
    if part is None:
        raise ValueError("q: expected a row-wise part, got a Quantized without one; q.columnwise.T has its "
                         "columns as rows")
    if part.block is None or part.block[0] != 1:
        raise ValueError(f"q: expected row-wise blocks (1, B), got "
                         f"{part.block or 'one scale for the tensor'}; those of column-wise data "
                         "are in its .T")
    rows = part.block[1] if block is None else block
    if not isinstance(rows, (int, np.integer)) or not 1 <= rows < 2**63:
        raise ValueError("block: expected how many rows share a scale, an integer of 1 or more, "
                         f"got {rows!r}")
    s = part.to_layout("compact")
    codes, scales = asnumpy(s.data), widen(asnumpy(s.scale_inv))
    codes = np.swapaxes(codes, -1, -2) if s.transposed else codes
    tile = int(rows), part.block[1] or max(s.shape[-1], 1)
    spans = np.full((*s.shape[:-2], cdiv(s.shape[-2], rows), scales.shape[-1]), np.nan, np.float32)
    step = max(1, CHUNK // max(1, tile[0] * scales.shape[-1] * tile[1]))    # rows of tiles at a time
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


def _module(x: Array) -> Any:
    xp = backend.module_of(x)
    if x.dtype not in (*INPUT_DTYPES, _FLOAT64):
        raise TypeError(f"x: expected dtype {names(INPUT_DTYPES)}, float64, got {x.dtype}")
    return xp


def _same_shape(x: Array, values: Array) -> None:
    if values.shape != x.shape:
        raise ValueError(f"q: expected the shape of x, {x.shape}, got {values.shape}")


def _values_and_codes(q: Any, xp: Any) -> tuple[Array, Array | None]:
    """(dequantised values, FP8 codes or None), both in the logical shape."""
    if isinstance(q, (Scaled, Quantized)):
        s = q if isinstance(q, Scaled) else q._any
        backend.require_module(s.data, xp, "q")
        return s.dequantize(float32), contiguous(transpose(s.data) if s.transposed else s.data)
    backend.require_module(q, xp, "q")
    if q.dtype in FP8_DTYPES:
        return astype(q, float32), contiguous(q)
    if q.dtype not in (*INPUT_DTYPES, _FLOAT64):
        raise TypeError(f"q: expected a Scaled, a Quantized or an array of dtype "
                        f"{names((*FP8_DTYPES, *INPUT_DTYPES))}, float64, "
                        f"got {q.dtype}")
    return q, None


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def _html(facts: dict[str, str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in facts)
    body = "".join(f"<td>{escape(text)}</td>" for text in facts.values())
    return f"<table><tr>{head}</tr><tr>{body}</tr></table>"


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
