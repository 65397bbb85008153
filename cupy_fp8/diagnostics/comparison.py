"""Compares what every recipe does to one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .. import backend
from ..arrays import Array, contiguous
from ..formats import FORMATS, INPUT_DTYPES, choice, float8_e5m2, float32, names
from ..kernels import Variant, recording
from ..layouts import block_text
from ..ops.scales.amax import compute_amax
from ..ops.scales.scale import compute_scale
from ..recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..results import Quantized, Scaled, as_scaled, html_table
from . import on_gpu
from .recipe_rows import COLUMNS, Recipe, RecipeError, columns_for, recipe_name
from .scale_report import compact_scales
from .text import text_table
from .verdict import KINDS, Kind, verdict_on
from .whole import error_and_local

__all__ = ["RECIPES", "Comparison", "compare", "each", "launched"]

#: a quantiser; writes into a result if one is given
Quantize: TypeAlias = Callable[..., Quantized]

#: default recipes of a comparison, coarse scales first
RECIPES: tuple[Recipe, ...] = (
    CurrentScaling(), DelayedScaling(), CurrentScaling(pow2_scale=True), CurrentScaling(float8_e5m2),
    *(BlockScaling(block, pow2_scale=pow2) for block in ((128, 128), (1, None), (1, 128))
      for pow2 in (False, True)),
    MXScaling(), MXScaling(float8_e5m2))


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured: a `RecipeError` for each recipe, by name.

    shape, dtype  of x; for FP8 data with scales, the dtype of the data
    rows          one for each recipe, in the given order
    kind          what x is: 'weights', 'activations', or None if unknown
    """

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[RecipeError, ...]
    kind: Kind | None = None

    def __getitem__(self, name: str) -> RecipeError:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}: the recipes are {', '.join(row.name for row in self.rows)}")

    def __iter__(self) -> Iterator[RecipeError]:
        return iter(self.rows)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def distinct(self) -> tuple[RecipeError, ...]:
        """The rows, without those whose figures equal an earlier row's."""
        return tuple(row for row in self.rows if row.name not in self.same)

    @property
    def same(self) -> dict[str, str]:
        """The recipes whose figures equal those of an earlier one, and that one."""
        found: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        for row in self.rows:
            name = first.setdefault(row.figures, row.name)
            if name != row.name:
                found[row.name] = name
        return found

    @property
    def verdict(self) -> str:
        """Which recipe to take, why, and its code, for weights and for activations unless `kind` says which x
        is. It considers this tensor's numbers alone, and values other than the largest: the simplest recipe
        whose `local_sqnr_db` is hardly less than the best one's, and that loses hardly more values."""
        return verdict_on([self.rows], [self.kind])

    @property
    def notes(self) -> list[str]:
        """Sentences about what the table does not show."""
        first = self.rows[0].error
        found = [f"Left out of the errors: {first.nonfinite:,} NaN or Inf in x."] if first.nonfinite else []
        found += [f"{row.name} makes {row.error.nan:,} NaN." for row in self.distinct
                  if row.error.nan > first.nonfinite]
        groups: dict[str, list[str]] = {}
        for name, other in self.same.items():
            groups.setdefault(other, [other]).append(name)
        same = "; ".join(" = ".join(group) for group in groups.values())
        return [*found, f"Same figures: {same}."] if same else found

    @property
    def title(self) -> str:
        return f"{'×'.join(map(str, self.shape))} {self.dtype}"

    def __repr__(self) -> str:
        table = text_table(columns_for(row.name for row in self.rows), [row.cells() for row in self.distinct])
        return "\n".join([f"Comparison of {self.title}", table, *self.notes, self.verdict])

    def _repr_html_(self) -> str:
        titles = [column.title for column in COLUMNS]
        table = html_table(titles, (row.cells() for row in self.distinct))
        return f"<div>{self.title}{table}{'<br>'.join([*self.notes, self.verdict])}</div>"


def compare(x: Any, recipes: Iterable[Recipe] | Mapping[str, Recipe] | None = None, *,
            amax: Array | None = None, kind: Kind | None = None) -> Comparison:
    """Quantise a tensor with every recipe, and measure what each changed.

    x : bfloat16, float16 or float32 array [..., M, K] of two or three dimensions, NumPy or CuPy; or a
        `Scaled` or `Quantized`, whose float32 values are then quantised again.
    recipes : those to compare, or a dict of them by name. Default: one scale for the tensor, blocks of
        128×128, whole rows, 1×128 (each with f32 and with power-of-two scales) and MX, in E4M3; one scale and
        MX also in E5M2.
    amax : float32 [1]: the tensor's largest magnitude as delayed scaling knows it, from earlier steps.
        Default: the tensor's own, with which delayed scaling is current scaling.
    kind : what x is, for the verdict: 'weights' or 'activations'. Default: the verdict covers both.
    Returns a `Comparison`, whose `verdict` names those to take. Row-wise data are measured, by `error`.
    Raises TypeError (dtypes, not a recipe), ValueError (shapes, no elements, no recipes, two of one name,
    kind).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.random.default_rng(0).standard_normal((256, 256), np.float32)
    >>> found = fp8.diagnostics.compare(x)
    >>> round(found["MX E4M3"].error.sqnr_db, 1), found.same["delayed E4M3"]
    (31.5, 'tensor E4M3')
    """
    if kind is not None:
        choice(kind, "kind", KINDS)
    rows = tuple(each(x, recipes, amax=amax))
    return Comparison(tuple(x.shape), dtype_text(x), rows, kind)


def each(x: Any, recipes: Iterable[Recipe] | Mapping[str, Recipe] | None = None, *, amax: Array | None = None,
         run: Callable[[Quantize, Array], Quantized] = lambda quantize, x: quantize(x)
         ) -> Iterator[RecipeError]:
    """Yield the rows of `compare`, each as soon as it is known. run(quantize, x) returns quantize(x,
    out=None), and may time it."""
    chosen = _named(RECIPES if recipes is None else recipes)
    x = _values(x)
    return _rows(x, chosen, amax, run)


def _rows(x: Array, chosen: Mapping[str, Recipe], amax: Array | None,
          run: Callable[[Quantize, Array], Quantized]) -> Iterator[RecipeError]:
    for name, recipe in chosen.items():
        q = run(quantizer(recipe, x, amax), x)
        found, beside = error_and_local(x, q)
        yield RecipeError(name, recipe, found, q.nbytes / x.size, beside)


def quantizer(recipe: Recipe, x: Array, amax: Array | None) -> Quantize:
    """Return the quantiser of a recipe for x, with the scale of delayed scaling from an amax (default: x's
    own)."""
    if not isinstance(recipe, DelayedScaling):
        return recipe.quantize
    if amax is None:
        amax = compute_amax(x)
    scale = compute_scale(amax, dtype=recipe.dtype, margin=recipe.margin)
    if scale.size != 1:
        raise ValueError(f"amax: expected one element, got shape {amax.shape}")
    return lambda x, out=None: recipe.quantize(x, scale=scale, out=out)


def launched(x: Array, recipes: Iterable[Recipe] = RECIPES) -> list[Variant]:
    """Return the kernel variants that `compare` launches for an array, in the order in which a GPU needs
    them. Nothing runs, and the values of x do not matter."""
    flat = contiguous(x).reshape(-1)
    with recording() as variants:
        for recipe in recipes:
            s = as_scaled(quantizer(recipe, x, None)(x))
            compact_scales(s)
            on_gpu.error_sums(flat, s.dequantize(float32).reshape(-1), s.data.reshape(-1),
                              local=True)
    return list(dict.fromkeys(variants))


def _values(x: Any) -> Array:
    if isinstance(x, (Scaled, Quantized)):
        x = x.dequantize()
    backend.module_of(x)
    if x.dtype not in INPUT_DTYPES:
        hint = "fp8.Scaled(data, scale_inv, …)" if x.dtype in FORMATS else "x.astype(np.float32)"
        raise TypeError(f"x: expected dtype {names(INPUT_DTYPES)}, or a Scaled or Quantized, got {x.dtype}; "
                        f"pass {hint}")
    if x.ndim not in (2, 3) or not x.size:
        raise ValueError(f"x: expected elements in two or three dimensions, got shape {x.shape}; x[None] "
                         "makes a vector a matrix of one row")
    return x


def _named(recipes: Iterable[Recipe] | Mapping[str, Recipe]) -> dict[str, Recipe]:
    if isinstance(recipes, Mapping):
        found = [(str(name), recipe) for name, recipe in recipes.items()]
    else:
        try:
            found = [(recipe_name(recipe), recipe) for recipe in recipes]
        except TypeError as wrong:
            raise TypeError("recipes: expected recipes, such as [fp8.MXScaling(), fp8.BlockScaling()], or a "
                            f"dict of them by name, got {recipes!r} ({wrong})") from None
    for name, recipe in found:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipes: expected a recipe as {name}, got {recipe!r}")
    if not found or len(dict(found)) != len(found):
        raise ValueError(f"recipes: expected one or more, each with a name of its own, got "
                         f"{[name for name, _ in found]}; a dict gives names")
    return dict(found)


def dtype_text(x: Any) -> str:
    """Return the dtype of an array; for data with scales also what shares one."""
    if not isinstance(x, (Scaled, Quantized)):
        return str(x.dtype)
    part = x if isinstance(x, Scaled) else x._any
    return f"{x.dtype}, {'one scale' if part.block is None else block_text(part.block)}"
