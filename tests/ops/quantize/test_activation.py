"""Values and errors of activation_quantize and activation_backward_quantize. tests/ops/test_cases.py compares
bytes over all cases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_swiglu import DELAYED, every_recipe, normal

import cupy_fp8 as fp8
from cupy_fp8 import reference
from cupy_fp8.formats import bfloat16, float16, float32
from cupy_fp8.kernels import sources
from cupy_fp8.ops.quantize import activation as op
from cupy_fp8.ops.quantize import fused
from cupy_fp8.reference.quantize.activations import activation
from cupy_fp8.testing import assert_bytes_equal

F32 = np.float32


def gelu(a: float) -> float:
    return a * 0.5 * math.erfc(-a / math.sqrt(2))


def gelu_tanh(a: float) -> float:
    return 0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


#: the activations in float64, by their usual formulas
FORMULAS: dict[str, Callable[[float], float]] = {
    "silu": lambda a: a / (1 + math.exp(-a)), "gelu": gelu, "gelu_tanh": gelu_tanh,
    "relu": lambda a: max(a, 0.0), "relu2": lambda a: max(a, 0.0) ** 2}
OF_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
every_unary = pytest.mark.parametrize("kind", op.UNARY)
every_gated = pytest.mark.parametrize("kind", op.GATED)


def slope_of(kind: str, a: float) -> float:
    """Return the derivative in float64, from differences of two steps."""
    f, h = FORMULAS[kind], 1e-3
    near, far = ((f(a + s) - f(a - s)) / (2 * s) for s in (h, 2 * h))
    return (4 * near - far) / 3


@pytest.mark.parametrize("kind", FORMULAS)
def test_values_and_slopes_are_the_formula(kind):
    x = normal((64, 40))
    y, slope = activation(x, kind)
    given = x.reshape(-1).tolist()
    np.testing.assert_allclose(y.reshape(-1), [FORMULAS[kind](a) for a in given], rtol=2e-5, atol=2e-7)
    smooth = np.abs(x.reshape(-1)) > 0.01                   # relu has no derivative at 0
    want = np.array([slope_of(kind, a) for a in given])
    np.testing.assert_allclose(slope.reshape(-1)[smooth], want[smooth], rtol=1e-5, atol=2e-6)


@every_gated
def test_gated_values_and_gradients_are_the_formula(run, kind):
    """Row by row in float64: values, gradients of both halves and of the weights."""
    m, h = 6, 40
    x, grad, p = normal((m, 2 * h)), normal((m, h), seed=1), normal((m,), seed=2)
    f = OF_GATED[kind]
    scale = {"scale": 16.0}
    given = {"kind": kind, "probs": run.array(p), **scale}
    y = run.numpy(fp8.activation_quantize(run.array(x), DELAYED, **given))
    q, dprobs = fp8.activation_backward_quantize(run.array(grad), run.array(x), DELAYED, **given)
    q, dprobs = run.numpy(q), run.numpy(dprobs)
    for i in range(m):
        a, b = x[i, :h].tolist(), x[i, h:].tolist()
        acts = [FORMULAS[f](v) for v in a]
        values = [act * w * float(p[i]) for act, w in zip(acts, b, strict=True)]
        assert_close(y.dequantize()[i], values)
        g = grad[i].astype(np.float64) * float(p[i])
        assert_close(q.dequantize()[i, :h],
                     [gj * w * slope_of(f, v) for gj, w, v in zip(g, b, a, strict=True)])
        assert_close(q.dequantize()[i, h:], g * acts)
        np.testing.assert_allclose(dprobs[i], np.sum(grad[i] * np.array(acts) * b), rtol=1e-4, atol=1e-5)


def assert_close(quantised: np.ndarray, want: Any) -> None:
    """Compare within e4m3's precision of values times 16."""
    np.testing.assert_allclose(quantised, np.clip(want, -28, 28), rtol=2**-4 + 1e-4, atol=2**-10 / 16 + 1e-6)


@every_recipe
@pytest.mark.parametrize("columns", [256, 54], ids=["wide", "any"])
def test_kind_swiglu_is_swiglu(run, recipe, columns):
    how, options = recipe
    x, grad = (run.array(normal((70, n), bfloat16, n)) for n in (columns, columns // 2))
    given = {**options, "columnwise": True, "probs": run.array(normal((70,)))}
    more = {"clamp": 1.0, "interleaved": True, "bias": run.array(normal((columns,), bfloat16))}
    for extra in ({}, more):
        assert_bytes_equal(fp8.activation_quantize(x, how, kind="swiglu", **given, **extra),
                           fp8.swiglu_quantize(x, how, **given, **extra))
        for got, want in zip(
                fp8.activation_backward_quantize(grad, x, how, kind="swiglu", **given, **extra),
                fp8.swiglu_backward_quantize(grad, x, how, **given, **extra), strict=True):
            assert_bytes_equal(got, want)


@every_gated
def test_options_of_gated_kinds_are_those_of_swiglu(run, kind):
    """Biases of experts, clamp and interleaved x, applied by hand before a call without them."""
    x, bias = normal((12, 64)), normal((2, 64), seed=1)
    grad = normal((12, 32), seed=2)
    biased = x.copy()
    biased[:5] += bias[0]
    biased[5:11] += bias[1]
    a, b = biased[:, ::2], biased[:, 1::2]
    plain = np.concatenate([np.minimum(a, F32(0.5)), np.clip(b, F32(-0.5), F32(0.5))], axis=1)
    options = {"bias": run.array(bias), "splits": [5, 6], "clamp": 0.5, "interleaved": True, "kind": kind}
    assert_bytes_equal(fp8.activation_quantize(run.array(x), DELAYED, scale=8.0, **options),
                       fp8.activation_quantize(run.array(plain), DELAYED, scale=8.0, kind=kind))
    q, none = fp8.activation_backward_quantize(run.array(grad), run.array(x), DELAYED, scale=8.0, **options)
    assert none is None
    want, _ = fp8.activation_backward_quantize(run.array(grad), run.array(plain), DELAYED, scale=8.0,
                                               kind=kind)
    got, want = (np.array(run.numpy(each).data.astype(F32)) for each in (q, want))
    inside = np.concatenate([a <= F32(0.5), np.abs(b) <= F32(0.5)], axis=1)
    assert 0 < np.count_nonzero(inside) < inside.size
    halves = np.concatenate([got[:, ::2], got[:, 1::2]], axis=1)
    np.testing.assert_array_equal(halves, np.where(inside, want, 0))


@pytest.mark.parametrize("kind", op.ACTIVATIONS)
def test_finite_numbers_give_numbers(run, kind):
    """Also the largest, whose squares overflow; a gradient of 0 is not multiplied by Inf."""
    ends = np.array([0, -0.0, 1e-45, -1e-45, 1e19, -1e19, 3e38, -3e38, 11.02, -11.02, 90, -90], F32)
    second = np.ones_like(ends) if kind in op.GATED else ends[:0]
    x = run.array(np.concatenate([ends, second])[np.newaxis])
    grad = run.array(np.zeros((1, ends.size), F32))
    y = fp8.activation_quantize(x, DELAYED, scale=1.0, kind=kind)
    dx: Any = fp8.activation_backward_quantize(grad, x, DELAYED, scale=1.0, kind=kind)
    for q in (y, dx[0] if kind in op.GATED else dx):
        assert np.isfinite(run.numpy(q).data.astype(F32)).all()


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


def test_a_kind_has_few_programs():
    """Path any has one program for all kinds, and kinds other than SiLU have fast ones only for bf16."""
    own = {kind: list(op._SOURCES[kind].variants()) for kind in op.UNARY}
    shared = set.intersection(*(set(variants) for variants in own.values()))
    assert len(shared) == 36
    assert {kind: len(variants) - 36 for kind, variants in own.items()} == {
        "silu": 24, "gelu": 9, "gelu_tanh": 9, "relu2": 9}
    programs = op._SOURCES["gelu"].by_path(fused.F32_BLOCKS, np.dtype(bfloat16), np.dtype(fp8.float8_e4m3fn),
                                           False)
    assert set(programs) == {fused.ANY, fused.PLAIN}


def test_path_any_has_the_activations_by_number():
    text = (sources.root() / "include/source/any_kind.cuh").read_text()
    names = re.search(r"enum class Kind : u32 \{ (.*) \};", text)
    assert names is not None
    assert tuple(names[1].split(", ")) == fused.KINDS


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"x": np.ones(4, float32)}, ValueError, r"x: expected shape \[M, K\], got \(4,\)"),
    ({"kind": "relux"}, ValueError, r"kind: expected one of \('silu',.*\), got 'relux'"),
    *[({name: value, "kind": "gelu"}, ValueError, f"{name}: kind 'gelu' has no second factor")
      for name, value in (("probs", np.ones(4, float32)), ("bias", np.ones(8, float32)), ("splits", [4]),
                          ("clamp", 7.0), ("interleaved", True))],
    ({"interleaved": 3}, TypeError, "interleaved: expected"),
    ({"kind": "geglu", "x": np.ones((4, 7), float32)}, ValueError, r"x: expected shape \[M, 2 H\]"),
    ({"kind": "reglu", "clamp": -1.0}, ValueError, "clamp: expected a number above 0"),
    ({"kind": "geglu", "grad": np.ones((4, 8), float32)}, ValueError, "the rows of x and half its columns"),
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
