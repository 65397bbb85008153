"""Cases of MX quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array
from ...formats import (
    FORMATS,
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
)
from ...ops.quantize import mx
from ...options import MX_MODES, MX_PROFILES, MX_SCALE_LAYOUTS
from ..base import DIRECTIONS, MATRIX, TIMED_MATRICES, TIMED_MATRIX, Case, array_alone, maker
from ..registry import HostCalls, Registration, Timed, register

MX_DIRECTIONS = (*({**d, "transposed": False} for d in DIRECTIONS[:3]),
                 *({**d, "transposed": True} for d in DIRECTIONS[1:3]))
_SQUARE = {"block": (32, 32)}
#: short blocks, one warp tile or several, rows with and without wide accesses, tails of the swizzled layout's
#: tiles, no elements, or a batch
_SHAPES = ((1, 1), (1, 5), (5, 1), (0, 5), (5, 0), (3, 37), (31, 33), (32, 32), (33, 31), (64, 96),
           (128, 128), (130, 257), (144, 264),
           (160, 132), (260, 128), (129, 64), (1, 640), (640, 1), (2, 40, 64), (3, 0, 4), (2, 133, 144),
           (3, 128, 96), (2, 160, 160))


def _cases() -> Iterator[Case]:
    case = maker("quantize_mx")
    # few blocks first (for callers that take only a few cases), for every kind of kernel
    swizzled = {"scale_layout": "swizzled"}
    for directions in MX_DIRECTIONS:
        yield case(bfloat16, (288, 128), "normal", **swizzled, **directions)
    yield case(float32, (132, 288), "normal", "strided", **swizzled, **MX_DIRECTIONS[2])
    yield case(bfloat16, (133, 259), "normal", **swizzled, **MX_DIRECTIONS[4])
    yield case(bfloat16, (133, 259), "normal", "strided", **_SQUARE, **MX_DIRECTIONS[4])
    for directions in MX_DIRECTIONS:
        # the programs for wide accesses (rows of whole blocks, whole warp tiles) in both memory orders, and
        # the program for any shape
        for dtype in INPUT_DTYPES:
            for to in FP8_DTYPES:
                for layout in ("contiguous", "strided"):
                    yield case(dtype, (160, 288), "edges", layout, dtype=to, **directions)
                yield case(dtype, (67, 101), "edges", dtype=to, **directions)
                yield case(dtype, (64, 104), "edges", dtype=to, **directions)
                yield case(dtype, (64, 128), "edges", dtype=to, scale_layout="swizzled", **directions)
        for dtype in (bfloat16, float32):
            for profile, scale_layout in zip(MX_PROFILES, MX_SCALE_LAYOUTS, strict=True):
                yield case(dtype, (96, 160), profile=profile, **directions)
                yield case(dtype, MATRIX, profile=profile, scale_layout=scale_layout, **directions)
        for shape in _SHAPES:
            for scale_layout in MX_SCALE_LAYOUTS:
                yield case(bfloat16, shape, "normal", scale_layout=scale_layout, **directions)
            yield case(float32, shape, "normal", "strided", scale_layout="swizzled", **directions)
        for scale_layout in MX_SCALE_LAYOUTS:
            for dtype in INPUT_DTYPES:
                yield case(dtype, (72, 96), "normal", "offset", scale_layout=scale_layout, **directions)
            for shape in ((72, 95), (160, 288), (2, 48, 80)):
                for layout in ("contiguous", "strided"):
                    yield case(float16, shape, "normal", layout, scale_layout=scale_layout, **_SQUARE,
                               **directions)
    yield from _rule_cases(case)


def _rule_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of every mode and profile, and of padded swizzled scales."""
    for mode in MX_MODES:
        for profile in MX_PROFILES:
            for to in FP8_DTYPES:
                for dtype in INPUT_DTYPES:
                    yield case(dtype, (33, 96), "bits", dtype=to, mode=mode, profile=profile)
                yield case(float32, (64, 64), "edges", dtype=to, mode=mode, profile=profile, columnwise=True)
                yield case(float32, (64, 64), "edges", dtype=to, mode=mode, profile=profile, columnwise=True,
                           transposed=True, **_SQUARE)
    # swizzled scales of row-wise results have padding below and beside, in one matrix and in several
    for shape in ((127, 96), (129, 96), (300, 160), (256, 128), (3, 130, 32), (2, 256, 64)):
        yield case(bfloat16, shape, "normal", dtype=float8_e5m2, scale_layout="swizzled")
        yield case(float32, shape, "normal", dtype=float8_e4m3fn, scale_layout="swizzled")


#: shapes (N, K) of experts' weights, which are quantised along N
_EXPERTS = ((8192, 5120), (5120, 8192), (2048, 7168))
#: names of directions in the labels of timed calls
_TIMED = {"row": MX_DIRECTIONS[0], "column": MX_DIRECTIONS[1], "column stored transposed": MX_DIRECTIONS[3],
          "both": MX_DIRECTIONS[2], "both, column stored transposed": MX_DIRECTIONS[4]}


def _timed() -> Iterator[Timed]:
    case = maker("quantize_mx", "normal")

    def timed(name: str, shape: tuple[int, ...], dtype: np.dtype[Any] = bfloat16, more: str = "",
              **options: Any) -> Timed:
        return Timed(f"{FORMATS[dtype].tag}→e4m3 {name}{more}", case(dtype, shape, **_TIMED[name], **options))

    for shape in TIMED_MATRICES:
        for name in _TIMED:
            yield timed(name, shape)
        yield timed("row", shape, more=" floor", mode="floor")
        yield timed("row", shape, more=" swizzled", scale_layout="swizzled")
    for name in ("column", "both"):
        yield timed(name, TIMED_MATRIX, more=" swizzled", scale_layout="swizzled")
    yield timed("row", TIMED_MATRIX, more=" torchao", profile="torchao")
    for dtype in (float32, float16):
        for name in _TIMED:
            yield timed(name, TIMED_MATRIX, dtype)
    for experts, count in product(_EXPERTS, (1, 2, 4, 8, 16, 64)):
        for name in ("column", "column stored transposed"):
            yield timed(name, (count, *experts))
    for name in ("column", "column stored transposed"):
        yield Timed(f"bf16→e4m3 {name}, N fastest",
                    case(bfloat16, (8, *_EXPERTS[0]), "normal", "strided", **_TIMED[name]))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("row", mx.quantize_mx, x)
    yield HostCalls.both("both", mx.quantize_mx, x, columnwise=True)


register(Registration("quantize_mx", mx.quantize_mx, reference.quantize_mx, array_alone, _cases,
                      "MXFP8: blocks of 32 with E8M0 scales", programs=(mx.variants,),
                      timed=_timed, host_calls=_host_calls))
