"""Operands of products, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_fp8 import BlockScaling, CurrentScaling, Scaled
from cupy_fp8.cases.matmul.dense import operand
from cupy_fp8.formats import float8_e4m3fn, float32

#: Values have no outlier columns; one distribution has outliers anywhere.
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "positive mean": lambda rng, shape: rng.uniform(0, 2, shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape)}
RECIPES: dict[str, Any] = {"tensor": CurrentScaling(), "row": BlockScaling((1, None)),
                           "vector": BlockScaling((1, 128)), "block": BlockScaling((128, 128))}


def scaled(shape: tuple[int, ...], scaling: str, seed: int) -> Scaled:
    return operand(shape, float8_e4m3fn, scaling, "gemm_ready", float32, "normal", seed)


def integers(shape: tuple[int, ...], dtype: Any, seed: int) -> Scaled:
    """Return small integers, whose products are added exactly, under power-of-two scales."""
    rng = np.random.default_rng(seed)
    data = rng.integers(-3, 4, shape).astype(np.float32).astype(dtype)
    return Scaled(data, np.array([0.25], np.float32), shape)


def draw(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return values of one of DRAWS."""
    return DRAWS[kind](np.random.default_rng(seed), shape).astype(np.float32)


def quantized(kind: str, shape: tuple[int, ...], scaling: str, seed: int) -> Scaled:
    """Return values of one of DRAWS under fitting scales."""
    found = RECIPES[scaling].quantize(draw(kind, shape, seed)).rowwise
    assert found is not None
    return found
