"""Reference of cupy_fp8.ops.moe.offsets (docs/numerics.md, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def splits_to_offsets(splits: Any, *, strides: Sequence[int] = (1,), include_leading_zero: Any = True,
                      dtypes: Any = np.int64) -> list[np.ndarray]:
    """Sum with Python's integers, which do not overflow. include_leading_zero, dtypes: one for all outputs,
    or one for each."""
    n = len(strides)
    leads = include_leading_zero
    if not isinstance(leads, Sequence):
        leads = (leads,) * n
    types = dtypes if isinstance(dtypes, (list, tuple)) else (dtypes,) * n
    sums = np.cumsum(np.maximum(splits, 0).astype(object))
    return [offsets(sums * int(stride), lead, np.dtype(dtype))
            for stride, lead, dtype in zip(strides, leads, types, strict=True)]


def offsets(values: np.ndarray, lead: bool, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the values in dtype, clamped to its largest value. lead: prepend a 0."""
    fitting = np.minimum(values, np.iinfo(dtype).max).astype(dtype)
    return np.concatenate([np.zeros(int(lead), dtype), fitting])
