"""Measures the error of a whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array, asnumpy, contiguous
from ..kernels import executor_of
from ..results import facts_table
from . import on_gpu, pieces
from .inputs import module_of_x, require_shape, values_and_codes
from .losses import error_sums

__all__ = ["ErrorReport", "error"]


@dataclass(frozen=True)
class ErrorReport:
    """What `error` measured. x is the original, v the dequantised value; counts are of elements.

    elements            all of them
    sqnr_db             10 log10(Σ x² / Σ (v − x)²) over finite x: inf without any error, −inf if a finite x
                        became NaN or Inf
    max_relative_error  max |v − x| / |x| over finite nonzero x (an underflow is 1.0); 0.0 where there are
                        none
    saturated           finite x that overflowed: rounded with unlimited exponent, |x| / scale_inv is beyond
                        the format's maximum, so that without saturation it would be NaN (E4M3) or Inf (E5M2).
                        None where only values are known
    underflowed         finite nonzero x (also subnormal) with v = 0
    nan                 NaN in v
    nonfinite           NaN or Inf in x (these take no part in the errors)
    normal              x that are normal numbers of the format: |x| / scale_inv is not below the smallest
                        one, and not saturated. None, as the next three, where only values are known
    subnormal           x below them that did not become 0: they have fewer digits
    normal_error        root mean square of |v − x| / |x| over the normal ones
    max_normal_error    its maximum, at most 1/17 in E4M3 and 1/9 in E5M2 (up to the rounding of scale_inv)
    """

    elements: int
    sqnr_db: float
    max_relative_error: float
    saturated: int | None
    underflowed: int
    nan: int
    nonfinite: int
    normal: int | None = None
    subnormal: int | None = None
    normal_error: float | None = None
    max_normal_error: float | None = None

    def _facts(self) -> dict[str, str]:
        saturated = "unknown" if self.saturated is None else f"{self.saturated:,}"
        return {"SQNR": f"{self.sqnr_db:.2f} dB", "max relative error": f"{self.max_relative_error:.3g}",
                "saturated": saturated, "underflowed": f"{self.underflowed:,}",
                "NaN": f"{self.nan:,}", "non-finite in x": f"{self.nonfinite:,}",
                "elements": f"{self.elements:,}"}

    def __repr__(self) -> str:
        f = self._facts()
        tail = f", {f['non-finite in x']} non-finite in x" if self.nonfinite else ""
        return (f"ErrorReport(SQNR {f['SQNR']}, max relative error {f['max relative error']}; "
                f"of {f['elements']} elements {f['saturated']} saturated, {f['underflowed']} underflowed, "
                f"{f['NaN']} NaN{tail})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())


def error(x: Array, q: Any) -> ErrorReport:
    """Compare a tensor with its quantised form.

    x : the original: bfloat16, float16, float32 or float64 array of any shape.
    q : its `Scaled` or `Quantized` (the row-wise part where there is one), or an array of x's shape: FP8
        (unscaled), or dequantised values in any of x's dtypes (`saturated` is then unknown). Of the same kind
        (NumPy or CuPy) as x.
    Returns an `ErrorReport`, whose fields say exactly what is counted.

    Values are compared and summed in f64. x and v are exact there; squares and sums are rounded, so their
    last digits may differ between NumPy and CuPy. Besides one f32 copy of the dequantised values, memory
    stays bounded: NumPy processes 2**20 elements at a time, and a GPU takes one pass. `saturated` compares
    |x| with the dequantised maximum: exact up to the rounding of scale_inv (1e-7 of the bound). Warns with
    `ScaleWarning` where a scale is 0, negative, Inf or NaN. Raises TypeError (dtypes, mixed kinds),
    ValueError (shapes).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([1.0, -3.3, 500.0, 1e-4])
    >>> fp8.diagnostics.error(x, fp8.quantize_tensor(x, 1.0))
    ErrorReport(SQNR 19.66 dB, max relative error 1; of 4 elements 1 saturated, 1 underflowed, 0 NaN)
    """
    xp = module_of_x(x)
    values, codes = values_and_codes(q, xp)
    require_shape(x, values)
    return error_of(x, values, codes)


def error_of(x: Array, values: Array, codes: Array | None) -> ErrorReport:
    """Return the report for the results of `values_and_codes`."""
    return _measured(x, values, codes, local=False)[0]


def error_and_local(x: Array, q: Any) -> tuple[ErrorReport, float]:
    """Return (the result of `error`, the SQNR of values beside larger ones, in decibels).

    The latter is 10 log10(1 / mean(Σ (v − x)² / Σ x²)) over runs of 32 adjacent values, each without its
    largest one and its outliers (`losses.OUTLIER`), and with a ratio of at most 1: no value counts more
    because others are smaller, and values that set scales do not count. Without runs of two nonzero values it
    is the SQNR of all.
    """
    values, codes = values_and_codes(q, module_of_x(x))
    require_shape(x, values)
    return _measured(x, values, codes, local=True)


def _measured(x: Array, values: Array, codes: Array | None, local: bool) -> tuple[ErrorReport, float]:
    xp = module_of_x(x)
    flat, flat_values = (contiguous(a).reshape(-1) for a in (x, values))
    flat_codes = None if codes is None else codes.reshape(-1)
    if not x.size:
        known = () if codes is None else (0, 0, 0.0, 0.0)
        return ErrorReport(0, math.inf, 0.0, None if codes is None else 0, 0, 0, 0, *known), math.inf
    if executor_of(xp) == "reference":
        table = _by_numpy(flat, flat_values, flat_codes, local)
    else:
        table = asnumpy(on_gpu.error_sums(flat, flat_values, flat_codes, local))
    signal, noise, *sums = table[:, :-2].sum(axis=0).tolist()
    counts, squares, (of_runs, runs) = sums[:6], sums[6], sums[7:] if local else (0, 0)
    largest_normal, largest = table[:, -2:].max(axis=0).tolist()
    saturated, underflowed, nan, nonfinite, normal, subnormal = map(int, counts)
    whole = (int(x.size), _decibels(signal, noise), largest)
    beside = _decibels(runs, of_runs) if runs else whole[1]
    if codes is None:
        return ErrorReport(*whole, None, underflowed, nan, nonfinite), beside
    return ErrorReport(*whole, saturated, underflowed, nan, nonfinite, normal, subnormal,
                       math.sqrt(squares / max(normal, 1)), largest_normal), beside


def _by_numpy(x: np.ndarray, values: np.ndarray, codes: np.ndarray | None, local: bool) -> np.ndarray:
    with np.errstate(invalid="ignore"):             # a signalling NaN is invalid
        return np.stack([error_sums(x[piece], values[piece], None if codes is None else codes[piece], local)
                         for piece in pieces.of_line(x.size)])


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
