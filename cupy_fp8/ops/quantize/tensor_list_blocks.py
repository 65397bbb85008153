"""Tensor lists quantised in blocks: all arrays of a dtype in one launch.

Kernels: those of row groups (ops/quantize/grouped_blocks.py), which take a list as well."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...calls.call import Call, Input, Op
from ...calls.tensor_lists import ListResult, TableLayout, checked
from ...formats import INPUT_DTYPES, flag
from ...kernels import Launch
from ...kernels.warp_tiles import LANE_COLUMNS
from ...layouts import cdiv
from ...recipes import BlockScaling, MXScaling, check_directions
from ...results import Quantized
from . import block_results, blocks, grouped_blocks, mx
from .block_results import TRANSPOSED


class _Array(NamedTuple):
    """An array as it lies in memory, whether its last two axes are swapped there, and the plan for its shape and dtype."""

    x: Input
    swapped: bool
    plan: grouped_blocks.Plan


class _Inputs(NamedTuple):
    arrays: list[_Array]
    recipe: BlockScaling | MXScaling
    directions: dict[str, bool]


class _QuantizeList(Op[_Inputs]):
    def arguments(self, call: Call, xs: Any, noop: Any, recipe: BlockScaling | MXScaling, rowwise: Any,
                  columnwise: Any) -> _Inputs:
        directions = {"rowwise": flag(rowwise, "rowwise"), "columnwise": flag(columnwise, "columnwise")}
        check_directions((0, 0), **directions)
        if not checked(xs, "xs"):
            call.without_arrays(noop)
        arrays = [_array(call, f"xs[{i}]", x, recipe, **directions) for i, x in enumerate(xs)]
        call.noop(noop)
        return _Inputs(arrays, recipe, directions)

    def result(self, inputs: _Inputs) -> ListResult:
        return ListResult([array.plan.result for array in inputs.arrays])

    def reference(self, inputs: _Inputs) -> list[Quantized]:
        xs = [x.array.swapaxes(-1, -2) if swapped else x.array for x, swapped, _ in inputs.arrays]
        return reference.multi_quantize(xs, inputs.recipe, **inputs.directions)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        """One for all arrays of a dtype; one for each array that no kernel for lists takes: such as have the last two axes
        swapped in memory, and blocks of whole rows or columns."""
        assert isinstance(call.result, ListResult)
        listed: dict[np.dtype[Any], list[_Listed]] = {}
        alone: list[Launch] = []
        for (x, swapped, plan), own in zip(inputs.arrays, call.result.divide(written), strict=True):
            out = plan.addresses(own)
            if swapped or None in plan.block:
                alone += [variant.bind(x.array, grid, x=x.at, noop=call.noop_at, **members)
                          for variant, grid, members in plan.choices(out, x.at % plan.load_bytes == 0)]
            elif plan.size:
                aligned = x.at % (LANE_COLUMNS * x.dtype.itemsize) == 0
                listed.setdefault(x.dtype, []).append(_Listed(x, plan, _kernel(plan).members.at(out, aligned)))
        for arrays in listed.values():
            yield _launch(call, arrays)
        yield from alone


QUANTIZE = _QuantizeList()


def _array(call: Call, name: str, x: Any, recipe: BlockScaling | MXScaling, rowwise: bool, columnwise: bool) -> _Array:
    backend.module_of(x, name)
    swapped = x.ndim in (2, 3) and block_results.lies_swapped(x)
    found = call.read(name, x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES)
    if x.ndim not in (2, 3):
        raise ValueError(f"{name}: expected an array of two or three dimensions, got shape {x.shape}")
    if isinstance(recipe, BlockScaling):
        plan = blocks._QUANTIZE._plan(found.array, swapped, (
            recipe.dtype, rowwise, columnwise, True, recipe.block, recipe.pow2_scale, recipe.eps, recipe.profile,
            recipe.scale_layout))
    else:
        plan = mx._QUANTIZE._plan(found.array, swapped, (
            recipe.dtype, rowwise, columnwise, False, recipe.mode, recipe.profile, recipe.block, recipe.scale_layout))
    assert isinstance(plan, (blocks.Plan, mx.Plan))
    return _Array(found, swapped, plan)


class _Listed(NamedTuple):
    """An array of a launch, and the members of its record but for x."""

    x: Input
    plan: grouped_blocks.Plan
    members: block_results.Members


class _Kernel:
    """What the kernel for lists is told of arrays of one plan, whatever their memory."""

    def __init__(self, plan: grouped_blocks.Plan) -> None:
        sides, members = grouped_blocks.sides_of(plan)
        self.members, self.stored = block_results.PanelMembers(plan, sides, members), (sides[0].stored, sides[1].stored)

    def allows_wide(self, vector: int) -> bool:
        """Whether an array with this `vector` suits the program for wide accesses, which asks about transposed rows alone."""
        return all(vector & bit for bit, stored in zip((1, 2, 4), (None, *self.stored), strict=True) if stored != TRANSPOSED)


_kernel = functools.lru_cache(maxsize=1024)(_Kernel)


def _launch(call: Call, arrays: list[_Listed]) -> Launch:
    """The launch for arrays of one dtype. Any of them that does not allow wide accesses takes the kernel for any memory."""
    plan = arrays[0].plan
    wide = all(_kernel(each.plan).allows_wide(each.members["vector"]) for each in arrays)
    variant, panels = grouped_blocks.variant(plan, _kernel(plan).stored, wide)
    tiles = [(cdiv(each.plan.columns, panels.columns), cdiv(each.plan.rows, panels.rows)) for each in arrays]
    counts = [each.plan.size // (each.plan.rows * each.plan.columns) * across * down
              for each, (across, down) in zip(arrays, tiles, strict=True)]
    params = "BlockParams" if isinstance(plan, blocks.Plan) else "MxParams"
    table = TableLayout(variant.kernel.record(f"ListedArray<{params}>"), counts)
    packed, first = [], 0
    for each, (across, down), count in zip(arrays, tiles, counts, strict=True):
        packed.append(table.record.pack(array={"x": each.x.at, **each.members}, first=first, across=across, down=down))
        first += count
    at = table.make(call, b"".join(packed))
    return variant.bind(arrays[0].x.array, first, all={"noop": call.noop_at},
                        list={"arrays": at, "array_of": at + table.numbers})
