"""Cases of quantisation in blocks with f32 scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from ...ops.quantize import blocks
from ...options import BLOCK_PROFILES, BLOCK_SCALE_LAYOUTS, BLOCKS
from ..base import ALIGNED_MATRIX, DIRECTIONS, MATRIX, TIMED_MATRICES, TIMED_MATRIX, Case, array_alone, maker
from ..registry import HostCalls, Registration, Timed, register

_ROW, _COLUMN, _BOTH, _AS_IS = DIRECTIONS
_COLUMN_AS_IS = {**_COLUMN, "transposed": False}
_SQUARE: dict[str, Any] = {"block": (128, 128)}
_WHOLE_ROWS: dict[str, Any] = {"block": (1, None)}
_COMPACT = {"scale_layout": "compact"}
_VLLM = {"profile": "vllm"}
#: options that launch every kernel with wide accesses
_WIDE: tuple[dict[str, Any], ...] = (_ROW, {**_ROW, **_VLLM}, _COLUMN, _BOTH, {**_BOTH, **_COMPACT},
                                     _COLUMN_AS_IS, _AS_IS, {**_ROW, **_SQUARE}, {**_COLUMN, **_SQUARE},
                                     {**_BOTH, **_SQUARE})
#: short blocks, one warp tile or several, tails of every tile, no elements, or a batch
_SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (3, 37), (128, 128), (130, 257), (260, 132), (129, 64), (1, 640),
    (640, 1), (48, 1100),
    (2, 40, 64), (3, 0, 4), (0, 2, 2), (2, 133, 144), (3, 128, 96))


def _cases() -> Iterator[Case]:
    case = maker("quantize_block")
    # few blocks first (for callers that take only a few cases), for every kind of kernel
    for options in _WIDE:
        yield case(bfloat16, (288, 136), "normal", **options)
    yield case(bfloat16, (37, 256), "normal", **_ROW)
    yield case(bfloat16, (133, 259), "normal", **_BOTH, **_COMPACT)
    yield case(bfloat16, (133, 259), "normal", **_BOTH, **_WHOLE_ROWS)
    yield case(float32, (133, 259), "normal", **_BOTH, **_VLLM)
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for options in _WIDE:
            yield case(dtype, ALIGNED_MATRIX, "edges", dtype=to, **options)
        for options in ({}, _VLLM, _WHOLE_ROWS):
            yield case(dtype, (67, 101), "edges", dtype=to, **_BOTH, **options)
    for profile, pow2, to in product(BLOCK_PROFILES, (False, True), FP8_DTYPES):
        rule = {"profile": profile, "pow2_scale": pow2, "dtype": to}
        yield case(bfloat16, (33, 160), "bits", **_BOTH, **rule)
        yield case(float32, (64, 72), "edges", **_BOTH, **rule, block=(1, 32))
        yield case(float16, (64, 136), "bits", **rule, **_COMPACT)
    for profile, eps in product(BLOCK_PROFILES, (0.0, 1e-42, 1e-3)):
        for pow2 in (False, True):
            yield case(float32, (40, 96), "bits", **_BOTH, profile=profile, eps=eps, pow2_scale=pow2,
                       block=(1, 32))
    for shape in _SHAPES:
        for options in ({}, _COMPACT, _SQUARE, {**_SQUARE, **_COMPACT}, _WHOLE_ROWS):
            yield case(bfloat16, shape, "normal", **_BOTH, **options)
    for block in BLOCKS:
        for shape, scale_layout in product((ALIGNED_MATRIX, (2, 133, 144)), ("gemm_ready", "compact")):
            yield case(bfloat16, shape, "normal", **_BOTH, block=block, scale_layout=scale_layout)
        yield case(float16, MATRIX, "normal", "strided", **_BOTH, block=block)
        yield case(bfloat16, (144, 132), "normal", "strided", **_AS_IS, block=block, dtype=float8_e5m2)
        if 1 in block:
            yield case(bfloat16, MATRIX, "normal", **_BOTH, block=block, scale_layout="deepgemm_sm90")
    yield from _row_and_column_cases(case)


def _row_and_column_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of blocks along rows alone, of whole rows and columns, and of other memory orders."""
    # in rows of whole blocks a warp has eight blocks down or across, or fewer
    for dtype, to in product(INPUT_DTYPES, FP8_DTYPES):
        for options in (_ROW, {**_ROW, **_VLLM}):
            yield case(dtype, (21, 384), "edges", dtype=to, **options)
            yield case(dtype, (21, 384), "bits", dtype=to, **options, **_COMPACT)
    for shape, scale_layout in product(((1, 128), (8, 128), (9, 1024), (67, 1408), (3, 21, 384),
                                        (2, 16, 640)), BLOCK_SCALE_LAYOUTS):
        yield case(bfloat16, shape, "normal", **_ROW, scale_layout=scale_layout)
        yield case(float32, shape, "normal", **_COLUMN_AS_IS, block=(128, 1), scale_layout=scale_layout)
    yield case(bfloat16, (256, 21), "normal", "strided", **_COLUMN)
    for dtype in INPUT_DTYPES:
        for options in ({}, _SQUARE, _WHOLE_ROWS):
            yield case(dtype, (72, 96), "normal", "offset", **_BOTH, **options)
        yield case(dtype, (21, 384), "normal", "offset", **_ROW)
    for options in _WIDE:
        yield case(bfloat16, (160, 144), "normal", "strided", **options)
    # whole rows and columns take the quick division in one step or several, or do without it
    for dtype, to, direction in product((bfloat16, float32), FP8_DTYPES, (_BOTH, _AS_IS)):
        yield case(dtype, (67, 1101), "normal", dtype=to, **direction, **_WHOLE_ROWS, **_VLLM)
        yield case(dtype, (300, 21), "bits", dtype=to, **direction, **_WHOLE_ROWS, **_VLLM)
    # squares take the quick division or do without it
    for values, direction in product(("normal", "bits"), (_ROW, _COLUMN, _BOTH, _AS_IS)):
        yield case(bfloat16, (133, 259), values, **direction, **_SQUARE, **_VLLM)


def _timed() -> Iterator[Timed]:
    case = maker("quantize_block", "normal")

    def timed(name: str, shape: tuple[int, ...], *options: dict[str, Any],
              dtype: np.dtype[Any] = bfloat16) -> Timed:
        merged = {name: value for given in options for name, value in given.items()}
        return Timed(f"{FORMATS[dtype].tag}→e4m3 {name}", case(dtype, shape, **merged))

    for shape in TIMED_MATRICES:
        yield timed("1×128 row", shape, _ROW)
        yield timed("1×128 row compact", shape, _ROW, _COMPACT)
        yield timed("128×1 column", shape, _COLUMN)
        yield timed("1×128 both", shape, _BOTH)
        yield timed("128×128 row", shape, _ROW, _SQUARE)
        yield timed("128×128 both", shape, _BOTH, _SQUARE)
    yield timed("1×128 both compact", TIMED_MATRIX, _BOTH, _COMPACT)
    yield timed("128×128 column", TIMED_MATRIX, _COLUMN, _SQUARE)
    for profile in ("deepgemm", "vllm"):
        yield timed(f"1×128 row {profile}", TIMED_MATRIX, _ROW, {"profile": profile})
    yield timed("1×32 row", TIMED_MATRIX, _ROW, {"block": (1, 32)})
    for dtype in (float32, float16):
        yield timed("1×128 row", TIMED_MATRIX, _ROW, dtype=dtype)
        yield timed("128×1 column", TIMED_MATRIX, _COLUMN, dtype=dtype)
        yield timed("1×128 both", TIMED_MATRIX, _BOTH, dtype=dtype)


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("row", blocks.quantize_block, x)
    yield HostCalls.both("both", blocks.quantize_block, x, columnwise=True)


register(Registration("quantize_block", blocks.quantize_block, reference.quantize_block, array_alone, _cases,
                      "FP8 in blocks (1×128, 128×128, rows, …) with float32 scales",
                      programs=(blocks.variants,), timed=_timed, host_calls=_host_calls))
