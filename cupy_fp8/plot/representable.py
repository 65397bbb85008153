"""Plots of the values that a format represents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..formats import FORMATS, Format
from ..reference.numerics import widen
from .style import GREY, ORANGE, axes, binade_ticks, blue, formats_of, positive_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["number_line"]

_LINE_DTYPES = tuple(dtype for dtype, f in FORMATS.items() if f.bits <= 16)


def number_line(dtypes: Any, *, axis: Literal["log", "linear"] = "log", limit: float | None = None,
                ax: Axes | None = None) -> Axes:
    """Draw every finite value of a format as a tick on a line: one line per format, subnormals in orange.

    dtypes : one of float8_e4m3fn, float8_e5m2, float8_e8m0fnu, bfloat16, float16, or a sequence of them.
    axis : 'log' (positive values on a scale of powers of two) or 'linear' (both signs).
    limit : the largest magnitude shown; default: the largest that any of the formats has.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> fp8.plot.number_line([fp8.float8_e4m3fn, fp8.float8_e5m2]).get_title()
    'Representable values'
    """
    if axis not in ("log", "linear"):
        raise ValueError(f"axis: expected 'log' or 'linear', got {axis!r}")
    formats = formats_of(dtypes, _LINE_DTYPES)
    ax = axes(ax, (8, 0.7 + 0.62 * len(formats)))
    limit = max(f.max for f in formats) if limit is None else positive_number(limit, "limit")
    for row, f in enumerate(formats):
        v = finite_values(f)
        v = v[(np.abs(v) <= limit) & ((v > 0) | (axis == "linear"))]
        subnormal = (np.abs(v) < f.smallest_normal) & (v != 0)
        ax.axhline(row, color=GREY, linewidth=0.6, zorder=0)
        for part, colour in ((v[~subnormal], blue(ax)), (v[subnormal], ORANGE)):
            ax.vlines(part, row - 0.3, row + 0.3, color=colour, linewidth=0.9 if v.size < 200 else 0.6)
    if axis == "log":
        ax.set_xscale("log", base=2)
        binade_ticks(ax.xaxis, *ax.get_xlim())
    ax.set_yticks(range(len(formats)), [f.dtype.name for f in formats])
    ax.set_ylim(len(formats) - 0.5, -0.5)
    ax.set_title("Representable values", fontsize="medium")
    named = [ax.plot([], [], color=colour, linewidth=3, label=label)[0]
             for colour, label in ((blue(ax), "normal numbers"), (ORANGE, "subnormals"))]
    ax.legend(handles=named, frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def finite_values(fmt: Format) -> np.ndarray:
    """Return all finite values of a format of at most 16 bits in ascending order, f64; zero once."""
    every = np.arange(1 << fmt.bits).astype(fmt.storage).view(fmt.dtype)
    v = widen(every).astype(np.float64)
    return np.unique(v[np.isfinite(v)])
