"""Makes buffers by running a step without tokens and keeping its arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, zeros
from ..calls.group_sizes import check_align
from ..formats import FP8_DTYPES, INPUT_DTYPES, choice, flag, float32, integer, lookup
from ..ops.moe.route import route
from ..recipes import quantize
from . import checks, weights
from .dataflow import GROUP, KEEPS
from .step import Buffers

if TYPE_CHECKING:
    from .experts import Experts


def make(experts: Experts, sizes: dict[str, Any], align: Any, x_dtype: Any, grad_dtype: Any, keep: Any,
         **flags: Any) -> Buffers:
    """sizes: tokens, topk and rows; None where not known. flags: probs and accumulate."""
    flags = {name: flag(value, name) for name, value in flags.items()}
    if keep is not None:
        choice(keep, "keep", KEEPS)
    dtypes = {"x_dtype": _dtype(experts, x_dtype, "x_dtype"),
              "grad_dtype": _dtype(experts, grad_dtype, "grad_dtype")}
    sizes = {name: _size(value, name) for name, value in sizes.items()}
    if (sizes["tokens"] is None) != (sizes["topk"] is None) or set(sizes.values()) == {None}:
        raise ValueError("tokens, topk, rows: expected tokens and topk, for forward, or rows alone, for "
                         f"forward_rows, got {', '.join(f'{name}={n}' for name, n in sizes.items())}")
    of_rows = sizes["tokens"] is None
    if align is None:
        align = GROUP if of_rows else experts._flow.align(keep)
    if of_rows:
        align = check_align(align)
        checks.alignment(experts, align, "align")
    like, routing = weights.kind(experts.up), None
    if not of_rows:
        nowhere = zeros((sizes["tokens"], sizes["topk"]), np.int32, like=like)
        nowhere.fill(-1)
        routing = route(nowhere, num_experts=experts.num_experts, rows=sizes["rows"], align=align)
        sizes["rows"] = routing.rows
    made = Buffers(experts, {**sizes, "align": align, "keep": keep, **flags,
                             **{name: str(dtype) for name, dtype in dtypes.items()}})
    if routing:
        made._made["routing"] = routing             # a Gate is routed into it
    history = None if experts.state is None else experts.state.amax_history.copy()
    _step(experts, made, routing, *dtypes.values())
    if experts.state is not None:
        experts.state.amax_history[...] = history
    made._complete()
    return made


def _step(experts: Experts, made: Buffers, routing: Any, x_dtype: np.dtype[Any], grad_dtype: np.dtype[Any]
          ) -> None:
    """Run a step into the buffers, with zeros for everything."""
    facts, like = made._facts, weights.kind(experts.up)
    number = facts["tokens" if routing else "rows"]
    x, grad = (_tokens(experts, number, dtype, name, of_rows=not routing)
               for name, dtype in (("x", x_dtype), ("grad", grad_dtype)))
    shape = (number, facts["topk"]) if routing else (number,)
    probs: Array | None = zeros(shape, float32, like=like) if facts["probs"] else None
    keep, sums, saved = facts["keep"], None, None
    if routing:
        _, saved = experts.forward(x, routing, probs, keep=keep, out=made)
    else:
        splits = zeros((experts.num_experts,), np.int32, like=like)
        _, saved = experts.forward_rows(x, splits, probs, keep=keep, align=facts["align"], out=made)
    if saved is None:
        return
    if facts["accumulate"]:
        sums = zeros(experts.up.shape, float32, like=like), zeros(experts.down.shape, float32, like=like)
    (experts.backward if routing else experts.backward_rows)(grad, saved, accumulate=sums, out=made)


def _size(given: Any, name: str) -> int | None:
    if given is None:
        return None
    size = integer(given, name)
    if size < 0:
        raise ValueError(f"{name}: expected 0 or more, got {size}")
    return size


def _dtype(experts: Experts, given: Any, name: str) -> np.dtype[Any]:
    """Return the dtype of what is dispatched: FP8 if arrays are quantised before."""
    flow = experts._flow
    if given is None:
        return experts.recipe.dtype if flow.dispatches_fp8 else experts.dtype
    dtype = lookup(given, INPUT_DTYPES + (FP8_DTYPES if flow.dispatches_fp8 else ()), name).dtype
    return dtype if dtype in FP8_DTYPES or not flow.dispatches_fp8 else experts.recipe.dtype


def _tokens(experts: Experts, number: int, dtype: np.dtype[Any], name: str, *, of_rows: bool) -> Any:
    """Return zeros as `forward` or `forward_rows` takes them."""
    recipe, fp8 = experts.recipe, experts._flow.dispatches_fp8
    values = zeros((number, experts.hidden), experts.dtype if fp8 else dtype,
                   like=weights.kind(experts.up))
    if not fp8 or (dtype == recipe.dtype and not of_rows):
        return values
    return quantize(values, replace(recipe, dtype=dtype), **experts._scales[name]).rowwise
