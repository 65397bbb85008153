"""Reference of cupy_fp8.ops.quantize.activation: an activation, then quantisation of its f32 values
(docs/numerics.md, section 13)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recipes import Recipe
from ...results import Quantized
from .. import numerics
from .by_recipe import quantize_by


def activation_quantize(x: np.ndarray, recipe: Recipe, *, kind: str = "silu", scale: Any = None,
                        amax: np.ndarray | None = None, rowwise: bool = True,
                        columnwise: bool = False) -> Quantized:
    """Quantises act(x) by the recipe's rule."""
    y, _ = activation(numerics.widen(x), kind)
    return quantize_by(recipe, y, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                       source=x.dtype)


def activation_backward_quantize(grad: np.ndarray, x: np.ndarray, recipe: Recipe, *, kind: str = "silu",
                                 scale: Any = None, amax: np.ndarray | None = None, rowwise: bool = True,
                                 columnwise: bool = False) -> Quantized:
    """Quantises grad * act'(x) by the recipe's rule."""
    _, slope = activation(numerics.widen(x), kind)
    return quantize_by(recipe, numerics.mul(numerics.widen(grad), slope), rowwise=rowwise,
                       columnwise=columnwise, scale=scale, amax=amax, source=x.dtype)


def activation(a: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(act(a), act'(a)) in f32."""
    return _ACTIVATIONS[kind](a)


def _silu(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one, sigma = numerics.F32_ONE, numerics.sigmoid(a)
    slope = numerics.mul(sigma, numerics.add(one, numerics.mul(a, numerics.sub(one, sigma))))
    return numerics.mul(a, sigma), slope


_ACTIVATIONS = {"silu": _silu}
