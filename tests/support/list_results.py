"""Shared by tests of tensor lists and of the weight cache: results of lists, and their launches."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Quantized, cases, testing
from cupy_fp8.cases.quantize.tensor_list import GROUPS
from cupy_fp8.formats import bfloat16

#: launches of a list of non-empty arrays
LAUNCHES = {DelayedScaling: ["multi_cast_transpose"],
            CurrentScaling: ["multi_amax_scale", "multi_cast_transpose"],
            BlockScaling: ["group_quantize_block"], MXScaling: ["group_quantize_mx"]}


def one_element(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def arrays(*results: Quantized) -> list[Any]:
    """Yield every array once."""
    return list({id(a): a for q in results for part in q.parts.values() for a in part}.values())


def raw(results: list[Quantized]) -> list[bytes]:
    return [bytes(fp8.asnumpy(a).tobytes()) for a in arrays(*results)]


def poison(results: list[Quantized]) -> None:
    for a in arrays(*results):
        cases.poison(a)


def assert_same(actual: Quantized, desired: Quantized) -> None:
    testing.assert_bytes_equal(actual, desired)


# ---- lists of matrices ----
DELAYED = DelayedScaling()
KINDS: tuple[Any, ...] = (DELAYED, CurrentScaling(), BlockScaling(), MXScaling())


def kind(recipe: Any) -> str:
    return type(recipe).__name__


def matrices(group: str, dtype: Any = bfloat16, seed: int = 0) -> list[np.ndarray]:
    return [cases.values("normal", shape, dtype, seed + i) for i, shape in enumerate(GROUPS[group])]


def multi(xs: Any, recipe: Any, **options: Any) -> Any:
    return fp8.multi_quantize(xs, recipe, **({"columnwise": True} | options))


def outputs_for(xs: list[Any], recipe: Any = DELAYED, **directions: bool) -> list[Quantized]:
    outputs = [recipe.empty(x.shape, like=x, **({"columnwise": True} | directions)) for x in xs]
    poison(outputs)
    return outputs


def scales_of(recipe: Any, xs: list[Any]) -> dict[str, Any]:
    return {"scales": [0.5 + i for i in range(len(xs))]} if isinstance(recipe, DelayedScaling) else {}


def expected(recipe: Any, xs: list[Any], scale: float | None = None, **directions: bool) -> list[Quantized]:
    """Return each array's own result, with the scales of `scales_of` if the recipe needs any."""
    given = [{"scale": 0.5 + i if scale is None else scale} if isinstance(recipe, DelayedScaling) else {}
             for i in range(len(xs))]
    return [recipe.quantize(x, **({"columnwise": True} | directions), **own)
            for x, own in zip(xs, given, strict=True)]


def assert_all_same(run: testing.Executor, results: list[Quantized], desired: list[Quantized]) -> None:
    testing.assert_bytes_equal(results, list(map(run.numpy, desired)))
