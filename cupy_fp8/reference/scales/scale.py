"""Reference of cupy_fp8.ops.scales.scale: scales of per-tensor scaling (docs/numerics.md, section 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import FORMATS, float8_e4m3fn
from .. import numerics


def compute_scale(amax: np.ndarray, *, dtype: Any = float8_e4m3fn, margin: int = 0, eps: float = 0.0,
                  pow2_scale: bool = False) -> np.ndarray:
    """Return the scale that maps amax to the format's maximum times 2^-margin."""
    target = numerics.times_power_of_two(FORMATS[np.dtype(dtype)].max, -margin)
    return numerics.scale_from_amax(amax, target, np.float32(eps), numerics.F32_MAX, pow2_scale)


def update_delayed_scaling(history: np.ndarray, scale: np.ndarray, *, dtype: Any, margin: int = 0,
                           algo: str = "max",
                           amax: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the next history and scale. The columns of the history are independent."""
    target = numerics.times_power_of_two(FORMATS[np.dtype(dtype)].max, -margin)
    reduced = np.zeros_like(scale) if amax is None else amax
    last = np.where(reduced != 0, reduced, history[0])
    changes = np.ones(scale.shape, bool) if amax is None else last != 0

    rolled = np.concatenate([history[1:], last[np.newaxis]])
    seen = last if algo == "most_recent" else np.max(rolled, axis=0, initial=0, where=~np.isnan(rolled))
    usable = np.isfinite(seen) & (seen > 0)
    fresh = np.where(usable, numerics.div(target, np.where(usable, seen, numerics.F32_ONE)), scale)
    fresh = np.where(np.isinf(fresh), numerics.F32_MAX, fresh)
    rolled[0] = 0
    return np.where(changes, rolled, history), np.where(changes, fresh, scale)
