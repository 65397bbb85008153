"""Offsets of groups against a loop over Python's integers: any number of outputs, their memory, and sizes that are wrong on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases.moe.offsets import TYPICAL, sizes
from cupy_fp8.kernels import Variant, errors
from cupy_fp8.ops.moe import offsets

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
MAX32, MAX64 = 2**31 - 1, 2**63 - 1
NEGATIVE, OVERFLOW = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.OFFSET_OVERFLOW))
#: Of one tile, of a few, and of so many that their totals are a launch of their own.
NUMBERS = (17, 1000, 3000, 8193)


def by_loop(splits: Any, stride: int = 1, lead: bool = True, dtype: Any = INT64) -> np.ndarray:
    """docs/numerics.md, size by size."""
    total, values = 0, [0] if lead else []
    for size in splits:
        total += max(int(size), 0)
        values.append(min(total * stride, int(np.iinfo(dtype).max)))
    return np.array(values, dtype)


def address(a: Any) -> int:
    return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)


def poisoned(run: testing.Executor, splits: Any, **options: Any) -> tuple[list[Any], Callable[[], bool]]:
    """(outputs for a call, poisoned, each in memory of its own; whether 64 bytes on either side of each are as they were)."""
    outputs, around = [], []
    for a in reference.splits_to_offsets(splits, **options):
        buffer = run.array(np.full(a.nbytes + 128, 0xAA, np.uint8))
        outputs.append(buffer[64 : 64 + a.nbytes].view(a.dtype))
        around.append((buffer, a.nbytes))

    def intact() -> bool:
        return all((np.delete(fp8.asnumpy(b), np.s_[64 : 64 + n]) == 0xAA).all() for b, n in around)

    return outputs, intact


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of every launch, which still happens."""
    seen: list[int] = []
    launch = Variant.launch

    def noted(self: Variant, x: Any, grid: int, *values: Any) -> None:
        seen.append(grid)
        launch(self, x, grid, *values)

    monkeypatch.setattr(Variant, "launch", noted)
    return seen


# ---- values ----
def test_by_hand(run):
    splits = run.array(np.array([3, 0, 5], np.int32))
    ends, starts, elements = fp8.splits_to_offsets(splits, strides=(1, 1, 7), include_leading_zero=(False, True, True),
                                                   dtypes=("int32", "int64", "int32"))
    assert [a.dtype for a in (ends, starts, elements)] == [INT32, INT64, INT32]
    assert [fp8.asnumpy(a).tolist() for a in (ends, starts, elements)] == [[3, 3, 8], [0, 3, 3, 8], [0, 21, 21, 56]]
    (plain,) = fp8.splits_to_offsets(splits)
    testing.assert_bytes_equal(plain, np.array([0, 3, 3, 8], np.int64))
    assert type(fp8.splits_to_offsets(splits)) is list


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
def test_by_loop(dtype, number, run):
    for values in ("few", "around 2**26", "most"):
        host = sizes(number, values, dtype, number)
        strides = (1, 0) if values == "most" else (1, 0, 13, 4096)
        for lead in (False, True):
            got = fp8.splits_to_offsets(run.array(host), strides=strides, include_leading_zero=lead)
            for a, stride in zip(got, strides, strict=True):
                testing.assert_bytes_equal(a, by_loop(host, stride, lead))


@needs_host
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2600), st.sampled_from([INT32, INT64]), st.integers(0, 40), st.integers(0, 2**32 - 1),
       st.lists(st.tuples(st.integers(0, 2**20), st.booleans(), st.sampled_from([INT32, INT64])), max_size=20), st.booleans())
def test_any_call(number, dtype, log2, seed, options, bulk):
    rng = np.random.default_rng(seed)
    host = rng.integers(0, min(2**log2, np.iinfo(dtype).max, MAX64 // (max(number, 1) << 20)), number, endpoint=True).astype(dtype)
    total = int(host.sum(dtype=np.int64))
    options = [(stride if t == INT64 or total * stride <= MAX32 else 0, lead, t) for stride, lead, t in options]
    strides, leads, dtypes = zip(*options, strict=True) if options else ((), (), ())
    with testing.executor("host"):
        got = fp8.splits_to_offsets(host, strides=strides, include_leading_zero=leads, dtypes=dtypes, bulk_allocate=bulk)
    assert len(got) == len(options)
    for a, (stride, lead, t) in zip(got, options, strict=True):
        testing.assert_bytes_equal(a, by_loop(host, stride, lead, t))


@pytest.mark.full
def test_a_million(run, launched):
    host = sizes(1_000_000, "few", INT64)
    outputs, intact = poisoned(run, host, **TYPICAL)
    assert fp8.splits_to_offsets(run.array(host), **TYPICAL, outputs=outputs) is outputs
    for a, b in zip(outputs, reference.splits_to_offsets(host, **TYPICAL), strict=True):
        testing.assert_bytes_equal(a, b)
    assert intact()
    assert len(launched) == (0 if run.name == "reference" else 2)
    ends = np.cumsum(host, dtype=np.int64)
    np.testing.assert_array_equal(fp8.asnumpy(outputs[2]), np.concatenate([[0], ends * 7168]))


def test_the_largest_offsets_fit(run):
    """The last value that a dtype holds is no error."""
    for number in NUMBERS:
        host = np.zeros(number, np.int64)
        host[[0, number // 2, number - 1]] = 2**62, 2**62 - 8, 7
        got = fp8.splits_to_offsets(run.array(host), strides=(1, 0), check=True, dtypes=("int64", "int32"))
        testing.assert_bytes_equal(got[0], by_loop(host))
        assert int(got[0][-1]) == MAX64
        host[[0, number // 2, number - 1]] = 2**29, 2**29 - 1, 0
        got = fp8.splits_to_offsets(run.array(host), strides=(2,), check=True, dtypes="int32")
        assert int(got[0][-1]) == MAX32 - 1
    (a,) = fp8.splits_to_offsets(run.array(np.array([1, 0])), strides=(MAX64,))
    testing.assert_bytes_equal(a, np.array([0, MAX64, MAX64]))
    assert fp8.device_errors() == ()


def test_no_groups(run, launched):
    """Only the zeros are left, and they are written."""
    splits = run.array(np.zeros(0, np.int32))
    outputs, intact = poisoned(run, np.zeros(0, np.int32), **TYPICAL)
    fp8.splits_to_offsets(splits, **TYPICAL, outputs=outputs)
    assert [fp8.asnumpy(a).tolist() for a in outputs] == [[], [0], [0], [0], [0]]
    assert intact()
    given_splits: Any
    for given_splits in (splits, []):
        assert [a.shape for a in fp8.splits_to_offsets(given_splits, include_leading_zero=False)] == [(0,)]


def test_no_outputs(run, launched):
    splits = run.array(np.array([3, 4]))
    for number in (2, 9000):
        assert fp8.splits_to_offsets(run.array(np.ones(number, np.int64)), strides=()) == []
    nothing: list[Any] = []
    assert fp8.splits_to_offsets(splits, strides=(), outputs=nothing, bulk_allocate=True) is nothing
    assert fp8.splits_to_offsets(splits, strides=(), dtypes=(), include_leading_zero=[]) == []
    assert launched == []


@needs_host
@pytest.mark.parametrize(("number", "outputs", "blocks"), [
    (0, 1, [1]), (1, 5, [5]), (1024, 5, [5]), (1025, 5, [10]), (8192, 2, [16]), (8193, 5, [9, 9]), (64, 16, [16]), (64, 17, [16, 1]),
    (9000, 40, [9, 9, 9, 9])])
def test_as_few_launches_as_needed(number, outputs, blocks, launched):
    with testing.executor("host"):
        got = fp8.splits_to_offsets(np.ones(number, np.int64), strides=range(outputs))
    assert launched == blocks
    for stride, a in enumerate(got):
        np.testing.assert_array_equal(a, np.arange(number + 1) * stride)


# ---- options and kinds ----
def test_options_for_all_or_for_each(run):
    splits = run.array(np.array([2, 3], np.int64))
    want = [by_loop([2, 3], 1, True, INT32), by_loop([2, 3], 5, True, INT32)]
    lead: Any
    strides: Any
    for lead in (True, (True, True), [True, np.True_], np.array([True, True])):
        for dtype in (np.int32, "int32", INT32, ("i4", np.int32), [INT32, INT32]):
            for strides in ((1, 5), [1, 5], np.array([1, 5]), (np.int8(1), np.uint64(5))):
                for a, b in zip(fp8.splits_to_offsets(splits, strides=strides, include_leading_zero=lead, dtypes=dtype), want, strict=True):
                    testing.assert_bytes_equal(a, b)


def test_lists_of_sizes(run):
    for given_splits in ([3, 0, 5], (np.int8(3), False, 5)):
        got = fp8.splits_to_offsets(given_splits, **TYPICAL)
        for a, b in zip(got, reference.splits_to_offsets([3, 0, 5], **TYPICAL), strict=True):
            testing.assert_bytes_equal(a, b)
        assert isinstance(got[0], fp8.xp.ndarray)
        outputs, intact = poisoned(run, [3, 0, 5], **TYPICAL)               # of run's kind, whatever fp8.xp is
        for _ in range(2):
            assert fp8.splits_to_offsets(given_splits, **TYPICAL, outputs=outputs) is outputs
            for a, b in zip(outputs, got, strict=True):
                testing.assert_bytes_equal(a, b)
            for a in outputs:
                cases.poison(a)
        assert intact()


def test_any_view_of_sizes(run):
    host = np.arange(60, dtype=np.int64)
    device = run.array(host)
    for view in (np.s_[::2], np.s_[::-1], np.s_[7:40], np.s_[3:4], np.s_[50:10:-3]):
        (a,) = fp8.splits_to_offsets(device[view])
        testing.assert_bytes_equal(a, by_loop(host[view]))
    testing.assert_bytes_equal(device, host)


# ---- memory ----
@pytest.mark.parametrize("number", [0, 1, 3, 64, 1000, 9000])
def test_one_buffer(number, run):
    host = sizes(number, "few", INT64)
    got = fp8.splits_to_offsets(run.array(host), **TYPICAL, bulk_allocate=True)
    assert len({id(a.base) for a in got}) == 1
    base = got[0].base
    assert base is not None
    ends = 0
    for a, b in zip(got, reference.splits_to_offsets(host, **TYPICAL), strict=True):
        testing.assert_bytes_equal(a, b)
        assert a.flags.c_contiguous
        assert address(a) % 16 == 0
        assert a.size == 0 or address(a) >= ends
        ends = max(ends, address(a) + a.nbytes)
    assert ends <= address(base) + base.nbytes
    addresses = [address(a) for a in got]
    for a in got:
        cases.poison(a)
    assert fp8.splits_to_offsets(run.array(host), **TYPICAL, bulk_allocate=True, outputs=got) is got      # it is about allocation
    assert [address(a) for a in got] == addresses
    for a, b in zip(got, reference.splits_to_offsets(host, **TYPICAL), strict=True):
        testing.assert_bytes_equal(a, b)
    apart = fp8.splits_to_offsets(run.array(host), **TYPICAL)
    assert len({id(a if a.base is None else a.base) for a in apart}) == 5


@pytest.mark.parametrize("number", [3, 1100, 9000])
def test_outputs_are_written_in_place(number, run):
    outputs, intact = poisoned(run, np.ones(number, np.int32), **TYPICAL)
    addresses = [address(a) for a in outputs]
    given_outputs: Any = outputs
    for seed in range(4):
        host = sizes(number, "few", (INT32, INT64)[seed // 2], seed)
        for a in outputs:
            cases.poison(a)
        assert fp8.splits_to_offsets(run.array(host), **TYPICAL, outputs=given_outputs) is given_outputs
        for a, b in zip(outputs, reference.splits_to_offsets(host, **TYPICAL), strict=True):
            testing.assert_bytes_equal(a, b)
        assert intact()
        assert [address(a) for a in outputs] == addresses
        given_outputs = tuple(outputs) if seed % 2 else outputs


# ---- sizes on the device that are wrong ----
@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, run: testing.Executor) -> testing.Executor:
    """NumPy arrays are looked at as little as those on a device."""
    monkeypatch.setattr(offsets, "_check_sizes", lambda *_: None)
    return run


def wrong_sizes() -> Iterator[tuple[str, list[tuple[int, int]], list[str]]]:
    """Name, sizes by place (a fraction of all groups, in 16ths), and what is found."""
    yield "right", [(0, 5), (16, 7)], []
    yield "negative first", [(0, -1), (3, 4)], [NEGATIVE]
    yield "negative last", [(3, 4), (16, -(2**31))], [NEGATIVE]
    yield "int32 reached", [(0, 2**30), (9, 2**30 - 1)], []
    yield "int32 passed by 1", [(0, 2**30), (9, 2**30 - 1), (16, 1)], [OVERFLOW]
    yield "int32 passed at once", [(0, MAX32), (1, MAX32), (2, -5)], [NEGATIVE, OVERFLOW]


def spread(number: int, placed: list[tuple[int, int]], dtype: np.dtype[Any]) -> np.ndarray:
    host = np.zeros(number, dtype)
    for place, size in placed:
        host[place * (number - 1) // 16] = size
    return host


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("placed", "found"), [pytest.param(p, f, id=name) for name, p, f in wrong_sizes()])
@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
def test_wrong_sizes_are_harmless_and_noted(dtype, placed, found, number, unchecked):
    run = unchecked
    host = spread(number, placed, dtype)
    options: dict[str, Any] = {"strides": (1, 1, 2, 0), "dtypes": ("int32", "int64", "int64", "int32")}
    outputs, intact = poisoned(run, host, **options)
    fp8.splits_to_offsets(run.array(host), **options, outputs=outputs)
    for a, stride, t in zip(outputs, options["strides"], options["dtypes"], strict=True):
        testing.assert_bytes_equal(a, by_loop(host, stride, True, np.dtype(t)))
    assert intact()
    assert list(fp8.device_errors(clear=True)) == ([] if run.name == "reference" else found)


HUGE: dict[str, tuple[list[tuple[int, int]], int, list[str]]] = {
    "sum reached": ([(0, 2**62), (8, 2**62 - 1)], 1, []), "sum passed by 1": ([(0, 2**62), (8, 2**62)], 1, [OVERFLOW]),
    "sum passed by far": ([(i, MAX64) for i in range(0, 17, 2)], 1, [OVERFLOW]),
    "twice two to the 63": ([(0, 2**62), (3, 2**62), (7, 2**62), (11, 2**62)], 1, [OVERFLOW]),
    "and of stride 0": ([(i, MAX64) for i in range(0, 17, 2)], 0, []),
    "product passed": ([(0, 2**40), (16, 1)], 2**23, [OVERFLOW]), "product reached": ([(0, 2**40 - 1)], 2**23, []),
    "a product that wraps to little": ([(2, 2**33), (9, 2**33)], 2**31, [OVERFLOW]),
    "the largest stride": ([(5, 1), (16, 1)], MAX64, [OVERFLOW]), "the smallest size": ([(0, -(2**63)), (16, 3)], 3, [NEGATIVE]),
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", HUGE)
def test_nothing_wraps(name, number, unchecked):
    run = unchecked
    placed, stride, found = HUGE[name]
    host = spread(number, placed, INT64)
    (a,) = fp8.splits_to_offsets(run.array(host), strides=(stride,))
    testing.assert_bytes_equal(a, by_loop(host, stride))
    assert list(fp8.device_errors(clear=True)) == ([] if run.name == "reference" else found)


@pytest.mark.parametrize("number", [64, 3000, 9000])
def test_all_sizes_huge(number, unchecked):
    run = unchecked
    for size in (MAX64, 2**62, 2**63 // number + 1, 2**26, 2**26 - 1):
        host = np.full(number, size, np.int64)
        (a, b) = fp8.splits_to_offsets(run.array(host), strides=(1, 3))
        testing.assert_bytes_equal(a, by_loop(host))
        testing.assert_bytes_equal(b, by_loop(host, 3))


def test_numpy_sizes_are_never_noted(run):
    before = fp8.device_errors()
    with pytest.raises(ValueError, match=r"^splits: expected sizes of 0 or more"):
        fp8.splits_to_offsets(np.array([4, -6]))
    assert fp8.device_errors() == before


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize("number", [64, 3000, 9000])
def test_graph_replay_follows_the_sizes(number):
    """Two graphs over the same sizes, replayed in turn, share nothing that either needs."""
    cp = backend.cupy()
    splits = cp.zeros(number, cp.int64)
    several: list[dict[str, Any]] = [TYPICAL, {"strides": tuple(range(20)), "bulk_allocate": True}]
    results = [fp8.splits_to_offsets(splits, **options) for options in several]
    for options, outputs in zip(several, results, strict=True):
        fp8.splits_to_offsets(splits, **options, outputs=outputs)
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        graphs = []
        for options, outputs in zip(several, results, strict=True):
            stream.begin_capture()
            fp8.splits_to_offsets(splits, **options, outputs=outputs)
            graphs.append(stream.end_capture())
        for seed in range(3):
            host = sizes(number, "few", INT64, seed)
            splits.set(host)
            for a in (a for outputs in results for a in outputs):
                cases.poison(a)
            for graph in graphs:
                graph.launch(stream)
            stream.synchronize()
            for options, outputs in zip(several, results, strict=True):
                desired = reference.splits_to_offsets(host, **{k: v for k, v in options.items() if k != "bulk_allocate"})
                for a, b in zip(outputs, desired, strict=True):
                    testing.assert_bytes_equal(a, b)
        splits[number // 2] = -1
        graphs[0].launch(stream)
        assert fp8.device_errors(clear=True) == (NEGATIVE,)


@pytest.mark.gpu
def test_check_looks_at_the_device():
    cp = backend.cupy()
    splits = cp.asarray([3, -1])
    outputs = fp8.splits_to_offsets(cp.asarray([3, 1]))
    for a in outputs:
        cases.poison(a)
    for given_splits in (splits, [3, -1]):
        with pytest.raises(ValueError, match=r"^splits: expected sizes of 0 or more, got -1 for group 1"):
            fp8.splits_to_offsets(given_splits, outputs=outputs, check=True)
    with pytest.raises(ValueError, match=r"^splits: output 0 would end with 3 \* 9223372036854775807, more than int64 holds"):
        fp8.splits_to_offsets(cp.asarray([3, 0]), strides=(MAX64,), outputs=outputs, check=True)
    assert all((bits(fp8.asnumpy(a)) == 0xAAAAAAAAAAAAAAAA).all() for a in outputs)
    assert fp8.device_errors() == ()
    fp8.splits_to_offsets(splits, outputs=outputs)
    assert fp8.device_errors(clear=True) == (NEGATIVE,)
    assert outputs[0].get().tolist() == [0, 3, 3]


@pytest.mark.gpu
def test_what_cannot_be_captured():
    cp = backend.cupy()
    splits, many = cp.asarray([3, 1, 4, 1]), cp.ones(9000, cp.int64)
    outputs, half = fp8.splits_to_offsets(splits), fp8.splits_to_offsets(splits[::2])
    fresh = [cp.empty(9001, cp.int64)]
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("out: needed while a CUDA graph is captured", lambda: fp8.splits_to_offsets(splits)),
        ("check: waits for the device", lambda: fp8.splits_to_offsets(splits, outputs=outputs, check=True)),
        ("splits: a list would have to be copied", lambda: fp8.splits_to_offsets([3, 1, 4, 1], outputs=outputs)),
        ("splits: not C-contiguous", lambda: fp8.splits_to_offsets(splits[::2], outputs=half)),
        ("out: used for the first time", lambda: fp8.splits_to_offsets(many, outputs=fresh)),
    ]
    with stream:
        stream.begin_capture()
        try:
            for message, call in calls:
                with pytest.raises(ValueError, match="^" + message):
                    call()
            assert fp8.splits_to_offsets(splits, outputs=outputs) is outputs
        finally:
            stream.end_capture()


@pytest.mark.gpu
def test_sizes_on_another_device():
    cp = backend.cupy()
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    for number in (40, 9000):
        host = sizes(number, "few", INT32)
        with cp.cuda.Device(1):
            splits = cp.asarray(host)
            cp.cuda.Device(1).synchronize()
        for bulk in (False, True):
            got = fp8.splits_to_offsets(splits, **TYPICAL, bulk_allocate=bulk)
            assert fp8.splits_to_offsets(splits, **TYPICAL, outputs=got) is got
            assert {a.data.device_id for a in got} == {1}
            with cp.cuda.Device(1):
                for a, b in zip(got, reference.splits_to_offsets(host, **TYPICAL), strict=True):
                    testing.assert_bytes_equal(a, b)


@pytest.mark.gpu
def test_outputs_take_what_is_remembered_along():
    cp = backend.cupy()
    splits = cp.asarray([1, 2])
    outputs = fp8.splits_to_offsets(splits, strides=(1, 2))
    gc.collect()
    before = len(offsets._targets)
    fp8.splits_to_offsets(splits, strides=(1, 2), outputs=outputs)
    assert len(offsets._targets) == before + 1
    outputs.pop()
    gc.collect()
    assert len(offsets._targets) == len(offsets._ends) == before
