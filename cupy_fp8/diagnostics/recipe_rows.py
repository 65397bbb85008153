"""A recipe's row in a comparison: its name, its figures, and their texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..formats import float8_e4m3fn
from ..layouts import Block
from ..options import block_pow2
from ..recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe
from .text import Column, count, decibels
from .whole import ErrorReport

__all__ = ["COLUMNS", "LEGEND", "Recipe", "RecipeError", "columns_for", "recipe_name"]

COLUMNS = (Column("recipe", 17, right=False), Column("SQNR dB", 7), Column("local dB", 8),
           Column("normal error", 12), Column("saturated", 9), Column("to zero", 7),
           Column("bytes", 5, rank=1))

LEGEND = {
    "recipe": "what shares a scale (MX: 1×32), and the format; pow2: scales are powers of two.",
    "SQNR": "power of the values over that of the errors; 6 dB are one bit.",
    "local": "that of 32 adjacent values without the largest and outliers, on average: what is left beside "
             "those.",
    "normal error": "relative error of the values that are normal numbers in FP8: rms / largest.",
    "saturated": "values beyond the format's maximum.",
    "to zero": "values too small for any number but 0.",
    "bytes": "of data and scales per element, row-wise. Training also needs the column-wise ones.",
}


@dataclass(frozen=True)
class RecipeError:
    """What one recipe did to a tensor.

    name                its name
    recipe              the recipe
    error               the `ErrorReport`
    bytes_per_element   bytes of data and scales per element (one direction)
    local_sqnr_db       the SQNR beside larger values: 10 log10(1 / mean(Σ (v − x)² / Σ x²)) over runs of 32
                        adjacent values, each without its largest one and its outliers (from 8 to 16 times
                        its median on), and with a ratio of at most 1, so that large values do not hide the
                        errors of the others
    """

    name: str
    recipe: Recipe
    error: ErrorReport
    bytes_per_element: float
    local_sqnr_db: float

    @property
    def lost(self) -> float:
        """The share of the elements that were saturated, or became 0 or NaN and were not."""
        e = self.error
        return ((e.saturated or 0) + e.underflowed + max(e.nan - e.nonfinite, 0)) / e.elements

    @property
    def code(self) -> str:
        """The recipe as code, without options that have their default."""
        options = [f"{name}={(str(value) if name == 'dtype' else value)!r}"
                   for name, value in self.options.items()]
        return f"fp8.{type(self.recipe).__name__}({', '.join(options)})"

    @property
    def options(self) -> dict[str, object]:
        """The options of the recipe that differ from their defaults."""
        return {field.name: getattr(self.recipe, field.name) for field in fields(self.recipe)
                if getattr(self.recipe, field.name) != field.default}

    @property
    def block(self) -> Block | None:
        """What shares a scale; None: the whole tensor."""
        return getattr(self.recipe, "block", None)

    @property
    def figures(self) -> tuple[ErrorReport, float, float]:
        """The figures that distinguish rows."""
        return self.error, self.bytes_per_element, self.local_sqnr_db

    def cells(self) -> tuple[str, ...]:
        """Return the texts of COLUMNS."""
        e = self.error
        assert e.normal_error is not None
        assert e.max_normal_error is not None
        wrong = f"{e.normal_error * 100:.1f} / {e.max_normal_error:.1%}" if e.max_normal_error else "0"
        return (self.name, decibels(e.sqnr_db), decibels(self.local_sqnr_db), wrong if e.normal else "–",
                *(count(n) for n in (e.saturated, e.underflowed)),
                f"{self.bytes_per_element:.3f}")


def columns_for(recipes: Iterable[str]) -> list[Column]:
    """Return COLUMNS, with room for these names."""
    first, *others = COLUMNS
    return [first._replace(width=max(first.width, *map(len, recipes))), *others]


def recipe_name(recipe: Recipe) -> str:
    """Return a recipe in a few words: what shares a scale, the format, and options that are not the usual
    ones.

    >>> import cupy_fp8 as fp8
    >>> recipe_name(fp8.BlockScaling(pow2_scale=True)), recipe_name(fp8.MXScaling(mode="floor"))
    ('1×128 E4M3 pow2', 'MX E4M3 floor')
    """
    options: dict[str, Any]
    match recipe:
        case DelayedScaling():
            where, options = "delayed", {f"margin {recipe.margin}": recipe.margin}
        case CurrentScaling():
            where, options = "tensor", {"pow2": recipe.pow2_scale, f"eps {recipe.eps:g}": recipe.eps}
        case MXScaling():
            where = "MX" if recipe.block == (1, 32) else "MX 32×32"
            options = {recipe.mode: recipe.mode != "rceil", recipe.profile: recipe.profile != "te"}
        case BlockScaling():
            lines: dict[Any, str] = {(1, None): "row", (None, 1): "column"}
            where = lines.get(recipe.block) or "×".join(map(str, recipe.block))
            options = {"pow2": block_pow2(recipe.pow2_scale, recipe.profile), f"eps {recipe.eps}": recipe.eps,
                       recipe.profile: recipe.profile != "te"}
        case _:
            raise TypeError(f"{recipe!r} is no recipe")
    fmt = "E4M3" if recipe.dtype == float8_e4m3fn else "E5M2"
    return " ".join([where, fmt, *(text for text, is_said in options.items() if is_said)])
