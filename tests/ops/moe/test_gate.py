"""The gate against loops over tokens, and what its users rely on."""

from __future__ import annotations

from typing import Any

import gate_loops
import numpy as np
import pytest
from gate_loops import INF, NAN, hostile, logits
from moe_arrays import noted
from tiers import where_kernels_run

import cupy_fp8 as fp8
from cupy_fp8.formats import INPUT_DTYPES
from cupy_fp8.gate import SCORES
from cupy_fp8.kernels import errors
from cupy_fp8.testing import assert_bytes_equal

WRONG = errors.MESSAGES[errors.Fact.GATE_EXPERT]


def exact_scores(x: np.ndarray, score: str) -> np.ndarray:
    return {"softmax": np.exp(x) / np.exp(x).sum(1, keepdims=True), "sigmoid": 1 / (1 + np.exp(-x)),
            "sqrtsoftplus": np.sqrt(np.log1p(np.exp(x)))}[score]


def expect(run: Any, x: np.ndarray, k: int, **options: Any) -> Any:
    """Compares all that the gate gives with the loops."""
    want = gate_loops.gated(x, k, **options)
    given = {name: run.array(each) if isinstance(each, np.ndarray) else each
             for name, each in options.items()}
    gate = fp8.topk_gate(run.array(x), k, scores=True, **given)
    for name, wanted in want.items():
        if (made := getattr(gate, name)) is not None:
            assert_bytes_equal(run.numpy(made), wanted)
    return gate


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_every_score(score, dtype, run):
    for experts, k in ((1, 1), (5, 5), (24, 3), (70, 8)):
        expect(run, logits((9, experts), dtype), k, score=score, sequences=3)
        expect(run, hostile((12, experts), dtype), k, score=score, normalize=False, factor=-1.5)


@pytest.mark.parametrize("score", SCORES)
def test_bias_and_groups(score, run):
    bias = logits((1, 24), seed=5)[0] / 4
    for x in (logits((9, 24)), hostile((12, 24))):
        expect(run, x, 5, score=score, bias=bias)
        expect(run, x, 5, score=score, bias=hostile((24, 1))[:, 0])
        for groups, kept in ((4, 1), (4, 2), (24, 5), (1, 1), (6, 5)):
            expect(run, x, 5, score=score, bias=bias, groups=groups, group_topk=kept)


def test_many_slots(run):
    for k in (31, 33, 64):
        expect(run, logits((3, 90)), k)
        expect(run, hostile((12, 90)), k, score="sigmoid")


def test_ties_go_to_the_smaller_index(run):
    gate = fp8.topk_gate(run.array(np.zeros((2, 40), np.float32)), 17)
    assert run.numpy(gate.indices).tolist() == [list(range(17))] * 2
    x = np.array([[1, 3, 2, 3, 3, 2]], np.float32)
    assert run.numpy(fp8.topk_gate(run.array(x), 5).indices).tolist() == [[1, 3, 4, 2, 5]]


def test_nan_is_never_chosen_and_minus_infinity_last(run):
    x = np.array([[NAN, 1, -INF, 2], [NAN] * 4, [-INF] * 4], np.float32)
    gate = fp8.topk_gate(run.array(x), 4, scores=True)
    assert run.numpy(gate.indices).tolist() == [[3, 1, 2, -1], [-1] * 4, [0, 1, 2, 3]]
    assert not run.numpy(gate.weights)[1:].any()
    assert not run.numpy(gate.scores)[1:].any()
    assert run.numpy(gate.counts).tolist() == [1, 2, 2, 2]


def test_the_bias_is_in_no_weight(run):
    x = logits((20, 16))
    for k, bias in ((16, logits((1, 16), seed=3)[0]), (2, np.where(np.arange(16) < 2, 9, 0))):
        gate = fp8.topk_gate(run.array(x), k, bias=run.array(np.asarray(bias, np.float32)),
                             normalize=False, scores=True)
        chosen = run.numpy(gate.indices)
        assert_bytes_equal(run.numpy(gate.weights), np.take_along_axis(run.numpy(gate.scores), chosen, 1))
        assert k == 16 or {*chosen.reshape(-1).tolist()} == {0, 1}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_replay(dtype, run):
    x = logits((30, 12))
    gate = fp8.topk_gate(run.array(x), 3, score="sigmoid", sequences=2)
    again = fp8.topk_gate(run.array(x), 3, score="sigmoid", sequences=2,
                          indices=run.array(run.numpy(gate.indices).astype(dtype)))
    assert_bytes_equal(again, gate)
    chosen = np.random.default_rng(0).integers(-1, 12, (30, 3)).astype(dtype)
    expect(run, x, 3, indices=chosen)
    assert not fp8.device_errors()


def test_replayed_experts_that_do_not_exist(run):
    x, wide = logits((4, 6)), np.array([[0, 6], [-2, 1], [2**40, -2**40], [5, 5]])
    expect(run, x, 2, indices=wide)
    noted(run, [WRONG])
    expect(run, x, 2, indices=np.clip(wide, -7, 7).astype(np.int32))
    noted(run, [WRONG])


@where_kernels_run
def test_a_result_that_is_written_again_counts_anew(run):
    """Counts and sums begin at zero in each call, whatever was there."""
    first, second = run.array(logits((70, 20))), run.array(logits((70, 20), seed=2))
    options: dict[str, Any] = {"scores": True, "sequences": 2}
    want = [fp8.topk_gate(x, 3, **options) for x in (first, second)]
    out = fp8.topk_gate(first, 3, **options)
    for x, wanted in ((second, want[1]), (first, want[0]), (first, want[0])):
        assert fp8.topk_gate(x, 3, out=out, **options) is out
        assert_bytes_equal(out, wanted)


@where_kernels_run
def test_a_token_does_not_depend_on_the_others(run):
    x = logits((67, 40))
    whole = fp8.topk_gate(run.array(x), 4)
    for some in (slice(0, 1), slice(33, 50), slice(66, 67)):
        part = fp8.topk_gate(run.array(x[some].copy()), 4)
        for name in ("indices", "weights"):
            assert_bytes_equal(run.numpy(getattr(part, name)), run.numpy(getattr(whole, name))[some])


@pytest.mark.parametrize("score", SCORES)
def test_against_float64(score):
    x = logits((50, 30)).astype(np.float64)
    exact = exact_scores(x, score)
    gate = fp8.topk_gate(x.astype(np.float32), 4, score=score, scores=True, sequences=1, factor=2.5)
    assert gate.scores is not None
    assert gate.score_sums is not None
    np.testing.assert_allclose(gate.scores, exact, rtol=1e-6)
    order = np.argsort(-exact, 1)[:, :4]
    assert np.array_equal(gate.indices, order)
    chosen = np.take_along_axis(exact, order, 1)
    np.testing.assert_allclose(gate.weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(gate.score_sums[0], (exact / exact.sum(1, keepdims=True)).sum(0), rtol=2e-6)


def test_experts_are_routed(run):
    gate = fp8.topk_gate(run.array(logits((40, 8))), 2)
    routing = fp8.route(gate.indices, num_experts=8, align=16)
    assert_bytes_equal(run.numpy(routing.splits), run.numpy(gate.counts))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients(score, normalize, run):
    grad, a = logits((12, 5), seed=8), logits((3, 24), seed=9)
    for x in (logits((12, 24)), hostile((12, 24))):
        for indices in (None, np.random.default_rng(0).integers(-1, 24, (12, 5)).astype(np.int32)):
            gate = fp8.topk_gate(run.array(x), 5, score=score, normalize=normalize, factor=1.5, sequences=3,
                                 indices=None if indices is None else run.array(indices))
            on_host = fp8.topk_gate(x, 5, score=score, normalize=normalize, factor=1.5, sequences=3,
                                    indices=indices)
            for sums in (None, a):
                given = None if sums is None else run.array(sums)
                made = fp8.topk_gate_backward(run.array(grad), run.array(x), gate, score_grads=given)
                assert_bytes_equal(run.numpy(made), gate_loops.gradient(grad, x, on_host, sums))


@pytest.mark.parametrize("score", SCORES)
def test_gradients_against_differences(score):
    """Of a function of weights and sums of scores, at float64."""
    x, k = logits((6, 10)), 3
    grad, a = logits((6, k), seed=8), logits((2, 10), seed=9)
    gate = fp8.topk_gate(x, k, score=score, factor=2, sequences=2)

    def loss(x: np.ndarray) -> float:
        s = exact_scores(x, score)
        chosen = np.take_along_axis(s, gate.indices, 1)
        shares = (s / s.sum(1, keepdims=True)).reshape(2, 3, 10).sum(1)
        return float((2 * chosen / chosen.sum(1, keepdims=True) * grad).sum() + (shares * a).sum())

    made, step = fp8.topk_gate_backward(grad, x, gate, score_grads=a), 1e-5
    for t, e in np.ndindex(x.shape):
        moved = np.zeros(x.shape)
        moved[t, e] = step
        exact = (loss(x + moved) - loss(x - moved)) / (2 * step)
        assert abs(made[t, e] - exact) < 2e-5
