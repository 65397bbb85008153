"""Every program that registered ops may launch: what the tests compile for every architecture."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels import Variant
from .registry import OPS, Registration


class Program(NamedTuple):
    """What `kernels.sources.program` takes: a source, an entry point in it, and the #defines for it."""

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, variant: Variant) -> Program:
        return cls(variant.kernel.source, variant.kernel.entry, variant.defines)

    def __str__(self) -> str:
        return "-".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


def programs(op: Registration) -> dict[Program, Variant]:
    """The variants that an op may launch, by their programs."""
    return {Program.of(variant): variant for variant in op.variants()}


def launched_variants() -> dict[Program, Variant]:
    """The variants that all ops may launch, by their programs."""
    return {program: variant for op in OPS.values() for program, variant in programs(op).items()}


def all_programs() -> tuple[Program, ...]:
    """The programs of all ops, and that of the benchmark's delay.

    >>> str(next(p for p in all_programs() if p.source == "scales/amax"))
    'compute_amax-IN=bf16-NAN_WINS=0'
    """
    return (*launched_variants(), Program("bench/delay", "delay", ()))
