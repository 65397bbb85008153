"""What tests of expert layers share: arrays, results with guards around them, and calls that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import Routing, Scaled, cases, testing

#: For what concerns NumPy arrays only: the fixture `run` of these executors.
on_the_cpu = pytest.mark.parametrize("run", ["reference", "host"], indirect=True)


def array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """No byte is 0, so that zeros show; bool is all True."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.ones(shape, bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(1, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return cases.values("normal", shape, np.dtype(dtype), seed)


def arrays_of(result: Any) -> Iterator[Any]:
    """The arrays of a result, in their order."""
    if isinstance(result, Routing):
        yield from result._arrays().values()
    elif isinstance(result, (list, tuple, Scaled)):
        for part in result:
            yield from arrays_of(part)
    elif result is not None:
        yield result


def assert_equal(actual: Any, wanted: Any) -> None:
    """Results have the same arrays, byte for byte."""
    for mine, theirs in zip(arrays_of(actual), arrays_of(wanted), strict=True):
        testing.assert_bytes_equal(mine, theirs)


def guarded_like(run: testing.Executor, wanted: Any, lead: int = 0) -> tuple[Any, Callable[[], bool]]:
    """(a poisoned result of the same form, whether the memory around its arrays is as it was)."""
    checks = []

    def make(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, Scaled):
            return Scaled._of(make(part.data), make(part.scale_inv), part.shape, False, part.block,
                              part.scale_layout)
        if isinstance(part, Routing):
            return dataclasses.replace(part, **{name: make(a) for name, a in part._arrays().items()})
        if isinstance(part, (list, tuple)):
            return type(part)(map(make, part))
        itemsize = part.dtype.itemsize
        a, intact = guarded(run, part.shape, part.dtype, lead // itemsize * itemsize)
        checks.append(intact)
        return a

    return make(wanted), lambda: all(intact() for intact in checks)


def expect(run: testing.Executor, wanted: Any, function: Callable[..., Any], *args: Any,
           leads: tuple[int, ...] = (0,), out_name: str = "out", **kwargs: Any) -> Any:
    """The function gives the wanted bytes: in a new result, and in given ones that begin `lead` bytes past a
    multiple of 16. Returns the new one."""
    made = function(*args, **kwargs)
    assert_equal(made, wanted)
    for lead in leads:
        out, intact = guarded_like(run, wanted, lead)
        assert function(*args, **kwargs, **{out_name: out}) is out
        assert_equal(out, wanted)
        assert intact()
    return made


def noted(run: testing.Executor, found: list[str]) -> None:
    """The device's word says this, and no more; the reference notes nothing."""
    assert list(fp8.device_errors(clear=True)) == (found if run.name != "reference" else [])


def zero_rows(a: Any) -> np.ndarray:
    """Which rows are all zeros."""
    return np.logical_not(raw(a).reshape(len(a), -1).any(axis=1))
