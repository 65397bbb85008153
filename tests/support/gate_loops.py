"""The gate, its gradient and its losses, token by token in loops over f32 scalars: docs/numerics.md, section
14. Uses only the package's functions of one number, which tests/numerics compares with f64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from moe_loops import tree

from cupy_fp8 import Gate
from cupy_fp8.formats import float32
from cupy_fp8.reference.numerics import exp, log, log1p, narrow, sigmoid, widen

F = np.float32
ZERO, ONE, EPSILON, INF = F(0), F(1), F(1e-20), F(np.inf)
Numbers = Sequence[Any]


def _each(function: Callable[..., Any], row: Numbers) -> list[Any]:
    return list(np.asarray(function(np.array(row, F)), F))


# ---- scores ----
def terms(logits: Numbers) -> tuple[Any, list[Any]]:
    """Return m and x of softmax; m is -Inf if no logit is a number."""
    numbers = [v for v in logits if not np.isnan(v)]
    m = max(numbers, default=-INF)
    x = _each(exp, [v - m if np.isfinite(v) and np.isfinite(m) else -INF for v in logits])
    return m, [ONE if v == m == INF else term for v, term in zip(logits, x, strict=True)]


def scores(logits: Numbers, score: str) -> list[Any]:
    if score == "softmax":
        _, x = terms(logits)
        total = tree(x)
        return [ZERO if term == 0 else term / total for term in x]
    if score == "sigmoid":
        found = _each(sigmoid, logits)
    else:
        small = _each(log1p, _each(exp, [-abs(v) for v in logits]))
        found = [np.sqrt((v if v > 0 else ZERO) + rest) for v, rest in zip(logits, small, strict=True)]
    return [ZERO if np.isnan(v) else s for v, s in zip(logits, found, strict=True)]


def shares(s: list[Any], score: str) -> list[Any]:
    return s if score == "softmax" else [each / (tree(s) + EPSILON) for each in s]


# ---- selection ----
def best(values: dict[int, Any], k: int) -> list[int]:
    """Return the k keys with the largest values (smaller keys first among equals), or fewer."""
    left = dict(values)
    found: list[int] = []
    while left and len(found) < k:
        largest = max(left.values())
        found.append(min(key for key, value in left.items() if value == largest))
        del left[found[-1]]
    return found


def candidates(logits: Numbers, s: list[Any], bias: np.ndarray | None) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for expert, (v, each) in enumerate(zip(logits, s, strict=True)):
        c = -INF if v == -INF else each if bias is None else each + bias[expert]
        if not np.isnan(v) and not np.isnan(c):
            found[expert] = c
    return found


def select(c: dict[int, Any], experts: int, k: int, groups: int | None, group_topk: int | None) -> list[int]:
    if groups is not None and group_topk is not None:
        size, count = experts // groups, k // group_topk
        of_groups = {}
        for group in range(groups):
            own = sorted((v for e, v in c.items() if e // size == group), reverse=True)[:count]
            own += [-INF] * (count - len(own))
            total = own[0]
            for term in own[1:]:
                total = total + term
            of_groups[group] = -INF if np.isnan(total) else total
        kept = best(of_groups, group_topk)
        c = {e: v for e, v in c.items() if e // size in kept}
    found = best(c, k)
    return found + [-1] * (k - len(found))


# ---- the ops ----
def gate(logits: Any, k: int, *, score: str = "softmax", bias: Any = None, groups: int | None = None,
         group_topk: int | None = None, normalize: bool = True, factor: float = 1.0, indices: Any = None,
         with_scores: bool = False, sequences: int | None = None) -> Gate:
    rows, (tokens, experts) = widen(logits), logits.shape
    chosen, weights = np.zeros((tokens, k), np.int32), np.zeros((tokens, k), F)
    counts = np.zeros((sequences or 1, experts), np.int32)
    all_scores = np.zeros((tokens, experts), F)
    of_sequences: list[list[Any]] = [[] for _ in range(sequences or 1)]
    length = tokens // (sequences or 1)
    with np.errstate(all="ignore"):
        for token in range(tokens):
            row = list(rows[token])
            s = scores(row, score)
            if indices is None:
                own = select(candidates(row, s, bias), experts, k, groups, group_topk)
            else:
                own = [int(e) if 0 <= e < experts else -1 for e in indices[token]]
            r = [s[e] if e >= 0 else ZERO for e in own]
            divisor = tree(r) + EPSILON if normalize else ONE
            chosen[token], weights[token] = own, [each / divisor * F(factor) for each in r]
            for e in own:
                if e >= 0:
                    counts[token // length, e] += 1
            all_scores[token] = s
            of_sequences[token // length].append(shares(s, score))
        sums = [[tree(list(column)) for column in zip(*q, strict=True)] if q else [ZERO] * experts
                for q in of_sequences]
    return Gate(chosen, narrow(weights, float32), counts if sequences else counts[0],
                all_scores if with_scores else None,
                narrow(np.array(sums, F), float32) if sequences else None, score, normalize, factor)


def backward(grad: Any, logits: Any, made: Gate, score_grads: Any = None) -> np.ndarray:
    rows, (tokens, experts) = widen(logits), logits.shape
    out, factor = np.zeros((tokens, experts), F), F(made.factor)
    with np.errstate(all="ignore"):
        for token in range(tokens):
            row, own = list(rows[token]), made.indices[token]
            s = scores(row, made.score)
            h = _of_slots(list(grad[token]), own, s, factor, made.normalize)
            if score_grads is not None:
                a = _of_shares(list(score_grads[token // (tokens // len(score_grads))]), s, made.score)
                h = [each + more for each, more in zip(h, a, strict=True)]
            out[token] = [ZERO if np.isnan(v) else d
                          for v, d in zip(row, _of_logits(row, s, h, made.score), strict=True)]
    return narrow(out, logits.dtype)


def _of_slots(grad: list[Any], own: np.ndarray, s: list[Any], factor: Any, normalize: bool) -> list[Any]:
    u = [g * factor if e >= 0 else ZERO for g, e in zip(grad, own, strict=True)]
    r = [s[e] if e >= 0 else ZERO for e in own]
    d = u
    if normalize:
        total = tree(r) + EPSILON
        through = tree([a * (b / total) for a, b in zip(u, r, strict=True)])
        d = [(each - through) / total for each in u]
    h = [ZERO] * len(s)
    for each, e in zip(d, own, strict=True):
        if e >= 0:
            h[e] = h[e] + each
    return h


def _of_shares(a: list[Any], s: list[Any], score: str) -> list[Any]:
    if score == "softmax":
        return a
    total = tree(s) + EPSILON
    through = tree([each * (own / total) for each, own in zip(a, s, strict=True)])
    return [(each - through) / total for each in a]


def _of_logits(row: list[Any], s: list[Any], h: list[Any], score: str) -> list[Any]:
    if score == "softmax":
        through = tree([a * b for a, b in zip(h, s, strict=True)])
        return [own * (each - through) for own, each in zip(s, h, strict=True)]
    if score == "sigmoid":
        return [each * (own * (ONE - own)) for own, each in zip(s, h, strict=True)]
    slopes = _each(sigmoid, row)
    return [ZERO if own == 0 else each * (F(0.5) * slope / own)
            for own, each, slope in zip(s, h, slopes, strict=True)]


def balance(made: Gate, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    assert made.score_sums is not None
    (tokens, k), (sequences, experts) = made.indices.shape, made.counts.shape
    length = tokens // sequences
    with np.errstate(all="ignore"):
        f = F(coeff * experts / (k * sequences * length**2) if length else 0)
        counts = [F(max(count, 0)) for count in made.counts.ravel()]
        loss = f * tree([a * b for a, b in zip(counts, made.score_sums.ravel(), strict=True)])
        grad = np.array([f * count for count in counts], F).reshape(sequences, experts)
    return narrow(np.array([loss], F), float32), grad


def z_loss(logits: Any, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    rows, grad, squares = widen(logits), np.zeros(logits.shape, F), []
    tokens = max(1, len(rows))
    with np.errstate(all="ignore"):
        for token, row in enumerate(rows):
            m, x = terms(list(row))
            z = m + log(np.array([tree(x)], F))[0] if np.isfinite(m) else ZERO
            squares.append(z * z)
            grad[token] = [F(2 * coeff / tokens) * z * p for p in scores(list(row), "softmax")]
        loss = F(coeff / tokens) * tree(squares) if squares else ZERO
    return narrow(np.array([loss], F), float32), narrow(grad, logits.dtype)
