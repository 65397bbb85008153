"""The layer of experts over ranks, by each transport, and the same in bfloat16 by PyTorch over NCCL."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ...arrays import Array
from ...distributed import ExpertParallel
from ...distributed.expert_parallel import TransportName
from ...dlpack import from_dlpack
from ...moe.dataflow import GROUP, GROUP_OF_RESULTS
from ...moe.experts import Experts
from ...ops.moe.offsets import splits_to_offsets
from ...recipes import quantize
from ..ranks import Ranks
from ..steps import call_times
from . import layer_fused
from .dispatch import group, same_bytes, timed
from .dispatch_given import RECIPE, Destinations, Sizes, Way, bound, parallel, uniform
from .layer import CALL, Problem, Shape, problem, relative_error
from .layer_peers import BF16_ALIGN, Bf16, tensor
from .layer_rows import MOST_ERROR, Row, torch_problem


class Task(NamedTuple):
    """tokens: of a rank; experts: of all ranks; both: forward and backward, otherwise forward alone."""

    tokens: int
    experts: int
    both: bool

    def shape(self, ranks: Ranks, sizes: Sizes) -> Shape:
        """Return what a rank computes, on average."""
        return Shape(self.experts // ranks.world.size, self.tokens, sizes.topk, sizes.hidden, sizes.inner)

    @property
    def size(self) -> dict[str, int]:
        return {"tokens": self.tokens, "experts": self.experts}

    def align(self, fp8: bool) -> int:
        if not fp8:
            return BF16_ALIGN
        return GROUP if self.both else GROUP_OF_RESULTS


class Steps:
    """Steps that overwrite their results outside the experts: route, dispatch, experts, combine, and back the
    same way. name: of the implementation."""

    name = ""

    def __init__(self, ep: ExpertParallel, given: Problem, chosen: Array) -> None:
        self._ep, self._chosen = ep, chosen
        self._x, self._grad, self._probs = given.x, given.grad, given.probs
        self._made: dict[str, Any] = {}
        self._y_rows = self._saved = None
        self._gradients: tuple[Any, ...] = ()

    def _call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        made = self._made[name] = CALL(name, function, *args, out=self._made.get(name))
        return made

    def meet(self) -> None:
        """Run an exchange to synchronise the ranks, which is not among the named calls."""
        self._ep.route(self._chosen, out=self._made["route"])

    def forward(self) -> Any:
        """Return the outputs of this rank's tokens."""
        self.send()
        self.compute()
        return self.collect()

    def both(self) -> tuple[Any, ...]:
        """Return (y, dx, dprobs, d_up, d_down)."""
        self.forward()
        self.send_back()
        self.compute_back()
        self.collect_back(*self._gradients[:2])
        return self.results

    @property
    def results(self) -> tuple[Any, ...]:
        """What the last step of `both` returned."""
        return self._made["combine"], *self._made["dispatch backward"], *self._gradients[2:]

    # ---- parts of a step: exchanges, and what the experts compute between them ----
    def send(self) -> None:
        routing = self._call("route", self._ep.route, self._chosen)
        self._call("dispatch", self._ep.dispatch, self._sent("x", self._x), routing, self._probs)

    def compute(self) -> None:
        rows, row_probs = self._made["dispatch"]
        self._y_rows, self._saved = self._experts(rows, self._made["route"].splits, row_probs)

    def collect(self) -> Any:
        return self._call("combine", self._ep.combine, self._y_rows, self._made["route"])

    def send_back(self) -> None:
        self._call("combine backward", self._ep.combine_backward, self._sent("grad", self._grad),
                   self._made["route"])

    def compute_back(self) -> None:
        self._gradients = self._experts_backward(self._made["combine backward"], self._saved)

    def collect_back(self, dx_rows: Any, row_dprobs: Any) -> None:
        self._call("dispatch backward", self._ep.dispatch_backward, dx_rows, row_dprobs, self._made["route"])

    def _sent(self, name: str, x: Array) -> Any:
        """Return tokens in the form in which they are dispatched."""
        return x

    def _experts(self, rows: Any, splits: Array, row_probs: Array) -> tuple[Any, Any]:
        raise NotImplementedError

    def _experts_backward(self, grad_rows: Any, saved: Any) -> tuple[Any, ...]:
        raise NotImplementedError


class Fp8(Steps):
    """`moe.Experts` between ExpertParallel's methods, with buffers for everything. experts: those of another
    layer of the same problem. on_rows: called with the gradients of rows and of their probs, before those of
    weights are computed."""

    def __init__(self, ep: ExpertParallel, given: Problem, chosen: Array, task: Task,
                 experts: Experts[Any] | None = None) -> None:
        super().__init__(ep, given, chosen)
        self.experts = experts or Experts(given.up, given.down, RECIPE)
        self.on_rows: Callable[[Any, Any], None] | None = None
        self._options: dict[str, Any] = {"keep": "bf16" if task.both else None, "align": task.align(True)}
        self._buffers = self.experts.empty(rows=ep.rows, **self._options)

    def _sent(self, name: str, x: Array) -> Any:
        return self._call(f"{name} tokens", quantize, x, RECIPE).rowwise

    def _experts(self, rows: Any, splits: Array, row_probs: Array) -> tuple[Any, Any]:
        return self.experts.forward_rows(rows, splits, row_probs, out=self._buffers, **self._options)

    def _experts_backward(self, grad_rows: Any, saved: Any) -> tuple[Any, ...]:
        return self.experts.backward_rows(grad_rows, saved, out=self._buffers, on_rows=self.on_rows)


class OfTorch(Steps):
    """`layer_peers.Bf16` between ExpertParallel's methods."""

    def __init__(self, ep: ExpertParallel, given: Problem, chosen: Array) -> None:
        super().__init__(ep, given, chosen)
        self._layer = Bf16(given)
        self.name = self._layer.name

    def _experts(self, rows: Any, splits: Array, row_probs: Array) -> tuple[Any, Any]:
        ends = CALL("offsets", splits_to_offsets, splits, include_leading_zero=False, dtypes="int32")[0]
        out, saved = self._layer.forward_rows(tensor(rows), tensor(ends), tensor(row_probs))
        return from_dlpack(out), saved

    def _experts_backward(self, grad_rows: Any, saved: Any) -> tuple[Any, ...]:
        return tuple(map(from_dlpack, self._layer.backward_rows(tensor(grad_rows), saved)))


# ---- rows ----
def layer_rows(ranks: Ranks, sizes: Sizes, transports: Sequence[TransportName]) -> Iterator[Row]:
    """Yield forward passes of experts shared by the ranks, and steps with the same number of experts on each
    rank. DeepGEMM comes last, since an error of its kernel may end everything on the GPU."""
    firsts: dict[Task, Row] = {}
    forward = [Task(tokens, sizes.experts, False) for tokens in sizes.forward]
    steps = [Task(tokens, sizes.weak * ranks.world.size, True) for tokens in sizes.steps]
    for task in (*forward, *steps):
        to = uniform(ranks, task.tokens, task.experts, sizes.topk)
        ways: list[tuple[str, Callable[[], Row]]] = [
            (str(way), partial(_layer, ranks, sizes, way, task, to))
            for way in (Way(name, True) for name in transports)]
        if "nccl" in transports:
            ways.append((str(Way("nccl", False)), partial(_bf16, ranks, sizes, task, to)))
        section = "forward and backward" if task.both else "forward"
        for row in group(ranks, section, task.size, ways):
            firsts.setdefault(task, row)
            yield row
    for task in forward if transports else ():
        way = Way(transports[0], True)
        yield from group(ranks, "forward in one kernel", task.size, [
            ("DeepGEMM", partial(_fused, ranks, sizes, way, task))], firsts[task])


def _fused(ranks: Ranks, sizes: Sizes, way: Way, task: Task) -> Row:
    module = layer_fused.library() if torch_problem() is None else "it needs PyTorch and a GPU"
    why = ranks.problem(module if isinstance(module, str) else None)
    if why is not None:
        return {"skipped": why}
    given = problem(task.shape(ranks, sizes), ranks.xp, seed=ranks.world.rank)
    to = uniform(ranks, task.tokens, task.experts, sizes.topk)
    with connected(ranks, sizes, way, task) as ep:
        layer = Fp8(ep, given, to.own, task)
        y = layer.forward().copy()
    (port,) = struct.unpack("!H", ranks.world.gather(struct.pack("!H", layer_fused.free_port()))[0])
    place = layer_fused.Place(ranks.world.rank, ranks.world.size, port)
    given = replace(given, chosen=to.own)
    with layer_fused.fused(module, given, layer.experts.up, layer.experts.down, place) as forward:
        made = from_dlpack(forward())
        ranks.clock.wait()
        (error,) = ranks.slowest([relative_error([made], [y])])
        row = _timed_alone(ranks, forward) | {"error": round(error, 4), "by": layer_fused.NAME}
    row |= rate(row, ranks, sizes, task)
    return row if error <= MOST_ERROR else row | {"problem": f"y is off by {error:.1%}"}


def _bf16(ranks: Ranks, sizes: Sizes, task: Task, to: Destinations) -> Row:
    problem = ranks.problem(torch_problem())
    return _layer(ranks, sizes, Way("nccl", False), task, to) if problem is None else {"skipped": problem}


def _layer(ranks: Ranks, sizes: Sizes, way: Way, task: Task, to: Destinations) -> Row:
    with connected(ranks, sizes, way, task) as ep:
        return _timed(ranks, sizes, ep, way, task, to)


def connected(ranks: Ranks, sizes: Sizes, way: Way, task: Task, **options: Any) -> ExpertParallel:
    align = task.align(way.fp8)
    rows = bound(ranks, task.tokens, task.experts, sizes.topk, align)
    return parallel(ranks, sizes, way, task.tokens, task.experts, rows=rows, align=align, **options)


def _timed(ranks: Ranks, sizes: Sizes, ep: ExpertParallel, way: Way, task: Task, to: Destinations) -> Row:
    given = problem(task.shape(ranks, sizes), ranks.xp, seed=ranks.world.rank)
    layer: Steps = Fp8(ep, given, to.own, task) if way.fp8 else OfTorch(ep, given, to.own)
    del given
    step = layer.both if task.both else layer.forward
    row = (_of_fp8 if way.fp8 else _timed_alone)(ranks, step)

    def after_meeting() -> None:
        layer.meet()
        step()

    calls = call_times(after_meeting, ranks.clock)
    row["calls_us"] = {name: round(us, 1) for name, us in zip(calls, ranks.middle(list(calls.values())),
                                                              strict=True)}
    return row | rate(row, ranks, sizes, task) | ({"by": layer.name} if layer.name else {})


def rate(row: Row, ranks: Ranks, sizes: Sizes, task: Task, batches: int = 1) -> Row:
    """Return a rank's shape and its TFLOP/s."""
    shape = task.shape(ranks, sizes)
    flops = batches * shape.flops * (3 if task.both else 1)
    return {"shape": list(shape)} | {f"{name}tflops": round(flops / row[f"{name}us"] / 1e6, 1)
                                     for name in ("", "graph_") if f"{name}us" in row}


def _of_fp8(ranks: Ranks, step: Callable[[], Any]) -> Row:
    """Time a step as in a program that does nothing else: host time counts."""
    results = step()
    return timed(ranks, step, same_bytes(ranks, lambda: results), queued=False)


def _timed_alone(ranks: Ranks, step: Callable[[], Any]) -> Row:
    """Time another library's step, whose bytes may differ from run to run."""
    step()
    time = ranks.time(step, queued=False)
    return {"us": round(time.us, 2), "spread_percent": round(time.spread, 2),
            "host_us": round(time.host_us, 1)}
