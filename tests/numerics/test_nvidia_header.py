"""The reference against NVIDIA's own host conversions: cuda_fp8.h of the CUDA toolkit, compiled with g++.

Known differences are asserted too: negative values beyond E4M3 without saturation (0xFF there, 0x7F here: one
NaN), negative values to E8M0 (the magnitude is converted there, NaN here), the NaN of a float output (0x7FFF
there; rule 4 here).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import nvrtc
import oracle
import pytest
from oracle import E4M3FN, E5M2, FP8, HALVES

from cupy_fp8.formats import bfloat16, float8_e8m0fnu, float16
from cupy_fp8.reference import astype
from cupy_fp8.testing import assert_bytes_equal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's wheels are for Linux")

SOURCE = r"""
#include <cuda_fp8.h>
#include <cstddef>

// One loop per conversion: EXPORT(name, input type, output type, expression of in[i]).
#define EXPORT(name, In, Out, ...) \
    extern "C" void name(const In* in, Out* out, size_t n, int e5m2, int saturate) { \
        const __nv_fp8_interpretation_t kind = e5m2 ? __NV_E5M2 : __NV_E4M3; \
        const __nv_saturation_t mode = saturate ? __NV_SATFINITE : __NV_NOSAT; \
        (void)kind, (void)mode; \
        for (size_t i = 0; i < n; i++) out[i] = __VA_ARGS__; \
    }
EXPORT(float32_to_fp8, float, unsigned char, __nv_cvt_float_to_fp8(in[i], mode, kind))
EXPORT(float16_to_fp8, __half_raw, unsigned char, __nv_cvt_halfraw_to_fp8(in[i], mode, kind))
EXPORT(bfloat16_to_fp8, __nv_bfloat16_raw, unsigned char, __nv_cvt_bfloat16raw_to_fp8(in[i], mode, kind))
EXPORT(float32_to_e8m0, float, unsigned char, __nv_cvt_float_to_e8m0(in[i], mode, cudaRoundPosInf))
EXPORT(bfloat16_to_e8m0, __nv_bfloat16_raw, unsigned char,
       __nv_cvt_bfloat16raw_to_e8m0(in[i], mode, cudaRoundPosInf))
EXPORT(fp8_to_float16, unsigned char, __half_raw, __nv_cvt_fp8_to_halfraw(in[i], kind))
EXPORT(e8m0_to_bfloat16, unsigned char, __nv_bfloat16_raw, __nv_cvt_e8m0_to_bf16raw(in[i]))
"""


class Header:
    """NVIDIA's conversions over whole arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def convert(self, name: str, x: np.ndarray, out: np.dtype, *, e5m2: bool = False,
                saturate: bool = True) -> np.ndarray:
        source, target = np.ascontiguousarray(x), np.full(x.shape, 0xA5, f"u{out.itemsize}").view(out)
        function = getattr(self._library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        function.restype = None
        function(source.ctypes.data, target.ctypes.data, source.size, e5m2, saturate)
        return target


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    compiler = os.environ.get("CXX") or "g++"
    assert shutil.which(compiler), f"{compiler} is needed to compile cuda_fp8.h"
    found = nvrtc.wheel_files("*/include/cuda_fp8.h")
    assert found, "cuda_fp8.h not found: pip install nvidia-cuda-runtime"
    folders = {path.parent for pattern in ("*/include/cuda_fp8.h", "*/include/crt/host_defines.h",
                                           "*/include/nv/target")
               for path in nvrtc.wheel_files(pattern)}
    includes = sorted({folder.parent if folder.name in ("crt", "nv") else folder for folder in folders})
    folder = tmp_path_factory.mktemp("nvidia_header")
    (folder / "header.cpp").write_text(SOURCE)
    library = folder / "header.so"
    done = subprocess.run([compiler, "-std=c++17", "-O2", "-shared", "-fPIC",
                           *(f"-I{path}" for path in includes), str(folder / "header.cpp"), "-o",
                           str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Header(ctypes.CDLL(str(library)))


def f32_values() -> Iterator[np.ndarray]:
    """Yield 2**24 values of random bits, 2**22 near the range of each format, and every boundary."""
    boundaries = [oracle.boundaries(f) for f in FP8] + [oracle.e8m0_boundaries()]
    return itertools.chain(boundaries, oracle.random_f32(chunks=16),
                           *(oracle.random_f32(f, chunks=4) for f in FP8))


@pytest.mark.parametrize("saturate", [True, False], ids=["saturating", "not saturating"])
@pytest.mark.parametrize("f", FP8, ids=lambda f: str(f.dtype))
class TestEncode:
    def test_f32(self, f, saturate, header):
        for x in f32_values():
            check_fp8(x, header.convert("float32_to_fp8", x, f.dtype, e5m2=f is E5M2, saturate=saturate),
                      saturate)

    @pytest.mark.parametrize("half", HALVES, ids=lambda half: str(half.dtype))
    def test_every_half(self, f, saturate, half, header):
        x = oracle.patterns(half)
        check_fp8(x, header.convert(f"{half.dtype}_to_fp8", x, f.dtype, e5m2=f is E5M2, saturate=saturate),
                  saturate)


def check_fp8(x: np.ndarray, theirs: np.ndarray, saturate: bool) -> None:
    ours = astype(x, theirs.dtype, saturate=saturate)
    if theirs.dtype == E4M3FN.dtype and not saturate:
        beyond = astype(x, np.float32) < -464
        assert set(theirs.view(np.uint8)[beyond]) <= {0xFF}
        assert set(ours.view(np.uint8)[beyond]) <= {0x7F}
        ours, theirs = ours[~beyond], theirs[~beyond]
    assert_bytes_equal(ours, theirs)


def test_f32_to_e8m0(header):
    for x in f32_values():
        check_e8m0(x, header.convert("float32_to_e8m0", x, float8_e8m0fnu, saturate=False))


def test_every_bfloat16_to_e8m0(header):
    x = oracle.patterns(oracle.BFLOAT16)
    check_e8m0(astype(x, np.float32), header.convert("bfloat16_to_e8m0", x, float8_e8m0fnu, saturate=False))


def check_e8m0(x: np.ndarray, theirs: np.ndarray) -> None:
    ours, negative = astype(x, float8_e8m0fnu), x < 0
    assert_bytes_equal(ours[~negative], theirs[~negative])
    assert (ours[negative].view(np.uint8) == 255).all()
    assert_bytes_equal(astype(-x[negative], float8_e8m0fnu), theirs[negative])


@pytest.mark.parametrize("f", FP8, ids=lambda f: str(f.dtype))
def test_decode(f, header):
    codes = oracle.patterns(f)
    theirs = header.convert("fp8_to_float16", codes, float16, e5m2=f is E5M2)
    check_nan(astype(codes, float16), theirs, 0x7E00)
    assert np.isnan(theirs).sum() == (2 if f is E4M3FN else 6)


def test_decode_e8m0(header):
    codes = np.arange(256, dtype=np.uint8).view(float8_e8m0fnu)
    check_nan(astype(codes, bfloat16), header.convert("e8m0_to_bfloat16", codes, bfloat16), 0x7FC0)


def check_nan(ours: np.ndarray, theirs: np.ndarray, nan: int) -> None:
    """Check that bits are equal, except NaN: `nan` here, 0x7FFF there."""
    a, b = ours.view(np.uint16), theirs.view(np.uint16)
    is_nan = b == 0x7FFF
    assert (a[is_nan] == nan).all()
    assert is_nan.any()
    assert np.array_equal(a[~is_nan], b[~is_nan])
