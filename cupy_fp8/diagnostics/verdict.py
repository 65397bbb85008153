"""Chooses recipes for weights and activations, from their figures on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal, TypeAlias

from ..layouts import Block
from .recipe_rows import RecipeError
from .text import decibels, share

#: the rows of one tensor, one per recipe
Rows: TypeAlias = Sequence[RecipeError]
#: role of a tensor in a model
Kind: TypeAlias = Literal["weights", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "activations")

#: A recipe is good enough if it is this close to the best one, first in decibels of the local SQNR, then in
#: the share of lost elements.
_DECIBELS, _SHARE = 1.0, 0.001
#: SQNR in decibels that E4M3's rounding leaves for values of any size. A recipe with more has values that
#: happen to be exact.
_ROUNDED = 32.0
#: From this SQNR on a result counts as exact: x was FP8 before, and the recipe reproduces it.
_EXACT = 60.0
#: SQNR in decibels of the largest values for a recipe that rounds them (E5M2: errors of at most 1/9)
_LARGEST_ROUNDED = 19.0
#: Preference among good recipes, by what shares a scale (None: the tensor). Weights of 128×128 are multiplied
#: with activations of 1×128, and tokens share no block, as docs/start.md says.
_SIMPLEST: dict[Kind, tuple[Block | None, ...]] = {
    "weights": (None, (128, 128), (1, None), (1, 64), (1, 128), (1, 32)),
    "activations": (None, (1, 128), (1, None), (1, 64), (1, 32))}


def good(rows: Rows) -> set[str]:
    """Return the names of the good recipes: those with hardly more noise than any other in the values beside
    larger ones, and of these the ones that lose hardly more values. SQNR itself is dominated by the largest
    values, which a scale that is not a power of two stores exactly: it only shows whether these were cut
    off."""
    least = min(max(row.error.sqnr_db for row in rows), _LARGEST_ROUNDED)
    kept = [row for row in rows if row.error.sqnr_db >= least]
    most = max(row.local_sqnr_db for row in kept)
    best = min(most, _EXACT if most == math.inf else _ROUNDED)
    kept = [row for row in kept if row.local_sqnr_db >= best - _DECIBELS]
    lost = min(row.lost for row in kept) + _SHARE
    return {row.name for row in kept if row.lost <= lost}


def recommended(tensors: Sequence[Rows], kinds: Sequence[Kind | None]) -> dict[Kind, str]:
    """Return the name of the recipe for each kind present: good enough for most of the tensors; of several
    the simplest, and if both kinds are present a pair with fast products. kinds: those of the tensors; None
    is either."""
    enough = [good(rows) for rows in tensors]
    found = {kind: [names for names, of in zip(enough, kinds, strict=True) if of in (kind, None)]
             for kind in KINDS}
    there = [kind for kind in KINDS if found[kind]]

    def merit(rows: Sequence[RecipeError]) -> tuple[int, ...]:
        of_kinds = list(zip(there, rows, strict=True))
        return (sum(row.name in names for kind, row in of_kinds for names in found[kind]),
                -sum(_rank(kind, row) for kind, row in of_kinds), -sum(len(row.options) for row in rows))

    pairs: list[Rows] = [rows for rows in product(*(_candidates(kind, tensors[0]) for kind in there))
             if not set(kinds) >= set(KINDS) or _fast(rows)]
    best = max(pairs, key=merit)
    return {kind: row.name for kind, row in zip(there, best, strict=True)}


def _candidates(kind: Kind, rows: Rows) -> Rows:
    return [row for row in rows if row.block in _SIMPLEST[kind]] or rows


def _rank(kind: Kind, row: RecipeError) -> int:
    known = _SIMPLEST[kind]
    return known.index(row.block) if row.block in known else len(known)


def _fast(rows: Sequence[RecipeError]) -> bool:
    """Whether a weight and an activation in these recipes have fast products."""
    blocks = [row.block for row in rows]
    return len(set(blocks)) == 1 or blocks == [(128, 128), (1, 128)]


def verdict_on(tensors: Sequence[Rows], kinds: Sequence[Kind | None]) -> str:
    """Return sentences for each kind of tensor: the recipe to take, why, and its code. Tensors whose kind is
    None may be either."""
    usable = [(rows, kind) for rows, kind in zip(tensors, kinds, strict=True) if not rows[0].error.nonfinite]
    if not usable:
        where = "x" if len(tensors) == 1 else "these tensors"
        return f"Take none yet: find the NaN or Inf in {where} first."
    names = recommended(*zip(*usable, strict=True))
    said: dict[tuple[str, str], list[str]] = {}
    for kind, name in names.items():
        about = [rows for rows, of in usable if of in (kind, None)]
        why = _on_one(name, kind, about[0], names) if len(about) == 1 else _on_many(name, about)
        written = f"It is written {_row(name, about[0]).code}."
        said.setdefault((name, f"{why} {written}"), []).append(kind)
    text = " ".join(f"Take {name} for {' and '.join(of)}: {why}" for (name, why), of in said.items())
    broken = len(tensors) - len(usable)
    return f"{text} {broken} with NaN or Inf left out." if broken else text


def _on_one(name: str, kind: Kind, rows: Rows, names: dict[Kind, str]) -> str:
    row, simplest = _row(name, rows), min(_candidates(kind, rows), key=lambda row: _rank(kind, row))
    if row.error.sqnr_db == math.inf:
        return "it is exact."
    if row is simplest:
        return f"{_figures(row)}; no other is clearly better, and none is simpler."
    if simplest.name in good(rows):
        others = [f"{other} of {of}" for of, other in names.items() if of != kind]
        return f"{_figures(row)}; {simplest.name} is as good, but not fast beside {others[0]}."
    return f"{_figures(row)}; {simplest.name} has {_figures(simplest)}."


def _on_many(name: str, tensors: Sequence[Rows]) -> str:
    fine = [_row(name, rows) for rows in tensors if name in good(rows)]
    low, lost = min(row.local_sqnr_db for row in fine), max(row.lost for row in fine)
    least = "exact" if low == math.inf else f"at least {low:.1f} dB locally"
    which = f"{len(fine)} of {len(tensors)}" if len(fine) < len(tensors) else (
        f"all {len(fine)}" if len(fine) > 2 else "both")
    return f"it is hardly worse than the best recipe in {which} tensors ({least}, {_lost(lost)})."


def _row(name: str, rows: Rows) -> RecipeError:
    return next(row for row in rows if row.name == name)


def _figures(row: RecipeError) -> str:
    return f"{decibels(row.local_sqnr_db)} dB locally, {_lost(row.lost)}"


def _lost(lost: float) -> str:
    return f"{share(lost)} of the values saturated or 0" if lost else "no value saturated or 0"
