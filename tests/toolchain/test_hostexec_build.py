"""The environment of the CPU executor: a compiler with arguments, read-only folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import hostexec, testing
from cupy_fp8.hostexec import build

ROOT = Path(fp8.__file__).resolve().parent.parent


@pytest.fixture
def no_known_version(monkeypatch):
    """Determine the compiler's version anew, and forget the one found by this test."""
    build.compiler_version.cache_clear()
    yield
    monkeypatch.undo()
    build.compiler_version.cache_clear()


@pytest.mark.parametrize(("given", "command"), [
    ("", ["g++"]), ("  ", ["g++"]), ("g++ -m64", ["g++", "-m64"]), ("'no such' -O2", ["no such", "-O2"]),
])
def test_compiler_with_arguments(given, command, monkeypatch):
    monkeypatch.setenv("CXX", given)
    assert build.compiler() == command


@needs_host
def test_path_of_a_compiler_with_spaces(tmp_path, monkeypatch):
    program = tmp_path / "my g++"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    assert build.compiler() == [str(program)]


@pytest.mark.parametrize(("given", "message"), [
    ("g++ 'unclosed", "CXX is not a command .*set it to a compiler, such as g"),
    ("no-such-compiler -m64", "needs g.*install it or set CXX"),
    ("false -m64", "false -m64 --version failed"),
])
def test_a_compiler_that_does_not_work(given, message, no_known_version, monkeypatch):
    monkeypatch.setenv("CXX", given)
    with pytest.raises(hostexec.HostError, match=message):
        build.compiler_version()
    assert testing.executor_problem("host")


@needs_host
def test_arguments_of_the_compiler_are_part_of_the_cache_key(no_known_version, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    plain = build.compiler_version()
    build.compiler_version.cache_clear()
    monkeypatch.setenv("CXX", "g++ -m64")
    assert build.compiler_version() != plain


def selftest(**env: str) -> subprocess.CompletedProcess[str]:
    """Run the selftest of an op with one small kernel, in a separate process."""
    command = [sys.executable, "-m", "cupy_fp8", "selftest", "compute_scale", "--executor", "host"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env)


@pytest.mark.full
@needs_host
def test_kernels_of_a_compiler_with_arguments(tmp_path):
    done = selftest(CXX="g++ -g0 -DUNUSED='a b'", CUPY_FP8_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS compute_scale" in done.stdout


@needs_host
def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = selftest(CUPY_FP8_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert done.stdout.startswith("the host executor cannot run here: the folder for compiled kernels cannot")
    assert done.stdout.endswith("set CUPY_FP8_CACHE_DIR to a folder where files can be written\n")
    assert done.stderr == ""


@needs_host
def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_FP8_CACHE_DIR", str(tmp_path))

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert hostexec.available() is None                     # may hold all kernels already
    with pytest.raises(hostexec.HostError, match=r"Permission denied.*set CUPY_FP8_CACHE_DIR to a folder"):
        build.build_runtime("fast")


BUILD = """
import sys, time
from pathlib import Path
from cupy_fp8.hostexec import build

def make(scratch):
    with open(build.cache_dir() / "log", "a") as log:
        log.write("made\\n")
    time.sleep(0.5)
    (scratch / "library").write_text("whole")
    return scratch / "library"

print(build._build_into(build.cache_dir() / "library", make).read_text())
"""


@needs_host
def test_processes_that_want_the_same_file_make_it_once(tmp_path):
    environment = os.environ | {"CUPY_FP8_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUILD]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
               for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["whole\n"] * 3
    assert (tmp_path / "host" / "log").read_text() == "made\n"
    assert {path.name for path in (tmp_path / "host").iterdir()} == {"library", "log"}


def test_no_home(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPY_FP8_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(hostexec.HostError, match=r"determine home directory.*set CUPY_FP8_CACHE_DIR"):
        build.cache_dir()


@pytest.mark.parametrize("strategy", [testing.scales, testing.arrays, testing.mx_results])
def test_strategies_without_hypothesis(strategy, monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy_fp8\[test\]' or hypothesis") as raised:
        strategy()
    assert raised.value.name == "hypothesis"
