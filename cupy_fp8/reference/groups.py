"""Reference of cupy_fp8.ops.groups (docs/numerics.md, section 7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import bits, zeros
from ..layouts import padded_rows


def pad_groups(x: np.ndarray, splits: Any, align: int) -> np.ndarray:
    return _move(x, padded_rows(len(x), len(splits), align), splits, 1, align)


def unpad_groups(y: np.ndarray, splits: Any, align: int, *, rows: int | None = None) -> np.ndarray:
    return _move(y, len(y) if rows is None else rows, splits, align, 1)


def sort_chunks(x: np.ndarray, splits: Any, order: Any) -> np.ndarray:
    return _move(x, len(x), splits, 1, 1, np.asarray(order, np.int64))


def _move(x: np.ndarray, rows: int, splits: Any, align_from: int, align_to: int, order: np.ndarray | None = None) -> np.ndarray:
    """Each row of the result from the row of x that it is a copy of, or 0."""
    sizes = np.clip(np.asarray(splits, np.int64), 0, max(len(x), rows) + 1)        # sums of which int64 holds
    order = np.arange(len(sizes)) if order is None else order
    exists = (order >= 0) & (order < len(sizes))
    group = np.where(exists, order, 0)
    from_start = _starts(sizes, align_from)
    placed = np.where(exists, sizes[group], 0) if len(sizes) else sizes
    to_start = _starts(placed, align_to)
    row = np.arange(rows)
    at = np.searchsorted(to_start, row, side="right") - 1          # the last one that begins here or before: not an empty one
    result = zeros((rows, *x.shape[1:]), x.dtype, like=np)
    if len(sizes) == 0:
        return result
    offset = row - to_start[at]
    source = from_start[group[at]] + offset
    found = (offset < placed[at]) & (source < len(x))
    bits(result)[found] = bits(x)[source[found]]
    return result


def _starts(sizes: np.ndarray, align: int) -> np.ndarray:
    """Exclusive sums of the sizes, each rounded up."""
    taken = -(-sizes // align) * align
    return np.cumsum(taken) - taken
