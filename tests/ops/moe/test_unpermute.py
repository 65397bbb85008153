"""Sums of tokens' rows against loops over rows, in their order; the gradients of both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe_arrays import assert_equal, expect, normal
from moe_loops import f32, gathered, gradients, moved, routings, summed, tree

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.cases.moe.route import routing as routed
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float32
from cupy_fp8.ops.moe import permute_launches as launching


def unpermuted(run: testing.Executor, experts: Any, y: Any, probs: Any = None) -> np.ndarray:
    """Call unpermute for tokens with these experts."""
    number = int(np.max(experts)) + 1
    r = run.array(reference.route(np.array(experts), num_experts=number))
    there = None if probs is None else run.array(f32(probs))
    return fp8.asnumpy(fp8.unpermute(run.array(y), r, probs=there))


@routings
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_sums(dtype, options, run):
    host = routed(37, **options)
    r = run.array(host)
    for columns, kind in ((24, "normal"), (13, "bits"), (0, "bits")):
        y = cases.values(kind, (host.rows, columns), dtype, 1)
        weights: list[np.ndarray | None] = [None, cases.values(kind, (37, host.topk), float32, 2)]
        if host.experts is not None:
            weights.append(normal((37, host.num_experts), seed=3))
        for probs in weights:
            there = None if probs is None else run.array(probs)
            expect(run, summed(y, host, probs), fp8.unpermute, run.array(y), r, probs=there,
                   leads=(dtype.itemsize * (columns % 2),))


def test_the_last_row_comes_first(run):
    """(1e8 + -1e8) + 1 is 1, 1e8 + (-1e8 + 1) is 0; slots are in another order than rows."""
    for rows, want in (([1, -1e8, 1e8], 1), ([1e8, -1e8, 1], 0)):
        assert unpermuted(run, [[1, 2, 0]], f32(rows)).tolist() == [want]
    # probs by slot, for rows 1, 2, 0
    assert unpermuted(run, [[1, 2, 0]], f32([1, -1, 1]), [[1e8, 1e8, 1]]).tolist() == [1]


def test_products_are_rounded(run):
    """An fma would keep the bits that these lose."""
    a = np.float32(1 + 2**-12)
    assert unpermuted(run, [[0, 0]], f32([a, a]), [[-a, a]]).tolist() == [0]


def test_zeros_infinities_and_nan(run):
    experts, y = [[0], [0], [-1], [0], [0]], f32([-0.0, np.inf, 3, np.nan, 1])
    want = np.array([0x80000000, 0x7FC00000, 0, 0x40C00000, 0x7FC00000], np.uint32).view(np.float32)
    testing.assert_bytes_equal(unpermuted(run, experts, y, [[1], [0], [1], [2], [-1]]), want)
    assert np.signbit(unpermuted(run, experts, y)).tolist() == [True, False, False, False, False]


def test_tiny_and_huge_sums(run):
    """Subnormals are kept; a sum beyond the format is Inf; it is rounded once."""
    two = [[0, 0]]
    assert unpermuted(run, two, np.full((2, 1), 2.0**-149, np.float32)).view(np.uint32).tolist() == [[2]]
    assert unpermuted(run, two, np.full((2, 1), 40000, np.float16)).tolist() == [[np.inf]]
    # 2049 is between two float16 numbers; 2050.0 is one
    y = np.array([[2048], [1]], np.float16)
    assert unpermuted(run, two, y, [[1, 1.001]]).tolist() == [[2050]]


@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("topk", [1, 2, 4, 6, 8, 3])
def test_several_steps_of_a_block(topk, dtype, run, monkeypatch):
    """This many tokens take several steps: rows of the next step are loaded while those of one are summed."""
    monkeypatch.setattr(launching, "_BLOCKS", 1)
    launching.unpermute_split.cache_clear()
    for kind, used in (("distinct", None), ("any", None), ("any", 1), ("any", 2), ("any", 4), ("any", 7)):
        host = routed(7, topk, 11, kind, used=used)
        y, probs = normal((host.rows, 4200), dtype), normal((7, topk), seed=1)
        assert_equal(fp8.unpermute(run.array(y), run.array(host), probs=run.array(probs)),
                     summed(y, host, probs))
    launching.unpermute_split.cache_clear()


# ---- gradients ----
@routings
def test_the_gradient_of_permute(options, run):
    host = routed(41, **options)
    r = run.array(host)
    for dtype in INPUT_DTYPES:
        grad = cases.values("bits", (host.rows, 16), dtype, 1)
        by_row = cases.values("bits", (host.rows,), float32, 2)
        want, given_grad = summed(grad, host), run.array(grad)
        assert_equal(fp8.permute_backward(given_grad, r), want)
        expect(run, (want, gathered(by_row, host)), fp8.permute_backward, given_grad, r,
               probs_grad=run.array(by_row))


@routings
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_the_gradient_of_unpermute(dtype, options, run):
    host = routed(13, **options)
    r = run.array(host)
    for columns, kind in ((24, "normal"), (13, "bits"), (0, "bits"), (1, "bits")):
        y, grad = (cases.values(kind, (rows, columns), dtype, i) for rows, i in ((host.rows, 1), (13, 2)))
        given_grad, given_y = run.array(grad), run.array(y)
        for number in {host.topk, host.topk if host.experts is None else host.num_experts}:
            probs = normal((13, number), seed=3)
            expect(run, gradients(grad, y, host, probs), fp8.unpermute_backward, given_grad, given_y, r,
                   probs=run.array(probs))
        expect(run, (moved(grad, host), None), fp8.unpermute_backward, given_grad, None, r)


@pytest.mark.parametrize(("columns", "dtype"), [(8192, bfloat16), (8193, bfloat16), (40_007, bfloat16),
                                                (4096, float32), (12_289, float32)])
def test_dot_products_of_long_rows(columns, dtype, run):
    """Longer than the tiles of the kernel; the tree by recursion. topk is more than the kernel takes at a
    time."""
    host, probs = routed(2, 34, 50, align=2), np.ones((2, 34), np.float32)
    grad, y = normal((2, columns), dtype, 1), normal((host.rows, columns), dtype, 2)
    _, dprobs = fp8.unpermute_backward(run.array(grad), run.array(y), run.array(host), probs=run.array(probs))
    assert dprobs is not None
    for token, slot in ((0, 0), (0, 33), (1, 5), (1, 32)):
        row = host.row_map[token, slot]
        products = grad[token].astype(np.float32) * y[row].astype(np.float32)
        want = tree(list(products)) if row >= 0 else np.float32(0)
        assert_equal(fp8.asnumpy(dprobs)[token, slot:slot + 1], np.array([want]))


def test_gradients_are_adjoint(run):
    """<f(x), g> = <x, f'(g)>, exactly: small integers are not rounded."""
    rng = np.random.default_rng(0)

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(np.float32)

    for host in (routed(30, 3, 5, align=4), routed(30, 3, 6, form="mask"),
                 routed(30, 2, 6, form="mask of any")):
        x, probs = integers(30, 8), integers(30, host.topk)
        g, g_probs = integers(host.rows, 8), integers(host.rows)
        r, there = run.array(host), run.array(probs)
        y, y_probs = map(fp8.asnumpy, fp8.permute(run.array(x), r, probs=there))
        x_grad, probs_grad = map(fp8.asnumpy,
                                 fp8.permute_backward(run.array(g), r, probs_grad=run.array(g_probs)))
        assert (y * g).sum() + (y_probs * g_probs).sum() == (x * x_grad).sum() + (probs * probs_grad).sum()
        out = fp8.asnumpy(fp8.unpermute(run.array(g), r, probs=there))
        grad_y, dprobs = map(fp8.asnumpy, fp8.unpermute_backward(run.array(x), run.array(g), r, probs=there))
        assert (out * x).sum() == (g * grad_y).sum() == (probs * dprobs).sum()
