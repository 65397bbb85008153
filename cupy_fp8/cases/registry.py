"""The registered ops, used by tests, selftest, benchmark, the command line and docs/ops.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..kernels import Variant
from .base import Case, nbytes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: order of the families in docs/ops.md; any other family follows
FAMILIES = ("matmul", "quantize", "convert", "scales", "moe")


def bytes_moved(arguments: Arguments, written: dict[str, np.ndarray], but: tuple[str, ...] = ()) -> int:
    """Return the bytes of all arguments, read once, and of all written arrays, written once. but: names of
    options and written arrays that are not counted."""
    args, kwargs = arguments
    named = [*kwargs.items(), *written.items()]
    return nbytes(*args, *(a for name, a in named if name not in but))


def all_but(*names: str) -> Callable[[Arguments, dict[str, np.ndarray]], int]:
    """Return a `Registration.moves` that counts the bytes of all arrays but some much smaller ones."""
    return functools.partial(bytes_moved, but=names)


class Timed(NamedTuple):
    """A call that `bench` times. shape: the row's, if it differs from the case's."""

    label: str
    case: Case
    shape: tuple[int, ...] | None = None


class HostCalls(NamedTuple):
    """Equivalent calls whose host time `bench` measures: one with `out=` (or in place), and one that
    allocates, if the op can. label: suffix of the row's name after the op's; "": none."""

    label: str
    with_out: Callable[[], Any]
    allocating: Callable[[], Any] | None = None

    @classmethod
    def both(cls, label: str, function: Callable[..., Any], *args: Any, **options: Any) -> HostCalls:
        """Make a call that allocates, and one whose `out` is the result of another."""
        allocating = functools.partial(function, *args, **options)
        return cls(label, functools.partial(allocating, out=allocating()), allocating)


@dataclass(frozen=True)
class Registration:
    """What tests, selftest, benchmark and docs/ops.md need to know about an op.

    function   what users call; it takes `out=`, unless the op `updates` arguments
    reference  its definition in NumPy
    inputs     (case) -> positional and keyword arguments, as NumPy arrays
    cases      the calls to check
    summary    its row in docs/ops.md
    programs   functions that return every kernel variant that it may launch
    updates    names of the leading arguments that a call updates in place and returns
    timed      the calls that `bench` times, with their labels
    moves      (arguments, written arrays by name) -> the bytes that a call must move
    host_calls (a small bfloat16 matrix on the device) -> the calls whose host time `bench` measures; None: a
               call of the smallest case
    agrees     (arrays that a call wrote by name, those of the reference, the NumPy arguments): AssertionError
               unless the first are right, for an op whose result is not defined byte for byte; None: they are
               equal
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Case], Arguments]
    cases: Callable[[], Iterator[Case]]
    summary: str
    programs: tuple[Callable[[], Iterable[Variant]], ...] = ()
    updates: tuple[str, ...] = ()
    timed: Callable[[], Iterable[Timed]] = tuple
    moves: Callable[[Arguments, dict[str, np.ndarray]], int] = bytes_moved
    host_calls: Callable[[Array], Iterable[HostCalls]] | None = None
    agrees: Callable[[dict[str, Any], dict[str, Any], Arguments], None] | None = None

    @property
    def family(self) -> str:
        """The folder of its reference, or "other" for an op from outside the package."""
        package, _, inside = self.reference.__module__.partition(".")
        return inside.split(".")[1] if package == "cupy_fp8" and inside.count(".") > 1 else "other"

    def variants(self) -> dict[Variant, None]:
        """Return every kernel variant that it may launch, once."""
        return dict.fromkeys(chain.from_iterable(variants() for variants in self.programs))


#: by family, then by name
OPS: dict[str, Registration] = {}


def register(*ops: Registration) -> None:
    """Register ops for everything that uses OPS. ValueError if a name is taken."""
    for op in ops:
        if op.name in OPS:
            raise ValueError(f"{op.name}: an op of this name is registered already")
        OPS[op.name] = op
    ordered = sorted(OPS.items(), key=lambda item: (_place(item[1].family), item[0]))
    OPS.clear()
    OPS.update(ordered)


def family_modules(package: str) -> list[ModuleType]:
    """Import and return all modules in the families' folders of a package."""
    families = [m.name for m in iter_modules(import_module(package).__path__) if m.ispkg]
    return [import_module(f"{package}.{family}.{module.name}") for family in sorted(families, key=_place)
            for module in iter_modules(import_module(f"{package}.{family}").__path__)]


def _place(family: str) -> tuple[int, str]:
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), family
