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
_SHARED_BY_DEFAULT = 48 << 10       # bytes of shared memory, static and dynamic, that a launch gets without asking

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
    cooperative: its blocks wait for each other, so all of a grid must be resident."""

    def __init__(self, family: str, entry: str, fields: str, cooperative: bool = False) -> None:
        self.family, self.entry, self.cooperative = family, entry, cooperative
        self.params = struct.Struct(f"@{fields}0q")        # 0q: padded at the end as C++ pads a struct of 8-byte members

    def variant(self, *, block: int, shared: int = 0, **defines: str | int) -> Variant:
        """The entry point compiled with `defines`, for blocks of `block` threads and `shared` bytes of dynamic shared memory.
        Compiled at its first launch. Make it once and keep it."""
        return Variant(self, block, shared, tuple((name, str(value)) for name, value in defines.items()))


class Variant:
    """A compiled choice of a kernel. `launch` is the path every op takes on every call: nothing avoidable belongs in it."""

    def __init__(self, kernel: Kernel, block: int, shared: int, defines: tuple[tuple[str, str], ...]) -> None:
        self.kernel, self.block, self.shared, self.cooperative, self.defines = kernel, block, shared, kernel.cooperative, defines
        self._pack_into = kernel.params.pack_into
        self._functions: dict[int, int] = {}               # by device
        self._modules: list[Any] = []                      # keeps the loaded code alive
        self._local = _LaunchBuffers(kernel.params.size)
        self._lock = threading.Lock()

    def launch(self, x: Any, grid: int, *values: Any, shared: int | None = None) -> None:
        """Run `grid` blocks on the current stream of x's device, or on the CPU for a NumPy x. values: the struct's members; shared:
        bytes of dynamic shared memory, where a launch wants less than the variant's."""
        if shared is None:
            shared = self.shared
        if isinstance(x, np.ndarray):
            self._host_function()((grid,), (self.block,), self.kernel.params.pack(*values), shared_mem=shared,
                                  resident=self.cooperative)
            return
        device = x.data.device_id
        function = self._functions.get(device) or self._load(device)
        if device != _driver.get_device():
            with _cuda().Device(device):
                self.launch(x, grid, *values, shared=shared)
            return
        local = self._local
        self._pack_into(local.buffer, 0, *values)
        stream = _driver.get_current_stream().ptr
        if self.cooperative:
            _driver.launch_cooperative_kernel(function, grid, 1, 1, self.block, 1, 1, shared, stream, local.pointers)
        else:
            _driver.launch_kernel(function, grid, 1, 1, self.block, 1, 1, shared, stream, local.pointers, 0)

    def compile(self, device: int | None) -> None:
        """Compile it before its first launch, for a GPU or (None) for the CPU. Several threads may compile at the same time: CuPy lets
        other threads run while NVRTC compiles, and so does waiting for g++."""
        if device is None:
            self._host_function()
            return
        with _cuda().Device(device):
            _cuda().runtime.free(0)                        # makes the device's context current in this thread
            self._load(device)

    def _load(self, device: int) -> int:
        with self._lock:
            if device in self._functions:
                return self._functions[device]
            backend.check_device(device)
            cp = backend.cupy()
            _driver.bind(cp.cuda)
            with cp.cuda.Device(device), self._announced(f"sm_{cp.cuda.Device(device).compute_capability}"):
                module = cp.RawModule(code=sources.program(self.kernel.family, self.kernel.entry, self.all_defines()),
                                      options=(*COMPILE_OPTIONS, f"-I{sources.root() / 'include'}"))
                function = module.get_function(self.kernel.entry)
                if self.shared + function.shared_size_bytes > _SHARED_BY_DEFAULT:
                    function.max_dynamic_shared_size_bytes = self.shared
                self._functions[device] = function.kernel.ptr
            self._modules.append((module, function))
            return self._functions[device]

    def _host_function(self) -> Any:
        from .. import hostexec

        family, entry = self.kernel.family, self.kernel.entry
        return hostexec.compile_kernel(sources.root() / f"{family}.cu", entry, include_dirs=[sources.root() / "include"],
                                       defines=sources.all_defines(entry, dict(self.all_defines())))

    def all_defines(self) -> tuple[tuple[str, str], ...]:
        """The defines and, with CUPY_FP8_BITCODE=1 in the environment, the integer conversions of older GPUs (for tests)."""
        return (*self.defines, ("CUPY_FP8_BITCODE", "1")) if os.environ.get("CUPY_FP8_BITCODE") == "1" else self.defines

    @contextmanager
    def _announced(self, target: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if _announce:
            choice = ", ".join(f"{name}={value}" for name, value in self.defines)
            _announce(f"compiling {self.kernel.family}.cu: {self.kernel.entry} [{choice}] for {target} … "
                      f"{time.perf_counter() - start:.2f} s")


class _Driver:
    """The CUDA calls of a launch, looked up once."""

    get_device: Callable[[], int]
    get_current_stream: Callable[[], Any]
    launch_kernel: Callable[..., None]
    launch_cooperative_kernel: Callable[..., None]

    def bind(self, cuda: Any) -> None:
        self.get_device, self.get_current_stream = cuda.runtime.getDevice, cuda.get_current_stream
        self.launch_kernel, self.launch_cooperative_kernel = cuda.driver.launchKernel, cuda.driver.launchCooperativeKernel


_driver = _Driver()


class _LaunchBuffers(threading.local):
    """The parameter struct and the pointer to it that a launch takes: one of each per thread, reused."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.pointers = ctypes.addressof(self._pointer)
        if backend.gpu_problem() is None:
            _cuda().runtime.free(0)                        # makes the device's context current in this thread


@functools.cache
def _cuda() -> Any:
    return backend.cupy().cuda


@functools.cache
def multiprocessors(device_id: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(_cuda().runtime.getDeviceProperties(device_id)["multiProcessorCount"])


@functools.cache
def shared_memory_per_block(device_id: int) -> int:
    """Bytes of shared memory, static and dynamic, that a block of this GPU can have."""
    return int(_cuda().runtime.getDeviceProperties(device_id)["sharedMemPerBlockOptin"])


def current_stream(device_id: int) -> int:
    """The handle of a device's current stream: where `Variant.launch` launches for its arrays."""
    cuda = _cuda()
    if device_id == cuda.runtime.getDevice():
        return int(cuda.get_current_stream().ptr)
    with cuda.Device(device_id):
        return int(cuda.get_current_stream().ptr)


def capturing(device_id: int) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    return bool(_cuda().runtime.streamIsCapturing(current_stream(device_id)))
