"""Per-tensor scaling: any number is a scale, two places for one scale, an amax that is written anew; every
float32 there is."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.formats import FP8_DTYPES, float16, float32


def one_element(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def test_compute_amax_does_not_accumulate(run):
    out = run.array(one_element(1e30))
    for value in (5.0, 2.0, 0.0):
        fp8.compute_amax(run.array(np.full((300, 70), -value, np.float32)), out=out)
        assert float(out[0]) == value


SCALAR_SCALES: list[Any] = [
    1, 3, 0, -2, 2**200, 0.37, -0.0, 1e300, -1e300, 1e-300, float("inf"), float("nan"), np.float32(0.37),
    np.float64(0.1), np.float16(0.1), np.int8(-3), np.uint64(2**63), np.float64(1e39)]


@pytest.mark.parametrize("scale", SCALAR_SCALES, ids=repr)
def test_a_scalar_scale_is_its_float32(scale, run):
    host = cases.values("bits", (24, 40), float32)
    x = run.array(host)
    with np.errstate(over="ignore"):
        array = np.array([np.float32(scale)])
    want = reference.cast_transpose(host, array)
    for found in (fp8.cast_transpose(x, scale), fp8.cast_transpose(x, run.array(array)),
                  fp8.cast_transpose(x, scale, out=fp8.cast_transpose(x, 1.0))):
        testing.assert_bytes_equal(run.numpy(found), want)
    for found in (fp8.quantize_tensor(x, scale), DelayedScaling().quantize(x, scale=scale)):
        testing.assert_bytes_equal(run.numpy(found), reference.quantize_tensor(host, array))


@pytest.mark.parametrize("call", [
    lambda m, x, **out: m.cast_transpose(x, 3.0, **out),
    lambda m, x, **out: m.quantize_tensor(x, 3.0, columnwise=True, transposed=False, **out),
    lambda m, x, **out: m.swiglu_quantize(x, DelayedScaling(), scale=0.7, columnwise=True, **out)])
def test_separate_scale_inv_are_both_written(call, run):
    host = cases.values("normal", (33, 40), float16)
    fresh: Any = call(fp8, run.array(host))
    row, column = fresh.rowwise, fresh.columnwise
    out = Quantized(row, Scaled(column.data, fp8.empty_like(row.scale_inv), column.shape, column.transposed))
    for a in (row.data, column.data, row.scale_inv, out.columnwise.scale_inv):
        cases.poison(a)
    assert call(fp8, run.array(host), out=out) is out
    testing.assert_bytes_equal(out, call(reference, host))


# ---- every float32 ----
CHUNK, BUCKET = 1 << 26, 1 << 16        # float32 patterns per launch; those that share their upper half


class Expected:
    """The reference's bytes for every float32. Rounding is monotonic in the magnitude, so a bucket whose
    first and last pattern give one byte gives it throughout; only the few others are computed in full."""

    def __init__(self, dtype: np.dtype) -> None:
        first = np.arange(1 << 16, dtype=np.uint32) << 16
        self.dtype = dtype
        self.byte, last = self.of(first), self.of(first | 0xFFFF)
        different = np.flatnonzero(self.byte != last)
        self.full = {int(b): self.of(first[b] | np.arange(BUCKET, dtype=np.uint32)) for b in different}

    def of(self, patterns: np.ndarray) -> np.ndarray:
        return bits(reference.quantize_tensor(patterns.view(np.float32), np.float32(1),
                                              dtype=self.dtype).data)

    def differs(self, bucket: int, got: np.ndarray) -> str:
        """Return the first difference of a bucket's bytes, or nothing."""
        want = self.full.get(bucket, self.byte[bucket])
        wrong = np.flatnonzero(got != want)
        if not wrong.size:
            return ""
        return f"{self.dtype} of {(bucket << 16) + int(wrong[0]):#010x}: {got[wrong[0]]:#04x} is wrong"


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_buckets_are_the_reference(dtype):
    expected = Expected(dtype)
    assert 100 < len(expected.full) < 400
    some = np.random.default_rng(5).integers(0, 1 << 16, 40)
    edges = (0, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xFF80, 0xFFFF)
    for bucket in (*some.tolist(), *list(expected.full)[:5], *edges):
        got = expected.of((np.uint32(bucket) << 16) | np.arange(BUCKET, dtype=np.uint32))
        assert expected.differs(bucket, got) == ""
        got[77] ^= 1
        assert "is wrong" in expected.differs(bucket, got)


def every_float32() -> None:
    """quantize_tensor (scale 1) of all 2**32 bit patterns, to both formats: bytes equal to the
    reference's."""
    cp = backend.cupy()
    one_on_gpu, patterns = cp.ones(1, cp.float32), cp.arange(CHUNK, dtype=cp.uint32)
    out = {dtype: DelayedScaling(dtype).empty(CHUNK, like=patterns) for dtype in FP8_DTYPES}
    expected = {dtype: Expected(dtype) for dtype in FP8_DTYPES}
    compared = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, 1 << 32, CHUNK):
            x = (patterns + cp.uint32(first)).view(cp.float32)
            for dtype in FP8_DTYPES:
                cases.poison(out[dtype].data)
                fp8.quantize_tensor(x, one_on_gpu, dtype=dtype, out=out[dtype])
                got = fp8.asnumpy(out[dtype].data).view(np.uint8).reshape(-1, BUCKET)
                buckets = range(first // BUCKET, first // BUCKET + len(got))
                assert [text for text in pool.map(expected[dtype].differs, buckets, got) if text] == []
                compared += got.size
    print("compared", compared)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("bitcode", ["0", "1"], ids=["hardware", "bitcode"])
def test_every_float32(bitcode):
    """The test runs in a fresh process, since kernels compiled for the other conversions would be used again.
    """
    root = str(Path(fp8.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"CUPY_FP8_BITCODE": bitcode, "PYTHONPATH": path}
    program = f"import {Path(__file__).stem} as tests; tests.every_float32()"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"compared {2 * 2**32}\n"
