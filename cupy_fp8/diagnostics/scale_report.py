"""How the scales of a tensor are spread, and which of them are no positive numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, bits, contiguous
from ..formats import float8_e8m0fnu
from ..results import Quantized, Scaled, as_scaled, facts_table
from . import pieces

__all__ = ["ScaleReport", "ScaleWarning", "scales"]

#: floor(log2) of the smallest and the largest positive finite f32.
_LOWEST, _HIGHEST = -149, 127
#: Counted after the exponents: scales that are no positive finite numbers.
_UNUSABLE = {"zero": "0 (values of 0)", "negative": "negative (values of the other sign)",
             "infinite": "Inf (values of Inf and NaN)", "nan": "NaN (values of NaN)"}
_ZERO, _NEGATIVE, _INFINITE, _NAN = range(_HIGHEST - _LOWEST + 1, _HIGHEST - _LOWEST + 1 + len(_UNUSABLE))


class ScaleWarning(UserWarning):
    """Data have scales that are 0, negative, Inf or NaN: whole blocks come back as 0 or NaN, or with the
    other sign. `warnings.filterwarnings("error", category=cupy_fp8.diagnostics.ScaleWarning)` makes it an
    error."""


@dataclass(frozen=True)
class ScaleReport:
    """What `scales` found. All but the counts is about the scale_inv that are positive and finite, and NaN
    where there are none.

    scales              all of them, without padding
    zero, negative, infinite, nan
                        how many are ±0, below 0 (−Inf too), Inf, and NaN
    minimum, maximum    of scale_inv
    mean, std           of scale_inv: the mean and the standard deviation √(Σ (s − mean)² / n)
    log2_mean, log2_std the same of log2 scale_inv, in powers of two
    first_exponent      the exponent at which the histogram begins; 0 if it is empty
    histogram           histogram[i] of them are at least 2**(first_exponent + i) and less than twice that
    """

    scales: int
    zero: int
    negative: int
    infinite: int
    nan: int
    minimum: float
    maximum: float
    mean: float
    std: float
    log2_mean: float
    log2_std: float
    first_exponent: int
    histogram: tuple[int, ...]

    @property
    def unusable(self) -> int:
        """Scales that are no positive finite numbers."""
        return self.zero + self.negative + self.infinite + self.nan

    def _facts(self) -> dict[str, str]:
        known = self.scales > self.unusable
        spread = f"{self.log2_mean:.2f} ± {self.log2_std:.2f}" if known else "unknown"
        span = f"{math.log2(self.minimum):.4g} … {math.log2(self.maximum):.4g}" if known else "unknown"
        return {"scales": f"{self.scales:,}", "log2 scale_inv": span, "mean ± deviation": spread,
                **{name: f"{getattr(self, name):,}" for name in _UNUSABLE}}

    def __repr__(self) -> str:
        f = self._facts()
        odd = ", ".join(f"{f[name]} {name}" for name in _UNUSABLE if getattr(self, name))
        return (f"ScaleReport({f['scales']} scales, log2 scale_inv {f['log2 scale_inv']}, mean "
                f"{f['mean ± deviation']}{odd and '; ' + odd})")

    def _repr_html_(self) -> str:
        return facts_table(self._facts())


def scales(q: Scaled | Quantized) -> ScaleReport:
    """Find how the scales of quantised data are spread: a histogram by powers of two, extremes, mean and
    standard deviation, and how many are 0, negative, Inf or NaN.

    q : per-tensor data, or data with a scale per block in any layout and dtype of scales (for a `Quantized`
        its row-wise part, if there is one), NumPy or CuPy.
    Returns a `ScaleReport`. Warns with `ScaleWarning` where a scale is 0, negative, Inf or NaN. Computed
    where the scales are, in f64 and in pieces of 2**20; a GPU sends a few kilobytes. Means and deviations may
    differ in their last digits between NumPy and CuPy, everything else is exact. Raises TypeError.

    The deviation shows what minimum and maximum hide: a few large scales, or two groups of them. It is that
    of the whole set, √(Σ (s − mean)² / n), as in TransformerEngine's scale_inv_std.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.outer([448, 448, 7], np.ones(64)).astype(np.float32)
    >>> report = fp8.diagnostics.scales(fp8.quantize_mx(x))
    >>> report
    ScaleReport(6 scales, log2 scale_inv -6 … 0, mean -2.00 ± 2.83)
    >>> report.first_exponent, report.histogram
    (-6, (2, 0, 0, 0, 0, 0, 4))
    """
    report = report_of(compact_scales(as_scaled(q)))
    warn_of(report)
    return report


def compact_scales(s: Scaled) -> Array:
    """scale_inv without padding: f32 or E8M0."""
    return s.scale_inv if s.block is None else s.to_layout("compact").scale_inv


def scales_by_block(s: Scaled) -> Array:
    """Those of blocks, by rows and columns of blocks of the logical matrix."""
    scale_inv = compact_scales(s)
    # Scales of 2-D blocks follow the order in which the data are stored.
    return scale_inv.swapaxes(-1, -2) if s.transposed and s.block and 1 not in s.block else scale_inv


def report_of(scale_inv: Array) -> ScaleReport:
    """The report of f32 or E8M0 scales without padding. Warns of nothing."""
    xp = backend.module_of(scale_inv)
    flat = contiguous(scale_inv).reshape(-1)
    parts = [_tallied(xp, flat[piece]) for piece in pieces.of_line(flat.size)]
    if not parts:
        return ScaleReport(0, 0, 0, 0, 0, *_figures(np.zeros((0, 7))), 0, ())
    counts = xp.stack([found for found, _ in parts]).sum(axis=0)
    moments = xp.stack([found for _, found in parts])
    if xp is not np:
        counts, moments = counts.get(), moments.get()
    used = np.flatnonzero(counts[:_ZERO])
    histogram = counts[used[0]:used[-1] + 1].tolist() if used.size else []
    zero, negative, infinite, nan = counts[_ZERO:].tolist()
    return ScaleReport(int(flat.size), zero, negative, infinite, nan, *_figures(moments[moments[:, 0] > 0]),
                       int(used[0]) + _LOWEST if used.size else 0, tuple(histogram))


def warn_of(report: ScaleReport) -> None:
    """ScaleWarning if some scales are no positive finite numbers."""
    odd = [f"{count:,} {'is' if count == 1 else 'are'} {kind}" for name, kind in _UNUSABLE.items()
           if (count := getattr(report, name))]
    if odd:
        backend.warn(f"q: of {report.scales:,} scales, {', '.join(odd)}; "
                     f"diagnostics.blocks(x, q).exponents shows where", ScaleWarning)


def log2_of_scales(xp: Any, scale_inv: Array) -> Array:
    """log2 as f32, from the bits: CuPy would take f32 subnormals for zeros."""
    key, significand, exponent = _decoded(xp, scale_inv)
    with np.errstate(divide="ignore"):
        log2 = xp.log2(significand) + exponent
    log2 = xp.where(key == _ZERO, -np.inf, xp.where(key == _INFINITE, np.inf, log2))
    return xp.where((key == _NEGATIVE) | (key == _NAN), np.nan, log2).astype(np.float32)


def _decoded(xp: Any, scale_inv: Array) -> tuple[Array, Array, Array]:
    """(floor(log2) − _LOWEST or one of _ZERO … _NAN, significand, exponent): the magnitude is significand *
    2**exponent, exactly, and the significand is 1 where there is no positive finite value."""
    u = bits(scale_inv).astype(np.int64)
    if scale_inv.dtype == float8_e8m0fnu:
        return xp.where(u == 0xFF, _NAN, u - 127 - _LOWEST), xp.ones(u.shape), u - 127
    field, fraction = u >> 23 & 0xFF, u & 0x7FFFFF
    significand = xp.where(field == 0, fraction, fraction + (1 << 23))
    exponent = xp.maximum(field, 1) - 150
    key = xp.frexp(significand.astype(np.float64))[1].astype(np.int64) - 1 + exponent - _LOWEST
    key = xp.where(field == 0xFF, xp.where(fraction == 0, _INFINITE, _NAN), key)
    key = xp.where((u >> 31 == 1) & (key != _NAN), _NEGATIVE, key)
    key = xp.where(significand == 0, _ZERO, key)
    return key, xp.where(key < _ZERO, significand, 1).astype(np.float64), exponent


def _tallied(xp: Any, scale_inv: Array) -> tuple[Array, Array]:
    """(counts by key, f64 [7]: how many are positive and finite, and of these minimum, maximum, mean, sum of
    squared deviations, and the last two of log2)."""
    key, significand, exponent = _decoded(xp, scale_inv)
    used = key < _ZERO
    count = used.sum(dtype=np.float64)
    value = xp.ldexp(significand, exponent.astype(np.int32))
    moments = [count, xp.where(used, value, np.inf).min(), xp.where(used, value, -np.inf).max()]
    for a in (value, xp.log2(significand) + exponent):
        mean = xp.where(used, a, 0.0).sum() / xp.maximum(count, 1.0)
        moments += [mean, xp.where(used, xp.square(a - mean), 0.0).sum()]
    return xp.bincount(key, minlength=_NAN + 1), xp.stack(moments)


def _figures(moments: np.ndarray) -> tuple[float, float, float, float, float, float]:
    """minimum, maximum, mean, std, log2_mean and log2_std of all pieces from the moments of each, by the rule
    for a union of samples (Chan, Golub and LeVeque 1983)."""
    if not len(moments):
        return (math.nan, ) * 6
    count, low, high = moments[:, 0], float(moments[:, 1].min()), float(moments[:, 2].max())
    mean, std = _union(count, moments[:, 3], moments[:, 4])
    log2_mean, log2_std = _union(count, moments[:, 5], moments[:, 6])
    if low == high:                     # the sums are rounded, and the mean would not be the value
        return low, high, low, 0.0, log2_mean, 0.0
    return low, high, mean, std, log2_mean, log2_std


def _union(count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> tuple[float, float]:
    """(mean, standard deviation)."""
    whole = float((count * mean).sum() / count.sum())
    return whole, math.sqrt((squares + count * np.square(mean - whole)).sum() / count.sum())
