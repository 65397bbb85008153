"""Benchmark rows of quantize_block."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import reference
from ...arrays import asnumpy, bits
from ...formats import FORMATS, bfloat16, float16, float32
from ...layouts import scale_shape
from ...ops.quantize.blocks import quantize_block
from ...results import Quantized, Scaled
from ...testing import assert_bytes_equal
from .tensor import SIZES, Spec, _normal

_MAIN = SIZES[2]
_ROW, _COLUMN, _BOTH = (True, False), (False, True), (True, True)
_SQUARE: dict[str, Any] = {"block": (128, 128)}
_EDGE = 128                                 # of the compared tiles, which are whole blocks


def _check(x: Any, out: Quantized, options: dict[str, Any]) -> None:
    """Checks tiles of 128 x 128 elements at the corners and at some places between."""
    rows, columns = x.shape
    middle = rows // 2 // _EDGE * _EDGE, columns // 4 // _EDGE * _EDGE
    for r, c in ((0, 0), middle, (_EDGE, columns - _EDGE), (rows - _EDGE, columns - _EDGE)):
        tile = asnumpy(bits(x)[r : r + _EDGE, c : c + _EDGE].copy()).view(x.dtype)
        want = reference.quantize_block(tile, columnwise=True, **options)
        for part, wanted in ((out._row, want._row), (out._column, want._column)):
            if part is None or wanted is None:
                continue
            at = (c, r) if part.transposed else (r, c)
            assert_bytes_equal(bits(part.data)[at[0] : at[0] + _EDGE, at[1] : at[1] + _EDGE].copy(),
                               bits(wanted.data))
            assert_bytes_equal(_scales(part, r, c), _scales(wanted, 0, 0))


def _scales(part: Scaled, r: int, c: int) -> Any:
    """The scales of a tile, by rows and columns of blocks."""
    assert part.block is not None
    flipped = part.block[0] == 1 and part.scale_layout != "compact" if 1 in part.block else part.transposed
    scales = part.scale_inv.T if flipped else part.scale_inv
    rows, columns = (slice(at // (b or 1), at // (b or 1) + _EDGE // (b or 1))
                     for at, b in zip((r, c), part.block, strict=True))
    return scales[rows, columns].copy()


def _quantize(shape: tuple[int, int], source: np.dtype[Any], directions: tuple[bool, bool],
              options: dict[str, Any]) -> Any:
    def make() -> Any:
        x = _normal(shape, source)
        out = quantize_block(x, rowwise=directions[0], columnwise=directions[1], **options)

        def call() -> Any:
            return quantize_block(x, rowwise=directions[0], columnwise=directions[1], out=out, **options)

        return call, lambda: _check(x, out, options)

    return make


def _all() -> Iterator[Spec]:
    def spec(label: str, shape: tuple[int, int], directions: tuple[bool, bool],
             source: np.dtype[Any] = bfloat16, **options: Any) -> Spec:
        block, layout = options.get("block", (1, 128)), options.get("scale_layout", "gemm_ready")
        scales = sum(4 * prod(scale_shape(shape, along, layout, swapped))
                     for along, swapped, on in zip((block, block[::-1]), (False, True), directions,
                                                   strict=True) if on)
        traffic = prod(shape) * (source.itemsize + sum(directions)) + scales
        return Spec("quantize_block", f"{FORMATS[source].tag}→e4m3 {label}", shape, traffic,
                    _quantize(shape, source, directions, options))

    for shape in SIZES:
        yield spec("1×128 row", shape, _ROW)
        yield spec("1×128 row compact", shape, _ROW, scale_layout="compact")
        yield spec("128×1 column", shape, _COLUMN)
        yield spec("1×128 both", shape, _BOTH)
        yield spec("128×128 row", shape, _ROW, **_SQUARE)
        yield spec("128×128 both", shape, _BOTH, **_SQUARE)
    yield spec("1×128 both compact", _MAIN, _BOTH, scale_layout="compact")
    yield spec("128×128 column", _MAIN, _COLUMN, **_SQUARE)
    for profile in ("deepgemm", "vllm"):
        yield spec(f"1×128 row {profile}", _MAIN, _ROW, profile=profile)
    yield spec("1×32 row", _MAIN, _ROW, block=(1, 32))
    for source in (float32, float16):
        yield spec("1×128 row", _MAIN, _ROW, source)
        yield spec("128×1 column", _MAIN, _COLUMN, source)
        yield spec("1×128 both", _MAIN, _BOTH, source)


SPECS: tuple[Spec, ...] = tuple(_all())
