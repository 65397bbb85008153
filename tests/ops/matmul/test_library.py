"""The search for libcublasLt, with shared libraries that the C++ compiler makes from a few functions."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fake_cublaslt import FakeCublasLt
from tiers import quick_if

from cupy_fp8 import DeviceError
from cupy_fp8.hostexec import build
from cupy_fp8.ops.matmul import library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes libraries of Linux")

#: functions of a library: those of tests/support/fake_cublaslt.py
FUNCTIONS = tuple(name for name in vars(FakeCublasLt()) if name.startswith("cublasLt"))
_SUCCEEDING = {
    "cublasLtGetVersion": "size_t cublasLtGetVersion() { return VERSION; }",
    "cublasLtGetStatusName": 'const char* cublasLtGetStatusName(int s) { return s == 7 ? "INVALID" : 0; }',
    "cublasLtCreate": "int cublasLtCreate(void** to) { *to = (void*)0x123456789abc; return 0; }"}


def make(to: Path, version: int = 130101, functions: tuple[str, ...] = FUNCTIONS) -> str:
    """Make a library with these functions. All but _SUCCEEDING return status 7."""
    lines = [_SUCCEEDING.get(name, f"int {name}() {{ return 7; }}") for name in functions]
    source = to.parent / "source.cpp"
    source.write_text("\n".join(
        [f'#include <stddef.h>\nenum {{ VERSION = {version} }};\nextern "C" {{', *lines, "}"]))
    subprocess.run([*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(to)], check=True,
                   env=build.clean_environment())
    return str(to)


@pytest.fixture(autouse=True)
def _not_looked_for_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a new search in every test, in a process without cuda-pathfinder."""
    monkeypatch.setattr(library, "found", functools.cache(library.found.__wrapped__))
    monkeypatch.setitem(sys.modules, "cuda", None)


def with_pathfinder(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[str]:
    """Install a cuda-pathfinder with this answer. Returns the list of what it is asked for."""
    asked: list[str] = []

    def load_nvidia_dynamic_lib(name: str) -> Any:
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(abs_path=answer)

    package: Any = types.ModuleType("cuda")
    package.pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib=load_nvidia_dynamic_lib)
    monkeypatch.setitem(sys.modules, "cuda", package)
    return asked


def found() -> library.Library:
    one = library.found()
    assert isinstance(one, library.Library), one
    return one


# ---- by cuda-pathfinder ----
def test_pathfinder_is_asked_first_and_once(tmp_path, monkeypatch):
    path, other = (make(tmp_path / f"{name}.so", version) for name, version in (("a", 130205), ("b", 120901)))
    monkeypatch.setattr(library, "_NAMES", (other,))
    asked = with_pathfinder(monkeypatch, Path(path))
    assert (found().path, found().version) == (path, (13, 2))
    assert found() is found()
    assert asked == ["cublasLt"]


class DynamicLibNotFoundError(RuntimeError):
    """Like cuda-pathfinder's."""


@pytest.mark.parametrize("answer", [DynamicLibNotFoundError("not found"), None, "/nowhere/libcublasLt.so.13"],
                         ids=str)
def test_names_are_tried_where_pathfinder_finds_nothing(answer, tmp_path, monkeypatch):
    path = make(tmp_path / "b.so", 120901)
    monkeypatch.setattr(library, "_NAMES", (path,))
    asked = with_pathfinder(monkeypatch, answer)
    assert (found().path, found().version) == (path, (12, 9))
    assert asked == ["cublasLt"]


def test_names_are_tried_where_pathfinder_finds_another_library(tmp_path, monkeypatch):
    path, other = make(tmp_path / "b.so"), make(tmp_path / "a.so", functions=FUNCTIONS[1:])
    monkeypatch.setattr(library, "_NAMES", (path,))
    with_pathfinder(monkeypatch, other)
    assert found().path == path


# ---- by name ----
@pytest.mark.parametrize("lacking", quick_if(lambda name: name == "cublasLtMatmul", FUNCTIONS))
def test_a_library_that_lacks_a_function_is_passed_over(lacking, tmp_path, monkeypatch):
    """The library of CUDA 11 is one."""
    paths = (make(tmp_path / "a.so", functions=tuple(name for name in FUNCTIONS if name != lacking)),
             make(tmp_path / "b.so", 120804))
    monkeypatch.setattr(library, "_NAMES", paths)
    assert (found().path, found().version) == (paths[1], (12, 8))


def test_what_cannot_be_loaded_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.so").write_text("no library")
    path = make(tmp_path / "c.so")
    monkeypatch.setattr(library, "_NAMES", (str(tmp_path / "a.so"), "libcublasLt.so.of_no_version", path))
    assert found().path == path


@pytest.mark.parametrize(("there", "name"), [
    ((12, 13), "libcublasLt.so.13"), ((12,), "libcublasLt.so.12"), ((), None)], ids=str)
def test_the_names_that_the_loader_looks_for(there, name, tmp_path):
    """In a separate process, since the loader reads its path when a process begins. Libraries without
    functions keep it from finding this machine's own."""
    for major in (12, 13):
        make(tmp_path / f"libcublasLt.so.{major}", functions=FUNCTIONS if major in there else ())
    code = ("import sys; sys.modules['cuda'] = None; from cupy_fp8.ops.matmul import library; "
            "print(getattr(library.found(), 'path', None))")
    folders = ":".join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                          env={**os.environ, "LD_LIBRARY_PATH": folders})
    assert done.stdout.strip() == str(name)


def test_the_extras_that_install_it(monkeypatch):
    """The extras of both CUDA versions exist."""
    monkeypatch.setattr(library, "_NAMES", ("libcublasLt.so.of_no_version",))
    message = library.found()
    assert isinstance(message, str)
    extras = re.findall(r"cupy_fp8\[(\w+)\]", message)
    assert extras == ["gemm", "gemm12"]
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert all(f'\n{extra} = ["nvidia-cublas' in project for extra in extras)


# ---- calls ----
def test_calls_of_a_loaded_library(tmp_path):
    """A handle of more than 32 bits, names of statuses, and the error of a call that fails."""
    path = make(tmp_path / "a.so", 130100)
    loaded = library.Library(ctypes.CDLL(path), path)
    assert loaded.create() == 0x123456789abc
    assert (loaded.status_name(7), loaded.status_name(8)) == ("INVALID", "?")
    with pytest.raises(DeviceError, match=rf"^cublasLtMatmulDescCreate: INVALID \(cuBLASLt 13\.1, "
                                          rf"{re.escape(path)}\)$"):
        library.description(loaded)
