"""Repeated tensor lists: remembered calls, their tables, and what identifies a list."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from list_results import (
    DELAYED,
    KINDS,
    LAUNCHES,
    assert_all_same,
    expected,
    kind,
    matrices,
    multi,
    outputs_for,
    poison,
    scales_of,
)
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import MXScaling, Quantized, cases, testing
from cupy_fp8.calls import keys, tables
from cupy_fp8.calls.descriptions import Written, divide
from cupy_fp8.calls.tables import DeviceTable, Records
from cupy_fp8.formats import INPUT_DTYPES, bfloat16


# ---- calls that come again ----
@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[DeviceTable]:
    """Record every table that is made."""
    made: list[DeviceTable] = []
    init = DeviceTable.__init__

    def noted(self: DeviceTable, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(DeviceTable, "__init__", noted)
    return made


@needs_host
@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_calls_that_come_again_make_no_table(recipe, uploads, launched):
    """The same arrays, and views of the same memory; other arrays are noticed, also if an identity recurs."""
    with testing.executor("host") as run:
        xs = matrices("mixed")
        given = {"scales": np.ones(len(xs), np.float32)} if recipe is DELAYED else {}
        outputs, others = outputs_for(xs, recipe), outputs_for(xs, recipe)

        def call(xs: list[Any], outputs: list[Quantized]) -> None:
            multi(xs, recipe, out=outputs, **given)
            with testing.executor("reference"):
                assert_all_same(run, outputs, expected(recipe, xs, 1.0))

        for i in range(3):
            call(xs if i != 1 else [x[:] for x in xs], outputs)
        assert (len(uploads), launched) == (1, LAUNCHES[type(recipe)] * 3)
        call(xs, [outputs[0], *others[1:]])                 # only the first result has another table
        assert len(uploads) == 2
        xs[3] *= bfloat16.type(0.5)
        call(xs, outputs)
        assert len(uploads) == 2
        for i in range(8):
            xs[0] = cases.values("normal", xs[0].shape, bfloat16, 100 + i)      # the previous array is gone
            call(xs, outputs)
        assert sum(each.memory is not None for each in uploads) <= tables._MOST
        del outputs, others
        gc.collect()
        assert all(each.memory is None for each in uploads), "a table outlived its result"


@pytest.mark.parametrize("recipe", KINDS[2:], ids=kind)
def test_a_table_makes_no_room_for_another_of_the_same_call(recipe, run):
    """A launch for each dtype has a table of its own. One array is another each time, so its table is made
    again, and the other two tables are the oldest. Repeated calls would find that theirs is gone."""
    host = [cases.values("normal", (16, 40), dtype) for dtype in INPUT_DTYPES]
    xs = [run.array(x) for x in host]
    given, outputs = scales_of(recipe, xs), outputs_for(xs, recipe)
    others = [cases.values("normal", (16, 40), host[-1].dtype, i) for i in range(2 * tables._MOST)]
    in_memory = [run.array(x) for x in others]              # they exist at once, so each has its own
    for x, other in zip(others * 2, in_memory * 2, strict=True):
        multi([*xs[:-1], other], recipe, out=outputs, **given)
        assert_all_same(run, outputs, expected(recipe, [*host[:-1], x]))
        poison(outputs)


def test_tables_that_a_graph_captured_stay():
    x, owner = np.zeros(1, np.float32), np.zeros(1, np.float32)
    first = tables.table(owner, x, Records.of(bytes(16)))
    first.captured = True
    made = [tables.table(owner, x, Records.of(i.to_bytes(16, "little"))) for i in range(1, 8)]
    assert tables.table(owner, x, Records.of(bytes(16))) is first
    assert [each.use() for each in made] == [False] * 3 + [True] * tables._MOST
    del owner
    assert not first.use()


def test_large_results_have_memory_of_their_own():
    """An array keeps its whole allocation alive: large ones share none."""
    small, large = Written("a", (3,), np.dtype(np.float32)), Written("b", (9 << 20,), np.dtype(np.uint8))
    assert divide([small, small, large, large, small]) == ([(0, 0), (0, 256), (0, 512), (1, 0), (2, 0)],
                                                           [512 + (9 << 20), 9 << 20, 256])
    assert divide([]) == ([], [0])


class _Pointer:
    """Like CuPy's, for descriptions of arrays that do not access memory."""

    device_id = 0

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


_Array = type("ndarray", (), {"__module__": "cupy", "_c_contiguous": True, "dtype": np.dtype(np.float32)})


def _array(ptr: int, shape: tuple[int, ...]) -> Any:
    made: Any = _Array()
    made.data, made.shape = _Pointer(ptr), shape
    return made


def test_a_list_of_gpu_arrays_is_described_once_while_they_live(monkeypatch):
    described: list[int] = []
    real = keys._of_parts
    monkeypatch.setattr(keys, "_KINDS", dict(keys._KINDS))

    def noted(parts: Any, *rest: Any) -> bool:
        described.append(len(parts))
        return real(parts, *rest)

    monkeypatch.setattr(keys, "_of_parts", noted)
    xs = [_array(512 * i, (2, 3)) for i in range(3)]

    def describe(xs: list[Any]) -> Any:
        return keys.key_of("op", (xs,), None)

    first = describe(xs)
    assert describe(list(xs)) == first
    assert described == [3]
    assert describe([_array(512 * i, (2, 3)) for i in range(3)]) == first  # these view the same memory
    assert describe([*xs[:2], _array(4096, (2, 3))]) != first
    assert described == [3] * 3
    xs[1].shape = (3, 2)
    assert describe(xs) != first                            # an assigned shape is noticed
    xs[1].shape = (2, 3)
    assert describe(xs) == first
    key = keys.identities(xs)
    assert key in keys._known_lists
    del xs[0]
    gc.collect()
    assert key not in keys._known_lists
    assert keys.key_of("op", ([0.0, 1.0],), None) != keys.key_of("op", ([-0.0, 1.0],), None)


@needs_host
@pytest.mark.parametrize("recipe", [DELAYED, MXScaling()], ids=kind)
def test_a_shape_that_is_assigned_is_noticed(recipe):
    with testing.executor("host"):
        x = cases.values("normal", (16, 24), bfloat16)
        outputs = outputs_for([x], recipe)
        multi([x], recipe, out=outputs, **scales_of(recipe, [x]))
        x.shape = (24, 16)
        with pytest.raises(ValueError, match=r"out\[0\]\.rowwise: "):
            multi([x], recipe, out=outputs, **scales_of(recipe, [x]))


@pytest.mark.parametrize("recipe", KINDS, ids=kind)
def test_a_table_is_there_for_every_replay(recipe, device):
    """A replay reads it whatever was called after the capture, and with the present values of the scales."""
    cp = device.cupy
    xs = [device.array(x) for x in matrices("mixed")]
    outputs, scales = outputs_for(xs, recipe), device.array(np.ones(len(xs), np.float32))
    given = {"scales": scales} if recipe is DELAYED else {}
    multi(xs, recipe, out=outputs, **given)
    cp.cuda.get_current_stream().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        multi(xs, recipe, out=outputs, **given)
        graph = stream.end_capture()
        for _ in range(tables._MOST + 2):
            multi([device.array(fp8.asnumpy(x)) for x in xs], recipe, out=outputs, **given)
        scales.fill(3)
        poison(outputs)
        graph.launch(stream)
        stream.synchronize()
    want = expected(recipe, list(map(fp8.asnumpy, xs)), 3.0)
    testing.assert_bytes_equal(list(map(device.run.numpy, outputs)), want)
