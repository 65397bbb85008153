"""Quality of the scaling-aware transpose: errors and unchanged values on two distributions, and the defects
of the published bit trick."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8.arrays import bits
from cupy_fp8.formats import float8_e4m3fn
from cupy_fp8.reference.numerics import floor_to_power_of_two, narrow, widen
from cupy_fp8.results import Scaled

BLOCK = 128


def quantize_rows(x: np.ndarray, pow2: bool = True) -> Scaled:
    """Quantise a float32 array in blocks of 1 x 128 by TransformerEngine's rule."""
    rows, columns = x.shape
    amax = np.abs(x).reshape(rows, columns // BLOCK, BLOCK).max(axis=-1)
    with np.errstate(divide="ignore"):
        scale = np.where(amax == 0, np.float32(1), np.float32(448) / amax)
    scale = floor_to_power_of_two(scale) if pow2 else scale
    data = narrow(x * np.repeat(scale, BLOCK, axis=1), float8_e4m3fn)
    return Scaled(data, np.float32(1) / scale, x.shape, False, (1, BLOCK), "compact")


def row_values(s: Scaled) -> np.ndarray:
    return widen(s.data) * np.repeat(s.scale_inv, BLOCK, axis=1)


def column_values(s: Scaled) -> np.ndarray:
    """Return the column-wise values in the logical shape."""
    return widen(s.data).T * np.repeat(s.scale_inv, BLOCK, axis=0)[: s.shape[0], : s.shape[1]]


def transposed(q: Scaled, target: Any = "column") -> Scaled:
    result = fp8.scaling_aware_transpose(q, target=target, scale_layout="compact").columnwise
    assert result is not None
    return result


def bit_trick(q: Scaled) -> Scaled:
    """Do what the published kernel does, by its description: the exponent field decreases by the difference
    of scales, down to 0, mantissa bits stay; codes of exponent field 0 become 0; a tile's largest scale
    counts whatever its row holds."""
    rows, columns = q.shape
    tiles = q.scale_inv.reshape(rows // BLOCK, BLOCK, columns // BLOCK)
    target = np.repeat(tiles.max(axis=1), BLOCK, axis=0)
    k = np.repeat(np.log2(q.scale_inv / target).astype(np.int64), BLOCK, axis=1)
    code = bits(q.data).astype(np.int64)
    field = code >> 3 & 15
    moved = np.where(field == 0, 0, np.maximum(field + k, 0) << 3 | code & 7)
    data = (code & 0x80 | moved).astype(np.uint8).view(float8_e4m3fn)
    scale_inv = np.repeat(target[::BLOCK], BLOCK, axis=1)
    return Scaled(np.ascontiguousarray(data.T), scale_inv, q.shape, True, (BLOCK, 1), "compact")


def requantized(x: np.ndarray) -> np.ndarray:
    """Do what the transpose replaces: row-wise with plain f32 scales, dequantised, quantised again
    column-wise."""
    plain = row_values(quantize_rows(x, pow2=False))
    return row_values(quantize_rows(np.ascontiguousarray(plain.T), pow2=False)).T


def relative_error(values: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64) - x) / np.linalg.norm(x.astype(np.float64)))


@functools.cache
def normal() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((4096, 2048), np.float32)


@functools.cache
def gradients() -> np.ndarray:
    """Return heavy-tailed values: Student's t with 3 degrees of freedom, rows of very different size."""
    rng = np.random.default_rng(6)
    return (rng.standard_t(3, (1024, 1024)) * rng.lognormal(0, 2, (1024, 1))).astype(np.float32)


@pytest.mark.full
def test_no_double_quantisation():
    """The column-wise tensor is as good as the row-wise one; requantising is 1.4 times worse."""
    x = normal()
    q = quantize_rows(x)
    once = relative_error(row_values(q), x)
    for target in ("column", "tile"):
        assert relative_error(column_values(transposed(q, target)), x) == pytest.approx(once, rel=0.005)
    twice = relative_error(requantized(x), x)
    assert once == pytest.approx(0.0267, abs=0.0003)
    assert twice == pytest.approx(0.0364, abs=0.0005)


def share_unchanged(q: Scaled, s: Scaled) -> float:
    return float(np.mean(column_values(s) == row_values(q)))


def test_values_unchanged():
    """For heavy-tailed gradients a column's own target keeps most values, the published rule fewest."""
    q = quantize_rows(gradients())
    column, tile, trick = (share_unchanged(q, s) for s in (transposed(q), transposed(q, "tile"),
                                                           bit_trick(q)))
    assert column == pytest.approx(0.96, abs=0.02)
    assert tile == pytest.approx(0.86, abs=0.03)
    assert trick == pytest.approx(0.81, abs=0.04)
    assert column > tile > trick
    inflated = np.abs(column_values(bit_trick(q))) / np.maximum(np.abs(row_values(q)), 1e-30)
    assert inflated[row_values(q) != 0].max() > 1000
    for target in ("column", "tile"):
        ours, given = np.abs(column_values(transposed(q, target))), np.abs(row_values(q))
        # rounding up at most doubles, to the smallest subnormal
        assert (ours <= 2 * given).all()


# ---- the published defects, one by one ----
def two_rows(first: list[int], second: list[int], scale_inv: list[float]) -> Scaled:
    """Return a tile with codes in its first two rows, zeros below."""
    codes = np.zeros((BLOCK, BLOCK), np.uint8)
    codes[0, :len(first)], codes[1, :len(second)] = first, second
    scales = np.full((BLOCK, 1), scale_inv[1], np.float32)
    scales[0] = scale_inv[0]
    return Scaled(codes.view(float8_e4m3fn), scales, (BLOCK, BLOCK), False, (1, BLOCK), "compact")


@pytest.mark.parametrize("target", ["column", "tile"])
def test_mantissa_bits_do_not_survive_underflow(target):
    """1.75 under a scale 2^-30 of the largest vanishes; the bit trick makes 6 steps of 2^-9 of it."""
    q = two_rows([0x38], [0x3E], [1.0, 2.0**-30])
    assert column_values(bit_trick(q))[1, 0] == 6 * 2.0**-9
    assert column_values(transposed(q, target))[1, 0] == 0


@pytest.mark.parametrize("target", ["column", "tile"])
def test_source_subnormals_survive(target):
    q = two_rows([0x05], [0x03], [1.0, 1.0])
    assert not column_values(bit_trick(q)).any()
    assert column_values(transposed(q, target))[:2, 0].tolist() == [5 * 2.0**-9, 3 * 2.0**-9]


@pytest.mark.parametrize("target", ["column", "tile"])
def test_nan_stays_nan(target):
    q = two_rows([0x38, 0x38], [0x7F, 0xFF], [2.0, 1.0])
    assert np.abs(column_values(bit_trick(q))[1, :2]).tolist() == [480.0, 480.0]
    assert bits(transposed(q, target).data)[:2, 1].tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("target", ["column", "tile"])
def test_rows_of_zeros_do_not_dominate(target):
    """Quantisers store the scale 1 for them."""
    q = two_rows([], [0x7E, 0x01, 0x83], [1.0, 2.0**-20])
    assert not column_values(bit_trick(q))[1, 1:].any()
    np.testing.assert_array_equal(column_values(transposed(q, target)), row_values(q))


def test_square_blocks_transpose_without_loss():
    """128 x 128 blocks are rows that share their scale: values stay, bit for bit under target 'tile'."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (256, 256), np.uint8)
    scales = np.repeat(np.array([[0.25, 8], [2.0**-40, 1]], np.float32), BLOCK, axis=0)
    q = Scaled(codes.view(float8_e4m3fn), scales, codes.shape, False, (1, BLOCK), "compact")
    kept = transposed(q, "tile")
    want = np.where(codes & 0x7F == 0x7F, 0x7F, codes)
    np.testing.assert_array_equal(bits(kept.data), want.T)
    np.testing.assert_array_equal(kept.scale_inv, np.repeat(scales[::BLOCK], BLOCK, axis=1))
    np.testing.assert_array_equal(column_values(transposed(q)), row_values(q))


def test_weight_gradient_error():
    """dW = dy^T x with column-wise operands: the cost of double quantisation."""
    rng = np.random.default_rng(9)
    x, dy = (rng.standard_normal((2048, 256), np.float32) for _ in range(2))
    exact = dy.T.astype(np.float64) @ x

    def product(columns: Any) -> np.ndarray:
        return columns(dy).T.astype(np.float64) @ columns(x)

    aware = relative_error(product(lambda a: column_values(transposed(quantize_rows(a)))), exact)
    twice = relative_error(product(requantized), exact)
    assert aware == pytest.approx(0.0377, abs=0.001)
    assert twice == pytest.approx(0.0515, abs=0.001)
