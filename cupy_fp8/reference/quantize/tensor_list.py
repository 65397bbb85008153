"""Reference of cupy_fp8.ops.quantize.tensor_list: each array of a list by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...formats import float8_e4m3fn
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ...results import Quantized
from .blocks import quantize_block
from .mx import quantize_mx
from .tensor import cast_transpose, quantize_tensor


def multi_cast_transpose(xs: Sequence[np.ndarray], scales: Any, *, dtype: Any = float8_e4m3fn,
                         amaxes: Any = None) -> list[Quantized]:
    """`cast_transpose` of each array."""
    return [cast_transpose(x, scale, dtype=dtype, amax=amax)
            for x, scale, amax in zip(xs, _each(scales, len(xs)), _each(amaxes, len(xs)), strict=True)]


def multi_quantize(xs: Sequence[np.ndarray], recipe: Any, *, rowwise: bool = True, columnwise: bool = False,
                   scales: Any = None, amaxes: Any = None) -> list[Quantized]:
    """Quantises each array with the recipe's op."""
    directions = {"rowwise": rowwise, "columnwise": columnwise}
    if isinstance(recipe, MXScaling):
        return [quantize_mx(x, dtype=recipe.dtype, mode=recipe.mode, profile=recipe.profile,
                            block=recipe.block, scale_layout=recipe.scale_layout, **directions) for x in xs]
    if isinstance(recipe, BlockScaling):
        return [quantize_block(x, block=recipe.block, dtype=recipe.dtype, pow2_scale=recipe.pow2_scale,
                               eps=recipe.eps, profile=recipe.profile, scale_layout=recipe.scale_layout,
                               **directions) for x in xs]
    rule: dict[str, Any] = {}
    if isinstance(recipe, CurrentScaling):
        rule = {"eps": recipe.eps, "pow2_scale": recipe.pow2_scale}
    assert rule or isinstance(recipe, DelayedScaling)
    return [quantize_tensor(x, scale, dtype=recipe.dtype, amax=amax, **directions, **rule)
            for x, scale, amax in zip(xs, _each(scales, len(xs)), _each(amaxes, len(xs)), strict=True)]


def _each(a: Any, number: int) -> Sequence[Any]:
    """One value for each array: the members of a list, or views of an array's elements."""
    if a is None:
        return [None] * number
    return [a[i:i + 1] for i in range(number)] if isinstance(a, np.ndarray) else a
