"""Reference of cupy_fp8.ops.convert (docs/numerics.md, rules 2 to 5 and 10)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..results import Quantized, Scaled
from . import numerics


def astype(a: np.ndarray, dtype: Any, saturate: bool = True) -> np.ndarray:
    """Exact to f32, then rounded to dtype."""
    return numerics.narrow(numerics.widen(a), np.dtype(dtype), saturate)


def dequantize(q: Scaled | Quantized, *, dtype: Any = np.float32) -> np.ndarray:
    """narrow(fl(widen(data) * scale_inv)), in the logical shape."""
    s = q if isinstance(q, Scaled) else q.columnwise if q.rowwise is None else q.rowwise
    assert s is not None
    values = numerics.narrow(numerics.mul(numerics.widen(s.data), s.scale_inv[0]), np.dtype(dtype))
    return transpose(values) if s.transposed else values


def transpose(a: np.ndarray) -> np.ndarray:
    """The last two axes swapped, C-contiguous."""
    return np.swapaxes(a, -1, -2).copy(order="C")
