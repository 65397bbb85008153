"""Validation shared by all ops. Everything here runs before anything is written; each message says what was
expected, what came and what to do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from .. import backend, kernels
from ..advice import dtype_instead, scale_instead, type_name
from ..arrays import Array, address, aligned_address, contiguous, is_array, is_contiguous
from ..formats import FORMATS, float32, names


def source(x: Array, dtypes: tuple[np.dtype[Any], ...], name: str = "x",
           dimensions: int = 0) -> tuple[Array, Any, int]:
    """Return (x ready for a kernel, its module, its address): one of the dtypes, C-contiguous (copied if
    not), naturally aligned. dimensions: of an array that a number can be made to (see
    `advice.array_instead`)."""
    xp = backend.module_of(x, name, "float32" if float32 in dtypes else dtypes[0].name, dimensions)
    check_dtype(x, dtypes, name)
    if xp is np and type(x) is not np.ndarray:
        x = x.view(np.ndarray)                  # products and sums of numpy.matrix differ
    if not is_contiguous(x):
        if xp is not np and kernels.capturing(x.data.device_id):
            raise ValueError(
                f"{name}: not C-contiguous, and a copy cannot be made while a CUDA graph is captured; "
                "copy it before the capture"
            )
        x = contiguous(x)
    if xp is np and address(x) % x.dtype.itemsize:
        x = x.copy()
    at = aligned_address(x, name)
    if xp is np and not kernels.executor_is_forced():
        backend.note_large_numpy(x)
    return x, xp, at


def check_dtype(a: Array, dtypes: tuple[np.dtype[Any], ...], name: str) -> None:
    """Raise TypeError unless an array has one of the dtypes."""
    if a.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names(dtypes)}, got {a.dtype}"
                        f"{dtype_instead(a.dtype, dtypes, name)}")


def check_writeable(a: Array, name: str) -> None:
    """Raise ValueError for a read-only NumPy array."""
    if isinstance(a, np.ndarray) and not a.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")


def one_f32(a: Any, x: Array, xp: Any, name: str) -> int:
    """Return the address of a one-element f32 array of x's kind and device."""
    backend.require_module(a, xp, name, dimensions=1)
    check_dtype(a, (float32,), name)
    if a.size != 1:
        raise ValueError(f"{name}: expected one element, got shape {a.shape}")
    at = aligned_address(a, name)
    if xp is not np:
        backend.same_device(a, x, name)
    return at


def scalar_or_one_f32(a: Any, x: Array, xp: Any, name: str) -> tuple[int, float]:
    """Return (address, 0) of a one-element f32 array, or (0, value) of a Python or NumPy scalar rounded to
    f32."""
    if isinstance(a, xp.ndarray):
        if a.size != 1:
            raise ValueError(f"{name}: expected one element, got shape {a.shape}; quantize_block has a scale "
                             "for each row or block, and finds it itself")
        return one_f32(a, x, xp, name), 0.0
    number = (a.dtype.kind in "fiu" or a.dtype in FORMATS if isinstance(a, np.generic)
              else isinstance(a, (int, float)))
    if isinstance(a, bool) or not number:
        if is_array(a):
            backend.require_module(a, xp, name)
        raise TypeError(f"{name}: expected a number or a float32 array of one element, got {type_name(a)}"
                        f"{scale_instead(a, name)}")
    try:
        with np.errstate(over="ignore"):
            return 0, float(np.float32(a))
    except OverflowError:
        raise ValueError(f"{name}: an integer of {a.bit_length()} bits, beyond every float") from None


def check_shape(name: str, given: tuple[int, ...], wanted: tuple[int, ...], what: str = "") -> None:
    """Raise ValueError unless the shapes are equal. what: what an array of the wanted shape holds."""
    if given != wanted:
        raise ValueError(f"{name}: expected shape {wanted}{what and ', '}{what}, got {given}")


def writable(a: Array, shape: tuple[int, ...], dtype: np.dtype[Any], x: Array, xp: Any, name: str) -> int:
    """Like `fitting`, for an array that a kernel writes."""
    at = fitting(a, shape, dtype, x, xp, name)
    check_writeable(a, name)
    return at


def fitting(a: Array, shape: tuple[int, ...], dtype: np.dtype[Any], x: Array, xp: Any, name: str) -> int:
    """Return the address of an array of this dtype and shape, C-contiguous, aligned, of x's kind and
    device."""
    backend.require_module(a, xp, name, dtype.name)
    if a.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {a.dtype}")
    check_shape(name, a.shape, shape)
    if not is_contiguous(a):
        raise ValueError(
            f"{name}: expected a C-contiguous array, got strides {a.strides}; make one with cupy_fp8.empty"
        )
    if xp is not np:
        backend.same_device(a, x, name)
    return aligned_address(a, name)


def byte_range(a: Array) -> tuple[int, int]:
    """Return the addresses of an array's lowest byte and of the end of its highest one."""
    at = address(a)
    if a.size == 0:
        return at, at
    steps = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)]
    return at + sum(min(step, 0) for step in steps), at + a.itemsize + sum(max(step, 0) for step in steps)


def matrix_strides(a: Array) -> tuple[int, int, int] | None:
    """Return the strides in elements (matrices, rows, columns), or None if an array has no such three."""
    size = a.itemsize
    *batch, row, column = a.strides
    if any(stride < 0 or stride % size for stride in a.strides) or address(a) % size:
        return None
    steps = [(n, stride) for n, stride in zip(a.shape, batch, strict=False) if n != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(steps)):
        return None
    return (steps[-1][1] if steps else 0) // size, row // size, column // size


def may_wait(x: Array) -> None:
    """Raise ValueError while a CUDA graph is captured on x's device: `check=True` waits for the device."""
    if not isinstance(x, np.ndarray) and kernels.capturing(x.data.device_id):
        raise ValueError("check: waits for the device, which cannot be done while a CUDA graph is captured; "
                         "check before the capture")


def may_allocate(x: Array) -> None:
    """Raise ValueError while a CUDA graph is captured on x's device: memory of the pool could be another's
    when the graph is replayed."""
    if not isinstance(x, np.ndarray) and kernels.capturing(x.data.device_id):
        raise ValueError("out: needed while a CUDA graph is captured, since nothing may be allocated")
