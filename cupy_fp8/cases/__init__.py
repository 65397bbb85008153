"""The registered ops and their cases, used by tests, selftest, bench, the command line and docs/ops.md.

The modules in the families' folders register their ops; importing this package imports all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from .base import (
    ALIGNED_MATRIX,
    DIRECTIONS,
    LARGE_SHAPES,
    MATRIX,
    SHAPES,
    Case,
    outputs,
    poison,
    source,
    values,
)
from .registry import OPS, Arguments, HostCalls, Registration, Timed, family_modules, register

__all__ = ["ALIGNED_MATRIX", "DIRECTIONS", "LARGE_SHAPES", "MATRIX", "OPS", "SHAPES", "Arguments", "Case",
           "HostCalls", "Registration", "Timed", "all_cases", "outputs", "poison", "register", "source",
           "values"]

family_modules(__name__)


def all_cases() -> Iterator[Case]:
    for op in OPS.values():
        yield from op.cases()
