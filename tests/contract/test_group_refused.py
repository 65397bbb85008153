"""group_quantize of offsets that only the device can see to be wrong, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_arrays import (
    ALL,
    BLOCKS,
    COLUMNS,
    CURRENT,
    PARTS,
    RECIPE,
    ROWS,
    guarded_like,
    matrix,
    refused,
    scales_for,
    scales_of,
)
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, testing
from cupy_fp8.calls import group_sizes
from cupy_fp8.formats import bfloat16
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import errors, shapes

NEGATIVE, SUM = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM))


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    monkeypatch.setattr(group_sizes, "check_at_most", lambda *_: None)
    monkeypatch.setattr("cupy_fp8.calls.group_sizes.compare_offsets", lambda *_: None)
    return run


@pytest.mark.parametrize(("columns", "large"), [(16, False), (5, False), (16, True)])
@pytest.mark.parametrize("offsets", [[0, 160, 480], [-16, 160, 320], [0, 320, 480], [2**63 - 1, -(2**63), 0],
                                     [0, 159, 480]], ids=str)
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
@where_kernels_run                                              # the reference does not use the offsets
def test_wrong_offsets_stay_within_the_arrays(recipe, offsets, columns, large, unchecked, monkeypatch):
    if large:
        monkeypatch.setattr(shapes, "choose_tile", lambda x, large: large)
    run, x, splits = unchecked, matrix(30, columns), np.array([10, 20])
    scales, given_offsets = scales_for(recipe, 2, run), run.array(np.array(offsets))
    for rowwise in (True, False) if recipe in BLOCKS.values() else (True,):
        right = fp8.group_quantize(run.array(x), run.array(splits), recipe, rowwise=rowwise, columnwise=True,
                                   scales=scales)
        out, intact = guarded_like(run, right, splits=right.splits, offsets=given_offsets)
        fp8.group_quantize(run.array(x), out.splits, recipe, rowwise=rowwise, columnwise=True, scales=scales,
                           offsets=given_offsets, out=out)
        assert intact()
        is_right = offsets == [0, 160, 480] and columns == 16
        assert list(fp8.device_errors(clear=True)) == ([] if is_right else [SUM])
        if is_right:
            for name in PARTS[2:]:
                if getattr(right, name) is not None:
                    testing.assert_bytes_equal(getattr(out, name), getattr(right, name))


# ---- what is refused ----
X, SPLITS, SCALES = matrix(9, 16), np.array([4, 5], np.int32), scales_of(2)
NOOP = np.zeros(1, np.float32)
#: The error, and how a call differs from one that is right.
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "recipe: expected a DelayedScaling, .* or MXScaling, got str", {"recipe": "mx"}),
    (TypeError, "x: expected dtype", {"x": np.zeros((9, 16))}),
    (ValueError, "x: expected an array of two dimensions", {"x": X.reshape(-1)}),
    (ValueError, "rowwise, columnwise: expected at least one", {"rowwise": False, "columnwise": False}),
    (TypeError, r"rowwise: expected True or False, got", {"rowwise": NOOP}),
    (ValueError, "splits: expected sizes that add up to at most the 9 rows there are, got 10",
     {"splits": [4, 6]}),
    (ValueError, "splits: expected sizes of 0 or more", {"splits": [4, -1]}),
    (ValueError, "splits: expected int64, since 2147483640 rows rounded up to 16 are more than int32 holds, "
                 "got int32",
     {"x": np.zeros((2**31 - 8, 0), bfloat16), "align": 16, "out": None}),
    (ValueError, "scales: delayed scaling needs the scales", {"scales": None}),
    (ValueError, "scales: current scaling takes them from the values themselves", {"recipe": CURRENT}),
    (ValueError, "scales, amaxes: belong to per-tensor recipes", {"recipe": BlockScaling()}),
    (ValueError, "scales, amaxes: belong to per-tensor recipes",
     {"recipe": MXScaling(), "scales": None, "amaxes": SCALES}),
    (ValueError, "scales, amaxes: belong to per-tensor recipes", {"recipe": BlockScaling(ROWS)}),
    (ValueError, r"scales: expected shape \(2,\), one for each group, got \(3,\)", {"scales": scales_of(3)}),
    (TypeError, "scales: expected dtype float32, got float64", {"scales": np.ones(2)}),
    (TypeError, "scales: expected a numpy.ndarray or cupy.ndarray", {"scales": [1.0, 2.0]}),
    (ValueError, r"amaxes: expected shape \(2,\), got \(3,\)", {"amaxes": scales_of(3)}),
    (ValueError, r"amaxes: expected shape \(2,\)",
     {"recipe": CURRENT, "scales": None, "amaxes": scales_of(3)}),
    (ValueError, "amaxes: expected a C-contiguous array", {"amaxes": scales_of(4)[::2]}),
    (ValueError, "noop: needs out=", {"noop": NOOP, "out": None}),
    (ValueError, "noop: needs out=", {"recipe": CURRENT, "scales": None, "noop": NOOP, "out": None}),
    (ValueError, "noop: needs out=", {"noop": NOOP, "align": 8, "out": None}),
    (ValueError, "align: expected a power of two from 1 to 65536, got 12", {"align": 12}),
    (ValueError, "align: expected a power of two from 1 to 65536, got 0", {"align": 0}),
    (ValueError, "align: expected a power of two from 1 to 65536, got 131072", {"align": 1 << 17}),
    (TypeError, "align: expected an integer, got 8.0", {"align": 8.0}),
    (ValueError, r"offsets: expected none with align=8, got ndarray",
     {"align": 8, "offsets": np.array([0, 128, 256])}),
    (ValueError, "offsets: expected 64 at 1 ", {"offsets": np.array([0, 65, 144])}),
    (ValueError, "out: expected offsets to be out.offsets", {"offsets": np.array([0, 64, 144])}),
    (ValueError, "out: expected splits to be out.splits", {"splits": [4, 5]}),
    (ValueError, "out: expected splits to be out.splits", {"splits": SPLITS.copy()}),
    (TypeError, r"out: expected a Grouped \(an earlier result\), got ndarray", {"out": X}),
    (ValueError, r"out: expected shape \(10, 16\), got", {"x": matrix(10, 16)}),
    (ValueError, "out.columnwise: expected none for these options, got one", {"columnwise": False}),
]  # fmt: skip


def call(**options: Any) -> Any:
    """A call that is right, but for the options given."""
    options = {"x": X, "splits": SPLITS, "recipe": RECIPE, "columnwise": True, **options}
    options.setdefault("scales", scales_for(options["recipe"], 2))
    x, splits, recipe = (options.pop(name) for name in ("x", "splits", "recipe"))
    return lambda: fp8.group_quantize(x, splits, recipe, **options)


@pytest.mark.parametrize(("error", "message", "options"), REFUSED,
                         ids=[message[:40] for _, message, _ in REFUSED])
def test_refused(error, message, options):
    out = call()()
    refused(error, message, call(**{"out": out, "scales": SCALES, **options}), out)


#: The recipe and options of a result, the error, how the result is changed, and how the call then differs.
RESULTS: list[tuple[Any, dict[str, Any], type[Exception], str, Any, Any]] = [
    (RECIPE, {"columnwise": False}, ValueError, "out.columnwise: expected one for these options, got none",
     None, lambda _: {"columnwise": True}),
    (RECIPE, {}, ValueError, r"out: expected shape \(23, 16\), got \(9, 16\)", None, lambda _: {"align": 8}),
    (RECIPE, {"align": 8}, ValueError, r"out: expected shape \(39, 16\), got \(23, 16\)", None,
     lambda _: {"align": 16}),
    (RECIPE, {"align": 8}, ValueError, "out: expected splits to be out.splits", None, lambda _: {"align": 1}),
    (RECIPE, {"align": 8}, ValueError, r"out.splits: expected shape \(2,\), got \(3,\)",
     lambda _: {"splits": np.zeros(3, np.int32)}, None),
    (BlockScaling(), {}, ValueError, r"out: expected block \(1, None\), got \(1, 128\)", None,
     lambda _: {"recipe": BlockScaling(ROWS)}),
    (BlockScaling(), {}, ValueError, r"out: expected block \(1, 32\), got \(1, 128\)", None,
     lambda _: {"recipe": MXScaling()}),
    (BlockScaling(ROWS), {}, ValueError, r"out: expected block \(None, 1\), got \(1, None\)", None,
     lambda _: {"recipe": BlockScaling(COLUMNS)}),
    *((BlockScaling(block), {}, ValueError, "out: expected scale_layout compact, got gemm_ready", None,
       lambda _, block=block: {"recipe": BlockScaling(block, scale_layout="compact")})
      for block in ((1, 128), ROWS)),
    *((BlockScaling(block), {}, ValueError, "out.columnwise: expected none for these options, got one", None,
       lambda _: {"columnwise": False}) for block in ((1, 128), ROWS)),
    (BlockScaling(), {}, ValueError, r"out\.scale_inv: expected",
     lambda g: {"scale_inv": g.scale_inv[:-1]}, None),
    (BlockScaling(ROWS), {}, ValueError,
     r"out\.columnwise_scale_inv: expected shape \(2, 16\), got \(1, 16\)",
     lambda g: {"columnwise_scale_inv": g.columnwise_scale_inv[:1]}, None),
    (MXScaling(block=(32, 32)), {}, ValueError, r"out\.columnwise: expected out\.rowwise itself",
     lambda g: {"columnwise": g.rowwise.copy()}, None),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "options", "error", "message", "change", "differs"), RESULTS,
                         ids=[f"{type(row[0]).__name__}-{row[3][:40]}" for row in RESULTS])
def test_refused_results(recipe, options, error, message, change, differs):
    out = call(recipe=recipe, **options)()
    wrong = Grouped._of_fields(**{**out.__getstate__(), **change(out)}) if change else out
    given = {"recipe": recipe, **options, "out": wrong, **(differs(out) if differs else {})}
    refused(error, message, call(**given), out, PARTS if "align" in options else PARTS[1:])
