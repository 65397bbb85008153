"""The rows of `bench moe`: the time of a step of the layer by each recipe and dataflow, beside the same in
bfloat16 and a layer that quantises again; and the forward pass alone, beside DeepGEMM's in one kernel.

Every row is checked: in place, allocating and from a graph a step gives the same bytes, twice, and its weight
gradients equal those of bfloat16 up to rounding. A row that fails has a `problem`; the others are measured.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ... import backend
from ...arrays import Array, bytes_equal
from ...dlpack import from_dlpack
from ...moe.dataflow import DATAFLOWS, Dataflow
from ..measure import Call
from ..steps import Clock, Events, call_times, step_time
from . import layer_fused
from .layer import (
    FEW_TOKENS,
    FIRST,
    RECIPES,
    SHAPES,
    Layer,
    Problem,
    Shape,
    captured,
    poisoned,
    problem,
    relative_error,
)
from .layer_peers import Bf16, Requantising

Row = dict[str, Any]
MOST_ERROR = 0.12                   # of weight gradients, relative to those of bfloat16
_FUSED = f"forward: {layer_fused.NAME}"
_UP, _DOWN = 3, 4                   # indices of the weight gradients among a step's results


@contextmanager
def on_gpu() -> Iterator[tuple[Any, Events]]:
    """Make current for CuPy and PyTorch: (a stream that can be captured, its clock)."""
    cp = backend.cupy()
    stream = cp.cuda.Stream(non_blocking=True)
    with ExitStack() as entered:
        entered.enter_context(stream)
        if torch_problem() is None:
            import torch

            entered.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        yield stream, Events(stream)


def torch_problem() -> str | None:
    """Return why PyTorch cannot be compared with, or None."""
    try:
        torch = import_module("torch")
    except Exception as error:          # a broken installation raises errors of several types
        return f"torch: {error}"
    return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm"


def step_rows(clock: Clock, stream: Any, xp: Any, shapes: Iterable[Shape] = SHAPES) -> Iterator[Row]:
    """Yield a row for each layer. stream: None: there are no graphs."""
    for shape in shapes:
        given = problem(shape, xp)
        others: dict[str, float] = {}
        wanted: list[Array] = []
        if torch_problem() is None:
            yield attempt(shape, "bf16", partial(_bf16, given, clock, others, wanted))
            release()
        yield attempt(shape, "requantising", partial(_requantising, given, clock, others, wanted))
        release()
        for recipe in RECIPES:
            for dataflow in DATAFLOWS:
                yield attempt(shape, f"{recipe} {dataflow}", partial(
                    _ours, given, recipe, dataflow, clock, stream, others, wanted))
                release()
        del given, wanted
        release()


def attempt(shape: Shape, variant: str, measure: Callable[[], Row]) -> Row:
    """Return a row, or what its measurement raised."""
    row: Row = {"op": "moe", "variant": variant, "shape": list(shape)}
    try:
        return row | measure()
    except Exception as error:          # the other rows are measured all the same
        return row | {"problem": f"{type(error).__name__}: {str(error)[:300]}"}


def release() -> None:
    """Give back the memory of the previous row."""
    gc.collect()
    if "cupy" in sys.modules and hasattr(backend.cupy(), "get_default_memory_pool"):
        backend.cupy().get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _bf16(given: Problem, clock: Clock, others: dict[str, float], wanted: list[Array]) -> Row:
    step = Bf16(given)
    wanted[:] = step()[_UP:]
    row = _timed(step, given.shape.flops * 3, clock) | {"by": step.name}
    others["bf16"] = row["us"]
    return row


def _requantising(given: Problem, clock: Clock, others: dict[str, float], wanted: list[Array]) -> Row:
    step = Requantising(given)
    row = _timed(step, given.shape.flops * 3, clock) | _errors(step(), wanted) | {"by": step.name}
    others["requantising"] = row["us"]
    return row


def _timed(step: Call, flops: int, clock: Clock) -> Row:
    time = step_time(step, clock)
    return {"us": round(time.us, 1), "spread_percent": round(time.spread, 2),
            "tflops": round(flops / time.us / 1e6, 1), "host_us": round(time.host_us, 1),
            "calls_us": {name: round(us, 1) for name, us in call_times(step, clock).items()}}


def _ours(given: Problem, recipe: str, dataflow: Dataflow, clock: Clock, stream: Any,
          others: dict[str, float], wanted: list[Array]) -> Row:
    layer = Layer(given, recipe, dataflow)
    kept = layer.kept()
    in_place = layer.in_place()
    launch, why = _graph(layer.in_place, stream)
    row: Row = {"checks": _checks(layer, in_place, launch)} | _errors(in_place, wanted)
    row |= _timed(layer.in_place, given.shape.flops * 3, clock)
    allocating = step_time(layer.allocating, clock)
    row |= {"allocating_us": round(allocating.us, 1), "allocating_host_us": round(allocating.host_us, 1),
            "bytes_per_token": {keep: round(nbytes, 1) for keep, nbytes in kept.items()}}
    row |= _graph_timed(launch, clock)
    row |= {f"{name}_ratio": round(us / row["us"], 3) for name, us in others.items()}
    return row | _problem(row, why)


def _graph_timed(launch: Call | None, clock: Clock) -> Row:
    if launch is None:
        return {}
    graph = step_time(launch, clock)
    return {"graph_us": round(graph.us, 1), "graph_host_us": round(graph.host_us, 1)}


def _graph(step: Call, stream: Any) -> tuple[Call | None, str | None]:
    """Return (a launch of the step's graph, why there is none)."""
    if stream is None:
        return None, None
    try:
        return captured(step, stream), None
    except Exception as error:          # the step itself is timed all the same
        return None, f"no graph: {type(error).__name__}: {str(error)[:200]}"


def _checks(layer: Layer, in_place: tuple[Any, ...], launch: Call | None) -> dict[str, bool]:
    """Return whether the bytes are the same each time."""
    first = layer.allocating()
    found = {"again": bytes_equal(layer.allocating(), first)}
    poisoned(in_place)
    found["out="] = bytes_equal(layer.in_place(), first)
    if launch is not None:
        poisoned(in_place)
        launch()
        found["graph"] = bytes_equal(in_place, first)
    return found


def _errors(results: tuple[Any, ...], wanted: list[Array]) -> Row:
    """Return the relative errors of the weight gradients of both products."""
    if not wanted:
        return {}
    return {"error": {name: round(relative_error(results[at], of), 4)
                      for name, at, of in zip(("up", "down"), (_UP, _DOWN), wanted, strict=True)}}


def _problem(row: Row, why: str | None = None) -> Row:
    """Return a row with the failed checks. why: there is no graph."""
    wrong = [] if why is None else [why]
    wrong += [f"other bytes: {name}" for name, same in row["checks"].items() if not same]
    wrong += [f"the gradient of {name} is off by {error:.1%}" for name, error in row.get("error", {}).items()
              if not error <= MOST_ERROR]
    return {"problem": "; ".join(wrong)} if wrong else {}


def forward_rows(clock: Clock, stream: Any, xp: Any, shapes: Sequence[Shape] = (*SHAPES, *FEW_TOKENS)
                 ) -> Iterator[Row]:
    """Yield the forward pass alone: routing, quantisation of the tokens, experts; eager and from a graph.
    DeepGEMM comes last, since an error of its kernel may end everything on the GPU."""
    usable = torch_problem() is None and xp is not np
    module = layer_fused.library() if usable else "it needs PyTorch and a GPU"
    ours: dict[Shape, Row] = {}
    for shape in shapes:
        given = problem(shape, xp)
        label = f"forward: {' '.join(FIRST)}"
        yield attempt(shape, label, partial(_ours_forward, given, clock, stream, ours))
        release()
        if torch_problem() is None:
            yield attempt(shape, "forward: bf16", partial(_bf16_forward, given, clock, ours))
            release()
        del given
    for shape in shapes:
        if isinstance(module, str):
            yield attempt(shape, _FUSED, partial(dict, skipped=module))
            continue
        yield attempt(shape, _FUSED, partial(_fused, module, shape, xp, clock, ours))
        release()


def _ours_forward(given: Problem, clock: Clock, stream: Any, ours: dict[Shape, Row]) -> Row:
    layer = Layer(given, *FIRST)
    row = _timed(layer.forward, given.shape.flops, clock)
    launch, why = _graph(layer.forward, stream)
    row |= _graph_timed(launch, clock)
    ours[given.shape] = row
    return row if why is None else row | {"problem": why}


def _bf16_forward(given: Problem, clock: Clock, ours: dict[Shape, Row]) -> Row:
    return _beside(Bf16(given).forward, given, clock, ours)


def _beside(step: Call, given: Problem, clock: Clock, ours: dict[Shape, Row]) -> Row:
    row, own = _timed(step, given.shape.flops, clock), ours.get(given.shape, {})
    return row | {name: round(row["us"] / own[key], 3)
                  for name, key in (("to_ours", "us"), ("to_graph", "graph_us")) if key in own}


def _fused(module: Any, shape: Shape, xp: Any, clock: Clock, ours: dict[Shape, Row]) -> Row:
    given = problem(shape, xp)
    layer = Layer(given, *FIRST)
    y = layer.forward()
    place = layer_fused.Place(0, 1, layer_fused.free_port())
    with layer_fused.fused(module, given, layer.experts.up, layer.experts.down, place) as forward:
        made = from_dlpack(forward())
        clock.wait()
        error = relative_error([made], [y])
        row = _beside(forward, given, clock, ours) | {"error": {"y": round(error, 4)}}
    return row if error <= MOST_ERROR else row | {"problem": f"y is off by {error:.1%}"}
