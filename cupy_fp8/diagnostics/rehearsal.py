"""The kernels that `compare` launches for an array, found before they are needed."""

from __future__ import annotations

from collections.abc import Iterable

from ..arrays import Array, contiguous
from ..formats import float32
from ..kernels import Variant, recording
from ..results import as_scaled
from . import on_gpu
from .comparison import RECIPES, quantizer
from .recipe_rows import Recipe
from .scale_report import compact_scales

__all__ = ["launched"]


def launched(x: Array, recipes: Iterable[Recipe] = RECIPES) -> list[Variant]:
    """The variants, in the order in which a GPU needs them. Nothing runs, and x may hold anything."""
    flat = contiguous(x).reshape(-1)
    with recording() as variants:
        for recipe in recipes:
            s = as_scaled(quantizer(recipe, x, None)(x))
            compact_scales(s)
            on_gpu.error_sums(flat, s.dequantize(float32).reshape(-1), s.data.reshape(-1))
    return list(dict.fromkeys(variants))
