"""Cases of quantize_tensor and cast_transpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, full
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from ...ops.quantize import bias_gradient, tensor, tensor_current
from ...ops.scales import amax
from ..base import (
    ALIGNED_MATRIX,
    DIRECTIONS,
    MATRIX,
    SCALES,
    SHAPES,
    TIMED_MATRICES,
    TIMED_MATRIX,
    Case,
    maker,
    source,
)
from ..registry import Arguments, HostCalls, Registration, Timed, all_but, register

_COLUMN = DIRECTIONS[1]


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    scale = options.pop("scale", 0.37)
    amax_start = options.pop("amax", None)
    kwargs = options if amax_start is None else {**options, "amax": np.array([amax_start], np.float32)}
    return (source(case), None if scale is None else np.array([scale], np.float32)), kwargs


def _cases() -> Iterator[Case]:
    case = maker("quantize_tensor")
    for directions in DIRECTIONS:
        yield from _given_scale_cases(case, directions)
        yield from _current_cases(case, directions)
        yield from _dbias_cases(case, directions)
    # more tiles than a launch sums at once
    yield case(bfloat16, (33000, 3), "normal", dbias=True)
    for start in (-1.0, float("inf"), float("nan"), 2.0**-149):
        yield case(float32, (9, 11), "normal", amax=start)


def _given_scale_cases(case: Callable[..., Case], directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for to in FP8_DTYPES:
            for kind in ("bits", "edges", "normal"):
                yield case(dtype, MATRIX, kind, dtype=to, amax=0.0, **directions)
            yield case(dtype, ALIGNED_MATRIX, dtype=to, amax=0.0, **directions)
    for shape in SHAPES:
        if _fits(shape, directions):
            yield case(bfloat16, shape, amax=-1.0, **directions)
            yield case(float32, shape, "normal", **directions)
    for layout in ("offset", "strided"):
        for dtype in INPUT_DTYPES:
            yield case(dtype, (72, 96), "bits", layout, amax=0.0, **directions)
    for value in SCALES:
        yield case(float32, (24, 40), scale=value, dtype=float8_e5m2, **directions)


def _current_cases(case: Callable[..., Case], directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for kind in ("bits", "edges", "normal"):
            yield case(dtype, MATRIX, kind, scale=None, amax=0.0, **directions)
        yield case(dtype, ALIGNED_MATRIX, "normal", scale=None, dtype=float8_e5m2, pow2_scale=True, eps=1e3,
                   **directions)
    for shape in SHAPES:
        if _fits(shape, directions):
            yield case(bfloat16, shape, "normal", scale=None, pow2_scale=True, **directions)


def _dbias_cases(case: Callable[..., Case], directions: dict[str, Any]) -> Iterator[Case]:
    for dtype in INPUT_DTYPES:
        for matrix in (MATRIX, ALIGNED_MATRIX, (130, 264)):
            for to in FP8_DTYPES:
                yield case(dtype, matrix, dtype=to, dbias=True, amax=0.0, **directions)
            yield case(dtype, matrix, "normal", dbias=True, **directions)
        yield case(dtype, (300, 96), "normal", "offset", dbias=True, scale=None, **directions)
    for shape in SHAPES:
        if len(shape) >= 2:
            yield case(bfloat16, shape, "normal", dbias=True, **directions)


def _fits(shape: tuple[int, ...], directions: dict[str, Any]) -> bool:
    return len(shape) >= 2 or not directions["columnwise"]


def _cast_transpose_cases() -> Iterator[Case]:
    case = maker("cast_transpose")
    for dtype in INPUT_DTYPES:
        for to in FP8_DTYPES:
            for dbias in (False, True):
                yield case(dtype, ALIGNED_MATRIX, dtype=to, amax=0.0, dbias=dbias)


def _timed() -> Iterator[Timed]:
    case = maker("quantize_tensor", "normal")
    for shape in TIMED_MATRICES:
        yield Timed("bf16→e4m3 row +amax", case(bfloat16, shape, amax=0.0))
        yield Timed("bf16→e4m3 column +amax", case(bfloat16, shape, amax=0.0, **_COLUMN))
        yield Timed("bf16→e4m3 row +amax +dbias", case(bfloat16, shape, amax=0.0, dbias=True))
        yield Timed("bf16→e4m3 current row", case(bfloat16, shape, scale=None))
    for source_dtype in (float32, float16):
        name = FORMATS[source_dtype].tag
        yield Timed(f"{name}→e5m2 row +amax", case(source_dtype, TIMED_MATRIX, amax=0.0, dtype=float8_e5m2))
        yield Timed(f"{name}→e4m3 column +amax", case(source_dtype, TIMED_MATRIX, amax=0.0, **_COLUMN))


def _timed_cast_transpose() -> Iterator[Timed]:
    case = maker("cast_transpose", "normal")
    for shape in TIMED_MATRICES:
        yield Timed("bf16→e4m3 +amax", case(bfloat16, shape, amax=0.0))
        yield Timed("bf16→e4m3 +amax +dbias", case(bfloat16, shape, amax=0.0, dbias=True))
        yield Timed("bf16→e4m3 current", case(bfloat16, shape, scale=None))
    for source_dtype in (float32, float16):
        name = FORMATS[source_dtype].tag
        yield Timed(f"{name}→e4m3 +amax", case(source_dtype, TIMED_MATRIX, amax=0.0))
        yield Timed(f"{name}→e4m3 +amax +dbias", case(source_dtype, TIMED_MATRIX, amax=0.0, dbias=True))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    quantize = functools.partial(tensor.quantize_tensor, x)
    scale, amax_buffer, noop = (full(1, value, float32, like=x) for value in (1, 0, 0))
    yield HostCalls.both("row", quantize, scale)
    yield HostCalls("row +amax +noop",
                    functools.partial(quantize, scale, amax=amax_buffer, noop=noop, out=quantize(scale)),
                    functools.partial(quantize, scale, amax=amax_buffer))
    yield HostCalls.both("current", quantize)


def _host_calls_of_cast_transpose(x: Array) -> Iterator[HostCalls]:
    scale = full(1, 1, float32, like=x)
    yield HostCalls.both("+amax", tensor.cast_transpose, x, scale, amax=full(1, 0, float32, like=x))
    yield HostCalls.both("current (two launches)", tensor.cast_transpose, x)
    yield HostCalls.both("+dbias", tensor.cast_transpose, x, scale, dbias=True)


_PROGRAMS = (tensor.variants, tensor_current.variants, bias_gradient.variants, amax.variants)

register(
    Registration("quantize_tensor", tensor.quantize_tensor, reference.quantize_tensor, _inputs, _cases,
                 "FP8 with one scale, a given one or the tensor's own",
                 programs=_PROGRAMS, timed=_timed, moves=all_but("dbias"), host_calls=_host_calls),
    Registration("cast_transpose", tensor.cast_transpose, reference.cast_transpose, _inputs,
                 _cast_transpose_cases,
                 "`quantize_tensor` in both directions, from one read of x",
                 programs=_PROGRAMS, timed=_timed_cast_transpose, moves=all_but("dbias"),
                 host_calls=_host_calls_of_cast_transpose),
)
