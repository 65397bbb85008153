"""Reference of cupy_fp8.ops.convert.rebase: new blocks for data with power-of-two scales (docs/numerics.md,
section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layouts import Block, scale_dtype
from ...results import Quantized, Scaled, row_wise
from .. import numerics
from ..scales import convert
from .astype import transpose
from .dequantize import block_scales, on_elements
from .scaling_aware import Exponents, exponents, magnitudes, moved, stored_scales, target_exponent


def rebase_scales(q: Scaled | Quantized, *, block: Block, scale_dtype: Any = None,
                  scale_layout: str = "compact", changed: np.ndarray | None = None) -> Scaled:
    """out = narrow(v * s / t), where t is the power of two for the values of a new block. The number of
    values that changed is added to `changed`."""
    s = row_wise(q)
    data = transpose(s.data) if s.transposed else s.data
    v = numerics.widen(data)
    power, exists, zero, wrong = _of_elements(s)
    t = target_exponent(numerics.in_blocks(magnitudes(v, power, exists), block).max(axis=(-3, -1)), s.dtype)
    exponent = on_elements(t, block, s.shape)
    out = moved(v, power - exponent, exists, zero, s.dtype)
    if changed is not None:
        changed += _differing(v, out, exponent, power, exists, zero)
    held = _dtype_of_scales(s, scale_dtype, scale_layout)
    scales = stored_scales(t, np.asarray(numerics.in_blocks(wrong, block).any(axis=(-3, -1))), held)
    return Scaled._of(transpose(out) if s.transposed else out, _laid_out(scales, s, block, scale_layout),
                      s.shape, s.transposed, block, scale_layout)


def _of_elements(s: Scaled) -> Exponents:
    """Return the scale of every element in the logical shape."""
    if s.block is None:
        return Exponents(*(np.full(s.shape, a.reshape(-1)[0], a.dtype) for a in exponents(s.scale_inv)))
    return Exponents(*(on_elements(a, s.block, s.shape) for a in exponents(block_scales(s))))


def _differing(v: np.ndarray, out: np.ndarray, exponent: np.ndarray, power: np.ndarray, exists: np.ndarray,
               zero: np.ndarray) -> int:
    """Count the values that changed. NaN counts as unchanged."""
    with np.errstate(invalid="ignore"):
        before = np.select([exists, zero], [np.ldexp(v.astype(np.float64), power.astype(np.int32)), v * 0.0],
                           np.nan)
        after = np.ldexp(out.astype(np.float64), exponent.astype(np.int32))
    return int(np.count_nonzero(~np.isnan(before) & (before != after)))


def _dtype_of_scales(s: Scaled, dtype: Any, layout: str) -> np.dtype[Any]:
    """Return the dtype of the new scales before they are packed into words."""
    held = scale_dtype(s.scale_inv.dtype, layout) if dtype is None else np.dtype(dtype)
    return scale_dtype(held, "compact")


def _laid_out(scales: np.ndarray, s: Scaled, block: Block, layout: str) -> np.ndarray:
    """Store scales, given as rows and columns of blocks of the logical matrix, in a layout."""
    rows = s.shape[-2]
    if block[1] == 1:
        scales = transpose(scales)
    elif s.transposed and 1 not in block:       # scales in the order of the stored data
        scales, block, rows = transpose(scales), (block[1], block[0]), s.shape[-1]
    return convert.stored(scales, layout, block, rows)
