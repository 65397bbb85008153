"""Kernel: an entry point of a source file. Variant: that entry point compiled for a choice of types and
options. Launch: a variant with its grid and the values of its parameter struct."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import backend
from ..formats import FORMATS
from . import cubin, sources, structs
from .driver import driver

COMPILE_OPTIONS = ("-std=c++17",)
_ON_CPU = -1                        # device of launches of NumPy arrays
#: Static and dynamic shared memory available without opting in.
_SHARED_BY_DEFAULT = 48 << 10

#: Called with a line of text when a kernel is compiled; the command line prints it.
_announce: Callable[[str], None] | None = None


def announce(callback: Callable[[str], None] | None) -> None:
    """Call `callback` with a line of text whenever a kernel is compiled; None for silence."""
    global _announce
    _announce = callback


class Kernel:
    """The entry point `entry` of kernels_cu/<source>.cu, or of a .cu file elsewhere whose path is given. The
    kernel's parameter struct is read from there when it is first needed.

    block: threads per block, for kernels whose variants all have the same number.
    cooperative: its blocks wait for each other, so all blocks of a grid must be resident.
    waits: its blocks wait only for blocks that already run, so a GPU may run any number of them at a time
    (the CPU runs all).
    cluster: neighbouring blocks that share their shared memory; grids are multiples of it, and the source
    says the same to the compiler.
    arch: the only architecture, whose own instructions it uses ("sm_90a"); None: any GPU."""

    def __init__(self, source: str | Path, entry: str, *, block: int = 0, cooperative: bool = False,
                 waits: bool = False, cluster: int = 1, arch: str | None = None) -> None:
        self.source, self.entry, self.block = str(source).removesuffix(".cu"), entry, block
        self.cooperative, self.resident_on_cpu = cooperative, cooperative or waits
        self.cluster, self.arch = cluster, arch
        self._variants: dict[tuple[int, int, tuple[tuple[str, str], ...]], Variant] = {}

    @functools.cached_property
    def layout(self) -> structs.StructLayout:
        """Layout of its parameter struct."""
        return structs.of_entry(self.source, self.entry)

    @property
    def params(self) -> struct.Struct:
        """Packer of the members of its parameter struct, in order."""
        return self.layout.packer

    def record(self, name: str) -> structs.StructLayout:
        """Return the layout of another struct of its source: a record of a table that it reads."""
        return structs.named(self.source, name)

    def constant(self, name: str) -> int:
        """Return a number that its source declares: ``constexpr int name = …``."""
        return structs.constant(self.source, name)

    def variant(self, *, block: int = 0, shared: int = 0, **defines: str | int | np.dtype[Any]) -> Variant:
        """Return the entry point with these `defines`, for blocks of `block` threads (0: the kernel's own
        number) and `shared` bytes of dynamic shared memory. The same choice gives the same variant, which its
        first launch compiles. A define can be a dtype, which stands for its format's name in
        kernels_cu/include/numerics/formats.cuh, or a bool, which becomes 0 or 1."""
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
    """A kernel compiled for one choice of types and options."""

    def __init__(self, kernel: Kernel, block: int, shared: int, defines: tuple[tuple[str, str], ...]) -> None:
        self.kernel, self.block, self.shared, self.defines = kernel, block, shared, defines
        self.cooperative = kernel.cooperative
        #: handle of the loaded function on each device
        self.functions: dict[int, int] = {}
        self._modules: list[Any] = []                      # keeps the loaded code alive
        self._lock = threading.Lock()

    @functools.cached_property
    def pack_into(self) -> Callable[..., None]:
        """Packer of the values of its parameter struct into a buffer."""
        return self.kernel.params.pack_into

    def bind(self, x: Any, grid: int, /, *, shared: int | None = None, block: int | None = None,
             **members: Any) -> Launch:
        """Return a launch for x's kind and device, which can run repeatedly. members: members of the kernel's
        struct by name; the others are 0. shared, block: bytes of dynamic shared memory, and threads per
        block, if fewer than the variant's."""
        layout = self.kernel.layout
        return Launch(self, x, grid, layout.values(members), self.shared if shared is None else shared,
                      self.block if block is None else block)

    def run_on_cpu(self, grid: int, values: Sequence[Any], shared: int, block: int) -> None:
        """Run it on NumPy arrays, compiled for the CPU."""
        self._host_function()((grid,), (block,), self.kernel.params.pack(*values), shared_mem=shared,
                              resident=self.kernel.resident_on_cpu, cluster=self.kernel.cluster)

    def run_ranks_on_cpu(self, grid: int, block: int, ranks: Sequence[Sequence[Any]]) -> None:
        """Run a grid of it for each rank, each with its own values, all at the same time."""
        packed = [self.kernel.params.pack(*values) for values in ranks]
        self._host_function()((grid,), (block,), packed[0], shared_mem=self.shared, ranks=packed)

    def compile(self, device: int | None) -> None:
        """Compile it before its first launch, for a GPU, or for the CPU (None). Several threads may compile
        at the same time, since others run while NVRTC or g++ compiles."""
        if device is None:
            self._host_function()
            return
        cuda = backend.cupy().cuda
        with cuda.Device(device):
            cuda.runtime.free(0)            # makes the device's context current in the thread
            self.load(device)

    def load(self, device: int) -> int:
        """Return the handle of the function on a device; compiles and loads it if necessary."""
        with self._lock:
            if device in self.functions:
                return self.functions[device]
            backend.check_device(device)
            cp = backend.cupy()
            driver.bind(cp.cuda)
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
                self.functions[device] = function.kernel.ptr
            self._modules.append((module, function))
            return self.functions[device]

    def _host_function(self) -> Any:
        from .. import hostexec

        source, entry = self.kernel.source, self.kernel.entry
        return hostexec.compile_kernel(sources.path(source), entry, include_dirs=[sources.root() / "include"],
                                       defines=sources.all_defines(entry, dict(self.all_defines())))

    def all_defines(self) -> tuple[tuple[str, str], ...]:
        """The defines, plus the integer conversions of older GPUs if CUPY_FP8_BITCODE=1 is in the environment
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


class Launch:
    """A kernel variant with its grid and the values of its struct's members, launched on the current stream
    of x's device, or on the CPU for a NumPy x. shared: bytes of dynamic shared memory; block: threads per
    block."""

    def __init__(self, variant: Variant, x: Any, grid: int, values: list[Any], shared: int,
                 block: int) -> None:
        self.variant, self.grid, self.values, self.shared = variant, grid, values, shared
        self.block = block
        self.device = _ON_CPU if isinstance(x, np.ndarray) else x.data.device_id
        self._kept = 0              # after `keep`: address of a pointer to the packed struct

    @property
    def pointer_positions(self) -> Sequence[int]:
        """Indices of the values that are addresses."""
        return self.variant.kernel.layout.pointers

    def run(self) -> None:
        self.start(self.values, self._kept)

    def run_with(self, values: list[Any]) -> None:
        """Run the same launch with other values."""
        self.start(values, 0)

    def keep(self) -> None:
        """Pack the values once, for a launch that is run repeatedly."""
        packed = self.variant.kernel.params.pack(*self.values)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self._kept = ctypes.addressof(self._pointer)

    def start(self, values: list[Any], kept: int) -> None:
        """Launch. Every launch of every op comes through here, so it does nothing avoidable. kept: address of
        a pointer to the values' bytes; 0: they are packed here."""
        variant, device = self.variant, self.device
        if device == _ON_CPU:
            variant.run_on_cpu(self.grid, values, self.shared, self.block)
            return
        function = variant.functions.get(device) or variant.load(device)
        if device != driver.get_device():
            with backend.cupy().cuda.Device(device):
                self.start(values, kept)
            return
        thread = driver.thread
        pointers = thread.pointers          # first access in a thread makes the device's context current
        if kept:
            pointers = kept
        else:
            variant.pack_into(thread.buffer, 0, *values)
        stream = driver.get_current_stream().ptr
        if variant.cooperative:
            driver.launch_cooperative_kernel(function, self.grid, 1, 1, self.block, 1, 1, self.shared,
                                             stream, pointers)
        else:
            driver.launch_kernel(function, self.grid, 1, 1, self.block, 1, 1, self.shared, stream,
                                 pointers, 0)


@contextmanager
def recording() -> Iterator[list[Variant]]:
    """Within this context no thread launches a kernel; the list gets the variant of every launch instead."""
    variants: list[Variant] = []
    start: Any = Launch.start
    Launch.start = lambda launch, *_: variants.append(launch.variant)  # type: ignore[method-assign]
    try:
        yield variants
    finally:
        Launch.start = start  # type: ignore[method-assign]
