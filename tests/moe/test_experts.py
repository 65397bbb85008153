"""Experts: values, against float64 and against the same calls by hand, and the number of roundings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from expert_layers import FLOWS, biases, by_hand, errors, in_float64, layer, step
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import moe, testing
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.moe import experts as layers
from cupy_fp8.moe.dataflow import KEEPS
from cupy_fp8.moe.experts import TENSORS
from cupy_fp8.ops.matmul import wgmma

RECIPES: dict[str, Any] = {
    "blocks": fp8.BlockScaling(), "compact": fp8.BlockScaling(scale_layout="compact"),
    "f32 blocks": fp8.BlockScaling(pow2_scale=False), "current": fp8.CurrentScaling(),
    "delayed": fp8.DelayedScaling(history_len=4)}
#: values of three bits of mantissa, rounded once, and once more with keep="fp8"
WITHIN = {"bf16": 0.09, "input": 0.09, "fp8": 0.11}


def made(given: Any, recipe: Any = None, **options: Any) -> moe.Experts:
    """Make the layer. Delayed scaling gets the scales found by a previous step."""
    experts = moe.Experts(given.up, given.down, recipe, **options)
    if experts.state is not None:
        for _ in range(2):
            experts.state.update()
            experts.update(given.up, given.down)
            step(experts, given)
        experts.state.update()
        experts.update(given.up, given.down)
    return experts


@pytest.mark.parametrize("keep", quick_if(lambda keep: keep != "fp8", KEEPS))
@pytest.mark.parametrize("recipe", quick_if(lambda name: name in ("blocks", "current"), RECIPES))
@pytest.mark.parametrize("dataflow", FLOWS)
def test_values(dataflow, recipe, keep, run):
    if (dataflow, recipe) == ("casting_free", "f32 blocks"):
        pytest.skip("refused: exponents alone cannot move")
    given = layer()
    found = step(made(given.moved(run), RECIPES[recipe], dataflow=dataflow), given.moved(run), keep=keep)
    assert max(errors(found, in_float64(given))) < WITHIN[keep]
    assert [a.dtype for a in found] == [bfloat16, bfloat16, float32, bfloat16, bfloat16]
    assert not fp8.asnumpy(found[3])[-1].any(), "the last expert has no token"
    assert not fp8.asnumpy(found[4])[-1].any(), "the last expert has no token"


@pytest.mark.parametrize("options", [
    {"clamp": 2.0}, {"form": "gpt_oss"}, {"form": "gpt_oss", "clamp": 2.0, "interleaved": True},
    {"interleaved": True}], ids=str)
def test_activations(options, run):
    given = layer()
    found = step(made(given.moved(run), **options), given.moved(run))
    # near the clamp the derivative may be that of the other side
    assert max(errors(found, in_float64(given, **options))) < (0.16 if "clamp" in options else WITHIN["bf16"])


@pytest.mark.parametrize("dtype", [float16, float32])
def test_other_dtypes(dtype, run):
    given = layer()
    found = step(made(given.moved(run), dtype=dtype), given.moved(run))
    assert max(errors(found, in_float64(given))) < WITHIN["bf16"]
    assert [a.dtype for a in found] == [dtype, dtype, float32, dtype, dtype]


def test_other_formats(run):
    given = layer()
    found = step(made(given.moved(run), fp8.BlockScaling(dtype=float8_e5m2)), given.moved(run))
    assert 0.09 < max(errors(found, in_float64(given))) < 0.18


@pytest.mark.parametrize("shape", [
    {"tokens": 0}, {"tokens": 1, "topk": 1, "experts": 1}, {"tokens": 5, "topk": 0},
    {"tokens": 200, "topk": 3, "experts": 40, "hidden": 33, "inner": 17},
    {"tokens": 30, "hidden": 128, "inner": 128, "experts": 2}], ids=str)
def test_shapes(shape, run):
    given = layer(**shape)
    for align in (128, 8):
        routing = given.moved(run).routing(align)
        found = step(made(given.moved(run)), given.moved(run), routing)
        wanted = in_float64(given)
        assert [a.shape for a in found] == [b.shape for b in wanted]
        if given.chosen.size:
            assert max(errors(found, wanted)) < 0.13


def test_masks(run):
    """Probs by expert, and slots in ascending order."""
    given = layer()
    mask = np.zeros((len(given.x), len(given.up)), bool)
    by_expert = np.zeros(mask.shape, np.float32)
    token, slot = np.nonzero(given.chosen >= 0)
    mask[token, given.chosen[token, slot]] = True
    by_expert[token, given.chosen[token, slot]] = given.probs[token, slot]
    there = given.moved(run)
    routing = fp8.route(run.array(mask), topk=2, align=128)
    experts = made(there)
    y, saved = experts.forward(there.x, routing, run.array(by_expert))
    dx, dprobs, *weights = experts.backward(there.grad, saved)
    want = step(experts, there)
    for got, wanted in zip((y, dx, *weights), (*want[:2], *want[3:]), strict=True):
        assert max(errors((got,), (np.asarray(fp8.asnumpy(wanted), np.float64),))) < 0.01
    assert dprobs is not None
    assert dprobs.shape == (len(given.x), 2)


# ---- bytes ----
@pytest.mark.parametrize("align", [128, 16, 1])
def test_the_same_calls_by_hand(align, run):
    given = layer().moved(run)
    found = step(made(given), given, given.routing(align))
    for got, wanted in zip(found, by_hand(given, align), strict=True):
        testing.assert_bytes_equal(got, wanted)


@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("recipe", quick_if(lambda name: name == "blocks", ["blocks", "current"]))
def test_inputs_alone_give_the_same_bytes(dataflow, recipe, run):
    given = layer().moved(run)
    experts = made(given, RECIPES[recipe], dataflow=dataflow)
    for got, wanted in zip(step(experts, given, keep="input"), step(experts, given), strict=True):
        testing.assert_bytes_equal(got, wanted)


def test_what_is_kept_in_fp8_is_what_forward_read(run):
    """The activation is computed from h as it is kept."""
    given = layer().moved(run)
    experts = made(given)
    _, saved = experts.forward(given.x, given.routing(), given.probs, keep="fp8")
    assert isinstance(saved.hidden, fp8.Quantized)
    h = fp8.dequantize(saved.hidden, dtype=bfloat16)
    rows, p = fp8.permute(fp8.quantize_block(given.x), given.routing(), probs=given.probs)
    wanted = fp8.quantize_block(fp8.grouped_matmul_nt(rows, experts.up, given.routing().aligned_splits))
    testing.assert_bytes_equal(h, wanted.dequantize(bfloat16))
    a = fp8.swiglu_quantize(h, fp8.BlockScaling(), probs=p)
    out = fp8.grouped_matmul_nt(a, experts.down, given.routing().aligned_splits)
    y, _ = experts.forward(given.x, given.routing(), given.probs, keep="fp8")
    testing.assert_bytes_equal(y, fp8.unpermute(out, given.routing()))


def test_tokens_quantised_before(run):
    given = layer().moved(run)
    experts = made(given)
    x, grad = fp8.BlockScaling().quantize(given.x), fp8.BlockScaling().quantize(given.grad).rowwise
    quantised: Any = given._replace(x=x, grad=grad)         # type: ignore[arg-type]
    found = step(experts, quantised)
    for got, wanted in zip(found, step(experts, given), strict=True):
        testing.assert_bytes_equal(got, wanted)


@pytest.mark.parametrize("keep", KEEPS)
def test_rows(keep, run):
    """The core, between a dispatch and a combination by hand."""
    given = layer().moved(run)
    experts, routing = made(given), given.routing()
    x, grad = (fp8.BlockScaling().quantize(a) for a in (given.x, given.grad))
    rows, p = fp8.permute(x, routing, probs=given.probs)
    out, saved = experts.forward_rows(rows, routing.aligned_splits, p, keep=keep)
    early: list[Any] = []

    def send(*of_rows: Any) -> None:
        early.extend(fp8.permute_backward(of_rows[0], routing, probs_grad=of_rows[1]))

    d_rows, dp, d_up, d_down = experts.backward_rows(fp8.permute(grad, routing), saved, on_rows=send)
    dx, dprobs = fp8.permute_backward(d_rows, routing, probs_grad=dp)
    for got, wanted in zip(early, (dx, dprobs), strict=True):
        testing.assert_bytes_equal(got, wanted)
    found = fp8.unpermute(out, routing), dx, dprobs, d_up, d_down
    for got, wanted in zip(found, step(experts, given, keep=keep), strict=True):
        testing.assert_bytes_equal(got, wanted)


def test_without_probs(run):
    given = layer().moved(run)
    experts = made(given)
    y, saved = experts.forward(given.x, given.routing())
    dx, dprobs, *weights = experts.backward(given.grad, saved)
    assert dprobs is None
    ones = given._replace(probs=run.array(np.ones(given.probs.shape, np.float32)))
    wanted = step(experts, ones)
    for got, want in zip((y, dx, *weights), (*wanted[:2], *wanted[3:]), strict=True):
        testing.assert_bytes_equal(got, want)


def test_weight_gradients_are_added(run):
    given = layer().moved(run)
    experts = made(given)
    sums = [run.array(np.full(w.shape, 3, np.float32)) for w in (given.up, given.down)]
    found = step(experts, given, accumulate=tuple(sums))
    assert found[3] is sums[0]
    assert found[4] is sums[1]
    exact = in_float64(layer())
    want = (*exact[:3], *(3 + a for a in exact[3:]))
    assert max(errors(found, want)) < WITHIN["bf16"]


@pytest.mark.parametrize(("recipe", "keep", "biased"), quick_if(lambda how: how[0] == "current", [
    ("blocks", "bf16", False), ("blocks", "input", True), ("current", "input", True)]))
def test_any_grid_gives_the_same_bytes(recipe, keep, biased, run, monkeypatch):
    """The number of multiprocessors changes only who computes a tile."""
    host = layer(tokens=150, hidden=272, inner=208)
    given, bias = host.moved(run), [run.array(b) for b in biases(host)] if biased else None
    experts, want = made(given, RECIPES[recipe], bias=bias), None
    for clusters in (1, 2, 5):
        monkeypatch.setattr(wgmma, "_CLUSTERS_ON_CPU", clusters)
        monkeypatch.setattr(wgmma, "multiprocessors", lambda _, clusters=clusters: 2 * clusters)
        found = step(experts, given, keep=keep)
        for got, wanted in zip(found, want or found, strict=True):
            testing.assert_bytes_equal(got, wanted)
        want = found


# ---- roundings ----
@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often values are rounded to FP8, and widened."""
    found: Counter[str] = Counter()
    for module in (moe.dataflow, layers, moe.biases, moe.weights):
        for name in ("quantize", "multi_quantize", "quantize_permute", "swiglu_quantize",
                     "swiglu_backward_quantize", "dequantize"):
            if function := getattr(module, name, None):
                monkeypatch.setattr(module, name, counting(found, name, function))
    return found


def counting(found: Counter[str], name: str, function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        found[name] += 1
        return function(*args, **options)

    return call


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dataflow", "keep", "roundings", "widened"), [
    ("casting_free", "bf16", 4, 0), ("casting_free", "input", 5, 0), ("casting_free", "fp8", 6, 2),
    ("both_directions", "bf16", 4, 0), ("requantize", "bf16", 7, 3)])
def test_values_are_rounded_as_often_as_said(dataflow, keep, roundings, widened, biased, counted):
    """Two casts and two fused ones, in one direction or in both. With less kept, values are recomputed, with
    the same bytes. Weights and the two terms of a bias are rounded when they are taken and updated."""
    given = layer()
    bias = biases(given) if biased else None
    experts = made(given, dataflow=dataflow, bias=bias)
    assert counted == ({"quantize": 4, "dequantize": 1} if biased else {"quantize": 2})
    counted.clear()
    experts.update(given.up, given.down, bias)
    assert counted == ({"multi_quantize": 1, "quantize": 2, "dequantize": 1} if biased else
                       {"multi_quantize": 1})
    counted.clear()
    step(experts, given, keep=keep)
    assert counted.pop("dequantize", 0) == widened
    assert sum(counted.values()) == roundings
    assert counted["swiglu_backward_quantize"] == 1


# ---- memory ----
@pytest.mark.parametrize(("keep", "kib"), [("bf16", 138), ("fp8", 40), ("input", 7.2)])
def test_bytes_kept_of_a_token(keep, kib):
    """H 7168, F 2048 and 8 experts a token, from a hidden size 56 times as small and rows without padding."""
    tokens, scale = 64, 7168 // 128
    given = layer(tokens=tokens, topk=8, experts=8, hidden=128 * scale // 8, inner=2048 // 8)
    given = given._replace(chosen=np.tile(np.arange(8, dtype=np.int32), (tokens, 1)))
    experts = moe.Experts(given.up, given.down)
    routing = given.routing(16, rows=8 * tokens)
    _, saved = experts.forward(given.x, routing, given.probs, keep=keep)
    assert saved.nbytes / tokens / 1024 * 8 == pytest.approx(kib, rel=0.03)


def test_state_of_delayed_scaling(run):
    given = layer().moved(run)
    experts = moe.Experts(given.up, given.down, fp8.DelayedScaling(history_len=4))
    assert experts.state is not None
    assert experts.state.scale.shape == (len(TENSORS),)
    step(experts, given)
    amax = fp8.asnumpy(experts.state.amax_history)[0]
    exact = {"x": given.x, "grad": given.grad, "up": given.up, "down": given.down}
    for name, tensor in exact.items():
        assert amax[TENSORS.index(name)] == abs(fp8.asnumpy(tensor).astype(np.float32)).max()
    assert (amax > 0).all()
