"""The CUDA calls of a launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

_MOST_PARAMETER_BYTES = 1 << 15     # CUDA's limit for kernel parameters


class _Thread(threading.local):
    """A thread's buffer for the packed values of a launch, which CUDA copies, and the address of a pointer to
    it."""

    def __init__(self, cuda: Any) -> None:
        self.buffer = ctypes.create_string_buffer(_MOST_PARAMETER_BYTES)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.pointers = ctypes.addressof(self._pointer)
        cuda.runtime.free(0)                # makes the device's context current in the thread


class Driver:
    """CUDA functions of a launch, looked up when the first variant is loaded."""

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


driver = Driver()
