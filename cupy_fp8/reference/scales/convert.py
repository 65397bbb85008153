"""Reference of cupy_fp8.ops.scales.convert (docs/layouts.md; docs/numerics.md, section 5): scales of blocks
from one layout to another."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import bits
from ...formats import float8_e8m0fnu, int32
from ...layouts import PACKED, PADDED_TO, Block, cdiv, round_up, scale_dtype, scale_grid
from ...results import Scaled
from .. import numerics
from ..convert.astype import transpose
from .swizzle import swizzle, unswizzle


def convert_scales(scale_inv: np.ndarray, *, source: str, target: str, shape: tuple[int, ...], block: Block,
                   dtype: Any = None) -> np.ndarray:
    """Take scales out of one layout, convert their dtype, and store them in another layout."""
    scales = lines_by_blocks(scale_inv, source, shape, block)
    held = scale_dtype(scale_inv.dtype, target) if dtype is None else np.dtype(dtype)
    return stored(as_dtype(scales, float8_e8m0fnu if held == int32 else held), target, block, shape[-2])


def rows_of_scales(s: Scaled) -> np.ndarray:
    """Return the compact scales of blocks (1, B): a row of scales per row of data."""
    assert s.block is not None
    return lines_by_blocks(s.scale_inv, str(s.scale_layout), s.shape, s.block)


def as_dtype(scales: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert f32 scales to E8M0 or back. Scales already of that dtype keep every bit."""
    if scales.dtype == dtype:
        return scales
    return encode(scales) if dtype == float8_e8m0fnu else numerics.widen(scales)


def encode(scales: np.ndarray) -> np.ndarray:
    """Encode f32 as E8M0: a power of two from 2^-127 to 2^127 by its exponent, 0 as the smallest one,
    anything else as NaN."""
    return np.where(is_in_e8m0(scales), bits(scales) >> 23, 255).astype(np.uint8).view(float8_e8m0fnu)


def is_in_e8m0(scales: np.ndarray) -> np.ndarray:
    """Whether E8M0 represents an f32 value: 2^-127 (a subnormal), or a positive normal number whose mantissa
    is 0. 0, the scale of unused rows, is stored as the smallest value."""
    u = bits(scales)
    normal = (u >= 0x00800000) & (u < 0x7F800000) & (u & 0x007FFFFF == 0)
    return np.asarray(normal | (u == 0x00400000) | (u == 0))


def lines_by_blocks(scale_inv: np.ndarray, layout: str, shape: tuple[int, ...], block: Block) -> np.ndarray:
    """Return scales as […, lines, blocks], without the layout's padding. For 2-D blocks lines are rows of
    blocks."""
    grid = scale_grid(shape, block)
    if layout == "swizzled":
        return unswizzle(scale_inv, grid.outer, grid.blocks)
    if layout == "deepgemm_sm100":
        lines = _unpacked(scale_inv)[..., :grid.blocks]
        return lines[..., :grid.outer, :] if 1 in block else lines[..., ::block[0], :]
    if layout == "compact":
        return transpose(scale_inv) if grid.columnwise else scale_inv
    return transpose(scale_inv[..., :grid.outer]) if 1 in block else scale_inv[..., :grid.blocks]


def stored(scales: np.ndarray, layout: str, block: Block, rows: int = 0) -> np.ndarray:
    """Invert `lines_by_blocks`: a new array with zeros as padding. rows: the matrix's rows, needed for 2-D
    blocks in deepgemm_sm100."""
    if layout == "swizzled":
        return swizzle(scales)
    if layout == "deepgemm_sm100":
        return _packed(scales if 1 in block else np.repeat(scales, block[0] or 1, axis=-2)[..., :rows, :])
    if layout == "compact":
        return transpose(scales) if block[1] == 1 else scales.copy(order="C")
    return padded(transpose(scales) if 1 in block else scales)


def padded(scales: np.ndarray) -> np.ndarray:
    """Pad rows to a multiple of four scales."""
    out = np.zeros((*scales.shape[:-1], round_up(scales.shape[-1], PADDED_TO)), scales.dtype)
    out[..., :scales.shape[-1]] = scales
    return out


def _packed(scales: np.ndarray) -> np.ndarray:
    """Pack E8M0 […, lines, blocks] into int32 […, words of four blocks, lines and padding], the first of the
    four in the lowest byte."""
    *batch, lines, blocks = scales.shape
    words = cdiv(blocks, PACKED)
    out = np.zeros((*batch, round_up(lines, PADDED_TO), words * PACKED), np.uint8)
    out[..., :lines, :blocks] = bits(scales)
    return transpose(out.view("<i4")).astype(int32)


def _unpacked(words: np.ndarray) -> np.ndarray:
    """Invert `_packed`; padding is included."""
    return transpose(words.astype("<i4")).view(float8_e8m0fnu)
