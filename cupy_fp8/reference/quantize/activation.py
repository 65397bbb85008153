"""Reference of cupy_fp8.ops.quantize.activation: an activation, then quantisation of its f32 values
(docs/numerics.md, section 13)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recipes import Recipe
from ...results import Quantized
from .. import numerics
from .activations import GATED, activation
from .by_recipe import quantize_by
from .swiglu import swiglu, swiglu_backward


def activation_quantize(x: np.ndarray, recipe: Recipe, *, kind: str = "silu", scale: Any = None,
                        amax: np.ndarray | None = None, probs: np.ndarray | None = None,
                        bias: np.ndarray | None = None, splits: np.ndarray | None = None,
                        rowwise: bool = True, columnwise: bool = False, clamp: float | None = None,
                        interleaved: bool = False) -> Quantized:
    """Quantise act(x), or for gated kinds (act(a) * b) * p, by the recipe's rule."""
    if kind in GATED:
        y = swiglu(x, probs=probs, bias=bias, splits=splits, clamp=clamp, interleaved=interleaved, kind=kind)
    else:
        y, _ = activation(numerics.widen(x), kind)
    return quantize_by(recipe, y, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                       source=x.dtype)


def activation_backward_quantize(grad: np.ndarray, x: np.ndarray, recipe: Recipe, *, kind: str = "silu",
                                 scale: Any = None, amax: np.ndarray | None = None,
                                 probs: np.ndarray | None = None, bias: np.ndarray | None = None,
                                 splits: np.ndarray | None = None, rowwise: bool = True,
                                 columnwise: bool = False, clamp: float | None = None,
                                 interleaved: bool = False
                                 ) -> Quantized | tuple[Quantized, np.ndarray | None]:
    """Return the gradient of x, quantised by the recipe's rule; for gated kinds (that, the gradient of
    probs)."""
    if kind in GATED:
        dx, dprobs = swiglu_backward(grad, x, probs=probs, bias=bias, splits=splits, clamp=clamp,
                                     interleaved=interleaved, kind=kind)
    else:
        _, slope = activation(numerics.widen(x), kind)
        dx, dprobs = numerics.mul(numerics.widen(grad), slope), None
    q = quantize_by(recipe, dx, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                    source=x.dtype)
    return (q, dprobs) if kind in GATED else q
