"""Row-wise data with power-of-two scales, as inputs of `scaling_aware_transpose`, its results, and the same
in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.formats import FORMATS, float8_e4m3fn, float8_e8m0fnu
from cupy_fp8.results import Quantized, Scaled

NAN = 0x7F


def scaled(codes: np.ndarray, exponents: np.ndarray, dtype: np.dtype[Any], block: int = 128) -> Scaled:
    """Return row-wise data with scales 2^exponents."""
    scale_inv: np.ndarray = np.ldexp(np.float32(1), exponents.astype(np.int32))
    if block == 32:
        scale_inv = (exponents + 127).astype(np.uint8).view(float8_e8m0fnu)
    return Scaled(codes.view(dtype), scale_inv, codes.shape, False, (1, block), "compact")


def random_rows(rows: int, columns: int, block: int = 128, *, seed: int = 0,
                dtype: Any = fp8.float8_e4m3fn) -> Scaled:
    """Return positive numbers under scales that differ by little."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x78, (rows, columns), np.uint8)
    return scaled(codes, rng.integers(-9, -3, (rows, -(-columns // block))), dtype, block)


def parts(result: Quantized) -> tuple[Scaled, Scaled]:
    """Return (row-wise, column-wise)."""
    assert result.rowwise is not None
    assert result.columnwise is not None
    return result.rowwise, result.columnwise


def part(s: Scaled, **changes: Any) -> Scaled:
    """Return the same with other fields, unchecked."""
    fields = {"data": s.data, "scale_inv": s.scale_inv, "shape": s.shape, "transposed": s.transposed,
              "block": s.block, "scale_layout": s.scale_layout, "splits": s.splits, **changes}
    return Scaled._of(**fields)


def transposed(q: Scaled, run: testing.Executor, **options: Any) -> Scaled:
    """Return the column-wise part."""
    return parts(run.numpy(fp8.scaling_aware_transpose(run.array(q), **options)))[1]


# ---- independent implementation: fractions, and the nearest code by a search ----
def value_of(code: int, dtype: np.dtype[Any]) -> Fraction:
    return Fraction(float(np.array([code], np.uint8).view(dtype).astype(np.float32)[0]))


def nearest_code(v: Fraction, dtype: np.dtype[Any]) -> int:
    codes = range(0x7F if dtype == float8_e4m3fn else 0x7C)
    return min(codes, key=lambda c: (abs(value_of(c, dtype) - abs(v)), c & 1))


def exponent_of(products: list[Fraction], dtype: np.dtype[Any]) -> int:
    """Return the exponent of the scale of a block whose values have these magnitudes."""
    if not any(products):
        return 0
    e = -127
    while Fraction(2)**e * Fraction(FORMATS[dtype].max) < max(products) and e < 127:
        e += 1
    return e
