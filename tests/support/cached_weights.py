"""Weights for tests of WeightCache, and their expected quantised copies."""

from __future__ import annotations

from typing import Any

from list_results import arrays

from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Quantized, cases, testing
from cupy_fp8.arrays import address
from cupy_fp8.formats import bfloat16

RECIPES = (DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling())
SHAPES = ((64, 48), (130, 33), (0, 8), (16, 16))


def weights_of(run: testing.Executor, seed: int = 0) -> list[Any]:
    return [run.array(cases.values("normal", shape, bfloat16, seed + i)) for i, shape in enumerate(SHAPES)]


def change(weights: list[Any]) -> None:
    for w in weights:
        w *= w.dtype.type(0.5)


def addresses(results: list[Quantized]) -> list[int]:
    return [address(a) for a in arrays(*results)]


def expected(recipe: Any, w: Any, scale: float, rowwise: bool = True, columnwise: bool = False) -> Quantized:
    given = {"scale": scale} if isinstance(recipe, DelayedScaling) else {}
    found: Quantized = recipe.quantize(w, rowwise=rowwise, columnwise=columnwise, **given)
    return found
