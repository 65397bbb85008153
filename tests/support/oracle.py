"""Rounding by definition: a table of every value of a format, and the nearest entry. ml_dtypes only provides
dtypes.

All values and midpoints of the formats are exact in f64, so comparisons of f64 numbers decide every rounding
exactly. Also the inputs that the tests of numerics share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


def _f64(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):                 # raised for a signalling NaN
        return values.astype(np.float64)


@dataclass(frozen=True)
class FloatFormat:
    """A sign bit, `exponent_bits`, `mantissa_bits`; `codes`: number of finite magnitudes (the rest: Inf and
    NaN)."""

    dtype: np.dtype[Any]
    exponent_bits: int
    mantissa_bits: int
    codes: int
    nan: int                                # the pattern that this library writes
    inf: int | None

    @property
    def storage(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.dtype.itemsize}")

    @property
    def sign(self) -> int:
        return 1 << (8 * self.dtype.itemsize - 1)

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """f64 values of the codes 0, 1, 2, …, and the next value if the format continued."""
        code = np.arange(self.codes + 1)
        exponent, mantissa = code >> self.mantissa_bits, code & (1 << self.mantissa_bits) - 1
        bias = 2 ** (self.exponent_bits - 1) - 1
        significand = np.where(exponent == 0, mantissa, mantissa + (1 << self.mantissa_bits))
        return np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - self.mantissa_bits)

    @cached_property
    def midpoints(self) -> np.ndarray:
        return np.asarray((self.magnitudes[:-1] + self.magnitudes[1:]) / 2)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return f64 values of codes, sign included; Inf and NaN too."""
        magnitude = codes.astype(np.int64) & self.sign - 1
        value = self.magnitudes[np.minimum(magnitude, self.codes - 1)]
        value = np.where(magnitude < self.codes, value, np.inf if self.inf is not None else np.nan)
        value = np.where(magnitude > (self.codes - 1 if self.inf is None else self.inf), np.nan, value)
        return np.where(codes & self.sign, -value, value)

    def encode(self, values: np.ndarray, saturate: bool) -> np.ndarray:
        """Return codes of the nearest values, ties to the even code; past the last midpoint the maximum, or
        Inf (NaN without one)."""
        magnitude = np.abs(_f64(values))
        code = np.searchsorted(self.midpoints, magnitude, side="left")      # number of midpoints below
        tie = magnitude == self.midpoints[np.minimum(code, self.codes - 1)]
        code += tie & (code % 2 == 1)
        past = code >= self.codes
        code[past] = self.codes - 1 if saturate else self.nan if self.inf is None else self.inf
        code += np.where(np.signbit(values) & ~(past & (code == self.nan)), self.sign, 0)
        code[np.isnan(values)] = self.nan
        return code.astype(self.storage)


E4M3FN = FloatFormat(np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, 0x7F, 0x7F, None)
E5M2 = FloatFormat(np.dtype(ml_dtypes.float8_e5m2), 5, 2, 0x7C, 0x7F, 0x7C)
FP8 = (E4M3FN, E5M2)
BFLOAT16 = FloatFormat(np.dtype(ml_dtypes.bfloat16), 8, 7, 0x7F80, 0x7FC0, 0x7F80)
FLOAT16 = FloatFormat(np.dtype(np.float16), 5, 10, 0x7C00, 0x7E00, 0x7C00)
HALVES = (BFLOAT16, FLOAT16)

_POWERS = np.ldexp(1.0, np.arange(-127, 128))


def encode_e8m0(values: np.ndarray) -> np.ndarray:
    """Round up to a power of two: 255 above 2**127 and for negative values and NaN; zeros of both signs give
    2**-127."""
    codes = np.searchsorted(_POWERS, _f64(values), side="left")
    return np.where(np.isnan(values) | (values < 0), 255, codes).astype(np.uint8)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    return np.append(_POWERS, np.nan)[codes]


def patterns(f: FloatFormat) -> np.ndarray:
    """Return every value of a one- or two-byte format: all NaN patterns, infinities, zeros, subnormals."""
    return np.arange(2 * f.sign, dtype=np.uint32).astype(f.storage).view(f.dtype)


def with_neighbours(magnitudes: np.ndarray) -> np.ndarray:
    """Return f32 values, and the f32 values just above and below, of both signs."""
    bits = magnitudes.astype(np.float32).view(np.uint32)
    below = np.where(bits == 0, 0, bits - np.uint32(1)).astype(np.uint32)
    near = np.concatenate([bits, bits + np.uint32(1), below])
    return np.concatenate([near, near | np.uint32(0x80000000)]).view(np.float32)


def boundaries(f: FloatFormat) -> np.ndarray:
    """Return values where rounding to `f` can go wrong: around every value, every midpoint, and the limits of
    f32."""
    limits = np.array([0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**127, np.finfo(np.float32).max, np.inf,
                       np.nan])
    points = np.concatenate([f.magnitudes, f.midpoints, limits])
    return with_neighbours(points[~((points > limits[-3]) & np.isfinite(points))])


def e8m0_boundaries() -> np.ndarray:
    """Return values around every power of two, every 1.5 * 2**e, and the limits of f32."""
    return with_neighbours(np.concatenate([[0, 2.0**-149, np.finfo(np.float32).max, np.inf], _POWERS,
                                           1.5 * _POWERS]))


def random_f32(f: FloatFormat | None = None, chunks: int = 16, size: int = 1 << 20) -> Iterator[np.ndarray]:
    """Yield chunks * size f32 values in pieces: any bits, or if `f` is given any mantissa with exponents in
    and around its range."""
    rng = np.random.default_rng(20)
    for _ in range(chunks):
        bits = rng.integers(0, 1 << 32, size, np.uint32)
        if f is not None:
            smallest, largest = np.frexp(f.magnitudes[[1, -2]])[1] + 126  # exponent fields in f32
            exponent = rng.integers(max(smallest - 2, 0), min(largest + 2, 254), size, np.uint32,
                                    endpoint=True)
            bits = bits & np.uint32(0x807FFFFF) | exponent << np.uint32(23)
        yield bits.view(np.float32)
