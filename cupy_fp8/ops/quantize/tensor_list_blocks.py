"""Quantises tensor lists in blocks, all arrays of a dtype in one launch.

Kernels: those of ops/quantize/grouped_blocks.py, which take lists too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import check_dimensions
from ...calls import validate
from ...calls.call import Call, Input, Op
from ...calls.tensor_lists import ListResult, TableLayout, checked
from ...directions import check_directions
from ...formats import INPUT_DTYPES, flag
from ...kernels import Launch
from ...kernels.shapes import LANE_COLUMNS
from ...layouts import cdiv
from ...recipes import BlockScaling, MXScaling
from ...results import Quantized
from . import block_quantization, blocks, grouped_blocks, mx
from .block_quantization import TRANSPOSED, WIDE_COLUMNS, WIDE_ROWS, WIDE_X, BlockOp


class _Inputs(NamedTuple):
    """op, arrays: the op for one array, and its inputs for each array."""

    op: BlockOp
    arrays: list[block_quantization.Inputs]
    recipe: BlockScaling | MXScaling
    directions: dict[str, bool]


class _BlockList(Op[_Inputs]):
    def arguments(self, call: Call, xs: Any, noop: Any, recipe: BlockScaling | MXScaling, rowwise: Any,
                  columnwise: Any) -> _Inputs:
        directions = flag(rowwise, "rowwise"), flag(columnwise, "columnwise")
        check_directions((0, 0), *directions)
        if not checked(xs, "xs"):
            call.without_arrays(noop)
        op: BlockOp = blocks.QUANTIZE
        options: Sequence[Any]
        if isinstance(recipe, BlockScaling):
            options = blocks.BlockOptions.of(recipe, *directions)
        else:
            op, options = mx.QUANTIZE, mx.MxOptions.of(recipe, *directions)
        arrays = []
        for i, x in enumerate(xs):
            call.names["x"] = f"xs[{i}]"
            backend.module_of(x, call.names["x"])
            validate.check_dtype(x, INPUT_DTYPES, call.names["x"])
            check_dimensions(x.shape, call.names["x"], 2, 3)
            arrays.append(op.arguments(call, x, None, *options))
        call.noop(noop)
        return _Inputs(op, arrays, recipe, dict(zip(("rowwise", "columnwise"), directions, strict=True)))

    def result(self, inputs: _Inputs) -> ListResult:
        return ListResult([inputs.op.result(array) for array in inputs.arrays])

    def reference(self, inputs: _Inputs) -> list[Quantized]:
        xs = [array.logical_x for array in inputs.arrays]
        return reference.multi_quantize(xs, inputs.recipe, **inputs.directions)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        """Yield one launch for all arrays of a dtype. An array has its own launches if its last two axes are
        swapped in memory, or if blocks are whole rows or columns, which kernels for lists do not take."""
        assert isinstance(call.result, ListResult)
        listed: dict[np.dtype[Any], list[_ListedArray]] = {}
        alone: list[Launch] = []
        for array, own in zip(inputs.arrays, call.result.divide(written), strict=True):
            x, quantization = array.x, array.quantization
            if quantization.swapped or None in quantization.block:
                alone += inputs.op.launches(call, array, *own)
            elif quantization.size:
                listed.setdefault(x.dtype, []).append(
                    _ListedArray(x, quantization, _members(quantization, own, x)))
        for arrays in listed.values():
            yield _launch(call, arrays)
        yield from alone


QUANTIZE = _BlockList()


# ---- launches ----
class _ListedArray(NamedTuple):
    """An array of a launch, its quantisation, and the members of its record except x."""

    x: Input
    quantization: grouped_blocks.AnyQuantization
    members: block_quantization.Members

    @property
    def allows_wide(self) -> bool:
        """Whether it allows wide accesses. The program for these checks the rows of transposed data itself.
        """
        axes, _ = grouped_blocks.axes_of(self.quantization)
        vector = self.members["vector"]
        return all(vector & bit or how == TRANSPOSED
                   for bit, how in ((WIDE_X, None), (WIDE_ROWS, axes[0].stored),
                                    (WIDE_COLUMNS, axes[1].stored)))

    def tiles(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return (tiles of all matrices, tiles across a matrix, tiles down a matrix)."""
        (*batch, down, across) = self.quantization.shape
        across, down = cdiv(across, columns), cdiv(down, rows)
        return prod(batch) * across * down, across, down


def _members(quantization: grouped_blocks.AnyQuantization, written: Sequence[int],
             x: Input) -> block_quantization.Members:
    aligned = x.at % (LANE_COLUMNS * x.dtype.itemsize) == 0
    axes, members = grouped_blocks.axes_of(quantization)
    addresses = quantization.result.addresses(written)
    return {**quantization.warp_tile_members(axes, addresses, aligned), **members}


def _launch(call: Call, arrays: list[_ListedArray]) -> Launch:
    """Return the launch for arrays of one dtype. It uses the program for any memory unless all arrays allow
    wide accesses."""
    quantization, wide = arrays[0].quantization, all(each.allows_wide for each in arrays)
    (along_rows, along_columns), _ = grouped_blocks.axes_of(quantization)
    stored = along_rows.stored, along_columns.stored
    variant, warp_tiles = grouped_blocks.variant(quantization, stored, wide)
    tiles = [each.tiles(warp_tiles.rows, warp_tiles.columns) for each in arrays]
    params = "BlockParams" if isinstance(quantization, blocks.BlockQuantization) else "MxParams"
    table = TableLayout(variant.kernel.record(f"ListedArray<{params}>"), [count for count, _, _ in tiles])
    packed, first = [], 0
    for each, (count, across, down) in zip(arrays, tiles, strict=True):
        array = {"x": each.x.at, **each.members}
        packed.append(table.record.pack(array=array, first=first, across=across, down=down))
        first += count
    at = table.make(call, b"".join(packed))
    return variant.bind(arrays[0].x.array, table.count, all={"noop": call.noop_at},
                        list={"arrays": at, "array_of": at + table.numbers})
