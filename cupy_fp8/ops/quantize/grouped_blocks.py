"""Groups of rows quantised in blocks, each as a matrix of its own. Kernels: kernels_cu/quantize/blocks.cu and mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from ...arrays import Array
from ...calls import splits as sizes
from ...calls.row_segments import GroupRuns, pays
from ...formats import FP8_DTYPES, INPUT_DTYPES
from ...grouped import Grouped
from ...kernels import Kernel, Variant
from ...kernels.warp_tiles import LANE_COLUMNS, ROWS, Panels
from ...layouts import group_scales, group_unit, grouped_scale_shape
from ...recipes import BlockScaling, Form, MXScaling
from . import blocks, mx
from .block_results import ABSENT, AS_IS, TRANSPOSED, Members, PanelMembers, Side
from .grouped_results import Arrays, GroupForm, addresses, divided

Plan = blocks.Plan | mx.Plan

_BLOCKS = Kernel("quantize/blocks", "group_quantize_block")
_MX = Kernel("quantize/mx", "group_quantize_mx")
_RUN = 2                        # tiles of a block where data are stored transposed: more would leave multiprocessors idle at the end


@functools.lru_cache(maxsize=256)
def plan(shape: tuple[int, int], source: np.dtype[Any], recipe: BlockScaling | MXScaling, rowwise: bool, columnwise: bool) -> Plan:
    """Of all rows as one matrix, which is the same for its groups but for their number of rows. shape: of the result."""
    if isinstance(recipe, BlockScaling):
        return blocks.Plan(shape, source, False, (recipe.dtype, rowwise, columnwise, True, recipe.block, recipe.pow2_scale, recipe.eps,
                                                  recipe.profile, recipe.scale_layout))
    return mx.Plan(shape, source, False, (recipe.dtype, rowwise, columnwise, False, recipe.mode, recipe.profile, recipe.block,
                                          recipe.scale_layout))


def form(plan: Plan, arrays: Arrays, number: int) -> GroupForm:
    """The result's description for so many groups; blocks of whole rows and columns have it too. arrays: what tells of the
    groups."""
    arrays = dict(arrays)
    shape = plan.rows, plan.columns
    for name, of in plan.forms.items():
        assert of.block is not None
        assert of.scale_layout is not None
        arrays[name] = (plan.size,), of.dtype
        arrays["scale_inv" if name == "rowwise" else f"{name}_scale_inv"] = (
            grouped_scale_shape(shape, number, of.block, of.scale_layout, of.transposed), of.scale_dtype)
    row, column = plan.forms.get("rowwise"), plan.forms.get("columnwise")
    block = row.block if row else cast(Form, column).block
    assert block is not None
    return GroupForm(shape, arrays, block if row else (block[1], block[0]), cast(Form, row or column).scale_layout,
                     isinstance(plan, blocks.Plan), "data" in plan.shared and len(plan.forms) == 2)


class Launch:
    """The launch for all groups and, where that pays, the one before it that finds each block's rows. Kept with a result on a
    GPU that was given as `out=`."""

    def __init__(self, plan: Plan, out: Grouped, x: Array, at: int, noop_at: int, offsets_at: int, groups: sizes.Groups,
                 align: int, owner: Array | None) -> None:
        (fast, slow), of_plan = sides_of(plan)
        members = PanelMembers(plan, (fast, slow), of_plan, grouped=True).at(addresses(out), at % (LANE_COLUMNS * x.itemsize) == 0)
        chosen, panels = variant(plan, (fast.stored, slow.stored), members["vector"] == 7)
        division = divided(out, x, groups, offsets_at, align, panels.run_rows, panels.columns, clears=1)
        scales = [scales_of(plan, len(groups.array), side) for side in (fast, slow)]
        self._runs = None
        if pays(x, division.grid):
            self._runs = GroupRuns(x, owner, *division.to_find, (scales[0][1], scales[1][1]))
        self._launch = chosen.bind(
            x, division.grid, all={"x": at, "noop": noop_at, **members},
            groups=(*division.members, 0 if self._runs is None else self._runs.at), fast=scales[0], slow=scales[1])

    def run(self, x: Array) -> None:
        if self._runs is not None:
            self._runs.run(x)
        self._launch.run()


def sides_of(plan: Plan) -> tuple[tuple[Side, Side], Members]:
    """What the kernel is told of a result's directions: its sides, and members of its struct."""
    return plan.tile_launch(list(plan.forms)) if isinstance(plan, blocks.Plan) else (plan.sides, plan.members)


def scales_of(plan: Plan, number: int, side: Side) -> tuple[int, int, int, int]:
    """The GroupScales of kernels_cu/include/groups/row_groups.cuh."""
    if side.scales is None:
        return 0, 0, 0, 0
    of = plan.forms[side.scales]
    assert of.block is not None
    assert of.block[0] is not None
    assert of.scale_layout is not None
    described = of.block, of.scale_layout, of.transposed
    stored = prod(grouped_scale_shape((plan.rows, plan.columns), number, *described))
    return of.block[0].bit_length() - 1, group_unit(*described).bit_length() - 1, group_scales(plan.columns, *described), stored


def variant(plan: Plan, stored: tuple[int, int], wide: bool) -> tuple[Variant, Panels]:
    """The variant for memory that allows wide accesses, or for any, and the panels of its blocks."""
    if isinstance(plan, blocks.Plan):
        return _block_variant(plan.source, plan.to, *stored, 1 not in plan.block, plan.divide, wide)
    return _mx_variant(plan.source, plan.to, *stored, plan.tall, wide)


def _block_variant(source: np.dtype[Any], to: np.dtype[Any], fast: int, slow: int, square: bool, divide: bool,
                   wide: bool) -> tuple[Variant, Panels]:
    # Blocks down columns alone, data as they are: rare, and no program of their own.
    panels = blocks.panels_of(source, fast, slow, square, divide, False) if wide and slow != AS_IS else None
    if panels is None:
        return blocks.any_shape_variant(source, to, divide, _BLOCKS), blocks.ANY_SHAPE
    panels = panels._replace(down_first=False, run=_RUN if slow == TRANSPOSED else 1)       # groups have an order of their own
    return blocks.tile_variant(source, to, fast, slow, square, divide, panels, True, _BLOCKS), panels


def _mx_variant(source: np.dtype[Any], to: np.dtype[Any], fast: int, slow: int, tall: bool, wide: bool) -> tuple[Variant, Panels]:
    if not wide:                                            # told at run time; MX data are never stored transposed here
        return mx.tile_variant(source, to, AS_IS, AS_IS, mx.ANY_SHAPE, False, _MX), mx.ANY_SHAPE
    panels = mx.panels_of(source, fast, slow, tall)._replace(down_first=False)
    return mx.tile_variant(source, to, fast, slow, panels, True, _MX), panels


def run_rows() -> Iterator[int]:
    """Of every variant."""
    for v in variants():
        defines = dict(v.defines)
        yield int(defines.get("RUN", 1)) * int(defines["PANELS_DOWN"]) * ROWS


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        for divide in (False, True):
            yield _block_variant(source, to, ABSENT, ABSENT, False, divide, False)[0]
            yield _block_variant(source, to, AS_IS, ABSENT, False, divide, True)[0]
        for (fast, slow), square in product(((ABSENT, TRANSPOSED), (AS_IS, TRANSPOSED)), (False, True)):
            yield _block_variant(source, to, fast, slow, square, False, True)[0]
        yield _block_variant(source, to, AS_IS, ABSENT, True, False, True)[0]
        yield _mx_variant(source, to, ABSENT, ABSENT, False, False)[0]
        for (fast, slow), tall in product(((AS_IS, ABSENT), (ABSENT, AS_IS), (AS_IS, AS_IS)), (False, True)):
            yield _mx_variant(source, to, fast, slow, tall, True)[0]
