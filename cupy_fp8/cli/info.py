"""python -m cupy_fp8 info: versions, GPU, compiler, caches, and what works on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from typing import Any

from .. import backend, testing
from ..kernels import sources
from ..ops.matmul import library
from . import terminal

_EXECUTORS = {"reference": "NumPy", "host": "kernels compiled for the CPU", "cuda": "kernels on a GPU"}
_EXTRAS = {"matplotlib": "pictures", "rich": "tables on terminals"}


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m cupy_fp8 info", description=__doc__).parse_args(argv)
    problems = {name: testing.executor_problem(name) for name in testing.EXECUTORS}
    shown = facts() | {name: _version(name, use) for name, use in _EXTRAS.items()}
    if shown["cupy"] == problems["cuda"]:
        shown["cupy"] = "not usable: see the cuda executor"
    terminal.say_facts(shown)
    print()
    terminal.say_facts({
        f"{name} executor": f"works ({_EXECUTORS[name]})" if problem is None else f"no: {problem}"
        for name, problem in problems.items()})
    return 0


def _version(package: str, use: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"not installed (optional: {use})"


def facts() -> dict[str, Any]:
    """Return what a benchmark result must say about the machine that made it."""
    import cupy_fp8

    found: dict[str, Any] = {"cupy_fp8": cupy_fp8.__version__, "python": platform.python_version(),
                             "platform": sys.platform, "numpy": metadata.version("numpy"),
                             "ml_dtypes": metadata.version("ml_dtypes"),
                             "kernel sources": f"{len(sources.files())} files, {sources.digest()[:12]}"}
    try:
        cp = backend.cupy()
    except backend.DeviceError as error:
        return {**found, "cupy": str(error)}
    found["cupy"] = cp.__version__
    found["CuPy cache"] = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
    try:
        found["NVRTC"] = ".".join(map(str, cp.cuda.nvrtc.getVersion()))
    except Exception as error:  # a missing library raises errors of several types, all shown here
        found["NVRTC"] = f"no: {error}"
    cublaslt = library.found()
    found["cuBLASLt"] = (f"no: {cublaslt}" if isinstance(cublaslt, str)
                         else f"{'.'.join(map(str, cublaslt.version))}, {cublaslt.path}")
    if backend.gpu_problem() is None:
        properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())
        found |= {"CUDA driver": cp.cuda.runtime.driverGetVersion(),
                  "CUDA runtime": cp.cuda.runtime.runtimeGetVersion(),
                  "GPU": properties["name"].decode(),
                  "compute capability": f"{properties['major']}.{properties['minor']}",
                  "multiprocessors": properties["multiProcessorCount"],
                  "L2 cache": f"{properties['l2CacheSize'] >> 20} MiB",
                  "GPUs": cp.cuda.runtime.getDeviceCount()}
    return found
