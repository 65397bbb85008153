"""Lines over a common axis: measurements by step or by setting, and error reports of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from ..advice import shown
from ..diagnostics import ErrorReport
from ..formats import choice
from .style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    axes,
    binade_ticks,
    blue,
    figure,
    floats,
    integer_ticks,
    list_of_axes,
    mapping,
    members,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curves", "reports"]

# lines differ in colour, dashes and marker at once, so that no reader depends on colour
_LOOKS: tuple[tuple[str, str, str], ...] = (
    (BLUE, "-", "o"), (VERMILION, "--", "s"), (GREEN, "-.", "^"), (ORANGE, ":", "D"), (GREY, "-", "v"),
    (PURPLE, "--", "P"), ("#882255", "-.", "X"))
_MARKED = 40                                    # lines of more points have no markers
AxisScale: TypeAlias = Literal["linear", "log2", "log10"]
_SCALES: tuple[AxisScale, ...] = get_args(AxisScale)
_SHARES = ("saturated", "underflowed", "nan", "nonfinite")


def curves(x: Any, series: Mapping[str, Any], *, xlabel: str = "", ylabel: str = "", title: str = "",
           xscale: AxisScale = "linear", yscale: AxisScale = "linear", legend: bool = True,
           ax: Axes | None = None) -> Axes:
    """Draw several lines over the same x: losses by step, bytes by size, errors by setting.

    x : one-dimensional array or sequence of numbers.
    series : {label: as many numbers}; NaN leaves a gap.
    xscale, yscale : 'linear', 'log2' or 'log10'.
    legend : False for a panel beside one that has the legend.

    Lines differ in colour, dashes and marker, in the order of `series`. Where x has whole numbers only, so
    have its ticks. Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.curves([1, 2, 4], {"swizzled": [5.0, 3.0, 2.0]}, xscale="log2", ylabel="bytes")
    >>> [line.get_label() for line in ax.lines]
    ['swizzled']
    """
    choice(xscale, "xscale", _SCALES)
    choice(yscale, "yscale", _SCALES)
    mapping(series, "series", "a dict of numbers by label")
    at = _numbers(x, "x")
    lines = {label: _numbers(y, f"series[{label!r}]") for label, y in series.items()}
    for label, y in lines.items():
        if y.shape != at.shape:
            raise ValueError(f"series[{label!r}]: expected {at.size} numbers, as many as x, got {y.size}")
    ax = axes(ax, (7, 3))
    for i, (label, y) in enumerate(lines.items()):
        colour, dashes, marker = _LOOKS[i % len(_LOOKS)]
        ax.plot(at, y, linestyle=dashes, color=blue(ax) if colour == BLUE else colour,
                marker=marker if at.size <= _MARKED else "", markersize=4, linewidth=1.5, label=label)
    _set_scales(ax, xscale, yscale)
    if xscale == "linear" and (at == np.round(at)).all():
        integer_ticks(ax.xaxis)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if title:
        ax.set_title(title, fontsize="medium")
    if legend and len(lines) > 1:
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if len(lines) > 3 else {}
        ax.legend(frameon=False, fontsize="small", **beside)
    return ax


def _numbers(values: Any, name: str) -> np.ndarray:
    a = floats(values, name)
    if a.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {a.shape}")
    return a


def _set_scales(ax: Any, xscale: str, yscale: str) -> None:
    for axis, scale, set_scale, limits in ((ax.xaxis, xscale, ax.set_xscale, ax.get_xlim),
                                           (ax.yaxis, yscale, ax.set_yscale, ax.get_ylim)):
        if scale != "linear":
            set_scale("log", base=int(scale.removeprefix("log")))
        if scale == "log2":
            binade_ticks(axis, *limits())


def reports(x: Any, series: Mapping[str, Sequence[ErrorReport]],
            quantities: Sequence[str] = ("sqnr_db", "saturated", "underflowed"), *, xlabel: str = "",
            title: str = "", xscale: AxisScale = "linear",
            ax: Sequence[Axes] | None = None) -> list[Axes]:
    """Draw what `diagnostics.error` found over a sweep or over steps: a panel for each quantity, one above
    the other.

    x : what the reports belong to, numbers.
    series : {label: a report for each x}.
    quantities : fields of `diagnostics.ErrorReport`. Counts are drawn as a share of the elements, in %.
    ax : as many Axes as there are quantities.
    Returns the Axes as a list. Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([0.1, 1.0, 3.0])
    >>> found = [fp8.diagnostics.error(x, fp8.quantize_tensor(x, s)) for s in (1.0, 1024.0)]
    >>> top, bottom = fp8.plot.reports([1, 1024], {"E4M3": found}, ("sqnr_db", "saturated"))
    >>> top.get_ylabel(), bottom.get_ylabel()
    ('SQNR (dB)', 'saturated (%)')
    """
    known = tuple(ErrorReport.__dataclass_fields__)
    quantities = members(quantities, "quantities")
    for quantity in quantities:
        if quantity not in known:
            raise ValueError(f"quantities: expected fields of ErrorReport, {known}, got {quantity!r}")
    given = {label: members(found, f"series[{label!r}]")
             for label, found in mapping(series, "series", "a dict of reports by label").items()}
    for label, found in given.items():
        if not all(isinstance(report, ErrorReport) for report in found):
            raise TypeError(f"series[{label!r}]: expected a list of ErrorReports, got {shown(found)}")
    lines = {_label(quantity): {label: [_value(report, quantity) for report in found]
                                for label, found in given.items()} for quantity in quantities}
    panels = stacked(x, lines, xscale=xscale, xlabel=xlabel, title=title, ax=ax)
    for panel in panels:
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, -0.03 * high), max(high, 1e-3))
    return panels


def stacked(x: Any, lines: Mapping[str, Mapping[str, Any]], *, xlabel: str = "", title: str = "",
            xscale: AxisScale = "linear", ax: Sequence[Axes] | None = None) -> list[Axes]:
    """Draw `curves` in panels one above the other, by the label of their y axis. Returns the Axes."""
    size = 7.5, 1.2 + 1.5 * len(lines)
    panels = list(figure(size, len(lines))) if ax is None else list_of_axes(ax)
    if len(panels) != len(lines):
        raise ValueError(f"ax: expected {len(lines)} Axes, one for each quantity, got {len(panels)}")
    for panel, (label, series) in zip(panels, lines.items(), strict=True):
        first, last = panel is panels[0], panel is panels[-1]
        curves(x, series, xscale=xscale, ylabel=label, xlabel=xlabel if last else "",
               title=title if first else "", legend=first, ax=panel)
    return panels


def _value(report: ErrorReport, quantity: str) -> float:
    value = getattr(report, quantity)
    if value is None:
        return float("nan")
    return 100 * value / max(report.elements, 1) if quantity in _SHARES else float(value)


def _label(quantity: str) -> str:
    name = "SQNR (dB)" if quantity == "sqnr_db" else quantity.replace("_", " ")
    return f"{name} (%)" if quantity in _SHARES else name
