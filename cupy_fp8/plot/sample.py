"""Samples of large arrays, so that drawing them takes no longer than drawing small ones."""

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

#: most elements drawn
MOST = 1 << 20
#: most rows and columns of a map's cells
MOST_CELLS = 1024


class Sample(NamedTuple):
    """x and its quantised values (None if not given), as flat f32 arrays, and the number of elements of x."""

    x: np.ndarray
    v: np.ndarray | None
    elements: int

    @property
    def text(self) -> str:
        if self.x.size == self.elements:
            return f"{self.elements:,} elements"
        return f"{self.x.size:,} of {self.elements:,} elements (sampled)"


def sampled(x: Array, q: Any = None) -> Sample:
    """Return all elements of arrays of up to MOST, otherwise MOST of them: one from each of as many equal
    ranges of the flat array, at a place chosen by a generator with a fixed seed. The same shape thus gives
    the same places, and these do not coincide with regular patterns of the data. Only what is drawn is
    dequantised, and copied from a GPU."""
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
    """Return MOST increasing flat indices below `size`, one in each of MOST ranges."""
    number = np.arange(MOST + 1)
    edges = number * (size // MOST) + number * (size % MOST) // MOST        # no product exceeds int64
    return edges[:-1] + (np.random.default_rng(0).random(MOST) * np.diff(edges)).astype(np.int64)


def every_nth(extent: int) -> np.ndarray:
    """Return at most MOST_CELLS equally spaced increasing indices below `extent`."""
    count = min(extent, MOST_CELLS)
    return np.arange(count) * extent // max(count, 1)


def taken(a: Array, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the elements at these indices, on the host."""
    xp = backend.module_of(a)
    return asnumpy(bits(a)[tuple(xp.asarray(i) for i in at)]).view(a.dtype)


def _values_at(s: Scaled, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """Dequantise elements, as docs/numerics.md defines."""
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
