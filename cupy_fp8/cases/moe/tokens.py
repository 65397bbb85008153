"""Cases of tokens that go to their experts' rows and back. A case of `route` has the assignment's shape, [T,
topk] for indices or [T, E] for a mask. The others have the tokens' shape, and options for their routing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import reference
from ...formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from ...layouts import scale_shape
from ...ops.moe import permute, route
from ...results import Scaled
from ...routing import Routing
from ..base import Case, source, values
from ..registry import Registration, register

_INT32, _INT64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(bool)
#: Where routes go. 'any': to any expert, also twice to one, or nowhere; 'distinct': to different ones; 'one':
#: all to the same; 'none': nowhere.
KINDS = ("any", "distinct", "one", "none")


def indices(tokens: int, topk: int, experts: int, kind: str = "any", dtype: np.dtype[Any] = _INT32,
            seed: int = 0) -> np.ndarray:
    """Experts of each token's slots. -1 means dropped, as an eighth of 'any' is."""
    rng = np.random.default_rng(seed)
    if kind == "distinct":
        return np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].astype(dtype)
    if kind in ("one", "none"):
        return np.full((tokens, topk), experts // 2 if kind == "one" else -1, dtype)
    chosen = rng.integers(0, experts, (tokens, topk))
    return np.where(rng.random((tokens, topk)) < 1 / 8, -1, chosen).astype(dtype)


def mask(tokens: int, experts: int, most: int, kind: str = "any", seed: int = 0) -> np.ndarray:
    """Up to `most` experts of each token."""
    chosen = np.zeros((tokens, experts), bool)
    if kind == "one":
        chosen[:, experts // 2] = True
    elif kind != "none":
        number = np.random.default_rng(seed + 1).integers(0, most, (tokens, 1), endpoint=True)
        np.put_along_axis(chosen, indices(tokens, most, experts, "distinct", seed=seed),
                          np.arange(most) < number, 1)
    return chosen


def routing(tokens: int, topk: int, experts: int, kind: str = "any", align: int = 1,
            form: str = "indices") -> Routing:
    """The reference's routing. form: the kind of assignment: 'indices', a 'mask' with at most topk experts
    for a token, or a 'mask of any' number of them."""
    if form == "indices":
        return reference.route(indices(tokens, topk, experts, kind), num_experts=experts, align=align)
    chosen = mask(tokens, experts, topk, kind)
    return reference.route(chosen, topk=topk, align=align) if form == "mask" else reference.route(
        chosen, rows=tokens * topk + experts * (align - 1), align=align)


# ---- route ----
def _route_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    if case.layout == "offset":
        flat = assignment.reshape(-1)
        assignment = np.concatenate([flat[:1], flat])[1:].reshape(case.shape)
    if case.layout == "strided":
        assignment = np.asfortranarray(assignment)
    return (assignment,), options


def _route_cases() -> Iterator[Case]:
    def case(dtype: Any, tokens: int, extent: int, kind: str = "any", layout: str = "contiguous", /,
             **options: Any) -> Case:
        return Case("route", dtype, (tokens, extent), "bits", layout, {"kind": kind, **options})

    # The first cases have one block of threads and several, indices and masks, for callers that take only a
    # few cases.
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
    for experts in (31, 32, 33, 255, 256, 257, 1023, 1024):          # warps and rounds of the kernel's scans
        yield case(_INT32, 200, 4, num_experts=experts, align=8)
        yield case(_BOOL, 60, experts, topk=6, align=32)
    # A warp holds 128 routes between its two passes.
    for topk in (0, 32, 33, 63, 64, 65, 127, 128, 129, 200):
        yield case(_INT32, 70, topk, num_experts=40)
    yield case(_INT32, 2, 1024, num_experts=9, align=64)
    # More routes than a warp holds at once, in as many blocks as there can be.
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


# ---- moving tokens ----
_ROUTED: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 6, "align": 16}, {"topk": 8, "experts": 64, "kind": "distinct"},
    {"topk": 3, "experts": 5, "form": "mask"}, {"topk": 2, "experts": 4, "align": 128, "kind": "one"},
    {"topk": 2, "experts": 9, "align": 4, "form": "mask of any"},
    {"topk": 1, "experts": 3, "align": 32})
_OTHERS: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 3, "kind": "none", "align": 2}, {"topk": 0, "experts": 3, "align": 4},
    {"topk": 40, "experts": 50}, {"topk": 9, "experts": 2}, {"topk": 2, "experts": 1024, "form": "mask"},
    {"topk": 0, "experts": 4, "form": "mask", "align": 2})
_FEW: tuple[dict[str, Any], ...] = (
    {"topk": 2, "experts": 4, "align": 8}, {"topk": 3, "experts": 5, "form": "mask"},
    {"topk": 2, "experts": 3, "align": 16, "form": "mask of any"})
#: One token and many for each block of threads; rows of whole chunks, of words, and of odd lengths; rows that
#: blocks share.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (40, 64), (70, 264), (33, 5), (9, 37), (1100, 16), (3, 17_000), (300, 1), (65, 3, 5), (0, 24), (5, 0),
    (1, 8), (20, 4, 10))


def _routed(case: Case) -> tuple[Routing, dict[str, Any]]:
    """(the routing of the case's tokens, its other options)."""
    options = dict(case.options)
    names = options.keys() & {"topk", "experts", "kind", "align", "form"}
    taken = {name: options.pop(name) for name in names}
    return routing(case.shape[0], **taken), options


def _probs(routes: Routing, by: str | None, kind: str = "normal") -> dict[str, np.ndarray]:
    """Probs by slot, or by expert if that is another shape."""
    if by is None:
        return {}
    columns = routes.num_experts if by == "expert" and routes.experts is not None else routes.topk
    probs = values(kind, (routes.tokens, columns), float32, 5)
    probs[::7] = 0
    return {"probs": probs}


def _permute_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    routes, options = _routed(case)
    x: Any = source(case)
    block = options.get("block")
    if block is not None:
        scale_inv = values("bits", scale_shape(case.shape, block, "compact"), options["scales"], 1)
        x = Scaled(x, scale_inv, case.shape, False, block, "compact")
    return (x, routes), _probs(routes, options.get("probs"), "bits")


def _rows_inputs(case: Case) -> tuple[np.ndarray, Routing, dict[str, Any]]:
    """(rows, the routing, other options). Unused rows have Inf and NaN too, since no result may depend on
    them."""
    routes, options = _routed(case)
    rows = Case(case.op, case.dtype, (routes.rows, *case.shape[1:]), case.values, case.layout)
    return source(rows, 2), routes, options


def _unpermute_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    y, routes, options = _rows_inputs(case)
    return (y, routes), _probs(routes, options.get("probs"), case.values)


def _permute_backward_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    grad, routes, options = _rows_inputs(case)
    probs_grad = {"probs_grad": values("bits", (routes.rows,), float32, 4)}
    return (grad, routes), probs_grad if options.get("probs") else {}


def _unpermute_backward_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    y, routes, options = _rows_inputs(case)
    return (source(case, 3), y, routes), _probs(routes, options.get("probs"), case.values)


def _cases(op: str, dtypes: tuple[np.dtype[Any], ...], probs: tuple[str | None, ...],
           kinds: tuple[str, ...]) -> Iterator[Case]:
    """Cases whose shapes, types, routings, probs and values take turns."""
    def turn(choices: Any, i: int) -> Any:
        return choices[i % len(choices)]

    # The first cases take a few blocks of threads, for callers that take only a few cases.
    for i, shape in enumerate(((5, 40), (7, 9), (3, 300), (6, 64), (4, 2, 11), (5, 264), (0, 8), (3, 7))):
        yield Case(op, turn(dtypes, i), shape, turn(kinds, i),
                   options={**turn(_FEW, i), "probs": turn(probs, i + i // 3)})
    for i, shape in enumerate(_SHAPES):
        for j in range(2):
            options = {**turn(_ROUTED, i + 2 * j), "probs": turn(probs, i + j)}
            yield Case(op, turn(dtypes, i + j), shape, turn(kinds, i + i // 2 + j), options=options)
    for i, routed in enumerate((*_ROUTED, *_OTHERS)):
        for by in probs:
            yield Case(op, turn(dtypes, i), (50, 40), turn(kinds, i), options={**routed, "probs": by})
    for dtype in dtypes:
        yield Case(op, dtype, (24, 48), turn(kinds, 0), "offset", {**_ROUTED[0], "probs": probs[-1]})
    yield Case(op, dtypes[0], (24, 48), turn(kinds, 0), "strided", {**_ROUTED[2], "probs": probs[-1]})


def _permute_cases() -> Iterator[Case]:
    yield from _cases("permute", (bfloat16, float8_e4m3fn, float32, float8_e5m2, float16),
                      (None, "slot", "expert"), ("bits",))
    scaled = ((1, 128), float32), ((1, 32), float8_e8m0fnu), ((1, 64), float32), ((1, None), float32)
    for i, (block, scales) in enumerate(scaled):
        for j, shape in enumerate(((30, 256), (40, 520), (0, 128), (9, 37), (5, 0))):
            options = {**_ROUTED[(i + j) % len(_ROUTED)], "block": block, "scales": scales,
                       "probs": (None, "slot")[(i + j) % 2]}
            yield Case("permute", float8_e4m3fn, shape, options=options)


def _unpermute_cases() -> Iterator[Case]:
    yield from _cases("unpermute", INPUT_DTYPES, (None, "slot", "expert"), ("normal", "bits", "edges"))
    # Numbers of routes that have programs, for tokens that have all of them, and other numbers.
    for i, (topk, dtype) in enumerate(product((1, 2, 4, 6, 8), INPUT_DTYPES)):
        for kind in ("distinct", "any"):
            options = {"topk": topk, "experts": 11, "kind": kind, "probs": (None, "slot")[i % 2]}
            yield Case("unpermute", dtype, (21, 40), "normal", options=options)


def _permute_backward_cases() -> Iterator[Case]:
    yield from _cases("permute_backward", INPUT_DTYPES, (None, "slot"), ("bits", "normal"))


def _unpermute_backward_cases() -> Iterator[Case]:
    yield from _cases("unpermute_backward", INPUT_DTYPES, ("slot", "expert", None),
                      ("normal", "bits", "edges"))
    for columns in (2047, 2048, 4097, 8192, 8200):                    # tiles of the kernel's sums
        yield Case("unpermute_backward", float32, (3, columns), "normal",
                   options={**_ROUTED[0], "probs": "slot"})
    yield Case("unpermute_backward", bfloat16, (3, 24_579), "normal", options={**_ROUTED[0], "probs": "slot"})


register(
    Registration("route", route.route, reference.route, _route_inputs, _route_cases,
                 "finds the rows of each token, sorted by expert",
                 programs=(route.variants,)),
    Registration("permute", permute.permute, reference.permute, _permute_inputs, _permute_cases,
                 "copies tokens to their experts' rows, with scales and probs",
                 programs=(permute.variants,)),
    Registration("unpermute", permute.unpermute, reference.unpermute, _unpermute_inputs, _unpermute_cases,
                 "sums each token's rows, weighted by probs, in a fixed order",
                 programs=(permute.variants,)),
    Registration("permute_backward", permute.permute_backward, reference.permute_backward,
                 _permute_backward_inputs, _permute_backward_cases,
                 "the gradients of permuted tokens and probs",
                 programs=(permute.variants,)),
    Registration("unpermute_backward", permute.unpermute_backward, reference.unpermute_backward,
                 _unpermute_backward_inputs, _unpermute_backward_cases,
                 "the gradients of rows and probs",
                 programs=(permute.variants,)),
)
