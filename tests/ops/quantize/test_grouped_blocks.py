"""group_quantize in blocks, including whole rows and whole columns: every group equals the recipe's result
for its rows, whatever the other groups. test_cases.py has the kernels' bytes."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from group_arrays import COLUMNS, DIRECTIONS, ROWS, expect_groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, MXScaling, cases, testing
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float32
from cupy_fp8.layouts import group_scales, group_unit, grouped_scale_shape, scale_shape

EACH: Any = product
BLOCKS: list[Any] = [
    *(BlockScaling(block, scale_layout=layout)
      for block, layout in EACH(((1, 128), (128, 1), (1, 32), (128, 128)), ("gemm_ready", "compact"))),
    BlockScaling(profile="vllm"),
    BlockScaling(dtype=float8_e5m2, profile="deepgemm", scale_layout="deepgemm_sm90"),
    *(MXScaling(block=block, scale_layout=layout)
      for block, layout in EACH(((1, 32), (32, 32)), ("compact", "swizzled")))]
LINES: list[Any] = [
    *(BlockScaling(block, scale_layout=layout)
      for block, layout in EACH((ROWS, COLUMNS), ("gemm_ready", "compact", "deepgemm_sm90"))),
    *(BlockScaling(ROWS, profile=profile, scale_layout="compact")
      for profile in ("deepgemm", "tilekernels", "vllm", "sglang", "torchao")),
    BlockScaling(COLUMNS, float8_e5m2, eps=0.5, pow2_scale=False),
    BlockScaling(COLUMNS, profile="vllm", pow2_scale=True)]


@pytest.mark.parametrize("directions", DIRECTIONS, ids=str)
@pytest.mark.parametrize("recipe", BLOCKS + LINES, ids=str)
def test_groups_are_what_the_recipe_makes_of_them(run, recipe, directions):
    x = cases.values("edges", (300, 150), bfloat16)
    for sizes in ([130, 0, 1, 128], *([[0, 300], [300, 0], [0, 0, 0], []] if recipe in LINES else [])):
        g = fp8.group_quantize(run.array(x), sizes, recipe, **directions)
        expect_groups(g, x, sizes, recipe, **directions)
        assert recipe not in LINES or g.block == recipe.block


@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling()], ids=str)
def test_rows_at_any_multiple_of_eight_bytes(run, recipe):
    """Warp tiles need no more. (A single array's rows of whole blocks are read 16 bytes at a time.)"""
    x, sizes = cases.values("normal", (40, 256), bfloat16), [13, 27]
    memory = run.array(np.concatenate([np.zeros(4, bfloat16), x.reshape(-1)]))
    expect_groups(fp8.group_quantize(memory[4:].reshape(40, 256), sizes, recipe), x, sizes, recipe)


@pytest.mark.full
@pytest.mark.parametrize("directions", DIRECTIONS[1:], ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("source", [bfloat16, float32])
def test_several_tiles_of_a_block_of_threads(run, source, block, directions):
    """Elements after the last whole sector of a column are carried from tile to tile, and stored after the
    last one; fewer than a sector, too."""
    sizes = [1, 517, 31, 0, 1030, 33, 259, 32, 131, 2, 48, 780, 256]
    x = cases.values("normal", (sum(sizes) + 3, 132), source)
    g = fp8.group_quantize(run.array(x), sizes, BlockScaling(block), **directions)
    expect_groups(g, x, sizes, BlockScaling(block), **directions)


def test_dequantize(run):
    x, sizes = cases.values("normal", (300, 150), bfloat16), [130, 0, 1, 128]
    for recipe, directions in product((*BLOCKS, BlockScaling(ROWS), BlockScaling(COLUMNS)), DIRECTIONS):
        g = fp8.group_quantize(run.array(x), sizes, recipe, **directions)
        want, ends = np.zeros((300, 150), np.float32), np.cumsum([0, *sizes])
        for start, end in pairwise(ends):
            want[start:end] = recipe.quantize(x[start:end], **directions).dequantize()
        testing.assert_bytes_equal(g.dequantize(), want)
        testing.assert_bytes_equal(fp8.dequantize(g), want)


@pytest.mark.parametrize("recipe", BLOCKS, ids=str)
def test_shape_of_scales_is_the_bound(recipe):
    """However the rows are divided, the scales fit; some division needs all of the room, except less than a
    unit."""
    shape = (70, 40)
    q = recipe.quantize(np.zeros(shape, np.float32), columnwise=True)
    for s in (q.rowwise, q.columnwise):
        described = s.block, s.scale_layout, s.transposed
        unit = group_unit(*described)
        for groups in (1, 3, 70, 200):
            room = np.prod(grouped_scale_shape(shape, groups, *described))
            ones = min(groups, 70) - 1
            worst = [1] * ones + [70 - ones]
            needed = sum(np.prod(scale_shape((m, shape[1]), *described)) for m in worst)
            assert needed <= room < needed + group_scales(shape[1], *described) * max(1, unit)


# ---- whole rows and whole columns ----
def test_scales_by_their_formula(run):
    """torchao's: 448 / max(amax, 1e-12), of each row, and of each column of each group."""
    x, sizes = cases.values("normal", (200, 68), float32), [70, 0, 127]
    x[:, 5] = 0
    recipe = BlockScaling(ROWS, profile="torchao", scale_layout="compact")
    g = fp8.group_quantize(run.array(x), sizes, recipe, columnwise=True)

    def scale_of(amax: np.ndarray) -> np.ndarray:
        scale: np.ndarray = np.float32(448) / np.maximum(amax, np.float32(1e-12))
        return scale

    inverses = np.float32(1) / scale_of(np.abs(x[:197]).max(axis=1))
    np.testing.assert_array_equal(fp8.asnumpy(g.scale_inv)[:197, 0], inverses)
    amax = np.stack([np.abs(x[:70]).max(axis=0), np.zeros(68, np.float32), np.abs(x[70:197]).max(axis=0)])
    np.testing.assert_array_equal(fp8.asnumpy(g.columnwise_scale_inv), np.float32(1) / scale_of(amax))
    want = (x[70:197].T * scale_of(amax[2])[:, None]).clip(-448, 448).astype(float8_e4m3fn)
    np.testing.assert_array_equal(fp8.asnumpy(g[2].columnwise.data).astype(np.float32),
                                  want.astype(np.float32))


@needs_host
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1024, 2048, 4096, 8192]),
       st.integers(-9, 9), st.integers(1, 3), st.sampled_from([bfloat16, float32]), st.booleans())
def test_any_length_of_rows(sizes, columns, more, times, dtype, divides):
    """Rows about as long as one, two, four and eight warps hold, and as one block takes; the largest element
    is anywhere."""
    columns, recipe = columns * times + more, BlockScaling(ROWS, profile="vllm" if divides else "te")
    x = cases.values("normal", (sum(sizes), columns), np.dtype(dtype))
    x[np.arange(len(x)), np.random.default_rng(columns).integers(0, columns, len(x))] = 1000
    with testing.executor("host"):
        g = fp8.group_quantize(x, sizes, recipe)
    expect_groups(g, x, sizes, recipe)


def test_the_order_of_groups_does_not_matter(run):
    """Neither their order nor the number of others matters: only the bytes move."""
    x, recipe = cases.values("normal", (260, 72), bfloat16), BlockScaling(ROWS, scale_layout="compact")
    g = fp8.group_quantize(run.array(x), [100, 31, 129], recipe, columnwise=True)
    moved = np.concatenate([x[131:], x[:100], x[100:131]])
    other = fp8.group_quantize(run.array(moved), [129, 0, 100, 31], recipe, columnwise=True)
    for i, j in ((0, 2), (1, 3), (2, 0)):
        testing.assert_bytes_equal(g[i], other[j])
