"""Reference of cupy_fp8.ops.moe.permute (docs/numerics.md, section 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import bits, zeros
from ...formats import float32
from ...results import Scaled
from ...routing import Routing
from .. import numerics
from ..scales.convert import rows_of_scales, stored


def permute(x: Any, routing: Routing, *, probs: np.ndarray | None = None,
            scale_layout: str | None = None) -> Any:
    """Copy each token, its scales and its probs to the rows of the map. The other rows are zeros."""
    if isinstance(x, Scaled):
        assert x.block is not None
        data, scales = _to_rows(x.data, routing), _to_rows(rows_of_scales(x), routing)
        layout = scale_layout or ("gemm_ready" if scales.dtype == float32 else "compact")
        rows: Any = Scaled._of(data, stored(scales, layout, x.block), data.shape, False, x.block, layout)
    else:
        rows = _to_rows(x, routing)
    if probs is None:
        return rows
    rows_probs = np.zeros(routing.rows, np.float32)
    row_map = _row_map(routing)
    used = row_map >= 0
    bits(rows_probs)[row_map[used]] = bits(by_slot(probs, routing))[used]
    return rows, rows_probs


def unpermute(y: np.ndarray, routing: Routing, *, probs: np.ndarray | None = None) -> np.ndarray:
    """narrow(sum of fl(row * prob)) over a token's rows, from the last row to the first."""
    columns = y.shape[1:]
    given = _row_map(routing)
    order = np.argsort(-given, axis=1, kind="stable")  # dropped slots (-1) come last
    row_map = np.take_along_axis(given, order, 1)
    total = np.zeros((routing.tokens, *columns), np.float32)
    for slot in range(routing.topk):
        here = row_map[:, slot] >= 0
        term = numerics.widen(y[row_map[here, slot]])
        if probs is not None:
            prob = np.take_along_axis(by_slot(probs, routing), order, 1)[here, slot]
            term = numerics.mul(term, prob.reshape(-1, *(1 for _ in columns)))
        total[here] = term if slot == 0 else numerics.add(total[here], term)
    return numerics.narrow(total, y.dtype)


def permute_backward(grad: np.ndarray, routing: Routing, *, probs_grad: np.ndarray | None = None) -> Any:
    """Return the gradient of x, and the gradient of probs by slot if that of the permuted probs is given."""
    x_grad = unpermute(grad, routing)
    if probs_grad is None:
        return x_grad
    slots = np.zeros(routing.row_map.shape, np.float32)
    row_map = _row_map(routing)
    used = row_map >= 0
    bits(slots)[used] = bits(probs_grad)[row_map[used]]
    return x_grad, slots


def unpermute_backward(grad: np.ndarray, y: np.ndarray | None, routing: Routing, *,
                       probs: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """grad_y = narrow(fl(grad * prob)) in each token's rows; dprob = the sum of fl(grad * y) over the
    columns, by the fixed tree."""
    if probs is None:
        return _to_rows(grad, routing), None
    assert y is not None
    row_map = _row_map(routing)
    token, slot = np.nonzero(row_map >= 0)
    row = row_map[token, slot]
    columns = int(np.prod(grad.shape[1:]))
    g = numerics.widen(grad.reshape(len(grad), columns))[token]
    prob = by_slot(probs, routing)[token, slot]
    grad_y = zeros(y.shape, y.dtype, like=np)
    grad_y[row] = numerics.narrow(numerics.mul(g, prob[:, None]), y.dtype).reshape(len(row), *y.shape[1:])
    dots = numerics.tree_sum(numerics.mul(g, numerics.widen(y.reshape(len(y), columns))[row]), 1)
    dprobs = np.zeros(probs.shape, np.float32)
    if probs.shape == routing.row_map.shape or routing.experts is None:
        bits(dprobs)[token, slot] = bits(dots)
    else:
        expert = routing.experts[token, slot]
        known = (expert >= 0) & (expert < routing.num_experts)
        bits(dprobs)[token[known], expert[known]] = bits(dots)[known]
    return grad_y, dprobs


def by_slot(probs: np.ndarray, routing: Routing) -> np.ndarray:
    """Return probs by slot, [T, topk]. From probs by expert, [T, E], each slot takes its expert's, or 0 for
    an index of no expert."""
    if routing.experts is None or probs.shape == routing.row_map.shape:
        return probs
    known = (routing.experts >= 0) & (routing.experts < routing.num_experts)
    if routing.num_experts == 0:
        return np.zeros(routing.experts.shape, np.float32)
    found = np.take_along_axis(probs, np.where(known, routing.experts, 0), 1)
    return np.where(known, found, np.float32(0))


def _row_map(routing: Routing) -> np.ndarray:
    """Return the row of each slot; -1 (dropped) if the routing has no such row."""
    return np.where((routing.row_map >= 0) & (routing.row_map < routing.rows), routing.row_map, np.int32(-1))


def _to_rows(x: np.ndarray, routing: Routing) -> np.ndarray:
    rows = zeros((routing.rows, *x.shape[1:]), x.dtype, like=np)
    row_map = _row_map(routing)
    token, slot = np.nonzero(row_map >= 0)
    bits(rows)[row_map[token, slot]] = bits(x)[token]
    return rows
