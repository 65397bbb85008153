"""Finds the CUDA sources, hashes them, and makes programs from them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def root() -> Path:
    """The kernels_cu folder, inside an installed package or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "include").is_dir():
            return folder
    raise FileNotFoundError(
        f"kernels_cu was found neither in {package} nor beside it: the installation is incomplete"
    )


def files() -> list[Path]:
    """Every source file, sorted."""
    return sorted(p for pattern in ("**/*.cu", "**/*.cuh") for p in root().glob(pattern))


def names() -> list[str]:
    """The .cu files, as `Kernel` names them: "quantize/mx"."""
    return sorted(p.relative_to(root()).with_suffix("").as_posix() for p in root().glob("**/*.cu"))


def path(source: str) -> Path:
    """The .cu file of a `Kernel.source`: in kernels_cu, or elsewhere if the source is an absolute path."""
    return root() / f"{source}.cu"


@functools.cache
def digest() -> str:
    """Return a hash of all sources. CuPy's disk cache keys on the program text alone, so this goes into every
    program; otherwise a changed header would be compiled from the cache of the old one."""
    h = hashlib.sha256()
    for file in files():
        h.update(file.relative_to(root()).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return h.hexdigest()


@functools.cache
def program(source: str, entry: str, defines: tuple[tuple[str, str], ...]) -> str:
    """Return the program that compiles one entry point of kernels_cu/<source>.cu.

    The choices are #defines in the text rather than compiler options, because CuPy probes the compiler anew
    for every new set of options."""
    head = "".join(f"#define {name} {value}\n" for name, value in all_defines(entry, dict(defines)).items())
    return f'// {digest()}\n{head}#line 1 "{source}.cu"\n{path(source).read_text(encoding="utf-8")}'


def all_defines(entry: str, defines: Mapping[str, str]) -> dict[str, str]:
    return {**defines, f"ENTRY_{entry}": "1"}
