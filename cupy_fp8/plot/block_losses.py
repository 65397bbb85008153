"""Plots of `diagnostics` by block: the distribution of the scales, and where and how much was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from .. import backend
from ..arrays import Array, asnumpy
from ..diagnostics import BlockReport, ScaleReport, scales
from ..diagnostics.pieces import of_line
from ..formats import choice
from ..layouts import cdiv
from ..reference.numerics import in_blocks
from ..results import Quantized, Scaled
from .scale_maps import draw_map
from .style import BLUE, GREEN, ORANGE, VERMILION, axes, blue, integer_ticks, is_dark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["loss_histogram", "loss_map", "scale_histogram"]

#: label, colour and dashes of each loss. Lines differ in both, for colour-blind readers.
Loss: TypeAlias = Literal["saturated", "underflowed", "nan", "negative_zeros"]
_LOSSES: dict[str, tuple[str, str, str]] = {
    "saturated": ("saturated", VERMILION, "-"), "underflowed": ("underflowed", BLUE, "--"),
    "nan": ("NaN", ORANGE, ":"), "negative_zeros": ("−0", GREEN, "-.")}
_MOST_BARS = 64
#: most rows and columns of a map's cells: in a figure of usual size each has a pixel
MOST_CELLS = 128
#: colours of blocks without losses, on light and on dark backgrounds
NO_LOSS = ("#EEF1F4", "#2B3036")


def scale_histogram(q: Scaled | Quantized | ScaleReport, *, ax: Axes | None = None) -> Axes:
    """Draw how many scales lie in each power of two: a bar at e counts the scale_inv that are at least 2**e
    and less than 2**(e + 1).

    q : quantised data (of a `Quantized` the row-wise part, if there is one), or what `diagnostics.scales`
        found. The title has mean and standard deviation of log2 scale_inv. Scales of 0, negative ones, Inf
        and NaN have no place on the axis: the label below counts them.
    Every scale counts, on the device that has them. Warns with `ScaleWarning` as `diagnostics.scales`. Raises
    TypeError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.outer([448, 448, 7], np.ones(64)).astype(np.float32)
    >>> fp8.plot.scale_histogram(fp8.quantize_mx(x)).get_title()
    '6 scales, log2 scale_inv: mean −2.00, deviation 2.83'
    """
    report = q if isinstance(q, ScaleReport) else scales(q)
    ax = axes(ax, (7, 3))
    exponents = report.first_exponent + np.arange(len(report.histogram))
    ax.bar(exponents, report.histogram, width=0.85, color=blue(ax))
    _count_axis(ax, max(report.histogram, default=0))
    integer_ticks(ax.xaxis)
    if exponents.size:
        ax.set_xlim(min(exponents[0] - 1, exponents[-1] - 4), max(exponents[-1] + 1, exponents[0] + 4))
    odd = [f"{count:,} {kind}" for count, kind in ((report.zero, "are 0"), (report.negative, "negative"),
                                                   (report.infinite, "Inf"), (report.nan, "NaN")) if count]
    ax.set(xlabel="exponent of scale_inv" + (f"      (not shown: {', '.join(odd)})" if odd else ""),
           ylabel="scales")
    spread = (f", log2 scale_inv: mean {report.log2_mean:.2f}, deviation {report.log2_std:.2f}"
              if exponents.size else "")
    number = f"{report.scales:,} scale{'' if report.scales == 1 else 's'}"
    ax.set_title(number + spread.replace("-", "−"), fontsize="medium")
    return ax


def loss_map(report: BlockReport, loss: Loss = "underflowed", *, ax: Axes | None = None) -> Axes:
    """Draw which share of each block's elements was lost, where the block is in the matrix: blocks without
    losses in the palest colour, others by the logarithm of their share, from one element of a block up.

    report : what `diagnostics.blocks` found. Matrices of a batch are drawn one below the other.
    loss : 'saturated', 'underflowed', 'nan' or 'negative_zeros'.
    Of more than 128 rows or columns of blocks, a cell shows the worst of several blocks, and the colour bar
    says so: every block counts, and none is too small to be seen. Raises TypeError, ValueError, ImportError
    without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.ones((4, 64), np.float32)
    >>> x[2, 40:] = 1e-6
    >>> ax = fp8.plot.loss_map(fp8.diagnostics.blocks(x, fp8.quantize_mx(x)))
    >>> ax.get_title(), ax.images[0].get_array()[2].tolist()
    ('Underflowed elements in 1 of 8 blocks', [0.0, 75.0])
    """
    counts = _counts(report, loss)
    xp = backend.module_of(counts)
    share = (100 * counts / xp.asarray(report.elements)).astype(np.float32)
    share = share.reshape(-1, share.shape[-1])
    down, across = tile = tuple(max(1, cdiv(extent, MOST_CELLS)) for extent in share.shape)
    cells = asnumpy(_largest(share, (down, across)))
    ax = axes(ax, (6, 3.6))
    _draw_shares(ax, cells, share.shape, 100 / max(1, int(report.elements.max(initial=1))),
                 "% of a block" + (f", worst of {down}×{across} blocks" if max(tile) > 1 else ""))
    name, affected = _LOSSES[loss][0], int((counts != 0).sum())
    ax.set_title(f"{name[0].upper()}{name[1:]} elements in {affected:,} of {counts.size:,} blocks",
                 fontsize="medium")
    if not cells.all():
        ax.set_xlabel(f"block column      ({'dark' if is_dark(ax) else 'pale'}: no loss)")
    return ax


def loss_histogram(report: BlockReport, *, ax: Axes | None = None) -> Axes:
    """Draw how many blocks lost how many elements: a line for each kind of loss that there is.

    report : what `diagnostics.blocks` found. Blocks that lost nothing are left out of the lines, and counted
    in the legend. Raises TypeError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.ones((4, 64), np.float32)
    >>> x[2, 40:] = 1e-6
    >>> ax = fp8.plot.loss_histogram(fp8.diagnostics.blocks(x, fp8.quantize_mx(x)))
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['underflowed: 1 block']
    """
    if not isinstance(report, BlockReport):
        raise TypeError(f"report: expected a BlockReport, as diagnostics.blocks returns it, got "
                        f"{type(report).__name__}")
    ax, most = axes(ax, (7, 3)), 0
    known = {loss: counts for loss in _LOSSES
             if (counts := getattr(report, loss)) is not None and counts.size}
    largest = max((int(counts.max()) for counts in known.values()), default=0)
    width = max(1, cdiv(largest, _MOST_BARS))                     # counts per step of the line
    for loss, (name, colour, dashes) in _LOSSES.items():
        if not (affected := int((known[loss] != 0).sum()) if loss in known else 0):
            continue
        found = _by_count(known[loss], width, cdiv(largest, width))
        edges = 0.5 + width * np.arange(len(found) + 1)
        ax.stairs(found, edges, color=blue(ax) if colour == BLUE else colour, linestyle=dashes, linewidth=1.6,
                  label=f"{name}: {affected:,} block{'' if affected == 1 else 's'}")
        most = max(most, int(found.max()))
    _count_axis(ax, most)
    integer_ticks(ax.xaxis)
    ax.set_xlim(0.5, width * (cdiv(max(largest, 8), width) + 0.3) + 0.5)
    ax.set(xlabel="lost elements of a block" + (f"      ({width} to a step)" if width > 1 else ""),
           ylabel="blocks")
    blocks = f"{report.nan.size:,} blocks of {report.block[0] or 'all'}×{report.block[1] or 'all'}"
    ax.set_title(f"Losses of {blocks}" if most else f"No losses in {blocks}", fontsize="medium")
    if most:
        ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _counts(report: BlockReport, loss: str) -> Array:
    if not isinstance(report, BlockReport):
        raise TypeError(f"report: expected a BlockReport, as diagnostics.blocks returns it, got "
                        f"{type(report).__name__}")
    choice(loss, "loss", _LOSSES)
    if (counts := getattr(report, loss)) is None:
        raise ValueError(f"loss: {loss} is not known without x; pass it to diagnostics.blocks")
    return counts


def _draw_shares(ax: Any, cells: np.ndarray, shape: tuple[int, ...], one: float, label: str) -> None:
    """Draw a map of percentages, the smallest of which is `one`. Most blocks lose few elements and a few lose
    many, so on a linear scale nearly all of them would have one colour."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.ticker import LogLocator, NullLocator

    dark = is_dark(ax)
    # viridis begins dark: on a dark background that end is left out, so that no loss is dark
    ramp = colormaps["viridis" if dark else "viridis_r"](np.linspace(0.2 if dark else 0, 1, 256))
    colours = ListedColormap(ramp).with_extremes(under=NO_LOSS[dark], bad=NO_LOSS[dark])
    least = min(10.0, 0.8 * one)                        # resampled cells of `one` may be slightly smaller
    top = max(float(cells.max(initial=0)), 10 * least)
    bar = draw_map(ax, cells, shape, label, colours, LogNorm(least, top)).ax.yaxis
    bar.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * least else (1,)))
    bar.set_minor_locator(NullLocator())
    bar.set_major_formatter("{x:g}")


def _largest(a: Array, tile: tuple[int, int]) -> Array:
    """Return the largest element of each tile of a matrix; tiles at the ends are smaller."""
    tiles = in_blocks(a, tile)
    return tiles.max(axis=(1, 3)) if a.size else tiles[:, 0, :, 0]


def _by_count(counts: Array, width: int, steps: int) -> np.ndarray:
    """Return the number of blocks with counts of 1 … width, width + 1 … 2 * width, …"""
    xp, flat = backend.module_of(counts), counts.reshape(-1)
    total = np.zeros(steps + 1, np.int64)
    for piece in of_line(flat.size):
        total += asnumpy(xp.bincount((flat[piece] + (width - 1)) // width, minlength=steps + 1))
    return total[1:]


def _count_axis(ax: Any, most: int) -> None:
    """Make an axis of whole numbers: logarithmic if there are many."""
    if most > 20:
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
    else:
        integer_ticks(ax.yaxis)
