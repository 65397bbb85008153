"""Which recipe to take, from what each did to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from .recipe_rows import RecipeError
from .text import share

#: A tensor has one row for each recipe.
Rows: TypeAlias = Sequence[RecipeError]

#: A recipe is good enough if it is this close to the best one, first in the share of elements that is lost,
#: then in decibels.
_SHARE, _DECIBELS = 0.01, 1.0
#: E4M3's rounding leaves this SQNR, in decibels, of values of any size. A recipe with more has large values
#: that happen to be exact, as the largest value of each block is under a scale that is no power of two.
_ROUNDED = 32.0
#: From this SQNR on a result is as good as exact: x was FP8 before, and a recipe gives it back.
_EXACT = 60.0


def good(rows: Rows) -> dict[str, RecipeError]:
    """The rows, by name, that lose hardly more values than any other, and of these the ones with hardly more
    noise. What is lost comes first, because SQNR is that of a few large values where there are such."""
    least = min(row.lost for row in rows)
    kept = [row for row in rows if row.lost <= least + _SHARE]
    most = max(row.error.sqnr_db for row in kept)
    best = min(most, _EXACT if most == math.inf else _ROUNDED)
    return {row.name: row for row in kept if row.error.sqnr_db >= best - _DECIBELS}


def recommended(tensors: Sequence[Rows]) -> str:
    """The name of the recipe that is good enough for most of the tensors: of several the one with the fewest
    bytes, of these the first."""
    enough = [good(rows) for rows in tensors]

    def merit(rows: Rows) -> tuple[int, float]:
        """How many tensors a recipe is good enough for, and then how few bytes it takes."""
        return (sum(row.name in one for row, one in zip(rows, enough, strict=True)),
                -sum(row.bytes_per_element * row.error.elements for row in rows))

    return max(zip(*tensors, strict=True), key=merit)[0].name


def verdict_on(tensors: Sequence[Rows]) -> str:
    """Two sentences: the recipe to take for these tensors and why, and how it is written."""
    usable = [rows for rows in tensors if not rows[0].error.nonfinite]
    if not usable:
        where = "x" if len(tensors) == 1 else "these tensors"
        return f"Take none yet: find the NaN or Inf in {where} first."
    name = recommended(usable)
    said = _on_one(name, usable[0]) if len(usable) == 1 else _on_many(name, usable)
    broken = len(tensors) - len(usable)
    if broken:
        said = f"{said[:-1]}; {broken} with NaN or Inf left out."
    return f"{said} It is written {_row(name, usable[0]).code}."


def _on_one(name: str, rows: Rows) -> str:
    row, smallest = _row(name, rows), _smallest(rows)
    if row.error.sqnr_db == math.inf:
        return f"Take {name}: it is exact."
    if row is smallest:
        return f"Take {name}: {_figures(row)}; no other is clearly better, and none has fewer bytes."
    return f"Take {name}: {_figures(row)}; {smallest.name} has {_figures(smallest)}."


def _on_many(name: str, tensors: Sequence[Rows]) -> str:
    enough = [good(rows) for rows in tensors]
    fine = [rows[name] for rows in enough if name in rows]
    low, lost = min(row.error.sqnr_db for row in fine), max(row.lost for row in fine)
    least = "exact" if low == math.inf else f"at least {low:.1f} dB"
    which = f"{len(fine)} of {len(tensors)}" if len(fine) < len(tensors) else (
        f"all {len(fine)}" if len(fine) > 2 else "both")
    said = f"Take {name}: it is hardly worse than the best recipe in {which} tensors ({least}, {_lost(lost)})"
    smallest = _smallest(tensors[0]).name
    others = sum(smallest in rows for rows in enough)
    if others < len(fine):
        said += f"; {smallest} is so in {others or 'none'} of them"
    return f"{said}."


def _row(name: str, rows: Rows) -> RecipeError:
    return next(row for row in rows if row.name == name)


def _smallest(rows: Rows) -> RecipeError:
    return min(rows, key=lambda row: row.bytes_per_element)


def _figures(row: RecipeError) -> str:
    return f"{row.error.sqnr_db:.1f} dB, {_lost(row.lost)}"


def _lost(lost: float) -> str:
    return f"{share(lost)} of the values saturated or 0" if lost else "no value saturated or 0"
