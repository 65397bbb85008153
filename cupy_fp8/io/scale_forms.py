"""Interprets the scales of FP8 data by dtypes and shapes: which elements share a scale, and the values or the
`Scaled` made from data and scales.

Data are always multiplied by their scales, whatever the scales are called. One-byte scales are E8M0
exponents, also if a file calls them U8: read as numbers they would make weights 450,000 times too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..formats import FP8_DTYPES, float8_e8m0fnu, float32
from ..layouts import SMALLEST_BLOCK, Block, cdiv, is_block, scale_shape
from ..ops.scales.swizzle import unswizzle_scales
from ..results import Scaled
from .safetensors import Tensor

__all__ = ["FLOAT_SCALES", "SCALES", "Form", "Share", "combine", "form_of", "held_block", "share_text",
           "shares_that_fit", "values_of"]

FLOAT_SCALES, EXPONENTS = ("F32", "BF16", "F16"), ("F8_E8M0", "U8")
#: the dtypes that scales can have
SCALES = (*FLOAT_SCALES, *EXPONENTS)
#: (rows, columns) of each matrix that share a scale, None for all of them; None: the whole tensor
Share = tuple[int | None, int | None] | None
_ROWS, _COLUMNS, _MATRICES = (1, None), (None, 1), (None, None)
_BLOCKS: tuple[Share, ...] = ((1, 32), (1, 128), (128, 128))
_MX = (1, 32)


class Form(NamedTuple):
    """The form of a tensor's scales. swizzled: E8M0 scales of 1×32 in tiles of 128×4."""

    share: Share
    swizzled: bool = False


def form_of(data: Tensor, scale: Tensor, said: Share | bool = False, sure: bool = False,
            swizzled: bool = False) -> Form:
    """Find the form of scales from their dtype and shape.

    said : what shares a scale by the checkpoint's configuration; False: not said.
    sure : `said` was given by the caller, and is the only reading tried.
    swizzled : the checkpoint says that E8M0 scales are stored in tiles.
    Raises ValueError, whose text follows the names and shapes of both, if no reading fits.
    """
    if scale.dtype not in SCALES:
        raise ValueError(f"expected scales of type {', '.join(SCALES)}")
    if swizzled or (said is False and scale.shape in _swizzled_shapes(data.shape, only_padded=True)
                    and scale.dtype in EXPONENTS):
        if scale.dtype in EXPONENTS and scale.shape in _swizzled_shapes(data.shape):
            return Form(_MX, True)
        raise ValueError("these are no swizzled scales of blocks 1×32")
    first: list[Share] = [] if isinstance(said, bool) else [said]
    fits = _fitting(data, scale, first)
    if not fits and not sure:
        fits = _fitting(data, scale, _usual(data.shape))
    if not fits:
        if sure and not isinstance(said, bool):
            raise ValueError(f"these are not the scales of {share_text(said)}")
        raise ValueError("these scales fit no block that is known")
    return Form(fits[0])                # the others are equivalent: blocks that extend past the tensor


def _fitting(data: Tensor, scale: Tensor, shares: Sequence[Share]) -> list[Share]:
    """Return the readings that the shapes allow. Bytes called U8 are exponents of blocks only."""
    return [share for share in shares if scale.shape in _shapes(data.shape, share)
            and (scale.dtype != "U8" or (share is not None and None not in share))]


def _usual(shape: tuple[int, ...]) -> list[Share]:
    if len(shape) < 2:
        return [None]
    return [None, _ROWS, _COLUMNS, *([_MATRICES] if len(shape) > 2 else []), *_BLOCKS]


def _shapes(shape: tuple[int, ...], share: Share) -> list[tuple[int, ...]]:
    """Return the possible shapes of such scales; the last is ModelOpt's."""
    if share is None:
        return [(), (1,), (1, 1), (1,) * len(shape)]
    if len(shape) < 2:
        return []
    *batch, down, across = _grid(shape, share)
    found = [(*batch, down, across), (*batch, down, 1, across, 1)]
    if across == 1:
        found.append((*batch, down))
    if across == down == 1 and batch:
        found.append(tuple(batch))
    return found


def _swizzled_shapes(shape: tuple[int, ...], only_padded: bool = False) -> list[tuple[int, ...]]:
    """Return the shapes of swizzled scales of blocks 1×32. only_padded: those that compact scales cannot
    have."""
    if len(shape) < 2 or not prod(shape):
        return []
    padded = scale_shape(shape, _MX, "swizzled")
    found = [padded, (prod(padded),)]
    compact = [*_shapes(shape, _MX), *_shapes(shape, _ROWS), *_shapes(shape, _COLUMNS)]
    return [one for one in found if not only_padded or one not in compact]


def _grid(shape: tuple[int, ...], share: tuple[int | None, int | None]) -> tuple[int, ...]:
    *batch, rows, columns = shape
    return (*batch, *(cdiv(n, b or max(n, 1)) for n, b in zip((rows, columns), share, strict=True)))


def shares_that_fit(data: Tensor, scale: Tensor) -> list[tuple[int, int]]:
    """Return power-of-two blocks that would explain the shape of scales of unknown form, to suggest in a
    message."""
    powers = [1, *(SMALLEST_BLOCK << i for i in range(8))]
    return [(a, b) for a in powers for b in powers if a * b > 1 and _fitting(data, scale, [(a, b)])]


def share_text(share: Share) -> str:
    """Return in words what shares a scale."""
    if share is None:
        return "the tensor"
    if share in (_ROWS, _COLUMNS, _MATRICES):
        return {_ROWS: "each row", _COLUMNS: "each column", _MATRICES: "each matrix"}[share]
    return "blocks of " + "×".join("all" if b is None else str(b) for b in share)


def held_block(shape: tuple[int, ...], share: Share) -> Block | bool | None:
    """Return the block of the `Scaled` for such scales: their own, or a finer one with repeated scales. False
    if there is none."""
    if share is None or is_block(share):
        return share
    *batch, rows, columns = shape
    if share == _MATRICES and not batch:
        return None
    down, across = share[0] or rows, share[1] or columns
    if across >= columns:
        return _ROWS
    if down >= rows:
        return _COLUMNS
    line, column = across & -across, down & -down           # largest powers of two that divide them
    if line >= SMALLEST_BLOCK:
        return 1, line
    return (column, 1) if column >= SMALLEST_BLOCK else False


def combine(data: Any, scale: np.ndarray, form: Form) -> Scaled | np.ndarray:
    """Return a `Scaled` of data and scales, or the float32 values if no Scaled can hold them (FNUZ types, and
    blocks whose sides no power of two divides)."""
    scale, share, shape = _as_factors(scale), form.share, data.shape
    if form.swizzled:
        blocks = cdiv(shape[-1], _MX[1])
        swizzled = scale.reshape(scale_shape(shape, _MX, "swizzled"))
        scale = unswizzle_scales(np.ascontiguousarray(swizzled), shape=(*shape[:-1], blocks))
    block = held_block(shape, share)
    if data.dtype not in FP8_DTYPES or isinstance(block, bool):
        return values_of(data, scale, share)
    if share is None or block is None:
        return Scaled(data, scale.astype(float32).reshape(1), shape)
    if None in block:
        scale = scale.astype(float32)
    grid = scale.reshape(_grid(shape, share))
    if block != share:
        grid = _repeated(grid, shape, share, block)
    return Scaled(data, np.ascontiguousarray(grid), shape, False, block, "compact")


def values_of(data: np.ndarray, scale: np.ndarray, share: Share, first_row: int = 0, height: int | None = None
              ) -> np.ndarray:
    """fl32(data · scale) of a whole tensor, or of rows from `first_row` on of one matrix with `height` rows
    and its scales."""
    factors = _as_factors(scale).astype(float32)
    if share is None:
        return np.asarray(data.astype(float32) * factors.reshape(()))
    *batch, rows, columns = data.shape
    down, across = share[0] or max(height or rows, 1), share[1] or max(columns, 1)
    grid = factors.reshape(*batch, cdiv(height or rows, down), cdiv(columns, across))
    at = (np.arange(first_row, first_row + rows) // down)[:, None], np.arange(columns) // across
    return np.asarray(data.astype(float32) * grid[(..., *at)])


def _as_factors(scale: np.ndarray) -> np.ndarray:
    """Return scales as f32 (exact, also from bfloat16 and float16), or E8M0 for exponents."""
    if scale.dtype == np.uint8:
        scale = scale.view(float8_e8m0fnu)
    return scale if scale.dtype == float8_e8m0fnu else scale.astype(float32)


def _repeated(grid: np.ndarray, shape: tuple[int, ...], share: tuple[int | None, int | None],
              block: Block) -> np.ndarray:
    """Return the grid of a finer block, each with the scale of the share that contains it."""
    at = []
    for n, coarse, fine in zip(shape[-2:], share, block, strict=True):
        starts = np.arange(cdiv(n, fine or max(n, 1))) * (fine or 0)
        at.append(starts // (coarse or max(n, 1)))
    return grid[(..., at[0][:, None], at[1])]
