"""The arguments of ops that move rows: an array, or a Scaled, whose scales move with its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import backend
from ...arrays import Array, check_dimensions
from ...calls.call import Call, Input
from ...calls.descriptions import Description, Written, one_array
from ...layouts import LAYOUTS_WITH_STRIDES, Block, scale_shape
from ...results import Quantized, Scaled, row_wise
from ...scaled_parts import check_one_piece
from ..scales.convert import with_compact_scales


class MovedRows(NamedTuple):
    """Rows that move. given: the array, or the Scaled that has the other arrays."""

    given: Any
    data: Input
    scales: Input | None = None         # one row per row of the data
    one_scale: Input | None = None      # one scale for all rows
    layout: str = "compact"             # of the result's scales

    @property
    def number(self) -> int:
        return self.data.shape[0]

    def moved(self, number: int) -> Description:
        """Return the description of a result of `number` such rows."""
        shape = number, *self.data.shape[1:]
        if not isinstance(self.given, Scaled):
            return one_array(shape, self.data.dtype)
        scale_inv, block = self.given.scale_inv, self.given.block
        if block is not None:
            return described_rows(shape, self.data.dtype, scale_inv.dtype, block, self.layout)
        return _ScaledRows(None, self.layout, Written("out.data", shape, self.data.dtype),
                           Written("out.scale_inv", scale_inv.shape, scale_inv.dtype))


class _ScaledRows(Description):
    """Description of a Scaled with scales of blocks (1, B), or with one scale (block None)."""

    def __init__(self, block: Any, layout: str, data: Written, scales: Written) -> None:
        super().__init__(data, scales)
        self._block, self._layout = block, None if block is None else layout

    def build(self, arrays: Sequence[Array]) -> Scaled:
        data, scale_inv = arrays
        return Scaled._of(data, scale_inv, self.arrays[0].shape, False, self._block, self._layout)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        shape = self.arrays[0].shape
        if not isinstance(out, Scaled):
            raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
        wanted = shape, False, self._block, self._layout
        if (out.shape, out.transposed, out.block, out.scale_layout) != wanted:
            scales = "one scale" if self._block is None else f"{self._layout} scales of blocks {self._block}"
            raise ValueError(f"out: expected shape {shape} with {scales}, got {out!r}")
        return out.data, out.scale_inv


def described_rows(shape: tuple[int, ...], dtype: Any, scales: Any, block: Block, layout: str) -> Description:
    """Return the description of a row-wise Scaled with blocks (1, B). dtype, scales: of codes and scales."""
    return _ScaledRows(block, layout, Written("out.data", shape, dtype),
                       Written("out.scale_inv", scale_shape(shape, block, layout), scales))


def rowwise(x: Any, name: str) -> Any:
    """Return the row-wise part of a Quantized, whose scales move with the rows; anything else unchanged.
    """
    return row_wise(x, name, "; only its scales move with rows") if isinstance(x, Quantized) else x


def read_rows(call: Call, name: str, x: Any, layout: str = "compact") -> MovedRows:
    """Declare rows that move: an array of any dtype of 1, 2, 4 or 8 bytes, or a row-wise Scaled with one
    scale or with blocks (1, B). layout: of the result's scales. gemm_ready ones are made from any that have
    strides; for others scales are made compact, in new memory."""
    if not isinstance(x, Scaled):
        backend.module_of(x, name)
        if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
            raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
        check_dimensions(x.shape, name, 1)
        data = call.read(name, x, (x.dtype,))
        return MovedRows(data.array, data)
    check_one_piece(x, name)
    if x.transposed or (x.block is not None and x.block[0] != 1):
        raise ValueError(f"{name}: expected row-wise data stored as is, with one scale or blocks (1, B), "
                         f"whose scales move with their rows; got {x!r}")
    readable = ("compact",) if layout == "compact" else LAYOUTS_WITH_STRIDES
    data, scales = call.read_scaled(name, x, () if layout == "compact" else readable)
    check_dimensions(data.shape, name, 1)
    if x.block is not None and x.scale_layout not in readable:
        x, scales = with_compact_scales(call, name, x)
    dense = Scaled._of(data.array, scales.array, x.shape, False, x.block, x.scale_layout)
    if x.block is None:
        return MovedRows(dense, data, one_scale=scales)
    return MovedRows(dense, data, scales, layout=layout)
