"""A launch: a kernel variant with its grid and the values of its parameter struct."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import backend

if TYPE_CHECKING:
    from .kernel import Variant

_ON_CPU = -1                        # the device of a launch of NumPy arrays
_MOST_PARAMETER_BYTES = 1 << 15     # CUDA takes less


class Launch:
    """A kernel variant with its grid and the values of its struct's members, which are launched on the
    current stream of the device that has x, or on the CPU for a NumPy x. shared: bytes of dynamic shared
    memory."""

    def __init__(self, variant: Variant, x: Any, grid: int, values: list[Any], shared: int) -> None:
        self.variant, self.grid, self.values, self.shared = variant, grid, values, shared
        self.device = _ON_CPU if isinstance(x, np.ndarray) else x.data.device_id
        self._kept = 0              # the address of a pointer to the packed struct, after `keep`

    @property
    def pointer_positions(self) -> Sequence[int]:
        """Which of the values are addresses."""
        return self.variant.kernel.layout.pointers

    def run(self) -> None:
        self.start(self.values, self._kept)

    def run_with(self, values: list[Any]) -> None:
        """The same launch with other values."""
        self.start(values, 0)

    def keep(self) -> None:
        """Pack the values once, for a launch that is run again and again."""
        packed = self.variant.kernel.params.pack(*self.values)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self._kept = ctypes.addressof(self._pointer)

    def start(self, values: list[Any], kept: int) -> None:
        """Every launch of every op comes through here, so it does nothing avoidable. kept: the address of a
        pointer to the values' bytes; 0: they are packed here."""
        variant, device = self.variant, self.device
        if device == _ON_CPU:
            variant.run_on_cpu(self.grid, values, self.shared)
            return
        function = variant.functions.get(device) or variant.load(device)
        if device != driver.get_device():
            with backend.cupy().cuda.Device(device):
                self.start(values, kept)
            return
        thread = driver.thread
        pointers = thread.pointers          # The first look in a thread makes the device's context current.
        if kept:
            pointers = kept
        else:
            variant.pack_into(thread.buffer, 0, *values)
        stream = driver.get_current_stream().ptr
        if variant.cooperative:
            driver.launch_cooperative_kernel(function, self.grid, 1, 1, variant.block, 1, 1, self.shared,
                                             stream, pointers)
        else:
            driver.launch_kernel(function, self.grid, 1, 1, variant.block, 1, 1, self.shared, stream,
                                 pointers, 0)


class _Thread(threading.local):
    """A thread's buffer for the packed values of a launch, which CUDA copies, and the address of a pointer to
    it."""

    def __init__(self, cuda: Any) -> None:
        self.buffer = ctypes.create_string_buffer(_MOST_PARAMETER_BYTES)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.pointers = ctypes.addressof(self._pointer)
        cuda.runtime.free(0)                # makes the device's context current in this thread


class _Driver:
    """What a launch needs of CUDA. It is looked up when the first variant is loaded."""

    get_device: Callable[[], int]
    get_current_stream: Callable[[], Any]
    launch_kernel: Callable[..., None]
    launch_cooperative_kernel: Callable[..., None]
    thread: _Thread

    def bind(self, cuda: Any) -> None:
        if hasattr(self, "thread"):
            return
        self.get_device, self.get_current_stream = cuda.runtime.getDevice, cuda.get_current_stream
        self.launch_kernel = cuda.driver.launchKernel
        self.launch_cooperative_kernel = cuda.driver.launchCooperativeKernel
        self.thread = _Thread(cuda)


driver = _Driver()


@contextmanager
def recording() -> Iterator[list[Variant]]:
    """Within it no thread launches a kernel: the list gets the variant of every launch instead."""
    variants: list[Variant] = []
    start: Any = Launch.start
    Launch.start = lambda launch, *_: variants.append(launch.variant)  # type: ignore[method-assign]
    try:
        yield variants
    finally:
        Launch.start = start  # type: ignore[method-assign]
