"""Benchmark rows of swizzle_scales and unswizzle_scales: the scales of 4096 x 4096 elements and more, 32
elements for a scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import backend, reference
from ...arrays import Array, asnumpy
from ...cases.scales.swizzle import sizes_along
from ...formats import float8_e8m0fnu
from ...ops.scales.swizzle import swizzle_scales, unswizzle_scales
from ...testing import assert_bytes_equal
from ..quantize.tensor import SIZES, Spec

_GROUPS = 64


def _scales(shape: tuple[int, ...]) -> Array:
    return backend.cupy().random.randint(0, 256, shape, np.uint8).view(float8_e8m0fnu)


def _swizzle(shape: tuple[int, int], columnwise: bool, groups: int = 0, axis: int = 0) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        stored = _scales(shape[::-1] if columnwise else shape)
        s = stored.T if columnwise else stored
        splits = cp.asarray(sizes_along(shape[axis], groups, axis)) if groups else None
        out = swizzle_scales(s, splits=splits, axis=axis)

        def check() -> None:
            host = None if splits is None else splits.get()
            assert_bytes_equal(out, reference.swizzle_scales(asnumpy(s), splits=host, axis=axis))

        return (lambda: swizzle_scales(s, splits=splits, axis=axis, out=out)), check

    return make


def _unswizzle(shape: tuple[int, int], columnwise: bool) -> Any:
    def make() -> Any:
        s = _scales(shape)
        w = swizzle_scales(s)
        stored = _scales(shape[::-1] if columnwise else shape)
        out = stored.T if columnwise else stored

        def check() -> None:
            assert bool((out.view("u1") == s.view("u1")).all())

        return (lambda: unswizzle_scales(w, shape=shape, out=out)), check

    return make


def _all() -> Iterator[Spec]:
    def spec(op: str, label: str, shape: tuple[int, int], make: Any) -> Spec:
        return Spec(op, label, shape, shape[0] * shape[1] * 2, make)

    for rows, columns in SIZES:
        shape = rows, columns // 32
        yield spec("swizzle_scales", "row-wise", shape, _swizzle(shape, False))
        yield spec("swizzle_scales", "column-wise", shape, _swizzle(shape, True))
        yield spec("unswizzle_scales", "row-wise", shape, _unswizzle(shape, False))
        yield spec("unswizzle_scales", "column-wise", shape, _unswizzle(shape, True))
    shape = 16384, 8192 // 32
    yield spec("swizzle_scales", f"row-wise, {_GROUPS} groups of rows", shape,
               _swizzle(shape, False, _GROUPS))
    shape = 8192, 16384 // 32
    yield spec("swizzle_scales", f"column-wise, {_GROUPS} K-groups", shape, _swizzle(shape, True, _GROUPS, 1))
    yield spec("swizzle_scales", "row-wise, unaligned", (16384, 90), _swizzle((16384, 90), False))


SPECS: tuple[Spec, ...] = tuple(_all())
