"""Current scaling of groups of rows: the scale that each group's own amax calls for. Kernel: kernels_cu/quantize/grouped_amax.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array
from ...calls import validate
from ...calls.row_segments import GroupRuns, pays
from ...calls.splits import Groups
from ...formats import FORMATS, INPUT_DTYPES
from ...kernels import Kernel, Variant, error_word, grid_size, workspace
from ...layouts import cdiv, padded_rows

_KERNEL = Kernel("quantize/grouped_amax", "group_amax_scale")
_THREADS = 256
RUN_ROWS = 64
_PART_BYTES = 64 << 10      # of a run, that a block of threads reads
_FEWEST = 64                # groups that a workspace has room for


class Rule(NamedTuple):
    """Of current scaling, as `compute_scale` takes it."""

    target: float
    eps: float
    pow2: bool


class GroupScales:
    """A launch that finds the scales of all groups, and where it leaves them for the launches that follow on this stream.
    owner: the array that the workspace belongs to (see `workspace`)."""

    def __init__(self, x: Array, at: int, owner: Array | None, amaxes_at: int, noop_at: int, offsets_at: int, groups: Groups,
                 rule: Rule) -> None:
        (rows, columns), number = x.shape, len(groups.array)
        room = max(_FEWEST, 1 << max(0, number - 1).bit_length())      # so that not every number has a workspace of its own
        self._words = workspace(owner, x, "group_amax", 1 + 2 * room)
        words_at = validate.address(self._words)
        self.at = words_at + 4 * (1 + room)
        across = max(1, cdiv(RUN_ROWS * columns * x.dtype.itemsize, _PART_BYTES))
        down = padded_rows(rows, number, RUN_ROWS) // RUN_ROWS
        self._variant = _variant(x.dtype)
        self._grid = grid_size(down * across if number else 1, x.shape)
        row_groups = offsets_at, 0, 0, groups.at, number, error_word(x), groups.wide, rows, columns, rows, across, 1
        self._runs = GroupRuns(x, owner, RUN_ROWS, down, row_groups) if pays(x, self._grid) else None
        self._members = (at, words_at, self.at, amaxes_at, noop_at, *row_groups, 0 if self._runs is None else self._runs.at, *rule)

    def run(self, x: Array) -> None:
        if self._runs is not None:
            self._runs.run(x)
        self._variant.launch(x, self._grid, *self._members)


@functools.cache
def _variant(source: np.dtype[Any]) -> Variant:
    return _KERNEL.variant(block=_THREADS, IN=FORMATS[source].tag)


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source in INPUT_DTYPES:
        yield _variant(source)
