"""Samples of activations with quantisation: the codes of tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import reference
from ...reference.quantize.activations import GATED
from ..data import part
from . import swiglu
from .tiles import EDGE, assert_tile, corners, of_a_tile


def _compare(quantised: Callable[..., Any], of_gated: Callable[..., None], args: tuple[Any, ...],
             options: dict[str, Any], out: Any) -> None:
    """Compare tiles. quantised: the reference."""
    if options["kind"] in GATED:
        of_gated(quantised, args, options, out)
        return
    *arrays, recipe = args
    recipe, given = of_a_tile(recipe, options, out)
    for r, c in corners(out.shape):
        tiles = [part(a, slice(r, r + EDGE), slice(c, c + EDGE)) for a in arrays]
        assert_tile(out, quantised(*tiles, recipe, **given), r, c)


COMPARE = {"activation_quantize": partial(_compare, reference.activation_quantize, swiglu.compare),
           "activation_backward_quantize": partial(_compare, reference.activation_backward_quantize,
                                                   swiglu.compare_backward)}
