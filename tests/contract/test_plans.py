"""What quantize_block and quantize_mx keep from call to call: plans that depend on nothing but shape, dtype
and options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.formats import bfloat16, float32
from cupy_fp8.kernels import Variant
from cupy_fp8.ops.quantize import block_results, blocks, mx
from cupy_fp8.testing import assert_bytes_equal

FUNCTIONS: dict[Callable[..., Any], tuple[block_results.Quantizer, Callable[..., Any]]] = {
    fp8.quantize_block: (blocks._QUANTIZE, reference.quantize_block),
    fp8.quantize_mx: (mx._QUANTIZE, reference.quantize_mx),
}


@pytest.fixture(params=FUNCTIONS, ids=lambda f: f.__name__)
def quantize(request):
    return request.param


def test_a_second_call_plans_nothing(quantize, monkeypatch):
    quantizer, definition = FUNCTIONS[quantize]
    shape = (37, 64)
    first, second = (np.random.default_rng(seed).normal(size=shape).astype(float32) for seed in (0, 1))
    with testing.executor("host"):
        quantize(first, columnwise=True)
        monkeypatch.setattr(quantizer, "_make", None)
        before = quantizer._cached.cache_info()
        q = quantize(second, columnwise=True)
        after = quantizer._cached.cache_info()
    assert after.misses == before.misses
    want = definition(second, columnwise=True)
    for mine, wanted in ((q.rowwise, want.rowwise), (q.columnwise, want.columnwise)):
        for a, b in zip(mine, wanted, strict=True):
            assert_bytes_equal(a, b)


def test_plans_know_shape_dtype_order_and_options(quantize):
    """The struct of a launch is of its own call, whatever was called before."""
    x = np.random.default_rng(0).normal(size=(64, 96)).astype(float32)
    _, definition = FUNCTIONS[quantize]
    arrays = [x, x.T, x.reshape(96, 64), x.astype(bfloat16), x.reshape(2, 32, 96)]
    options = [{}, {"dtype": "float8_e5m2"}, {"columnwise": True}, {"rowwise": False, "columnwise": True}]
    with testing.executor("host"):
        for _ in range(2):
            for a, o in itertools.product(arrays, options):
                q, want = quantize(a, **o), definition(a, **o)
                for mine, wanted in ((q.rowwise, want.rowwise), (q.columnwise, want.columnwise)):
                    assert (mine is None) == (wanted is None)
                    if mine is not None:
                        for got, desired in zip(mine, wanted, strict=True):
                            assert_bytes_equal(got, desired)


@pytest.mark.parametrize(("right", "wrong", "error"), [
    ({"pow2_scale": True}, {"pow2_scale": 1}, TypeError),
    ({"pow2_scale": False}, {"pow2_scale": 0.0}, TypeError),
    ({"eps": 1.0}, {"eps": True}, TypeError),
    ({"block": (1, 128)}, {"block": (1, 128.0)}, ValueError),
    ({"block": (1, 128)}, {"block": (True, 128)}, ValueError),
])
def test_what_equals_a_right_option_stays_wrong(right, wrong, error):
    x = np.ones((3, 128), float32)
    fp8.quantize_block(x, **right)
    for _ in range(2):
        with pytest.raises(error, match=f"^{next(iter(wrong))}: expected") as raised:
            fp8.quantize_block(x, **wrong)
        assert raised.value.__context__ is None


@pytest.mark.parametrize("profile", ["te", "deepgemm", "torchao"])
def test_an_eps_of_minus_zero_is_zero(profile):
    x = np.zeros((2, 256), float32)
    x[0, 3], x[0, 200] = 3, 1e-30
    with testing.executor("host"):
        for eps in (-0.0, 0.0):
            q, want = (f(x, profile=profile, eps=eps) for f in (fp8.quantize_block, reference.quantize_block))
            assert_bytes_equal(q.data, want.data)
            assert_bytes_equal(q.scale_inv, want.scale_inv)


def test_the_reference_makes_no_kernels(quantize, monkeypatch):
    """A Variant looks for a GPU."""
    def no_variant(*_):
        raise AssertionError("a kernel was made")

    monkeypatch.setattr(Variant, "__init__", no_variant)
    x = np.ones((5, 7), float32)
    quantize(x, columnwise=True, out=quantize(x, columnwise=True))
