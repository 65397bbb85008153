"""Samples of quantize_tensor and cast_transpose: rows, and columns of the bias gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy
from ...formats import float8_e4m3fn
from ...ops.scales.amax import compute_amax
from ...ops.scales.scale import compute_scale
from ...results import Quantized
from ...testing import assert_bytes_equal
from ..data import columns, part, sample


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Quantized) -> None:
    (x, scale), to = args, options.get("dtype", float8_e4m3fn)
    used = asnumpy(compute_scale(compute_amax(x), dtype=to) if scale is None else scale)
    compare_rows(x, out, used, to)
    if "amax" in options:
        assert_bytes_equal(options["amax"], compute_amax(x))
    if out.dbias is not None:
        picked = sample(x.shape[1])
        sums = reference.numerics.tree_sum(columns(x, picked).astype(np.float32), 0)
        assert_bytes_equal(out.dbias[picked], sums)


def compare_rows(x: Any, out: Quantized, scale: np.ndarray, to: np.dtype[Any]) -> None:
    """Compare sampled rows in each direction."""
    picked = sample(x.shape[0])
    want = reference.quantize_tensor(part(x, picked), scale, dtype=to)
    if out._row is not None:
        assert_bytes_equal(part(out._row.data, picked), want.data)
    if out._column is not None:
        assert_bytes_equal(columns(out._column.data, picked), reference.transpose(want.data))


COMPARE = {"quantize_tensor": _compare, "cast_transpose": _compare}
