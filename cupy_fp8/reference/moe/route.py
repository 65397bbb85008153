"""Reference of cupy_fp8.ops.moe.route (docs/numerics.md, section 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layouts import padded_rows
from ...routing import Routing


def route(assignment: Any, *, num_experts: int | None = None, topk: int | None = None,
          rows: int | None = None, align: int = 1) -> Routing:
    """assignment: indices [T, topk] of `num_experts` experts, or a mask [T, E], of which the first `topk`
    experts of each token are used (None: all)."""
    assignment = np.asarray(assignment)
    mask = assignment.dtype == bool
    number = assignment.shape[1] if mask else int(num_experts or 0)
    experts = slots_of(assignment, topk) if mask else assignment.astype(np.int64)
    tokens, slots = experts.shape
    if rows is None:
        rows = padded_rows(tokens * slots, number, align)
    entry = np.flatnonzero((experts >= 0) & (experts < number))
    expert = experts.reshape(-1)[entry]
    order = np.argsort(expert, kind="stable")           # routes of an expert stay in token order
    entry, expert = entry[order], expert[order]
    sizes = np.bincount(expert, minlength=number)
    ends = np.cumsum(-(-sizes // align) * align)
    starts = ends - -(-sizes // align) * align
    row = starts[expert] + np.arange(len(entry)) - (np.cumsum(sizes) - sizes)[expert]
    entry, row = entry[row < rows], row[row < rows]
    row_map, sources = np.full(tokens * slots, -1, np.int32), np.full(rows, -1, np.int32)
    row_map[entry] = row
    sources[row] = entry
    offsets = np.minimum(np.concatenate([[0], ends]), rows).astype(np.int64)
    splits = np.minimum(sizes, rows - offsets[:-1]).astype(np.int32)
    return Routing(row_map.reshape(tokens, slots), splits, np.diff(offsets).astype(np.int32), offsets,
                   sources, rows, align, np.ascontiguousarray(experts, np.int32) if mask else None)


def slots_of(mask: np.ndarray, topk: int | None) -> np.ndarray:
    """int64 [T, topk]: the first experts of each token in ascending order, then -1. With a slot for every
    expert, expert e takes slot e."""
    tokens, number = mask.shape
    if topk is None or topk == number:
        return np.where(mask, np.arange(number), -1)
    slot = np.cumsum(mask, axis=1) - 1
    token, expert = np.nonzero(mask & (slot < topk))
    slots = np.full((tokens, topk), -1, np.int64)
    slots[token, slot[token, expert]] = expert
    return slots
