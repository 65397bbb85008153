"""Offsets of groups against a loop over Python's integers: any number of outputs, their memory, and wrong
sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import note_launches
from moe_arrays import assert_equal, expect, noted
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import address
from cupy_fp8.cases.moe.offsets import TYPICAL, sizes
from cupy_fp8.kernels import errors
from cupy_fp8.ops.moe import offsets

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
MAX32, MAX64 = 2**31 - 1, 2**63 - 1
NEGATIVE, OVERFLOW = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE,
                                                         errors.Fact.OFFSET_OVERFLOW))
#: sizes that fill one tile, a few, or so many that their totals are a separate launch
NUMBERS = (17, 1000, 3000, 8193)


def by_loop(splits: Any, stride: int = 1, lead: bool = True, dtype: Any = INT64) -> np.ndarray:
    """Follow docs/numerics.md, size by size."""
    total, values = 0, [0] if lead else []
    for size in splits:
        total += max(int(size), 0)
        values.append(min(total * stride, int(np.iinfo(dtype).max)))
    return np.array(values, dtype)


def expect_offsets(run: testing.Executor, host: Any, wanted: list[np.ndarray], **options: Any) -> None:
    splits = run.array(np.asarray(host))
    expect(run, wanted, fp8.splits_to_offsets, splits, **options)


# ---- values ----
def test_by_hand(run):
    splits = run.array(np.array([3, 0, 5], np.int32))
    got = fp8.splits_to_offsets(splits, strides=(1, 1, 7), include_leading_zero=(False, True, True),
                                dtypes=("int32", "int64", "int32"))
    assert type(got) is list
    assert_equal(got, [np.array([3, 3, 8], INT32), np.array([0, 3, 3, 8], INT64),
                       np.array([0, 21, 21, 56], INT32)])
    assert_equal(fp8.splits_to_offsets(splits), [np.array([0, 3, 3, 8], INT64)])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
def test_by_loop(dtype, number, run):
    for values in ("few", "around 2**26", "most"):
        host = sizes(number, values, dtype, number)
        strides = (1, 0) if values == "most" else (1, 0, 13, 4096)
        for lead in (False, True):
            got = fp8.splits_to_offsets(run.array(host), strides=strides, include_leading_zero=lead)
            assert_equal(got, [by_loop(host, stride, lead) for stride in strides])


@needs_host
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2600), st.sampled_from([INT32, INT64]), st.integers(0, 40), st.integers(0, 2**32 - 1),
       st.lists(st.tuples(st.integers(0, 2**20), st.booleans(), st.sampled_from([INT32, INT64])),
                max_size=20),
       st.booleans())
def test_any_call(number, dtype, log2, seed, options, bulk):
    rng = np.random.default_rng(seed)
    largest = min(2**log2, np.iinfo(dtype).max, MAX64 // (max(number, 1) << 20))
    host = rng.integers(0, largest, number, endpoint=True).astype(dtype)
    total = int(host.sum(dtype=np.int64))
    options = [(stride if t == INT64 or total * stride <= MAX32 else 0, lead, t) for stride, lead,
               t in options]
    strides, leads, dtypes = zip(*options, strict=True) if options else ((), (), ())
    with testing.executor("host"):
        got = fp8.splits_to_offsets(host, strides=strides, include_leading_zero=leads, dtypes=dtypes,
                                    bulk_allocate=bulk)
    assert_equal(got, [by_loop(host, stride, lead, t) for stride, lead, t in options])


@pytest.mark.full
def test_a_million(run, launched):
    host = sizes(1_000_000, "few", INT64)
    wanted = reference.splits_to_offsets(host, **TYPICAL)
    np.testing.assert_array_equal(wanted[2], np.concatenate([[0], np.cumsum(host, dtype=np.int64) * 7168]))
    expect_offsets(run, host, wanted, **TYPICAL)
    assert len(launched) == (0 if run.name == "reference" else 2 * 2)


def test_the_largest_offsets_fit(run):
    """The last value that a dtype holds is not an error."""
    for number in NUMBERS:
        host = np.zeros(number, np.int64)
        host[[0, number // 2, number - 1]] = 2**62, 2**62 - 8, 7
        got = fp8.splits_to_offsets(run.array(host), strides=(1, 0), check=True, dtypes=("int64", "int32"))
        testing.assert_bytes_equal(got[0], by_loop(host))
        assert int(got[0][-1]) == MAX64
        host[[0, number // 2, number - 1]] = 2**29, 2**29 - 1, 0
        got = fp8.splits_to_offsets(run.array(host), strides=(2,), check=True, dtypes="int32")
        assert int(got[0][-1]) == MAX32 - 1
    got = fp8.splits_to_offsets(run.array(np.array([1, 0])), strides=(MAX64,))
    assert_equal(got, [np.array([0, MAX64, MAX64])])
    assert fp8.device_errors() == ()


def test_no_groups(run):
    """Only the leading zeros are written."""
    leads, dtypes = TYPICAL["include_leading_zero"], TYPICAL["dtypes"]
    wanted = [np.zeros(int(lead), dtype) for lead, dtype in zip(leads, dtypes, strict=True)]
    expect_offsets(run, np.zeros(0, np.int32), wanted, **TYPICAL)
    splits: Any
    for splits in (run.array(np.zeros(0, np.int32)), []):
        assert [a.shape for a in fp8.splits_to_offsets(splits, include_leading_zero=False)] == [(0,)]


def test_no_outputs(run, launched):
    for number in (2, 9000):
        splits = run.array(np.ones(number, np.int64))
        assert fp8.splits_to_offsets(splits, strides=(), bulk_allocate=number == 2) == []
    nothing: list[Any] = []
    assert fp8.splits_to_offsets(splits, strides=(), out=nothing, bulk_allocate=True) is nothing
    assert fp8.splits_to_offsets(splits, strides=(), dtypes=(), include_leading_zero=[]) == []
    assert launched == []


@needs_host
@pytest.mark.parametrize(("number", "outputs", "grids"), [
    (0, 1, [1]), (1, 5, [5]), (1024, 5, [5]), (1025, 5, [10]), (8192, 2, [16]), (8193, 5, [9, 9]),
    (64, 16, [16]), (64, 17, [16, 1]), (9000, 40, [9, 9, 9, 9])])
def test_as_few_launches_as_needed(number, outputs, grids, monkeypatch):
    launched = note_launches(monkeypatch)
    with testing.executor("host"):
        got = fp8.splits_to_offsets(np.ones(number, np.int64), strides=range(outputs))
    assert [one.grid for one in launched] == grids
    assert_equal(got, [np.arange(number + 1) * stride for stride in range(outputs)])


# ---- options and kinds ----
def test_options_for_all_or_for_each(run):
    splits = run.array(np.array([2, 3], np.int64))
    want = [by_loop([2, 3], stride, True, INT32) for stride in (1, 5)]
    options: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("include_leading_zero", (True, (True, True), [True, np.True_], np.array([True, True]),
                                  (np.array(True), True))),
        ("dtypes", (np.int32, "int32", INT32, ("i4", np.int32), [INT32, INT32])),
        ("strides", ((1, 5), [1, 5], np.array([1, 5]), (np.int8(1), np.uint64(5)))))
    for name, values in options:
        for value in values:
            given_options = {"strides": (1, 5), "include_leading_zero": True, "dtypes": "int32", name: value}
            assert_equal(fp8.splits_to_offsets(splits, **given_options), want)


@pytest.mark.parametrize("kind", [tuple, list, np.array])
@pytest.mark.parametrize("leads", [True, (True, False), [True, False]], ids=str)
def test_equal_options_are_one_object(leads, kind):
    """Calls are remembered by this object, so another one would not be recognised."""
    def found():
        return offsets._options(kind((1, 3)), leads, kind(("int32", "int64")))

    assert found() is found()
    assert found() is offsets._options((1, 3), leads, ("int32", "int64"))


def test_options_that_the_caller_changes(run):
    """Lists and arrays belong to the caller: a later call uses their present values."""
    splits = run.array(np.array([2, 3], np.int64))
    strides, outputs = np.array([1, 5]), fp8.splits_to_offsets(splits, strides=(1, 5))
    for stride in (5, 6, 7):
        strides[1] = stride
        option: Any
        for option in (strides, list(strides)):
            fp8.splits_to_offsets(splits, strides=option, out=outputs)
            assert_equal(outputs, [by_loop([2, 3]), by_loop([2, 3], stride)])


def test_lists_of_sizes(run):
    for given_splits in ([3, 0, 5], (np.int8(3), np.int64(0), 5)):
        want = reference.splits_to_offsets([3, 0, 5], **TYPICAL)
        made = fp8.splits_to_offsets(given_splits, **TYPICAL)
        assert_equal(made, want)
        assert isinstance(made[0], fp8.xp.ndarray)
        # the outputs are of run's kind, whatever fp8.xp is
        outputs = fp8.splits_to_offsets(run.array(np.array([1, 1, 1])), **TYPICAL)
        assert fp8.splits_to_offsets(given_splits, **TYPICAL, out=outputs) is outputs
        assert_equal(outputs, want)


# ---- memory ----
@pytest.mark.parametrize("number", [0, 1, 3, 64, 1000, 9000])
def test_one_buffer(number, run):
    host = sizes(number, "few", INT64)
    want = reference.splits_to_offsets(host, **TYPICAL)
    got = fp8.splits_to_offsets(run.array(host), **TYPICAL, bulk_allocate=True)
    assert_equal(got, want)
    base: Any = got[0].base
    assert all(a.base is base and base is not None for a in got)
    ends = 0
    for a in got:
        assert a.flags.c_contiguous
        assert address(a) % 16 == 0
        assert a.size == 0 or address(a) >= ends
        ends = max(ends, address(a) + a.nbytes)
    assert ends <= address(base) + base.nbytes
    for a in got:
        cases.poison(a)
    # the option concerns allocation
    assert fp8.splits_to_offsets(run.array(host), **TYPICAL, bulk_allocate=True, out=got) is got
    assert_equal(got, want)
    apart = fp8.splits_to_offsets(run.array(host), **TYPICAL)
    assert len({id(a if a.base is None else a.base) for a in apart}) == 5


# ---- sizes on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """Values of NumPy arrays are not checked, like those on a device."""
    monkeypatch.setattr(offsets, "_check_sizes", lambda *_: None)
    return run


#: Each row: sizes by place (a fraction of all groups, in 16ths), a stride, and the errors for outputs of
#: int32 or int64.
HUGE: dict[str, tuple[list[tuple[int, int]], int, list[str]]] = {
    "int32 reached": ([(0, 2**30), (9, 2**30 - 1)], 1, []),
    "int32 passed by 1": ([(0, 2**30), (9, 2**30 - 1), (16, 1)], 1, [OVERFLOW]),
    "int32 passed at once": ([(0, MAX32), (1, MAX32), (2, -5)], 1, [NEGATIVE, OVERFLOW]),
    "sum reached": ([(0, 2**62), (8, 2**62 - 1)], 1, []),
    "sum passed by 1": ([(0, 2**62), (8, 2**62)], 1, [OVERFLOW]),
    "sum passed by far": ([(i, MAX64) for i in range(0, 17, 2)], 1, [OVERFLOW]),
    "twice two to the 63": ([(0, 2**62), (3, 2**62), (7, 2**62), (11, 2**62)], 1, [OVERFLOW]),
    "and of stride 0": ([(i, MAX64) for i in range(0, 17, 2)], 0, []),
    "product passed": ([(0, 2**40), (16, 1)], 2**23, [OVERFLOW]),
    "product reached": ([(0, 2**40 - 1)], 2**23, []),
    "a product that wraps to little": ([(2, 2**33), (9, 2**33)], 2**31, [OVERFLOW]),
    "the largest stride": ([(5, 1), (16, 1)], MAX64, [OVERFLOW]),
    "the smallest size": ([(0, -(2**63)), (16, 3)], 3, [NEGATIVE])}


def spread(number: int, placed: list[tuple[int, int]], dtype: np.dtype[Any]) -> np.ndarray:
    host = np.zeros(number, dtype)
    for place, size in placed:
        host[place * (number - 1) // 16] = size
    return host


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", HUGE)
def test_nothing_wraps(name, number, unchecked):
    (placed, stride, found), dtype = HUGE[name], INT32 if name.startswith("int32") else INT64
    host = spread(number, placed, INT64)
    got = fp8.splits_to_offsets(unchecked.array(host), strides=(stride,), dtypes=dtype)
    assert_equal(got, [by_loop(host, stride, dtype=dtype)])
    noted(unchecked, found)


@pytest.mark.parametrize("number", [64, 3000, 9000])
def test_all_sizes_huge(number, unchecked):
    for size in (MAX64, 2**62, 2**63 // number + 1, 2**26, 2**26 - 1):
        host = np.full(number, size, np.int64)
        assert_equal(fp8.splits_to_offsets(unchecked.array(host), strides=(1, 3)),
                     [by_loop(host), by_loop(host, 3)])


def test_numpy_sizes_are_never_noted(run):
    before = fp8.device_errors()
    with pytest.raises(ValueError, match=r"^splits: expected sizes of 0 or more"):
        fp8.splits_to_offsets(np.array([4, -6]))
    assert fp8.device_errors() == before


def test_any_dtype_holds_zeros():
    got = fp8.splits_to_offsets([MAX64, 1, 0], strides=(0,), dtypes="int32")
    assert_equal(got, [np.zeros(4, INT32)])


@pytest.mark.skipif(backend.gpu_problem() is None, reason="there is a GPU")
def test_without_a_gpu_a_list_means_numpy():
    (a,) = fp8.splits_to_offsets([1, 2])
    assert isinstance(a, np.ndarray)
    assert a.tolist() == [0, 1, 3]
