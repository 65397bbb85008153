"""What the tests of tensor lists and of the weight cache share: the results of lists, and the launches that
made them."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Quantized, cases, testing

#: The launches of a list of arrays that are not empty.
LAUNCHES = {DelayedScaling: ["multi_cast_transpose"],
            CurrentScaling: ["multi_amax_scale", "multi_cast_transpose"],
            BlockScaling: ["group_quantize_block"], MXScaling: ["group_quantize_mx"]}


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def arrays(*results: Quantized) -> list[Any]:
    """Every array, each once."""
    return list({id(a): a for q in results for _, part in q._parts() for a in part}.values())


def raw(results: list[Quantized]) -> list[bytes]:
    return [bytes(fp8.asnumpy(a).tobytes()) for a in arrays(*results)]


def poison(results: list[Quantized]) -> None:
    for a in arrays(*results):
        cases.poison(a)


def assert_same(actual: Quantized, desired: Quantized) -> None:
    testing.assert_bytes_equal(actual, desired)
