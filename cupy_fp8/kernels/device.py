"""What runs a kernel, and the facts about a GPU that launches depend on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from .. import backend

_forced: ContextVar[str | None] = ContextVar("cupy_fp8_executor", default=None)


# ---- executors ----
@contextmanager
def forced_executor(name: str) -> Iterator[None]:
    """Within this context NumPy arrays run the kernels on the CPU ('host') or the reference ('reference')."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def executor_of(xp: Any) -> str:
    """Return 'cuda' for CuPy arrays; for NumPy arrays 'reference', or 'host' inside
    `forced_executor('host')`."""
    return "cuda" if xp is not np else _forced.get() or "reference"


def executor_is_forced() -> bool:
    """Whether the executor of NumPy arrays was chosen: by tests, and by code that only inspects a call."""
    return _forced.get() is not None


# ---- GPUs ----
#: its `compute_capability`
HOPPER = 90


@functools.cache
def compute_capability(device_id: int) -> int:
    """Return a GPU's compute capability times ten."""
    return int(backend.cupy().cuda.Device(device_id).compute_capability)


@functools.cache
def multiprocessors(device_id: int) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    return int(backend.cupy().cuda.runtime.getDeviceProperties(device_id)["multiProcessorCount"])


@functools.cache
def shared_memory_per_block(device_id: int) -> int:
    """Return the bytes of shared memory, static and dynamic, that a block can have on this GPU."""
    return int(backend.cupy().cuda.runtime.getDeviceProperties(device_id)["sharedMemPerBlockOptin"])


def current_stream(device_id: int) -> int:
    """Return the handle of a device's current stream, on which kernels are launched."""
    cuda = backend.cupy().cuda
    if device_id == cuda.runtime.getDevice():
        return int(cuda.get_current_stream().ptr)
    with cuda.Device(device_id):
        return int(cuda.get_current_stream().ptr)


def capturing(device_id: int) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    return bool(backend.cupy().cuda.runtime.streamIsCapturing(current_stream(device_id)))


# ---- grids ----
def grid_size(blocks: int, shape: tuple[int, ...], name: str = "x") -> int:
    """Return the blocks of a grid, at least one. ValueError, naming the argument, for more than the
    hardware's 2**31 - 1."""
    if blocks > 0x7FFFFFFF:
        raise ValueError(f"{name}: an array of shape {shape} needs {blocks} blocks, more than a launch can "
                         "have (2**31 - 1); split the array")
    return blocks or 1
