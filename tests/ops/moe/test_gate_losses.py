"""The losses of a gate against loops and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gate_loops import added_up, hostile, logits, one

import cupy_fp8 as fp8
from cupy_fp8.formats import INPUT_DTYPES
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal


@pytest.mark.parametrize("sequences", [1, 4])
def test_load_balance(sequences, run):
    x, coeff = logits((40, 13)), 0.01
    gate = fp8.topk_gate(run.array(x), 3, sequences=sequences)
    loss, grad = fp8.load_balance_loss(gate, coeff)
    factor = np.float32(coeff * 13 / (3 * sequences * (40 // sequences) ** 2))
    counts, sums = run.numpy(gate.counts).astype(np.float32), run.numpy(gate.score_sums)
    assert_bytes_equal(run.numpy(grad), counts * factor)
    assert_bytes_equal(run.numpy(loss), np.array([factor * added_up((counts * sums).reshape(-1))]))


def test_an_even_load_costs_coeff():
    gate = fp8.topk_gate(np.eye(8, dtype=np.float32), 1, sequences=1)
    loss, _ = fp8.load_balance_loss(gate, 0.5)
    np.testing.assert_allclose(loss, 0.5, rtol=1e-6)


def test_large_counts(run):
    """Beyond 2^24 a count has more bits than f32."""
    counts = np.array([[1, 2**24 + 1, 2**24 + 3, 2**31 - 1, 0]], np.int32)
    slots = run.array(np.zeros((1, 1), np.int32)), run.array(np.zeros((1, 1), np.float32))
    sums = run.array(np.zeros(counts.shape, np.float32))
    gate = fp8.Gate(slots[0], slots[1], run.array(counts), score_sums=sums)
    _, grad = fp8.load_balance_loss(gate, 0.2)
    assert_bytes_equal(run.numpy(grad), counts.astype(np.float32) * np.float32(0.2 * 5))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_z_loss(dtype, run):
    for x in (logits((21, 13), dtype), hostile((21, 13), dtype), logits((0, 13), dtype)):
        loss, grad = fp8.z_loss(run.array(x), 0.3)
        want = _z_loss(x, 0.3)
        assert_bytes_equal(run.numpy(loss), want[0])
        assert_bytes_equal(run.numpy(grad), want[1])


def _z_loss(x: np.ndarray, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    gate: Any = fp8.topk_gate(x, 1, scores=True)
    slope, squares = np.float32(2 * coeff / max(1, len(x))), []
    grad = np.zeros(x.shape, np.float32)
    with np.errstate(all="ignore"):
        for t, row in enumerate(x.astype(np.float32)):
            numbers = row[~np.isnan(row)]
            m = max(numbers, default=-np.inf)
            z = np.float32(0)
            if np.isfinite(m):
                terms = [np.float32(0) if np.isnan(each) else one(numerics.exp, each - m) for each in row]
                z = np.float32(m + one(numerics.log, added_up(terms)))
            squares.append(np.float32(z * z))
            grad[t] = np.float32(slope * z) * gate.scores[t]
        loss = np.float32(np.float32(coeff / max(1, len(x))) * added_up(squares))
    return np.array([loss]), numerics.narrow(grad, x.dtype)


def test_against_float64():
    x = logits((64, 20))
    lse = np.log(np.exp(x.astype(np.float64)).sum(1))
    loss, grad = fp8.z_loss(x, 0.001)
    np.testing.assert_allclose(loss, 0.001 * (lse**2).mean(), rtol=1e-6)
    p = np.exp(x.astype(np.float64) - lse[:, None])
    np.testing.assert_allclose(grad, 0.002 / 64 * lse[:, None] * p, rtol=3e-6)


def test_gates_without_sums_are_refused():
    gate = fp8.topk_gate(logits((4, 5)), 2)
    with pytest.raises(ValueError, match=r"^gate: expected .* with sequences="):
        fp8.load_balance_loss(gate, 0.1)
    with pytest.raises(ValueError, match=r"score_grads: .*with sequences="):
        fp8.topk_gate_backward(gate.weights, logits((4, 5)), gate, score_grads=np.zeros((1, 5), np.float32))
