"""Numbers as they are: a table, bars made of parts, and cells with a number in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..results import html_table
from .style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    axes,
    checked_form,
    floats,
    ink,
    mapping,
    members,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bars", "cells", "table"]

_PARTS = (BLUE, ORANGE, GREEN, VERMILION, GREY, PURPLE, SKY)
_HATCHES = ("", "///", "...", "\\\\\\", "", "xxx", "++")


class NotebookTable:
    """Rows of text under a head: aligned where it is printed, an HTML table in a notebook."""

    def __init__(self, head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
        self.head = [str(cell) for cell in members(head, "head")]
        self.rows = [[str(cell) for cell in members(row, f"rows[{i}]")]
                     for i, row in enumerate(members(rows, "rows"))]
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"rows: expected {len(self.head)} cells, as many as in head, got {row}")

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
                         for row in (self.head, *self.rows))

    def _repr_html_(self) -> str:
        return html_table(self.head, self.rows, first="th")


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> NotebookTable:
    """Return a table that notebooks show as such, and that prints as aligned text. The first cell of a row
    names it. Needs no matplotlib. Raises ValueError for a row that has not as many cells as the head.

    >>> table(["recipe", "SQNR (dB)"], [["E4M3", 31.5], ["E5M2", 25.6]])
    recipe  SQNR (dB)
    E4M3         31.5
    E5M2         25.6
    """
    return NotebookTable(head, rows)


def bars(rows: Mapping[str, Mapping[str, float] | Sequence[tuple[str, float]]], *, xlabel: str = "",
         title: str = "", form: str = "{:,.4g}", ax: Axes | None = None) -> Axes:
    """Draw horizontal bars made of parts, with their totals: bytes by purpose, launches by kernel, rows by
    state.

    rows : {label: {part: size}}, or pairs (part, size) where a part comes more than once. Parts of one name
        have one colour and hatch, which the legend explains.
    form : how the totals are written. Raises ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.bars({"MX": {"data": 1, "scales": 1 / 32}, "per tensor": {"data": 1}}, xlabel="bytes")
    >>> [text.get_text() for text in ax.texts]
    ['1.031', '1']
    """
    form = checked_form(form, "form")
    parts = {label: members(row.items() if isinstance(row, Mapping) else row, f"rows[{label!r}]")
             for label, row in mapping(rows, "rows", "a dict of parts by label").items()}
    names = list(dict.fromkeys(part for row in parts.values() for part, _ in row))
    ax = axes(ax, (8, 0.9 + 0.42 * len(parts)))
    if any(size < 0 for row in parts.values() for _, size in row):
        raise ValueError(f"rows: expected sizes of at least 0, got {rows}")
    longest = max((sum(size for _, size in row) for row in parts.values()), default=0)
    named: set[str] = set()
    for y, row in enumerate(parts.values()):
        left = 0.0
        for part, size in row:
            i = names.index(part) % len(_PARTS)
            ax.barh(y, size, left=left, height=0.7, color=_PARTS[i], hatch=_HATCHES[i],
                    edgecolor=ax.get_facecolor(), linewidth=0.8, label="" if part in named else part)
            named.add(part)
            left += size
        ax.text(left + 0.01 * longest, y, form.format(left), va="center", fontsize="small")
    ax.set_yticks(range(len(parts)), list(parts))
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_xlim(0, 1.12 * longest or 1)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(xlabel)
    if title:
        ax.set_title(title, fontsize="medium")
    if len(names) > 1:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def cells(values: Any, text: Any = None, *, rows: Sequence[Any] | None = None,
          columns: Sequence[Any] | None = None, xlabel: str = "", ylabel: str = "", title: str = "",
          form: str = "{:.3g}", ax: Axes | None = None) -> Axes:
    """Draw a small matrix with a colour and a text in each cell: what differs from what, or where something
    lies in memory.

    values : 2-D numbers; NaN is an empty cell. text : as many texts; default: the values, as `form` says.
    rows, columns : names along the axes; default: numbers.
    Raises ValueError, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.cells([[0, 208], [208, 0]], rows=["te", "deepgemm"], title="codes that differ")
    >>> [t.get_text() for t in ax.texts]
    ['0', '208', '208', '0']
    """
    v = floats(values, "values")
    if v.ndim != 2:
        raise ValueError(f"values: expected two dimensions, got shape {v.shape}")
    form = checked_form(form, "form")
    texts = np.vectorize(lambda a: "" if np.isnan(a) else form.format(a), otypes=[object])(v)
    texts = texts if text is None else np.asarray(text, object)
    if texts.shape != v.shape:
        raise ValueError(f"text: expected the shape of values, {v.shape}, got {texts.shape}")
    down = members(range(v.shape[0]) if rows is None else rows, "rows", v.shape[0])
    across = members(range(v.shape[1]) if columns is None else columns, "columns", v.shape[1])
    widest = max((len(str(t)) for t in texts.flat), default=1)
    ax = axes(ax, (1.5 + max(0.5, 0.12 * widest) * v.shape[1], 1.2 + 0.36 * v.shape[0]))
    known = v[np.isfinite(v)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    share = (v - low) / ((high - low) or 1)
    ax.set_facecolor(f"{GREY}40")
    ax.imshow(share, cmap="Blues", vmin=-0.15, vmax=1.35, aspect="auto", interpolation="nearest")
    for (i, j), t in np.ndenumerate(texts):
        empty = not np.isfinite(v[i, j])
        ax.text(j, i, t, ha="center", va="center", fontsize="small",
                color=ink(ax) if empty else "white" if share[i, j] > 0.7 else "black")
    names = [str(name) for name in across]
    long = max(map(len, names), default=0) > 6
    ax.set_xticks(range(v.shape[1]), names, rotation=35 if long else 0, ha="right" if long else "center")
    ax.set_yticks(range(v.shape[0]), down)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if title:
        ax.set_title(title, fontsize="medium")
    return ax
