"""log and log1p of the gate: accuracy, and equal bits from kernels and reference."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import quick_if

from cupy_fp8 import backend, hostexec
from cupy_fp8.kernels import sources
from cupy_fp8.reference import numerics
from cupy_fp8.testing import assert_bytes_equal

LOG, LOG1P, LOG_NEAR_ONE, SQRT, LESS_ONE = range(5)
SOURCE = Path(__file__).parent / "logarithm.cu"
F32 = np.float32
ONE, TWO, LARGEST = 0x3F800000, 0x40000000, 0x7F7FFFFF
SQRT_TWO, SQRT_TWO_LESS_ONE, ONE_LESS_SQRT_HALF = 0x3FB504F3, 0x3ED413CD, 0x3E95F61A
TO_1024, SMALL = 0x44800000, 0x39800000                                 # 1024, 2^-12

Function = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    """Return (function, values) -> the results of the kernel's function."""
    def on_host(function: int, a: np.ndarray) -> np.ndarray:
        out = np.empty_like(a)
        kernel = hostexec.compile_kernel(SOURCE, "logarithm_of", include_dirs=[sources.root() / "include"],
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
        module.get_function("logarithm_of")((1024,), (256,), (params,))
        return out.get()

    if request.param == "host" and hostexec.available() is not None:
        pytest.skip(str(hostexec.available()))
    return on_host if request.param == "host" else on_gpu


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(F32)


def sweep(first: int, last: int, step: int, at_once: int = 1 << 20) -> Iterator[np.ndarray]:
    """Yield floats of every step-th bit pattern, and the last one."""
    for start in range(first, last, step * at_once):
        yield floats(np.arange(start, min(last, start + step * at_once), step, dtype=np.uint64))
    yield floats(np.array([last]))


def worst(function: Function, exact: Function, first: int, last: int, step: int) -> float:
    """Return the largest error in ulps of the exact result."""
    found = 0.0
    for x in sweep(first, last, step):
        want = exact(x.astype(np.float64))
        ulp = np.ldexp(1.0, np.maximum(np.frexp(want)[1] - 24, -149))
        found = max(found, float((np.abs(function(x) - want) / ulp).max()))
    return found


@pytest.mark.parametrize("step", quick_if(lambda step: step > 1, [1, 13]))
def test_log_between_one_and_two(step):
    """All floats: 1.1389, at 1.5710016. The relative error is near 1 no larger than elsewhere."""
    assert 1.1 < worst(numerics.log, np.log, ONE + 1, TWO - 1, step) < 1.1389
    assert worst(numerics.log, np.log, ONE + 1, SQRT_TWO, step) < 1.0126


def test_log_up_to_1024_and_beyond():
    assert 0.9 < worst(numerics.log, np.log, TWO, TO_1024, 101) < 1
    assert worst(numerics.log, np.log, TO_1024, LARGEST, 1009) < 0.594


@pytest.mark.parametrize("step", quick_if(lambda step: step > 1, [1, 61]))
def test_log1p(step):
    """All floats of [2^-12, 1]: 1.7775, just above the bound where ln 2 is added. Below, y is the result up
    to rounding."""
    assert 1.7 < worst(numerics.log1p, np.log1p, SQRT_TWO_LESS_ONE - (1 << 16), 0x3F000000, 1) < 1.7775
    assert worst(numerics.log1p, np.log1p, SMALL, ONE, step) < 1.7775
    assert worst(numerics.log1p, np.log1p, SMALL, SQRT_TWO_LESS_ONE - 1, step) < 1.2
    assert worst(numerics.log1p, np.log1p, 1, SMALL, 10_007) < 0.501


@pytest.mark.parametrize("step", quick_if(lambda step: step > 1, [1, 41]))
def test_the_polynomial_is_within_1_2_ulp(step):
    """Of all floats on both sides of 1: 1.1625 below, 1.0401 above."""
    def below(t: np.ndarray) -> np.ndarray:
        return numerics._log_near_one(-t)

    assert 1.1 < worst(below, lambda t: np.log1p(-t), SMALL, ONE_LESS_SQRT_HALF, step) < 1.1625
    assert worst(numerics._log_near_one, np.log1p, SMALL, SQRT_TWO_LESS_ONE, step) < 1.0401


def test_ends():
    ln2 = F32(np.log(2))
    assert numerics.log(np.array([1, 2, 4, 2.0**127], F32)).tolist() == [0, ln2, 2 * ln2, F32(127) * ln2]
    found = numerics.log1p(np.array([0, 1, 2.0**-149, 2.0**-126], F32))
    assert found.tolist() == [0, ln2, 2.0**-149, 2.0**-126]
    assert not np.signbit(found[0])


def test_log_never_falls():
    """Also between binades, and where the reduced number changes sides."""
    for place in (SQRT_TWO, SQRT_TWO + (1 << 23), TWO, TWO + (1 << 23), TO_1024):
        around = floats(np.arange(place - 4096, place + 4096))
        assert (np.diff(numerics.log(around)) >= 0).all()


def test_kernels_and_reference_agree(run):
    rng = np.random.default_rng(0)
    ends = [ONE, ONE + 1, SQRT_TWO - 1, SQRT_TWO, SQRT_TWO + 1, TWO - 1, TWO, TO_1024, LARGEST]
    x = floats(np.concatenate([ends, rng.integers(ONE, LARGEST + 1, 1 << 18),
                               rng.integers(ONE, TWO, 1 << 18)]))
    assert_bytes_equal(run(LOG, x), numerics.log(x))
    ends = [0, 1, 0x7FFFFF, 0x800000, SQRT_TWO_LESS_ONE - 1, SQRT_TWO_LESS_ONE, SQRT_TWO_LESS_ONE + 1, ONE]
    y = floats(np.concatenate([ends, rng.integers(0, ONE + 1, 1 << 18), rng.integers(SMALL, ONE, 1 << 18)]))
    assert_bytes_equal(run(LOG1P, y), numerics.log1p(y))
    near = np.concatenate([floats(rng.integers(0, SQRT_TWO_LESS_ONE, 1 << 17)),
                           -floats(rng.integers(0, ONE_LESS_SQRT_HALF, 1 << 17))])
    assert_bytes_equal(run(LOG_NEAR_ONE, near), numerics._log_near_one(near))


def test_roots_and_differences(run):
    """Subnormal results too, and the signs of zeros."""
    rng = np.random.default_rng(0)
    x = floats(np.concatenate([[0, 1, 0x7FFFFF, 0x800000, 0x80000000, LARGEST, 0x7F800000],
                               rng.integers(0, LARGEST, 1 << 18)]))
    assert_bytes_equal(run(SQRT, x), numerics.sqrt(x))
    a = floats(np.concatenate([[ONE, ONE - 1, ONE + 1, 0, 0x80000000, 0x7F800000, 0xFF800000],
                               rng.integers(0x3F000000, 0x40800000, 1 << 17),
                               rng.integers(0, LARGEST, 1 << 17)]))
    assert_bytes_equal(run(LESS_ONE, a), numerics.sub(a, F32(1)))
