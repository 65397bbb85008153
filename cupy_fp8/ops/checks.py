"""Validation that every op shares. Everything here runs before anything is written; each message says what was expected, what
came and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import backend, runtime
from ..arrays import Array, contiguous
from ..formats import float32, names


def source(x: Array, dtypes: tuple[np.dtype[Any], ...], name: str = "x") -> tuple[Array, Any]:
    """(x ready for a kernel, its module): one of the dtypes, C-contiguous (copied if not), naturally aligned."""
    xp = backend.module_of(x, name)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names(dtypes)}, got {x.dtype}")
    if not x.flags.c_contiguous:
        if xp is not np and runtime.capturing():
            raise ValueError(f"{name}: not C-contiguous, and a copy cannot be made while a CUDA graph is captured; "
                             "copy it before the capture")
        x = contiguous(x)
    if address(x) % x.dtype.itemsize:
        if xp is not np:
            raise ValueError(f"{name}: address {address(x):#x} is not a multiple of the element size {x.dtype.itemsize}")
        x = x.copy()
    if xp is np:
        backend.note_large_numpy(x)
    return x, xp


def address(a: Array) -> int:
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def address_or_null(a: Array | None) -> int:
    return 0 if a is None else address(a)


def one_f32(a: Any, xp: Any, name: str) -> None:
    """A one-element f32 array of module xp."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.dtype != float32:
        raise TypeError(f"{name}: expected dtype float32, got {a.dtype}")
    if a.size != 1:
        raise ValueError(f"{name}: expected one element, got shape {a.shape}")
    if address(a) % 4:
        raise ValueError(f"{name}: address {address(a):#x} is not a multiple of 4")


def scalar_or_one_f32(a: Any, xp: Any, name: str) -> tuple[int, float]:
    """(address, 0) of a one-element f32 array, or (0, value) of a Python or NumPy scalar rounded to f32."""
    if isinstance(a, xp.ndarray):
        one_f32(a, xp, name)
        return address(a), 0.0
    if isinstance(a, (bool, np.bool_)) or not isinstance(a, (int, float, np.floating, np.integer)):
        backend.require_module(a, xp, name)
    with np.errstate(over="ignore"):
        return 0, float(np.float32(a))


def destination(a: Array, shape: tuple[int, ...], dtype: np.dtype[Any], x: Array, xp: Any, name: str) -> None:
    """`a` can receive a result of this shape and dtype computed from x: kind, dtype, shape, strides, device, no overlap with x."""
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {a.dtype}")
    if a.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {a.shape}")
    if not a.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {a.strides}; make one with cupy_fp8.empty")
    if xp is np:
        if not a.flags.writeable:
            raise ValueError(f"{name}: the array is read-only")
    elif a.data.device_id != x.data.device_id:
        raise ValueError(f"{name}: on GPU {a.data.device_id}, the input is on GPU {x.data.device_id}")
    separate(a, x, name, "the input")


def separate(a: Array, b: Array, name: str, other: str) -> None:
    """ValueError if two C-contiguous arrays share memory."""
    start, other_start = address(a), address(b)
    if start < other_start + b.nbytes and other_start < start + a.nbytes:
        raise ValueError(f"{name}: overlaps {other} in memory; results need memory of their own")


def same_device(a: Array | None, x: Array, name: str) -> None:
    if a is not None and not isinstance(x, np.ndarray) and a.data.device_id != x.data.device_id:
        raise ValueError(f"{name}: on GPU {a.data.device_id}, the input is on GPU {x.data.device_id}")


def grid_size(blocks: int, shape: tuple[int, ...]) -> int:
    """At least one block; ValueError past the hardware's 2**31 - 1."""
    if blocks > 0x7FFFFFFF:
        raise ValueError(f"x: shape {shape} needs {blocks} blocks, more than a launch can have (2**31 - 1); split the array")
    return max(blocks, 1)
