"""exp and the logistic function: accuracy, and equal bits from kernels and reference."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_fp8 import backend, hostexec
from cupy_fp8.kernels import sources
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal

EXP_OF_MINUS, SIGMOID, SIGMOIDS, RECIPROCAL, RECIPROCAL_FROM_ONE, QUOTIENT = range(6)
SOURCE = Path(__file__).parent / "sigmoid.cu"
F32 = np.float32
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 1, -1, 86.99999, 87, -87,
                    87.00001, 87.33654, -87.33654, 88.02969, 88.72284, 88.72283, 88.9, 89, 89.1, 103.97208,
                    103.97207, 104, -88.72284, -103.97208, -104, -3e38, 3e38], F32)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    """Return (function, values) -> the results of the kernel's function."""
    def on_host(function: int, a: np.ndarray) -> np.ndarray:
        out = np.empty_like(a)
        kernel = hostexec.compile_kernel(SOURCE, "sigmoid_of", include_dirs=[sources.root() / "include"],
                                         defines={"FUNCTION": str(function)})
        kernel((2,), (32,), struct.pack("@PPq", a.ctypes.data, out.ctypes.data, a.size), shared_mem=0,
               resident=False)
        return out

    def on_gpu(function: int, a: np.ndarray) -> Any:
        cp = backend.cupy()
        module = cp.RawModule(code=SOURCE.read_text(),
                              options=("-std=c++17", f"-I{sources.root() / 'include'}",
                                       f"-DFUNCTION={function}"))
        given, out = cp.asarray(a), cp.empty(a.shape, cp.float32)
        params = np.frombuffer(struct.pack("@PPq", given.data.ptr, out.data.ptr, a.size), np.dtype("V24"))[0]
        module.get_function("sigmoid_of")((1024,), (256,), (params,))
        return out.get()

    if request.param == "host" and hostexec.available() is not None:
        pytest.skip(str(hostexec.available()))
    return on_host if request.param == "host" else on_gpu


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(F32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, F32)


def random_floats(size: int, seed: int = 0) -> np.ndarray:
    return floats(np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint64))


def one_nan(v: np.ndarray) -> np.ndarray:
    return numerics.one_nan(v)


def sweep(first: int, last: int, step: int, at_once: int = 1 << 21) -> Iterator[np.ndarray]:
    """Yield floats of every step-th bit pattern."""
    for start in range(first, last, step * at_once):
        yield floats(np.arange(start, min(last, start + step * at_once), step, dtype=np.uint64))


def errors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the errors of y as exp(x), in ulps of the exact result; what rounds to Inf counts as 2^128."""
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.float64))
        rest = np.expm1(x.astype(np.float64))
    exact = np.minimum(exact, 2.0**200)
    ulp = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
    got = np.where(np.isinf(y), 2.0**128, y.astype(np.float64))
    over = np.isinf(y) & (exact >= 2.0**128)
    near_one = np.abs(x) < 0.5                                          # there 1 + x is not a double
    return np.where(over, 0, np.abs(np.where(near_one, (got - 1) - rest, got - exact)) / ulp)


@pytest.mark.full
def test_exp_is_within_two_ulps(run):
    """2^26 floats where exp is neither 1 nor beyond the range, and some everywhere. (All 2^32: 1.8598,
    docs/numerics.md.)"""
    worst, count = 0.0, 0
    for sign in (0, 1 << 31):
        for first, last, step in ((0x32800000, 0x42D80000, 8), (0, 0x32800000, 40_009),
                                  (0x42D80000, 0x7F800001, 40_009)):
            for x in sweep(sign | first, sign | last, step):
                x = x[:x.size // 8 * 8]
                count += x.size
                worst = max(worst, float(errors(x, run(EXP_OF_MINUS, -x)).max(initial=0)))
    assert count > 1 << 26
    assert 1.8 < worst < 1.8599


def test_limits():
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 0, -0.0, 3e38, -3e38, 1e-45, 88.72283, 88.72284,
                  -103.97207, -103.9721], F32)
    want = np.array([np.inf, 0, np.nan, np.nan, 1, 1, np.inf, 0, 1, np.exp(np.float64(x[9])), np.inf,
                     2.0**-149, 0], F32)
    got = numerics.exp(x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.abs(got[9].view(np.int32) - want[9].view(np.int32)) <= 1
    np.testing.assert_array_equal(np.delete(got, 9), np.delete(want, 9))
    assert not np.signbit(got[[1, 7, 12]]).any()
    sigma = numerics.sigmoid(np.array([np.inf, -np.inf, 0, 3e38, -3e38], F32))
    assert sigma.tolist() == [1, 0, 0.5, 1, 0]


@pytest.mark.parametrize("function", ["exp", "sigmoid", "sigmoids"])
def test_kernel_and_reference_agree(run, function):
    x = np.concatenate([SPECIAL, -SPECIAL, random_floats(1 << 19),
                        np.random.default_rng(1).normal(0, 8, 1 << 18).astype(F32),
                        np.linspace(-105, 105, 1 << 18, dtype=F32),
                        np.linspace(-88.8, -86, 1 << 17, dtype=F32)])
    x = x[:x.size // 8 * 8]
    got = run({"exp": EXP_OF_MINUS, "sigmoid": SIGMOID, "sigmoids": SIGMOIDS}[function], x)
    assert_bytes_equal(one_nan(got), one_nan(numerics.exp(-x) if function == "exp" else numerics.sigmoid(x)))


def test_eight_at_once_are_those_of_each(run):
    """A large argument sends all eight through the slow path."""
    x = np.random.default_rng(0).normal(0, 3, (4096, 8)).astype(F32)
    x[np.arange(4096), np.arange(4096) % 8] = np.resize(SPECIAL, 4096)
    assert_bytes_equal(one_nan(run(SIGMOIDS, x)), one_nan(run(SIGMOID, x)))


def test_sigmoid_is_accurate():
    """Compared with f64, relative to the result's ulp, if that is a normal number."""
    x = np.concatenate([np.linspace(-87, 100, 1 << 20, dtype=F32),
                        np.random.default_rng(0).normal(0, 3, 1 << 19).astype(F32)])
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    error = np.abs(numerics.sigmoid(x) - exact) / np.ldexp(1.0, np.frexp(exact)[1] - 24)
    assert 3 < error.max() < 3.776


@pytest.mark.full
def test_one_correction_makes_a_reciprocal_exact():
    """From every start within an ulp, for all significands, the correction gives the nearest float, except
    for one start of one significand."""
    d = floats(np.arange(0x3F800000, 0x40000000))
    want = numerics.div(F32(1), d)
    wrong = []
    for away in (-1, 0, 1):
        start = (want.view(np.int32) + away).view(F32)
        product = start.astype(np.float64) * d                          # exact, as is 1 minus it
        # the quotients are in (1/2, 1], where an ulp is 2^-24
        near = np.abs(1 - product) <= d * 2.0**-24
        got = numerics.fma(numerics.fma(-d, start, F32(1)), start, start)
        wrong += [(float(d[i]), float(start[i])) for i in np.nonzero(near & (got != want))[0]]
        if away == 0:
            assert near.all()
    assert wrong == [(2 - 2.0**-23, 0.5)]


def test_reciprocals(run):
    """A GPU computes those of all significands, including the one that the test above leaves to
    rcp.approx."""
    for exponent in (127, 128, 150, 252):
        d = floats(np.arange(0, 1 << 23) + (exponent << 23))
        assert_bytes_equal(run(RECIPROCAL, d), numerics.div(F32(1), d))


def test_reciprocals_that_are_subnormal(run):
    """All from 2^126 on, a quarter of which would be ties without the remainder, and the ends of the
    range."""
    d = floats(np.arange(0x7E7FFFF0, 0x7F800000))
    assert_bytes_equal(run(RECIPROCAL_FROM_ONE, d), numerics.div(F32(1), d))
    ends = np.array([1, 1 + 2.0**-23, 2 - 2.0**-23, 3, 2.0**125, np.inf, np.nan, np.nan], F32)
    assert_bytes_equal(one_nan(run(RECIPROCAL_FROM_ONE, ends)), one_nan(numerics.div(F32(1), ends)))


def test_quotients_without_a_call(run):
    """Quotients by scales of blocks are rounded like division, subnormal and overflowing ones too."""
    rng = np.random.default_rng(0)
    size = 1 << 20

    def some(low: int, high: int) -> np.ndarray:
        return floats(rng.integers(low << 23, high << 23, size))

    significands = rng.integers(0, 1 << 23, size)
    few = significands & 0x700000  # few bits make exact quotients, and ties
    ends = np.array([0, 2.0**-149, 2.0**-126, 1, 448, 57344, 3.4e38, np.inf], F32)
    pairs: list[tuple[Any, Any]] = [
        (some(0, 255), some(0, 255)), (some(1, 30), some(125, 160)), (some(0, 1), some(100, 150)),
        # subnormal, with ties of every kind
        (some(100, 150), some(0, 1)), (floats((1 << 23) + significands),
                                       floats(rng.integers(127, 152, size) * (1 << 23) + few)),
        (floats((10 << 23) + few), floats(rng.integers(130, 165, size) * (1 << 23) + few[::-1])),
        (np.full(size, 448, F32), some(0, 255)), (some(0, 255), np.full(size, 448, F32)),
        (np.ones(size, F32), some(0, 255)), (np.repeat(ends, 8), np.tile(ends, 8)),
    ]
    for a, b in pairs:
        with np.errstate(all="ignore"):
            want = numerics.div(a, b)
        defined = ~np.isnan(want)
        a, b, want = (v[defined][: defined.sum() // 4 * 4] for v in (a, b, want))
        assert_bytes_equal(run(QUOTIENT, np.stack([a, b], axis=1).reshape(-1))[::2].copy(), want)


def test_one_correction_leaves_no_code_of_a_quotient_wrong():
    """A quotient from a reciprocal and its exact remainder is on the same side of every tie between two FP8
    values (an odd number of five bits times a power of two) as the one that division rounds, or both are the
    tie: for divisors of 2^14 significands, and dividends next to the ties. (For all significands: none is
    wrong. Without a correction 6 % are.)"""
    s = floats(0x3F800000 + np.unique(np.append(np.random.default_rng(0).integers(0, 1 << 23, 1 << 14),
                                                [0, 1, (1 << 23) - 1])))
    r = numerics.div(F32(1), s)
    wrong_without = 0
    for tie in np.arange(1, 32, 2, dtype=F32):
        for away in range(-4, 5):
            a = ((tie * s).view(np.int32) + away).view(F32)
            start = a * r
            corrected = numerics.fma(numerics.fma(-s, start, a), r, start)
            want = np.sign(numerics.div(a, s) - tie)
            np.testing.assert_array_equal(np.sign(corrected - tie), want)
            wrong_without += int(np.count_nonzero(np.sign(start - tie) != want))
    assert wrong_without > s.size


def exactly(a: float, b: float, c: float) -> np.float32:
    """fl(a * b + c), by integers."""
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0:
        return F32(np.float64(a) * np.float64(b) + np.float64(c))       # this has the right sign
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 24, -149)
    while magnitude >= Fraction(2) ** (exponent + 24):
        exponent += 1
    units = round(magnitude / Fraction(2) ** exponent)                  # ties go to even
    with np.errstate(over="ignore"):
        return F32(np.copysign(float(units * Fraction(2) ** exponent), float(value)))


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    size = 4000
    a, b, c = (random_floats(size, seed) for seed in (1, 2, 3))
    one, other, third = (rng.integers(1 << 23, 1 << 24, size).astype(F32) for _ in range(3))
    with np.errstate(over="ignore", invalid="ignore"):
        near = -(a.astype(np.float64) * b).astype(F32)
    small = [rng.integers(1, 1 << 12, size).astype(F32) * F32(2.0**-80) for _ in range(2)]
    e = 2.0**-24
    groups: list[tuple[Any, Any, Any]] = [
        (a, b, c), (a, b, near),                                        # the sum is arbitrary, or cancels
        (one, other, third * np.exp2(rng.integers(-30, 30, size)).astype(F32)),
        # subnormal results
        (small[0], small[1], rng.integers(0, 1 << 10, size).astype(F32) * F32(2.0**-149)),
        # Between two floats except for a bit far below. Rounded to f64 first, they would be ties.
        (f32(e, e, 3 * e, e), f32(1, 1 + 2 * e, 1 - e, 1 - e), f32(1, 1, 1, 1 + 2 * e)),
        (f32(2.0**-60, -(2.0**-60)), f32(2.0**-20, 2.0**-20), f32(1.5, 1.5)),
    ]
    for x, y, z in groups:
        finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
        got = numerics.fma(x, y, z)[finite]
        want = np.array([exactly(*map(float, v)) for v in zip(x[finite], y[finite], z[finite], strict=True)],
                        F32)
        assert_bytes_equal(got, want)
    assert np.isnan(numerics.fma(f32(np.inf, 0, np.nan), f32(1, np.inf, 1), f32(-np.inf, 1, 1))).all()
    assert numerics.fma(F32(3e38), F32(10), F32(0)) == np.inf
