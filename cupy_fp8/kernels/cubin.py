"""Programs for one architecture only, such as sm_90a. CuPy compiles for the architecture without the letter,
which lacks these instructions, so they are compiled by NVRTC here and kept in CuPy's cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from .. import backend


def nvrtc_version() -> tuple[int, int]:
    """Return (major, minor) of the NVRTC that compiles. Older ones do not know all instructions of a
    target."""
    major, minor = backend.cupy().cuda.nvrtc.getVersion()
    return major, minor


def path(program: str, target: str, options: tuple[str, ...]) -> Path:
    """Return the file of the compiled program, compiling it if necessary. RuntimeError with NVRTC's messages
    if that fails."""
    options = (*options, f"-arch={target}")
    text = "\0".join((program, *options, str(nvrtc_version())))
    found = _folder() / f"cupy_fp8_{hashlib.sha256(text.encode()).hexdigest()}.cubin"
    if not found.exists():
        _write(found, _compiled(program, options))
    return found


def _folder() -> Path:
    """CuPy's own cache folder."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _compiled(program: str, options: tuple[str, ...]) -> bytes:
    nvrtc = backend.cupy().cuda.nvrtc
    handle = nvrtc.createProgram(program, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(handle, options)
        return bytes(nvrtc.getCUBIN(handle))
    except nvrtc.NVRTCError:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()}, {' '.join(options)}:\n"
                           f"{nvrtc.getProgramLog(handle)}") from None
    finally:
        nvrtc.destroyProgram(handle)


def _write(to: Path, data: bytes) -> None:
    """Write a file atomically: other processes see all of it or nothing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=to.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(temporary, to)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
