"""group_quantize(align=): the same as pad_groups, then group_quantize."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_arrays import ALL, BLOCKS, CURRENT, PARTS, RECIPE, matrix, needs_host, refused, scales_for, scales_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import row_segments
from cupy_fp8.cases.moe.pad import sizes
from cupy_fp8.formats import bfloat16
from cupy_fp8.grouped import Grouped
from cupy_fp8.kernels import Variant, tiles


def padded(x: np.ndarray, splits: np.ndarray, recipe: Any, align: int, **options: Any) -> Grouped:
    """What group_quantize(align=) is the same as."""
    aligned = (-(-splits // align) * align).astype(splits.dtype)
    rows = fp8.pad_groups(x[: splits.sum()], splits, align)
    return fp8.group_quantize(rows, aligned, recipe, scales=scales_for(recipe, len(splits)), **options)


def expect_same(actual: Grouped, desired: Grouped) -> None:
    """But for the number of rows after the last group, which are zeros like their scales."""
    assert (actual.block, actual.scale_layout, actual.transposed) == (desired.block, desired.scale_layout, desired.transposed)
    for name in PARTS:
        mine, theirs = getattr(actual, name), getattr(desired, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == theirs.dtype
            more, want = raw(mine).reshape(-1), raw(theirs).reshape(-1)
            testing.assert_bytes_equal(more[: want.size], want)
            assert not more[want.size :].any()


@pytest.mark.full
@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 49, 0], [1] * 50, [0] * 300 + [50]],
                         ids=lambda s: f"{len(s)}of{sum(s)}")
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_aligned_is_padded_then_quantised(splits, recipe, run):
    for align, columns, spare in ((16, 48, 0), (128, 37, 9)):
        x = matrix(sum(splits) + spare, columns)
        bits(x)[sum(splits) :] = 0x4242                              # no group's: it may not be seen
        for dtype in (np.int32, np.int64):
            given_splits, scales = np.array(splits, dtype), scales_for(recipe, len(splits))
            for directions in ({}, {"rowwise": False, "columnwise": True}, {"columnwise": True}):
                g = fp8.group_quantize(run.array(x), run.array(given_splits), recipe, align=align, **dict[str, Any](directions),
                                       scales=None if scales is None else run.array(scales))
                assert g.shape == (len(x) + (align - 1) * min(len(splits), len(x)), columns)
                with testing.executor("reference"):
                    expect_same(g, padded(x, given_splits, recipe, align, **dict[str, Any](directions)))
    in_list = fp8.group_quantize(run.array(x), splits, recipe, align=align, columnwise=True,
                                 scales=None if scales is None else run.array(scales))
    assert in_list.splits.dtype == np.int64
    for name in PARTS:
        if getattr(g, name) is not None:
            testing.assert_bytes_equal(getattr(in_list, name), fp8.asnumpy(getattr(g, name)))


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 150), max_size=8), st.integers(0, 20), st.integers(1, 40), st.sampled_from([1, 8, 16]),
       st.sampled_from([2, 4, 16, 32, 64, 128, 256]), st.sampled_from(sorted(ALL)), st.integers(0, 2**32 - 1))
def test_any_aligned_call(splits, spare, columns, multiple, align, name, seed):
    splits, x = np.array(splits, np.int64), matrix(sum(splits) + spare, columns * multiple, seed=seed)
    with testing.executor("host"):
        g = fp8.group_quantize(x, splits, ALL[name], columnwise=True, align=align, scales=scales_for(ALL[name], len(splits)))
    expect_same(g, padded(x, splits, ALL[name], align, columnwise=True))


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_aligned_results_are_written_in_place(recipe, run, monkeypatch):
    """Sizes change, what an earlier call left there is gone, nothing else is written; so many launches."""
    launches: list[str] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        launches.append(self.kernel.entry)
        launch(self, x, grid, *values)

    monkeypatch.setattr(Variant, "launch", noted)
    x, splits, scales = matrix(200, 48), run.array(np.array([100, 0, 93], np.int32)), scales_for(recipe, 3)
    options: dict[str, Any] = {"columnwise": True, "align": 32, "scales": None if scales is None else run.array(scales)}
    fresh = fp8.group_quantize(run.array(x), splits, recipe, **options)
    parts = {name: guarded(run, a.shape, a.dtype) for name in PARTS if (a := getattr(fresh, name)) is not None}
    out = Grouped(**{name: a for name, (a, _) in parts.items()}, shape=fresh.shape, block=fresh.block, scale_layout=fresh.scale_layout,
                  transposed=fresh.transposed)
    noop = run.array(np.zeros(1, np.float32))
    launches.clear()
    for host in ([100, 0, 93], [0, 0, 200], [1, 1, 1], [0, 0, 0], [64, 32, 96]):
        bits(splits)[...] = run.array(np.array(host, np.int32))
        for a, _ in parts.values():
            cases.poison(a)
        assert fp8.group_quantize(run.array(x), splits, recipe, **options, noop=noop, out=out) is out
        with testing.executor("reference"):
            expect_same(out, padded(x, np.array(host, np.int32), recipe, 32, columnwise=True))
        assert fp8.asnumpy(splits).tolist() == host
    assert all(intact() for _, intact in parts.values())
    each = 3 if recipe is BLOCKS["columns"] or recipe is BLOCKS["rows"] else 2 if recipe is CURRENT else 1
    assert len(launches) == (0 if run.name == "reference" else 5 * each)
    for a, _ in parts.values():
        cases.poison(a)
    fp8.group_quantize(run.array(x), splits, recipe, **options, noop=run.array(np.ones(1, np.float32)), out=out)
    assert all((raw(a).view(np.uint8) == 0xAA).all() for a, _ in parts.values())


def test_amaxes_of_padded_groups(run):
    """Rows of zeros raise none."""
    x, start = matrix(60, 33), np.array([1e30, 5, -2, 0], np.float32)
    for recipe in (RECIPE, CURRENT):
        amaxes, want, splits = run.array(start), start.copy(), np.array([20, 0, 30, 10])
        scales = scales_for(recipe, 4)
        fp8.group_quantize(run.array(x), run.array(splits), recipe, align=64, amaxes=amaxes,
                           scales=None if scales is None else run.array(scales))
        with testing.executor("reference"):
            padded(x, splits, recipe, 64, amaxes=want)
        testing.assert_bytes_equal(amaxes, want)


def test_members_of_padded_groups(run):
    x = matrix(9, 16)
    g = fp8.group_quantize(run.array(x), [4, 0, 5], RECIPE, columnwise=True, align=8, scales=run.array(scales_of(3)))
    assert [member.rowwise.shape for member in g] == [(8, 16), (0, 16), (8, 16)]
    want = reference.quantize_tensor(x[4:], scales_of(3)[2:]).rowwise
    assert want is not None
    testing.assert_bytes_equal(g[2].rowwise.data[:5], want.data)
    assert not raw(g[2].rowwise.data[5:]).any()
    values = g.dequantize()
    assert values.shape == g.shape == (9 + 7 * 3, 16)


def test_refusals_of_align():
    x, splits, scales = matrix(9, 16), np.array([4, 5], np.int32), scales_of(2)
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales, align=8)
    unpadded = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)

    def call(x: Any = x, splits: Any = splits, **options: Any) -> Any:
        given_options: dict[str, Any] = {"columnwise": True, "scales": scales, "out": out, "align": 8, **options}
        return lambda: fp8.group_quantize(x, splits, RECIPE, **given_options)

    def with_splits(a: Any) -> Grouped:
        return Grouped(a, out.offsets, out.shape, out.rowwise, out.columnwise, out.scale_inv)

    cases.poison(out.splits)
    for error, message, wrong in (
            (ValueError, "align: expected a power of two from 1 to 65536, got 12", call(align=12)),
            (ValueError, "align: expected a power of two from 1 to 65536, got 0", call(align=0)),
            (ValueError, "align: expected a power of two from 1 to 65536, got 131072", call(align=1 << 17)),
            (TypeError, "align: expected an integer, got 8.0", call(align=8.0)),
            (ValueError, r"offsets: expected none with align=8, got ndarray", call(offsets=np.array([0, 128, 256]))),
            (ValueError, "splits: expected int64, since 2147483640 rows rounded up to 16 are more than int32 holds, got int32",
             call(np.zeros((2**31 - 8, 0), bfloat16), align=16, out=None)),
            (ValueError, "splits: expected sizes that add up to at most the 9 rows there are, got 10", call(splits=[4, 6])),
            (ValueError, r"out: expected shape \(23, 16\), got \(9, 16\)", call(out=unpadded)),
            (ValueError, r"out: expected shape \(39, 16\), got \(23, 16\)", call(align=16)),
            (ValueError, "out: expected splits to be out.splits", call(align=1)),
            (TypeError, "out.splits: expected dtype int64, got int32", call(splits=[4, 5])),
            (ValueError, r"out.splits: expected shape \(2,\), got \(3,\)", call(out=with_splits(np.zeros(3, np.int32)))),
            (ValueError, "out.splits: overlaps splits in memory", call(out=with_splits(splits))),
            (ValueError, "out.splits: overlaps out.rowwise in memory", call(out=with_splits(out.data[16:24].view(np.int32)))),
            (ValueError, "noop: needs out=", call(noop=np.zeros(1, np.float32), out=None))):
        refused(error, message, wrong, out)
    assert (bits(out.splits).view(np.uint8) == 0xAA).all()


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_graph_replay_of_padded_groups(recipe, large, monkeypatch):
    if large:                                                        # as arrays are whose groups another launch finds
        monkeypatch.setattr(tiles, "choose", lambda x, large: large)
        monkeypatch.setattr(row_segments, "_MANY", 0)
    cp = backend.cupy()
    data, scales = matrix(500, 48), scales_for(recipe, 20)
    x, splits = fp8.asarray(data, like="cupy"), cp.asarray(sizes(500, 20))
    options: dict[str, Any] = {"columnwise": True, "align": 16, "scales": None if scales is None else cp.asarray(scales)}
    out = fp8.group_quantize(x, splits, recipe, **options)
    fp8.group_quantize(x, splits, recipe, **options, out=out)        # makes its workspace
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        fp8.group_quantize(x, splits, recipe, **options, out=out)
        graph = stream.end_capture()
        for seed in range(3):
            host = sizes(490, 20, seed=seed)
            splits.set(host)
            for name in PARTS:
                if getattr(out, name) is not None:
                    cases.poison(getattr(out, name))
            graph.launch(stream)
            stream.synchronize()
            expect_same(out, padded(data, host, recipe, 16, columnwise=True))
    assert fp8.device_errors() == ()
