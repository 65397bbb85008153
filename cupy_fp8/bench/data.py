"""Arrays of the benchmark, and samples of them that are compared with references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy, bits
from ..cases.base import drawn
from ..formats import float32
from ..ops.convert.astype import astype

#: Bytes from which arrays are made on the GPU. NumPy takes seconds for such arrays.
_LARGE = 1 << 24
_SAMPLED = 16


def on_gpu(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Array:
    """What `cases.values` gives, with large arrays on the GPU: 'bits' are random bytes, and any other kind is
    N(0, 1)."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return drawn(kind, shape, dtype, seed)
    return random_bytes(shape, dtype) if kind == "bits" else normal(shape, dtype)


def random_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    count = math.prod(shape) * dtype.itemsize
    return backend.cupy().random.randint(0, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """N(0, 1)."""
    x = backend.cupy().random.standard_normal(shape, dtype=np.float32)
    return x if dtype == float32 else astype(x, dtype)


def sample(rows: int, number: int = _SAMPLED) -> list[int]:
    """The first row, the last one, and some between."""
    return sorted({int(r) for r in np.linspace(0, rows - 1, number)})


def part(a: Array, rows: Any, columns: Any = slice(None)) -> np.ndarray:
    """Rows (a list or a slice) and columns (a slice) of a matrix, brought to the host."""
    return np.ascontiguousarray(asnumpy(bits(a)[rows][:, columns])).view(a.dtype)


def columns(a: Array, picked: list[int]) -> np.ndarray:
    """Columns of a matrix, brought to the host."""
    return np.ascontiguousarray(asnumpy(bits(a)[:, picked])).view(a.dtype)
