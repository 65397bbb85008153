"""Programs for a single architecture are compiled once, and kept in CuPy's cache under everything that they
depend on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_fp8 import backend
from cupy_fp8.kernels import cubin


class NVRTC:
    """What `cubin` calls of cupy.cuda.nvrtc. A program compiles to its text and options."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.version, self.programs, self.compiled = (13, 1), dict[int, Any](), 0

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> int:
        self.programs[len(self.programs) + 1] = text
        return len(self.programs)

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        if "wrong" in self.programs[program]:
            raise self.NVRTCError
        self.compiled += 1
        self.programs[program] = "|".join((self.programs[program], *options))

    def getCUBIN(self, program: int) -> bytes:
        return str(self.programs[program]).encode()

    def getProgramLog(self, program: int) -> str:
        return "kernel.cu(3): error: wrong"

    def destroyProgram(self, program: int) -> None:
        self.programs[program] = None


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    found = NVRTC()
    monkeypatch.setattr(backend, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(nvrtc=found)))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return found


def test_a_program_is_compiled_once(nvrtc, tmp_path):
    for _ in range(2):
        found = cubin.path("text", "sm_90a", ("-std=c++17",))
        assert found.read_bytes() == b"text|-std=c++17|-arch=sm_90a"
        assert found.parent == tmp_path / "cache"
    assert nvrtc.compiled == 1
    assert not any(nvrtc.programs.values())             # all are destroyed


def test_a_file_is_known_by_all_that_it_depends_on(nvrtc):
    """The text, the target, the options and the compiler."""
    calls: list[tuple[str, str, tuple[str, ...]]] = [
        ("text", "sm_90a", ()), ("other", "sm_90a", ()), ("text", "sm_100a", ()), ("text", "sm_90a", ("-G",))]
    paths = [cubin.path(*call) for call in calls]
    nvrtc.version = 13, 2
    paths.append(cubin.path(*calls[0]))
    assert len(set(paths)) == nvrtc.compiled == 5


def test_what_does_not_compile_leaves_nothing(nvrtc, tmp_path):
    with pytest.raises(RuntimeError, match=r"^NVRTC \(13, 1\), -arch=sm_90a:\n.*error: wrong$"):
        cubin.path("wrong", "sm_90a", ())
    assert not any(nvrtc.programs.values())
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_written_leaves_nothing(nvrtc, tmp_path, monkeypatch):
    def refuses(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(OSError, match="no space"):
        cubin.path("text", "sm_90a", ())
    assert list((tmp_path / "cache").iterdir()) == []
