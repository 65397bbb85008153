"""The reference's ground rules (docs/numerics.md, section 0) against an exact oracle, and against ml_dtypes
with every difference from it stated."""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import oracle
import pytest
from oracle import E4M3FN, E5M2, FP8, HALVES, FloatFormat

from cupy_fp8.formats import FORMATS, float8_e8m0fnu, float32
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal

ALL = (*FP8, *HALVES)
INFINITY = np.uint32(0x7F800000)


def by_name(f: FloatFormat) -> str:
    return str(f.dtype)


def every_nan() -> np.ndarray:
    """Return f32 NaN of both signs: quiet and signalling, first and last payloads, and those that narrow to a
    zero mantissa."""
    payloads = np.concatenate([1 << np.arange(23), [0x7FFFFF, 0x400001, 0x3FFFFF, 0x1FFF]]).astype(np.uint32)
    return np.concatenate([payloads | INFINITY, payloads | np.uint32(0xFF800000)]).view(np.float32)


def sources(f: FloatFormat) -> Iterator[np.ndarray]:
    """Yield every bf16 and f16 pattern, every boundary of f, NaN, and random f32 values in the range of f."""
    halves = [numerics.widen(oracle.patterns(half)) for half in HALVES]
    return itertools.chain(halves, [oracle.boundaries(f), every_nan()], oracle.random_f32(f, chunks=4))


def assert_encodes(f: FloatFormat, x: np.ndarray, saturate: bool) -> None:
    assert_bytes_equal(numerics.narrow(x, f.dtype, saturate), f.encode(x, saturate).view(f.dtype))


@pytest.mark.parametrize("f", ALL, ids=by_name)
def test_widen_is_exact(f):
    p = oracle.patterns(f)
    value = f.decode(p.view(f.storage))
    assert_bytes_equal(numerics.one_nan(numerics.widen(p)), numerics.one_nan(value.astype(np.float32)))
    numbers = ~np.isnan(value)
    assert np.array_equal(numerics.widen(p)[numbers].astype(np.float64), value[numbers])


def test_formats_table_is_the_oracles():
    for f in ALL:
        row = FORMATS[f.dtype]
        assert (row.exponent_bits, row.mantissa_bits, row.nan,
                row.inf) == (f.exponent_bits, f.mantissa_bits, f.nan, f.inf)
        assert row.bias == 2 ** (f.exponent_bits - 1) - 1
        assert (row.max, row.smallest_subnormal) == (f.magnitudes[f.codes - 1], f.magnitudes[1])
        assert row.smallest_normal == f.magnitudes[1 << f.mantissa_bits]


@pytest.mark.parametrize("saturate", [True, False], ids=["saturating", "not saturating"])
@pytest.mark.parametrize("f", FP8, ids=by_name)
def test_narrow_to_fp8(f, saturate):
    for x in sources(f):
        assert_encodes(f, x, saturate)


@pytest.mark.parametrize("f", FP8, ids=by_name)
def test_narrow_to_fp8_of_any_bits(f):
    for x in oracle.random_f32(chunks=16):
        assert_encodes(f, x, saturate=True)


@pytest.mark.parametrize("f", HALVES, ids=by_name)
def test_narrow_to_halves(f):
    for x in sources(f):
        assert_encodes(f, x, saturate=False)


@pytest.mark.parametrize("f", HALVES, ids=by_name)
def test_halves_ignore_saturate(f):
    x = oracle.boundaries(f)
    assert_bytes_equal(numerics.narrow(x, f.dtype, True), numerics.narrow(x, f.dtype, False))


@pytest.mark.parametrize(("f", "value", "saturated", "unsaturated"), [
    (E4M3FN, 448, 0x7E, 0x7E), (E4M3FN, 464, 0x7E, 0x7E),
    (E4M3FN, np.nextafter(np.float32(464), np.float32(465)), 0x7E, 0x7F), (E4M3FN, 480, 0x7E, 0x7F),
    (E4M3FN, np.inf, 0x7E, 0x7F), (E4M3FN, 2.0**-10, 0, 0), (E4M3FN, 1.5 * 2.0**-9, 2, 2),
    (E4M3FN, 17, 0x58, 0x58), (E4M3FN, 19, 0x5A, 0x5A), (E5M2, 57344, 0x7B, 0x7B),
    (E5M2, np.nextafter(np.float32(61440), np.float32(0)), 0x7B, 0x7B), (E5M2, 61440, 0x7B, 0x7C),
    (E5M2, np.inf, 0x7B, 0x7C), (E5M2, 2.0**-17, 0, 0), (E5M2, 1.5 * 2.0**-16, 2, 2),
], ids=str)
def test_values_of_the_specification(f, value, saturated, unsaturated):
    """The values are written out, so that oracle and reference cannot be wrong together."""
    x = np.array([value, -value], np.float32)
    for saturate, code in ((True, saturated), (False, unsaturated)):
        mirrored = code if code == 0x7F else code | 0x80
        assert numerics.narrow(x, f.dtype, saturate).view(np.uint8).tolist() == [code, mirrored]


@pytest.mark.parametrize("f", FP8, ids=by_name)
def test_differences_from_ml_dtypes(f):
    """ml_dtypes rounds alike, but overflows instead of saturating (E4M3 above 464: signed NaN; E5M2 from
    61440: Inf) and keeps the sign of a NaN (E5M2: 0x7E or 0xFE)."""
    for x in sources(f):
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = x.astype(f.dtype).view(np.uint8)
        ours = numerics.narrow(x, f.dtype).view(np.uint8)
        nan, sign = np.isnan(x), np.where(np.signbit(x), np.uint8(0x80), np.uint8(0))
        over = np.abs(x) > 464 if f is E4M3FN else np.abs(x) >= 61440
        assert np.array_equal(theirs[~over & ~nan], ours[~over & ~nan])
        assert np.array_equal(theirs[over], (f.nan if f is E4M3FN else f.inf) | sign[over])
        assert np.array_equal(theirs[nan], (0x7F if f is E4M3FN else 0x7E) | sign[nan])
        unsaturated = numerics.narrow(x, f.dtype, saturate=False).view(np.uint8)
        assert np.array_equal(unsaturated[~nan], np.where(over & (f is E4M3FN), f.nan, theirs)[~nan])


def test_e8m0_rounds_up():
    halves = [numerics.widen(oracle.patterns(half)) for half in HALVES]
    for x in itertools.chain(halves, [oracle.e8m0_boundaries(), every_nan()], oracle.random_f32(chunks=16)):
        assert_bytes_equal(numerics.narrow(x, float8_e8m0fnu), oracle.encode_e8m0(x).view(float8_e8m0fnu))


@pytest.mark.parametrize(("value", "code"), [
    (0.0, 0), (-0.0, 0), (2.0**-149, 0), (2.0**-127, 0), (1.0001 * 2.0**-127, 1), (2.0**-126, 1), (1, 127),
    (1.0000001, 128), (2.0**127, 254), (1.0000001 * 2.0**127, 255), (np.inf, 255), (np.nan, 255), (-1, 255),
    (-(2.0**-149), 255), (-np.inf, 255),
], ids=str)
def test_e8m0_values(value, code):
    assert numerics.round_up_e8m0(np.array([value], np.float32)).view(np.uint8).tolist() == [code]


def test_e8m0_widens_exactly():
    codes = np.arange(256, dtype=np.uint8)
    value = oracle.decode_e8m0(codes)
    assert_bytes_equal(numerics.widen(codes.view(float8_e8m0fnu)), numerics.one_nan(value.astype(np.float32)))
    assert_bytes_equal(numerics.round_up_e8m0(value.astype(np.float32)), codes.view(float8_e8m0fnu))


def test_e8m0_difference_from_ml_dtypes():
    """ml_dtypes rounds to nearest and converts zero to NaN: never more than our byte, and at most one
    less."""
    x = oracle.e8m0_boundaries()
    x = x[(x > 0) & (x <= 2.0**127)]
    steps = numerics.round_up_e8m0(x).view(np.uint8).astype(int) - x.astype(float8_e8m0fnu).view(np.uint8)
    assert set(steps.tolist()) == {0, 1}
    assert np.zeros(1, np.float32).astype(float8_e8m0fnu).view(np.uint8) == 255


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_nan_pattern(dtype):
    f = FORMATS[dtype]
    values = np.concatenate([every_nan(), *(numerics.widen(oracle.patterns(source)) for source in ALL)])
    nan = values[np.isnan(values)]
    for saturate in (True, False):
        out = numerics.narrow(nan, dtype, saturate).view(f.storage)
        assert set(out.tolist()) == {f.nan}


def test_f32_is_kept():
    for x in itertools.chain([oracle.boundaries(E4M3FN), oracle.e8m0_boundaries()],
                             oracle.random_f32(chunks=1)):
        expected = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).view(np.float32)
        assert_bytes_equal(numerics.narrow(x, float32), expected)


def test_products_are_correctly_rounded():
    """Compared with the exact product in f64, rounded once; subnormal and overflowing results are
    included."""
    rng = np.random.default_rng(3)
    for x in itertools.chain([oracle.boundaries(E5M2)], oracle.random_f32(chunks=2)):
        scale = rng.integers(0, 1 << 32, x.size, np.uint32).view(np.float32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            exact = (x.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
        assert_bytes_equal(numerics.one_nan(numerics.mul(x, scale)), numerics.one_nan(exact))
    assert numerics.mul(np.array([2.0**-126], np.float32), np.float32(0.5)).tolist() == [2.0**-127]


def test_quotients_are_correctly_rounded():
    """|a/b - q| is at most half a step of f32, and ties go to even, in exact arithmetic."""
    rng = np.random.default_rng(4)
    a, b = (v[np.isfinite(v) & (v != 0)][:3000]
            for v in rng.integers(0, 1 << 32, (2, 4000), np.uint32).view(np.float32))
    a[::3] = 1                                              # scale_inv is 1 / scale
    b[::5] = (b[::5].view(np.uint32) | np.uint32(0x7E000000)).view(np.float32)  # quotients are subnormal
    keep = np.isfinite(b)
    a, b = a[keep], b[keep]
    quotients = numerics.div(a, b)
    checked = 0
    for x, y, q in zip(a.tolist(), b.tolist(), quotients, strict=True):
        exact = Fraction(x) / Fraction(y)
        if abs(exact) > Fraction(float(np.finfo(np.float32).max)):
            continue
        error, even = abs(exact - Fraction(float(q))), int(q.view(np.uint32)) % 2 == 0
        below, above = (np.nextafter(q, np.float32(side)) for side in (-np.inf, np.inf))
        for other in (float(v) for v in (below, above) if np.isfinite(v)):
            other_error = abs(exact - Fraction(other))
            assert error < other_error or (even and error == other_error), (x, y, q)
        checked += 1
    assert checked > 2000
    assert numerics.div(np.float32(1),
                        np.array([0, -0.0, np.inf], np.float32)).tolist() == [np.inf, -np.inf, 0]


@pytest.mark.parametrize("dtype", [*(f.dtype for f in HALVES), float32], ids=str)
def test_amax(dtype):
    """Compared with Python's max over the elements, one by one."""
    rng = np.random.default_rng(5)
    for size in (1, 2, 7, 100, 3000):
        x = rng.integers(0, 1 << 8 * dtype.itemsize, size, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
        numbers = [abs(v) for v in numerics.widen(x).tolist() if v == v]
        assert numerics.amax(x).tolist() == [max(numbers, default=0.0)]
        propagated = numerics.amax(x, "propagate")
        if len(numbers) < size:
            assert propagated.view(np.uint32).tolist() == [0x7FC00000]
        else:
            assert propagated.tolist() == [max(numbers)]
    for nothing in (np.array([], dtype), np.array([np.nan, -np.nan], dtype), np.array([-0.0], dtype)):
        assert numerics.amax(nothing).view(np.uint32).tolist() == [0]
    assert numerics.amax(np.array([1, -np.inf, np.nan], dtype)).tolist() == [np.inf]
    assert numerics.amax(np.array([[2, -3], [1, 0]], dtype)).tolist() == [3]


@pytest.mark.parametrize(("start", "value", "end"), [
    (0.0, 2.5, 2.5), (3.0, 2.5, 3.0), (-1.0, 2.5, 2.5), (-0.0, 0.0, 0.0), (2.0, np.inf, np.inf),
    (np.inf, 2.0, np.inf)])
def test_raise_amax(start, value, end):
    buffer = np.array([start], np.float32)
    numerics.raise_amax(buffer, np.array([value], np.float32))
    assert_bytes_equal(buffer, np.array([end], np.float32))
