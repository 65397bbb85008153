"""Reference of cupy_fp8.ops.quantize.norm: RMSNorm and LayerNorm, then quantisation of their f32 values
(docs/numerics.md, section 16)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...recipes import Recipe
from .. import numerics
from ..numerics import add, div, mul, sub
from .by_recipe import quantize_by


def norm_quantize(x: np.ndarray, weight: np.ndarray, recipe: Recipe, *, residual: np.ndarray | None = None,
                  bias: np.ndarray | None = None, kind: str = "rms", eps: float = 1e-6,
                  weight_offset: float = 0.0, round_through: Any = None, scale: Any = None,
                  amax: np.ndarray | None = None, rowwise: bool = True, columnwise: bool = False,
                  return_residual: bool = False, return_normed: bool = False,
                  return_rstd: bool = False) -> Any:
    """Quantises y by the recipe's rule."""
    z = numerics.widen(x)
    if residual is not None:
        z = add(z, numerics.widen(residual))
    summed = numerics.narrow(z, x.dtype)
    if residual is not None and round_through is not None:
        z = numerics.widen(summed)
    rows = NormedRows.of(z, kind, eps)
    y = mul(rows.normed, _weight(weight, weight_offset))
    if bias is not None:
        y = add(y, numerics.widen(bias))
    if round_through is not None:
        y = numerics.widen(numerics.narrow(y, np.dtype(round_through)))
    quantised = quantize_by(recipe, y, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                            source=x.dtype)
    more = ((return_residual, summed), (return_normed, numerics.narrow(y, x.dtype)),
            (return_rstd, numerics.one_nan(rows.rstd[:, 0])))
    asked = [a for wanted, a in more if wanted]
    return (quantised, *asked) if asked else quantised


def norm_backward_quantize(grad: np.ndarray, x: np.ndarray, weight: np.ndarray, recipe: Recipe | None, *,
                           rstd: np.ndarray | None = None, residual_grad: np.ndarray | None = None,
                           kind: str = "rms", eps: float = 1e-6, weight_offset: float = 0.0,
                           dtype: Any = None, scale: Any = None, amax: np.ndarray | None = None,
                           rowwise: bool = True, columnwise: bool = False) -> tuple[Any, ...]:
    """(dx, quantised by the recipe's rule or rounded to `dtype`; dweight; of LayerNorm dbias)."""
    rows, g = NormedRows.of(numerics.widen(x), kind, eps, rstd), numerics.widen(grad)
    gw = mul(g, _weight(weight, weight_offset))
    dx = sub(gw, mul(rows.normed, _mean(mul(gw, rows.normed))))
    if kind == "layer":
        dx = sub(dx, _mean(gw))
    dx = mul(rows.rstd, dx)
    if residual_grad is not None:
        dx = add(dx, numerics.widen(residual_grad))
    dweight = numerics.tree_sum(mul(g, rows.normed), 0)
    dbias = (numerics.tree_sum(g, 0),) if kind == "layer" else ()
    if recipe is None:
        return numerics.narrow(dx, np.dtype(dtype or x.dtype)), dweight, *dbias
    quantised = quantize_by(recipe, dx, rowwise=rowwise, columnwise=columnwise, scale=scale, amax=amax,
                            source=x.dtype)
    return quantised, dweight, *dbias


class NormedRows(NamedTuple):
    """n = c * i and i = 1 / sigma of each row."""

    normed: np.ndarray
    rstd: np.ndarray

    @staticmethod
    def of(z: np.ndarray, kind: str, eps: float, rstd: np.ndarray | None = None) -> NormedRows:
        c = sub(z, _mean(z)) if kind == "layer" else z
        if rstd is None:
            deviation = numerics.sqrt(add(_mean(mul(c, c)), np.float32(eps)))
            i = div(numerics.F32_ONE, deviation)
        else:
            i = rstd[:, None]
        return NormedRows(mul(c, i), i)


def _mean(terms: np.ndarray) -> np.ndarray:
    """The mean of each row, its sum by the tree."""
    return div(numerics.tree_sum(terms, 1), np.float32(terms.shape[1]))[:, None]


def _weight(weight: np.ndarray, offset: float) -> np.ndarray:
    w = numerics.widen(weight)
    return add(w, np.float32(offset)) if np.float32(offset) else w
