"""The directions of a quantised result, row-wise and column-wise: their description without memory, and
uninitialised results in new arrays or in the caller's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import backend
from .arrays import Array, check_dimensions, empty
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
        return Scaled._of(data, scale_inv, *self.attributes)

    @property
    def attributes(self) -> tuple[Any, ...]:
        """The attributes of its Scaled, except the arrays."""
        return self.shape, self.transposed, self.block, self.scale_layout


class Directions(dict[str, Direction]):
    """The directions of a result by name, row-wise first.

    shared: the arrays, 'data' or 'scale_inv', that both directions share, since their bytes are the same. If
    both are shared, both directions are one Scaled."""

    def __init__(self, directions: Mapping[str, Direction], shared: tuple[str, ...] = ()) -> None:
        super().__init__(directions)
        self.shared = shared if len(self) == 2 else ()

    @property
    def first(self) -> Direction:
        return next(iter(self.values()))

    @property
    def distinct(self) -> list[str]:
        """The names of the directions that have an array of their own."""
        return [name for name in self if name == "rowwise" or len(self.shared) < 2]

    def is_shared(self, name: str, what: str) -> bool:
        """Whether an array of this direction is shared with the row-wise one."""
        return name == "columnwise" and what in self.shared

    def arrays(self) -> Iterator[tuple[str, str, tuple[int, ...], np.dtype[Any]]]:
        """Yield (direction, 'scale_inv' or 'data', shape, dtype) of every array; shared ones once."""
        for name, direction in self.items():
            for what, shape, dtype in (("scale_inv", direction.scale_shape, direction.scale_dtype),
                                       ("data", direction.stored, direction.dtype)):
                if not self.is_shared(name, what):
                    yield name, what, shape, dtype

    @functools.cached_property
    def positions(self) -> dict[str, tuple[int, int]]:
        """Indices of the data and scale_inv of each direction among the arrays."""
        order = [(name, what) for name, what, _, _ in self.arrays()]

        def at(name: str, what: str) -> int:
            return order.index(("rowwise" if self.is_shared(name, what) else name, what))

        return {name: (at(name, "data"), at(name, "scale_inv")) for name in self}

    def parts(self, arrays: Sequence[Array]) -> tuple[Scaled | None, Scaled | None]:
        """Return the row-wise and the column-wise part of a result with these arrays, given in their order.
        Called by every allocating call, so it looks nothing up."""
        row = column = None
        of_row, of_column = self._parts
        if of_row:
            data, scale_inv, shape, transposed, block, layout = of_row
            row = column = Scaled._of(arrays[data], arrays[scale_inv], shape, transposed, block, layout)
        if of_column:
            data, scale_inv, shape, transposed, block, layout = of_column
            column = Scaled._of(arrays[data], arrays[scale_inv], shape, transposed, block, layout)
        return row, column if "columnwise" in self else None

    @functools.cached_property
    def _parts(self) -> list[tuple[Any, ...] | None]:
        """(indices of data and scale_inv, the other attributes of its Scaled) for the row-wise and for the
        column-wise part; None if there is no such part or if it is the row-wise one."""
        return [(*self.positions[name], *self[name].attributes) if name in self.distinct else None
                for name in ("rowwise", "columnwise")]


def check_directions(shape: tuple[int, ...], rowwise: bool, columnwise: bool, dbias: bool = False) -> None:
    """Raise TypeError or ValueError if an array of this shape has no such directions or no bias gradient."""
    flags(rowwise=rowwise, columnwise=columnwise, dbias=dbias)
    if not (rowwise or columnwise):
        raise ValueError("rowwise, columnwise: expected at least one of them, got neither")
    for name, wanted in (("columnwise", columnwise), ("dbias", dbias)):
        if wanted:
            check_dimensions(shape, name, 2, array="x")


def tensor_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                      transposed: bool = True) -> Directions:
    """Return the directions of a result with one scale, which they share. transposed: how column-wise data
    are stored; if not, both directions have the same data."""
    found = {name: Direction(dtype=dtype, shape=shape, transposed=swapped, block=None, scale_layout=None,
                             scale_dtype=float32, scale_shape=(1,))
             for name, wanted, swapped in (("rowwise", rowwise, False),
                                           ("columnwise", columnwise, transposed)) if wanted}
    return Directions(found, ("scale_inv",) if transposed else ("data", "scale_inv"))


def block_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                     transposed: bool, block: Block, scale_layout: str,
                     scale_dtype: np.dtype[Any] = float32) -> Directions:
    """Return the directions of a result in blocks. block: the row-wise one. Square blocks make both
    directions the same unless column-wise data are stored transposed. ValueError if neither direction is
    wanted, or if the array is not two- or three-dimensional."""
    check_directions(shape, rowwise, columnwise)
    check_dimensions(shape, "x", 2, 3)
    across = block[1], block[0]
    found = {name: Direction(dtype=dtype, shape=shape, transposed=swapped, block=along,
                             scale_layout=scale_layout, scale_dtype=scale_dtype,
                             scale_shape=scale_shape(shape, along, scale_layout, swapped))
             for name, wanted, along, swapped in (("rowwise", rowwise, block, False),
                                                  ("columnwise", columnwise, across, transposed)) if wanted}
    return Directions(found, ("data", "scale_inv") * (found.get("rowwise") == found.get("columnwise")))


def mx_directions(shape: tuple[int, ...], dtype: np.dtype[Any], rowwise: bool, columnwise: bool,
                  transposed: bool, block: tuple[int, int], scale_layout: str) -> Directions:
    """Return the directions of an MX result. Blocks of (32, 32) repeat their scale for each line, so their
    scales are those of (1, 32) too; their codes are the same in both directions."""
    found = block_directions(shape, dtype, rowwise, columnwise, transposed, (1, 32), scale_layout,
                             float8_e8m0fnu)
    return Directions(found, ("data",) if block == (32, 32) and not transposed else ())


def dbias_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array's bias gradient, with one sum per column of each matrix."""
    return (*shape[:-2], shape[-1])


# ---- uninitialised results ----
def new_parts(directions: Directions, like: Any) -> dict[str, Scaled]:
    """Return the parts of a result in new arrays, by name."""
    parts = directions.parts([empty(shape, dtype, like=like) for _, _, shape, dtype in directions.arrays()])
    return {name: part for name, part in zip(("rowwise", "columnwise"), parts, strict=True) if part}


def from_buffers(buffers: Mapping[str, tuple[Array, Array]],
                 directions: Mapping[str, Direction]) -> dict[str, Scaled]:
    """Return the parts of a result in the caller's arrays. TypeError or ValueError if these do not fit."""
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
