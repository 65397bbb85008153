"""Benchmark rows of dequantize where blocks share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy, bits, empty
from ...formats import FORMATS, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from ...layouts import scale_shape, swap_last
from ...ops.convert.astype import astype
from ...ops.convert.dequantize import dequantize
from ...results import Scaled
from ...testing import assert_bytes_equal
from ..quantize.tensor import SIZES, Spec

_MAIN = SIZES[2]
_SLICES, _SLICE_ROWS = 4, 128       # rows that are compared with the reference
_ROW, _COLUMN = (1, 32), (32, 1)


def _result(shape: tuple[int, int], dtype: np.dtype[Any], block: Any, scale: np.dtype[Any], layout: str,
            transposed: bool) -> Scaled:
    """A result with codes of N(0, 60) and scales around 1."""
    cp = backend.cupy()
    stored = swap_last(shape) if transposed else shape
    data = astype(60 * cp.random.standard_normal(stored, dtype=cp.float32), dtype)
    bytes_ = cp.random.randint(117, 138, scale_shape(shape, block, layout, transposed), dtype=np.uint8)
    scale_inv = bytes_.view(float8_e8m0fnu) if scale == float8_e8m0fnu else bytes_.astype(cp.float32) / 100
    return Scaled(data, scale_inv, shape, transposed, block, layout)


def _slices(a: Array, rows: int) -> np.ndarray:
    """Evenly spaced row segments of `a`."""
    starts = np.linspace(0, max(a.shape[0] // rows - 1, 0), _SLICES).astype(int) * rows
    return np.concatenate([asnumpy(bits(a)[start:start + rows]) for start in starts]).view(a.dtype)


def _blocks(shape: tuple[int, int], dtype: np.dtype[Any], to: np.dtype[Any], block: Any, scale: np.dtype[Any],
            layout: str, transposed: bool) -> Any:
    def make() -> Any:
        s = _result(shape, dtype, block, scale, layout, transposed)
        out = empty(shape, to, like=s.data)

        def check() -> None:
            raw = bits(s.data).T if transposed else bits(s.data)
            data = np.ascontiguousarray(_slices(raw, _SLICE_ROWS)).view(dtype)
            scales = s.to_layout("compact").scale_inv
            if transposed and 1 not in block:
                scales = scales.T
            part = Scaled(data, _slices(scales, _SLICE_ROWS // block[0]), data.shape, False, block, "compact")
            assert_bytes_equal(_slices(out, _SLICE_ROWS), reference.dequantize(part, dtype=to))

        return (lambda: dequantize(s, dtype=to, out=out)), check

    return make


def _all() -> Iterator[Spec]:
    def spec(label: str, shape: tuple[int, int], block: Any, dtype: np.dtype[Any] = float8_e4m3fn,
             to: np.dtype[Any] = bfloat16, scale: np.dtype[Any] = float8_e8m0fnu, layout: str = "compact",
             transposed: bool = False) -> Spec:
        name = f"{FORMATS[dtype].tag.removesuffix('fn')}→{FORMATS[to].tag} {label}"
        scales = prod(scale_shape(shape, block, layout, transposed))
        traffic = prod(shape) * (1 + to.itemsize) + scales * scale.itemsize
        make = _blocks(shape, dtype, to, block, scale, layout, transposed)
        return Spec("dequantize", name, shape, traffic, make)

    for shape in SIZES:
        yield spec("MX row", shape, _ROW)
        yield spec("MX column", shape, _COLUMN)
        yield spec("MX column stored transposed", shape, _COLUMN, transposed=True)
    for block, label in ((_ROW, "MX row swizzled"), (_COLUMN, "MX column swizzled")):
        yield spec(label, _MAIN, block, layout="swizzled")
    yield spec("MX row stored transposed", _MAIN, _ROW, transposed=True)
    yield spec("MX column stored transposed swizzled", _MAIN, _COLUMN, layout="swizzled", transposed=True)
    for to in (float16, float32):
        for block, label in ((_ROW, "MX row"), (_COLUMN, "MX column")):
            yield spec(label, _MAIN, block, float8_e5m2, to)
    for block, transposed in (((1, 128), False), ((128, 1), True), ((128, 128), False), ((128, 128), True)):
        label = f"{block[0]}×{block[1]} f32 scales" + (" stored transposed" if transposed else "")
        yield spec(label, _MAIN, block, scale=float32, transposed=transposed)


SPECS: tuple[Spec, ...] = tuple(_all())
