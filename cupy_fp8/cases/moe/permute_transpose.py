"""Cases of permuting tokens to their experts' rows in both directions. A case's shape is that of the tokens;
its options say how they are routed (see cases.moe.route)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray
from ...formats import FP8_DTYPES, float8_e4m3fn, float8_e5m2, float32
from ...layouts import cdiv
from ...ops.moe import permute_transpose
from ...ops.quantize import blocks
from ...reference.scales.convert import stored
from ...results import Scaled
from ..base import Case, maker, nbytes, powers_of_two, source
from ..registry import Arguments, HostCalls, Registration, Timed, register
from .permute import ROUTED, probs_of, routed, small_routing

#: Experts have many rows, whole tiles of them, or few; begin at multiples of 128 or anywhere, are empty, or
#: leave rows unused.
_ROUTINGS: tuple[dict[str, Any], ...] = (
    *ROUTED, {"topk": 2, "experts": 3, "align": 128}, {"topk": 2, "experts": 3},
    {"topk": 2, "experts": 5, "rows": 400}, {"topk": 2, "experts": 5, "align": 16, "rows": 1003},
    {"topk": 2, "experts": 3, "kind": "none", "align": 2}, {"topk": 0, "experts": 3, "align": 4})


def _inputs(case: Case) -> Arguments:
    routes, options = routed(case)
    held = options.get("held", "compact")               # layout of the tokens' scales
    data = source(case)
    tokens, columns = case.shape
    rng = np.random.default_rng(tokens + columns)
    low, high = options.get("exponents", (-9, -5))
    exponents = rng.integers(low, high, (tokens, cdiv(columns, 128)), endpoint=True)
    scales = stored(powers_of_two(exponents, float32), held, (1, 128))
    x = Scaled(data, asarray(scales, like=data), case.shape, False, (1, 128), held)
    return (x, routes), probs_of(routes, options.get("probs"), "bits")


def _cases() -> Iterator[Case]:
    case = maker("permute_transpose", "normal")
    # few blocks first (for callers that take only a few cases), for every program
    for dtype, columns in product(FP8_DTYPES, (144, 40, 45)):
        yield case(dtype, (8, columns), topk=2, experts=3, align=16, probs="slot")
    for topk, experts in ((1, 2), (2, 3)):
        yield case(float8_e4m3fn, (8, 272), topk=topk, experts=experts)
    for i, options in enumerate(_ROUTINGS):
        for j, shape in enumerate(((150, 272), (97, 400), (70, 131), (0, 144))):
            yield case(FP8_DTYPES[(i + j) % 2], shape, probs=(None, "slot", "expert")[(i + j) % 3],
                       held=("compact", "gemm_ready", "deepgemm_sm90")[(i + j // 2) % 3], **options)
    for exponents in ((-25, 0), (-32, 0), (-127, 127), (-149, -120)):
        yield case(float8_e4m3fn, (200, 272), "bits", exponents=exponents, topk=2, experts=4)
        yield case(float8_e5m2, (200, 272), "bits", exponents=exponents, topk=2, experts=4, align=16)
    for columns in (0, 1, 16, 128, 1040):
        yield case(float8_e4m3fn, (300, columns), topk=2, experts=3, align=4)
    for layout in ("offset", "strided"):
        yield case(float8_e4m3fn, (50, 144), "normal", layout, topk=2, experts=3, align=16)
    yield case(float8_e4m3fn, (1500, 144), topk=2, experts=2)
    yield case(float8_e4m3fn, (600, 400), topk=8, experts=64, kind="distinct")


def _timed() -> Iterator[Timed]:
    case = maker("permute_transpose", "normal")
    for tokens, topk, experts in ((16384, 2, 8), (4096, 8, 64)):
        yield Timed(f"e4m3fn, top {topk} of {experts}",
                    case(float8_e4m3fn, (tokens, 7168), topk=topk, experts=experts, kind="distinct",
                         align=128, probs="slot"))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Tokens are read, and rows are written in both directions. The routing is not counted."""
    (x, _), options = arguments
    return nbytes(x, options.get("probs"), *written.values())


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", permute_transpose.permute_transpose, blocks.quantize_block(x), small_routing(x))


register(
    Registration("permute_transpose", permute_transpose.permute_transpose, reference.permute_transpose,
                 _inputs, _cases, "copies FP8 tokens to their experts' rows, and transposes these",
                 programs=(permute_transpose.variants,), timed=_timed, moves=_moves,
                 host_calls=_host_calls),
)
