"""The arguments of ops that move rows: an array, or a Scaled, whose scales move with its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import backend
from ...arrays import Array
from ...calls.call import Call, Input
from ...calls.results import Description, Written, one_array
from ...formats import FP8_DTYPES, names
from ...results import Scaled
from ...scaled_parts import check_block_scales
from ..scales.convert import with_compact_scales


class Rows(NamedTuple):
    """Rows that move. given: the array, or the Scaled that has the other arrays."""

    given: Any
    data: Input
    scales: Input | None = None         # a row for each row of the data
    one_scale: Input | None = None      # for all rows

    @property
    def number(self) -> int:
        return self.data.shape[0]

    def moved(self, number: int) -> Description:
        """The description of a result of `number` such rows."""
        shape = number, *self.data.shape[1:]
        if not isinstance(self.given, Scaled):
            return one_array(shape, self.data.dtype)
        scale_inv = self.given.scale_inv
        scale_shape = scale_inv.shape if self.scales is None else (number, *scale_inv.shape[1:])
        return _ScaledRows(self.given.block, Written("out.data", shape, self.data.dtype),
                           Written("out.scale_inv", scale_shape, scale_inv.dtype))


class _ScaledRows(Description):
    """Describes a Scaled with compact scales of blocks (1, B), or with one scale (block None)."""

    def __init__(self, block: Any, data: Written, scales: Written) -> None:
        super().__init__(data, scales)
        self._block, self._layout = block, None if block is None else "compact"

    def build(self, arrays: Sequence[Array]) -> Scaled:
        data, scale_inv = arrays
        return Scaled._of(data, scale_inv, self.arrays[0].shape, False, self._block, self._layout)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        shape = self.arrays[0].shape
        if not isinstance(out, Scaled):
            raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
        wanted = shape, False, self._block, self._layout
        if (out.shape, out.transposed, out.block, out.scale_layout) != wanted:
            scales = "one scale" if self._block is None else f"compact scales of blocks {self._block}"
            raise ValueError(f"out: expected shape {shape} with {scales}, got {out!r}")
        return out.data, out.scale_inv


def read_rows(call: Call, name: str, x: Any) -> Rows:
    """Declares rows that move: an array of any dtype of 1, 2, 4 or 8 bytes, or a Scaled with one scale or
    with blocks (1, B). Scales that are not compact are made so, in new memory."""
    if not isinstance(x, Scaled):
        data = _read_array(call, name, x)
        return Rows(data.array, data)
    data = _read_array(call, f"{name}.data", x.data)
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"{name}.data: expected one of {names(FP8_DTYPES)}, got {data.dtype}")
    if data.shape != x.shape:
        raise ValueError(f"{name}.data: expected the shape of {name}, {x.shape}, got {data.shape}")
    where = f"{name}.scale_inv"
    if x.block is None:
        one_scale = Input(x.scale_inv, call.one_f32(where, x.scale_inv))
        return Rows(Scaled._of(data.array, x.scale_inv, x.shape), data, one_scale=one_scale)
    backend.require_module(x.scale_inv, call.xp, where)
    check_block_scales(x, name)
    if x.scale_layout != "compact":
        call.read_strided(where, x.scale_inv)
        x = with_compact_scales(x, name)
        call.repeatable = False                     # a later call finds these scales elsewhere
    scales = call.read(where, x.scale_inv, (x.scale_inv.dtype,))
    return Rows(Scaled._of(data.array, scales.array, x.shape, False, x.block, "compact"), data, scales)


def _read_array(call: Call, name: str, x: Any) -> Input:
    backend.module_of(x, name)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    check_has_rows(x, name)
    return call.read(name, x, (x.dtype,))


def check_has_rows(x: Array, name: str) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: expected rows, an array of one or more dimensions, got shape ()")
