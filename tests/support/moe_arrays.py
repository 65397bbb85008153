"""Shared by tests of expert layers: arrays, expected results, and the device's error word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scale_arrays import guarded_like

import cupy_fp8 as fp8
from cupy_fp8 import cases, testing

#: Executors for tests that concern only NumPy arrays (fixture `run`).
on_the_cpu = pytest.mark.parametrize("run", ["reference", "host"], indirect=True)


def array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Return an array without zero bytes, so that zeros show; bool is all True."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.ones(shape, bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(1, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return cases.values("normal", shape, np.dtype(dtype), seed)


#: Check that results have the same arrays, byte for byte, and the same metadata.
assert_equal = testing.assert_bytes_equal


def expect(run: testing.Executor, wanted: Any, function: Callable[..., Any], *args: Any,
           leads: tuple[int, ...] = (0,), out_name: str = "out", **kwargs: Any) -> Any:
    """Check that the function gives the wanted bytes: in a new result, and in given ones that begin `lead`
    bytes past a multiple of 16. Return the new one."""
    made = function(*args, **kwargs)
    assert_equal(made, wanted)
    for lead in leads:
        out, intact = guarded_like(run, wanted, lead)
        assert function(*args, **kwargs, **{out_name: out}) is out
        assert_equal(out, wanted)
        assert intact()
    return made


def noted(run: testing.Executor, found: list[str]) -> None:
    """Check that the device's word says exactly this; the reference notes nothing."""
    assert list(fp8.device_errors(clear=True)) == (found if run.name != "reference" else [])
