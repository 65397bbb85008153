"""Ground rules (docs/numerics.md, section 0): every rounding that any op performs, as named NumPy operations.

f32 arithmetic in NumPy is correctly rounded and keeps subnormals; what is added here is saturation, one NaN pattern per
format, and E8M0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import bits
from ..formats import FORMATS, FP8_DTYPES, float8_e8m0fnu, float32

F32_ONE = np.float32(1)
F32_NAN = np.uint32(0x7FC00000)
F32_MAX = np.finfo(np.float32).max


def widen(a: np.ndarray) -> np.ndarray:
    """The exact f32 values (rules 3 and 5)."""
    if a.dtype == float8_e8m0fnu:
        e = a.view(np.uint8).astype(np.uint32)
        return np.where(e == 0, np.uint32(0x00400000), np.where(e == 255, F32_NAN, e << 23)).view(np.float32)
    return a.astype(np.float32)


def narrow(v: np.ndarray, dtype: np.dtype[Any], saturate: bool = True) -> np.ndarray:
    """f32 values rounded to `dtype`: nearest-even, subnormals kept, FP8 saturating unless told otherwise, NaN as one pattern."""
    if dtype == float8_e8m0fnu:
        return round_up_e8m0(v)
    f = FORMATS[dtype]
    nan = np.isnan(v)
    if dtype in FP8_DTYPES and saturate:
        v = np.clip(v, np.float32(-f.max), np.float32(f.max))
    elif f.inf is None:
        nan |= np.abs(v) > 464                                              # past the last tie to 448: E4M3 has no Inf
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.asarray(v).astype(dtype)
    bits(out)[nan] = f.nan
    return out


def round_up_e8m0(v: np.ndarray) -> np.ndarray:
    """RP8: the smallest power of two not below v; 255 where there is none (negative nonzero, Inf, NaN)."""
    u = bits(np.asarray(v, np.float32))
    exponent, mantissa = u >> 23 & 0xFF, u & 0x7FFFFF
    e = np.where(exponent == 0, mantissa > 0x400000, exponent + (mantissa != 0))
    e = np.where((exponent == 255) | ((u >> 31 == 1) & (u != 0x80000000)), 255, e)
    return e.astype(np.uint8).view(float8_e8m0fnu)


def one_nan(v: np.ndarray) -> np.ndarray:
    """f32 with every NaN as 0x7FC00000 (rule 4)."""
    return narrow(v, float32)


def mul(a: np.ndarray, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(np.multiply(a, b, dtype=np.float32))


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.add(a, b, dtype=np.float32))


def tree_sum(terms: np.ndarray, axis: int) -> np.ndarray:
    """The sum along an axis by the fixed tree (rule 11): adjacent pairs, level by level; an unpaired last term passes unchanged."""
    terms = np.moveaxis(terms, axis, 0)
    if not len(terms):
        return np.zeros(terms.shape[1:], np.float32)
    while len(terms) > 1:
        pairs = len(terms) // 2
        terms = np.concatenate([add(terms[:2 * pairs:2], terms[1:2 * pairs:2]), terms[2 * pairs:]])
    return one_nan(terms[0])


def div(a: Any, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        return np.asarray(np.divide(a, b, dtype=np.float32))


def amax(x: np.ndarray, nan: str = "ignore") -> np.ndarray:
    """max |x| from 0 (rule 6), f32 [1]. nan='ignore' skips NaN, 'propagate' makes the result NaN where there is one."""
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(x)
    if nan == "propagate" and is_nan.any():
        return np.array([F32_NAN]).view(np.float32)
    # Magnitudes order like their bits, in every float format.
    magnitude = bits(np.asarray(np.abs(x)))
    top = np.max(magnitude, initial=magnitude.dtype.type(0), where=~is_nan)
    return widen(np.asarray(top).reshape(1).view(x.dtype))


def raise_amax(buffer: np.ndarray, value: np.ndarray) -> None:
    """buffer = max(buffer, value) as signed integers, which is what the kernels' atomic maximum does."""
    words = buffer.view(np.int32)
    np.maximum(words, value.view(np.int32).reshape(words.shape), out=words)


def times_power_of_two(value: float, exponent: int) -> np.float32:
    """fl(value * 2^exponent) for a value of a few significant bits: exact in f64, or far beyond f32 on either side."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.ldexp(np.float64(value), min(max(exponent, -1000), 1000)))


def floor_to_power_of_two(v: np.ndarray) -> np.ndarray:
    """The largest power of two not above a finite v >= 0: the mantissa cleared, but for a subnormal's leading one; 0 stays 0."""
    fraction, exponent = np.frexp(v)                                        # v = fraction * 2^exponent, 0.5 <= fraction < 1
    return np.where(fraction == 0, v, np.ldexp(F32_ONE, exponent - 1)).astype(np.float32)


def scale_from_amax(amax: np.ndarray, target: np.float32, eps: np.float32, largest: np.float32, pow2: bool) -> np.ndarray:
    """fl(target / amax) with amax at least eps, at most `largest`; 1 where amax is 0, Inf or NaN (section 1)."""
    a = np.where(amax < eps, eps, amax)
    scale = div(target, a)
    scale = np.where(np.isinf(scale), largest, scale)
    nothing = (a == 0) | ~np.isfinite(a)
    scale = np.where(nothing, F32_ONE, scale)
    return floor_to_power_of_two(scale) if pow2 else scale
