"""Reference of cupy_fp8.ops.scales.amax."""

from __future__ import annotations

import numpy as np

from .. import numerics


def compute_amax(x: np.ndarray, *, nan: str = "ignore") -> np.ndarray:
    """max |x| in f32, starting from 0 (docs/numerics.md, rule 6)."""
    return numerics.amax(x, nan)
