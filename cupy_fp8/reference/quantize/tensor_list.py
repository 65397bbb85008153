"""Reference of cupy_fp8.ops.quantize.tensor_list: each array of a list by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...formats import float8_e4m3fn
from ...recipes import Recipe
from ...results import Quantized
from .by_recipe import quantize_by
from .tensor import cast_transpose


def multi_cast_transpose(xs: Sequence[np.ndarray], scales: Any, *, dtype: Any = float8_e4m3fn,
                         amaxes: Any = None) -> list[Quantized]:
    """Call `cast_transpose` on each array."""
    return [cast_transpose(x, scale, dtype=dtype, amax=amax)
            for x, scale, amax in zip(xs, _each(scales, len(xs)), _each(amaxes, len(xs)), strict=True)]


def multi_quantize(xs: Sequence[np.ndarray], recipe: Recipe, *, rowwise: bool = True,
                   columnwise: bool = False, scales: Any = None, amaxes: Any = None) -> list[Quantized]:
    """Quantise each array by the recipe."""
    return [quantize_by(recipe, x, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax)
            for x, scale, amax in zip(xs, _each(scales, len(xs)), _each(amaxes, len(xs)), strict=True)]


def _each(a: Any, number: int) -> Sequence[Any]:
    """Return one value for each array: the members of a list, or views of an array's elements."""
    if a is None:
        return [None] * number
    return [a[i:i + 1] for i in range(number)] if isinstance(a, np.ndarray) else a
