"""The description of the Grouped that `group_quantize` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from ...arrays import Array, address
from ...calls.descriptions import Description, Written
from ...calls.group_sizes import Groups
from ...directions import Direction, Directions
from ...formats import float32
from ...grouped import Grouped
from ...layouts import Block, grouped_scale_shape

_INT64 = np.dtype(np.int64)
#: Arrays have a shape and a dtype, by the names that a Grouped has for them.
_Arrays = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
#: A Grouped has these arrays besides splits and offsets. Absent ones are None.
_DATA_AND_SCALES = ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


def scale_format(direction: Direction) -> tuple[Block, str, bool]:
    """Returns (block, layout of scales, whether data are stored transposed) of a direction in blocks."""
    assert direction.block is not None
    assert direction.scale_layout is not None
    return direction.block, direction.scale_layout, direction.transposed


class GroupedResult(Description):
    """Describes a Grouped with these directions of all groups together. It holds the sizes and offsets that
    the call was given. The call writes offsets if it was given none, and sizes if it pads the groups.

    transposed: the attribute of the Grouped, which it has without column-wise data too."""

    def __init__(self, directions: Directions, transposed: bool, groups: Groups, offsets: Array | None,
                 pads: bool) -> None:
        self._splits, self._offsets, self._shared = groups.array, offsets, "data" in directions.shared
        first, (rows, columns) = directions.first, directions.first.shape
        self.shape = rows, columns
        block = first.block
        if block is not None and "rowwise" not in directions:
            block = block[1], block[0]                      # The block of rows describes both directions.
        self._attributes = {"shape": self.shape, "block": block, "scale_layout": first.scale_layout,
                            "transposed": transposed}
        number = len(groups.array)
        arrays: _Arrays = {name: ((prod(self.shape),), direction.dtype)
                           for name, direction in directions.items()
                           if not directions.is_shared(name, "data")}
        arrays |= _scales(directions, self.shape, number)
        if offsets is None:
            arrays["offsets"] = (number + 1,), _INT64
        if pads:
            arrays["splits"] = (number,), groups.array.dtype
        self._names = tuple(arrays)
        super().__init__(*(Written(f"out.{name}", *described) for name, described in arrays.items()))

    def build(self, arrays: Sequence[Array]) -> Grouped:
        return self._maker()(arrays, self._splits, self._offsets)

    def builder(self, names: tuple[str, ...]) -> Callable[[Sequence[Array], tuple[Any, ...]], Grouped]:
        make, splits, offsets = self._maker(), names.index("splits"), names.index("offsets")
        return lambda arrays, given: make(arrays, given[splits], given[offsets])

    def _maker(self) -> Callable[[Sequence[Array], Array, Array | None], Grouped]:
        """Returns a function that makes a Grouped of (arrays written, splits given, offsets given). It holds
        no array."""
        written, shared, attributes = self._names, self._shared, self._attributes

        def make(arrays: Sequence[Array], splits: Array, offsets: Array | None) -> Grouped:
            fields = {"splits": splits, "offsets": offsets, **dict.fromkeys(_DATA_AND_SCALES),
                      **dict(zip(written, arrays, strict=True))}
            if shared:
                fields["columnwise"] = fields["rowwise"]
            return Grouped._of_fields(**fields, **attributes)

        return make

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Grouped):
            raise TypeError(f"out: expected a Grouped (an earlier result), got {type(out).__name__}")
        if "splits" not in self._names and not _is_same(out.splits, self._splits):
            raise ValueError("out: expected splits to be out.splits, that very memory; a result belongs to "
                             "the sizes that it was made for, which may change in place")
        if self._offsets is not None and not _is_same(out.offsets, self._offsets):
            raise ValueError("out: expected offsets to be out.offsets, that very memory")
        for name, value in self._attributes.items():
            if getattr(out, name) != value:
                raise ValueError(f"out: expected {name} {value}, got {getattr(out, name)}")
        for name in _DATA_AND_SCALES:
            has = getattr(out, name) is not None
            wanted = name in self._names or (self._shared and name == "columnwise")
            if has != wanted:
                raise ValueError(f"out.{name}: expected {'one' if wanted else 'none'} for these options, "
                                 f"got {'one' if has else 'none'}")
        if self._shared and out.columnwise is not out.rowwise:
            raise ValueError("out.columnwise: expected out.rowwise itself, since both directions are the "
                             "same here")
        return [getattr(out, name) for name in self._names]

    def addresses(self, written: Sequence[int]) -> dict[str, int]:
        """Returns the addresses of a Grouped's arrays by name; 0 for those that the call does not write."""
        addresses = dict.fromkeys((*_DATA_AND_SCALES, "offsets", "splits"), 0)
        addresses.update(zip(self._names, written, strict=True))
        if self._shared:
            addresses["columnwise"] = addresses["rowwise"]
        return addresses


def _scales(directions: Directions, shape: tuple[int, int], number: int) -> _Arrays:
    """Returns the scales of so many groups."""
    if directions.first.block is None:
        return {"scale_inv": ((number,), float32)}
    return {"scale_inv" if name == "rowwise" else "columnwise_scale_inv":
            (grouped_scale_shape(shape, number, *scale_format(direction)), direction.scale_dtype)
            for name, direction in directions.items()}


def _is_same(own: Array, given: Array) -> bool:
    """Returns whether two arrays of sizes or offsets are the same memory."""
    return type(own) is type(given) and own.shape == given.shape and own.dtype == given.dtype \
        and address(own) == address(given)
