"""Plots of a format's range, of its range in each block of a row, and of the code that a value is rounded
to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import backend
from ..arrays import Array, asarray, asnumpy
from ..formats import FORMATS, FP8_DTYPES, lookup
from ..ops.convert.astype import astype
from ..reference.numerics import widen
from ..results import Quantized, Scaled, as_scaled
from ..scaled_parts import check_one_piece
from .representable import number_line
from .style import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    axes,
    binade_ticks,
    blue,
    formats_of,
    positive_number,
    whole_number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["block_ranges", "format_ranges", "rounding"]


def format_ranges(dtypes: Any, *, top: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw the ranges of formats, one bar each: normal numbers in blue, subnormals hatched.

    dtypes : a format of `finfo`, or a sequence of them.
    top : where to put the maximum of every format, as a scale of max / amax puts it on amax; default:
        unscaled.

    The text is the number of binades (powers of two) from the smallest positive number to the largest.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.format_ranges([fp8.float8_e4m3fn, fp8.float8_e5m2])
    >>> [t.get_text() for t in ax.texts]
    ['17.8 binades', '31.8 binades']
    """
    formats = formats_of(dtypes, tuple(FORMATS))
    top = None if top is None else positive_number(top, "top")
    ax = axes(ax, (8, 1 + 0.4 * len(formats)))
    ax.set_xscale("log", base=2)
    ends: list[float] = []
    for row, f in enumerate(formats):
        factor = 1.0 if top is None else top / f.max
        low, normal, high = factor * f.smallest_subnormal, factor * f.smallest_normal, factor * f.max
        ax.barh(row, high - normal, left=normal, height=0.6, color=blue(ax), label="normal numbers")
        if f.mantissa_bits:
            ax.barh(row, normal - low, left=low, height=0.6, color=ORANGE, hatch="///",
                    edgecolor=ax.get_facecolor(), linewidth=0, label="subnormals")
        ax.annotate(f"{np.log2(high / low):.1f} binades", (high, row), (5, 0), textcoords="offset points",
                    va="center", fontsize="small")
        ends += low, high
    span = np.log2(max(ends) / min(ends))
    ax.set_xlim(min(ends) / 2 ** (0.02 * span), max(ends) * 2 ** (0.15 * span))
    binade_ticks(ax.xaxis, *ax.get_xlim())
    ax.set_yticks(range(len(formats)), [f.dtype.name for f in formats])
    ax.set_ylim(len(formats) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.set_title("Where the formats reach", fontsize="medium")
    unique = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(unique.values(), unique, frameon=False, fontsize="small", loc="upper left",
              bbox_to_anchor=(0, -0.2), ncols=2)
    return ax


def block_ranges(x: Array, q: Scaled | Quantized, row: int = 0, *, first: int = 0, blocks: int = 4,
                 ax: Axes | None = None) -> Axes:
    """Draw the magnitudes of a few blocks of one row of x, and where each block's scale puts the format: its
    maximum (dashed), its subnormals (band), below which values become 0.

    x : 2-D bfloat16, float16 or float32 array. q : its row-wise result with blocks along rows, such as that
    of `quantize_mx` or `quantize_block`. first, blocks : which blocks of the row.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal((4, 256), np.float32)
    >>> ax = fp8.plot.block_ranges(x, fp8.quantize_mx(x), row=2, blocks=3)
    >>> [t.get_text() for t in ax.texts]
    ['block 0', 'block 1', 'block 2']
    """
    backend.module_of(x, "x")
    check_one_piece(as_scaled(q))
    part = q._row if isinstance(q, Quantized) else q
    if part is None or part.block is None or part.block[0] != 1 or part.block[1] is None:
        raise ValueError(f"q: expected row-wise blocks, such as quantize_mx makes, got {q!r}")
    if part.shape != x.shape or len(x.shape) != 2:
        raise ValueError(f"x: expected two dimensions, and the shape of q, {part.shape}, got {x.shape}")
    row = whole_number(row, "row", -x.shape[0], x.shape[0])
    first, blocks = whole_number(first, "first", 0), whole_number(blocks, "blocks", 1)
    width, f = part.block[1], FORMATS[part.dtype]
    scales = widen(asnumpy(part.to_layout("compact").scale_inv[row])).astype(np.float64)
    stop = min(first + blocks, scales.size)
    at = np.arange(first * width, min(stop * width, x.shape[1]))
    if not at.size:
        raise ValueError(f"first: expected a block below {scales.size}, got {first}")
    magnitude = np.abs(widen(asnumpy(x[row])).astype(np.float64))[at]
    ax = axes(ax, (8, 3.4))
    for block in range(first, stop):
        edges, s = (block * width - 0.5, min((block + 1) * width, x.shape[1]) - 0.5), scales[block]
        named = block == first
        ax.fill_between(edges, f.smallest_subnormal * s, f.smallest_normal * s, color=ORANGE, alpha=0.35,
                        linewidth=0, label="subnormals" if named else None)
        ax.hlines(f.max * s, *edges, color=VERMILION, linestyle="--", label="largest code" if named else "")
        ax.text(sum(edges) / 2, f.max * s * 1.5, f"block {block}", ha="center", fontsize="small")
    ax.plot(at, np.where(magnitude > 0, magnitude, np.nan), "o", color=blue(ax), markersize=3.5, label="|x|")
    ax.set_yscale("log", base=2)
    ax.set_ylim(top=16 * f.max * scales[first:stop].max())
    binade_ticks(ax.yaxis, *ax.get_ylim())
    ax.set_xticks(np.arange(first, stop + 1) * width)
    ax.grid(axis="x", color=GREY, alpha=0.4)
    ax.set(xlabel="column", ylabel="|x|")
    ax.set_title(f"Row {row} in blocks of {width}: what each scale lets {f.dtype.name} hold",
                 fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def rounding(x: Any, dtype: Any = "float8_e4m3fn", *, ax: Axes | None = None) -> Axes:
    """Draw which code each number becomes: numbers above, the format's positive values below, an arrow for
    each. Blue is exact, orange red is rounded; a cross becomes 0.

    x : positive numbers.
    dtype : float8_e4m3fn or float8_e5m2.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.rounding([1.6, 0.2, 2.0**-12])
    >>> ax.get_title()
    'What becomes of numbers in float8_e4m3fn: 1 of 3 become 0'
    """
    f = lookup(dtype, FP8_DTYPES, "dtype")
    values = np.asarray(x, np.float64)
    if values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"x: expected positive numbers in one dimension, got {x!r}")
    codes = widen(asnumpy(astype(asarray(values.astype(np.float32), like=np), f.dtype))).astype(np.float64)
    ax = number_line(f.dtype, limit=2 * values.max(), ax=axes(ax, (8, 2.2)))
    for before, after in zip(values, codes, strict=True):
        colour = BLUE if before == after else VERMILION
        ax.plot(before, -1.2, "o" if after else "x", color=colour, markersize=6)
        if after:
            ax.annotate("", (after, -0.35), (before, -1.1), arrowprops={"arrowstyle": "->", "color": colour})
    ax.set_xlim(min(values.min(), f.smallest_subnormal) / 1.5, 2 * values.max())
    binade_ticks(ax.xaxis, *ax.get_xlim())
    ax.set_ylim(0.5, -1.6)
    ax.set_yticks([-1.2, 0], ["x", f.dtype.name])
    lost = int((codes == 0).sum())
    ax.set_title(f"What becomes of numbers in {f.dtype.name}: {lost} of {values.size} become 0",
                 fontsize="medium")
    return ax
