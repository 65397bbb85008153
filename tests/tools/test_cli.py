"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, testing
from cupy_fp8.__main__ import COMMANDS, main
from cupy_fp8.arrays import bits
from cupy_fp8.cli import selftest, written
from cupy_fp8.kernels import Variant

ROOT = Path(fp8.__file__).resolve().parent.parent
without_gpu = pytest.mark.skipif(backend.gpu_problem() is None, reason="there is a GPU")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cupy_fp8 …` in a separate process."""
    return subprocess.run([sys.executable, "-m", "cupy_fp8", *arguments], capture_output=True, text=True,
                          timeout=300, cwd=ROOT)


def exit_code(arguments: list[str]) -> int:
    """Return the exit code of the process: argparse exits itself, other codes are returned."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1


# ---- the front ----
@pytest.mark.parametrize(("arguments", "code", "expected"), [
    *((given, 0, "usage: python -m cupy_fp8 COMMAND") for given in (["--help"], ["-h"])),
    ([], 2, "usage: python -m cupy_fp8 COMMAND"),
    (["--version"], 0, f"cupy_fp8 {fp8.__version__}\n"),
    (["quantize"], 2, "cupy_fp8: no such command: quantize\nThe commands are demo, info, "),
    (["demoo", "a.npy"], 2, "cupy_fp8: no such command: demoo; did you mean demo?\n"),
    (["LIST"], 2, "cupy_fp8: no such command: LIST; did you mean list?\n"),
    (["", "list"], 2, "cupy_fp8: no such command: \n"),
    *(([name, "--help"], 0, f"usage: python -m cupy_fp8 {name}") for name in COMMANDS),
    *((given, 2, f"usage: python -m cupy_fp8 {given[0]}") for given in (
        ["list", "everything"], ["info", "--json"], ["selftest", "--executor", "tpu"],
        ["bench", "no_such_op"], ["bench", "--json"],
        ["demo", "--no-such-option"], ["demo", ""], ["demo", "--json", ""], ["demo", "--seed", "-1"],
        ["convert", "", "out", "--recipe", "row"], ["convert", "in", "", "--recipe", "row"])),
], ids=str)
def test_usage(arguments, code, expected, capsys):
    """Requested help goes to stdout, and errors of arguments to stderr."""
    assert exit_code(arguments) == code
    printed = capsys.readouterr()
    asked, unasked = (printed.out, printed.err) if code == 0 else (printed.err, printed.out)
    assert asked.startswith(expected)
    assert unasked == ""


def test_commands_are_the_documented_ones(capsys):
    assert sorted(COMMANDS) == ["bench", "convert", "demo", "info", "inspect", "launch", "list", "selftest"]
    assert exit_code(["--help"]) == 0
    out = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.MULTILINE)
    assert "\n  --version  " in out


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("cupy_fp8.cli.list.main", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("arguments", "code", "out"), [
    (["list"], 0, "quantize_tensor"), (["--help"], 0, "usage"), ([], 2, ""), (["nothing"], 2, ""),
    (["bench", "no_such_op"], 2, ""),
], ids=str)
def test_in_a_process(arguments, code, out):
    done = command(*arguments)
    assert done.returncode == code
    assert out in done.stdout
    assert (done.stderr == "") == (code == 0)


def test_console_script(monkeypatch, capsys):
    """It calls `main` without arguments, whose return value is the exit code."""
    project = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.scripts\]\ncupy-fp8 = "([\w.]+):(\w+)"\n', project)
    assert found
    script = getattr(importlib.import_module(found[1]), found[2])
    for arguments, code in ((["list"], 0), (["no-such-command"], 2)):
        monkeypatch.setattr(sys, "argv", ["cupy-fp8", *arguments])
        assert script() == code
        assert capsys.readouterr()


# ---- list, info ----
def test_list(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    shown = " ".join(printed.split())
    for op in cases.OPS.values():
        assert f" {op.name} {' '.join(op.summary.split())}" in shown
    titles = re.findall(r"^(\w.*)\n  \w", printed, re.MULTILINE)
    families = dict.fromkeys(op.family for op in cases.OPS.values())
    assert titles == [written.TITLES.get(family, family) for family in families]


def test_list_writes_what_is_out_of_date(monkeypatch, tmp_path, capsys):
    page, package = tmp_path / "ops.md", tmp_path / "__init__.py"
    page.write_text("before\n<!-- ops: here -->\n| old |\n<!-- end of ops -->\nafter\n")
    package.write_text("from .ops.scales.old import old\n# `list --write` writes this:\n__all__ = [\n\n]\n")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "__init__.py").write_text("")
    monkeypatch.setattr(written, "_PACKAGE", tmp_path)
    monkeypatch.setattr(written, "PAGE", page)
    assert main(["list", "--write"]) == 0
    assert capsys.readouterr().out == f"written: {page}\nwritten: {package}\n"
    assert main(["list", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert page.read_text() == f"before\n<!-- ops: here -->\n{table}<!-- end of ops -->\nafter\n"
    assert package.read_text().startswith("from .ops.convert.astype import astype, transpose\n")
    assert '__all__ = [\n    "activation_backward_quantize", "activation_quantize", ' in package.read_text()
    assert "old" not in package.read_text()
    page.unlink()
    assert exit_code(["list", "--write"]) == 2
    assert "needs a checkout" in capsys.readouterr().err


def test_info(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 or " " not in line.strip() for line in out.splitlines())  # paths are longer
    found = re.findall(r"^(\S.*?)  +(.*(?:\n +.*)*)", out, re.MULTILINE)
    lines = {name: " ".join(value.split()) for name, value in found}
    assert lines["cupy_fp8"] == fp8.__version__
    assert lines["numpy"] == np.__version__
    assert re.match(r"\d+ files, [0-9a-f]{12}", lines["kernel sources"])
    for name in testing.EXECUTORS:
        problem = testing.executor_problem(name)
        assert lines[f"{name} executor"].startswith("works" if problem is None else f"no: {problem}")
    assert {"ml_dtypes", "cupy", "matplotlib", "rich"} <= lines.keys()
    assert out.count("pip install 'cupy-cuda13x") <= 1      # a long reason is given once
    assert backend.gpu_problem() is not None or lines["compute capability"]


def test_info_facts_are_data():
    facts = importlib.import_module("cupy_fp8.cli.info").facts()
    assert json.loads(json.dumps(facts)).keys() == facts.keys()


# ---- selftest ----
@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, cases.Registration]:
    """Return the ops, each with only its first cases."""
    first = {name: list(op.cases())[:3] for name, op in cases.OPS.items()}
    few = {name: dataclasses.replace(op, cases=partial(iter, first[name])) for name, op in cases.OPS.items()}
    monkeypatch.setattr(cases, "OPS", few)
    return few


@pytest.mark.full
@needs_host
def test_selftest_of_everything(monkeypatch, capsys):
    """Every case is checked once, whatever the result of the checks (test_cases.py runs them)."""
    checked: list[tuple[str, str, str]] = []

    def check(op, case, run):
        checked.append((op.name, str(case), run.name))

    monkeypatch.setattr(selftest, "check", check)
    monkeypatch.setattr(Variant, "compile", lambda *_: None)
    assert main(["selftest", "--full", "--executor", "host"]) == 0
    assert sorted(checked) == sorted(
        (op.name, str(case), "host") for op in cases.OPS.values() for case in op.cases())
    found = re.findall(r"^PASS (\w+) +(\d+) cases +\d+\.\d s$", capsys.readouterr().out, re.MULTILINE)
    assert dict(found) == {name: str(len(list(op.cases()))) for name, op in cases.OPS.items()}


def one_bit_off(op: cases.Registration) -> cases.Registration:
    """Return the op with one flipped bit in the last element of every nonempty result: the lowest one, or one
    of the exponent where results have a bound."""
    def function(*args, **kwargs):
        result = op.function(*args, **kwargs)
        for a in result if op.updates else cases.outputs(result, {}).values():
            if a.size:
                bits(a).reshape(-1)[-1] ^= 1 if op.agrees is None else 1 << 8 * a.itemsize - 3
        return result

    return dataclasses.replace(op, function=function)


def writes_nothing(op: cases.Registration) -> cases.Registration:
    """Return the op in a form that writes nothing."""
    def function(*args, out=None, **kwargs):
        updated = args[:len(op.updates)]
        return updated or (op.function(*args, **kwargs) if out is None else out)

    return dataclasses.replace(op, function=function)


def raises(op: cases.Registration) -> cases.Registration:
    def function(*args, **kwargs):
        raise ValueError("planted")

    return dataclasses.replace(op, function=function)


def returns_others(op: cases.Registration) -> cases.Registration:
    """Return the op in a form that returns something else than its `out`."""
    def function(*args, out=None, **kwargs):
        result = op.function(*args, **kwargs)
        return tuple(a.copy() for a in result) if op.updates else result

    return dataclasses.replace(op, function=function)


BROKEN = list(itertools.product(cases.OPS, (one_bit_off, writes_nothing, raises, returns_others)))


@needs_host
@pytest.mark.parametrize(("name", "breakage"), [
    pytest.param(name, breakage, marks=[] if i % 13 == 0 else pytest.mark.full)
    for i, (name, breakage) in enumerate(BROKEN)])
def test_selftest_finds_a_broken_op(name, breakage, few_cases, monkeypatch, capsys):
    """The ops before and after it are checked all the same."""
    names = list(few_cases)
    for other in set(names) - {names[(names.index(name) + step) % len(names)] for step in (-1, 0, 1)}:
        monkeypatch.delitem(few_cases, other)
    monkeypatch.setitem(few_cases, name, breakage(few_cases[name]))
    assert main(["selftest", "--full", "--executor", "host"]) == 1
    printed = capsys.readouterr().out
    assert sorted(re.findall(r"^(PASS|FAIL) (\w+) ", printed, re.MULTILINE)) == sorted(
        ("FAIL" if other == name else "PASS", other) for other in few_cases)
    failed = re.search(r"^(\d+) of \d+ cases failed$", printed, re.MULTILINE)
    assert failed
    assert 1 <= int(failed[1]) <= 3
    assert str(next(few_cases[name].cases())).split("-")[0] in printed
    assert "all bytes equal" not in printed


@without_gpu
def test_selftest_where_there_is_no_gpu(capsys):
    assert main(["selftest", "--executor", "cuda"]) == 1
    assert capsys.readouterr().out == f"the cuda executor cannot run here: {backend.gpu_problem()}\n"


@pytest.mark.gpu
def test_selftest_on_the_gpu(few_cases, capsys):
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.startswith("executor: cuda\n")
