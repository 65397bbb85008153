"""Experts: a refused call has written nothing, whatever memory it was given."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from expert_layers import FLOWS, layer, step

import cupy_fp8 as fp8
from cupy_fp8 import moe, testing
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float32
from cupy_fp8.moe import experts as layers
from cupy_fp8.moe.step import arrays_of

#: Weights are smaller than the arrays of a step, parts of which may serve as gradients of weights.
GIVEN = layer(hidden=8, inner=8)
TOKENS, TOPK = GIVEN.chosen.shape
ROUTING = GIVEN.routing()
SIZES = np.asarray(ROUTING.aligned_splits)
OVERLAPS = "in memory; results need memory of their own"


def made(dataflow: Any = "casting_free", **options: Any) -> Any:
    return moe.Experts(GIVEN.up, GIVEN.down, dataflow=dataflow, **options)


def rows_of(experts: Any, a: Any) -> Any:
    return fp8.permute(a if experts.dataflow == "both_directions" else fp8.quantize_block(a), ROUTING)


def contents(*holders: Any) -> list[bytes]:
    values = [holder._made if isinstance(holder, moe.Buffers) else {"": holder} for holder in holders]
    return [fp8.asnumpy(a).tobytes() for each in values for held in each.values() for a in arrays_of(held)]


def refused(call: Callable[[], Any], error: type[Exception], message: str, *unchanged: Any) -> None:
    before = contents(*unchanged)
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
    assert contents(*unchanged) == before


def part_of(a: Any, shape: tuple[int, ...]) -> Any:
    """Return a float32 array in the memory of another."""
    return a.reshape(-1).view(np.uint8)[:4 * int(np.prod(shape))].view(float32).reshape(shape)


def sums() -> list[Any]:
    return [np.full(w.shape, 3, np.float32) for w in (GIVEN.up, GIVEN.down)]


# ---- sizes ----
SPLITS: dict[str, Any] = {
    "too few": (SIZES[:3], ValueError, "splits: expected the sizes of 4 experts, got 3"),
    "too many": ([0, *SIZES], ValueError, "splits: expected the sizes of 4 experts, got 5"),
    "a matrix": (SIZES[None], ValueError, "splits: expected the sizes of 4 experts, got shape (1, 4)"),
    "floats": (SIZES.astype(np.float32), TypeError, "splits: expected dtype int32, int64, got float32"),
    "None": (None, TypeError, "splits: expected the sizes of 4 experts, an int32 or int64 array or a list, "
                              "got None"),
    "a number": (128, TypeError, "splits: expected the sizes of 4 experts, an int32"),
    "more than rows": ([1024, 0, 0, 0], ValueError, "splits: expected sizes that add up to at most the 512"),
    "negative": ([-128, 128, 0, 0], ValueError, "splits: expected sizes of 0 or more, got -128 for group 0"),
    "strings": (["a", "b", "c", "d"], TypeError, "splits: expected integers ('str' object"),
    "lists": ([[128], [0], [0], [0]], TypeError, "splits: expected integers ('list' object"),
    "truths": ([True, False, False, False], TypeError, "splits: expected integers (a truth value"),
    "no multiple": (SIZES - 28 * (SIZES > 0), ValueError, "splits: expected multiples of align=128, got 100"),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("dataflow", FLOWS)
def test_wrong_sizes(dataflow, name):
    """What the previous forward pass saved is still valid."""
    given, error, message = SPLITS[name]
    experts = made(dataflow)
    buffers = experts.empty(TOKENS, TOPK)
    rows, grad = rows_of(experts, GIVEN.x), rows_of(experts, GIVEN.grad)
    _, saved = experts.forward_rows(rows, SIZES, np.ones(512, np.float32), out=buffers)
    want = contents(experts.backward_rows(grad, saved, out=buffers))
    other = rows_of(experts, -GIVEN.x)
    refused(lambda: experts.forward_rows(other, given, np.ones(512, np.float32), out=buffers), error, message,
            buffers)
    assert contents(experts.backward_rows(grad, saved, out=buffers)) == want


def test_sizes_on_a_device(device):
    """Shape, dtype, kind and GPU are checked, values are not; a list is copied there."""
    run = device.run
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    rows = fp8.permute(fp8.quantize_block(given.x), given.routing())
    for wrong, message in ((SIZES[:3], "splits: expected the sizes of 4 experts, got 3"),
                           (SIZES[None], "splits: expected the sizes of 4 experts, got shape (1, 4)")):
        refused(lambda wrong=wrong: experts.forward_rows(rows, run.array(wrong)),  # type: ignore[misc]
                ValueError, message)
    refused(lambda: experts.forward_rows(rows, SIZES), TypeError, "splits: a numpy array among cupy arrays")
    if len(device.devices) > 1:
        far: Any = device.array(SIZES, device.devices[1])
        refused(lambda: experts.forward_rows(rows, far), ValueError, "splits: on GPU")
    found, saved = experts.forward_rows(rows, SIZES.tolist())
    testing.assert_bytes_equal(found, experts.forward_rows(rows, run.array(SIZES))[0])
    testing.assert_bytes_equal(saved.splits, SIZES.astype(np.int64))
    experts.forward_rows(rows, run.array(SIZES * 9))        # noted, not refused
    assert any("do not add up" in each for each in fp8.device_errors(clear=True))


def test_sizes_that_are_no_multiples_are_noted(device):
    """The weight gradients of such experts are 0, and those of others unaffected."""
    run = device.run
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    rows, grad = (fp8.permute(fp8.quantize_block(a), given.routing()) for a in (given.x, given.grad))
    fp8.device_errors(clear=True)
    _, saved = experts.forward_rows(rows, run.array(np.array([128, 100, 128, 0], np.int32)))
    _, _, d_up, d_down = experts.backward_rows(grad, saved)
    assert any("or of the promised align; its product is 0" in each for each in fp8.device_errors(clear=True))
    for d in (fp8.asnumpy(d_up), fp8.asnumpy(d_down)):
        assert [bool(each.astype(np.float32).any()) for each in d] == [True, False, False, False]


def test_a_step_that_fails_makes_the_one_before_stale(monkeypatch):
    experts = made()
    buffers = experts.empty(TOKENS, TOPK)
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "unpermute", lambda *_, **__: pytest.fail("an error of the device"))
        with pytest.raises(pytest.fail.Exception):
            experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    refused(lambda: experts.backward(GIVEN.grad, saved, out=buffers), ValueError,
            "saved: a later forward pass has written its buffers")


# ---- sums of weight gradients ----
def read_only() -> list[Any]:
    found = sums()
    found[1].flags.writeable = False
    return found


def unaligned() -> list[Any]:
    up, down = sums()
    memory = np.zeros(down.nbytes + 8, np.uint8)
    at = 1 - memory.ctypes.data % 4 + 4
    return [up, memory[at:at + down.nbytes].view(np.float32).reshape(down.shape)]


def overlapping() -> list[Any]:
    up, down = sums()
    memory = np.zeros(up.size + down.size, np.float32)
    return [memory[:up.size].reshape(up.shape), memory[up.size - 1:-1].reshape(down.shape)]


@pytest.mark.parametrize(("given", "message"), [
    (read_only, "accumulate (down): the array is read-only"),
    (unaligned, "accumulate (down): address"),
    (overlapping, f"accumulate (down): overlaps accumulate (up) {OVERLAPS}"),
    (lambda: [sums()[0], np.asfortranarray(sums()[1])], "accumulate (down): expected a C-contiguous float32"),
])
def test_wrong_sums(given, message):
    experts, found = made(), given()
    buffers = experts.empty(TOKENS, TOPK, accumulate=True)
    for out in (None, buffers):
        _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=out)
        refused(lambda out=out, saved=saved:                # type: ignore[misc]
                experts.backward(GIVEN.grad, saved, accumulate=found, out=out), ValueError, message, *found,
                buffers)


def test_sums_in_memory_that_the_step_has():
    experts = made("both_directions")
    buffers = experts.empty(TOKENS, TOPK, accumulate=True, grad_dtype=float32)
    x, grad = (np.zeros((2, TOKENS, 8), dtype) for dtype in (bfloat16, np.float32))
    x[0], grad[0] = GIVEN.x, GIVEN.grad
    up, down = sums()
    for keep in ("bf16", "input"):
        _, saved = experts.forward(x[0], ROUTING, GIVEN.probs, keep=keep)
        wrong = {"grad": grad, "saved": x} if keep == "input" else {"saved": saved.hidden}
        for name, memory in wrong.items():
            refused(lambda saved=saved, memory=memory:      # type: ignore[misc]
                    experts.backward(grad[0], saved, accumulate=(up, part_of(memory, down.shape))),
                    ValueError, f"accumulate (down): overlaps {name} {OVERLAPS}", up, x, grad)
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    refused(lambda: experts.backward(grad[0], saved, out=buffers,
                                     accumulate=(part_of(buffers._made["h"], up.shape), down)),
            ValueError, f"accumulate (up): overlaps out (h) {OVERLAPS}", down, buffers)


def test_sums_in_memory_of_weights():
    memory = np.zeros(4 * GIVEN.up.size, np.uint8)
    data = memory[:GIVEN.up.size].view(float8_e4m3fn).reshape(GIVEN.up.shape)
    data[...] = fp8.quantize_tensor(GIVEN.up.reshape(-1, 8), 1.0).data.reshape(GIVEN.up.shape)
    held = fp8.Scaled(data, np.ones(1, np.float32), data.shape)
    experts: Any = moe.Experts(held, GIVEN.down, fp8.CurrentScaling())
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs)
    up, down = part_of(memory, GIVEN.up.shape), sums()[1]
    refused(lambda: experts.backward(GIVEN.grad, saved, accumulate=(up, down)), ValueError,
            f"accumulate (up): overlaps the layer's up {OVERLAPS}", memory, down)
    experts.update(GIVEN.up, GIVEN.down)                    # into memory of its own
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs)
    assert experts.backward(GIVEN.grad, saved, accumulate=(up, down))[2] is up


# ---- what a step is given, in its buffers ----
@pytest.mark.parametrize("dataflow", FLOWS)
def test_inputs_in_buffers(dataflow):
    experts = made(dataflow)
    buffers = experts.empty(TOKENS, TOPK)
    y, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    dx, dprobs, *_ = experts.backward(GIVEN.grad, saved, out=buffers)
    inside = part_of(buffers._made["h"], GIVEN.probs.shape)
    for name, x, probs in (("x: overlaps out (y)", y, GIVEN.probs), ("x: overlaps out (dx)", dx, GIVEN.probs),
                           ("probs: overlaps out (dx)", GIVEN.x, dprobs),
                           ("probs: overlaps out (h)", GIVEN.x, inside)):
        refused(partial(experts.forward, x, ROUTING, probs, out=buffers), ValueError,
                f"{name} {OVERLAPS}", buffers)
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    refused(lambda: experts.backward(dx, saved, out=buffers), ValueError,
            f"grad: overlaps out (dx) {OVERLAPS}", buffers)


@pytest.mark.parametrize("dataflow", FLOWS)
def test_rows_in_buffers(dataflow):
    experts = made(dataflow)
    buffers, rows, grad = experts.empty(rows=512), rows_of(experts, GIVEN.x), rows_of(experts, GIVEN.grad)
    p = np.ones(512, np.float32)
    _, saved = experts.forward_rows(rows, SIZES, p, out=buffers)
    h = buffers._made["h"]
    inside = h.reshape(-1)[:512 * 8].reshape(512, 8)
    if dataflow != "both_directions":
        codes = h.reshape(-1).view(float8_e4m3fn)[:512 * 8].reshape(512, 8)
        inside = fp8.Scaled(codes, rows.scale_inv, (512, 8), block=(1, 128), scale_layout="gemm_ready")
    for name, *given in (("rows", inside, SIZES, p), ("row_probs", rows, SIZES, part_of(h, (512,))),
                         ("splits", rows, part_of(h, (4,)).view(np.int32), p)):
        if name == "splits":
            h.reshape(-1)[:8] = 0
        refused(lambda given=given: experts.forward_rows(*given, out=buffers),  # type: ignore[misc]
                ValueError, f"{name}: overlaps out (h) {OVERLAPS}", buffers)
    _, saved = experts.forward_rows(rows, SIZES, p, out=buffers)
    refused(lambda: experts.backward_rows(inside, saved, out=buffers), ValueError,
            f"grad_rows: overlaps out (h) {OVERLAPS}", buffers)
    experts.backward_rows(grad, saved, out=buffers)


@pytest.mark.parametrize("dataflow", FLOWS)
def test_a_gradient_in_the_place_of_y(dataflow):
    experts = made(dataflow)
    buffers = experts.empty(TOKENS, TOPK)
    y, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    y[...] = GIVEN.grad
    found = experts.backward(y, saved, out=buffers)
    for got, want in zip(found, step(experts, GIVEN)[1:], strict=True):
        testing.assert_bytes_equal(got, want)


# ---- scales ----
def test_scales_that_are_no_powers_of_two():
    experts = made()
    wrong = [fp8.quantize_block(a, pow2_scale=False) for a in (GIVEN.x, GIVEN.grad)]
    routed = ROUTING, GIVEN.probs
    buffers, into = experts.empty(TOKENS, TOPK), sums()
    message = "{}.scale_inv: expected powers of two, got "
    refused(lambda: experts.forward(wrong[0], *routed, out=buffers), ValueError, message.format("x"), buffers)
    _, saved = experts.forward(GIVEN.x, *routed)
    refused(lambda: experts.backward(wrong[1], saved, accumulate=into), ValueError, message.format("grad"),
            *into)
    rows = [fp8.permute(q, ROUTING) for q in wrong]
    refused(lambda: experts.forward_rows(rows[0], SIZES), ValueError, message.format("rows"))
    right = fp8.permute(fp8.quantize_block(GIVEN.x), ROUTING)
    right.scale_inv[:, SIZES.sum():] = 3                    # of rows that no expert has
    _, saved = experts.forward_rows(right, SIZES)
    refused(lambda: experts.backward_rows(rows[1], saved), ValueError, message.format("grad_rows"))
    y, _ = experts.forward(wrong[0], *routed, keep=None)    # no columns are made
    assert y.shape == GIVEN.x.shape


# ---- copies ----
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_is_copied(copied):
    experts = made()
    buffers = experts.empty(TOKENS, TOPK)
    _, saved = experts.forward(GIVEN.x, ROUTING, GIVEN.probs, out=buffers)
    for value, instead in ((experts, "make another layer, of the same weights"),
                           (saved, "call forward again"), (buffers, "empty() of the layer makes others")):
        refused(lambda value=value: copied(value), TypeError,  # type: ignore[misc]
                f"{type(value).__name__}: cannot be copied or pickled; {instead}")
    other = moe.Experts(experts.up, experts.down, experts.recipe)
    for got, want in zip(step(other, GIVEN), step(experts, GIVEN), strict=True):
        testing.assert_bytes_equal(got, want)


def test_buffers_hold_nothing_of_the_caller():
    experts = made()
    buffers = experts.empty(rows=ROUTING.rows)

    def step_of_rows() -> weakref.ref[Any]:
        rows, grad = rows_of(experts, GIVEN.x), rows_of(experts, GIVEN.grad)
        _, saved = experts.forward_rows(rows, SIZES, np.ones(len(rows.data), np.float32), out=buffers)
        experts.backward_rows(grad, saved, out=buffers)
        return weakref.ref(rows.data)

    gone = [step_of_rows() for _ in range(2)]
    gc.collect()
    assert [each() for each in gone] == [None, None]
