"""Every program that registered ops may launch: compiled by tests for every architecture."""

from __future__ import annotations

from typing import NamedTuple

from cupy_fp8.cases import OPS, Registration
from cupy_fp8.diagnostics import on_gpu
from cupy_fp8.distributed import exchange, slots
from cupy_fp8.kernels import Variant

#: Sources whose kernels no op launches: the benchmark's delay, the sums of diagnostics.error, and the
#: exchanges of ranks.
WITHOUT_OP = frozenset({"bench/delay", "diagnostics/error_sums", "distributed/exchange", "distributed/slots",
                        "distributed/sums"})


class Program(NamedTuple):
    """Arguments of `kernels.sources.program`: a source, an entry point in it, and its #defines."""

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, variant: Variant) -> Program:
        return cls(variant.kernel.source, variant.kernel.entry, variant.defines)

    def __str__(self) -> str:
        return "-".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


def programs(op: Registration) -> dict[Program, Variant]:
    """Return the variants that an op may launch, by their programs."""
    return {Program.of(variant): variant for variant in op.variants()}


def launched_variants() -> dict[Program, Variant]:
    """Return the variants that all ops may launch, by their programs."""
    return {program: variant for op in OPS.values() for program, variant in programs(op).items()}


def all_programs() -> tuple[Program, ...]:
    """Return the programs of all ops, and those in WITHOUT_OP."""
    others = (*on_gpu.variants(), *exchange.variants(), *slots.variants())
    return (*launched_variants(), *map(Program.of, others), Program("bench/delay", "delay", ()))
