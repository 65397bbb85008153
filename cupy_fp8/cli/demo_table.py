"""The demo's tables: aligned text or Markdown, every tensor or a summary by kind of tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One tensor quantised with one recipe, row-wise and column-wise. Infinite figures are None, for JSON.

    bytes_per_element  data and scales of both directions
    microseconds       of one call
    copy_share         a device copy of the same traffic takes this share of it (on a GPU only)
    """

    tensor: str
    shape: tuple[int, int]
    dtype: str
    recipe: str
    sqnr_db: float | None
    max_relative_error: float | None
    saturated: int
    underflowed: int
    nan: int
    bytes_per_element: float
    microseconds: float
    copy_share: float | None


_Column = tuple[str, Callable[[Row], str]]


def render(rows: Sequence[Row], *, markdown: bool, summary: bool) -> str:
    """The table of all rows, after the summary where one is asked for."""
    table = _markdown if markdown else _text
    full = table(*_full(rows))
    if not summary:
        return full
    mark = "### " if markdown else ""
    return f"{mark}By kind of tensor\n\n{table(*_summary(rows))}\n\n{mark}Every tensor\n\n{full}"


def _full(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns: list[_Column] = [
        ("tensor", lambda r: r.tensor),
        ("shape", lambda r: "×".join(map(str, r.shape))),
        ("dtype", lambda r: r.dtype),
        ("recipe", lambda r: r.recipe),
        ("SQNR dB", lambda r: _number(r.sqnr_db, ".2f")),
        ("max rel. error", lambda r: _number(r.max_relative_error, ".4f")),
        ("saturated", lambda r: f"{r.saturated:,}"),
        ("underflowed", lambda r: f"{r.underflowed:,}"),
        ("bytes/element", lambda r: f"{r.bytes_per_element:.3f}"),
        ("time", lambda r: duration(r.microseconds)),
    ]
    if any(r.nan for r in rows):
        columns.insert(8, ("NaN", lambda r: f"{r.nan:,}"))
    if any(r.copy_share is not None for r in rows):
        columns.append(("of copy speed", lambda r: "–" if r.copy_share is None else f"{r.copy_share:.0%}"))
    return [title for title, _ in columns], [[text(r) for _, text in columns] for r in rows]


def kind_of(tensor: str) -> str:
    """A tensor's name with its numbers left out, so that the same matrix of every layer has one name.

    >>> kind_of("encoder.layer.11.attention.self.key.weight")
    'encoder.layer.*.attention.self.key.weight'
    """
    return re.sub(r"(?<![^._:/ -])\d+(?![^._:/ -])", "*", tensor)


def _summary(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((kind_of(row.tensor), row.recipe), []).append(row)
    head = ["kind", "tensors", "elements", "recipe", "SQNR dB (lowest … highest)", "max rel. error",
            "saturated", "underflowed", "bytes/element", "time"]
    body = []
    for (kind, recipe), members in groups.items():
        elements = sum(r.shape[0] * r.shape[1] for r in members)
        body.append([kind, str(len(members)), f"{elements:,}", recipe, _span([r.sqnr_db for r in members]),
                     _number(_worst(r.max_relative_error for r in members), ".4f"),
                     f"{sum(r.saturated for r in members):,}",
                     _share(sum(r.underflowed for r in members), elements),
                     f"{sum(r.bytes_per_element * r.shape[0] * r.shape[1] for r in members) / elements:.3f}",
                     duration(sum(r.microseconds for r in members))])
    return head, body


def duration(microseconds: float) -> str:
    """
    >>> duration(7.31), duration(1234.5), duration(2.5e6)
    ('7.3 µs', '1.2 ms', '2.5 s')
    """
    for limit, unit in ((1e3, "µs"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / limit * 1e3:.1f} {unit}"
    return f"{microseconds / 1e6:.1f} s"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _worst(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else max(v for v in found if v is not None)


def _span(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return "–"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} … {high}"


def _share(count: int, elements: int) -> str:
    return f"{count:,}" if count == 0 else f"{count:,} ({count / elements:.2g} of all)"


def _text(head: list[str], body: list[list[str]]) -> str:
    """Columns two spaces apart; a column is set right where all its cells begin like a number."""
    lines = [head, *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(re.match(r"[\d–-]", cell) for cell in column) for column in zip(*body, strict=True)]
    padded = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
              for line in lines]
    first, *others = ["  ".join(cells).rstrip() for cells in padded]
    return "\n".join([first, "  ".join("─" * w for w in widths), *others])


def _markdown(head: list[str], body: list[list[str]]) -> str:
    right = [all(re.match(r"[\d–-]", cell) for cell in column) for column in zip(*body, strict=True)]
    rule = ["---:" if r else "---" for r in right]
    # A name is whatever its file says: no cell may end its column, and * is not emphasis.
    return "\n".join("| " + " | ".join(line) + " |" for line in (
        head, rule, *([cell.replace("|", "\\|").replace("*", "\\*") for cell in line] for line in body)))
