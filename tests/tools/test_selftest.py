"""The quick pass of selftest: its cases, its progress, and compilers that work ahead of the checks."""

from __future__ import annotations

import dataclasses
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from covering import observed
from programs import launched_variants
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cases, hostexec, testing
from cupy_fp8.__main__ import main
from cupy_fp8.cases.covering import Recorded, covering_of, record, served_by, spread
from cupy_fp8.cli import progress, selftest
from cupy_fp8.kernels import Variant, recording

ROOT = Path(fp8.__file__).resolve().parent.parent


def entries(recorded: list[Recorded]) -> set[tuple[str, str]]:
    return {entry for one in recorded for entry in one.entries}


def variants(recorded: list[Recorded]) -> set[Variant]:
    return {variant for one in recorded for variant in one.variants}


# ---- the cases ----
def covering(op: cases.Registration) -> list[cases.Case]:
    """Return the cases that the quick pass chooses for kernels on the CPU."""
    return [chosen.case for chosen in covering_of(record(op))]


def recorded_of(op: cases.Registration) -> list[Recorded]:
    return [one for one in observed() if one.case.op == op.name]


@pytest.mark.parametrize("op", cases.OPS.values(), ids=list(cases.OPS))
def test_covering_launches_every_entry_point_of_the_op(op):
    recorded = recorded_of(op)
    chosen = covering_of(recorded)
    assert not [str(one.case) for one in recorded if one.raised]
    assert entries(chosen) == entries(recorded)
    assert 1 <= len(chosen) <= len(entries(recorded))
    served = served_by(chosen, recorded)
    assert {id(one) for one in chosen} <= {id(one) for one in served}
    assert variants(served) == variants(chosen)
    fewer = spread(chosen, served, 10)
    assert {id(one) for one in chosen} <= {id(one) for one in fewer} <= {id(one) for one in served}
    assert len(fewer) <= len(chosen) + 10


@pytest.mark.parametrize("name", ["compute_amax", *(
    pytest.param(name, marks=pytest.mark.full) for name in cases.OPS if name != "compute_amax")])
def test_covering_compiles_nothing(name, monkeypatch):
    monkeypatch.setattr(hostexec, "compile_kernel", None)
    op = cases.OPS[name]
    assert [str(one.case) for one in covering_of(recorded_of(op))] == [str(case) for case in covering(op)]


def test_all_ops_together_launch_every_entry_point_of_the_package():
    launched = {entry for op in cases.OPS.values() for entry in entries(covering_of(recorded_of(op)))}
    assert launched == {(program.source, program.entry) for program in launched_variants()}


def test_recording_launches_nothing():
    x = np.ones((3, 5), np.float32)
    with testing.executor("host"), recording() as variants:
        fp8.compute_amax(x, out=(out := np.full(1, 7, np.float32)))
    assert out[0] == 7
    assert [variant.kernel.entry for variant in variants] == ["compute_amax"]


def test_a_case_that_raises_is_chosen():
    op = cases.OPS["transpose"]
    given = list(op.cases())[:4]

    def inputs(case: cases.Case):
        if case is given[2]:
            raise ValueError("planted")
        return op.inputs(case)

    broken = cases.Registration("transpose", op.function, op.reference, inputs, lambda: iter(given), "")
    assert given[2] in covering(broken)
    silent = cases.Registration("transpose", lambda *_, **__: None, op.reference, op.inputs,
                                lambda: iter(given), "")
    assert covering(silent) == given[:1]


# ---- the command ----
@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the op and case of every check. Nothing is compiled or launched."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(selftest, "check", lambda op, case, run: found.append((op.name, str(case))))
    monkeypatch.setattr(Variant, "compile", lambda *_: None)
    return found


@pytest.mark.full
@needs_host
def test_the_default_is_the_quick_pass(checked, capsys):
    assert main(["selftest", "--executor", "host"]) == 0
    assert {name for name, _ in checked} == cases.OPS.keys()
    for name, op in cases.OPS.items():
        assert {(name, str(case)) for case in covering(op)} <= set(checked)
    assert len(checked) < sum(1 for _ in cases.all_cases()) / 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("This was the quick pass")


@pytest.mark.skipif(testing.executor_problem("cuda") is None, reason="kernels run on the GPU")
def test_without_a_compiler_the_reference_runs_and_what_is_left_out_is_said(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(hostexec.build, "compiler_version", hostexec.build.compiler_version.__wrapped__)
    checked: list[str] = []
    check = selftest.check

    def noted(op, case, run):
        assert run.name == "reference"
        checked.append(op.name)
        check(op, case, run)

    monkeypatch.setattr(selftest, "check", noted)
    assert main(["selftest", "quantize_tensor", "transpose"]) == 0
    assert set(checked) == {"quantize_tensor", "transpose"}
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "executor: reference"
    assert out[1].startswith("Kernels are left out: the host executor needs g++ (")
    assert "no-such-compiler" in out[1]
    entries = {(variant.kernel.source, variant.kernel.entry) for name in ("quantize_tensor", "transpose")
               for one in record(cases.OPS[name]) for variant in one.variants}
    assert out[-2:] == ["all bytes equal the reference's",
                        f"These were calls on NumPy arrays. Kernel entry points left out: {len(entries)}."]
    assert main(["selftest", "transpose", "--executor", "host"]) == 1
    assert "the host executor cannot run here: the host executor needs g++" in capsys.readouterr().out


def test_a_fault_is_found_without_a_compiler(monkeypatch, capsys):
    """In an op that writes other bytes than its reference."""
    op = cases.OPS["transpose"]
    wrong = dataclasses.replace(op, reference=lambda x: op.reference(x)[..., ::-1])
    monkeypatch.setitem(cases.OPS, "transpose", wrong)
    assert main(["selftest", "transpose", "--executor", "reference"]) == 1
    assert "FAIL transpose" in capsys.readouterr().out


@needs_host
@pytest.mark.parametrize("arguments", [[], ["--full"]], ids=str)
def test_ops_by_name(arguments, checked, capsys):
    assert main(["selftest", "transpose", *arguments, "astype", "transpose", "--executor", "host"]) == 0
    names = [name for name, _ in checked]
    assert set(names) == {"astype", "transpose"}
    if arguments:
        assert len(names) == sum(1 for name in set(names) for _ in cases.OPS[name].cases())
    assert ("This was the quick pass" in capsys.readouterr().out) == (not arguments)


@pytest.mark.parametrize("command", ["selftest", "bench"])
@pytest.mark.parametrize(("given", "near"), [
    ("quantise_mx", "quantize_mx"), ("swiglu", "swiglu_quantize"), ("Transpose", "transpose"),
])
def test_an_unknown_op(command, given, near, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([command, "astype", given])
    printed = capsys.readouterr()
    assert leaving.value.code == 2
    assert printed.out == ""
    assert f"no such op: {given}; did you mean " in printed.err
    assert near in printed.err.split("did you mean ")[1].split("?\n")[0]
    assert all(name in printed.err for name in cases.OPS)


@needs_host
def test_a_name_like_no_other(capsys):
    with pytest.raises(SystemExit):
        main(["selftest", "zzz"])
    assert f"no such op: zzz\nThe ops are {next(iter(cases.OPS))}" in capsys.readouterr().err


@needs_host
def test_kernels_are_compiled_in_several_threads_and_once(checked, monkeypatch):
    """Every compiler waits until another one has begun."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    barrier, compiled = threading.Barrier(2, timeout=60), []

    def compile_(variant: Variant, device: int | None) -> None:
        compiled.append((variant, device))
        if len(compiled) <= 2:
            barrier.wait()

    monkeypatch.setattr(Variant, "compile", compile_)
    assert main(["selftest", "quantize_tensor", "cast_transpose", "--executor", "host"]) == 0
    assert len(compiled) == len(set(compiled)) > 2
    assert {device for _, device in compiled} == {None}


@needs_host
def test_an_error_of_a_compiler_is_reported_by_the_case(monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise hostexec.HostError("g++ failed: planted")

    monkeypatch.setattr(hostexec, "compile_kernel", broken)
    assert main(["selftest", "transpose", "--executor", "host"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL transpose" in printed
    assert "HostError: g++ failed: planted" in printed
    assert "all bytes equal" not in printed


# ---- in a process of its own ----
def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cupy_fp8", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env=os.environ | env)


@needs_host
def test_output_comes_while_kernels_are_compiled(tmp_path):
    """The compiler of the first op's kernel waits for a file: the second op's line comes before that."""
    compiler, gate = tmp_path / "slow-g++", tmp_path / "gate"
    wait = f'while [ ! -e "{gate}" ]; do sleep 0.05; done'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *ENTRY_transpose*) {wait};; esac\n'
                        f'exec {os.environ.get("CXX") or "g++"} "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    with start("selftest", "transpose", "compute_scale", "--executor", "host", CXX=str(compiler),
               CUPY_FP8_CACHE_DIR=str(tmp_path / "cache")) as child:
        assert child.stdout
        assert child.stderr
        assert child.stdout.readline() == "executor: host\n"
        assert child.stderr.readline() == "looking for the kernels of transpose\n"
        assert child.stdout.readline().startswith("PASS compute_scale")
        while "next: transpose" not in (line := child.stderr.readline()):
            assert line
        gate.touch()
        rest, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    assert rest.startswith("PASS transpose")


@needs_host
def test_output_on_an_ascii_terminal():
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    with start("selftest", "compute_scale", "--executor", "host", **ascii_only) as child:
        out, error = child.communicate(timeout=300)
    assert child.returncode == 0
    assert "all bytes equal the reference's" in out
    assert "Traceback" not in error


# ---- progress ----
def test_progress_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    line = progress.Progress()
    line.clear()
    line.show("one")
    line.show("two [1/2]")                              # not rich's markup
    line.clear()
    line.clear()
    shown = screen.getvalue()
    assert "two [1/2]\n" in shown
    assert shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")    # the cursor is back, and the line is empty


@pytest.mark.parametrize("without", ["a terminal", "rich", "a terminal that moves its cursor"])
def test_progress_elsewhere_is_a_plain_line_now_and_then(without, monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    monkeypatch.setattr(file, "isatty", lambda: without != "a terminal")
    monkeypatch.setenv("TERM", "dumb" if "cursor" in without else "xterm")
    if without == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    line = progress.Progress()
    for at, text in ((0, "one"), (4, "two"), (6, "three"), (8, "four")):    # two and four come too early
        now[0] = at
        line.show(text)
    now[0] = 10
    line.printed()                                      # something else is printed
    for at, text in ((12, "five"), (15, "six")):
        now[0] = at
        line.show(text)
    assert file.getvalue() == "one\nthree\nsix\n"
