"""group_quantize of sizes and offsets that only the device can see to be wrong, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_arrays import ALL, BLOCKS, CURRENT, PARTS, RECIPE, matrix, refused, scales_for, scales_of
from scale_arrays import guarded

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.calls import splits as sizes_of_groups
from cupy_fp8.formats import float8_e4m3fn
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import errors, tiles

NEGATIVE, SUM = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM))


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    monkeypatch.setattr(sizes_of_groups, "check_at_most", lambda *_: None)
    monkeypatch.setattr("cupy_fp8.calls.splits.compare_offsets", lambda *_: None)
    return run


@pytest.mark.full
@pytest.mark.parametrize(("given_sizes", "found"), [
    ([100, 0, 150], []), ([100, 0, 201], [SUM]), ([100, -1, 200], [NEGATIVE]), ([-100, 400], [NEGATIVE, SUM]), ([299, 50, 50, 1], [SUM]),
    ([300] * 200, [SUM]), ([0] * 300 + [301], [SUM]), ([2**63 - 1, 2**62, -(2**63), 1 << 40], [NEGATIVE, SUM]), ([2**63 - 1] * 500, [SUM]),
], ids=lambda s: str(s)[:30])  # fmt: skip
@pytest.mark.parametrize(("columns", "align"), [(16, 1), (5, 1), (16, 16), (5, 4)])
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_wrong_sizes_are_harmless_and_noted(given_sizes, found, recipe, columns, align, unchecked):
    run, x, splits = unchecked, matrix(300, columns), np.array(given_sizes, np.int64)
    scales = scales_for(recipe, len(given_sizes))
    g = fp8.group_quantize(run.array(x), run.array(splits), recipe, columnwise=True, align=align,
                           scales=None if scales is None else run.array(scales))
    want = reference.group_quantize(x, splits, recipe, columnwise=True, scales=scales, align=align)
    for name in PARTS[align == 1 :]:
        if getattr(want, name) is not None:
            testing.assert_bytes_equal(getattr(g, name), getattr(want, name))
    if align > 1:                                                    # each as far as x has rows for it, rounded up
        counted = np.diff(np.minimum(np.cumsum([0, *(min(max(n, 0), 301) for n in given_sizes)]), 300))
        assert fp8.asnumpy(g.splits).tolist() == (-(-counted // align) * align).tolist()
    assert list(fp8.device_errors(clear=True)) == (found if run.name != "reference" else [])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("offsets", [[0, 160, 480], [-16, 160, 320], [0, 320, 480], [2**63 - 1, -(2**63), 0], [0, 159, 480]], ids=str)
@pytest.mark.parametrize("recipe", [RECIPE, CURRENT], ids=["delayed", "current"])
def test_wrong_offsets_stay_within_the_arrays(recipe, offsets, large, unchecked, monkeypatch):
    if large:
        monkeypatch.setattr(tiles, "choose", lambda x, large: large)
    run, x, splits = unchecked, matrix(30, 16), unchecked.array(np.array([10, 20]))
    parts = [guarded(run, (480,), float8_e4m3fn) for _ in range(2)]
    given_offsets = run.array(np.array(offsets))
    out = Grouped(splits, given_offsets, (30, 16), parts[0][0], parts[1][0], run.array(np.zeros(2, np.float32)))
    if run.name == "reference":
        pytest.skip("does not use them")
    fp8.group_quantize(run.array(x), splits, recipe, columnwise=True, scales=run.array(scales_of(2)) if recipe is RECIPE else None,
                       offsets=given_offsets, out=out)
    assert all(intact() for _, intact in parts)
    assert list(fp8.device_errors(clear=True)) == ([] if offsets[:2] == [0, 160] else [SUM])


@pytest.mark.parametrize("columns", [16, 5])
@pytest.mark.parametrize("offsets", [(0, 160, 480), (-16, 160, 320), (0, 320, 480), (2**63 - 1, -(2**63), 0), (0, 159, 480)], ids=str)
@pytest.mark.parametrize("recipe", BLOCKS.values(), ids=BLOCKS)
def test_wrong_offsets_of_blocks_stay_within_the_arrays(recipe, offsets, columns, unchecked):
    run, x, splits = unchecked, matrix(30, columns), np.array([10, 20])
    if run.name == "reference":
        pytest.skip("does not use them")
    right = fp8.group_quantize(x, splits, recipe, columnwise=True)
    given_offsets = run.array(np.array(offsets))
    parts = {name: guarded(run, a.shape, a.dtype) for name in ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")
             if (a := getattr(right, name)) is not None}
    out = Grouped(run.array(splits), given_offsets, (30, columns), **{name: a for name, (a, _) in parts.items()}, block=right.block,
                  scale_layout=right.scale_layout, transposed=right.transposed)
    fp8.group_quantize(run.array(x), out.splits, recipe, columnwise=True, offsets=given_offsets, out=out)
    assert all(intact() for _, intact in parts.values())
    assert list(fp8.device_errors(clear=True)) == ([] if offsets == (0, 160, 480) and columns == 16 else [SUM])


# ---- what is refused ----
def test_refusals():
    x, splits, scales = matrix(9, 16), np.array([4, 5]), scales_of(2)
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)

    def call(x: Any = x, splits: Any = splits, recipe: Any = RECIPE, **options: Any) -> Any:
        given_options: dict[str, Any] = {"columnwise": True, "scales": scales, "out": out, **options}
        return lambda: fp8.group_quantize(x, splits, recipe, **given_options)

    other = fp8.group_quantize(x, splits, RECIPE, scales=scales)
    for error, message, wrong in (
            (TypeError, "recipe: expected a DelayedScaling, .* or MXScaling, got str", call(recipe="mx")),
            (TypeError, "x: expected dtype", call(np.zeros((9, 16)))),
            (ValueError, r"x: expected shape \[M, K\], got \(144,\)", call(x.reshape(-1))),
            (ValueError, "rowwise, columnwise: expected at least one", call(rowwise=False, columnwise=False)),
            (ValueError, "splits: expected sizes that add up to at most the 9 rows there are, got 10", call(splits=[4, 6])),
            (ValueError, "splits: expected sizes of 0 or more", call(splits=[4, -1])),
            (ValueError, "scales: delayed scaling needs the scales", call(scales=None)),
            (ValueError, "scales: current scaling takes them from the groups themselves", call(recipe=CURRENT)),
            (ValueError, r"amaxes: expected shape \(2,\), got \(3,\)", call(recipe=CURRENT, scales=None, amaxes=scales_of(3))),
            (ValueError, "noop: needs out=", call(recipe=CURRENT, scales=None, noop=np.zeros(1, np.float32), out=None)),
            (TypeError, "out.rowwise: expected dtype float8_e5m2", call(recipe=fp8.CurrentScaling(fp8.float8_e5m2), scales=None)),
            (ValueError, "out.rowwise: overlaps amaxes in memory",
             call(recipe=CURRENT, scales=None, amaxes=out.data[16:24].view(np.float32))),
            (ValueError, r"scales: expected shape \(2,\), one for each group, got \(3,\)", call(scales=scales_of(3))),
            (ValueError, "amaxes: expected a C-contiguous array", call(amaxes=scales_of(4)[::2])),
            (TypeError, "scales: expected dtype float32, got float64", call(scales=np.ones(2))),
            (TypeError, "scales: expected a numpy.ndarray or cupy.ndarray", call(scales=[1.0, 2.0])),
            (ValueError, r"amaxes: expected shape \(2,\), got \(3,\)", call(amaxes=scales_of(3))),
            (ValueError, "amaxes: overlaps scales in memory", call(amaxes=scales)),
            (ValueError, "noop: needs out=", call(noop=np.zeros(1, np.float32), out=None)),
            (TypeError, "offsets: expected dtype int64", call(offsets=np.zeros(3, np.int32))),
            (ValueError, "offsets: expected 64 at 1 ", call(offsets=np.array([0, 65, 144]))),
            (ValueError, r"offsets: address 0x[0-9a-f]+ is not a multiple of the element size 8",
             call(offsets=np.zeros(28, np.uint8)[4:].view(np.int64))),
            (ValueError, "out: expected offsets to be out.offsets", call(offsets=np.array([0, 64, 144]))),
            (ValueError, "out: expected splits to be out.splits", call(splits=[4, 5])),
            (ValueError, "out: expected splits to be out.splits", call(splits=splits.copy())),
            (TypeError, r"out: expected a Grouped \(an earlier result\), got ndarray", call(out=x)),
            (ValueError, r"out: expected shape \(10, 16\), got", call(matrix(10, 16))),
            (ValueError, "out.columnwise: expected none for these options, got one", call(columnwise=False)),
            (ValueError, "out.columnwise: expected one for these options, got none", call(out=other)),
            (TypeError, "out.rowwise: expected dtype float8_e5m2", call(recipe=fp8.DelayedScaling(fp8.float8_e5m2))),
            (ValueError, "out.rowwise: overlaps scales in memory", call(scales=out.data[16:24].view(np.float32)))):
        refused(error, message, wrong, out)
