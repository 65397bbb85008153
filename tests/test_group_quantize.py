"""Groups as tensors of their own: Grouped, and group_quantize against quantize_tensor of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, runtime, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS
from cupy_fp8.cases.groups import sizes
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float32
from cupy_fp8.grouped import Grouped
from cupy_fp8.ops import group_amax, group_quantize, group_runs, resident, tiles
from cupy_fp8.ops import splits as sizes_of_groups
from cupy_fp8.runtime import Variant, errors

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
RECIPE, CURRENT = fp8.DelayedScaling(), fp8.CurrentScaling()
BLOCKS = {"block": fp8.BlockScaling(), "square": fp8.BlockScaling(block=(128, 128)), "mx": fp8.MXScaling(scale_layout="swizzled")}
NEGATIVE, SUM = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM))


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


# ---- Grouped ----
def test_wrap(run):
    data = run.array(np.arange(21, dtype=np.int32).reshape(7, 3))
    index: Any = np.int64(2)
    for splits in ([2, 0, 4], run.array(np.array([2, 0, 4], np.int32))):
        g = fp8.Grouped.wrap(data, splits)
        assert (len(g), g.shape, g.dtype, g.nbytes) == (3, (7, 3), np.dtype(np.int32), 84)
        assert fp8.asnumpy(g.offsets).tolist() == [0, 6, 6, 18]
        assert g.offsets.dtype == np.int64
        assert g.data.shape == (21,)
        assert [fp8.asnumpy(a).tolist() for a in g] == [[[0, 1, 2], [3, 4, 5]], [], np.arange(6, 18).reshape(4, 3).tolist()]
        assert g[-1].shape == g[index].shape == (4, 3)
        g[2][0, 0] = 99
        assert int(data[2, 0]) == 99, "a member is a view"
        data[2, 0] = 6
    offsets = run.array(np.array([0, 6, 6, 18]))
    assert fp8.Grouped.wrap(data, splits, offsets=offsets).offsets is offsets
    assert repr(g) == f"Grouped(int32[7, 3] in 3 groups, plain values, {'cupy' if run.name == 'cuda' else 'numpy'})"
    typed = fp8.Grouped.wrap(run.array(np.arange(8, dtype=np.uint8).view(float8_e4m3fn).reshape(4, 2)), [1, 3])
    assert (typed[1].dtype, typed[1].shape) == (float8_e4m3fn, (3, 2))


def test_wrap_refuses():
    data, everything = np.zeros((4, 2), np.float32), cast(Any, slice(None))
    for wrong, error, message in (
            (lambda: Grouped.wrap(np.zeros(4), [4]), ValueError, r"data: expected shape \[M, K\], got \(4,\)"),
            (lambda: Grouped.wrap(data.T, [2]), ValueError, "data: expected a C-contiguous array"),
            (lambda: Grouped.wrap([[1]], [1]), TypeError, "data: expected a numpy.ndarray or cupy.ndarray"),
            (lambda: Grouped.wrap(data, [2, 3]), ValueError, "splits: expected sizes that add up to at most the 4 rows there are, got 5"),
            (lambda: Grouped.wrap(data, [2, -1]), ValueError, "splits: expected sizes of 0 or more, got -1 for group 1"),
            (lambda: Grouped.wrap(data, [2.0]), TypeError, "splits: expected integers"),
            (lambda: Grouped.wrap(data, [4], offsets=np.zeros(2, np.int32)), TypeError, "offsets: expected dtype int64, got int32"),
            (lambda: Grouped.wrap(data, [4], offsets=np.zeros(3, np.int64)), ValueError, "offsets: expected a C-contiguous array of 2"),
            (lambda: Grouped.wrap(data, [4], offsets=[0, 8]), TypeError, "offsets: expected a numpy.ndarray"),
            (lambda: Grouped.wrap(data, [4])[1], IndexError, "Grouped: index 1 is out of range for 1 groups"),
            (lambda: Grouped.wrap(data, [4])[everything], TypeError, "Grouped: expected an integer index"),
            (lambda: Grouped.wrap(data, [4]).dequantize(), TypeError, "dequantize: plain float32 values are not quantised"),
            (lambda: Grouped(data, data, (4, 2)), ValueError, "Grouped: expected row-wise data, or quantised column-wise data"),
            (lambda: Grouped.wrap(data, [2, 2], offsets=np.array([0, 6, 8]))[0], ValueError, "splits: group 1 of 2 rows at element 6")):
        with pytest.raises(error, match="^" + message):
            wrong()


def test_columnwise_alone():
    g = fp8.group_quantize(matrix(9, 4), [4, 5], RECIPE, rowwise=False, columnwise=True, scales=scales_of(2))
    assert g.rowwise is None
    with pytest.raises(AttributeError, match=r"no row-wise data: use \.columnwise"):
        _ = g.data
    assert g[1].rowwise is None
    assert g[1].columnwise.data.shape == (4, 5)


@pytest.mark.parametrize("rowwise", [True, False])
def test_dequantize(rowwise, run):
    x, splits, scales = matrix(50, 24), [20, 0, 23], scales_of(3)
    g = fp8.group_quantize(run.array(x), splits, RECIPE, rowwise=rowwise, columnwise=True, scales=run.array(scales))
    want = np.zeros((50, 24), np.float32)
    want[:20] = reference.quantize_tensor(x[:20], scales[:1]).dequantize()
    want[20:43] = reference.quantize_tensor(x[20:43], scales[2:]).dequantize()
    testing.assert_bytes_equal(g.dequantize(), want)
    testing.assert_bytes_equal(fp8.dequantize(g), want)
    testing.assert_bytes_equal(g.dequantize(bfloat16), reference.astype(want, bfloat16))


# ---- group_quantize ----
@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 50, 0]], ids=str)
@pytest.mark.parametrize("columns", [48, 37])
def test_each_group_by_itself(splits, columns, run):
    x, scales = matrix(50, columns), scales_of(len(splits))
    for given_splits in (splits, run.array(np.array(splits, np.int32)), run.array(np.array(splits, np.int64))):
        for directions in cases.DIRECTIONS[:3]:
            g = fp8.group_quantize(run.array(x), given_splits, RECIPE, scales=run.array(scales), **dict[str, Any](directions))
            assert (g.rowwise is not None, g.columnwise is not None) == (directions["rowwise"], directions["columnwise"])
            expect_members(g, x, splits, scales)


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 150), max_size=12), st.integers(0, 40), st.integers(1, 40), st.sampled_from([1, 8, 16]),
       st.integers(0, 2**32 - 1))
def test_any_call(splits, spare, columns, multiple, seed):
    splits, columns = [n // multiple * multiple for n in splits], columns * multiple
    x, scales = matrix(sum(splits) + spare, columns, seed=seed), scales_of(len(splits))
    with testing.executor("host"):
        g = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)
    expect_members(g, x, splits, scales)


def test_nothing_else_is_written(run):
    x, splits = matrix(70, 40), run.array(np.array([30, 0, 33]))
    parts = {name: guarded(run, shape, np.dtype(dtype)) for name, shape, dtype in (
        ("offsets", (4,), np.int64), ("rowwise", (2800,), float8_e4m3fn), ("columnwise", (2800,), float8_e4m3fn),
        ("scale_inv", (3,), float32))}
    out = Grouped(splits, parts["offsets"][0], (70, 40), *(parts[name][0] for name in ("rowwise", "columnwise", "scale_inv")))
    scales = scales_of(3)
    assert fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales), out=out) is out
    expect_members(out, x, [30, 0, 33], scales)
    assert all(intact() for _, intact in parts.values())


def test_amaxes_are_raised(run):
    x, amaxes = matrix(60, 33), run.array(np.array([1e30, 5, 0, 0], np.float32))
    fp8.group_quantize(run.array(x), [20, 0, 30, 10], RECIPE, scales=run.array(scales_of(4)), amaxes=amaxes)
    top = [float(np.abs(x[a:b].astype(np.float32)).max()) for a, b in ((20, 50), (50, 60))]
    assert fp8.asnumpy(amaxes).tolist() == [float(np.float32(1e30)), 5, *top]


def test_given_offsets_are_used(run, monkeypatch):
    x, splits, scales = matrix(60, 16), [20, 0, 40], scales_of(3)
    offsets = run.array(np.array([0, 320, 320, 960]))
    seen: list[int] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        seen.append(grid)
        launch(self, x, grid, *values)

    monkeypatch.setattr(Variant, "launch", noted)
    g = fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales), offsets=offsets)
    assert g.offsets is offsets
    expect_members(g, x, splits, scales)
    fp8.group_quantize(run.array(x), splits, RECIPE, columnwise=True, scales=run.array(scales))
    assert len(seen) == (0 if run.name == "reference" else 2), "one launch each, offsets or not"


def test_noop(run):
    x, splits, scales = run.array(matrix(20, 16)), run.array(np.array([8, 12])), run.array(scales_of(2))
    out, amaxes = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales), run.array(np.zeros(2, np.float32))
    parts = (out.rowwise, out.columnwise, out.scale_inv, out.offsets)
    for value in (1.0, 0.0):
        for a in parts:
            cases.poison(a)
        noop = run.array(np.array([value], np.float32))
        fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales, amaxes=amaxes, noop=noop, out=out)
        untouched = all((raw(a).view(np.uint8) == 0xAA).all() for a in parts) and not fp8.asnumpy(amaxes).any()
        assert untouched == (value == 1.0)


@needs_host
def test_tiles_of_large_arrays(monkeypatch):
    """What only arrays of many megabytes get."""
    monkeypatch.setattr(tiles, "choose", lambda x, large: large)
    with testing.executor("host") as run:
        for case in OPS["group_quantize"].cases():
            check(OPS["group_quantize"], case, run)


# ---- current scaling ----
@pytest.mark.parametrize("options", [{}, {"eps": 0.5, "pow2_scale": True}], ids=str)
@pytest.mark.parametrize("splits", [[50], [16, 0, 32], [0, 0, 0], [], [7, 13, 0, 1, 20], [0, 50, 0], [0] * 300 + [50]],
                         ids=lambda s: f"{len(s)}of{sum(s)}")
def test_current_scales_are_each_groups_own(splits, options, run):
    x = matrix(50, 48) * np.geomspace(1e-3, 1e3, 50)[:, None].astype(bfloat16)
    for given_splits in (splits, run.array(np.array(splits, np.int32)), run.array(np.array(splits, np.int64))):
        for directions in cases.DIRECTIONS[:3]:
            g = fp8.group_quantize(run.array(x), given_splits, fp8.CurrentScaling(**options), **dict[str, Any](directions))
            assert (g.rowwise is not None, g.columnwise is not None) == (directions["rowwise"], directions["columnwise"])
            expect_members(g, x, splits, None, **options)
            empty = fp8.asnumpy(g.scale_inv)[np.array(splits, int) == 0]
            assert (empty == (0.5 / 256 if options else 1)).all(), "of an amax of 0: eps, or no scale at all"


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 150), max_size=12), st.integers(0, 40), st.integers(1, 600), st.sampled_from(["bits", "normal"]),
       st.sampled_from([bfloat16, np.float16, np.float32]), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_any_current_call(splits, spare, columns, kind, dtype, lead, seed):
    """Runs of every length, at every address."""
    dtype = np.dtype(dtype)
    with testing.executor("host") as run:
        x, _ = guarded(run, (sum(splits) + spare, columns), dtype, lead * dtype.itemsize)
        bits(x)[...] = bits(cases.values(kind, x.shape, dtype, seed))
        expect_members(fp8.group_quantize(x, splits, CURRENT), x, splits, None)


@pytest.mark.parametrize("columns", [640, 641])
def test_the_largest_element_is_found_wherever_it_is(columns, run):
    """In the first and last elements of groups, runs of 64 rows, parts of 64 KB, before and after the aligned chunks of these."""
    splits = [3, 0, 200, 64, 1]
    x = np.full((280, columns), 0.25, np.float32)
    x[268:] = 1000                                                   # no group's
    starts = np.cumsum([0, *splits]) * columns
    part = (64 << 10) // 4
    for g, rows in enumerate(splits):
        last = rows * columns - 1
        for at in {0, 1, last, 64 * columns - 1, 64 * columns, part - 1, part, 2 * part, 64 * columns + part, 77 * columns + 5}:
            if 0 <= at <= last:
                changed = x.copy()
                changed.reshape(-1)[starts[g] + at] = -3.5
                got = fp8.asnumpy(fp8.group_quantize(run.array(changed), splits, CURRENT).scale_inv)
                want = np.where(np.array(splits) > 0, np.float32(1) / (np.float32(448) / np.float32(0.25)), np.float32(1))
                want[g] = np.float32(1) / (np.float32(448) / np.float32(3.5))
                np.testing.assert_array_equal(got, want.astype(np.float32), err_msg=f"element {at} of group {g}")


def test_current_amaxes_are_raised(run):
    x, start = matrix(60, 33), np.array([1e30, 5, -2, 0], np.float32)
    amaxes, splits = run.array(start), [20, 0, 30, 10]
    g = fp8.group_quantize(run.array(x), splits, CURRENT, amaxes=amaxes)
    expect_members(g, x, splits, None)
    ends, want = np.cumsum([0, *splits]), start.copy()
    for i in range(4):
        reference.quantize_tensor(x[ends[i] : ends[i + 1]], None, amax=want[i : i + 1])
    testing.assert_bytes_equal(amaxes, want)


@pytest.mark.parametrize("entries", [["group_amax_scale", "group_cast_transpose"], ["group_cast_current"]], ids=len)
def test_current_scaling_leaves_its_workspace_ready(entries, run, monkeypatch):
    """The same words for every call, as on a GPU, and for other sizes."""
    launches: list[str] = []
    launch, made = Variant.launch, runtime.workspace
    kept: dict[int, Any] = {}

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        launches.append(self.kernel.entry)
        launch(self, x, grid, *values)

    def same_words(owner: Any, x: Any, use: str, words: int) -> Any:
        return kept.setdefault(words, made(owner, x, use, words))

    monkeypatch.setattr(Variant, "launch", noted)
    monkeypatch.setattr(group_amax, "workspace", same_words)
    monkeypatch.setattr(group_quantize, "workspace", same_words)
    gpu = resident._gpu
    monkeypatch.setattr(resident, "_gpu", lambda device: gpu(device)._replace(fewest=0))
    if len(entries) == 2:
        monkeypatch.setattr(resident, "choose", lambda *_: None)
    splits = run.array(np.array([0] * 70 + [300, 21]))
    out = fp8.group_quantize(run.array(matrix(333, 520)), splits, CURRENT, columnwise=True)
    for seed in range(3):
        x = matrix(333, 520, seed=seed) * np.float32(10.0**-seed).astype(bfloat16)
        for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
            cases.poison(a)
        assert fp8.group_quantize(run.array(x), splits, CURRENT, columnwise=True, out=out) is out
        expect_members(out, x, fp8.asnumpy(splits), None)
    if run.name == "reference":
        assert not launches
        return
    # Of so many blocks the CPU has a launch before, as a GPU of large arrays; tiles that are read once always have.
    before = ["group_find_runs"] if run.name == "host" or len(entries) == 1 else []
    assert launches == [*before, *entries] * 4
    (words,) = kept.values()
    if len(entries) == 2:
        assert len(words) == 1 + 2 * 128
        assert not fp8.asnumpy(words)[: 1 + 128].any()
    else:
        launched, finished = fp8.asnumpy(words)[:2].tolist()
        assert (launched >= 4, finished) == (True, 0), "launches, and blocks that have finished one that is under way"


def test_noop_of_current_scaling(run):
    host = matrix(20, 16)
    x, splits, recipe = run.array(host), run.array(np.array([8, 12])), fp8.CurrentScaling(pow2_scale=True)
    out, amaxes = fp8.group_quantize(x, splits, recipe, columnwise=True), run.array(np.full(2, -1, np.float32))
    parts = (out.rowwise, out.columnwise, out.scale_inv, out.offsets)
    for value in (1.0, 0.0, 1.0):
        for a in parts:
            cases.poison(a)
        before = fp8.asnumpy(amaxes).copy()
        fp8.group_quantize(x, splits, recipe, columnwise=True, amaxes=amaxes, noop=run.array(np.array([value], np.float32)), out=out)
        if value == 1.0:
            assert all((raw(a).view(np.uint8) == 0xAA).all() for a in parts)
            testing.assert_bytes_equal(amaxes, before)
        else:
            expect_members(out, host, [8, 12], None, pow2_scale=True)
            assert (fp8.asnumpy(amaxes) > 0).all()


def test_one_result_for_both_recipes(run):
    """What is remembered of one is not taken for the other."""
    host, splits, scales = matrix(30, 16), run.array(np.array([10, 20])), run.array(scales_of(2))
    x = run.array(host)
    out = fp8.group_quantize(x, splits, RECIPE, scales=scales)
    for _ in range(2):
        fp8.group_quantize(x, splits, CURRENT, out=out)
        expect_members(out, host, [10, 20], None)
        fp8.group_quantize(x, splits, fp8.CurrentScaling(eps=50.0), out=out)
        expect_members(out, host, [10, 20], None, eps=50.0)
        fp8.group_quantize(x, splits, RECIPE, scales=scales, out=out)
        expect_members(out, host, [10, 20], scales_of(2))


def test_scales_of_any_strides(run):
    x, splits, scales = matrix(30, 16), np.array([10, 20]), scales_of(4)
    on_device = run.array(splits)
    out = fp8.group_quantize(run.array(x), on_device, RECIPE, scales=run.array(scales)[::2])
    for _ in range(2):
        cases.poison(out.rowwise)
        fp8.group_quantize(run.array(x), on_device, RECIPE, scales=run.array(scales)[::2], out=out)
        expect_members(out, x, splits, scales[::2])


# ---- padded ----
ALL: dict[str, Any] = {"delayed": RECIPE, "current": CURRENT, **BLOCKS}
PARTS = ("splits", "offsets", "rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")


def scales_for(recipe: Any, number: int) -> np.ndarray | None:
    return scales_of(number) if recipe is RECIPE else None


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
    """Sizes change, what an earlier call left there is gone, nothing else is written; one launch (of current scaling two)."""
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
    assert len(launches) == (0 if run.name == "reference" else 10 if recipe is CURRENT else 5)
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


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> Iterator[testing.Executor]:
    monkeypatch.setattr(sizes_of_groups, "check_at_most", lambda *_: None)
    monkeypatch.setattr("cupy_fp8.ops.splits.compare_offsets", lambda *_: None)
    fp8.device_errors(clear=True)
    yield run
    fp8.device_errors(clear=True)


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
def refused(error: type[Exception], message: str, call: Callable[[], Any], out: Grouped | None = None) -> None:
    parts = [] if out is None else [a for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets) if a is not None]
    for a in parts:
        cases.poison(a)
    with pytest.raises(error, match="^" + message):
        call()
    assert all((bits(a).view(np.uint8) == 0xAA).all() for a in parts), "memory was written"


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
            (ValueError, r"amaxes: expected a contiguous array of shape \(2,\)", call(recipe=CURRENT, scales=None, amaxes=scales_of(3))),
            (ValueError, "noop: needs out=", call(recipe=CURRENT, scales=None, noop=np.zeros(1, np.float32), out=None)),
            (TypeError, "out.rowwise: expected dtype float8_e5m2", call(recipe=fp8.CurrentScaling(fp8.float8_e5m2), scales=None)),
            (ValueError, "out.rowwise: overlaps amaxes in memory",
             call(recipe=CURRENT, scales=None, amaxes=out.data[16:24].view(np.float32))),
            (ValueError, r"scales: expected an array of shape \(2,\)", call(scales=scales_of(3))),
            (ValueError, r"amaxes: expected a contiguous array of shape \(2,\)", call(amaxes=scales_of(4)[::2])),
            (TypeError, "scales: expected dtype float32, got float64", call(scales=np.ones(2))),
            (TypeError, "scales: expected a numpy.ndarray or cupy.ndarray", call(scales=[1.0, 2.0])),
            (ValueError, r"amaxes: expected a contiguous array of shape \(2,\)", call(amaxes=scales_of(3))),
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


# ---- on a GPU ----
@pytest.mark.gpu
def test_graph_replay_follows_the_sizes():
    cp = backend.cupy()
    x, splits, scales = fp8.asarray(matrix(500, 48), like="cupy"), cp.asarray(sizes(500, 20)), cp.asarray(scales_of(20))
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=scales, out=out)
        with pytest.raises(ValueError, match=r"^Grouped: members are found"):
            _ = out[0]
        graph = stream.end_capture()
        for seed in range(3):
            host = sizes(490, 20, seed=seed)
            splits.set(host)
            for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
                cases.poison(a)
            graph.launch(stream)
            stream.synchronize()
            expect_members(out, fp8.asnumpy(x), host, scales_of(20))
    other = fp8.asarray(matrix(500, 48, seed=9), like="cupy")
    for _ in range(2):                                              # what is remembered of the first x is not taken for the second's
        for a in (other, x):
            assert fp8.group_quantize(a, splits, RECIPE, columnwise=True, scales=scales, out=out) is out
            expect_members(out, fp8.asnumpy(a), host, scales_of(20))
    assert fp8.device_errors() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_graph_replay_of_padded_groups(recipe, large, monkeypatch):
    if large:                                                        # as arrays are whose groups another launch finds
        monkeypatch.setattr(tiles, "choose", lambda x, large: large)
        monkeypatch.setattr(group_runs, "_MANY", 0)
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


@pytest.mark.gpu
def test_graph_replay_of_current_scaling():
    """Two results captured into one graph, each with words of its own."""
    cp = backend.cupy()
    x, splits = fp8.asarray(matrix(500, 48), like="cupy"), cp.asarray(sizes(490, 20))
    fresh = fp8.group_quantize(x, splits, CURRENT)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"^out: used for the first time while a CUDA graph is captured"):
            fp8.group_quantize(x, splits, CURRENT, out=fresh)
        stream.end_capture()
    outs = [fp8.group_quantize(x, splits, CURRENT, columnwise=True) for _ in range(2)]
    amaxes = cp.zeros(20, cp.float32)
    for out in outs:
        fp8.group_quantize(x, splits, CURRENT, columnwise=True, amaxes=amaxes, out=out)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        for out in outs:
            fp8.group_quantize(x, splits, CURRENT, columnwise=True, amaxes=amaxes, out=out)
        graph = stream.end_capture()
        for seed in range(3):
            host, data = sizes(490, 20, seed=seed), matrix(500, 48, seed=seed)
            splits.set(host)
            bits(x).set(bits(data))
            amaxes.fill(0)
            for out in outs:
                for a in (out.rowwise, out.columnwise, out.scale_inv, out.offsets):
                    cases.poison(a)
            graph.launch(stream)
            stream.synchronize()
            for out in outs:
                expect_members(out, data, host, None)
            starts = np.cumsum(host) - host
            want = [float(reference.compute_amax(data[a : a + n])[0]) for a, n in zip(starts, host, strict=True)]
            assert amaxes.tolist() == want
    assert fp8.device_errors() == ()


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    cp = backend.cupy()
    rows, columns, splits = 33_000, 65_536, [5, 32_768, 0, 200]
    x = fp8.full((rows, columns), 1.0, bfloat16, like="cupy")
    x_bits = bits(x)
    x_bits[-30, 7] = int(np.array(3.0, bfloat16).view(np.uint16))
    out = fp8.group_quantize(x, splits, RECIPE, columnwise=True, scales=cp.ones(4, cp.float32))
    one, three = (int(fp8.asarray([v], float8_e4m3fn, like=np).view(np.uint8)[0]) for v in (1.0, 3.0))
    end = sum(splits) * columns
    for flat in (bits(out.rowwise), bits(out.columnwise)):
        assert bool((flat[end:] == 0).all())
        assert int((flat[:end] == one).sum()) == end - 1
    assert int(bits(out[3].rowwise.data)[rows - 30 - 32_773, 7]) == three
    assert int(bits(out[3].columnwise.data)[7, rows - 30 - 32_773]) == three
    out = fp8.group_quantize(x, splits, fp8.CurrentScaling(pow2_scale=True))
    assert fp8.asnumpy(out.scale_inv).tolist() == [1 / 256, 1 / 256, 1.0, 1 / 128]
