"""NVRTC through ctypes: compiles a kernel for any architecture without a GPU or CuPy, and reads the
compiler's report."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cupy_fp8.kernels import sources
from cupy_fp8.kernels.kernel import COMPILE_OPTIONS

# appended by CuPy to the user's options
CUPY_OPTIONS = ("-ftz=true",)
#: With a driver installed, NVRTC may cache results, which come without the assembler's report.
_REPORT = ("--ptxas-options=-v", "--no-cache")


def wheel_files(pattern: str) -> list[Path]:
    """Files of NVIDIA's wheels (nvidia/cu13/lib/…, nvidia/cuda_nvrtc/lib/…)."""
    spec = find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(path for folder in folders for path in Path(folder).glob(pattern))


#: NVRTC of these CUDA toolkits comes with the extras `cuda13` and `cuda12`.
TOOLKITS = (13, 12)


@functools.cache
def library(toolkit: int) -> ctypes.CDLL:
    """Load libnvrtc. It looks for its builtins on the loader's path, where a wheel does not put them, so they
    are loaded first."""
    paths = [wheel_files(f"*/lib/{name}") for name in (f"libnvrtc-builtins.so.{toolkit}.*",
                                                       f"libnvrtc.so.{toolkit}")]
    if not all(paths):
        raise FileNotFoundError(f"libnvrtc of CUDA {toolkit} not found: pip install -e '.[test]'")
    return [ctypes.CDLL(str(path[0])) for path in paths][-1]


class CompileError(RuntimeError):
    """Return NVRTC's log."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: static shared memory (bytes), resources per thread (bytes, registers), and its
    PTX."""

    shared: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    ptx: str


def compile_variant(source: str, entry: str, defines: tuple[tuple[str, str], ...], arch: str,
                    toolkit: int) -> Compiled:
    """Compile like cupy_fp8.kernels through CuPy, for `arch` (sm_90, …)."""
    return compile_text(sources.program(source, entry, defines), arch, toolkit)


def variant_ptx(source: str, entry: str, defines: tuple[tuple[str, str], ...], arch: str,
                toolkit: int) -> str:
    """Return only the PTX, in half the time: the assembler is not run."""
    return _compile(sources.program(source, entry, defines), arch.replace("sm", "compute"), toolkit)[1]


def compile_text(text: str, arch: str, toolkit: int = TOOLKITS[0]) -> Compiled:
    log, ptx = _compile(text, arch, toolkit, *_REPORT)
    return Compiled(*_resources(log), ptx)


def _compile(text: str, arch: str, toolkit: int, *more_options: str) -> tuple[str, str]:
    """Return (the log, PTX)."""
    nvrtc, program = library(toolkit), ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    try:
        options = [f"-arch={arch}", *COMPILE_OPTIONS, f"-I{sources.root() / 'include'}", *CUPY_OPTIONS,
                   *more_options]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        log = _text(nvrtc, program, "ProgramLog")
        if failed:
            raise CompileError(f"for {arch}, CUDA {toolkit}:\n{log}")
        return log, _text(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _resources(log: str) -> tuple[int, int, int, int, int]:
    frame = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if len(frame) != 1 or len(registers) != 1:
        raise CompileError(f"expected the assembler's report of one kernel, got:\n{log}")
    shared = re.findall(r"(\d+) bytes smem", log)
    return (sum(map(int, shared)), int(registers[0]), *map(int, frame[0]))     # type: ignore[return-value]


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(nvrtc.nvrtcGetErrorString(status).decode())
