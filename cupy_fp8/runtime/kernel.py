"""A kernel is one entry point of one source file; a variant is that entry point compiled for one choice of types and options."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from .. import backend
from . import sources

COMPILE_OPTIONS = ("-std=c++17",)

#: Called with a line of text when a kernel is compiled (the command line prints it). None: silence.
_announce: Callable[[str], None] | None = None
_forced: ContextVar[str | None] = ContextVar("cupy_fp8_executor", default=None)


def announce(callback: Callable[[str], None] | None) -> None:
    """Have `callback` called with a line of text whenever a kernel is compiled; None for silence."""
    global _announce
    _announce = callback


@contextmanager
def forced_executor(name: str) -> Iterator[None]:
    """Within it NumPy arrays run the kernels on the CPU ('host') instead of the reference ('reference')."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def executor_of(xp: Any) -> str:
    """'cuda' for CuPy arrays; for NumPy arrays 'reference', or 'host' inside `forced_executor('host')`."""
    return "cuda" if xp is not np else _forced.get() or "reference"


class Kernel:
    """The entry point `entry` of kernels_cu/<family>.cu and the layout of its parameter struct (`struct` module codes).

    >>> cast = Kernel("cast", "cast", "8P3qfI")
    >>> cast.launch(x, variant, grid, block, shared, values)   # doctest: +SKIP
    """

    def __init__(self, family: str, entry: str, fields: str) -> None:
        self.family, self.entry = family, entry
        self.params = struct.Struct(f"@{fields}0q")        # 0q: padded at the end as C++ pads a struct of 8-byte members
        self._functions: dict[tuple[int, tuple[Any, ...]], int] = {}
        self._modules: list[Any] = []                      # keeps the loaded code alive
        self._local = _LaunchBuffers(self.params.size)
        self._lock = threading.Lock()

    def launch(self, x: Any, variant: tuple[tuple[str, Any], ...], grid: int, block: int, shared: int, *values: Any) -> None:
        """Run on the current stream of x's device, or on the CPU for a NumPy x.

        variant: pairs of define and value, hashable and always in the same order. values: the struct's members.
        """
        if isinstance(x, np.ndarray):
            self._host_function(variant)((grid,), (block,), self.params.pack(*values), shared_mem=shared)
            return
        cp_cuda = backend.cupy().cuda
        device = x.data.device_id
        if device != cp_cuda.runtime.getDevice():
            with cp_cuda.Device(device):
                self.launch(x, variant, grid, block, shared, *values)
            return
        function = self._functions.get((device, variant))
        if function is None:
            function = self._load(device, variant, shared)
        local = self._local
        self.params.pack_into(local.buffer, 0, *values)
        cp_cuda.driver.launchKernel(function, grid, 1, 1, block, 1, 1, shared, cp_cuda.get_current_stream().ptr, local.pointers, 0)

    def _load(self, device: int, variant: tuple[tuple[str, Any], ...], shared: int) -> int:
        with self._lock:
            if (device, variant) in self._functions:
                return self._functions[device, variant]
            backend.check_device(device)
            cp = backend.cupy()
            with _announced(self, variant, f"sm_{cp.cuda.Device(device).compute_capability}"):
                module = cp.RawModule(code=sources.program(self.family, self.entry, _as_text(variant)),
                                      options=(*COMPILE_OPTIONS, f"-I{sources.root() / 'include'}"))
                function = module.get_function(self.entry)
                if shared > 48 << 10:
                    function.max_dynamic_shared_size_bytes = shared
            self._modules.append((module, function))
            self._functions[device, variant] = function.kernel.ptr
            return self._functions[device, variant]

    def _host_function(self, variant: tuple[tuple[str, Any], ...]) -> Any:
        from .. import hostexec

        return hostexec.compile_kernel(sources.root() / f"{self.family}.cu", self.entry, defines=sources.all_defines(
            self.entry, dict(_as_text(variant))), include_dirs=[sources.root() / "include"])


class _LaunchBuffers(threading.local):
    """The parameter struct and the pointer to it that a launch takes: one of each per thread, reused."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.pointers = ctypes.addressof(self._pointer)
        if backend.gpu_problem() is None:
            backend.cupy().cuda.runtime.free(0)            # makes the device's context current in this thread


@contextmanager
def _announced(kernel: Kernel, variant: tuple[tuple[str, Any], ...], target: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if _announce:
        choice = ", ".join(f"{name}={value}" for name, value in variant)
        _announce(f"compiling {kernel.family}.cu: {kernel.entry} [{choice}] for {target} … {time.perf_counter() - start:.2f} s")


@functools.cache
def _as_text(variant: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    extra = [("CUPY_FP8_BITCODE", "1")] if os.environ.get("CUPY_FP8_BITCODE") else []
    return tuple((name, str(value)) for name, value in (*variant, *extra))


@functools.cache
def multiprocessors(device_id: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(backend.cupy().cuda.runtime.getDeviceProperties(device_id)["multiProcessorCount"])


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    cp_cuda = backend.cupy().cuda
    return bool(cp_cuda.runtime.streamIsCapturing(cp_cuda.get_current_stream().ptr))
