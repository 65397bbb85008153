"""Benchmark rows of group_quantize."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import backend
from ...arrays import Array, asnumpy, bits, zeros
from ...cases.groups import sizes
from ...formats import bfloat16
from ...layouts import padded_rows, round_up
from ...ops.convert.astype import astype
from ...ops.quantize.grouped import group_quantize
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ...testing import assert_bytes_equal
from .tensor import Spec

_CHECKED = 3                # groups that are checked


def _normal(shape: tuple[int, int]) -> Array:
    cp = backend.cupy()
    return astype(cp.random.standard_normal(shape, dtype=cp.float32), bfloat16)


def _spec(label: str, shape: tuple[int, int], nbytes: float, division: str, recipe: Any, columnwise: bool,
          groups: int = 64, align: int = 1) -> Spec:
    """division: how rows are divided into groups. Per-tensor recipes raise amaxes too if groups are not
    padded."""

    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups, division)
        x, splits = _normal(shape), cp.asarray(host)
        options: dict[str, Any] = {"columnwise": columnwise, "align": align}
        if isinstance(recipe, DelayedScaling):
            options["scales"] = cp.linspace(0.5, 2, groups, dtype=cp.float32)
        if isinstance(recipe, (DelayedScaling, CurrentScaling)) and align == 1:
            options["amaxes"] = cp.zeros(groups, cp.float32)
        out = group_quantize(x, splits, recipe, **options)

        def check() -> None:
            """Compares some groups with what the recipe makes of each by itself."""
            starts, aligned = np.cumsum(host) - host, [round_up(int(size), align) for size in host]
            assert asnumpy(out.splits).tolist() == aligned
            for g in np.linspace(0, groups - 1, _CHECKED).astype(int):
                own: dict[str, Any] = {"columnwise": columnwise}
                part = zeros((aligned[g], shape[1]), bfloat16, like=x)
                bits(part)[: host[g]] = bits(x)[starts[g] : starts[g] + host[g]]
                if "scales" in options:
                    own["scale"] = options["scales"][g : g + 1]
                if "amaxes" in options:
                    own["amax"] = cp.zeros(1, cp.float32)
                assert_bytes_equal(out[g], recipe.quantize(part, **own))
                assert "amax" not in own or float(own["amax"][0]) == float(options["amaxes"][g])

        return (lambda: group_quantize(x, splits, recipe, **options, out=out)), check

    return Spec("group_quantize", f"bf16→e4m3 {label}", shape, int(nbytes), make)


def _all(shape: tuple[int, int]) -> Iterator[Spec]:
    elements = shape[0] * shape[1]
    for label, division, both in (
            ("both", "even", True), ("both, ragged", "ragged", True),
            ("both, ragged in multiples of 16", "aligned", True), ("row", "even", False)):
        yield _spec(f"{label}, 64 groups", shape, elements * (3 + both), division, DelayedScaling(), both)
    for label, both in (("both", True), ("row", False)):
        yield _spec(f"current {label}, 64 groups", shape, elements * (3 + both), "even", CurrentScaling(),
                    both)


def _all_in_blocks(shape: tuple[int, int]) -> Iterator[Spec]:
    elements = shape[0] * shape[1]
    recipes = (("1×128", BlockScaling(), 4 / 128), ("MX", MXScaling(scale_layout="swizzled"), 1 / 32))
    for (label, recipe, scales), both in product(recipes, (True, False)):
        yield _spec(f"{label} {'both' if both else 'row'}, ragged, 64 groups", shape,
                    elements * (2 + (1 + both) * (1 + scales)), "ragged", recipe, both)
    yield _spec("1×128 both, ragged in multiples of 16, 64 groups", shape, elements * (2 + 2 * (1 + 4 / 128)),
                "aligned", BlockScaling(), True)
    whole_rows = BlockScaling((1, None), scale_layout="compact")
    # both directions read x twice; the second read is not counted
    for label, both in (("row", False), ("both", True)):
        yield _spec(f"whole rows {label}, ragged, 64 groups", shape, elements * (3 + both), "ragged",
                    whole_rows, both)


def _all_padded(shape: tuple[int, int], groups: int = 64, align: int = 128) -> Iterator[Spec]:
    written = padded_rows(shape[0], groups, align)
    recipes = (("", DelayedScaling(), 0.0), ("MX ", MXScaling(scale_layout="swizzled"), 1 / 32))
    for label, recipe, scales in recipes:
        yield _spec(f"{label}both, ragged, {groups} groups padded to {align}", shape,
                    shape[1] * (2 * shape[0] + 2 * written * (1 + scales)), "ragged", recipe, True, groups,
                    align)


_SHAPES = (64 * 2048, 5120), (64 * 4096, 7168)
SPECS: tuple[Spec, ...] = (*(spec for shape in _SHAPES for spec in _all(shape)),
                           *(spec for shape in _SHAPES for spec in _all_in_blocks(shape)),
                           *_all_padded(_SHAPES[0]))
