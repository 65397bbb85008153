"""Reference of cupy_fp8.ops.convert.astype (docs/numerics.md, rules 2 to 5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import numerics


def astype(a: np.ndarray, dtype: Any, *, saturate: bool = True) -> np.ndarray:
    """Round the elements, exact in f32, to dtype."""
    return numerics.narrow(numerics.widen(a), np.dtype(dtype), saturate)


def transpose(a: np.ndarray) -> np.ndarray:
    """Swap the last two axes; the result is C-contiguous."""
    return np.swapaxes(a, -1, -2).copy(order="C")
