"""Which recipe to take, from what each did to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .text import share

if TYPE_CHECKING:
    from .compare import Comparison, RecipeError

#: A recipe is good enough within this of the best: share of the elements that is lost, then decibels.
_SHARE, _DECIBELS = 0.01, 1.0


def good(comparison: Comparison) -> dict[str, RecipeError]:
    """The rows that lose hardly more values than any other, and of these the ones with hardly more noise.
    What is lost comes first, because SQNR is that of a few large values where there are such."""
    least = min(row.lost for row in comparison)
    kept = [row for row in comparison if row.lost <= least + _SHARE]
    best = max(row.error.sqnr_db for row in kept)
    return {row.name: row for row in kept if row.error.sqnr_db >= best - _DECIBELS}


def recommended(comparisons: Sequence[Comparison]) -> str:
    """The name of the recipe that is good enough for most of the tensors: of several the one with the fewest
    bytes, of these the first."""
    names = [row.name for row in comparisons[0]]
    enough = [good(comparison) for comparison in comparisons]

    def merit(name: str) -> tuple[int, float]:
        size = sum(comparison[name].bytes_per_element * comparison.elements for comparison in comparisons)
        return sum(name in one for one in enough), -size

    return max(names, key=merit)


def verdict_on(comparisons: Sequence[Comparison]) -> str:
    """A sentence: the recipe to take for these tensors, and why."""
    usable = [one for one in comparisons if not one.rows[0].error.nonfinite]
    if not usable:
        where = "x" if len(comparisons) == 1 else "these tensors"
        return f"Take none yet: find the NaN or Inf in {where} first."
    name = recommended(usable)
    said = (_on_one if len(usable) == 1 else _on_many)(name, usable)
    broken = len(comparisons) - len(usable)
    return said if not broken else f"{said[:-1]}; {broken} with NaN or Inf left out."


def _on_one(name: str, comparisons: Sequence[Comparison]) -> str:
    comparison = comparisons[0]
    row, smallest = comparison[name], _smallest(comparison)
    if row.error.sqnr_db == math.inf:
        return f"Take {name}: it is exact."
    if row is smallest:
        return f"Take {name}: {_figures(row)}; no other is clearly better, and none has fewer bytes."
    return f"Take {name}: {_figures(row)}; {smallest.name} has {_figures(smallest)}."


def _on_many(name: str, comparisons: Sequence[Comparison]) -> str:
    enough = [name in good(comparison) for comparison in comparisons]
    rows = [comparison[name] for comparison, fine in zip(comparisons, enough, strict=True) if fine]
    low, lost = min(row.error.sqnr_db for row in rows), max(row.lost for row in rows)
    least = "exact" if low == math.inf else f"at least {low:.1f} dB"
    which = f"all {len(rows)} tensors" if all(enough) else f"{len(rows)} of {len(enough)} tensors"
    said = f"Take {name}: it is good enough for {which} ({least}, {_lost(lost)})"
    smallest = _smallest(comparisons[0]).name
    if smallest != name:
        count = sum(smallest in good(comparison) for comparison in comparisons)
        said += f"; {smallest} would be for {count or 'none'}"
    return f"{said}."


def _smallest(comparison: Comparison) -> RecipeError:
    return min(comparison, key=lambda row: row.bytes_per_element)


def _figures(row: RecipeError) -> str:
    return f"{row.error.sqnr_db:.1f} dB, {_lost(row.lost)}"


def _lost(lost: float) -> str:
    return f"{share(lost)} of the values lost" if lost else "no value lost"
