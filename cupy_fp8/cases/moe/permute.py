"""Cases of permuting tokens to their experts' rows and back. A case's shape is that of the tokens; its
options say how they are routed (see cases.moe.route)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, asarray
from ...formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from ...layouts import scale_shape
from ...ops.moe import permute, route
from ...results import Scaled
from ...routing import Routing
from ..base import Case, maker, nbytes, source, values
from ..registry import Arguments, HostCalls, Registration, Timed, register
from .route import routing

ROUTED: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 6, "align": 16}, {"topk": 8, "experts": 64, "kind": "distinct"},
    {"topk": 3, "experts": 5, "form": "mask"}, {"topk": 2, "experts": 4, "align": 128, "kind": "one"},
    {"topk": 2, "experts": 9, "align": 4, "form": "mask of any"},
    {"topk": 1, "experts": 3, "align": 32})
_OTHERS: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 3, "kind": "none", "align": 2}, {"topk": 0, "experts": 3, "align": 4},
    {"topk": 40, "experts": 50}, {"topk": 9, "experts": 2}, {"topk": 2, "experts": 1024, "form": "mask"},
    {"topk": 0, "experts": 4, "form": "mask", "align": 2})
#: of (slots, most rows of a token), as many as a program of unpermute sums at once, and others
_USED = ((2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (6, 1), (6, 2), (6, 4), (6, 5), (8, 0), (8, 1), (8, 2),
         (8, 4), (8, 7), (10, 3))
_FEW: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 4, "align": 8}, {"topk": 3, "experts": 5, "form": "mask"},
    {"topk": 2, "experts": 3, "align": 16, "form": "mask of any"})
#: A block of threads has one token or many. Rows have whole chunks, words or odd lengths, or are shared by
#: blocks.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (40, 64), (70, 264), (33, 5), (9, 37), (1100, 16), (3, 17_000), (300, 1), (65, 3, 5), (0, 24), (5, 0),
    (1, 8), (20, 4, 10))


def routed(case: Case) -> tuple[Routing, dict[str, Any]]:
    """Return (the routing of the case's tokens, its other options)."""
    options = dict(case.options)
    names = options.keys() & {"topk", "experts", "kind", "align", "form", "rows", "used"}
    taken = {name: options.pop(name) for name in names}
    return routing(case.shape[0], **taken), options


def probs_of(routes: Routing, by: str | None, kind: str = "normal") -> dict[str, np.ndarray]:
    """Return probs by slot, or by expert."""
    if by is None:
        return {}
    columns = routes.num_experts if by == "expert" and routes.experts is not None else routes.topk
    probs = values(kind, (routes.tokens, columns), float32, 5)
    probs[::7] = 0
    return {"probs": probs}


def _inputs(case: Case) -> Arguments:
    routes, options = routed(case)
    x: Any = source(case)
    block = options.get("block")
    layout = {name: options[name] for name in ("scale_layout",) if name in options}
    if block is not None:
        held = options.get("held", "compact")           # layout of the tokens' scales
        scale_inv = values("bits", scale_shape(case.shape, block, held), options["scales"], 1)
        x = Scaled(x, asarray(scale_inv, like=x), case.shape, False, block, held)
    return (x, routes), probs_of(routes, options.get("probs"), "bits") | layout


def _rows_inputs(case: Case) -> tuple[np.ndarray, Routing, dict[str, Any]]:
    """Return (rows, the routing, other options). Unused rows contain Inf and NaN, since no result may depend
    on them."""
    routes, options = routed(case)
    rows = Case(case.op, case.dtype, (routes.rows, *case.shape[1:]), case.values, case.layout)
    return source(rows, 2), routes, options


def _unpermute_inputs(case: Case) -> Arguments:
    y, routes, options = _rows_inputs(case)
    return (y, routes), probs_of(routes, options.get("probs"), case.values)


def _permute_backward_inputs(case: Case) -> Arguments:
    grad, routes, options = _rows_inputs(case)
    probs_grad = {"probs_grad": values("bits", (routes.rows,), float32, 4)}
    return (grad, routes), probs_grad if options.get("probs") else {}


def _unpermute_backward_inputs(case: Case) -> Arguments:
    y, routes, options = _rows_inputs(case)
    return (source(case, 3), y, routes), probs_of(routes, options.get("probs"), case.values)


def _cases_of(op: str, dtypes: tuple[np.dtype[Any], ...], probs: tuple[str | None, ...],
           kinds: tuple[str, ...]) -> Iterator[Case]:
    """Yield cases whose shapes, types, routings, probs and values take turns."""
    def turn(choices: Any, i: int) -> Any:
        return choices[i % len(choices)]

    # few blocks of threads first, for callers that take only a few cases
    for i, shape in enumerate(((5, 40), (7, 9), (3, 300), (6, 64), (4, 2, 11), (5, 264), (0, 8), (3, 7))):
        yield Case(op, turn(dtypes, i), shape, turn(kinds, i),
                   options={**turn(_FEW, i), "probs": turn(probs, i + i // 3)})
    for i, shape in enumerate(_SHAPES):
        for j in range(2):
            options = {**turn(ROUTED, i + 2 * j), "probs": turn(probs, i + j)}
            yield Case(op, turn(dtypes, i + j), shape, turn(kinds, i + i // 2 + j), options=options)
    for i, routed in enumerate((*ROUTED, *_OTHERS)):
        for by in probs:
            yield Case(op, turn(dtypes, i), (50, 40), turn(kinds, i), options={**routed, "probs": by})
    for i, (topk, used) in enumerate(_USED):
        for shape in ((70, 40), (700, 8), (5, 4200)):
            yield Case(op, turn(dtypes, i), shape, turn(kinds, i + i // 2), options={
                "topk": topk, "experts": 12, "used": used, "probs": turn(probs, i + i // 3)})
    # rows with more bytes than a block's threads load at once; and more routes than a block has threads
    yield Case(op, dtypes[1], (3, 3001), turn(kinds, 0), options={**ROUTED[0], "probs": probs[-1]})
    for topk in (256, 257, 1000):
        yield Case(op, dtypes[0], (2, 24), turn(kinds, 0),
                   options={"topk": topk, "experts": 1000, "probs": "slot"})
    for dtype in dtypes:
        yield Case(op, dtype, (24, 48), turn(kinds, 0), "offset", {**ROUTED[0], "probs": probs[-1]})
    yield Case(op, dtypes[0], (24, 48), turn(kinds, 0), "strided", {**ROUTED[2], "probs": probs[-1]})


def _cases() -> Iterator[Case]:
    yield from _cases_of("permute", (bfloat16, float8_e4m3fn, float32, float8_e5m2, float16),
                      (None, "slot", "expert"), ("bits",))
    scaled = ((1, 128), float32), ((1, 32), float8_e8m0fnu), ((1, 64), float32), ((1, None), float32)
    for i, (block, scales) in enumerate(scaled):
        for j, shape in enumerate(((30, 256), (40, 520), (0, 128), (9, 37), (5, 0))):
            options = {**ROUTED[(i + j) % len(ROUTED)], "block": block, "scales": scales,
                       "probs": (None, "slot")[(i + j) % 2]}
            yield Case("permute", float8_e4m3fn, shape, options=options)
    yield from _cases_of_scale_layouts()


def _cases_of_scale_layouts() -> Iterator[Case]:
    """Yield cases of scales before and after. A warp moves gemm_ready scales of 32 rows and 16 columns, four
    columns at once or one. Rows are not multiples of 4 or 32, or are padding alone. Blocks for data follow
    the last one for scales, or there are none."""
    few: dict[str, Any] = {"topk": 2, "experts": 5}
    f32: dict[str, Any] = {"block": (1, 32), "scales": float32}
    for tokens, columns, rows in (
            (5, 32, {}), (16, 128, {}), (17, 64, {"align": 4}), (9, 512, {"rows": 31}),
            (9, 480, {"rows": 33}), (3, 544, {"rows": 1}), (20, 640, {"align": 16}), (2, 530, {"rows": 130}),
            (0, 96, {"rows": 5}), (3, 4128, {"rows": 2000}), (28, 2176, {})):
        for held in ("compact", "gemm_ready"):
            options = {**few, **rows, **f32, "held": held}
            yield Case("permute", float8_e4m3fn, (tokens, columns), options=options)
    for held, dtype, scale_layout in (("compact", float32, "compact"),
                                      ("deepgemm_sm90", float32, "gemm_ready"),
                                      ("compact", float8_e8m0fnu, "compact")):
        options = {**few, "align": 16, "block": (1, 128), "scales": dtype, "held": held,
                   "scale_layout": scale_layout, "probs": "slot"}
        yield Case("permute", float8_e5m2, (21, 700), options=options)


def _unpermute_cases() -> Iterator[Case]:
    yield from _cases_of("unpermute", INPUT_DTYPES, (None, "slot", "expert"), ("normal", "bits", "edges"))
    # Some numbers of routes have programs of their own, if all tokens have them; other numbers share one.
    for i, (topk, dtype) in enumerate(product((1, 2, 4, 6, 8), INPUT_DTYPES)):
        for kind in ("distinct", "any"):
            options = {"topk": topk, "experts": 11, "kind": kind, "probs": (None, "slot")[i % 2]}
            yield Case("unpermute", dtype, (21, 40), "normal", options=options)
    # more chunks than the threads of a block sum in one turn
    yield Case("unpermute", bfloat16, (265, 8248), "normal",
               options={"topk": 2, "experts": 11, "kind": "distinct"})


def _permute_backward_cases() -> Iterator[Case]:
    yield from _cases_of("permute_backward", INPUT_DTYPES, (None, "slot"), ("bits", "normal"))


def _unpermute_backward_cases() -> Iterator[Case]:
    yield from _cases_of("unpermute_backward", INPUT_DTYPES, ("slot", "expert", None),
                      ("normal", "bits", "edges"))
    for columns in (2047, 2048, 4097, 8192, 8200):                    # sums take one tile or several
        yield Case("unpermute_backward", float32, (3, columns), "normal",
                   options={**ROUTED[0], "probs": "slot"})
    yield Case("unpermute_backward", bfloat16, (3, 24_579), "normal", options={**ROUTED[0], "probs": "slot"})
    # several tiles, for more slots than are loaded at once
    yield Case("unpermute_backward", float32, (2, 4100), "normal",
               options={"topk": 40, "experts": 50, "probs": "slot"})


#: the timed layer: 64 experts, 8 for each of 8192 tokens
_LAYER: dict[str, Any] = {"topk": 8, "experts": 64, "kind": "distinct"}
_TOKENS = (8192, 7168)


def _timed() -> Iterator[Timed]:
    case = functools.partial(maker("permute"), **_LAYER)
    blocks: dict[str, Any] = {"block": (1, 128), "scales": float32}
    mx: dict[str, Any] = {"block": (1, 32), "scales": float8_e8m0fnu}
    for align, label in ((1, ""), (16, ", to 16")):
        yield Timed(f"bf16{label}", case(bfloat16, _TOKENS, align=align))
        yield Timed(f"e4m3fn, 1x128{label}", case(float8_e4m3fn, _TOKENS, align=align, **blocks))
        yield Timed(f"e4m3fn, 1x128 gemm_ready{label}",
                    case(float8_e4m3fn, _TOKENS, align=align, held="gemm_ready", **blocks))
        yield Timed(f"e4m3fn, 1x128 to compact{label}",
                    case(float8_e4m3fn, _TOKENS, align=align, scale_layout="compact", **blocks))
        yield Timed(f"e4m3fn, MX{label}", case(float8_e4m3fn, _TOKENS, align=align, **mx))
    yield Timed("bf16, to 16, probs", case(bfloat16, _TOKENS, align=16, probs="slot"))
    yield Timed("bf16, half a tail", case(bfloat16, _TOKENS, rows=2 * 8 * 8192))
    yield Timed("bf16, to 16", case(bfloat16, (64, 7168), align=16))


def _timed_unpermute() -> Iterator[Timed]:
    case = functools.partial(maker("unpermute", "normal"), **_LAYER)
    yield Timed("bf16, probs", case(bfloat16, _TOKENS, probs="slot"))
    yield Timed("bf16", case(bfloat16, _TOKENS))
    yield Timed("bf16, probs", case(bfloat16, (64, 7168), probs="slot"))


def _timed_permute_backward() -> Iterator[Timed]:
    case = functools.partial(maker("permute_backward", "normal"), **_LAYER)
    yield Timed("bf16, probs", case(bfloat16, _TOKENS, probs="slot"))


def _timed_unpermute_backward() -> Iterator[Timed]:
    case = functools.partial(maker("unpermute_backward", "normal"), **_LAYER)
    for align, label in ((1, ""), (16, ", to 16")):
        yield Timed(f"bf16{label}", case(bfloat16, _TOKENS, align=align, probs="slot"))


def _moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Tokens and probs are read, and rows are written. The routing is not counted."""
    (x, _), options = arguments
    return nbytes(x, options.get("probs"), *written.values())


def _moves_of_sums(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """Each token's rows are read, and tokens are written. Probs, their gradients and the routing are
    not counted."""
    (rows, _), _ = arguments
    return nbytes(rows, written.get("result", written.get("[0].result")))


def _unpermute_backward_moves(arguments: Arguments, written: dict[str, np.ndarray]) -> int:
    """The gradient and each token's rows are read, and all rows are written. Probs, their gradients
    and the routing are not counted."""
    (grad, _, routes), _ = arguments
    return nbytes(grad) * (1 + routes.topk) + nbytes(written["[0].result"])


def small_routing(x: Array) -> Routing:
    """Send each row of x to both of two experts."""
    return route.route(asarray([[0, 1]] * len(x), np.int32, like=x), num_experts=2)


def _host_calls(x: Array) -> Iterator[HostCalls]:
    yield HostCalls.both("", permute.permute, x, small_routing(x))


def _host_calls_of_unpermute(x: Array) -> Iterator[HostCalls]:
    routes = small_routing(x)
    yield HostCalls.both("", permute.unpermute, permute.permute(x, routes), routes)


register(
    Registration("permute", permute.permute, reference.permute, _inputs, _cases,
                 "copies tokens to their experts' rows, with scales and probs",
                 programs=(permute.variants,), timed=_timed, moves=_moves, host_calls=_host_calls),
    Registration("unpermute", permute.unpermute, reference.unpermute, _unpermute_inputs, _unpermute_cases,
                 "sums each token's rows, weighted by probs, in a fixed order",
                 programs=(permute.variants,), timed=_timed_unpermute, moves=_moves_of_sums,
                 host_calls=_host_calls_of_unpermute),
    Registration("permute_backward", permute.permute_backward, reference.permute_backward,
                 _permute_backward_inputs, _permute_backward_cases,
                 "the gradients of permuted tokens and probs",
                 programs=(permute.variants,), timed=_timed_permute_backward, moves=_moves_of_sums),
    Registration("unpermute_backward", permute.unpermute_backward, reference.unpermute_backward,
                 _unpermute_backward_inputs, _unpermute_backward_cases,
                 "the gradients of rows and probs",
                 programs=(permute.variants,), timed=_timed_unpermute_backward,
                 moves=_unpermute_backward_moves),
)
