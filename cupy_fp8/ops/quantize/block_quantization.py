"""Shared by quantisers in blocks: the op, what follows from shapes and options, and members of the kernels'
structs.

Kernels know only memory, where the last two axes of x may be swapped. Blocks *along rows* lie along a row of
memory, blocks *along columns* down a column; which of them are the row-wise ones depends on the order of x in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays import Array, is_contiguous
from ...calls.call import Call, Input, Op
from ...directions import Direction, Directions
from ...formats import FP8_DTYPES, INPUT_DTYPES, lookup
from ...kernels.shapes import LANE_COLUMNS
from ...layouts import Block, swap_last
from ...results import Quantized
from .quantized_result import Addresses, QuantizedResult

#: How the data of a direction are stored: not at all, in the order of x's memory, or with the last two axes
#: swapped.
ABSENT, AS_IS, TRANSPOSED = 0, 1, 2

#: Members of a kernel's struct, by name.
Members = dict[str, Any]
_NOWHERE = 0, 0
#: Bits of the member `vector`: wide accesses of x, of data along rows, of data along columns.
WIDE_X, WIDE_ROWS, WIDE_COLUMNS = 1, 2, 4
ALL_WIDE = WIDE_X | WIDE_ROWS | WIDE_COLUMNS


# ---- members of the kernels' structs ----
class Axis(NamedTuple):
    """What a kernel writes for the blocks along one axis of memory. data, scales: the direction that they
    belong to, or None if they are not written. stored: how the data are stored. strides: of the scales, as
    members of the kernel's struct."""

    data: str | None
    stored: int
    scales: str | None
    strides: Mapping[str, int]


def stored_as(direction: Direction | None, swapped: bool) -> int:
    """Return how the data of a direction are stored. swapped: the last two axes of x are swapped in
    memory."""
    return ABSENT if direction is None else AS_IS if direction.transposed == swapped else TRANSPOSED


def destinations(axes: tuple[Axis, Axis], addresses: Addresses) -> Members:
    """Return the destinations of data and scales along rows and along columns of memory."""
    (rows_data, _), (columns_data, _) = (addresses.get(axis.data, _NOWHERE) for axis in axes)
    (_, rows_scales), (_, columns_scales) = (addresses.get(axis.scales, _NOWHERE) for axis in axes)
    along_rows, along_columns = axes
    return {
        "rows_data": rows_data,
        "columns_data": columns_data,
        "along_rows": {"to": rows_scales, **along_rows.strides},
        "along_columns": {"to": columns_scales, **along_columns.strides},
    }


class Options(Protocol):
    """Options of an op that quantises in blocks: a NamedTuple with the names that users and the reference
    have for them."""

    @property
    def dtype(self) -> Any: ...
    @property
    def block(self) -> Block: ...
    def _asdict(self) -> dict[str, Any]: ...
    def _replace(self, *, dtype: np.dtype[Any]) -> Any: ...


class Quantization:
    """What is read and written for an array, independent of its memory. The kernels' members follow from it.

    shape, source: shape of x in memory, and its dtype. swapped: its last two axes are swapped there. kind:
    kind of data, in messages."""

    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], swapped: bool, options: Options,
                 directions: Directions, kind: str) -> None:
        self.shape, self.source, self.swapped, self.directions = shape, source, swapped, directions
        self.size, (self.rows, self.columns) = prod(shape), shape[-2:]
        self.to, self.block = options.dtype, options.block
        self.result = QuantizedResult(directions, kind)

    def warp_tile_members(self, axes: tuple[Axis, Axis], addresses: Addresses, aligned: bool,
                          chunk: int = LANE_COLUMNS, grouped: bool = False) -> Members:
        """Return destinations, and `vector`. aligned: x is aligned to chunks. chunk: elements of a wide
        access. grouped: the kernel checks each group's transposed data itself."""
        members, whole = destinations(axes, addresses), self.columns % chunk == 0
        vector = WIDE_X * (whole and aligned)
        for bit, axis, at in zip((WIDE_ROWS, WIDE_COLUMNS), axes,
                                 (members["rows_data"], members["columns_data"]), strict=True):
            if axis.stored == TRANSPOSED:
                wide = grouped or (self.rows % 16 == 0 and at % 16 == 0)
            else:
                wide = whole and at % chunk == 0
            vector |= bit * wide
        return {**members, "vector": vector}


# ---- the ops ----
class Inputs(NamedTuple):
    """x in the order of its memory, maybe with its last two axes swapped."""

    x: Input
    quantization: Any
    options: Options

    @property
    def logical_x(self) -> Array:
        """x with the axes that users see."""
        return self.x.array.swapaxes(-1, -2) if self.quantization.swapped else self.x.array


class BlockOp(Op[Inputs]):
    """An op that quantises in blocks. Its arguments are x, noop and the options."""

    options: Callable[..., Options]
    quantization: Callable[[tuple[int, ...], np.dtype[Any], bool, Any], Quantization]
    definition: Callable[..., Quantized]

    def arguments(self, call: Call, x: Any, noop: Any, *given: Any) -> Inputs:
        options = type(self).options(*given)
        options = options._replace(dtype=lookup(options.dtype, FP8_DTYPES, "dtype").dtype)
        swapped = lies_swapped(x)
        x_input = call.read("x", x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES)
        call.noop(noop)
        quantization = type(self).quantization(x_input.shape, x_input.dtype, swapped, options)
        return Inputs(x_input, quantization, options)

    def result(self, inputs: Inputs) -> QuantizedResult:
        result: QuantizedResult = inputs.quantization.result
        return result

    def reference(self, inputs: Inputs) -> Quantized:
        return type(self).definition(inputs.logical_x, **inputs.options._asdict())


def lies_swapped(x: Any) -> bool:
    """Return whether an array is C-contiguous only with its last two axes swapped."""
    if x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True):
        return False
    return bool(x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2)))


def logical_shape(shape: tuple[int, ...], swapped: bool) -> tuple[int, ...]:
    """Return the logical shape of x, given its shape in memory."""
    return swap_last(shape) if swapped else shape
