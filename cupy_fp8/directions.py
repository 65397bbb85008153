"""The directions of a quantised result, row-wise and column-wise: what each holds before there is memory, and
uninitialised results in new arrays or in the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import backend
from .arrays import Array, check_dimensions, empty, empty_beside
from .formats import flags, float8_e8m0fnu, float32
from .layouts import Block, scale_shape, swap_last
from .results import Scaled


class Direction(NamedTuple):
    """One direction of a result without its memory: a Scaled's attributes, the scales' dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    transposed: bool
    block: Block | None
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
    for name, wanted in (("columnwise", columnwise), ("dbias", dbias)):
        if wanted:
            check_dimensions(shape, name, 2, array="x")


def tensor_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool,
                      columnwise: bool) -> dict[str, Direction]:
    """The directions of a result with one scale, by name. Column-wise data are stored transposed."""
    return {name: Direction(dtype, shape, name == "columnwise", None, None, float32, (1,))
            for name, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted}


def block_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                     transposed: bool, block: Block, scale_layout: str,
                     scale_dtype: np.dtype[Any] = float32) -> dict[str, Direction]:
    """The directions of a result in blocks, by name. block: the row-wise one. ValueError if both directions
    are unwanted, or if the array is not two- or three-dimensional."""
    check_directions(shape, rowwise, columnwise)
    check_dimensions(shape, "x", 2, 3)
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


# ---- uninitialised results ----
def with_one_scale(directions: Mapping[str, Direction], like: Any) -> dict[str, Scaled]:
    """The parts of a result of per-tensor scaling, which share their scale_inv."""
    scale_inv = empty((1,), float32, like=like)
    return {name: direction.scaled(empty_beside(scale_inv, direction.stored, direction.dtype), scale_inv)
            for name, direction in directions.items()}


def with_scales(directions: Mapping[str, Direction], like: Any, same_data: bool = False) -> dict[str, Scaled]:
    """The parts of a result of quantisation in blocks. same_data: both directions have the same codes, stored
    alike, so they share one array."""
    parts: dict[str, Scaled] = {}
    for name, direction in directions.items():
        if same_data and "rowwise" in parts:
            data = parts["rowwise"].data
        else:
            data = empty(direction.stored, direction.dtype, like=like)
        parts[name] = direction.scaled(data, empty(direction.scale_shape, direction.scale_dtype, like=like))
    return parts


def from_buffers(buffers: Mapping[str, tuple[Array, Array]],
                 directions: Mapping[str, Direction]) -> dict[str, Scaled]:
    """The parts of a result in the caller's arrays. TypeError or ValueError if these do not fit."""
    if not isinstance(buffers, Mapping):
        raise TypeError(f"buffers: expected a dict of (data, scale_inv) pairs, got {type(buffers).__name__}")
    if sorted(buffers) != sorted(directions):
        raise ValueError(f"buffers: expected a (data, scale_inv) pair for each of {list(directions)}, got "
                         f"{sorted(buffers)}")
    return {name: _part(name, buffers[name], direction) for name, direction in directions.items()}


def _part(name: str, pair: tuple[Array, Array], direction: Direction) -> Scaled:
    try:
        data, scale_inv = pair
    except (TypeError, ValueError):
        raise ValueError(f"buffers[{name!r}]: expected a (data, scale_inv) pair, "
                         f"got {type(pair).__name__}") from None
    xp = backend.module_of(data, f"buffers[{name!r}] data")
    backend.require_module(scale_inv, xp, f"buffers[{name!r}] scale_inv")
    for what, a, shape, dtype in (("data", data, direction.stored, direction.dtype),
                                  ("scale_inv", scale_inv, direction.scale_shape, direction.scale_dtype)):
        if a.dtype != dtype:
            raise TypeError(f"buffers[{name!r}] {what}: expected dtype {dtype}, got {a.dtype}")
        if a.shape != shape or not a.flags.c_contiguous:
            raise ValueError(f"buffers[{name!r}] {what}: expected a C-contiguous array of shape {shape}, got "
                             f"shape {a.shape}, strides {a.strides}")
    return direction.scaled(data, scale_inv)
