"""Reference of cupy_fp8.ops.moe.group_sums (docs/numerics.md, section 12)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...results import Quantized, Scaled, row_wise
from .. import numerics
from ..convert.dequantize import dequantize
from ..scales.swizzle import group_ranges


def group_sums(x: Any, splits: Any, *, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum fl(weights[r] · x[r]) over the rows r of each group, by the fixed tree."""
    terms = dequantize(row_wise(x)) if isinstance(x, (Scaled, Quantized)) else numerics.widen(x)
    if weights is not None:
        terms = numerics.mul(terms, weights[:, None])
    sums = np.zeros((len(splits), terms.shape[1]), np.float32)
    for e, (start, end) in enumerate(group_ranges(splits, len(terms), 0)):
        sums[e] = numerics.tree_sum(terms[start:end], 0)
    return sums
