"""A stand-in for CuPy: arrays lie in the CPU's memory, and kernels run on the CPU.

Calls take the path of a GPU: results are views of one allocation, workspaces belong to arrays or streams,
devices are compared, and a capture records launches, which its graph replays with the same parameters. An
allocation during a capture is an error. Streams run in order, so nothing here shows a missing
synchronisation.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import fake_cublaslt
import numpy as np
import pytest

from cupy_fp8 import backend
from cupy_fp8.kernels import OwnedMemory, Variant, errors, kernel, tensor_map
from cupy_fp8.kernels.driver import Driver
from cupy_fp8.ops.quantize import single_read, tensor_current

#: Numbers of devices that no machine has, since some facts of devices are cached.
DEVICES = (40, 41)
_ALIGNMENT, _POISON = 512, 0xAA
_workspaces = sys.modules["cupy_fp8.kernels.workspace"]


class _State:
    """The current device and stream, and what the captured stream has recorded; None: no capture."""

    def __init__(self) -> None:
        self.device = DEVICES[0]
        self.streams: list[Stream] = []
        self.recorded: list[Callable[[], Any]] | None = None


_state = _State()


class MemoryPointer:
    """An address in a buffer of bytes."""

    def __init__(self, buffer: np.ndarray, device_id: int, start: int = 0) -> None:
        self.buffer, self.device_id, self.start = buffer, device_id, start
        self.ptr = buffer.ctypes.data + start

    def __add__(self, more: int) -> MemoryPointer:
        return MemoryPointer(self.buffer, self.device_id, self.start + more)

    def copy_from_device_async(self, source: MemoryPointer, nbytes: int) -> None:
        ctypes.memmove(self.ptr, source.ptr, nbytes)

    def copy_from_host_async(self, source: int, nbytes: int, stream: Any = None) -> None:
        ctypes.memmove(self.ptr, source, nbytes)


def alloc(nbytes: int) -> MemoryPointer:
    """Allocate poisoned memory on the current device."""
    if _state.recorded is not None:
        raise AssertionError("memory was allocated while a graph is captured")
    buffer = np.full(nbytes + 2 * _ALIGNMENT, _POISON, np.uint8)
    return MemoryPointer(buffer, _state.device, -buffer.ctypes.data % _ALIGNMENT)


class ndarray:
    """As much of CuPy's class as calls and tests need."""

    __module__ = "cupy"

    def _init(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None,
              strides: Any = None) -> None:
        dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        at = alloc(int(np.prod(shape)) * dtype.itemsize) if memptr is None else memptr
        self._set(np.ndarray(shape, dtype, at.buffer, at.start, strides), at.buffer, at.device_id, None)

    __init__ = _init

    def _set(self, a: np.ndarray, buffer: np.ndarray, device_id: int, base: ndarray | None) -> None:
        self.on_host, self.base = a, base
        self.data = MemoryPointer(buffer, device_id, a.ctypes.data - buffer.ctypes.data)
        self._c_contiguous = a.flags.c_contiguous

    def _view(self, a: np.ndarray) -> ndarray:
        made = ndarray.__new__(ndarray)
        made._set(a, self.data.buffer, self.data.device_id, self if self.base is None else self.base)
        return made

    shape, dtype, strides, size, nbytes, itemsize, ndim, flags = (
        property(attrgetter(f"on_host.{name}"))
        for name in ("shape", "dtype", "strides", "size", "nbytes", "itemsize", "ndim", "flags"))
    T = property(lambda self: self._view(self.on_host.T))
    __cuda_array_interface__ = property(lambda self: {"data": (self.data.ptr, False)})

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self) -> int:
        return len(self.on_host)

    def __bool__(self) -> bool:
        return bool(self.on_host)

    def __int__(self) -> int:
        return int(self.on_host.reshape(()))

    def __float__(self) -> float:
        return float(self.on_host.reshape(()))

    def __getitem__(self, key: Any) -> ndarray:
        if isinstance(key, int) or (isinstance(key, tuple) and ... not in key):
            key = (*key, ...) if isinstance(key, tuple) else (key, ...)
        return self._view(self.on_host[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.on_host[key] = getattr(value, "on_host", value)

    def view(self, dtype: Any) -> ndarray:
        return self._view(self.on_host.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self.on_host.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> ndarray:
        return self._view(self.on_host.swapaxes(first, second))

    def fill(self, value: Any) -> None:
        self.on_host.fill(value)

    def copy(self) -> ndarray:
        return _placed(self.on_host)

    def get(self) -> np.ndarray:
        return self.on_host.copy()

    def set(self, a: np.ndarray) -> None:
        self.on_host[...] = a


def asarray(a: Any) -> ndarray:
    return a if isinstance(a, ndarray) else _placed(np.asarray(a))


def _placed(a: np.ndarray) -> ndarray:
    made = ndarray(a.shape, a.dtype)
    made.on_host[...] = a
    return made


def ascontiguousarray(a: ndarray) -> ndarray:
    return a if a._c_contiguous else _placed(np.ascontiguousarray(a.on_host))


def zeros(shape: Any, dtype: Any) -> ndarray:
    made = ndarray(shape, dtype)
    made.on_host[...] = 0
    return made


class Device(AbstractContextManager["Device"]):
    compute_capability = "90"

    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> Device:
        self._before, _state.device = _state.device, self.id
        return self

    def __exit__(self, *_: Any) -> None:
        _state.device = self._before

    def synchronize(self) -> None:
        pass


class Stream(AbstractContextManager["Stream"]):
    _numbers = itertools.count(1)

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(self._numbers)

    def __enter__(self) -> Stream:
        _state.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _state.streams.pop()

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        _state.recorded = []

    def end_capture(self) -> Graph:
        recorded, _state.recorded = _state.recorded, None
        assert recorded is not None
        return Graph(recorded)


class Graph:
    def __init__(self, launches: list[Callable[[], Any]]) -> None:
        self._launches = launches

    def launch(self, stream: Stream | None = None) -> None:
        for run in self._launches:
            run()


#: loaded variants by function handle
_loaded: dict[int, Variant] = {}


def _load(variant: Variant, device: int) -> int:
    handle = variant.functions[device] = id(variant)
    _loaded[handle] = variant
    return handle


def _launch(function: int, grid: int, _y: int, _z: int, block: int, _block_y: int, _block_z: int, shared: int,
            stream: int, pointers: int, *_: Any) -> None:
    """The driver's launch: copies the parameters and runs the kernel on the CPU."""
    variant = _loaded[function]
    at = ctypes.c_void_p.from_address(pointers).value
    assert at is not None
    packed, on_cpu = ctypes.string_at(at, variant.kernel.params.size), variant._host_function()
    _record_or_run(lambda: on_cpu((grid,), (block,), packed, shared_mem=shared,
                                  resident=variant.kernel.resident_on_cpu, cluster=variant.kernel.cluster))


def _module() -> Any:
    module: Any = types.ModuleType("cupy")
    default = Stream()
    properties = {"multiProcessorCount": 12, "sharedMemPerBlockOptin": 227 << 10}
    runtime = types.SimpleNamespace(getDevice=lambda: _state.device, getDeviceCount=lambda: len(DEVICES),
                                    free=lambda at: None,
                                    streamIsCapturing=lambda stream: _state.recorded is not None,
                                    getDeviceProperties=lambda device: properties,
                                    deviceSynchronize=lambda: None)
    module.cuda = types.SimpleNamespace(
        runtime=runtime, alloc=alloc, Device=Device, Stream=Stream,
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        driver=types.SimpleNamespace(launchKernel=_launch, launchCooperativeKernel=_launch),
        get_current_stream=lambda: _state.streams[-1] if _state.streams else default)
    vars(module).update(ndarray=ndarray, asarray=asarray, ascontiguousarray=ascontiguousarray, zeros=zeros)
    return module


def install(patch: pytest.MonkeyPatch) -> Any:
    """Return the module, used as CuPy by the package while `patch` lasts."""
    module, driver = _module(), Driver()
    _state.__init__()                                       # type: ignore[misc]
    driver.bind(module.cuda)
    patch.setitem(sys.modules, "cupy", module)
    for owner, name, value in (
            (backend, "cupy", lambda: module), (backend, "gpu_problem", lambda: None),
            (backend, "check_device", lambda device: None), (kernel, "driver", driver),
            (Variant, "load", _load), (Variant, "compile", lambda variant, device: None),
            (errors, "_words", {}), (_workspaces, "_of_results", OwnedMemory(dict)),
            (_workspaces, "_of_streams", {}), (single_read, "_gpu", lambda device: single_read._CPU),
            (tensor_current, "_gpu", lambda device: tensor_current._CPU),
            (tensor_map, "_encoded", tensor_map.on_host)):
        patch.setattr(owner, name, value)
    fake_cublaslt.install(patch, fake_cublaslt.FakeCublasLt(record=_record_or_run))
    return module


def _record_or_run(run: Callable[[], Any]) -> None:
    if _state.recorded is None:
        run()
    else:
        _state.recorded.append(run)
