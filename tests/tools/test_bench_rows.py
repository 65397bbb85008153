"""Rows of the benchmark, with small arrays and the stand-in for CuPy: the timed call runs on the CPU, and its
check compares with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import stand_in_arithmetic
from tiers import first_of_each, needs_host

from cupy_fp8 import bench
from cupy_fp8.bench import data, generic, host
from cupy_fp8.bench.matmul import compare, dense, grouped
from cupy_fp8.bench.measure import Call, Check
from cupy_fp8.cases import OPS, Case
from cupy_fp8.cases.covering import record

pytestmark = needs_host

#: small matrices with several tiles and blocks, and more rows and columns than checks compare
_MOST = 512
_MOST_MATRICES = 2


def small(case: Case) -> Case:
    """Return the same call with smaller arrays."""
    *batch, rows, columns = (1, *case.shape)
    shape = (*(min(n, _MOST_MATRICES) for n in batch), min(rows, _MOST), min(columns, _MOST))
    options = dict(case.options)
    if "rows" in options:
        options["rows"] = options["rows"] * shape[-2] // rows
    if case.op.startswith("multi_"):                        # they take a list of matrices
        return replace(case, shape=(5,), options={**options, "group": "whole"})
    return replace(case, shape=shape[1:], options=options)


def timed() -> Iterator[tuple[str, str, Case]]:
    """Yield op, label and small call of each row; only one of rows that differ just by shape."""
    for name, op in OPS.items():
        labels: dict[str, Case] = {}
        for label, case, _ in op.timed():
            labels.setdefault(label, case)
        yield from ((name, label, small(case)) for label, case in labels.items())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_arithmetic.install(monkeypatch)
    monkeypatch.setattr(data, "_LARGE", 1 << 17)            # most first arguments are then made on the GPU


@pytest.mark.parametrize(("name", "label", "case"), first_of_each(lambda row: row[0], timed()))
def test_the_timed_call_writes_what_its_check_compares(name, label, case, gpu):
    op = OPS[name]
    make = partial(generic.make, op, case, bench.compare_functions().get(name))
    check_made(make, written=bool(op.updates))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in OPS])
def test_host_calls_take_arrays_of_a_gpu(name, gpu):
    for _, calls in host.all_calls([name]):
        calls.with_out()
        if calls.allocating is not None:
            calls.allocating()


@pytest.mark.parametrize("pair", compare.PAIRS, ids=str)
def test_products(pair, gpu):
    check_made(partial(dense._product, (64, 72, 256), pair, {}))


GROUPED = {shape.label: shape for shape in (
    grouped.Shape("m", 3, 160, 128, 256), grouped.Shape("k", 3, 260, 64, 128, accumulate=True),
    grouped.Shape("k", 3, 260, 64, 128))}


@pytest.mark.parametrize("label", first_of_each(lambda label: GROUPED[label].group, GROUPED))
def test_grouped_products(label, gpu):
    shape = GROUPED[label]
    check_made(partial(grouped._product, shape), written=shape.accumulate)


def test_a_comparison_shows_last_who_refuses(gpu, monkeypatch):
    def refuse() -> Call:
        raise TypeError("not this shape")

    for name, value in (("_WARM", 0), ("_PAUSE", 0), ("seconds", lambda call: call())):
        monkeypatch.setattr(compare, name, value)
    callers = [("no", refuse), ("one", lambda: lambda: 1.0), ("two", lambda: lambda: 2.0)]
    assert list(compare.timed(callers)) == [("one", 1.0, 1.0, ""), ("two", 2.0, 2.0, ""),
                                            ("no", 0, 0, "TypeError: not this shape")]


def check_made(make: Callable[[], tuple[Call, Check]], written: bool = False) -> None:
    """Check that the check fails before the call and passes after it. written: the check makes another call
    itself."""
    call, check = make()
    if not written:
        with pytest.raises((AssertionError, ValueError)):
            check()
    call()
    check()


def background_jobs(items, background):
    """Kernels of the selected rows are compiled beside other tests."""
    for item in items:
        if item.originalname == "test_the_timed_call_writes_what_its_check_compares":
            op, case = (OPS[item.callspec.params["name"]], item.callspec.params["case"])
            for variant in record(op, cases=[case])[0].variants:
                yield variant, partial(variant.compile, None)
