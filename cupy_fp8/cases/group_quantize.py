"""Cases of groups quantised as tensors of their own. A case's shape is x's; its options say how it is divided (see cases.groups), and
how many rows are left over (`spare`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from .. import reference
from ..arrays import Array, bits
from ..formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float16, float32
from ..grouped import Grouped
from ..ops import group_quantize
from ..recipes import DelayedScaling
from .base import DIRECTIONS, Case, Op, source
from .groups import sizes


def _inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case.options)
    number, rows = options.pop("groups"), case.shape[0] - options.pop("spare", 0)
    splits = sizes(rows, number, options.pop("sizes", "ragged")).astype(np.int64 if options.pop("wide", True) else np.int32)
    rng = np.random.default_rng(5)
    options["scales"] = np.exp2(rng.uniform(-4, 6, number)).astype(np.float32)
    if options.pop("with_amax", True):
        options["amax"] = rng.choice(np.array([0, 1e-3, 1e30], np.float32), number)
    if options.pop("with_offsets", False):
        options["offsets"] = np.concatenate([[0], np.cumsum(splits, dtype=np.int64)]) * case.shape[1]
    return (source(case), splits, DelayedScaling(options.pop("dtype", float8_e4m3fn))), options


def _group_quantize(x: Array, splits: Array, recipe: DelayedScaling, *, amax: Array | None = None, offsets: Array | None = None,
                    out: Grouped | None = None, **options: Any) -> Grouped:
    """A result belongs to its own splits and offsets: those given are copied there."""
    if out is not None:
        bits(out.splits)[...] = bits(splits)
        splits = out.splits
        if offsets is not None:
            out.offsets[...] = offsets
            offsets = out.offsets
    return group_quantize.group_quantize(x, splits, recipe, amaxes=amax, offsets=offsets, out=out, **options)


def _reference(x: np.ndarray, splits: np.ndarray, recipe: DelayedScaling, *, amax: np.ndarray | None = None, **options: Any) -> Grouped:
    return reference.group_quantize(x, splits, recipe, amaxes=amax, **options)


def _cases() -> Iterator[Case]:
    both = {"rowwise": True, "columnwise": True}

    def case(dtype: Any, shape: tuple[int, int], values: str = "normal", layout: str = "contiguous", /, **options: Any) -> Case:
        return Case("group_quantize", dtype, shape, values, layout, options)

    # First, for whoever takes only a few: few tiles, everything that the kernel does; every type.
    yield case(bfloat16, (140, 136), groups=3, **both)
    yield case(bfloat16, (150, 48), groups=3, sizes="aligned", spare=10, **both)
    yield case(float32, (40, 37), groups=2, spare=7, wide=False, **both)
    yield case(float16, (20, 24), groups=4, with_amax=False, with_offsets=True, columnwise=True)
    for source_dtype, dtype in product(INPUT_DTYPES, (float8_e4m3fn, float8_e5m2)):
        for columns in (264, 133):
            yield case(source_dtype, (300, columns), "bits", groups=5, dtype=dtype, **both)
        yield case(source_dtype, (400, 272), "edges", groups=6, sizes="aligned", dtype=dtype, spare=17, with_offsets=True, **both)
    for directions in DIRECTIONS[:2]:
        for shape in ((300, 144), (77, 130)):
            yield case(bfloat16, shape, groups=4, spare=5, **directions)
    for shape in ((1, 1), (0, 8), (5, 0), (1, 300), (300, 1), (257, 16)):
        for number in (0, 1, 3):
            yield case(bfloat16, shape, groups=number, spare=shape[0] if number == 0 else 0, **both)
    for division in ("even", "one"):
        yield case(bfloat16, (512, 128), groups=4, sizes=division, **both)
    for number in (127, 128, 129, 400):                              # rounds of the kernel's scan
        yield case(bfloat16, (200, 16), groups=number, spare=3, **both)
    yield case(bfloat16, (30, 40), groups=3, spare=30, **both)
    for layout in ("offset", "strided"):
        yield case(float32, (100, 48), "bits", layout, groups=4, **both)


OPS = (
    Op("group_quantize", _group_quantize, _reference, _inputs, _cases,
       "groups of rows whose sizes are on the device, each quantised as a tensor of its own: row-wise, column-wise or both from one read"),
)
