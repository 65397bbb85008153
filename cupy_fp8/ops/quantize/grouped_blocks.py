"""Quantises groups of rows in blocks, each group as a matrix of its own. Kernels:
kernels_cu/quantize/blocks.cu and mx.cu, and grouped_rows_columns.cu for whole rows and columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from ...calls.call import Call
from ...calls.row_segments import find_segments, is_worth_a_launch
from ...formats import FP8_DTYPES, INPUT_DTYPES, float32
from ...kernels import Kernel, Launch, Variant
from ...kernels.shapes import LANE_COLUMNS, WarpTiles
from ...layouts import cdiv, group_scales, group_unit, grouped_scale_shape, round_up
from ...recipes import BlockScaling, MXScaling
from . import blocks, mx
from .block_quantization import ABSENT, ALL_WIDE, AS_IS, TRANSPOSED, Axis, Members
from .grouped_call import Inputs, tiled
from .grouped_result import scale_format
from .quantized_result import Addresses

AnyQuantization = blocks.BlockQuantization | mx.MxQuantization

_BLOCKS = Kernel("quantize/blocks", "group_quantize_block")
_MX = Kernel("quantize/mx", "group_quantize_mx")
#: Tiles per thread block that writes transposed data. With more, SMs are idle at the end.
_TILES_PER_BLOCK = 2
_WHOLE_VECTORS = Kernel("quantize/grouped_rows_columns", "group_quantize_whole_vectors")
_VECTOR_TILE = WarpTiles(8, 1, down_first=False)        # writes 256 bytes of a transposed row
#: Rows per segment; elements of a row per thread block; threads per block (SegmentOfRows).
_SEGMENT_ROWS, _SHARE, _THREADS = 32, 8192, 256
_ROWS = Kernel("quantize/grouped_rows_columns", "group_quantize_rows", block=_THREADS)
_CHUNK_BYTES, _WARP = 16, 32
#: passes of the kernel of whole columns
_FIND, _QUANTIZE = 0, 1


@functools.lru_cache(maxsize=256)
def quantization_of(shape: tuple[int, int], source: np.dtype[Any], recipe: BlockScaling | MXScaling,
                    rowwise: bool, columnwise: bool) -> AnyQuantization:
    """Return the quantisation of all rows as one matrix; a group's differs only in the number of rows. shape:
    the result's."""
    if isinstance(recipe, BlockScaling):
        options = blocks.BlockOptions.of(recipe, rowwise, columnwise)
        return blocks.BlockQuantization(shape, source, False, options)
    return mx.MxQuantization(shape, source, False, mx.MxOptions.of(recipe, rowwise, columnwise))


def launches(call: Call, inputs: Inputs, addresses: dict[str, int]) -> Iterator[Launch]:
    """Yield the launch for all groups, after one that finds each thread block's rows if that gains time."""
    quantization, x = cast(AnyQuantization, inputs.quantization), inputs.x.array
    if None in quantization.block:
        yield from _whole_vectors(call, inputs, addresses)
        return
    (rows, columns), own = axes_of(quantization)
    wide_loads = inputs.x.at % (LANE_COLUMNS * x.itemsize) == 0
    members = {**quantization.warp_tile_members((rows, columns), _by_direction(addresses), wide_loads,
                                                grouped=True), **own}
    wide = members["vector"] == ALL_WIDE
    chosen, warp_tiles = variant(quantization, (rows.stored, columns.stored), wide)
    tiling = tiled(call, inputs, addresses, warp_tiles.rows_of_block, warp_tiles.columns, without_rows=1)
    scales = [group_scale_members(quantization, inputs.number, axis) for axis in (rows, columns)]
    segments_at = 0
    if is_worth_a_launch(x, tiling.grid):
        shifts = scales[0]["unit_shift"], scales[1]["unit_shift"]
        find, segments_at = find_segments(call, tiling.rows, tiling.segments, tiling.groups, shifts)
        yield find
    yield chosen.bind(x, tiling.grid, all={"x": inputs.x.at, "noop": call.noop_at, **members},
                      groups={**tiling.groups, "segments": segments_at}, along_rows=scales[0],
                      along_columns=scales[1])


def _by_direction(addresses: dict[str, int]) -> Addresses:
    """Return (data, scale_inv) of each direction, from the addresses of a Grouped's arrays by name."""
    return {"rowwise": (addresses["rowwise"], addresses["scale_inv"]),
            "columnwise": (addresses["columnwise"], addresses["columnwise_scale_inv"])}


def axes_of(quantization: AnyQuantization) -> tuple[tuple[Axis, Axis], Members]:
    """Return what the kernel writes along rows and along columns, and members of its struct."""
    if isinstance(quantization, blocks.BlockQuantization):
        axes = quantization.axes(list(quantization.directions))
        return axes, quantization.members(axes)
    return quantization.axes, quantization.members


def group_scale_members(quantization: AnyQuantization, number: int, axis: Axis) -> dict[str, int]:
    """Returns members of the GroupScales of kernels_cu/include/groups/row_groups.cuh."""
    if axis.scales is None:
        return dict.fromkeys(("block_shift", "unit_shift", "unit", "all"), 0)
    scales = scale_format(quantization.directions[axis.scales])
    (rows, _), *_ = scales
    assert rows is not None
    stored = prod(grouped_scale_shape((quantization.rows, quantization.columns), number, *scales))
    return {"block_shift": rows.bit_length() - 1, "unit_shift": group_unit(*scales).bit_length() - 1,
            "unit": group_scales(quantization.columns, *scales), "all": stored}


# ---- whole rows and whole columns ----
def _whole_vectors(call: Call, inputs: Inputs, addresses: dict[str, int]) -> Iterator[Launch]:
    """Yield one launch if only rows are written. Otherwise one finds each thread block's rows and clears the
    amaxes, the second finds the amaxes, and the third quantises."""
    quantization, x = cast(blocks.BlockQuantization, inputs.quantization), inputs.x.array
    (rows, columns), own = axes_of(quantization)
    rows_alone = (rows.stored, columns.stored) == (AS_IS, ABSENT)
    tile = (_SEGMENT_ROWS, _SHARE) if rows_alone else (_VECTOR_TILE.rows, _VECTOR_TILE.columns)
    tiling = tiled(call, inputs, addresses, *tile, without_rows=1)
    chunk = _CHUNK_BYTES // x.itemsize if rows_alone else LANE_COLUMNS
    aligned = inputs.x.at % (chunk * x.itemsize) == 0

    def members(to: Addresses) -> Members:
        return {**quantization.warp_tile_members((rows, columns), to, aligned, chunk, grouped=True), **own}

    scales = group_scale_members(quantization, inputs.number, rows)
    amaxes, clear = ({}, (0, 0)) if rows_alone else _amaxes(call, inputs, (rows, columns))
    groups = {**tiling.groups, "segments": 0}
    if clear[1] or is_worth_a_launch(x, tiling.grid):
        find, groups["segments"] = find_segments(call, tiling.rows, tiling.segments, tiling.groups,
                                                 (scales["unit_shift"], 0), clear)
        yield find
    chosen = (_rows_variant if rows_alone else _whole_vectors_variant)(quantization.source, quantization.to)
    array = {"x": inputs.x.at, "noop": call.noop_at}
    if not rows_alone:
        # This launch writes only amaxes; the other one clears what no group has, and writes offsets and
        # sizes.
        without_results = {**groups, "offsets_out": 0, "sizes_out": 0}
        yield chosen.bind(x, tiling.grid, all={**array, **members({})}, groups=without_results,
                          along_rows=scales, **amaxes, phase=_FIND)
    yield chosen.bind(x, tiling.grid, all={**array, **members(_by_direction(addresses))}, groups=groups,
                      along_rows=scales, **amaxes, phase=_QUANTIZE, team=_team(quantization.columns, chunk))


def _amaxes(call: Call, inputs: Inputs, axes: tuple[Axis, Axis]) -> tuple[dict[str, int], tuple[int, int]]:
    """Return members with the addresses of row and column amaxes, and the memory to clear for them: (address,
    bytes)."""
    quantization = cast(AnyQuantization, inputs.quantization)
    of_rows = quantization.rows if axes[0].scales else 0
    of_columns = inputs.number * quantization.columns if axes[1].scales else 0
    words = round_up(of_rows + of_columns, 4)                   # the other launch clears whole chunks
    at = call.workspace("group_amaxes", words)
    return {"row_amaxes": at if axes[0].scales else 0,
            "column_amaxes": at + 4 * of_rows if axes[1].scales else 0}, (at, 4 * max(words, 4))


def _team(columns: int, chunk: int) -> int:
    """Return the threads per row: as few as can hold all of it, at most a thread block."""
    wanted = cdiv(max(columns, 1), chunk * _ROWS.constant("kChunksInRegisters"))
    return min(_THREADS, max(_WARP, 1 << (wanted - 1).bit_length()))


# ---- variants ----
def variant(quantization: AnyQuantization, stored: tuple[int, int], wide: bool) -> tuple[Variant, WarpTiles]:
    """Return the variant for memory that allows wide accesses, or for any, and the warp tiles of its thread
    blocks.

    Few choices have their own program for wide accesses. The others take the program with run-time choices:
    f32, for which both programs keep 256 threads per SM in flight; elements that are divided (profile vllm);
    and squares whose column-wise data are wanted alone."""
    wide = wide and quantization.source != float32
    if isinstance(quantization, blocks.BlockQuantization):
        return _block_variant(quantization.source, quantization.to, *stored, quantization.square,
                              wide and not quantization.divide)
    return _mx_variant(quantization.source, quantization.to, *stored, quantization.scales_adjoin_down, wide)


def _block_variant(source: np.dtype[Any], to: np.dtype[Any], rows: int, columns: int, square: bool,
                   wide: bool) -> tuple[Variant, WarpTiles]:
    wide &= not (square and rows == ABSENT)
    warp_tiles = blocks.warp_tiles_of(source, rows, columns, square, False) if wide else None
    if warp_tiles is None:
        return blocks.any_shape_variant(source, to, _BLOCKS), blocks.ANY_SHAPE
    # groups have their own order
    tiles_per_block = _TILES_PER_BLOCK if columns == TRANSPOSED else 1
    warp_tiles = warp_tiles._replace(down_first=False, tiles_per_block=tiles_per_block)
    return blocks.tile_variant(source, to, rows, columns, square, warp_tiles, True, _BLOCKS), warp_tiles


def _mx_variant(source: np.dtype[Any], to: np.dtype[Any], rows: int, columns: int, adjoin_down: bool,
                wide: bool) -> tuple[Variant, WarpTiles]:
    if not wide:                                        # MX data are never stored transposed here
        return mx.tile_variant(source, to, AS_IS, AS_IS, mx.ANY_SHAPE, False, _MX), mx.ANY_SHAPE
    warp_tiles = mx.warp_tiles_of(source, rows, columns, adjoin_down)._replace(down_first=False)
    return mx.tile_variant(source, to, rows, columns, warp_tiles, True, _MX), warp_tiles


def _rows_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _ROWS.variant(IN=source, OUT=to, **_vector_defines())


def _whole_vectors_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    factors_and_divisors = 2 * 4 * (_VECTOR_TILE.rows + _VECTOR_TILE.columns)
    return _WHOLE_VECTORS.variant(block=_VECTOR_TILE.block, shared=_VECTOR_TILE.tile + factors_and_divisors,
                                  IN=source, OUT=to, **_vector_defines())


def _vector_defines() -> dict[str, int]:
    return {"WARP_TILES_DOWN": _VECTOR_TILE.down, "WARP_TILES_ACROSS": _VECTOR_TILE.across}


def variants() -> Iterator[Variant]:
    """Yields every variant that these launches may take."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _rows_variant(source, to)
        yield _whole_vectors_variant(source, to)
        yield _block_variant(source, to, ABSENT, ABSENT, False, False)[0]
        yield _mx_variant(source, to, ABSENT, ABSENT, False, False)[0]
        if source == float32:
            continue
        yield _block_variant(source, to, ABSENT, TRANSPOSED, False, True)[0]
        for columns, square in product((ABSENT, TRANSPOSED), (False, True)):
            yield _block_variant(source, to, AS_IS, columns, square, True)[0]
        for (rows, columns), adjoin_down in product(((AS_IS, ABSENT), (ABSENT, AS_IS), (AS_IS, AS_IS)),
                                                    (False, True)):
            yield _mx_variant(source, to, rows, columns, adjoin_down, True)[0]
