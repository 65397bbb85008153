"""Turns what the functions of `diagnostics` accept into values and FP8 codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, contiguous
from ..formats import FP8_DTYPES, INPUT_DTYPES, float32, names
from ..ops.convert.astype import astype, transpose
from ..results import Quantized, Scaled, as_scaled
from .scale_report import compact_scales, warn_of_unusable

_FLOAT64 = np.dtype(np.float64)


def module_of_x(x: Array) -> Any:
    xp = backend.module_of(x)
    if x.dtype not in (*INPUT_DTYPES, _FLOAT64):
        raise TypeError(f"x: expected dtype {names(INPUT_DTYPES)}, float64, got {x.dtype}")
    return xp


def require_shape(x: Array, values: Array) -> None:
    if values.shape != x.shape:
        raise ValueError(f"q: expected the shape of x, {x.shape}, got {values.shape}")


def values_and_codes(q: Any, xp: Any) -> tuple[Array, Array | None]:
    """Return (dequantised values, FP8 codes or None), both in the logical shape. xp: the module that q must
    be of; None: either. Warns of scales that are not positive finite numbers."""
    if isinstance(q, (Scaled, Quantized)):
        s = as_scaled(q)
        if xp is not None:
            backend.require_module(s.data, xp, "q")
        warn_of_unusable(compact_scales(s))
        return s.dequantize(float32), contiguous(transpose(s.data) if s.transposed else s.data)
    backend.require_module(q, xp, "q")
    if q.dtype in FP8_DTYPES:
        return astype(q, float32), contiguous(q)
    if q.dtype not in (*INPUT_DTYPES, _FLOAT64):
        expected = names((*FP8_DTYPES, *INPUT_DTYPES, _FLOAT64))
        raise TypeError(f"q: expected a Scaled, a Quantized or an array of dtype {expected}, got {q.dtype}")
    return q, None
