"""A kernel is one entry point of one source file; a variant is that entry point compiled for one choice of
types and options."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..formats import FORMATS
from . import cubin, sources, structs

COMPILE_OPTIONS = ("-std=c++17",)
_ON_CPU = -1                        # the device of a launch of NumPy arrays
_SHARED_BY_DEFAULT = 48 << 10  # bytes of shared memory, static and dynamic, that a launch gets without asking

#: Called with a line of text when a kernel is compiled; the command line prints it. None: no call.
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


def executor_is_forced() -> bool:
    """Whether somebody chose what runs NumPy arrays: tests, and what only looks at a call."""
    return _forced.get() is not None


class Kernel:
    """The entry point `entry` of kernels_cu/<source>.cu, or of a .cu file elsewhere whose path is given. The
    kernel's parameter struct is read from there when it is first needed.

    block: the threads of a block, for kernels whose variants all have as many.
    cooperative: its blocks wait for each other, so all blocks of a grid must run at the same time.
    cluster: so many neighbouring blocks share their shared memory; grids are multiples of it, and the source
    says the same to the compiler.
    arch: the one architecture whose own instructions it uses ("sm_90a"); None: any GPU."""

    def __init__(self, source: str | Path, entry: str, *, block: int = 0, cooperative: bool = False,
                 cluster: int = 1, arch: str | None = None) -> None:
        self.source, self.entry, self.block = str(source).removesuffix(".cu"), entry, block
        self.cooperative, self.cluster, self.arch = cooperative, cluster, arch
        self._variants: dict[tuple[int, int, tuple[tuple[str, str], ...]], Variant] = {}

    @functools.cached_property
    def layout(self) -> structs.Layout:
        """Where the members of its parameter struct lie."""
        return structs.of_entry(self.source, self.entry)

    @property
    def params(self) -> struct.Struct:
        """Packs the members of its parameter struct, all of them in order."""
        return self.layout.packer

    def record(self, name: str) -> structs.Layout:
        """Another struct of its source: a record of a table that it reads."""
        return structs.named(self.source, name)

    def variant(self, *, block: int = 0, shared: int = 0, **defines: str | int | np.dtype[Any]) -> Variant:
        """The entry point with these `defines`, for blocks of `block` threads (0: the kernel's own number)
        and `shared` bytes of dynamic shared memory. The same choice gives the same variant, which its first
        launch compiles. A define can be a dtype, which stands for its format's name in
        kernels_cu/include/numerics/formats.cuh, or a truth value, which becomes 0 or 1."""
        texts = tuple([(name, _define(value)) for name, value in defines.items()])
        choice = block or self.block, shared, texts
        assert choice[0], f"{self.entry}: neither kernel nor variant says how many threads a block has"
        found = self._variants.get(choice)
        return self._variants.setdefault(choice, Variant(self, *choice)) if found is None else found


def _define(value: str | int | np.dtype[Any]) -> str:
    if isinstance(value, np.dtype):
        return FORMATS[value].tag
    return value if isinstance(value, str) else str(int(value))


class Variant:
    """A kernel compiled for one choice of types and options. Every call of every op goes through `launch`, so
    it does nothing avoidable."""

    def __init__(self, kernel: Kernel, block: int, shared: int, defines: tuple[tuple[str, str], ...]) -> None:
        self.kernel, self.block, self.shared, self.defines = kernel, block, shared, defines
        self.cooperative = kernel.cooperative
        self._functions: dict[int, int] = {}               # by device
        self._modules: list[Any] = []                      # keeps the loaded code alive
        self._lock = threading.Lock()

    @functools.cached_property
    def _pack_into(self) -> Callable[..., None]:
        return self.kernel.params.pack_into

    @functools.cached_property
    def _local(self) -> _LaunchBuffers:
        """Made by the first launch: modules make variants when they are imported, which must not start CUDA.
        """
        return _LaunchBuffers(self.kernel.params.size)

    def launch(self, x: Any, grid: int, *values: Any, shared: int | None = None) -> None:
        """Run `grid` blocks on the current stream of x's device, or on the CPU for a NumPy x. values: the
        struct's members; shared: bytes of dynamic shared memory, where a launch wants less than the
        variant's. Every launch comes through here. A `Launch` stands for x and has everything else."""
        local = self._local  # the first look makes the context current in a thread
        if type(x) is Launch:
            device, shared, pointers = x.device, x.shared, x.pointers
            if not pointers or device == _ON_CPU:
                values = tuple(x.values)
        else:
            device, pointers = _ON_CPU if isinstance(x, np.ndarray) else x.data.device_id, 0
            shared = self.shared if shared is None else shared
        if device == _ON_CPU:
            self._host_function()((grid,), (self.block,), self.kernel.params.pack(*values), shared_mem=shared,
                                  resident=self.cooperative, cluster=self.kernel.cluster)
            return
        if not pointers:
            self._pack_into(local.buffer, 0, *values)
            pointers = local.pointers
        function = self._functions.get(device) or self._load(device)
        if device != _driver.get_device():
            with _cuda().Device(device):
                if type(x) is Launch:
                    x.run()
                else:
                    self.launch(x, grid, *values, shared=shared)
            return
        stream = _driver.get_current_stream().ptr
        if self.cooperative:
            _driver.launch_cooperative_kernel(function, grid, 1, 1, self.block, 1, 1, shared, stream,
                                              pointers)
        else:
            _driver.launch_kernel(function, grid, 1, 1, self.block, 1, 1, shared, stream, pointers, 0)

    def bind(self, x: Any, grid: int, /, *, shared: int | None = None, **members: Any) -> Launch:
        """A launch for x's kind and device, which can run again and again. members: the members of the
        kernel's struct by name; the others are 0."""
        layout = self.kernel.layout
        return Launch(self, x, grid, layout.values(members), self.shared if shared is None else shared)

    def compile(self, device: int | None) -> None:
        """Compile it before its first launch, for a GPU, or for the CPU (None). Several threads may compile
        at the same time, since others run while NVRTC or g++ compiles."""
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
                program = sources.program(self.kernel.source, self.kernel.entry, self.all_defines())
                options = (*COMPILE_OPTIONS, f"-I{sources.root() / 'include'}")
                if self.kernel.arch is None:
                    module = cp.RawModule(code=program, options=options)
                else:
                    module = cp.RawModule(path=str(cubin.path(program, self.kernel.arch, options)))
                function = module.get_function(self.kernel.entry)
                if self.shared + function.shared_size_bytes > _SHARED_BY_DEFAULT:
                    function.max_dynamic_shared_size_bytes = self.shared
                self._functions[device] = function.kernel.ptr
            self._modules.append((module, function))
            return self._functions[device]

    def _host_function(self) -> Any:
        from .. import hostexec

        source, entry = self.kernel.source, self.kernel.entry
        return hostexec.compile_kernel(sources.path(source), entry, include_dirs=[sources.root() / "include"],
                                       defines=sources.all_defines(entry, dict(self.all_defines())))

    def all_defines(self) -> tuple[tuple[str, str], ...]:
        """The defines and, with CUPY_FP8_BITCODE=1 in the environment, the integer conversions of older GPUs
        (for tests)."""
        bitcode = os.environ.get("CUPY_FP8_BITCODE") == "1"
        return (*self.defines, ("CUPY_FP8_BITCODE", "1")) if bitcode else self.defines

    @contextmanager
    def _announced(self, target: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if _announce:
            choice = ", ".join(f"{name}={value}" for name, value in self.defines)
            _announce(f"compiling {self.kernel.source}.cu: {self.kernel.entry} [{choice}] for {target} … "
                      f"{time.perf_counter() - start:.2f} s")


@contextmanager
def recording() -> Iterator[list[Variant]]:
    """Within it no thread launches a kernel: the list gets the variant of every launch instead."""
    variants: list[Variant] = []
    launch: Any = Variant.launch
    Variant.launch = lambda variant, *_, **__: variants.append(variant)  # type: ignore[method-assign]
    try:
        yield variants
    finally:
        Variant.launch = launch  # type: ignore[method-assign]


class Launch:
    """A kernel variant with its grid and the values of its struct's members, to be launched on the current
    stream."""

    def __init__(self, variant: Variant, x: Any, grid: int, values: list[Any], shared: int) -> None:
        self.variant, self.grid, self.values, self.shared = variant, grid, values, shared
        self.device = _ON_CPU if isinstance(x, np.ndarray) else x.data.device_id
        #: The address of the pointers to the kernel's arguments, after `keep`.
        self.pointers = 0

    @property
    def pointer_positions(self) -> Sequence[int]:
        """Which of the values are addresses."""
        return self.variant.kernel.layout.pointers

    def run(self) -> None:
        self.variant.launch(self, self.grid)

    def run_with(self, x: Any, values: list[Any]) -> None:
        """The same launch with other values."""
        self.variant.launch(x, self.grid, *values, shared=self.shared)

    def keep(self) -> None:
        """Pack the parameters once, for a launch that is run again and again."""
        packed = self.variant.kernel.params.pack(*self.values)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self.pointers = ctypes.addressof(self._pointer)

    @property
    def packed(self) -> bytes:
        return self.variant.kernel.params.pack(*self.values)


class _Driver:
    """The CUDA calls of a launch, looked up once."""

    get_device: Callable[[], int]
    get_current_stream: Callable[[], Any]
    launch_kernel: Callable[..., None]
    launch_cooperative_kernel: Callable[..., None]

    def bind(self, cuda: Any) -> None:
        self.get_device, self.get_current_stream = cuda.runtime.getDevice, cuda.get_current_stream
        self.launch_kernel = cuda.driver.launchKernel
        self.launch_cooperative_kernel = cuda.driver.launchCooperativeKernel


_driver = _Driver()


class _LaunchBuffers(threading.local):
    """A thread's buffer for the parameter struct and the pointer to it. Launches reuse them."""

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
def compute_capability(device_id: int) -> int:
    """A GPU's compute capability times ten: 90 is Hopper."""
    return int(_cuda().Device(device_id).compute_capability)


@functools.cache
def multiprocessors(device_id: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(_cuda().runtime.getDeviceProperties(device_id)["multiProcessorCount"])


@functools.cache
def shared_memory_per_block(device_id: int) -> int:
    """Bytes of shared memory, static and dynamic, that a block of this GPU can have."""
    return int(_cuda().runtime.getDeviceProperties(device_id)["sharedMemPerBlockOptin"])


def current_stream(device_id: int) -> int:
    """The handle of a device's current stream, on which `Variant.launch` launches."""
    cuda = _cuda()
    if device_id == cuda.runtime.getDevice():
        return int(cuda.get_current_stream().ptr)
    with cuda.Device(device_id):
        return int(cuda.get_current_stream().ptr)


def capturing(device_id: int) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    return bool(_cuda().runtime.streamIsCapturing(current_stream(device_id)))


def grid_size(blocks: int, shape: tuple[int, ...]) -> int:
    """The blocks of a grid, at least one. ValueError for more than the hardware's 2**31 - 1."""
    if blocks > 0x7FFFFFFF:
        raise ValueError(f"x: shape {shape} needs {blocks} blocks, more than a launch can have (2**31 - 1); "
                         "split the array")
    return blocks or 1
