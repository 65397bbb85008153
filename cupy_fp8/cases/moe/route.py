"""Cases of route, and the routings of other cases. The shape of a case of route is the assignment's, [T,
topk] for indices or [T, E] for a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...ops.moe import route
from ...routing import Routing
from ..base import Case, laid_out, maker
from ..registry import Arguments, Registration, Timed, all_but, register

_INT32, _INT64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(bool)
#: Routes of 'any' go to any expert, also twice to one, or nowhere; of 'distinct' to different experts; of
#: 'one' all to the same one; of 'none' nowhere.
KINDS = ("any", "distinct", "one", "none")


def indices(tokens: int, topk: int, experts: int, kind: str = "any", dtype: np.dtype[Any] = _INT32,
            seed: int = 0, used: int | None = None) -> np.ndarray:
    """Return the experts of each token's slots. -1 means dropped, which an eighth of 'any' is. used: of each
    token's slots, any others are dropped."""
    if used is not None:
        kept = np.random.default_rng(seed + 2).random((tokens, topk)).argsort(1) < used
        return np.where(kept, indices(tokens, topk, experts, kind, dtype, seed), -1).astype(dtype)
    rng = np.random.default_rng(seed)
    if kind == "distinct":
        return np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].astype(dtype)
    if kind in ("one", "none"):
        return np.full((tokens, topk), experts // 2 if kind == "one" else -1, dtype)
    chosen = rng.integers(0, experts, (tokens, topk))
    return np.where(rng.random((tokens, topk)) < 1 / 8, -1, chosen).astype(dtype)


def mask(tokens: int, experts: int, most: int, kind: str = "any", seed: int = 0) -> np.ndarray:
    """Return a mask with up to `most` experts for each token."""
    chosen = np.zeros((tokens, experts), bool)
    if kind == "one":
        chosen[:, experts // 2] = True
    elif kind != "none":
        number = np.random.default_rng(seed + 1).integers(0, most, (tokens, 1), endpoint=True)
        np.put_along_axis(chosen, indices(tokens, most, experts, "distinct", seed=seed),
                          np.arange(most) < number, 1)
    return chosen


def routing(tokens: int, topk: int, experts: int, kind: str = "any", align: int = 1,
            form: str = "indices", rows: int | None = None, used: int | None = None) -> Routing:
    """Return the reference's routing. form: the kind of assignment: 'indices', a 'mask' with at most topk
    experts per token, or a 'mask of any' number of them."""
    if form == "indices":
        return reference.route(indices(tokens, topk, experts, kind, used=used), num_experts=experts,
                               align=align, rows=rows)
    chosen = mask(tokens, experts, topk, kind)
    return reference.route(chosen, topk=topk, align=align) if form == "mask" else reference.route(
        chosen, rows=tokens * topk + experts * (align - 1), align=align)


def _inputs(case: Case) -> Arguments:
    options = dict(case.options)
    kind, tight = options.pop("kind", "any"), options.pop("tight", False)
    if case.dtype == _BOOL:
        tokens, experts = case.shape
        most = options.pop("most", options.get("topk", experts))
        assignment = mask(tokens, experts, most, kind)
        if "topk" not in options:
            options["rows"] = tokens * most + experts * (options.get("align", 1) - 1)
    else:
        tokens, topk = case.shape
        assignment = indices(tokens, topk, options["num_experts"], kind, case.dtype)
    if tight:
        made = reference.route(assignment, **options)
        options["rows"] = int(made.offsets[-1])
    return (laid_out(assignment, case.layout),), options


def _cases() -> Iterator[Case]:
    def case(dtype: Any, tokens: int, extent: int, kind: str = "any", layout: str = "contiguous", /,
             **options: Any) -> Case:
        return Case("route", dtype, (tokens, extent), "bits", layout, {"kind": kind, **options})

    # few blocks first, for callers that take only a few cases: one block of threads and several, indices and
    # masks
    yield case(_INT32, 5, 2, num_experts=4, align=4)
    yield case(_INT64, 150, 8, num_experts=16, align=16)
    yield case(_BOOL, 40, 12, topk=3, align=8)
    yield case(_INT32, 700, 2, num_experts=5, align=128, tight=True)
    yield case(_BOOL, 90, 70, most=5)
    yield case(_INT32, 0, 2, num_experts=3, align=16)
    yield case(_BOOL, 0, 3, topk=2, align=2)
    yield case(_INT32, 130, 3, "one", num_experts=300)
    for kind in KINDS:
        for tokens, topk, experts in ((1, 1, 1), (64, 8, 64), (65, 8, 64), (513, 4, 33), (1500, 1, 7)):
            if kind != "distinct" or topk <= experts:
                dtype = _INT64 if tokens % 2 else _INT32
                yield case(dtype, tokens, topk, kind, num_experts=experts, align=16)
    for experts in (31, 32, 33, 255, 256, 257, 1023, 1024):          # scans take several warps and rounds
        yield case(_INT32, 200, 4, num_experts=experts, align=8)
        yield case(_BOOL, 60, experts, topk=6, align=32)
    # a warp holds 128 routes between its two passes
    for topk in (0, 32, 33, 63, 64, 65, 127, 128, 129, 200):
        yield case(_INT32, 70, topk, num_experts=40)
    yield case(_INT32, 2, 1024, num_experts=9, align=64)
    # more routes than a warp holds at once, in the most blocks
    yield case(_INT32, 9000, 3, num_experts=12, align=16)
    yield case(_INT32, 70_000, 1, num_experts=64)
    yield case(_BOOL, 9000, 8, topk=2, align=16)
    for kind in ("one", "none"):
        yield case(_BOOL, 40, 12, kind, topk=12)
        yield case(_BOOL, 40, 12, kind, topk=1, align=64)
    yield case(_BOOL, 33, 5, "none", topk=0, align=4)
    for layout in ("offset", "strided"):
        yield case(_INT64, 100, 4, "any", layout, num_experts=10)
        yield case(_BOOL, 100, 10, "any", layout, topk=4)


def _timed() -> Iterator[Timed]:
    case = maker("route")
    for tokens, topk, experts, align in ((8192, 8, 64, 1), (8192, 8, 64, 16), (8192, 8, 256, 128),
                                         (128, 8, 64, 16), (65536, 8, 64, 1)):
        yield Timed(f"top {topk} of {experts} to {align}",
                    case(_INT32, (tokens, topk), num_experts=experts, align=align, kind="distinct"))
    yield Timed("mask, top 8 of 64 to 1", case(_BOOL, (8192, 64), topk=8))


register(Registration("route", route.route, reference.route, _inputs, _cases,
                      "finds the rows of each token, sorted by expert",
                      programs=(route.variants,), timed=_timed,
                      moves=all_but("splits", "aligned_splits", "offsets")))
