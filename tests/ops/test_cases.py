"""Every case of every op on every executor of this machine: the bytes are the reference's, also with out=."""

import dataclasses
import re
from functools import partial

import covering
import numpy as np
import pytest
from large_tiles import check_those_that_ask
from launches import note_launches
from programs import WITHOUT_OP
from tiers import quick_if

from cupy_fp8 import cases, testing
from cupy_fp8.arrays import bits
from cupy_fp8.cases import OPS
from cupy_fp8.cli.selftest import check
from cupy_fp8.formats import float8_e8m0fnu
from cupy_fp8.kernels import Kernel, sources

CASES = [one.case for one in covering.observed()]
QUICK = {id(one.case) for one in covering.quick_cases()}


@pytest.mark.parametrize("case", quick_if(lambda case: id(case) in QUICK, CASES), ids=str)
@pytest.mark.parametrize("executor", [*testing.EXECUTORS[:2], pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_reference(case, executor):
    with testing.executor(executor) as run:
        check(OPS[case.op], case, run)


def test_the_reference_makes_no_kernels(monkeypatch):
    """Which would look for a GPU or for a compiler."""
    monkeypatch.setattr(Kernel, "variant", lambda *_, **options: pytest.fail(f"a kernel was made: {options}"))
    with testing.executor("reference") as run:
        for op in OPS.values():
            check(op, next(op.cases()), run)


def background_jobs(items, background):
    """Kernels of the selected cases are compiled beside other tests, which launch many of them too."""
    given = [item.callspec.params for item in items if item.originalname == "test_equals_reference"]
    selected = {id(params["case"]) for params in given if params["executor"] == "host"}
    for variant in {v: None for one in covering.observed() if id(one.case) in selected for v in one.variants}:
        yield variant, partial(variant.compile, None)


def entry_points():
    """Return every entry point in the sources."""
    return {(source, entry) for source in sources.names()
            for entry in re.findall(r"(\w+)\(const __grid_constant__", sources.path(source).read_text())}


def test_quick_cases_launch_every_entry_point(monkeypatch):
    """Launches are counted where they happen. (On a GPU small arrays do not launch every kernel, since some
    pay only for large ones.)"""
    launched = note_launches(monkeypatch)
    with testing.executor("host") as run:
        for one in covering.cover(covering.quick_cases(), covering.launched_entries):
            check(OPS[one.case.op], one.case, run)
    entries = {(one.variant.kernel.source, one.variant.kernel.entry) for one in launched}
    assert entries == {found for found in entry_points() if found[0] not in WITHOUT_OP}


@pytest.mark.full
@pytest.mark.parametrize("executor", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_large_arrays(executor, monkeypatch):
    """The kernels that transpose, with the tiles that only arrays of many megabytes get."""
    with testing.executor(executor) as run:
        chosen = check_those_that_ask(run, (case for case in CASES if len(case.shape) > 1), monkeypatch)
    assert len(chosen) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", cases.LARGE_SHAPES, ids=str)
def test_large_shapes(shape):
    with testing.executor("cuda") as run:
        for case in CASES:
            if case.op == "scaling_aware_transpose" and len(shape) > 2:
                continue                                            # It takes one matrix.
            if case.shape == cases.MATRIX and case.values == "bits":
                check(OPS[case.op], dataclasses.replace(case, shape=shape), run)


# ---- what the check finds: tests/tools/test_cli.py has faults of every op ----
def forgets_padding(s, *, out=None, **options):
    swizzle = OPS["swizzle_scales"].function
    fresh = swizzle(s, **options)
    if out is not None:
        used = swizzle(np.ones(s.shape, np.uint8).view(float8_e8m0fnu), **options)
        np.copyto(bits(out), bits(fresh), where=bits(used) != 0)
    return fresh if out is None else out


def returns_a_copy(history, scale, **options):
    return OPS["update_delayed_scaling"].function(history, scale, **options)[0], scale.copy()


@pytest.mark.parametrize(("op", "broken", "message"), [
    ("swizzle_scales", forgets_padding, "elements of float8_e8m0fnu"),
    ("update_delayed_scaling", lambda *arrays, **_: arrays, "^history: .* elements of float32"),
    ("update_delayed_scaling", returns_a_copy, "^scale was not returned")])
def test_a_broken_function_is_caught(op, broken, message):
    with testing.executor("reference") as run, pytest.raises(AssertionError, match=message):
        check(dataclasses.replace(OPS[op], function=broken), next(OPS[op].cases()), run)
