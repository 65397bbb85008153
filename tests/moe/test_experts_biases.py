"""Experts with biases: values, bytes, buffers, updates, and what is refused."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from expert_layers import FLOWS, Replay, biases, by_hand, errors, in_float64, layer, step
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import cases, moe, testing
from cupy_fp8.calls.descriptions import Allocation
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.moe.dataflow import KEEPS
from cupy_fp8.moe.step import arrays_of

GIVEN = layer()
TOKENS, TOPK = GIVEN.chosen.shape
BIAS = biases(GIVEN)
RECIPES: dict[str, Any] = {"blocks": fp8.BlockScaling(), "compact": fp8.BlockScaling(scale_layout="compact"),
                           "current": fp8.CurrentScaling(), "delayed": fp8.DelayedScaling(history_len=4)}
GPT_OSS: dict[str, Any] = {"form": "gpt_oss", "clamp": 7.0, "interleaved": True}


def moved(run: testing.Executor, bias: Any = BIAS) -> Any:
    return tuple(None if b is None else run.array(b) for b in bias)


def made(run: testing.Executor, recipe: str = "blocks", bias: Any = BIAS, **options: Any) -> moe.Experts:
    """Make the layer. Delayed scaling gets the scales found by a previous step."""
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, RECIPES[recipe], bias=moved(run, bias), **options)
    if experts.state is not None:
        for _ in range(2):
            step(experts, given)
            experts.state.update()
            experts.update(given.up, given.down)
    return experts


def assert_same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        testing.assert_bytes_equal(got, want)


# ---- values ----
@pytest.mark.parametrize("keep", quick_if(lambda keep: keep == "input", KEEPS))
@pytest.mark.parametrize("recipe", quick_if(lambda name: name == "blocks", RECIPES))
@pytest.mark.parametrize("dataflow", FLOWS)
def test_values(dataflow, recipe, keep, run):
    found = step(made(run, recipe, dataflow=dataflow), GIVEN.moved(run), keep=keep)
    assert max(errors(found, in_float64(GIVEN, bias=BIAS))) < (0.11 if keep == "fp8" else 0.09)
    assert [a.dtype for a in found] == [bfloat16, bfloat16, float32, bfloat16, bfloat16, float32, float32]
    assert not any(fp8.asnumpy(a)[-1].any() for a in found[3:]), "the last expert has no token"


def test_gpt_oss(run):
    found = step(made(run, **GPT_OSS), GIVEN.moved(run))
    assert max(errors(found, in_float64(GIVEN, bias=BIAS, **GPT_OSS))) < 0.09


@pytest.mark.parametrize("dtype", quick_if(lambda dtype: dtype == float16, [float16, float32]))
def test_biases_of_other_dtypes(dtype, run):
    """That of up becomes the dtype of h; that of down is unchanged."""
    bias = tuple(b.astype(dtype) for b in BIAS)
    assert_same(step(made(run, bias=bias), GIVEN.moved(run)), step(made(run), GIVEN.moved(run)))
    found = step(made(run, bias=bias, dtype=dtype), GIVEN.moved(run))
    assert max(errors(found, in_float64(GIVEN, bias=BIAS))) < 0.09


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dataflow", quick_if(lambda name: name == "casting_free", FLOWS))
def test_one_bias(dataflow, which, run):
    """Equal to two, the other of which is 0; its gradient is None."""
    one = tuple(b if i == which else None for i, b in enumerate(BIAS))
    other = tuple(b if i == which else np.zeros_like(b) for i, b in enumerate(BIAS))
    given = GIVEN.moved(run)
    experts = made(run, bias=one, dataflow=dataflow)
    y, saved = experts.forward(given.x, given.routing(), given.probs)
    *found, grads = experts.backward(given.grad, saved)
    wanted = step(made(run, bias=other, dataflow=dataflow), given)
    assert_same((y, *found, grads[which]), (*wanted[:5], wanted[5 + which]))
    assert grads[1 - which] is None


def test_none_are_as_before(run):
    given = GIVEN.moved(run)
    experts = made(run, bias=(None, None))
    _, saved = experts.forward(given.x, given.routing(), given.probs)
    assert len(experts.backward(given.grad, saved)) == 4
    assert_same(step(experts, given), step(moe.Experts(given.up, given.down), given))


def test_without_probs(run):
    given = GIVEN.moved(run)
    experts = made(run)
    y, saved = experts.forward(given.x, given.routing())
    dx, dprobs, *weights, grads = experts.backward(given.grad, saved)
    assert dprobs is None
    ones = GIVEN._replace(probs=np.ones(GIVEN.probs.shape, np.float32))
    exact = in_float64(ones, bias=BIAS)
    assert max(errors((y, dx, *weights, *grads), (*exact[:2], *exact[3:]))) < 0.09


@pytest.mark.parametrize("dtype", quick_if(lambda dtype: dtype == bfloat16, [bfloat16, float32]))
@pytest.mark.parametrize("value", quick_if(lambda value: value == 110, [110, 1.1, 0.0171]))
@pytest.mark.parametrize("recipe", [fp8.BlockScaling(), fp8.BlockScaling(dtype=float8_e5m2),
                                    fp8.CurrentScaling()], ids=str)
def test_probs_through_a_constant_bias(recipe, value, dtype, run):
    """A single FP8 number for it would be wrong by up to 6 %, and its sum by as much. Gradients are FP8
    numbers."""
    given = GIVEN._replace(down=np.zeros_like(GIVEN.down), grad=np.ones_like(GIVEN.grad))
    bias = np.full(GIVEN.down.shape[:2], value, np.float32).astype(dtype)
    there = given.moved(run)
    dprobs = fp8.asnumpy(step(moe.Experts(there.up, there.down, recipe, bias=(None, run.array(bias))),
                              there)[2])
    exact = float(bias[0, 0]) * given.grad.shape[1]
    within = 1e-6 if dtype == bfloat16 else 0.002
    np.testing.assert_allclose(dprobs[given.chosen >= 0], exact, rtol=within)
    assert not dprobs[given.chosen < 0].any()


def test_rows_in_which_nobody_is():
    """With a bias and no probs they have its activation, with probs zeros. They add nothing to gradients."""
    experts, routing = made(testing.Executor("reference")), GIVEN.routing()
    nobody = np.ones(routing.rows, bool)
    nobody[routing.row_map[routing.row_map >= 0]] = False
    nobody[routing.aligned_splits.sum():] = False
    found = []
    for probs in (None, np.ones_like(GIVEN.probs)):
        _, saved = experts.forward(GIVEN.x, routing, probs)
        assert saved.activation is not None
        found.append(fp8.dequantize(saved.activation, dtype=np.float32)[nobody])
        assert np.isfinite(found[-1]).all()
        _, _, d_up, d_down, grads = experts.backward(GIVEN.grad, saved)
        exact = in_float64(GIVEN._replace(probs=np.ones_like(GIVEN.probs)), bias=BIAS)
        assert max(errors((d_up, d_down, *grads), exact[3:])) < 0.09
    assert found[0].any()
    assert not found[1].any()


# ---- bytes ----
@pytest.mark.parametrize("align", [128, 16, 1])
def test_the_same_calls_by_hand(align, run):
    given = GIVEN.moved(run)
    assert_same(step(made(run), given, given.routing(align)), by_hand(given, align, moved(run)))


@pytest.mark.parametrize("keep", KEEPS)
def test_rows(keep, run):
    given = GIVEN.moved(run)
    experts, routing = made(run), given.routing()
    x, grad = (fp8.BlockScaling().quantize(a) for a in (given.x, given.grad))
    rows, p = fp8.permute(x, routing, probs=given.probs)
    out, saved = experts.forward_rows(rows, routing.aligned_splits, p, keep=keep)
    d_rows, dp, d_up, d_down, grads = experts.backward_rows(fp8.permute(grad, routing), saved)
    dx, dprobs = fp8.permute_backward(d_rows, routing, probs_grad=dp)
    found = fp8.unpermute(out, routing), dx, dprobs, d_up, d_down, *grads
    assert_same(found, step(experts, given, keep=keep))


@pytest.mark.parametrize("dataflow", FLOWS)
def test_inputs_alone_give_the_same_bytes(dataflow, run):
    experts, given = made(run, dataflow=dataflow), GIVEN.moved(run)
    assert_same(step(experts, given, keep="input"), step(experts, given))


# ---- memory ----
@pytest.mark.parametrize(("dataflow", "keep"), quick_if(
    lambda of: of in {("casting_free", "bf16"), ("requantize", "input")}, product(FLOWS, KEEPS)))
def test_buffers(dataflow, keep, run, monkeypatch):
    """A step with buffers allocates nothing and gives the bytes of one without, whatever they held."""
    experts, given = made(run, dataflow=dataflow), GIVEN.moved(run)
    buffers, routing = experts.empty(TOKENS, TOPK, keep=keep), given.routing()
    want = step(experts, given, routing, keep=keep)
    for held in buffers._made.values():
        for a in arrays_of(held):
            if a.dtype != np.int32:
                cases.poison(a)
    if run.name != "reference":                             # which computes into new memory
        monkeypatch.setattr(Allocation, "make", lambda *_: pytest.fail("something was allocated"))
    for _ in range(2):
        assert_same(step(experts, given, routing, keep=keep, out=buffers), want)


def test_updates_in_place(run):
    """The layer has copies; None keeps one."""
    given, bias, other = GIVEN.moved(run), moved(run), biases(GIVEN, seed=9)
    experts = moe.Experts(given.up, given.down, bias=bias)
    held = [experts._biases.up, experts._biases.down]
    experts.update(given.up, given.down, moved(run, other))
    assert_same(bias, BIAS)
    assert_same(held, other)
    assert_same(step(experts, given), step(made(run, bias=other), given))
    experts.update(given.up, given.down, (None, bias[1]))
    experts.update(given.up, given.down)
    assert_same(step(experts, given), step(made(run, bias=(other[0], BIAS[1])), given))


def test_representation():
    assert repr(moe.Experts(*GIVEN[:2], bias=BIAS)).endswith("casting_free, numpy, bias of up and down)")
    assert repr(moe.Experts(*GIVEN[:2], bias=(None, BIAS[1]))).endswith("casting_free, numpy, bias of down)")
    assert repr(moe.Experts(*GIVEN[:2])).endswith("casting_free, numpy)")


# ---- refused ----
UP, DOWN = BIAS


@pytest.mark.parametrize(("given", "error", "message"), [
    (UP, TypeError, "bias: expected two arrays, for up and down, or None, got"),
    ((UP,), TypeError, "bias: expected two arrays, for up and down, or None, got"),
    (([1.0], DOWN), TypeError, "bias (up): expected an array or None, got list"),
    ((UP, DOWN.astype(np.float64)), TypeError,
     "bias (down): expected bfloat16, float16, float32, got float64"),
    ((DOWN, UP), ValueError, "bias (up): expected shape (4, 192), got (4, 160)"),
    ((UP, DOWN[0]), ValueError, "bias (down): expected shape (4, 160), got (160,)"),
])
def test_what_is_refused(given, error, message):
    experts: Any = moe.Experts(GIVEN.up, GIVEN.down, bias=BIAS)
    before = [a.tobytes() for a in arrays_of((experts.up, experts.down))]
    for call in (lambda: moe.Experts(GIVEN.up, GIVEN.down, bias=given),
                 lambda: experts.update(GIVEN.up * 2, GIVEN.down, given)):
        with pytest.raises(error, match="^" + re.escape(message)):
            call()
    assert [a.tobytes() for a in arrays_of((experts.up, experts.down))] == before


def test_a_bias_for_a_layer_without_one():
    experts = moe.Experts(GIVEN.up, GIVEN.down, bias=(UP, None))
    with pytest.raises(ValueError, match=r"^bias \(down\): expected None, since the layer has none"):
        experts.update(GIVEN.up, GIVEN.down, (UP, DOWN))


# ---- in a graph ----
@pytest.mark.parametrize("recipe", quick_if(lambda name: name == "delayed", RECIPES))
@pytest.mark.parametrize("keep", quick_if(lambda keep: keep == "input", KEEPS))
def test_a_step_in_a_graph(keep, recipe, device):
    """Captured once, with the update of weights and biases, and replayed with others."""
    run = device.run
    held, bias = GIVEN.moved(run), moved(run)
    experts = moe.Experts(held.up, held.down, RECIPES[recipe], bias=bias)
    replay = Replay(device, experts, held, bias, keep)
    for seed in (1, 2, 3):
        replay.compare(layer(seed=seed).moved(run), moved(run, biases(GIVEN, seed)))
