"""diagnostics.scale_span against exact fractions, and against what the scaling-aware transpose makes 0."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from block_data import result

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.diagnostics import SpanReport, Vanished, pieces, scale_span
from cupy_fp8.formats import FORMATS, FP8_DTYPES, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from cupy_fp8.layouts import cdiv

#: scales of 0 and NaN are intended here; test_diagnostics_scales.py covers the warning
pytestmark = pytest.mark.filterwarnings("error", "ignore::cupy_fp8.diagnostics.ScaleWarning")


def by_hand(values: np.ndarray, scales: np.ndarray, width: int, rows: int,
            dtype: np.dtype[Any]) -> tuple[list[list[float]], list[int]]:
    """Compute the definition in exact arithmetic: spans, and the counts of a report. values, scales: f32."""
    half = Fraction(FORMATS[dtype].smallest_subnormal) / 2
    spans: list[list[float]] = []
    counts = [0] * 6
    for top in range(0, values.shape[0], rows):
        spans.append([])
        for b in range(scales.shape[1]):
            tile = {i: [float(v) for v in values[i, b * width:(b + 1) * width]]
                    for i in range(top, min(top + rows, len(values)))
                    if 0 < scales[i, b] < math.inf}
            held = {i: line for i, line in tile.items() if any(v != 0 for v in line)}
            s = {i: Fraction(float(scales[i, b])) for i in tile}
            counts[0] += len(held)
            counts[1] += sum(v != 0 and not math.isnan(v) for line in tile.values() for v in line)
            spans[-1].append(math.nan if not held
                             else math.log2(max(s[i] for i in held) / min(s[i] for i in held)))
            largest = max((s[i] for i in held), default=Fraction(1))
            of_column = [target_of({i: line[column] for i, line in tile.items()}, s, dtype)
                         for column in range(len(next(iter(tile.values()), [])))]
            for at, target in ((2, [largest] * len(of_column)), (4, of_column)):
                for i, line in held.items():
                    left = [v != 0 and not (math.isfinite(v) and abs(Fraction(v)) * s[i] / t <= half)
                            for v, t in zip(line, target, strict=True)]
                    counts[at] += not any(left)
                    counts[at + 1] += sum(v != 0 and not there for v, there in zip(line, left, strict=True))
    return spans, counts


def target_of(column: dict[int, float], scales: dict[int, Fraction], dtype: np.dtype[Any]) -> Fraction:
    """Return the target scale of a column of a tile: the power of two that its largest value needs."""
    if any(math.isinf(v) for v in column.values()):
        return Fraction(2) ** 127
    products = [Fraction(abs(v)) * scales[i] for i, v in column.items() if math.isfinite(v)]
    needed = max(products, default=Fraction(0)) / Fraction(FORMATS[dtype].max)
    target = Fraction(2) ** -127 if needed else Fraction(1)
    while target < needed and target < Fraction(2) ** 127:
        target *= 2
    return target


def counts_of(report: SpanReport) -> list[int]:
    return [report.row_blocks, report.elements, *report.by_tile, *report.by_column]


def data(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Return arbitrary codes, mostly small ones; rows of zeros of both signs, of NaN, with a NaN, with a
    single value."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    codes[..., 1::3, :] &= 0x87
    codes[..., 4::9, :] &= 0x80
    codes[..., 5::11, :] = 0x7F
    codes[..., 6::13, :] &= 0x80
    codes[..., 6::13, ::50] = 0x01
    codes[..., 7::13, :] &= 0x80
    codes[..., 7::13, 3::40] = 0xFF
    return codes.view(dtype)


def scales_of(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "e8m0":
        e = rng.integers(110, 140, shape).astype(np.uint8)
        e[..., 2::17, :] = 255
        return e.view(float8_e8m0fnu)
    s = np.ldexp(np.float32(1), rng.integers(-12, 12, shape)).astype(np.float32)
    if kind == "any":
        s *= rng.uniform(1, 2, shape).astype(np.float32)
        s[..., 2::17, :], s[..., 3::23, :], s[..., 8::19, :], s[..., 9::29, :] = np.nan, np.inf, 0, -1
    if kind == "wide":
        s = np.ldexp(np.float32(1), rng.integers(-149, 128, shape)).astype(np.float32)
    return s


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["e8m0", "powers", "any", "wide"])
def test_by_hand(monkeypatch, kind, dtype, chunk):
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    for shape, width, rows in (((70, 100), 32, 32), (((40, 70), 64, 16))):
        q = Scaled(data(shape, dtype), scales_of(kind, (shape[0], cdiv(shape[1], width))), shape, False,
                   (1, width), "compact")
        report = scale_span(q, block=rows)
        spans, counts = by_hand(reference.numerics.widen(q.data), reference.numerics.widen(q.scale_inv),
                                width, rows, dtype)
        assert report.tile == (rows, width)
        assert counts_of(report) == counts
        assert min(counts) > 0
        assert report.spans.dtype == float32
        np.testing.assert_allclose(report.spans, np.array(spans, np.float32), rtol=3e-7)
        if kind != "any":
            np.testing.assert_array_equal(report.spans, np.array(spans, np.float32))
        assert report.largest == report.spans[~np.isnan(report.spans)].max()
        assert report.median == np.median(report.spans[~np.isnan(report.spans)])


@pytest.mark.parametrize("target", ["tile", "column"])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize(("block", "kind"), [((1, 128), "powers"), ((1, 128), "wide"), ((1, 32), "e8m0")])
def test_what_the_transpose_makes_zero(block, kind, dtype, target):
    shape = (300, 420)
    q = Scaled(data(shape, dtype), scales_of(kind, (300, cdiv(420, block[1]))), shape, False, block,
               "compact")
    column = fp8.scaling_aware_transpose(q, target=target).columnwise
    assert column is not None
    before, after = bits(q.data) & 0x7F != 0, bits(column.data).T & 0x7F != 0
    report = scale_span(q)
    vanished = report.by_tile if target == "tile" else report.by_column
    assert vanished.elements == (before & ~after).sum() > 0
    padded = np.zeros((2, 300, cdiv(420, block[1]) * block[1]), bool)
    padded[:, :, :420] = before, after
    held, left = np.asarray(padded.reshape(2, 300, -1, block[1]).any(axis=-1))
    assert vanished.row_blocks == (held & ~left).sum() > 0


def test_ties_vanish_and_what_is_above_does_not():
    """Half of the smallest subnormal rounds to 0, which is even."""
    for dtype, tiny in ((float8_e4m3fn, 2.0**-9), (float8_e5m2, 2.0**-16)):
        for scale, vanishes in ((tiny / 2, True), (np.nextafter(np.float32(tiny / 2), np.float32(1)), False)):
            codes = fp8.asarray([[1.0], [1.0]], dtype, like="numpy")
            scales = np.array([[1], [scale]], np.float32)
            report = scale_span(Scaled(codes, scales, (2, 1), False, (1, 128), "compact"))
            assert report.by_tile == (vanishes, vanishes)


def test_every_layout_and_the_transposed_view():
    shape = (140, 700)
    compact = Scaled(data(shape, float8_e4m3fn), scales_of("powers", (140, 6)), shape, False, (1, 128),
                     "compact")
    want = scale_span(compact)
    for layout in ("gemm_ready", "swizzled", "deepgemm_sm90", "deepgemm_sm100"):
        got = scale_span(compact.to_layout(layout))
        assert counts_of(got) == counts_of(want)
        np.testing.assert_array_equal(got.spans, want.spans)
    turned = Scaled(reference.transpose(compact.data), compact.scale_inv, shape, True, (1, 128), "compact")
    assert repr(scale_span(turned)) == repr(want)
    column = Scaled(turned.data, reference.transpose(compact.scale_inv), (700, 140), False, (128, 1),
                    "compact")
    assert repr(scale_span(column.T)) == repr(want)
    assert repr(scale_span(Quantized(compact, column.T))) == repr(want)


def test_a_batch_is_its_matrices():
    shape = (3, 70, 100)
    q = result(shape, (1, 32))
    report = scale_span(q, block=16)
    matrices = [Scaled(q.data[i], q.scale_inv[i], shape[1:], False, (1, 32), "compact") for i in range(3)]
    alone = [scale_span(matrix, block=16) for matrix in matrices]
    assert report.spans.shape == (3, 5, 4)
    np.testing.assert_array_equal(report.spans, np.stack([a.spans for a in alone]))
    assert counts_of(report) == np.sum([counts_of(a) for a in alone], axis=0).tolist()


def test_whole_rows():
    x = np.outer([1, 2**-20, 2**-20, 1], np.ones(300)).astype(np.float32)
    q = fp8.quantize_block(x, block=(1, None), pow2_scale=True)
    report = scale_span(q, block=2)
    assert (report.tile, report.spans.tolist()) == ((2, 300), [[20.0], [20.0]])
    assert report.by_tile == report.by_column == Vanished(2, 600)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 3, 64), (5, 40)], ids=str)
def test_nothing(shape):
    q = Scaled(np.zeros(shape, float8_e4m3fn), np.zeros((*shape[:-1], cdiv(shape[-1], 32)), np.float32),
               shape, False, (1, 32), "compact")
    report = scale_span(q)
    assert counts_of(report) == [0] * 6
    assert np.isnan(report.spans).all()
    assert math.isnan(report.largest)
    assert "scales up to unknown apart, median unknown; not 0: 0 row-blocks, 0 elements" in repr(report)


def test_text():
    x = np.outer([1e-4, 1, 100], np.ones(256)).astype(np.float32)
    report = scale_span(fp8.quantize_block(x))
    assert repr(report) == (
        "SpanReport(1×2 tiles of 128×128, scales up to 2^20 apart, median 2^20; "
        "not 0: 6 row-blocks, 768 elements; "
        "vanish by tile: 2 row-blocks, 256 elements, by column: 2 row-blocks, 256 elements)")
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<th>") == html.count("<td>") == 6
    assert "<td>2 row-blocks, 256 elements</td>" in html


X = np.ones((64, 64), np.float32)
COLUMN = fp8.quantize_block(X, rowwise=False, columnwise=True)


@pytest.mark.parametrize(("q", "options", "kind", "message"), [
    (X, {}, TypeError, "q: expected a Scaled or Quantized, got ndarray"),
    (fp8.quantize_tensor(X, 1.0), {}, ValueError,
     r"q: expected row-wise blocks \(1, B\), got one scale for the tensor"),
    (COLUMN, {}, ValueError,
     r"q: expected a row-wise part, got a Quantized without one; q\.columnwise\.T has its columns as rows"),
    (COLUMN.columnwise, {}, ValueError,
     r"q: expected row-wise blocks \(1, B\), got \(128, 1\); those of column-wise data are in its \.T"),
    (fp8.quantize_block(X, block=(128, 128)), {}, ValueError,
     r"q: expected row-wise blocks \(1, B\), got \(128, 128\)"),
    (fp8.quantize_block(X, block=(1, None)), {}, ValueError,
     r"block: expected how many rows share a scale, .*, got None"),
    (fp8.quantize_block(X), {"block": 0}, ValueError,
     r"block: expected how many rows share a scale, an integer of 1 or more, got 0"),
    (fp8.quantize_block(X), {"block": (1, 128)}, TypeError, r"block: expected an integer, got \(1, 128\)"),
])
def test_errors(q, options, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        scale_span(q, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_cupy_equals_numpy(layout):
    q = fp8.quantize_block(cases.values("normal", (300, 700), float32), scale_layout=layout)
    with testing.executor("cuda") as run:
        there = scale_span(run.array(q))
    assert isinstance(there.spans, np.ndarray)
    assert repr(there) == repr(scale_span(q))
