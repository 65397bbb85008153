"""The gate against loops over tokens: scores, bias, groups, ties, NaN and infinities, given indices, sums by
sequence; common properties of its results; and what a call leaves."""

from __future__ import annotations

from typing import Any

import gate_loops
import numpy as np
import pytest
from messages import poisoned
from moe_arrays import assert_equal, expect, normal, noted
from tiers import needs_host, quick_if

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float16, float32
from cupy_fp8.gate import SCORES
from cupy_fp8.kernels import errors

EXPERT = errors.MESSAGES[errors.Fact.GATE_EXPERT]
every_score = pytest.mark.parametrize("score", SCORES)
INF, NAN = np.inf, np.nan


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def usual(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return typical logits, without columns of large ones."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def expect_gate(run: testing.Executor, logits: np.ndarray, k: int, leads: tuple[int, ...] = (0, 4),
                return_scores: bool = False, **options: Any) -> fp8.Gate:
    """Check against the loops, in a new result and in given ones."""
    want = gate_loops.gate(logits, k, with_scores=return_scores, **options)
    there: dict[str, Any] = {name: run.array(a) if isinstance(a, np.ndarray) else a
                             for name, a in options.items()}
    made: fp8.Gate = expect(run, want, fp8.topk_gate, run.array(logits), k, return_scores=return_scores,
                            **there, leads=leads)
    return run.numpy(made)


# ---- values ----
@every_score
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_scores_and_sums(dtype, score, run):
    for (tokens, experts), k, sequences in (((37, 24), 3, 1), ((12, 33), 8, 4), ((40, 4), 1, 2)):
        x = normal((tokens, experts), dtype)
        expect_gate(run, x, k, score=score, return_scores=True, sequences=sequences)
        expect_gate(run, x, k, score=score, normalize=False, factor=2.5)


@every_score
@pytest.mark.parametrize(("experts", "k"), quick_if(lambda at: at in {(1, 1), (200, 33)}, [
    (1, 1), (2, 2), (31, 31), (32, 32), (33, 8), (64, 64), (65, 64), (200, 33), (512, 6), (600, 64),
    (1024, 1), (1024, 64)]))
def test_many_experts_and_slots(experts, k, score, run):
    for x in (normal((5, experts)), usual((5, experts))):
        expect_gate(run, x, k, score=score, sequences=1, return_scores=True)


@every_score
def test_a_bias_chooses_and_is_in_no_weight(score, run):
    x, bias = normal((30, 20), seed=1), normal((20,), seed=2)
    found = expect_gate(run, x, 4, score=score, bias=bias)
    assert not np.array_equal(found.indices, reference.topk_gate(x, 4, score=score).indices)
    assert_equal(fp8.topk_gate(x, 4, score=score, indices=found.indices).weights, found.weights)
    expect_gate(run, x, 4, score=score, bias=f32([NAN, INF, -INF, -0.0] * 5), return_scores=True)


@every_score
@pytest.mark.parametrize(("experts", "groups", "group_topk", "k"), [
    (16, 4, 2, 4), (16, 4, 2, 5), (24, 24, 3, 3), (24, 1, 1, 5), (60, 3, 1, 20), (33, 11, 4, 9)])
def test_groups(experts, groups, group_topk, k, score, run):
    for x in (normal((19, experts)), np.round(normal((19, experts)))):
        expect_gate(run, x, k, score=score, groups=groups, group_topk=group_topk)
        expect_gate(run, x, k, score=score, groups=groups, group_topk=group_topk,
                    bias=normal((experts,), seed=3))


def test_groups_by_hand(run):
    """Group scores are 3 + 0, 2 + 2 and 2.5 + 1: by one expert the first is best, by two the second."""
    bias, x = f32([3, 0, 2, 2, 2.5, 1]), run.array(np.full((1, 6), -200, np.float32))
    given = run.array(bias)

    def chosen(k: int, kept: int) -> Any:
        return fp8.asnumpy(fp8.topk_gate(x, k, score="sigmoid", bias=given, groups=3, group_topk=kept)
                           .indices).tolist()

    assert chosen(1, 1) == [[0]]
    assert chosen(2, 1) == [[2, 3]]
    assert chosen(2, 2) == [[0, 4]]
    assert chosen(4, 2) == [[4, 2, 3, 5]]


@every_score
def test_ties_go_to_the_smaller_index(score, run):
    x = f32([[1] * 40, [0, 2] * 20, [-3] * 39 + [5]])
    found = expect_gate(run, x, 6, score=score)
    assert found.indices.tolist() == [[0, 1, 2, 3, 4, 5], [1, 3, 5, 7, 9, 11], [39, 0, 1, 2, 3, 4]]
    found = expect_gate(run, x, 4, score=score, groups=8, group_topk=2)
    assert found.indices.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7], [39, 0, 1, 2]]


def test_different_logits_may_have_equal_scores(run):
    """sigma is 1 from 17.4 on: the smaller index is chosen, although its logit is smaller."""
    found = expect_gate(run, f32([[20, 90, 30, 1]]), 2, score="sigmoid")
    assert found.indices.tolist() == [[0, 1]]


@every_score
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_nan_and_infinities(dtype, score, run):
    x = np.array([[NAN] * 5, [-INF] * 5, [INF] * 5, [NAN, -INF, NAN, -INF, NAN], [NAN, 1, -INF, 2, NAN],
                  [INF, 1, NAN, INF, -INF], [NAN] * 4 + [-INF], [-0.0, 0, -0.0, 0, NAN],
                  [-200, -300, 90, 200, -88]], np.float32).astype(dtype)
    found = expect_gate(run, x, 4, score=score, return_scores=True, sequences=3)
    want = [[-1] * 4, [0, 1, 2, 3], [0, 1, 2, 3], [1, 3, -1, -1], [3, 1, 2, -1], [0, 3, 1, 4],
            [4, -1, -1, -1], [0, 1, 2, 3]]
    assert found.indices.tolist()[:8] == want
    assert not found.weights[:2].any()
    for k, options in ((4, {"normalize": False}), (4, {"bias": f32([NAN, -INF, 0, INF, -1])}),
                       (3, {"groups": 5, "group_topk": 3})):
        expect_gate(run, x, k, score=score, return_scores=True, **options)


def test_a_logit_of_minus_infinity_is_chosen_last(run):
    """Whatever its bias. Both groups have -Inf, so the first is kept."""
    x, bias = run.array(f32([[-INF, 0, 1, NAN]])), run.array(f32([100, 0, -INF, 100]))
    assert fp8.asnumpy(fp8.topk_gate(x, 4, bias=bias).indices).tolist() == [[1, 0, 2, -1]]
    kept = fp8.topk_gate(x, 2, bias=bias, groups=2, group_topk=1)
    assert fp8.asnumpy(kept.indices).tolist() == [[1, 0]]


@every_score
@pytest.mark.parametrize("kind", ["bits", "edges"])
def test_any_bits(kind, score, run):
    for dtype in INPUT_DTYPES:
        x = cases.values(kind, (24, 21), np.dtype(dtype), 3)
        expect_gate(run, x, 7, score=score, return_scores=True, sequences=2, bias=cases.values(
            kind, (21,), np.dtype(float32), 4))


@every_score
def test_without_tokens(score, run):
    for dtype, sequences in ((bfloat16, None), (float32, 5)):
        found = expect_gate(run, np.zeros((0, 12), dtype), 3, score=score, sequences=sequences,
                            return_scores=True)
        assert (found.tokens, found.topk, found.num_experts, int(found.counts.sum())) == (0, 3, 12, 0)


def test_sums_of_many_tokens(run):
    """In several segments, parts of these, and a truncated part."""
    for tokens, sequences in ((515, 1), (1100, 2)):
        expect_gate(run, normal((tokens, 5), float16), 2, sequences=sequences, leads=(0,))


# ---- values against f64 ----
def exactly(x: np.ndarray, score: str) -> np.ndarray:
    x = x.astype(np.float64)
    if score == "softmax":
        return np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    return 1 / (1 + np.exp(-x)) if score == "sigmoid" else np.sqrt(np.logaddexp(0, x))


@every_score
@pytest.mark.parametrize("normalize", [False, True])
def test_values_against_f64(score, normalize, run):
    x = np.concatenate([usual((200, 48)), np.clip(usual((200, 48)) * np.float32(8), -20, 20)])
    made = run.numpy(fp8.topk_gate(run.array(x), 6, score=score, normalize=normalize, factor=2.5,
                                   return_scores=True,
                                   sequences=2))
    s = exactly(x, score)
    np.testing.assert_allclose(made.scores, s, rtol=4e-6)
    chosen = np.take_along_axis(s, made.indices.astype(np.int64), 1)
    assert (np.sort(s, 1)[:, :-7:-1] / chosen < 1 + 1e-5).all()
    want = 2.5 * (chosen / chosen.sum(1, keepdims=True) if normalize else chosen)
    np.testing.assert_allclose(made.weights, want, rtol=4e-6)
    shares = (s / s.sum(1, keepdims=True)).reshape(2, 200, 48)
    np.testing.assert_allclose(made.score_sums, shares.sum(1), rtol=2e-6)


# ---- indices that are given ----
@every_score
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_given_indices(dtype, score, run):
    """Also none, repeated ones, and invalid ones, which the device notes."""
    x = normal((20, 9), bfloat16)
    indices = np.random.default_rng(0).integers(-1, 9, (20, 5)).astype(dtype)
    indices[3], indices[4] = -1, 7
    expect_gate(run, x, 5, score=score, indices=indices, return_scores=True, sequences=4)
    noted(run, [])
    assert_equal(fp8.topk_gate(x, 5, score=score, indices=indices, groups=3, group_topk=2, bias=normal((9,))),
                 fp8.topk_gate(x, 5, score=score, indices=indices))


@pytest.mark.parametrize("wrong", [-2, 9, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_indices_that_are_no_experts(wrong, run):
    x = normal((40, 9))
    for dtype, k, at in ((np.int32, 3, 2), (np.int64, 3, 0), (np.int64, 9, 8)):
        if np.iinfo(dtype).min <= wrong <= np.iinfo(dtype).max:
            indices = np.random.default_rng(0).integers(0, 9, (40, k)).astype(dtype)
            indices[33, at] = wrong
            found = expect_gate(run, x, k, indices=indices, leads=(0,))
            noted(run, [EXPERT])
            assert found.indices[33, at] == -1
            assert found.weights[33, at] == 0


def test_a_slot_past_the_first_32_that_is_no_expert(run):
    indices = np.zeros((2, 40), np.int64)
    indices[1, 39] = 77
    found = expect_gate(run, normal((2, 50)), 40, indices=indices)
    noted(run, [EXPERT])
    assert found.counts.tolist() == [79] + [0] * 49


# ---- what results have in common ----
@every_score
def test_the_rest_of_a_batch_changes_no_byte(score, run):
    x = normal((50, 70), bfloat16)
    whole = run.numpy(fp8.topk_gate(run.array(x), 6, score=score, return_scores=True))
    for first, last in ((0, 1), (7, 8), (7, 31), (49, 50)):
        part = run.numpy(fp8.topk_gate(run.array(x[first:last].copy()), 6, score=score, return_scores=True))
        for name in ("indices", "weights", "scores"):
            assert_equal(getattr(part, name), getattr(whole, name)[first:last].copy())


@every_score
def test_a_gate_again_with_its_own_indices(score, run):
    x = run.array(normal((60, 40)))
    made = fp8.topk_gate(x, 5, score=score, bias=run.array(normal((40,), seed=1)), groups=4, group_topk=2,
                         sequences=3)
    assert_equal(fp8.topk_gate(x, 5, score=score, indices=made.indices, sequences=3), made)
    counts = fp8.asnumpy(made.counts)
    assert (counts.sum(1) == 20 * 5).all()
    assert counts.sum(0).tolist() == np.bincount(fp8.asnumpy(made.indices).ravel(), minlength=40).tolist()


@every_score
def test_experts_in_another_order(score, run):
    """Without ties the same experts are chosen. The divisor of sigma is a sum over slots, whose order is
    unchanged."""
    x, order = usual((40, 64)), np.random.default_rng(0).permutation(64)
    made, other = (run.numpy(fp8.topk_gate(run.array(each), 8, score=score, sequences=1, normalize=False))
                   for each in (x, x[:, order].copy()))
    assert np.array_equal(order[other.indices], made.indices)
    assert np.array_equal(other.counts[0], made.counts[0, order])
    np.testing.assert_allclose(other.weights, made.weights, rtol=1e-6)
    assert score == "softmax" or np.array_equal(other.weights, made.weights)


def test_route_goes_on_from_here(run):
    x = normal((30, 12))
    x[3] = NAN
    made = fp8.topk_gate(run.array(x), 4)
    r = fp8.route(made.indices, num_experts=12, align=16)
    assert np.array_equal(fp8.asnumpy(r.splits), fp8.asnumpy(made.counts))
    rows = run.array(normal((30, 16), bfloat16))
    moved, probs = fp8.permute(rows, r, probs=made.weights)
    assert moved.shape[0] == probs.shape[0] == r.rows
    assert fp8.asnumpy(r.row_map)[3].tolist() == [-1] * 4


def test_the_same_result_again(run):
    """With what earlier calls left: words are zero again, whatever the number of tokens and sequences."""
    made: list[tuple[Any, int | None, Any]] = []
    for tokens, experts, sequences in ((300, 24, 3), (300, 24, None), (2, 24, 1), (1000, 8, 1), (64, 300, 2)):
        x = normal((tokens, experts))
        made.append((x, sequences, fp8.topk_gate(run.array(x), 4, sequences=sequences)))
    for _ in range(3):
        for x, sequences, out in made:
            poisoned(out)
            assert fp8.topk_gate(run.array(x), 4, sequences=sequences, out=out) is out
            assert_equal(out, reference.topk_gate(x, 4, sequences=sequences))


def test_a_refused_call_writes_nothing(run):
    x, wrong = run.array(normal((8, 12))), run.array(normal((8, 13)))
    out = fp8.topk_gate(x, 3, return_scores=True)
    before = [fp8.asnumpy(a).tobytes() for a in out._arrays().values()]
    calls: list[tuple[Any, int, dict[str, Any]]] = [
        (wrong, 3, {}), (x, 4, {}), (x, 3, {"sequences": 2}), (x, 3, {"return_scores": False}),
        (x, 3, {"factor": 2.0}), (x, 3, {"score": "sigmoid"}), (x, 3, {"bias": run.array(normal((11,)))})]
    for logits, k, options in calls:
        with pytest.raises(ValueError):         # noqa: PT011 (test_messages_of_gates.py has the messages)
            fp8.topk_gate(logits, k, **{"return_scores": True, **options}, out=out)
        assert [fp8.asnumpy(a).tobytes() for a in out._arrays().values()] == before


@needs_host
@pytest.mark.full
def test_a_running_sum_has_many_rounds():
    """More than 32 parts of 16 segments each, of a block's 32 tokens."""
    x = normal((40_000, 3), bfloat16)
    with testing.executor("host"):
        assert_equal(fp8.topk_gate(x, 1, sequences=1), reference.topk_gate(x, 1, sequences=1))


@pytest.mark.gpu
def test_many_tokens_on_a_gpu():
    x = normal((70_000, 256), bfloat16)
    with testing.executor("cuda") as run:
        for score in SCORES:
            want = reference.topk_gate(x, 8, score=score, sequences=10)
            there = run.array(x)
            for _ in range(10):
                assert_equal(fp8.topk_gate(there, 8, score=score, sequences=10), want)
