"""grouped_matmul_nt with a bias for each group, multiplied by row weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import product_kernels
import pytest
from product_operands import integers, scaled

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, cases, reference, testing
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float32
from cupy_fp8.ops.matmul import align_rows

SPLITS = np.array([0, 37, 0, 200, 8, 0], np.int64)
TOTAL, N = 250, 136                                     # five rows belong to no group
OF_ROWS = np.append(np.repeat(np.arange(6), SPLITS), [-1] * 5)


def biases(dtype: Any = float32, n: int = N) -> np.ndarray:
    """Return small integers."""
    return np.random.default_rng(1).integers(-40, 40, (6, n)).astype(np.float32).astype(dtype)


def weights() -> np.ndarray:
    """Return weights with Inf in rows of no group, which are not read."""
    found = np.random.default_rng(2).integers(-3, 4, TOTAL).astype(np.float32)
    found[OF_ROWS < 0] = np.inf
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [N, 23])
@pytest.mark.parametrize("k", [0, 144, 130])
@pytest.mark.parametrize("kernel", product_kernels.KERNELS)
def test_small_integers_are_exact(kernel, k, n, weighted, run, monkeypatch):
    """Also without products, and where rows are copied first."""
    product_kernels.use(kernel, run, monkeypatch)
    monkeypatch.setattr(align_rows, "worth_copies", lambda problem: problem.k > 0)
    a, b = integers((TOTAL, k), float8_e4m3fn, 6), integers((6, n, k), float8_e4m3fn, 7)
    factors = weights() if weighted else np.ones(TOTAL, np.float32)
    added = biases(n=n)[OF_ROWS] * np.where(OF_ROWS < 0, 0, factors).astype(np.float32)[:, None]
    want = reference.grouped_matmul_nt(a, b, SPLITS, dtype=float32) + added
    given = {"bias_weights": run.array(factors)} if weighted else {}
    for dtype in INPUT_DTYPES:
        got = fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(SPLITS), dtype=float32,
                                    bias=run.array(biases(dtype, n)), **given)
        testing.assert_bytes_equal(fp8.asnumpy(got) + np.float32(0), want + np.float32(0))


@pytest.mark.parametrize("kernel", product_kernels.KERNELS)
def test_it_is_added_before_rounding(kernel, run, monkeypatch):
    """1 + w, rounded once: a bfloat16 has neither 1 + 2^-9 nor 1 + 3 · 2^-9."""
    product_kernels.use(kernel, run, monkeypatch)
    ones = np.ones((4, 16), float8_e4m3fn)
    a, b = (Scaled(x, np.array([0.25], np.float32), x.shape) for x in (ones, ones[None, :1]))
    bias = np.array([[1]], np.float32)
    factors = np.array([2.0**-9, 3 * 2.0**-9, 2.0**-7, 2.0**-8], np.float32)
    got = fp8.grouped_matmul_nt(run.array(a), run.array(b), [4], bias=run.array(bias),
                                bias_weights=run.array(factors))
    want = (1 + factors).astype(bfloat16)[:, None]
    testing.assert_bytes_equal(got, want)


def test_the_reference_by_hand():
    a, b = scaled((TOTAL, 64), "vector", 1), scaled((6, N, 64), "block", 2)
    bias, factors = cases.values("normal", (6, N), bfloat16, 3), cases.values("normal", (TOTAL,), float32, 4)
    got = reference.grouped_matmul_nt(a, b, SPLITS, dtype=float32, bias=bias, bias_weights=factors)
    for row, e in enumerate(OF_ROWS):
        want = 0.0
        if e >= 0:
            want = b.dequantize(np.float32)[e].astype(np.float64) @ a.dequantize(np.float32)[row]
            want = want + factors[row] * bias[e].astype(np.float64)
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-4)


def test_special_values_of_other_groups_stay_there(run):
    a, b = integers((TOTAL, 48), float8_e4m3fn, 1), integers((6, N, 48), float8_e4m3fn, 2)
    bias = biases()
    want = reference.grouped_matmul_nt(a, b, SPLITS, dtype=float32, bias=bias)
    bias[[0, 2, 4, 5]] = np.nan
    got = fp8.asnumpy(fp8.grouped_matmul_nt(run.array(a), run.array(b), run.array(SPLITS), dtype=float32,
                                            bias=run.array(bias)))
    assert np.isnan(got[OF_ROWS == 4]).all()
    testing.assert_bytes_equal(got[OF_ROWS != 4] + np.float32(0), want[OF_ROWS != 4] + np.float32(0))


A, B = scaled((TOTAL, 200), "vector", 1), scaled((6, N, 200), "block", 2)
COLUMNS = scaled((N, TOTAL), "row", 1)
BIAS, WEIGHTS = biases(), weights()


@pytest.mark.parametrize(("error", "message", "args", "options"), [
    (ValueError, "bias: expected shape (6, 136), a value for each row of each group's b, got (136,)",
     (A, B, SPLITS), {"bias": BIAS[0]}),
    (TypeError, "bias: expected dtype bfloat16, float16, float32, got float64", (A, B, SPLITS),
     {"bias": BIAS.astype(np.float64)}),
    (ValueError, "bias_weights: expected shape (250,), one for each row of a, got (249,)", (A, B, SPLITS),
     {"bias": BIAS, "bias_weights": WEIGHTS[1:]}),
    (TypeError, "bias_weights: expected dtype float32, got bfloat16", (A, B, SPLITS),
     {"bias": BIAS, "bias_weights": WEIGHTS.astype(bfloat16)}),
    (ValueError, "bias_weights: expected None without a bias", (A, B, SPLITS), {"bias_weights": WEIGHTS}),
    (ValueError, "bias: expected None for group='k', whose products have no rows of groups, got an array; "
     "group_sums makes gradients of biases", (COLUMNS, COLUMNS, SPLITS), {"group": "k", "bias": BIAS}),
    (ValueError, "bias: expected None beside accumulate, whose rows have theirs", (A, B, SPLITS),
     {"bias": BIAS, "accumulate": np.zeros((TOTAL, N), np.float32)}),
])
def test_refused(error, message, args, options):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        fp8.grouped_matmul_nt(*args, **options)
