"""compute_scale against exact division, for every bfloat16 amax and every float32 one, and what it
refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import backend, reference
from cupy_fp8.arrays import bits
from cupy_fp8.cases import poison, values
from cupy_fp8.formats import FORMATS, FP8_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float32
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal

FLT_MAX = float(np.finfo(np.float32).max)
INF, NAN = float("inf"), float("nan")
LARGEST = {float8_e4m3fn: 448, float8_e5m2: 57344}
#: all powers of two that f32 has, subnormal ones included
POWERS = np.array([2.0**e for e in range(-149, 128)])

dtypes = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
pow2s = pytest.mark.parametrize("pow2", [False, True], ids=["any", "pow2"])


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def exact_target(dtype: Any, margin: int) -> float:
    """Return the format's maximum times 2^-margin, rounded to f32, which is exact: it has three significant
    bits."""
    exact = LARGEST[dtype] * Fraction(2) ** -margin
    return INF if exact > FLT_MAX else float(np.float32(float(exact)))


def expected_scales(amax: np.ndarray, dtype: Any, margin: int, eps: float, pow2: bool) -> np.ndarray:
    """Return the scales by f64, whose quotient of two f32 rounds to the correctly rounded f32
    (`test_f64_divides_exactly_enough`), and by search among the powers of two."""
    with np.errstate(invalid="ignore"):                                 # signalling NaN
        a = amax.astype(np.float64)
    a[a < float(np.float32(eps))] = float(np.float32(eps))
    usable = np.isfinite(a) & (a != 0)
    with np.errstate(over="ignore", under="ignore"):
        scale = (exact_target(dtype, margin) / a[usable]).astype(np.float32)
    scale[scale == np.inf] = FLT_MAX
    if pow2:
        found = np.searchsorted(POWERS, scale.astype(np.float64), side="right") - 1
        scale = np.where(scale > 0, POWERS[found], 0).astype(np.float32)
    out = np.ones(a.shape, np.float32)
    out[usable] = scale
    return out


def test_f64_divides_exactly_enough():
    """The nearest f32 is checked in fractions, for quotients of every magnitude and those nearest to ties."""
    rng = np.random.default_rng(0)
    largest = 0x7F7FFFFF - np.arange(500, dtype=np.uint32)
    amax = np.concatenate([rng.integers(1, 0x7F800000, 2000, np.uint32), largest]).view(np.float32)
    for dtype, margin in ((float8_e4m3fn, 0), (float8_e5m2, 3), (float8_e4m3fn, 12)):
        found = expected_scales(amax, dtype, margin, 0.0, False)
        for a, s in zip(amax.tolist(), found, strict=True):
            exact = Fraction(exact_target(dtype, margin)) / Fraction(a)
            if exact > FLT_MAX:
                assert s == FLT_MAX
                continue
            error = abs(exact - Fraction(float(s)))
            for other in (np.nextafter(s, np.float32(0)), np.nextafter(s, np.float32(np.inf))):
                if np.isfinite(other) and other != s:
                    distance = abs(exact - Fraction(float(other)))
                    assert error < distance or (error == distance and int(s.view(np.uint32)) % 2 == 0)


@pow2s
@pytest.mark.parametrize("eps", [0.0, 2.0**-149, 1e-39, 1e-12, 0.37, 1e30])
@pytest.mark.parametrize("margin", [0, 1, 3, 12, 23, -2, -120, 158, 500])
@dtypes
def test_every_bfloat16_amax(run, dtype, margin, eps, pow2):
    amax = numerics.widen(oracle.patterns(oracle.HALVES[0]))
    assert amax.size == 1 << 16
    out = fp8.empty((1 << 16,), float32, like=run.array(amax))
    poison(out)
    options = {"dtype": dtype, "margin": margin, "eps": eps, "pow2_scale": pow2}
    assert fp8.compute_scale(run.array(amax), **options, out=out) is out
    assert_bytes_equal(out, expected_scales(amax, dtype, margin, eps, pow2))


@pow2s
@dtypes
def test_amax_around_the_edges(run, dtype, pow2):
    """f32 values near where the scale overflows, near powers of two of the scale, subnormal amax, the
    largest."""
    edges = [LARGEST[dtype] / FLT_MAX, FLT_MAX, 2.0**-126, 2.0**-149, *(LARGEST[dtype] * 2.0**e
                                                                        for e in range(-140, 100, 7))]
    near = np.concatenate([bits(f32(e)) + np.arange(-40, 41) for e in edges])
    amax = near[(near >= 0) & (near < 1 << 31)].astype(np.uint32).view(np.float32)
    for margin in (0, 2, 9, 20):
        got = fp8.compute_scale(run.array(amax), dtype=dtype, margin=margin, pow2_scale=pow2)
        assert_bytes_equal(got, expected_scales(amax, dtype, margin, 0.0, pow2))


@pytest.mark.parametrize(("amax", "options", "scale"), [
    (3.5, {}, 128.0), (448.0, {}, 1.0), (3.0, {}, float(np.float32(448 / 3))), (3.0, {"pow2_scale": True},
                                                                                128.0),
    (3.5, {"margin": 2}, 32.0), (3.5, {"margin": -1}, 256.0), (3.5, {"dtype": float8_e5m2}, 16384.0),
    (0.0, {}, 1.0), (-0.0, {}, 1.0), (INF, {}, 1.0), (NAN, {}, 1.0), (-NAN, {}, 1.0), (-3.5, {}, 1.0),
    (-INF, {}, 1.0),
    (0.0, {"eps": 3.5}, 128.0), (-0.0, {"eps": 3.5}, 128.0), (-INF, {"eps": 3.5}, 128.0), (NAN, {"eps": 3.5},
                                                                                           1.0),
    (-NAN, {"eps": 3.5}, 1.0), (INF, {"eps": 3.5}, 1.0), (7.0, {"eps": 3.5}, 64.0), (3.5, {"eps": 3.5},
                                                                                     128.0),
    (1e-45, {"eps": 1e-50}, FLT_MAX),
    (2.0**-149, {}, FLT_MAX), (2.0**-149, {"pow2_scale": True}, 2.0**127), (1e-37, {}, FLT_MAX),
    (0.0, {"pow2_scale": True}, 1.0),
    (2.0**-140, {"eps": 2.0**-126, "margin": 8}, 1.75 * 2.0**126),
    (FLT_MAX, {}, float(np.float32(448 / FLT_MAX))), (FLT_MAX, {"pow2_scale": True}, 2.0**-120),
    # a subnormal scale is the largest power of two below, never 0 unless the scale itself is
    (2.0**127, {"margin": 9}, 1.75 * 2.0**-128), (2.0**127, {"margin": 9, "pow2_scale": True}, 2.0**-128),
    (2.0**127, {"margin": 30, "pow2_scale": True}, 2.0**-148), (2.0**127, {"margin": 31, "pow2_scale": True},
                                                                2.0**-149),
    (2.0**127, {"margin": 32, "pow2_scale": True}, 0.0),
    (1.0, {"margin": 1000}, 0.0), (1.0, {"margin": -1000}, FLT_MAX),
    (1.0, {"margin": -(10**30), "pow2_scale": True}, 2.0**127),
], ids=str)
def test_values_written_out(run, amax, options, scale):
    assert_bytes_equal(fp8.compute_scale(run.array(f32(amax)), **options), f32(scale))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 5), (1027,)], ids=str)
def test_any_shape(run, shape):
    amax = values("bits", shape, float32)
    got = fp8.compute_scale(run.array(amax))
    assert_bytes_equal(got, expected_scales(amax.reshape(-1), float8_e4m3fn, 0, 0.0, False).reshape(shape))


def test_scale_of_an_amax_uses_the_whole_range(run):
    x = run.array(values("normal", (40, 72), bfloat16))
    amax = fp8.compute_amax(x)
    top = float(run.numpy(amax)[0])
    q = fp8.quantize_tensor(x, fp8.compute_scale(amax))
    assert np.abs(run.numpy(q).data.astype(np.float32)).max() == 448
    assert abs(float(run.numpy(q).scale_inv[0]) * 448 - top) <= top * 2.0**-22


def test_formats_table_agrees():
    assert {dtype: FORMATS[dtype].max for dtype in FP8_DTYPES} == LARGEST


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.full
def test_every_float32_amax():
    """All 2^32 are compared with the reference, in each option."""
    cp, chunk = backend.cupy(), 1 << 24
    patterns, out = cp.arange(chunk, dtype=cp.uint32), cp.empty(chunk, cp.float32)
    options: tuple[dict[str, Any], ...] = (
        {}, {"pow2_scale": True}, {"dtype": float8_e5m2}, {"eps": 1e-12}, {"margin": 3},
        {"margin": -3, "pow2_scale": True},
        {"dtype": float8_e5m2, "margin": 16, "eps": 1e-38, "pow2_scale": True})

    def check(start: int, got: list[np.ndarray]) -> None:
        amax = (np.arange(chunk, dtype=np.uint32) + np.uint32(start)).view(np.float32)
        for actual, chosen in zip(got, options, strict=True):
            with np.errstate(invalid="ignore"):                         # signalling NaN
                assert_bytes_equal(actual, reference.compute_scale(amax, **chosen))

    with ThreadPoolExecutor(8) as pool:
        pending = []
        for start in range(0, 1 << 32, chunk):
            got = []
            for chosen in options:
                poison(out)
                got.append(fp8.compute_scale((patterns + cp.uint32(start)).view(cp.float32), **chosen,
                                             out=out).get())
            pending.append(pool.submit(check, start, got))
            if len(pending) == 16:
                pending.pop(0).result()
        for done in pending:
            done.result()
