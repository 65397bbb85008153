"""The gate and its gradient as loops over tokens, written down from docs/numerics.md, section 14."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from moe_loops import tree

from cupy_fp8.formats import float32
from cupy_fp8.reference import numerics

ZERO, EPSILON, LOWEST = np.float32(0), np.float32(1e-20), -math.inf
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def logits(shape: tuple[int, int], dtype: Any = float32, seed: int = 0) -> np.ndarray:
    return numerics.narrow(np.random.default_rng(seed).standard_normal(shape, np.float32) * 2, dtype)


def hostile(shape: tuple[int, int], dtype: Any = float32) -> np.ndarray:
    """Ties, NaN, both infinities, very large and small logits, and rows of nothing else."""
    drawn = np.random.default_rng(1).integers(0, 12, shape)
    special = np.array([NAN, -INF, INF, 88, -120, 3e38, -0.0, 1e-45, 0, 1, 1, 0.5], np.float32)[drawn]
    special[0], special[1], special[2, 1:] = NAN, -INF, NAN
    special[3, ::2] = NAN
    special[4:7] = np.where(special[4:7] == INF, 2, special[4:7])
    return numerics.narrow(special, dtype)


def added_up(terms: Sequence[Any]) -> np.float32:
    return np.float32(tree(list(terms))) if len(terms) else ZERO


def one(function: Any, value: Any) -> np.float32:
    """A function of numerics of one number."""
    return np.float32(function(np.array([value], np.float32))[0])


def scores(logits: np.ndarray, score: str) -> list[np.float32]:
    """Of one token, with numbers that are f32."""
    numbers = [each for each in logits if not math.isnan(each)]
    if score == "softmax":
        largest = max(numbers, default=LOWEST)
        x = [_exponential(each, largest) for each in logits]
        total = added_up(x)
        return [each if each == 0 else np.float32(each / total) for each in x]
    if score == "sigmoid":
        return [ZERO if math.isnan(each) else one(numerics.sigmoid, each) for each in logits]
    return [ZERO if math.isnan(each) else np.sqrt(np.float32(
        max(each, ZERO) + one(numerics.log1p, one(numerics.exp, -abs(each))))) for each in logits]


def _exponential(each: np.float32, largest: Any) -> np.float32:
    if math.isnan(each) or each == LOWEST:
        return ZERO
    return np.float32(1) if each == largest else one(numerics.exp, np.float32(each - largest))


def selected(logits: np.ndarray, s: list[np.float32], k: int, bias: np.ndarray | None, groups: int | None,
             group_topk: int | None) -> list[int]:
    c: dict[int, float] = {}
    for e, each in enumerate(logits):
        if not math.isnan(each):
            value = s[e] if bias is None else np.float32(s[e] + bias[e])
            c[e] = LOWEST if each == LOWEST else float(value)
    c = {e: value for e, value in c.items() if not math.isnan(value)}
    if groups is not None:
        size, terms = len(logits) // groups, k // int(group_topk or 1)
        kept = best({g: _of_group([c.get(e, LOWEST) for e in range(g * size, g * size + size)], terms)
                     for g in range(groups)}, int(group_topk or 1))
        c = {e: value for e, value in c.items() if e // size in kept}
    found = best(c, k)
    return found + [-1] * (k - len(found))


def best(c: dict[int, float], k: int) -> list[int]:
    """Of equal ones the first, one after the other."""
    left = dict(c)
    found: list[int] = []
    while left and len(found) < k:
        largest = max(left.values())
        found.append(min(e for e, value in left.items() if value == largest))
        del left[found[-1]]
    return found


def _of_group(c: list[float], terms: int) -> float:
    total = np.float32(sorted(c, reverse=True)[0])
    for term in sorted(c, reverse=True)[1:terms]:
        total = np.float32(total + np.float32(term))
    return LOWEST if math.isnan(total) else float(total)


def weighted(r: list[np.float32], normalize: bool, factor: float) -> list[np.float32]:
    divisor = np.float32(added_up(r) + EPSILON)
    return [np.float32(np.float32(each / divisor if normalize else each) * np.float32(factor)) for each in r]


def gated(logits: np.ndarray, k: int, *, score: str = "softmax", bias: np.ndarray | None = None,
          groups: int | None = None, group_topk: int | None = None, normalize: bool = True,
          factor: float = 1.0, indices: np.ndarray | None = None, sequences: int | None = None
          ) -> dict[str, np.ndarray]:
    """indices, weights, counts, scores, and score_sums of sequences."""
    tokens, experts = logits.shape
    values = logits.astype(np.float32)
    with np.errstate(all="ignore"):
        s = [scores(row, score) for row in values]
        chosen = [[e if 0 <= e < experts else -1 for e in indices[t].tolist()] if indices is not None
                  else selected(values[t], s[t], k, bias, groups, group_topk) for t in range(tokens)]
        r = [[s[t][e] if e >= 0 else ZERO for e in chosen[t]] for t in range(tokens)]
        weights = [weighted(each, normalize, factor) for each in r]
        number = sequences or 1
        counts = np.zeros((number, experts), np.int32)
        for t, slots in enumerate(chosen):
            for e in slots:
                counts[t // (tokens // number), e] += e >= 0
        q = s if score == "softmax" else [[each / np.float32(added_up(row) + EPSILON) for each in row]
                                          for row in s]
        sums = [[added_up([q[t][e] for t in range(i * tokens // number, (i + 1) * tokens // number)])
                 for e in range(experts)] for i in range(number)]
    shaped = np.array(weights, np.float32).reshape(tokens, k)
    return {"indices": np.array(chosen, np.int32).reshape(tokens, k), "weights": numerics.one_nan(shaped),
            "counts": counts if sequences else counts[0],
            "scores": np.array(s, np.float32).reshape(tokens, experts),
            "score_sums": numerics.one_nan(np.array(sums, np.float32))}


def gradient(grad: np.ndarray, logits: np.ndarray, gate: Any, a: np.ndarray | None = None) -> np.ndarray:
    """a: gradients of score_sums."""
    values, found = logits.astype(np.float32), np.zeros(logits.shape, np.float32)
    with np.errstate(all="ignore"):
        for t, row in enumerate(values):
            of_sums = None if a is None else a[t // (len(values) // len(a))]
            s = scores(row, gate.score)
            h = _of_scores(grad[t], gate.indices[t].tolist(), s, gate, of_sums)
            total = added_up([np.float32(x * y) for x, y in zip(h, s, strict=True)])
            found[t] = [_of_logit(*each, total, gate.score) for each in zip(row, s, h, strict=True)]
    return numerics.narrow(found, logits.dtype)


def _of_scores(grad: np.ndarray, slots: list[int], s: list[np.float32], gate: Any, a: np.ndarray | None
               ) -> list[np.float32]:
    d = [np.float32(g * np.float32(gate.factor)) if e >= 0 else ZERO
         for g, e in zip(grad, slots, strict=True)]
    if gate.normalize:
        d = through_sum(d, [s[e] if e >= 0 else ZERO for e in slots])
    h = [ZERO] * len(s)
    for e, each in zip(slots, d, strict=True):
        if e >= 0:
            h[e] = np.float32(h[e] + each)
    if a is None:
        return h
    shares = list(a) if gate.score == "softmax" else through_sum(list(a), s)
    return [np.float32(x + y) for x, y in zip(h, shares, strict=True)]


def through_sum(grads: list[np.float32], values: list[np.float32]) -> list[np.float32]:
    """Gradients of values from those of values / (their sum + 1e-20)."""
    divisor = np.float32(added_up(values) + EPSILON)
    total = added_up([np.float32(g * np.float32(v / divisor)) for g, v in zip(grads, values, strict=True)])
    return [np.float32(np.float32(g - total) / divisor) for g in grads]


def _of_logit(logit: np.float32, s: np.float32, h: np.float32, total: np.float32, score: str) -> np.float32:
    if math.isnan(logit):
        return ZERO
    if score == "softmax":
        return np.float32(s * np.float32(h - total))
    if score == "sigmoid":
        return np.float32(h * np.float32(s * np.float32(np.float32(1) - s)))
    half = np.float32(np.float32(0.5) * one(numerics.sigmoid, logit))
    return ZERO if s == 0 else np.float32(h * np.float32(half / s))
