"""Plots of magnitudes before and after quantisation, and of the error by magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, asnumpy
from ..formats import FORMATS, FP8_DTYPES, Format
from ..results import Quantized, Scaled
from .sample import sampled
from .style import GREY, ORANGE, VERMILION, axes, binade_ticks, blue, is_dark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["error_by_magnitude", "histogram"]

_BINS_PER_BINADE = 4
#: means and maxima of fewer elements are noise: these are drawn as dots
_FEWEST = 32


def histogram(x: Array, q: Any = None, *, ax: Axes | None = None) -> Axes:
    """Draw how often each magnitude occurs in x and after quantisation, on log2 axes with four bins per power
    of two.

    x : bfloat16, float16 or float32 array of any shape.
    q : what became of it: `Scaled`, `Quantized`, or dequantised values of x's shape; drawn as an outline.
        Where it has a single scale, the format's subnormals are shaded, and its limits marked, in units of x.
    Zeros have no place on the axis: the legend counts them. Of more than 2**20 elements a sample of 2**20 is
    drawn, always the same one, and the title says so: one element from each of 2**20 equal ranges.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal(1000, np.float32)
    >>> fp8.plot.histogram(x, fp8.quantize_tensor(x, 64.0)).get_xlabel()
    '|x|'
    """
    sample = sampled(x, q)
    before, after = _magnitudes(sample.x), None if sample.v is None else _magnitudes(sample.v)
    present = np.concatenate([before[before > 0], [] if after is None else after[after > 0]])
    low, high = (np.floor(np.log2(present.min())),
                 np.floor(np.log2(present.max())) + 1) if present.size else (-1, 1)
    edges: Any = 2.0 ** np.linspace(low, high, int(high - low) * _BINS_PER_BINADE + 1)
    ax = axes(ax, (7, 3.2))
    ax.hist(before, edges, color=blue(ax), alpha=0.5, label=_counted("x", before))
    if after is not None:
        ax.hist(after, edges, color=VERMILION, histtype="step", linewidth=1.2,
                label=_counted("quantised", after))
    s = q._any if isinstance(q, Quantized) else q
    if isinstance(s, Scaled) and s.scale_inv.size == 1:
        _mark_range(ax, FORMATS[s.dtype], float(asnumpy(s.scale_inv).reshape(())))
    ax.set_xscale("log", base=2)
    binade_ticks(ax.xaxis, *ax.get_xlim())
    if present.size:
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)                     # so that a bar of one element is visible
    ax.set_xlabel("|x|")
    ax.set_ylabel("elements")
    ax.set_title(f"Magnitudes of {sample.text}", fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def error_by_magnitude(x: Array, q: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the relative error against magnitude: root mean square and maximum of |v − x| / |x|. Points are a
    quarter of a power of two apart, and each has the elements from 1/√2 to √2 times its magnitude.

    x : bfloat16, float16 or float32 array of any shape.
    q : `Scaled`, `Quantized`, or dequantised values of x's shape.

    The dashed line is half a unit in the last place relative to the value, 2**-(mantissa bits + 1): the
    bound of every normal number that was not saturated. Below the normal range the error grows to 1
    (underflow); beyond the maximum it grows again (saturation). Where several scales meet, some elements of a
    magnitude are lost and others are not: the square of the root mean square is about the share that is. Dots
    are elements of magnitudes with fewer than 32. Of more than 2**20 elements a sample is drawn, as in
    `histogram`.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal(1000, np.float32)
    >>> fp8.plot.error_by_magnitude(x, fp8.quantize_tensor(x, 64.0)).get_ylabel()
    'relative error'
    """
    if q is None:
        raise TypeError("q: expected a Scaled, a Quantized or dequantised values, got None")
    sample = sampled(x, q)
    assert sample.v is not None
    with np.errstate(invalid="ignore"):             # a signalling NaN is invalid
        original, v = sample.x.astype(np.float64), sample.v.astype(np.float64)
    used = np.isfinite(original) & np.isfinite(v) & (original != 0)
    original, v = original[used], v[used]
    ax = axes(ax, (7, 3.2))
    if original.size:
        _draw_errors(ax, np.abs(original), np.abs(v - original) / np.abs(original))
    s = q._any if isinstance(q, Quantized) else q
    if isinstance(s, Scaled):
        bound = 2.0 ** -(FORMATS[s.dtype].mantissa_bits + 1)
        ax.axhline(bound, color=GREY, linestyle="--", linewidth=0.9,
                   label=f"half a unit in the last place, {bound:g}")
    ax.set_xscale("log", base=2)
    binade_ticks(ax.xaxis, *ax.get_xlim())
    ax.set_yscale("log")
    ax.set_xlabel("|x|")
    ax.set_ylabel("relative error")
    ax.set_title(f"Error by magnitude of {sample.text}", fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _magnitudes(v: np.ndarray) -> np.ndarray:
    """Return the finite magnitudes, in f64."""
    return np.abs(v[np.isfinite(v)]).astype(np.float64)


def _counted(label: str, magnitudes: np.ndarray) -> str:
    zeros = int((magnitudes == 0).sum())
    return f"{label} ({zeros:,} zeros)" if zeros else label


def _mark_range(ax: Any, f: Format, scale_inv: float) -> None:
    tiny, normal, top = (limit * scale_inv for limit in (f.smallest_subnormal, f.smallest_normal, f.max))
    if not 0 < tiny < top < np.inf:
        return
    assert f.dtype in FP8_DTYPES
    ax.axvspan(tiny, normal, color=ORANGE, alpha=0.4 if is_dark(ax) else 0.2, linewidth=0, label="subnormal")
    ax.axvline(tiny, color=GREY, linestyle=":", linewidth=1)
    ax.axvline(top, color=GREY, linestyle="--", linewidth=1, label=f"{f.dtype.name} maximum")


def _draw_errors(ax: Any, magnitude: np.ndarray, error: np.ndarray) -> None:
    """Draw lines where there are enough elements, dots where there are not."""
    bins = np.floor(np.log2(magnitude) * _BINS_PER_BINADE).astype(np.int64)
    first = int(bins.min())
    centres, rms, top, counted = _by_window(bins - first, error)
    at = 2.0 ** ((centres + first) / _BINS_PER_BINADE)
    ax.plot(at, top, color=VERMILION, linewidth=1.2, label="maximum")
    ax.plot(at, rms, color=blue(ax), linestyle="--", linewidth=1.2, label="root mean square")
    alone = ~counted[bins - first]
    if alone.any():
        ax.scatter(magnitude[alone], error[alone], s=5, color=blue(ax), linewidth=0, label="single elements")


def _by_window(bins: np.ndarray, error: np.ndarray
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (edges between bins, root mean square and maximum over the binade around each edge, the bins
    covered by any). NaN where a binade has fewer than _FEWEST elements, or none beside its centre.

    The steps of a floating-point format repeat from binade to binade, and in subnormals from one step to the
    next. A whole binade contains all of them, wherever it begins, so that only the error varies, not the
    steps. The mean of a mixture of lost and kept elements changes with their shares; a median would jump
    between the two."""
    half, number = _BINS_PER_BINADE // 2, int(bins.max()) + 1
    largest = np.zeros(number)
    np.maximum.at(largest, bins, error)
    windows = np.lib.stride_tricks.sliding_window_view
    n, squares, top = (windows(np.pad(a, 2 * half), 2 * half) for a in (
        np.bincount(bins), np.bincount(bins, error * error), largest))
    used = (n.sum(axis=1) >= _FEWEST) & n[:, half - 1:half + 1].any(axis=1)
    rms = np.sqrt(squares.sum(axis=1) / np.maximum(n.sum(axis=1), 1))
    counted: Any = windows(used, 2 * half)[1:number + 1].any(axis=1)
    return (np.arange(used.size) - half, np.where(used, rms, np.nan), np.where(used, top.max(axis=1), np.nan),
            counted)
