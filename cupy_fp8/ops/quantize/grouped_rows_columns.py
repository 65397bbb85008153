"""Groups of rows quantised with a scale for every row, or for every column of each group.

Kernels: kernels_cu/quantize/grouped_rows_columns.cu, with groups/row_segments.cu before it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ...arrays import Array
from ...calls import splits as sizes
from ...calls import validate
from ...calls.row_segments import GroupRuns, pays
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES
from ...grouped import Grouped
from ...kernels import Kernel, Variant, workspace
from ...kernels.warp_tiles import LANE_COLUMNS, Panels
from ...layouts import cdiv
from . import blocks, grouped_blocks
from .block_results import ABSENT, AS_IS, NOWHERE, Members, PanelMembers, Side
from .grouped_results import addresses, divided

_ROWS = Kernel("quantize/grouped_rows_columns", "group_quantize_rows")
_LINES = Kernel("quantize/grouped_rows_columns", "group_quantize_lines")
_PANELS = Panels(8, 1, down_first=False)            # 256 bytes of a transposed row
_RUN, _SHARE, _THREADS = 32, 8192, 256              # RunOfRows of the kernel
_CHUNK_BYTES, _KEPT, _WARP = 16, 4, 32              # of a row, by a thread of the kernel
_FIND, _QUANTIZE = 0, 1                             # passes of the kernel of lines
_FEWEST = 64                                        # maxima that a workspace has room for
#: Rows of the runs that are found before these kernels.
RUN_ROWS = _RUN, _PANELS.rows


class Launch:
    """The launches' variants, grids, and the members of their structs. Kept with a result on a GPU that was given as `out=`."""

    def __init__(self, plan: grouped_blocks.Plan, out: Grouped, x: Array, at: int, noop_at: int, offsets_at: int, groups: sizes.Groups,
                 align: int, owner: Array | None) -> None:
        assert isinstance(plan, blocks.Plan)
        (fast, slow), of_plan = plan.tile_launch(list(plan.forms))
        rows_alone = (fast.stored, slow.stored) == (AS_IS, ABSENT)
        run, share = (_RUN, _SHARE) if rows_alone else (_PANELS.rows, _PANELS.columns)
        division = divided(out, x, groups, offsets_at, align, run, share, clears=1)
        chunk = _CHUNK_BYTES // x.dtype.itemsize if rows_alone else LANE_COLUMNS
        members = PanelMembers(plan, (fast, slow), of_plan, chunk, grouped=True)
        aligned = at % (chunk * x.dtype.itemsize) == 0
        scales = grouped_blocks.scales_of(plan, len(groups.array), fast)
        tops_at, clear = (0, 0), (0, 0)
        if not rows_alone:
            tops_at, clear = self._tops(plan, x, owner, len(groups.array), (fast, slow))
        self.runs = None
        if clear[1] or pays(x, division.grid):
            self.runs = GroupRuns(x, owner, *division.to_find, (scales[1], 0), clear)
        runs_at = 0 if self.runs is None else self.runs.at
        rest: Members = {"fast": scales, "row_tops": tops_at[0], "column_tops": tops_at[1]}
        variant = (_rows_variant if rows_alone else _lines_variant)(plan.source, plan.to)
        written = {"x": at, "noop": noop_at, **members.at(addresses(out), aligned)}
        self.launches = [variant.bind(x, division.grid, all=written, groups=(*division.members, runs_at), **rest, phase=_QUANTIZE,
                                      team=_team(plan.columns, chunk))]
        if not rows_alone:
            # Nothing is written but maxima: the other launch clears what no group has, and tells of the groups.
            found = {"x": at, "noop": noop_at, **members.at(NOWHERE, aligned)}
            groups_alone = offsets_at, 0, 0, *division.members[3:], runs_at
            self.launches.insert(0, variant.bind(x, division.grid, all=found, groups=groups_alone, **rest, phase=_FIND))

    def _tops(self, plan: blocks.Plan, x: Array, owner: Array | None, number: int,
              sides: tuple[Side, Side]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where maxima of rows and of columns go, and what of that is to be cleared: address and bytes."""
        of_rows, of_columns = (lines if side.scales else 0 for lines, side in zip((plan.rows, number * plan.columns), sides, strict=True))
        words = -(-(of_rows + of_columns) // 4) * 4                  # whole chunks
        room = max(_FEWEST, 1 << (words - 1).bit_length())           # so that not every number has a workspace of its own
        self._words = workspace(owner, x, "group_lines", room)
        at = validate.address(self._words)
        return (at if sides[0].scales else 0, at + 4 * of_rows if sides[1].scales else 0), (at, 4 * max(words, 4))

    def run(self, x: Array) -> None:
        if self.runs is not None:
            self.runs.run(x)
        for launch in self.launches:
            launch.run()


def _team(columns: int, chunk: int) -> int:
    """Threads that have a row: as few as keep all of it, if any do."""
    wanted = cdiv(max(columns, 1), chunk * _KEPT)
    return min(_THREADS, max(_WARP, 1 << (wanted - 1).bit_length()))


@functools.cache
def _rows_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _ROWS.variant(block=_THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, **_defines())


@functools.cache
def _lines_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    shared = _PANELS.tile + 2 * 4 * (_PANELS.rows + _PANELS.columns)
    return _LINES.variant(block=_PANELS.block, shared=shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, **_defines())


def _defines() -> dict[str, int]:
    return {"PANELS_DOWN": _PANELS.down, "PANELS_ACROSS": _PANELS.across}


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _rows_variant(source, to)
        yield _lines_variant(source, to)
