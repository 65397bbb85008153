"""Tensor maps: descriptions of matrices for the copy engine (TMA) of sm_90 and later
(kernels_cu/include/matmul/tensor_copy.cuh)."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_SWIZZLE_128, _L2_256, _ZEROS_OUTSIDE, _NOT_INTERLEAVED = 3, 3, 0, 0
_TYPES = {1: 0, 2: 1, 4: 7}            # CUDA's uint8, uint16 and float32, by itemsize
_BOX_BYTES, _BYTES, _ALIGNMENT = 128, 128, 64


class TensorMap(bytes):
    """Bytes of a map for the address `at`; moved(at) is the map of the same matrix elsewhere."""

    at: int
    moved: Callable[[int], TensorMap]


def encode(x: Any, at: int, columns: int, rows: int, pitch: int, box_rows: int,
           matrices: int = 0, itemsize: int = 1) -> TensorMap:
    """Return the map of a matrix with rows at multiples of `pitch` bytes, copied in boxes of box_rows rows of
    128 bytes. Elements are bytes, 16 bits wide or float32, by their itemsize. matrices: number of consecutive
    matrices, whose boxes have three coordinates; 0: one matrix, whose boxes have two. x: an array on the same
    device; for a NumPy array, return what kernels on the CPU read. An empty matrix has the map of one
    element, which is never copied."""
    shape = max(columns, 1), max(rows, 1), max(pitch, 16), box_rows, matrices, itemsize
    encoded = on_host if isinstance(x, np.ndarray) else _encoded

    def moved(at: int) -> TensorMap:
        made = encoded(at, *shape)
        made.at, made.moved = at, moved
        return made

    return moved(at)


def on_host(at: int, columns: int, rows: int, pitch: int, box_rows: int, matrices: int = 0,
            itemsize: int = 1) -> TensorMap:
    """Return the map as kernels on the CPU read it: what the driver would encode."""
    if at % 16 or pitch % 16:
        raise RuntimeError(f"a tensor map of rows at {at:#x}, pitch {pitch}: no multiples of 16 bytes")
    packed = struct.pack("=QQQQIII", at, columns, rows, pitch, box_rows, max(matrices, 1), itemsize)
    return TensorMap(packed.ljust(_BYTES, b"\0"))


@functools.lru_cache(4096)
def _encoded(at: int, columns: int, rows: int, pitch: int, box_rows: int, matrices: int,
             itemsize: int) -> TensorMap:
    raw = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    where = -(-ctypes.addressof(raw) // _ALIGNMENT) * _ALIGNMENT
    u64, u32, rank = ctypes.c_uint64, ctypes.c_uint32, 3 if matrices else 2
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(where), _TYPES[itemsize], rank, ctypes.c_void_p(at),
        (u64 * 3)(columns, rows, matrices), (u64 * 2)(pitch, rows * pitch),
        (u32 * 3)(_BOX_BYTES // itemsize, box_rows, 1), (u32 * 3)(1, 1, 1), _NOT_INTERLEAVED, _SWIZZLE_128,
        _L2_256, _ZEROS_OUTSIDE)
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: status {status} for {rows} rows of {columns} elements "
                           f"of {itemsize} bytes at {at:#x}, pitch {pitch}")
    return TensorMap(ctypes.string_at(where, _BYTES))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
