"""diagnostics.error against a count by hand, element by element."""

import math
from typing import Any

import numpy as np
import pytest
import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import diagnostics, testing
from cupy_fp8.diagnostics import ErrorReport, error, losses, on_gpu, pieces

E4M3, E5M2 = fp8.float8_e4m3fn, fp8.float8_e5m2
# the largest f32 that still rounds to the maximum, and the smallest that overflows
BORDER = {E4M3: (np.float32(464), np.nextafter(np.float32(464), np.float32(500))),
          E5M2: (np.nextafter(np.float32(61440), np.float32(0)), np.float32(61440))}


def by_hand(x, v):
    """Compute (sqnr_db, max_relative_error, underflowed, nan, nonfinite) with Python's floats and fsum."""
    pairs = list(zip(*(a.astype(np.float64).ravel().tolist() for a in (x, v)), strict=True))
    finite = [(a, b) for a, b in pairs if math.isfinite(a)]
    gaps = [abs(b - a) if math.isfinite(b) else math.inf for a, b in finite]
    signal, noise = math.fsum(a * a for a, _ in finite), math.fsum(g * g for g in gaps)
    lost = signal == 0 or noise == math.inf
    sqnr = math.inf if noise == 0 else -math.inf if lost else 10 * math.log10(signal / noise)
    relative = max((g / abs(a) for (a, _), g in zip(finite, gaps, strict=True) if a), default=0.0)
    underflowed, nan = sum(a != 0 and b == 0 for a, b in finite), sum(math.isnan(b) for _, b in pairs)
    return sqnr, relative, underflowed, nan, len(pairs) - len(finite)


def figures(report):
    return report.sqnr_db, report.max_relative_error, report.underflowed, report.nan, report.nonfinite


def sample(shape=(37, 53), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):        # the largest become Inf in float16, which is a separate case
        return (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(dtype)


@pytest.fixture
def special():
    """Return x of a dtype: every kind of number, with neighbours of each, in several blocks of threads."""
    def make(dtype, seed=0):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(1003) * 2.0 ** rng.integers(-160, 140, 1003)
        x[:13] = 0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 480, 57344, 61440, -65536, 2.0**-149, 2.0**-140
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    return make


@needs_host
@pytest.mark.parametrize("local", [False, True], ids=["all", "local"])
@pytest.mark.parametrize("codes", [E4M3, E5M2, None], ids=str)
@pytest.mark.parametrize("of", ["float32", "float16", fp8.bfloat16, "float64"], ids=str)
def test_the_kernel_adds_up_what_numpy_does(special, monkeypatch, of, codes, local):
    """Counts and the largest errors are equal, sums agree to the last digits."""
    monkeypatch.setattr(on_gpu, "_ELEMENTS", 256)
    x = special(of)
    x[512:] = sample((491,), of, seed=1)
    with np.errstate(all="ignore"):
        q = fp8.quantize_tensor(x.astype(np.float32), 4.0, dtype=codes or E4M3)
        values = q.dequantize() if codes else np.concatenate([x[7:800], x[:7], x[800:]]).astype(of)
        want = losses.error_sums(x, values, q.data if codes else None, local)
    with testing.executor("host"):
        got = on_gpu.error_sums(x, values, q.data if codes else None, local)
    assert got.shape == (4, losses.LOCAL_SUMS if local else losses.SUMS)
    if local:
        assert 0 < want[9] < want[10] == 32
        blocks = [slice(i, i + 256) for i in range(0, 1003, 256)]
        each = [losses.error_sums(x[i], values[i], q.data[i] if codes else None, True)[9] for i in blocks]
        np.testing.assert_allclose(got[:, 9], each, rtol=1e-13)
        np.testing.assert_allclose(got[:, 9:11].sum(axis=0), want[9:11], rtol=1e-13)
        got, want = np.delete(got, [9, 10], axis=1), np.delete(want, [9, 10])
    np.testing.assert_array_equal(got[:, -2:].max(axis=0), want[-2:])
    np.testing.assert_array_equal(got[:, 2:-3].sum(axis=0), want[2:-3])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(got[:, [0, 1, -3]].sum(axis=0), want[[0, 1, -3]], rtol=1e-13)
    assert not codes or (want[2:-3] > 0).all(), "every count counts something"


@needs_host
def test_more_elements_than_threads(monkeypatch):
    monkeypatch.setattr(on_gpu, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(on_gpu, "_ELEMENTS", 256)
    x = sample((37, 53))
    q = fp8.cast_transpose(x, 30.0)
    with testing.executor("host"):
        assert figures(error(x, q)) == pytest.approx(by_hand(x, q.dequantize()), rel=1e-12)
        assert error(x[:0], fp8.quantize_tensor(x[:0], 1.0)).elements == 0


@needs_host
def test_small_values_count_on_a_device(monkeypatch):
    """f32 subnormals, which CuPy's own arithmetic would flush to 0."""
    x = np.array([2.0**-140, 2.0**-130, 1], np.float32)
    module = stand_in.install(monkeypatch)
    report = error(module.asarray(x), module.asarray(np.zeros(3, np.float32)))
    assert (report.underflowed, report.elements) == (3, 3)


@pytest.mark.parametrize("chunk", [1, 100, 1961, 1 << 20])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("of", [np.float32, np.float16, fp8.bfloat16], ids=["f32", "f16", "bf16"])
def test_by_hand(monkeypatch, chunk, dtype, of):
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    x = sample((5, 7) if chunk == 1 else (37, 53), of)
    q = fp8.quantize_tensor(x, 30.0, dtype=dtype)
    report = error(x, q)
    assert report.elements == x.size
    assert figures(report) == pytest.approx(by_hand(x, q.dequantize()), rel=1e-12)
    scaled = np.abs(x.astype(np.float32)) * np.float32(30)
    over = scaled > 464 if dtype == E4M3 else scaled >= 61440
    assert report.saturated == int((over & np.isfinite(x)).sum())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_saturation_is_overflow_of_the_rounding(dtype):
    inside, beyond = BORDER[dtype]
    top = np.float32(fp8.finfo(dtype).max)
    x = np.array([top, inside, -inside, beyond, -beyond, 2 * beyond, np.inf, np.nan, 0.0, 1.0], np.float32)
    report = error(x, fp8.quantize_tensor(x, 1.0, dtype=dtype))
    assert (report.saturated, report.nan, report.nonfinite) == (3, 1, 2)
    unsaturated = fp8.astype(x, dtype, saturate=False).astype(np.float32)  # an equivalent definition
    assert int((~np.isfinite(unsaturated) & np.isfinite(x)).sum()) == 3


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_scale_of_max_over_amax_saturates_nothing(dtype):
    for seed in range(50):
        x = sample((8, 8), seed=seed)
        scale = np.float32(fp8.finfo(dtype).max) / fp8.compute_amax(x)
        assert error(x, fp8.quantize_tensor(x, scale, dtype=dtype)).saturated == 0


def test_every_kind_of_result_agrees():
    x = sample()
    q: Any = fp8.cast_transpose(x, 8.0)
    want = error(x, q)
    assert want == error(x, q.rowwise) == error(x, q.columnwise)
    assert want == error(x, fp8.results.Quantized(None, q.columnwise))
    assert error(x.T, q.columnwise.T) == error(x.T.copy(), q.rowwise.T)
    values = error(x, q.dequantize())
    assert values.saturated is None
    assert figures(values) == figures(want)
    ones = fp8.quantize_tensor(x, 1.0)
    assert error(x, ones.data) == error(x, ones)


def test_exact():
    x = np.array([[1, -2], [0, 448]], np.float32)
    assert error(x, fp8.quantize_tensor(x, 1.0)) == ErrorReport(4, math.inf, 0.0, 0, 0, 0, 0, 3, 0, 0.0, 0.0)


@pytest.mark.parametrize(("dtype", "smallest", "largest", "bound"), [
    (fp8.float8_e4m3fn, 2.0**-6, 448, 1 / 17), (fp8.float8_e5m2, 2.0**-14, 57344, 1 / 9)])
def test_error_of_normal_values(dtype, smallest, largest, bound):
    """Underflows, subnormal values, values rounded up to the smallest normal number, and saturated ones do
    not count."""
    x = np.array([smallest, 1.06 * smallest, smallest * 0.99, smallest / 2.5, 1e-12, -largest, largest * 1.1,
                  0, np.nan], np.float32)
    report = error(x, fp8.quantize_tensor(x, 1.0, dtype=dtype))
    assert (report.normal, report.subnormal, report.underflowed, report.saturated) == (3, 2, 1, 1)
    v = fp8.quantize_tensor(x, 1.0, dtype=dtype).dequantize().astype(np.float64)[1]
    wrong = abs(v - x[1].astype(np.float64)) / x[1].astype(np.float64)
    assert report.max_normal_error == wrong
    assert report.normal_error == pytest.approx(math.sqrt(wrong**2 / 3))
    many = np.linspace(smallest, largest, 100_003, dtype=np.float32)
    found = error(many, fp8.quantize_tensor(many, 1.0, dtype=dtype)).max_normal_error
    assert found is not None
    assert 0.99 * bound < found <= bound
    nothing = error(x, x)
    assert (nothing.normal, nothing.subnormal, nothing.normal_error, nothing.max_normal_error) == (None,) * 4


def test_known_figures():
    report = error(np.array([10, -1, 1e-9], np.float32), np.array([10, -1.5, 0], np.float32))
    assert report.sqnr_db == pytest.approx(10 * math.log10(101 / 0.25))
    assert (report.max_relative_error, report.underflowed, report.saturated) == (1.0, 1, None)


def test_a_broken_result_has_no_signal_left():
    x = np.array([1, 2, 3], np.float32)
    report = error(x, np.array([1, np.nan, 3], np.float32))
    assert (report.sqnr_db, report.max_relative_error, report.nan) == (-math.inf, math.inf, 1)
    assert error(x, np.array([1, np.inf, 3], np.float32)).sqnr_db == -math.inf
    assert error(np.zeros(3, np.float32), x).sqnr_db == -math.inf


def test_signalling_nan_is_silent():
    x = np.array([[0x7F800001, 0x3F800000]], np.uint32).view(np.float32)  # pytest turns warnings into errors
    q = fp8.quantize_tensor(x, 1.0)
    assert (error(x, q).nonfinite, error(x, q).nan) == (1, 1)
    assert diagnostics.blocks(x, fp8.quantize_block(x)).nan.tolist() == [[1]]


def test_nothing_to_compare():
    nothing = np.zeros((0, 3), np.float32)
    assert error(nothing, nothing) == ErrorReport(0, math.inf, 0.0, None, 0, 0, 0)
    x = np.array([np.nan, np.inf], np.float32)
    assert error(x, x) == ErrorReport(2, math.inf, 0.0, None, 0, 1, 2)


def test_f64_and_strided_input():
    x = sample((20, 30)).astype(np.float64)[::2, ::3]
    v = x.astype(np.float32)
    assert figures(error(x, v)) == pytest.approx(by_hand(x, v), rel=1e-12)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=20))
def test_any_values(pairs):
    x, v = (np.array([p[i] for p in pairs], np.float32) for i in (0, 1))
    assert figures(error(x, v)) == pytest.approx(by_hand(x, v), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("x", "q", "kind", "message"), [
    (np.zeros(3, np.int32), np.zeros(3, np.float32), TypeError,
     "x: expected dtype bfloat16, float16, float32, float64, got"),
    (np.zeros(3, np.float32), np.zeros(3, np.int8), TypeError,
     "q: expected a Scaled, a Quantized or an array"),
    (np.zeros(3, np.float32), [1, 2, 3], TypeError, "q: expected a numpy"),
    (np.zeros(3, np.float32), np.zeros(4, np.float32), ValueError,
     r"q: expected the shape of x, \(3,\), got \(4,\)"),
])
def test_errors(x, q, kind, message):
    with pytest.raises(kind, match=message):
        error(x, q)


def test_text():
    report = ErrorReport(1_048_576, 31.523, 1.0, None, 12_345, 0, 3)
    assert repr(report) == (
        "ErrorReport(SQNR 31.52 dB, max relative error 1; of 1,048,576 elements unknown saturated, 12,345 "
        "underflowed, 0 NaN, 3 non-finite in x)")
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<th>") == html.count("<td>") == 7
    assert "<td>31.52 dB</td>" in html


@pytest.mark.gpu
def test_cupy_equals_numpy():
    x = sample()
    device = fp8.asarray(x, like="cupy")
    for dtype in (E4M3, E5M2):
        host, there = (error(a, fp8.cast_transpose(a, 30.0, dtype=dtype).columnwise) for a in (x, device))
        assert (there.saturated, there.underflowed, there.nan) == (host.saturated, host.underflowed, host.nan)
        assert figures(there) == pytest.approx(figures(host), rel=1e-12)
