"""Shared by tests of groups of rows: arrays, recipes, and expected results."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from scale_arrays import raw

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, cases, reference, testing
from cupy_fp8.formats import bfloat16
from cupy_fp8.grouped import Grouped

RECIPE, CURRENT = fp8.DelayedScaling(), fp8.CurrentScaling()
ROWS, COLUMNS = (1, None), (None, 1)
BLOCKS = {"block": BlockScaling(), "square": BlockScaling(block=(128, 128)),
          "mx": MXScaling(scale_layout="swizzled"), "rows": BlockScaling(ROWS),
          "columns": BlockScaling(COLUMNS, scale_layout="compact")}
ALL: dict[str, Any] = {"delayed": RECIPE, "current": CURRENT, **BLOCKS}
DIRECTIONS: list[dict[str, Any]] = [
    {"rowwise": row, "columnwise": column} for row, column in ((True, False), (False, True), (True, True))]
#: arrays of a Grouped
PARTS = ("splits", "offsets", "rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


def matrix(rows: int, columns: int, dtype: Any = bfloat16, seed: int = 0) -> np.ndarray:
    return cases.values("normal", (rows, columns), np.dtype(dtype), seed)


def scales_of(number: int) -> np.ndarray:
    return np.linspace(0.5, 40, number, dtype=np.float32) if number else np.zeros(0, np.float32)


def scales_for(recipe: Any, number: int, run: testing.Executor | None = None) -> Any:
    """Return the scales for a call with this recipe, or None; on run's device."""
    if recipe is not RECIPE:
        return None
    return scales_of(number) if run is None else run.array(scales_of(number))


def parts_of(g: Grouped, names: Iterable[str] = PARTS) -> dict[str, Any]:
    """Return the arrays of a Grouped that are present, by name."""
    return {name: a for name in names if (a := getattr(g, name)) is not None}


def poison(arrays: Iterable[Any]) -> None:
    for a in arrays:
        cases.poison(a)


def expect_groups(g: Grouped, x: np.ndarray, sizes: Any, recipe: Any, scales: np.ndarray | None = None,
                  **directions: bool) -> None:
    """Check that every member equals the recipe applied to its rows, that data and scales follow one another,
    and that the rest is 0. With whole columns every group has a line of scales, zeros if it has no rows."""
    ends, directions = np.cumsum([0, *sizes]), {"rowwise": True, "columnwise": False, **directions}
    assert fp8.asnumpy(g.offsets).tolist() == (ends * x.shape[1]).tolist()
    assert len(g) == len(sizes)
    own = [{} if scales is None else {"scale": scales[i : i + 1]} for i in range(len(sizes))]
    with testing.executor("reference"):
        want = [recipe.quantize(x[a:b], **directions, **scale)
                for (a, b), scale in zip(pairwise(ends), own, strict=True)]
        none = recipe.quantize(np.zeros((1, x.shape[1]), x.dtype), **directions,
                               **({} if scales is None else {"scale": 1.0}))
    members = list(g)
    for name, is_wanted in directions.items():
        assert (getattr(g, name) is not None) == is_wanted
        if not is_wanted:
            continue
        parts = [getattr(q, name) for q in want]
        for mine, theirs in zip((getattr(member, name) for member in members), parts, strict=True):
            assert (mine.shape, mine.transposed, mine.block, mine.scale_layout) == (
                theirs.shape, theirs.transposed, theirs.block, theirs.scale_layout)
            testing.assert_bytes_equal(mine.data, theirs.data)
            testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
        follow_one_another(getattr(g, name), [part.data for part in parts])
        lines = [part if part.shape[0] or part.block is None or part.block[0] is not None
                 else getattr(none, name)
                 for part in parts]
        of_rows = name == "rowwise" or g.block is None
        follow_one_another(g.scale_inv if of_rows else g.columnwise_scale_inv,
                           [line.scale_inv for line in lines])


def follow_one_another(flat: Any, parts: list[Any]) -> None:
    """Check that an array consists of these parts one after the other, then zeros."""
    got, *expected = (raw(a).reshape(-1).view(np.uint8) for a in (flat, *parts))
    want = np.concatenate([np.zeros(0, np.uint8), *expected])
    testing.assert_bytes_equal(got[: want.size], want)
    assert not got[want.size :].any()


def padded(x: np.ndarray, sizes: Any, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of groups, each padded with rows of zeros, and their sizes."""
    sizes = np.asarray(sizes, np.int64)
    return reference.pad_groups(x[: sizes.sum()], sizes, align=align), -(-sizes // align) * align


def most_rows(rows: int, groups: int, align: int) -> int:
    """Return the most rows of padded groups: as many groups as possible have one row, and the rest are
    full."""
    full = min(groups, rows)
    return align * (full + (rows - full) // align)
