"""`bench dispatch` without a GPU: its options, its arithmetic with test clocks, rows of tiny layers on NumPy
arrays between threads, and its lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks_in_bench import TINY, Ticks, between, take_few

from cupy_fp8 import backend
from cupy_fp8.bench import ranks as timing
from cupy_fp8.bench.moe import dispatch, dispatch_given, dispatch_layer
from cupy_fp8.bench.ranks import Ranks
from cupy_fp8.cli import bench as command
from cupy_fp8.cli import bench_dispatch, info, launch
from cupy_fp8.distributed import World, local


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    take_few(monkeypatch)


# ---- the command ----
@pytest.mark.parametrize(("arguments", "problem"), [
    (["dispatch"], "bench dispatch: --ranks says how many processes to start"),
    (["dispatch", "--ranks", "3"], "--ranks: expected a divisor of the 64 experts, got 3"),
    (["dispatch", "--ranks", "0"], "expected a number of 1 or more"),
    (["dispatch", "--ranks", "4", "--experts", "10"], "--ranks: expected a divisor of the 10 experts, got 4"),
    (["dispatch", "--ranks", "2", "--experts", "6"], "a token has 8 different ones"),
    (["dispatch", "--ranks", "2", "--experts-of-rank", "3"], "a token has 8 different ones"),
    (["moe", "--experts", "2"], "of `bench dispatch` alone"),
    (["moe", "--ranks", "2"], "of `bench dispatch` alone"),
    (["--quick"], "of `bench dispatch` alone"),
    (["dispatch", "--ranks", "2", "--only", "route"], "invalid choice: 'route'")], ids=str)
def test_options_that_do_not_fit(arguments, problem, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert problem in capsys.readouterr().err


def test_it_is_named_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "dispatch: experts over the GPUs of --ranks" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as the command checks."""
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(backend, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(info, "facts", dict)


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_are_started_and_their_rows_written(code, gpus, tmp_path, monkeypatch):
    """Also those left by a run that fails."""
    started: list[Any] = []

    def run(given: list[str], ranks: int, *, share_gpus: bool) -> int:
        started.append((given[:3], given[4:], ranks, share_gpus))
        with open(given[3], "w") as file:
            file.write('{"op": "dispatch", "us": 1}\n')
        return code

    monkeypatch.setattr(launch, "run", run)
    path = tmp_path / "rows.json"
    options = ["--ranks", "4", "--quick", "--only", "layer", "--only", "combine", "--share-gpus",
               "--experts", "256"]
    assert command.main(["dispatch", *options, "--json", str(path)]) == bool(code)
    assert started == [([sys.executable, "-m", bench_dispatch.__name__],
                        ["--quick", "--only=layer", "--only=combine", "--experts=256",
                         "--experts-of-rank=16"], 4, True)]
    row, *problems = json.loads(path.read_text())["results"]
    assert row == {"op": "dispatch", "us": 1}
    said = "a rank ended with exit code 3; what it said is above"
    assert problems == [{"op": "dispatch", "problem": said}] * bool(code)


def test_more_ranks_than_gpus(gpus, capsys):
    assert command.main(["dispatch", "--ranks", "4"]) == 1
    assert capsys.readouterr().out == "4 ranks, but 2 GPUs (--share-gpus lets ranks share them)\n"


def test_the_options_of_a_rank_are_those_of_the_command(monkeypatch):
    parser = argparse.ArgumentParser()
    bench_dispatch.add_options(parser)
    assert parser.parse_args(["--ranks", "8"]).only == []
    full = dispatch_given.FULL
    assert (full.experts, full.weak, full.topk) == (
        bench_dispatch._EXPERTS, bench_dispatch._OF_RANK, bench_dispatch._SLOTS)
    assert set(dispatch_given.QUICK.sent) < set(dispatch_given.FULL.sent)


# ---- times ----
def test_the_time_is_that_of_the_slowest_rank():
    """Its steps are 40 µs in bursts of three, chosen for both ranks."""
    clocks = [Ticks(6.0), Ticks(120.0)]
    called = [0, 0]

    def run(world: World) -> Any:
        def step() -> None:
            called[world.rank] += 1

        return Ranks(world, clocks[world.rank], None, np, 2).time(step)

    first, second = local(2).run(run)
    assert first == second
    steps = int(10_000 / 40)
    most = min(steps, timing._MOST)
    assert first.us == pytest.approx(120 / most)
    assert first.spread == 0
    assert first.host_us == pytest.approx(10 / most)
    assert called == [3 + (1 + 3) + 2 * (1 + most)] * 2
    assert clocks[0].log[:3] == ["wait", "wait", "pause"]
    assert clocks[0].log[3] == f"delay {200 + (most + 1) * 10 / 3:.0f}"


def test_steps_that_are_not_queued_have_no_delay():
    clock = Ticks()
    local(1).run(lambda world: Ranks(world, clock, None, np, 1).time(lambda: None, queued=False))
    assert not [entry for entry in clock.log if entry.startswith("delay")]


def test_what_one_rank_says_all_know():
    def run(world: World) -> Any:
        ranks = Ranks(world, Ticks(), None, np)
        own = "no link" if world.rank == 1 else None
        return (ranks.all(world.rank != 1), ranks.all(True), ranks.problem(own), ranks.problem(None),
                ranks.slowest([world.rank, -world.rank]), ranks.middle([world.rank]))

    assert local(3).run(run) == [(False, True, "rank 1: no link", None, [2, 0], [1])] * 3


# ---- what is sent ----
def test_bytes_are_those_of_the_busiest_rank():
    """Rank 0 sends two tokens to rank 1, one of them for two experts there; rank 1 sends one."""
    chosen = [np.array([[0, 2], [2, 3], [0, 1]]), np.array([[2, 3], [1, 2]])]
    to = dispatch_given.Destinations(chosen, 2, None)
    assert to.busiest() == 2
    assert to.busiest(slots=True) == 3
    assert dispatch_given.Destinations(chosen[:1], 4, None).busiest() == 0


def test_destinations():
    ranks = [Ranks(world, Ticks(), None, np) for world in local(4)]
    even, spread = dispatch_given.balanced(ranks[1], 64, 8), dispatch_given.uniform(ranks[1], 100, 16, 8)
    assert even.busiest() == 48
    assert (np.diff(even.own // 8, axis=1) == 0).all()
    assert (np.sort(spread.own, 1)[:, 1:] != np.sort(spread.own, 1)[:, :-1]).all()
    assert spread.local == 4
    for made in (even, spread):
        assert (made.own == made.chosen[1]).all()
        assert (made.chosen[0] != made.chosen[1]).any()


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 81920), (4096, 40960), (128, 2048), (1, 272)])
def test_rows_of_a_rank(tokens, rows):
    """A quarter more than the mean, in whole groups, or enough for any routing."""
    ranks = Ranks(local(4)[0], Ticks(), None, np)
    assert dispatch_given.bound(ranks, tokens, 64, 8, 16 if tokens < 4096 else 128) == rows


# ---- rows ----
@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_the_exchange_alone(size, few):
    fp8, bf16, *others = between(size, dispatch.exchange_rows)
    assert [fp8["variant"], bf16["variant"]] == ["p2p FP8", "p2p bf16"]
    assert [row["variant"] for row in others] == ["nccl FP8", "nccl bf16"]
    assert fp8["section"] == "exchange"
    assert (fp8["ranks"], fp8["rows"]) == (size, 5)
    moved = 3 if size == 2 else 0
    assert fp8["bytes"] == moved * (128 + 4 + 2 * 4)
    assert bf16["bytes"] == moved * (2 * 128 + 2 * 4)
    assert ("gb_per_s" in fp8) == (size == 2)
    for row in (fp8, bf16, *others):
        assert row["checks"] == {"again": True}
        assert "problem" not in row
    assert "to_first" not in fp8
    assert bf16["to_first"] == 1


def test_rows_of_the_whole_dispatch(few):
    rows = between(2, dispatch.dispatch_rows)
    assert [row["variant"] for row in rows] == ["p2p FP8", "nccl FP8", "nccl bf16"]
    assert rows[1]["checks"] == {"again": True, "beside": True, "exchange again": True}
    for row in rows:
        assert row["to_exchange"] == row["us"] == row["exchange_us"] == 1
        assert "problem" not in row


def test_rows_of_the_way_back(few):
    rows = between(2, dispatch.combine_rows)
    assert [row["variant"] for row in rows] == ["p2p rank", "nccl rank", "p2p exact", "nccl exact"]
    assert rows[2]["bytes"] > rows[0]["bytes"] > 0
    assert rows[3]["checks"]["beside"]
    assert not [row for row in rows if "problem" in row]


@pytest.mark.parametrize("wrong", ["again", "graph"])
def test_a_step_that_writes_nothing_is_noticed(wrong, few, monkeypatch):
    monkeypatch.setattr(dispatch, "captured",
                        lambda step, stream: (lambda: None) if wrong == "graph" else step)

    def run(world: World) -> Any:
        ranks, made = Ranks(world, Ticks(), "stream", np, 1), np.ones(4, np.float32)

        def step() -> None:
            if wrong != "again" or world.rank:
                made[:] = 1

        row = dispatch.timed(ranks, step, dispatch.same_bytes(ranks, lambda: made), nbytes=2000)
        return dispatch.finished(ranks, row, {"us": 4.0, "graph_us": 2.0})

    for row in local(2).run(run):
        assert row["problem"].startswith("other bytes: again" if wrong == "again" else "other bytes: graph")
        assert row["graph_gb_per_s"] == row["gb_per_s"] == 2
        assert (row["to_first"], row["to_first_graph"]) == (0.25, 0.5)


def test_an_exchange_that_brings_other_bytes_is_noticed(few, monkeypatch):
    def run(world: World) -> Any:
        ranks = Ranks(world, Ticks(), None, np, 1)
        to = dispatch_given.balanced(ranks, 9, 2)
        with dispatch_given.parallel(ranks, TINY, dispatch_given.Way("p2p", True), 9, 4) as ep:
            parts = dispatch_given.parts_of(*dispatch_given.tokens_of(ranks, 9, TINY, True))
            routing, transport = ep.route(to.own), ep._transport
            assert transport is not None

            def bad() -> Any:
                data, scales, probs = transport.dispatch(routing, *parts)
                assert scales is not None
                scales[9 * world.rank] += 1
                return data, scales, probs

            def good() -> Any:
                return transport.dispatch(routing, *parts)

            return [dispatch._arrives(ranks, 9, routing, parts, good, step) for step in (good, bad)]

    assert local(2).run(run) == [[True, False]] * 2


def test_a_graph_that_one_rank_has_not_nobody_has(monkeypatch):
    def refuse(step: Any, stream: Any) -> Any:
        if stream:
            raise ValueError("not while a graph is captured")
        return step

    monkeypatch.setattr(dispatch, "captured", refuse)
    found = local(2).run(lambda world: dispatch.graph_of(Ranks(world, Ticks(), world.rank, np), lambda: None))
    assert found == [(None, "rank 1: no graph: ValueError: not while a graph is captured")] * 2


def test_transports_that_are_not_there(monkeypatch):
    monkeypatch.setattr(dispatch, "nccl_problem", lambda: "CuPy has no NCCL")
    found = local(2).run(lambda world: dispatch.missing(Ranks(world, Ticks(), None, np)))
    assert found == [{"nccl": "rank 0: CuPy has no NCCL"}] * 2


# ---- lines ----
def test_lines(few, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "nccl_problem", lambda: "CuPy has no NCCL")
    monkeypatch.setattr(dispatch_layer, "torch_problem", lambda: "no PyTorch")
    monkeypatch.setattr(dispatch_given, "QUICK", TINY)

    def rows(ranks: Ranks, *_: Any) -> Iterator[dict[str, Any]]:
        return bench_dispatch.shown(bench_dispatch.measured(ranks, quick=True))

    found = between(1, rows)
    assert found[0]["skipped"] == "rank 0: CuPy has no NCCL"
    out = capsys.readouterr().out
    assert out.startswith("    nccl         skipped: rank 0: CuPy has no NCCL\n\nThe exchange alone")
    for title in bench_dispatch._TITLES.values():
        assert out.count(title) == 1
    assert f"  5 rows a rank\n    p2p FP8     {1:10.2f}" in out
    assert "        the exchange alone: 1.00 µs\n" in out
    assert "  6 tokens a rank, 4 experts\n" in out
    assert "        µs: route " in out


def test_all_values_have_a_column():
    row = {"variant": "p2p FP8", "us": 98.4, "graph_us": 97.0, "spread_percent": 1.23, "host_us": 30.4,
           "bytes": 22_800_000, "gb_per_s": 231.7, "graph_gb_per_s": 235.1, "to_first": 1.5,
           "to_first_graph": 1.4, "exchange_us": 90.0, "exchange_graph_us": 89.0, "to_exchange": 1.09,
           "to_exchange_graph": 1.08,
           "note": "a note", "problem": "other bytes: graph"}
    first, *rest = bench_dispatch.lines(row)
    assert first.split() == ["p2p", "FP8", "98.40", "97.00", "1.2", "30", "22.80", "232", "235", "1.50",
                             "1.40", "1.09", "1.08"]
    assert len(first) == len(bench_dispatch._HEADING)
    assert [line.strip() for line in rest] == ["the exchange alone: 90.00 µs, in a graph 89.00", "a note",
                                               "p2p FP8      PROBLEM: other bytes: graph"]
