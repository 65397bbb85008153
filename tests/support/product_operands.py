"""Operands of products, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_fp8 import Scaled
from cupy_fp8.cases.matmul.dense import operand
from cupy_fp8.formats import float8_e4m3fn, float32


def scaled(shape: tuple[int, ...], scaling: str, seed: int) -> Scaled:
    return operand(shape, float8_e4m3fn, scaling, "gemm_ready", float32, "normal", seed)


def integers(shape: tuple[int, ...], dtype: Any, seed: int) -> Scaled:
    """Small integers, whose products are added exactly, under scales that are powers of two."""
    rng = np.random.default_rng(seed)
    data = rng.integers(-3, 4, shape).astype(np.float32).astype(dtype)
    return Scaled(data, np.array([0.25], np.float32), shape)
