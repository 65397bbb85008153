"""Reference of cupy_fp8.ops.moe.permute_transpose (docs/numerics.md, sections 4 and 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import asnumpy
from ...results import Quantized, Scaled
from ...routing import Routing
from ..convert.scaling_aware import scaling_aware_transpose
from .permute import permute


def permute_transpose(x: Scaled, routing: Routing, *, probs: np.ndarray | None = None) -> Any:
    """Return the rows, and their scaling-aware transpose expert by expert."""
    moved = permute(x, routing, probs=probs)
    rows = moved if probs is None else moved[0]
    transposed = scaling_aware_transpose(rows, splits=asnumpy(routing.aligned_splits))
    made = Quantized._of(rows, transposed.columnwise)
    return made if probs is None else (made, moved[1])
