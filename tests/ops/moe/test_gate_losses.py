"""The gate's gradient and its losses against loops over tokens, and against f64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gate_loops
import numpy as np
import pytest
from messages import poisoned
from moe_arrays import assert_equal, expect, normal
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float16, float32
from cupy_fp8.gate import SCORES

every_score = pytest.mark.parametrize("score", SCORES)
INF, NAN = np.inf, np.nan


def usual(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return typical numbers, without columns of large ones."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def expect_gradient(run: testing.Executor, grad: Any, logits: Any, made: fp8.Gate,
                    score_grads: Any = None) -> np.ndarray:
    want = gate_loops.backward(grad, logits, made, score_grads)
    given = {} if score_grads is None else {"score_grads": run.array(score_grads)}
    found = expect(run, want, fp8.topk_gate_backward, run.array(grad), run.array(logits), run.array(made),
                   **given, leads=(0, 4))
    return np.asarray(run.numpy(found))


def expect_z(run: testing.Executor, logits: np.ndarray, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    found = expect(run, gate_loops.z_loss(logits, coeff), fp8.z_loss, run.array(logits), coeff, leads=(0, 4))
    loss, grad = found
    return run.numpy(loss), run.numpy(grad)


def expect_balance(run: testing.Executor, made: fp8.Gate, coeff: float) -> tuple[np.ndarray, np.ndarray]:
    found = expect(run, gate_loops.balance(made, coeff), fp8.load_balance_loss, run.array(made), coeff,
                   leads=(0, 4))
    loss, grad = found
    return run.numpy(loss), run.numpy(grad)


# ---- the gradient of logits ----
@every_score
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_gradients(dtype, score, run):
    for (tokens, experts), k, sequences in (((37, 24), 3, 1), ((12, 33), 8, 4), ((40, 4), 1, 2)):
        for normalize in (True, False):
            x, grad = normal((tokens, experts), dtype), normal((tokens, k), seed=1)
            made = reference.topk_gate(x, k, score=score, normalize=normalize, factor=-1.5,
                                       sequences=sequences)
            expect_gradient(run, grad, x, made)
            expect_gradient(run, grad, x, made, normal((sequences, experts), seed=2))


@every_score
@pytest.mark.parametrize(("experts", "k"), quick_if(lambda at: at in {(1, 1), (1024, 64)}, [
    (1, 1), (32, 32), (33, 33), (64, 64), (200, 31), (513, 6), (1024, 64)]))
def test_gradients_of_many_experts_and_slots(experts, k, score, run):
    for x in (normal((4, experts)), usual((4, experts))):
        made = reference.topk_gate(x, k, score=score, sequences=2)
        expect_gradient(run, normal((4, k), seed=1), x, made, normal((2, experts), seed=2))


@every_score
def test_gradients_of_slots_with_one_expert(score, run):
    """They are added from the first slot on; experts of no slot get 0."""
    x, grad = normal((6, 50)), f32_of_orders((6, 40))
    indices = np.random.default_rng(0).integers(-1, 3, (6, 40)).astype(np.int32)
    for normalize in (True, False):
        made = reference.topk_gate(x, 40, score=score, indices=indices, normalize=normalize)
        found = expect_gradient(run, grad, x, made)
        assert score == "softmax" or not found[:, 3:].any()


def f32_of_orders(shape: tuple[int, ...]) -> np.ndarray:
    """Return values whose sums depend on the order."""
    return np.random.default_rng(1).choice(np.array([1e8, -1e8, 1, 3], np.float32), shape)


@every_score
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_gradients_of_nan_infinities_and_zeros(dtype, score, run):
    x = np.array([[NAN] * 5, [-INF] * 5, [INF] * 5, [NAN, -INF, NAN, -INF, NAN], [NAN, 1, -INF, 2, NAN],
                  [INF, 1, NAN, INF, -INF], [-0.0, 0, -0.0, 0, NAN], [-200, -300, 90, 200, -88]],
                 np.float32).astype(dtype)
    made = reference.topk_gate(x, 4, score=score, sequences=2)
    plain = dataclasses.replace(made, normalize=False)
    for grad in (normal((8, 4)), np.full((8, 4), -0.0, np.float32), np.full((8, 4), NAN, np.float32),
                 np.full((8, 4), INF, np.float32)):
        for each in (made, plain):
            for shares in (None, normal((2, 5), seed=1)):
                found = expect_gradient(run, grad, x, each, shares)
                assert not found[np.isnan(x)].view(f"u{x.itemsize}").any()


@every_score
@pytest.mark.parametrize("kind", ["bits", "edges"])
def test_gradients_of_any_bits(kind, score, run):
    for dtype in INPUT_DTYPES:
        x = cases.values(kind, (24, 21), np.dtype(dtype), 3)
        made = reference.topk_gate(x, 7, score=score, sequences=3)
        expect_gradient(run, cases.values(kind, (24, 7), np.dtype(float32), 4), x, made, cases.values(
            kind, (3, 21), np.dtype(float32), 5))


def differences(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the gradient of a sum over tokens, each of which depends only on its own row, by central
    differences."""
    found, step = np.zeros_like(x), 1e-5
    for e in range(x.shape[1]):
        moved = np.zeros_like(x)
        moved[:, e] = step
        found[:, e] = (function(x + moved) - function(x - moved)) / (2 * step)
    return found


def scores_f64(x: np.ndarray, score: str) -> np.ndarray:
    if score == "softmax":
        return np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return 1 / (1 + np.exp(-x)) if score == "sigmoid" else np.sqrt(np.logaddexp(0, x))


@every_score
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_against_differences_in_f64(score, normalize, run):
    """For the sum of weights times grad, and of normalised scores times their gradients."""
    x, grad, shares = usual((40, 12)), usual((40, 4), 1), usual((2, 12), 2)
    made = reference.topk_gate(x, 4, score=score, normalize=normalize, factor=2.5, sequences=2)
    found = run.numpy(fp8.topk_gate_backward(run.array(grad), run.array(x), run.array(made),
                                             score_grads=run.array(shares)))
    chosen = made.indices.astype(np.int64)

    def objective(at: np.ndarray) -> np.ndarray:
        s = scores_f64(at, score)
        r = np.take_along_axis(s, chosen, 1)
        weights = 2.5 * (r / r.sum(1, keepdims=True) if normalize else r)
        q = s / s.sum(1, keepdims=True)
        return np.asarray((weights * grad).sum(1) + (q * np.repeat(shares, 20, 0)).sum(1))

    np.testing.assert_allclose(found, differences(objective, x.astype(np.float64)), rtol=1e-4, atol=3e-6)


# ---- the loss of even loads ----
@every_score
@pytest.mark.parametrize(("tokens", "experts", "k", "sequences"), [
    (40, 8, 2, 1), (40, 8, 2, 5), (6, 300, 3, 3), (12, 256, 1, 1), (12, 257, 1, 1), (600, 3, 2, 600),
    (0, 8, 2, 2)])
def test_balance(tokens, experts, k, sequences, score, run):
    made = reference.topk_gate(normal((tokens, experts)), k, score=score, sequences=sequences)
    for coeff in (0.01, -3, 0, 1e30):
        expect_balance(run, made, coeff)


def test_balance_of_equal_loads_is_coeff(run):
    """Each expert has as many slots as the others, and an equal share."""
    made = reference.topk_gate(np.eye(8, dtype=np.float32).repeat(8, 0), 1, sequences=1)
    assert made.counts.tolist() == [[8] * 8]
    loss, grad = expect_balance(run, made, 0.01)
    np.testing.assert_allclose(loss, 0.01, rtol=1e-6)
    np.testing.assert_allclose(grad, 0.01 / 64, rtol=1e-6)


@every_score
def test_balance_against_f64(score, run):
    """coeff times the sum over experts of f[e] * P[e], the mean over sequences."""
    x = usual((60, 16))
    made = run.numpy(fp8.topk_gate(run.array(x), 2, score=score, sequences=3))
    loss, grad = expect_balance(run, made, 0.1)
    s = scores_f64(x.astype(np.float64), score)
    shares = (s / s.sum(1, keepdims=True)).reshape(3, 20, 16)
    loads = 16 / (2 * 20) * made.counts.astype(np.float64)
    np.testing.assert_allclose(loss, [0.1 * (loads * shares.mean(1)).sum(1).mean()], rtol=1e-6)
    np.testing.assert_allclose(grad, 0.1 * loads / 3 / 20, rtol=1e-6)


def test_counts_that_f32_rounds(run):
    """More than 2^24, to nearest even; negative ones, which no gate has, are 0."""
    counts = np.array([[2**24 + 1, 2**24 + 3, 2**31 - 1, 2**30 + 65, -5]], np.int32)
    made = fp8.Gate(np.zeros((5, 1), np.int32), np.zeros((5, 1), np.float32), counts, None,
                    np.ones((1, 5), np.float32))
    _, grad = expect_balance(run, made, 5.0)
    assert grad.tolist() == [[2**24, 2**24 + 4, 2**31, 2**30 + 128, 0]]


def test_sums_of_nan_and_infinities(run):
    for value in (NAN, INF, -INF, -0.0, 3e38):
        made = reference.topk_gate(usual((40, 300)), 300 // 5, sequences=2)
        sums: Any = np.array(made.score_sums)
        sums[1, 299] = value
        expect_balance(run, dataclasses.replace(made, score_sums=sums), 1.0)


# ---- the z-loss ----
@pytest.mark.parametrize("experts", quick_if((1, 33, 1024).__contains__,
                                             [1, 2, 8, 31, 33, 64, 200, 512, 1024]))
def test_z_loss(experts, run):
    for dtype in INPUT_DTYPES:
        expect_z(run, normal((21, experts), dtype), 0.001)
    expect_z(run, cases.values("bits", (21, experts), np.dtype(float32)), 1.0)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 33, 520])
def test_z_loss_of_tokens(tokens, run):
    for coeff in (1.0, -0.5, 3e38):
        loss, _ = expect_z(run, normal((tokens, 6), float16), coeff)
        assert tokens or loss.view(np.uint32) == 0


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_z_loss_of_nan_and_infinities(dtype, run):
    """A row without a number above -Inf counts as 0, and so does one with Inf; NaN is left out."""
    x = np.array([[NAN] * 3, [-INF] * 3, [1, INF, 2], [NAN, -INF, NAN], [NAN, 1, NAN], [2, -INF, NAN]],
                 np.float32).astype(dtype)
    loss, grad = expect_z(run, x, 6.0)
    assert loss.tolist() == [5.0]
    assert grad.astype(np.float32).tolist() == [[0] * 3] * 4 + [[0, 2, 0], [4, 0, 0]]


def test_z_loss_against_f64(run):
    x = np.concatenate([usual((100, 24)), usual((100, 24), 1) * np.float32(6) + np.float32(3)])
    loss, grad = expect_z(run, x, 0.5)

    def squares(at: np.ndarray) -> np.ndarray:
        return np.asarray(0.5 / 200 * np.log(np.exp(at).sum(1)) ** 2)

    exact = x.astype(np.float64)
    np.testing.assert_allclose(loss, [squares(exact).sum()], rtol=1e-6)
    np.testing.assert_allclose(grad, differences(squares, exact), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("experts", [2, 24, 1024])
def test_the_rest_of_a_batch_changes_no_gradient(experts, run):
    """Except through the number of tokens, which a coefficient compensates if it is a power of two."""
    x, grad = normal((64, experts), bfloat16), normal((64, 2), seed=1)
    made = run.array(reference.topk_gate(x, 2, score="sigmoid"))
    whole = run.numpy(fp8.topk_gate_backward(run.array(grad), run.array(x), made))
    of_z = run.numpy(fp8.z_loss(run.array(x), 1.0)[1])
    for first in (0, 32, 48):
        part = slice(first, first + 16)
        some = run.array(reference.topk_gate(x[part].copy(), 2, score="sigmoid"))
        assert_equal(run.numpy(fp8.topk_gate_backward(run.array(grad[part].copy()), run.array(x[part].copy()),
                                                      some)), whole[part].copy())
        assert_equal(run.numpy(fp8.z_loss(run.array(x[part].copy()), 0.25)[1]), of_z[part].copy())


# ---- what a call leaves ----
def test_the_same_results_again(run):
    """Block counters are zero again, however many blocks there were."""
    gates = [reference.topk_gate(normal((60, experts)), 2, sequences=s)
             for experts, s in ((300, 20), (8, 1), (300, 2))]
    logits = [normal(shape) for shape in ((500, 8), (3, 8), (90, 300))]
    made: list[tuple[Any, Any, Any]] = [
        (fp8.load_balance_loss, run.array(g), reference.load_balance_loss(g, 0.1)) for g in gates]
    made += [(fp8.z_loss, run.array(x), reference.z_loss(x, 0.1)) for x in logits]
    outs = [op(given, 0.1) for op, given, _ in made]
    for _ in range(3):
        for (op, given, want), out in zip(made, outs, strict=True):
            poisoned(out)
            assert op(given, 0.1, out=out) is out
            assert_equal(run.numpy(out), want)


@needs_host
@pytest.mark.full
def test_running_sums_of_many_blocks():
    """More blocks than a block has threads."""
    x, made = normal((70_000, 2)), reference.topk_gate(usual((600, 256)), 1, sequences=600)
    with testing.executor("host"):
        assert_equal(fp8.z_loss(x, 1.0), reference.z_loss(x, 1.0))
        assert_equal(fp8.load_balance_loss(made, 1.0), reference.load_balance_loss(made, 1.0))


@pytest.mark.gpu
def test_many_tokens_on_a_gpu():
    x, grad = normal((70_000, 256), bfloat16), normal((70_000, 8), seed=1)
    made = reference.topk_gate(x, 8, sequences=70)
    want = (reference.z_loss(x, 0.1), reference.load_balance_loss(made, 0.1),
            reference.topk_gate_backward(grad, x, made))
    with testing.executor("cuda") as run:
        there, gate = run.array(x), run.array(made)
        for _ in range(10):
            assert_equal(fp8.z_loss(there, 0.1), want[0])
            assert_equal(fp8.load_balance_loss(gate, 0.1), want[1])
            assert_equal(fp8.topk_gate_backward(run.array(grad), there, gate), want[2])
