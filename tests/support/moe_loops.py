"""The moves of an expert layer, token by token: expected results of permute, unpermute and their
gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scale_arrays import raw

from cupy_fp8 import Routing, Scaled
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float32
from cupy_fp8.reference.numerics import narrow

ROUTED: list[dict[str, Any]] = [
    {"topk": 2, "experts": 5, "align": 16}, {"topk": 8, "experts": 64, "kind": "distinct"},
    {"topk": 3, "experts": 6, "form": "mask", "align": 4}, {"topk": 2, "experts": 9, "form": "mask of any"},
    {"topk": 5, "experts": 3}, {"topk": 2, "experts": 4, "kind": "none", "align": 2},
    {"topk": 1, "experts": 4, "kind": "one", "align": 128}, {"topk": 33, "experts": 40, "align": 2},
    {"topk": 0, "experts": 2, "align": 8}]
routings = pytest.mark.parametrize("options", ROUTED, ids=lambda o: "-".join(map(str, o.values())))


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def moved(x: Any, r: Routing, probs: np.ndarray | None = None, scale_layout: str | None = None) -> Any:
    """permute of an array or a row-wise Scaled with compact scales; with probs a tuple."""
    if probs is not None:
        return moved(x, r, scale_layout=scale_layout), moved_probs(probs, r)
    if isinstance(x, Scaled):
        data, scale_inv = (moved(a, r) for a in x)
        layout = scale_layout or ("gemm_ready" if scale_inv.dtype == float32 else "compact")
        if layout == "gemm_ready":
            lines = np.zeros((scale_inv.shape[1], -(-r.rows // 4) * 4), np.uint32)
            for row, scales in enumerate(raw(scale_inv)):
                lines[:, row] = scales
            scale_inv = lines.view(np.float32)
        return Scaled._of(data, scale_inv, data.shape, False, x.block, layout)
    out = np.zeros((r.rows, *x.shape[1:]), raw(x).dtype)
    for token, rows in enumerate(r.row_map):
        for row in rows:
            if row >= 0:
                out[row] = raw(x)[token]
    return out.view(x.dtype)


def prob_index(probs: np.ndarray, r: Routing, token: int, slot: int) -> tuple[int, int]:
    """Return the index of a slot's prob: by slot, or by the expert of a mask."""
    by_slot = r.experts is None or probs.shape == r.row_map.shape
    return token, slot if by_slot or r.experts is None else int(r.experts[token, slot])


def moved_probs(probs: np.ndarray, r: Routing) -> np.ndarray:
    out = np.zeros(r.rows, np.float32)
    for token, slot in zip(*np.nonzero(r.row_map >= 0), strict=True):
        out[r.row_map[token, slot]] = probs[prob_index(probs, r, token, slot)]
    return out


def summed(y: np.ndarray, r: Routing, probs: np.ndarray | None = None) -> np.ndarray:
    """unpermute, row by row in NumPy's f32 scalars and vectors."""
    out = np.zeros((r.tokens, *y.shape[1:]), np.float32)
    by_row = None if probs is None else moved_probs(probs, r)
    with np.errstate(all="ignore"):
        for token, rows in enumerate(r.row_map):
            first = True
            for row in sorted((row for row in rows if row >= 0), reverse=True):
                term = y[row].astype(np.float32)
                if by_row is not None:
                    term = term * by_row[row]
                out[token] = term if first else out[token] + term
                first = False
    return narrow(out, y.dtype)


def gathered(rows: np.ndarray, r: Routing) -> np.ndarray:
    """The gradients of probs by slot, from those by row."""
    slots = np.zeros(r.row_map.shape, np.uint32)
    used = r.row_map >= 0
    slots[used] = raw(rows)[r.row_map[used]]
    return slots.view(np.float32)


def gradients(grad: np.ndarray, y: np.ndarray, r: Routing,
              probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """unpermute_backward, row by row."""
    dprobs, grad_y = np.zeros(probs.shape, np.float32), np.zeros(y.shape, raw(y).dtype).view(y.dtype)
    by_row = moved_probs(probs, r)
    with np.errstate(all="ignore"):
        for token, slot in zip(*np.nonzero(r.row_map >= 0), strict=True):
            row = r.row_map[token, slot]
            g, v = grad[token].astype(np.float32), y[row].astype(np.float32)
            bits(grad_y)[row] = bits(narrow(g * by_row[row], y.dtype))
            if g.size:
                dprobs[prob_index(probs, r, token, slot)] = narrow(f32([tree(list(g * v))]), float32)[0]
    return grad_y, dprobs


def tree(terms: list[np.float32]) -> np.float32:
    """Rule 11 by recursion: the sum of the largest power of two of terms below all, and of the rest."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return tree(terms[:half]) + tree(terms[half:])
