"""References of cupy_fp8.ops.moe.gate and gate_losses (docs/numerics.md, section 14)."""

from __future__ import annotations

import numpy as np

from ...formats import float32
from ...gate import Gate
from .. import numerics
from ..numerics import F32_ONE, add, div, mul, sub, tree_sum

#: added to sums of scores before dividing by them
_EPSILON = np.float32(1e-20)


def topk_gate(logits: np.ndarray, k: int, *, score: str = "softmax", bias: np.ndarray | None = None,
              groups: int | None = None, group_topk: int | None = None, normalize: bool = True,
              factor: float = 1.0, indices: np.ndarray | None = None, return_scores: bool = False,
              sequences: int | None = None) -> Gate:
    tokens, experts = logits.shape
    values = np.ascontiguousarray(numerics.widen(logits))
    s = _scores(values, score)
    if indices is None:
        chosen = _largest(_selected_by(values, s, bias, groups, group_topk, k), k)
    else:
        chosen = np.where((indices >= 0) & (indices < experts), indices, -1).astype(np.int32, order="C")
    counts = np.zeros((sequences or 1, experts), np.int32)
    token, slot = np.nonzero(chosen >= 0)
    length = max(1, tokens // (sequences or 1))
    np.add.at(counts, (token // length, chosen[token, slot]), 1)
    return Gate(chosen, _weights(_of_slots(s, chosen), normalize, factor),
                counts if sequences else counts[0], s if return_scores else None,
                _by_sequence(_shares(s, score), sequences) if sequences else None, score, normalize, factor)


def topk_gate_backward(grad: np.ndarray, logits: np.ndarray, gate: Gate, *,
                       score_grads: np.ndarray | None = None) -> np.ndarray:
    values = np.ascontiguousarray(numerics.widen(logits))
    s = _scores(values, gate.score)
    chosen = np.asarray(gate.indices)
    r = _of_slots(s, chosen)
    with np.errstate(under="ignore"):
        d = np.where(chosen >= 0, mul(grad, np.float32(gate.factor)), np.float32(0))
    if gate.normalize:
        total = add(tree_sum(r, 1), _EPSILON)[:, None]
        d = div(sub(d, tree_sum(mul(d, div(r, total)), 1)[:, None]), total)
    h = np.zeros_like(s)
    row = np.arange(len(s))
    for slot in range(chosen.shape[1]):
        there = chosen[:, slot] >= 0
        at = row[there], chosen[there, slot]
        h[at] = add(h[at], d[there, slot])
    if score_grads is not None:
        h = add(h, _through_shares(s, np.repeat(score_grads, len(s) // max(1, len(score_grads)), axis=0),
                                   gate.score))
    if gate.score == "softmax":
        found = mul(s, sub(h, tree_sum(mul(h, s), 1)[:, None]))
    elif gate.score == "sigmoid":
        found = mul(h, mul(s, sub(F32_ONE, s)))
    else:
        half = mul(numerics.sigmoid(values), np.float32(0.5))
        found = np.where(s == 0, np.float32(0), mul(h, div(half, s)))
    return numerics.narrow(np.where(np.isnan(values), np.float32(0), found), logits.dtype)


def load_balance_loss(gate: Gate, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    assert gate.score_sums is not None
    factor = balance_factor(gate, coeff)
    counts = np.maximum(np.asarray(gate.counts), 0).astype(np.float32)
    terms = mul(counts, gate.score_sums).reshape(-1)
    loss = numerics.one_nan(mul(tree_sum(terms, 0), factor))
    return loss.reshape(1), numerics.one_nan(mul(counts, factor))


def balance_factor(gate: Gate, coeff: float) -> np.float32:
    """coeff * E / (k * S * L * L) for S sequences of L tokens."""
    (tokens, k), (sequences, experts) = gate.indices.shape, gate.counts.shape
    length = tokens // sequences
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(coeff * experts / (k * sequences * length * length) if length else 0.0)


def z_loss(logits: np.ndarray, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    values = np.ascontiguousarray(numerics.widen(logits))
    largest, x = _exponentials(values)
    total = tree_sum(x, 1)
    z = add(largest, numerics.log(np.where(total > 0, total, F32_ONE)))
    z = np.where(np.isfinite(largest), z, np.float32(0))
    mean, slope = z_factors(len(logits), coeff)
    loss = numerics.one_nan(mul(tree_sum(mul(z, z), 0), mean))
    grad = mul(mul(z, slope)[:, None], _softmax(x))
    return loss.reshape(1), numerics.narrow(grad, logits.dtype)


def z_factors(tokens: int, coeff: float) -> tuple[np.float32, np.float32]:
    """coeff / T and 2 * coeff / T; 0 without tokens."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(coeff / tokens if tokens else 0), np.float32(2 * coeff / tokens if tokens else 0)


# ---- scores ----
def _exponentials(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(max, exp(l - max)) for each row of logits."""
    numbers = np.where(np.isnan(values), np.float32(-np.inf), values)
    largest = numbers.max(axis=1, initial=np.float32(-np.inf))
    difference = sub(values, largest[:, None])
    x = numerics.exp(difference)
    return largest, np.where(np.isnan(difference), (values == np.inf).astype(float32), x)


def _softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(x == 0, np.float32(0), div(x, tree_sum(x, 1)[:, None]))


def _scores(values: np.ndarray, score: str) -> np.ndarray:
    if score == "softmax":
        return _softmax(_exponentials(values)[1])
    if score == "sigmoid":
        s = numerics.sigmoid(values)
    else:
        small = numerics.log1p(np.asarray(numerics.exp(-np.abs(values))))
        s = numerics.sqrt(add(np.where(values > 0, values, np.float32(0)), small))
    return np.where(np.isnan(values), np.float32(0), s)


def _shares(s: np.ndarray, score: str) -> np.ndarray:
    """Return scores normalised to a sum of one; the auxiliary loss uses their mean."""
    return s if score == "softmax" else div(s, add(tree_sum(s, 1), _EPSILON)[:, None])


def _through_shares(s: np.ndarray, grads: np.ndarray, score: str) -> np.ndarray:
    """Return gradients of the scores from those of the normalised scores."""
    if score == "softmax":
        return grads
    total = add(tree_sum(s, 1), _EPSILON)[:, None]
    return div(sub(grads, tree_sum(mul(grads, div(s, total)), 1)[:, None]), total)


def _by_sequence(q: np.ndarray, sequences: int) -> np.ndarray:
    """Return the sums over the tokens of each sequence."""
    return tree_sum(q.reshape(sequences, -1 if q.size else 0, q.shape[1]), 1)


# ---- selection ----
def _selected_by(values: np.ndarray, s: np.ndarray, bias: np.ndarray | None, groups: int | None,
                 group_topk: int | None, k: int) -> np.ndarray:
    """Return the values that selection compares; NaN: not a candidate."""
    c = s if bias is None else add(s, bias)
    c = np.where(values == -np.inf, np.float32(-np.inf), c)
    c = np.where(np.isnan(values), np.float32(np.nan), c)
    if groups is None or group_topk is None:
        return c
    of_groups = c.reshape(len(c), groups, -1)
    descending = -np.sort(np.where(np.isnan(of_groups), np.inf, -of_groups), axis=2)
    of_group = descending[:, :, 0].astype(np.float32)
    for term in range(1, k // group_topk):
        of_group = add(of_group, descending[:, :, term])
    of_group = np.where(np.isnan(of_group), np.float32(-np.inf), of_group)
    kept = np.zeros(of_group.shape, bool)
    np.put_along_axis(kept, _largest(of_group, group_topk), True, 1)
    return np.where(np.repeat(kept, of_groups.shape[2], axis=1), c, np.float32(np.nan))


def _largest(c: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest of each row, the first of equal ones first; -1 where only NaN is
    left."""
    order = np.argsort(-c, axis=1, kind="stable")[:, :k]            # NaN sorts last
    return np.where(np.isnan(np.take_along_axis(c, order, 1)), -1, order).astype(np.int32)


def _of_slots(s: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.where(chosen >= 0, np.take_along_axis(s, np.maximum(chosen, 0).astype(np.int64), 1),
                    np.float32(0))


def _weights(r: np.ndarray, normalize: bool, factor: float) -> np.ndarray:
    if normalize:
        r = div(r, add(tree_sum(r, 1), _EPSILON)[:, None])
    return numerics.one_nan(mul(r, np.float32(factor)))
