"""Every program that the package may launch: what the tests compile for every architecture."""

from __future__ import annotations

from typing import NamedTuple

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


def all_variants() -> tuple[Program, ...]:
    """The variants, entry point by entry point.

    >>> str(all_variants()[0])
    'compute_amax-IN=bf16-NAN_WINS=0'
    """
    launched = [*amax.variants(), *cast.variants(), *current.variants(), *dbias.variants(), *convert.variants(),
                *dequantize.variants(), *scale.variants(), *layouts.variants(), *scale_layouts.variants(), *mx.variants(),
                *blocks.variants(), *aware.variants(), *offsets.variants(),
                *groups.variants(), *group_quantize.variants(), *multi.variants(), *swiglu.variants(),
                *route.variants(), *permute.variants()]
    return (*dict.fromkeys(Program(v.kernel.family, v.kernel.entry, v.defines) for v in launched), Program("delay", "delay", ()))
