"""Cases of astype and transpose."""

from __future__ import annotations

from collections.abc import Iterator

from ... import reference
from ...arrays import Array
from ...formats import (
    BYTE_DTYPES,
    FORMATS,
    FP8_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
)
from ...ops.convert import astype
from ..base import SHAPES, TIMED_MATRICES, TIMED_MATRIX, Case, array_alone, maker, source
from ..registry import Arguments, HostCalls, Registration, Timed, register


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    return (source(case), options.pop("to")), options


def _cases() -> Iterator[Case]:
    case = maker("astype")
    for dtype in FORMATS:
        for to in FORMATS:
            for kind in ("bits", "edges"):
                yield case(dtype, (33, 67), kind, to=to)
            if to in FP8_DTYPES:
                yield case(dtype, (33, 67), "edges", to=to, saturate=False)
    for shape in SHAPES:
        yield case(float32, shape, to=float8_e4m3fn)
        yield case(float8_e5m2, shape, to=bfloat16)
    for layout in ("offset", "strided"):
        for dtype, to in ((float32, float8_e4m3fn), (float8_e4m3fn, float16), (float8_e8m0fnu, float32),
                          (float16, float8_e5m2)):
            yield case(dtype, (40, 72), "bits", layout, to=to)


def _transpose_cases() -> Iterator[Case]:
    case = maker("transpose")
    for shape in SHAPES:
        if len(shape) >= 2:
            for dtype in BYTE_DTYPES:
                yield case(dtype, shape)
    for layout in ("offset", "strided"):
        yield case(float8_e4m3fn, (144, 272), "bits", layout)


def _timed() -> Iterator[Timed]:
    case = maker("astype", "normal")
    for shape in TIMED_MATRICES:
        yield Timed("bf16→e4m3", case(bfloat16, shape, to=float8_e4m3fn))
        yield Timed("e4m3→bf16", case(float8_e4m3fn, shape, to=bfloat16))
    for dtype in (float32, float16):
        name = FORMATS[dtype].tag
        yield Timed(f"{name}→e4m3", case(dtype, TIMED_MATRIX, to=float8_e4m3fn))
        yield Timed(f"e5m2→{name}", case(float8_e5m2, TIMED_MATRIX, to=dtype))


def _timed_transpose() -> Iterator[Timed]:
    case = maker("transpose", "normal")
    for shape in TIMED_MATRICES:
        yield Timed("e4m3", case(float8_e4m3fn, shape))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", astype.astype, x, float8_e4m3fn)


def _host_calls_of_transpose(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", astype.transpose, astype.astype(x, float8_e4m3fn))


register(
    Registration("astype", astype.astype, reference.astype, _inputs, _cases,
                 "converts between float32, float16, bfloat16, E4M3, E5M2 and E8M0",
                 programs=(astype.variants,), timed=_timed, host_calls=_host_calls),
    Registration("transpose", astype.transpose, reference.transpose, array_alone, _transpose_cases,
                 "swaps the last two axes of FP8 or E8M0 data",
                 programs=(astype.variants,), timed=_timed_transpose,
                 host_calls=_host_calls_of_transpose),
)
