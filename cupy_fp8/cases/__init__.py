"""The one table of ops and their cases, a module per family: tests, selftest, benchmark and the README table all walk over it."""

from __future__ import annotations

from collections.abc import Iterator

from . import aware, blocks, dequantize, group_quantize, groups, layouts, multi, mx, offsets, per_tensor, scale_layouts, swiglu, tokens
from .base import ALIGNED_MATRIX, DIRECTIONS, LARGE_SHAPES, MATRIX, SHAPES, Case, Op, outputs, poison, source, values

__all__ = ["ALIGNED_MATRIX", "DIRECTIONS", "LARGE_SHAPES", "MATRIX", "OPS", "SHAPES", "Case", "Op", "all_cases", "outputs", "poison",
           "source", "values"]

OPS: dict[str, Op] = {op.name: op for op in (
    *per_tensor.OPS, *dequantize.OPS, *layouts.OPS, *scale_layouts.OPS, *mx.OPS, *blocks.OPS, *aware.OPS, *offsets.OPS, *groups.OPS,
    *group_quantize.OPS,
    *multi.OPS, *swiglu.OPS, *tokens.OPS)}


def all_cases() -> Iterator[Case]:
    for op in OPS.values():
        yield from op.cases()
