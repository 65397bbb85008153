"""Rows of the benchmark for groups quantised as tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ... import backend
from ...arrays import Array, asnumpy, bits, zeros
from ...cases.moe.pad import sizes
from ...formats import bfloat16
from ...layouts import padded_rows, round_up
from ...ops.convert.astype import astype
from ...ops.quantize.grouped import group_quantize
from ...ops.quantize.tensor import quantize_tensor
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ...testing import assert_bytes_equal
from .tensor import Spec

_CHECKED = 3                # groups


def _normal(shape: tuple[int, int]) -> Array:
    cp = backend.cupy()
    return astype(cp.random.standard_normal(shape, dtype=cp.float32), bfloat16)


def _quantize(shape: tuple[int, int], groups: int, division: str, columnwise: bool,
              current: bool = False) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups, division)
        x, splits = _normal(shape), cp.asarray(host)
        recipe = CurrentScaling() if current else DelayedScaling()
        scales, amaxes = cp.linspace(0.5, 2, groups, dtype=cp.float32), cp.zeros(groups, cp.float32)
        options: dict[str, Any] = {"columnwise": columnwise, "scales": None if current else scales,
                                   "amaxes": amaxes}
        out = group_quantize(x, splits, recipe, **options)

        def check() -> None:
            starts = np.cumsum(host) - host
            for g in np.linspace(0, groups - 1, _CHECKED).astype(int):
                part = bits(x)[starts[g] : starts[g] + host[g]].view(bfloat16)
                amax = cp.zeros(1, cp.float32)
                want = quantize_tensor(part, None if current else scales[g : g + 1], columnwise=columnwise,
                                       amax=amax)
                for mine, theirs in ((out[g].rowwise, want.rowwise), (out[g].columnwise, want.columnwise)):
                    if mine is not None and theirs is not None:
                        assert_bytes_equal(mine.data, theirs.data)
                        assert_bytes_equal(mine.scale_inv, theirs.scale_inv)
                assert float(amax[0]) == float(amaxes[g])

        return (lambda: group_quantize(x, out.splits, recipe, **options, out=out)), check

    return make


def _all() -> Iterator[Spec]:
    for rows, columns in ((64 * 2048, 5120), (64 * 4096, 7168)):
        for label, division, both in (("both", "even", True), ("both, ragged", "ragged", True),
                                      ("both, ragged in multiples of 16", "aligned", True),
                                      ("row", "even", False)):
            yield Spec("group_quantize", f"bf16→e4m3 {label}, 64 groups", (rows, columns),
                       rows * columns * (4 if both else 3),
                       _quantize((rows, columns), 64, division, both))
        for label, both in (("both", True), ("row", False)):
            yield Spec("group_quantize", f"bf16→e4m3 current {label}, 64 groups", (rows, columns),
                       rows * columns * (4 if both else 3),
                       _quantize((rows, columns), 64, "even", both, current=True))


def _padded(shape: tuple[int, int], groups: int, align: int, recipe: Any) -> Any:
    """In both directions, from ragged groups."""

    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups, "ragged")
        aligned = [round_up(int(size), align) for size in host]
        x, options = _normal(shape), dict[str, Any](columnwise=True, align=align)
        if isinstance(recipe, DelayedScaling):
            options["scales"] = cp.linspace(0.5, 2, groups, dtype=cp.float32)
        splits = cp.asarray(host)
        out = group_quantize(x, splits, recipe, **options)

        def check() -> None:
            starts = np.cumsum(host) - host
            assert asnumpy(out.splits).tolist() == aligned
            for g in np.linspace(0, groups - 1, _CHECKED).astype(int):
                part = zeros((aligned[g], shape[1]), bfloat16, like=x)
                bits(part)[: host[g]] = bits(x)[starts[g] : starts[g] + host[g]]
                scale = {"scale": options["scales"][g : g + 1]} if "scales" in options else {}
                want = recipe.quantize(part, columnwise=True, **scale)
                for mine, theirs in ((out[g].rowwise, want.rowwise), (out[g].columnwise, want.columnwise)):
                    assert_bytes_equal(mine.data, theirs.data)
                    assert_bytes_equal(mine.scale_inv, theirs.scale_inv)

        return (lambda: group_quantize(x, splits, recipe, **options, out=out)), check

    return make


def _all_padded() -> Iterator[Spec]:
    rows, columns, groups, align = 64 * 2048, 5120, 64, 128
    written = padded_rows(rows, groups, align)
    for label, recipe, scales in (("", DelayedScaling(), 0.0),
                                  ("MX ", MXScaling(scale_layout="swizzled"), 1 / 32)):
        yield Spec("group_quantize", f"bf16→e4m3 {label}both, ragged, {groups} groups padded to {align}",
                   (rows, columns), int(columns * (2 * rows + 2 * written * (1 + scales))),
                   _padded((rows, columns), groups, align, recipe))


def _in_blocks(shape: tuple[int, int], groups: int, division: str, recipe: Any, columnwise: bool) -> Any:
    def make() -> Any:
        cp = backend.cupy()
        host = sizes(shape[0], groups, division)
        x = _normal(shape)
        out = group_quantize(x, cp.asarray(host), recipe, columnwise=columnwise)

        def check() -> None:
            starts = np.cumsum(host) - host
            for g in np.linspace(0, groups - 1, _CHECKED).astype(int):
                want = recipe.quantize(bits(x)[starts[g] : starts[g] + host[g]].view(bfloat16),
                                       columnwise=columnwise)
                for mine, theirs in ((out[g].rowwise, want.rowwise), (out[g].columnwise, want.columnwise)):
                    if mine is not None and theirs is not None:
                        assert_bytes_equal(mine.data, theirs.data)
                        assert_bytes_equal(mine.scale_inv, theirs.scale_inv)

        return (lambda: group_quantize(x, out.splits, recipe, columnwise=columnwise, out=out)), check

    return make


def _all_in_blocks() -> Iterator[Spec]:
    recipes = (("1×128", BlockScaling(), 4 / 128), ("MX", MXScaling(scale_layout="swizzled"), 1 / 32))
    for rows, columns in ((64 * 2048, 5120), (64 * 4096, 7168)):
        for (label, recipe, scales), both in product(recipes, (True, False)):
            directions = 1 + both
            yield Spec("group_quantize", f"bf16→e4m3 {label} {'both' if both else 'row'}, ragged, 64 groups",
                       (rows, columns),
                       int(rows * columns * (2 + directions * (1 + scales))),
                       _in_blocks((rows, columns), 64, "ragged", recipe, both))
        yield Spec("group_quantize", "bf16→e4m3 1×128 both, ragged in multiples of 16, 64 groups",
                   (rows, columns), int(rows * columns * (2 + 2 * (1 + 4 / 128))),
                   _in_blocks((rows, columns), 64, "aligned", BlockScaling(), True))
        whole_rows = BlockScaling((1, None), scale_layout="compact")
        for label, both in (("row", False), ("both", True)):    # both reads x twice, which is not counted
            yield Spec("group_quantize", f"bf16→e4m3 whole rows {label}, ragged, 64 groups", (rows, columns),
                       rows * columns * (3 + both),
                       _in_blocks((rows, columns), 64, "ragged", whole_rows, both))


SPECS: tuple[Spec, ...] = (*_all(), *_all_in_blocks(), *_all_padded())
