"""Reference of cupy_fp8.ops.quantize.swiglu: SwiGLU, then quantisation of its f32 values
(docs/numerics.md, section 9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recipes import Recipe
from ...results import Quantized
from .. import numerics
from ..scales.swizzle import group_ranges
from .activations import GATED, Pair, activation, silu
from .by_recipe import quantize_by

ALPHA = np.float32(1.702)


def swiglu_quantize(x: np.ndarray, recipe: Recipe, *, scale: Any = None, amax: np.ndarray | None = None,
                    probs: np.ndarray | None = None, bias: np.ndarray | None = None,
                    splits: np.ndarray | None = None, rowwise: bool = True, columnwise: bool = False,
                    clamp: float | None = None, form: str = "swiglu", interleaved: bool = False) -> Quantized:
    """Quantise y by the recipe's rule."""
    y = swiglu(x, probs=probs, bias=bias, splits=splits, clamp=clamp, form=form, interleaved=interleaved)
    # y stays in f32, but x's dtype still limits the scales of blocks
    return quantize_by(recipe, y, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                       source=x.dtype)


def swiglu_backward_quantize(grad: np.ndarray, x: np.ndarray, recipe: Recipe, *, scale: Any = None,
                             amax: np.ndarray | None = None, probs: np.ndarray | None = None,
                             bias: np.ndarray | None = None, splits: np.ndarray | None = None,
                             rowwise: bool = True, columnwise: bool = False, clamp: float | None = None,
                             form: str = "swiglu",
                             interleaved: bool = False) -> tuple[Quantized, np.ndarray | None]:
    """(the gradient of x, quantised by the recipe's rule, the gradient of probs)."""
    dx, dprobs = swiglu_backward(grad, x, probs=probs, bias=bias, splits=splits, clamp=clamp, form=form,
                                 interleaved=interleaved)
    q = quantize_by(recipe, dx, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                    source=x.dtype)
    return q, dprobs


def swiglu(x: np.ndarray, *, probs: np.ndarray | None = None, bias: np.ndarray | None = None,
           splits: np.ndarray | None = None, clamp: float | None = None, form: str = "swiglu",
           interleaved: bool = False, kind: str = "swiglu") -> np.ndarray:
    """y = (act(a) * b) * p in f32; for 'gpt_oss' ((a * sigma(alpha * a)) * (b + 1)) * p."""
    a, b = clamped(*halves(x, bias, splits, interleaved), clamp)
    (act, _), b = _activated(a, b, kind, form)
    y = numerics.mul(act, b)
    return y if probs is None else numerics.mul(y, probs[:, np.newaxis])


def swiglu_backward(grad: np.ndarray, x: np.ndarray, *, probs: np.ndarray | None = None,
                    bias: np.ndarray | None = None, splits: np.ndarray | None = None,
                    clamp: float | None = None, form: str = "swiglu",
                    interleaved: bool = False,
                    kind: str = "swiglu") -> tuple[np.ndarray, np.ndarray | None]:
    """Return (dx in f32, laid out like x; dprobs or None)."""
    g = numerics.widen(grad)
    given_a, given_b = halves(x, bias, splits, interleaved)
    a, b = clamped(given_a, given_b, clamp)
    (act, slope), b = _activated(a, b, kind, form)
    ge = g if probs is None else numerics.mul(g, probs[:, np.newaxis])
    da, db = numerics.mul(numerics.mul(ge, b), slope), numerics.mul(ge, act)
    if clamp is not None:
        limit = np.float32(clamp)
        with np.errstate(invalid="ignore"):
            da = np.where(given_a > limit, np.float32(0), da)
            db = np.where(np.abs(given_b) > limit, np.float32(0), db)
    dx = np.stack([da, db], axis=-1).reshape(x.shape) if interleaved else np.concatenate([da, db], axis=1)
    return dx, None if probs is None else numerics.tree_sum(numerics.mul(numerics.mul(g, act), b), 1)


def _activated(a: np.ndarray, b: np.ndarray, kind: str, form: str) -> tuple[Pair, np.ndarray]:
    """Return ((act(a), its derivative), the factor of act(a))."""
    if form == "gpt_oss":
        return silu(a, numerics.mul(a, ALPHA)), numerics.add(b, numerics.F32_ONE)
    assert form == "swiglu"
    return activation(a, GATED[kind]), b


def halves(x: np.ndarray, bias: np.ndarray | None, splits: np.ndarray | None,
           interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (a, b) with bias. splits: rows of each expert; each expert has its own row of bias. Rows after
    the last expert get no bias; a negative size counts as 0, and an expert that extends past the last row
    ends there."""
    v = numerics.widen(x)
    if bias is not None and splits is None:
        v = numerics.add(v, numerics.widen(bias))
    elif bias is not None and splits is not None:
        ranges = group_ranges(splits, len(v), 0)
        for (start, end), own in zip(ranges, numerics.widen(bias), strict=True):
            v[start:end] = numerics.add(v[start:end], own)
    half = v.shape[1] // 2
    return (v[:, ::2], v[:, 1::2]) if interleaved else (v[:, :half], v[:, half:])


def clamped(a: np.ndarray, b: np.ndarray, clamp: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (a clamped to at most clamp, b clamped to -clamp … clamp). NaN stays."""
    if clamp is None:
        return a, b
    with np.errstate(over="ignore"):
        limit = np.float32(clamp)
    return np.minimum(a, limit), np.maximum(np.minimum(b, limit), -limit)
