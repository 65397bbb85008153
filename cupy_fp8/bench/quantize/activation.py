"""Samples of activations with quantisation: the codes of tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import reference
from ...results import Quantized
from ..data import part
from .tiles import EDGE, assert_tile, corners, of_a_tile


def _compare(quantised: Callable[..., Quantized], args: tuple[Any, ...], options: dict[str, Any],
             out: Quantized) -> None:
    """quantised: the reference."""
    *arrays, recipe = args
    recipe, given = of_a_tile(recipe, options, out)
    for r, c in corners(out.shape):
        tiles = [part(a, slice(r, r + EDGE), slice(c, c + EDGE)) for a in arrays]
        assert_tile(out, quantised(*tiles, recipe, **given), r, c)


COMPARE = {"activation_quantize": partial(_compare, reference.activation_quantize),
           "activation_backward_quantize": partial(_compare, reference.activation_backward_quantize)}
