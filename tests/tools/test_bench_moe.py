"""`bench moe` without a GPU: its names, its arithmetic with a test clock, and its rows of a tiny layer by the
references."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in
import stand_in_arithmetic
from tiers import needs_host

from cupy_fp8 import DelayedScaling, backend
from cupy_fp8.bench import steps
from cupy_fp8.bench.moe import layer, layer_fused, layer_peers, layer_rows
from cupy_fp8.cli import bench as command
from cupy_fp8.cli import bench_moe, info
from cupy_fp8.moe.dataflow import DATAFLOWS
from cupy_fp8.moe.step import Calls

TINY = layer.Shape(3, 24, 2, 128, 128)


class Ticks:
    """A clock that gives the next of some times at each mark, and on the host 10 µs more each time."""

    def __init__(self, durations: Iterator[float] | None = None) -> None:
        self.durations, self.now, self.host, self.log = durations, 0.0, 0.0, list[tuple[str, float]]()

    def mark(self) -> float:
        self.now += 1 if self.durations is None else next(self.durations)
        return self.now

    def us(self, start: float, stop: float) -> float:
        return stop - start

    def host_us(self) -> float:
        self.host += 10
        return self.host

    def wait(self) -> None:
        self.log.append(("wait", 0))

    def pause(self, seconds: float) -> None:
        self.log.append(("pause", seconds))

    def delay(self, us: float) -> None:
        self.log.append(("delay", us))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BURSTS", "_STEPS", "_REPEATS"):
        monkeypatch.setattr(steps, name, 1)
    monkeypatch.setattr(steps, "_BURST_US", 1.0)


# ---- the command ----
def test_it_is_named_in_the_help_and_no_op(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "moe: steps of the expert layer" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="2"):
        command.main(["mo"])
    error = capsys.readouterr().err
    assert "no such op: mo; did you mean moe?" in error
    assert error.endswith("Or moe, dispatch.\n")


@pytest.mark.parametrize(("arguments", "measured"), [
    ([], ["device all", "host all"]), (["moe"], ["moe "]),
    (["moe", "route"], ["device route", "host route", "moe "])], ids=str)
def test_what_is_measured(arguments, measured, monkeypatch):
    found: list[str] = []

    def note(text: str, ops: list[str]) -> list[dict[str, Any]]:
        found.append(f"{text} {'all' if len(ops) > 1 else ops[0]}")
        return []

    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(info, "facts", dict)
    monkeypatch.setattr(command, "device_rows", lambda ops: note("device", ops))
    monkeypatch.setattr(command, "host_rows", lambda ops: note("host", ops))
    monkeypatch.setattr(command, "moe_rows", lambda: note("moe", [""]))
    assert command.main(arguments) == 0
    assert found == measured


@pytest.mark.parametrize("problem", [None, "other bytes: graph"])
def test_a_problem_is_the_exit_status_and_all_rows_are_written(problem, tmp_path, monkeypatch):
    rows: list[dict[str, Any]] = [{"op": "moe"} | ({"problem": problem} if problem else {}), {"op": "moe"}]
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(info, "facts", dict)
    monkeypatch.setattr(command, "moe_rows", lambda: iter(rows))
    assert command.main(["moe", "--json", str(tmp_path / "rows.json")]) == bool(problem)
    assert json.loads((tmp_path / "rows.json").read_text())["results"] == rows


# ---- times ----
@pytest.mark.parametrize(("first", "of_burst"), [(9e6, 3), (6000, 5)])
def test_the_time_of_a_step_is_the_median_of_bursts(first, of_burst):
    """A burst has three steps, or more if they are short, between two marks. Bursts take 3, 6, … 24. first:
    the time of the three steps before them."""
    durations = iter([100, first, *(t for burst in range(8) for t in (100, of_burst * (burst + 1)))])
    clock, called = Ticks(durations), []
    found = steps.step_time(lambda: called.append(1), clock)
    assert tuple(found) == pytest.approx((4.5, (8 - 1) / 4.5 * 100, 10 / of_burst))
    assert len(called) == 3 + 3 + 8 * of_burst
    assert clock.log == [("wait", 0), ("wait", 0), *[("pause", 0.15), ("wait", 0)] * 8]


def test_times_of_calls_are_medians_of_sums_by_name():
    """Each call has two marks. Calls of one name are summed in each step."""
    call, durations = Calls(None), list[float]()
    for first in (5, 1, 2, 4, 3):
        durations += [50, first, 50, 10 * first, 50, 100]
    clock = Ticks(iter(durations))

    def step() -> None:
        for name in ("a", "b", "a"):
            call(name, lambda: None)

    plain = Calls.__call__
    assert steps.call_times(step, clock) == {"a": 103, "b": 30}
    assert Calls.__call__ is plain
    assert clock.log == [("pause", 0.1), ("delay", steps._DELAY_US), ("wait", 0)] * 5


def test_calls_are_as_they_were_after_an_error():
    plain = Calls.__call__
    with pytest.raises(ZeroDivisionError), steps.marked_calls(Ticks()):
        Calls(None)("a", lambda: 1 / 0)
    assert Calls.__call__ is plain


# ---- the problem ----
def test_the_routing_is_uneven_and_its_probs_those_of_the_largest_logits():
    shape = layer.Shape(8, 500, 2)
    chosen, probs = layer.routed(shape, np.random.default_rng(0))
    sizes = np.bincount(chosen.reshape(-1), minlength=8)
    assert sizes.sum() == 1000
    assert sizes.max() > 1.5 * sizes.min()
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert (probs[:, 0] >= probs[:, 1]).all()
    assert (probs.sum(1) < 1).all()
    assert [a.dtype for a in (chosen, probs)] == [np.int32, np.float32]


def test_flops_and_rows_of_the_shapes():
    assert [s.tokens * s.topk for s in layer.SHAPES] == [32768, 32768]
    assert layer.SHAPES[0].flops == 2 * 32768 * 3 * 7168 * 2048
    assert str(layer.SHAPES[1]) == "E=64, T=4096, k=8 (32768 rows), hidden 7168, inner 2048"


def test_relative_error():
    wanted = np.array([[[3.0, 4.0]], [[0, 12.0]]], np.float32)
    made = wanted + np.array([[[0, 0]], [[1.3, 0]]], np.float32)
    assert layer.relative_error(made, wanted) == pytest.approx(0.1)


# ---- rows ----
def test_rows_of_a_tiny_layer(few, monkeypatch, capsys):
    """One row for each recipe and each dataflow, and the forward pass; all are printed."""
    monkeypatch.setattr(layer_rows, "torch_problem", lambda: "no PyTorch")
    monkeypatch.setattr(layer_rows, "RECIPES", {"1×128": layer.RECIPES["1×128"]})
    rows = list(bench_moe.shown("title", "heading", layer_rows.step_rows(Ticks(), None, np, [TINY])))
    rows += bench_moe.shown("forward", "heading", layer_rows.forward_rows(Ticks(), None, np, [TINY]))
    requantising, *ours, forward, fused = rows
    assert [row["variant"] for row in ours] == [f"1×128 {flow}" for flow in DATAFLOWS]
    for row in ours:
        assert row["checks"] == {"again": True, "out=": True}
        assert row["us"] == 1
        assert row["requantising_ratio"] == requantising["us"] == 1
        kept = row["bytes_per_token"]
        assert kept["bf16"] > kept["fp8"] > kept["input"]
    assert set(ours[0]["calls_us"]) >= {"route", "x permuted", "h", "up grad", "dx"}
    assert "up grad" not in forward["calls_us"]
    assert fused["skipped"] == "it needs PyTorch and a GPU"
    assert not [row for row in rows if "problem" in row]
    json.dumps(rows)
    out = capsys.readouterr().out
    assert out.count("E=3, T=24, k=2, hidden 128, inner 128\nheading\n") == 2
    assert "    same bytes: again yes, out= yes\n" in out


def test_scales_of_delayed_scaling_are_calibrated():
    made = layer.Layer(layer.problem(TINY, np), "delayed", "casting_free")
    assert isinstance(made.experts.recipe, DelayedScaling)
    assert made.experts.state is not None
    assert (made.experts.state.scale != 1).all()
    y, *_, d_up, _ = made.in_place()
    assert np.isfinite(y.astype(np.float32)).all()
    assert d_up.astype(np.float32).any()


def test_a_row_that_fails_leaves_the_others(few, monkeypatch, capsys):
    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layer_rows, "torch_problem", lambda: "no PyTorch")
    monkeypatch.setattr(layer_rows, "RECIPES", {"1×128": layer.RECIPES["1×128"]})
    monkeypatch.setattr(layer_rows, "Requantising", refuse)
    first, *rows = bench_moe.shown("title", "heading", layer_rows.step_rows(Ticks(), None, np, [TINY]))
    assert first["problem"] == "RuntimeError: out of memory"
    assert f"{'requantising':28} PROBLEM: RuntimeError: out of memory\n" in capsys.readouterr().out
    assert not [row for row in rows if "problem" in row or "requantising_ratio" in row]


def test_checks_notice_other_bytes():
    """Steps whose results differ, results that are not written, gradients that are far off or NaN."""
    results = iter([1, 2, 3])
    fresh = SimpleNamespace(allocating=lambda: (np.full(2, next(results), np.float32),),
                            in_place=lambda: (np.zeros(2, np.float32),))
    made: Any = fresh
    checks = layer_rows._checks(made, (np.zeros(2, np.float32),), lambda: None)
    assert checks == {"again": False, "out=": False, "graph": False}
    row = {"checks": checks, "error": {"up": 0.05, "down": math.nan}}
    assert layer_rows._problem(row)["problem"].split("; ") == [
        "other bytes: again", "other bytes: out=", "other bytes: graph",
        "the gradient of down is off by nan%"]
    assert layer_rows._problem({"checks": {"again": True}, "error": {"up": 0.1}}) == {}


def test_the_layer_that_quantises_again_gives_what_the_dataflow_gives():
    """The same roundings in the same order, composed of public calls."""
    given = layer.problem(TINY, np)
    theirs, ours = layer_peers.Requantising(given)(), layer.Layer(given, "1×128", "requantize").allocating()
    for a, b in zip(theirs, ours, strict=True):
        assert layer.relative_error([a], [b]) == 0


def test_bf16_beside_it(few, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(layer_rows, "RECIPES", {"1×128": layer.RECIPES["1×128"]})
    bf16, *rows = layer_rows.step_rows(Ticks(), None, np, [TINY])
    assert bf16["by"] == "bf16 torch._grouped_mm, SwiGLU by PyTorch's ops"
    for row in rows:
        assert 0.01 < row["error"]["up"] < 0.1
        assert "problem" not in row
    assert rows[1]["bf16_ratio"] == 1


def test_why_there_is_no_fused_kernel(monkeypatch):
    def find(name: str) -> Any:
        if name == "deep_gemm":
            raise OSError("libcudart.so.12: no such file")
        return SimpleNamespace(**dict.fromkeys(layer_fused._NEEDED[1:]))

    monkeypatch.setattr(layer_fused, "import_module", find)
    assert layer_fused.library() == ("deep_gemm: OSError: libcudart.so.12: no such file; "
                                     "sgl_deep_gemm has no fp8_mega_moe")


@needs_host
@pytest.mark.full
def test_with_arrays_of_a_gpu(few, monkeypatch):
    """Kernels on the CPU, a graph, and what CuPy lacks for 8-bit floats. A step that cannot be captured is
    timed all the same."""
    cp, _ = stand_in_arithmetic.install(monkeypatch)
    cp.full = lambda shape, value, dtype: stand_in._placed(np.full(shape, value, dtype))
    monkeypatch.setattr(layer_rows, "torch_problem", lambda: "no PyTorch")
    monkeypatch.setattr(layer_rows, "RECIPES", {"1×128": layer.RECIPES["1×128"]})
    monkeypatch.setattr(layer_rows, "DATAFLOWS", ["both_directions"])
    with stand_in.Stream(non_blocking=True) as stream:
        rows = list(layer_rows.step_rows(Ticks(), stream, cp, [TINY]))
        rows += layer_rows.forward_rows(Ticks(), stream, cp, [TINY])
        assert not [row for row in rows if "problem" in row]
        assert rows[-2]["graph_us"] == 1
        assert rows[1]["checks"] == {"again": True, "out=": True, "graph": True}
        assert rows[1]["graph_us"] == 1
        monkeypatch.setattr(layer.Layer, "in_place", layer.Layer.allocating)
        row = list(layer_rows.step_rows(Ticks(), stream, cp, [TINY]))[1]
    assert row["us"] == 1
    assert row["problem"].startswith("no graph: ")
