"""Results with a scale per block, of any codes under any scales; and results with guards around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scale_arrays import guarded

from cupy_fp8 import Quantized, Scaled, cases, testing
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu
from cupy_fp8.layouts import scale_shape, swap_last

ROW, COLUMN = (1, 32), (32, 1)
LAYOUTS = ("compact", "swizzled")
#: Every way that MX data are stored: (block, scale layout, whether transposed).
MX = [(block, layout, transposed) for block in (ROW, COLUMN) for layout in LAYOUTS
      for transposed in (False, True)]


def parts(q: Quantized) -> list[Scaled]:
    """The directions that a result has."""
    return list(q.parts.values())


def result(shape: tuple[int, ...], block: Any = ROW, layout: str = "compact", transposed: bool = False, *,
           seed: int = 0, dtype: np.dtype[Any] = float8_e4m3fn,
           scale: np.dtype[Any] = float8_e8m0fnu) -> Scaled:
    return Scaled(cases.values("bits", swap_last(shape) if transposed else shape, dtype, seed),
                  cases.values("bits", scale_shape(shape, block, layout, transposed), scale, seed + 1), shape,
                  transposed, block, layout)


def arrays_of(q: Quantized) -> list[Any]:
    """Data and scales of each direction."""
    return [a for part in parts(q) for a in part]


def guarded_like(run: testing.Executor, q: Quantized, lead: int) -> tuple[Quantized, Callable[[], bool]]:
    """(the same in poisoned memory, of which every array starts `lead` bytes past a multiple of 16, whether
    what surrounds it is as it was)."""
    checks, found = [], {}
    for name, part in q.parts.items():
        pair = [guarded(run, a.shape, a.dtype, lead) for a in part]
        checks += [intact for _, intact in pair]
        found[name] = Scaled._of(pair[0][0], pair[1][0], *list(part.__getstate__().values())[2:])
    return Quantized(**found), lambda: all(intact() for intact in checks)
