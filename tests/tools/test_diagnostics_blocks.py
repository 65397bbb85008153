"""diagnostics of data with a scale per block, against counts by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from block_data import COLUMN, ROW

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.diagnostics import blocks, error, per_block, pieces
from cupy_fp8.diagnostics.losses import count_per_block
from cupy_fp8.formats import INPUT_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from cupy_fp8.reference.convert.dequantize import element_scales

#: NaN scales are intended here; test_diagnostics_scales.py covers the warning
pytestmark = pytest.mark.filterwarnings("ignore::cupy_fp8.diagnostics.ScaleWarning")
NAMES = ("saturated", "underflowed", "nan", "negative_zeros", "exponents")


def quantized(x: np.ndarray, scale_inv: np.ndarray, block: Any, dtype: np.dtype = float8_e4m3fn,
              layout: Any = "compact", transposed: bool = False) -> Scaled:
    """Divide x by given scales and cast, like a quantiser. scale_inv: E8M0 bytes, or f32."""
    scale_inv = scale_inv.view(float8_e8m0fnu) if scale_inv.dtype == np.uint8 else scale_inv
    scales = element_scales(Scaled._of(x, scale_inv, x.shape, False, block, "compact")).astype(np.float64)
    with np.errstate(all="ignore"):
        data: Any = fp8.astype((x.astype(np.float64) / scales).astype(np.float32), dtype)
    if transposed:
        data = reference.transpose(data)
        scale_inv = scale_inv if 1 in block else np.ascontiguousarray(scale_inv.T)
    return Scaled(data, scale_inv, x.shape, transposed, block, "compact").to_layout(layout)


def sample(shape: tuple[int, ...] = (40, 70), dtype: np.dtype = float32) -> np.ndarray:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    x.reshape(-1)[3:9] = [0, -0.0, np.nan, np.inf, -np.inf, 1e-30]
    return reference.astype(x, dtype)


def overflows(ratio: float, dtype: np.dtype) -> bool:
    """Whether rounding without a limit exceeds the format."""
    return ratio > 464 if dtype == float8_e4m3fn else ratio >= 61440


@pytest.mark.parametrize("chunk", [50, 300, 1 << 20])
@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2], ids=str)
@pytest.mark.parametrize(("block", "layout", "transposed"), [
    (ROW, "compact", False), (ROW, "swizzled", True), (COLUMN, "compact", True), (COLUMN, "swizzled", False),
    ((32, 32), "compact", False), ((32, 32), "compact", True), ((1, None), "compact", False),
    ((None, 1), "compact", True), ((128, 128), "compact", False)])
def test_by_hand(monkeypatch, block, layout, transposed, dtype, chunk):
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    x = sample()
    rows, columns = (n if b is None else b for b, n in zip(block, x.shape, strict=True))
    grid = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    exponent = np.random.default_rng(1).integers(117, 131, grid).astype(np.uint8)
    if dtype == float8_e5m2:
        exponent -= 8
    if exponent.size > 1:
        exponent[-1, -1] = 255
    s = quantized(x, exponent, block, dtype, layout, transposed)
    values, want = s.dequantize(), np.zeros((4, *grid), np.int32)
    codes = bits(reference.transpose(s.data) if transposed else s.data)
    for i, j in np.ndindex(x.shape):
        at, value, v = (i // rows, j // columns), float(x[i, j]), float(values[i, j])
        e, finite, losses = int(exponent[at]), math.isfinite(value), want[:, at[0], at[1]]
        losses[0] += finite and e != 255 and overflows(abs(value) / 2.0 ** (e - 127), dtype)
        losses[1] += finite and value != 0 and v == 0
        losses[2] += math.isnan(v)
        losses[3] += codes[i, j] == 0x80
    assert want.sum(axis=(1, 2)).min() > 0
    report, whole = blocks(x, s), error(x, s)
    for name, counts in zip(NAMES, want, strict=False):
        got = getattr(report, name)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, counts)
    powers = np.where(exponent == 255, np.float32(np.nan), exponent.astype(np.float32) - 127)
    np.testing.assert_array_equal(report.exponents, powers)
    assert report.block == block
    assert (whole.saturated, whole.underflowed, whole.nan) == tuple(want.sum(axis=(1, 2))[:3])
    size = np.zeros(grid, np.int64)
    np.add.at(size, tuple(i // n for i, n in zip(np.indices(x.shape), (rows, columns), strict=True)), 1)
    np.testing.assert_array_equal(report.elements, size)
    alone = blocks(None, s)
    assert (alone.saturated, alone.underflowed, alone.scales) == (None, None, report.scales)
    for name in NAMES[2:]:
        np.testing.assert_array_equal(getattr(alone, name), getattr(report, name))


@pytest.mark.parametrize("block", [ROW, COLUMN, (7, 1), (1, 130), (16, 16), (128, 128), (150, 1), (3, 130)])
@pytest.mark.parametrize("shape", [(150, 130), (1, 130), (150, 1), (10, 11), (0, 3), (3, 0)])
def test_pieces_are_small_and_have_every_element_once(monkeypatch, shape, block):
    monkeypatch.setattr(pieces, "CHUNK", 100)
    seen = np.zeros(shape, np.int64)
    for elements, of_blocks in pieces.of_matrix(shape, block):
        seen[elements] += 1
        assert 0 < seen[elements].size <= 100
        for axis, (part, there, size) in enumerate(zip(elements, of_blocks, block, strict=True)):
            stop = min(part.stop, shape[axis])
            assert (there.start, there.stop) == (part.start // size, -(-stop // size))
            # a piece has either whole blocks from the first to the last, or a part of one
            assert there.stop - there.start == 1 or part.start % size == 0
    assert (seen == 1).all()


def test_a_part_of_a_block_takes_no_memory_for_all_of_it(monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK", 100)
    sizes = []

    def recorded(found, rows, columns):
        sizes.append(rows * columns)
        return count_per_block(found, rows, columns)

    monkeypatch.setattr(per_block, "count_per_block", recorded)
    x = sample((500, 3))
    s = quantized(x, np.array([[120, 121, 122]], np.uint8), (None, 1), transposed=True)
    assert blocks(x, s).underflowed.sum() == error(x, s).underflowed > 0
    assert max(sizes) <= 100


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_a_batch_is_its_matrices(dtype):
    x = sample((3, 40, 70), dtype)
    exponent = np.random.default_rng(2).integers(110, 140, (3, 40, 3)).astype(np.uint8)
    q = Quantized(quantized(x, exponent, ROW), quantized(x, np.full((3, 2, 70), 120, np.uint8), COLUMN))
    report = blocks(x, q)                                                   # for the row-wise part
    assert report.saturated.shape == report.exponents.shape == (3, 40, 3)
    for i in range(3):
        alone = blocks(x[i], quantized(x[i], exponent[i], ROW))
        for name in NAMES:
            np.testing.assert_array_equal(getattr(report, name)[i], getattr(alone, name))
    column = blocks(x, Quantized(None, q.columnwise))
    assert (column.nan.shape, column.block) == ((3, 2, 70), COLUMN)
    assert (column.exponents == -7).all()


def test_the_transposed_view():
    x = sample()
    s = quantized(x, np.random.default_rng(1).integers(110, 140, (40, 3)).astype(np.uint8), ROW)
    report, turned = blocks(x, s), blocks(x.T, s.T)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(turned, name), getattr(report, name).T)
    assert error(x.T, s.T) == error(x.T.copy(), s.T) == error(np.ascontiguousarray(x.T), s.T)
    for name in ("saturated", "underflowed"):
        assert getattr(error(x.T, s.T), name) == getattr(error(x, s), name)


def test_the_limits_of_the_scales():
    """2**-127 is an f32 subnormal, and 448 * 2**120 exceeds f32."""
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = np.array([np.finfo(np.float32).max, np.finfo(np.float32).max, 2.0**-126, 2.0**-149])
    s = quantized(x, np.array([[246], [247], [0], [0]], np.uint8), ROW)
    assert bits(s.data)[:, 0].tolist() == [0x7E, 0x78, 0x40, 0x00]
    report = blocks(x, s)
    assert report.saturated.ravel().tolist() == [1, 0, 0, 0]                # FLT_MAX is 512 * 2**119
    assert report.underflowed.ravel().tolist() == [0, 0, 0, 1]
    assert report.nan.ravel().tolist() == [0, 0, 0, 0]
    assert report.exponents.ravel().tolist() == [119, 120, -127, -127]


def test_exponents_of_f32_scales():
    largest = np.finfo(np.float32).max
    scales = np.array([[1, 3, 2.0**-127, 2.0**-149, 3 * 2.0**-130, 0, np.inf, np.nan, -1, -0.0, largest]],
                      np.float32)
    s = Scaled(np.zeros((1, 11 * 32), float8_e4m3fn), scales, (1, 11 * 32), block=ROW, scale_layout="compact")
    with np.errstate(all="ignore"):
        want = np.log2(scales.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(blocks(np.zeros((1, 11 * 32), np.float32), s).exponents, want)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 3, 64)], ids=str)
def test_nothing(shape):
    grid = (*shape[:-1], -(-shape[-1] // 32))
    s = Scaled(np.zeros(shape, float8_e4m3fn), np.zeros(grid, float8_e8m0fnu), shape, block=ROW,
               scale_layout="compact")
    report = blocks(np.zeros(shape, np.float32), s)
    assert report.saturated.shape == report.exponents.shape == grid
    known = grid[-1] > 0 and grid[0] > 0
    assert f"0 with −0; log2 scale_inv {'-127 … -127' if known else 'unknown'}" in repr(report)
    assert np.broadcast_to(report.elements, grid).sum() == 0


def test_text():
    x = np.full((2, 40), 448, np.float32)
    x[1, 0] = 1e-30
    s = quantized(x, np.array([[127, 126], [130, 255]], np.uint8), ROW)
    report = blocks(x, s)
    assert repr(report) == (
        "BlockReport(2×2 blocks: 1 with saturated elements, 1 with underflowed ones, 1 with NaN, 0 with −0; "
        "log2 scale_inv -1 … 3, mean 0.67 ± 1.70)")
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<th>") == html.count("<td>") == 7
    assert "<td>-1 … 3</td>" in html
    assert "unknown with saturated elements, unknown with underflowed ones" in repr(blocks(None, s))


@pytest.mark.parametrize(("x", "q", "kind", "message"), [
    (np.zeros((4, 32), np.int32), None, TypeError,
     "x: expected dtype bfloat16, float16, float32, float64, got int32"),
    ([1.0], None, TypeError, "x: expected a numpy.ndarray"),
    (np.zeros((4, 32), np.float32), np.zeros((4, 32), np.float32), TypeError,
     "q: expected a Scaled or Quantized, got ndarray"),
    (np.zeros((4, 32), np.float32), fp8.quantize_tensor(np.zeros((4, 32), np.float32), 1.0), ValueError,
     "q: expected data with a scale per block, got one scale for the tensor; use error"),
    (np.zeros((32, 4), np.float32), quantized(np.zeros((4, 32), np.float32), np.zeros((4, 1), np.uint8), ROW),
     ValueError, r"q: expected the shape of x, \(32, 4\), got \(4, 32\)"),
])
def test_errors(x, q, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        blocks(x, q)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("block", [ROW, COLUMN], ids=str)
def test_cupy_equals_numpy(block, layout, transposed):
    x = sample((3, 40, 70))
    grid = (3, 40, 3) if block == ROW else (3, 2, 70)
    s = quantized(x, np.random.default_rng(1).integers(115, 131, grid).astype(np.uint8), block, float8_e4m3fn,
                  layout, transposed)
    with testing.executor("cuda") as run:
        there, here = blocks(run.array(x), run.array(s)), blocks(x, s)
        whole = error(run.array(x), run.array(s))
    for name in NAMES:
        np.testing.assert_array_equal(fp8.asnumpy(getattr(there, name)), getattr(here, name))
    assert repr(there) == repr(here)
    for name in ("saturated", "underflowed", "nan"):
        assert getattr(whole, name) == getattr(here, name).sum()
