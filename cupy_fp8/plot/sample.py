"""A sample of the elements of large arrays, so that pictures of them take no longer than of small ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy, bits
from ..diagnostics.per_block import block_extents
from ..diagnostics.scale_report import scales_by_block
from ..formats import INPUT_DTYPES, names
from ..reference.numerics import mul, widen
from ..results import Quantized, Scaled

#: Only so many elements of a larger array are drawn.
MOST = 1 << 20
#: A map has at most so many rows and columns of cells.
MOST_CELLS = 1024


class Sample(NamedTuple):
    """x and what became of it (None if that was not given), flat f32 arrays, and the elements that x has."""

    x: np.ndarray
    v: np.ndarray | None
    elements: int

    @property
    def text(self) -> str:
        if self.x.size == self.elements:
            return f"{self.elements:,} elements"
        return f"{self.x.size:,} of {self.elements:,} elements (sampled)"


def sampled(x: Array, q: Any = None) -> Sample:
    """All elements of arrays of up to MOST, otherwise MOST of them: one from each of as many equal ranges of
    the flat array, at a place that a generator with a fixed seed chooses. The same shape thus gives the same
    places, and no regular pattern of the data coincides with them. Only what is drawn is dequantised, and
    copied from a GPU."""
    _require_dtype(x, "x")
    s = q._any if isinstance(q, Quantized) else q
    if s is not None:
        shape = s.shape if isinstance(s, Scaled) else _require_dtype(s, "q").shape
        if shape != x.shape:
            raise ValueError(f"q: expected the shape of x, {x.shape}, got {shape}")
    if x.size <= MOST:
        v = s.dequantize() if isinstance(s, Scaled) else s
        return Sample(_f32(x), None if v is None else _f32(v), int(x.size))
    at = np.unravel_index(places(x.size), x.shape)
    v = None if s is None else _values_at(s, at) if isinstance(s, Scaled) else widen(taken(s, at))
    return Sample(widen(taken(x, at)), v, int(x.size))


def places(size: int) -> np.ndarray:
    """MOST increasing flat indices below `size`, one in each of MOST ranges."""
    number = np.arange(MOST + 1)
    edges = number * (size // MOST) + number * (size % MOST) // MOST        # No product is beyond int64.
    return edges[:-1] + (np.random.default_rng(0).random(MOST) * np.diff(edges)).astype(np.int64)


def every_nth(extent: int) -> np.ndarray:
    """At most MOST_CELLS increasing indices below `extent`, equally far apart."""
    count = min(extent, MOST_CELLS)
    return np.arange(count) * extent // max(count, 1)


def taken(a: Array, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """The elements at these indices, on the host."""
    xp = backend.module_of(a)
    return asnumpy(bits(a)[tuple(xp.asarray(i) for i in at)]).view(a.dtype)


def _values_at(s: Scaled, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """Dequantised elements, as docs/numerics.md defines them."""
    stored = (*at[:-2], at[-1], at[-2]) if s.transposed else at
    codes = widen(taken(s.data, stored))
    if s.block is None:
        return mul(codes, widen(asnumpy(s.scale_inv)).reshape(-1)[0])
    rows, columns = block_extents(s.block, s.shape)
    scale_inv = taken(scales_by_block(s), (*at[:-2], at[-2] // rows, at[-1] // columns))
    return mul(codes, widen(scale_inv))


def _f32(a: Array) -> np.ndarray:
    return widen(asnumpy(a)).reshape(-1)


def _require_dtype(a: Array, name: str) -> Array:
    backend.module_of(a, name)
    if a.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: expected dtype {names(INPUT_DTYPES)}, got {a.dtype}")
    return a
