"""How much a quantisation changed a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from . import backend
from .arrays import Array, bits, contiguous
from .formats import FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float8_e5m2, float32, names
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
        facts = self._facts()
        head = "".join(f"<th>{escape(name)}</th>" for name in facts)
        body = "".join(f"<td>{escape(text)}</td>" for text in facts.values())
        return f"<table><tr>{head}</tr><tr>{body}</tr></table>"


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
    xp = backend.module_of(x)
    if x.dtype not in (*INPUT_DTYPES, _FLOAT64):
        raise TypeError(f"x: expected dtype {names(INPUT_DTYPES)}, float64, got {x.dtype}")
    values, codes = _values_and_codes(q, xp)
    if values.shape != x.shape:
        raise ValueError(f"q: expected the shape of x, {x.shape}, got {values.shape}")
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
    magnitude = xp.where(finite, xp.abs(x), 0.0)
    with np.errstate(all="ignore"):
        gap = xp.where(finite, xp.where(came_back, xp.abs(v - x), np.inf), 0.0)
        relative = xp.where(magnitude > 0, gap / magnitude, 0.0)
        sums = (xp.square(magnitude), xp.square(gap), _overflowed(xp, magnitude, v, codes), (magnitude > 0) & (v == 0),
                xp.isnan(v), ~finite)
        return xp.stack([*(a.sum(dtype=np.float64) for a in sums), relative.max()])


def _overflowed(xp: Any, magnitude: Array, v: Array, codes: Array | None) -> Array:
    if codes is None:
        return xp.zeros(1, np.bool_)
    top, bound, maximum, at_tie = _OVERFLOW[codes.dtype]
    # For an f32 x both products are exact in f64: 24 bits times at most 4.
    left, right = magnitude * maximum, xp.abs(v) * bound
    return ((bits(codes) & 0x7F) == top) & ((left >= right) if at_tie else (left > right))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
