"""The command line's output on ASCII terminals and into pipes whose reader has gone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiers import first_of_each

import cupy_fp8 as fp8
from cupy_fp8 import cases, testing
from cupy_fp8.cli import terminal, written

ROOT = Path(fp8.__file__).resolve().parent.parent
HOST_PROBLEM = testing.executor_problem("host")
#: ways in which Python sees such a terminal: with its own choice of UTF-8 for the C locale, and without
ASCII = {"C locale": {"LC_ALL": "C"},
         "strictly ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
         "ASCII output": {"PYTHONIOENCODING": "ascii"}}


def run(*arguments: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "cupy_fp8", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | env)


@pytest.mark.parametrize("environment", first_of_each(lambda _: 0, ASCII.values()), ids=list(ASCII))
@pytest.mark.parametrize("command", ["list", "info", "demo"])
def test_ascii_terminals(command, environment, tmp_path):
    file = tmp_path / "weight.npy"
    np.save(file, np.ones((3, 5), np.float32))
    done = run(command, *([str(file)] if command == "demo" else []), **environment)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    if "LC_ALL" not in environment or "PYTHONUTF8" in environment:
        assert done.stdout.isascii()
        assert b"?" not in done.stdout
    shown = done.stdout.decode()
    assert {"list": "1x128" in shown or "1×128" in shown, "info": "ml_dtypes" in shown,
            "demo": "3x5" in shown or "3×5" in shown}[command]


def test_characters_that_an_encoding_lacks(monkeypatch):
    for encoding, expected in (("ascii", "1x2 ... ?"), ("latin-1", "1×2 ... ?"), ("utf-8", "1×2 … 字")):
        buffer = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
        terminal.show_any_text()
        print("1×2 … 字", end="", flush=True)
        assert buffer.getvalue().decode(encoding) == expected


@pytest.mark.parametrize("arguments", [["list"], ["info"], ["--help"], ["demo", "--help"]], ids=str)
def test_a_reader_that_has_gone(arguments):
    """As after `| head`: writing fails, without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141 or arguments == ["demo", "--help"]        # argparse may hide the error


@pytest.mark.skipif(HOST_PROBLEM is not None, reason=str(HOST_PROBLEM))
def test_selftest_whose_reader_has_gone():
    """Its first line is written at once, and ends it before anything is compiled."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run("selftest", "--executor", "host", stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


def test_list_into_head():
    command = f"'{sys.executable}' -m cupy_fp8 list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{written.TITLES[next(iter(cases.OPS.values())).family]}\n"
    assert done.stderr == ""
