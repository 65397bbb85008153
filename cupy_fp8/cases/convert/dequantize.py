"""Cases of dequantize: one scale for a tensor, and a scale for every block in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from ...layouts import scale_shape, swap_last
from ...ops.convert import astype, dequantize
from ...results import Scaled
from ..base import ALIGNED_MATRIX, MATRIX, SHAPES, Case, source, values
from ..registry import Registration, register

_SCALES = (1.0, 0.37, 2.0**-130, 0.0, 3e38, float("inf"), float("nan"), -2.0)
_MX_BLOCKS = ((1, 32), (32, 1))
_OTHER_BLOCKS: tuple[Any, ...] = ((1, 128), (128, 1), (128, 128), (1, None), (None, 1), (1, 64), (32, 32),
                                  (64, 256))
#: The last shape has no tail of a block of 32.
_TAILS: tuple[tuple[int, ...], ...] = (MATRIX, ALIGNED_MATRIX, (160, 288))
_BATCHES: tuple[tuple[int, ...], ...] = ((2, 3, 40, 96), (300, 160), (6, 1056))
_ANY: tuple[tuple[int, ...], ...] = (MATRIX, (256, 384), (2, 133, 144))


def _inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case's array is the data as stored. Scales of blocks have any bits. scales='view': they are not
    contiguous, as `.T` makes them."""
    options = dict(case.options)
    transposed, block = options.pop("transposed", False), options.pop("block", None)
    dtype, layout = options.pop("scale", float8_e8m0fnu), options.pop("scale_layout", "compact")
    view, value = options.pop("scales", ""), options.pop("scale_inv", 0.37)
    data = source(case)
    shape = swap_last(data.shape) if transposed else data.shape
    if block is None:
        return (Scaled(data, np.array([value], np.float32), shape, transposed),), options
    scale_inv = values("bits", scale_shape(shape, block, layout, transposed), dtype, 1)
    if view:
        scale_inv = np.ascontiguousarray(scale_inv.swapaxes(-1, -2)).swapaxes(-1, -2)
    return (Scaled(data, scale_inv, shape, transposed, block, layout),), options


def _cases() -> Iterator[Case]:
    for dtype in FP8_DTYPES:
        for to in INPUT_DTYPES:
            for transposed in (False, True):
                yield Case("dequantize", dtype, MATRIX, options={"dtype": to, "transposed": transposed})
                options = {"dtype": to, "transposed": transposed}
                yield Case("dequantize", dtype, ALIGNED_MATRIX, options=options)
            for scale_inv in _SCALES:
                yield Case("dequantize", dtype, (16, 16), options={"dtype": to, "scale_inv": scale_inv})
    for shape in SHAPES:
        yield Case("dequantize", float8_e4m3fn, shape, options={"dtype": bfloat16})
        if len(shape) >= 2:
            yield Case("dequantize", float8_e4m3fn, shape, options={"dtype": bfloat16, "transposed": True})
    yield from _block_cases()


def _block_cases() -> Iterator[Case]:
    def case(source: np.dtype[Any], shape: tuple[int, ...], layout: str = "contiguous", /,
             **options: Any) -> Case:
        return Case("dequantize", source, shape, "bits", layout, options)

    for block in _MX_BLOCKS:
        for transposed in (False, True):
            mx: dict[str, Any] = {"block": block, "transposed": transposed}
            for dtype in FP8_DTYPES:
                for to in INPUT_DTYPES:
                    for shape in _TAILS:
                        yield case(dtype, shape, dtype=to, **mx)
                    yield case(dtype, ALIGNED_MATRIX, dtype=to, scale=float32, **mx)
                    yield case(dtype, (144, 256), dtype=to, scale=float32, **mx)
                    yield case(dtype, (144, 256), dtype=to, scale_layout="swizzled", **mx)
            for scale_layout in ("compact", "swizzled"):
                for shape in SHAPES:
                    if len(shape) >= 2:
                        yield case(float8_e4m3fn, shape, dtype=bfloat16, scale_layout=scale_layout, **mx)
                for shape in _BATCHES:
                    yield case(float8_e5m2, shape, dtype=float32, scale_layout=scale_layout, **mx)
                for layout in ("offset", "strided"):
                    yield case(float8_e4m3fn, (96, 160), layout, dtype=bfloat16, scale_layout=scale_layout,
                               **mx)
            for shape in (*_TAILS, (2, 133, 160), (70, 32), (32, 70)):
                yield case(float8_e4m3fn, shape, dtype=bfloat16, scales="view", **mx)
    for block in _OTHER_BLOCKS:
        for transposed in (False, True):
            for scale in (float8_e8m0fnu, float32):
                for shape in _ANY:
                    yield case(float8_e5m2, shape, dtype=bfloat16, block=block, transposed=transposed,
                               scale=scale)
            yield case(float8_e5m2, (2, 133, 144), dtype=bfloat16, block=block, transposed=transposed,
                       scale=float32, scales="view")
            yield case(float8_e5m2, (0, 40), dtype=bfloat16, block=block, transposed=transposed,
                       scale=float32)
            if block in ((1, 128), (128, 1), (128, 128), (1, None)):
                for shape in (ALIGNED_MATRIX, (2, 133, 144)):
                    yield case(float8_e4m3fn, shape, dtype=bfloat16, block=block, transposed=transposed,
                               scale=float32,
                               scale_layout="gemm_ready")


register(Registration("dequantize", dequantize.dequantize, reference.dequantize, _inputs, _cases,
                      "the values of quantised data",
                      programs=(dequantize.variants, astype.variants)))
