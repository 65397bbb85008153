"""scaling_aware_transpose: values, against a second definition in exact arithmetic and over all ratios of
scales."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from power_of_two_rows import NAN, exponent_of, nearest_code, parts, scaled, transposed, value_of

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import FORMATS, FP8_DTYPES, float8_e4m3fn, float8_e5m2
from cupy_fp8.kernels import errors
from cupy_fp8.ops.convert import scaling_aware
from cupy_fp8.results import Quantized


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("spread", [3, 40, 127])
def test_columns_in_exact_arithmetic(dtype, spread):
    rng = np.random.default_rng(spread)
    codes = rng.integers(0, 256, (9, 24), np.uint8)
    codes[rng.random(codes.shape) < 0.4] &= 0x8F            # these become small
    codes[:, 5] &= 0x80
    codes[(codes & 0x7C) == 0x7C] &= 0xBF                   # leaves neither Inf nor NaN, except for a few
    codes[4, 7] = NAN
    exponents = rng.integers(-spread, spread, (9, 1), endpoint=True)
    got = transposed(scaled(codes, exponents, dtype), testing.Executor("reference"), scale_layout="compact")
    for c in range(codes.shape[1]):
        v = [value_of(int(code), dtype) if int(code) != NAN else None for code in codes[:, c]]
        products = [abs(x) * Fraction(2)**int(e) for x, e in zip(v, exponents[:, 0], strict=True) if x]
        t = exponent_of(products, dtype)
        assert got.scale_inv[0, c] == np.ldexp(1.0, t)
        for r, x in enumerate(v):
            k = int(exponents[r, 0]) - t
            want = NAN if x is None else nearest_code(x * Fraction(2)**k, dtype) | int(codes[r, c]) & 0x80
            assert bits(got.data)[c, r] == want, (r, c)


@pytest.mark.full
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
def test_every_code_by_every_ratio_down(dtype, run):
    """Target 'tile': 1.0 under the largest scale gives k = 0 to -254 for all other rows, with every code in
    each."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (3 * 128, 1))
    exponents = np.empty((3 * 128, 2), np.int64)
    for tile, top in enumerate((127, 0, 127)):
        below = np.arange(128) + (127 if tile == 2 else 0)
        exponents[tile * 128:][:128] = (top - below)[:, None]
        if tile == 2:
            exponents[tile * 128] = top
    got = transposed(scaled(codes, exponents, dtype), run, target="tile")
    v = codes.view(dtype).astype(np.float64)
    for tile, top in enumerate((127, 0, 127)):
        rows = slice(tile * 128, tile * 128 + 128)
        assert (got.scale_inv[tile] == np.ldexp(1.0, top)).all()
        with np.errstate(over="ignore"):
            want = reference.numerics.narrow(np.ldexp(v[rows], exponents[rows, :1] - top).astype(np.float32),
                                             dtype)
        np.testing.assert_array_equal(bits(got.data).T[rows], bits(want))


@pytest.mark.full
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("block", [128, 32])
def test_every_code_alone_in_its_column(dtype, block, run):
    """Target 'column': the others are zeros of both signs under any scale, up to 2^254 times the target. The
    value is unchanged, unless the target cannot be low enough."""
    power = np.concatenate([np.arange(-127, 128), [127]])
    codes = np.zeros((256 * block, 256), np.uint8)
    codes[1::2] = 0x80
    exponents = np.full((256 * block, 256 // block), 127)
    exponents[2::block] = -127
    rows = np.arange(256) * block + 5
    codes[rows] = np.arange(256)
    exponents[rows] = power[:, None]
    got = transposed(scaled(codes, exponents, dtype, block), run)
    v = np.abs(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64))
    finite = np.isfinite(v) & (v != 0)
    t = np.log2(got.scale_inv.astype(np.float64)[:, :256])
    products = np.ldexp(v[finite], power[:, None])
    want = np.clip(np.ceil(np.log2(products / FORMATS[dtype].max)), -127, 127)
    np.testing.assert_array_equal(t[:, finite], want)
    np.testing.assert_array_equal(t[:, v == 0], np.zeros((256, 2)))
    np.testing.assert_array_equal(t[:, np.isnan(v)], np.zeros((256, np.isnan(v).sum())))
    np.testing.assert_array_equal(t[:, np.isinf(v)], np.full((256, np.isinf(v).sum()), 127))
    values = np.ldexp(np.abs(got.data.T[rows].astype(np.float64)), t.astype(int))
    np.testing.assert_array_equal(values[:, finite][want > -127], products[want > -127])
    others = np.delete(bits(got.data).T, rows, axis=0)
    np.testing.assert_array_equal(others, np.delete(codes, rows, axis=0))


def test_largest_products_by_hand(run):
    """1.75 times a power of two needs its own exponent, 1.875 the next; Inf the largest; NaN and zeros
    none."""
    codes = np.zeros((3, 128), np.uint8)
    codes[0, :4] = 0x7E, 0x77, 0x76, 0x01                   # 448, 240, 224, 2^-9
    codes[1, :5] = 0x80, 0, 0x7F, 0, 0xFF
    got = transposed(scaled(codes, np.array([[-5], [100], [-5]]), float8_e4m3fn), run)
    assert np.log2(got.scale_inv[0, :5]).tolist() == [-5, -5, -6, -22, 0]
    assert bits(got.data)[:5, 0].tolist() == [0x7E, 0x77, 0x7E, 0x78, 0]
    assert bits(got.data)[:5, 1].tolist() == [0x80, 0, 0x7F, 0, 0x7F]
    codes[0, :2] = 0x7B, 0x7C
    got = transposed(scaled(codes[:, :128], np.array([[-5], [0], [-5]]), float8_e5m2), run)
    assert np.log2(got.scale_inv[0, :2]).tolist() == [-5, 127]
    assert bits(got.data)[1, 0] == 0x7B


# ---- blocks whose rows differ too much for one arithmetic ----
@pytest.mark.full
@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("step", [1, 2, 3, 12, 13, 30])
def test_rows_that_differ(dtype, block, step, run):
    """Neighbouring rows differ by 2^step, so that every path through the kernel is taken, in tiles with
    sparse columns too."""
    rng = np.random.default_rng(step)
    codes = rng.integers(0, 256, (260, 136), np.uint8)
    codes[rng.random(codes.shape) < 0.9] &= 0x81
    codes[:, ::3] &= 0x83
    exponents = np.clip(-(np.arange(260) * step % 250)[:, None] + 120 + rng.integers(-1, 2,
                                                                                     (260, -(-136 // block))),
                                                                                     -127, 127)
    q = scaled(codes, exponents, dtype, block)
    for target in scaling_aware.TARGETS:
        options: dict[str, Any] = {"splits": [130, 0, 7, 123], "target": target}
        testing.assert_bytes_equal(run.numpy(fp8.scaling_aware_transpose(run.array(q), **options)),
                                   reference.scaling_aware_transpose(q, **options))


@pytest.mark.parametrize("block", [128, 32])
def test_a_tile_with_a_single_value(block, run):
    """Wherever it is, its row's scale is the target; NaN is a value."""
    tiles = 32
    codes, exponents = np.zeros((tiles * block, block), np.uint8), np.full((tiles * block, 1), 5)
    for i in range(tiles):
        row = i * block + (i * 5 + 3) % block
        codes[row, i * block // tiles + i % (block // tiles)] = NAN if i % 3 == 0 else 0x81
        exponents[row] = -i - 1
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target="tile")
    powers = np.log2(got.scale_inv.astype(np.float64))
    np.testing.assert_array_equal(powers[:, :block], np.repeat(-1.0 - np.arange(tiles)[:, None], block,
                                                               axis=1))
    np.testing.assert_array_equal(bits(got.data).T, codes)


# ---- scales that are no powers of two, zero, or NaN ----
WRONG = [3.0, -0.0, -1.0, float("inf"), float("nan"), 1.0000001, 2.0**-126 * 1.5, 3 * 2.0**-149]


@pytest.mark.parametrize("target", scaling_aware.TARGETS)
@pytest.mark.parametrize("wrong", WRONG)
# so few rows make strips that are below one another in a tile
@pytest.mark.parametrize("rows", [140, 50, 20])
def test_scales_that_are_no_powers_of_two(rows, wrong, target, run, monkeypatch):
    """NumPy scales are checked and refused. On the device the row-block becomes NaN, the scales of its tile
    become NaN, and all else is unchanged."""
    rng = np.random.default_rng(4)
    codes, exponents = rng.integers(0, 0x78, (rows, 300), np.uint8), rng.integers(-9, -3, (rows, 3))
    q = scaled(codes, exponents, float8_e4m3fn)
    q.scale_inv[9, 1] = wrong
    if run.name != "cuda":
        with pytest.raises(ValueError, match=re.escape("q.scale_inv: expected powers of two, got "
                                                       f"{np.float32(wrong)} at (9, 1)")):
            fp8.scaling_aware_transpose(run.array(q), target=target)
        monkeypatch.setattr(scaling_aware, "_check_scales", lambda *_: None)
    got = run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target))
    assert fp8.device_errors(clear=True) == (() if run.name == "reference"
                                             else (errors.MESSAGES[errors.Fact.SCALE_NOT_POWER_OF_TWO],))
    testing.assert_bytes_equal(got, reference.scaling_aware_transpose(q, target=target))
    nan_codes = codes.copy()
    nan_codes[9, 128:256] = 0                               # this row does not affect targets
    right = transposed(scaled(nan_codes, exponents, float8_e4m3fn), testing.Executor("reference"),
                       target=target)
    data, scales = bits(got.columnwise.data), got.columnwise.scale_inv
    assert (data[128:256, 9] == NAN).all()
    assert (scales[0, 128:256].view(np.uint32) == 0x7FC00000).all()
    data[128:256, 9] = bits(right.data)[128:256, 9]
    np.testing.assert_array_equal(data, bits(right.data))
    scales[0, 128:256] = right.scale_inv[0, 128:256]
    np.testing.assert_array_equal(scales, right.scale_inv)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
@pytest.mark.parametrize("span", [3, 60])
def test_scales_of_zero(span, target, dtype, run):
    """Rows with scale 0 are rows of zeros, whatever their codes."""
    rng = np.random.default_rng(span)
    codes, exponents = rng.integers(0, 256, (300, 260), np.uint8), rng.integers(-span, 1, (300, 3))
    q, empty = scaled(codes, exponents, dtype), rng.random((300, 3)) < 0.3
    empty[128:256, 0] = True                                # a whole tile is empty
    q.scale_inv[empty] = 0
    got = transposed(q, run, target=target)
    assert fp8.device_errors(clear=True) == ()
    elements = np.repeat(empty, 128, axis=1)[:, :260]
    finite = np.isfinite(q.data.astype(np.float32))
    rest = codes.copy()
    rest[elements & finite] &= 0x80
    rest[elements & ~finite] = 0x7F
    exponents[empty] = 0
    want = transposed(scaled(rest, exponents, dtype), testing.Executor("reference"),
                      target="column") if target == "column" else None
    if want is not None:
        np.testing.assert_array_equal(bits(got.data), bits(want.data))
        np.testing.assert_array_equal(got.scale_inv, want.scale_inv)
    assert (bits(got.data).T[elements & finite] == (codes & 0x80)[elements & finite]).all()
    assert (bits(got.data).T[elements & ~finite] == NAN).all()
    assert (got.scale_inv[1, :128] == 1).all()
    testing.assert_bytes_equal(run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target)),
                reference.scaling_aware_transpose(q, target=target))


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
def test_one_row_with_scale_1_among_small_ones(target, block, run):
    """Usually such a row is all zeros and does not affect the target. This one is not."""
    codes, exponents = np.full((130, 48), 0x38, np.uint8), np.full((130, -(-48 // block)), -20)
    exponents[5] = 0
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target=target)
    powers = np.log2(got.scale_inv[5 // block, :48].astype(np.float32))
    assert (powers == (-8 if target == "column" else 0)).all()              # 1 is 256 * 2^-8
    assert (bits(got.data)[:, 5] == (0x78 if target == "column" else 0x38)).all()
    assert (bits(got.data)[:, :5] == 0).all()                               # it would be 2^-20 or 2^-12
    codes[5] = 0
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target=target)
    assert (bits(got.data)[:, :5] == (0x78 if target == "column" else 0x38)).all()


def test_rows_of_no_expert_may_have_any_scale(run):
    q = scaled(np.full((20, 128), 0x38, np.uint8), np.zeros((20, 1), np.int64), float8_e4m3fn)
    q.scale_inv[15:] = np.nan
    got = transposed(q, run, splits=[7, 8])
    assert fp8.device_errors(clear=True) == ()
    testing.assert_bytes_equal(Quantized(q, got), Quantized(q, parts(reference.scaling_aware_transpose(q,
                                                                                        splits=[7, 8]))[1]))
    with pytest.raises(ValueError, match=r"^q.scale_inv: expected powers of two, got nan at \(15, 0\)"):
        fp8.scaling_aware_transpose(q, splits=[7, 9])


def test_subnormal_scales_are_powers_of_two(run):
    codes = np.full((130, 8), 0x38, np.uint8)
    q = scaled(codes, np.resize(np.arange(-149, -120), (130, 1)), float8_e5m2)
    for target in scaling_aware.TARGETS:
        want = reference.scaling_aware_transpose(q, target=target)
        testing.assert_bytes_equal(run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target)), want)


def test_nan_scales_of_mx(run):
    """E8M0's NaN is a value: its block is NaN, the targets ignore it."""
    q = scaled(np.full((40, 32), 0x38, np.uint8), np.full((40, 1), -3), float8_e4m3fn, 32)
    bits(q.scale_inv)[7] = 255
    for target in scaling_aware.TARGETS:
        got = transposed(q, run, target=target)
        assert (bits(got.data)[:, 7] == NAN).all()
        assert (bits(got.data)[:, 6] == (0x78 if target == "column" else 0x38)).all()
        assert (bits(got.scale_inv) == (127 - 3 - 8 if target == "column" else 124)).all()


def test_dequantize(run):
    q = scaled(np.random.default_rng(1).integers(0, 0x78, (140, 260), np.uint8), np.zeros((140, 3), np.int64),
               float8_e4m3fn)
    given = run.array(q)
    for part_of_it in parts(fp8.scaling_aware_transpose(given)):
        testing.assert_bytes_equal(part_of_it.dequantize(), given.dequantize())     # its values fit
