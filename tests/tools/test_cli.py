"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, testing
from cupy_fp8.__main__ import COMMANDS, main
from cupy_fp8.arrays import bits
from cupy_fp8.cli import selftest
from cupy_fp8.kernels import Variant

ROOT = Path(fp8.__file__).resolve().parent.parent
HOST_PROBLEM = testing.executor_problem("host")
needs_host = pytest.mark.skipif(HOST_PROBLEM is not None, reason=str(HOST_PROBLEM))


def command(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`python -m cupy_fp8 …` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "cupy_fp8", *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def exit_code(arguments: list[str]) -> int:
    """What the process would exit with: argparse leaves by itself, the rest is returned."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1


# ---- the front ----
@pytest.mark.parametrize("arguments", [["--help"], ["-h"]], ids=str)
def test_help(arguments, capsys):
    assert exit_code(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: python -m cupy_fp8 COMMAND")
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", printed.out, re.MULTILINE)
    assert printed.err == ""


@pytest.mark.parametrize("arguments", [[], ["quantize"], ["--version"], ["", "list"], ["LIST"]], ids=str)
def test_bad_command(arguments, capsys):
    assert exit_code(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("usage: python -m cupy_fp8 COMMAND")
    assert printed.out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    assert exit_code([name, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: python -m cupy_fp8 {name}")
    assert printed.err == ""


@pytest.mark.parametrize("arguments", [
    ["list", "everything"], ["info", "--json"], ["selftest", "--executor", "tpu"], ["selftest", "--executor", "reference"],
    ["bench", "no_such_op"], ["bench", "--json"], ["demo", "--no-such-option"],
], ids=str)  # fmt: skip
def test_bad_arguments_of_a_command(arguments, capsys):
    assert exit_code(arguments) == 2
    printed = capsys.readouterr()
    assert f"python -m cupy_fp8 {arguments[0]}" in printed.err
    assert printed.out == ""


def test_commands_are_the_documented_ones():
    assert sorted(COMMANDS) == ["bench", "demo", "info", "list", "selftest"]


@pytest.mark.parametrize("arguments", [("list",), ("--help",)], ids=str)
def test_in_a_process(arguments):
    done = command(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "quantize_tensor" in done.stdout or "usage" in done.stdout


def test_exit_codes_of_a_process():
    assert command("nothing").returncode == 2
    assert command().returncode == 2
    assert command("bench", "no_such_op").returncode == 2


def test_console_script():
    scripts = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n[")[0]
    found = re.fullmatch(r'cupy-fp8 = "([\w.]+):(\w+)"\s*', scripts)
    assert found
    assert getattr(importlib.import_module(found[1]), found[2]) is main


@pytest.mark.parametrize(("arguments", "code"), [(["list"], 0), (["no-such-command"], 2)], ids=str)
def test_main_reads_the_command_line(arguments, code, monkeypatch, capsys):
    """As the console script calls it: without arguments, its return value the exit code."""
    monkeypatch.setattr(sys, "argv", ["cupy-fp8", *arguments])
    assert main() == code
    assert capsys.readouterr()


# ---- list, info ----
def test_list(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{op.name:18} {op.summary}" for op in cases.OPS.values()]
    for name in ("quantize_tensor", "cast_transpose", "dequantize", "astype", "transpose", "compute_amax"):
        assert any(line.startswith(name + " ") for line in lines)


def test_info(capsys):
    assert main(["info"]) == 0
    lines = dict(re.findall(r"^(.+?)  +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert lines["cupy_fp8"].strip() == fp8.__version__
    assert lines["numpy"].strip() == np.__version__
    assert re.match(r"\d+ files, [0-9a-f]{12}", lines["kernel sources"])
    assert lines["reference executor"].strip() == "works"
    for name in ("host", "cuda"):
        problem = testing.executor_problem(name)
        assert lines[f"{name} executor"].strip() == ("works" if problem is None else f"no: {problem}")
    if backend.gpu_problem() is None:
        assert lines["compute capability"]
    assert "ml_dtypes" in lines
    assert "cupy" in lines


def test_info_facts_are_data():
    facts = importlib.import_module("cupy_fp8.cli.info").facts()
    assert json.loads(json.dumps(facts)).keys() == facts.keys()


# ---- selftest ----
@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, cases.Op]:
    """A table with the first cases of every op."""
    first = {name: list(op.cases())[:3] for name, op in cases.OPS.items()}
    few = {name: dataclasses.replace(op, cases=partial(iter, first[name])) for name, op in cases.OPS.items()}
    monkeypatch.setattr(cases, "OPS", few)
    return few


@pytest.mark.full
@needs_host
def test_selftest_passes(few_cases, capsys):
    assert main(["selftest", "--full", "--executor", "host"]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "executor: host"
    assert [re.match(r"PASS (\w+) +3 cases +\d+\.\d s$", line).group(1) for line in lines] == list(few_cases)   # type: ignore[union-attr]
    assert last == "all bytes equal the reference's"


@needs_host
def test_selftest_of_everything(monkeypatch, capsys):
    """Every case is checked once, which test_cases.py does too, whatever the check makes of them."""
    checked: list[tuple[str, str, str]] = []
    monkeypatch.setattr(selftest, "check", lambda op, case, run: checked.append((op.name, str(case), run.name)))
    monkeypatch.setattr(Variant, "compile", lambda *_: None)
    assert main(["selftest", "--full", "--executor", "host"]) == 0
    assert checked == [(op.name, str(case), "host") for op in cases.OPS.values() for case in op.cases()]
    counts = {m[1]: int(m[2]) for m in re.finditer(r"^PASS (\w+) +(\d+) cases", capsys.readouterr().out, re.MULTILINE)}
    assert counts == {name: len(list(op.cases())) for name, op in cases.OPS.items()}


def one_bit_off(op: cases.Op) -> cases.Op:
    """The op with the lowest bit of the last element of every nonempty result turned over."""
    def function(*args, **kwargs):
        result = op.function(*args, **kwargs)
        for a in result if op.updates else cases.outputs(result, {}).values():
            if a.size:
                bits(a).reshape(-1)[-1] ^= 1
        return result

    return dataclasses.replace(op, function=function)


def writes_nothing(op: cases.Op) -> cases.Op:
    """The op, but what it should write comes back untouched."""
    def function(*args, out=None, **kwargs):
        updated = args[:len(op.updates)]
        return updated or (op.function(*args, **kwargs) if out is None else out)

    return dataclasses.replace(op, function=function)


def raises(op: cases.Op) -> cases.Op:
    def function(*args, **kwargs):
        raise ValueError("planted")

    return dataclasses.replace(op, function=function)


def returns_others(op: cases.Op) -> cases.Op:
    """The op, but what it returns is not what it was given to write."""
    def function(*args, out=None, **kwargs):
        result = op.function(*args, **kwargs)
        return tuple(a.copy() for a in result) if op.updates else result

    return dataclasses.replace(op, function=function)


@needs_host
@pytest.mark.parametrize("breakage", [one_bit_off, writes_nothing, raises, returns_others])
@pytest.mark.parametrize("name", list(cases.OPS))
def test_selftest_finds_a_broken_op(name, breakage, few_cases, monkeypatch, capsys):
    names = list(few_cases)
    others = {names[(names.index(name) + step) % len(names)] for step in (-1, 1)}       # what stands before it, and after it, goes on
    for other in set(names) - {name, *others}:
        monkeypatch.delitem(few_cases, other)
    monkeypatch.setitem(few_cases, name, breakage(few_cases[name]))
    assert main(["selftest", "--full", "--executor", "host"]) == 1
    printed = capsys.readouterr().out
    assert re.findall(r"^FAIL (\w+) ", printed, re.MULTILINE) == [name]
    assert re.findall(r"^PASS (\w+) ", printed, re.MULTILINE) == [other for other in few_cases if other != name]
    failed = re.search(r"^(\d+) of all cases failed$", printed, re.MULTILINE)
    assert failed
    assert 1 <= int(failed[1]) <= 3
    assert str(next(few_cases[name].cases())).split("-")[0] in printed
    assert "all bytes equal" not in printed


def test_selftest_where_there_is_no_gpu(capsys):
    problem = backend.gpu_problem()
    if problem is None:
        pytest.skip("there is a GPU")
    assert main(["selftest", "--executor", "cuda"]) == 1
    assert capsys.readouterr().out == f"the cuda executor cannot run here: {problem}\n"


@pytest.mark.gpu
def test_selftest_on_the_gpu(few_cases, capsys):
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.startswith("executor: cuda\n")


# ---- bench ----
def test_bench_where_there_is_no_gpu(capsys, tmp_path):
    problem = backend.gpu_problem()
    if problem is None:
        pytest.skip("there is a GPU")
    for arguments in ([], ["compute_amax"], ["--json", str(tmp_path / "results.json")]):
        assert main(["bench", *arguments]) == 1
        assert capsys.readouterr().out == f"bench needs a GPU: {problem}\n"
    assert list(tmp_path.iterdir()) == []
    assert command("bench").returncode == 1


def test_bench_names_an_unknown_op(capsys):
    assert exit_code(["bench", "astyp", "compute_amax"]) == 2
    error = capsys.readouterr().err
    assert "no such op: astyp (did you mean astype?); the ops are" in error
    assert all(name in error for name in cases.OPS)
