"""What activation_quantize and activation_backward_quantize compute and refuse. tests/ops/test_cases.py
compares bytes over all cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_swiglu import DELAYED, every_recipe, normal

import cupy_fp8 as fp8
from cupy_fp8 import reference
from cupy_fp8.formats import bfloat16, float16, float32
from cupy_fp8.ops.quantize import activation as op
from cupy_fp8.ops.quantize import fused
from cupy_fp8.reference.quantize.activation import activation
from cupy_fp8.testing import assert_bytes_equal


def test_values_are_the_formula():
    x = normal((64, 40))
    a = x.astype(np.float64)
    sigma = 1 / (1 + np.exp(-a))
    y, slope = activation(x, "silu")
    np.testing.assert_allclose(y, a * sigma, rtol=5e-7)
    np.testing.assert_allclose(slope, sigma * (1 + a * (1 - sigma)), rtol=1e-5, atol=1e-7)


def test_each_operation_is_rounded():
    a = np.array([1.3, -0.7], float32)
    sigma = reference.numerics.sigmoid(a)
    y, slope = activation(a, "silu")
    assert (y == a * sigma).all()
    assert (slope == sigma * (1 + a * (1 - sigma))).all()


@every_recipe
@pytest.mark.parametrize("columns", [136, 57], ids=["wide", "any"])
@pytest.mark.parametrize("dtype", [bfloat16, *(pytest.param(dtype, marks=pytest.mark.full)
                                               for dtype in (float16, float32))], ids=str)
def test_it_is_swiglu_whose_other_half_is_1(run, recipe, columns, dtype):
    """Other kernels, the same bytes."""
    how, options = recipe
    x, grad = normal((70, columns), dtype), normal((70, columns), dtype, 1)
    gated = run.array(np.concatenate([x, np.ones_like(x)], axis=1))
    x, grad = run.array(x), run.array(grad)
    assert_bytes_equal(fp8.activation_quantize(x, how, columnwise=True, **options),
                       fp8.swiglu_quantize(gated, how, columnwise=True, **options))
    if how is DELAYED:
        both, _ = fp8.swiglu_backward_quantize(grad, gated, how, **options)
        dx = fp8.activation_backward_quantize(grad, x, how, **options)
        assert_bytes_equal(run.numpy(dx).data, np.ascontiguousarray(run.numpy(both).data[:, :columns]))


def test_edges(run):
    x = run.array(np.array([[np.inf, -np.inf, np.nan, 0, -0.0, 100, -100, -87.5]], float32))
    y = run.numpy(fp8.activation_quantize(x, DELAYED, scale=1.0)).data.view(np.uint8)[0].tolist()
    assert y == [0x7E, 0x7F, 0x7F, 0x00, 0x80, 0x6C, 0x80, 0x80]
    one = run.array(np.ones((1, 8), float32))
    dx = run.numpy(fp8.activation_backward_quantize(one, x, DELAYED, scale=1.0)).data.view(np.uint8)
    assert dx[0].tolist() == [0x7F, 0x7F, 0x7F, 0x30, 0x30, 0x38, 0x80, 0x80]


@every_recipe
def test_results_are_those_that_recipes_make(run, recipe):
    how, options = recipe
    x, grad = (run.array(normal((70, 96), bfloat16, seed)) for seed in (0, 1))
    calls: Any = ((fp8.activation_quantize, (x,)), (fp8.activation_backward_quantize, (grad, x)))
    for function, given in calls:
        out = how.empty((70, 96), columnwise=True, like=x)
        assert function(*given, how, columnwise=True, out=out, **options) is out
        assert_bytes_equal(out, function(*given, how, columnwise=True, **options))


def test_an_activation_has_few_programs():
    assert len(list(op.variants())) <= 60 * len(op.ACTIVATIONS)
    programs = op._SOURCES["silu"].by_path(fused.F32_BLOCKS, np.dtype(bfloat16), np.dtype(fp8.float8_e4m3fn),
                                           False)
    assert set(programs) == {fused.ANY, fused.PLAIN}


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"x": np.ones(4, float32)}, ValueError, r"x: expected shape \[M, K\], got \(4,\)"),
    ({"kind": "relux"}, ValueError, r"kind: expected one of \('silu',.*\), got 'relux'"),
    ({"recipe": fp8.BlockScaling((128, 128))}, ValueError, "recipe: expected blocks of one of"),
    ({"recipe": DELAYED}, ValueError, "scale: delayed scaling needs the scale"),
    ({"grad": np.ones((4, 7), float32)}, ValueError, r"grad: expected shape \(4, 8\), x's shape, got"),
    ({"grad": np.ones((4, 8), float16)}, TypeError, "grad: expected dtype float32, got float16"),
])
def test_refused(given, error, message):
    given = {"x": np.ones((4, 8), float32), "recipe": fp8.BlockScaling()} | given
    function = fp8.activation_backward_quantize if "grad" in given else fp8.activation_quantize
    with pytest.raises(error, match=message):
        function(**given)
