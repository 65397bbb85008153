"""Launches that find, ahead of another launch, the rows and group of each of its thread blocks, or the group
of each row. Kernels: kernels_cu/groups/row_segments.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import kernels
from ..arrays import Array
from ..kernels import Kernel, Launch, Variant
from ..layouts import cdiv, round_up
from .group_sizes import Groups

if TYPE_CHECKING:
    from .call import Call

_THREADS = 256
_SEGMENTS = Kernel("groups/row_segments", "group_find_segments", block=_THREADS)
_ROWS = Kernel("groups/row_segments", "group_find_rows", block=_THREADS)
_CHUNK_BYTES = 16               # bytes that a thread clears at once
_MOST_CHUNKS = 4                # most chunks per thread, if segments are few
_MANY = 8                       # thread blocks per SM from which on finding rows is worth a launch


class Found(NamedTuple):
    """A launch that precedes another one, and the address where that one reads the result."""

    launch: Launch
    at: int


def find_segments(call: Call, rows: int, count: int, groups: Mapping[str, Any],
                  shifts: tuple[int, int] = (0, 0), clear: tuple[int, int] = (0, 0)) -> Found:
    """Find the rows and the group of each of `count` segments of `rows` rows.

    rows: a power of two. groups: members of RowGroups (kernels_cu/include/groups/row_groups.cuh) except
    `segments`. shifts: log2 of the units that positions of each direction's scales are counted in. clear:
    address and bytes, both multiples of 16, of a workspace that the launch fills with zeros.
    """
    at = call.workspace("row_segments", _SEGMENTS.record("RowSegment").size // 4 * count)
    clear_at, nbytes = clear
    chunks = nbytes // _CHUNK_BYTES
    grid = max(cdiv(count, _THREADS // 32), cdiv(chunks, _MOST_CHUNKS * _THREADS))
    launch = _SEGMENTS.variant().bind(
        call.x, grid, groups=groups, to=at, count=count, rows_log2=_log2(rows), first_shift=shifts[0],
        second_shift=shifts[1], clear=clear_at, chunks=chunks)
    return Found(launch, at)


def find_groups_of_rows(call: Call, groups: Groups, rows: int, tile_rows: int) -> Found:
    """Find the group of each of `rows` rows: u32 words, all ones for rows of no group, up to a whole number
    of tiles of `tile_rows` rows."""
    count = round_up(rows, tile_rows)
    at = call.workspace("group_rows", count)
    splits = groups.members(call.error_word())
    grid = cdiv(count, _THREADS // 32 * _ROWS.constant("kSpan"))
    launch = _ROWS.variant().bind(call.x, grid, splits=splits, rows=rows, all=count, group_of=at)
    return Found(launch, at)


def is_worth_a_launch(x: Array, grid: int) -> bool:
    """Return whether finding the rows of `grid` thread blocks before their launch gains more than an
    additional launch costs. (On the CPU few blocks count as many, so that tests see both ways.)"""
    return grid > (_MANY if isinstance(x, np.ndarray) else _MANY * kernels.multiprocessors(x.data.device_id))


def _log2(rows: int) -> int:
    assert rows & rows - 1 == 0, "row segments have a power of two rows"
    return rows.bit_length() - 1


def rows_variants() -> Iterator[Variant]:
    """The variant of `find_groups_of_rows`."""
    yield _ROWS.variant()


def variants() -> Iterator[Variant]:
    """The variant of `find_segments`."""
    yield _SEGMENTS.variant()
