"""Counts what quantisation loses: overflows, underflows, and values under a coarser scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, bits
from ..formats import FORMATS, float8_e4m3fn, float8_e5m2
from ..reference.convert.scaling_aware import target_exponent
from ..reference.numerics import in_blocks, widen

#: By format: (code of the maximum, bound, maximum, whether the bound itself overflows). The bound is half a
#: step past the maximum; values beyond it overflow when rounded to nearest even. A tie rounds to 448 in E4M3,
#: which is even, but overflows in E5M2, where 57344 is odd.
OVERFLOW = {float8_e4m3fn: (0x7E, 464.0, 448.0, False), float8_e5m2: (0x7B, 61440.0, 57344.0, True)}
#: number of sums of `error_sums`, without and with those of runs of RUN adjacent elements
SUMS, LOCAL_SUMS = 11, 13
RUN = 32
#: A value of a run is an outlier from this many powers of two above the run's median on (8 to 16 times the
#: median). One in 10,000 normally distributed values is. Compared with the largest value only, an outlier
#: would hide beside a larger one.
OUTLIER = 4


def error_sums(x: np.ndarray, v: np.ndarray, codes: np.ndarray | None, local: bool = False) -> np.ndarray:
    """Return f64 [SUMS] of one chunk: signal, noise, saturated, underflowed, nan, nonfinite, normal,
    subnormal, the squared relative errors of normal values, with local=True the two of `_of_runs`, and the
    largest relative error of normal values and of all."""
    x, v = x.astype(np.float64), v.astype(np.float64)
    finite, came_back = np.isfinite(x), np.isfinite(v)
    magnitude = finite_magnitude(np, x)
    with np.errstate(all="ignore"):
        gap = np.where(finite, np.where(came_back, np.abs(v - x), np.inf), 0.0)
        relative = np.where(magnitude > 0, gap / magnitude, 0.0)
        lost = losses(np, magnitude, v, codes)
        normal, subnormal = _precision(magnitude, v, came_back & ~lost[0], codes)
        of_normal = np.where(normal, relative, 0.0)
        signal, noise = np.square(magnitude), np.square(gap)
        sums = [a.sum(dtype=np.float64) for a in (signal, noise, *lost, ~finite, normal, subnormal,
                                                  np.square(of_normal))]
        runs = _of_runs(magnitude, gap) if local else ()
        return np.stack([*sums, *runs, of_normal.max(), relative.max()])


def _of_runs(magnitude: np.ndarray, gap: np.ndarray) -> tuple[np.floating, np.floating]:
    """Return (the sum of noise over signal, at most 1 each, of runs without their first largest element and
    their outliers; the number of runs with other nonzero elements). The last run may be shorter."""
    magnitude, gap = (np.append(a, np.zeros(-a.size % RUN)).reshape(-1, RUN) for a in (magnitude, gap))
    kept = ~_outliers(magnitude)
    np.put_along_axis(kept, magnitude.argmax(axis=-1)[:, None], False, axis=-1)
    signal, noise = (np.square(a).sum(axis=-1, where=kept) for a in (magnitude, gap))
    counted = signal > 0
    ratio = np.divide(noise, signal, out=np.ones_like(noise), where=counted & (noise < signal))
    return ratio.sum(where=counted), counted.sum(dtype=np.float64)


def _outliers(magnitude: np.ndarray) -> np.ndarray:
    """Flag the outliers of runs [n, RUN]. Zeros are left out of the median, which is the lower one of an even
    number: up to half of a run's values can be outliers."""
    exponent = magnitude.view(np.int64) >> 52
    last = exponent.max()
    ordered = np.sort(np.where(magnitude > 0, exponent, last + 1), axis=-1)
    used = (magnitude > 0).sum(axis=-1, keepdims=True)
    median = np.take_along_axis(ordered, np.maximum(used - 1, 0) // 2, axis=-1)
    return exponent >= median + OUTLIER


def _precision(magnitude: np.ndarray, v: np.ndarray, kept: np.ndarray,
               codes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Flag (elements whose value is a normal number of the format, those whose value is subnormal), among
    what was kept. A value just below the smallest normal number is subnormal, although it may be rounded to
    that number."""
    if codes is None:
        return np.zeros(1, np.bool_), np.zeros(1, np.bool_)
    code, smallest = bits(codes) & 0x7F, smallest_normal(codes.dtype)
    normal = (code > smallest) | ((code == smallest) & (magnitude >= np.abs(v)))
    used = kept & (magnitude > 0) & (v != 0)
    return used & normal, used & ~normal


def smallest_normal(dtype: np.dtype[Any]) -> int:
    """Return the code of an FP8 format's smallest normal number."""
    return 1 << FORMATS[dtype].mantissa_bits


def finite_magnitude(xp: Any, x: Array) -> Array:
    return xp.where(xp.isfinite(x), xp.abs(x), 0.0)


def losses(xp: Any, magnitude: Array, v: Array, codes: Array | None) -> tuple[Array, Array, Array]:
    """Return (saturated elements, underflowed ones, NaN), as flags."""
    return _overflowed(xp, magnitude, v, codes), (magnitude > 0) & (v == 0), xp.isnan(v)


def negative_zeros(codes: Array) -> Array:
    """Return a flag for each element whose code is −0."""
    return bits(codes) == 0x80


def _overflowed(xp: Any, magnitude: Array, v: Array, codes: Array | None) -> Array:
    if codes is None:
        return xp.zeros(1, np.bool_)
    top, bound, maximum, at_tie = OVERFLOW[codes.dtype]
    # |v| is the maximum times the element's own scale_inv. For an f32 x both products are exact in f64, since
    # they have 24 bits times at most 4.
    with np.errstate(all="ignore"):
        left, right = magnitude * maximum, xp.abs(v) * bound
    return ((bits(codes) & 0x7F) == top) & ((left >= right) if at_tie else (left > right))


def count_per_block(found: Array, rows: int, columns: int) -> Array:
    """Count the set flags of a matrix in each block of rows x columns."""
    return in_blocks(found, (rows, columns)).sum(axis=(1, 3), dtype=np.int32)


def spans_of_tiles(codes: np.ndarray, scales: np.ndarray,
                   tile: tuple[int, int]) -> tuple[np.ndarray, list[int]]:
    """Return (the spans, the counts of a SpanReport) of rows of tiles: codes [rows, K], f32 scales [rows,
    row-blocks]."""
    codes = in_blocks(codes, tile)
    scales = in_blocks(scales.astype(np.float64), (tile[0], 1))[..., 0]
    valid = np.isfinite(scales) & (scales > 0)
    v, s = np.abs(widen(codes)).astype(np.float64), np.where(valid, scales, 1)
    something = (v != 0) & valid[..., None]
    number = something & ~np.isnan(v)
    used = something.any(axis=-1)
    high, low = np.where(used, s, 0).max(axis=1), np.where(used, s, np.inf).min(axis=1)
    high_fraction, high_exponent = np.frexp(high)
    low_fraction, low_exponent = np.frexp(np.where(high > 0, low, 1))
    with np.errstate(divide="ignore"):              # spans of powers of two are exact
        spans = np.where(high > 0, np.log2(high_fraction / low_fraction) + (high_exponent - low_exponent),
                         np.nan)
    products = np.where(number, v * s[..., None], 0)                        # exact
    by_tile = np.where(high > 0, high, 1)[:, None, :, None]
    by_column = np.ldexp(1.0, target_exponent(products.max(axis=1), codes.dtype).astype(np.int32))[:, None]
    counts = [int(used.sum()), int(number.sum())]
    for target in (by_tile, by_column):
        gone = number & (products <= target * (FORMATS[codes.dtype].smallest_subnormal / 2))
        counts += [int((used & ~(something & ~gone).any(axis=-1)).sum()), int(gone.sum())]
    return spans.astype(np.float32), counts
