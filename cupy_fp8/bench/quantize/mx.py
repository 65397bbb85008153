"""Samples of quantize_mx: rows and columns of the first and the last matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy, bits
from ...reference.scales.swizzle import unswizzle
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from ..data import sample


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Quantized) -> None:
    (x,), mode = args, options.get("mode", "rceil")
    for e in (0, -1):
        matrix = bits(x)[e] if x.ndim == 3 else bits(x)
        for made, lines in ((out._row, matrix), (out._column, matrix.T)):
            if made is None:
                continue
            picked = sample(lines.shape[0])
            want = reference.quantize_mx(asnumpy(lines[picked]).view(x.dtype), mode=mode)
            data, scales = _of_matrix(made, e)
            assert_bytes_equal(data[picked], bits(want.data))
            assert_bytes_equal(scales[picked], bits(want.scale_inv))


def _of_matrix(made: Scaled, e: int) -> tuple[Any, np.ndarray]:
    """Return (data, scales) of one matrix as bytes, lines of blocks first."""
    columnwise = made.block == (32, 1)
    data, scales = (bits(a)[e] if len(made.shape) == 3 else bits(a) for a in made)
    lines, length = made.shape[-2:][::-1] if columnwise else made.shape[-2:]
    scales = asnumpy(scales)
    if made.scale_layout == "swizzled":
        scales = unswizzle(scales, lines, -(-length // 32))
    elif columnwise:
        scales = scales.T
    return data.T if columnwise and not made.transposed else data, scales


COMPARE = {"quantize_mx": _compare}
