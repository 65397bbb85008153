"""Every program that the package may launch: what the tests compile for every architecture."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels import Variant
from .convert import astype, dequantize, scaling_aware
from .moe import offsets, pad, permute, route
from .quantize import bias_gradient, blocks, grouped, mx, swiglu, tensor, tensor_current, tensor_list
from .scales import amax, convert, scale, swizzle


class Program(NamedTuple):
    """The arguments of `kernels.sources.program`: an entry point of kernels_cu/<source>.cu and the #defines it is compiled with."""

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "-".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


def launched_variants() -> dict[Program, Variant]:
    """The variants, entry point by entry point."""
    found = [*amax.variants(), *tensor.variants(), *tensor_current.variants(), *bias_gradient.variants(), *astype.variants(),
                *dequantize.variants(), *scale.variants(), *swizzle.variants(), *convert.variants(), *mx.variants(),
                *blocks.variants(), *scaling_aware.variants(), *offsets.variants(),
                *pad.variants(), *grouped.variants(), *tensor_list.variants(), *swiglu.variants(),
                *route.variants(), *permute.variants()]
    return {Program(v.kernel.source, v.kernel.entry, v.defines): v for v in found}


def all_variants() -> tuple[Program, ...]:
    """Their programs, and that of the delay before what the benchmark times.

    >>> str(all_variants()[0])
    'compute_amax-IN=bf16-NAN_WINS=0'
    """
    return (*launched_variants(), Program("bench/delay", "delay", ()))
