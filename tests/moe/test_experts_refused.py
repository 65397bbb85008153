"""Experts: what is refused, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from expert_layers import layer

import cupy_fp8 as fp8
from cupy_fp8 import moe
from cupy_fp8.moe.step import arrays_of

GIVEN = layer()
TOKENS, TOPK = GIVEN.chosen.shape
EXPERTS: Any = moe.Experts(GIVEN.up, GIVEN.down)
ROUTING = GIVEN.routing()
SAVED = EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs)[1]
BUFFERS = EXPERTS.empty(TOKENS, TOPK)
SUMS = tuple(np.full(w.shape, 3, np.float32) for w in GIVEN[:2])
BOTH = moe.Experts(GIVEN.up, GIVEN.down, dataflow="both_directions")
SQUARE = fp8.BlockScaling((128, 128))


def of_rows() -> Any:
    return EXPERTS.forward_rows(fp8.permute(fp8.quantize_block(GIVEN.x), ROUTING), ROUTING.aligned_splits)[1]


def updated() -> Any:
    experts = moe.Experts(GIVEN.up, GIVEN.down)
    saved = experts.forward(GIVEN.x, ROUTING)[1]
    experts.update(GIVEN.up, GIVEN.down)
    return experts.backward(GIVEN.grad, saved)


def routed_again() -> Any:
    routing = GIVEN.routing()
    saved = EXPERTS.forward(GIVEN.x, routing)[1]
    fp8.route(GIVEN.chosen, num_experts=4, align=128, out=routing)
    return EXPERTS.backward(GIVEN.grad, saved)


def rescaled(keep: str) -> Any:
    experts: Any = moe.Experts(GIVEN.up, GIVEN.down, fp8.DelayedScaling(history_len=2))
    saved = experts.forward(GIVEN.x, ROUTING, keep=keep)[1]
    experts.state.update()
    return experts.backward(GIVEN.grad, saved)


def overwritten() -> Any:
    saved = EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS)[1]
    EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS)
    return EXPERTS.backward(GIVEN.grad, saved, out=BUFFERS)


def sums_for_buffers() -> Any:
    saved = EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS)[1]
    return EXPERTS.backward(GIVEN.grad, saved, accumulate=SUMS, out=BUFFERS)


def new(*args: Any, **options: Any) -> Any:
    return moe.Experts(*(args or (GIVEN.up, GIVEN.down)), **options)


WRONG: dict[str, Any] = {
    "weights that do not fit": (lambda: new(GIVEN.up, GIVEN.down[:, :, :90]), ValueError,
                                "up, down: expected [E, 2 F, H] and [E, H, F], got (4, 192, 160)"),
    "weights without experts": (lambda: new(GIVEN.up[0], GIVEN.down), ValueError, "up: expected [experts, N"),
    "integers": (lambda: new(GIVEN.up.astype(np.int32), GIVEN.down), TypeError,
                 "up: expected bfloat16, float16, float32, or a Scaled, got int32"),
    "a list": (lambda: new([1], GIVEN.down), TypeError, "up: expected an array, a Scaled or a Quantized"),
    "vectors": (lambda: new(fp8.BlockScaling().quantize(GIVEN.up), GIVEN.down), ValueError,
                "up: expected row-wise weights in blocks of (128, 128), or with one scale, got"),
    "MX": (lambda: new(recipe=fp8.MXScaling()), TypeError,
           "recipe: expected a BlockScaling, CurrentScaling or DelayedScaling, got MXScaling"),
    "squares": (lambda: new(recipe=SQUARE), ValueError, "recipe: expected blocks of (1, 128) with"),
    "scales that are no powers": (lambda: new(recipe=fp8.BlockScaling(pow2_scale=False)), ValueError,
                                  "recipe: the casting-free dataflow moves exponents"),
    "a dataflow": (lambda: new(dataflow="casting-free"), ValueError, "dataflow: expected"),
    "a form": (lambda: new(form="silu"), ValueError, "form: expected"),
    "a clamp": (lambda: new(clamp=-1), ValueError, "clamp: expected"),
    "an update": (lambda: EXPERTS.update(GIVEN.up[:, :2], GIVEN.down), ValueError,
                  "up: expected shape (4, 192, 160), as before, got (4, 2, 160)"),
    "x of another width": (lambda: EXPERTS.forward(GIVEN.x[:, :8], ROUTING), ValueError,
                           "x: expected shape (48, 160), got (48, 8)"),
    "x of other tokens": (lambda: EXPERTS.forward(GIVEN.x[:8], ROUTING), ValueError,
                          "x: expected shape (48, 160), got (8, 160)"),
    "x with one scale": (lambda: EXPERTS.forward(fp8.quantize_tensor(GIVEN.x), ROUTING), ValueError,
                         "x: expected row-wise data with blocks (1, 128), got"),
    "x in FP8 to quantise": (lambda: BOTH.forward(fp8.quantize_block(GIVEN.x), ROUTING), TypeError,
                             "x: expected an array, which 'both_directions' quantises in both directions"),
    "rows that are not FP8": (lambda: EXPERTS.forward_rows(GIVEN.x, ROUTING.aligned_splits), TypeError,
                              "rows: expected rows in FP8 (a Scaled), got ndarray"),
    "no routing": (lambda: EXPERTS.forward(GIVEN.x, GIVEN.chosen), TypeError, "routing: expected a Routing"),
    "other experts": (lambda: EXPERTS.forward(GIVEN.x, fp8.route(GIVEN.chosen, num_experts=5)), ValueError,
                      "routing: expected 4 experts, got 5"),
    "groups anywhere": (lambda: BOTH.forward(GIVEN.x, GIVEN.routing(16)), ValueError,
                        "routing: expected align=128, since 'both_directions'"),
    "probs": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs[:, :1]), ValueError,
              "probs: expected a float32 array of shape (48, 2), got float32 (48, 1)"),
    "sizes": (lambda: EXPERTS.forward_rows(fp8.permute(fp8.quantize_block(GIVEN.x), ROUTING), [128, 256]),
              ValueError, "splits: expected the sizes of 4 experts, got 2"),
    "keep": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, keep="bfloat16"), ValueError, "keep: expected"),
    "nothing saved": (lambda: EXPERTS.backward(GIVEN.grad, None), TypeError,
                      "saved: expected what forward returned, got None, since forward kept nothing"),
    "another layer's": (lambda: new().backward(GIVEN.grad, SAVED), ValueError,
        "saved: belongs to another layer"),
    "other weights": (updated, ValueError, "saved: the weights have been updated"),
    "other scales": (lambda: rescaled("input"), ValueError, "saved: the state's scales have been updated"),
    "other scales of h": (lambda: rescaled("fp8"), ValueError, "saved: the state's scales have been updated"),
    "no multiple": (lambda: EXPERTS.forward_rows(GIVEN.x, ROUTING.aligned_splits, align=0), ValueError,
                    "align: expected a power of two from 1 to 65536, got 0"),
    "rows anywhere": (lambda: BOTH.forward_rows(GIVEN.x, [16, 16, 16, 0], align=16), ValueError,
                      "align: expected align=128, since 'both_directions'"),
    "another routing": (routed_again, ValueError, "saved: its routing has been written again"),
    "rows to backward": (lambda: EXPERTS.backward(GIVEN.grad, of_rows()), ValueError,
                         "saved: comes from forward_rows, whose gradients backward_rows computes"),
    "tokens to backward_rows": (lambda: EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), SAVED),
        ValueError,
                                "saved: comes from forward, whose gradients backward computes"),
    "no function": (lambda: EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), of_rows(), on_rows=1),
                    TypeError, "on_rows: expected a function of the gradients of the rows and of row_probs"),
    "a gradient": (lambda: EXPERTS.backward(GIVEN.grad[:4], SAVED), ValueError,
                   "grad: expected shape (48, 160), got (4, 160)"),
    "sums": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, accumulate=(GIVEN.up, GIVEN.down)), ValueError,
             "accumulate (up): expected a C-contiguous float32 array of shape (4, 192, 160), got bfloat16"),
    "a second sum": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, accumulate=(SUMS[0], GIVEN.down)),
                     ValueError,
                     "accumulate (down): expected a C-contiguous float32 array of shape (4, 160, 96), "),
    "sums of a gradient that is wrong": (
        lambda: EXPERTS.backward(GIVEN.grad[:4], SAVED, accumulate=SUMS), ValueError, "grad: expected shape"),
    "sums for buffers without": (sums_for_buffers, ValueError,
                                 "out: made for accumulate=False, got accumulate=True"),
    "one sum": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, accumulate=GIVEN.up), TypeError,
                "accumulate: expected two arrays"),
    "buffers of nobody": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, out=GIVEN.x), TypeError,
                          "out: expected Buffers, as empty() makes them, got ndarray"),
    "another layer's buffers": (lambda: new().forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS), ValueError,
                                "out: these buffers belong to another layer"),
    "buffers of other tokens": (
        lambda: EXPERTS.forward(GIVEN.x, GIVEN.routing(rows=1024), GIVEN.probs, out=BUFFERS), ValueError,
        "out: made for rows="),
    "buffers of another align": (
        lambda: EXPERTS.forward(GIVEN.x, GIVEN.routing(64), GIVEN.probs, out=BUFFERS), ValueError,
        "out: made for align=128, got align=64"),
    "buffers with probs": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, out=BUFFERS), ValueError,
                           "out: made for probs=True, got probs=False"),
    "no buffers": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, out=BUFFERS), ValueError,
                   "out: expected no buffers that the forward pass had"),
    "buffers written again": (overwritten, ValueError, "saved: a later forward pass has written its buffers"),
}


#: a step into the buffers comes before what is refused
STEPS_BEFORE = {"buffers written again", "sums for buffers without"}


def contents() -> dict[str, list[bytes]]:
    values = {"given": tuple(GIVEN), "sums": SUMS, "weights": (EXPERTS.up, EXPERTS.down),
              "buffers": tuple(BUFFERS._made.values())}
    return {name: [a.tobytes() for a in arrays_of(value)] for name, value in values.items()}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    call, error, message = WRONG[name]
    before = contents()
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
    after = contents()
    if name in STEPS_BEFORE:
        after["buffers"] = before["buffers"]
    assert after == before


def test_buffers_are_not_written_by_a_call_that_is_refused():
    buffers = EXPERTS.empty(TOKENS, TOPK)
    held = {name: [a.tobytes() for a in arrays_of(made)] for name, made in buffers._made.items()}
    for wrong in ({"x": GIVEN.x[:, :8]}, {"probs": GIVEN.probs[:1]}):
        given = {"x": GIVEN.x, "probs": GIVEN.probs} | wrong
        with pytest.raises(ValueError, match="expected"):
            EXPERTS.forward(given["x"], ROUTING, given["probs"], out=buffers)
    assert {name: [a.tobytes() for a in arrays_of(made)] for name, made in buffers._made.items()} == held


def test_other_scales_where_the_activation_is_kept():
    assert rescaled("bf16")[2].shape == GIVEN.up.shape


def test_sizes_that_do_not_begin_at_blocks():
    """Refused if known on the host; a device notes it (test_grouped_matmul_nt)."""
    rows = fp8.quantize_block(GIVEN.x)
    with pytest.raises(ValueError, match=r"^splits: expected multiples of align=128, got 20; align=1"):
        EXPERTS.forward_rows(rows, np.array([20, 20, 8, 0]))
    _, saved = EXPERTS.forward_rows(rows, np.array([20, 20, 8, 0]), align=1)
    assert EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), saved)[2].dtype == EXPERTS.dtype


def test_representations():
    assert repr(EXPERTS).startswith("Experts(4 experts, hidden 160, inner 96, BlockScaling(")
    assert repr(SAVED).startswith("Saved(keep='bf16': rows, hidden, activation, ")
    assert (EXPERTS.num_experts, EXPERTS.inner, EXPERTS.hidden) == (4, 96, 160)
