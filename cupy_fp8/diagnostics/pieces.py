"""Splits the work of `diagnostics` into pieces of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from ..layouts import cdiv

#: elements per piece, whole runs of 32; their f64 intermediates are ten arrays of 8 MB
CHUNK = 1 << 20

Piece = tuple[slice, slice]


def of_matrix(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[Piece, Piece]]:
    """Yield (elements, their blocks) for pieces of at most CHUNK elements: whole blocks where they fit, else
    parts of one block along that axis.

    >>> [rows for (rows, _), _ in of_matrix((3, 1 << 19), (1, 32))]
    [slice(0, 2, None), slice(2, 3, None)]
    """
    rows = max(1, CHUNK // max(1, shape[1]))
    if rows < block[0]:
        rows = min(block[0], CHUNK)
    columns = max(1, CHUNK // rows)
    for down in _along(shape[0], block[0], rows):
        for across in _along(shape[1], block[1], columns):
            yield (down[0], across[0]), (down[1], across[1])


def of_line(size: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK elements."""
    return (slice(i, i + CHUNK) for i in range(0, size, CHUNK))


def _along(extent: int, block: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield (elements, blocks) of an axis: several whole blocks at a time, or parts of one."""
    if block <= most:
        step = most // block * block
        for first in range(0, extent, step):
            stop = min(first + step, extent)
            yield slice(first, stop), slice(first // block, cdiv(stop, block))
        return
    for start in range(0, extent, block):
        for first in range(start, min(start + block, extent), most):
            stop = min(first + most, start + block, extent)
            yield slice(first, stop), slice(start // block, start // block + 1)
