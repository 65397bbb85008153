"""What equal options of quantisers in blocks mean, and that the reference makes no kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import reference, testing
from cupy_fp8.formats import float32
from cupy_fp8.kernels import Variant
from cupy_fp8.testing import assert_bytes_equal

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {fp8.quantize_block: reference.quantize_block,
                                                          fp8.quantize_mx: reference.quantize_mx}


@pytest.fixture(params=FUNCTIONS, ids=lambda f: f.__name__)
def quantize(request):
    return request.param


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
