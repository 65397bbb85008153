"""How much a quantisation changed a tensor, and each of its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from . import backend
from .arrays import Array, asnumpy, bits, contiguous
from .formats import FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32, names
from .layouts import cdiv
from .results import Quantized, Scaled

#: Elements whose f64 intermediates exist at one time (eight arrays of 8 MB).
CHUNK = 1 << 20

_FLOAT64 = np.dtype(np.float64)
#: The code of the maximum; the bound from which rounding to nearest even leaves the format (half a step past the maximum); the
#: maximum; whether the bound itself leaves it: the tie goes to 448 in E4M3 (even), past 57344 in E5M2 (odd).
_OVERFLOW = {float8_e4m3fn: (0x7E, 464.0, 448.0, False), float8_e5m2: (0x7B, 61440.0, 57344.0, True)}


@dataclass(frozen=True)
class ErrorReport:
    """What `error` measured. x is the original, v the dequantised value; counts are of elements.

    elements            all of them
    sqnr_db             10 log10(Σ x² / Σ (v − x)²) over finite x: inf without any error, −inf where a finite x came back as
                        NaN or Inf
    max_relative_error  max |v − x| / |x| over finite nonzero x (an underflow is 1.0); 0.0 where there are none
    saturated           finite x that overflowed: rounded with unlimited exponent, |x| / scale_inv is beyond the format's maximum,
                        so that without saturation it would be NaN (E4M3) or Inf (E5M2). None where only values are known
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
                "NaN": f"{self.nan:,}", "non-finite in x": f"{self.nonfinite:,}", "elements": f"{self.elements:,}"}

    def __repr__(self) -> str:
        f = self._facts()
        tail = f", {f['non-finite in x']} non-finite in x" if self.nonfinite else ""
        return (f"ErrorReport(SQNR {f['SQNR']}, max relative error {f['max relative error']}; of {f['elements']} elements "
                f"{f['saturated']} saturated, {f['underflowed']} underflowed, {f['NaN']} NaN{tail})")

    def _repr_html_(self) -> str:
        return _html(self._facts())


@dataclass(frozen=True, eq=False)
class BlockReport:
    """What `blocks` counted. Arrays of the kind of x with an entry for each block, by rows and columns of blocks of the logical matrix.

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
        return (f"BlockReport({f['blocks']} blocks: {f['with saturated']} with saturated elements, {f['with underflowed']} with "
                f"underflowed ones, {f['with NaN']} with NaN; log2 scale_inv {f['log2 scale_inv']})")

    def _repr_html_(self) -> str:
        return _html(self._facts())


def error(x: Array, q: Any) -> ErrorReport:
    """Compare a tensor with its quantised form.

    x : the original: bfloat16, float16, float32 or float64 array of any shape.
    q : its `Scaled` or `Quantized` (the row-wise part where there is one), or an array of x's shape: FP8 (unscaled), or
        dequantised values in any of x's dtypes (`saturated` is then unknown). Of the same kind (NumPy or CuPy) as x.
    Returns an `ErrorReport`, whose fields say exactly what is counted.

    Values are compared and summed in f64 (x and v exactly; squares and sums rounded, so that the last digits may differ between
    NumPy and CuPy). Beside one f32 copy of the dequantised values memory stays bounded: f64 intermediates exist for 2**20
    elements at a time. `saturated` compares |x| with the dequantised maximum: exact up to the rounding of scale_inv (1e-7 of the
    bound).
    CuPy flushes f32 subnormals to zero when it widens them, so on a GPU |x| below 2**-126 counts as zero.
    Raises TypeError (dtypes, mixed kinds), ValueError (shapes).

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
    partial = [_partial(xp, flat[i:i + CHUNK], flat_values[i:i + CHUNK], None if flat_codes is None else flat_codes[i:i + CHUNK])
               for i in range(0, x.size, CHUNK)]
    if not partial:
        return ErrorReport(0, math.inf, 0.0, None if codes is None else 0, 0, 0, 0)
    table = xp.stack(partial)           # one transfer at the end: nothing before it waits for the GPU
    table = table if xp is np else table.get()
    signal, noise, saturated, underflowed, nan, nonfinite = table[:, :-1].sum(axis=0).tolist()
    return ErrorReport(int(x.size), _decibels(signal, noise), float(table[:, -1].max()),
                       None if codes is None else int(saturated), int(underflowed), int(nan), int(nonfinite))


def blocks(x: Array, q: Scaled | Quantized) -> BlockReport:
    """Count block by block what `error` counts for the whole tensor, and show each block's scale.

    x : the original: bfloat16, float16, float32 or float64 array [..., M, K].
    q : what became of it, with a scale per block, in any layout (of a `Quantized` the row-wise part where there is one). Of the same
        kind (NumPy or CuPy) as x.
    Returns a `BlockReport`, for row-wise blocks (1, B) arrays [..., M, ceil(K / B)], for column-wise ones [..., ceil(M / B), K].
    Compared in f64, in pieces of about 2**20 elements, with the caveats of `error`.
    Raises TypeError (dtypes, mixed kinds), ValueError (shapes, data with one scale).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> codes = np.full((1, 64), 0x7E, np.uint8).view(fp8.float8_e4m3fn)
    >>> scale_inv = np.array([[127, 120]], np.uint8).view(fp8.float8_e8m0fnu)
    >>> q = fp8.Scaled(codes, scale_inv, (1, 64), block=(1, 32), scale_layout="compact")
    >>> fp8.diagnostics.blocks(np.full((1, 64), 448, np.float32), q)
    BlockReport(1×2 blocks: 1 with saturated elements, 0 with underflowed ones, 0 with NaN; log2 scale_inv -7 … 0)
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
    extents = [min(block or max(extent, 1), max(extent, 1)) for block, extent in zip(s.block, x.shape[-2:], strict=True)]
    exponents = _log2(xp, s.to_layout("compact").scale_inv)
    if s.transposed and 1 not in s.block:                               # in the order in which the data are stored
        exponents = exponents.swapaxes(-1, -2)
    counts = xp.zeros((3, *exponents.shape), np.int32)
    step = max(1, CHUNK // max(1, x.shape[-1] * extents[0]))            # rows of blocks at a time
    for matrix in np.ndindex(x.shape[:-2]):
        for first in range(0, exponents.shape[-2], step):
            rows = slice(first * extents[0], (first + step) * extents[0])
            piece, v = x[matrix][rows].astype(np.float64), values[matrix][rows].astype(np.float64)
            for kind, found in enumerate(_losses(xp, _finite_magnitude(xp, piece), v, codes[matrix][rows])):
                there = (kind, *matrix, slice(first, first + step))
                counts[there] = _per_block(xp, found, *extents)
    return BlockReport(s.block, counts[0], counts[1], counts[2], exponents)


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
    from .ops.convert import astype, transpose

    if isinstance(q, (Scaled, Quantized)):
        s = q if isinstance(q, Scaled) else q._any
        backend.require_module(s.data, xp, "q")
        return s.dequantize(float32), contiguous(transpose(s.data) if s.transposed else s.data)
    backend.require_module(q, xp, "q")
    if q.dtype in FP8_DTYPES:
        return astype(q, float32), contiguous(q)
    if q.dtype not in (*INPUT_DTYPES, _FLOAT64):
        raise TypeError(f"q: expected a Scaled, a Quantized or an array of dtype {names((*FP8_DTYPES, *INPUT_DTYPES))}, float64, "
                        f"got {q.dtype}")
    return q, None


def _partial(xp: Any, x: Array, v: Array, codes: Array | None) -> Array:
    """f64 [7] of one chunk: signal, noise, saturated, underflowed, nan, nonfinite, max relative error."""
    x, v = x.astype(np.float64), v.astype(np.float64)
    finite, came_back = xp.isfinite(x), xp.isfinite(v)
    magnitude = _finite_magnitude(xp, x)
    with np.errstate(all="ignore"):
        gap = xp.where(finite, xp.where(came_back, xp.abs(v - x), np.inf), 0.0)
        relative = xp.where(magnitude > 0, gap / magnitude, 0.0)
        sums = (xp.square(magnitude), xp.square(gap), *_losses(xp, magnitude, v, codes), ~finite)
        return xp.stack([*(a.sum(dtype=np.float64) for a in sums), relative.max()])


def _finite_magnitude(xp: Any, x: Array) -> Array:
    return xp.where(xp.isfinite(x), xp.abs(x), 0.0)


def _losses(xp: Any, magnitude: Array, v: Array, codes: Array | None) -> tuple[Array, Array, Array]:
    """Which elements are saturated, underflowed, NaN."""
    return _overflowed(xp, magnitude, v, codes), (magnitude > 0) & (v == 0), xp.isnan(v)


def _overflowed(xp: Any, magnitude: Array, v: Array, codes: Array | None) -> Array:
    if codes is None:
        return xp.zeros(1, np.bool_)
    top, bound, maximum, at_tie = _OVERFLOW[codes.dtype]
    # |v| is the maximum times the element's own scale_inv. For an f32 x both products are exact in f64: 24 bits times at most 4.
    with np.errstate(all="ignore"):
        left, right = magnitude * maximum, xp.abs(v) * bound
    return ((bits(codes) & 0x7F) == top) & ((left >= right) if at_tie else (left > right))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def _per_block(xp: Any, found: Array, rows: int, columns: int) -> Array:
    """How many of a matrix's flags are set in each block of rows x columns."""
    down, across = (cdiv(extent, block) for extent, block in zip(found.shape, (rows, columns), strict=True))
    padded = xp.zeros((down * rows, across * columns), np.bool_)
    padded[:found.shape[0], :found.shape[1]] = found
    return padded.reshape(down, rows, across, columns).sum(axis=(1, 3), dtype=np.int32)


def _log2(xp: Any, scale_inv: Array) -> Array:
    """log2 as f32, from the bits: CuPy would take f32 subnormals for zeros."""
    u = bits(scale_inv).astype(np.int64)
    if scale_inv.dtype == float8_e8m0fnu:
        return xp.where(u == 0xFF, np.nan, (u - 127).astype(np.float64)).astype(np.float32)
    exponent, fraction = u >> 23 & 0xFF, u & 0x7FFFFF
    significand = xp.where(exponent == 0, fraction, fraction + (1 << 23)).astype(np.float64)
    with np.errstate(divide="ignore"):
        log2 = xp.log2(significand) + (xp.maximum(exponent, 1) - 150)
    log2 = xp.where(exponent == 0xFF, xp.where(fraction == 0, np.inf, np.nan), log2)
    return xp.where((u >> 31 == 1) & (significand != 0), np.nan, log2).astype(np.float32)


def _html(facts: dict[str, str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in facts)
    body = "".join(f"<td>{escape(text)}</td>" for text in facts.values())
    return f"<table><tr>{head}</tr><tr>{body}</tr></table>"
