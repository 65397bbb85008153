"""Cases of compute_amax."""

from __future__ import annotations

from collections.abc import Iterator

from ... import reference
from ...arrays import Array
from ...formats import FORMATS, INPUT_DTYPES, bfloat16, float16, float32
from ...ops.scales import amax
from ..base import MATRIX, SHAPES, TIMED_MATRICES, TIMED_MATRIX, Case, array_alone, maker
from ..registry import HostCalls, Registration, Timed, register


def _cases() -> Iterator[Case]:
    case = maker("compute_amax")
    for dtype in INPUT_DTYPES:
        for nan in ("ignore", "propagate"):
            for kind in ("bits", "normal"):
                yield case(dtype, MATRIX, kind, nan=nan)
            yield case(dtype, (5, 100), "bits", "offset", nan=nan)
            yield case(dtype, (40, 72), "normal", "strided", nan=nan)
    for shape in SHAPES:
        yield case(bfloat16, shape, "normal")


def _timed() -> Iterator[Timed]:
    case = maker("compute_amax", "normal")
    for shape in TIMED_MATRICES:
        yield Timed("bf16", case(bfloat16, shape))
    for dtype in (float32, float16):
        yield Timed(FORMATS[dtype].tag, case(dtype, TIMED_MATRIX))


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", amax.compute_amax, x)


register(Registration("compute_amax", amax.compute_amax, reference.compute_amax, array_alone, _cases,
                      "the largest magnitude",
                      programs=(amax.variants,), timed=_timed, host_calls=_host_calls))
