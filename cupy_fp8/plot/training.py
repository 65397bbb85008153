"""Delayed scaling over the steps of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import FP8_DTYPES, lookup
from .style import GREY, VERMILION, axes, binade_ticks, blue, floats, ink, integer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["amax_history"]


def amax_history(amax: Any, limit: Any, *, dtype: Any = "float8_e4m3fn", steps: Any = None, title: str = "",
                 ax: Axes | None = None) -> Axes:
    """Draw a tensor's amax at every step, and the largest magnitude that the scale of the step lets through.
    A vertical line in orange red is a step that saturates: amax is larger by half a step of the format or
    more.

    amax : one number a step, as row 0 of `DelayedScalingState.amax_history` holds it before `update`.
    limit : the format's maximum / scale of each step. dtype : the format, float8_e4m3fn or float8_e5m2.
    steps : their numbers; default 0, 1, …
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.amax_history([1.0, 1.1, 6.0, 6.2], [1.2, 1.2, 1.2, 6.0], title="hidden 1")
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['largest value that fits', 'amax of the step', 'saturated (1 step)']
    """
    seen, most = floats(amax, "amax"), floats(limit, "limit")
    if seen.ndim != 1 or seen.shape != most.shape:
        raise ValueError(f"limit: expected one number for each step, as amax has, {seen.shape}, "
                         f"got {most.shape}")
    at = np.arange(seen.size) if steps is None else floats(steps, "steps")
    if at.shape != seen.shape:
        raise ValueError(f"steps: expected {seen.size} numbers, one for each step, got {at.size}")
    f = lookup(dtype, FP8_DTYPES, "dtype")
    half_step = 2.0 ** (np.floor(np.log2(f.max)) - f.mantissa_bits - 1) / f.max
    over = seen > most * (1 + half_step)
    ax = axes(ax, (8, 3))
    ax.plot(at, most, drawstyle="steps-mid", color=blue(ax), linewidth=1.4, label="largest value that fits")
    ax.plot(at, seen, ".", color=ink(ax), markersize=5, label="amax of the step")
    ax.vlines(at[over], most[over], seen[over], color=VERMILION, linewidth=3,
              label=f"saturated ({int(over.sum())} {'step' if over.sum() == 1 else 'steps'})")
    ax.set_yscale("log", base=2)
    binade_ticks(ax.yaxis, *ax.get_ylim())
    ax.set(xlabel="step", ylabel="magnitude")
    ax.grid(axis="y", color=GREY, alpha=0.25)
    integer_ticks(ax.xaxis)
    if title:
        ax.set_title(title, fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax
