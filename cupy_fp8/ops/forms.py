"""What quantisers that scale in blocks share: arrays in either memory order, and results given as `out=` checked against their forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array, bits, is_contiguous
from ..formats import INPUT_DTYPES
from ..recipes import Form
from ..results import Quantized, Scaled
from . import checks

#: How the data of blocks along the rows of memory (fast) and down its columns (slow) are stored, where they are wanted.
ABSENT, AS_IS, TRANSPOSED = 0, 1, 2

#: Runs of memory, each from an address to another.
Ranges = list[tuple[int, int]]


def source(x: Array) -> tuple[Array, Any, int, bool]:
    """(x as it lies in memory, its module, its address, whether its last two axes are swapped there)."""
    swapped = False
    if not (x.flags.c_contiguous if isinstance(x, np.ndarray) else getattr(x, "_c_contiguous", True)):
        swapped = x.ndim >= 2 and is_contiguous(x.swapaxes(-1, -2))
    return (*checks.source(x.swapaxes(-1, -2) if swapped else x, INPUT_DTYPES), swapped)


def logical(x: Array, swapped: bool) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1], x.shape[-2]) if swapped else x.shape


def stored(part: Scaled | None, swapped: bool) -> int:
    return ABSENT if part is None else AS_IS if part.transposed == swapped else TRANSPOSED


def written(out: Quantized, forms: Mapping[str, Form], x: Array, xp: Any, kind: str, shared: tuple[str, ...] = ()) -> Ranges:
    """The memory of a result given as `out=`, once every part of it has been found to have its form. `kind` of data, for messages.
    shared: 'data', 'scale_inv': what both directions must have in common; nothing else may overlap."""
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    found: list[tuple[str, int, int]] = []
    for name, part in (("rowwise", out.rowwise), ("columnwise", out.columnwise)):
        form = forms.get(name)
        if (part is None) != (form is None):
            raise ValueError(f"out: {'no' if part is None else 'has a'} {name} part, but {name}={form is not None} was asked for")
        if part is None or form is None:
            continue
        if (part.shape, part.transposed, part.block, part.scale_layout) != form[1:5]:
            raise ValueError(f"out.{name}: expected {kind} data of shape {form.shape}, {'' if form.transposed else 'not '}stored "
                             f"transposed, block {form.block}, scales {form.scale_layout}; got {part!r}, scales {part.scale_layout}")
        for what, a, shape, dtype in (("data", part.data, form.stored, form.dtype),
                                      ("scale_inv", part.scale_inv, form.scale_shape, form.scale_dtype)):
            at = checks.destination(a, shape, dtype, x, xp, checks.address(x), f"out.{name}.{what}")
            if what in shared and name == "columnwise" and out.rowwise is not None:
                if a is not getattr(out.rowwise, what):
                    raise ValueError(f"out.{name}.{what}: expected out.rowwise.{what} itself, since both directions are the same here")
                continue
            for other, other_at, other_nbytes in found:
                checks.separate(at, a.nbytes, other_at, other_nbytes, f"out.{name}.{what}", other)
            found.append((f"out.{name}.{what}", at, a.nbytes))
    return [(at, at + nbytes) for _, at, nbytes in found if nbytes]


def check_separate(ranges: Ranges, at: int, nbytes: int, noop_at: int) -> None:
    """ValueError if what is written overlaps the input or noop."""
    for start, end in ranges:
        if at < end and start < at + nbytes:
            raise ValueError("out: overlaps the input in memory; results need memory of their own")
        if start - 3 <= noop_at < end:                 # of four bytes the last may be the first that is written
            raise ValueError("out: overlaps noop in memory; results need memory of their own")


def store(out: Quantized, result: Quantized) -> None:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if mine is not None and fresh is not None:
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)
