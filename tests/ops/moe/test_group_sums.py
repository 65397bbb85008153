"""Sums of the rows of groups against a recursive tree; wrong sizes on the device; any segments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from moe_arrays import assert_equal, expect, normal, noted, on_the_cpu
from moe_loops import f32, tree
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import cases, kernels
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float32
from cupy_fp8.kernels import errors
from cupy_fp8.ops.moe import group_sums as op

NEGATIVE, SUM = (errors.MESSAGES[fact] for fact in (errors.Fact.SPLIT_NEGATIVE, errors.Fact.SPLIT_SUM))
RECIPES: dict[str, Any] = {
    "gemm_ready": fp8.BlockScaling(), "compact": fp8.BlockScaling(scale_layout="compact"),
    "any": fp8.BlockScaling(pow2_scale=False), "tensor": fp8.CurrentScaling()}


def summed(values: np.ndarray, splits: Any, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum column by column."""
    terms = values.astype(np.float32)
    with np.errstate(all="ignore"):
        if weights is not None:
            terms = terms * weights[:, None]
        starts = pairwise(np.cumsum([0, *splits]))
        rows = [[tree(list(column)) if b > a else 0 for column in terms[a:b].T] for a, b in starts]
    return np.array(rows, np.float32).reshape(len(splits), values.shape[1])


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_arrays(dtype, run):
    splits = [40, 0, 1, 70, 300, 0]
    for columns in (24, 13, 0):
        x, weights = normal((420, columns), dtype), normal((420,), seed=1)
        for given in (None, weights):
            there = None if given is None else run.array(given)
            expect(run, summed(x, splits, given), fp8.group_sums, run.array(x), run.array(np.array(splits)),
                   weights=there, leads=(0, 4))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_rows(recipe, run):
    """Either part of a Quantized, whose scales are read in place."""
    x, weights, splits = normal((260, 280), bfloat16), normal((260,), seed=1), [3, 200, 0, 50]
    q = RECIPES[recipe].quantize(x, columnwise=True)
    want = summed(q.rowwise.dequantize(), splits, weights)
    for each in (q, q.rowwise):
        expect(run, want, fp8.group_sums, run.array(each), splits, weights=run.array(weights))


def test_the_tree_begins_with_each_group(run):
    """(1e8 + -1e8) + (1 + 1) is 2, and (1e8 + 1) + (-1e8 + 1) is 0."""
    column = f32([7, 1e8, -1e8, 1, 1, 1e8, 1, -1e8, 1]).reshape(-1, 1)
    assert fp8.asnumpy(fp8.group_sums(run.array(column), [1, 4, 4])).tolist() == [[7], [2], [0]]


def test_products_are_rounded(run):
    """An fma would keep the bits that these lose."""
    a = np.float32(1 + 2**-12)
    x = run.array(f32([[-a], [a]]))
    weights = f32([a, a])
    assert fp8.asnumpy(fp8.group_sums(x, [2], weights=run.array(weights))).tolist() == [[0]]


def test_zeros_infinities_and_nan(run):
    """-0 remains if all terms are -0; an empty group has +0; any NaN is the one NaN."""
    x = f32([-0.0, -0.0, np.inf, -np.inf, 2.0**-149, 3e38, 3e38])
    x = np.append(x, np.uint32(0xFFC12345).view(np.float32)).reshape(-1, 1)
    found = fp8.asnumpy(fp8.group_sums(run.array(x), [2, 0, 2, 1, 2, 1])).view(np.uint32)
    assert found.ravel().tolist() == [0x80000000, 0, 0x7FC00000, 1, 0x7F800000, 0x7FC00000]


def test_rows_after_the_last_group_are_not_read(run):
    x, weights = normal((90, 16)), normal((90,), seed=1)
    want = summed(x[:50], [20, 30], weights[:50])
    x[50:], weights[50:] = np.nan, np.nan
    assert_equal(fp8.group_sums(run.array(x), [20, 30], weights=run.array(weights)), want)


@pytest.mark.parametrize(("sizes", "as_if", "notes"), [
    ([20, -3, 30], [20, 0, 30], [NEGATIVE]), ([20, 90, 5], [20, 70, 0], [SUM]),
    ([90, -1, 5, 2**40], [90, 0, 0, 0], [NEGATIVE, SUM])])
def test_wrong_sizes_on_the_device(sizes, as_if, notes, run, monkeypatch):
    monkeypatch.setattr(op, "check_at_most", lambda *_: None)           # a GPU's host does not know them
    x = normal((90, 16))
    expect(run, summed(x, as_if), fp8.group_sums, run.array(x), run.array(np.array(sizes)))
    noted(run, notes)


@on_the_cpu
def test_sizes_on_the_host_are_refused(run):
    with pytest.raises(ValueError, match="splits: expected sizes that add up to at most the 9 rows"):
        fp8.group_sums(run.array(normal((9, 4))), np.array([4, 6]), check=True)


@needs_host
@pytest.mark.parametrize("found", [False, True])
def test_segments_that_a_launch_finds_are_the_same(found, monkeypatch):
    monkeypatch.setattr(op, "is_worth_a_launch", lambda *_: found)
    with fp8.testing.executor("host"):
        x, splits = normal((3000, 520), bfloat16), [1, 0, 999, 2000]
        assert_equal(fp8.group_sums(x, splits), fp8.reference.group_sums(x, splits))


@needs_host
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_any_segments_give_the_same_bytes(rows, monkeypatch):
    """Their sums are subtrees."""
    monkeypatch.setattr(op, "_ROWS", rows)
    with fp8.testing.executor("host"):
        x, splits, weights = normal((2500, 40)), [1300, 0, 700, 130, 370], normal((2500,), seed=1)
        assert_equal(fp8.group_sums(x, splits, weights=weights), fp8.reference.group_sums(
            x, splits, weights=weights))


@needs_host
def test_counts_of_blocks_are_zero_after_a_launch():
    """The same result again, with what the first call left."""
    with fp8.testing.executor("host"):
        x, splits = normal((3000, 24)), np.array([1500, 1500])
        out = fp8.group_sums(x, splits)
        for _ in range(3):
            cases.poison(out)
            assert_equal(fp8.group_sums(x, splits, out=out), fp8.reference.group_sums(x, splits))


@pytest.mark.gpu
def test_a_large_layer_on_a_gpu():
    with fp8.testing.executor("cuda") as run:
        rng = np.random.default_rng(0)
        sizes = rng.multinomial(33_000, rng.dirichlet(np.ones(64)))
        x = cases.values("normal", (34_000, 384), bfloat16)
        weights = rng.random(34_000, dtype=float32)
        q = fp8.quantize_block(x)
        want = fp8.reference.group_sums(q, sizes, weights=weights)
        there, given = run.array(q), run.array(weights)
        for _ in range(20):
            assert_equal(fp8.group_sums(there, run.array(sizes), weights=given), want)
        assert kernels.device_errors() == ()
