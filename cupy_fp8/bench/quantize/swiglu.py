"""Samples of SwiGLU with quantisation: tiles of whole blocks, and for gradients whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy
from ...recipes import CurrentScaling, DelayedScaling
from ...results import Quantized
from ...testing import assert_bytes_equal
from ..data import part

_EDGE = 128                                     # the side of the compared tiles


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Quantized) -> None:
    """Compares the codes of tiles at the corners and of one between."""
    (x, recipe), (rows, columns) = args, out.shape
    given = dict(options)
    if isinstance(recipe, CurrentScaling):              # The scale depends on the whole array.
        recipe, given["scale"] = DelayedScaling(recipe.dtype), asnumpy(1 / out._any.scale_inv)
    for r, c in ((0, 0), (rows // 2 // _EDGE * _EDGE, columns // 4 // _EDGE * _EDGE),
                 (rows - _EDGE, columns - _EDGE)):
        halves = [slice(at, at + _EDGE) for at in (c, columns + c)]
        if options.get("interleaved"):
            halves = [slice(2 * c, 2 * (c + _EDGE))]
        tile = _joined(x, slice(r, r + _EDGE), halves)
        want = reference.swiglu_quantize(tile, recipe, **_of_rows(given, r, halves))
        for made, wanted in ((out._row, want._row), (out._column, want._column)):
            if made is not None and wanted is not None:
                i, j = (c, r) if made.transposed else (r, c)
                codes = part(made.data, slice(i, i + _EDGE), slice(j, j + _EDGE))
                assert_bytes_equal(codes, wanted.data)


def _compare_backward(args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
    """Compares whole rows: the first blocks of each direction."""
    (grad, x, recipe), few = args, slice(0, _EDGE)
    made, sums = out if isinstance(out, tuple) else (out, None)
    want, wanted_sums = reference.swiglu_backward_quantize(
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
    """The reference's options for some columns of a tile's rows, from `first` on."""
    given = dict(options)
    if "scale" in given:
        given["scale"] = asnumpy(given["scale"])
    if "probs" in given:
        given["probs"] = asnumpy(given["probs"][first : first + _EDGE])
    if "bias" in given:
        bias = given["bias"]
        found = _joined(bias.reshape(-1, bias.shape[-1]), slice(None), columns)
        given["bias"] = found if "splits" in given else found[0]
    if "splits" in given:
        ends = np.clip(np.cumsum(asnumpy(given["splits"])), first, first + _EDGE)
        given["splits"] = np.diff(ends, prepend=first)
    return given


COMPARE = {"swiglu_quantize": _compare, "swiglu_backward_quantize": _compare_backward}
