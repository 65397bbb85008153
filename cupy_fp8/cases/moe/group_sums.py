"""Cases of sums of the rows of each group. A case's shape is x's; its options are `groups` (their number) and
`sizes`, how x is divided (see cases.groups)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray
from ...formats import (
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
    int32,
)
from ...layouts import scale_shape
from ...ops.moe import group_sums
from ...ops.scales import convert
from ...results import Scaled
from ..base import Case, laid_out, maker, nbytes, source, values
from ..groups import DIVISIONS, sizes
from ..registry import Arguments, HostCalls, Registration, Timed, register


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    rows, spare = case.shape[0], options.pop("spare", 0)
    splits = sizes(max(rows - spare, 0), options.pop("groups"), options.pop("sizes", "ragged"))
    splits = splits.astype(np.int64 if options.pop("wide", True) else np.int32)
    x: Any = source(case)
    if case.dtype in FP8_DTYPES:
        layout, kind = options.pop("scale_layout", None), options.pop("scales", "normal")
        shape = (1,) if layout is None else scale_shape(case.shape, (1, 128), layout)
        dtype = options.pop("scale_dtype", float32)
        drawn = values(kind, shape, float32 if dtype == int32 else dtype, 1).view(dtype)
        scale_inv = laid_out(drawn, options.pop("scales_at", "contiguous"))
        x = Scaled(x, scale_inv, case.shape, False, None if layout is None else (1, 128), layout)
    if options.pop("weighted", False):
        options["weights"] = values(case.values, (rows,), float32, 2)
    return (x, splits), options


#: columns: a lane's chunks, a strip or several; rows: those of a few segments
_SHAPES: tuple[tuple[int, ...], ...] = ((300, 264), (77, 5), (1000, 40), (130, 513), (600, 256), (1, 1))


def _cases() -> Iterator[Case]:
    case, blocks = maker("group_sums", "normal"), {"scale_layout": "gemm_ready"}
    # few blocks of threads first, for callers that take only a few cases
    yield case(float8_e4m3fn, (140, 40), groups=3, **blocks)
    yield case(bfloat16, (70, 24), groups=2, weighted=True)
    yield case(float8_e5m2, (300, 37), groups=2, sizes="one")
    yield case(float32, (20, 9), groups=4, spare=3)
    for i, (dtype, shape) in enumerate(product(INPUT_DTYPES, _SHAPES)):
        yield case(dtype, shape, groups=4, weighted=i % 2 == 0, spare=i % 3)
        yield case(dtype, shape, ("bits", "edges")[i % 2], groups=3, weighted=i % 4 < 2, wide=False)
    for i, (dtype, layout, shape) in enumerate(product(FP8_DTYPES, (None, "compact", "gemm_ready"), _SHAPES)):
        yield case(dtype, shape, groups=4, scale_layout=layout, weighted=i % 2 == 0, spare=i % 3)
        yield case(dtype, shape, "bits", groups=3, scale_layout=layout, scales="bits", weighted=i % 4 < 2)
    for dtype, division in product((bfloat16, float8_e4m3fn), DIVISIONS):
        yield case(dtype, (700, 72), groups=5, sizes=division, weighted=True)
    # a round of 32 groups and one more, more groups than rows, and none
    for groups, rows in ((31, 90), (32, 90), (33, 90), (129, 600), (1000, 40), (1, 0), (5, 0), (0, 9),
                         (0, 0)):
        yield case(float8_e4m3fn, (rows, 24), groups=groups, **blocks)
        yield case(float16, (rows, 24), groups=groups, weighted=True)
    # exactly a warp's rows, a segment's, and those of 32 segments; one more and one less
    for rows, more in product((32, 64, 256, 2048, 8192), (-1, 0, 1)):
        yield case(float8_e4m3fn, (rows + more, 16), groups=1, scale_layout="compact")
        yield case(bfloat16, (rows + more, 8), groups=1 + rows // 100, sizes="one", weighted=True)
    yield case(float32, (17_000, 4), groups=1)
    yield case(bfloat16, (40, 0), groups=3)
    yield case(float8_e4m3fn, (100, 264), "bits", groups=3, scale_layout="compact", scales="bits",
               scale_dtype=float8_e8m0fnu, weighted=True)
    yield case(float8_e5m2, (200, 700), groups=3, scale_layout="deepgemm_sm100", scales="bits",
               scale_dtype=int32)
    for layout in ("offset", "strided"):
        yield case(float16, (100, 48), "normal", layout, groups=4, weighted=True)
        yield case(float8_e4m3fn, (100, 264), "normal", layout, groups=4, scale_layout="compact",
                   scales_at=layout)


def _timed() -> Iterator[Timed]:
    case = maker("group_sums", "normal")
    for groups in (8, 64):
        for layout, weighted in (("gemm_ready", False), ("gemm_ready", True), ("compact", False)):
            yield Timed(f"e4m3fn, {layout}{', weights' if weighted else ''}, {groups} groups",
                        case(float8_e4m3fn, (34_000, 7168), groups=groups, scale_layout=layout,
                             weighted=weighted))
        yield Timed(f"bf16, {groups} groups", case(bfloat16, (34_000, 7168), groups=groups))
    yield Timed("e4m3fn, gemm_ready, 64 groups",
                case(float8_e4m3fn, (34_000, 4096), groups=64, scale_layout="gemm_ready"))
    yield Timed("e4m3fn, gemm_ready, 1024 groups",
                case(float8_e4m3fn, (34_000, 7168), groups=1024, scale_layout="gemm_ready"))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """x is read, and the sums are written. Weights are not counted."""
    return nbytes(arguments[0][0], *written.values())


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", group_sums.group_sums, x, asarray([4, 12], np.int64, like=x))


register(Registration(
    "group_sums", group_sums.group_sums, reference.group_sums, _inputs, _cases,
    "sums the rows of each group, weighted, in a fixed order: bias gradients of experts",
    programs=(group_sums.variants, convert.variants), timed=_timed, moves=_moves, host_calls=_host_calls))
