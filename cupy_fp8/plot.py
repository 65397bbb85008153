"""Pictures of number formats and quantisation errors, with matplotlib (extra `plot`).

Every function draws into `ax` (default: a new figure) and returns the Axes, takes NumPy and CuPy arrays
(copied to the host), and changes no global setting of matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import Array, asnumpy
from .formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, Format, lookup, names
from .reference.numerics import widen
from .results import Quantized, Scaled

__all__ = ["error_by_magnitude", "histogram", "number_line", "scale_heat_map"]

MATPLOTLIB_HINT = "plotting needs matplotlib: pip install 'cupy_fp8[plot]' (or: pip install matplotlib)"

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN, _VERMILION, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"
_BINS_PER_BINADE = 4
_LINE_DTYPES = tuple(dtype for dtype, f in FORMATS.items() if f.bits <= 16)


def number_line(dtypes: Any, *, axis: str = "log", limit: float | None = None, ax: Any = None) -> Any:
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
    several = isinstance(dtypes, Sequence) and not isinstance(dtypes, str)
    formats = [lookup(dtype, _LINE_DTYPES, "dtypes") for dtype in (dtypes if several else [dtypes])]
    if not formats:
        raise ValueError("dtypes: expected at least one, got none")
    ax = _axes(ax, (8, 0.7 + 0.62 * len(formats)))
    limit = max(f.max for f in formats) if limit is None else float(limit)
    for row, f in enumerate(formats):
        v = finite_values(f)
        v = v[(np.abs(v) <= limit) & ((v > 0) | (axis == "linear"))]
        subnormal = (np.abs(v) < f.smallest_normal) & (v != 0)
        ax.axhline(row, color=_GREY, linewidth=0.6, zorder=0)
        for part, colour in ((v[~subnormal], _BLUE), (v[subnormal], _ORANGE)):
            ax.vlines(part, row - 0.3, row + 0.3, color=colour, linewidth=0.9 if v.size < 200 else 0.5)
    if axis == "log":
        ax.set_xscale("log", base=2)
    ax.set_yticks(range(len(formats)), [f.dtype.name for f in formats])
    ax.set_ylim(len(formats) - 0.5, -0.5)
    ax.set_title("Representable values")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def finite_values(fmt: Format) -> np.ndarray:
    """All finite values of a format of at most 16 bits in ascending order, f64; zero once."""
    every = np.arange(1 << fmt.bits).astype(fmt.storage).view(fmt.dtype)
    v = widen(every).astype(np.float64)
    return np.unique(v[np.isfinite(v)])


def histogram(x: Array, q: Any = None, *, ax: Any = None) -> Any:
    """Draw how often each magnitude occurs in x and after quantisation, on log2 axes with four bins per power
    of two.

    x : bfloat16, float16 or float32 array of any shape.
    q : what became of it: `Scaled`, `Quantized`, or dequantised values of x's shape; drawn as an outline.
        Where it has a single scale, the format's subnormals are shaded, and its limits marked, in units of x.
    Zeros have no place on the axis: the legend counts them.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal(1000, np.float32)
    >>> fp8.plot.histogram(x, fp8.quantize_tensor(x, 64.0)).get_xlabel()
    '|x|'
    """
    before = _magnitudes(x)
    after = None if q is None else _magnitudes(_dequantized(q, x))
    present = np.concatenate([before[before > 0], [] if after is None else after[after > 0]])
    low, high = (np.floor(np.log2(present.min())),
                 np.floor(np.log2(present.max())) + 1) if present.size else (-1, 1)
    edges = 2.0 ** np.linspace(low, high, int(high - low) * _BINS_PER_BINADE + 1)
    ax = _axes(ax, (7, 3.2))
    ax.hist(before, edges, color=_BLUE, alpha=0.35, label=_counted("x", before))
    if after is not None:
        ax.hist(after, edges, color=_VERMILION, histtype="step", linewidth=1.2,
                label=_counted("quantised", after))
    s = q._any if isinstance(q, Quantized) else q
    if isinstance(s, Scaled) and s.scale_inv.size == 1:
        _mark_range(ax, FORMATS[s.dtype], float(asnumpy(s.scale_inv).reshape(())))
    ax.set_xscale("log", base=2)
    if present.size:
        ax.set_yscale("log")
    ax.set_xlabel("|x|")
    ax.set_ylabel("elements")
    ax.legend(loc="upper left", frameon=False, fontsize="small")
    return ax


def error_by_magnitude(x: Array, q: Any, *, ax: Any = None) -> Any:
    """Draw the relative error against magnitude: median and maximum of |v − x| / |x| in bins of a quarter of
    a power of two.

    x : bfloat16, float16 or float32 array of any shape. q : `Scaled`, `Quantized`, or dequantised values
    of x's shape. The dashed line is half a unit in the last place relative to the value, 2**-(mantissa
    bits + 1): the bound of every normal number that was not saturated. Below the normal range the error
    grows to 1 (underflow); beyond the maximum it grows again (saturation). Raises TypeError, ValueError,
    ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal(1000, np.float32)
    >>> fp8.plot.error_by_magnitude(x, fp8.quantize_tensor(x, 64.0)).get_ylabel()
    'relative error'
    """
    original, v = _host_f32(x, "x").astype(np.float64), _dequantized(q, x).astype(np.float64)
    used = np.isfinite(original) & np.isfinite(v) & (original != 0)
    original, v = original[used], v[used]
    ax = _axes(ax, (7, 3.2))
    if original.size:
        centres, middle, top = _by_bin(np.abs(original), np.abs(v - original) / np.abs(original))
        ax.plot(centres, top, color=_VERMILION, linewidth=1.2, label="maximum")
        ax.plot(centres, middle, color=_BLUE, linewidth=1.2, label="median")
    s = q._any if isinstance(q, Quantized) else q
    if isinstance(s, Scaled):
        bound = 2.0 ** -(FORMATS[s.dtype].mantissa_bits + 1)
        ax.axhline(bound, color=_GREY, linestyle="--", linewidth=0.9,
                   label=f"half a unit in the last place, {bound:g}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("|x|")
    ax.set_ylabel("relative error")
    ax.legend(frameon=False, fontsize="small")
    return ax


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
    ax = _axes(ax, (5, 3.6))
    picture = ax.imshow(np.where(np.isfinite(exponents), exponents, np.nan), cmap="viridis", aspect="auto",
                        interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, label="log2 scale_inv")
    ax.set_xlabel("block column")
    ax.set_ylabel("block row")
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError(MATPLOTLIB_HINT) from None
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def _host_f32(a: Array, name: str) -> np.ndarray:
    a = asnumpy(a)
    if a.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: expected dtype {names(INPUT_DTYPES)}, got {a.dtype}")
    return widen(a)


def _dequantized(q: Any, x: Array) -> np.ndarray:
    v = _host_f32(q.dequantize() if isinstance(q, (Scaled, Quantized)) else q, "q")
    if v.shape != x.shape:
        raise ValueError(f"q: expected the shape of x, {x.shape}, got {v.shape}")
    return v


def _magnitudes(a: Array) -> np.ndarray:
    """The finite magnitudes as a flat f64 array."""
    v = _host_f32(a, "x")
    return np.abs(v[np.isfinite(v)]).astype(np.float64)


def _counted(label: str, magnitudes: np.ndarray) -> str:
    zeros = int((magnitudes == 0).sum())
    return f"{label} ({zeros:,} zeros)" if zeros else label


def _mark_range(ax: Any, f: Format, scale_inv: float) -> None:
    tiny, normal, top = (limit * scale_inv for limit in (f.smallest_subnormal, f.smallest_normal, f.max))
    if not 0 < tiny < top < np.inf:
        return
    assert f.dtype in FP8_DTYPES
    ax.axvspan(tiny, normal, color=_ORANGE, alpha=0.15, linewidth=0, label="subnormal")
    ax.axvline(tiny, color=_GREY, linestyle=":", linewidth=1)
    ax.axvline(top, color=_GREY, linestyle="--", linewidth=1, label=f"{f.dtype.name} maximum")


def _by_bin(magnitude: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bin centres, median, maximum) of the errors in quarter binades that are not empty."""
    index = np.floor(np.log2(magnitude) * _BINS_PER_BINADE).astype(np.int64)
    order = np.lexsort((error, index))
    index, error = index[order], error[order]
    start = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
    stop = np.append(start[1:], index.size)
    return 2.0 ** ((index[start] + 0.5) / _BINS_PER_BINADE), error[(start + stop - 1) // 2], error[stop - 1]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
