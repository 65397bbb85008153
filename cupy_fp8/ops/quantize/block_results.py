"""What quantisers in blocks share: the description of their results, and the members of the kernels' structs.

Kernels know only memory, where the last two axes of x may be swapped. Blocks *along rows* lie along a row of
memory, blocks *along columns* down a column; which of them are the row-wise ones depends on how x lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...arrays import Array, empty_beside, is_contiguous
from ...calls.call import Call, Input, Op, run
from ...calls.results import Description, Written
from ...directions import Direction
from ...formats import INPUT_DTYPES
from ...kernels.warp_tiles import LANE_COLUMNS
from ...layouts import as_block, swap_last
from ...results import Quantized

#: How the data of one direction are stored: not at all, in the order of x's memory, or with its last two axes
#: swapped.
ABSENT, AS_IS, TRANSPOSED = 0, 1, 2

#: Members of a kernel's struct by name.
Members = dict[str, Any]
#: The addresses of data and scale_inv of each direction of a result.
Places = Mapping[str | None, tuple[int, int]]
_NOWHERE = 0, 0


# ---- the result ----
class BlockResult(Description):
    """Describes a Quantized with these directions. shared: the arrays ('data', 'scale_inv') that both
    directions have in common. kind: the kind of data, for messages."""

    def __init__(self, directions: dict[str, Direction], shared: tuple[str, ...], kind: str) -> None:
        self.directions, self.shared, self.kind = directions, shared if len(directions) == 2 else (), kind
        # by direction: the positions of data and scale_inv among the arrays
        self._positions: dict[str, list[int]] = {}
        written: list[Written] = []
        for name, direction in directions.items():
            positions = self._positions[name] = []
            for what, shape, dtype in _arrays_of(direction):
                if self._is_shared(name, what):
                    positions.append(self._positions["rowwise"][len(positions)])
                else:
                    positions.append(len(written))
                    written.append(Written(f"out.{name}.{what}", shape, dtype))
        super().__init__(*written)

    def build(self, arrays: Sequence[Array]) -> Quantized:
        parts = {name: self.directions[name].scaled(arrays[data], arrays[scales])
                 for name, (data, scales) in self._positions.items()}
        row = parts.get("rowwise")
        return Quantized._of(row, row if len(self.shared) == 2 else parts.get("columnwise"))

    def places(self, written: Sequence[int]) -> Places:
        return {name: (written[data], written[scales]) for name, (data, scales) in self._positions.items()}

    def arrays_of(self, out: Any) -> list[Array]:
        check_out(out, self.directions, self.kind)
        found = []
        for name, part in out.parts.items():
            for what, a in zip(("data", "scale_inv"), part, strict=True):
                if not self._is_shared(name, what):
                    found.append(a)
                elif a is not getattr(out.rowwise, what):
                    raise ValueError(f"out.{name}.{what}: expected out.rowwise.{what} itself, since both "
                                     "directions are the same here")
        return found

    def _is_shared(self, name: str, what: str) -> bool:
        return name == "columnwise" and what in self.shared


def _arrays_of(direction: Direction) -> tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]:
    return (("data", direction.stored, direction.dtype),
            ("scale_inv", direction.scale_shape, direction.scale_dtype))


def check_out(out: Any, directions: Mapping[str, Direction], kind: str) -> None:
    """TypeError or ValueError unless a result given as `out=` has these directions. kind: the kind of data,
    for messages."""
    if not isinstance(out, Quantized):
        raise TypeError("out: expected a Quantized (an earlier result, or recipe.empty(…)), got "
                        f"{type(out).__name__}")
    if out.dbias is not None:
        raise ValueError("out: has a dbias, which no quantisation in blocks writes")
    for name, part in (("rowwise", out._row), ("columnwise", out._column)):
        direction = directions.get(name)
        if (part is None) != (direction is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but "
                             f"{name}={direction is not None} was asked for")
        if part is None or direction is None:
            continue
        if (part.shape, part.transposed, part.block, part.scale_layout) != direction[1:5]:
            order = "stored transposed" if direction.transposed else "not stored transposed"
            raise ValueError(f"out.{name}: expected {kind} data of shape {direction.shape}, {order}, block "
                             f"{direction.block}, scales {direction.scale_layout}; got {part!r}, scales "
                             f"{part.scale_layout}")


# ---- members of the kernels' structs ----
class Axis(NamedTuple):
    """What a kernel writes for the blocks along one axis of memory. data, scales: the direction that they
    belong to, or None if they are not written. stored: how the data are stored. strides: where the scales
    lie, as the members of the kernel's struct beside their address."""

    data: str | None
    stored: int
    scales: str | None
    strides: Mapping[str, int]


def stored(direction: Direction | None, swapped: bool) -> int:
    """How the data of a direction are stored. swapped: whether x lies in memory with its last two axes
    swapped."""
    return ABSENT if direction is None else AS_IS if direction.transposed == swapped else TRANSPOSED


def destinations(axes: tuple[Axis, Axis], places: Places) -> Members:
    """Where a kernel writes data and scales along rows and along columns of memory."""
    (rows_data, _), (columns_data, _) = (places.get(axis.data, _NOWHERE) for axis in axes)
    (_, rows_scales), (_, columns_scales) = (places.get(axis.scales, _NOWHERE) for axis in axes)
    along_rows, along_columns = axes
    return {
        "rows_data": rows_data,
        "columns_data": columns_data,
        "along_rows": {"to": rows_scales, **along_rows.strides},
        "along_columns": {"to": columns_scales, **along_columns.strides},
    }


class Quantization:
    """What follows from an array's shape and the options, whatever the memory: the result, and members of the
    kernels' structs. shape: of x as it lies in memory."""

    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], to: np.dtype[Any],
                 result: BlockResult) -> None:
        self.shape, self.source, self.to, self.result = shape, source, to, result
        self.size, (self.rows, self.columns) = prod(shape), shape[-2:]
        self.directions, self.shared, self.kind = result.directions, result.shared, result.kind

    def empty(self, x: Array) -> Quantized:
        """An uninitialised result beside x."""
        return self.result.build([empty_beside(x, a.shape, a.dtype) for a in self.result.arrays])

    def warp_tile_members(self, axes: tuple[Axis, Axis], places: Places, aligned: bool,
                          chunk: int = LANE_COLUMNS, grouped: bool = False) -> Members:
        """Destinations, and `vector`, whose bits say which accesses may be wide: of x (1), of data along rows
        (2) and of data along columns (4). aligned: whether x is aligned to chunks. chunk: elements of a wide
        access. grouped: the kernel asks for each group of rows what its transposed data allow."""
        members, whole = destinations(axes, places), self.columns % chunk == 0
        vector = int(whole and aligned)
        for bit, axis, at in zip((2, 4), axes, (members["rows_data"], members["columns_data"]), strict=True):
            if axis.stored == TRANSPOSED:
                wide = grouped or (self.rows % 16 == 0 and at % 16 == 0)
            else:
                wide = whole and at % chunk == 0
            vector |= bit * wide
        return {**members, "vector": vector}


# ---- the ops ----
class Inputs(NamedTuple):
    x: Input                            # as it lies in memory
    swapped: bool                       # whether its last two axes are swapped there
    quantization: Any
    options: tuple[Any, ...]


class BlockOp(Op[Inputs]):
    """An op that quantises in blocks."""

    #: Makes a Quantization from shape, dtype, whether axes are swapped, and options.
    quantization: Callable[..., Quantization]
    definition: Callable[..., Quantized]
    #: The names of the options, as the definition has them.
    options: ClassVar[tuple[str, ...]]

    def __call__(self, x: Array, options: tuple[Any, ...], noop: Array | None,
                 out: Quantized | None) -> Quantized:
        result: Quantized = run(self, (x, noop, *options), out)
        return result

    def arguments(self, call: Call, x: Any, noop: Any, *options: Any) -> Inputs:
        swapped = lies_swapped(x)
        found = call.read("x", x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES)
        call.noop(noop)
        place = self.options.index("block")
        options = *options[:place], as_block(options[place]), *options[place + 1:]
        return Inputs(found, swapped, type(self).quantization(found.shape, found.dtype, swapped, options),
                      options)

    def result(self, inputs: Inputs) -> Description:
        result: BlockResult = inputs.quantization.result
        return result

    def reference(self, inputs: Inputs) -> Quantized:
        x = inputs.x.array.swapaxes(-1, -2) if inputs.swapped else inputs.x.array
        return type(self).definition(x, **dict(zip(self.options, inputs.options, strict=True)))


def lies_swapped(x: Any) -> bool:
    """Whether an array is C-contiguous only with its last two axes swapped."""
    if x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True):
        return False
    return bool(x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2)))


def logical(shape: tuple[int, ...], swapped: bool) -> tuple[int, ...]:
    """The shape of x, given the shape in which it lies in memory."""
    return swap_last(shape) if swapped else shape
