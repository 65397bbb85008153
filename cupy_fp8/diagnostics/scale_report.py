"""The distribution of a tensor's scales, and which of them are not positive numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy, bits, contiguous
from ..formats import float8_e8m0fnu
from ..results import Quantized, Scaled, as_scaled, facts_table
from . import pieces

__all__ = ["ScaleReport", "ScaleWarning", "scales"]

#: floor(log2) of the smallest and the largest positive finite f32
_LOWEST, _HIGHEST = -149, 127
#: scales that are not positive finite numbers, counted after the exponents
_UNUSABLE = {"zero": "0 (values of 0)", "negative": "negative (values of the other sign)",
             "infinite": "Inf (values of Inf and NaN)", "nan": "NaN (values of NaN)"}
_INF = np.uint32(0x7F800000)
_ZERO, _NEGATIVE, _INFINITE, _NAN = range(_HIGHEST - _LOWEST + 1, _HIGHEST - _LOWEST + 1 + len(_UNUSABLE))


class ScaleWarning(UserWarning):
    """Data have scales that are 0, negative, Inf or NaN: whole blocks are dequantised as 0 or NaN, or with
    the opposite sign. `warnings.filterwarnings("error", category=cupy_fp8.diagnostics.ScaleWarning)` makes it
    an error."""


@dataclass(frozen=True)
class ScaleReport:
    """What `scales` found. All but the counts refers to positive finite scale_inv, and is NaN if there are
    none.

    scales              all of them, without padding
    zero, negative, infinite, nan
                        how many are ±0, below 0 (−Inf too), Inf, and NaN
    minimum, maximum    of scale_inv
    mean, std           of scale_inv: the mean and the standard deviation √(Σ (s − mean)² / n)
    log2_mean, log2_std the same for log2 scale_inv, in powers of two
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
        """Scales that are not positive finite numbers."""
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
    """Describe the distribution of the scales of quantised data: a histogram by powers of two, extremes, mean
    and standard deviation, and how many are 0, negative, Inf or NaN.

    q : per-tensor data, or data with a scale per block in any layout and dtype of scales (for a `Quantized`
        its row-wise part, if there is one), NumPy or CuPy.
    Returns a `ScaleReport`. Warns with `ScaleWarning` where a scale is 0, negative, Inf or NaN. Computed on
    the host, in f64 and in pieces of 2**20; a GPU sends the scales. Raises TypeError.

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
    """Return scale_inv without padding: f32 or E8M0."""
    return s.scale_inv if s.block is None else s.to_layout("compact").scale_inv


def scales_by_block(s: Scaled) -> Array:
    """Return the scales of blocks, by rows and columns of blocks of the logical matrix."""
    scale_inv = compact_scales(s)
    # scales of 2-D blocks are in the order of the stored data
    return scale_inv.swapaxes(-1, -2) if s.transposed and s.block and 1 not in s.block else scale_inv


def report_of(scale_inv: Array) -> ScaleReport:
    """Return the report of f32 or E8M0 scales without padding. Does not warn."""
    flat = contiguous(asnumpy(scale_inv)).reshape(-1)
    parts = [_tallied(flat[piece]) for piece in pieces.of_line(flat.size)]
    if not parts:
        return ScaleReport(0, 0, 0, 0, 0, *_figures(np.zeros((0, 7))), 0, ())
    counts = np.stack([found for found, _ in parts]).sum(axis=0)
    moments = np.stack([found for _, found in parts])
    used = np.flatnonzero(counts[:_ZERO])
    histogram = counts[used[0]:used[-1] + 1].tolist() if used.size else []
    zero, negative, infinite, nan = counts[_ZERO:].tolist()
    return ScaleReport(int(flat.size), zero, negative, infinite, nan, *_figures(moments[moments[:, 0] > 0]),
                       int(used[0]) + _LOWEST if used.size else 0, tuple(histogram))


def warn_of(report: ScaleReport) -> None:
    """Warn with ScaleWarning if some scales are not positive finite numbers."""
    odd = [f"{count:,} {'is' if count == 1 else 'are'} {kind}" for name, kind in _UNUSABLE.items()
           if (count := getattr(report, name))]
    if odd:
        backend.warn(f"q: of {report.scales:,} scales, {', '.join(odd)}; "
                     f"diagnostics.blocks(x, q).exponents shows where", ScaleWarning)


def warn_of_unusable(scale_inv: Array) -> None:
    """Do the same as `warn_of`, without making the report if all scales are usable."""
    scale_inv = asnumpy(scale_inv)
    words = bits(scale_inv)
    usable = words != 0xFF if scale_inv.dtype == float8_e8m0fnu else words - np.uint32(1) < _INF - 1
    if not usable.all():
        warn_of(report_of(scale_inv))


def log2_of_scales(scale_inv: np.ndarray) -> np.ndarray:
    """Return log2 as f32."""
    key, significand, exponent = _decoded(scale_inv)
    with np.errstate(divide="ignore"):
        log2 = np.log2(significand) + exponent
    log2 = np.where(key == _ZERO, -np.inf, np.where(key == _INFINITE, np.inf, log2))
    return np.where((key == _NEGATIVE) | (key == _NAN), np.nan, log2).astype(np.float32)


def _decoded(scale_inv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (floor(log2) − _LOWEST or one of _ZERO … _NAN, significand, exponent): the magnitude is
    significand * 2**exponent, exactly; the significand is 1 if there is no positive finite value."""
    u = bits(scale_inv).astype(np.int64)
    if scale_inv.dtype == float8_e8m0fnu:
        return np.where(u == 0xFF, _NAN, u - 127 - _LOWEST), np.ones(u.shape), u - 127
    field, fraction = u >> 23 & 0xFF, u & 0x7FFFFF
    significand = np.where(field == 0, fraction, fraction + (1 << 23))
    exponent = np.maximum(field, 1) - 150
    key = np.frexp(significand.astype(np.float64))[1].astype(np.int64) - 1 + exponent - _LOWEST
    key = np.where(field == 0xFF, np.where(fraction == 0, _INFINITE, _NAN), key)
    key = np.where((u >> 31 == 1) & (key != _NAN), _NEGATIVE, key)
    key = np.where(significand == 0, _ZERO, key)
    return key, np.where(key < _ZERO, significand, 1).astype(np.float64), exponent


def _tallied(scale_inv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (counts by key, f64 [7]: the number of positive finite scales, their minimum, maximum, mean, sum
    of squared deviations, and the last two for log2)."""
    key, significand, exponent = _decoded(scale_inv)
    used = key < _ZERO
    count = used.sum(dtype=np.float64)
    value = np.ldexp(significand, exponent.astype(np.int32))
    moments = [count, np.where(used, value, np.inf).min(), np.where(used, value, -np.inf).max()]
    for a in (value, np.log2(significand) + exponent):
        mean = np.where(used, a, 0.0).sum() / np.maximum(count, 1.0)
        moments += [mean, np.where(used, np.square(a - mean), 0.0).sum()]
    return np.bincount(key, minlength=_NAN + 1), np.stack(moments)


def _figures(moments: np.ndarray) -> tuple[float, float, float, float, float, float]:
    """Return minimum, maximum, mean, std, log2_mean and log2_std of all pieces from the moments of each, by
    the rule for a union of samples (Chan, Golub and LeVeque 1983)."""
    if not len(moments):
        return (math.nan, ) * 6
    count, low, high = moments[:, 0], float(moments[:, 1].min()), float(moments[:, 2].max())
    mean, std = _union(count, moments[:, 3], moments[:, 4])
    log2_mean, log2_std = _union(count, moments[:, 5], moments[:, 6])
    if low == high:                     # exact, while the mean of rounded sums would not be
        return low, high, low, 0.0, log2_mean, 0.0
    return low, high, mean, std, log2_mean, log2_std


def _union(count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> tuple[float, float]:
    """Return (mean, standard deviation)."""
    whole = float((count * mean).sum() / count.sum())
    return whole, math.sqrt((squares + count * np.square(mean - whole)).sum() / count.sum())
