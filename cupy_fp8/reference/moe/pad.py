"""Reference of cupy_fp8.ops.moe.pad (docs/numerics.md, section 7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import bits, zeros
from ...layouts import padded_rows
from ...results import Scaled
from ..scales.convert import rows_of_scales


def pad_groups(x: Any, splits: Any, *, align: int) -> Any:
    return _move_all(x, padded_rows(_rows(x), len(splits), align), splits, 1, align)


def unpad_groups(y: Any, splits: Any, *, align: int, rows: int | None = None) -> Any:
    return _move_all(y, _rows(y) if rows is None else rows, splits, align, 1)


def sort_chunks(x: Any, splits: Any, order: Any) -> Any:
    return _move_all(x, _rows(x), splits, 1, 1, np.asarray(order, np.int64))


def _rows(x: Any) -> int:
    return int(x.shape[0])


def _move_all(x: Any, rows: int, *how: Any) -> Any:
    """Move the rows of an array, or of a Scaled's data and of its scales if each row has its own."""
    if not isinstance(x, Scaled):
        return _move(x, rows, *how)
    data, shape = _move(x.data, rows, *how), (rows, *x.shape[1:])
    if x.block is None:
        return Scaled._of(data, x.scale_inv.copy(), shape)
    return Scaled._of(data, _move(rows_of_scales(x), rows, *how), shape, False, x.block, "compact")


def _move(x: np.ndarray, rows: int, splits: Any, align_from: int, align_to: int,
          order: np.ndarray | None = None) -> np.ndarray:
    """Fill each row of the result with its row of x, or with 0."""
    sizes = np.clip(np.asarray(splits, np.int64), 0, max(len(x), rows) + 1)        # the sum fits int64
    order = np.arange(len(sizes)) if order is None else order
    exists = (order >= 0) & (order < len(sizes))
    group = np.where(exists, order, 0)
    from_start = _starts(sizes, align_from)
    placed = np.where(exists, sizes[group], 0) if len(sizes) else sizes
    to_start = _starts(placed, align_to)
    row = np.arange(rows)
    # the last group that begins at or before the row
    at = np.searchsorted(to_start, row, side="right") - 1
    result = zeros((rows, *x.shape[1:]), x.dtype, like=np)
    if len(sizes) == 0:
        return result
    offset = row - to_start[at]
    source = from_start[group[at]] + offset
    found = (offset < placed[at]) & (source < len(x))
    bits(result)[found] = bits(x)[source[found]]
    return result


def _starts(sizes: np.ndarray, align: int) -> np.ndarray:
    """Return the exclusive sums of the rounded-up sizes."""
    taken = -(-sizes // align) * align
    return np.cumsum(taken) - taken
