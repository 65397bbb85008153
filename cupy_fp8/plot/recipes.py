"""Plots of what recipes do to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..advice import type_name
from ..diagnostics import Comparison
from ..diagnostics.text import elided
from .style import BLUE, GREEN, ORANGE, VERMILION, ink, list_of_axes, pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["comparison"]

#: colour and marker of each tensor; more tensors than these are drawn as points of one kind
_LOOKS = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (ORANGE, "D"))
_LEAST = 1e-4                                   # % of lost values up to which the axis is linear


def comparison(found: Comparison | Mapping[str, Comparison], *,
               ax: Sequence[Axes] | None = None) -> list[Axes]:
    """Draw what each recipe does to tensors: SQNR at the left, and the share of the values that was saturated
    or lost to 0 at the right.

    found : what `diagnostics.compare` returned, or {name: it} for several tensors and the same recipes. Up to
        four tensors have a legend; of more each is a pale point, and the median a line. Recipes whose figures
        are always those of an earlier one are left out.
    ax : two Axes. Returns them as a list.
    Raises TypeError, ValueError, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    >>> left, right = fp8.plot.comparison(fp8.diagnostics.compare(x))
    >>> left.get_xlabel(), right.get_xlabel()
    ('SQNR (dB)', 'saturated or 0 (%)')
    """
    if not isinstance(found, (Comparison, Mapping)):
        raise TypeError("found: expected what diagnostics.compare returns, or a dict of these by name, got "
                        f"{type_name(found)}")
    tensors = {"": found} if isinstance(found, Comparison) else dict(found)
    recipes = _recipes(tensors)
    panels = list(pair((9, 1.3 + 0.27 * len(recipes)))) if ax is None else list_of_axes(ax)
    if len(panels) != 2:
        raise ValueError(f"ax: expected two Axes, got {len(panels)}")
    for panel, label, value in zip(panels, ("SQNR (dB)", "saturated or 0 (%)"), (_decibels, _lost),
                                   strict=True):
        _draw(panel, {name: [value(one[recipe]) for recipe in recipes] for name, one in tensors.items()})
        panel.set_xlabel(label)
        panel.set_yticks(range(len(recipes)), recipes if panel is panels[0] else [])
        panel.set_ylim(len(recipes) - 0.5, -0.5)
        panel.grid(axis="y", linewidth=0.4, alpha=0.4)
        panel.spines[["top", "right"]].set_visible(False)
    _mark_infinite(panels[0], tensors, recipes)
    panels[1].set_xscale("symlog", linthresh=_LEAST)
    panels[1].set_xlim(-_LEAST / 4, max(1.0, 1.5 * panels[1].dataLim.x1))
    panels[0].set_title(_title(tensors), loc="left", fontsize="medium")
    if 1 < len(tensors) <= len(_LOOKS):
        panels[1].legend(frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1),
                         ncols=2, borderaxespad=0)
    return panels


def _recipes(tensors: Mapping[str, Comparison]) -> list[str]:
    """Return the names of the recipes that differ somewhere."""
    if not tensors:
        raise ValueError("found: expected one comparison or more, got none")
    for name, one in tensors.items():
        if not isinstance(one, Comparison):
            raise TypeError(f"found: expected what diagnostics.compare returns as {name!r}, got {one!r}")
    names = {tuple(row.name for row in one) for one in tensors.values()}
    if len(names) > 1:
        raise ValueError("found: expected comparisons of the same recipes")
    return [name for name in names.pop() if any(name not in one.same for one in tensors.values())]


def _decibels(row: Any) -> float:
    return row.error.sqnr_db if math.isfinite(row.error.sqnr_db) else math.nan


def _lost(row: Any) -> float:
    return 100 * row.lost


def _draw(panel: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Draw a point for each tensor and recipe, in the recipe's line."""
    lines = range(len(next(iter(values.values()))))
    if len(values) <= len(_LOOKS):
        for i, (name, row) in enumerate(values.items()):
            colour, marker = _LOOKS[i]
            aside = 0.2 * (i - (len(values) - 1) / 2)  # offset, so that equal points do not hide each other
            panel.plot(row, [line + aside for line in lines], linestyle="", marker=marker, color=colour,
                       markersize=6, label=elided(name, 40), clip_on=False)
        return
    for row in values.values():
        panel.plot(row, lines, linestyle="", marker="o", color=BLUE, markersize=5, markeredgewidth=0,
                   alpha=max(0.15, min(0.7, 6 / len(values))))
    for line, of_recipe in zip(lines, zip(*values.values(), strict=True), strict=True):
        known = sorted(v for v in of_recipe if not math.isnan(v))
        if known:
            panel.plot([known[len(known) // 2]] * 2, [line - 0.3, line + 0.3], color=ink(panel),
                       linewidth=1.5)


def _mark_infinite(panel: Any, tensors: Mapping[str, Comparison], recipes: Sequence[str]) -> None:
    """Mark values that are exact, or all noise: these have no place on the axis."""
    for line, recipe in enumerate(recipes):
        found = [one[recipe].error.sqnr_db for one in tensors.values()]
        for value, text, at in ((math.inf, "exact", 1.0), (-math.inf, "no signal", 0.0)):
            if value in found:
                many = f"{found.count(value)} " if found[1:] else ""
                panel.annotate(f"{many}{text}", (at, line), xycoords=("axes fraction", "data"), va="center",
                               ha="right" if at else "left", fontsize="small")


def _title(tensors: Mapping[str, Comparison]) -> str:
    (name, one), *others = tensors.items()
    about = f"{len(tensors)} tensors" if others else f"{elided(name, 40)} {one.title}".strip()
    return f"What each recipe does to {about}"
