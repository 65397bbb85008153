"""Cases of dequantize: one scale for a tensor, and a scale for every block in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray, full
from ...formats import (
    FORMATS,
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
)
from ...layouts import scale_shape, swap_last
from ...ops.convert import astype, dequantize
from ...ops.quantize import mx, tensor
from ...results import Scaled
from ..base import (
    ALIGNED_MATRIX,
    MATRIX,
    SCALES,
    SHAPES,
    TIMED_MATRICES,
    TIMED_MATRIX,
    Case,
    laid_out,
    maker,
    source,
    values,
)
from ..registry import Arguments, HostCalls, Registration, Timed, register

_MX_BLOCKS = ((1, 32), (32, 1))
_OTHER_BLOCKS: tuple[Any, ...] = ((1, 128), (128, 1), (128, 128), (1, None), (None, 1), (1, 64), (32, 32),
                                  (64, 256))
#: the last shape has no tail of a block of 32
_TAILS: tuple[tuple[int, ...], ...] = (MATRIX, ALIGNED_MATRIX, (160, 288))
_BATCHES: tuple[tuple[int, ...], ...] = ((2, 3, 40, 96), (300, 160), (6, 1056))
_ANY: tuple[tuple[int, ...], ...] = (MATRIX, (256, 384), (2, 133, 144))


def _inputs(case: Case) -> Arguments:
    """The case's array is the data as stored. Scales of blocks have arbitrary bits. scales='view': not
    contiguous, as `.T` makes them."""
    options = dict(case.options)
    transposed, block = options.pop("transposed", False), options.pop("block", None)
    dtype, layout = options.pop("scale", float8_e8m0fnu), options.pop("scale_layout", "compact")
    view, value = options.pop("scales", ""), options.pop("scale_inv", 0.37)
    data = source(case)
    shape = swap_last(data.shape) if transposed else data.shape
    if block is None:
        scale_inv = asarray(np.array([value], np.float32), like=data)
        return (Scaled(data, scale_inv, shape, transposed),), options
    compact = values("bits", scale_shape(shape, block, layout, transposed), dtype, 1)
    compact = laid_out(compact, "strided" if view else "contiguous")
    return (Scaled(data, asarray(compact, like=data), shape, transposed, block, layout),), options


def _cases() -> Iterator[Case]:
    case = maker("dequantize")
    for dtype in FP8_DTYPES:
        for to in INPUT_DTYPES:
            for transposed in (False, True):
                for matrix in (MATRIX, ALIGNED_MATRIX):
                    yield case(dtype, matrix, dtype=to, transposed=transposed)
            for scale_inv in SCALES:
                yield case(dtype, (16, 16), dtype=to, scale_inv=scale_inv)
    for shape in SHAPES:
        yield case(float8_e4m3fn, shape, dtype=bfloat16)
        if len(shape) >= 2:
            yield case(float8_e4m3fn, shape, dtype=bfloat16, transposed=True)
    yield from _mx_cases(case)
    yield from _other_block_cases(case)


def _mx_cases(case: Callable[..., Case]) -> Iterator[Case]:
    for block, transposed in product(_MX_BLOCKS, (False, True)):
        mx: dict[str, Any] = {"block": block, "transposed": transposed}
        for dtype, to in product(FP8_DTYPES, INPUT_DTYPES):
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
                yield case(float8_e4m3fn, (96, 160), "bits", layout, dtype=bfloat16,
                           scale_layout=scale_layout, **mx)
        for shape in (*_TAILS, (2, 133, 160), (70, 32), (32, 70)):
            yield case(float8_e4m3fn, shape, dtype=bfloat16, scales="view", **mx)


def _other_block_cases(case: Callable[..., Case]) -> Iterator[Case]:
    for block, transposed in product(_OTHER_BLOCKS, (False, True)):
        options: dict[str, Any] = {"dtype": bfloat16, "block": block, "transposed": transposed}
        for scale in (float8_e8m0fnu, float32):
            for shape in _ANY:
                yield case(float8_e5m2, shape, **options, scale=scale)
        yield case(float8_e5m2, (2, 133, 144), **options, scale=float32, scales="view")
        yield case(float8_e5m2, (0, 40), **options, scale=float32)
        if block in ((1, 128), (128, 1), (128, 128), (1, None)):
            for shape in (ALIGNED_MATRIX, (2, 133, 144)):
                yield case(float8_e4m3fn, shape, **options, scale=float32, scale_layout="gemm_ready")


def _timed() -> Iterator[Timed]:
    case = maker("dequantize", "normal")
    row: dict[str, Any] = {"dtype": bfloat16, "block": (1, 32)}
    column: dict[str, Any] = {"dtype": bfloat16, "block": (32, 1)}
    for shape in TIMED_MATRICES:
        yield Timed("e4m3→bf16", case(float8_e4m3fn, shape, dtype=bfloat16))
        yield Timed("e4m3→bf16 stored transposed",
                    case(float8_e4m3fn, shape[::-1], dtype=bfloat16, transposed=True), shape)
        yield Timed("e4m3→bf16 MX row", case(float8_e4m3fn, shape, **row))
        yield Timed("e4m3→bf16 MX column", case(float8_e4m3fn, shape, **column))
        yield Timed("e4m3→bf16 MX column stored transposed",
                    case(float8_e4m3fn, shape[::-1], **column, transposed=True), shape)
    yield from _timed_with_one_size(case, TIMED_MATRIX, row, column)


def _timed_with_one_size(case: Callable[..., Case], shape: tuple[int, int], row: dict[str, Any],
                         column: dict[str, Any]) -> Iterator[Timed]:
    """Yield rows of other layouts, types and blocks."""
    stored = shape[::-1]
    for name, options in (("row", row), ("column", column)):
        yield Timed(f"e4m3→bf16 MX {name} swizzled",
                    case(float8_e4m3fn, shape, **options, scale_layout="swizzled"))
    yield Timed("e4m3→bf16 MX row stored transposed", case(float8_e4m3fn, stored, **row, transposed=True),
                shape)
    yield Timed("e4m3→bf16 MX column stored transposed swizzled",
                case(float8_e4m3fn, stored, **column, transposed=True, scale_layout="swizzled"), shape)
    for to in (float16, float32):
        tag = FORMATS[to].tag
        yield Timed(f"e5m2→{tag}", case(float8_e5m2, shape, dtype=to))
        yield Timed(f"e5m2→{tag} MX row", case(float8_e5m2, shape, **{**row, "dtype": to}))
        yield Timed(f"e5m2→{tag} MX column", case(float8_e5m2, shape, **{**column, "dtype": to}))
    for block, transposed in (((1, 128), False), ((128, 1), True), ((128, 128), False), ((128, 128), True)):
        name = f"{block[0]}×{block[1]} f32 scales{' stored transposed' if transposed else ''}"
        yield Timed(f"e4m3→bf16 {name}",
                    case(float8_e4m3fn, stored if transposed else shape, dtype=bfloat16, block=block,
                         scale=float32, transposed=transposed), shape)


def _host_calls(x: Array) -> Iterator[HostCalls]:
    scaled = tensor.quantize_tensor(x, full(1, 1, float32, like=x))
    yield HostCalls.both("", dequantize.dequantize, scaled, dtype=bfloat16)
    yield HostCalls.both("MX", dequantize.dequantize, mx.quantize_mx(x), dtype=bfloat16)


register(Registration("dequantize", dequantize.dequantize, reference.dequantize, _inputs, _cases,
                      "the values of quantised data",
                      programs=(dequantize.variants, astype.variants), timed=_timed, host_calls=_host_calls))
