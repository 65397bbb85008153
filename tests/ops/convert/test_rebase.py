"""rebase_scales: values, against exact arithmetic by another way and over all ratios of scales; counts of
changed values; wrong scales; layouts; what is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from power_of_two_rows import NAN, exponent_of, nearest_code, scaled, value_of
from scale_arrays import guarded_like

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import FORMATS, FP8_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from cupy_fp8.kernels import errors
from cupy_fp8.ops.convert import rebase
from cupy_fp8.results import Scaled

dtypes = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: d.name)


def rebased(q: Scaled, block: Any, run: testing.Executor, **options: Any) -> tuple[Scaled, int]:
    """Return the result and the number of changed values."""
    count = run.array(np.zeros(1, np.int64))
    got = run.numpy(fp8.rebase_scales(run.array(q), block=block, changed=count, **options))
    return got, int(run.numpy(count)[0])


def values(s: Scaled) -> np.ndarray:
    """Return the values in f64, which holds all of them. Scales must be compact."""
    scales: Any = s.scale_inv.astype(np.float64)
    assert s.block is not None
    for axis, extent in zip((-2, -1), s.block, strict=True):
        length = s.shape[axis]
        scales = np.repeat(scales, extent or length, axis).take(range(length), axis)
    data = s.data.swapaxes(-1, -2) if s.transposed else s.data
    with np.errstate(invalid="ignore"):
        found: np.ndarray = data.astype(np.float64) * scales
    return found


def differing(before: np.ndarray, after: np.ndarray) -> int:
    return int(np.count_nonzero((before != after) & ~np.isnan(before)))


@pytest.mark.parametrize("lead", [0, 1, 8])
def test_a_result_at_any_address(lead, run):
    """Data at a multiple of 16 bytes, and their result elsewhere."""
    q = fp8.quantize_mx(np.random.default_rng(0).standard_normal((40, 256), np.float32)).rowwise
    want = reference.rebase_scales(q, block=(1, 128))
    out, intact = guarded_like(run, want, lead)
    testing.assert_bytes_equal(run.numpy(fp8.rebase_scales(run.array(q), block=(1, 128), out=out)), want)
    assert intact()


# ---- a second definition, in exact arithmetic ----
@dtypes
@pytest.mark.parametrize("spread", [3, 20, 127])
def test_in_exact_arithmetic(dtype, spread):
    rng = np.random.default_rng(spread)
    codes = rng.integers(0, 256, (6, 70), np.uint8)
    codes[rng.random(codes.shape) < 0.4] &= 0x8F            # these become small
    codes[(codes & 0x7C) == 0x7C] &= 0xBF                   # leaves neither Inf nor NaN, except for one
    codes[3] &= 0x80
    codes[2, 40] = NAN
    exponents = rng.integers(-spread, spread, (6, 3), endpoint=True)
    got, changed = rebased(scaled(codes, exponents, dtype, 32), (1, 64), testing.Executor("reference"))
    count = 0
    for row, block in np.ndindex(6, 2):
        columns = range(64 * block, min(64 * block + 64, 70))
        v = {c: value_of(int(codes[row, c]), dtype) * Fraction(2)**int(exponents[row, c // 32])
             for c in columns if codes[row, c] != NAN}
        t = exponent_of([abs(x) for x in v.values()], dtype)
        assert bits(got.scale_inv)[row, block] == t + 127
        for c in columns:
            want = nearest_code(v[c] / Fraction(2)**t, dtype) | int(codes[row, c]) & 0x80 if c in v else NAN
            assert bits(got.data)[row, c] == want, (row, c)
            count += c in v and value_of(want, dtype) * Fraction(2)**t != v[c]
    assert changed == count


# ---- all codes under all ratios of scales ----
@dtypes
def test_every_code_by_every_ratio_down(dtype, run):
    """A block of the largest value at 2^127 makes k = 0 to -254 for all codes."""
    codes = np.tile(np.arange(512, dtype=np.uint8), (255, 1))
    codes[:, 256:] = 0x7E if dtype == float8_e4m3fn else 0x7B
    exponents = np.full((255, 16), 127)
    exponents[:, :8] = 127 - np.arange(255)[:, None]
    q = scaled(codes, exponents, dtype, 32)
    got, changed = rebased(q, (1, 512), run)
    assert (bits(got.scale_inv) == 254).all()
    v = codes.view(dtype).astype(np.float64)
    with np.errstate(over="ignore"):
        k = np.repeat(exponents, 32, axis=1) - 127
        want = reference.numerics.narrow(np.ldexp(v, k).astype(np.float32), dtype)
    testing.assert_bytes_equal(got.data, want)
    assert changed == differing(values(q), values(got))
    assert changed > 50_000


@dtypes
def test_every_code_alone_in_its_block(dtype, run):
    """The others are zeros of both signs under any scale, up to 2^254 times the target. The value is
    unchanged."""
    power = np.arange(-127, 128, 2)
    codes = np.zeros((256, len(power), 64), np.uint8)
    codes[..., 1::2] = 0x80
    codes[..., 40] = np.arange(256)[:, None]
    exponents = np.full((256, len(power), 2), 127)
    exponents[..., 1] = power
    q = scaled(codes.reshape(-1, 64), exponents.reshape(-1, 2), dtype, 32)
    got, changed = rebased(q, (1, 128), run)
    before, after = values(q), values(got)
    v = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    low = np.ldexp(np.abs(v)[:, None] / FORMATS[dtype].max, power) < 2.0**-127  # below every scale
    finite = (np.isfinite(v)[:, None] & ~low).reshape(-1)
    np.testing.assert_array_equal(after[finite], before[finite])
    np.testing.assert_array_equal(np.delete(bits(got.data), 40, axis=1), np.delete(bits(q.data), 40, axis=1))
    assert changed == differing(before, after)


@pytest.mark.full
@dtypes
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (256, 256), (1, None)], ids=str)
@pytest.mark.parametrize("step", [1, 3, 7, 9, 16, 30])
def test_blocks_that_differ(dtype, block, step, run):
    """Neighbouring blocks differ by 2^step, so that every path through the kernel is taken."""
    rng = np.random.default_rng(step)
    codes = rng.integers(0, 256, (260, 272), np.uint8)
    codes[rng.random(codes.shape) < 0.5] &= 0x87
    exponents = np.clip(100 - (np.arange(260 * 9) * step % 220), -127, 127).reshape(260, 9)
    q = scaled(codes, exponents, dtype, 32)
    count = np.zeros(1, np.int64)
    want = reference.rebase_scales(q, block=block, changed=count)
    got, changed = rebased(q, block, run)
    testing.assert_bytes_equal(got.data, want.data)
    testing.assert_bytes_equal(got.scale_inv, want.scale_inv)
    assert changed == count[0] == differing(values(q), values(got))


# ---- unchanged values ----
def test_equal_scales_change_nothing(run):
    """A quantiser's data fill their blocks: codes and scales are unchanged."""
    x = np.random.default_rng(1).uniform(1, 1.7, (140, 300)).astype(np.float32)
    q = fp8.quantize_mx(x).rowwise
    assert q is not None
    for block in ((1, 128), (128, 128), (1, None)):
        got, changed = rebased(q, block, run)
        testing.assert_bytes_equal(got.data, q.data)
        assert set(np.unique(bits(got.scale_inv))) == set(np.unique(bits(q.scale_inv)))
        assert changed == 0


@pytest.mark.parametrize("before", [(1, 128), (128, 128), (1, None), None], ids=str)
def test_smaller_blocks_change_nothing(before, run):
    x = np.random.default_rng(2).standard_normal((140, 300), np.float32)
    x[:, 64:96] *= 1e-4
    q = fp8.quantize_tensor(x, 64.0).rowwise if before is None else \
        fp8.quantize_block(x, block=before, scale_layout="compact").rowwise
    assert q is not None
    got, changed = rebased(q, (1, 32), run)
    assert changed == 0
    testing.assert_bytes_equal(got.dequantize(), q.dequantize())
    again, changed = rebased(got, before or (128, 128), run)
    assert changed == 0
    testing.assert_bytes_equal(again.dequantize(), q.dequantize())


def test_a_view_of_the_transposed_matrix(run):
    q = fp8.quantize_mx(np.random.default_rng(3).standard_normal((2, 70, 300), np.float32)).rowwise
    assert q is not None
    for block, layout in (((1, 128), "gemm_ready"), ((128, 64), "compact"), ((128, 64), "gemm_ready")):
        row, changed = rebased(q, block, run, scale_dtype=float32, scale_layout=layout)
        column, changed_too = rebased(q.T, block[::-1], run, scale_dtype=float32, scale_layout=layout)
        assert changed == changed_too
        testing.assert_bytes_equal(column.data, row.data)
        testing.assert_bytes_equal(column.T.dequantize(), row.dequantize())


@pytest.mark.parametrize(("block", "layouts"), [
    ((1, 128), ("gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled")),
    ((128, 128), ("gemm_ready", "deepgemm_sm100"))], ids=str)
@pytest.mark.parametrize("shape", [(70, 300), (2, 5, 640)], ids=str)
def test_layouts_are_those_of_to_layout(shape, block, layouts, run):
    q = fp8.quantize_mx(np.random.default_rng(4).standard_normal(shape, np.float32)).rowwise
    assert q is not None
    compact, _ = rebased(q, block, run, scale_dtype=float32)
    layout: Any
    for layout in layouts:
        assert rebased(q, block, run, scale_layout=layout)[0] == compact.to_layout(layout)
    for layout in ("swizzled", "deepgemm_sm100"):
        assert rebased(q.to_layout(layout), block, run, scale_dtype=float32)[0] == compact


# ---- scales that are no powers of two ----
@pytest.mark.parametrize("wrong", [3.0, -0.0, -1.0, float("inf"), float("nan"), 3 * 2.0**-149])
@pytest.mark.parametrize(("block", "dtype"), [((1, 256), float32), ((128, 256), float8_e8m0fnu)], ids=str)
def test_scales_that_are_no_powers_of_two(block, dtype, wrong, run, monkeypatch):
    """NumPy scales are checked and refused. On the device the old block and the new scale become NaN, all
    else is unchanged, and none of it counts as changed."""
    rng = np.random.default_rng(4)
    codes, exponents = rng.integers(0, 0x78, (140, 300), np.uint8), rng.integers(-30, -3, (140, 3))
    q = scaled(codes, exponents, float8_e4m3fn)
    q.scale_inv[9, 1] = wrong
    if run.name != "cuda":
        with pytest.raises(ValueError, match=re.escape("q.scale_inv: expected powers of two, got "
                                                       f"{np.float32(wrong)} at (9, 1)")):
            fp8.rebase_scales(run.array(q), block=block)
        monkeypatch.setattr(rebase, "check_powers_of_two", lambda *_: None)
    got, changed = rebased(q, block, run, scale_dtype=dtype)
    assert fp8.device_errors(clear=True) == (() if run.name == "reference"
                                             else (errors.MESSAGES[errors.Fact.SCALE_NOT_POWER_OF_TWO],))
    codes[9, 128:256] = 0                                   # this row does not affect targets
    right, count = rebased(scaled(codes, exponents, float8_e4m3fn), block, testing.Executor("reference"),
                           scale_dtype=dtype)
    assert changed == count
    assert (bits(got.data)[9, 128:256] == NAN).all()
    place = 9 // block[0], 0
    assert bits(got.scale_inv)[place] == (0x7FC00000 if dtype == float32 else 255)
    bits(got.data)[9, 128:256] = 0
    bits(got.scale_inv)[place] = bits(right.scale_inv)[place]
    testing.assert_bytes_equal(got.data, right.data)
    testing.assert_bytes_equal(got.scale_inv, right.scale_inv)


def test_scales_of_zero_and_nan(run):
    """A block with scale 0 is zeros, whatever its codes; E8M0's NaN is a value. Neither affects a target."""
    q = scaled(np.full((1, 256), 0xB8, np.uint8), np.array([[-3, 90]]), float8_e4m3fn)
    q.scale_inv[0, 1] = 0
    got, changed = rebased(q, (1, 256), run)
    assert bits(got.data)[0, ::128].tolist() == [0xF8, 0x80]                 # 1 is 256 * 2^-8
    assert got.scale_inv.tolist() == [[2.0**-11]]
    assert changed == 0
    q = scaled(np.full((1, 64), 0xB8, np.uint8), np.array([[-3, 0]]), float8_e4m3fn, 32)
    bits(q.scale_inv)[0, 1] = 255
    got, changed = rebased(q, (1, 64), run)
    assert bits(got.data)[0, ::32].tolist() == [0xF8, NAN]
    assert bits(got.scale_inv).tolist() == [[127 - 11]]
    assert changed == 0
    assert fp8.device_errors(clear=True) == ()


def test_inf_becomes_the_largest_value(run):
    codes = np.full((2, 32), 0x3C, np.uint8)
    codes[:, 3] = 0x7C, 0xFC
    got, changed = rebased(scaled(codes, np.zeros((2, 1), np.int64), float8_e5m2, 32), (1, 32), run)
    assert bits(got.data)[:, 3].tolist() == [0x7B, 0xFB]
    assert bits(got.scale_inv).tolist() == [[254], [254]]
    assert changed == 64                                                    # 1 vanishes beside 2^127
