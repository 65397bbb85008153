"""Ground rules (docs/numerics.md, section 0): every rounding of every op, as named NumPy operations.

f32 arithmetic in NumPy is correctly rounded and keeps subnormals; added here are saturation, one NaN pattern
per format, and E8M0.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import backend
from ..arrays import bits
from ..formats import FORMATS, FP8_DTYPES, float8_e8m0fnu, float32
from ..layouts import Block, cdiv

F32_ONE = np.float32(1)
F32_NAN = np.uint32(0x7FC00000)
F32_MAX = np.finfo(np.float32).max


def widen(a: np.ndarray) -> np.ndarray:
    """Return the elements as f32, exactly (rules 3 and 5)."""
    if a.dtype == float8_e8m0fnu:
        e = a.view(np.uint8).astype(np.uint32)
        return np.where(e == 0, np.uint32(0x00400000), np.where(e == 255, F32_NAN, e << 23)).view(np.float32)
    if a.dtype in FP8_DTYPES:           # six times as fast as ml_dtypes
        return np.asarray(np.take(_fp8_values(a.dtype), a.view(np.uint8)))
    return a.astype(np.float32)


@functools.cache
def _fp8_values(dtype: np.dtype[Any]) -> np.ndarray:
    """Return the value of each code."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def narrow(v: np.ndarray, dtype: np.dtype[Any], saturate: bool = True) -> np.ndarray:
    """Round f32 values to `dtype`, to nearest even with subnormals. FP8 saturates unless `saturate` is False.
    NaN has one pattern."""
    if dtype == float8_e8m0fnu:
        return round_up_e8m0(v)
    f = FORMATS[dtype]
    nan = np.isnan(v)
    if dtype in FP8_DTYPES and saturate:
        v = np.clip(v, np.float32(-f.max), np.float32(f.max))
    elif f.inf is None:
        # NaN beyond the last tie to 448, since E4M3 has no Inf
        nan |= np.abs(v) > 464
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.asarray(v).astype(dtype)
    bits(out)[nan] = f.nan
    return out


def narrow_f64(v: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Round f64 values once to float32, float16 or bfloat16. The step through f32 rounds to odd: dropped bits
    stay visible in the last bit, and f32 has enough bits more than the other two that the second step rounds
    like the exact value."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = np.asarray(v).astype(np.float32)
    if dtype != float32:
        beyond = np.isfinite(v) & (np.abs(single) > np.abs(v))
        single = np.where(beyond, np.nextafter(single, np.float32(0)), single)
        inexact = np.isfinite(v) & (single != v)
        bits(single)[inexact] |= 1
    return narrow(single, dtype)


def round_up_e8m0(v: np.ndarray) -> np.ndarray:
    """RP8: the E8M0 byte of the smallest power of two not below v. 255 if there is none (nonzero negative
    values, Inf, NaN)."""
    u = bits(np.asarray(v, np.float32))
    exponent, mantissa = u >> 23 & 0xFF, u & 0x7FFFFF
    e = np.where(exponent == 0, mantissa > 0x400000, exponent + (mantissa != 0))
    e = np.where((exponent == 255) | ((u >> 31 == 1) & (u != 0x80000000)), 255, e)
    return e.astype(np.uint8).view(float8_e8m0fnu)


def one_nan(v: np.ndarray) -> np.ndarray:
    """Replace every NaN of f32 values by 0x7FC00000 (rule 4)."""
    return narrow(v, float32)


def mul(a: np.ndarray, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(np.multiply(a, b, dtype=np.float32))


def add(a: Any, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.add(a, b, dtype=np.float32))


def sub(a: Any, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.subtract(a, b, dtype=np.float32))


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """fl(a * b + c), rounded once. The product is exact in f64. The f64 sum rounds to f32 like the exact sum,
    unless it is halfway between two f32 values (then it ends in 28 zeros): there it is moved back towards the
    exact sum."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.asarray(product + c)
        tie = (total.view(np.uint64) & np.uint64(0x0FFFFFFF)) == 0
        if tie.any():
            x, y, s = (np.broadcast_to(v, total.shape)[tie].astype(np.float64) for v in (product, c, total))
            part = s - x
            # the exact error of s; NaN where s is not finite
            error = (x - (s - part)) + (y - part)
            total[tie] = np.where(error == 0, s,
                                  np.nextafter(s,
                                               np.where(error > 0, np.inf, np.where(error < 0, -np.inf, s))))
        return total.astype(np.float32)


#: Constants of exp: log2 e, ln 2 in two parts, the polynomial's coefficients (that of r^5 first), and 1.5 *
#: 2^23, whose addition rounds to an integer.
_LOG2_E, _LN2, _LN2_REST = np.array([0x3FB8AA3B, 0x3F317218, 0xB102E308], np.uint32).view(np.float32)
_EXP_COEFFICIENTS = np.array(
    [0x3C076C36, 0x3D2BA173, 0x3E2AAE85, 0x3EFFFED3, 0x3F7FFFF7, 0x3F800000], np.uint32).view(np.float32)
_TO_INTEGER = np.float32(12582912)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x within two ulps, by a fixed sequence of operations (section 9)."""
    # beyond these bounds the result is 0 or Inf; NaN stays
    x = np.where(x < -104, np.float32(-104), np.where(x > 89, np.float32(89), x))
    n = sub(fma(x, _LOG2_E, _TO_INTEGER), _TO_INTEGER)
    r = fma(n, -_LN2_REST, fma(n, -_LN2, x))
    p = _EXP_COEFFICIENTS[0]
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = fma(p, r, coefficient)
    whole = np.where(np.isnan(x), 0, n).astype(np.int32)
    half = whole >> 1
    # the power as two factors, so that a subnormal result is rounded once
    return mul(mul(p, np.ldexp(F32_ONE, half)), np.ldexp(F32_ONE, whole - half))


def sigmoid(a: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-a))."""
    return div(F32_ONE, add(F32_ONE, exp(-a)))


def polynomial(coefficients: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Evaluate by Horner's rule with fma; the coefficient of the largest power first."""
    p = coefficients[0]
    for coefficient in coefficients[1:]:
        p = fma(p, t, coefficient)
    return np.asarray(p)


#: Constants of the normal tail: its end, e (the coefficient of t^7 first), p of 2^f, and 1.5 * 2^23 - 1,
#: whose addition rounds to an integer, less 1; of erf: sqrt 2 and R.
_TAIL_END, _SQRT2 = np.array([0x413038AA, 0x3FB504F3], np.uint32).view(np.float32)
_TAIL_COEFFICIENTS = np.array([0xB598770D, 0x379BB6D0, 0xB8B3A842, 0xB9C83EA7, 0x3BF1F2B7, 0xBD57EBE1,
                               0xBEEB1436, 0xBF9357A8], np.uint32).view(np.float32)
_TAIL_TO_INTEGER = np.float32(12582911)
_POWER_COEFFICIENTS = np.array(
    [0x3AADED2C, 0x3C1E7457, 0x3D635B6C, 0x3E75FCE1, 0x3F317215, 0x3F800000], np.uint32).view(np.float32)
_ERF_COEFFICIENTS = np.array(
    [0xBA13A34E, 0x3BA1243F, 0xBCDAD1C4, 0x3DE7049F, 0xBEC0933A, 0x3E0375D1], np.uint32).view(np.float32)
_TANH_COEFFICIENTS = np.array([0x3C86A8BB, 0xBD57BE9B, 0x3E08677E, 0xBEAAAA29], np.uint32).view(np.float32)
_TANH_FROM = np.float32(0.55)


def tail_argument(a: np.ndarray) -> np.ndarray:
    """Return |a|, clamped to the end of the tail. NaN stays."""
    return np.minimum(np.abs(a), _TAIL_END)


def normal_tail(t: np.ndarray) -> np.ndarray:
    """Phi(-t) of the normal distribution for 0 <= t <= 11.0138, by a fixed sequence of operations (section
    13)."""
    e = polynomial(_TAIL_COEFFICIENTS, t)
    shifted = fma(e, t, _TAIL_TO_INTEGER)
    p = polynomial(_POWER_COEFFICIENTS, fma(e, t, sub(_TAIL_TO_INTEGER, shifted)))
    whole = np.where(np.isnan(e), 0, sub(shifted, _TO_INTEGER)).astype(np.int32)
    return (p.view(np.int32) + (whole << 23)).view(np.float32)


def erf(x: np.ndarray) -> np.ndarray:
    """erf x within two ulps, by a fixed sequence of operations (section 13)."""
    tail = sub(F32_ONE, mul(normal_tail(tail_argument(mul(x, _SQRT2))), np.float32(2)))
    near_zero = fma(polynomial(_ERF_COEFFICIENTS, mul(x, x)), x, x)
    return np.where(np.abs(x) >= 1, np.copysign(tail, x), near_zero)


def tanh(u: np.ndarray) -> np.ndarray:
    """tanh u within two ulps, by a fixed sequence of operations (section 13)."""
    tail = sub(F32_ONE, mul(sigmoid(mul(np.abs(u), np.float32(-2))), np.float32(2)))
    square = mul(u, u)
    near_zero = fma(mul(polynomial(_TANH_COEFFICIENTS, square), square), u, u)
    return np.copysign(np.where(np.abs(u) >= _TANH_FROM, tail, near_zero), u)       # -0 stays -0


#: Constants of log: the bits of √½, ln 2, and the coefficients of q (that of t^7 first); of log1p: the bound
#: √2 - 1.
_SQRT_HALF_BITS = 0x3F3504F3
_LOG_COEFFICIENTS = np.array([0x3DB2E9EC, 0xBE1286FD, 0x3E18C38F, 0xBE29AE10, 0x3E4C693E, 0xBE80024F,
                              0x3EAAAB7A, 0xBEFFFFFD], np.uint32).view(np.float32)
_SQRT2_LESS_ONE = np.uint32(0x3ED413CD).view(np.float32)


def log(x: np.ndarray) -> np.ndarray:
    """ln x for normal numbers from 1 on, by a fixed sequence of operations (section 14)."""
    exponent = (x.view(np.int32) - np.int32(_SQRT_HALF_BITS)) >> 23
    reduced = (x.view(np.int32) - (exponent << 23)).view(np.float32)
    return fma(exponent.astype(np.float32), _LN2, _log_near_one(sub(reduced, F32_ONE)))


def log1p(y: np.ndarray) -> np.ndarray:
    """ln(1 + y) for 0 <= y <= 1, by a fixed sequence of operations (section 14)."""
    upper = add(_LN2, _log_near_one(mul(sub(y, F32_ONE), np.float32(0.5))))
    return np.where(y < _SQRT2_LESS_ONE, _log_near_one(y), upper)


def _log_near_one(t: np.ndarray) -> np.ndarray:
    """ln(1 + t) for √½ - 1 <= t <= √2 - 1."""
    q = _LOG_COEFFICIENTS[0]
    for coefficient in _LOG_COEFFICIENTS[1:]:
        q = fma(q, t, coefficient)
    return fma(mul(t, t), q, t)


def sqrt(a: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.sqrt(a, dtype=np.float32)


def tree_sum(terms: np.ndarray, axis: int) -> np.ndarray:
    """Sum along an axis by the fixed tree (rule 11), which adds adjacent pairs, level by level. An unpaired
    last term passes unchanged."""
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
    """max |x|, starting from 0 (rule 6), as f32 [1]. nan='ignore' skips NaN; 'propagate' makes the result NaN
    if there is one."""
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(x)
    if nan == "propagate" and is_nan.any():
        return np.array([F32_NAN]).view(np.float32)
    # magnitudes order like their bits, in every float format
    magnitude = bits(np.asarray(np.abs(x)))
    top = np.max(magnitude, initial=magnitude.dtype.type(0), where=~is_nan)
    return widen(np.asarray(top).reshape(1).view(x.dtype))


def raise_amax(buffer: np.ndarray, value: np.ndarray) -> None:
    """buffer = max(buffer, value) as signed integers, like the kernels' atomic maximum."""
    words = buffer.view(np.int32)
    np.maximum(words, value.view(np.int32).reshape(words.shape), out=words)


def times_power_of_two(value: float, exponent: int) -> np.float32:
    """fl(value * 2^exponent) for a value of a few significant bits. In f64 the product is exact, or far
    outside the range of f32."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.ldexp(np.float64(value), min(max(exponent, -1000), 1000)))


def floor_to_power_of_two(v: np.ndarray) -> np.ndarray:
    """Return the largest power of two not above a finite v >= 0. Only a subnormal keeps a mantissa bit, its
    leading one. 0 stays 0."""
    # v = fraction * 2^exponent with 0.5 <= fraction < 1
    fraction, exponent = np.frexp(v)
    return np.where(fraction == 0, v, np.ldexp(F32_ONE, exponent - 1)).astype(np.float32)


def scale_from_amax(amax: np.ndarray, target: np.float32, eps: np.float32, largest: np.float32,
                    pow2: bool) -> np.ndarray:
    """fl(target / amax) with amax at least eps, at most `largest`; 1 where amax is 0, Inf or NaN (section 1).
    """
    a = np.where(amax < eps, eps, amax)
    scale = div(target, a)
    scale = np.where(np.isinf(scale), largest, scale)
    nothing = (a == 0) | ~np.isfinite(a)
    scale = np.where(nothing, F32_ONE, scale)
    return floor_to_power_of_two(scale) if pow2 else scale


def in_blocks(a: Any, block: Block) -> Any:
    """Reshape a NumPy or CuPy array […, M, K] to […, rows of blocks, rows, columns of blocks, columns];
    partial blocks are padded with zeros."""
    *batch, rows, columns = a.shape
    height, width = (min(extent or whole, whole)
                     for extent, whole in zip(block, (max(rows, 1), max(columns, 1)), strict=True))
    down, across = cdiv(rows, height), cdiv(columns, width)
    padded = backend.module_of(a).zeros((*batch, down * height, across * width), a.dtype)
    padded[..., :rows, :columns] = a
    return padded.reshape(*batch, down, height, across, width)
