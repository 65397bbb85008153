"""What norm_quantize and norm_backward_quantize compute, by other means than their reference.
tests/ops/test_cases.py compares bytes over all cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_swiglu import BLOCKS, DELAYED, MX, every_recipe, normal

import cupy_fp8 as fp8
from cupy_fp8.formats import bfloat16, float16, float32
from cupy_fp8.testing import assert_bytes_equal

KINDS = ("rms", "layer")
every_kind = pytest.mark.parametrize("kind", KINDS)
EPS = 1e-6


def arrays(run: Any, shape: tuple[int, int], dtype: Any = float32) -> tuple[Any, ...]:
    """grad, x, a residual, and a weight and a bias in f32."""
    of_rows = (normal(shape, dtype, seed) for seed in (1, 2, 3))
    return (*map(run.array, of_rows), *(run.array(normal(shape[1:], seed=seed)) for seed in (4, 5)))


# ---- the formulas in f64 ----
def normed_f64(x: np.ndarray, kind: str) -> np.ndarray:
    x = x.astype(np.float64)
    c = x - x.mean(1, keepdims=True) if kind == "layer" else x
    return c / np.sqrt((c * c).mean(1, keepdims=True) + EPS)


def y_f64(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, kind: str) -> np.ndarray:
    return normed_f64(x, kind) * weight.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))


@every_kind
@pytest.mark.parametrize("shape", [(5, 37), (3, 4096), (130, 264)])
def test_y_is_near_the_norm_in_f64(run, kind, shape):
    """A sum of K terms has log2 K roundings, and few operations follow: 2**-20 of the largest values."""
    _, x, _, weight, bias = arrays(run, shape)
    more = {"bias": bias} if kind == "layer" else {}
    _, y, rstd = map(run.numpy, fp8.norm_quantize(
        x, weight, DELAYED, scale=1.0, kind=kind, return_normed=True, return_rstd=True, **more))
    wide = run.numpy(x)
    exact = y_f64(wide, run.numpy(weight), run.numpy(bias) if more else None, kind)
    np.testing.assert_allclose(y, exact, rtol=2.0**-20, atol=2.0**-20)
    deviation = np.sqrt(wide.var(1, dtype=np.float64) if kind == "layer" else (wide.astype(float)**2).mean(1))
    np.testing.assert_allclose(rstd, 1 / deviation, rtol=2.0**-20)


@every_kind
def test_gradients_are_finite_differences(run, kind):
    """Of the sum of grad * y, in f64, in every element of x, weight and bias."""
    shape, step = (3, 11), 1e-5
    grad, x, _, weight, bias = arrays(run, shape)
    found = [run.numpy(a) for a in fp8.norm_backward_quantize(grad, x, weight, None, kind=kind)]
    g = run.numpy(grad).astype(np.float64)
    points = [run.numpy(a).astype(np.float64) for a in (x, weight, bias)][:len(found)]

    def loss(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> Any:
        return (g * y_f64(x, weight, bias, kind)).sum()

    for i, (point, gradient) in enumerate(zip(points, found, strict=True)):
        slopes = np.empty(point.shape)
        for at in np.ndindex(point.shape):
            losses = []
            for sign in (1, -1):
                moved = [a.copy() for a in points]
                moved[i][at] += sign * step
                losses.append(loss(*moved))
            slopes[at] = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-5)


# ---- the order of operations, one element after the other ----
def sum_by_pairs(terms: list[Any]) -> Any:
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(terms) - len(terms) % 2:]
    return terms[0]


def row_in_loops(z: list[Any], kind: str) -> tuple[list[Any], Any]:
    """n of each element of a row, and 1 / sigma."""
    k = float32.type(len(z))
    mean = sum_by_pairs(z) / k
    c = [a - mean for a in z] if kind == "layer" else z
    rstd = float32.type(1) / np.sqrt(sum_by_pairs([a * a for a in c]) / k + float32.type(EPS))
    return [a * rstd for a in c], rstd


@every_kind
@pytest.mark.parametrize("columns", [1, 5, 8, 13])
def test_operations_come_in_this_order(run, kind, columns):
    shape = (7, columns)
    grad, x, residual, weight, bias = arrays(run, shape)
    more = {"bias": bias} if kind == "layer" else {}
    _, y, rstd = map(run.numpy, fp8.norm_quantize(
        x, weight, DELAYED, residual=residual, scale=1.0, kind=kind, weight_offset=1.0, return_normed=True,
        return_rstd=True, **more))
    dx, *sums = map(run.numpy, fp8.norm_backward_quantize(grad, x, weight, None, kind=kind, weight_offset=1.0,
                                                          residual_grad=residual))
    grad, x, residual, weight, bias = map(run.numpy, (grad, x, residual, weight, bias))
    w, k, terms = [a + float32.type(1) for a in weight], float32.type(columns), []
    for r in range(shape[0]):
        n, sigma = row_in_loops([a + b for a, b in zip(x[r], residual[r], strict=True)], kind)
        want = [a * b for a, b in zip(n, w, strict=True)]
        want = [a + b for a, b in zip(want, bias, strict=True)] if more else want
        assert_bytes_equal(y[r], np.array(want, float32))
        assert rstd[r] == sigma
        n, sigma = row_in_loops(list(x[r]), kind)
        gw = [a * b for a, b in zip(grad[r], w, strict=True)]
        c2 = sum_by_pairs([a * b for a, b in zip(gw, n, strict=True)]) / k
        c1 = sum_by_pairs(gw) / k
        rest = [a - b * c2 for a, b in zip(gw, n, strict=True)]
        rest = [a - c1 for a in rest] if kind == "layer" else rest
        want = [sigma * a + b for a, b in zip(rest, residual[r], strict=True)]
        assert_bytes_equal(dx[r], np.array(want, float32))
        terms.append([a * b for a, b in zip(grad[r], n, strict=True)])
    for found, rows in zip(sums, (terms, list(grad)), strict=False):
        want = [sum_by_pairs([row[c] for row in rows]) for c in range(columns)]
        assert_bytes_equal(found, np.array(want, float32))


# ---- options are other calls ----
@every_recipe
@every_kind
def test_the_recipe_takes_y_in_f32(run, recipe, kind):
    how, options = recipe
    _, x, _, weight, _ = arrays(run, (70, 96))
    q, y = fp8.norm_quantize(x, weight, how, kind=kind, columnwise=True, return_normed=True, **options)
    assert_bytes_equal(q, how.quantize(y, columnwise=True, **options))


@every_recipe
@every_kind
@pytest.mark.parametrize("columns", [96, 57], ids=["wide", "any"])
def test_round_through_is_two_steps(run, recipe, kind, columns):
    """Add and store, norm and store, quantise what has been stored."""
    how, options = recipe
    _, x, residual, weight, _ = arrays(run, (70, columns), bfloat16)
    given: dict[str, Any] = {"kind": kind, "round_through": bfloat16, "columnwise": True, **options}
    q, summed, y = fp8.norm_quantize(x, weight, how, residual=residual, return_residual=True,
                                     return_normed=True, **given)
    stored = (run.numpy(x).astype(float32) + run.numpy(residual).astype(float32)).astype(bfloat16)
    assert_bytes_equal(run.numpy(summed), stored)
    again, y_again = fp8.norm_quantize(run.array(stored), weight, how, return_normed=True, **given)
    assert_bytes_equal(again, q)
    assert_bytes_equal(run.numpy(y_again), run.numpy(y))
    wide = run.array(run.numpy(y).astype(float32))
    if how is not BLOCKS:                       # whose largest scale is that of bfloat16
        assert_bytes_equal(q, how.quantize(wide, columnwise=True, **options))
    else:
        assert_bytes_equal(q, how.quantize(y, columnwise=True, **options))


@every_kind
def test_without_round_through_the_sum_is_not_rounded(run, kind):
    _, x, residual, weight, _ = arrays(run, (30, 128), bfloat16)
    wide = run.array(run.numpy(x).astype(float32) + run.numpy(residual).astype(float32))
    given: dict[str, Any] = {"kind": kind, "return_rstd": True}
    q, rstd = fp8.norm_quantize(x, weight, MX, residual=residual, **given)
    want, rstd_of_sum = fp8.norm_quantize(wide, weight, MX, **given)
    assert_bytes_equal(q, want)
    assert_bytes_equal(run.numpy(rstd), run.numpy(rstd_of_sum))


@every_recipe
@every_kind
def test_zero_centred_weights(run, recipe, kind):
    how, options = recipe
    grad, x, _, weight, _ = arrays(run, (70, 96), bfloat16)
    plain = run.array(run.numpy(weight) + float32.type(1))
    given = {"kind": kind, "columnwise": True, **options}
    assert_bytes_equal(fp8.norm_quantize(x, weight, how, weight_offset=1.0, **given),
                       fp8.norm_quantize(x, plain, how, **given))
    for a, b in zip(fp8.norm_backward_quantize(grad, x, weight, how, weight_offset=1.0, **given),
                    fp8.norm_backward_quantize(grad, x, plain, how, **given), strict=True):
        assert_bytes_equal(a, b)


@every_recipe
@every_kind
def test_the_gradient_that_comes_past_the_norm(run, recipe, kind):
    how, options = recipe
    grad, x, residual, weight, _ = arrays(run, (70, 96))
    dx, *sums = fp8.norm_backward_quantize(grad, x, weight, None, kind=kind)
    both = run.array(run.numpy(dx) + run.numpy(residual))
    q, *same = fp8.norm_backward_quantize(grad, x, weight, how, kind=kind, residual_grad=residual,
                                          columnwise=True, **options)
    assert_bytes_equal(q, how.quantize(both, columnwise=True, **options))
    for a, b in zip(sums, same, strict=True):
        assert_bytes_equal(a, b)


@every_kind
@pytest.mark.parametrize("columns", [96, 57], ids=["wide", "any"])
def test_the_returned_rstd_is_what_is_found(run, kind, columns):
    grad, x, _, weight, _ = arrays(run, (70, columns), float16)
    _, rstd = fp8.norm_quantize(x, weight, MX, kind=kind, return_rstd=True)
    for how, columnwise in ((None, False), (BLOCKS, False), (BLOCKS, True)):
        for a, b in zip(fp8.norm_backward_quantize(grad, x, weight, how, kind=kind, columnwise=columnwise),
                        fp8.norm_backward_quantize(grad, x, weight, how, kind=kind, columnwise=columnwise,
                                                   rstd=rstd), strict=True):
            assert_bytes_equal(a, b)


@pytest.mark.parametrize("how", [None, MX])
@pytest.mark.parametrize("columns", [96, 57], ids=["wide", "any"])
def test_dbias_is_that_of_a_cast(run, how, columns):
    """By another kernel."""
    grad, x, _, weight, _ = arrays(run, (300, columns), bfloat16)
    _, _, dbias = fp8.norm_backward_quantize(grad, x, weight, how, kind="layer")
    assert_bytes_equal(run.numpy(dbias), run.numpy(fp8.quantize_tensor(grad, 1.0, dbias=True).dbias))


def test_edges(run):
    """A row with Inf, one whose squares overflow, one of zeros, and one with NaN."""
    x = np.ones((4, 8), float32)
    x[0, 0], x[1, :2], x[2], x[3, 7] = np.inf, (3e38, -1), -0.0, np.nan
    made = fp8.norm_quantize(run.array(x), run.array(np.ones(8, float32)), DELAYED, scale=1.0, eps=0.0,
                             return_rstd=True)
    codes, rstd = run.numpy(made[0]).data.view(np.uint8), run.numpy(made[1])
    assert codes.tolist() == [[0x7F] + [0] * 7, [0, 0x80] + [0] * 6, [0x7F] * 8, [0x7F] * 8]
    assert_bytes_equal(rstd, np.array([0, 0, np.inf, np.nan], float32))
