"""Maps of scales by their place in the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy
from ..diagnostics.scale_report import scales_by_block
from ..formats import FORMATS, lookup
from ..reference.numerics import widen
from ..results import Quantized, Scaled, as_scaled
from .sample import MOST_CELLS, every_nth, taken
from .style import GREY, axes, integer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["scale_heat_map"]


def scale_heat_map(scale_inv: Array | Scaled | Quantized, *, ax: Axes | None = None) -> Axes:
    """Draw log2 of every scale_inv: it shows where a matrix is large and where it is small.

    scale_inv : f32 or float8_e8m0fnu array of compact scales, 2-D; fewer dimensions are drawn as one row. Or
        a `Scaled` or `Quantized` (the row-wise part where there is one), with scales in any layout. Zeros,
        negative scales, NaN and Inf are grey. Of more than 1024 rows or columns of blocks, 1024 that are
        equally far apart are drawn, and the title says so.
    Raises TypeError, ValueError for more than two dimensions, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> ax = fp8.plot.scale_heat_map(np.float32([[0.5, 1.0], [2.0, 4.0]]))
    >>> ax.images[0].get_array().tolist()
    [[-1.0, 0.0], [1.0, 2.0]]
    """
    if isinstance(scale_inv, (Scaled, Quantized)):
        scale_inv = scales_by_block(as_scaled(scale_inv))
    backend.module_of(scale_inv, "scale_inv")
    lookup(scale_inv.dtype, tuple(FORMATS), "scale_inv")
    if scale_inv.ndim > 2:
        raise ValueError(f"scale_inv: expected at most two dimensions, got shape {scale_inv.shape}; draw one "
                         f"matrix at a time")
    grid = scale_inv.reshape((1, -1) if scale_inv.ndim < 2 else scale_inv.shape)
    whole = max(grid.shape, default=0) <= MOST_CELLS
    s = asnumpy(grid) if whole else taken(grid, np.ix_(*map(every_nth, grid.shape)))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(widen(s).astype(np.float64))
    cells = np.where(np.isfinite(exponents), exponents, np.nan)
    ax = axes(ax, (6, 3.6))
    integer_ticks(draw_map(ax, cells, grid.shape, "log2 scale_inv").ax.yaxis)
    shown, of = ("×".join(f"{extent:,}" for extent in shape) for shape in (s.shape, grid.shape))
    ax.set_title(f"{of} scales" if whole else f"{shown} of {of} scales (sampled)", fontsize="medium")
    if np.isnan(cells).any():
        ax.set_xlabel("block column      (grey: 0, negative, NaN or Inf)")
    return ax


def draw_map(ax: Any, cells: np.ndarray, shape: tuple[int, ...], label: str, colours: Any = None,
             norm: Any = None) -> Any:
    """Draw a map of a matrix of blocks, and return its colour bar. The axes count blocks of the whole matrix,
    of `shape`, also where a cell stands for several. By default NaN cells are grey."""
    from matplotlib import colormaps

    # viridis keeps its order for colour-blind readers, in print and on both backgrounds; it has no grey.
    colours = colours or colormaps["viridis"].with_extremes(bad=GREY)
    picture = ax.imshow(cells, cmap=colours, norm=norm, aspect="auto", interpolation="nearest",
                        extent=(-0.5, max(shape[1], 1) - 0.5, max(shape[0], 1) - 0.5, -0.5))
    bar = ax.figure.colorbar(picture, ax=ax, label=label)
    bar.outline.set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        integer_ticks(axis)
    ax.set(xlabel="block column", ylabel="block row")
    ax.spines[:].set_visible(False)
    return bar
