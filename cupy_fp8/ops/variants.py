"""Every program that the package may launch: what the tests compile for every architecture."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime import Variant
from . import (
    amax,
    aware,
    blocks,
    cast,
    convert,
    current,
    dbias,
    dequantize,
    group_quantize,
    groups,
    layouts,
    multi,
    mx,
    offsets,
    permute,
    route,
    scale,
    scale_layouts,
    swiglu,
)


class Program(NamedTuple):
    """The arguments of `runtime.sources.program`: an entry point of kernels_cu/<family>.cu and the #defines it is compiled with."""

    family: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "-".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


def launched_variants() -> dict[Program, Variant]:
    """The variants, entry point by entry point."""
    found = [*amax.variants(), *cast.variants(), *current.variants(), *dbias.variants(), *convert.variants(),
                *dequantize.variants(), *scale.variants(), *layouts.variants(), *scale_layouts.variants(), *mx.variants(),
                *blocks.variants(), *aware.variants(), *offsets.variants(),
                *groups.variants(), *group_quantize.variants(), *multi.variants(), *swiglu.variants(),
                *route.variants(), *permute.variants()]
    return {Program(v.kernel.family, v.kernel.entry, v.defines): v for v in found}


def all_variants() -> tuple[Program, ...]:
    """Their programs, and that of the delay before what the benchmark times.

    >>> str(all_variants()[0])
    'compute_amax-IN=bf16-NAN_WINS=0'
    """
    return (*launched_variants(), Program("delay", "delay", ()))
