"""Quantises groups of rows with one scale each, given or found from the group's own elements. Kernels:
kernels_cu/quantize/grouped_tensor.cu, and grouped_amax.cu, which finds scales in a launch of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ...calls.call import Call
from ...calls.row_segments import find_segments, is_worth_a_launch
from ...formats import FP8_DTYPES, INPUT_DTYPES
from ...kernels import Kernel, Launch, Variant, grid_size, room, shapes
from ...layouts import cdiv, padded_rows
from ...recipes import CurrentScaling
from ..scales.scale import TensorScaleRule
from . import single_read
from .grouped_call import Inputs, row_groups, tiled

_AMAX = Kernel("quantize/grouped_amax", "group_amax_scale", block=256)
_CAST = Kernel("quantize/grouped_tensor", "group_cast_transpose")
_CURRENT = Kernel("quantize/grouped_tensor", "group_cast_current", block=single_read.THREADS,
                  cooperative=True)
_SHARE_BYTES = 64 << 10             # bytes of a row segment per thread block of group_amax_scale
_TALL = 4096                        # average rows per group from which on wide tiles are faster


def launches(call: Call, inputs: Inputs, addresses: dict[str, int]) -> Iterator[Launch]:
    """Yield the launches that quantise with given scales, or with scales found first or from the same read of
    x."""
    recipe, scales_at, amaxes_at = inputs.recipe, 0, inputs.amaxes.at if inputs.amaxes else 0
    if isinstance(recipe, CurrentScaling):
        rule = TensorScaleRule.of(recipe.dtype, recipe.eps, recipe.pow2_scale)
        if staging := _single_read(inputs, addresses):
            yield from _cast_current(call, inputs, addresses, staging, rule)
            return
        scales_at, scale_launches = _find_scales(call, inputs, amaxes_at, rule)
        yield from scale_launches
        amaxes_at = 0                                       # raised by the first launch
    elif inputs.scales:
        scales_at = inputs.scales.at
    yield from _cast(call, inputs, addresses, scales_at, amaxes_at)


def _cast(call: Call, inputs: Inputs, addresses: dict[str, int], scales_at: int,
          amaxes_at: int) -> Iterator[Launch]:
    x, aligned = inputs.x.array, _is_aligned(inputs, addresses)
    tile = shapes.choose_tile(x, _large_tile(inputs)) if aligned else shapes.SMALL
    tiling = tiled(call, inputs, addresses, tile.rows, tile.columns)
    grid, segments_at = tiling.grid, 0
    if tile is not shapes.SMALL:
        # The program of large tiles needs the found segments. Its thread blocks take further tiles if there
        # are any.
        find, segments_at = find_segments(call, tiling.rows, tiling.segments, tiling.groups)
        yield find
        grid = tiling.fewest
    yield _cast_variant(x.dtype, inputs.recipe.dtype, tile).bind(
        x, grid, x=inputs.x.at, data=addresses["rowwise"], data_t=addresses["columnwise"], scale=scales_at,
        scale_inv=addresses["scale_inv"], amax=amaxes_at, noop=call.noop_at,
        groups={**tiling.groups, "segments": segments_at}, aligned=int(aligned),
        reverse=int(isinstance(inputs.recipe, CurrentScaling)), tiles=tiling.grid)


def _is_aligned(inputs: Inputs, addresses: dict[str, int]) -> bool:
    """Return whether every row of x and data allows chunked access."""
    return inputs.x.shape[1] % 8 == 0 and inputs.x.at % 16 == 0 and addresses["rowwise"] % 8 == 0


def _large_tile(inputs: Inputs) -> shapes.Tile:
    """Return the tile for large arrays."""
    (rows, columns), both = inputs.x.shape, inputs.rowwise and inputs.columnwise
    wide = both and inputs.x.dtype.itemsize == 2 and rows >= _TALL * inputs.number
    return shapes.BOTH if wide and shapes.fills_wide([columns]) else shapes.BOTH_NARROW


# ---- current scaling ----
def _find_scales(call: Call, inputs: Inputs, amaxes_at: int,
                 rule: TensorScaleRule) -> tuple[int, list[Launch]]:
    """Returns (the address of all groups' scales, the launches that find them)."""
    x, (rows, columns), count = inputs.x.array, inputs.x.shape, inputs.number
    each = room(count)
    words_at = call.workspace("group_amax", 1 + 2 * each)
    scales_at = words_at + 4 * (1 + each)
    segment_rows = _AMAX.constant("kSegmentRows")
    across = max(1, cdiv(segment_rows * columns * x.dtype.itemsize, _SHARE_BYTES))
    segments = padded_rows(rows, count, segment_rows) // segment_rows
    grid = grid_size(segments * across if count else 1, x.shape)
    scale_launches: list[Launch] = []
    groups = row_groups(call, inputs, across)
    if is_worth_a_launch(x, grid):
        find, groups["segments"] = find_segments(call, segment_rows, segments, groups)
        scale_launches.append(find)
    scale_launches.append(_AMAX.variant(IN=x.dtype).bind(
        x, grid, x=inputs.x.at, workspace=words_at, scale=scales_at, amax=amaxes_at, noop=call.noop_at,
        groups=groups, rule=rule._asdict()))
    return scales_at, scale_launches


def _single_read(inputs: Inputs, addresses: dict[str, int]) -> single_read.Staging | None:
    """Return the staging for quantising groups from one read. Assumes about equally large groups, since only
    the device knows their sizes."""
    if not (inputs.number and _is_aligned(inputs, addresses)):
        return None
    rows, columns = inputs.x.shape
    down = cdiv(cdiv(rows, inputs.number), single_read.TILE.rows)
    across = max(1, cdiv(columns, single_read.TILE.columns))
    return single_read.choose(inputs.x.array, [down * across], inputs.number)


def _cast_current(call: Call, inputs: Inputs, addresses: dict[str, int], staging: single_read.Staging,
                  rule: TensorScaleRule) -> Iterator[Launch]:
    x, tile = inputs.x.array, single_read.TILE
    tiling = tiled(call, inputs, addresses, tile.rows, tile.columns)
    find, segments_at = find_segments(call, tiling.rows, tiling.segments, tiling.groups)
    yield find
    of_tiles = single_read.words(tiling.grid)
    words_at = call.workspace("group_current", of_tiles + 2 * inputs.number)
    yield _CURRENT.variant(shared=staging.shared, IN=x.dtype, OUT=inputs.recipe.dtype).bind(
        x, staging.blocks, x=inputs.x.at, data=addresses["rowwise"], data_t=addresses["columnwise"],
        scale_inv=addresses["scale_inv"], amax=inputs.amaxes.at if inputs.amaxes else 0, noop=call.noop_at,
        amax_of_launch=words_at + 4 * of_tiles, groups={**tiling.groups, "segments": segments_at},
        single_read=single_read.members(words_at, tiling.grid, staging, rule))


# ---- variants ----
def _cast_variant(source: np.dtype[Any], to: np.dtype[Any], tile: shapes.Tile) -> Variant:
    return _CAST.variant(block=tile.block, shared=tile.shared, IN=source, OUT=to, TILE_ROWS=tile.rows,
                         TILE_COLUMNS=tile.columns, DBIAS=0, LARGE=tile is not shapes.SMALL)


def variants() -> Iterator[Variant]:
    """Yields every variant that these launches may take."""
    for source in INPUT_DTYPES:
        yield _AMAX.variant(IN=source)
    yield from single_read.variants(_CURRENT)
    tiles = shapes.SMALL, shapes.BOTH_NARROW, shapes.BOTH
    for source, to, tile in product(INPUT_DTYPES, FP8_DTYPES, tiles):
        if tile != shapes.BOTH or source.itemsize == 2:
            yield _cast_variant(source, to, tile)
