"""Groups of rows against Python's slices: padded, unpadded, reordered; wrong sizes and orders on the
device."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from group_arrays import most_rows
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from moe_arrays import array, assert_equal, expect, noted, on_the_cpu
from scale_arrays import guarded, raw
from tiers import needs_host
from trees import leaves, map_arrays

import cupy_fp8 as fp8
from cupy_fp8 import cases, kernels, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.groups import sizes
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e8m0fnu, float32
from cupy_fp8.kernels import errors
from cupy_fp8.layouts import scale_shape
from cupy_fp8.ops.moe import pad
from cupy_fp8.results import Scaled

_FACTS = errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM, errors.Fact.ORDER
NEGATIVE, SUM, ORDER = (errors.MESSAGES[fact] for fact in _FACTS)


def fp8_array(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return array(shape, float8_e4m3fn, seed)


def chunks(x: np.ndarray, splits: Any) -> list[np.ndarray]:
    return [raw(x)[a:b] for a, b in pairwise(np.cumsum([0, *splits]))]


def of_parts(function: Any, x: Any, *how: Any) -> Any:
    """Return function(array, …) for an array, or for a Scaled's data and scales."""
    if not isinstance(x, Scaled):
        return function(x, *how)
    data = function(x.data, *how)
    scale_inv = x.scale_inv if x.block is None else function(x.scale_inv, *how)
    return Scaled._of(data, scale_inv, data.shape, False, x.block, x.scale_layout)


def padded_by_slices(x: Any, splits: Any, align: int) -> Any:
    def padded(a: np.ndarray) -> np.ndarray:
        rows = most_rows(len(a), len(splits), align)
        out, at = np.zeros((rows, *a.shape[1:]), raw(a).dtype), 0
        for chunk in chunks(a, splits):
            out[at:at + len(chunk)] = chunk
            at += -(-len(chunk) // align) * align
        return out.view(a.dtype)

    return of_parts(padded, x)


def sorted_by_slices(x: Any, splits: Any, order: Any) -> Any:
    def placed(a: np.ndarray) -> np.ndarray:
        parts = chunks(a, splits)
        return np.concatenate([raw(a)[:0], *(parts[i] for i in order)]).view(a.dtype)

    return of_parts(placed, x)


def expect_all(run: testing.Executor, x: Any, splits: Any, align: int, order: Any, lead: int = 0) -> None:
    """Check pad_groups, unpad_groups and sort_chunks of x, divided into these groups. splits, order: as ops
    take them."""
    host, host_order = (a if isinstance(a, list) else fp8.asnumpy(a).tolist() for a in (splits, order))
    given_x, leads = run.array(x), (lead,)
    y = expect(run, padded_by_slices(x, host, align), fp8.pad_groups, given_x, splits, align=align,
               leads=leads)
    expect(run, x, fp8.unpad_groups, y, splits, align=align, rows=x.shape[0], leads=leads)
    expect(run, sorted_by_slices(x, host, host_order), fp8.sort_chunks, given_x, splits, order, leads=leads)


# ---- values ----
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 15, 16, 17, 31, 33, 37, 100, 7161])
def test_rows_of_any_length(columns, run):
    """Loaded in aligned words wherever they begin, and joined at their ends."""
    splits, x = [3, 0, 5, 1], array((9, columns), np.uint8)
    for lead in (0, 1, 4, 15):
        data, _ = guarded(run, x.shape, x.dtype, lead)
        data[...] = run.array(x)
        for align in (1, 4):
            out, intact = guarded(run, (most_rows(9, 4, align), columns), x.dtype, lead)
            fp8.pad_groups(data, run.array(np.array(splits)), align=align, out=out)
            testing.assert_bytes_equal(out, padded_by_slices(x, splits, align))
            assert intact()


@pytest.mark.full
def test_a_row_for_every_byte(run):
    """Positions are computed with 32-bit numbers if there are few rows, and with 64-bit numbers otherwise."""
    for number in ((1 << 24) - 3, (1 << 24) - 1, (1 << 24) + 5):
        x = np.resize(array((251,), np.uint8), number)
        splits, order = [3, 1 << 23, 0, number - (1 << 23) - 10, 7], [4, 1, 3, 2, 0]
        data, given_splits = run.array(x), run.array(np.array(splits))
        assert_equal(fp8.pad_groups(data, given_splits, align=16), padded_by_slices(x, splits, 16))
        assert_equal(fp8.sort_chunks(data, given_splits, run.array(np.array(order))),
                     sorted_by_slices(x, splits, order))


def test_many_groups_before_a_row(run):
    """Rounds of the scan that end before the rows that a block searches, and groups of any size among
    them."""
    rng = np.random.default_rng(3)
    splits = np.where(rng.random(700) < 0.3, 0, rng.integers(0, 40, 700))
    x = array((int(splits.sum()), 72), bfloat16)
    for align in (1, 16):
        y = fp8.pad_groups(run.array(x), run.array(splits), align=align)
        assert_equal(y, padded_by_slices(x, splits, align))
        assert_equal(fp8.unpad_groups(y, run.array(splits), align=align, rows=len(x)), x)


SPLITS: list[list[int]] = [[5], [0, 3, 0, 0, 2], [0, 0], [], [128, 1, 0, 127], [1] * 300,
                           [0] * 200 + [7] + [0] * 200, [16, 32, 16], list(range(40))]


@pytest.mark.parametrize("align", [1, 2, 16, 32, 128])
@pytest.mark.parametrize("splits", SPLITS, ids=lambda s: f"{len(s)}of{sum(s)}")
def test_there_and_back(splits, align, run):
    x, order = array((sum(splits), 24), bfloat16), np.random.default_rng(3).permutation(len(splits))
    for dtype in (np.int32, np.int64, list):
        given_splits: Any = splits if dtype is list else run.array(np.array(splits, dtype))
        expect_all(run, x, given_splits, align, order.tolist() if dtype is list
                   else run.array(order.astype(dtype)))
    y = fp8.pad_groups(run.array(x), splits, align=align)
    everything = fp8.unpad_groups(y, splits, align=align)  # by default there are as many rows as y has
    assert everything.shape == y.shape
    assert_equal(fp8.asnumpy(everything)[:len(x)], x)
    assert not raw(everything)[len(x):].any()
    sorted_rows = fp8.sort_chunks(run.array(x), splits, order.tolist())
    assert_equal(fp8.sort_chunks(sorted_rows, [splits[i] for i in order], np.argsort(order).tolist()), x)


def test_more_chunks_than_a_window(run):
    order = np.random.default_rng(3).permutation(1500)
    x = fp8_array((1500, 7, 5))
    got = fp8.sort_chunks(run.array(x), run.array(np.ones(1500, np.int64)), run.array(order))
    assert_equal(got, sorted_by_slices(x, [1] * 1500, order))


@pytest.mark.parametrize("dtype", [np.uint8, bool, np.float16, bfloat16, np.float32, np.int64, np.float64,
                                   np.complex64, float8_e4m3fn, float8_e8m0fnu], ids=str)
def test_any_dtype(dtype, run):
    x = array((20, 3), dtype)
    y = fp8.pad_groups(run.array(x), [7, 13], align=16)
    assert (y.dtype, y.shape) == (x.dtype, (48, 3))
    assert_equal(y, padded_by_slices(x, [7, 13], 16))


@on_the_cpu
def test_float32_of_one_column_is_moved_in_words(run):
    """Probabilities of tokens: rows of four bytes."""
    x, splits = array((3000, 1), float32), sizes(3000, 8)
    y = fp8.pad_groups(x, splits, align=16)
    assert_equal(y, padded_by_slices(x, splits, 16))
    with kernels.forced_executor("reference"):
        assert_equal(fp8.unpad_groups(y, splits, align=16, rows=3000), x)


def test_one_launch_each(run, launched):
    x, splits = run.array(fp8_array((5000, 64))), run.array(sizes(5000, 900))
    y = fp8.pad_groups(x, splits, align=128)
    fp8.unpad_groups(y, splits, align=128)
    fp8.sort_chunks(x, splits, run.array(np.arange(900)[::-1].copy()))
    for block in ((1, 32), None):
        fp8.pad_groups(run.array(quantised(5000, 64, block, float8_e8m0fnu)), splits, align=128)
    assert launched == ([] if run.name == "reference" else ["move_groups"] * 5)


# ---- quantised rows ----
BLOCKS: tuple[tuple[tuple[int, int | None] | None, Any, int], ...] = (
    ((1, 128), float32, 512), ((1, 32), float8_e8m0fnu, 200), ((1, None), float32, 64),
    ((1, 64), float32, 129), (None, float32, 24))


def quantised(rows: int, columns: int, block: Any, dtype: Any, seed: int = 0) -> Scaled:
    """Return data and scales without a byte of 0."""
    data = fp8_array((rows, columns), seed)
    if block is None:
        return Scaled(data, np.array([0.37 + seed], np.float32), data.shape)
    scale_inv = array(scale_shape(data.shape, block, "compact", False), dtype, seed + 1)
    return Scaled(data, scale_inv, data.shape, False, block, "compact")


@pytest.mark.parametrize(("block", "dtype", "columns"), BLOCKS)
@pytest.mark.parametrize("splits", [[5], [0, 3, 0, 0, 2], [], [128, 1, 0, 127], [1] * 300],
                         ids=lambda s: f"{len(s)}of{sum(s)}")
def test_scales_move_with_their_rows(splits, block, dtype, columns, run):
    q, rows = quantised(sum(splits), columns, block, dtype), sum(splits)
    order = np.random.default_rng(3).permutation(len(splits)).tolist()
    expect_all(run, q, run.array(np.array(splits, np.int64)), 16, order)
    y = fp8.pad_groups(run.array(q), splits, align=16)
    assert (y.shape, y.transposed, y.block, y.scale_layout) == (y.data.shape, False, block, q.scale_layout)
    everything = fp8.unpad_groups(y, splits, align=16, out=fp8.unpad_groups(y, splits, align=16))
    for a, want in zip(everything, q, strict=True) if block else ((everything.data, q.data),):
        assert_equal(fp8.asnumpy(a)[:rows], want)
        assert not raw(a)[rows:].any()


@pytest.mark.parametrize("layout", ["gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"])
def test_scales_in_any_layout(layout, run):
    """The default of quantisers moves without conversion; compact scales are returned, whatever the input
    layout. New scales at the same place are read again."""
    splits, order, recipe = run.array(np.array([5, 0, 16, 19])), [2, 0, 3, 1], fp8.BlockScaling()
    x = np.random.default_rng(4).standard_normal((40, 260), np.float32)
    q = fp8.quantize_mx(run.array(x)) if layout == "swizzled" else recipe.quantize(run.array(x))
    q = q.to_layout(layout)
    calls: list[Any] = [functools.partial(fp8.pad_groups, splits=splits, align=8),
                        functools.partial(fp8.unpad_groups, splits=run.array(np.array([4, 9, 3])), align=8),
                        functools.partial(fp8.sort_chunks, splits=splits, order=order)]
    for call in calls:
        out = call(q.to_layout("compact").rowwise)
        for given_q in (q, q.rowwise, q):
            assert_equal(call(given_q), out)
            cases.poison(out.data)
            assert call(given_q, out=out) is out
            assert_equal(call(given_q), out)
    bits(q.scale_inv)[...] = bits(q.scale_inv)[::-1].copy()
    for call in calls:
        assert_equal(call(q), call(q.to_layout("compact")))


@needs_host
@settings(max_examples=180, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=40), st.sampled_from([1, 2, 8, 16, 64]), st.integers(0, 200),
       st.lists(st.integers(0, 15), min_size=2, max_size=2), st.integers(0, 15),
       st.sampled_from([*(np.uint8, bfloat16, np.float32) * 3, *BLOCKS]), st.integers(0, 2**32 - 1))
@example([5], 1, 0, [0, 0], 1, np.uint8, 0)         # rows without columns, stored to an odd address
def test_any_call(splits, align, columns, leads, lead_out, form, seed):
    """Any sizes, row lengths and addresses."""
    host = (quantised(sum(splits), max(columns, 1), form[0], form[1], seed % 99) if isinstance(form, tuple)
            else array((sum(splits), columns), form, seed))
    leads_left = iter(leads)
    with testing.executor("host") as run:
        x = map_arrays(host, lambda a: guarded(run, a.shape, a.dtype,
                                               next(leads_left) // a.itemsize * a.itemsize)[0])
        for mine, a in zip(leaves(x), leaves(host), strict=True):
            bits(mine)[...] = bits(a)
        expect_all(run, x, splits, align, np.random.default_rng(seed).permutation(len(splits)), lead_out)


# ---- facts on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """Values of NumPy arrays are not checked, like those on a device."""
    for name in ("_check_sizes", "_check_padded_sizes", "_check_order"):
        monkeypatch.setattr(pad, name, lambda *_: None)
    return run


def test_wrong_sizes_by_hand():
    """The harmless interpretation, in rows that can be inspected."""
    x = np.arange(1, 6)
    assert reference.pad_groups(x, [1, 9], align=2).tolist() == [1, 0, 2, 3, 4, 5]
    assert reference.pad_groups(x, [-3, 2], align=4).tolist() == [1, 2, *[0] * 6]
    assert reference.unpad_groups(x, [1, 2], align=2, rows=4).tolist() == [1, 3, 4, 0]
    assert reference.unpad_groups(x, [1, 9], align=2, rows=7).tolist() == [1, 3, 4, 5, 0, 0, 0]
    assert reference.sort_chunks(x, [2, 2, 1], [2, 7, 0]).tolist() == [5, 1, 2, 0, 0]
    assert reference.sort_chunks(x, [2, 2, 1], [1, 1, 0]).tolist() == [3, 4, 3, 4, 1]
    assert reference.sort_chunks(x, [2, 2, 9], [2, 0, 1]).tolist() == [5, 0, 0, 0, 0]


@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 3, 1, 0], [0, 1, 2, 4], [0, 1, 2, -1],
                                   [2**31 - 1, -(2**31), 2, 2], [1, 1, 1, 1]], ids=str)
def test_wrong_orders_are_harmless_and_noted(order, wide, unchecked):
    run, x, splits = unchecked, fp8_array((60, 16)), np.array([10, 0, 30, 20])
    want, there = reference.sort_chunks(x, splits, order), run.array(np.array(order, wide))
    expect(run, want, fp8.sort_chunks, run.array(x), run.array(splits), there)
    noted(run, [] if order == [0, 1, 2, 3] else [ORDER])


@pytest.mark.parametrize("twice", [None, (5, 69_990), (65_535, 65_536), (69_999, 0), "a far one"])
def test_orders_of_many_chunks(twice, unchecked):
    """More than are checked at a time, for indices that occur twice: at two positions, or one that is checked
    last."""
    run, number = unchecked, 70_000
    splits, order = np.zeros(number, np.int32), np.random.default_rng(0).permutation(number)
    splits[::7000] = 3
    if twice == "a far one":
        twice = 0, int(np.argmax(order[1:] >= 1 << 16)) + 1
    if twice:
        order[twice[0]] = order[twice[1]]
    x = fp8_array((30, 16))
    assert_equal(fp8.sort_chunks(run.array(x), run.array(splits), run.array(order)),
                 reference.sort_chunks(x, splits, order))
    noted(run, [ORDER] if twice else [])


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,)])
def test_sizes_of_nothing_are_looked_at(shape, unchecked):
    run, x = unchecked, unchecked.array(fp8_array(shape))
    for splits, found in (([shape[0], 0], []), ([shape[0] + 1, 0], [SUM]), ([-1, shape[0]], [NEGATIVE])):
        given_splits = run.array(np.array(splits))
        assert fp8.pad_groups(x, given_splits, align=16).shape == (most_rows(shape[0], 2, 16), *shape[1:])
        noted(run, found)
        assert fp8.sort_chunks(x, given_splits, run.array(np.array([1, 0]))).shape == shape
        noted(run, found)
    nothing = run.array(np.zeros(0, np.int64))
    assert fp8.pad_groups(x, nothing, align=16).shape == (0, *shape[1:])
    noted(run, [SUM] if shape[0] else [])


# ---- many rows ----
@needs_host
@pytest.mark.full
def test_groups_of_more_rows_than_sums_of_32_bits_are_for():
    """Rounds of 32 groups are then summed in 64 bits."""
    rows, number = (1 << 24) + 5, 70
    x = np.resize(np.arange(251, dtype=np.uint8), (rows, 1)).view(float8_e4m3fn)
    splits = np.full(number, rows // number)
    splits[-1] += rows % number
    with testing.executor("host"):
        assert_equal(fp8.pad_groups(x, splits, align=16), reference.pad_groups(x, splits, align=16))
