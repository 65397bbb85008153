"""Planted faults. This module imports nothing from the package, in which faults are planted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cupy_fp8.kernels import Variant

REPOSITORY = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A text that occurs once in a source, and its replacement.

    file: of kernels_cu, or a Python module of cupy_fp8
    op: an op whose cases find the fault. kernel: the source that they must launch, for a fault in a header or
    in a module. define: a define of the program that they must launch, as "NAME=value". mode: the build that
    shows the fault.
    test: pytest node ids, separated by spaces, that find the fault instead of an op's cases
    case: substring of the names of cases or tests; others are not tried
    name: distinguishes the faults of a file; empty for one of them"""

    file: str
    old: str
    new: str
    op: str = ""
    kernel: str = ""
    define: str = ""
    case: str = ""
    mode: str = "fast"
    test: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        return f"{self.file}: {self.name}" if self.name else self.file

    @property
    def module(self) -> str:
        """The module with the fault, or "" for a CUDA source."""
        if not self.file.endswith(".py"):
            return ""
        return ".".join(("cupy_fp8", *Path(self.file).with_suffix("").parts)).removesuffix(".__init__")

    @property
    def source(self) -> str:
        """The .cu file that the cases must launch, or "" for any."""
        return self.kernel or (self.file.removesuffix(".cu") if self.file.endswith(".cu") else "")

    def in_program(self, variant: Variant) -> bool:
        """Whether the program contains the fault, or is launched by a faulty module."""
        defines = {f"{name}={value}" for name, value in variant.defines}
        return self.source in ("", variant.kernel.source) and (not self.define or self.define in defines)

    def path(self, kernels: Path) -> Path:
        """Path of the original. kernels: the folder kernels_cu."""
        return (REPOSITORY / "cupy_fp8" if self.module else kernels) / self.file

    def planted_in(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.file}: {self.old!r} occurs {text.count(self.old)} times"
        return text.replace(self.old, self.new)
