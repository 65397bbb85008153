"""Expert layers for comparison: in float64, and composed of public calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import cases, moe, testing
from cupy_fp8.formats import bfloat16

FLOWS = moe.dataflow.DATAFLOWS
GATE = 1.702                            # of gpt-oss


class Layer(NamedTuple):
    """Inputs of a step: weights, tokens, the experts of each, their probs, and the gradient of y."""

    up: np.ndarray
    down: np.ndarray
    x: np.ndarray
    chosen: np.ndarray
    probs: np.ndarray
    grad: np.ndarray

    def moved(self, run: Any) -> Layer:
        return Layer(*map(run.array, self))

    def routing(self, align: int = 128, **options: Any) -> fp8.Routing:
        return fp8.route(self.chosen, num_experts=len(self.up), align=align, **options)


def layer(tokens: int = 48, topk: int = 2, experts: int = 4, hidden: int = 160, inner: int = 96,
          seed: int = 0) -> Layer:
    """The last expert has no token, and some slots are dropped."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(bfloat16)

    chosen = np.argsort(rng.random((tokens, max(experts - 1, topk))), axis=1)[:, :topk].astype(np.int32)
    if tokens * topk > 8:
        chosen[::7, 0] = -1
    return Layer(normal(experts, 2 * inner, hidden, scale=hidden ** -0.5),
                 normal(experts, hidden, inner, scale=inner ** -0.5), normal(tokens, hidden), chosen,
                 rng.random((tokens, topk), dtype=np.float32), normal(tokens, hidden))


def biases(given: Layer, seed: int = 5, scale: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Biases of up [E, 2 F] and of down [E, H]."""
    rng, (experts, hidden, _) = np.random.default_rng(seed), given.down.shape
    shapes = (experts, given.up.shape[1]), (experts, hidden)
    up, down = ((scale * rng.standard_normal(shape)).astype(bfloat16) for shape in shapes)
    return up, down


def act(a: np.ndarray, b: np.ndarray, form: str, clamp: float | None) -> tuple[np.ndarray, ...]:
    """Return (the activation, its derivatives by a and by b), in float64."""
    in_a, in_b = np.ones_like(a), np.ones_like(b)
    if clamp is not None:
        in_a, in_b = a <= clamp, abs(b) <= clamp
        a, b = np.minimum(a, clamp), np.clip(b, -clamp, clamp)
    gate = GATE if form == "gpt_oss" else 1.0
    b = b + 1 if form == "gpt_oss" else b
    sigma = 1 / (1 + np.exp(-gate * a))
    return a * sigma * b, b * sigma * (1 + gate * a * (1 - sigma)) * in_a, a * sigma * in_b


def in_float64(given: Layer, form: str = "swiglu", clamp: float | None = None, interleaved: bool = False,
               bias: tuple[Any, Any] | None = None) -> tuple[np.ndarray, ...]:
    """Return (y, dx, dprobs, d_up, d_down), and with biases their gradients."""
    up, down, x, probs, grad = (np.asarray(a, np.float64)
                                for a in (given.up, given.down, given.x, given.probs, given.grad))
    y, dx, dprobs = np.zeros_like(x), np.zeros_like(x), np.zeros_like(probs)
    d_up, d_down = np.zeros_like(up), np.zeros_like(down)
    of_up, of_down = (np.zeros(w.shape[:2]) if b is None else b.astype(np.float64)
                      for w, b in zip((up, down), bias or (None, None), strict=True))
    d_of_up, d_of_down = np.zeros_like(of_up), np.zeros_like(of_down)
    for e in range(len(up)):
        token, slot = np.nonzero(given.chosen == e)
        h, p = x[token] @ up[e].T + of_up[e], probs[token, slot][:, None]
        a, b = (h[:, 0::2], h[:, 1::2]) if interleaved else np.split(h, 2, axis=1)
        value, by_a, by_b = act(a, b, form, clamp)
        np.add.at(y, token, (value * p) @ down[e].T + p * of_down[e])
        d_value = grad[token] @ down[e]
        d_down[e] = grad[token].T @ (value * p)
        dprobs[token, slot] = (d_value * value).sum(1) + grad[token] @ of_down[e]
        d_of_down[e] = (grad[token] * p).sum(0)
        d_a, d_b = d_value * p * by_a, d_value * p * by_b
        dh = np.stack([d_a, d_b], 2).reshape(h.shape) if interleaved else np.concatenate([d_a, d_b], 1)
        d_up[e], d_of_up[e] = dh.T @ x[token], dh.sum(0)
        np.add.at(dx, token, dh @ up[e])
    return (y, dx, dprobs, d_up, d_down, *((d_of_up, d_of_down) if bias else ()))


def by_hand(given: Layer, align: int = 128, bias: tuple[Any, Any] = (None, None)) -> tuple[Any, ...]:
    """Run the casting-free layer from public calls: (y, dx, dprobs, d_up, d_down), and the gradients of
    biases, if there are both."""
    blocks, squares = fp8.BlockScaling(), fp8.BlockScaling((128, 128))
    up, down = (squares.quantize(w, columnwise=True) for w in given[:2])
    routing = given.routing(align)
    splits = routing.aligned_splits
    of_up: dict[str, Any] = {} if bias[0] is None else {"bias": bias[0], "splits": splits}
    of_down: dict[str, Any] = {}
    rows, p = fp8.permute(blocks.quantize(given.x), routing, probs=given.probs)
    h = fp8.grouped_matmul_nt(rows, up, splits)
    if bias[1] is not None:
        of_down = {"bias": bias[1], "bias_weights": p}
    a = fp8.swiglu_quantize(h, blocks, probs=p, **of_up)
    y = fp8.unpermute(fp8.grouped_matmul_nt(a, down, splits, **of_down), routing)

    grads = fp8.permute(blocks.quantize(given.grad), routing)
    columns = [fp8.scaling_aware_transpose(q, splits=splits) for q in (grads, a, rows)]
    d_down = fp8.grouped_matmul_nt(columns[0], columns[1], splits, group="k")
    dh, dp = fp8.swiglu_backward_quantize(fp8.grouped_matmul_nt(grads, down.T, splits), h, blocks, probs=p,
                                          columnwise=align == 128, **of_up)
    if bias[1] is not None and dp is not None:
        for term in two_terms(bias[1]):
            fp8.grouped_matmul_nt(grads, term, splits, accumulate=dp.reshape(-1, 1))
    dh_columns = dh.T if align == 128 else fp8.scaling_aware_transpose(dh, splits=splits)
    d_up = fp8.grouped_matmul_nt(dh_columns, columns[2], splits, group="k")
    dx, dprobs = fp8.permute_backward(fp8.grouped_matmul_nt(dh, up.T, splits), routing, probs_grad=dp)
    if bias[0] is None:
        return y, dx, dprobs, d_up, d_down
    return (y, dx, dprobs, d_up, d_down, fp8.group_sums(dh, splits),
            fp8.group_sums(grads, splits, weights=p))


def two_terms(bias: Any) -> list[Any]:
    """Return the bias of down in FP8, and its rounding error."""
    blocks, exact = fp8.BlockScaling(), fp8.asnumpy(bias).astype(np.float32)[:, None]
    first = blocks.quantize(fp8.asarray(exact, like=bias))
    rest = exact - fp8.asnumpy(first.dequantize(np.float32))
    return [first, blocks.quantize(fp8.asarray(rest, like=bias))]


def step(experts: moe.Experts, given: Layer, routing: fp8.Routing | None = None, *, keep: Any = "bf16",
         out: Any = None, accumulate: Any = None) -> tuple[Any, ...]:
    """Return (y, dx, dprobs, d_up, d_down) of a step, and the gradients of its biases, if any."""
    routing = given.routing() if routing is None else routing
    y, saved = experts.forward(given.x, routing, given.probs, keep=keep, out=out)
    assert saved is not None
    found = experts.backward(given.grad, saved, accumulate=accumulate, out=out)
    return y, *found[:4], *(grad for grads in found[4:] for grad in grads if grad is not None)


def errors(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> list[float]:
    """Return the relative error of each, by its norm."""
    pairs = ((np.asarray(fp8.asnumpy(a), np.float64), b) for a, b in zip(found, wanted, strict=True))
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


class Replay:
    """A step in a graph, captured with the update of weights and biases, beside the same step without a
    graph."""

    def __init__(self, device: Any, experts: moe.Experts, held: Layer, bias: Any, keep: Any) -> None:
        self.experts, self.held, self.bias, self.keep = experts, held, bias, keep
        tokens, topk = held.chosen.shape
        buffers, routing = experts.empty(tokens, topk, keep=keep), held.routing()

        def whole() -> tuple[Any, ...]:
            fp8.route(held.chosen, num_experts=len(held.up), align=128, out=routing)
            experts.update(held.up, held.down, bias)
            return step(experts, held, routing, keep=keep, out=buffers)

        self.memory = buffers, routing                      # a graph keeps none alive
        whole()
        cuda = device.cupy.cuda
        self.stream, self.wait = cuda.Stream(non_blocking=True), cuda.runtime.deviceSynchronize
        self.wait()
        with self.stream:
            self.stream.begin_capture()
            self.found = whole()
            self.graph = self.stream.end_capture()

    def compare(self, other: Layer, bias: Any) -> None:
        """Replay with these arrays. Delayed scaling starts with the same scales, and ends with the same amax
        history."""
        alone = moe.Experts(other.up, other.down, self.experts.recipe, bias=bias)
        for experts in (self.experts, alone):
            if experts.state is not None:
                experts.state.scale.fill(24)
                experts.state.amax_history.fill(0)
        for mine, new in zip((*self.held, *(self.bias or ())), (*other, *(bias or ())), strict=True):
            mine.view(np.uint8)[...] = new.view(np.uint8)
        for a in self.found:
            cases.poison(a)
        self.wait()
        self.graph.launch(self.stream)
        self.wait()
        alone.update(other.up, other.down, bias)
        wanted = step(alone, other, keep=self.keep)
        for got, want in zip(self.found, wanted, strict=True):
            testing.assert_bytes_equal(fp8.asnumpy(got), fp8.asnumpy(want))
        if alone.state is not None and self.experts.state is not None:
            testing.assert_bytes_equal(fp8.asnumpy(self.experts.state.amax_history),
                                       fp8.asnumpy(alone.state.amax_history))
