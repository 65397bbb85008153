"""Benchmark rows of rebase_scales: MX data to the blocks that a Hopper GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy, bits
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e5m2, float32
from ...layouts import scale_shape
from ...ops.convert.rebase import rebase_scales
from ...ops.quantize.blocks import quantize_block
from ...ops.quantize.mx import quantize_mx
from ...results import Scaled
from ...testing import assert_bytes_equal
from ..quantize.tensor import Spec, _normal

_SHAPES = ((4096, 7168), (16384, 8192))
_MX, _ROW, _SQUARE = (1, 32), (1, 128), (128, 128)
_PANEL_ROWS = 128                           # rows at either end that are compared with the reference


def _panel(a: Array, rows: int, last: bool) -> np.ndarray:
    return asnumpy((bits(a)[-rows:] if last else bits(a)[:rows]).copy()).view(a.dtype)


def _check(q: Scaled, out: Scaled, block: Any) -> None:
    got = out.to_layout("compact")
    for last in (False, True):
        part = Scaled(_panel(q.data, _PANEL_ROWS, last), _panel(q.scale_inv, _PANEL_ROWS, last),
                      (_PANEL_ROWS, q.shape[1]), False, q.block, "compact")
        want = reference.rebase_scales(part, block=block, scale_dtype=float32)
        assert_bytes_equal(_panel(got.data, _PANEL_ROWS, last), want.data)
        assert_bytes_equal(_panel(got.scale_inv, len(want.scale_inv), last), want.scale_inv)


def _rebase(shape: tuple[int, int], dtype: np.dtype[Any], before: Any, block: Any, layout: str,
            counts: bool) -> Any:
    def make() -> Any:
        x = _normal(shape, bfloat16)
        made = quantize_mx(x, dtype=dtype) if before == _MX else \
            quantize_block(x, dtype=dtype, block=before, pow2_scale=True, scale_layout="compact")
        q = made.rowwise
        assert q is not None
        options: dict[str, Any] = {"block": block, "scale_dtype": float32, "scale_layout": layout,
                                   "changed": backend.cupy().zeros(1, np.int64) if counts else None}
        out = rebase_scales(q, **options)
        return (lambda: rebase_scales(q, out=out, **options)), lambda: _check(q, out, block)

    return make


def _all() -> Iterator[Spec]:
    def spec(shape: tuple[int, int], before: Any, block: Any, layout: str = "compact",
             dtype: np.dtype[Any] = float8_e4m3fn, counts: bool = False) -> Spec:
        name = f"{FORMATS[dtype].tag} {before[0]}×{before[1]} → {block[0]}×{block[1]}"
        label = f"{name}, {layout}{', changed values counted' if counts else ''}"
        traffic = 2 * prod(shape) + prod(scale_shape(shape, before, "compact")) * (1 if before == _MX else 4)
        traffic += 4 * prod(scale_shape(shape, block, layout))
        make = _rebase(shape, dtype, before, block, layout, counts)
        return Spec("rebase_scales", label, shape, traffic, make)

    for shape in _SHAPES:
        yield spec(shape, _MX, _ROW, "gemm_ready")
        yield spec(shape, _MX, _ROW, "gemm_ready", counts=True)
        yield spec(shape, _MX, _SQUARE)
        yield spec(shape, _MX, _SQUARE, counts=True)
        yield spec(shape, _ROW, _SQUARE)
    yield spec(_SHAPES[0], _MX, _ROW)
    yield spec(_SHAPES[0], _MX, (256, 256))
    for block in (_ROW, _SQUARE):
        yield spec(_SHAPES[0], _MX, block, dtype=float8_e5m2)


SPECS: tuple[Spec, ...] = tuple(_all())
