"""Quantisation by any recipe: calls the reference of the recipe's op."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe
from ...results import Quantized
from .blocks import quantize_block
from .mx import quantize_mx
from .tensor import quantize_tensor


def quantize_by(recipe: Recipe, x: np.ndarray, *, rowwise: bool = True, columnwise: bool = False,
                scale: Any = None, amax: np.ndarray | None = None, source: Any = None) -> Quantized:
    """Quantise by the rule of a recipe, whose fields are the options of its op. scale: for delayed scaling;
    amax: for per-tensor recipes. source: the dtype whose largest value limits the scale of a block; None: x's
    dtype."""
    directions: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
    if isinstance(recipe, BlockScaling):
        return quantize_block(x, **vars(recipe), **directions, source=source)
    if isinstance(recipe, MXScaling):
        return quantize_mx(x, **vars(recipe), **directions)
    if isinstance(recipe, CurrentScaling):
        return quantize_tensor(x, **vars(recipe), **directions, amax=amax)
    assert isinstance(recipe, DelayedScaling)
    return quantize_tensor(x, scale, dtype=recipe.dtype, **directions, amax=amax)
