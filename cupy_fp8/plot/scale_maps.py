"""Scales where they are in the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, asnumpy
from ..formats import FORMATS, lookup
from ..reference.numerics import widen
from ..results import Quantized, Scaled
from .style import axes

__all__ = ["scale_heat_map"]


def scale_heat_map(scale_inv: Array | Scaled | Quantized, *, ax: Any = None) -> Any:
    """Draw log2 of every scale_inv: it shows where a matrix is large and where it is small.

    scale_inv : f32 or float8_e8m0fnu array of compact scales, 2-D; fewer dimensions are drawn as one row. Or
        a `Scaled` or `Quantized` (the row-wise part where there is one), with scales in any layout. Zeros,
        NaN and Inf stay blank.
    Raises TypeError, ValueError for more than two dimensions, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> ax = fp8.plot.scale_heat_map(np.float32([[0.5, 1.0], [2.0, 4.0]]))
    >>> ax.images[0].get_array().tolist()
    [[-1.0, 0.0], [1.0, 2.0]]
    """
    if isinstance(scale_inv, (Scaled, Quantized)):
        part = scale_inv if isinstance(scale_inv, Scaled) else scale_inv._any
        scale_inv = (part if part.block is None else part.to_layout("compact")).scale_inv
    s = asnumpy(scale_inv)
    lookup(s.dtype, tuple(FORMATS), "scale_inv")
    if s.ndim > 2:
        raise ValueError(f"scale_inv: expected at most two dimensions, got shape {s.shape}; draw one matrix "
                         f"at a time")
    values = np.atleast_2d(widen(s)).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(values)
    ax = axes(ax, (5, 3.6))
    picture = ax.imshow(np.where(np.isfinite(exponents), exponents, np.nan), cmap="viridis", aspect="auto",
                        interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, label="log2 scale_inv")
    ax.set_xlabel("block column")
    ax.set_ylabel("block row")
    for side in ax.spines.values():
        side.set_visible(False)
    return ax
