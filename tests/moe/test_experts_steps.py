"""Experts from step to step: buffers, weights that change, CUDA graphs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from expert_layers import FLOWS, Replay, errors, in_float64, layer, step
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, moe, testing
from cupy_fp8.calls.descriptions import Allocation
from cupy_fp8.moe.dataflow import KEEPS
from cupy_fp8.moe.step import arrays_of
from cupy_fp8.ops.matmul import wgmma

GIVEN = layer()
TOKENS, TOPK = GIVEN.chosen.shape
RECIPES: dict[str, Any] = {"blocks": fp8.BlockScaling(), "current": fp8.CurrentScaling(),
                           "delayed": fp8.DelayedScaling(history_len=4)}


def assert_same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        testing.assert_bytes_equal(got, want)


# ---- buffers ----
@pytest.mark.parametrize(("dataflow", "recipe", "keep"), quick_if(
    lambda of: of in {("casting_free", "delayed", "input"), ("both_directions", "blocks", "fp8")},
    [(*of, keep) for of in (*product(FLOWS, ["blocks"]), ("casting_free", "current"),
                            ("casting_free", "delayed")) for keep in KEEPS]))
def test_buffers(dataflow, recipe, keep, run, monkeypatch):
    """A step with buffers allocates nothing and gives the bytes of one without, whatever they held."""
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow)
    buffers = experts.empty(TOKENS, TOPK, keep=keep)
    routing = given.routing()
    other = given._replace(chosen=run.array(layer(seed=2).chosen)).routing()
    wanted = [step(experts, given, each, keep=keep) for each in (routing, other, routing)]
    for made in buffers._made.values():
        for a in arrays_of(made):
            if a.dtype != np.int32:                         # sizes are checked if they are on the host
                cases.poison(a)
    held = buffers.nbytes
    if run.name != "reference":                             # which computes into new memory
        monkeypatch.setattr(Allocation, "make", lambda *_: pytest.fail("something was allocated"))
    for each, want in zip((routing, other, routing), wanted, strict=True):
        assert_same(step(experts, given, each, keep=keep, out=buffers), want)
    assert buffers.nbytes == held
    assert f"{held:,} bytes" in repr(buffers)


@pytest.mark.parametrize("dataflow", moe.dataflow.DATAFLOWS)
@pytest.mark.parametrize("recipe", [fp8.BlockScaling(), fp8.CurrentScaling()], ids=["blocks", "current"])
def test_buffers_for_inference(recipe, dataflow, run):
    """Groups kept for gradients begin at multiples of 128, others at multiples of 16, unless columns are
    quantised across groups. y is the same."""
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, recipe, dataflow=dataflow)
    buffers = experts.empty(TOKENS, TOPK, keep=None)
    across = dataflow != "casting_free" and recipe == fp8.BlockScaling()
    assert buffers._facts["align"] == (128 if across else 16)
    routing = given.routing(align=buffers._facts["align"])
    y, saved = experts.forward(given.x, routing, given.probs, keep=None, out=buffers)
    assert saved is None
    testing.assert_bytes_equal(y, step(experts, given)[0])
    assert buffers.nbytes < experts.empty(TOKENS, TOPK).nbytes / 2
    made_for_others = experts.empty(TOKENS, TOPK, keep=None, align=128)
    if not across:
        with pytest.raises(ValueError, match="out: made for align=128, got align=16"):
            experts.forward(given.x, routing, given.probs, keep=None, out=made_for_others)


@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gate_is_routed_for_what_is_kept(recipe, dataflow, run):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow)
    logits = run.array(np.random.default_rng(1).standard_normal((TOKENS, len(GIVEN.up))).astype(np.float32))
    gate = fp8.topk_gate(logits, TOPK)
    y, saved = experts.forward(given.x, gate)
    buffers = experts.empty(TOKENS, TOPK, keep=None)
    alone, _ = experts.forward(given.x, gate, keep=None, out=buffers)
    testing.assert_bytes_equal(alone, y)
    assert saved.routing is not None
    alone_align = 128 if recipe == "blocks" and dataflow != "casting_free" else 16
    assert (saved.routing.align, buffers._made["routing"].align) == (128, alone_align)
    testing.assert_bytes_equal(experts.forward(given.x, gate, keep=None)[0], y)


def test_buffers_leave_the_state_alone(run):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, fp8.DelayedScaling(history_len=4))
    assert experts.state is not None
    before = [fp8.asnumpy(a).copy() for a in (experts.state.scale, experts.state.amax_history)]
    experts.empty(TOKENS, TOPK)
    for was, now in zip(before, (experts.state.scale, experts.state.amax_history), strict=True):
        testing.assert_bytes_equal(now, was)


def test_buffers_without_weight_gradients(run):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    buffers = experts.empty(TOKENS, TOPK, accumulate=True)
    assert not {"up grad", "down grad"} & buffers._made.keys()
    sums = tuple(run.array(np.zeros(w.shape, np.float32)) for w in GIVEN[:2])
    step(experts, given, accumulate=sums, out=buffers)
    alone = step(experts, given)
    assert max(errors(sums, tuple(np.asarray(fp8.asnumpy(a), np.float64) for a in alone[3:]))) < 0.005


# ---- weights ----
@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_in_place(recipe, run):
    given, other = GIVEN.moved(run), layer(seed=1).moved(run)
    experts = moe.Experts(given.up, given.down, RECIPES[recipe])
    arrays = [a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr
              for w in (experts.up, experts.down) for a in arrays_of(w)]
    experts.update(other.up, other.down)
    assert [a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr
            for w in (experts.up, experts.down) for a in arrays_of(w)] == arrays
    alone = moe.Experts(other.up, other.down, RECIPES[recipe])
    assert_same((experts.up, experts.down), (alone.up, alone.down))


def test_one_launch_updates_blocks(run, launched):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    launched.clear()
    experts.update(given.up, given.down)
    assert len(launched) == (0 if run.name == "reference" else 1)


@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_weights_of_a_checkpoint_are_not_quantised_again(layout, run):
    """Codes that no quantiser would give, and scales that are not powers of two."""
    rng = np.random.default_rng(0)
    squares = fp8.BlockScaling((128, 128), pow2_scale=False, scale_layout=layout)
    up, down = (squares.quantize(w).rowwise for w in GIVEN[:2])
    for w in (up, down):
        codes = w.data.view(np.uint8)
        codes[...] = rng.integers(0, 0x60, codes.shape)
    given, before = GIVEN.moved(run), up.data.tobytes()
    experts = moe.Experts(run.array(up), run.array(down))
    testing.assert_bytes_equal(experts.up.rowwise, up)
    testing.assert_bytes_equal(experts.up.columnwise.dequantize(), up.dequantize())
    values = GIVEN._replace(up=up.dequantize(), down=down.dequantize())
    assert max(errors(step(experts, given), in_float64(values))) < 0.09
    experts.update(given.up, given.down)                    # the checkpoint's own arrays are unchanged
    assert_same(step(experts, given), step(moe.Experts(given.up, given.down), given))
    assert up.data.tobytes() == before


def test_weights_with_one_scale(run):
    up, down = (fp8.CurrentScaling().quantize(w).rowwise for w in GIVEN[:2])
    given = GIVEN.moved(run)
    found = step(moe.Experts(run.array(up), run.array(down), fp8.CurrentScaling()), given)
    assert_same(found, step(moe.Experts(given.up, given.down, fp8.CurrentScaling()), given))


@pytest.mark.parametrize("recipe", ["blocks", "current"])
def test_each_weight_keeps_its_memory(recipe, run):
    """A Scaled is used as it is, and leaves the other one's memory alone."""
    given, r = GIVEN.moved(run), RECIPES[recipe]
    squares = fp8.BlockScaling((128, 128)) if recipe == "blocks" else r
    other = run.array(squares.quantize(layer(seed=1).down).rowwise)
    experts = moe.Experts(given.up, given.down, r)
    up, down = experts.up, experts.down
    experts.update(given.up, other)
    assert experts.up is up
    assert experts.down.data is other.data
    mixed = experts.down
    experts.update(given.up, given.down)                    # into new memory, since the other is the caller's
    assert experts.up is up
    assert experts.down is not down
    assert experts.down is not mixed
    testing.assert_bytes_equal(other.data, squares.quantize(layer(seed=1).down).data)
    new = experts.down
    experts.update(given.up, given.down)
    assert experts.up is up
    assert experts.down is new
    assert_same(step(experts, given), step(moe.Experts(given.up, given.down, r), given))


# ---- in a graph ----
@pytest.mark.parametrize("recipe", quick_if(lambda name: name == "blocks", RECIPES))
@pytest.mark.parametrize("keep", quick_if(lambda keep: keep == "bf16", KEEPS))
def test_a_step_in_a_graph(keep, recipe, device):
    """Captured once, with the update of the weights, and replayed with other routings, tokens and weights."""
    held = GIVEN.moved(device.run)
    experts = moe.Experts(held.up, held.down, RECIPES[recipe])
    replay = Replay(device, experts, held, None, keep)
    for seed in (1, 2, 3):
        replay.compare(layer(seed=seed).moved(device.run), None)


# ---- on a GPU ----
@pytest.mark.gpu
def test_any_grid_on_a_gpu(monkeypatch):
    with testing.executor("cuda") as run:
        given = layer(tokens=3000, hidden=1024, inner=512, experts=8).moved(run)
        experts = moe.Experts(given.up, given.down)
        want = step(experts, given)
        for number in (132, 114, 60, 2):
            monkeypatch.setattr(wgmma, "multiprocessors", lambda _, number=number: number)
            for keep in ("bf16", "input"):
                assert_same(step(experts, given, keep=keep), want)


@pytest.mark.gpu
def test_nothing_is_allocated_on_a_gpu():
    pool = backend.cupy().get_default_memory_pool()
    with testing.executor("cuda") as run:
        given = GIVEN.moved(run)
        experts = moe.Experts(given.up, given.down)
        buffers, routing = experts.empty(TOKENS, TOPK), given.routing()
        step(experts, given, routing, out=buffers)
        used = pool.used_bytes()
        for _ in range(3):
            step(experts, given, routing, out=buffers)
        assert pool.used_bytes() == used
        assert fp8.device_errors() == ()
