"""Results with a scale per block, from arbitrary codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_fp8 import Quantized, Scaled, cases
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu
from cupy_fp8.layouts import scale_shape, swap_last

ROW, COLUMN = (1, 32), (32, 1)
LAYOUTS = ("compact", "swizzled")
#: All ways of storing MX data: (block, scale layout, whether transposed).
MX = [(block, layout, transposed) for block in (ROW, COLUMN) for layout in LAYOUTS
      for transposed in (False, True)]


def parts(q: Quantized) -> list[Scaled]:
    """Return the directions of a result."""
    return list(q.parts.values())


def result(shape: tuple[int, ...], block: Any = ROW, layout: Any = "compact", transposed: bool = False, *,
           seed: int = 0, dtype: np.dtype[Any] = float8_e4m3fn,
           scale: np.dtype[Any] = float8_e8m0fnu) -> Scaled:
    return Scaled(cases.values("bits", swap_last(shape) if transposed else shape, dtype, seed),
                  cases.values("bits", scale_shape(shape, block, layout, transposed), scale, seed + 1), shape,
                  transposed, block, layout)
