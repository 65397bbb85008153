"""Which rows of which group the blocks of a launch have, or which group has each row; found before it. Kernels:
kernels_cu/groups/row_segments.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import kernels
from ..arrays import Array
from ..kernels import Kernel, Launch, Variant, error_word, workspace
from ..layouts import cdiv, round_up
from . import validate
from .splits import Groups

if TYPE_CHECKING:
    from .call import Call

_KERNEL = Kernel("groups/row_segments", "group_find_runs")
_KERNEL_OF_ROWS = Kernel("groups/row_segments", "group_find_rows")
_THREADS = 256
_SPAN = 128                     # rows of a warp (kSpan)
_RUN_WORDS = 16                 # of a RowRun
_FEWEST = 64                    # runs, or rows, that a workspace has room for
_CHUNK_BYTES = 16               # cleared at once
_MOST_CHUNKS = 4                # cleared by a thread, of a workspace of few runs
_MANY = 8                       # blocks per multiprocessor for which a launch of its own pays


class Found(NamedTuple):
    """A launch that goes before another one, and the address where that one reads what it found."""

    launch: Launch
    at: int


def find_segments(call: Call, rows: int, count: int, groups: Mapping[str, Any], shifts: tuple[int, int] = (0, 0),
                  clear: tuple[int, int] = (0, 0)) -> Found:
    """Finds which rows of which group each of `count` segments of `rows` rows has.

    groups: members of RowGroups (kernels_cu/include/groups/row_groups.cuh) but for `runs`. shifts: base-2 logarithms of the
    units in which positions of each direction's scales are counted. clear: address and bytes, both multiples of 16, of a
    workspace that the launch fills with zeros.
    """
    room = max(_FEWEST, 1 << (count - 1).bit_length())      # one workspace serves similar counts
    at, (clear_at, nbytes) = call.workspace("group_runs", _RUN_WORDS * room), clear
    chunks = nbytes // _CHUNK_BYTES
    grid = max(cdiv(count, _THREADS // 32), cdiv(chunks, _MOST_CHUNKS * _THREADS))
    return Found(_variant(rows).bind(call.x, grid, groups=groups, to=at, count=count, first_shift=shifts[0],
                                     second_shift=shifts[1], clear=clear_at, chunks=chunks), at)


def find_groups_of_rows(call: Call, groups: Groups, rows: int, tile_rows: int) -> Found:
    """Finds the group of each of `rows` rows: u32 words, all ones for rows of no group, up to a whole number of tiles of
    `tile_rows` rows."""
    count = round_up(rows, tile_rows)
    at = call.workspace("group_rows", max(_FEWEST, 1 << max(0, count - 1).bit_length()))
    splits = {"sizes": groups.at, "groups": len(groups.array), "errors": call.error_word(), "wide": groups.wide}
    return Found(_rows_variant().bind(call.x, cdiv(count, _THREADS // 32 * _SPAN), splits=splits, rows=rows, all=count,
                                      group_of=at), at)


class GroupRuns:
    """A launch that finds `count` runs of `rows` rows, and where it leaves them (`at`) for the launch that follows on this stream.
    owner: the array that the workspace belongs to (see `workspace`); groups: the members of RowGroups before `runs`; shifts: of units of
    which each group's are counted; clear: address and bytes, both multiples of 16, of a workspace that it fills with zeros."""

    def __init__(self, x: Array, owner: Array | None, rows: int, count: int, groups: tuple[Any, ...],
                 shifts: tuple[int, int] = (0, 0), clear: tuple[int, int] = (0, 0)) -> None:
        room = max(_FEWEST, 1 << (count - 1).bit_length())          # so that not every number has a workspace of its own
        self._words = workspace(owner, x, "group_runs", _RUN_WORDS * room)
        self.at = validate.address(self._words)
        self._variant = _variant(rows)
        chunks = clear[1] // _CHUNK_BYTES
        self._grid = max(cdiv(count, _THREADS // 32), cdiv(chunks, _MOST_CHUNKS * _THREADS))
        self._members = (*groups, 0, self.at, count, *shifts, clear[0], chunks)

    def run(self, x: Array) -> None:
        self._variant.launch(x, self._grid, *self._members)


class GroupRows:
    """A launch that finds the group of each of `rows` rows, and where it leaves them (`at`, u32 words, all ones for what no group has, up
    to a whole number of tiles of so many rows) for the launch that follows on this stream. owner: as of GroupRuns."""

    def __init__(self, x: Array, owner: Array | None, groups: Groups, rows: int, tile_rows: int) -> None:
        count = round_up(rows, tile_rows)
        self._words = workspace(owner, x, "group_rows", max(_FEWEST, 1 << max(0, count - 1).bit_length()))
        self.at = validate.address(self._words)
        self._grid = cdiv(count, _THREADS // 32 * _SPAN)
        self._members = groups.at, len(groups.array), error_word(x), groups.wide, rows, count, self.at

    def run(self, x: Array) -> None:
        _rows_variant().launch(x, self._grid, *self._members)


def pays(x: Array, grid: int) -> bool:
    """Whether a launch of so many blocks gains more than one more launch costs. (The CPU executor takes both ways, for what tests see.)"""
    return grid > (_MANY if isinstance(x, np.ndarray) else _MANY * kernels.multiprocessors(x.data.device_id))


@functools.cache
def _variant(rows: int) -> Variant:
    return _KERNEL.variant(block=_THREADS, RUN_ROWS=rows)


@functools.cache
def _rows_variant() -> Variant:
    return _KERNEL_OF_ROWS.variant(block=_THREADS)


def rows_variants() -> Iterator[Variant]:
    """Every variant of GroupRows."""
    yield _rows_variant()


def variants(rows: Iterator[int]) -> Iterator[Variant]:
    """Every variant for tiles of so many rows."""
    for each in dict.fromkeys(rows):
        yield _variant(each)
