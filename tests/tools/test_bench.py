"""The benchmark without a GPU: its rows and host calls exist and are described; nothing is timed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_fp8 import backend, bench, cases, testing
from cupy_fp8.__main__ import main
from cupy_fp8.bench import generic, host
from cupy_fp8.cli import bench as command
from cupy_fp8.cli import info

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "nvidia_h200.json").read_text())["results"]


@pytest.mark.skipif(backend.gpu_problem() is None, reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["compute_amax"], ["--json", "results.json"]], ids=str)
def test_without_a_gpu(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 1
    assert capsys.readouterr().out == f"bench needs a GPU: {backend.gpu_problem()}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of ops that get rows in the benchmark; "stopped" stops the run."""
    found: list[str] = []

    def rows(ops: list[str]) -> Iterator[dict[str, Any]]:
        for name in found:
            if name == "stopped":
                raise KeyboardInterrupt
            yield {"op": name}

    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(info, "facts", dict)
    monkeypatch.setattr(command, "device_rows", rows)
    monkeypatch.setattr(command, "host_rows", lambda ops: [])
    return found


def test_results_are_written_as_they_come(tmp_path, measured):
    """A stopped run leaves its results beside those of an earlier one."""
    path, partial = tmp_path / "results.json", tmp_path / "results.json.partial"
    measured += ["astype", "transpose"]
    assert command.main(["--json", str(path)]) == 0
    assert json.loads(path.read_text())["results"] == [{"op": "astype"}, {"op": "transpose"}]
    assert list(tmp_path.iterdir()) == [path]
    measured[:] = ["permute", "stopped"]
    with pytest.raises(KeyboardInterrupt):
        command.main(["--json", str(path)])
    assert json.loads(partial.read_text())["results"] == [{"op": "permute"}]
    assert len(json.loads(path.read_text())["results"]) == 2


def test_results_that_cannot_be_written_are_not_measured(tmp_path, measured, capsys):
    measured.append("stopped")
    for path, problem in ((tmp_path / "missing" / "results.json", "no such folder"),
                          (tmp_path, "is a folder"), ("/dev/null", "is no file that can be replaced")):
        with pytest.raises(SystemExit):
            command.main(["--json", str(path)])
        assert problem in capsys.readouterr().err


def test_every_op_has_rows_and_no_row_twice():
    rows = list(bench.specs())
    assert {row.op for row in rows} == cases.OPS.keys()
    assert max(Counter((row.op, row.label, row.shape) for row in rows).values()) == 1


@pytest.mark.parametrize("rows", [pytest.param(slice(None), marks=pytest.mark.full), slice(1)], ids=str)
def test_bytes_are_those_of_the_published_results(rows):
    """Results are compared by these bytes. The quick tier checks those of each op's first row."""
    published = {(r["op"], r["variant"], tuple(r["shape"])): r["bytes"] for r in RESULTS if "variant" in r}
    for op, of_op in groupby(bench.specs(), lambda row: row.op):
        for row in list(of_op)[rows]:
            traffic = row.traffic
            assert traffic > 0
            assert published.get((op, row.label, row.shape), traffic) == traffic, row


@pytest.fixture
def numpy_for_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays stand in for CuPy arrays, so that the calls run on the reference."""
    monkeypatch.setattr(host, "backend", SimpleNamespace(cupy=lambda: np))
    here = SimpleNamespace(array_arguments=lambda *arguments: arguments)
    monkeypatch.setattr(testing, "Executor", lambda name: here)


def test_names_of_rows_are_those_of_the_published_results(numpy_for_cupy):
    """Results are compared by these names."""
    rows = {(row.op, row.label, row.shape) for row in bench.specs()}
    assert {(r["op"], r["variant"], tuple(r["shape"])) for r in RESULTS if "variant" in r} <= rows
    names = [name for name, _ in host.all_calls(list(cases.OPS))]
    assert {r["op"] for r in RESULTS if "host_us_out" in r} <= {*names, host.BARE}
    assert {name.split()[0] for name in names} == cases.OPS.keys()
    assert len(set(names)) == len(names)


def test_host_calls_run(numpy_for_cupy):
    for _, calls in host.all_calls(list(cases.OPS)):
        calls.with_out()
        if calls.allocating is not None:
            calls.allocating()


def test_host_times_are_shown_with_their_ratio_to_a_bare_launch(numpy_for_cupy, monkeypatch, capsys):
    times: dict[Any, float] = {None: 4.0}
    monkeypatch.setattr(host, "bare_launch", lambda: None)
    monkeypatch.setattr(host, "host_us", lambda call: times.get(call, 6.0))
    _, *rows = command.host_rows(["compute_amax"])
    assert rows == [{"op": "compute_amax", "host_us_out": 6.0, "host_us_allocating": 6.0,
                     "host_ratio_out": 1.5, "host_ratio_allocating": 1.5}]
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{host.BARE:48}     4.00 ( 1.0)", f"{'compute_amax':48}     6.00 ( 1.5)     6.00 ( 1.5)"]


def test_bytes_moved_are_all_arguments_and_results():
    op, case = cases.OPS["astype"], next(cases.OPS["astype"].cases())
    args, kwargs = op.inputs(case)
    assert generic.traffic(op, case) == args[0].nbytes + op.reference(*args, **kwargs).nbytes
