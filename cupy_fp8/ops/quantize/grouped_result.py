"""The description of the Grouped that `group_quantize` returns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...arrays import Array
from ...calls.descriptions import Description, Written
from ...calls.group_sizes import Groups
from ...directions import Direction, Directions
from ...formats import float32
from ...grouped import Grouped
from ...layouts import Block, grouped_scale_shape

_INT64 = np.dtype(np.int64)
#: Shape and dtype of arrays, by their names in a Grouped.
_Arrays = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
#: Arrays of a Grouped besides splits and offsets; absent ones are None.
_DATA_AND_SCALES = ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


def scale_format(direction: Direction) -> tuple[Block, str, bool]:
    """Return (block, layout of scales, whether data are stored transposed) of a direction in blocks."""
    assert direction.block is not None
    assert direction.scale_layout is not None
    return direction.block, direction.scale_layout, direction.transposed


class GroupedResult(Description):
    """Description of a Grouped with these directions of all groups together. It has copies of the sizes and
    offsets that it is laid out by, since those that the call is given may change.

    transposed: the attribute of the Grouped, also without column-wise data."""

    def __init__(self, directions: Directions, transposed: bool, groups: Groups) -> None:
        self._shared = "data" in directions.shared
        first, (rows, columns) = directions.first, directions.first.shape
        self.shape = rows, columns
        block = first.block
        if block is not None and "rowwise" not in directions:
            block = block[1], block[0]                      # the block of rows describes both directions
        self._attributes = {"shape": self.shape, "block": block, "scale_layout": first.scale_layout,
                            "transposed": transposed}
        number = len(groups.array)
        arrays: _Arrays = {name: ((prod(self.shape),), direction.dtype)
                           for name, direction in directions.items()
                           if not directions.is_shared(name, "data")}
        arrays |= _scales(directions, self.shape, number)
        arrays |= {"offsets": ((number + 1,), _INT64), "splits": ((number,), groups.array.dtype)}
        self._names = tuple(arrays)
        super().__init__(*(Written(f"out.{name}", *described) for name, described in arrays.items()))

    def build(self, arrays: Sequence[Array]) -> Grouped:
        fields = {**dict.fromkeys(_DATA_AND_SCALES), **dict(zip(self._names, arrays, strict=True))}
        if self._shared:
            fields["columnwise"] = fields["rowwise"]
        return Grouped._of_fields(**fields, **self._attributes)

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Grouped):
            raise TypeError(f"out: expected a Grouped (an earlier result), got {type(out).__name__}")
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
        """Return the addresses of a Grouped's arrays by name; 0 for absent ones."""
        addresses = dict.fromkeys(_DATA_AND_SCALES, 0)
        addresses.update(zip(self._names, written, strict=True))
        if self._shared:
            addresses["columnwise"] = addresses["rowwise"]
        return addresses


def _scales(directions: Directions, shape: tuple[int, int], number: int) -> _Arrays:
    """Return the scales of `number` groups."""
    if directions.first.block is None:
        return {"scale_inv": ((number,), float32)}
    return {"scale_inv" if name == "rowwise" else "columnwise_scale_inv":
            (grouped_scale_shape(shape, number, *scale_format(direction)), direction.scale_dtype)
            for name, direction in directions.items()}
