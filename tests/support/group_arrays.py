"""What tests of groups of rows share: arrays, recipes, and what results must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scale_arrays import raw

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16
from cupy_fp8.grouped import Grouped

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
RECIPE, CURRENT = fp8.DelayedScaling(), fp8.CurrentScaling()
BLOCKS = {"block": fp8.BlockScaling(), "square": fp8.BlockScaling(block=(128, 128)), "mx": fp8.MXScaling(scale_layout="swizzled"),
          "rows": fp8.BlockScaling((1, None)), "columns": fp8.BlockScaling((None, 1), scale_layout="compact")}
ALL: dict[str, Any] = {"delayed": RECIPE, "current": CURRENT, **BLOCKS}
PARTS = ("splits", "offsets", "rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


def matrix(rows: int, columns: int, dtype: Any = bfloat16, seed: int = 0) -> np.ndarray:
    return cases.values("normal", (rows, columns), np.dtype(dtype), seed)


def scales_of(number: int) -> np.ndarray:
    return np.linspace(0.5, 40, number, dtype=np.float32) if number else np.zeros(0, np.float32)


def expect_members(g: Grouped, x: np.ndarray, splits: Any, scales: np.ndarray | None, **options: Any) -> None:
    """Every member is what quantize_tensor makes of its rows, without scales by current scaling; the rest is 0."""
    ends = np.cumsum([0, *splits])
    assert fp8.asnumpy(g.offsets).tolist() == (ends * x.shape[1]).tolist()
    assert len(g) == len(splits)
    for i, q in enumerate(g):
        want = reference.quantize_tensor(x[ends[i] : ends[i + 1]], None if scales is None else scales[i : i + 1], rowwise=True,
                                         columnwise=True, **options)
        for mine, theirs in ((q.rowwise, want.rowwise), (q.columnwise, want.columnwise)):
            if mine is not None:
                assert theirs is not None
                assert (mine.shape, mine.transposed) == (theirs.shape, theirs.transposed)
                testing.assert_bytes_equal(mine.data, theirs.data)
                testing.assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
    for flat in (g.rowwise, g.columnwise):
        assert flat is None or not raw(flat)[ends[-1] * x.shape[1] :].any()


def scales_for(recipe: Any, number: int) -> np.ndarray | None:
    return scales_of(number) if recipe is RECIPE else None


def refused(error: type[Exception], message: str, call: Callable[[], Any], out: Grouped | None = None) -> None:
    parts = [] if out is None else [a for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets) if a is not None]
    for a in parts:
        cases.poison(a)
    with pytest.raises(error, match="^" + message):
        call()
    assert all((bits(a).view(np.uint8) == 0xAA).all() for a in parts), "memory was written"
