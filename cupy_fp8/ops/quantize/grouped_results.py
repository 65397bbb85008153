"""What quantisers of groups of rows share: the arrays of a result, made, or given as `out=` and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, bits, empty_beside
from ...calls import validate
from ...calls.splits import Groups
from ...grouped import Grouped
from ...kernels import error_word, grid_size
from ...layouts import cdiv, padded_rows
from . import block_results

Arrays = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

_INT64 = np.dtype(np.int64)
_FACTS = ("shape", "block", "scale_layout", "transposed")


class GroupForm(NamedTuple):
    """What a Grouped is, but for its memory. arrays: shapes and dtypes by name, offsets and splits where they are to be written. shared:
    both directions have the same data."""

    shape: tuple[int, int]
    arrays: Arrays
    block: tuple[int | None, int | None] | None = None
    scale_layout: str | None = None
    transposed: bool = True
    shared: bool = False

    def empty(self, x: Array, splits: Array, offsets: Array | None) -> Grouped:
        """A result beside x, uninitialised."""
        made = {name: empty_beside(x, *of) for name, of in self.arrays.items() if not (self.shared and name == "columnwise")}
        if self.shared:
            made["columnwise"] = made["rowwise"]
        splits, offsets = made.pop("splits", splits), made.pop("offsets", offsets)
        return Grouped(splits, offsets, self.shape, block=self.block, scale_layout=self.scale_layout, transposed=self.transposed, **made)

    def check(self, out: Any, x: Array, xp: Any, at: int, groups: Groups, offsets: Array | None,
              read: list[tuple[int, int, str]]) -> None:
        """TypeError or ValueError unless `out` is such a result of these groups, in memory of its own. read: address, bytes and name of
        what the call reads, or writes elsewhere."""
        if not isinstance(out, Grouped):
            raise TypeError(f"out: expected a Grouped (an earlier result), got {type(out).__name__}")
        own, same = out.splits, "splits" in self.arrays
        if not same and type(own) is type(groups.array):
            same = (validate.address(own), own.shape, own.dtype) == (groups.at, groups.array.shape, groups.array.dtype)
        if not same:
            raise ValueError("out: expected splits to be out.splits, that very memory; a result belongs to the sizes that it was made for, "
                             "which may change in place")
        if offsets is not None and validate.address(out.offsets) != validate.address(offsets):
            raise ValueError("out: expected offsets to be out.offsets, that very memory")
        for name in _FACTS:
            if getattr(out, name) != getattr(self, name):
                raise ValueError(f"out: expected {name} {getattr(self, name)}, got {getattr(out, name)}")
        written: list[tuple[int, int, str]] = []
        for name in ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets", "splits"):
            a, of = getattr(out, name), self.arrays.get(name)
            if of is None or a is None:
                if name not in ("offsets", "splits") and (a is None) != (of is None):
                    raise ValueError(f"out.{name}: expected {'one' if a is None else 'none'} for these options, got "
                                     f"{'none' if a is None else 'one'}")
                continue
            if name == "columnwise" and self.shared:
                if a is not out.rowwise:
                    raise ValueError("out.columnwise: expected out.rowwise itself, since both directions are the same here")
                continue
            a_at = validate.destination(a, *of, x, xp, at, f"out.{name}")
            for other_at, nbytes, other in [*written, *read]:
                validate.separate(a_at, a.nbytes, other_at, nbytes, f"out.{name}", other)
            written.append((a_at, a.nbytes, f"out.{name}"))

    def store(self, out: Grouped, result: Grouped) -> None:
        """The reference's result, in the memory of a result given."""
        for name in self.arrays:
            bits(getattr(out, name))[...] = bits(getattr(result, name))


def describing(groups: Groups, with_offsets: bool, align: int) -> Arrays:
    """The arrays of a result that tell of its groups: offsets unless they are given, sizes where they are not those given."""
    number = len(groups.array)
    arrays: Arrays = {} if with_offsets else {"offsets": ((number + 1,), _INT64)}
    if align > 1:
        arrays["splits"] = (number,), groups.array.dtype
    return arrays


def addresses(out: Grouped) -> block_results.Addresses:
    """As of a Quantized."""
    row, row_scales, column, column_scales = (
        0 if a is None else validate.address(a) for a in (out.rowwise, out.scale_inv, out.columnwise, out.columnwise_scale_inv))
    return 0, row, row_scales, column, column_scales


class Division(NamedTuple):
    """Rows of a result divided into tiles for the blocks of a launch: `down` runs of so many `rows`, none with rows of two groups. What
    follows the last group is one more, to be cleared. grid: tiles of groups of any sizes; fewest: of groups of whole tiles. members: of
    RowGroups in kernels_cu/include/groups/row_groups.cuh, but for `runs`."""

    rows: int
    down: int
    grid: int
    fewest: int
    members: tuple[Any, ...]

    @property
    def to_find(self) -> tuple[int, int, tuple[Any, ...]]:
        """What `GroupRuns` finds the runs from."""
        return self.rows, self.down, self.members


def divided(out: Grouped, x: Array, groups: Groups, offsets_at: int, align: int, rows: int, columns: int, clears: int = 0) -> Division:
    """Into tiles of rows x columns. clears: runs that have no rows, and clear scales."""
    across = max(1, cdiv(out.shape[1], columns))
    down = max(1, clears + padded_rows(out.shape[0], len(groups.array) + 1, rows) // rows)
    places = offsets_at, 0 if offsets_at else validate.address(out.offsets), validate.address(out.splits) if align > 1 else 0
    fewest = max(1, cdiv(out.shape[0], rows)) * across
    return Division(rows, down, grid_size(down * across, x.shape), fewest, (
        *places, groups.at, len(groups.array), error_word(x), groups.wide, len(x), out.shape[1], out.shape[0], across, align))
