"""Reference of cupy_fp8.ops.quantize.tensor: per-tensor scaling (docs/numerics.md, section 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import float8_e4m3fn
from ...results import Quantized, Scaled
from .. import numerics
from ..convert.astype import transpose
from ..scales.scale import compute_scale


def quantize_tensor(x: np.ndarray, scale: Any = None, *, dtype: Any = float8_e4m3fn, rowwise: bool = True,
                    columnwise: bool = False, transposed: bool = True, amax: np.ndarray | None = None,
                    dbias: bool = False, eps: float = 0.0, pow2_scale: bool = False) -> Quantized:
    """data = narrow(fl(x * scale)), scale_inv = fl(1 / scale). `amax` is raised to the largest |x|, which
    determines the scale if scale is None. dbias is the sum of each column of x."""
    if scale is None:
        scale = compute_scale(numerics.amax(x), dtype=dtype, eps=eps, pow2_scale=pow2_scale)
    with np.errstate(over="ignore"):
        scale = np.asarray(scale, np.float32).reshape(1)
    data = numerics.narrow(numerics.mul(numerics.widen(x), scale[0]), np.dtype(dtype))
    scale_inv = numerics.one_nan(numerics.div(numerics.F32_ONE, scale))
    if amax is not None:
        numerics.raise_amax(amax, numerics.amax(x))
    row = Scaled._of(data, scale_inv, x.shape)
    column = Scaled._of(transpose(data), scale_inv, x.shape, True) if columnwise and transposed else row
    sums = numerics.tree_sum(numerics.widen(x), -2) if dbias else None
    return Quantized(row if rowwise else None, column if columnwise else None, sums)


def cast_transpose(x: np.ndarray, scale: Any = None, **options: Any) -> Quantized:
    """Call `quantize_tensor` in both directions."""
    return quantize_tensor(x, scale, rowwise=True, columnwise=True, **options)
