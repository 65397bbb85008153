"""Values and errors of swiglu_quantize and swiglu_backward_quantize. tests/ops/test_cases.py compares bytes
over all cases; test_swiglu_programs.py covers the choice of programs, tiles and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference
from cupy_fp8.arrays import bits
from cupy_fp8.formats import bfloat16, float16, float32
from cupy_fp8.ops.quantize.fused import output_of
from cupy_fp8.reference.quantize.swiglu import swiglu, swiglu_backward
from cupy_fp8.testing import assert_bytes_equal

DELAYED, CURRENT, BLOCKS, MX = fp8.DelayedScaling(), fp8.CurrentScaling(), fp8.BlockScaling(), fp8.MXScaling()
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "delayed": (DELAYED, {"scale": 0.5}), "current": (CURRENT, {}), "blocks": (BLOCKS, {}), "mx": (MX, {})}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def normal(shape: tuple[int, ...], dtype: Any = float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(float32).astype(dtype)


# ---- y ----
def test_y_is_the_formula():
    x = normal((64, 40))
    a, b = x[:, :20].astype(np.float64), x[:, 20:].astype(np.float64)
    np.testing.assert_allclose(swiglu(x), a / (1 + np.exp(-a)) * b, rtol=5e-7)
    p = normal((64,), seed=1)
    np.testing.assert_allclose(swiglu(x, probs=p), a / (1 + np.exp(-a)) * b * p[:, None], rtol=6e-7)
    a, b = np.minimum(a, 0.5), np.clip(b, -0.5, 0.5)
    np.testing.assert_allclose(swiglu(x, form="gpt_oss", clamp=0.5), a / (1 + np.exp(-1.702 * a)) * (b + 1),
                               rtol=6e-7)


def test_each_operation_is_rounded():
    """One element by hand: silu first, then b, then p."""
    a, b, p = (np.float32(v) for v in (1.3, -2.7, 0.3))
    x = np.array([[a, b]], float32)
    sigma = reference.numerics.sigmoid(np.array([a]))[0]
    assert swiglu(x, probs=np.array([p]))[0, 0] == ((a * sigma) * b) * p


def test_interleaved_is_another_order_of_columns():
    x, bias = normal((5, 24)), normal((24,), seed=1)
    order = np.arange(24).reshape(2, 12).T.reshape(-1)                  # the order is a0 b0 a1 b1 ...
    assert_bytes_equal(swiglu(x, bias=bias),
                       swiglu(np.ascontiguousarray(x[:, order]), bias=bias[order], interleaved=True))


def test_edges_of_y(run):
    """Consequences of the formula for special values: -Inf times sigma(-Inf) = 0 is NaN, NaN stays, and
    clamps keep it."""
    a = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 100, -100, -87.5, 1, 1], float32)
    b = np.array([2, 2, 2, -1, 1, 3, 3, 2.0**90, np.nan, np.inf], float32)
    x = np.concatenate([a, b])[None]
    y = swiglu(x)[0]
    assert y[0] == np.inf
    assert np.isnan(y[[1, 2, 8]]).all()
    assert y[3] == 0
    assert np.signbit(y[3])                                             # (0 * 0.5) * -1
    assert np.signbit(y[4])
    assert y[5] == 300
    assert y[6] == 0                                                    # exp(100) is Inf
    assert y[7] < -1e-9                                                 # a subnormal sigma is kept
    assert y[9] == np.inf
    clamped = swiglu(x, clamp=1.0)[0]
    assert np.isnan(clamped[[1, 2, 8]]).all()
    assert np.isfinite(clamped[[0, 5, 9]]).all()
    got = run.numpy(fp8.swiglu_quantize(run.array(x), DELAYED, scale=1.0))
    assert got.data.view(np.uint8)[0].tolist() == [0x7E, 0x7F, 0x7F, 0x80, 0x80, 0x79, 0x80, 0x80, 0x7F, 0x7E]


def test_y_is_not_rounded_in_between():
    """Codes are those of f32; rounding to bfloat16 first gives other codes."""
    x = normal((128, 512), bfloat16)
    q = reference.swiglu_quantize(x, BLOCKS)
    detour = reference.quantize_block(reference.astype(swiglu(x), bfloat16))
    assert (bits(q.data) != bits(detour.data)).mean() > 0.01
    assert_bytes_equal(q.data, reference.quantize_block(swiglu(x)).data)


def test_the_largest_scale_is_that_of_the_dtype(run):
    """The largest scale of float16 is 65504, though y is f32 and 448 / amax is beyond that."""
    x, probs = np.full((1, 256), 2.0**-24, float16), run.array(np.full(1, 2.0**-80, float32))
    for values, largest in ((x, 65504), (x.astype(bfloat16), 3.3895314e38),
                            (x.astype(float32), 3.4028235e38)):
        q = run.numpy(fp8.swiglu_quantize(run.array(values), fp8.BlockScaling(pow2_scale=False), probs=probs))
        assert q.scale_inv[0, 0] == np.float32(1) / np.float32(largest)


# ---- recipes and results ----
@every_recipe
def test_results_are_those_that_recipes_make(run, recipe):
    how, options = recipe
    x, grad, p = (run.array(a) for a in (normal((70, 96), bfloat16), normal((70, 48), bfloat16, 1),
                                         normal((70,), seed=2)))
    out = how.empty((70, 48), columnwise=True, like=x)
    pair = how.empty((70, 96), columnwise=True, like=x), run.array(np.empty(70, float32))
    assert fp8.swiglu_quantize(x, how, columnwise=True, out=out, **options) is out
    assert_bytes_equal(out, fp8.swiglu_quantize(x, how, columnwise=True, **options))
    assert fp8.swiglu_backward_quantize(grad, x, how, probs=p, columnwise=True, out=pair, **options) is pair
    assert_bytes_equal(pair, fp8.swiglu_backward_quantize(grad, x, how, probs=p, columnwise=True, **options))


def test_amax_is_that_of_y(run):
    x, amax = normal((300, 70), bfloat16), np.zeros(1, float32)
    x[3, 4] = np.nan
    for how, options in (RECIPES["delayed"], RECIPES["current"]):
        buffer = run.array(amax.copy())
        fp8.swiglu_quantize(run.array(x), how, amax=buffer, **options)
        assert_bytes_equal(run.numpy(buffer), reference.numerics.amax(swiglu(x)))


def test_scale_of_an_array_and_of_a_number(run):
    x = run.array(normal((9, 32)))
    for value in (0.0, np.inf, -2.0, 0.3):
        array = run.array(np.array([value], float32))
        assert_bytes_equal(run.numpy(fp8.swiglu_quantize(x, DELAYED, scale=array)),
                    run.numpy(fp8.swiglu_quantize(x, DELAYED, scale=value)))


# ---- gradients ----
def numerical(grad: np.ndarray, x: np.ndarray, p: np.ndarray,
              **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return gradients of sum(grad * y) by differences in f64."""
    def y(x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        a, b = (x[:, ::2], x[:, 1::2]) if options.get("interleaved") else (x[:, :half], x[:, half:])
        if c := options.get("clamp"):
            a, b = np.minimum(a, c), np.clip(b, -c, c)
        alpha, more = (1.702, 1) if options.get("form") == "gpt_oss" else (1, 0)
        return a / (1 + np.exp(-alpha * a)) * (b + more)

    x, dx, step = x.astype(np.float64), np.empty(x.shape), 1e-6
    for i in range(x.shape[1]):
        away = np.zeros(x.shape[1])
        away[i] = step
        dx[:, i] = (grad * p[:, None] * (y(x + away) - y(x - away))).sum(axis=1) / (2 * step)
    return dx, (grad * y(x)).sum(axis=1)


@pytest.mark.parametrize("options", [
    {}, {"clamp": 0.8}, {"form": "gpt_oss"}, {"form": "gpt_oss", "clamp": 0.8, "interleaved": True}], ids=str)
def test_gradients_are_those_of_y(options):
    grad, x, p = normal((33, 10)), normal((33, 20), seed=1), normal((33,), seed=2)
    dx, dprobs = swiglu_backward(grad, x, probs=p, **options)
    want_dx, want_dprobs = numerical(grad, x, p, **options)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-4, atol=1e-6)
    assert dprobs is not None
    np.testing.assert_allclose(dprobs, want_dprobs, rtol=1e-5, atol=1e-6)


def test_clipped_is_flat_and_the_limit_is_not(run):
    """The derivative is 1 at equality and 0 beyond; NaN is not clipped."""
    a, b = np.array([[2, 1, 0.5, np.nan, 1]], float32), np.array([[1, 1, -1, 1, -3]], float32)
    x, grad = np.concatenate([a, b], axis=1), np.ones((1, 5), float32)
    q, none = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), DELAYED, scale=1.0, clamp=1.0)
    assert none is None
    got = run.numpy(q).data.astype(float32)[0]
    assert got[[0, 9]].tolist() == [0, 0]
    assert (got[[1, 2, 6, 7]] != 0).all()
    assert np.isnan(got[[3, 8]]).all()


def test_sums_are_the_fixed_tree(run):
    """Sums over columns are the same whatever the tile: with many tiles, their tails, and pairs of columns.
    """
    for half, interleaved in ((1, False), (5, True), (64, True), (65, True), (127, False), (128, False),
                              (129, False), (1000, True), (1000, False), (40000, False)):
        rows = 19 if half < 40000 else 2  # one launch does not sum so many tiles
        grad, x, p = normal((rows, half), bfloat16), normal((rows, 2 * half), bfloat16,
                                                            seed=1), normal((rows,), seed=2)
        _, dprobs = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), MX, probs=run.array(p),
                                                 interleaved=interleaved)
        a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
        a, b, g = (v.astype(float32) for v in (a, b, grad))
        terms = (g * (a * reference.numerics.sigmoid(a))) * b
        while terms.shape[1] > 1:
            even = terms.shape[1] // 2 * 2
            terms = np.concatenate([terms[:, :even:2] + terms[:, 1:even:2], terms[:, even:]], axis=1)
        assert_bytes_equal(run.numpy(dprobs), terms[:, 0])


def test_one_result_for_both_orders_of_columns(run):
    """Sums of interleaved columns take twice the memory, which a result of the other order does not have."""
    x, grad, probs = (cases.values("normal", shape, bfloat16)
                      for shape in ((300, 2 * 200), (300, 200), (300,)))
    probs = probs.astype(float32)
    arguments = run.array(grad), run.array(x), MX
    out: Any = None
    for interleaved in (False, True, False, True):
        out = fp8.swiglu_backward_quantize(*arguments, probs=run.array(probs), interleaved=interleaved,
                                           out=out)
        want = reference.swiglu_backward_quantize(grad, x, MX, probs=probs, interleaved=interleaved)
        assert_bytes_equal(out, want)


def test_as_many_scales_as_32_bits_count_are_refused():
    """A row shorter than a block has a scale too, so any number of columns can have that many; the shape
    alone decides."""
    for rows, columns in (((1 << 32), 8), ((1 << 31), 160)):
        with pytest.raises(ValueError,
                           match=rf"^x: expected fewer than 2\^32 scales, .* have from {rows} rows on"):
            output_of((rows, columns), bfloat16, BLOCKS, True, False)
    output_of(((1 << 32) - 4, 8), bfloat16, BLOCKS, True, False)
