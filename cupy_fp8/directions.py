"""The directions of a quantised result, row-wise and column-wise: what each holds, before there is memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import Array
from .formats import flags, float8_e8m0fnu, float32
from .layouts import scale_shape
from .results import Scaled, swap_last


class Direction(NamedTuple):
    """One direction of a result without its memory: a Scaled's attributes, the scales' dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    transposed: bool
    block: tuple[int | None, int | None] | None
    scale_layout: str | None
    scale_dtype: np.dtype[Any]
    scale_shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the data in memory."""
        return swap_last(self.shape) if self.transposed else self.shape

    def scaled(self, data: Array, scale_inv: Array) -> Scaled:
        return Scaled._of(data, scale_inv, self.shape, self.transposed, self.block, self.scale_layout)


def check_directions(shape: tuple[int, ...], rowwise: bool, columnwise: bool, dbias: bool = False) -> None:
    """TypeError or ValueError if an array of this shape has no such directions or no bias gradient."""
    flags(rowwise=rowwise, columnwise=columnwise, dbias=dbias)
    if not (rowwise or columnwise):
        raise ValueError("rowwise, columnwise: expected at least one of them, got neither")
    if columnwise and len(shape) < 2:
        raise ValueError(f"columnwise: expected an array of two or more dimensions, got shape {shape}")
    if dbias and len(shape) < 2:
        raise ValueError(f"dbias: expected an array of two or more dimensions, got shape {shape}")


def tensor_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool,
                      columnwise: bool) -> dict[str, Direction]:
    """The directions of a result with one scale, by name. Column-wise data are stored transposed."""
    return {name: Direction(dtype, shape, name == "columnwise", None, None, float32, (1,))
            for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted}


def block_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                     transposed: bool, block: tuple[int | None, int | None], scale_layout: str,
                     scale_dtype: np.dtype[Any] = float32) -> dict[str, Direction]:
    """The directions of a result in blocks, by name. block: the row-wise one. ValueError if both directions
    are unwanted, or if the array is not two- or three-dimensional."""
    check_directions(shape, rowwise, columnwise)
    if not 2 <= len(shape) <= 3:
        raise ValueError(f"x: expected an array of two or three dimensions, got shape {shape}")
    return {name: Direction(dtype, shape, swapped, along, scale_layout, scale_dtype,
                            scale_shape(shape, along, scale_layout, swapped))
            for name, wanted, along, swapped in (("rowwise", rowwise, block, False),
                                                 ("columnwise", columnwise, (block[1], block[0]), transposed))
            if wanted}


def mx_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                  transposed: bool, scale_layout: str) -> dict[str, Direction]:
    """The directions of an MX result, by name. Blocks of (32, 32) repeat their scale for each line, so their
    scales are those of (1, 32) too."""
    return block_directions(shape, dtype, rowwise, columnwise, transposed, (1, 32), scale_layout,
                            float8_e8m0fnu)


def dbias_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array's bias gradient, which has one sum per column of each matrix."""
    return (*shape[:-2], shape[-1])
