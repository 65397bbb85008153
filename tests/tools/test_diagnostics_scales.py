"""diagnostics.scales against a straightforward computation, and the warning of unusable scales."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import stand_in_arithmetic
from block_data import COLUMN, ROW, result
from hypothesis import given, settings

import cupy_fp8 as fp8
from cupy_fp8 import Scaled, diagnostics, testing
from cupy_fp8.arrays import bits
from cupy_fp8.diagnostics import ScaleReport, ScaleWarning, blocks, error, pieces, scale_report, scales
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu, float32
from cupy_fp8.reference.convert.dequantize import block_scales
from cupy_fp8.reference.numerics import widen

quiet = pytest.mark.filterwarnings("ignore::cupy_fp8.diagnostics.ScaleWarning")
COUNTS = ("zero", "negative", "infinite", "nan")


def by_hand(scale_inv: np.ndarray) -> dict[str, Any]:
    """Compute the fields from all scales at once in f64."""
    with np.errstate(invalid="ignore"):                 # signalling NaN
        s = widen(scale_inv).astype(np.float64).ravel()
    good = s[np.isfinite(s) & (s > 0)]
    want: dict[str, Any] = {"scales": s.size, "zero": int((s == 0).sum()), "negative": int((s < 0).sum()),
                            "infinite": int((s == np.inf).sum()), "nan": int(np.isnan(s).sum())}
    exponents = np.frexp(good)[1] - 1
    binades, counts = np.unique(exponents, return_counts=True)
    want["histogram"] = dict(zip(binades.tolist(), counts.tolist(), strict=True))
    if good.size:
        want |= {"minimum": good.min(), "maximum": good.max(), "mean": good.mean(), "std": good.std(),
                 "log2_mean": np.log2(good).mean(), "log2_std": np.log2(good).std()}
    return want


def check(report: ScaleReport, want: dict[str, Any]) -> None:
    assert all(getattr(report, name) == want[name] for name in ("scales", *COUNTS))
    shown = {report.first_exponent + i: n for i, n in enumerate(report.histogram) if n}
    assert shown == want["histogram"]
    if not shown:
        assert (report.first_exponent, report.histogram) == (0, ())
    else:
        assert report.histogram[0] > 0
        assert report.histogram[-1] > 0
        assert (report.minimum, report.maximum) == (want["minimum"], want["maximum"])
    for name in ("mean", "std", "log2_mean", "log2_std", "minimum", "maximum"):
        assert getattr(report, name) == pytest.approx(want.get(name, math.nan), rel=1e-11, abs=1e-12,
                                                      nan_ok=True)


@quiet
@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [float32, float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_scales(monkeypatch, dtype, seed, chunk):
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    s = result((40, 200), ROW, "compact", seed=seed, scale=dtype)
    check(scales(s), by_hand(s.scale_inv))


@quiet
@settings(deadline=None, max_examples=50)
@given(testing.mx_results())
def test_padding_does_not_count(q):
    """Padding may contain anything."""
    check(scales(q), by_hand(block_scales(q)))


@pytest.mark.parametrize(("block", "layout"), [
    ((1, 128), "gemm_ready"), ((1, 128), "deepgemm_sm90"), ((1, 128), "deepgemm_sm100"),
    ((128, 128), "gemm_ready"), ((1, None), "gemm_ready"), ((128, 1), "gemm_ready"), ((1, 64), "compact")])
def test_every_kind_of_scaling(block, layout):
    x = np.random.default_rng(0).standard_normal((201, 301)).astype(np.float32)
    row = block if block[1] != 1 else block[::-1]
    q = fp8.quantize_block(x, block=row, columnwise=True, scale_layout="gemm_ready").to_layout(layout)
    s: Any = q.columnwise if block[1] == 1 else q.rowwise
    want = by_hand(block_scales(s.to_layout("compact")))
    assert 0 < want["scales"] < s.scale_inv.size or layout in ("compact", "deepgemm_sm100")
    check(scales(s), want)
    assert blocks(x, s).scales == scales(s)


def test_one_scale():
    x = np.array([1, 2, 3], np.float32)
    report = scales(fp8.quantize_tensor(x, 10.0))
    value = float(np.float32(1) / np.float32(10))
    assert report.log2_mean == pytest.approx(math.log2(value), rel=1e-14)
    assert report == ScaleReport(1, 0, 0, 0, 0, value, value, value, 0.0, report.log2_mean, 0.0, -4, (1,))
    assert scales(fp8.cast_transpose(np.ones((4, 4), np.float32), 10.0)) == report
    assert repr(report) == "ScaleReport(1 scales, log2 scale_inv -3.322 … -3.322, mean -3.32 ± 0.00)"


def test_equal_scales_do_not_deviate(monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK", 100)
    shape = (7, 32 * 143)
    s = Scaled(np.zeros(shape, float8_e4m3fn), np.full((7, 143), 0.1, np.float32), shape, block=ROW,
               scale_layout="compact")
    report = scales(s)
    assert (report.std, report.log2_std, report.mean) == (0, 0, float(np.float32(0.1)))


def test_bins_are_exact_at_powers_of_two():
    """The value below a power of two belongs to the bin below it; f32 subnormals have bins of their own."""
    powers = np.float32(2.0) ** np.arange(-149, 128).astype(np.float32)
    values = np.concatenate([powers, np.nextafter(powers[2:], np.float32(0))])
    check(scale_report.report_of(values), by_hand(values))


def test_nothing():
    s = Scaled(np.zeros((0, 64), float8_e4m3fn), np.zeros((0, 2), float8_e8m0fnu), (0, 64), block=ROW,
               scale_layout="compact")
    report = scales(s)
    check(report, by_hand(s.scale_inv))
    assert report.unusable == 0
    assert "log2 scale_inv unknown" in repr(report)


def with_scales(values: list[float]) -> Scaled:
    shape = (1, 32 * len(values))
    codes = np.full(shape, 0x38, np.uint8).view(float8_e4m3fn)
    return Scaled(codes, np.array([values], np.float32), shape, block=ROW, scale_layout="compact")


@pytest.mark.parametrize(("values", "text"), [
    ([1, 0, 0], "of 3 scales, 2 are 0 "), ([1, np.nan], "of 2 scales, 1 is NaN "),
    ([-0.0], "of 1 scales, 1 is 0 "), ([1, -1, np.inf, -np.inf, np.nan, 0],
     "of 6 scales, 1 is 0 .*, 2 are negative .*, 1 is Inf .*, 1 is NaN ")])
def test_unusable_scales_are_named(values, text):
    s = with_scales(values)
    x = np.ones(s.shape, np.float32)
    for call in (lambda: scales(s), lambda: blocks(x, s), lambda: blocks(None, s), lambda: error(x, s),
                 lambda: diagnostics.scale_span(s)):
        with pytest.warns(ScaleWarning, match=text) as caught:
            call()
        assert [w.filename for w in caught] == [__file__]
    assert "ScaleWarning" in diagnostics.__all__


def test_one_scale_of_zero_is_named():
    x = np.ones((2, 2), np.float32)
    with pytest.warns(ScaleWarning, match="of 1 scales, 1 is NaN"):
        error(x, fp8.quantize_tensor(x, math.nan))
    with pytest.warns(ScaleWarning, match="of 1 scales, 1 is 0"):
        error(x, fp8.quantize_tensor(x, math.inf))


def test_good_scales_are_silent():
    x = np.zeros((4, 64), np.float32)                   # blocks of zeros have scales of 2**-127
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for s in (fp8.quantize_mx(x), fp8.quantize_block(x), fp8.quantize_tensor(x, 1.0)):
            scales(s)
            error(x, s)


def test_errors():
    with pytest.raises(TypeError, match="q: expected a Scaled or Quantized, got ndarray"):
        scales(np.ones(3, np.float32))  # type: ignore[arg-type]


@quiet
@pytest.mark.parametrize("dtype", [float32, float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(("block", "transposed"), [(ROW, False), (COLUMN, True), ((128, 128), True),
                                                   (None, False)])
def test_the_way_of_cupy(monkeypatch, block, transposed, dtype):
    """The same figures for a device's arrays, with only scales and small tables copied to the host."""
    monkeypatch.setattr(pieces, "CHUNK", 1000)
    x = np.random.default_rng(1).standard_normal((256, 320)).astype(np.float32)
    host: Any = (fp8.quantize_tensor(x, 3.0).rowwise if block is None
            else result((256, 320), block, "compact", transposed, seed=5, scale=dtype))
    want, whole = scales(host), error(x, host)
    per_block = None if block is None else blocks(x, host)
    module, copied = stand_in_arithmetic.install(monkeypatch)
    there = Scaled(module.asarray(bits(host.data)).view(host.dtype),
                   module.asarray(bits(host.scale_inv)).view(host.scale_inv.dtype), host.shape,
                   host.transposed, host.block, host.scale_layout)
    device_x = module.asarray(x)
    assert scales(there) == want
    assert vars(error(device_x, there)) == pytest.approx(vars(whole), rel=1e-12, nan_ok=True)
    if per_block is not None:
        report = blocks(device_x, there)
        assert repr(report) == repr(per_block)
        assert max(copied) <= x.nbytes / 32
        for name in ("saturated", "underflowed", "nan", "negative_zeros", "exponents"):
            np.testing.assert_array_equal(getattr(report, name).on_host, getattr(per_block, name))


@pytest.mark.gpu
@quiet
@pytest.mark.parametrize("dtype", [float32, float8_e8m0fnu], ids=str)
def test_cupy_equals_numpy(dtype):
    s = result((400, 3200), ROW, "compact", seed=7, scale=dtype)
    with testing.executor("cuda") as run:
        check(scales(run.array(s)), by_hand(s.scale_inv))
