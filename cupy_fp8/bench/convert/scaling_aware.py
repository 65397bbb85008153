"""Samples of scaling_aware_transpose, and rows of what it replaces: dequantise, transpose, quantise again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy, bits
from ...formats import bfloat16
from ...layouts import cdiv
from ...ops.convert.dequantize import dequantize
from ...ops.quantize.blocks import quantize_block
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from ..data import normal, part
from ..measure import Call, Check, Spec

_SHAPES = ((16384, 8192), (32768, 7168))
_COLUMNS = 256                              # columns compared at either end


def _compare(args: tuple[Any, ...], options: dict[str, Any], out: Quantized) -> None:
    """Compare the first and the last columns of the first and the last expert that has rows."""
    (q,), column, target = args, out.columnwise, options["target"]
    rows, columns = q.shape
    block = q.block[1]
    splits = asnumpy(options["splits"]) if "splits" in options else np.array([rows])
    starts, lines = np.cumsum(splits) - splits, np.cumsum(-(-splits // block)) - -(-splits // block)
    experts = np.flatnonzero(splits)
    for e in {int(experts[0]), int(experts[-1])}:
        start, size, line = int(starts[e]), int(splits[e]), int(lines[e])
        of_expert = slice(start, start + size)
        data = bits(column.data).reshape(-1)[start * columns : (start + size) * columns]
        data = data.reshape(columns, size)
        for first in (0, columns - _COLUMNS):
            some = slice(first, first + _COLUMNS)
            blocks = slice(first // block, (first + _COLUMNS) // block)
            scale_inv = (part(q.scale_inv, of_expert, blocks) if q.scale_layout == "compact" else
                         np.ascontiguousarray(part(q.scale_inv, blocks, of_expert).T))
            few = Scaled(part(q.data, of_expert, some), scale_inv, (size, _COLUMNS), False, q.block,
                         "compact")
            want = reference.scaling_aware_transpose(few, target=target, scale_layout="compact").columnwise
            assert_bytes_equal(part(data, some).view(q.dtype), want.data)
            assert_bytes_equal(part(column.scale_inv, slice(line, line + cdiv(size, block)), some),
                               want.scale_inv)


def rows() -> Iterator[Spec]:
    for shape in _SHAPES:
        elements = shape[0] * shape[1]
        # the bytes that the op itself moves: data twice, and the scales of blocks three times
        yield Spec("scaling_aware_transpose", "dequantise, transpose, requantise", shape,
                   2 * elements + 3 * 4 * (elements // 128), partial(_by_other_ops, shape))


def _by_other_ops(shape: tuple[int, int]) -> tuple[Call, Check]:
    """Dequantise to bfloat16, then quantise column-wise, which transposes."""
    q = quantize_block(normal(shape, bfloat16), scale_layout="compact").rowwise
    x = dequantize(q, dtype=bfloat16)
    out = quantize_block(x, rowwise=False, columnwise=True)

    def call() -> Any:
        return quantize_block(dequantize(q, dtype=bfloat16, out=x), rowwise=False, columnwise=True, out=out)

    return call, lambda: None


COMPARE = {"scaling_aware_transpose": _compare}
