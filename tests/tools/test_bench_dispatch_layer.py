"""`bench dispatch`: rows of the whole layer, ours and in loops that stand in for other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from experts_in_loops import Loops
from ranks_in_bench import TINY, Ticks, between, take_few

import cupy_fp8 as fp8
from cupy_fp8.bench.moe import dispatch_given, dispatch_layer, dispatch_overlap, layer_fused
from cupy_fp8.bench.moe import layer as layer_of_one
from cupy_fp8.bench.ranks import Ranks
from cupy_fp8.distributed import World, local


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    take_few(monkeypatch)


def test_rows_of_the_layer(few, monkeypatch):
    monkeypatch.setattr(dispatch_layer, "torch_problem", lambda: "no PyTorch")
    alone = between(1, dispatch_layer.layer_rows)
    monkeypatch.setattr(dispatch_layer, "call_times", lambda step, clock: {"route": 2.0})    # of one thread
    for rows, size in ((alone, 1), (between(2, dispatch_layer.layer_rows), 2)):
        *rows, of_deepgemm = rows
        assert [row["variant"] for row in rows] == ["p2p FP8", "nccl FP8", "nccl bf16"] * 2
        assert [row["section"] for row in rows] == ["forward"] * 3 + ["forward and backward"] * 3
        assert [row["experts"] for row in rows] == [4] * 3 + [2 * size] * 3
        assert [row.get("skipped") for row in rows] == [None, None, "rank 0: no PyTorch"] * 2
        assert of_deepgemm["skipped"] == "rank 0: it needs PyTorch and a GPU"
        assert rows[3]["shape"] == [2, 6, 2, 128, 128]
        assert not [row for row in rows if "problem" in row]
    assert list(alone[0]["calls_us"]) == ["route", "x tokens", "dispatch", "h", "activation", "rows out",
                                          "combine"]
    assert set(alone[3]["calls_us"]) >= {"grad tokens", "combine backward", "up grad", "dispatch backward"}


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that stand in for PyTorch."""
    monkeypatch.setattr(dispatch_layer, "torch_problem", lambda: None)
    monkeypatch.setattr(dispatch_layer, "Bf16", Loops)
    for name in ("tensor", "from_dlpack"):
        monkeypatch.setattr(dispatch_layer, name, lambda a: a)


def test_rows_in_bf16_beside_the_layer(loops, few):
    *rows, of_deepgemm = between(1, dispatch_layer.layer_rows)
    assert "deep_gemm: " in of_deepgemm["skipped"]
    assert [row["variant"] for row in rows] == ["p2p FP8", "nccl FP8", "nccl bf16"] * 2
    for row in (rows[2], rows[5]):
        assert row["by"] == "loops"
        assert row["us"] == row["to_first"] == 1
        assert list(row["calls_us"])[:3] == ["route", "dispatch", "offsets"]


def test_both_layers_compute_the_same(loops):
    """Outputs and all gradients of two ranks, up to the rounding to FP8."""
    def run(world: World) -> Any:
        ranks, task = Ranks(world, Ticks(), None, np), dispatch_layer.Task(6, 4, True)
        to, found = dispatch_given.uniform(ranks, 6, 4, 2), []
        for in_fp8 in (True, False):
            given = layer_of_one.problem(task.shape(ranks, TINY), np, seed=world.rank)
            way = dispatch_given.Way("p2p", in_fp8)
            with dispatch_given.parallel(ranks, TINY, way, 6, 4, align=task.align(in_fp8)) as ep:
                layer: Any = (dispatch_layer.Fp8(ep, given, to.own, task) if in_fp8
                              else dispatch_layer.OfTorch(ep, given, to.own))
                layer.both()
                found.append([np.array(a, np.float32) for a in layer.both()])
        return found

    for ours, theirs in local(2).run(run):
        assert len(ours) == len(theirs) == 5
        for a, b, most in zip(ours, theirs, (0.1, 0.1, 0.3, 0.1, 0.1), strict=True):     # dprobs are few sums
            assert np.linalg.norm(a - b) < most * np.linalg.norm(b)


@pytest.mark.parametrize(("factor", "problem"), [(1, None), (1.5, "y is off by 50.0%")])
def test_the_row_of_deepgemm(factor, problem, few, monkeypatch):
    """Results of a function in its place are compared with ours. Ranks connect to the port of rank 0."""
    places = []

    @contextmanager
    def fused(module: Any, given: Any, up: Any, down: Any, place: Any) -> Iterator[Any]:
        places.append(place)
        world = World(place.rank, place.ranks, place.rank)
        assert (given.chosen == dispatch_given.uniform(Ranks(world, Ticks(), None, np), 6, 4, 2).own).all()
        weights = [fp8.dequantize(each.rowwise, dtype=np.float32) for each in (up, down)]
        assert weights[0].shape == (2, 256, 128)
        yield lambda: y_of[place.rank] * np.float32(factor)

    y_of: dict[int, np.ndarray] = {}
    forward = dispatch_layer.Fp8.forward

    def noted(layer: Any) -> Any:
        y = forward(layer)
        y_of[layer._ep.rank] = y.astype(np.float32)
        return y

    monkeypatch.setattr(dispatch_layer, "torch_problem", lambda: None)
    monkeypatch.setattr(dispatch_layer.Fp8, "forward", noted)
    monkeypatch.setattr(layer_fused, "library", object)
    monkeypatch.setattr(layer_fused, "fused", fused)
    task, way = dispatch_layer.Task(6, 4, False), dispatch_given.Way("p2p", True)
    rows = local(2).run(lambda world: dispatch_layer._fused(
        Ranks(world, Ticks(), None, np, 2), TINY, way, task))
    assert rows[0] == rows[1]
    assert rows[0].get("problem") == problem
    assert rows[0]["shape"] == [2, 6, 2, 128, 128]
    assert sorted(place[:2] for place in places) == [(0, 2), (1, 2)]
    assert len({place.port for place in places}) == 1


def test_rows_of_two_micro_batches(few):
    rows = between(2, dispatch_overlap.overlap_rows)
    assert [row["variant"] for row in rows] == ["p2p serial", "p2p overlap", "p2p 32 SMs"] * 2
    assert [(row["tokens"], row.get("away")) for row in rows] == [(6, None)] * 3 + [(24, 2)] * 3
    assert [set(row["checks"]) for row in rows] == [{"again"}, {"again", "beside"}, {"again", "beside"}] * 2
    assert not [row for row in rows if "problem" in row]
    assert len(between(1, dispatch_overlap.overlap_rows)) == 3


def test_exchanges_on_the_side(few):
    """Those of a batch are enqueued before what the experts compute for the other one, and gradients of rows
    before those of weights."""
    called: list[str] = []

    class Batch:
        on_rows: Any = None

        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, part: str) -> Any:
            return lambda *given: called.append(f"{self.name} {part}")

        def compute_back(self) -> None:
            called.append(f"{self.name} compute_back")
            self.on_rows("rows", "probs")
            called.append(f"{self.name} weights")

    class Side:
        def run(self, work: Any) -> int:
            work()
            return len(called)

        def wait(self, done: int) -> None:
            called.append(f"wait {done}")

    dispatch_overlap.overlapped([Batch("a"), Batch("b")], Side())       # type: ignore[list-item, arg-type]
    assert called == ["a send", "b send", "wait 1", "a compute", "a collect", "a send_back", "wait 2",
                      "b compute", "b collect", "b send_back", "wait 6", "a compute_back", "a collect_back",
                      "a weights", "wait 10", "b compute_back", "b collect_back", "b weights", "wait 18"]
