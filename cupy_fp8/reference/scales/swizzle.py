"""Reference of cupy_fp8.ops.scales.swizzle (docs/layouts.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...layouts import SWIZZLE_COLUMNS, SWIZZLE_ELEMENTS, SWIZZLE_ROWS, cdiv, grouped_shape, round_up


def swizzle(s: np.ndarray) -> np.ndarray:
    """Store […, R, C] of one-byte elements as […, R rounded up to 128, C rounded up to 4] in tiles of 128 x
    4, padded with 0."""
    *batch, lines, blocks = s.shape
    rows, columns = round_up(lines, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS)
    padded = np.zeros((*batch, rows, columns), np.uint8)
    padded[..., :lines, :blocks] = s.view(np.uint8)
    # axes: (tile, line / 32, line % 32, tile, block % 4)
    tiles = padded.reshape(*batch, rows // 128, 4, 32, columns // 4, 4)
    return np.moveaxis(tiles, (-5, -2, -3, -4, -1), range(-5, 0)).reshape(padded.shape).view(s.dtype)


def unswizzle(s: np.ndarray, lines: int, blocks: int) -> np.ndarray:
    """Invert `swizzle`: […, lines, blocks] of swizzled bytes, without the padding."""
    *batch, rows, columns = s.shape
    tiles = s.view(np.uint8).reshape(*batch, rows // 128, columns // 4, 32, 4, 4)
    plain = np.moveaxis(tiles, range(-5, 0), (-5, -2, -3, -4, -1)).reshape(s.shape)
    return plain[..., :lines, :blocks].copy(order="C").view(s.dtype)


def swizzle_scales(s: np.ndarray, *, splits: Any = None, axis: int = 0) -> np.ndarray:
    """Swizzle each group separately. Groups follow one another in rows (axis 0) or bytes (axis 1) of the
    result, with zeros after the last one."""
    if splits is None:
        return swizzle(s)
    out, end = np.zeros(grouped_shape(s.shape, len(splits), axis), np.uint8), 0
    for first, last in group_ranges(splits, s.shape[axis], axis):
        part = swizzle(s[first:last] if axis == 0 else s[:, first:last]).view(np.uint8)
        part = part if axis == 0 else part.reshape(-1)
        start, end = end, end + len(part)
        out[start:end] = part
    return out.view(s.dtype)


def unswizzle_scales(s: np.ndarray, *, shape: tuple[int, ...], splits: Any = None,
                     axis: int = 0) -> np.ndarray:
    """Invert `swizzle_scales`. Scales of no group are 0."""
    if splits is None:
        return unswizzle(s, *shape[-2:])
    out, end = np.zeros(shape, np.uint8), 0
    for first, last in group_ranges(splits, shape[axis], axis):
        lines, blocks = (last - first, shape[1]) if axis == 0 else (shape[0], last - first)
        rows, columns = round_up(lines, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS)
        start, end = end, end + (rows if axis == 0 else rows * columns)
        part = unswizzle(s[start:end].reshape(rows, columns), lines, blocks).view(np.uint8)
        out[(slice(first, last),) if axis == 0 else (slice(None), slice(first, last))] = part
    return out.view(s.dtype)


def group_ranges(splits: Any, total: int, axis: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each group among the `total` lines (axis 0) or blocks (axis 1, with sizes in
    elements). A negative size counts as 0, and a group that extends past the end stops there; on the host the
    ops refuse both."""
    first = 0
    for size in map(int, splits):
        last = min(first + cdiv(max(size, 0), SWIZZLE_ELEMENTS if axis == 1 else 1), total)
        yield first, last
        first = last
