"""Cases of quantising tokens while permuting them to their experts' rows. A case's shape is that of the
tokens; its options say how they are routed (see cases.moe.route), and the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e5m2, float16, float32
from ...ops.moe import quantize_permute
from ...options import BLOCK_PROFILES
from ...recipes import BlockScaling
from ..base import Case, maker, nbytes, source
from ..registry import Arguments, HostCalls, Registration, Timed, register
from .permute import ROUTED, probs_of, routed, small_routing

_VLLM = {"profile": "vllm"}
#: more slots than a warp has lanes for a block; tokens without rows; unused rows
_ROUTINGS: tuple[dict[str, Any], ...] = (
    *ROUTED, {"topk": 2, "experts": 3, "kind": "none", "align": 2}, {"topk": 0, "experts": 3, "align": 4},
    {"topk": 40, "experts": 50}, {"topk": 9, "experts": 12}, {"topk": 2, "experts": 5, "rows": 401})
#: A token has one unit of 512 elements, several, or a warp's pair and part of another; whole blocks or not.
_COLUMNS = 0, 1, 37, 128, 144, 512, 520, 1024, 1300, 2064


def _inputs(case: Case) -> Arguments:
    routes, options = routed(case)
    by = options.pop("probs", None)
    return (source(case), routes, BlockScaling(**options)), probs_of(routes, by, "bits")


def _cases() -> Iterator[Case]:
    case = maker("quantize_permute")
    # few blocks first (for callers that take only a few cases), for every program
    for dtype, to, profile in product(INPUT_DTYPES, FP8_DTYPES, ({}, _VLLM)):
        yield case(dtype, (4, 272), "normal", dtype=to, topk=2, experts=3, align=2, probs="slot", **profile)
    yield case(bfloat16, (3, 272), "normal", topk=4, experts=5, probs="slot")    # scales move separately
    for i, (dtype, to, profile) in enumerate(product(INPUT_DTYPES, FP8_DTYPES, ({}, _VLLM))):
        for j, columns in enumerate((288, 37)):
            yield case(dtype, (33, columns), ("edges", "bits")[(i + j) % 2], dtype=to,
                       **ROUTED[(i + j) % len(ROUTED)], **profile)
    for i, options in enumerate(_ROUTINGS):
        for by in (None, "slot", "expert"):
            yield case(INPUT_DTYPES[i % 3], (50, 160), "normal", probs=by, **options)
    for i, columns in enumerate(_COLUMNS):
        for dtype in INPUT_DTYPES:
            yield case(dtype, (20, columns), "normal", topk=3, experts=4, align=(1, 8)[i % 2], probs="slot")
    for name, pow2, to in product(BLOCK_PROFILES, (False, True), FP8_DTYPES):
        yield case(bfloat16, (18, 272), "bits", profile=name, pow2_scale=pow2, dtype=to, topk=2, experts=3)
        yield case(float32, (18, 133), "edges", profile=name, pow2_scale=pow2, dtype=to, eps=1e-3, topk=1,
                   experts=3)
    for layout in ("offset", "strided"):
        yield case(bfloat16, (24, 144), "normal", layout, topk=2, experts=3, align=16)
        yield case(float16, (24, 144), "normal", layout, dtype=float8_e5m2, topk=2, experts=3)
    for tokens in (0, 1):
        yield case(bfloat16, (tokens, 640), "normal", topk=8, experts=64, kind="distinct", align=16,
                   probs="slot")
    yield case(bfloat16, (1100, 136), "normal", topk=2, experts=8, align=128, probs="slot",
               scale_layout="compact")


def _timed() -> Iterator[Timed]:
    case = maker("quantize_permute", "normal")
    for tokens, topk, experts, align in ((16384, 2, 8, 128), (4096, 8, 64, 128), (128, 8, 64, 16),
                                         (1, 8, 64, 16)):
        yield Timed(f"bf16→e4m3fn, top {topk} of {experts}",
                    case(bfloat16, (tokens, 7168), topk=topk, experts=experts, kind="distinct", align=align,
                         probs="slot"))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Tokens are read, and rows are written. The routing is not counted."""
    (x, *_), options = arguments
    return nbytes(x, options.get("probs"), *written.values())


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", quantize_permute.quantize_permute, x, small_routing(x))


register(
    Registration("quantize_permute", quantize_permute.quantize_permute, reference.quantize_permute, _inputs,
                 _cases, "quantises tokens in blocks and copies them to their experts' rows",
                 programs=(quantize_permute.variants,), timed=_timed, moves=_moves, host_calls=_host_calls),
)
