"""Arrays of the benchmark, and samples of them for comparison with references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy, bits
from ..cases.base import draw_values
from ..formats import FP8_DTYPES, float8_e8m0fnu, float32
from ..ops.convert.astype import astype

#: larger arrays (in bytes) are made on the GPU, since NumPy takes seconds for them
_LARGE = 1 << 24
_SAMPLED = 16
#: E8M0 bytes of scales around 1
_AROUND_ONE = (117, 138)
#: standard deviation of codes of quantised data
_OF_CODES = 60


def on_gpu(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Array:
    """Return realistic data in place of those of `cases.values`, since times depend on them. 'bits' of scales
    are scales around 1, of other types random bytes; 'normal' is N(0, 1) without outliers, for FP8 codes N(0,
    60)."""
    if kind == "bits" and dtype in (float8_e8m0fnu, float32):
        return scales(shape, dtype, seed)
    if kind == "normal":
        return normal(shape, dtype)
    if math.prod(shape) * dtype.itemsize < _LARGE:
        return draw_values(kind, shape, dtype, seed)
    return random_bytes(shape, dtype)


def scales(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Return scales around 1."""
    exponents = np.random.default_rng(seed).integers(*_AROUND_ONE, shape, np.uint8)
    return exponents.view(dtype) if dtype == float8_e8m0fnu else exponents.astype(np.float32) / 100


def random_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    count = math.prod(shape) * dtype.itemsize
    return backend.cupy().random.randint(0, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return N(0, 1), for FP8 codes N(0, 60)."""
    x = backend.cupy().random.standard_normal(shape, dtype=np.float32)
    return x if dtype == float32 else astype(x * _OF_CODES if dtype in FP8_DTYPES else x, dtype)


def sample(rows: int, number: int = _SAMPLED) -> list[int]:
    """Return the first row, the last one, and some between."""
    return sorted({int(r) for r in np.linspace(0, rows - 1, number)})


def part(a: Array, rows: Any, columns: Any = slice(None)) -> np.ndarray:
    """Return rows (a list or a slice) and columns (a slice) of a matrix, on the host."""
    return np.ascontiguousarray(asnumpy(bits(a)[rows][:, columns])).view(a.dtype)


def columns(a: Array, picked: list[int]) -> np.ndarray:
    """Return columns of a matrix, on the host."""
    return np.ascontiguousarray(asnumpy(bits(a)[:, picked])).view(a.dtype)
