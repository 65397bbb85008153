"""Benchmark rows of scaling_aware_transpose, and of what it replaces: dequantise, transpose, quantise
again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy, bits
from ...cases.groups import sizes
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e5m2, float32
from ...layouts import cdiv
from ...ops.convert.dequantize import dequantize
from ...ops.convert.scaling_aware import TARGETS, scaling_aware_transpose
from ...ops.quantize.blocks import quantize_block
from ...ops.quantize.mx import quantize_mx
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from ..quantize.tensor import Spec, _normal

_SHAPES = ((16384, 8192), (32768, 7168))
_EXPERTS = (1, 8, 256)


def _rows(shape: tuple[int, int], dtype: np.dtype[Any], block: int) -> Scaled:
    x = _normal(shape, bfloat16)
    q = quantize_mx(x, dtype=dtype) if block == 32 else quantize_block(x, dtype=dtype, scale_layout="compact")
    assert q.rowwise is not None
    return q.rowwise


def _check(q: Scaled, out: Quantized, splits: np.ndarray | None, target: str) -> None:
    """Checks the first and the last columns of the first and the last expert that has rows."""
    column = out.columnwise
    assert column is not None
    rows, columns = q.shape
    block = int((q.block or (1, 0))[1] or 0)
    given = np.array([rows]) if splits is None else splits
    starts, lines = np.cumsum(given) - given, np.cumsum(-(-given // block)) - -(-given // block)
    picked = np.flatnonzero(given)
    for e in {int(picked[0]), int(picked[-1])}:
        start, size, line = int(starts[e]), int(given[e]), int(lines[e])
        data = bits(column.data).reshape(-1)[start * columns:(start + size) * columns].reshape(columns, size)
        for first in (0, columns - 256):
            scale_inv = _cut(q.scale_inv, start, size, first // block, 256 // block)
            part = Scaled(_cut(q.data, start, size, first, 256), scale_inv, (size, 256), False, q.block,
                          "compact")
            want = reference.scaling_aware_transpose(part, target=target, scale_layout="compact").columnwise
            assert want is not None
            assert_bytes_equal(asnumpy(data[first:first + 256].copy()).view(q.dtype), want.data)
            scales = bits(column.scale_inv)[line:line + cdiv(size, block), first:first + 256]
            assert_bytes_equal(asnumpy(scales.copy()).view(want.scale_inv.dtype), want.scale_inv)


def _cut(a: Array, start: int, size: int, first: int, columns: int) -> np.ndarray:
    return asnumpy(bits(a)[start:start + size, first:first + columns].copy()).view(a.dtype)


def _transpose(shape: tuple[int, int], dtype: np.dtype[Any], block: int, experts: int | None, target: str,
               multiple: int = 1) -> Any:
    """multiple: experts' sizes are multiples of it."""
    def make() -> Any:
        q = _rows(shape, dtype, block)
        host = None if experts is None else sizes(shape[0] // multiple, experts) * multiple
        splits = None if host is None else backend.cupy().asarray(host)
        out = scaling_aware_transpose(q, splits=splits, target=target)

        def call() -> Any:
            return scaling_aware_transpose(q, splits=splits, target=target, out=out)

        return call, lambda: _check(q, out, host, target)

    return make


def _baseline(shape: tuple[int, int]) -> Any:
    """The same with other ops of this library: dequantises to bfloat16, then quantises column-wise, which
    transposes."""
    def make() -> Any:
        q = _rows(shape, float8_e4m3fn, 128)
        x = dequantize(q, dtype=bfloat16)
        out = quantize_block(x, rowwise=False, columnwise=True)

        def call() -> Any:
            return quantize_block(dequantize(q, dtype=bfloat16, out=x), rowwise=False, columnwise=True,
                                  out=out)

        return call, lambda: None

    return make


def _all() -> Iterator[Spec]:
    def spec(label: str, shape: tuple[int, int], make: Any, block: int = 128) -> Spec:
        scales = shape[0] * cdiv(shape[1], block)
        # Scales are read and written column-wise, f32 ones also row-wise.
        extra = 3 * scales * float32.itemsize if block == 128 else 2 * scales
        return Spec("scaling_aware_transpose", label, shape, 2 * shape[0] * shape[1] + extra, make)

    for shape in _SHAPES:
        for target in TARGETS:
            yield spec(f"e4m3 {target}", shape, _transpose(shape, float8_e4m3fn, 128, None, target))
            for experts in _EXPERTS:
                yield spec(f"e4m3 {target}, {experts} uneven experts", shape,
                           _transpose(shape, float8_e4m3fn, 128, experts, target))
        for experts in _EXPERTS[1:]:
            yield spec(f"e4m3 column, {experts} uneven experts, multiples of 16", shape,
                       _transpose(shape, float8_e4m3fn, 128, experts, "column", 16))
        yield spec("dequantise, transpose, requantise", shape, _baseline(shape))
    for target in TARGETS:
        for dtype, block in ((float8_e5m2, 128), (float8_e4m3fn, 32)):
            kind = f"{FORMATS[dtype].tag} {target}{' MX' if block == 32 else ''}"
            yield spec(f"{kind}, 8 uneven experts", _SHAPES[0],
                       _transpose(_SHAPES[0], dtype, block, 8, target), block)


SPECS: tuple[Spec, ...] = tuple(_all())
