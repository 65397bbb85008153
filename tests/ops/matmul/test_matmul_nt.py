"""matmul_nt: its definition, the bound, accepted operands and errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import DeviceError, Quantized, Scaled, reference, testing
from cupy_fp8.cases import OPS
from cupy_fp8.cases.matmul.dense import operand
from cupy_fp8.formats import FORMATS, INPUT_DTYPES, bfloat16, float8_e4m3fn, float16, float32
from cupy_fp8.reference import numerics
from cupy_fp8.reference.matmul.dense import magnitudes
from cupy_fp8.reference.matmul.tolerance import SUMS, assert_within, ulp

PAIRS = (("tensor", "tensor"), ("row", "row"), ("vector", "block"), ("block", "vector"), ("vector", "vector"),
         ("block", "block"), ("row", "vector"))


def pair(scalings: tuple[str, str], m: int = 12, n: int = 8, k: int = 144, *, kind: str = "normal",
         batch: tuple[int, ...] = ()) -> tuple[Scaled, Scaled]:
    a, b = (operand((*batch, rows, k), float8_e4m3fn, scaling, "gemm_ready", float32, kind, seed)
            for seed, (rows, scaling) in enumerate(zip((m, n), scalings, strict=True)))
    return a, b


# ---- the definition ----
def rounded(v: Fraction, dtype: np.dtype[Any]) -> float:
    """Round v to nearest even, in exact arithmetic."""
    f = FORMATS[dtype]
    digits = f.bits - f.exponent_bits - 1
    size = max(abs(v), Fraction(f.smallest_normal))
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (exponent - digits)
    nearest = round(v / unit) * unit
    return float(nearest) if abs(nearest) <= f.max else float(np.copysign(np.inf, float(v)))


@pytest.mark.parametrize("to", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("scalings", PAIRS, ids="-".join)
def test_the_reference_is_the_formula(scalings, to):
    """The formula is computed in rational numbers and rounded once."""
    a, b = pair(scalings, 3, 5)
    bias, c = np.arange(5, dtype=np.float32), np.float32(100) * np.ones((3, 5), np.float32)
    left, right = (s.dequantize(np.float32) for s in (a, b))
    exact_left, exact_right = ([[Fraction(float(v)) * Fraction(float(w)) for v, w in zip(*row, strict=True)]
                                for row in zip(numerics.widen(s.data), scales(s), strict=True)]
                               for s in (a, b))
    for addends, more in (({}, 0), ({"bias": bias}, 1)):
        got = reference.matmul_nt(a, b, dtype=to, **addends)
        for i, j in np.ndindex(3, 5):
            want = sum(x * y for x, y in zip(exact_left[i], exact_right[j], strict=True)) + more * j
            assert float(got[i, j]) == rounded(want, to)
    got = reference.matmul_nt(a, b, accumulate=c, bias=bias)
    assert_within(got, left @ right.T + bias + c, magnitudes(a, b, bias=bias, accumulate=c))
    assert got.dtype == float32


def scales(s: Scaled) -> np.ndarray:
    """Return the scale of every value."""
    if s.block is None:
        return np.broadcast_to(s.scale_inv, s.shape)
    ones = Scaled(np.ones(s.shape, float8_e4m3fn), s.scale_inv, s.shape, False, s.block, s.scale_layout)
    return ones.dequantize()


def test_narrow_f64_rounds_once():
    """A tie between two bfloat16 values in f32, which the f64 value lies above."""
    v = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 65520 - 2.0**-30, 2.0**-25 + 2.0**-60, -0.0, np.inf])
    assert numerics.narrow_f64(v, bfloat16).astype(float).tolist() == [
        1 + 2.0**-7, 1, 65536, 2.0**-25, 0, np.inf]
    assert numerics.narrow_f64(v, float16).astype(float).tolist()[2:4] == [65504, 2.0**-24]


def test_cases_have_results():
    """No case of normal data has NaN, which would match anything that is not finite."""
    op = OPS["matmul_nt"]
    for case in op.cases():
        if case.values == "normal" and 0 not in case.shape:
            (a, b), options = op.inputs(case)
            made = op.reference(a, b, **options)
            assert np.isfinite(made.astype(np.float32)).all(), str(case)
            assert made.astype(np.float32).any(), str(case)


# ---- the bound ----
def test_the_bound_is_checked():
    a, b = pair(("vector", "block"), 16, 16, 512)
    desired, sizes = reference.matmul_nt(a, b, dtype=float32), magnitudes(a, b)
    largest = sizes * SUMS + ulp(desired.astype(np.float64), float32)
    assert_within((desired + 0.9 * largest).astype(np.float32), desired, sizes)
    wrong: list[Any] = [desired + 1.2 * largest, np.zeros_like(desired), desired * np.nan, desired * np.inf,
                        -desired, desired[::-1]]
    for one in wrong:
        with pytest.raises(AssertionError, match=r"elements of float32\[16, 16\]"):
            assert_within(one.astype(np.float32), desired, sizes)
    for other in (desired.astype(bfloat16), desired[:4]):
        with pytest.raises(AssertionError, match="desired float32"):
            assert_within(other, desired, sizes)


def test_the_bound_where_terms_are_not_finite():
    desired, sizes = np.array([np.nan, np.inf, 1], np.float32), np.array([np.nan, np.inf, 2])
    assert_within(np.array([np.inf, np.nan, 1], np.float32), desired, sizes)
    with pytest.raises(AssertionError, match="2 of 3 elements"):
        assert_within(np.array([1, 2, 1], np.float32), desired, sizes)
    # sums on either side of the largest float16
    assert_within(np.array([np.inf, 65504], np.float16), np.array([65504, np.inf], np.float16),
                  np.array([131038, 140000.0]))


def test_ulp():
    for dtype, one in ((bfloat16, 2.0**-7), (float16, 2.0**-10), (float32, 2.0**-23)):
        f = FORMATS[dtype]
        assert ulp(np.array([1.0, -1.5, 2.0, 0.0, f.smallest_subnormal]), dtype).tolist() == [
            one, one, 2 * one, f.smallest_subnormal, f.smallest_subnormal]
        assert np.isfinite(ulp(np.array([np.inf, np.nan, f.max]), dtype)).all()


@pytest.mark.parametrize("scalings", PAIRS, ids="-".join)
def test_integers_are_exact(scalings, run):
    """Partial sums stay below 2^13, with power-of-two scales."""
    a, b = pair(scalings, 16, 24, 1024)
    rng = np.random.default_rng(0)
    small = [Scaled(rng.integers(-2, 3, s.shape).astype(np.float32).astype(float8_e4m3fn),
                    np.exp2(rng.integers(-1, 2, s.scale_inv.shape)).astype(np.float32), s.shape, False,
                    s.block, s.scale_layout) for s in (a, b)]
    for to in INPUT_DTYPES:
        try:
            got = fp8.matmul_nt(*map(run.array, small), dtype=to)
        except DeviceError:
            assert run.name == "cuda"                                   # the other back end is used
            assert scalings in PAIRS[5:]
            continue
        testing.assert_bytes_equal(got, reference.matmul_nt(*small, dtype=to))


# ---- what it takes ----
def test_recipes(run):
    """Products of the results of recipes, the row-wise parts of Quantized, and gradients of weights."""
    rng = np.random.default_rng(1)
    x, w, grad = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 128), (48, 128), (32, 48)))
    for recipe in (fp8.CurrentScaling(), fp8.BlockScaling(), fp8.BlockScaling((128, 128)),
                   fp8.BlockScaling((1, None))):
        qx, qw, qgrad = (run.array(recipe.quantize(v, columnwise=True)) for v in (x, w, grad))
        for one, two, exact in ((qx, qw, x @ w.T), (qgrad, qw.T, grad @ w), (qgrad.T, qx.T, grad.T @ x)):
            got = run.numpy(fp8.matmul_nt(one, two, dtype=float32))
            want = run.numpy(one).dequantize() @ run.numpy(two).dequantize().T
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())
            assert np.abs(got - exact).max() < 0.1 * np.abs(exact).max()


def test_mx_of_numpy_arrays():
    layouts: Any = ((5, "compact"), (7, "swizzled"))
    x, w = (fp8.quantize_mx(np.random.default_rng(i).standard_normal((2, n, 96)).astype(np.float32),
                            scale_layout=layout)
            for i, (n, layout) in enumerate(layouts))
    want = np.einsum("bmk,bnk->bmn", x.dequantize(np.float32), w.dequantize(np.float32))
    np.testing.assert_allclose(fp8.matmul_nt(x, w, dtype=float32), want, rtol=1e-5, atol=1e-5)


def test_accumulate_is_updated_in_place(run):
    a, b = map(run.array, pair(("vector", "block"), 8, 16))
    into = run.array(np.ones((8, 16), np.float32))
    product = run.numpy(fp8.matmul_nt(a, b, dtype=float32))
    for turn in range(1, 4):
        assert fp8.matmul_nt(a, b, accumulate=into) is into
        np.testing.assert_allclose(run.numpy(into), 1 + turn * product, rtol=1e-5,
                                   atol=1e-4 * np.abs(product).max())


# ---- what it refuses ----
A, B = pair(("vector", "block"))
MX = fp8.quantize_mx(np.ones((8, 144), np.float32))
COLUMNS = fp8.quantize_block(np.ones((144, 12), np.float32), columnwise=True, rowwise=False)
HALF = fp8.quantize_block(np.ones((8, 144), np.float32), block=(1, 64))
E8M0 = fp8.BlockScaling((1, 32)).quantize(np.ones((8, 144), np.float32))
CALL: Callable[..., Any] = fp8.matmul_nt

REFUSED: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (TypeError, "a: expected a Scaled or Quantized, got ndarray; quantize_tensor, ", (np.ones((2, 2)), B),
     {}),
    (TypeError, "b: expected a Scaled or Quantized, got NoneType; ", (A, None), {}),
    (ValueError, "a: expected a row-wise part, got a Quantized without one; a.T has one, an operand",
     (COLUMNS, B), {}),
    (ValueError, "a: expected data stored as is (values along K adjacent), got data stored transposed; a.T "
     "of it is an operand of a product over its rows", (COLUMNS.columnwise, B), {}),
    (ValueError, "b: expected K = 144 as last extent, as a has, got shape (8, 128); ",
     (A, pair(("tensor", "tensor"), k=128)[1]), {}),
    (ValueError, "b: expected a matrix, as a has shape (12, 144), got shape (2, 8, 144)",
     (A, pair(("tensor", "block"), batch=(2,))[1]), {}),
    (ValueError, "b: expected a batch of 3 matrices, as a has shape (3, 12, 144), got shape (2, 8, 144)",
     (pair(("tensor", "block"), batch=(3,))[0], pair(("tensor", "block"), batch=(2,))[1]), {}),
    (ValueError, "a: expected a matrix [rows, K] or a batch [batch, rows, K], got shape (1, 2, 12, 144)",
     (Scaled(np.ones((1, 2, 12, 144), float8_e4m3fn), np.ones(1, np.float32), (1, 2, 12, 144)), B),
     {}),
    (ValueError, "b: expected one scale, a scale for each row, or blocks 1×128, 128×128 or MX, got block "
     "1×64 with float32 gemm_ready scales; b.to_block((1, 128), ", (A, HALF), {}),
    (TypeError, "b.scale_inv: expected dtype float8_e8m0fnu of blocks 1×32, got float32; b.to_block(",
     (A, E8M0), {}),
    (ValueError, "a: expected MX blocks 1×32, as b has, got block 1×128 with float32 gemm_ready scales; "
     "b.to_block((1, 128), scale_layout='gemm_ready') converts", (A, MX), {}),
    (TypeError, "dtype: expected one of bfloat16, float16, float32, got float8_e4m3fn", (A, B),
     {"dtype": float8_e4m3fn}),
    (ValueError, "bias: expected shape (8,), a value for each row of b, got (12,)", (A, B),
     {"bias": np.ones(12, np.float32)}),
    (ValueError, "fast_accum: expected False for operands in blocks", (A, B), {"fast_accum": True}),
    (ValueError, "fast_accum: expected False for operands in blocks", pair(("tensor", "vector")),
     {"fast_accum": True}),
    (ValueError, "out: expected None beside accumulate, which is the result", (A, B),
     {"accumulate": np.ones((12, 8), np.float32), "out": np.ones((12, 8), np.float32)}),
]


@pytest.mark.parametrize(("error", "message", "given", "options"), REFUSED,
                         ids=[line[1][:48] for line in REFUSED])
def test_refused(error, message, given, options):
    with pytest.raises(error, match="^" + re.escape(message)):
        CALL(*given, **options)


@pytest.mark.parametrize("quantize", [
    fp8.quantize_tensor, fp8.quantize_block, functools.partial(fp8.quantize_block, block=(128, 128)),
    functools.partial(fp8.quantize_block, block=(1, None)),
    functools.partial(fp8.quantize_mx, transposed=True)],
    ids=["tensor", "1x128", "128x128", "row", "mx"])
def test_columns_that_were_not_made_are_what_it_asks_for(quantize):
    """The gradient of activations is a product with w.T, whose rows are the columns of w."""
    w, g = np.ones((256, 384), np.float32), np.ones((128, 256), np.float32)
    wq, gq = quantize(w, columnwise=True), quantize(g)
    lacking = Quantized(wq.rowwise).T
    assert fp8.matmul_nt(gq, wq.T).shape == (128, 384)
    for wrong in (lacking, lacking.columnwise, wq.rowwise.T):
        with pytest.raises(ValueError, match=r"^b: expected .* If b is q\.T or q\.rowwise\.T, give q\.T \(no"
                                             r"t a part's\), of a q that was quantised with columnwise=True"):
            fp8.matmul_nt(gq, wrong)


def test_columns_of_blocks_are_refused():
    """Blocks along the rows, of data that are not stored transposed."""
    s = Scaled(np.ones((128, 64), float8_e4m3fn), np.ones((1, 64), np.float32), (128, 64), False, (128, 1),
               "compact")
    with pytest.raises(ValueError, match=r"^a: expected blocks along K, got block 128×1 .*take \.T of"):
        CALL(s, s)


# ---- on a GPU ----
@pytest.mark.gpu
@pytest.mark.full
def test_more_than_two_to_the_31_elements():
    run = testing.Executor("cuda")
    m, n, k = (1 << 16) + 64, (1 << 15) + 8, 128
    a, b = (run.array(operand((rows, k), float8_e4m3fn, scaling, "gemm_ready", float32, "normal", seed))
            for seed, (rows, scaling) in enumerate(((m, "tensor"), (n, "tensor"))))
    out = fp8.matmul_nt(a, b)
    whole = run.numpy(b)
    for rows in (slice(4), slice(m - 4, m)):
        part = Scaled(fp8.asnumpy(a.data[rows]), run.numpy(a.scale_inv), (4, k))
        assert_within(fp8.asnumpy(out[rows]), reference.matmul_nt(part, whole), magnitudes(part, whole))
