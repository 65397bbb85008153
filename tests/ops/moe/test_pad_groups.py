"""Groups of rows against Python's slices: padded, unpadded, in another order; sizes and orders that are wrong on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.moe.pad import sizes
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu, float32
from cupy_fp8.kernels import Variant, errors
from cupy_fp8.layouts import scale_shape
from cupy_fp8.ops.moe import pad
from cupy_fp8.results import Scaled

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
NEGATIVE, SUM, ORDER = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM, errors.Fact.ORDER))


def array(shape: tuple[int, ...], dtype: Any = float8_e4m3fn, seed: int = 0) -> np.ndarray:
    """No byte is 0, so that zeros show."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(1, 256, count, np.uint8).view(dtype).reshape(shape)


def chunks(x: np.ndarray, splits: Any) -> list[np.ndarray]:
    ends = np.cumsum([0, *splits])
    return [raw(x)[a:b] for a, b in pairwise(ends)]


def padded_by_slices(x: np.ndarray, splits: Any, align: int) -> np.ndarray:
    rows = len(x) + (align - 1) * min(len(splits), len(x))
    out, at = np.zeros((rows, *x.shape[1:]), raw(x).dtype), 0
    for chunk in chunks(x, splits):
        out[at : at + len(chunk)] = chunk
        at += -(-len(chunk) // align) * align
    return out.view(x.dtype)


def sorted_by_slices(x: np.ndarray, splits: Any, order: Any) -> np.ndarray:
    parts = chunks(x, splits)
    return np.concatenate([raw(x)[:0], *(parts[i] for i in order)]).view(x.dtype)


# ---- values ----
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 15, 16, 17, 31, 33, 37, 100, 7161])
def test_rows_of_any_length(columns, run):
    """Cut out of aligned memory wherever they begin, and put together at their ends."""
    splits = [3, 0, 5, 1]
    for lead in (0, 1, 4, 15):
        x = array((9, columns), np.uint8)
        data, _ = guarded(run, x.shape, x.dtype, lead)
        data[...] = run.array(x)
        for align in (1, 4):
            want = padded_by_slices(x, splits, align)
            y, intact = guarded(run, want.shape, x.dtype)
            fp8.pad_groups(data, run.array(np.array(splits)), align, out=y)
            testing.assert_bytes_equal(y, want)
            assert intact()


@pytest.mark.full
def test_a_row_for_every_byte(run):
    """Where rows are few their places are found with numbers of 32 bits, where they are many with numbers of 64."""
    for number in ((1 << 24) - 3, (1 << 24) - 1, (1 << 24) + 5):
        x = np.resize(array((251,), np.uint8), number)
        splits = [3, 1 << 23, 0, number - (1 << 23) - 10, 7]
        data, sizes = run.array(x), run.array(np.array(splits))
        testing.assert_bytes_equal(fp8.pad_groups(data, sizes, 16), padded_by_slices(x, splits, 16))
        order = [4, 1, 3, 2, 0]
        testing.assert_bytes_equal(fp8.sort_chunks(data, sizes, run.array(np.array(order))), sorted_by_slices(x, splits, order))


def test_many_groups_before_a_row(run):
    """Rounds of the scan that end before the rows that a block of threads looks for, and groups of any size among them."""
    rng = np.random.default_rng(3)
    splits = np.where(rng.random(700) < 0.3, 0, rng.integers(0, 40, 700))
    x = array((int(splits.sum()), 72), bfloat16)
    for align in (1, 16):
        want = padded_by_slices(x, splits, align)
        y = fp8.pad_groups(run.array(x), run.array(splits), align)
        testing.assert_bytes_equal(y, want)
        testing.assert_bytes_equal(fp8.unpad_groups(y, run.array(splits), align, rows=len(x)), x)


@pytest.mark.parametrize("align", [1, 2, 16, 32, 128])
@pytest.mark.parametrize("splits", [[5], [0, 3, 0, 0, 2], [0, 0], [], [128, 1, 0, 127], [1] * 300, [0] * 200 + [7] + [0] * 200,
                                    [16, 32, 16]], ids=lambda s: f"{len(s)}of{sum(s)}")
def test_padding_there_and_back(splits, align, run):
    x = array((sum(splits), 24), bfloat16)
    want = padded_by_slices(x, splits, align)
    for given_splits in (splits, run.array(np.array(splits, np.int32)), run.array(np.array(splits, np.int64))):
        y, intact = guarded(run, want.shape, x.dtype)
        assert fp8.pad_groups(run.array(x), given_splits, align, out=y) is y
        testing.assert_bytes_equal(y, want)
        assert intact()
        back, intact = guarded(run, x.shape, x.dtype)
        assert fp8.unpad_groups(y, given_splits, align, out=back) is back
        testing.assert_bytes_equal(back, x)
        assert intact()
        all_rows = fp8.unpad_groups(y, given_splits, align)
        assert all_rows.shape == want.shape
        testing.assert_bytes_equal(fp8.asnumpy(all_rows)[: len(x)], x)
        assert not raw(all_rows)[len(x) :].any()
        testing.assert_bytes_equal(fp8.unpad_groups(y, given_splits, align, rows=len(x)), x)


@pytest.mark.parametrize("splits", [[5], [0, 3, 0, 0, 2], [0, 0], [], [128, 1, 0, 127], list(range(40)), [1] * 1500])
def test_chunks_there_and_back(splits, run):
    order = np.random.default_rng(3).permutation(len(splits))
    x = array((sum(splits), 7, 5))
    want = sorted_by_slices(x, splits, order)
    for index in (np.int32, np.int64):
        out, intact = guarded(run, x.shape, x.dtype)
        given_splits, given_order = run.array(np.array(splits, np.int64)), run.array(order.astype(index))
        assert fp8.sort_chunks(run.array(x), given_splits, given_order, out=out) is out
        testing.assert_bytes_equal(out, want)
        assert intact()
        back = fp8.sort_chunks(out, [splits[i] for i in order], np.argsort(order).tolist())
        testing.assert_bytes_equal(back, x)


@pytest.mark.parametrize("dtype", [np.uint8, bool, np.float16, bfloat16, np.float32, np.int64, np.float64, np.complex64, float8_e4m3fn,
                                   float8_e8m0fnu], ids=str)
def test_any_dtype(dtype, run):
    x = array((20, 3), dtype) if dtype is not bool else np.ones((20, 3), bool)
    y = fp8.pad_groups(run.array(x), [7, 13], 16)
    assert (y.dtype, y.shape) == (x.dtype, (50, 3))
    testing.assert_bytes_equal(y, padded_by_slices(x, [7, 13], 16))


@needs_host
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=40), st.sampled_from([1, 2, 8, 16, 64]), st.integers(0, 70), st.integers(0, 15),
       st.integers(0, 15), st.sampled_from([np.uint8, bfloat16, np.float32]), st.integers(0, 2**32 - 1))
@example([5], 1, 0, 0, 1, np.uint8, 0)              # rows of no columns that go to an odd address
def test_any_call(splits, align, columns, lead, lead_out, dtype, seed):
    """Any sizes, row lengths and addresses."""
    itemsize, rng = np.dtype(dtype).itemsize, np.random.default_rng(seed)
    with testing.executor("host") as run:
        x, _ = guarded(run, (sum(splits), columns), np.dtype(dtype), lead // itemsize * itemsize)
        bits(x)[...] = bits(array(x.shape, dtype, seed))
        for want, call in ((padded_by_slices(x, splits, align), lambda out: fp8.pad_groups(x, splits, align, out=out)),
                           (sorted_by_slices(x, splits, order := rng.permutation(len(splits))),
                            lambda out: fp8.sort_chunks(x, splits, order, out=out))):
            out, intact = guarded(run, want.shape, x.dtype, lead_out // itemsize * itemsize)
            call(out)
            testing.assert_bytes_equal(out, want)
            assert intact()
        y = fp8.pad_groups(x, splits, align)
        back, intact = guarded(run, x.shape, x.dtype, lead_out // itemsize * itemsize)
        testing.assert_bytes_equal(fp8.unpad_groups(y, splits, align, out=back), x)
        assert intact()


def test_one_launch_each(run, monkeypatch):
    launches: list[int] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        launches.append(grid)
        launch(self, x, grid, *values)

    monkeypatch.setattr(Variant, "launch", noted)
    x, splits = run.array(array((5000, 64))), run.array(sizes(5000, 900))
    y = fp8.pad_groups(x, splits, 128)
    fp8.unpad_groups(y, splits, 128)
    fp8.sort_chunks(x, splits, run.array(np.arange(900)[::-1].copy()))
    for block in ((1, 32), None):
        fp8.pad_groups(run.array(quantised(5000, 64, block, float8_e8m0fnu)), splits, 128)
    assert len(launches) == (0 if run.name == "reference" else 5)


# ---- quantised rows ----
BLOCKS: tuple[tuple[tuple[int, int | None], Any, int], ...] = (
    ((1, 128), float32, 512), ((1, 32), float8_e8m0fnu, 200), ((1, None), float32, 64), ((1, 64), float32, 129))


def quantised(rows: int, columns: int, block: Any, dtype: Any, seed: int = 0) -> Scaled:
    """No byte of data and scales is 0."""
    data = array((rows, columns), seed=seed)
    if block is None:
        return Scaled(data, np.array([0.37], np.float32), data.shape)
    return Scaled(data, array(scale_shape(data.shape, block, "compact", False), dtype, seed + 1), data.shape, False, block, "compact")


def expect_scaled(actual: Any, like: Scaled, data: np.ndarray, scale_inv: np.ndarray) -> None:
    assert isinstance(actual, Scaled)
    assert (actual.shape, actual.transposed, actual.block, actual.scale_layout) == (data.shape, False, like.block, like.scale_layout)
    testing.assert_bytes_equal(actual.data, data)
    testing.assert_bytes_equal(actual.scale_inv, scale_inv)


@pytest.mark.parametrize(("block", "dtype", "columns"), BLOCKS)
@pytest.mark.parametrize("splits", [[5], [0, 3, 0, 0, 2], [], [128, 1, 0, 127], [1] * 300], ids=lambda s: f"{len(s)}of{sum(s)}")
def test_scales_move_with_their_rows(splits, block, dtype, columns, run):
    q, rows = quantised(sum(splits), columns, block, dtype), sum(splits)
    moved, order = run.array(q), np.random.default_rng(3).permutation(len(splits))
    padded = [padded_by_slices(a, splits, 16) for a in q]
    parts = [guarded(run, a.shape, a.dtype) for a in padded]
    y = Scaled(parts[0][0], parts[1][0], padded[0].shape, False, block, "compact")
    given_splits = run.array(np.array(splits, np.int64))
    assert fp8.pad_groups(moved, given_splits, 16, out=y) is y
    expect_scaled(y, q, *padded)
    expect_scaled(fp8.pad_groups(moved, splits, 16), q, *padded)
    assert all(intact() for _, intact in parts)
    expect_scaled(fp8.unpad_groups(y, given_splits, 16, rows=rows), q, *q)
    everything = fp8.unpad_groups(y, splits, 16, out=fp8.unpad_groups(y, splits, 16))
    for a, want in zip(everything, q, strict=True):
        testing.assert_bytes_equal(fp8.asnumpy(a)[:rows], want)
        assert not raw(a)[rows:].any()
    expect_scaled(fp8.sort_chunks(moved, given_splits, order.tolist()), q, *(sorted_by_slices(a, splits, order) for a in q))


def test_one_scale_for_all_rows_is_kept(run):
    q, other = quantised(9, 24, None, float32), quantised(9, 24, None, float32, seed=5)
    y = fp8.pad_groups(run.array(q), [4, 5], 8)
    expect_scaled(y, q, padded_by_slices(q.data, [4, 5], 8), q.scale_inv)
    other.scale_inv[0] = np.float32(-0.5)
    for a in y:
        cases.poison(a)
    assert fp8.pad_groups(run.array(other), [4, 5], 8, out=y) is y
    expect_scaled(y, other, padded_by_slices(other.data, [4, 5], 8), other.scale_inv)
    expect_scaled(fp8.unpad_groups(y, [4, 5], 8, rows=9), other, *other)
    expect_scaled(fp8.sort_chunks(run.array(q), [4, 5], [1, 0]), q, sorted_by_slices(q.data, [4, 5], [1, 0]), q.scale_inv)


def test_padding_before_and_after_quantising(run):
    """Rows have scales of their own: moved and quantised in either order they are the same, but for what zero rows get as scale."""
    x = reference.astype(np.random.default_rng(0).standard_normal((300, 256), np.float32), bfloat16)
    splits = [100, 0, 77, 123]
    for quantize in (lambda a: fp8.quantize_mx(a), lambda a: fp8.quantize_block(a, scale_layout="compact")):
        y = fp8.pad_groups(quantize(run.array(x)).rowwise, splits, 32)
        direct = quantize(fp8.pad_groups(run.array(x), splits, 32))
        testing.assert_bytes_equal(y.data, direct.data)
        used = padded_by_slices(np.ones((300, 1), np.uint8), splits, 32)[:, 0] == 1
        np.testing.assert_array_equal(raw(y.scale_inv)[used], raw(direct.scale_inv)[used])
        assert not raw(y.scale_inv)[~used].any()
        assert not fp8.asnumpy(y.dequantize())[~used].any()


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=40), st.sampled_from([1, 2, 16, 64]), st.integers(1, 200), st.sampled_from(BLOCKS),
       st.integers(0, 15), st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_any_scaled_call(splits, align, columns, form, lead, lead_scales, seed):
    """Any sizes, row lengths and addresses."""
    block, dtype, _ = form
    q = quantised(sum(splits), columns, block, dtype, seed)
    leads = lead, lead_scales // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
    with testing.executor("host") as run:
        parts = [guarded(run, a.shape, a.dtype, skipped) for a, skipped in zip(q, leads, strict=True)]
        for (part, _), a in zip(parts, q, strict=True):
            bits(part)[...] = bits(a)
        moved = Scaled(parts[0][0], parts[1][0], q.shape, False, block, "compact")
        y = fp8.pad_groups(moved, splits, align)
        expect_scaled(y, q, *(padded_by_slices(a, splits, align) for a in q))
        expect_scaled(fp8.unpad_groups(y, splits, align, rows=len(q.data)), q, *q)
        order = np.random.default_rng(seed).permutation(len(splits))
        expect_scaled(fp8.sort_chunks(moved, splits, order), q, *(sorted_by_slices(a, splits, order) for a in q))


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """NumPy arrays are looked at as little as those on a device."""
    for name in ("_check_sizes", "_check_padded_sizes", "_check_order"):
        monkeypatch.setattr(pad, name, lambda *_: None)
    return run


def noted(run: testing.Executor) -> list[str]:
    found = list(fp8.device_errors(clear=True))
    assert run.name != "reference" or found == []
    return found


HUGE = [2**63 - 1, 2**62, 2**62 + 5, -(2**63), 1 << 40]
#: sizes of 300 rows, what is found
WRONG: dict[str, tuple[list[int], list[str]]] = {
    "right": ([100, 0, 200], []), "short": ([100, 0, 150], [SUM]), "long": ([100, 0, 201], [SUM]), "nothing": ([0, 0, 0], [SUM]),
    "none": ([], [SUM]), "negative": ([100, -1, 200], [NEGATIVE]), "negative and short": ([-100, 100, 100], [NEGATIVE, SUM]),
    "past the end twice": ([299, 50, 50, 1], [SUM]), "all full": ([300] * 700, [SUM]), "late": ([0] * 600 + [299], [SUM]),
    "late negative": ([300] + [0] * 500 + [-5], [NEGATIVE]), "huge": (HUGE, [NEGATIVE, SUM]), "huge many": ([2**63 - 1] * 5000, [SUM]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("columns", [32, 5])
def test_wrong_sizes_are_harmless_and_noted(name, columns, unchecked):
    run, (given_sizes, found) = unchecked, WRONG[name]
    x, splits, align = array((300, columns)), np.array(given_sizes, np.int64), 16
    order = np.random.default_rng(0).permutation(len(splits))
    calls: tuple[tuple[Any, Any], ...] = (
        (reference.pad_groups(x, splits, align), lambda out: fp8.pad_groups(run.array(x), run.array(splits), align, out=out)),
        (reference.sort_chunks(x, splits, order),
         lambda out: fp8.sort_chunks(run.array(x), run.array(splits), run.array(order), out=out)))
    for want, call in calls:
        out, intact = guarded(run, want.shape)
        testing.assert_bytes_equal(call(out.view(x.dtype)), want)
        assert intact()
        assert noted(run) == (found if run.name != "reference" else [])
    q = quantised(300, 8 * columns, (1, 32), float8_e8m0fnu)
    wanted = reference.pad_groups(q, splits, align)
    parts = [guarded(run, a.shape, a.dtype) for a in wanted]
    fp8.pad_groups(run.array(q), run.array(splits), align, out=Scaled(parts[0][0], parts[1][0], wanted.shape, False, (1, 32), "compact"))
    for (part, intact), want in zip(parts, wanted, strict=True):
        testing.assert_bytes_equal(part, want)
        assert intact()
    assert noted(run) == (found if run.name != "reference" else [])


@pytest.mark.parametrize(("given_sizes", "rows", "found"), [
    ([100, 0, 60], 160, []), ([100, 0, 60], 200, []), ([100, 0, 60], 159, [SUM]), ([100, 0, 81], 300, [SUM]),
    ([100, -4, 60], 160, [NEGATIVE]), ([192], 192, []), ([193], 193, [SUM]), (HUGE, 250, [NEGATIVE, SUM]),
    ([2**63 - 1] * 3000, 100, [SUM]), ([], 10, []), ([0], 0, []),
])  # fmt: skip
def test_wrong_sizes_of_padded_groups(given_sizes, rows, found, unchecked):
    run, y, splits = unchecked, array((192, 48)), np.array(given_sizes, np.int64)
    out, intact = guarded(run, (rows, 48), y.dtype)
    fp8.unpad_groups(run.array(y), run.array(splits), 16, out=out)
    testing.assert_bytes_equal(out, reference.unpad_groups(y, splits, 16, rows=rows))
    assert intact()
    assert noted(run) == (found if run.name != "reference" else [])


def test_wrong_sizes_by_hand():
    """The harmless reading, in rows that can be seen."""
    x = np.arange(1, 6)
    assert reference.pad_groups(x, [1, 9], 2).tolist() == [1, 0, 2, 3, 4, 5, 0]
    assert reference.pad_groups(x, [-3, 2], 4).tolist() == [1, 2, *[0] * 9]
    assert reference.unpad_groups(x, [1, 2], 2, rows=4).tolist() == [1, 3, 4, 0]
    assert reference.unpad_groups(x, [1, 9], 2, rows=7).tolist() == [1, 3, 4, 5, 0, 0, 0]
    assert reference.sort_chunks(x, [2, 2, 1], [2, 7, 0]).tolist() == [5, 1, 2, 0, 0]
    assert reference.sort_chunks(x, [2, 2, 1], [1, 1, 0]).tolist() == [3, 4, 3, 4, 1]
    assert reference.sort_chunks(x, [2, 2, 9], [2, 0, 1]).tolist() == [5, 0, 0, 0, 0]


@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 3, 1, 0], [0, 1, 2, 4], [0, 1, 2, -1], [2**31 - 1, -(2**31), 2, 2], [1, 1, 1, 1]],
                         ids=str)
def test_wrong_orders_are_harmless_and_noted(order, wide, unchecked):
    run, x, splits = unchecked, array((60, 16)), np.array([10, 0, 30, 20])
    out, intact = guarded(run, x.shape, x.dtype)
    fp8.sort_chunks(run.array(x), run.array(splits), run.array(np.array(order, wide)), out=out)
    testing.assert_bytes_equal(out, reference.sort_chunks(x, splits, order))
    assert intact()
    assert noted(run) == ([] if order == [0, 1, 2, 3] or run.name == "reference" else [ORDER])


@pytest.mark.parametrize("twice", [None, (5, 69_990), (65_535, 65_536), (69_999, 0)])
def test_orders_of_many_chunks(twice, unchecked):
    """More than are looked at at a time, for indices that come twice."""
    run, number = unchecked, 70_000
    splits, order = np.zeros(number, np.int32), np.random.default_rng(0).permutation(number)
    splits[::7000] = 3
    if twice:
        order[twice[0]] = order[twice[1]]
    x = array((30, 16))
    out = fp8.sort_chunks(run.array(x), run.array(splits), run.array(order))
    testing.assert_bytes_equal(out, reference.sort_chunks(x, splits, order))
    assert noted(run) == ([ORDER] if twice and run.name != "reference" else [])


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,)])
def test_sizes_of_nothing_are_looked_at(shape, unchecked):
    run, x = unchecked, unchecked.array(array(shape))
    for splits, found in (([shape[0], 0], []), ([shape[0] + 1, 0], [SUM]), ([-1, shape[0]], [NEGATIVE])):
        given_splits = run.array(np.array(splits))
        assert fp8.pad_groups(x, given_splits, 16).shape == (shape[0] + 15 * min(2, shape[0]), *shape[1:])
        assert noted(run) == (found if run.name != "reference" else [])
        assert fp8.sort_chunks(x, given_splits, run.array(np.array([1, 0]))).shape == shape
        assert noted(run) == (found if run.name != "reference" else [])


# ---- what is refused ----
def refused(error: type[Exception], message: str, function: Callable[..., Any], *args: Any, out: np.ndarray | None = None,
            **kwargs: Any) -> None:
    if out is not None:
        cases.poison(out)
        kwargs["out"] = out
    with pytest.raises(error, match="^" + message):
        function(*args, **kwargs)
    if out is not None:
        assert (raw(out).view(np.uint8) == 0xAA).all(), "memory was written"


@pytest.fixture(params=["reference", "host"])
def numpy_run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        yield executor


def test_refused_arrays(numpy_run):
    for function, rest in ((fp8.pad_groups, (4,)), (fp8.unpad_groups, (4,)), (fp8.sort_chunks, ([0],))):
        name = "y" if function is fp8.unpad_groups else "x"
        wrong: Any
        for wrong in ([[1]], 3, None, fp8.quantize_tensor(np.ones((4, 4), np.float32), 1.0)):
            refused(TypeError, f"{name}: expected a numpy.ndarray or cupy.ndarray", function, wrong, [1], *rest, out=array((4, 4)))
        for dtype in (np.complex128, object, "S3"):
            refused(TypeError, f"{name}: expected a dtype of 1, 2, 4 or 8 bytes", function, np.zeros(4, dtype), [4], *rest)
        refused(ValueError, f"{name}: expected rows", function, np.array(1, np.float32), [1], *rest)


def test_refused_splits(numpy_run):
    x, out = array((9, 16)), array((27, 16))
    pad = fp8.pad_groups
    refused(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", pad, x, [14, -5], 4, out=out)
    for given_sizes in ([4, 4], [4, 6], [], [2**62] * 4):
        message = f"splits: expected sizes that add up to the 9 rows of x, got {sum(given_sizes)}"
        refused(ValueError, message, pad, x, given_sizes, 4, out=out)
        refused(ValueError, message, fp8.sort_chunks, x, np.array(given_sizes, np.int64),
                np.arange(len(given_sizes)), out=x.copy())
    refused(ValueError, r"splits: expected one dimension, got shape \(1, 2\)", pad, x, np.array([[4, 5]]), 4, out=out)
    refused(TypeError, "splits: expected dtype int32, int64, got float32", pad, x, np.zeros(2, np.float32), 4, out=out)
    refused(TypeError, "splits: expected integers", pad, x, [4.0, 5], 4, out=out)
    refused(TypeError, "splits: expected a numpy.ndarray or cupy.ndarray", pad, x, 9, 4, out=out)
    unpad = fp8.unpad_groups
    refused(ValueError, "splits: expected sizes that, each rounded up to 4, add up to at most the 9 rows of y, got 12", unpad, x, [4, 5], 4,
            rows=9, out=array((9, 16)))
    refused(ValueError, r"splits: expected sizes that add up to at most the 4 rows of the result, got 5; give rows= or an out=", unpad, x,
            [4, 1], 4, rows=4)
    refused(ValueError, r"splits: expected sizes of 0 or more", unpad, x, [-1], 4, out=array((9, 16)))
    refused(ValueError, "rows: expected 0 or more, got -1", unpad, x, [4], 4, rows=-1)
    refused(TypeError, "rows: expected an integer, got 4.0", unpad, x, [4], 4, rows=4.0)


def test_refused_alignments(numpy_run):
    x = array((9, 16))
    for align in (0, -1, 3, 24, 2**17):
        refused(ValueError, f"align: expected a power of two from 1 to 65536, got {align}", fp8.pad_groups, x, [4, 5], align)
        refused(ValueError, f"align: expected a power of two from 1 to 65536, got {align}", fp8.unpad_groups, x, [4, 5], align)
    for wrong in (16.0, None, "16"):
        refused(TypeError, "align: expected an integer, got", fp8.pad_groups, x, [4, 5], wrong)


def test_refused_orders(numpy_run):
    x, out = array((9, 16)), array((9, 16))
    for order, message in (([0, 0], "got 0 at 1, for a second time"), ([1, 2], "got 2 at 1$"), ([-1, 0], "got -1 at 0$")):
        refused(ValueError, f"order: expected a permutation of 0 to 1, {message}", fp8.sort_chunks, x, [4, 5], order, out=out)
        refused(ValueError, f"order: expected a permutation of 0 to 1, {message}", fp8.sort_chunks, x, [4, 5], np.array(order), out=out)
    refused(ValueError, "order: expected 2 indices, one for each of splits, got 3", fp8.sort_chunks, x, [4, 5], [0, 1, 2], out=out)
    refused(TypeError, "order: expected dtype int32, int64, got uint8", fp8.sort_chunks, x, [4, 5], np.zeros(2, np.uint8), out=out)
    refused(TypeError, "order: expected integers", fp8.sort_chunks, x, [4, 5], [0.0, 1], out=out)


def test_refused_out(numpy_run):
    x = array((9, 16))
    refused(ValueError, r"out: expected shape \(15, 16\), got \(9, 16\)", fp8.pad_groups, x, [4, 5], 4, out=array((9, 16)))
    refused(TypeError, "out: expected dtype float8_e4m3fn, got float32", fp8.pad_groups, x, [4, 5], 4, out=np.zeros((15, 16), np.float32))
    refused(ValueError, r"out: expected shape \(20, 16\), got \(20, 8\)", fp8.unpad_groups, x, [4], 4, out=array((20, 8)))
    with pytest.raises(TypeError, match=r"^out: expected an array of rows \(an earlier result\), got list"):
        fp8.unpad_groups(x, [4], 4, out=[])
    memory = array((40, 16))
    for call in (lambda: fp8.pad_groups(memory[:9], [4, 5], 4, out=memory[8:23]),
                 lambda: fp8.sort_chunks(memory[:9], [9], [0], out=memory[8:17])):
        before = raw(memory).copy()
        with pytest.raises(ValueError, match=r"^out: overlaps the input in memory"):
            call()
        np.testing.assert_array_equal(raw(memory), before)
    place = np.zeros(64, np.int64)
    place[:2] = 4, 5
    with pytest.raises(ValueError, match=r"^out: overlaps splits in memory"):
        fp8.sort_chunks(x, place[:2], [0, 1], out=place.view(x.dtype)[:144].reshape(9, 16))
    place[:2] = 1, 0
    with pytest.raises(ValueError, match=r"^out: overlaps order in memory"):
        fp8.sort_chunks(x, [4, 5], place[:2], out=place.view(x.dtype)[:144].reshape(9, 16))


def test_refused_scaled(numpy_run):
    x = np.ones((8, 256), np.float32)
    mx, both = fp8.quantize_mx(x, columnwise=True), fp8.quantize_block(x, columnwise=True)
    square = fp8.quantize_block(x, block=(128, 128), scale_layout="compact").rowwise
    tensor = fp8.cast_transpose(x, 1.0)
    assert mx.columnwise is not None
    assert both.rowwise is not None
    assert both.columnwise is not None
    assert tensor.columnwise is not None
    assert mx.rowwise is not None
    short = Scaled._of(mx.data, mx.scale_inv[:, :4], mx.shape, False, (1, 32), "compact")
    wrong: tuple[tuple[type[Exception], str, Any], ...] = (
        (ValueError, "expected row-wise data", mx.columnwise), (ValueError, "expected row-wise data", square),
        (ValueError, "expected data stored as they are, whose rows can move", tensor.columnwise),
        (ValueError, "expected data stored as they are, whose rows can move", both.columnwise),
        (ValueError, "expected compact scales, a row for each row of the data, got gemm_ready ones: use X.to_layout", both.rowwise),
        (ValueError, "expected compact scales, a row for each row of the data, got swizzled ones: use X.to_layout",
         mx.rowwise.to_layout("swizzled")))
    for function, rest in ((fp8.pad_groups, (4,)), (fp8.unpad_groups, (4,)), (fp8.sort_chunks, ([0],))):
        name = "y" if function is fp8.unpad_groups else "x"
        for error, message, q in wrong:
            refused(error, f"{name}: {message.replace('X', name)}", function, q, [8], *rest)
        refused(ValueError, rf"{name}.scale_inv: expected shape \(8, 8\)", function, short, [8], *rest)
        refused(ValueError, rf"{name}.data: expected rows of the logical shape \(9, 256\), got \(8, 256\)", function,
                Scaled._of(tensor.data, tensor.scale_inv, (9, 256)), [8], *rest)
        refused(ValueError, f"{name}.scale_inv: expected one element", function,
                Scaled._of(tensor.data, np.ones(2, np.float32), (8, 256)), [8], *rest)


def test_refused_out_of_scaled(numpy_run):
    q, tensor = quantised(9, 64, (1, 32), float8_e8m0fnu), quantised(9, 64, None, float32)
    out = fp8.pad_groups(q, [4, 5], 8)
    data, scale_inv = out
    form: Any = ((1, 32), "compact")
    shared, place = np.zeros(23 * 66, np.uint8), np.zeros(200, np.int64)
    place[:2] = 4, 5
    for error, message, wrong, given_q in (
            (TypeError, r"out: expected a Scaled \(an earlier result\), got ndarray", data, q),
            (TypeError, "out: expected a numpy.ndarray or cupy.ndarray", out, q.data),
            (ValueError, r"out: expected rows of shape \(23, 64\) quantised as", q, q),
            (ValueError, r"out: expected rows of shape \(23, 64\) quantised as", out, tensor),
            (ValueError, r"out: expected rows of shape \(23, 64\) quantised as", Scaled._of(data, scale_inv, data.shape, True, *form), q),
            (ValueError, r"out.scale_inv: expected shape \(23, 2\), got \(23, 1\)",
             Scaled._of(data, scale_inv[:, :1], data.shape, False, *form), q),
            (TypeError, "out.scale_inv: expected dtype float8_e8m0fnu",
             Scaled._of(data, scale_inv.view(np.uint8), data.shape, False, *form), q),
            (TypeError, "out.data: expected dtype float8_e4m3fn", Scaled._of(data.view(np.uint8), scale_inv, data.shape, False, *form), q),
            (ValueError, "out.data: overlaps out.scale_inv in memory",
             Scaled._of(shared[: 23 * 64].view(data.dtype).reshape(23, 64), shared[-46 - 1 : -1].view(scale_inv.dtype).reshape(23, 2),
                        (23, 64), False, *form), q),
            (ValueError, "out.scale_inv: overlaps scale_inv of the input in memory",
             Scaled._of(data, tensor.scale_inv, data.shape), tensor)):
        parts = (q.data, q.scale_inv, tensor.data, tensor.scale_inv)
        before = [raw(a).copy() for a in parts]
        with pytest.raises(error, match="^" + message):
            fp8.pad_groups(given_q, [4, 5], 8, out=wrong)
        for a, b in zip(parts, before, strict=True):
            np.testing.assert_array_equal(raw(a), b)
    within = place.view(np.uint8)[: 23 * 64].view(data.dtype).reshape(23, 64)
    with pytest.raises(ValueError, match=r"^out\.data: overlaps splits in memory"):
        fp8.pad_groups(q, place[:2], 8, out=Scaled(within, scale_inv, (23, 64), False, *form))
    cases.poison(data)
    cases.poison(scale_inv)
    with pytest.raises(ValueError, match=r"^splits: expected sizes that add up to the 9 rows of x, got 10"):
        fp8.pad_groups(q, [4, 6], 8, out=out)
    assert (raw(data) == 0xAA).all()
    assert (raw(scale_inv) == 0xAA).all()


# ---- on a GPU ----
@pytest.mark.gpu
def test_check_looks_at_the_device():
    cp = backend.cupy()
    x, right, wrong = fp8.asarray(array((9, 16)), like="cupy"), cp.asarray([4, 5]), cp.asarray([4, 6])
    with pytest.raises(ValueError, match=r"^splits: expected sizes that add up"):
        fp8.pad_groups(x, wrong, 16, check=True)
    with pytest.raises(ValueError, match=r"^splits: expected sizes that, each rounded up"):
        fp8.unpad_groups(x, wrong, 16, check=True)
    with pytest.raises(ValueError, match=r"^order: expected a permutation"):
        fp8.sort_chunks(x, right, cp.asarray([0, 0]), check=True)
    assert fp8.device_errors() == ()
    testing.assert_bytes_equal(fp8.pad_groups(x, right, 16, check=True), reference.pad_groups(fp8.asnumpy(x), [4, 5], 16))


@pytest.mark.gpu
def test_graph_replay_follows_sizes_and_order():
    """Nothing of them is on the host."""
    cp = backend.cupy()
    x, splits, order = fp8.asarray(array((500, 48)), like="cupy"), cp.asarray(sizes(500, 40)), cp.arange(40)
    y = fp8.pad_groups(x, splits, 32)
    back, placed = fp8.unpad_groups(y, splits, 32, rows=500), fp8.sort_chunks(x, splits, order)
    q = quantised(500, 48, (1, 32), float8_e8m0fnu)
    on_device = Scaled(fp8.asarray(q.data, like="cupy"), fp8.asarray(q.scale_inv, like="cupy"), q.shape, False, q.block, q.scale_layout)
    padded = fp8.pad_groups(on_device, splits, 32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        fp8.pad_groups(x, splits, 32, out=y)
        fp8.unpad_groups(y, splits, 32, out=back)
        fp8.sort_chunks(x, splits, order, out=placed)
        fp8.pad_groups(on_device, splits, 32, out=padded)
        with pytest.raises(ValueError, match=r"^out: needed while a CUDA graph is captured"):
            fp8.pad_groups(x, splits, 32)
        with pytest.raises(ValueError, match=r"^order: a list would have to be copied"):
            fp8.sort_chunks(x, splits, list(range(40)), out=placed)
        graph = stream.end_capture()
        for seed in range(4):
            host, to, data = sizes(500, 40, seed=seed), np.random.default_rng(seed).permutation(40), array((500, 48), seed=seed)
            splits.set(host)
            order.set(to)
            bits(x).set(bits(data))
            for out in (y, back, placed, *padded):
                cases.poison(out)
            graph.launch(stream)
            stream.synchronize()
            testing.assert_bytes_equal(y, padded_by_slices(data, host, 32))
            testing.assert_bytes_equal(back, data)
            testing.assert_bytes_equal(placed, sorted_by_slices(data, host, to))
            expect_scaled(padded, q, *(padded_by_slices(a, host, 32) for a in q))
    assert fp8.device_errors() == ()


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("columns", [65536, 65521])
def test_more_than_two_to_the_31_bytes(columns):
    cp = backend.cupy()
    x = cp.random.randint(1, 256, (33_000, columns), np.uint8)
    splits = [1, 32_768, 0, 231]
    y = fp8.pad_groups(x, splits, 16)
    assert bool((y[16:32_784] == x[1:32_769]).all())
    assert bool((y[32_784:33_015] == x[32_769:]).all())
    assert int((y != 0).sum()) == x.size
    assert bool((fp8.unpad_groups(y, splits, 16, rows=33_000) == x).all())
    placed = fp8.sort_chunks(x, splits, [3, 2, 1, 0])
    assert bool((placed[:231] == x[32_769:]).all())
    assert bool((placed[231:32_999] == x[1:32_769]).all())
    assert bool((placed[32_999] == x[0]).all())


@pytest.mark.gpu
def test_kinds_are_not_mixed():
    cp, x = backend.cupy(), array((9, 16))
    on_device = fp8.asarray(x, like="cupy")
    with pytest.raises(TypeError, match=r"^splits: a numpy array among cupy arrays"):
        fp8.pad_groups(on_device, np.array([4, 5]), 16)
    with pytest.raises(TypeError, match=r"^order: a numpy array among cupy arrays"):
        fp8.sort_chunks(on_device, cp.asarray([4, 5]), np.array([0, 1]))


def test_float32_of_one_column_is_moved_in_words(numpy_run):
    """Probabilities of tokens: rows of four bytes."""
    x = array((3000, 1), float32)
    testing.assert_bytes_equal(fp8.pad_groups(x, sizes(3000, 8), 16), padded_by_slices(x, sizes(3000, 8), 16))
    with kernels.forced_executor("reference"):
        testing.assert_bytes_equal(fp8.unpad_groups(fp8.pad_groups(x, [1000, 2000], 16), [1000, 2000], 16, rows=3000), x)
