"""erf, tanh and the activations based on normal tails: accuracy, and equal bits from kernels and
reference."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_fp8 import backend, hostexec
from cupy_fp8.kernels import sources
from cupy_fp8.reference import numerics
from cupy_fp8.reference.quantize.activations import activation
from cupy_fp8.testing import assert_bytes_equal

FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "erf": numerics.erf, "tanh": numerics.tanh,
    "tail": lambda a: numerics.normal_tail(numerics.tail_argument(a)),
    "gelu": lambda a: activation(a, "gelu")[0], "gelu'": lambda a: activation(a, "gelu")[1],
    "gelu_tanh": lambda a: activation(a, "gelu_tanh")[0],
    "gelu_tanh'": lambda a: activation(a, "gelu_tanh")[1]}
SOURCE = Path(__file__).parent / "erf.cu"
F32 = np.float32
ONE_BITS, INF_BITS = 0x3F800000, 0x7F800000


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    """Return (name of a function, values) -> the results of the kernel's function."""
    def on_host(name: str, a: np.ndarray) -> np.ndarray:
        out = np.empty_like(a)
        kernel = hostexec.compile_kernel(SOURCE, "erf_of_all", include_dirs=[sources.root() / "include"],
                                         defines={"FUNCTION": str(list(FUNCTIONS).index(name))})
        kernel((2,), (32,), struct.pack("@PPq", a.ctypes.data, out.ctypes.data, a.size), shared_mem=0,
               resident=False)
        return out

    def on_gpu(name: str, a: np.ndarray) -> Any:
        cp = backend.cupy()
        module = cp.RawModule(code=SOURCE.read_text(),
                              options=("-std=c++17", f"-I{sources.root() / 'include'}",
                                       f"-DFUNCTION={list(FUNCTIONS).index(name)}"))
        given, out = cp.asarray(a), cp.empty(a.shape, cp.float32)
        params = np.frombuffer(struct.pack("@PPq", given.data.ptr, out.data.ptr, a.size), np.dtype("V24"))[0]
        module.get_function("erf_of_all")((1024,), (256,), (params,))
        return out.get()

    if request.param == "host" and hostexec.available() is not None:
        pytest.skip(str(hostexec.available()))
    return on_host if request.param == "host" else on_gpu


def floats(first: int, last: int, step: int = 1) -> np.ndarray:
    """Return every step-th float from one bit pattern to another; their number is a multiple of eight."""
    found = np.arange(first, last, step, dtype=np.uint32).view(F32)
    return found[: found.size // 8 * 8].copy()


def sweep(first: int, last: int, step: int, at_once: int = 1 << 20) -> Iterator[np.ndarray]:
    for start in range(first, last, step * at_once):
        yield floats(start, min(last, start + step * at_once), step)


def exact_erf(x: np.ndarray) -> np.ndarray:
    """Return erf of x >= 0 in float64, with an error of at most 1e-14: the series, or Lentz's continued
    fraction of erfc."""
    x = x.astype(np.float64)
    small, large = np.minimum(x, 2.5), np.clip(x, 2.5, 27)
    term = total = 2 / math.sqrt(math.pi) * small
    for n in range(1, 60):
        term = term * (small * small) * (-1 / n)
        total = total + term / (2 * n + 1)
    fraction = large
    for n in range(90, 0, -1):
        fraction = large + n / 2 / fraction
    return np.where(x < 2.5, total, 1 - np.exp(-large * large) / (fraction * math.sqrt(math.pi)))


def exact_tail(t: np.ndarray) -> np.ndarray:
    """Phi(-t) in float64."""
    return np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in t.tolist()])


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return errors in ulps of the exact results."""
    return np.abs(got - exact) / np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))


def test_the_truth_is_true():
    x = np.linspace(0, 6, 4001)
    np.testing.assert_allclose(exact_erf(x), [math.erf(v) for v in x], rtol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize(("name", "exact", "bound"),
                         [("erf", exact_erf, 1.6032), ("tanh", np.tanh, 1.9012)])
def test_within_two_ulps(run, name, exact, bound):
    """Every 16th float from 2^-12 to 16, and some everywhere. Both functions are odd. (All 2^32: 1.6031 and
    1.9011, docs/numerics.md.)"""
    worst = 0.0
    for first, last, step in ((0x39800000, 0x41800000, 16), (0, 0x39800000, 4001),
                              (0x41800000, INF_BITS, 4001)):
        for x in sweep(first, last, step):
            got = run(name, x)
            worst = max(worst, float(ulps(got, exact(x.astype(np.float64))).max(initial=0)))
            assert_bytes_equal(run(name, -x), -got)
    assert bound - 0.2 < worst < bound


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernel_and_reference_agree(run, name):
    rng = np.random.default_rng(0)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 2.0**-126, 1, -1, 0.55,
                        -0.55, 3e38, -3e38, 11.013834, 11.0138331, -11.013834, 1e19, -1e19, 2e19, -2e19, 87,
                        -87], F32)
    x = np.concatenate([special, rng.integers(0, 1 << 32, 1 << 18, np.uint64).astype(np.uint32).view(F32),
                        rng.normal(0, 3, 1 << 18).astype(F32), np.linspace(-12, 12, 1 << 18, dtype=F32)])
    if name == "tail":                                              # for NaN any number
        x = np.nan_to_num(x, posinf=np.inf, neginf=-np.inf)
    assert_bytes_equal(numerics.one_nan(run(name, x)), numerics.one_nan(FUNCTIONS[name](x)))


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_odd_and_exact_at_the_ends(name):
    x = np.array([0, np.inf, 3e38, 1e-45, 0.3, 1, 2], F32)
    got = FUNCTIONS[name](x)
    assert got[:3].tolist() == [0, 1, 1]
    assert got[3] == F32(1e-45)
    assert_bytes_equal(FUNCTIONS[name](-x), -got)
    assert np.isnan(FUNCTIONS[name](np.array([np.nan, -np.nan], F32))).all()


def test_what_activations_are_at_the_ends():
    """No finite number gives NaN, and GELU has its limits."""
    x = np.concatenate([floats(0, INF_BITS, 999_983), np.array([3.4e38, 1.9e19, 11.013834], F32)])
    for name in ("gelu", "gelu_tanh"):
        for sign in (1, -1):
            y, slope = activation(F32(sign) * x, name)
            assert np.isfinite(y).all()
            assert np.isfinite(slope).all()
            beyond = x > 20
            assert (y[beyond] == (x[beyond] if sign > 0 else 0)).all()
            assert (slope[beyond] == (sign > 0)).all()
    ends = np.array([np.inf, -np.inf], F32)
    assert activation(ends, "gelu")[0].tolist() == [np.inf, 0]
    assert activation(ends, "gelu")[1].tolist() == [1, 0]
    assert np.isnan(activation(ends, "gelu_tanh")[0]).tolist() == [False, True]


def test_the_tail_ends_at_exactly_0():
    """Above 0 before it, since exponents would wrap otherwise."""
    end = int(numerics._TAIL_END.view(np.uint32))
    t = np.arange(end - (1 << 20), end + 1, dtype=np.uint32).view(F32)
    q = numerics.normal_tail(t)
    assert q[-1] == 0
    assert (q[:-1] > 0).all()
    assert (np.diff(q) <= 0).all()


def test_tails_are_accurate():
    """Relative errors of Phi(-t): a few ulps where GELU's values are large, larger far below."""
    for first, last, bound in ((0.0, 1.5, 7e-7), (1.5, 3, 1e-5), (3, 5, 1e-4)):
        t = np.linspace(first, last, 20_001, dtype=F32)
        exact = exact_tail(t)
        assert np.max(np.abs(numerics.normal_tail(t) - exact) / exact) < bound


def test_gelu_is_accurate():
    x = np.linspace(-12, 12, 40_001, dtype=F32)
    a = x.astype(np.float64)
    phi = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    below = exact_tail(-a)
    y, slope = activation(x, "gelu")
    np.testing.assert_allclose(y, a * below, rtol=6e-7, atol=1.5e-7)
    np.testing.assert_allclose(slope, below + a * phi, rtol=0, atol=6e-7)
