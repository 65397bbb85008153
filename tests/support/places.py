"""Places of the arrays of contract tests: NumPy with the reference, CuPy with a GPU, or a stand-in for
both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import stand_in

from cupy_fp8 import backend, device_errors, testing
from cupy_fp8.arrays import bits

#: All places, or only devices. The quick tier has only the stand-in: NumPy takes the same path except for
#: devices and captures.
DEVICES = ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]
EVERYWHERE = [pytest.param("numpy", marks=pytest.mark.full), *DEVICES]


@dataclass(frozen=True)
class Place:
    """A kind of array. devices: numbers of the existing ones, the current one first; empty for NumPy."""

    name: str
    run: testing.Executor
    cupy: Any
    devices: tuple[int, ...]

    def array(self, a: np.ndarray, device: int | None = None) -> Any:
        """Copy an array to the place, in the same memory order."""
        if not self.devices:
            return a
        cp = self.cupy
        steps = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)] if a.size else []
        before, after = -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
        lead = a.ctypes.data % a.itemsize + before
        with cp.cuda.Device(self.devices[0] if device is None else device):
            made = cp.ndarray(a.shape, a.dtype, cp.cuda.alloc(lead + after + a.itemsize) + lead, a.strides)
            if a.ctypes.data % a.itemsize:          # CuPy's own kernels require aligned elements
                made.data.copy_from_host_async(a.ctypes.data, a.nbytes)
            elif a.size:
                bits(made)[...] = cp.asarray(bits(np.ascontiguousarray(a)))
        return made


@contextmanager
def place(name: str) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        if name == "numpy":
            yield Place(name, testing.Executor("reference"), None, ())
            return
        if name == "stand-in":
            if problem := testing.executor_problem("host"):
                pytest.skip(problem)
            cp, devices = stand_in.install(patch), list(stand_in.DEVICES)
        else:
            cp = backend.cupy()
            devices = list(range(cp.cuda.runtime.getDeviceCount()))
        with testing.executor("cuda") as run:
            device_errors(clear=True)
            yield Place(name, run, cp, tuple(devices))
