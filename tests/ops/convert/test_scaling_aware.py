"""scaling_aware_transpose: against exact arithmetic by another way, over all ratios of scales, and what is wrong on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scale_arrays import guarded

import cupy_fp8 as fp8
from cupy_fp8 import backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls import splits as sizes_of_groups
from cupy_fp8.formats import FORMATS, FP8_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu
from cupy_fp8.kernels import errors
from cupy_fp8.ops.convert import scaling_aware
from cupy_fp8.results import Quantized, Scaled

NAN = 0x7F


def scaled(codes: np.ndarray, exponents: np.ndarray, dtype: np.dtype, block: int = 128) -> Scaled:
    """Row-wise data with scales 2^exponents."""
    scale_inv: np.ndarray = np.ldexp(np.float32(1), exponents.astype(np.int32))
    if block == 32:
        scale_inv = (exponents + 127).astype(np.uint8).view(float8_e8m0fnu)
    return Scaled(codes.view(dtype), scale_inv, codes.shape, False, (1, block), "compact")


def parts(result: Quantized) -> tuple[Scaled, Scaled]:
    """(row-wise, column-wise)."""
    assert result.rowwise is not None
    assert result.columnwise is not None
    return result.rowwise, result.columnwise


def transposed(q: Scaled, run: testing.Executor, **options: Any) -> Scaled:
    return parts(run.numpy(fp8.scaling_aware_transpose(run.array(q), **options)))[1]


def assert_same(actual: Quantized, desired: Quantized) -> None:
    for mine, want in zip(parts(actual), parts(desired), strict=True):
        testing.assert_bytes_equal(mine.data, want.data)
        testing.assert_bytes_equal(mine.scale_inv, want.scale_inv)


# ---- another way: fractions, and the nearest code by a search ----
def value_of(code: int, dtype: np.dtype) -> float:
    return float(np.array([code], np.uint8).view(dtype).astype(np.float32)[0])


def nearest_code(v: Fraction, dtype: np.dtype) -> int:
    codes = range(0x7F if dtype == float8_e4m3fn else 0x7C)
    return min(codes, key=lambda c: (abs(Fraction(value_of(c, dtype)) - abs(v)), c & 1))


def column_exponent(values: list[Fraction], dtype: np.dtype) -> int:
    if not values:
        return 0
    e = -400
    while Fraction(2)**e * Fraction(FORMATS[dtype].max) < max(values):
        e += 1
    return min(max(e, -127), 127)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("spread", [3, 40, 127])
def test_columns_in_exact_arithmetic(dtype, spread):
    rng = np.random.default_rng(spread)
    codes = rng.integers(0, 256, (9, 24), np.uint8)
    codes[rng.random(codes.shape) < 0.4] &= 0x8F            # small ones
    codes[:, 5] &= 0x80
    codes[(codes & 0x7C) == 0x7C] &= 0xBF                   # neither Inf nor NaN, but for a few
    codes[4, 7] = NAN
    exponents = rng.integers(-spread, spread, (9, 1), endpoint=True)
    got = transposed(scaled(codes, exponents, dtype), testing.Executor("reference"), scale_layout="compact")
    for c in range(codes.shape[1]):
        v = [Fraction(value_of(int(code), dtype)) if int(code) != NAN else None for code in codes[:, c]]
        products = [abs(x) * Fraction(2)**int(e) for x, e in zip(v, exponents[:, 0], strict=True) if x]
        t = column_exponent(products, dtype)
        assert got.scale_inv[0, c] == np.ldexp(1.0, t)
        for r, x in enumerate(v):
            k = int(exponents[r, 0]) - t
            want = NAN if x is None else nearest_code(x * Fraction(2)**k, dtype) | int(codes[r, c]) & 0x80
            assert bits(got.data)[c, r] == want, (r, c)


@pytest.mark.full
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
def test_every_code_by_every_ratio_down(dtype, run):
    """Target 'tile': 1.0 under the largest scale makes k = 0 to -254 for all other rows, every code in each."""
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
            want = reference.numerics.narrow(np.ldexp(v[rows], exponents[rows, :1] - top).astype(np.float32), dtype)
        np.testing.assert_array_equal(bits(got.data).T[rows], bits(want))


@pytest.mark.full
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("block", [128, 32])
def test_every_code_alone_in_its_column(dtype, block, run):
    """Target 'column': the others are zeros of both signs under any scale, up to 2^254 times the target. The value stays, unless
    the target cannot go low enough."""
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
    """1.75 times a power of two needs its own exponent, 1.875 the next; Inf the largest; NaN and zeros none."""
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


# ---- patches whose rows differ too much for one arithmetic ----
@pytest.mark.full
@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("step", [1, 2, 3, 12, 13, 30])
def test_rows_that_differ(dtype, block, step, run):
    """Neighbouring rows 2^step apart, so that every way through the kernel is taken, in tiles with sparse columns too."""
    rng = np.random.default_rng(step)
    codes = rng.integers(0, 256, (260, 136), np.uint8)
    codes[rng.random(codes.shape) < 0.9] &= 0x81
    codes[:, ::3] &= 0x83
    exponents = np.clip(-(np.arange(260) * step % 250)[:, None] + 120 + rng.integers(-1, 2, (260, -(-136 // block))), -127, 127)
    q = scaled(codes, exponents, dtype, block)
    for target in scaling_aware.TARGETS:
        assert_same(run.numpy(fp8.scaling_aware_transpose(run.array(q), splits=[130, 0, 7, 123], target=target)),
                    reference.scaling_aware_transpose(q, splits=[130, 0, 7, 123], target=target))


@pytest.mark.parametrize("block", [128, 32])
def test_a_tile_with_a_single_value(block, run):
    """Wherever it is, its row's scale is the target; NaN is a value."""
    tiles = 32
    codes, exponents = np.zeros((tiles * block, block), np.uint8), np.full((tiles * block, 1), 5)
    for i in range(tiles):
        row = i * block + (i * 5 + 3) % block
        codes[row, i * block // tiles + i % (block // tiles)], exponents[row] = (NAN if i % 3 == 0 else 0x81), -i - 1
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target="tile")
    powers = np.log2(got.scale_inv.astype(np.float64))
    np.testing.assert_array_equal(powers[:, :block], np.repeat(-1.0 - np.arange(tiles)[:, None], block, axis=1))
    np.testing.assert_array_equal(bits(got.data).T, codes)


# ---- experts ----
def test_experts_by_hand(run):
    """Every expert is a call of its own, one after the other; the tail of the scales is 0."""
    rng = np.random.default_rng(1)
    codes, exponents = rng.integers(0, 0x78, (300, 40), np.uint8), rng.integers(-9, -3, (300, 1))
    q, ranges = scaled(codes, exponents, float8_e4m3fn), [(0, 130), (130, 130), (130, 137), (137, 300)]
    got = run.numpy(fp8.scaling_aware_transpose(run.array(q), splits=[130, 0, 7, 163]))
    parts = [transposed(scaled(codes[a:b], exponents[a:b], float8_e4m3fn), testing.Executor("reference")) for a, b in ranges]
    assert got.columnwise.data.shape == (300 * 40,)
    assert got.columnwise.scale_inv.shape == ((300 + 127 * 4) // 128, 40)
    np.testing.assert_array_equal(bits(got.columnwise.data), np.concatenate([bits(part.data).reshape(-1) for part in parts]))
    scales = np.concatenate([part.scale_inv for part in parts])
    np.testing.assert_array_equal(got.columnwise.scale_inv[:len(scales)], scales)
    assert not got.columnwise.scale_inv[len(scales):].any()
    assert got.rowwise.scale_inv.shape == ((300 + 3 * 4) // 4 * 4,)
    row_scales = np.concatenate([np.pad(q.scale_inv[a:b, 0], (0, -(b - a) % 4)) for a, b in ranges])
    np.testing.assert_array_equal(got.rowwise.scale_inv[:len(row_scales)], row_scales)
    assert not got.rowwise.scale_inv[len(row_scales):].any()


@pytest.mark.parametrize("scale_layout", ["compact", "gemm_ready"])
@pytest.mark.parametrize("held", ["compact", "gemm_ready"])
@pytest.mark.parametrize("shape", [(300, 200), (3, 140, 260), (1, 1), (0, 130), (130, 0)], ids=str)
def test_blocks_of_128_x_128_are_transposed_as_they_are(shape, held, scale_layout, run):
    """Whatever the scales and the codes: nothing is computed."""
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    q = fp8.quantize_block(x, block=(128, 128), pow2_scale=False, scale_layout=held).rowwise
    assert q is not None
    bits(q.data)[...] = np.random.default_rng(4).integers(0, 256, shape, np.uint8)
    want = reference.quantize_block(x, block=(128, 128), pow2_scale=False, scale_layout=scale_layout, rowwise=False, columnwise=True)
    assert want.columnwise is not None
    given = run.array(q)
    result = fp8.scaling_aware_transpose(given, scale_layout=scale_layout)
    assert parts(result)[0] is given
    row, column = parts(run.numpy(result))
    testing.assert_bytes_equal(column.data, np.swapaxes(q.data, -1, -2).copy())
    testing.assert_bytes_equal(column.scale_inv, want.columnwise.scale_inv)
    assert (column.shape, column.transposed, column.block, column.scale_layout) == (shape, True, (128, 128), scale_layout)
    testing.assert_bytes_equal(column.dequantize(), row.dequantize())
    assert_same(reference.scaling_aware_transpose(q, scale_layout=scale_layout), run.numpy(result))
    wanted = column.data.copy(), column.scale_inv.copy()
    for written in parts(result)[1]:
        bits(written)[...] = 0
    assert fp8.scaling_aware_transpose(given, scale_layout=scale_layout, out=result) is result
    for mine, desired in zip(parts(run.numpy(result))[1], wanted, strict=True):
        testing.assert_bytes_equal(mine, desired)
    if q.data.size:
        another = Scaled(run.array(q.data.copy()), given.scale_inv, shape, False, (128, 128), held)
        with pytest.raises(ValueError, match=r"^out\.rowwise: expected q itself"):
            fp8.scaling_aware_transpose(another, scale_layout=scale_layout, out=result)


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("splits", [[100, 0, 150], [100, 0, 201], [0, 0], [100, -1, 200], [301], [299, 50, 50, 1], [1] * 299, [148, 20],
                                    [2**62, 2**62, -(2**63), 5], [], [1] * 300, [300, 300]], ids=lambda s: f"{s[:4]}…{len(s)}")
def test_wrong_splits_are_harmless_and_noted(splits, block, run, monkeypatch):
    monkeypatch.setattr(sizes_of_groups, "check_at_most", lambda *_: None)
    rng = np.random.default_rng(2)
    q = scaled(rng.integers(0, 0x78, (300, 136), np.uint8), rng.integers(-9, -3, (300, -(-136 // block))), float8_e4m3fn, block)
    host = np.array(splits, np.int64)
    assert_same(run.numpy(fp8.scaling_aware_transpose(run.array(q), splits=run.array(host))),
                reference.scaling_aware_transpose(q, splits=host))
    found = fp8.device_errors(clear=True)
    wrong = sum(size for size in splits if size > 0) > 300 or min(splits, default=0) < 0
    assert bool(found) == (wrong and run.name != "reference")


# ---- scales that are no powers of two ----
WRONG = [3.0, -0.0, -1.0, float("inf"), float("nan"), 1.0000001, 2.0**-126 * 1.5, 3 * 2.0**-149]


@pytest.mark.parametrize("target", scaling_aware.TARGETS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("rows", [140, 50, 20])            # so few that strips are below one another in a tile
def test_scales_that_are_no_powers_of_two(rows, wrong, target, run, monkeypatch):
    """Refused where they can be looked at. On the device: the row-block becomes NaN, the scales of its tile NaN, all else stays."""
    rng = np.random.default_rng(4)
    codes, exponents = rng.integers(0, 0x78, (rows, 300), np.uint8), rng.integers(-9, -3, (rows, 3))
    q = scaled(codes, exponents, float8_e4m3fn)
    q.scale_inv[9, 1] = wrong
    if run.name != "cuda":
        with pytest.raises(ValueError, match=re.escape(f"q.scale_inv: expected powers of two, got {np.float32(wrong)} at (9, 1)")):
            fp8.scaling_aware_transpose(run.array(q), target=target)
        monkeypatch.setattr(scaling_aware._Source, "check_scales", lambda *_: None)
    got = run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target))
    assert fp8.device_errors(clear=True) == (() if run.name == "reference" else (errors.MESSAGES[errors.Fact.SCALE_NOT_POWER_OF_TWO],))
    assert_same(got, reference.scaling_aware_transpose(q, target=target))
    nan_codes = codes.copy()
    nan_codes[9, 128:256] = 0                               # takes no part in targets
    right = transposed(scaled(nan_codes, exponents, float8_e4m3fn), testing.Executor("reference"), target=target)
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
    """Rows with scale 0 are rows of zeros, whatever they hold."""
    rng = np.random.default_rng(span)
    codes, exponents = rng.integers(0, 256, (300, 260), np.uint8), rng.integers(-span, 1, (300, 3))
    q, empty = scaled(codes, exponents, dtype), rng.random((300, 3)) < 0.3
    empty[128:256, 0] = True                                # nothing in a whole tile
    q.scale_inv[empty] = 0
    got = transposed(q, run, target=target)
    assert fp8.device_errors(clear=True) == ()
    elements = np.repeat(empty, 128, axis=1)[:, :260]
    finite = np.isfinite(q.data.astype(np.float32))
    rest = codes.copy()
    rest[elements & finite] &= 0x80
    rest[elements & ~finite] = 0x7F
    exponents[empty] = 0
    want = transposed(scaled(rest, exponents, dtype), testing.Executor("reference"), target="column") if target == "column" else None
    if want is not None:
        np.testing.assert_array_equal(bits(got.data), bits(want.data))
        np.testing.assert_array_equal(got.scale_inv, want.scale_inv)
    assert (bits(got.data).T[elements & finite] == (codes & 0x80)[elements & finite]).all()
    assert (bits(got.data).T[elements & ~finite] == NAN).all()
    assert (got.scale_inv[1, :128] == 1).all()
    assert_same(run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target)), reference.scaling_aware_transpose(q, target=target))


@pytest.mark.parametrize("recipe", [fp8.BlockScaling(scale_layout="compact"), fp8.MXScaling(scale_layout="compact")],
                         ids=lambda r: type(r).__name__)
def test_after_permuting(recipe, run):
    """Quantised, permuted and padded in FP8, transposed by expert, scales as matrix products want them: unused rows, whose scale is 0,
    and rows of no expert take no part in anything."""
    rng = np.random.default_rng(2)
    x, chosen = rng.standard_normal((70, 256), np.float32), rng.integers(0, 4, (70, 2))
    r = fp8.route(run.array(chosen), num_experts=4, align=16)
    q = recipe.quantize(run.array(x)).rowwise
    rows = fp8.permute(q, r)
    got = run.numpy(fp8.scaling_aware_transpose(rows, splits=r.aligned_splits))
    if q.block == (1, 128):
        assert rows.to_layout("deepgemm_sm100").scale_layout == "deepgemm_sm100"
    else:
        fp8.swizzle_scales(rows.scale_inv, splits=r.aligned_splits)
    assert fp8.device_errors(clear=True) == ()
    rows, sizes = run.numpy(rows), fp8.asnumpy(r.aligned_splits)
    assert sizes.sum() < len(rows.data)
    assert (bits(rows.scale_inv)[~bits(rows.data).any(axis=1)] == 0).all()
    assert_same(got, reference.scaling_aware_transpose(rows, splits=sizes))
    assert not np.isnan(got.columnwise.scale_inv.astype(np.float32)).any()


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
def test_one_row_with_scale_1_among_small_ones(target, block, run):
    """As a rule such a row is zeros and does not count for what the others are computed from. This one is not."""
    codes, exponents = np.full((130, 48), 0x38, np.uint8), np.full((130, -(-48 // block)), -20)
    exponents[5] = 0
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target=target)
    powers = np.log2(got.scale_inv[5 // block, :48].astype(np.float32))
    assert (powers == (-8 if target == "column" else 0)).all()              # 1 is 256 * 2^-8
    assert (bits(got.data)[:, 5] == (0x78 if target == "column" else 0x38)).all()
    assert (bits(got.data)[:, :5] == 0).all()                               # 2^-20, or 2^-12
    codes[5] = 0
    got = transposed(scaled(codes, exponents, float8_e4m3fn, block), run, target=target)
    assert (bits(got.data)[:, :5] == (0x78 if target == "column" else 0x38)).all()


@pytest.mark.parametrize("splits", [None, [37, 0, 100, 3]])
@pytest.mark.parametrize("lead", [1, 4, 8])
@pytest.mark.parametrize("block", [128, 32])
def test_results_anywhere_in_memory(block, lead, splits, run):
    """At any address that a dtype may have: nothing is written but the results."""
    rng = np.random.default_rng(lead)
    q = scaled(rng.integers(0, 0x78, (140, 256), np.uint8), rng.integers(-9, -3, (140, 256 // block)), float8_e4m3fn, block)
    given = run.array(q)
    made, checked = fp8.scaling_aware_transpose(given, splits=splits), []

    def moved(a: Any) -> Any:
        fresh, intact = guarded(run, a.shape, a.dtype, lead // a.dtype.itemsize * a.dtype.itemsize)
        checked.append(intact)
        return fresh

    row, column = parts(made)
    out = Quantized(row if block == 32 else part(row, scale_inv=moved(row.scale_inv)),
                    part(column, data=moved(column.data), scale_inv=moved(column.scale_inv)))
    assert fp8.scaling_aware_transpose(given, splits=splits, out=out) is out
    assert_same(run.numpy(out), reference.scaling_aware_transpose(q, splits=splits))
    assert all(intact() for intact in checked)


#: Of experts: less than a word, a unit of 16 bytes, a quarter and a half of a tile, a tile; and more, with last tiles of any size.
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 113, 127, 128, 129, 131, 143, 145, 160, 200, 255, 256, 257,
         272, 389)


@pytest.mark.parametrize("columns", [20, 300, 528])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
@pytest.mark.parametrize("block", [128, 32])
def test_experts_of_every_size(block, target, columns, run):
    """Their columns begin at every byte of 16; nothing is written but the results."""
    rng = np.random.default_rng(columns)
    splits = rng.permutation(np.repeat(SIZES, 2 if columns == 20 else 1))
    rows = int(splits.sum()) + 70
    q = scaled(rng.integers(0, 0x78, (rows, columns), np.uint8), rng.integers(-9, -3, (rows, -(-columns // block))), float8_e4m3fn, block)
    given, sizes = run.array(q), run.array(splits)
    row, column = parts(fp8.scaling_aware_transpose(given, splits=sizes, target=target))
    data, intact = guarded(run, column.data.shape, column.data.dtype, columns % 16)
    out = Quantized(row, part(column, data=data))
    fp8.scaling_aware_transpose(given, splits=sizes, target=target, out=out)
    assert_same(run.numpy(out), reference.scaling_aware_transpose(q, splits=splits, target=target))
    assert intact()


def test_rows_of_no_expert_may_have_any_scale(run):
    q = scaled(np.full((20, 128), 0x38, np.uint8), np.zeros((20, 1), np.int64), float8_e4m3fn)
    q.scale_inv[15:] = np.nan
    got = transposed(q, run, splits=[7, 8])
    assert fp8.device_errors(clear=True) == ()
    assert_same(Quantized(q, got), Quantized(q, parts(reference.scaling_aware_transpose(q, splits=[7, 8]))[1]))
    with pytest.raises(ValueError, match=r"^q.scale_inv: expected powers of two, got nan at \(15, 0\)"):
        fp8.scaling_aware_transpose(q, splits=[7, 9])


def test_subnormal_scales_are_powers_of_two(run):
    codes = np.full((130, 8), 0x38, np.uint8)
    q = scaled(codes, np.resize(np.arange(-149, -120), (130, 1)), float8_e5m2)
    for target in scaling_aware.TARGETS:
        want = reference.scaling_aware_transpose(q, target=target)
        assert_same(run.numpy(fp8.scaling_aware_transpose(run.array(q), target=target)), want)


def test_nan_scales_of_mx(run):
    """E8M0's NaN is a value: its block is NaN, the targets ignore it."""
    q = scaled(np.full((40, 32), 0x38, np.uint8), np.full((40, 1), -3), float8_e4m3fn, 32)
    bits(q.scale_inv)[7] = 255
    for target in scaling_aware.TARGETS:
        got = transposed(q, run, target=target)
        assert (bits(got.data)[:, 7] == NAN).all()
        assert (bits(got.data)[:, 6] == (0x78 if target == "column" else 0x38)).all()
        assert (bits(got.scale_inv) == (127 - 3 - 8 if target == "column" else 124)).all()


# ---- results ----
def test_row_wise_part(run):
    q = scaled(np.zeros((5, 130), np.uint8), np.arange(10).reshape(5, 2), float8_e4m3fn)
    given = run.array(q)
    row, column = parts(fp8.scaling_aware_transpose(Quantized(given)))
    assert row.data is given.data
    assert row.scale_layout == "gemm_ready"
    want = np.zeros((2, 8), np.float32)
    want[:, :5] = q.scale_inv.T
    testing.assert_bytes_equal(row.scale_inv, want)
    assert (column.shape, column.block, column.transposed) == ((5, 130), (128, 1), True)
    assert column.scale_inv.shape == (1, 132)
    mx = run.array(scaled(np.zeros((5, 130), np.uint8), np.zeros((5, 5), np.int64), float8_e4m3fn, 32))
    row, column = parts(fp8.scaling_aware_transpose(mx))
    assert row is mx
    assert column.scale_layout == "compact"


def test_dequantize(run):
    q = scaled(np.random.default_rng(1).integers(0, 0x78, (140, 260), np.uint8), np.zeros((140, 3), np.int64), float8_e4m3fn)
    given = run.array(q)
    for part_of_it in parts(fp8.scaling_aware_transpose(given)):
        testing.assert_bytes_equal(part_of_it.dequantize(), given.dequantize())     # whose values fit


Change = Callable[[Scaled, Scaled, Scaled], Any]


def part(s: Scaled, **changes: Any) -> Scaled:
    fields = {"data": s.data, "scale_inv": s.scale_inv, "shape": s.shape, "transposed": s.transposed, "block": s.block,
              "scale_layout": s.scale_layout, **changes}
    return Scaled._of(**fields)


OUT: list[tuple[type[Exception], str, Change]] = [
    (TypeError, r"out: expected a Quantized \(an earlier result\), got Scaled", lambda row, column, q: q),
    (ValueError, "out: expected a row-wise and a column-wise part", lambda row, column, q: Quantized(row)),
    (ValueError, "out.rowwise: expected q's own data with gemm_ready scales", lambda row, column, q: Quantized(
        part(row, data=row.data.copy()), column)),
    (ValueError, "out.rowwise: expected q's own data", lambda row, column, q: Quantized(q, column)),
    (ValueError, "out.columnwise: expected data of shape", lambda row, column, q: Quantized(row, part(column, block=(32, 1)))),
    (ValueError, r"out.columnwise.data: expected shape \(130, 20\), got \(2600,\)", lambda row, column, q: Quantized(
        row, part(column, data=column.data.reshape(-1)))),
    (ValueError, r"out.columnwise.scale_inv: expected shape \(1, 132\), got \(1, 128\)", lambda row, column, q: Quantized(
        row, part(column, scale_inv=np.ones((1, 128), np.float32)))),
    (TypeError, "out.columnwise.scale_inv: expected dtype float32", lambda row, column, q: Quantized(
        row, part(column, scale_inv=np.ones((1, 132))))),
    (ValueError, "out.columnwise.data: overlaps the input", lambda row, column, q: Quantized(
        row, part(column, data=q.data.reshape(130, 20)))),
]


@pytest.mark.parametrize(("error", "message", "change"), OUT, ids=[m for _, m, _ in OUT])
def test_refused_out(error, message, change):
    q = scaled(np.zeros((20, 130), np.uint8), np.zeros((20, 2), np.int64), float8_e4m3fn)
    out = change(*parts(fp8.scaling_aware_transpose(q)), q)
    with pytest.raises(error, match="^" + message):
        fp8.scaling_aware_transpose(q, out=out)


# ---- scales that are not compact ----
@pytest.mark.parametrize("splits", [None, [8, 0, 30]], ids=str)
@pytest.mark.parametrize("layout", ["gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"])
def test_scales_in_any_layout(layout, splits, run):
    """What `quantize_block` makes by default is taken as it is; so are all other layouts of row-wise scales."""
    x = cases.values("normal", (40, 260), bfloat16)
    compact = fp8.quantize_mx(x).rowwise if layout == "swizzled" else fp8.quantize_block(x, scale_layout="compact").rowwise
    assert compact is not None
    given, wanted = run.array(compact.to_layout(layout)), fp8.scaling_aware_transpose(compact, splits=splits)
    for q in (given, Quantized(given)):
        got = fp8.scaling_aware_transpose(q, splits=splits)
        testing.assert_bytes_equal(got.columnwise, wanted.columnwise)
        if layout == "swizzled":
            assert got.rowwise is given
        else:
            testing.assert_bytes_equal(got.rowwise, wanted.rowwise)
        for written in (*parts(got)[1], *([] if layout == "swizzled" else [parts(got)[0].scale_inv])):
            cases.poison(written)
        assert fp8.scaling_aware_transpose(q, splits=splits, out=got) is got
        testing.assert_bytes_equal(got.columnwise, wanted.columnwise)
        testing.assert_bytes_equal(given, compact.to_layout(layout))
        if layout != "swizzled":
            testing.assert_bytes_equal(got.rowwise, wanted.rowwise)


def test_the_default_of_quantize_block(run):
    x = cases.values("normal", (40, 260), bfloat16)
    testing.assert_bytes_equal(fp8.scaling_aware_transpose(fp8.quantize_block(run.array(x))),
                               fp8.scaling_aware_transpose(fp8.quantize_block(x, scale_layout="compact")))


def test_new_scales_of_the_same_result_are_read_anew(run):
    """Converted scales are never remembered: the next call sees what was written since."""
    first, second = (cases.values("normal", (40, 260), bfloat16, seed) for seed in (1, 2))
    recipe = fp8.BlockScaling()
    q = recipe.quantize(run.array(first))
    out = fp8.scaling_aware_transpose(q)
    recipe.quantize(run.array(second * bfloat16.type(64)), out=q)
    fp8.scaling_aware_transpose(q, out=out)
    testing.assert_bytes_equal(out, fp8.scaling_aware_transpose(recipe.quantize(second * bfloat16.type(64))))


def test_a_result_in_the_given_scales_is_refused(run):
    q = fp8.quantize_block(run.array(cases.values("normal", (40, 256), bfloat16)))
    out = fp8.scaling_aware_transpose(q)
    assert q.rowwise is not None
    before = fp8.asnumpy(q.scale_inv).copy()
    with pytest.raises(ValueError, match=r"^out\.rowwise\.scale_inv: overlaps q\.scale_inv in memory"):
        fp8.scaling_aware_transpose(q, out=Quantized(q.rowwise, out.columnwise))
    testing.assert_bytes_equal(q.scale_inv, before)


CODES, ONES = np.zeros((20, 130), np.uint8).view(float8_e4m3fn), np.ones((20, 2), np.float32)
RIGHT = Scaled(CODES, ONES, (20, 130), False, (1, 128), "compact")
REFUSED: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (TypeError, "q: expected a Scaled or Quantized, got ndarray", CODES, {}),
    (ValueError, "q: expected a row-wise part", Quantized(None, Scaled._of(CODES, ONES, (20, 130))), {}),
    (ValueError, "q: expected row-wise data", Scaled._of(CODES, ONES[:1, 0], (20, 130)), {}),
    (ValueError, "q: expected row-wise data", Scaled._of(CODES, ONES, (20, 130), False, (128, 1), "compact"), {}),
    (ValueError, "q: expected row-wise data", Scaled._of(CODES, ONES, (130, 20), True, (1, 128), "compact"), {}),
    (ValueError, "q: expected data not stored transposed", Scaled._of(CODES, ONES[:2, :1], (130, 20), True, (128, 128), "compact"), {}),
    (ValueError, r"q.scale_inv: expected shape \(1, 2\), got \(20, 2\)",
     Scaled._of(CODES, ONES, (20, 130), False, (128, 128), "compact"), {}),
    (ValueError, r"splits: blocks of \(128, 128\) may straddle", Scaled._of(CODES, ONES[:1], (20, 130), False, (128, 128), "compact"),
     {"splits": [20]}),
    (ValueError, r"q.scale_inv: expected shape \(2, 20\) \(gemm_ready scales",
     Scaled._of(CODES, ONES, (20, 130), False, (1, 128), "gemm_ready"), {}),
    (ValueError, r"q.data: expected shape \(20, 131\)", Scaled._of(CODES, ONES, (20, 131), False, (1, 128), "compact"), {}),
    (ValueError, r"q.scale_inv: expected shape \(20, 2\), got \(20, 1\)",
     Scaled._of(CODES, ONES[:, :1], (20, 130), False, (1, 128), "compact"), {}),
    (TypeError, "q.scale_inv: expected dtype float8_e8m0fnu", Scaled._of(CODES, ONES, (20, 130), False, (1, 32), "compact"), {}),
    (TypeError, "q.data: expected dtype", Scaled._of(np.zeros((20, 130), np.uint8), ONES, (20, 130), False, (1, 128), "compact"), {}),
    *((error, message, RIGHT, options) for error, message, options in (
        (ValueError, r"target: expected one of \('column', 'tile'\), got 'row'", {"target": "row"}),
        (ValueError, r"scale_layout: expected one of \('gemm_ready', 'compact'\), got 'swizzled'; .to_layout",
         {"scale_layout": "swizzled"}),
        (ValueError, "splits: expected sizes that add up to at most the 20 rows there are, got 21", {"splits": [21]}),
        (ValueError, "splits: expected sizes of 0 or more, got -1", {"splits": np.array([21, -1])}),
        (TypeError, "splits: expected dtype int32, int64, got float64", {"splits": np.array([20.0])}),
    )),
]


@pytest.mark.parametrize(("error", "message", "q", "options"), REFUSED, ids=[f"{m[:50]}{i}" for i, (_, m, _, _) in enumerate(REFUSED)])
def test_refused(error, message, q, options):
    with pytest.raises(error, match="^" + message):
        fp8.scaling_aware_transpose(q, **options)


# ---- on a GPU ----
def on_gpu(rows: int = 300, columns: int = 264) -> tuple[Scaled, Any]:
    rng = np.random.default_rng(8)
    q = scaled(rng.integers(0, 0x78, (rows, columns), np.uint8), rng.integers(-9, -3, (rows, -(-columns // 128))), float8_e4m3fn)
    return q, testing.Executor("cuda").array(q)


@pytest.mark.gpu
def test_graph_with_sizes_that_change():
    cp = backend.cupy()
    q, given = on_gpu()
    splits = cp.asarray([100, 200])
    fresh, out = (fp8.scaling_aware_transpose(given, splits=splits) for _ in range(2))
    fp8.scaling_aware_transpose(given, splits=splits, out=out)      # makes its workspace
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"^out: used for the first time while a CUDA graph is captured"):
            fp8.scaling_aware_transpose(given, splits=splits, out=fresh)
        assert fp8.scaling_aware_transpose(given, splits=splits, out=out) is out
        with pytest.raises(ValueError, match=r"^out: needed while a CUDA graph is captured"):
            fp8.scaling_aware_transpose(given, splits=splits)
        with pytest.raises(ValueError, match=r"^check: waits for the device"):
            fp8.scaling_aware_transpose(given, splits=splits, out=out, check=True)
        graph = stream.end_capture()
        for sizes in ([300, 0], [7, 293], [128, 172]):
            splits[...] = cp.asarray(sizes)
            bits(parts(out)[1].data).fill(0xAA)
            graph.launch(stream)
            stream.synchronize()
            assert_same(out, reference.scaling_aware_transpose(q, splits=sizes))


@pytest.mark.gpu
def test_check_looks_at_the_device():
    _, given = on_gpu()
    cp = backend.cupy()
    with pytest.raises(ValueError, match=r"^splits: expected sizes that add up"):
        fp8.scaling_aware_transpose(given, splits=cp.asarray([2, 299]), check=True)
    fp8.scaling_aware_transpose(given, splits=cp.asarray([1, 298]), check=True)
    given.scale_inv[3, 1] = 3
    with pytest.raises(ValueError, match=r"^q.scale_inv: expected powers of two, got 3.0 at \(3, 1\)"):
        fp8.scaling_aware_transpose(given, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [1, 8, 200])
def test_many_blocks(experts):
    """Large tiles, uneven experts; rows of the output at every address."""
    from cupy_fp8.cases.scales.swizzle import sizes

    q, given = on_gpu(5003, 4104)
    splits = sizes(5003, experts, 0)
    assert_same(fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits)),
                reference.scaling_aware_transpose(q, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("experts", [1, 5, 30])
@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_runs_of_tiles(tiles, experts, multiple, monkeypatch):
    """As blocks of threads have them in large arrays, here where neighbours run at the same time and every byte can be looked at."""
    from cupy_fp8.cases.scales.swizzle import sizes

    monkeypatch.setattr(scaling_aware, "_run", lambda *_: tiles)
    q, given = on_gpu(4000, 528)
    splits = sizes(4000 // multiple, experts, 0) * multiple
    for target in scaling_aware.TARGETS:
        assert_same(fp8.scaling_aware_transpose(given, splits=backend.cupy().asarray(splits), target=target),
                    reference.scaling_aware_transpose(q, splits=splits, target=target))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("splits", [None, [20_003, 0, 45_661]], ids=["whole", "experts"])
@pytest.mark.parametrize("target", scaling_aware.TARGETS)
def test_more_than_two_to_the_31_elements(target, splits):
    """Whole columns at both ends and around element 2**31 of the result."""
    cp = backend.cupy()
    rows, columns, stripe = (1 << 16) + 128, (1 << 15) + 128, 128
    assert rows * columns > 1 << 31
    data = cp.empty((rows, columns), np.uint8)
    data[...] = cp.asarray(np.random.default_rng(0).integers(0, 0x40, columns, np.uint8))
    data += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint8)[:, None]
    exponents = (7 * cp.arange(rows)[:, None] + cp.arange(columns // 128)) % 9
    scales = cp.ldexp(cp.ones(exponents.shape, cp.float32), exponents.astype(cp.int32) - 4)
    q = Scaled(data.view(float8_e4m3fn), scales, (rows, columns), False, (1, 128), "compact")
    row, column = parts(fp8.scaling_aware_transpose(q, splits=splits and cp.array(splits), target=target, scale_layout="compact"))
    for first in (0, (1 << 31) // rows // stripe * stripe, columns - stripe):
        block = first // 128
        part = Scaled(data[:, first:first + stripe].get().view(float8_e4m3fn), scales[:, block:block + 1].get(), (rows, stripe), False,
                      (1, 128), "compact")
        want_row, want = parts(reference.scaling_aware_transpose(part, splits=None if splits is None else np.array(splits), target=target,
                                                                 scale_layout="compact"))
        np.testing.assert_array_equal(column.scale_inv[:, first:first + stripe].get(), want.scale_inv)
        start = at = 0
        for size in splits or [rows]:
            found = bits(column.data).reshape(-1)[start * columns:(start + size) * columns].reshape(columns, size)[first:first + stripe]
            np.testing.assert_array_equal(found.get().reshape(-1), bits(want.data).reshape(-1)[start * stripe:(start + size) * stripe])
            padded = -(-size // 4) * 4
            of_rows = row.scale_inv.reshape(-1)[at * columns // 128:(at + padded) * columns // 128].reshape(columns // 128, padded)[block]
            np.testing.assert_array_equal(of_rows.get(), want_row.scale_inv.reshape(-1)[at:at + padded])
            start, at = start + size, at + padded
