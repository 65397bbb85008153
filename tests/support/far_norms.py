"""The far calls of norms. Statistics are those of whole rows, so it is only the rows that are far away."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from far_arrays import END, FAR, Far

import cupy_fp8 as fp8
from cupy_fp8.formats import bfloat16

_RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (fp8.DelayedScaling(), {"scale": 0.5}), "mx": (fp8.MXScaling(), {}),
    "block": (fp8.BlockScaling(), {})}
_ARRAY: dict[str, tuple[Any, dict[str, Any]]] = {"array": (None, {})}
#: Blocks find statistics ahead, or go through rows that are far apart, so the CPU can leave none out.
UNREACHED = {f"norm_quantize-{how}" for how in (*_RECIPES, "both", "any")}
UNREACHED |= {"norm_backward_quantize-both", "norm_backward_quantize-any"}


def calls() -> Iterator[tuple[str, Far]]:
    place = np.dtype(bfloat16), (FAR, 128)
    for how, (recipe, options) in _RECIPES.items():
        yield f"norm_quantize-{how}", Far(partial(_forward, recipe, options), *place)
    for how, (recipe, options) in (_RECIPES | _ARRAY).items():      # A block takes two rows or more.
        yield f"norm_backward_quantize-{how}", Far(partial(_backward, recipe, options), *place,
                                                   blocks=END // 2)
    both: dict[str, Any] = {"columnwise": True, "kind": "layer"}
    recipe = fp8.MXScaling()
    for how, columns in (("both", 128), ("any", 129)):
        at = np.dtype(bfloat16), (FAR, columns)
        yield f"norm_quantize-{how}", Far(partial(_forward, recipe, both), *at)
        yield f"norm_backward_quantize-{how}", Far(partial(_backward, recipe, both), *at)


def _forward(recipe: Any, options: dict[str, Any], m: Any, x: Any) -> Any:
    """With all that it returns. 1 / sigma of a row is a row, so that its windows are compared."""
    given = {"residual": x, "return_residual": True, "return_normed": True, "return_rstd": True, **options}
    *made, rstd = m.norm_quantize(x, _weight(x), recipe, **given)
    return *made, rstd.reshape(-1, 1)


def _backward(recipe: Any, options: dict[str, Any], m: Any, x: Any) -> Any:
    """Without the sums over all rows."""
    return m.norm_backward_quantize(x, x, _weight(x), recipe, residual_grad=x, **options)[0]


def _weight(x: Any) -> Any:
    return fp8.asarray(np.linspace(-1, 1, x.shape[1], dtype=np.float32), like=x)
