"""Samples of norms with quantisation: whole rows, which have statistics of their own, and of the gradients of
weight and bias a few columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asnumpy
from ...reference import numerics
from ...reference.quantize.norm import NormedRows
from ...results import Quantized
from ...testing import assert_bytes_equal
from ..data import columns, part, sample
from .tiles import EDGE, of_a_tile

#: Options that have a row for each row of x, and those that have one for all rows.
_OF_ROWS, _OF_ALL = ("residual", "residual_grad"), ("bias", "scale", "amax")
#: columns whose sums are compared, and rows that the reference takes at a time
_COLUMNS, _ROWS_AT_ONCE = 8, 1024


def _compare(op: Callable[..., Any], gradients: bool, args: tuple[Any, ...], options: dict[str, Any],
             out: Any) -> None:
    """Compares the first band of 128 rows, one between and the last one. op: the reference."""
    *arrays, weight, recipe = args
    made, *more = out if isinstance(out, tuple) else (out,)
    sums = [more.pop(0) for _ in range(len(more) if gradients else 0)]
    if isinstance(made, Quantized):
        recipe, options = of_a_tile(recipe, options, made)
    rows = arrays[0].shape[0]
    for first in (0, rows // 2 // EDGE * EDGE, rows - EDGE):
        band = slice(first, first + EDGE)
        want = op(*(part(a, band) for a in arrays), asnumpy(weight), recipe, **_of_rows(options, band))
        wanted, *others = want if isinstance(want, tuple) else (want,)
        _assert_band(made, wanted, band)
        for a, b in zip(more, others, strict=not gradients):
            assert_bytes_equal(part(a.reshape(rows, -1), band).reshape(b.shape), b)
    if sums:
        _assert_sums(arrays, sums, options)


def _of_rows(options: dict[str, Any], band: slice) -> dict[str, Any]:
    """The reference's options for a band of rows."""
    given = dict(options)
    for name in given.keys() & {*_OF_ROWS, *_OF_ALL, "rstd"}:
        if given[name] is not None:
            given[name] = (part(given[name], band) if name in _OF_ROWS else
                           asnumpy(given[name][band]) if name == "rstd" else asnumpy(given[name]).copy())
    return given


def _assert_band(made: Any, wanted: Any, band: slice) -> None:
    if not isinstance(made, Quantized):
        assert_bytes_equal(part(made, band), wanted)
        return
    for of_all, of_band in ((made._row, wanted._row), (made._column, wanted._column)):
        if of_all is not None and of_band is not None:
            at = (slice(None), band) if of_all.transposed else (band, slice(None))
            assert_bytes_equal(part(of_all.data, *at), of_band.data)


def _assert_sums(arrays: list[Array], sums: list[Array], options: dict[str, Any]) -> None:
    """Compares a few columns of dweight and dbias, which need all rows of grad and of normed x."""
    grad, x = arrays
    rows, width = x.shape
    picked = sample(width, _COLUMNS)
    terms = numerics.widen(columns(grad, picked))
    normed = np.concatenate([_normed(x, slice(first, first + _ROWS_AT_ONCE), options)[:, picked]
                             for first in range(0, rows, _ROWS_AT_ONCE)])
    assert_bytes_equal(asnumpy(sums[0])[picked], numerics.tree_sum(numerics.mul(terms, normed), 0))
    for dbias in sums[1:]:
        assert_bytes_equal(asnumpy(dbias)[picked], numerics.tree_sum(terms, 0))


def _normed(x: Array, rows: slice, options: dict[str, Any]) -> np.ndarray:
    rstd = options.get("rstd")
    return NormedRows.of(numerics.widen(part(x, rows)), options.get("kind", "rms"), options.get("eps", 1e-6),
                         None if rstd is None else asnumpy(rstd[rows])).normed


COMPARE = {"norm_quantize": partial(_compare, reference.norm_quantize, False),
           "norm_backward_quantize": partial(_compare, reference.norm_backward_quantize, True)}
