"""Reference of cupy_fp8.ops.convert.dequantize (docs/numerics.md, rules 3 to 5 and 10)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layouts import Block, swap_last
from ...results import Quantized, Scaled
from .. import numerics
from ..scales.convert import lines_by_blocks
from .astype import transpose


def dequantize(q: Scaled | Quantized, *, dtype: Any = np.float32) -> np.ndarray:
    """narrow(fl(widen(data) * scale_inv)) with the scale of each element's block, in the logical shape."""
    s = q if isinstance(q, Scaled) else q._any
    data = transpose(s.data) if s.transposed else s.data
    scale_inv = s.scale_inv.reshape(-1)[0] if s.block is None else element_scales(s)
    return numerics.narrow(numerics.mul(numerics.widen(data), scale_inv), np.dtype(dtype))


def element_scales(s: Scaled) -> np.ndarray:
    """Return the scale_inv of every element's block, as f32 in the logical shape."""
    assert s.block is not None
    return on_elements(numerics.widen(block_scales(s)), s.block, s.shape)


def on_elements(scales: np.ndarray, block: Block, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat the value of each block for all of its elements."""
    for axis, extent in zip((-2, -1), block, strict=True):
        length = shape[axis]
        whole = max(length, 1)
        scales = np.repeat(scales, min(extent or whole, whole), axis).take(range(length), axis)
    return scales


def block_scales(s: Scaled) -> np.ndarray:
    """Return scale_inv as rows and columns of blocks of the logical matrix."""
    assert s.block is not None
    shape, block, swapped = s.shape, s.block, s.block[1] == 1
    if s.transposed and 1 not in block:  # scales in the order of the stored data
        shape, block, swapped = swap_last(shape), (block[1], block[0]), True
    scales = lines_by_blocks(s.scale_inv, str(s.scale_layout), shape, block)
    return transpose(scales) if swapped else scales
