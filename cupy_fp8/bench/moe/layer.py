"""The expert layer as a whole: the arrays of a step, and the step by each recipe and dataflow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array, asarray, empty
from ...cases.base import poison
from ...formats import bfloat16, float32
from ...moe.dataflow import DATAFLOWS, KEEPS, Dataflow, Keep
from ...moe.experts import Experts
from ...moe.step import Buffers, Calls
from ...ops.convert.astype import astype
from ...ops.moe.route import route
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from ..measure import Call

#: calls of a step without a layer's buffers
CALL = Calls(None)
RECIPES: dict[str, Recipe] = {"1×128": BlockScaling(), "one scale": CurrentScaling(),
                              "delayed": DelayedScaling()}
#: recipe and dataflow that are compared with other implementations
FIRST = "1×128", DATAFLOWS[0]
_CALIBRATING_STEPS = 2              # the first finds the scales of weights, the second those of what follows


class Shape(NamedTuple):
    """Experts, tokens, slots of a token, and the extents of the weights [E, 2 F, H] and [E, H, F]."""

    experts: int
    tokens: int
    topk: int
    hidden: int = 7168
    inner: int = 2048

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass. A step has three times as many."""
        return 6 * self.tokens * self.topk * self.hidden * self.inner

    def __str__(self) -> str:
        return (f"E={self.experts}, T={self.tokens}, k={self.topk} ({self.tokens * self.topk} rows), "
                f"hidden {self.hidden}, inner {self.inner}")


SHAPES = (Shape(8, 16384, 2), Shape(64, 4096, 8))
#: with so few tokens only the forward pass is timed
FEW_TOKENS = tuple(Shape(64, tokens, 8) for tokens in (128, 16, 1))


@dataclass(frozen=True, eq=False)
class Problem:
    """The arrays of a step in bfloat16: tokens and gradients of different magnitudes, experts of different
    sizes."""

    shape: Shape
    up: Array
    down: Array
    x: Array
    grad: Array
    chosen: Array
    probs: Array


def problem(shape: Shape, xp: Any, seed: int = 0) -> Problem:
    """Make a problem. xp: NumPy or CuPy, which draws the large arrays."""
    rng = np.random.default_rng(seed)
    if xp is not np and hasattr(xp.random, "seed"):
        xp.random.seed(seed)
    normal = rng.standard_normal if xp is np else xp.random.standard_normal
    experts, tokens, _, hidden, inner = shape

    def rows(deviation: float) -> Array:
        magnitudes = np.exp(deviation * rng.standard_normal((tokens, 1))).astype(np.float32)
        return astype(normal((tokens, hidden), np.float32) * asarray(magnitudes, like=xp), bfloat16)

    def weights(*extents: int) -> Array:
        made = empty((experts, *extents), bfloat16, like=xp)
        for of_expert in made:
            astype(normal(extents, np.float32) * np.float32(extents[1] ** -0.5), bfloat16, out=of_expert)
        return made

    chosen, probs = (asarray(a, like=xp) for a in routed(shape, rng))
    return Problem(shape, weights(2 * inner, hidden), weights(hidden, inner), rows(1), rows(1.5), chosen,
                   probs)


def routed(shape: Shape, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts of each token and their probs: the largest of a softmax that favours some
    experts."""
    logits = (rng.standard_normal((shape.tokens, shape.experts))
              + rng.standard_normal(shape.experts) / 2).astype(np.float32)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :shape.topk]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs = np.take_along_axis(weights / weights.sum(axis=1, keepdims=True), chosen, axis=1)
    return np.ascontiguousarray(chosen, np.int32), np.ascontiguousarray(probs, np.float32)


class Layer:
    """The experts of a problem by one recipe and dataflow. A step is: route, forward, backward."""

    def __init__(self, given: Problem, recipe: str, dataflow: Dataflow) -> None:
        self.given = given
        self.experts = Experts(given.up, given.down, RECIPES[recipe], dataflow=dataflow)
        if self.experts.state is not None:
            for _ in range(_CALIBRATING_STEPS):
                self.allocating()
                self.experts.state.update()
                self.experts.update(given.up, given.down)

    @cached_property
    def _routing(self) -> Any:
        return self._route(None)

    @cached_property
    def _forward_routing(self) -> Any:
        return self._route(None, None)

    @cached_property
    def _buffers(self) -> Buffers:
        return self.experts.empty(self.given.shape.tokens, self.given.shape.topk)

    @cached_property
    def _forward_buffers(self) -> Buffers:
        return self.experts.empty(self.given.shape.tokens, self.given.shape.topk, keep=None)

    def _route(self, out: Any, keep: Keep | None = "bf16") -> Any:
        return CALL("route", route, self.given.chosen, num_experts=self.given.shape.experts,
                    align=self.experts._flow.align(keep), out=out)

    def allocating(self) -> tuple[Any, ...]:
        """Run a step that allocates: (y, dx, dprobs, d_up, d_down)."""
        return self._step(None, None)

    def in_place(self) -> tuple[Any, ...]:
        """Run a step with `out=`; returns the same."""
        return self._step(self._routing, self._buffers)

    def _step(self, routing: Any, buffers: Buffers | None) -> tuple[Any, ...]:
        given = self.given
        y, saved = self.experts.forward(given.x, self._route(routing), given.probs, out=buffers)
        assert saved is not None, "a step keeps what backward needs"
        return (y, *self.experts.backward(given.grad, saved, out=buffers))

    def forward(self) -> Any:
        """Run the forward pass alone, which keeps nothing, with `out=`."""
        routing = self._route(self._forward_routing, None)
        return self.experts.forward(self.given.x, routing, self.given.probs, keep=None,
                                    out=self._forward_buffers)[0]

    def kept(self) -> dict[str, float]:
        """Return the bytes per token that each `keep` saves for the backward pass."""
        found: dict[str, float] = {}
        for keep in KEEPS:
            _, saved = self.experts.forward(self.given.x, self._route(None), self.given.probs, keep=keep)
            assert saved is not None, "all of these keep something"
            found[keep] = saved.nbytes / self.given.shape.tokens
        return found


def captured(step: Call, stream: Any) -> Call:
    """Return a launch of the step's graph. stream: the current one, on which the step has run before."""
    stream.synchronize()
    stream.begin_capture()
    try:
        step()
    finally:
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


def poisoned(results: tuple[Any, ...]) -> None:
    """Overwrite results, so that the next step has to write them."""
    for a in results:
        poison(a)


def relative_error(made: Iterable[Array], wanted: Iterable[Array]) -> float:
    """Return ‖made - wanted‖ / ‖wanted‖ of matrices, one at a time."""
    off = norm = 0.0
    for mine, other in zip(made, wanted, strict=True):
        a, b = astype(mine, float32), astype(other, float32)
        difference = a - b
        off, norm = off + float((difference * difference).sum()), norm + float((b * b).sum())
    return float((off / norm) ** 0.5)
