"""Results of small arrays, of every kind and in every direction."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, cases
from cupy_fp8.formats import bfloat16

DIRECTIONS = [{"rowwise": True}, {"rowwise": False, "columnwise": True},
              {"rowwise": True, "columnwise": True}]
SHAPE = (3, 5)
KINDS = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
kind_parameter = pytest.mark.parametrize("kind", KINDS)
direction_parameter = pytest.mark.parametrize("directions", DIRECTIONS, ids=str)


def x_of(kind: str = "numpy", shape: tuple[int, ...] = SHAPE, dtype: np.dtype = bfloat16) -> fp8.arrays.Array:
    return fp8.asarray(cases.values("normal", shape, dtype), like=kind)


def parts(q: Quantized) -> list[Scaled]:
    return list(q.parts.values())
