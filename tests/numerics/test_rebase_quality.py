"""Quality of re-based MX data: errors and changed values on two distributions, compared with quantising
twice."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8.results import Scaled


def relative_error(q: Scaled, x: np.ndarray) -> float:
    return float(np.linalg.norm(q.dequantize().astype(np.float64) - x) / np.linalg.norm(x.astype(np.float64)))


@functools.cache
def weights() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((1024, 2048), np.float32) * np.float32(0.02)


@functools.cache
def gradients() -> np.ndarray:
    """Return heavy-tailed values: Student's t with 3 degrees of freedom, rows of very different size."""
    rng = np.random.default_rng(6)
    return (rng.standard_t(3, (1024, 1024)) * rng.lognormal(0, 2, (1024, 1))).astype(np.float32)


def rebased(x: np.ndarray, block: Any) -> tuple[Scaled, Scaled, float]:
    """Return (MX data, the same in other blocks, the share of values that changed)."""
    q, count = fp8.quantize_mx(x).rowwise, np.zeros(1, np.int64)
    assert q is not None
    r = q.to_block(block, changed=count)
    assert count[0] == np.count_nonzero(r.dequantize() != q.dequantize())
    return q, r, count[0] / x.size


def quantised(x: np.ndarray, block: Any, pow2: bool) -> Scaled:
    found = fp8.quantize_block(x, block=block, pow2_scale=pow2, scale_layout="compact").rowwise
    assert found is not None
    return found


@pytest.mark.parametrize(("values", "block", "share"), [
    (weights, (1, 128), 2.4e-5), (weights, (128, 128), 6.7e-5),
    (gradients, (1, 128), 1.1e-4), (gradients, (128, 128), 0.134)])
def test_as_good_as_mx(values, block, share):
    """Few values change, and those are the small ones of their blocks: the error stays that of MX, and equals
    that of blocks quantised from the values themselves. Dequantising and quantising with f32 scales increases
    it."""
    x = values()
    q, r, changed = rebased(x, block)
    assert changed == pytest.approx(share, rel=0.1)
    once = relative_error(q, x)
    assert relative_error(r, x) == pytest.approx(once, rel=1e-5)
    assert relative_error(quantised(x, block, True), x) == pytest.approx(once, rel=1e-5)
    assert relative_error(quantised(q.dequantize(), block, False), x) > 1.3 * once


def test_changed_values_are_the_smallest():
    """A value changes only if it is below the smallest normal number under its new scale, by at most half the
    distance of subnormals."""
    q, r, _ = rebased(gradients(), (128, 128))
    before, after = q.dequantize().astype(np.float64), r.dequantize().astype(np.float64)
    t = np.repeat(np.repeat(r.scale_inv.astype(np.float64), 128, 0), 128, 1)
    changed = before != after
    assert (np.abs(before) < t * 2.0**-6)[changed].all()
    assert (np.abs(before - after) <= t * 2.0**-10).all()
    assert (np.sign(after) * np.sign(before) >= 0).all()


def test_products_in_f64():
    """The product of re-based weights and activations is as close to the exact one as that of MX data."""
    x, w = weights()[:128], weights()[128:384]
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    (qx, rx, _), (qw, rw, _) = rebased(x, (1, 128)), rebased(w, (128, 128))

    def error(a: Scaled, b: Scaled) -> float:
        product = a.dequantize().astype(np.float64) @ b.dequantize().astype(np.float64).T
        return float(np.linalg.norm(product - exact) / np.linalg.norm(exact))

    assert error(rx, rw) == pytest.approx(error(qx, qw), rel=1e-4)
