"""Tokens moved by a routing against loops over tokens: data, scales and probs, sums in their order, gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scale_arrays import guarded, raw

import cupy_fp8 as fp8
from cupy_fp8 import Routing, Scaled, backend, cases, reference, testing
from cupy_fp8.arrays import bits
from cupy_fp8.calls.call import Call
from cupy_fp8.cases.moe.tokens import indices, mask
from cupy_fp8.cases.moe.tokens import routing as routed
from cupy_fp8.formats import INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, float32
from cupy_fp8.ops.moe import permute_plans as plans
from cupy_fp8.reference.numerics import narrow

needs_host = pytest.mark.skipif(testing.executor_problem("host") is not None, reason=str(testing.executor_problem("host")))


def array(shape: tuple[int, ...], dtype: Any = float8_e4m3fn, seed: int = 0) -> np.ndarray:
    """No byte is 0, so that zeros show."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(1, 256, count, np.uint8).view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: Any = float32, seed: int = 0) -> np.ndarray:
    return cases.values("normal", shape, np.dtype(dtype), seed)


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def moved(x: np.ndarray, r: Routing) -> np.ndarray:
    """permute, token by token."""
    out = np.zeros((r.rows, *x.shape[1:]), raw(x).dtype)
    for token, rows in enumerate(r.row_map):
        for row in rows:
            if row >= 0:
                out[row] = raw(x)[token]
    return out.view(x.dtype)


def moved_probs(probs: np.ndarray, r: Routing) -> np.ndarray:
    out = np.zeros(r.rows, np.float32)
    for token, rows in enumerate(r.row_map):
        for slot, row in enumerate(rows):
            if row >= 0:
                by_slot = r.experts is None or probs.shape == r.row_map.shape
                out[row] = probs[token, slot if by_slot else r.experts[token, slot]]        # type: ignore[index]
    return out


def summed(y: np.ndarray, r: Routing, probs: np.ndarray | None = None) -> np.ndarray:
    """unpermute, row by row in NumPy's f32 scalars and vectors."""
    out = np.zeros((r.tokens, *y.shape[1:]), np.float32)
    by_row = None if probs is None else moved_probs(probs, r)
    with np.errstate(all="ignore"):
        for token, rows in enumerate(r.row_map):
            first = True
            for row in sorted((row for row in rows if row >= 0), reverse=True):
                term = y[row].astype(np.float32)
                if by_row is not None:
                    term = term * by_row[row]
                out[token] = term if first else out[token] + term
                first = False
    return narrow(out, y.dtype)


def tree(terms: list[np.float32]) -> np.float32:
    """Rule 11 by recursion: the sum of the largest power of two of terms that is less than all, and of the rest."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return tree(terms[:half]) + tree(terms[half:])


ROUTED: list[dict[str, Any]] = [
    {"topk": 2, "experts": 5, "align": 16}, {"topk": 8, "experts": 64, "kind": "distinct"},
    {"topk": 3, "experts": 6, "form": "mask", "align": 4},
    {"topk": 2, "experts": 9, "form": "mask of any"}, {"topk": 5, "experts": 3}, {"topk": 2, "experts": 4, "kind": "none", "align": 2},
    {"topk": 1, "experts": 4, "kind": "one", "align": 128}, {"topk": 33, "experts": 40, "align": 2}, {"topk": 0, "experts": 2, "align": 8}]
routings = pytest.mark.parametrize("options", ROUTED, ids=lambda o: "-".join(map(str, o.values())))


def on(run: testing.Executor, *values: Any) -> tuple[Any, ...]:
    return tuple(map(run.array, values))


# ---- permute ----
@routings
@pytest.mark.parametrize(("dtype", "columns"), [(bfloat16, 64), (float8_e4m3fn, 37), (float8_e5m2, 4), (float16, 9), (np.float64, 3),
                                                (np.uint8, 0), (bool, 16), (np.int16, 5)])
def test_rows_of_any_length(dtype, columns, options, run):
    host = routed(37, **options)
    x, r = array((37, columns), dtype) if dtype is not bool else np.ones((37, columns), bool), run.array(host)
    want = moved(x, host)
    testing.assert_bytes_equal(fp8.permute(run.array(x), r), want)
    for lead in (0, 16 - want.dtype.itemsize):
        out, intact = guarded(run, want.shape, want.dtype, lead)
        assert fp8.permute(run.array(x), r, out=out) is out
        testing.assert_bytes_equal(out, want)
        assert intact()


@routings
def test_probs_move_along(options, run):
    host = routed(70, **options)
    x, r = array((70, 24), bfloat16), run.array(host)
    given_probs = [cases.values("bits", (70, host.topk), float32, 1)]
    if host.experts is not None:
        given_probs.append(cases.values("bits", (70, host.num_experts), float32, 2))
    for probs in given_probs:
        rows, rows_probs = fp8.permute(run.array(x), r, probs=run.array(probs))
        testing.assert_bytes_equal(rows, moved(x, host))
        testing.assert_bytes_equal(rows_probs, moved_probs(probs, host))
        (a, intact), (b, intact_probs) = guarded(run, rows.shape, rows.dtype), guarded(run, rows_probs.shape, float32, 4)
        out = a, b
        assert fp8.permute(run.array(x), r, probs=run.array(probs), out=out) is out
        testing.assert_bytes_equal(a, moved(x, host))
        testing.assert_bytes_equal(b, moved_probs(probs, host))
        assert intact()
        assert intact_probs()


@pytest.mark.parametrize(("block", "dtype"), [((1, 128), float32), ((1, 32), float8_e8m0fnu), ((1, 32), float32), ((1, None), float32)])
@pytest.mark.parametrize("columns", [512, 130, 31, 0])
def test_scales_move_along(block, dtype, columns, run):
    for host in (routed(40, 3, 8, align=16), routed(40, 2, 5, form="mask")):
        blocks = -(-columns // (block[1] or max(columns, 1)))
        x = Scaled(array((40, columns)), array((40, blocks), dtype, 1), (40, columns), False, block, "compact")
        q = fp8.permute(run.array(x), run.array(host))
        assert (q.shape, q.block, q.scale_layout, q.transposed) == ((host.rows, columns), block, "compact", False)
        testing.assert_bytes_equal(q.data, moved(x.data, host))
        testing.assert_bytes_equal(q.scale_inv, moved(x.scale_inv, host))
        probs = normal((40, host.topk))
        again = fp8.permute(run.array(x), run.array(host), probs=run.array(probs))
        for a in (*again[0], again[1]):
            cases.poison(a)
        assert fp8.permute(run.array(x), run.array(host), probs=run.array(probs), out=again) is again
        testing.assert_bytes_equal(again[0].data, moved(x.data, host))
        testing.assert_bytes_equal(again[0].scale_inv, moved(x.scale_inv, host))
        testing.assert_bytes_equal(again[1], moved_probs(probs, host))


@pytest.mark.parametrize("layout", ["gemm_ready", "deepgemm_sm90", "deepgemm_sm100", "swizzled"])
def test_scales_in_any_layout(layout, run):
    """What `quantize_block` makes by default moves as it is; compact scales come out, whatever layout goes in."""
    x, host = normal((40, 260)), routed(40, 3, 8, align=16)
    given = fp8.quantize_mx(x) if layout == "swizzled" else fp8.quantize_block(x)
    given = run.array(given.to_layout(layout))
    compact = run.numpy(given.to_layout("compact")).rowwise
    wanted = Scaled(moved(compact.data, host), moved(compact.scale_inv, host), (host.rows, 260), False, compact.block, "compact")
    r = run.array(host)
    for x in (given, given.rowwise):
        out = fp8.permute(x, r)
        testing.assert_bytes_equal(out, wanted)
        for _ in range(2):
            for a in out:
                cases.poison(a)
            assert fp8.permute(x, r, out=out) is out
            testing.assert_bytes_equal(out, wanted)


def test_new_scales_of_the_same_tokens_are_read_anew(run):
    """A call with converted scales is not remembered as one that needs no second look."""
    recipe, r = fp8.BlockScaling(), run.array(routed(40, 3, 8))
    q = recipe.quantize(run.array(normal((40, 260))))
    out = fp8.permute(q, r)
    fp8.permute(q, r, out=out)
    recipe.quantize(run.array(normal((40, 260), seed=3) * 64), out=q)
    fp8.permute(q, r, out=out)
    testing.assert_bytes_equal(out, fp8.permute(q.to_layout("compact"), r))


def test_quantised_tokens_are_the_tokens_quantised(run):
    """Blocks along rows do not know where their row is."""
    x, host = normal((50, 256)), routed(50, 2, 4, align=16)
    for recipe in (fp8.MXScaling(), fp8.BlockScaling(scale_layout="compact")):
        q = fp8.permute(recipe.quantize(run.array(x)).rowwise, run.array(host))
        want = recipe.quantize(fp8.permute(run.array(x), run.array(host))).rowwise
        assert want is not None
        used = fp8.asnumpy(host.sources) >= 0
        for a, b in zip(q, want, strict=True):
            np.testing.assert_array_equal(raw(a)[used], raw(b)[used])
            assert not raw(a)[~used].any()


@pytest.mark.parametrize(("tokens", "rows"), [(0, 33), (1, 32), (1, 2000), (40, 1281), (40, 5000), (600, 1200)])
def test_unused_rows_are_everywhere_zeros(tokens, rows, run):
    """Blocks of threads that have tokens clear a share of the rows; where rows are many there are blocks that do nothing else."""
    host = reference.route(np.arange(tokens)[:, None] * 5 % 3, num_experts=3, align=16, rows=rows)
    r = run.array(host)
    for columns in (8, 13, 3000):
        x, probs = array((tokens, columns), bfloat16), normal((tokens, 1), seed=3)
        want = moved(x, host)
        data, (y, intact), (by_row, intact_probs) = run.array(x), guarded(run, want.shape, bfloat16), guarded(run, (rows,), float32)
        assert fp8.permute(data, r, probs=run.array(probs), out=(y, by_row))[0] is y
        testing.assert_bytes_equal(y, want)
        testing.assert_bytes_equal(by_row, moved_probs(probs, host))
        assert intact()
        assert intact_probs()
        y, intact = guarded(run, want.shape, bfloat16)
        dprobs = run.array(np.empty_like(probs))
        fp8.unpermute_backward(data, run.array(want), r, probs=run.array(np.ones_like(probs)), out=(y, dprobs))
        assert not raw(fp8.asnumpy(y))[host.sources < 0].any()
        assert intact()


@pytest.mark.parametrize(("tokens", "columns"), [(530, 7168), (1100, 128), (3, 16_384), (3, 16_512), (2000, 128)])
def test_tokens_and_scales_of_blocks_of_threads(tokens, columns, run):
    """A block of threads takes one token, many, or a part of one, and others the scales."""
    host = reference.route(np.arange(2 * tokens).reshape(tokens, 2) % 3, num_experts=3)
    x = array((tokens, columns), float8_e4m3fn)
    scale_inv = cases.values("bits", (tokens, columns // 128), float32, 1)
    moved_rows = fp8.permute(Scaled(run.array(x), run.array(scale_inv), x.shape, False, (1, 128), "compact"), run.array(host))
    testing.assert_bytes_equal(moved_rows.data, moved(x, host))
    testing.assert_bytes_equal(moved_rows.scale_inv, moved(scale_inv, host))


def test_three_dimensions(run):
    host = routed(30, 2, 3)
    x = array((30, 3, 7), bfloat16)
    y = fp8.permute(run.array(x), run.array(host))
    testing.assert_bytes_equal(y, moved(x, host))
    assert fp8.unpermute(y, run.array(host)).shape == (30, 3, 7)


# ---- unpermute ----
@routings
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_sums(dtype, options, run):
    host = routed(37, **options)
    r = run.array(host)
    for columns, kind in ((24, "normal"), (13, "bits"), (0, "bits")):
        y = cases.values(kind, (host.rows, columns), dtype, 1)
        given_probs: list[np.ndarray | None] = [None, cases.values(kind, (37, host.topk), float32, 2)]
        if host.experts is not None:
            given_probs.append(normal((37, host.num_experts), seed=3))
        for probs in given_probs:
            want = summed(y, host, probs)
            testing.assert_bytes_equal(fp8.unpermute(run.array(y), r, probs=None if probs is None else run.array(probs)), want)
            out, intact = guarded(run, want.shape, want.dtype, dtype.itemsize * (columns % 2))
            assert fp8.unpermute(run.array(y), r, probs=None if probs is None else run.array(probs), out=out) is out
            testing.assert_bytes_equal(out, want)
            assert intact()


def test_the_last_row_comes_first(run):
    """(1e8 + -1e8) + 1 is 1, 1e8 + (-1e8 + 1) is 0; slots are in another order than rows."""
    r = run.array(reference.route(np.array([[1, 2, 0]]), num_experts=3))
    assert fp8.asnumpy(r.row_map).tolist() == [[1, 2, 0]]
    for rows, want in (([1, -1e8, 1e8], 1), ([1e8, -1e8, 1], 0)):
        assert fp8.unpermute(run.array(f32(rows)), r).tolist() == [want]
    y = f32([1, -1, 1])
    probs = f32([[1e8, 1e8, 1]])                             # by slot: rows 1, 2, 0
    assert fp8.unpermute(run.array(y), r, probs=run.array(probs)).tolist() == [1]


def test_products_are_rounded(run):
    """An fma would keep what these lose."""
    r = run.array(reference.route(np.array([[0, 0]]), num_experts=1))
    a = np.float32(1 + 2**-12)
    y, probs = np.array([a, a], np.float32), np.array([[-a, a]], np.float32)
    assert fp8.unpermute(run.array(y), r, probs=run.array(probs)).tolist() == [0]


def test_zeros_infinities_and_nan(run):
    r = run.array(reference.route(np.array([[0], [0], [-1], [0], [0]]), num_experts=1))
    y = f32([-0.0, np.inf, 3, np.nan, 1])
    probs = f32([[1], [0], [1], [2], [-1]])
    want = np.array([0x80000000, 0x7FC00000, 0, 0x40C00000, 0x7FC00000], np.uint32).view(np.float32)
    testing.assert_bytes_equal(fp8.unpermute(run.array(y), r, probs=run.array(probs)), want)
    assert np.signbit(fp8.asnumpy(fp8.unpermute(run.array(y), r))).tolist() == [True, False, False, False, False]


def test_tiny_and_huge_sums(run):
    """Subnormals are kept; a sum beyond the format is Inf; it is rounded once."""
    r = run.array(reference.route(np.array([[0, 0]]), num_experts=1))
    tiny = np.full((2, 1), 2.0**-149, np.float32)
    assert fp8.asnumpy(fp8.unpermute(run.array(tiny), r)).view(np.uint32).tolist() == [[2]]
    assert fp8.asnumpy(fp8.unpermute(run.array(np.full((2, 1), 40000, np.float16)), r)).tolist() == [[np.inf]]
    y = np.array([[2048], [1]], np.float16)                         # 2049 is between two numbers of float16, 2050.0 is one
    probs = f32([[1, 1.001]])
    assert fp8.asnumpy(fp8.unpermute(run.array(y), r, probs=run.array(probs))).tolist() == [[2050]]


# ---- gradients ----
@routings
def test_the_gradient_of_permute(options, run):
    host = routed(41, **options)
    r = run.array(host)
    for dtype in INPUT_DTYPES:
        grad = cases.values("bits", (host.rows, 16), dtype, 1)
        probs_grad = cases.values("bits", (host.rows,), float32, 2)
        want = summed(grad, host)
        slots = np.where(host.row_map >= 0, raw(probs_grad)[host.row_map] if host.rows else np.uint32(0), np.uint32(0)).astype(np.uint32)
        testing.assert_bytes_equal(fp8.permute_backward(run.array(grad), r), want)
        x_grad, dprobs = fp8.permute_backward(run.array(grad), r, probs_grad=run.array(probs_grad))
        testing.assert_bytes_equal(x_grad, want)
        testing.assert_bytes_equal(dprobs, slots.view(np.float32))
        (a, intact), (b, intact_probs) = guarded(run, want.shape, want.dtype), guarded(run, slots.shape, float32)
        out = a, b
        assert fp8.permute_backward(run.array(grad), r, probs_grad=run.array(probs_grad), out=out) is out
        testing.assert_bytes_equal(a, want)
        testing.assert_bytes_equal(b, slots.view(np.float32))
        assert intact()
        assert intact_probs()


@routings
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_the_gradient_of_unpermute(dtype, options, run):
    host = routed(13, **options)
    r = run.array(host)
    for columns, kind in ((24, "normal"), (13, "bits"), (0, "bits"), (1, "bits")):
        y, grad = cases.values(kind, (host.rows, columns), dtype, 1), cases.values(kind, (13, columns), dtype, 2)
        for shape in {(13, host.topk), *([(13, host.num_experts)] if host.experts is not None else [])}:
            probs = normal(shape, seed=3)
            dprobs, grad_y = np.zeros(shape, np.float32), np.zeros(y.shape, raw(y).dtype).view(dtype)
            by_row = moved_probs(probs, host)
            with np.errstate(all="ignore"):
                for token, slot in zip(*np.nonzero(host.row_map >= 0), strict=True):
                    row = host.row_map[token, slot]
                    g, v = grad[token].astype(np.float32), y[row].astype(np.float32)
                    bits(grad_y)[row] = bits(narrow(g * by_row[row], dtype))
                    column = slot if shape == host.row_map.shape else host.experts[token, slot]     # type: ignore[index]
                    if columns:
                        dprobs[token, column] = narrow(f32([tree(list(g * v))]), float32)[0]
            results = fp8.unpermute_backward(run.array(grad), run.array(y), r, probs=run.array(probs))
            testing.assert_bytes_equal(results[0], grad_y)
            testing.assert_bytes_equal(results[1], dprobs)
            (a, intact), (b, intact_probs) = guarded(run, y.shape, dtype), guarded(run, shape, float32)
            out = a, b
            assert fp8.unpermute_backward(run.array(grad), run.array(y), r, probs=run.array(probs), out=out) is out
            testing.assert_bytes_equal(a, grad_y)
            testing.assert_bytes_equal(b, dprobs)
            assert intact()
            assert intact_probs()
        copied, nothing = fp8.unpermute_backward(run.array(grad), None, r)
        assert nothing is None
        testing.assert_bytes_equal(copied, moved(grad, host))
        out = copied, None
        cases.poison(copied)
        assert fp8.unpermute_backward(run.array(grad), None, r, out=out) is out
        testing.assert_bytes_equal(copied, moved(grad, host))


@pytest.mark.parametrize(("columns", "dtype"), [(8192, bfloat16), (8193, bfloat16), (40_007, bfloat16), (4096, float32), (12_289, float32)])
def test_dot_products_of_long_rows(columns, dtype, run):
    """Past the tiles of the kernel; the tree by recursion. topk is more than the kernel takes at a time."""
    host = routed(2, 34, 50, align=2)
    grad, y = normal((2, columns), dtype, 1), normal((host.rows, columns), dtype, 2)
    _, dprobs = fp8.unpermute_backward(run.array(grad), run.array(y), run.array(host), probs=run.array(np.ones((2, 34), np.float32)))
    assert dprobs is not None
    for token, slot in ((0, 0), (0, 33), (1, 5), (1, 32)):
        row = host.row_map[token, slot]
        want = tree(list(grad[token].astype(np.float32) * y[row].astype(np.float32))) if row >= 0 else np.float32(0)
        testing.assert_bytes_equal(fp8.asnumpy(dprobs)[token, slot : slot + 1], np.array([want]))


def test_gradients_are_adjoint(run):
    """<f(x), g> = <x, f'(g)>, exactly: of small integers nothing is rounded."""
    rng = np.random.default_rng(0)
    for host in (routed(30, 3, 5, align=4), routed(30, 3, 6, form="mask"), routed(30, 2, 6, form="mask of any")):
        r = run.array(host)
        x, probs, g = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((30, 8), (30, host.topk), (host.rows, 8)))
        g_probs = rng.integers(-4, 5, host.rows).astype(np.float32)
        y, y_probs = map(fp8.asnumpy, fp8.permute(run.array(x), r, probs=run.array(probs)))
        x_grad, probs_grad = map(fp8.asnumpy, fp8.permute_backward(run.array(g), r, probs_grad=run.array(g_probs)))
        assert (y * g).sum() + (y_probs * g_probs).sum() == (x * x_grad).sum() + (probs * probs_grad).sum()
        out = fp8.asnumpy(fp8.unpermute(run.array(g), r, probs=run.array(probs)))
        grad_y, dprobs = map(fp8.asnumpy, fp8.unpermute_backward(run.array(x), run.array(g), r, probs=run.array(probs)))
        assert (out * x).sum() == (g * grad_y).sum() == (probs * dprobs).sum()


def test_there_and_back(run):
    """Of one slot each the same bytes; nothing depends on what unused rows hold."""
    host = reference.route(np.arange(90)[:, None] % 7, num_experts=7, align=16)
    for dtype in INPUT_DTYPES:
        x = normal((90, 33), dtype)
        y = fp8.permute(run.array(x), run.array(host))
        free = run.array(host.sources < 0)
        bits(y)[free] = 0xFFFF
        testing.assert_bytes_equal(fp8.unpermute(y, run.array(host)), x)
        grad_y, dprobs = fp8.unpermute_backward(
            run.array(x), y, run.array(host), probs=run.array(np.ones((90, 1), np.float32)))
        testing.assert_bytes_equal(grad_y, moved(x, host))
        assert np.isfinite(fp8.asnumpy(dprobs)).all()


@needs_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9), st.sampled_from([1, 2, 16]), st.integers(0, 70), st.integers(0, 15),
       st.integers(0, 15), st.sampled_from([np.uint8, bfloat16, float32]), st.integers(0, 2**32 - 1))
def test_any_call(tokens, topk, number, align, columns, lead, lead_out, dtype, seed):
    """Any routing, row lengths and addresses."""
    dtype = np.dtype(dtype)
    host = reference.route(indices(tokens, topk, number, seed=seed), num_experts=number, align=align)
    with testing.executor("host") as run:
        x, _ = guarded(run, (tokens, columns), dtype, lead // dtype.itemsize * dtype.itemsize)
        bits(x)[...] = bits(array(x.shape, dtype, seed))
        y, intact = guarded(run, (host.rows, columns), dtype, lead_out // dtype.itemsize * dtype.itemsize)
        fp8.permute(x, host, out=y)
        testing.assert_bytes_equal(y, moved(x, host))
        assert intact()
        if dtype != np.uint8:
            back, intact = guarded(run, x.shape, dtype, lead // dtype.itemsize * dtype.itemsize)
            testing.assert_bytes_equal(fp8.unpermute(y, host, out=back), summed(y, host))
            assert intact()
            probs, grad = normal((tokens, topk), seed=seed % 99), reference.unpermute_backward
            for a, b in zip(fp8.unpermute_backward(x, y, host, probs=probs), grad(x, y, host, probs=probs), strict=True):
                testing.assert_bytes_equal(a, b)


@needs_host
@pytest.mark.parametrize(("order", "seed"), [("asc", 0), ("desc", 0), ("random", 1), ("random", 2)])
def test_any_schedule(order, seed, monkeypatch):
    monkeypatch.setenv("CUPY_FP8_HOST_ORDER", order)
    monkeypatch.setenv("CUPY_FP8_HOST_SEED", str(seed))
    r = routed(60, 3, 7, align=8)
    y, x, probs = normal((r.rows, 300), bfloat16), normal((60, 300), bfloat16, 1), normal((60, 3))
    with testing.executor("host"):
        testing.assert_bytes_equal(fp8.permute(x, r), reference.permute(x, r))
        testing.assert_bytes_equal(fp8.unpermute(y, r, probs=probs), reference.unpermute(y, r, probs=probs))
        for a, b in zip(fp8.unpermute_backward(x, y, r, probs=probs), reference.unpermute_backward(x, y, r, probs=probs), strict=True):
            testing.assert_bytes_equal(a, b)


def routed_by_hand(row: int, options: dict[str, Any], **changed: Any) -> Routing:
    """A routing that nobody's `route` made: a slot of token 3 leads to this row, and no row thinks of that slot."""
    r = routed(20, 2, 3, **options)
    assert r.rows <= 100
    row_map, sources = r.row_map.copy(), r.sources.copy()
    if row_map[3, 1] >= 0:
        sources[row_map[3, 1]] = -1
    row_map[3, 1] = row
    return dataclasses.replace(r, row_map=row_map, sources=sources, **changed)


@pytest.mark.parametrize("options", [{}, {"form": "mask"}, {"align": 16}], ids=str)
@pytest.mark.parametrize("row", [-2, -(2**31), 2**31 - 1, 100])
def test_a_row_outside_of_the_routing_is_none(row, options, run):
    """A map that leads out of bounds is read as one that leads nowhere, by all four ops, by the reference as by the kernels."""
    host, nowhere = routed_by_hand(row, options), routed_by_hand(-1, options)
    r, x, y = on(run, host, normal((20, 24)), normal((host.rows, 24), seed=1))
    host_x, host_y, probs, rows_probs = run.numpy(x), run.numpy(y), normal((20, 2)), normal((host.rows,), seed=2)
    moved_rows, moved_with = fp8.permute(x, r, probs=run.array(probs))
    testing.assert_bytes_equal(moved_rows, moved(host_x, nowhere))
    testing.assert_bytes_equal(moved_with, moved_probs(probs, nowhere))
    testing.assert_bytes_equal(fp8.unpermute(y, r, probs=run.array(probs)), summed(host_y, nowhere, probs))
    x_grad, slots = fp8.permute_backward(y, r, probs_grad=run.array(rows_probs))
    testing.assert_bytes_equal(x_grad, summed(host_y, nowhere))
    testing.assert_bytes_equal(slots, np.where(nowhere.row_map < 0, 0, rows_probs[nowhere.row_map]).astype(np.float32))
    for options in ({}, {"probs": probs}):
        back = fp8.unpermute_backward(x, y, r, **{name: run.array(a) for name, a in options.items()})
        for mine, want in zip(back, reference.unpermute_backward(host_x, host_y, nowhere, **options), strict=True):
            assert (mine is None) == (want is None)
            if want is not None:
                testing.assert_bytes_equal(mine, want)


@pytest.mark.parametrize("expert", [-7, 3, 2**31 - 1])
def test_an_expert_that_is_none_has_a_prob_of_zero(expert, run):
    """Of probs by expert, where the expert of a slot with a row is wrong: the reference does as the kernels."""
    host = routed(20, 2, 3, form="mask")
    token = int(np.argmax(host.row_map[:, 0] >= 0))
    assert host.experts is not None
    host.experts[token, 0] = expert
    probs, x, y = normal((20, 3)), normal((20, 24)), normal((host.rows, 24), seed=1)
    by_slot = np.take_along_axis(probs, np.clip(host.experts, 0, 2), 1)
    by_slot[token, 0] = 0
    r, there = on(run, host, probs)
    testing.assert_bytes_equal(fp8.permute(run.array(x), r, probs=there)[1], moved_probs(by_slot, host))
    testing.assert_bytes_equal(fp8.unpermute(run.array(y), r, probs=there), summed(y, host, by_slot))
    grad_y, dprobs = fp8.unpermute_backward(run.array(x), run.array(y), r, probs=there)
    by_slot_grad_y, by_slot_dprobs = reference.unpermute_backward(x, y, host, probs=by_slot)
    testing.assert_bytes_equal(grad_y, by_slot_grad_y)
    want = np.zeros_like(probs)
    for t, k in zip(*np.nonzero(host.row_map >= 0), strict=True):
        if 0 <= host.experts[t, k] < 3:
            want[t, host.experts[t, k]] = by_slot_dprobs[t, k]                  # type: ignore[index]
    testing.assert_bytes_equal(dprobs, want)


# ---- calls that come again ----
def test_the_same_memory_needs_no_second_look(run, monkeypatch):
    if run.name == "reference":
        pytest.skip("launches nothing")
    host = routed(20, 2, 3, align=4)
    r, x, probs, rows_grad = on(run, host, normal((20, 24)), normal((20, 2), seed=1), normal((host.rows,), seed=2))
    y = fp8.permute(x, r, probs=probs)
    back = fp8.unpermute(y[0], r, probs=probs)
    grads, gradients = fp8.permute_backward(y[0], r, probs_grad=rows_grad), fp8.unpermute_backward(x, y[0], r, probs=probs)

    def all_calls() -> list[Any]:
        results = [fp8.permute(x, r, probs=probs, out=y), fp8.unpermute(y[0], r, probs=probs, out=back),
                   fp8.permute_backward(y[0], r, probs_grad=rows_grad, out=grads),
                   fp8.unpermute_backward(x, y[0], r, probs=probs, out=gradients)]
        assert [a is b for a, b in zip(results, (y, back, grads, gradients), strict=True)] == [True] * 4
        return [run.numpy(a) for a in (*y, back, *grads, *gradients)]

    first = [a.copy() for a in all_calls()]
    looked: list[str] = []
    routing = Call.routing

    def noted(self: Call, name: str, *given: Any) -> Routing:
        looked.append(name)
        return routing(self, name, *given)

    monkeypatch.setattr(Call, "routing", noted)
    for a in (*y, back, *grads, *gradients):
        cases.poison(a)
    for a, b in zip(all_calls(), first, strict=True):
        testing.assert_bytes_equal(a, b)
    assert not looked
    fp8.permute(x, r, probs=probs, out=(y[0].copy(), y[1]))         # other memory
    fp8.unpermute(y[0], r, out=back)                                # another call
    fp8.unpermute(y[0].reshape(host.rows, 4, 6), r, probs=probs, out=back.reshape(20, 4, 6))
    assert len(looked) == 3


def test_the_same_memory_as_another_dtype_is_another_call(run):
    """The bytes of bfloat16 arrays, given again as float16: sums are those of float16, and mixed arrays are refused."""
    host = routed(20, 2, 3, align=4)
    r, y = on(run, host, normal((host.rows, 24), bfloat16))
    back = fp8.unpermute(y, r)
    fp8.unpermute(y, r, out=back)
    with pytest.raises(TypeError, match=r"^out: expected dtype bfloat16, got float16"):
        fp8.unpermute(y, r, out=back.view(float16))
    fp8.unpermute(y.view(float16), r, out=back.view(float16))
    want = reference.unpermute(run.numpy(y).view(float16), host)
    testing.assert_bytes_equal(run.numpy(back).view(float16), want)


def test_a_result_made_read_only_between_two_calls_is_refused(numpy_run):
    r, x = on(numpy_run, routed(20, 2, 3, align=4), normal((20, 24)))
    y = fp8.permute(x, r)
    fp8.permute(x, r, out=y)
    y[...] = 7
    y.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: the array is read-only"):
        fp8.permute(x, r, out=y)
    assert (y == 7).all(), "a refused call wrote"


@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("topk", [1, 2, 4, 6, 8, 3])
def test_several_steps_of_a_block(topk, dtype, run, monkeypatch):
    """As many tokens have them: rows of the next step are on their way while those of one are added up."""
    monkeypatch.setattr(plans, "_BLOCKS", 1)
    plans.unpermute_plan.cache_clear()
    for kind in ("distinct", "any"):
        host = routed(4, topk, 11, kind)
        y, probs = normal((host.rows, 4200), dtype), normal((4, topk), seed=1)
        r, given, weights = on(run, host, y, probs)
        testing.assert_bytes_equal(run.numpy(fp8.unpermute(given, r, probs=weights)), summed(y, host, probs))
    plans.unpermute_plan.cache_clear()


# ---- what is refused ----
@pytest.fixture(params=["reference", "host"])
def numpy_run(request: pytest.FixtureRequest) -> Iterator[testing.Executor]:
    if problem := testing.executor_problem(request.param):
        pytest.skip(problem)
    with testing.executor(request.param) as executor:
        yield executor


def refused(error: type[Exception], message: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    out = kwargs.get("out")
    written = [a for a in (out if isinstance(out, tuple) else (out,)) if isinstance(a, np.ndarray)]
    for a in written:
        cases.poison(a)
    with pytest.raises(error, match="^" + message):
        function(*args, **kwargs)
    assert all((raw(a).view(np.uint8) == 0xAA).all() for a in written), "memory was written"


def test_refused_tokens(numpy_run):
    r = routed(9, 2, 3, align=4)
    out = np.empty((r.rows, 16), np.float32)
    wrong: Any
    for wrong in ([[1]], 3, None):
        refused(TypeError, "x: expected a numpy.ndarray or cupy.ndarray", fp8.permute, wrong, r, out=out)
    refused(ValueError, "x: expected a row-wise part, whose scales move with their rows, got a Quantized without one", fp8.permute,
            fp8.quantize_mx(normal((9, 32)), rowwise=False, columnwise=True), r)
    for dtype in (np.complex128, object, "S3"):
        refused(TypeError, "x: expected a dtype of 1, 2, 4 or 8 bytes", fp8.permute, np.zeros((9, 4), dtype), r)
    refused(ValueError, "x: expected rows", fp8.permute, np.array(1, np.float32), r)
    refused(ValueError, r"x: expected 9 rows, the tokens of the routing, got shape \(8, 16\)", fp8.permute, normal((8, 16)), r, out=out)
    for function, name in ((fp8.unpermute, "y"), (fp8.permute_backward, "grad")):
        refused(TypeError, f"{name}: expected dtype bfloat16, float16, float32, got float8", function, array((r.rows, 16)), r)
        refused(ValueError, rf"{name}: expected {r.rows} rows, the rows of the routing, got shape \(9, 16\)", function, normal((9, 16)), r)
        refused(ValueError, f"{name}: expected rows", function, np.array(1, np.float32), r)
    for moves in (fp8.permute, fp8.unpermute, fp8.permute_backward):
        refused(TypeError, r"routing: expected a Routing \(cupy_fp8.route makes one\), got ndarray", moves, normal((9, 16)), r.row_map)


def test_refused_scales(numpy_run):
    r, x = routed(9, 2, 3), normal((9, 256))
    refused(ValueError, r"x.scale_inv: expected shape \(2, 12\) \(gemm_ready scales", fp8.permute,
            Scaled._of(array((9, 256)), np.ones((9, 2), float32), (9, 256), False, (1, 128), "gemm_ready"), r)
    refused(ValueError, "x: per-tensor data has a single scale, which does not move; permute x.data", fp8.permute,
            fp8.quantize_tensor(x, 1.0).rowwise, r)
    column = fp8.quantize_mx(x, columnwise=True).columnwise
    refused(ValueError, r"x: expected row-wise blocks \(1, B\)", fp8.permute, column, r)
    refused(ValueError, r"x: expected row-wise blocks \(1, B\)", fp8.permute, fp8.quantize_block(x, block=(128, 128),
                                                                                              scale_layout="compact").rowwise, r)
    q = fp8.quantize_mx(x).rowwise
    assert q is not None
    refused(ValueError, r"x.scale_inv: expected shape \(9, 8\)", fp8.permute,
            Scaled._of(q.data, q.scale_inv[:, :7], q.shape, False, q.block, "compact"), r)
    refused(TypeError, "x.data: expected one of float8_e4m3fn, float8_e5m2, got float32", fp8.permute,
            Scaled._of(x, q.scale_inv, q.shape, False, q.block, "compact"), r)
    refused(TypeError, "out: expected a Scaled", fp8.permute, q, r, out=q.data)
    refused(ValueError, r"out: expected shape \(18, 256\) in blocks \(1, 32\)", fp8.permute, q, r, out=q)


@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_scales_that_overlap(layout, numpy_run):
    """The scales given and those of the result, also where compact ones are made of them first."""
    r = routed(9, 2, 3)
    q = fp8.quantize_block(normal((9, 256)), scale_layout=layout).rowwise
    assert q is not None
    out = fp8.permute(q, r)
    size = q.scale_inv.size
    memory = np.zeros(size + out.scale_inv.size - 1, np.float32)            # one element is in both
    given = dataclasses.replace(q, scale_inv=memory[:size].reshape(q.scale_inv.shape))
    over = dataclasses.replace(out, scale_inv=memory[size - 1:].reshape(out.scale_inv.shape))
    fp8.permute(given, r, out=out)
    refused(ValueError, "out.scale_inv: overlaps x.scale_inv in memory", fp8.permute, given, r, out=over)
    inside = dataclasses.replace(q, data=out.data[:9])
    refused(ValueError, "out: overlaps x.data in memory", fp8.permute, inside, r, out=out)
    assert not memory.any(), "memory was written"


def test_refused_probs(numpy_run):
    r, of_mask = routed(9, 2, 3), routed(9, 2, 5, form="mask")
    x, y = normal((9, 16)), normal((18, 16))
    for routing, shapes in ((r, [(9, 3), (9,), (8, 2), (9, 2, 1)]), (of_mask, [(9, 3), (9, 4)])):
        for shape in shapes:
            probs = normal(shape)
            refused(ValueError, r"probs: expected shape \(9, 2\), one for each slot", fp8.permute, x, routing, probs=probs)
            refused(ValueError, r"probs: expected shape \(9, 2\), one for each slot", fp8.unpermute, y, routing, probs=probs)
            refused(ValueError, r"probs: expected shape \(9, 2\), one for each slot", fp8.unpermute_backward, x, y, routing, probs=probs)
    refused(ValueError, r".* or \(9, 5\), one for each expert; got \(9, 3\)", fp8.permute, x, of_mask, probs=normal((9, 3)))
    refused(TypeError, "probs: expected dtype float32, got bfloat16", fp8.permute, x, r, probs=normal((9, 2), bfloat16))
    refused(TypeError, "probs: expected a numpy.ndarray", fp8.permute, x, r, probs=[[1, 2]] * 9)
    refused(ValueError, r"probs_grad: expected shape \(18,\)", fp8.permute_backward, y, r, probs_grad=normal((17,)))
    refused(TypeError, "y: needed for the gradient of probs, got None", fp8.unpermute_backward, x, None, r, probs=normal((9, 2)))
    refused(TypeError, "y: expected dtype float32, got float16", fp8.unpermute_backward, x, y.astype(float16), r, probs=normal((9, 2)))
    refused(ValueError, r"y: expected shape \(18, 16\)", fp8.unpermute_backward, x, normal((18, 8)), r, probs=normal((9, 2)))


def test_refused_out(numpy_run):
    r = routed(9, 2, 3)
    x, y, probs = normal((9, 16)), normal((18, 16)), normal((9, 2))
    refused(ValueError, r"out: expected shape \(18, 16\), got \(9, 16\)", fp8.permute, x, r, out=normal((9, 16)))
    refused(TypeError, "out: expected dtype float32, got bfloat16", fp8.permute, x, r, out=normal((18, 16), bfloat16))
    refused(TypeError, "out: expected a tuple of two", fp8.permute, x, r, probs=probs, out=normal((18, 16)))
    refused(ValueError, r"out\[1\]: expected shape \(18,\), got \(17,\)", fp8.permute, x, r, probs=probs,
            out=(normal((18, 16)), normal((17,))))
    refused(ValueError, r"out: expected shape \(9, 16\), got \(18, 16\)", fp8.unpermute, y, r, out=normal((18, 16)))
    refused(TypeError, "out: expected a tuple of two", fp8.permute_backward, y, r, probs_grad=normal((18,)), out=normal((9, 16)))
    refused(TypeError, "out: expected a tuple of two", fp8.unpermute_backward, x, y, r, probs=probs, out=[normal((18, 16)), probs])
    refused(ValueError, r"out\[1\]: expected shape \(9, 2\), got \(9, 3\)", fp8.unpermute_backward, x, y, r, probs=probs,
            out=(normal((18, 16)), normal((9, 3))))
    read_only = normal((18, 16))
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: the array is read-only"):
        fp8.permute(x, r, out=read_only)
    memory = normal((40, 16))
    for call, overlapped in (
            (lambda: fp8.permute(memory[:9], r, out=memory[8:26]), "x"),
            (lambda: fp8.unpermute(memory[:18], r, out=memory[17:26]), "y"),
            (lambda: fp8.permute_backward(memory[:18], r, out=memory[17:26]), "grad"),
            (lambda: fp8.unpermute_backward(memory[:9], None, r, out=(memory[8:26], None)), "grad")):
        before = raw(memory).copy()
        with pytest.raises(ValueError, match=f"^out: overlaps {overlapped} in memory"):
            call()
        np.testing.assert_array_equal(raw(memory), before)
    with pytest.raises(ValueError, match=r"^out\[1\]: overlaps probs in memory"):
        fp8.unpermute_backward(x, y, r, probs=probs, out=(normal((18, 16)), probs))
    with pytest.raises(ValueError, match=r"^out\[1\]: overlaps probs_grad in memory"):
        fp8.permute_backward(y, r, probs_grad=(rows_grad := normal((18,))),
                             out=(normal((9, 16)), rows_grad.reshape(9, 2)))
    with pytest.raises(ValueError, match=r"^out: overlaps routing.row_map in memory"):
        fp8.unpermute(normal((18, 1)), r, out=r.row_map.view(np.float32).reshape(-1)[:9].reshape(9, 1))
    both = np.empty(18 * 16, np.float32)
    with pytest.raises(ValueError, match=r"^out\[1\]: overlaps out in memory"):
        fp8.permute(x, r, probs=probs, out=(both.reshape(18, 16), both[:18]))


# ---- on a GPU ----
@pytest.mark.gpu
def test_graph_replay_follows_the_routing():
    """An expert layer's moves, captured with the route itself."""
    cp = backend.cupy()
    assignment, x = cp.asarray(indices(300, 3, 8)), fp8.asarray(normal((300, 128), bfloat16), like="cupy")
    probs, rows_grad = cp.asarray(normal((300, 3))), cp.ones(300 * 3 + 8 * 15, cp.float32)
    r = fp8.route(assignment, num_experts=8, align=16)
    q = fp8.quantize_mx(x).rowwise
    y, scaled = fp8.permute(x, r, probs=probs), fp8.permute(q, r)
    back, grads = fp8.unpermute(y[0], r, probs=probs), fp8.permute_backward(y[0], r, probs_grad=rows_grad)
    gradients = fp8.unpermute_backward(x, y[0], r, probs=probs)

    def all_calls() -> None:
        fp8.route(assignment, num_experts=8, align=16, out=r)
        fp8.permute(x, r, probs=probs, out=y)
        fp8.permute(q, r, out=scaled)
        fp8.unpermute(y[0], r, probs=probs, out=back)
        fp8.permute_backward(y[0], r, probs_grad=rows_grad, out=grads)
        fp8.unpermute_backward(x, y[0], r, probs=probs, out=gradients)

    all_calls()
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        all_calls()
        for call in (lambda: fp8.permute(x, r), lambda: fp8.unpermute(y[0], r), lambda: fp8.unpermute_backward(x, y[0], r, probs=probs)):
            with pytest.raises(ValueError, match=r"^out: needed while a CUDA graph is captured"):
                call()
        graph = stream.end_capture()
        for seed in range(3):
            assignment.set(indices(300, 3, 8, seed=seed))
            for a in (*y, *scaled, back, *grads, *gradients):
                cases.poison(a)
            graph.launch(stream)
            stream.synchronize()
            host = reference.route(fp8.asnumpy(assignment), num_experts=8, align=16)
            hx, hp = fp8.asnumpy(x), fp8.asnumpy(probs)
            hy = reference.permute(hx, host, probs=hp)
            want = (*hy, *reference.permute(testing.Executor("cuda").numpy(q), host), reference.unpermute(hy[0], host, probs=hp),
                    *reference.permute_backward(hy[0], host, probs_grad=fp8.asnumpy(rows_grad)),
                    *reference.unpermute_backward(hx, hy[0], host, probs=hp))
            for a, b in zip((*y, *scaled, back, *grads, *gradients), want, strict=True):
                testing.assert_bytes_equal(a, b)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("columns", [65536, 65521])
def test_more_than_two_to_the_31_bytes(columns):
    cp = backend.cupy()
    x = cp.random.randint(1, 256, (17_000, columns), np.uint8)
    r = fp8.route(cp.asarray(indices(17_000, 2, 5)), num_experts=5, align=128)
    y = fp8.permute(x, r)
    assert y.size > 2**31
    tokens, row_map = (0, 1, 8191, 16_999), r.row_map.get()
    for token in tokens:
        for row in row_map[token]:
            assert row < 0 or bool((y[row] == x[token]).all())
    assert int((y != 0).sum()) == int((row_map >= 0).sum()) * columns
    del x, y
    values = cp.random.standard_normal((r.rows, columns // 2), np.float32).astype(np.float16)
    probs = cp.random.standard_normal((17_000, 2), np.float32)
    sums = fp8.unpermute(values, r, probs=probs)
    grad_y, dprobs = fp8.unpermute_backward(sums, values, r, probs=probs)
    assert dprobs is not None
    assert values.nbytes > 2**31
    used = row_map[list(tokens)]
    few = reference.route(np.zeros((4, 2), np.int32), num_experts=1)
    few.row_map[...] = np.where(used < 0, -1, np.argsort(np.argsort(used.reshape(-1))).reshape(4, 2))
    rows = np.sort(used.reshape(-1))
    hy, hp = values[np.maximum(rows, 0).tolist()].get(), probs[list(tokens)].get()
    testing.assert_bytes_equal(sums[list(tokens)], reference.unpermute(hy, few, probs=hp))
    want_y, want_probs = reference.unpermute_backward(sums[list(tokens)].get(), hy, few, probs=hp)
    testing.assert_bytes_equal(dprobs[list(tokens)], want_probs)
    testing.assert_bytes_equal(grad_y[rows[rows >= 0].tolist()], want_y[rows >= 0])


@pytest.mark.gpu
def test_kinds_are_not_mixed():
    x, host = normal((9, 16)), routed(9, 2, 3)
    on_device = fp8.asarray(x, like="cupy")
    with pytest.raises(TypeError, match=r"^routing: a numpy array among cupy arrays"):
        fp8.permute(on_device, host)
    r = fp8.route(fp8.asarray(indices(9, 2, 3), like="cupy"), num_experts=3)
    with pytest.raises(TypeError, match=r"^routing: a cupy array among numpy arrays"):
        fp8.permute(x, r)
    with pytest.raises(TypeError, match=r"^probs: a numpy array among cupy arrays"):
        fp8.permute(on_device, r, probs=np.ones((9, 2), np.float32))


def test_masks_take_probs_of_experts(run):
    """What [T, E] probs mean: those of the chosen experts."""
    chosen = mask(40, 9, 3)
    host = reference.route(chosen, topk=3)
    probs = normal((40, 9))
    y = normal((host.rows, 8), seed=1)
    total = np.zeros((40, 8), np.float64)
    starts = host.offsets[:-1].copy()
    for expert in range(9):
        for token in np.flatnonzero(chosen[:, expert]):
            total[token] += probs[token, expert].astype(np.float64) * y[starts[expert]]
            starts[expert] += 1
    np.testing.assert_allclose(fp8.asnumpy(fp8.unpermute(*on(run, y, host), probs=run.array(probs))), total, rtol=1e-5, atol=1e-5)
