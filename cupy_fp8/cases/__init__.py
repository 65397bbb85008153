"""The one table of ops and their cases, a module per family: tests, selftest, benchmark and the README table all walk over it."""

from __future__ import annotations

from collections.abc import Iterator

from .base import (
    ALIGNED_MATRIX,
    DIRECTIONS,
    LARGE_SHAPES,
    MATRIX,
    SHAPES,
    Case,
    Op,
    outputs,
    poison,
    source,
    values,
)
from .convert import dequantize, scaling_aware
from .moe import offsets, pad, tokens
from .quantize import blocks, grouped, mx, swiglu, tensor, tensor_list
from .scales import convert, swizzle

__all__ = ["ALIGNED_MATRIX", "DIRECTIONS", "LARGE_SHAPES", "MATRIX", "OPS", "SHAPES", "Case", "Op", "all_cases", "outputs", "poison",
           "source", "values"]

OPS: dict[str, Op] = {op.name: op for op in (
    *tensor.OPS, *dequantize.OPS, *swizzle.OPS, *convert.OPS, *mx.OPS, *blocks.OPS, *scaling_aware.OPS, *offsets.OPS, *pad.OPS,
    *grouped.OPS,
    *tensor_list.OPS, *swiglu.OPS, *tokens.OPS)}


def all_cases() -> Iterator[Case]:
    for op in OPS.values():
        yield from op.cases()
