"""Replacements for results: quantised in another way, or with another part or fact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled
from cupy_fp8.arrays import Result
from cupy_fp8.gate import Gate
from cupy_fp8.routing import Routing


def results_of(shape: tuple[int, ...]) -> Iterator[tuple[str, Scaled | Quantized]]:
    """Yield data of a shape, quantised in every way: each direction, its `.T`, and the column-wise direction
    alone."""
    x = np.resize(np.linspace(-3, 3, 997, dtype=np.float32), shape)
    made = {"tensor": fp8.cast_transpose(x, 1.0), "swizzled": fp8.quantize_mx(x, scale_layout="swizzled")}
    recipes: dict[str, Any] = {
        "mx": fp8.MXScaling(), "gemm_ready": fp8.BlockScaling(), "half": fp8.BlockScaling((1, 64)),
        "compact": fp8.BlockScaling(scale_layout="compact"), "square": fp8.BlockScaling((128, 128)),
        "row": fp8.BlockScaling((1, None))}
    made.update({name: recipe.quantize(x, columnwise=True) for name, recipe in recipes.items()})
    for name, q in made.items():
        for direction, part in q.parts.items():
            yield from ((f"{name} {direction}", part), (f"{name} {direction}.T", part.T))
        if "columnwise" in q.parts:
            yield f"{name} columnwise alone", Quantized(None, q.columnwise)


def other_parts(out: Any) -> Iterator[tuple[str, Any]]:
    """Yield results with a missing part, parts in another order, or other facts."""
    if isinstance(out, (list, tuple)):
        made = type(out)
        yield from (("longer", made([*out, out[0]])), ("shorter", out[:-1]))
        if len(out) > 1:
            yield "turned", out[::-1]
        if made is tuple:                               # a list may also be given as a tuple
            yield "list", list(out)
        for i, part in enumerate(out):
            if part is not None:
                yield from ((f"[{i}]{how}", made([*out[:i], other, *out[i + 1:]]))
                            for how, other in ((": None", None), *other_parts(part)))
    if isinstance(out, Result):
        fields = out.__getstate__()
        for name, value in fields.items():
            for other in other_values(value):
                yield from ((f".{name}={other!r}", made) for made in _result(out, {**fields, name: other}))
            if isinstance(value, Result):
                for how, other in other_parts(value):
                    yield from ((f".{name}{how}", made) for made in _result(out, {**fields, name: other}))


def other_values(value: Any) -> Iterator[Any]:
    """Yield replacements for a field of a result."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, tuple):
        yield from ((*value, 3), value[:-1], (*value[::-1], 1))
    elif isinstance(value, str):
        yield from (None, "compact" if value == "swizzled" else "swizzled")
    elif value is not None:
        yield None


def _result(like: Result, fields: dict[str, Any]) -> Iterator[Result]:
    """Yield results that were not validated; for a Routing or a Gate, which calls do not validate again, only
    what can be built."""
    if isinstance(like, (Routing, Gate)):
        with suppress(TypeError, ValueError, AttributeError):
            yield type(like)(**fields)
        return
    made = object.__new__(type(like))
    made.__dict__.update(fields)
    yield made
