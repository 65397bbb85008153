"""Shared by all plots: colours, checks of arguments, and the Axes to draw into."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..advice import shown, type_name
from ..arrays import asnumpy, is_array
from ..formats import Format, integer, lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB_HINT = "plotting needs matplotlib: pip install 'cupy_fp8[plot]' (or: pip install matplotlib)"

# palette of Okabe and Ito, which colour-blind readers can tell apart
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"
SKY, PURPLE = "#56B4E9", "#CC79A7"


def pyplot() -> Any:
    """Return matplotlib.pyplot. ImportError that names the extra if it is not installed."""
    try:
        from matplotlib import pyplot as found
    except ImportError:
        raise ImportError(MATPLOTLIB_HINT) from None
    return found


def axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is None:
        ax = pyplot().subplots(figsize=size, layout="constrained")[1]
    elif not hasattr(ax, "spines"):
        raise TypeError(f"ax: expected Axes of matplotlib, got {type_name(ax)}")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def floats(a: Any, name: str) -> np.ndarray:
    """Return an array, or numbers in lists or another iterable, as f64 values to draw. TypeError for anything
    else."""
    if is_array(a):
        values: Any = asnumpy(a)
    else:
        values = list(a) if isinstance(a, Iterable) and not isinstance(a, (str, bytes)) else a
    with suppress(TypeError, ValueError, OverflowError):
        if not np.iscomplexobj(values):
            return np.asarray(values, np.float64)
    raise TypeError(f"{name}: expected numbers, got {shown(a)}")


def positive_number(value: Any, name: str) -> float:
    """Return a finite number above 0. TypeError or ValueError for anything else."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name}: expected a finite number above 0, got {shown(value)}")
    return float(value)


def checked_form(value: Any, name: str) -> str:
    """Return a text with a place for one number, as for `str.format`. TypeError or ValueError for anything
    else."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a format such as '{{:.3g}}', got {shown(value)}")
    try:
        value.format(0.0)
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{name}: expected a format such as '{{:.3g}}', got {shown(value)} "
                         f"({error})") from None
    return value


def formats_of(dtypes: Any, allowed: tuple[np.dtype[Any], ...]) -> list[Format]:
    """Return the format of a dtype, or those of a sequence of dtypes. TypeError for others than these,
    ValueError for none."""
    several = isinstance(dtypes, Sequence) and not isinstance(dtypes, str)
    found = [lookup(dtype, allowed, "dtypes") for dtype in (dtypes if several else [dtypes])]
    if not found:
        raise ValueError("dtypes: expected at least one, got none")
    return found


def whole_number(value: Any, name: str, least: int, below: int | None = None) -> int:
    """Return a whole number in a range. TypeError or ValueError for anything else."""
    number = integer(value, name)
    if number < least or (below is not None and number >= below):
        upto = "or more" if below is None else f"to {below - 1}"
        raise ValueError(f"{name}: expected {least} {upto}, got {shown(number)}")
    return number


def members(value: Any, name: str, count: int | None = None) -> list[Any]:
    """Return the members of a list or another iterable. TypeError for anything else, ValueError unless there
    are `count`."""
    try:
        found = None if isinstance(value, (str, bytes)) else list(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name}: expected a list, got {type_name(value)}")
    if count is not None and len(found) != count:
        raise ValueError(f"{name}: expected a list of {count}, got {shown(value)}")
    return found


def mapping(value: Any, name: str, expected: str) -> Mapping[Any, Any]:
    """Return the value itself. TypeError if it is not a dict."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected {expected}, got {type_name(value)}")
    return value


def list_of_axes(ax: Any) -> list[Any]:
    """Return the Axes given for several panels, or one for a single panel. TypeError for anything else."""
    try:
        found = list(ax)
    except TypeError:
        found = [ax]
    if not all(hasattr(panel, "spines") for panel in found):
        raise TypeError(f"ax: expected a list of Axes of matplotlib, got {shown(ax)}")
    return found


def figure(size: tuple[float, float], panels: int) -> Any:
    """Return the Axes of a new figure, one above the other over the same x."""
    return pyplot().subplots(panels, 1, figsize=size, sharex=True, squeeze=False,
                             layout="constrained")[1][:, 0]


def pair(size: tuple[float, float]) -> Any:
    """Return two Axes of a new figure, side by side."""
    return pyplot().subplots(1, 2, figsize=size, layout="constrained")[1]


def ink(ax: Any) -> Any:
    """Return the text colour of the Axes: dark on light backgrounds, light on dark ones."""
    return ax.xaxis.label.get_color()


def is_dark(ax: Any) -> bool:
    from matplotlib.colors import to_rgb

    return sum(to_rgb(ax.get_facecolor())) < 1.5


def blue(ax: Any) -> str:
    """Return the first colour of lines and bars: blue, or on a dark background the palette's sky blue."""
    return SKY if is_dark(ax) else BLUE


def integer_ticks(axis: Any) -> None:
    """Put no ticks between whole numbers, on an axis of counts, exponents or indices."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def binade_ticks(axis: Any, low: float, high: float) -> None:
    """Put ticks at powers of two whose exponents are multiples of 1, 2, 4, 8, …, at most nine of them."""
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullLocator

    span, step = math.log2(high / low), 1
    while span / step > 9:
        step *= 2
    axis.set_major_locator(LogLocator(base=2.0**step, numticks=99))
    axis.set_major_formatter(LogFormatterMathtext(base=2))
    axis.set_minor_locator(NullLocator())
