"""Dequantising data with a scale per block: exact for every code under every scale, whatever the layout."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from block_data import COLUMN, LAYOUTS, MX, ROW, result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import note_launches
from tiers import needs_host

import cupy_fp8 as fp8
from cupy_fp8 import Quantized, Scaled, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import (
    FP8_DTYPES,
    INPUT_DTYPES,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
)
from cupy_fp8.layouts import scale_shape, swap_last
from cupy_fp8.reference.scales.swizzle import swizzle

mx_parameter = pytest.mark.parametrize(("block", "layout", "transposed"), MX)


def codes(*values: int, dtype: np.dtype = float8_e4m3fn) -> np.ndarray:
    return np.array(values, np.uint8).view(dtype)


# ---- the values ----
def exact(code: np.ndarray, scale: np.ndarray, fp8_format: oracle.FloatFormat, to: np.dtype) -> np.ndarray:
    """Return the bytes of fl(decode(code) * 2**(scale - 127)) rounded to `to`: the product is exact in
    f64."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = (fp8_format.decode(code) * oracle.decode_e8m0(scale)).astype(np.float32)
        if to == float32:
            return np.where(np.isnan(v), np.uint32(0x7FC00000),
                            v.view(np.uint32)).astype(np.uint32).view(np.float32)
        half = next(f for f in oracle.HALVES if f.dtype == to)
        return half.encode(v, saturate=False).view(to)


@pytest.mark.full
@pytest.mark.parametrize("to", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("fp8_format", oracle.FP8, ids=lambda f: str(f.dtype))
@mx_parameter
def test_every_code_under_every_scale(block, layout, transposed, fp8_format, to, run):
    """Line i has the scale byte i throughout, and holds all codes."""
    line, code = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1).view(float8_e8m0fnu)
    data, want = code.astype(np.uint8).view(fp8_format.dtype), exact(code, line, fp8_format, to)
    if layout == "swizzled":
        scale = swizzle(scale)
    if block == COLUMN:
        data, want = data.T, want.T
        scale = scale if layout == "swizzled" else scale.T
    stored, scale_inv = (np.ascontiguousarray(bits(a)).view(a.dtype) for a in (data.T if transposed else data,
                                                                               scale))
    s = Scaled(stored, scale_inv, (256, 256), transposed, block, layout)
    testing.assert_bytes_equal(run.numpy(fp8.dequantize(run.array(s), dtype=to)), want)


@pytest.mark.parametrize(("dtype", "code", "scale", "to", "want"), [
    (float8_e4m3fn, 0x01, 0, float32, 0x00002000),          # 2**-9 * 2**-127: an f32 subnormal
    (float8_e5m2, 0x01, 0, float32, 0x00000040),            # 2**-143
    (float8_e4m3fn, 0x08, 0, bfloat16, 0x0001),             # 2**-133: the smallest bfloat16 subnormal
    (float8_e4m3fn, 0x04, 0, bfloat16, 0x0000),             # 2**-134: a tie, to even
    (float8_e4m3fn, 0x05, 0, bfloat16, 0x0001),
    (float8_e4m3fn, 0x84, 0, bfloat16, 0x8000),
    (float8_e4m3fn, 0x80, 200, float32, 0x80000000),        # -0
    (float8_e4m3fn, 0x80, 255, float32, 0x7FC00000),        # a NaN scale, of zero too
    (float8_e4m3fn, 0xFF, 0, float16, 0x7E00),
    (float8_e5m2, 0xFE, 127, bfloat16, 0x7FC0),
    (float8_e5m2, 0xFC, 0, float32, 0xFF800000),            # -Inf stays, however small the scale
    (float8_e4m3fn, 0x7E, 246, float32, 0x7F600000),        # 448 * 2**119
    (float8_e4m3fn, 0x7E, 247, float32, 0x7F800000),        # past f32
    (float8_e4m3fn, 0x78, 247, bfloat16, 0x7F800000 >> 16),
    (float8_e4m3fn, 0x7E, 135, float16, 0x7C00),            # 448 * 256 is past f16
    (float8_e4m3fn, 0x7E, 134, float16, 0x7B00),            # 57344
])
@mx_parameter
def test_edges(block, layout, transposed, dtype, code, scale, to, want, run):
    shape = (1, 3) if block == ROW else (3, 1)
    scale_inv = np.full(scale_shape(shape, block, layout), scale, np.uint8).view(float8_e8m0fnu)
    data = codes(code, code, code, dtype=dtype).reshape(swap_last(shape) if transposed else shape)
    got = run.numpy(fp8.dequantize(run.array(Scaled(data, scale_inv, shape, transposed, block, layout)),
                                   dtype=to))
    assert bits(got).ravel().tolist() == [want] * 3


# ---- which scale ----
def by_loop(s: Scaled) -> np.ndarray:
    """Compute f32 values, an element at a time, by the formulas of the layouts."""
    out = np.empty(s.shape, np.float32)
    assert s.block is not None
    data, scale_bytes = np.asarray(s.data).astype(np.float32), np.asarray(bits(s.scale_inv))
    for *matrix, i, j in np.ndindex(s.shape):
        line, block = (i, j // 32) if s.block == ROW else (j, i // 32)
        here = scale_bytes[tuple(matrix)]
        if s.scale_layout == "compact":
            e = int(here[line, block] if s.block == ROW else here[block, line])
        else:
            tile = line // 128 * (here.shape[1] // 4) + block // 4
            e = int(here.reshape(-1)[tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4])
        there = (*matrix, i, j)
        value = data[(*matrix, j, i) if s.transposed else there]
        out[there] = value * np.float32(2.0 ** (e - 127))
    return out


@mx_parameter
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (70, 33), (2, 45, 140), (130, 36)], ids=str)
def test_by_loop(shape, block, layout, transposed, run):
    s = result(shape, block, layout, transposed)
    bits(s.data)[...] &= 0x77                                               # finite numbers
    bits(s.scale_inv)[...] = bits(s.scale_inv) % 64 + 96                    # so that products are f32 normals
    testing.assert_bytes_equal(run.numpy(fp8.dequantize(run.array(s))), by_loop(s))


def test_a_swizzled_scale_is_not_a_compact_one():
    s = result((128, 128), ROW)
    assert not fp8.bytes_equal(s.dequantize(), Scaled(s.data, s.scale_inv, s.shape, block=ROW,
                                                      scale_layout="swizzled").dequantize())


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128), (128, 1), (1, None), (None, 1)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_f32_scales(block, transposed, run):
    """A scale that is not a power of two: one rounding of the product, then one to the target."""
    shape = (140, 270)
    s = result(shape, block, transposed=transposed, scale=float32)
    rows, columns = (n if b is None else b for b, n in zip(block, shape, strict=True))
    scales = s.scale_inv.T if transposed and 1 not in block else s.scale_inv
    scale = scales[np.arange(140)[:, None] // rows, np.arange(270) // columns]
    data = (s.data.T if transposed else s.data).astype(np.float32)
    with np.errstate(all="ignore"):
        want = np.asarray(data * scale)
    want[np.isnan(want)] = np.array([0x7FC00000], np.uint32).view(np.float32)
    testing.assert_bytes_equal(run.numpy(fp8.dequantize(run.array(s))), want)


few = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@needs_host
@few
@given(testing.mx_results(), st.sampled_from(INPUT_DTYPES))
def test_any_result(s, dtype):
    want = reference.dequantize(s, dtype=dtype)
    assert want.shape == s.shape
    with testing.executor("host"):
        testing.assert_bytes_equal(fp8.dequantize(s, dtype=dtype), want)
        testing.assert_bytes_equal(fp8.dequantize(s.T, dtype=dtype), np.ascontiguousarray(want.swapaxes(-1,
                                                                                                        -2)))
        testing.assert_bytes_equal(fp8.dequantize(Quantized(None, s), dtype=dtype), want)


# ---- views, out=, Quantized ----
@mx_parameter
@pytest.mark.parametrize("shape", [(130, 260), (160, 288), (2, 64, 96), (40, 32), (32, 40)], ids=str)
def test_the_transposed_view(shape, block, layout, transposed, run, monkeypatch):
    """A .T dequantises to the transposed values, and its scales are read in place."""
    launched = note_launches(monkeypatch)
    host = result(shape, block, layout, transposed)
    s = run.array(host)
    turned = s.T
    launched.clear()
    for to in (float32, bfloat16):
        testing.assert_bytes_equal(run.numpy(fp8.dequantize(turned, dtype=to)),
                                   np.ascontiguousarray(reference.dequantize(host, dtype=to).swapaxes(-1,
                                                                                                      -2)))
    scale_at = s.scale_inv.ctypes.data if run.name != "cuda" else s.scale_inv.data.ptr
    assert {one.values[2] for one in launched} == (set() if run.name == "reference" else {scale_at})
    testing.assert_bytes_equal(run.numpy(turned.T.dequantize()), reference.dequantize(host))


def test_scales_that_no_kernel_reads_in_place_are_copied(run):
    """Scattered matrices, reversed rows: every view is read as its values."""
    whole = run.array(result((4, 64, 96), ROW))
    for pick in ((slice(None, None, 2), slice(None)), (slice(None), slice(None, None, -1)),
                 ([0, 2, 3], slice(None))):
        scale_inv = bits(whole.scale_inv)[pick].view(float8_e8m0fnu)
        data = whole.data[:scale_inv.shape[0]]
        s = Scaled(data, scale_inv, data.shape, block=ROW, scale_layout="compact")
        plain = Scaled(fp8.asnumpy(data), np.ascontiguousarray(fp8.asnumpy(scale_inv)), data.shape, block=ROW,
                       scale_layout="compact")
        testing.assert_bytes_equal(run.numpy(fp8.dequantize(s)), reference.dequantize(plain))


def test_the_row_wise_part_comes_first(run):
    row, column = run.array(result((64, 96), ROW, seed=1)), run.array(result((64, 96), COLUMN, seed=5))
    for q, part in ((Quantized(row, column), row), (Quantized(None, column), column)):
        testing.assert_bytes_equal(run.numpy(q.dequantize(float16)), run.numpy(part.dequantize(float16)))
        assert q.shape == (64, 96)


def test_one_launch(run, monkeypatch):
    launched = note_launches(monkeypatch)
    for block, layout, transposed in MX:
        s = run.array(result((64, 96), block, layout, transposed))
        launched.clear()
        s.dequantize()
        assert len(launched) == (run.name != "reference")
        empty = run.array(result((0, 96), block, layout, transposed))
        launched.clear()
        assert empty.dequantize().shape == (0, 96)
        assert launched == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(70, 100), (2, 64, 96)], ids=str)
def test_what_quantize_mx_makes(shape, layout, transposed, run):
    """Both directions return to within half a unit in the last place, which no block of normal numbers
    exceeds."""
    host = cases.values("normal", shape, bfloat16)
    q = fp8.quantize_mx(run.array(host), columnwise=True, transposed=transposed, scale_layout=layout)
    x = host.astype(np.float32)
    for part in (q.rowwise, q.columnwise):
        assert part is not None
        values = run.numpy(part.dequantize())
        normal = np.abs(x) > np.abs(x).max() * 2.0**-13
        assert (np.abs(values - x)[normal] <= np.abs(x)[normal] * 2.0**-4).all()
        testing.assert_bytes_equal(run.numpy(part.T.dequantize()), np.ascontiguousarray(values.swapaxes(-1,
                                                                                                        -2)))


def test_overlap_with_a_strided_view_of_the_scales():
    """The range from the first to the last scale of a view counts, not the bytes of its scales."""
    memory = np.zeros(1 << 16, np.uint8)
    scale_inv = memory[:64 * 400].view(float8_e8m0fnu).reshape(64, 400)[:, :3]
    s = Scaled(np.zeros((64, 96), float8_e4m3fn), scale_inv, (64, 96), block=ROW, scale_layout="compact")
    start = (-memory.ctypes.data % 4) + 63 * 400 - 100
    assert memory.ctypes.data + start > scale_inv.ctypes.data + scale_inv.nbytes
    with testing.executor("host"), pytest.raises(ValueError, match=r"^out: overlaps q.scale_inv in memory"):
        fp8.dequantize(s, out=memory[start:start + 64 * 96 * 4].view(np.float32).reshape(64, 96))


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*cases.LARGE_SHAPES, (4096, 4096), (3, 1056, 992)], ids=str)
@mx_parameter
def test_large(shape, block, layout, transposed):
    with testing.executor("cuda") as run:
        for seed, to in enumerate(INPUT_DTYPES):
            host = result(shape, block, layout, transposed, seed=seed, dtype=FP8_DTYPES[seed % 2])
            want = reference.dequantize(host, dtype=to)
            s = run.array(host)
            testing.assert_bytes_equal(s.dequantize(to), want)
            testing.assert_bytes_equal(s.T.dequantize(to), np.ascontiguousarray(want.swapaxes(-1, -2)))
