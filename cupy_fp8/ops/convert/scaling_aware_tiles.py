"""The tiles of `scaling_aware_transpose`: how thread blocks share them, and which program of the kernel they
use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ... import kernels
from ...arrays import Array
from ...calls.call import Input
from ...calls.row_segments import variants as segment_variants
from ...formats import FP8_DTYPES, float8_e4m3fn
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv, row_scale_rows, target_rows

Target: TypeAlias = Literal["column", "tile"]
TARGETS: tuple[Target, ...] = get_args(Target)
TILE_ROWS = 128

_COLUMNS = 128                              # columns of a tile
_SMALL_EXPERT = 4 * TILE_ROWS               # rows of an expert, on average
# one warp per 16 columns
_KERNEL = Kernel("convert/scaling_aware", "scaling_aware_transpose", block=2 * _COLUMNS)
#: Bytes of shared memory: a tile (two with several tiles per thread block, one of which is being filled);
#: columns shifted to whole sectors, which are read up to a word past their end; the first sector of each
#: column until the thread block's last tile is done. A launch that shifts nothing leaves the second and third
#: to the L1.
_TILE, _SHIFTED, _FIRST_SECTORS = TILE_ROWS * _COLUMNS + 16, (TILE_ROWS + 32) * _COLUMNS + 16, 32 * _COLUMNS
# Tiles per thread block, without and with several experts; kMostTiles of
# include/convert/scaling_aware_scales.cuh.
_MOST_TILES, _MOST_OF_EXPERTS = 3, 4
_BLOCKS_PER_MULTIPROCESSOR = 8              # needed before a block gets more tiles
#: A thread block prefetches the tile this far ahead into the L2, in thread blocks per SM.
_AHEAD = 2
_SCALE_BLOCKS = 128, 32                     # elements that share a scale


class Tiles(NamedTuple):
    """Numbers of tiles of the data, down and across. shifts: columns of the result may begin at addresses
    that are no multiples of 16 bytes."""

    down: int
    strips: int
    shifts: bool


def tiles_of(shape: tuple[int, ...], groups: int | None, out_at: int) -> Tiles:
    """shape: of the rows. groups: number of experts; None: no splits."""
    rows, columns = shape
    strips = cdiv(columns, _COLUMNS)
    if groups is None:
        return Tiles(cdiv(rows, TILE_ROWS), strips, bool(rows % 16 or out_at % 16))
    # Rows of no expert have their own tiles. There is at least one, so that an empty array's sizes are
    # examined too.
    return Tiles(target_rows(rows, groups + 1, TILE_ROWS) + 1, max(1, strips), True)


def launch(data: Input, block: int, target: str, groups: int | None, tiles: Tiles, *,
           gathered: Gathered | None = None, **members: Any) -> Launch:
    """Return the launch that transposes. members: the other members of the kernel's struct."""
    rows, columns = data.shape
    alike = data.at
    if gathered is not None:
        rows, alike = gathered.rows, data.at | gathered.at
        members["gathered"] = gathered.members
    aligned = columns % 16 == 0 and alike % 16 == 0
    program = _program(data.dtype, block, target, aligned, tiles.shifts, rows, groups,
                       gathered is not None)
    count = tiles.down * tiles.strips
    most = _MOST_OF_EXPERTS if groups is not None and groups > 1 else _MOST_TILES
    of_a_block = 1 if program.one_tile else _tiles_of_a_block(data.array, count, most)
    blocks = cdiv(count, of_a_block) if gathered is None else tiles.strips * cdiv(tiles.down, of_a_block)
    return _variant(program).bind(
        data.array, grid_size(blocks, data.shape), shared=program.shared(tiles.shifts),
        data=data.at, rows=rows, columns=columns, scale_columns=cdiv(columns, block),
        target_rows=target_rows(rows, groups, block), row_scale_rows=row_scale_rows(rows, groups),
        down=tiles.down, strips=tiles.strips, tiles=of_a_block,
        vector=int(columns % 8 == 0 and data.at % 8 == 0), ahead=_ahead(data.array), **members)


class Gathered(NamedTuple):
    """Rows that a routing makes from tokens, to be written too. at: their address. members: of the struct
    GatheredRows."""

    rows: int
    at: int
    members: dict[str, Any]


class _Program(NamedTuple):
    """A variant of the kernel. blocks: thread blocks that fit on an SM."""

    dtype: np.dtype[Any]
    block: int
    target: str
    aligned: bool
    blocks: int
    one_tile: bool          # one tile per thread block, whose columns begin at multiples of 16 bytes
    gather: bool            # rows are those of tokens

    def shared(self, shifts: bool) -> int:
        """Return the bytes of shared memory of a launch. shifts: see `Tiles`."""
        if self.one_tile:
            return _TILE
        parts_wait = self.block == 128 and self.blocks < 4
        return 2 * _TILE + (_SHIFTED + parts_wait * _FIRST_SECTORS if shifts else 0)


def _program(dtype: np.dtype[Any], block: int, target: str, aligned: bool, shifts: bool, rows: int,
             groups: int | None, gather: bool = False) -> _Program:
    """Choose three or four thread blocks per SM: only some programs allow four, and large experts are faster
    with three (docs/lab-notes)."""
    four_fit = dtype == float8_e4m3fn and aligned and (block == 128 or not shifts)
    few_rows = groups is None or rows < _SMALL_EXPERT * groups
    blocks = 4 if four_fit and few_rows and not gather else 3
    return _Program(dtype, block, target, aligned, blocks, blocks == 4 and not shifts, gather)


def _tiles_of_a_block(x: Array, count: int, most: int) -> int:
    """Return the tiles per thread block: few, so that little of the GPU is idle at the end."""
    if isinstance(x, np.ndarray):
        return 3                            # tests on the CPU then see every transition between tiles
    blocks = _BLOCKS_PER_MULTIPROCESSOR * kernels.multiprocessors(x.data.device_id)
    return max(1, min(most, count // blocks))


def _ahead(x: Array) -> int:
    return 1 if isinstance(x, np.ndarray) else _AHEAD * kernels.multiprocessors(x.data.device_id)


def _variant(program: _Program) -> Variant:
    return _KERNEL.variant(shared=program.shared(not program.one_tile), IN=program.dtype, BLOCK=program.block,
                           TARGET=TARGETS.index(program.target), TILE_COLUMNS=_COLUMNS, BLOCKS=program.blocks,
                           ALIGNED=program.aligned, ONE_TILE=program.one_tile, GATHER=program.gather)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield from segment_variants()
    for dtype, block, target, aligned in product(FP8_DTYPES, _SCALE_BLOCKS, TARGETS, (False, True)):
        programs = [_program(dtype, block, target, aligned, shifts, _SMALL_EXPERT, groups)
                    for groups, shifts in ((None, False), (None, True), (1, True))]
        yield from map(_variant, dict.fromkeys(programs))


def gathering_variants() -> Iterator[Variant]:
    """Yields every variant that permute_transpose may launch."""
    yield from segment_variants()
    for dtype, aligned in product(FP8_DTYPES, (False, True)):
        yield _variant(_program(dtype, 128, "column", aligned, True, 0, 1, True))
