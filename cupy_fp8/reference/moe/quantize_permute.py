"""Reference of cupy_fp8.ops.moe.quantize_permute (docs/numerics.md, sections 3 and 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recipes import BlockScaling
from ...routing import Routing
from ..quantize.blocks import quantize_block
from .permute import permute


def quantize_permute(x: np.ndarray, routing: Routing, recipe: BlockScaling, *,
                     probs: np.ndarray | None = None) -> Any:
    """Quantise the tokens and permute them."""
    return permute(quantize_block(x, **vars(recipe)).rowwise, routing, probs=probs)
