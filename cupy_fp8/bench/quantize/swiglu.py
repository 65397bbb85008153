"""Samples of SwiGLU and other gated activations with quantisation: tiles of whole blocks, and for gradients
whole rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy
from ...results import Quantized
from ...testing import assert_bytes_equal
from ..data import part
from .tiles import EDGE, assert_tile, corners, of_a_tile


def compare(quantised: Callable[..., Quantized], args: tuple[Any, ...], options: dict[str, Any],
            out: Quantized) -> None:
    """Compare the codes of tiles at the corners and of one between. quantised: the reference."""
    x, recipe = args
    recipe, given = of_a_tile(recipe, options, out)
    for r, c in corners(out.shape):
        halves = [slice(at, at + EDGE) for at in (c, out.shape[1] + c)]
        if options.get("interleaved"):
            halves = [slice(2 * c, 2 * (c + EDGE))]
        tile = _joined(x, slice(r, r + EDGE), halves)
        assert_tile(out, quantised(tile, recipe, **_of_rows(given, r, halves)), r, c)


def compare_backward(quantised: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any],
                     out: Any) -> None:
    """Compare whole rows: the first blocks of each direction. quantised: the reference."""
    (grad, x, recipe), few = args, slice(0, EDGE)
    made, sums = out if isinstance(out, tuple) else (out, None)
    want, wanted_sums = quantised(
        part(grad, few), part(x, few), recipe, **_of_rows(options, 0, [slice(None)]))
    for written, wanted in ((made._row, want._row), (made._column, want._column)):
        if written is not None and wanted is not None:
            at = (slice(None), few) if written.transposed else (few, slice(None))
            assert_bytes_equal(part(written.data, *at), wanted.data)
    if sums is not None:
        assert_bytes_equal(sums[few], wanted_sums)


def _joined(a: Any, rows: slice, columns: list[slice]) -> np.ndarray:
    return np.concatenate([part(a, rows, these) for these in columns], axis=1)


def _of_rows(options: dict[str, Any], first: int, columns: list[slice]) -> dict[str, Any]:
    """Return the reference's options for some columns of a tile's rows, from `first` on."""
    given = dict(options)
    if "scale" in given:
        given["scale"] = asnumpy(given["scale"])
    if "probs" in given:
        given["probs"] = asnumpy(given["probs"][first : first + EDGE])
    if "bias" in given:
        bias = given["bias"]
        found = _joined(bias.reshape(-1, bias.shape[-1]), slice(None), columns)
        given["bias"] = found if "splits" in given else found[0]
    if "splits" in given:
        ends = np.clip(np.cumsum(asnumpy(given["splits"])), first, first + EDGE)
        given["splits"] = np.diff(ends, prepend=first)
    return given


COMPARE = {"swiglu_quantize": partial(compare, reference.swiglu_quantize),
           "swiglu_backward_quantize": partial(compare_backward, reference.swiglu_backward_quantize)}
