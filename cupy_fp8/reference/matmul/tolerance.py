"""How far a product may be from the reference: the bound of docs/numerics.md, section 10."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import asnumpy
from ...formats import FORMATS, float32

#: Error of sums relative to the sum of magnitudes: the promised bound, and the one for test cases.
PROMISED = 2.0**-6
SUMS = 2.0**-8


def assert_within(actual: Any, desired: np.ndarray, magnitudes: np.ndarray, name: str = "result",
                  sums: float = SUMS) -> None:
    """Raise AssertionError unless |actual - desired| <= sums · magnitude + one unit in the last place of
    desired, element by element, and actual is Inf or NaN wherever a term of the sum is. magnitudes: the sums
    of the terms' magnitudes in f64; where one exceeds the f32 range, sums may overflow, and any result is
    accepted."""
    __tracebackhide__ = True
    got = asnumpy(actual)
    if (got.dtype, got.shape) != (desired.dtype, desired.shape):
        raise AssertionError(f"{name}: actual {got.dtype} {got.shape}, desired {desired.dtype} "
                             f"{desired.shape}")
    largest = FORMATS[desired.dtype].max
    a, d = got.astype(np.float64), desired.astype(np.float64)
    special = ~np.isfinite(magnitudes)
    with np.errstate(invalid="ignore"):
        error = np.abs(np.clip(a, -largest, largest) - np.clip(d, -largest, largest))
        bound = sums * magnitudes + ulp(d, desired.dtype)
        wrong = np.where(special, np.isfinite(a), ~(error <= bound) & ~(magnitudes > FORMATS[float32].max))
    if not wrong.any():
        return
    worst = np.unravel_index(int(np.argmax(np.where(wrong & ~special, error / bound, wrong))), wrong.shape)
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {wrong.size} elements of {got.dtype}{list(got.shape)} are out of "
        f"bounds; worst at {tuple(map(int, worst))}: actual {a[worst]}, desired {d[worst]}, difference "
        f"{error[worst]:.3g}, bound {bound[worst]:.3g}, sum of magnitudes {magnitudes[worst]:.3g}")


def ulp(v: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return one unit in the last place of finite values of a dtype; beyond the largest value, that of the
    largest."""
    f = FORMATS[dtype]
    size = np.clip(np.nan_to_num(np.abs(v), nan=f.max, posinf=f.max), f.smallest_normal, f.max)
    _, exponent = np.frexp(size)
    return np.ldexp(1.0, exponent - 1 - (f.bits - f.exponent_bits - 1))
