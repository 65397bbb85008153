"""Samples of dequantize: rows, or segments of rows with their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asnumpy, bits
from ...results import Scaled
from ...testing import assert_bytes_equal
from ..data import part, sample

_SEGMENTS, _ROWS = 4, 128


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Array) -> None:
    (s,), to = args, options["dtype"]
    data = bits(s.data).T if s.transposed else bits(s.data)
    if s.block is None:
        picked = sample(s.shape[0])
        some = Scaled(part(data, picked).view(s.dtype), asnumpy(s.scale_inv), (len(picked), s.shape[1]))
        assert_bytes_equal(part(out, picked), reference.dequantize(some, dtype=to))
        return
    scales = s.to_layout("compact").scale_inv
    if s.transposed and 1 not in s.block:
        scales = scales.T
    codes = _segments(data, _ROWS).view(s.dtype)
    some = Scaled(codes, _segments(scales, _ROWS // s.block[0]), codes.shape, False, s.block, "compact")
    assert_bytes_equal(_segments(out, _ROWS), reference.dequantize(some, dtype=to))


def _segments(a: Array, rows: int) -> np.ndarray:
    """Return evenly spaced segments of rows."""
    starts = np.linspace(0, max(a.shape[0] // rows - 1, 0), _SEGMENTS).astype(int) * rows
    return np.concatenate([part(a, slice(start, start + rows)) for start in starts])


COMPARE = {"dequantize": _compare}
