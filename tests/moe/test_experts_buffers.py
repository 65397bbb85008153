"""Experts: buffers, what they are made for, and steps that do not wait for the device."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import stand_in
from expert_layers import FLOWS, biases, layer, step
from tiers import quick_if

import cupy_fp8 as fp8
from cupy_fp8 import cases, moe, testing
from cupy_fp8.calls.descriptions import Allocation
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.moe.dataflow import KEEPS
from cupy_fp8.moe.step import arrays_of

GIVEN = layer()
TOKENS, TOPK = GIVEN.chosen.shape
RECIPES: dict[str, Any] = {"blocks": fp8.BlockScaling(), "compact": fp8.BlockScaling(scale_layout="compact"),
                           "current": fp8.CurrentScaling(), "delayed": fp8.DelayedScaling(history_len=4)}


def assert_same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        testing.assert_bytes_equal(got, want)


def poisoned(buffers: moe.Buffers) -> None:
    for held in buffers._made.values():
        for a in arrays_of(held):
            if a.dtype != np.int32:                         # sizes are checked if they are on the host
                cases.poison(a)


# ---- of rows ----
def dispatched(experts: moe.Experts, a: Any, routing: fp8.Routing) -> Any:
    if experts.dataflow == "both_directions":
        return fp8.permute(a, routing)
    if isinstance(experts.recipe, fp8.BlockScaling):
        return fp8.permute(fp8.quantize(a, experts.recipe), routing)
    q = fp8.quantize(a, fp8.CurrentScaling()).rowwise
    data = fp8.permute(q.data, routing)
    return fp8.Scaled(data, q.scale_inv, data.shape)


@pytest.mark.parametrize(("dataflow", "recipe", "keep"), quick_if(
    lambda of: of in {("casting_free", "blocks", "input"), ("requantize", "current", "bf16")},
    product(FLOWS, RECIPES, KEEPS)))
def test_buffers_of_rows(dataflow, recipe, keep, run, monkeypatch):
    """The caller's rows are new arrays in each step."""
    given = GIVEN.moved(run)
    experts, routing = moe.Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow), given.routing()
    of_rows = experts.empty(rows=routing.rows, keep=keep)
    p = run.array(np.random.default_rng(0).random(routing.rows, dtype=np.float32))
    sent = [tuple(dispatched(experts, a, routing) for a in pair)
            for pair in ((given.x, given.grad), (given.grad, given.x))]
    splits = routing.aligned_splits
    wanted = []
    for rows, grad in sent:
        out, saved = experts.forward_rows(rows, splits, p, keep=keep)
        wanted.append((out, *experts.backward_rows(grad, saved)))
    for buffers in (of_rows, experts.empty(TOKENS, TOPK, keep=keep)):
        poisoned(buffers)
        held = buffers.nbytes
        with monkeypatch.context() as patch:
            if run.name != "reference":                     # which computes into new memory
                patch.setattr(Allocation, "make", lambda *_: pytest.fail("something was allocated"))
            for (rows, grad), want in zip(sent, wanted, strict=True):
                out, saved = experts.forward_rows(rows, splits, p, keep=keep, out=buffers)
                assert_same((out, *experts.backward_rows(grad, saved, out=buffers)), want)
        assert buffers.nbytes == held
    assert "tokens" not in repr(of_rows)


def test_align_of_rows():
    """Any that forward_rows takes."""
    experts: Any = moe.Experts(GIVEN.up, GIVEN.down)
    rows = fp8.quantize_block(np.zeros((512, 160), np.float32))
    for align in (1, 256):
        buffers = experts.empty(rows=512, align=align, probs=False)
        _, saved = experts.forward_rows(rows, [256, 0, 256, 0], align=align, out=buffers)
        experts.backward_rows(rows, saved, out=buffers)


# ---- dtypes ----
@pytest.mark.parametrize(("of_x", "of_grad"), quick_if(lambda dtypes: dtypes[1] == float32, [
    (float32, bfloat16), (bfloat16, float16), (float16, float32)]))
def test_tokens_of_other_dtypes(of_x, of_grad, run):
    given = GIVEN.moved(run)
    other = given._replace(x=fp8.astype(given.x, of_x), grad=fp8.astype(given.grad, of_grad))
    for dataflow in FLOWS:
        experts: Any = moe.Experts(given.up, given.down, dataflow=dataflow)
        buffers = experts.empty(TOKENS, TOPK, x_dtype=of_x, grad_dtype=of_grad)
        want = step(experts, other)
        poisoned(buffers)
        assert_same(step(experts, other, out=buffers), want)
        if dataflow == "both_directions":
            message = re.escape(f"out: made for x_dtype={of_x}, got x_dtype={of_grad}")
            with pytest.raises(ValueError, match=f"^{message}"):
                experts.forward(other.grad, given.routing(), given.probs, out=buffers)
            _, saved = experts.forward(other.x, given.routing(), given.probs, out=buffers)
            message = re.escape(f"out: made for grad_dtype={of_grad}, got grad_dtype={of_x}")
            with pytest.raises(ValueError, match=f"^{message}"):
                experts.backward(other.x, saved, out=buffers)


@pytest.mark.parametrize("recipe", ["blocks", "current"])
@pytest.mark.parametrize("dataflow", ["casting_free", "requantize"])
def test_tokens_in_another_format(dataflow, recipe, run):
    given = GIVEN.moved(run)
    experts: Any = moe.Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow)
    e5m2 = type(RECIPES[recipe])(dtype=float8_e5m2)
    of_grad: Any = fp8.quantize(given.grad, e5m2).rowwise
    sent = given._replace(grad=of_grad)
    buffers = experts.empty(TOKENS, TOPK, grad_dtype=float8_e5m2)
    want = step(experts, sent)
    poisoned(buffers)
    assert_same(step(experts, sent, out=buffers), want)
    other = experts.empty(TOKENS, TOPK)
    with pytest.raises(ValueError, match=r"^out: made for x_dtype=float8_e4m3fn, got x_dtype=float8_e5m2"):
        experts.forward(sent.grad, given.routing(), given.probs, out=other)


# ---- refused ----
@pytest.mark.parametrize(("options", "error", "message"), [
    ({"tokens": -1, "topk": 2}, ValueError, "tokens: expected 0 or more, got -1"),
    ({"tokens": 4, "topk": -2}, ValueError, "topk: expected 0 or more, got -2"),
    ({"tokens": 4, "topk": 2, "rows": -5}, ValueError, "rows: expected 0 or more, got -5"),
    ({"rows": 4.0}, TypeError, "rows: expected an integer, got 4.0"),
    ({"tokens": 4}, ValueError, "tokens, topk, rows: expected tokens and topk, for forward, or rows"),
    ({"topk": 4, "rows": 8}, ValueError, "tokens, topk, rows: expected tokens and topk, for forward"),
    ({}, ValueError, "tokens, topk, rows: expected tokens and topk, for forward, or rows alone"),
    ({"rows": 8, "align": 3}, ValueError, "align: expected a power of two from 1 to 65536, got 3"),
    ({"rows": 8, "probs": "no"}, TypeError, "probs: expected True or False, got 'no'"),
    ({"rows": 8, "accumulate": "no"}, TypeError, "accumulate: expected True or False, got 'no'"),
    ({"rows": 8, "keep": "half"}, ValueError, "keep: expected one of ('bf16', 'fp8', 'input'), got 'h"),
    ({"rows": 8, "x_dtype": "int8"}, TypeError, "x_dtype: expected one of bfloat16, float16, float32, floa"),
    ({"rows": 8, "grad_dtype": "int8"}, TypeError, "grad_dtype: expected one of bfloat16, float16, float32"),
])
def test_wrong_facts(options, error, message, monkeypatch):
    experts: Any = moe.Experts(GIVEN.up, GIVEN.down)
    monkeypatch.setattr(moe.buffers, "zeros", lambda *_, **__: pytest.fail("something was allocated"))
    with pytest.raises(error, match="^" + re.escape(message)):
        experts.empty(**options)


def test_fp8_is_not_quantised_in_both_directions():
    with pytest.raises(TypeError, match=r"^x_dtype: expected one of bfloat16, float16, float32, got float8"):
        moe.Experts(GIVEN.up, GIVEN.down, dataflow="both_directions").empty(rows=8, x_dtype=float8_e5m2)


# ---- no waiting ----
@pytest.mark.parametrize(("dataflow", "recipe"), quick_if(
    lambda pair: pair == ("casting_free", "delayed"),
    [("casting_free", "delayed"), ("both_directions", "blocks"), ("requantize", "blocks")]))
def test_no_step_waits_for_the_device(dataflow, recipe, device, monkeypatch):
    """With biases, updates, rows and every keep; on a GPU through CuPy's functions for reading values."""
    run = device.run
    given, bias = GIVEN.moved(run), tuple(run.array(b) for b in biases(GIVEN))
    experts = moe.Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow, bias=bias)
    routing = given.routing()
    rows, grad = (dispatched(experts, a, routing) for a in (given.x, given.grad))

    def every_step() -> None:
        for keep in KEEPS:
            step(experts, given, routing, keep=keep)
            step(experts, given, routing, keep=keep, out=buffers[keep])
            _, saved = experts.forward_rows(rows, routing.aligned_splits, keep=keep)
            experts.backward_rows(grad, saved)
        experts.update(given.up, given.down, bias)
        if experts.state is not None:
            experts.state.update()

    buffers = {keep: experts.empty(TOKENS, TOPK, keep=keep) for keep in KEEPS}
    every_step()
    if device.name != "stand-in":
        pytest.skip("CuPy's own class cannot be patched; graphs show it there")
    for owner, names in ((stand_in.ndarray, ("get", "__bool__", "__int__", "__float__")),
                         (stand_in.Device, ("synchronize",)), (stand_in.Stream, ("synchronize",)),
                         (device.cupy.cuda.runtime, ("deviceSynchronize",))):
        for name in names:
            monkeypatch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"{name} waits"))
    every_step()
