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
from cupy_fp8.ops import group_amax, tiles
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


def test_current_scaling_takes_two_launches_and_leaves_its_workspace_clean(run, monkeypatch):
    """The same words for every call, as on a GPU."""
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
    assert launches == ["group_amax_scale", "group_cast_transpose"] * 4
    (words,) = kept.values()
    assert len(words) == 1 + 2 * 128
    assert not fp8.asnumpy(words)[: 1 + 128].any()


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
@pytest.mark.parametrize("columns", [16, 5])
@pytest.mark.parametrize("recipe", [RECIPE, CURRENT, *BLOCKS.values()], ids=["delayed", "current", *BLOCKS])
def test_wrong_sizes_are_harmless_and_noted(given_sizes, found, recipe, columns, unchecked):
    run, x, splits = unchecked, matrix(300, columns), np.array(given_sizes, np.int64)
    scales = scales_of(len(given_sizes)) if recipe is RECIPE else None
    g = fp8.group_quantize(run.array(x), run.array(splits), recipe, columnwise=True, scales=None if scales is None else run.array(scales))
    want = reference.group_quantize(x, splits, recipe, columnwise=True, scales=scales)
    for name in ("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv", "offsets"):
        if getattr(want, name) is not None:
            testing.assert_bytes_equal(getattr(g, name), getattr(want, name))
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
