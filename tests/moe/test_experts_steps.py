"""Experts from step to step: buffers, weights that change, CUDA graphs, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from expert_layers import FLOWS, errors, in_float64, layer, step

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, moe, testing
from cupy_fp8.calls.descriptions import Allocation
from cupy_fp8.moe.experts import KEEPS
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
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("dataflow", "recipe"), [(flow, "blocks") for flow in FLOWS]
                         + [("casting_free", "current"), ("casting_free", "delayed")])
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
            if a.dtype != np.int32:                         # sizes are looked at where they are on the host
                cases.poison(a)
    held = buffers.nbytes
    if run.name != "reference":                             # which computes into new memory
        monkeypatch.setattr(Allocation, "make", lambda *_: pytest.fail("something was allocated"))
    for each, want in zip((routing, other, routing), wanted, strict=True):
        assert_same(step(experts, given, each, keep=keep, out=buffers), want)
    assert buffers.nbytes == held
    assert f"{held:,} bytes" in repr(buffers)


def test_buffers_for_inference(run):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    buffers = experts.empty(TOKENS, TOPK, keep=None)
    y, saved = experts.forward(given.x, given.routing(), given.probs, keep=None, out=buffers)
    assert saved is None
    testing.assert_bytes_equal(y, step(experts, given)[0])
    assert buffers.nbytes < experts.empty(TOKENS, TOPK).nbytes / 2


def test_buffers_leave_the_state_alone(run):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down, fp8.DelayedScaling(history_len=4))
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
    assert_same((experts.up, experts.down),
                [getattr(moe.Experts(other.up, other.down, RECIPES[recipe]), name) for name in ("up", "down")])


def test_one_launch_updates_blocks(run, launched):
    given = GIVEN.moved(run)
    experts = moe.Experts(given.up, given.down)
    launched.clear()
    experts.update(given.up, given.down)
    assert len(launched) == (0 if run.name == "reference" else 1)


@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_weights_of_a_checkpoint_are_not_quantised_again(layout, run):
    """Codes that no quantiser would give, and scales that are no powers of two."""
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
    experts.update(given.up, given.down)                    # The checkpoint's own arrays stay.
    assert_same(step(experts, given), step(moe.Experts(given.up, given.down), given))
    assert up.data.tobytes() == before


def test_weights_with_one_scale(run):
    up, down = (fp8.CurrentScaling().quantize(w).rowwise for w in GIVEN[:2])
    given = GIVEN.moved(run)
    found = step(moe.Experts(run.array(up), run.array(down), fp8.CurrentScaling()), given)
    assert_same(found, step(moe.Experts(given.up, given.down, fp8.CurrentScaling()), given))


# ---- what is refused ----
EXPERTS = moe.Experts(GIVEN.up, GIVEN.down)
ROUTING = GIVEN.routing()
SAVED = EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs)[1]
BUFFERS = EXPERTS.empty(TOKENS, TOPK)
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


def overwritten() -> Any:
    saved = EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS)[1]
    EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS)
    return EXPERTS.backward(GIVEN.grad, saved, out=BUFFERS)


def new(*args: Any, **options: Any) -> Any:
    return moe.Experts(*(args or (GIVEN.up, GIVEN.down)), **options)


WRONG: dict[str, Any] = {
    "weights that do not fit": (lambda: new(GIVEN.up, GIVEN.down[:, :, :90]), ValueError,
                                "up, down: expected [E, 2 F, H] and [E, H, F], got (4, 192, 160)"),
    "weights without experts": (lambda: new(GIVEN.up[0], GIVEN.down), ValueError, "up: expected [experts, N"),
    "integers": (lambda: new(GIVEN.up.astype(np.int32), GIVEN.down), TypeError, "up: expected bfloat16, float16, float32, or a Scaled, got int32"),
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
    "rows that are not FP8": (lambda: EXPERTS.forward_rows(GIVEN.x, [48, 0, 0, 0]), TypeError,
                              "rows: expected rows in FP8 (a Scaled), got ndarray"),
    "no routing": (lambda: EXPERTS.forward(GIVEN.x, GIVEN.chosen), TypeError, "routing: expected a Routing"),
    "other experts": (lambda: EXPERTS.forward(GIVEN.x, fp8.route(GIVEN.chosen, num_experts=5)), ValueError,
                      "routing: expected 4 experts, got 5"),
    "groups anywhere": (lambda: BOTH.forward(GIVEN.x, GIVEN.routing(16)), ValueError,
                        "routing: expected align=128, since 'both_directions'"),
    "probs": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, GIVEN.probs[:, :1]), ValueError,
              "probs: expected a float32 array of shape (48, 2), got float32 (48, 1)"),
    "sizes": (lambda: EXPERTS.forward_rows(fp8.permute(fp8.quantize_block(GIVEN.x), ROUTING), [1, 2]), ValueError,
              "b: expected the weights of 2 groups"),
    "keep": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, keep="bfloat16"), ValueError, "keep: expected"),
    "nothing saved": (lambda: EXPERTS.backward(GIVEN.grad, None), TypeError,
                      "saved: expected what forward returned, got None, since forward kept nothing"),
    "another layer's": (lambda: new().backward(GIVEN.grad, SAVED), ValueError, "saved: belongs to another layer"),
    "other weights": (updated, ValueError, "saved: the weights have been updated"),
    "another routing": (routed_again, ValueError, "saved: its routing has been written again"),
    "rows to backward": (lambda: EXPERTS.backward(GIVEN.grad, of_rows()), ValueError,
                         "saved: comes from forward_rows, whose gradients backward_rows computes"),
    "tokens to backward_rows": (lambda: EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), SAVED), ValueError,
                                "saved: comes from forward, whose gradients backward computes"),
    "a gradient": (lambda: EXPERTS.backward(GIVEN.grad[:4], SAVED), ValueError,
                   "grad: expected shape (48, 160), got (4, 160)"),
    "sums": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, accumulate=(GIVEN.up, GIVEN.down)), ValueError,
             "accumulate (up): expected a C-contiguous float32 array of shape (4, 192, 160), got bfloat16"),
    "one sum": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, accumulate=GIVEN.up), TypeError,
                "accumulate: expected two arrays"),
    "buffers of nobody": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, out=GIVEN.x), TypeError,
                          "out: expected Buffers, as empty() makes them, got ndarray"),
    "another layer's buffers": (lambda: new().forward(GIVEN.x, ROUTING, GIVEN.probs, out=BUFFERS), ValueError,
                                "out: these buffers belong to another layer"),
    "buffers of other tokens": (
        lambda: EXPERTS.forward(GIVEN.x, GIVEN.routing(64), GIVEN.probs, out=BUFFERS), ValueError,
        "out: made for rows="),
    "buffers with probs": (lambda: EXPERTS.forward(GIVEN.x, ROUTING, out=BUFFERS), ValueError,
                           "out: made for probs=True, got probs=False"),
    "no buffers": (lambda: EXPERTS.backward(GIVEN.grad, SAVED, out=BUFFERS), ValueError,
                   "out: expected no buffers that the forward pass had"),
    "buffers written again": (overwritten, ValueError, "saved: a later forward pass has written its buffers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    call, error, message = WRONG[name]
    before = [a.tobytes() for a in GIVEN]
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
    assert [a.tobytes() for a in GIVEN] == before


def test_buffers_are_not_written_by_a_call_that_is_refused():
    buffers = EXPERTS.empty(TOKENS, TOPK)
    held = {name: [a.tobytes() for a in arrays_of(made)] for name, made in buffers._made.items()}
    for wrong in ({"x": GIVEN.x[:, :8]}, {"probs": GIVEN.probs[:1]}):
        given = {"x": GIVEN.x, "probs": GIVEN.probs} | wrong
        with pytest.raises(ValueError):
            EXPERTS.forward(given["x"], ROUTING, given["probs"], out=buffers)
    assert {name: [a.tobytes() for a in arrays_of(made)] for name, made in buffers._made.items()} == held


def test_sizes_that_do_not_begin_at_blocks():
    """What a host knows is refused; a device notes it (test_grouped_matmul_nt)."""
    rows = fp8.quantize_block(GIVEN.x)
    _, saved = EXPERTS.forward_rows(rows, np.array([20, 20, 8, 0]))
    with pytest.raises(ValueError, match="splits: expected groups that begin at multiples of 128"):
        EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), saved)
    _, saved = EXPERTS.forward_rows(rows, np.array([20, 20, 8, 0]), align=1)
    assert EXPERTS.backward_rows(fp8.quantize_block(GIVEN.grad), saved)[2].dtype == EXPERTS.dtype_out


def test_representations():
    assert repr(EXPERTS).startswith("Experts(4 experts, hidden 160, inner 96, BlockScaling(")
    assert repr(SAVED).startswith("Saved(keep='bf16': rows, hidden, activation, ")
    assert (EXPERTS.num_experts, EXPERTS.inner, EXPERTS.hidden) == (4, 96, 160)


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keep", KEEPS)
def test_a_step_in_a_graph(keep, recipe):
    """Captured once, with the update of the weights, and replayed with other routings, tokens and weights."""
    cp = backend.cupy()
    with testing.executor("cuda") as run:
        held, others = GIVEN.moved(run), [layer(seed=i).moved(run) for i in (1, 2, 3)]
        experts = moe.Experts(held.up, held.down, RECIPES[recipe])
        buffers, routing = experts.empty(TOKENS, TOPK, keep=keep), held.routing()

        def whole() -> tuple[Any, ...]:
            fp8.route(held.chosen, num_experts=4, align=128, out=routing)
            experts.update(held.up, held.down)
            return step(experts, held, routing, keep=keep, out=buffers)

        whole()
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            found = whole()
            graph = stream.end_capture()
        for other in others:
            for mine, new in zip(held, other, strict=True):
                mine.view(cp.uint8)[...] = new.view(cp.uint8)
            graph.launch(stream)
            stream.synchronize()
            got = [fp8.asnumpy(a).copy() for a in found]
            alone = moe.Experts(other.up, other.down, RECIPES[recipe])
            if experts.state is None:
                assert_same(got, [fp8.asnumpy(a) for a in step(alone, other, keep=keep)])


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
