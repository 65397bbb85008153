"""Formats reports as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a text table whose width is known in advance. rank: if a table is too wide, columns of the
    highest rank are left out first; those of rank 0 stay."""

    title: str
    width: int
    right: bool = True
    rank: int = 0


def text_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([*text_head(columns), *(text_row(columns, row) for row in rows)])


def fitting(columns: Sequence[Column], width: int, between: int = 2) -> list[int]:
    """Return the indices of the columns that fit side by side."""
    kept = list(range(len(columns)))
    while sum(columns[i].width + between for i in kept) - between > width:
        last = max(kept, key=lambda i: (columns[i].rank, i))
        if not columns[last].rank:
            break
        kept.remove(last)
    return kept


def text_head(columns: Sequence[Column]) -> list[str]:
    return [text_row(columns, texts) for texts in ([c.title for c in columns],
                                                   ["─" * c.width for c in columns])]


def text_row(columns: Sequence[Column], cells: Sequence[str]) -> str:
    """Return a line of a table: columns are two spaces apart."""
    return "  ".join(cell.rjust(c.width) if c.right else cell.ljust(c.width)
                     for c, cell in zip(columns, cells, strict=True)).rstrip()


def elided(text: str, width: int) -> str:
    """Return the text, with its middle left out if it is longer than `width`: names differ at both ends.

    >>> elided("model.layers.11.mlp.down_proj.weight", 20)
    'model.laye…oj.weight'
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[:width - 1 - end]}…{text[len(text) - end:]}"


def json_number(value: Any) -> Any:
    """Return None (null) for NaN and infinities, which JSON does not have; anything else unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decibels(value: float) -> str:
    return {math.inf: "exact", -math.inf: "none"}.get(value) or f"{value:.2f}"


def count(n: int | None) -> str:
    """Format a number of elements in at most seven characters.

    >>> count(5094), count(8_388_608), count(12_345_678_901)
    ('5,094', '8.39 M', '12.3 G')
    """
    if n is None:
        return "unknown"
    if n < 1_000_000:
        return f"{n:,}"
    value, unit = (n / 1e9, "G") if n >= 999_500_000 else (n / 1e6, "M")
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def share(value: float) -> str:
    """
    >>> share(0.1234), share(0.996), share(0.000061), share(1e-9), share(0)
    ('12 %', '100 %', '0.0061 %', 'less than 0.0001 %', 'none')
    """
    if not value:
        return "none"
    if value >= 0.095:
        return f"{value * 100:.0f} %"
    return f"{value * 100:.2g} %" if value >= 1e-6 else "less than 0.0001 %"
