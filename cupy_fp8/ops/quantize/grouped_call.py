"""What all launches of `group_quantize` share: the inputs of a call, the description of its result, and the
division of the result's rows into tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, address
from ...calls.call import Call, Input
from ...calls.group_sizes import Groups
from ...calls.results import Description, Written
from ...grouped import Grouped
from ...kernels import grid_size
from ...layouts import cdiv, padded_rows
from ...recipes import Recipe
from . import blocks, mx

#: Shapes and dtypes by the names that a Grouped has for its arrays.
Arrays = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

_FACTS = ("shape", "block", "scale_layout", "transposed")
_SCALED = ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


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
    quantization: blocks.BlockQuantization | mx.MxQuantization | None
    result: GroupedResult

    @property
    def number(self) -> int:
        """How many groups there are."""
        return len(self.groups.array)


# ---- the result ----
class GroupedFacts(NamedTuple):
    """The attributes of a Grouped besides its arrays. shared: both directions have the same data."""

    shape: tuple[int, int]
    block: tuple[int | None, int | None] | None = None
    scale_layout: str | None = None
    transposed: bool = True
    shared: bool = False


class GroupedResult(Description):
    """Describes a Grouped. It holds the sizes and offsets that the call was given, unless the call writes
    them."""

    def __init__(self, facts: GroupedFacts, arrays: Arrays, groups: Groups, offsets: Array | None) -> None:
        self.facts, self._splits, self._offsets = facts, groups.array, offsets
        self._names = [name for name in arrays if not (facts.shared and name == "columnwise")]
        super().__init__(*(Written(f"out.{name}", *arrays[name]) for name in self._names))

    def build(self, arrays: Sequence[Array]) -> Grouped:
        return _grouped(self.facts, self._names, arrays, self._splits, self._offsets)

    def builder(self, names: tuple[str, ...]) -> Callable[[Sequence[Array], tuple[Any, ...]], Grouped]:
        facts, written = self.facts, self._names
        splits, offsets = names.index("splits"), names.index("offsets")

        def build(arrays: Sequence[Array], given: tuple[Any, ...]) -> Grouped:
            return _grouped(facts, written, arrays, given[splits], given[offsets])

        return build

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Grouped):
            raise TypeError(f"out: expected a Grouped (an earlier result), got {type(out).__name__}")
        if "splits" not in self._names and not _is_same(out.splits, self._splits):
            raise ValueError("out: expected splits to be out.splits, that very memory; a result belongs to "
                             "the sizes that it was made for, which may change in place")
        if self._offsets is not None and not _is_same(out.offsets, self._offsets):
            raise ValueError("out: expected offsets to be out.offsets, that very memory")
        for name in _FACTS:
            wanted, found = getattr(self.facts, name), getattr(out, name)
            if found != wanted:
                raise ValueError(f"out: expected {name} {wanted}, got {found}")
        shared = ("columnwise",) if self.facts.shared else ()
        for name in _SCALED:
            has, wanted = getattr(out, name) is not None, name in self._names or name in shared
            if has != wanted:
                raise ValueError(f"out.{name}: expected {'one' if wanted else 'none'} for these options, "
                                 f"got {'one' if has else 'none'}")
        if shared and out.columnwise is not out.rowwise:
            raise ValueError("out.columnwise: expected out.rowwise itself, since both directions are the "
                             "same here")
        return [getattr(out, name) for name in self._names]

    def places(self, written: Sequence[int]) -> dict[str, int]:
        """The addresses of a Grouped's arrays by name; 0 for those that the call does not write."""
        found = dict.fromkeys((*_SCALED, "offsets", "splits"), 0)
        found.update(zip(self._names, written, strict=True))
        if self.facts.shared:
            found["columnwise"] = found["rowwise"]
        return found


def _grouped(facts: GroupedFacts, names: Sequence[str], arrays: Sequence[Array], splits: Array,
             offsets: Array | None) -> Grouped:
    made = {"splits": splits, "offsets": offsets, **dict.fromkeys(_SCALED),
            **dict(zip(names, arrays, strict=True))}
    if facts.shared:
        made["columnwise"] = made["rowwise"]
    return Grouped._of_fields(**made, shape=facts.shape, block=facts.block, scale_layout=facts.scale_layout,
                              transposed=facts.transposed)


def _is_same(own: Array, given: Array) -> bool:
    """Whether two arrays of sizes or offsets are the same memory."""
    return type(own) is type(given) and own.shape == given.shape and own.dtype == given.dtype \
        and address(own) == address(given)


# ---- tiles ----
class Tiling(NamedTuple):
    """How a result's rows are divided into row segments, none with rows of two groups, and these into tiles
    for the blocks of a launch.

    rows: rows of a segment. segments, grid: the segments and tiles for groups of any sizes. fewest: the tiles
    if all groups are whole tiles. groups: the members of RowGroups (kernels_cu/include/groups/row_groups.cuh)
    except `segments`."""

    rows: int
    segments: int
    grid: int
    fewest: int
    groups: dict[str, Any]


def tiled(call: Call, inputs: Inputs, places: dict[str, int], rows: int, columns: int,
          clears: int = 0) -> Tiling:
    """Divides the result's rows, with those after the last group, into tiles of rows x columns. clears:
    segments without rows, whose blocks clear scales."""
    result_rows, width = inputs.result.facts.shape
    across = max(1, cdiv(width, columns))
    segments = max(1, clears + padded_rows(result_rows, inputs.number + 1, rows) // rows)
    groups = {**row_groups(call, inputs, across), "offsets_out": places["offsets"],
              "sizes_out": places["splits"], "result_rows": result_rows, "align": inputs.align}
    fewest = max(1, cdiv(result_rows, rows)) * across
    return Tiling(rows, segments, grid_size(segments * across, inputs.x.shape), fewest, groups)


def row_groups(call: Call, inputs: Inputs, across: int) -> dict[str, Any]:
    """Members of RowGroups for the groups in x, for a launch that writes nothing about groups to the
    result."""
    rows, columns = inputs.x.shape
    return {"offsets": inputs.offsets.at if inputs.offsets else 0,
            "splits": inputs.groups.members(call.error_word()), "rows": rows, "columns": columns,
            "result_rows": rows, "across": across, "align": 1}
