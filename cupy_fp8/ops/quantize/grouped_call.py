"""Shared by all launches of `group_quantize`: the inputs of a call, and the division of the result's rows
into tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...calls.call import Call, Input
from ...calls.group_sizes import Groups
from ...kernels import grid_size
from ...layouts import cdiv, padded_rows
from ...recipes import Recipe
from .block_quantization import Quantization
from .grouped_result import GroupedResult


class Inputs(NamedTuple):
    """The validated arguments of a call. quantization: None if each group has one scale."""

    x: Input
    groups: Groups
    recipe: Recipe
    rowwise: bool
    columnwise: bool
    scales: Input | None
    amaxes: Input | None
    offsets: Input | None
    align: int
    quantization: Quantization | None
    result: GroupedResult

    @property
    def number(self) -> int:
        """Number of groups."""
        return len(self.groups.array)


# ---- tiles ----
class Tiling(NamedTuple):
    """Division of a result's rows into row segments, none with rows of two groups, and of these into tiles
    for the thread blocks of a launch.

    rows: rows per segment. segments, grid: segments and tiles for groups of any sizes. fewest: tiles if all
    groups are whole tiles. groups: members of RowGroups (kernels_cu/include/groups/row_groups.cuh) except
    `segments`."""

    rows: int
    segments: int
    grid: int
    fewest: int
    groups: dict[str, Any]


def tiled(call: Call, inputs: Inputs, addresses: dict[str, int], rows: int, columns: int,
          without_rows: int = 0) -> Tiling:
    """Divide the result's rows, including those after the last group, into tiles of rows x columns.
    addresses: of the result's arrays by name. without_rows: further segments, whose thread blocks clear the
    scales that belong to no group."""
    result_rows, width = inputs.result.shape
    across = max(1, cdiv(width, columns))
    segments = max(1, without_rows + padded_rows(result_rows, inputs.number + 1, rows) // rows)
    groups = {**row_groups(call, inputs, across), "offsets_out": addresses["offsets"],
              "sizes_out": addresses["splits"], "result_rows": result_rows, "align": inputs.align}
    fewest = max(1, cdiv(result_rows, rows)) * across
    return Tiling(rows, segments, grid_size(segments * across, inputs.x.shape), fewest, groups)


def row_groups(call: Call, inputs: Inputs, across: int) -> dict[str, Any]:
    """Return members of RowGroups for the groups in x, for a launch that writes nothing about groups to the
    result."""
    rows, columns = inputs.x.shape
    return {"offsets": inputs.offsets.at if inputs.offsets else 0,
            "splits": inputs.groups.members(call.error_word()), "rows": rows, "columns": columns,
            "result_rows": rows, "across": across, "align": 1}
