"""swiglu_quantize and swiglu_backward_quantize: what they compute, call by call. Bytes over all cases are compared in test_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls.row_segments import GroupRows
from cupy_fp8.calls.splits import Groups
from cupy_fp8.formats import bfloat16, float8_e5m2, float16, float32
from cupy_fp8.ops.quantize import swiglu as op
from cupy_fp8.ops.quantize.swiglu import _plan
from cupy_fp8.reference.quantize.swiglu import swiglu, swiglu_backward
from cupy_fp8.results import Quantized, Scaled
from cupy_fp8.testing import assert_bytes_equal

DELAYED, CURRENT, BLOCKS, MX = fp8.DelayedScaling(), fp8.CurrentScaling(), fp8.BlockScaling(), fp8.MXScaling()
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "delayed": (DELAYED, {"scale": 0.5}), "current": (CURRENT, {}), "blocks": (BLOCKS, {}), "mx": (MX, {})}


def normal(shape: tuple[int, ...], dtype: Any = float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(float32).astype(dtype)


def parts(q: Quantized) -> list[Any]:
    return [a for part in (q.rowwise, q.columnwise) if part is not None for a in part]


def assert_same(actual: Quantized, desired: Quantized) -> None:
    assert len(parts(actual)) == len(parts(desired))
    for a, b in zip(parts(actual), parts(desired), strict=True):
        assert_bytes_equal(a, b)


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


# ---- y ----
def test_y_is_the_formula():
    x = normal((64, 40))
    a, b = x[:, :20].astype(np.float64), x[:, 20:].astype(np.float64)
    np.testing.assert_allclose(swiglu(x), a / (1 + np.exp(-a)) * b, rtol=5e-7)
    p = normal((64,), seed=1)
    np.testing.assert_allclose(swiglu(x, probs=p), a / (1 + np.exp(-a)) * b * p[:, None], rtol=6e-7)
    a, b = np.minimum(a, 0.5), np.clip(b, -0.5, 0.5)
    np.testing.assert_allclose(swiglu(x, form="gpt_oss", clamp=0.5), a / (1 + np.exp(-1.702 * a)) * (b + 1), rtol=6e-7)


def test_each_operation_is_rounded():
    """One element by hand: silu first, then b, then p."""
    a, b, p = (np.float32(v) for v in (1.3, -2.7, 0.3))
    x = np.array([[a, b]], float32)
    sigma = reference.numerics.sigmoid(np.array([a]))[0]
    assert swiglu(x, probs=np.array([p]))[0, 0] == ((a * sigma) * b) * p


def test_interleaved_is_another_order_of_columns():
    x, bias = normal((5, 24)), normal((24,), seed=1)
    order = np.arange(24).reshape(2, 12).T.reshape(-1)                  # a0 b0 a1 b1 ...
    assert_bytes_equal(swiglu(x, bias=bias), swiglu(np.ascontiguousarray(x[:, order]), bias=bias[order], interleaved=True))


def test_edges_of_y(run):
    """What follows from the formula where numbers end: -Inf times sigma(-Inf) = 0 is NaN, NaN stays, and clamps keep it."""
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
    """Quantised from f32, where a detour through bfloat16 gives other codes."""
    x = normal((128, 512), bfloat16)
    q = reference.swiglu_quantize(x, BLOCKS)
    detour = reference.quantize_block(reference.astype(swiglu(x), bfloat16))
    assert (bits(q.data) != bits(detour.data)).mean() > 0.01
    assert_bytes_equal(q.data, reference.quantize_block(swiglu(x)).data)


def test_the_largest_scale_is_that_of_the_dtype(run):
    """Of float16 65504, though y is f32; where 448 / amax is beyond that."""
    x, probs = np.full((1, 256), 2.0**-24, float16), run.array(np.full(1, 2.0**-80, float32))
    for values, largest in ((x, 65504), (x.astype(bfloat16), 3.3895314e38), (x.astype(float32), 3.4028235e38)):
        q = run.numpy(fp8.swiglu_quantize(run.array(values), fp8.BlockScaling(pow2_scale=False), probs=probs))
        assert q.scale_inv[0, 0] == np.float32(1) / np.float32(largest)


# ---- recipes and results ----
def test_directions_of_one_read(run, recipe):
    how, options = recipe
    x = run.array(normal((70, 96), bfloat16))
    both = fp8.swiglu_quantize(x, how, columnwise=True, **options)
    row, column = fp8.swiglu_quantize(x, how, **options), fp8.swiglu_quantize(x, how, rowwise=False, columnwise=True, **options)
    assert both.shape == (70, 48)
    for a, b in zip(parts(both), parts(row) + parts(column), strict=True):
        assert_bytes_equal(a, b)


def test_results_are_those_that_recipes_make(run, recipe):
    how, options = recipe
    x = run.array(normal((70, 96), bfloat16))
    fresh = fp8.swiglu_quantize(x, how, columnwise=True, **options)
    out = how.empty((70, 48), columnwise=True, like=x)
    for a in parts(out):
        cases.poison(a)
    assert fp8.swiglu_quantize(x, how, columnwise=True, out=out, **options) is out
    assert_same(run.numpy(out), run.numpy(fresh))
    for _ in range(2):                                                  # again, with other values, into what is known by now
        other = run.array(normal((70, 96), bfloat16, seed=3))
        fp8.swiglu_quantize(other, how, columnwise=True, out=out, **options)
        assert_same(run.numpy(out), run.numpy(fp8.swiglu_quantize(other, how, columnwise=True, **options)))


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_noop(run, recipe, value):
    how, options = recipe
    x, noop = run.array(normal((20, 32))), run.array(np.array([value], float32))
    out = how.empty((20, 16), columnwise=True, like=x)
    for a in parts(out):
        cases.poison(a)
    before = run.numpy(out)
    amax = run.array(np.array([0.25], float32)) if how in (DELAYED, CURRENT) else None
    more = {} if amax is None else {"amax": amax}
    before = Quantized(*(s and Scaled(s.data.copy(), s.scale_inv.copy(), s.shape, s.transposed, s.block, s.scale_layout)
                         for s in (before.rowwise, before.columnwise)))
    fp8.swiglu_quantize(x, how, columnwise=True, noop=noop, out=out, **options, **more)
    if value == 1.0:
        assert_same(run.numpy(out), before)
        assert amax is None or run.numpy(amax)[0] == 0.25
    else:
        assert_same(run.numpy(out), run.numpy(fp8.swiglu_quantize(x, how, columnwise=True, **options)))
        assert amax is None or run.numpy(amax)[0] > 0.25


def test_amax_is_that_of_y(run):
    x, amax = normal((300, 70), bfloat16), np.zeros(1, float32)
    x[3, 4] = np.nan
    for how, options in (RECIPES["delayed"], RECIPES["current"]):
        buffer = run.array(amax.copy())
        fp8.swiglu_quantize(run.array(x), how, amax=buffer, **options)
        assert_bytes_equal(run.numpy(buffer), reference.numerics.amax(swiglu(x)))


def test_current_scaling_again_and_again(run):
    """The workspace is left as it was found."""
    for scale in (100.0, 1.0, 0.01):
        x = normal((200, 300)) * np.float32(scale)
        got = run.numpy(fp8.swiglu_quantize(run.array(x), CURRENT))
        assert_same(got, reference.swiglu_quantize(x, CURRENT))


def test_scale_of_an_array_and_of_a_number(run):
    x = run.array(normal((9, 32)))
    for value in (0.0, np.inf, -2.0, 0.3):
        array = run.array(np.array([value], float32))
        assert_same(run.numpy(fp8.swiglu_quantize(x, DELAYED, scale=array)), run.numpy(fp8.swiglu_quantize(x, DELAYED, scale=value)))


def test_two_places_for_one_scale(run):
    x = run.array(normal((16, 32)))
    like = fp8.swiglu_quantize(x, DELAYED, scale=0.7, columnwise=True)
    row, column = like.rowwise, like.columnwise
    assert row is not None
    assert column is not None
    out = Quantized(Scaled(row.data, row.scale_inv, row.shape), Scaled(column.data, row.scale_inv.copy(), row.shape, True))
    for a in parts(out):
        cases.poison(a)
    fp8.swiglu_quantize(x, DELAYED, scale=0.7, columnwise=True, out=out)
    assert_same(run.numpy(out), run.numpy(fp8.swiglu_quantize(x, DELAYED, scale=0.7, columnwise=True)))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty(run, recipe, shape):
    how, options = recipe
    q = run.numpy(fp8.swiglu_quantize(run.array(np.zeros(shape, bfloat16)), how, columnwise=True, **options))
    assert q.shape == (shape[0], shape[1] // 2)
    if "scale" in options:
        assert q.scale_inv.tolist() == [2.0]
    elif how is CURRENT:
        assert q.scale_inv.tolist() == [1.0]


def test_nothing_beside_the_result_is_written(run):
    """Rows of every alignment, results that end where their memory does."""
    for width, dtype in ((2 * 33, bfloat16), (2 * 40, float16), (2 * 7, float32)):
        x = normal((19, width), dtype)
        want = reference.swiglu_quantize(x, MX, columnwise=True)
        for lead in (0, 1, 8):
            buffers = [np.full(lead + a.nbytes + 16, 0xAA, np.uint8) for a in parts(want)]
            given = [run.array(buffer) for buffer in buffers]
            views = [g[lead:lead + a.nbytes].view(a.dtype).reshape(a.shape) for g, a in zip(given, parts(want), strict=True)]
            row, column = want.rowwise, want.columnwise
            assert row is not None
            assert column is not None
            out = Quantized(Scaled(views[0], views[1], row.shape, False, row.block, row.scale_layout),
                            Scaled(views[2], views[3], row.shape, False, column.block, column.scale_layout))
            fp8.swiglu_quantize(run.array(x), MX, columnwise=True, out=out)
            assert_same(run.numpy(out), want)
            for g, a in zip(map(run.numpy, given), parts(want), strict=True):
                assert (g[:lead] == 0xAA).all()
                assert (g[lead + a.nbytes:] == 0xAA).all()


@pytest.mark.gpu
def test_captured_in_a_graph(recipe):
    import cupy as cp

    how, options = recipe
    x, probs = (fp8.asarray(a, like="cupy") for a in (normal((256, 512), bfloat16), normal((256,), seed=1)))
    out = how.empty((256, 256), columnwise=True, like=x)

    def call() -> None:
        fp8.swiglu_quantize(x, how, columnwise=True, probs=probs, out=out, **options)

    call()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for seed in (5, 6):
            bits(x)[...] = cp.asarray(bits(normal((256, 512), bfloat16, seed)))
            graph.launch(stream)
            stream.synchronize()
            assert_same(testing.Executor("cuda").numpy(out), reference.swiglu_quantize(
                fp8.asnumpy(x), how, columnwise=True, probs=fp8.asnumpy(probs), **options))


# ---- gradients ----
def numerical(grad: np.ndarray, x: np.ndarray, p: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """By differences in f64 of sum(grad * y)."""
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
    """Derivative 1 at equality, 0 beyond; NaN is not clipped."""
    a, b = np.array([[2, 1, 0.5, np.nan, 1]], float32), np.array([[1, 1, -1, 1, -3]], float32)
    x, grad = np.concatenate([a, b], axis=1), np.ones((1, 5), float32)
    q, none = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), DELAYED, scale=1.0, clamp=1.0)
    assert none is None
    got = run.numpy(q).data.astype(float32)[0]
    assert got[[0, 9]].tolist() == [0, 0]
    assert (got[[1, 2, 6, 7]] != 0).all()
    assert np.isnan(got[[3, 8]]).all()


def test_sums_are_the_fixed_tree(run):
    """Over columns, whatever the tile: many tiles, their tails, pairs of columns."""
    for half, interleaved in ((1, False), (5, True), (64, True), (65, True), (127, False), (128, False), (129, False), (1000, True),
                              (1000, False), (40000, False)):
        rows = 19 if half < 40000 else 2                                # more tiles than one launch adds up
        grad, x, p = normal((rows, half), bfloat16), normal((rows, 2 * half), bfloat16, seed=1), normal((rows,), seed=2)
        _, dprobs = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), MX, probs=run.array(p), interleaved=interleaved)
        a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
        a, b, g = (v.astype(float32) for v in (a, b, grad))
        terms = (g * (a * reference.numerics.sigmoid(a))) * b
        while terms.shape[1] > 1:
            even = terms.shape[1] // 2 * 2
            terms = np.concatenate([terms[:, :even:2] + terms[:, 1:even:2], terms[:, even:]], axis=1)
        assert_bytes_equal(run.numpy(dprobs), terms[:, 0])


@pytest.mark.parametrize("shape", [(0, 64), (6, 0), (0, 0)])
def test_gradients_of_nothing(run, recipe, shape):
    how, options = recipe
    grad, x = np.zeros((shape[0], shape[1] // 2), bfloat16), np.zeros(shape, bfloat16)
    q, dprobs = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), how, probs=run.array(np.ones(shape[0], float32)), **options)
    assert q.shape == shape
    assert_bytes_equal(run.numpy(dprobs), np.zeros(shape[0], float32))


def test_gradients_into_an_earlier_result(run, recipe):
    how, options = recipe
    p = run.array(normal((40,), seed=2))

    def call(seed: int, **more: Any) -> Any:
        grad, x = run.array(normal((40, 300), bfloat16, seed)), run.array(normal((40, 600), bfloat16, seed + 1))
        return fp8.swiglu_backward_quantize(grad, x, how, probs=p, columnwise=True, **more, **options)

    out = call(0)
    for seed in (3, 5):
        for a in (*parts(out[0]), out[1]):
            cases.poison(a)
        assert call(seed, out=out) is out
        want = call(seed)
        assert_same(run.numpy(out[0]), run.numpy(want[0]))
        assert_bytes_equal(run.numpy(out[1]), run.numpy(want[1]))
    noop = run.array(np.ones(1, float32))
    for a in (*parts(out[0]), out[1]):
        cases.poison(a)
    call(7, noop=noop, out=out)
    assert all((bits(run.numpy(a)).reshape(-1).view(np.uint8) == 0xAA).all() for a in (*parts(out[0]), out[1]))


def test_a_result_without_its_first_part_is_refused():
    probs = np.ones(8, float32)
    wrong: Any = ((None, None), (None, probs.copy()))
    for out in wrong:
        with pytest.raises(TypeError, match=r"^out\[0\]: expected a Quantized"):
            fp8.swiglu_backward_quantize(np.ones((8, 16), float32), np.ones((8, 32), float32), MX, probs=None if out[1] is None else probs,
                                         out=out)


def test_gradients_in_a_result_that_recipes_make(run):
    grad, x, p = (run.array(a) for a in (normal((40, 300)), normal((40, 600)), normal((40,))))
    out = MX.empty((40, 600), like=x), run.array(np.full(40, np.nan, float32))
    got = fp8.swiglu_backward_quantize(grad, x, MX, probs=p, out=out)
    want = fp8.swiglu_backward_quantize(grad, x, MX, probs=p)
    assert_same(run.numpy(got[0]), run.numpy(want[0]))
    assert_bytes_equal(run.numpy(out[1]), run.numpy(want[1]))


GRAD = np.ones((8, 16), float32)


@pytest.mark.parametrize(("grad", "options", "error", "message"), [
    (None, {}, TypeError, "grad: expected a numpy.ndarray"),
    (np.ones((8, 16), bfloat16), {}, TypeError, "grad: expected x's dtype float32, got bfloat16"),
    (np.ones((8, 32), float32), {}, ValueError, r"grad: expected shape \(8, 16\) for an x of shape \(8, 32\), got \(8, 32\)"),
    (GRAD, {"out": MX.empty((8, 32), like=np)}, TypeError, "out: expected an earlier result"),
    (GRAD, {"out": (MX.empty((8, 32), like=np), np.ones(8, float32))}, ValueError,
     r"out\[1\]: expected None, since there are no probs"),
    (GRAD, {"out": (MX.empty((8, 32), like=np), None), "probs": np.ones(8, float32)}, ValueError,
     r"out\[1\]: expected an array, since there are probs"),
    (GRAD, {"out": (MX.empty((8, 32), like=np), np.ones(7, float32)), "probs": np.ones(8, float32)}, ValueError,
     r"out\[1\]: expected shape \(8,\), got \(7,\)"),
    (GRAD, {"out": (MX.empty((8, 16), like=np), None)}, ValueError, r"out.rowwise: expected MX data of shape \(8, 32\)"),
])
def test_gradients_refused(grad, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        fp8.swiglu_backward_quantize(grad, np.ones((8, 32), float32), MX, **options)


def test_sums_need_memory_of_their_own():
    grad, x, p = np.ones((8, 16), float32), np.ones((8, 32), float32), np.ones(8, float32)
    for mine, name in ((p, "probs"), (grad.reshape(-1)[:8], "grad")):
        with pytest.raises(ValueError, match=f"out: overlaps {name} in memory"):
            fp8.swiglu_backward_quantize(grad, x, MX, probs=p, out=(MX.empty((8, 32), like=x), mine))
    out = MX.empty((8, 32), like=x)
    inside = out.data.reshape(-1)[:32].view(float32)
    with pytest.raises(ValueError, match=r"out\[1\]: overlaps out\[0\] in memory"):
        fp8.swiglu_backward_quantize(grad, x, MX, probs=p, out=(out, inside))


# ---- errors ----
def test_one_result_for_both_orders_of_columns(run):
    """Sums of interleaved columns take twice the memory, which a result of the other order does not have."""
    x, grad, probs = (cases.values("normal", shape, bfloat16) for shape in ((300, 2 * 200), (300, 200), (300,)))
    probs = probs.astype(float32)
    arguments = run.array(grad), run.array(x), MX
    out: Any = None
    for interleaved in (False, True, False, True):
        out = fp8.swiglu_backward_quantize(*arguments, probs=run.array(probs), interleaved=interleaved, out=out)
        want = reference.swiglu_backward_quantize(grad, x, MX, probs=probs, interleaved=interleaved)
        testing.assert_bytes_equal(out[0].data, want[0].data)
        testing.assert_bytes_equal(out[1], want[1])


def test_vectors_of_any_strides(run):
    x = cases.values("normal", (40, 48), float32)
    probs, bias = cases.values("normal", (40, 2), float32, 1), cases.values("normal", (96,), float32, 2)
    q = fp8.swiglu_quantize(run.array(x), MX, probs=run.array(probs)[:, 1], bias=run.array(bias)[::2])
    testing.assert_bytes_equal(q.data, fp8.swiglu_quantize(x, MX, probs=probs[:, 1].copy(), bias=bias[::2].copy()).data)


def misaligned(run: Any, a: np.ndarray) -> Any:
    """The same array where no wide access is possible."""
    whole = run.array(np.concatenate([np.zeros(1, a.dtype), a.reshape(-1)]))
    return whole[1:].reshape(a.shape)


@pytest.mark.parametrize(("shape", "programs"), [((21, 512), (op._PLAIN, op._PLAIN)), ((130, 64), (op._PLAIN, op._OPTIONS)),
                                                 ((9, 36), (op._ANY, op._ANY))])
def test_programs_agree(run, recipe, monkeypatch, shape, programs):
    """Calls without options have programs of their own; a clamp beyond all values asks for the same of those with options, and rows
    that allow no wide accesses of those for every call. Gradients of no whole tiles are options."""
    how, options = recipe
    launched = []
    for plan in set(op._PLANS.values()):
        def launch(self, x, program, *rest, _launch=plan.launch):
            launched.append(program)
            return _launch(self, x, program, *rest)

        monkeypatch.setattr(plan, "launch", launch)
    x, grad = normal(shape, bfloat16), normal((shape[0], shape[1] // 2), bfloat16, seed=1)
    probs = run.array(normal(shape[:1], seed=2))
    calls = [(run.array(x), None), (run.array(x), 1e30), (misaligned(run, x), None)]
    forward = [fp8.swiglu_quantize(x, how, columnwise=True, probs=probs, clamp=c, **options) for x, c in calls]
    backward = [fp8.swiglu_backward_quantize(run.array(grad), x, how, columnwise=True, probs=probs, clamp=c, **options) for x, c in calls]
    if run.name != "reference":
        with_options = op._OPTIONS if programs[0] != op._ANY else op._ANY
        straddles = how is BLOCKS and shape[1] == 64                        # a block of da and db
        both = op._ANY if straddles else with_options
        assert launched == [programs[0], with_options, op._ANY, op._ANY if straddles else programs[1], both, op._ANY]
    for other in (1, 2):
        assert_same(run.numpy(forward[0]), run.numpy(forward[other]))
        assert_same(run.numpy(backward[0][0]), run.numpy(backward[other][0]))
        assert_bytes_equal(run.numpy(backward[0][1]), run.numpy(backward[other][1]))


GPT_OSS: dict[str, Any] = {"form": "gpt_oss", "clamp": 1.5, "interleaved": True}


def test_which_calls_have_programs_with_options(monkeypatch):
    """Wide rows; but a block may not be of both da and db, and quotients (vllm) have none."""
    launched = []
    for plan in set(op._PLANS.values()):
        monkeypatch.setattr(plan, "launch", lambda self, x, program, *rest: launched.append(program))
    with testing.executor("host"):
        for how, half, more, want in (
                (DELAYED, 72, {"scale": 1.0}, op._OPTIONS), (MX, 72, {}, op._ANY), (MX, 96, {}, op._OPTIONS),
                (MX, 72, GPT_OSS, op._OPTIONS),
                (BLOCKS, 96, {}, op._ANY), (BLOCKS, 96, GPT_OSS, op._OPTIONS), (BLOCKS, 256, {}, op._PLAIN),
                (fp8.BlockScaling((1, 32)), 96, {}, op._OPTIONS), (fp8.BlockScaling(profile="vllm"), 256, GPT_OSS, op._ANY),
                (MX, 100, GPT_OSS, op._ANY)):
            fp8.swiglu_backward_quantize(np.zeros((8, half), bfloat16), np.zeros((8, 2 * half), bfloat16), how, **more)
            assert launched.pop() == want, (how, half, more)
            fp8.swiglu_quantize(np.zeros((8, 2 * half), bfloat16), how, **more)
            vllm = how.profile == "vllm" if isinstance(how, fp8.BlockScaling) else False
            wanted = op._ANY if half % 8 or (vllm and more) else op._OPTIONS if GPT_OSS.items() <= more.items() else op._PLAIN
            assert launched.pop() == wanted, (how, half, more)
        x, of_experts = np.zeros((8, 144), bfloat16), dict[str, Any](bias=np.zeros((2, 144), bfloat16), splits=[3, 4])
        for how, want in ((MX, op._EXPERTS), (BLOCKS, op._EXPERTS), (fp8.BlockScaling(profile="vllm"), op._ANY)):
            fp8.swiglu_quantize(x, how, **of_experts)
            assert launched.pop() == want
        fp8.swiglu_quantize(x[:0], MX, **{**of_experts, "splits": [0, 0]})
        assert launched.pop() == op._OPTIONS


TORCHAO = fp8.MXScaling(profile="torchao", scale_layout="swizzled")


@pytest.mark.parametrize("how", [DELAYED, CURRENT, BLOCKS, MX, TORCHAO], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_does_not_exist_counts_nowhere(run, how, interleaved):
    """Rows and columns of a tile beyond the array, where biases or weights are Inf or NaN and would be NaN times 0."""
    options = {"scale": 1.0} if how is DELAYED else {}
    for rows, half in ((3, 40), (130, 200), (35, 96)):
        x, grad, bias = normal((rows, 2 * half), bfloat16), normal((rows, half), bfloat16, 1), normal((2 * half,), bfloat16, 2)
        bias[5], bias[11], bias[half + 20] = 3e38, np.inf, np.nan
        bias[half - 3] = bias[2 * half - 3] = 3e38
        x[:, 5], x[:, half - 3] = -3e38, -3e38                              # so that no value is as large as that of a row of zeros
        probs = normal((rows,), seed=3)
        probs[1] = np.inf
        for clamp in (None, 2.0**-20):                                      # nearly everything is clipped: 0 whatever the weight
            how_else: dict[str, Any] = {"bias": bias, "probs": probs, "clamp": clamp, "form": "gpt_oss", "interleaved": interleaved,
                                        "columnwise": True, **options}
            given = {name: run.array(a) if isinstance(a, np.ndarray) else a for name, a in how_else.items()}
            with np.errstate(all="ignore"):
                want = reference.swiglu_quantize(x, how, **how_else)
                want_grad, want_probs = reference.swiglu_backward_quantize(grad, x, how, **how_else)
            assert_same(run.numpy(fp8.swiglu_quantize(run.array(x), how, **given)), want)
            pair = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), how, **given)
            assert_same(run.numpy(pair[0]), want_grad)
            assert_bytes_equal(run.numpy(pair[1]), want_probs)


X = np.ones((8, 32), float32)
OUT, TWO = MX.empty((8, 16), like=X), np.ones((2, 32), float32)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((X, "mx"), {}, TypeError, "recipe: expected a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got str"),
    ((X.astype(np.float64), MX), {}, TypeError, "x: expected dtype"),
    ((np.ones((8, 3), float32), MX), {}, ValueError, r"x: expected shape \[M, 2 H\], got \(8, 3\)"),
    ((np.ones((2, 8, 4), float32), MX), {}, ValueError, r"x: expected shape \[M, 2 H\]"),
    ((X, MX), {"rowwise": False}, ValueError, "rowwise, columnwise: expected at least one"),
    ((X, DELAYED), {"scale": 1.0, "rowwise": False}, ValueError, "rowwise, columnwise: expected at least one"),
    ((X, DELAYED), {}, ValueError, "scale: delayed scaling needs the scale"),
    ((X, CURRENT), {"scale": 1.0}, ValueError, "scale: current scaling takes it from the values themselves"),
    ((X, MX), {"scale": 1.0}, ValueError, "scale, amax: belong to per-tensor recipes"),
    ((X, BLOCKS), {"amax": np.zeros(1, float32)}, ValueError, "scale, amax: belong to per-tensor recipes"),
    ((X, fp8.BlockScaling((128, 128))), {}, ValueError, r"recipe: expected blocks of one of .* got \(128, 128\)"),
    ((X, fp8.BlockScaling((1, None))), {}, ValueError, "recipe: expected blocks of one of"),
    ((X, fp8.MXScaling(block=(32, 32))), {}, ValueError, r"recipe: expected MX blocks of \(1, 32\)"),
    ((X, MX), {"probs": np.ones(8)}, TypeError, "probs: expected dtype float32, got float64"),
    ((X, MX), {"probs": np.ones(7, float32)}, ValueError, r"probs: expected an array of shape \(8,\)"),
    ((X, MX), {"probs": [1.0] * 8}, TypeError, "probs: expected a numpy.ndarray"),
    ((X, MX), {"bias": np.ones(32, bfloat16)}, TypeError, "bias: expected dtype float32, got bfloat16"),
    ((X, MX), {"bias": np.ones(16, float32)}, ValueError, r"bias: expected an array of shape \(32,\)"),
    ((X, MX), {"bias": TWO}, ValueError, "bias: of several experts needs splits="),
    ((X, MX), {"bias": np.ones((2, 16), float32), "splits": [4, 4]}, ValueError, r"bias: expected an array of shape \(2, 32\)"),
    ((X, MX), {"bias": TWO, "splits": [8]}, ValueError, r"bias: expected an array of shape \(1, 32\)"),
    ((X, MX), {"bias": np.ones((2, 1, 32), float32), "splits": [4, 4]}, ValueError, r"bias: expected an array of shape \(2, 32\)"),
    ((X, MX), {"bias": np.ones(32, float32), "splits": [8]}, ValueError, r"splits: expected a bias \[E, 2 H\], .* got one for all rows"),
    ((X, MX), {"bias": [[1.0] * 32], "splits": [8]}, TypeError, "bias: expected a numpy.ndarray"),
    ((X, MX), {"splits": [8]}, ValueError, r"splits: expected a bias \[E, 2 H\], one for each expert, got none"),
    ((X, MX), {"bias": TWO, "splits": [4, 5]}, ValueError, "splits: expected sizes that add up to at most the 8 rows"),
    ((X, MX), {"bias": TWO, "splits": np.array([4, -1])}, ValueError, "splits: expected sizes of 0 or more, got -1"),
    ((X, MX), {"bias": TWO, "splits": np.ones(2, float32)}, TypeError, "splits: expected dtype int32"),
    ((X, MX), {"bias": TWO, "splits": np.ones((1, 2), np.int64)}, ValueError, "splits: expected one dimension"),
    ((X, MX), {"clamp": "7"}, TypeError, "clamp: expected a number or None, got '7'"),
    ((X, MX), {"clamp": True}, TypeError, "clamp: expected a number or None"),
    ((X, MX), {"clamp": 0.0}, ValueError, r"clamp: expected a number above 0 \(in float32\), got 0.0"),
    ((X, MX), {"clamp": 1e-60}, ValueError, "clamp: expected a number above 0"),
    ((X, MX), {"clamp": float("nan")}, ValueError, "clamp: expected a number above 0"),
    ((X, MX), {"form": "geglu"}, ValueError, r"form: expected one of \('swiglu', 'gpt_oss'\), got 'geglu'"),
    ((X, MX), {"noop": np.zeros(1, float32)}, ValueError, "noop: needs out="),
    ((X, MX), {"noop": np.zeros(2, float32)}, ValueError, "noop: expected one element"),
    ((X, DELAYED), {"scale": 1.0, "amax": X.reshape(-1)[:1]}, ValueError, "amax: overlaps the input"),
    ((X, MX), {"out": 3}, TypeError, "out: expected a Quantized"),
    ((X, MX), {"out": OUT, "columnwise": True}, ValueError, "out: no columnwise part"),
    ((X, BLOCKS), {"out": OUT}, ValueError, "out.rowwise: expected block-scaled data"),
    ((X, MX), {"out": MX.empty((8, 32), like=X)}, ValueError, r"out.rowwise: expected MX data of shape \(8, 16\)"),
    ((X, fp8.MXScaling(float8_e5m2)), {"out": OUT}, TypeError, "out.rowwise.data: expected dtype float8_e5m2"),
])
def test_refused(run, arguments, options, error, message):
    if run.name == "cuda":
        pytest.skip("host arrays")
    cases.poison(OUT.data)
    before = OUT.data.tobytes()
    with pytest.raises(error, match=f"^{message}"):
        fp8.swiglu_quantize(*arguments, **options)
    assert OUT.data.tobytes() == before


def test_results_need_memory_of_their_own():
    memory = np.zeros(4096, np.uint8)
    x = memory[:1024].view(float32).reshape(8, 32)

    def out(at: int) -> Quantized:
        data = memory[at:at + 128].view(fp8.float8_e4m3fn).reshape(8, 16)
        return Quantized(Scaled(data, np.empty((8, 1), fp8.float8_e8m0fnu), (8, 16), False, (1, 32), "compact"))

    with pytest.raises(ValueError, match="overlaps the input"):
        fp8.swiglu_quantize(x, MX, out=out(1000))
    for name, length in (("probs", 8), ("bias", 32), ("noop", 1), ("splits", 1)):
        there = memory[2048:2048 + 4 * length].view(np.int32 if name == "splits" else float32)
        option: dict[str, Any] = {name: there, **({"bias": np.zeros((1, 32), float32)} if name == "splits" else {})}
        with pytest.raises(ValueError, match=f"out: overlaps {name} in memory"):
            fp8.swiglu_quantize(x, MX, out=out(2050), **option)
    read_only = np.zeros(1, float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="amax: the array is read-only"):
        fp8.swiglu_quantize(x, DELAYED, scale=1.0, amax=read_only)


def test_a_second_call_plans_nothing(monkeypatch):
    fp8.swiglu_quantize(X, MX)
    before = op._plan.cache_info()
    fp8.swiglu_quantize(X + 1, MX)
    after = op._plan.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_as_many_scales_as_32_bits_count_are_refused():
    """Of rows shorter than a block, which any number of them have; found from the shape alone."""
    for rows, columns in (((1 << 32), 8), ((1 << 31), 160)):
        with pytest.raises(ValueError, match=rf"^x: expected fewer than 2\^32 scales, .* have from {rows} rows on"):
            _plan((rows, 2 * columns), np.dtype(bfloat16), fp8.BlockScaling(), True, False, False)
    _plan(((1 << 32) - 4, 16), np.dtype(bfloat16), fp8.BlockScaling(), True, False, False)


# ---- biases of experts ----
@pytest.mark.full
@pytest.mark.parametrize("half", [64, 27])
@pytest.mark.parametrize("rows", [[100, 0, 33, 1, 130], [0, 0], [264], [1] * 70])
def test_biases_of_experts_are_those_of_each_alone(run, half, rows):
    """Rows of no expert have none at all: -0 stays what it is."""
    x, bias = normal((270, 2 * half), bfloat16), normal((len(rows), 2 * half), bfloat16, seed=1)
    bits(x)[264:, ::3] = 0x8000
    grad = normal((270, half), bfloat16, seed=2)
    for how, options in RECIPES.values():
        if how is CURRENT:
            continue
        given = {"bias": run.array(bias), "splits": rows, **GPT_OSS, **options}
        q = run.numpy(fp8.swiglu_quantize(run.array(x), how, **given)).data
        back = run.numpy(fp8.swiglu_backward_quantize(run.array(grad), run.array(x), how, **given)[0]).data
        start = 0
        for own, count in zip([*bias, None], [*rows, 270 - sum(rows)], strict=True):
            here, options["bias"] = slice(start, start + count), own
            assert_bytes_equal(q[here], reference.swiglu_quantize(x[here], how, **GPT_OSS, **options).data)
            assert_bytes_equal(back[here], reference.swiglu_backward_quantize(grad[here], x[here], how, **GPT_OSS, **options)[0].data)
            start += count
        del options["bias"]


@pytest.mark.gpu
def test_biases_of_experts_in_a_graph(recipe):
    """Sizes, biases and values change in place. Wrong sizes are told, and are harmless."""
    import cupy as cp

    how, options = recipe
    x, bias = (fp8.asarray(a, like="cupy") for a in (normal((400, 512), bfloat16), normal((3, 512), bfloat16, seed=1)))
    grad, splits = fp8.asarray(normal((400, 256), bfloat16, 2), like="cupy"), cp.array([100, 0, 250])
    outs: list[Any] = [None, None]

    def call() -> None:
        outs[0] = fp8.swiglu_quantize(x, how, columnwise=True, bias=bias, splits=splits, out=outs[0], **options)
        outs[1] = fp8.swiglu_backward_quantize(grad, x, how, bias=bias, splits=splits, out=outs[1], **options)

    call()
    call()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for seed, sizes, counted in ((5, [0, 300, 1], [0, 300, 1]), (6, [-4, 390, 90], [0, 390, 10])):
            bits(bias)[...] = cp.asarray(bits(normal((3, 512), bfloat16, seed)))
            splits[...] = cp.array(sizes)
            graph.launch(stream)
            stream.synchronize()
            errors = fp8.device_errors(clear=True)
            assert bool(errors) == (sizes != counted), errors
            host: dict[str, Any] = {"bias": fp8.asnumpy(bias), "splits": np.array(counted), **options}
            executor = testing.Executor("cuda")
            assert_same(executor.numpy(outs[0]), reference.swiglu_quantize(fp8.asnumpy(x), how, columnwise=True, **host))
            assert_same(executor.numpy(outs[1][0]), reference.swiglu_backward_quantize(fp8.asnumpy(grad), fp8.asnumpy(x), how, **host)[0])


@pytest.mark.parametrize(("sizes", "rows"), [
    ([3, 0, 200], 300), ([-5, 7, 1 << 40, 9], 140), ([1 << 62, 1 << 62, 1 << 62], 129), ([], 1), ([0] * 100 + [5], 128), ([2] * 300, 600)])
def test_the_group_of_every_row(sizes, rows):
    """As the kernel finds it, of sizes on the device, which may be wrong. Rows of tiles that do not exist are nobody's."""
    splits = np.array(sizes, np.int64)
    want, start = np.full(-(-rows // 128) * 128, 0xFFFFFFFF, np.uint32), 0
    for group, size in enumerate(sizes):
        end = min(start + max(size, 0), rows)
        want[start:end], start = group, end
    with testing.executor("host"):
        x = np.zeros((rows, 1), float32)
        found = GroupRows(x, None, Groups(len(splits), splits.ctypes.data, splits.nbytes, 1, splits), rows, 128)
        words = found._words
        words[...] = 77
        found.run(x)
    assert_bytes_equal(words[:len(want)], want)
    assert (words[len(want):] == 77).all()


# ---- blocks that take several tiles ----
@pytest.fixture
def several_tiles(monkeypatch):
    """As large arrays have them."""
    monkeypatch.setattr(op, "_ENOUGH_BLOCKS", 1)
    _plan.cache_clear()
    yield
    _plan.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("rows", [128, 129, 385, 900, 1024])
@pytest.mark.parametrize("directions", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("recipe", [
    BLOCKS, fp8.BlockScaling((1, 32), profile="vllm"), fp8.BlockScaling((1, 64), scale_layout="compact"), MX,
    fp8.MXScaling(scale_layout="swizzled", profile="torchao")], ids=str)
def test_tiles_one_below_the_other(run, several_tiles, recipe, directions, rows):
    """Rows of the next tile are on their way while this one is stored; the last tile, and the last block, may be short."""
    rowwise, columnwise = directions
    for dtype, half in ((bfloat16, 256), (float32, 136)):
        x, probs = normal((rows, 2 * half), dtype, 1), normal((rows,), seed=2)
        plan = op._plan_of(x, recipe, rowwise, columnwise, False)
        assert plan.programs[1][2] > 1 or rows < 256
        q = run.numpy(fp8.swiglu_quantize(run.array(x), recipe, probs=run.array(probs), rowwise=rowwise, columnwise=columnwise))
        assert_same(q, reference.swiglu_quantize(x, recipe, probs=probs, rowwise=rowwise, columnwise=columnwise))
        if half % 128:
            continue
        grad = normal((rows, half), dtype, 3)
        pair = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), recipe, probs=run.array(probs), rowwise=rowwise,
                                            columnwise=columnwise)
        want, sums = reference.swiglu_backward_quantize(grad, x, recipe, probs=probs, rowwise=rowwise, columnwise=columnwise)
        assert_same(run.numpy(pair[0]), want)
        assert_bytes_equal(run.numpy(pair[1]), sums)


@pytest.mark.full
@pytest.mark.parametrize("rows", [129, 900])
@pytest.mark.parametrize("directions", [(True, False), (True, True)])
@pytest.mark.parametrize("experts", [None, 6])
@pytest.mark.parametrize("recipe", [DELAYED, BLOCKS, fp8.BlockScaling((1, 64), scale_layout="compact"), MX, TORCHAO], ids=str)
def test_tiles_with_options_one_below_the_other(run, several_tiles, recipe, directions, rows, experts):
    rowwise, columnwise = directions
    for dtype, half in ((bfloat16, 200), (float32, 136)):
        x, grad = normal((rows, 2 * half), dtype, 1), normal((rows, half), dtype, 3)
        bias = normal((2 * half,) if experts is None else (experts, 2 * half), dtype, 4)
        how: dict[str, Any] = {"probs": normal((rows,), seed=2), "bias": bias, "rowwise": rowwise, "columnwise": columnwise, **GPT_OSS}
        if experts is not None:
            how["splits"] = np.array([rows // 3, 17, 0, 9, rows // 3, 5])        # of some tiles more than two
        if recipe is DELAYED:
            how["scale"] = 0.5
        given = {name: run.array(a) if isinstance(a, np.ndarray) else a for name, a in how.items()}
        for backward in (False, True):
            plan = op._plan_of(x, recipe, rowwise, columnwise, backward)
            variant, _, each = plan.programs[op._OPTIONS if experts is None else op._EXPERTS]
            assert each > 1 or rows < 256 or op._most_tiles(variant) == 1
        assert_same(run.numpy(fp8.swiglu_quantize(run.array(x), recipe, **given)), reference.swiglu_quantize(x, recipe, **how))
        pair = fp8.swiglu_backward_quantize(run.array(grad), run.array(x), recipe, **given)
        want, sums = reference.swiglu_backward_quantize(grad, x, recipe, **how)
        assert_same(run.numpy(pair[0]), want)
        assert_bytes_equal(run.numpy(pair[1]), sums)


@pytest.mark.parametrize("recipe", [
    BLOCKS, fp8.BlockScaling(dtype=float8_e5m2, eps=2.0**-30), fp8.BlockScaling((1, 32), profile="sglang"), MX,
    fp8.MXScaling(float8_e5m2, profile="torchao", scale_layout="swizzled")], ids=str)
@pytest.mark.parametrize("together", [1, 64])
def test_weights_of_any_size(run, recipe, together):
    """A row-wise scale takes the weight of its row with it where no bit can tell: not where weights or maxima are extreme, 0 or NaN. A warp
    does so where all of its rows allow it: together: how many rows are alike."""
    weights = np.array([1, -1, 0, -0.0, np.nan, np.inf, -np.inf, 0.3, -3e38, 1e-45, 2.0**-41, 2.0**-40, 2.0**-39, 2.0**39, -(2.0**40),
                        1.7 * 2.0**39, 1e-38, -7.0], float32)
    exponents = np.array([0, -140, -126, -101, -100, -60, -59, -30, 20, 59, 60, 61, 100, 120], np.int32)
    if together > 1:
        weights, exponents = weights[[0, 7, 8, 9, 10, 12, 14, 15]], exponents[[0, 1, 4, 5, 8, 9, 12]]
    probs = np.repeat(weights, exponents.size * together)
    for columns in (128, 72):
        a, b = normal((probs.size, columns), seed=1), normal((probs.size, columns), seed=2)
        with np.errstate(over="ignore"):
            b = np.ldexp(b, np.tile(np.repeat(exponents, together), weights.size)[:, None]).astype(float32)
        b[::5, 3], b[::7, 40:] = 0, np.ldexp(b[::7, 40:], -70)          # codes that are 0, of both signs
        if together == 1:
            b[3::50, 9], b[7::60, 11] = np.inf, np.nan
        x = np.concatenate([a, b], axis=1)
        got = run.numpy(fp8.swiglu_quantize(run.array(x), recipe, probs=run.array(probs)))
        assert_same(got, reference.swiglu_quantize(x, recipe, probs=probs))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("how", ["delayed", "blocks", "mx"])
def test_more_than_two_to_the_31_elements(how):
    """Whole rows at both ends and around element 2**31 of y, and of its gradients, where x has more than 2**32."""
    import cupy as cp

    recipe, options = RECIPES[how]
    rows, half, stripe = (1 << 18) + 128, (1 << 13) + 128, 128
    assert rows * half > 1 << 31

    def memory(columns: int, seed: int) -> Any:
        words = cp.empty((rows, columns), np.uint16)
        words[...] = cp.asarray(bits(normal((columns,), bfloat16, seed)))
        words += (cp.arange(rows, dtype=cp.uint32) % 61).astype(cp.uint16)[:, None]
        return words

    def check(got: Quantized, want: Quantized, first: int) -> None:
        for part, wanted in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
            assert part is not None
            assert wanted is not None
            data = bits(part.data)
            here = data[:, first:first + stripe] if part.transposed else data[first:first + stripe]
            np.testing.assert_array_equal(here.get(), bits(wanted.data))
            scales = bits(part.scale_inv)
            if part.block is not None:
                extent = int(part.block[0] or 0)
                scales = scales[:, first:first + stripe] if extent == 1 and part.scale_layout == "gemm_ready" \
                    else scales[first // extent:(first + stripe) // extent]
            np.testing.assert_array_equal(scales.get(), bits(wanted.scale_inv))

    x, grad, probs = memory(2 * half, 0), memory(half, 1), cp.asarray(normal((rows,), seed=2))
    q = fp8.swiglu_quantize(x.view(bfloat16), recipe, columnwise=True, probs=probs, **options)
    back, sums = fp8.swiglu_backward_quantize(grad.view(bfloat16), x.view(bfloat16), recipe, columnwise=True, probs=probs, **options)
    assert sums is not None
    for first in (0, (1 << 31) // half // stripe * stripe, (1 << 31) // (2 * half) // stripe * stripe, rows - stripe):
        here = slice(first, first + stripe)
        hx, hgrad, given = x[here].get().view(bfloat16), grad[here].get().view(bfloat16), {"probs": probs[here].get(), **options}
        check(q, reference.swiglu_quantize(hx, recipe, columnwise=True, **given), first)
        want, of_probs = reference.swiglu_backward_quantize(hgrad, hx, recipe, columnwise=True, **given)
        check(back, want, first)
        assert_bytes_equal(sums[here], of_probs)
