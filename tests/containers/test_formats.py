"""The facts about each format."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8.formats import (
    BYTE_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
)


@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2, bfloat16, float16, float32], ids=str)
def test_finfo(dtype):
    ours, theirs = fp8.finfo(dtype), ml_dtypes.finfo(dtype)
    assert ours == fp8.finfo(dtype.type) == fp8.finfo(dtype.name)
    assert ours.dtype == dtype
    assert ours.bits == theirs.bits == 8 * dtype.itemsize
    assert ours.signed
    assert (ours.exponent_bits, ours.mantissa_bits) == (theirs.nexp, theirs.nmant)
    assert ours.max == float(theirs.max)
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)
    assert ours.storage == np.dtype(f"u{dtype.itemsize}")
    assert np.isnan(np.array([ours.nan], ours.storage).view(dtype).astype(np.float32))[0]
    if ours.inf is not None:
        assert np.isposinf(np.array([ours.inf], ours.storage).view(dtype).astype(np.float32))[0]
    every = np.arange(2**16 if ours.bits > 8 else 256).astype(f"u{min(ours.bits // 8, 2)}")
    if ours.bits <= 16:
        values = every.view(dtype).astype(np.float32)
        assert np.isinf(values).any() == (ours.inf is not None)
        assert values[np.isfinite(values)].max() == ours.max


def test_finfo_of_e8m0():
    e8m0 = fp8.finfo(float8_e8m0fnu)
    assert (e8m0.max, e8m0.smallest_normal, e8m0.nan, e8m0.inf,
            e8m0.signed) == (2.0**127, 2.0**-127, 0xFF, None, False)
    values = np.arange(255, dtype=np.uint8).view(float8_e8m0fnu).astype(np.float64)
    assert (values.max(), values.min()) == (e8m0.max, e8m0.smallest_normal)
    assert (e8m0.bits, e8m0.exponent_bits, e8m0.mantissa_bits, e8m0.bias) == (8, 8, 0, 127)


def test_the_dtypes_are_ml_dtypes_own():
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16"):
        assert getattr(fp8, name) == np.dtype(getattr(ml_dtypes, name))
    assert (fp8.float16, fp8.float32) == (np.dtype(np.float16), np.dtype(np.float32))
    assert all(d.itemsize == 1 for d in BYTE_DTYPES)
