"""Benchmark rows of convert_scales: the scales of 4096 x 4096 elements and more, 128 elements for an f32
scale, 32 for an E8M0 scale."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import asnumpy
from ...formats import float8_e8m0fnu, float32
from ...layouts import SCALE_DTYPES, scale_shape
from ...ops.scales.convert import convert_scales
from ...testing import assert_bytes_equal
from ..quantize.tensor import SIZES, Spec

_ROW, _COLUMN, _MX, _SQUARE = (1, 128), (128, 1), (1, 32), (128, 128)
#: (block, layouts) of the conversions between a model's quantisers and its matrix products.
_CONVERSIONS = ((_ROW, "compact", "gemm_ready"), (_ROW, "compact", "deepgemm_sm100"),
                (_COLUMN, "compact", "deepgemm_sm100"),
                (_ROW, "gemm_ready", "compact"), (_SQUARE, "compact", "deepgemm_sm100"),
                (_MX, "compact", "deepgemm_sm100"),
                (_MX, "swizzled", "deepgemm_sm100"), (_MX, "deepgemm_sm100", "swizzled"))


def _convert(shape: tuple[int, int], block: Any, source: str, target: str) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        options: dict[str, Any] = {"source": source, "target": target, "shape": shape, "block": block}
        compact = cp.random.randint(100, 150, scale_shape(shape, block, "compact"),
                                    np.uint8).view(float8_e8m0fnu)
        s = convert_scales(compact, source="compact", target=source, shape=shape, block=block,
                           dtype=_held(block, source))
        out = convert_scales(s, **options)

        def check() -> None:
            assert_bytes_equal(out, reference.convert_scales(asnumpy(s), **options))

        return (lambda: convert_scales(s, out=out, **options)), check

    return make


def _held(block: Any, layout: str) -> np.dtype[Any]:
    return SCALE_DTYPES[layout][0] if layout != "compact" else float8_e8m0fnu if block == _MX else float32


def _all() -> Iterator[Spec]:
    for shape in SIZES:
        for block, source, target in _CONVERSIONS:
            traffic = sum(prod(scale_shape(shape, block, layout)) * _held(block, layout).itemsize
                          for layout in (source, target))
            label = f"{source} → {target}, {block[0]}×{block[1]}"
            yield Spec("convert_scales", label, shape, traffic, _convert(shape, block, source, target))


SPECS: tuple[Spec, ...] = tuple(_all())
