"""testing.assert_product_close: products of every form are within their bound, and wrong ones are found."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_fp8 as fp8
from cupy_fp8 import testing
from cupy_fp8.cases import OPS
from cupy_fp8.testing import assert_product_close

RNG = np.random.default_rng(3)
X = RNG.standard_normal((48, 272), np.float32)
W = RNG.standard_normal((24, 272), np.float32)
SPLITS = [16, 0, 32]


def weights(recipe: Any) -> Any:
    return fp8.quantize(np.stack([W, -W, 2 * W]), recipe)


def dense() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return operands of a product, and its other arguments."""
    blocks, rows = fp8.BlockScaling(), fp8.BlockScaling((1, None))
    x, w = fp8.quantize_tensor(X), fp8.quantize_tensor(W)
    grad = fp8.quantize_block(X[:, :24], columnwise=True)
    return {
        "one scale": ((x, w), {}),
        "rows": ((fp8.quantize(X, rows), fp8.quantize(W, rows)), {}),
        "blocks": ((fp8.quantize(X, blocks), fp8.quantize_block(W, (128, 128))), {}),
        "MX": ((fp8.quantize_mx(X), fp8.quantize_mx(W, scale_layout="swizzled").rowwise), {}),
        "columns": ((grad.T, fp8.quantize_block(X, columnwise=True).T), {}),
        "bias": ((x, w), {"bias": W[:, 0]}),
        "accumulate": ((x, w), {"accumulate": X[:, :24].copy()}),
        "a batch": ((fp8.quantize_mx(np.stack([X, -X])), fp8.quantize_mx(np.stack([W, W]))), {}),
    }


def grouped() -> dict[str, tuple[Any, dict[str, Any]]]:
    blocks = fp8.BlockScaling()
    x, w = fp8.quantize(X, blocks), weights(fp8.BlockScaling((128, 128)))
    groups = fp8.group_quantize(X, SPLITS, blocks, columnwise=True)
    return {
        "rows of groups": ((x, w, SPLITS), {}),
        "sizes in an array": ((x, w, np.array(SPLITS, np.int32)), {}),
        "biases": ((x, w, SPLITS), {"bias": np.ones((3, 24), np.float32), "bias_weights": X[:, 0].copy()}),
        "a Grouped": ((groups, w), {}),
        "columns of groups": ((groups, groups), {"group": "k"}),
        "columns that are added": ((groups, groups, SPLITS), {
            "group": "k", "accumulate": np.ones((3, 272, 272), np.float32)}),
    }


CASES = {**dense(), **grouped()}


def product(operands: Any, options: dict[str, Any], dtype: Any) -> Any:
    given = {name: value.copy() if name == "accumulate" else value for name, value in options.items()}
    of_groups = len(operands) == 3 or isinstance(operands[0], fp8.Grouped)
    return (fp8.grouped_matmul_nt if of_groups else fp8.matmul_nt)(*operands, dtype=dtype, **given)


def check(actual: Any, operands: Any, options: dict[str, Any], **bound: Any) -> None:
    given: Any = options | bound
    assert_product_close(actual, *operands, **given)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda t: t.__name__)
def test_right_products_pass(name, dtype):
    operands, options = CASES[name]
    y = product(operands, options, dtype)
    before = {key: np.array(value, copy=True) for key, value in options.items() if key == "accumulate"}
    check(y, operands, options, rtol=0)
    exact = y.astype(np.float64)
    check((exact * (1 + 2.0**-8)).astype(y.dtype), operands, options)      # within the magnitudes' 2^-6
    for key, value in before.items():
        assert np.array_equal(options[key], value), "the call adds to what was given"


@pytest.mark.parametrize("name", CASES)
def test_one_wrong_element_is_named(name):
    operands, options = CASES[name]
    y = product(operands, options, np.float32)
    at = tuple(size // 2 for size in y.shape)
    # sums of |a · b| are at most some thousands here
    y[at] += 1e5
    where = ", ".join(map(str, at))
    message = (rf"product: 1 of {y.size} elements of float32.* worst at \({where}\): actual .*, desired .*, "
               r"difference 1e\+05, bound ")
    with pytest.raises(AssertionError, match=message):
        check(y, operands, options)


@pytest.mark.parametrize("wrong", ["zeros", "no scales", "no bias", "rows in another order", "NaN"])
def test_mistakes_of_kernels_are_found(wrong):
    (a, b), _ = CASES["blocks"]
    bias = np.full(24, 300, np.float32)
    right = fp8.matmul_nt(a, b, dtype=np.float32, bias=bias)
    made = {
        "zeros": lambda: np.zeros_like(right),
        "no scales": lambda: a.data.astype(np.float32) @ b.data.astype(np.float32).T + bias,
        "no bias": lambda: fp8.matmul_nt(a, b, dtype=np.float32),
        "rows in another order": lambda: right[::-1].copy(),
        "NaN": lambda: right * np.nan,
    }[wrong]()
    with pytest.raises(AssertionError, match="elements of float32"):
        assert_product_close(made, a, b, bias=bias)


def test_the_worst_element_is_named_with_all_figures():
    a, b = fp8.quantize_tensor(np.ones((2, 4), np.float32), 1.0), fp8.quantize_tensor(np.eye(4, dtype="f4"),
                                                                                     1.0)
    y = np.ones((2, 4), np.float32)
    assert_product_close(y, a, b)
    y[0, 1], y[1, 3] = 1.5, 3
    with pytest.raises(AssertionError) as caught:
        assert_product_close(y, a, b)
    assert str(caught.value) == (
        "product: 2 of 8 elements of float32[2, 4] are out of bounds; worst at (1, 3): actual 3.0, "
        "desired 1.0, difference 2, bound 0.0156, sum of magnitudes 1")
    assert_product_close(y, a, b, rtol=2)


def test_terms_that_are_not_finite():
    x = np.ones((2, 16), np.float32)
    x[1, 3] = np.nan
    a, b = fp8.quantize_tensor(x, 1.0), fp8.quantize_tensor(np.ones((2, 16), np.float32), 1.0)
    y = fp8.matmul_nt(a, b, dtype=np.float32)
    assert_product_close(y, a, b)
    y[1] = np.inf
    assert_product_close(y, a, b)
    y[1] = 16
    with pytest.raises(AssertionError, match="2 of 4 elements"):
        assert_product_close(y, a, b)


def test_what_is_no_product():
    (a, b), _ = CASES["blocks"]
    y = fp8.matmul_nt(a, b)
    with pytest.raises(AssertionError, match=r"actual bfloat16 \(24, 48\), desired bfloat16 \(48, 24\)"):
        assert_product_close(y.T, a, b)
    with pytest.raises(TypeError, match="actual: expected a NumPy or CuPy array, got Quantized"):
        assert_product_close(a, a, b)       # type: ignore[arg-type, unused-ignore]
    with pytest.raises(TypeError, match="actual: "):
        assert_product_close(np.zeros((48, 24)), a, b)
    with pytest.raises(TypeError, match="a: expected a Scaled or Quantized, got ndarray"):
        assert_product_close(y, X, b)       # type: ignore[arg-type, unused-ignore]
    with pytest.raises(ValueError, match="expected K = 272"):
        assert_product_close(y, a, fp8.quantize_block(W[:, :128]))
    with pytest.raises(ValueError, match="bias_weights: belong to products of groups"):
        assert_product_close(y, a, b, bias_weights=X[:, 0])
    with pytest.raises(ValueError, match="rtol: expected a number of 0 or more, got -1"):
        assert_product_close(y, a, b, rtol=-1)


@pytest.mark.parametrize("op", ["matmul_nt", "grouped_matmul_nt"])
def test_operands_of_the_cases(op):
    """Every layout of operands in the cases is accepted."""
    registered, seen = OPS[op], set()
    for case in registered.cases():
        kind = tuple(case.options.get(name) for name in ("scaling", "given", "group", "scale_layout"))
        if kind in seen or case.values != "normal":
            continue
        seen.add(kind)
        args, options = registered.inputs(case)
        options = {name: value for name, value in options.items() if name not in ("align", "check", "out")}
        given = {name: value.copy() if name == "accumulate" else value for name, value in options.items()}
        y = getattr(fp8, op)(*args, **given)
        options.pop("dtype", None)
        assert_product_close(y, *args, **options, rtol=0)
    assert len(seen) > 5


def test_on_the_executor(run):
    """Products of kernels, on any executor."""
    a, b = (run.array(each) for each in CASES["blocks"][0])
    y = fp8.matmul_nt(a, b, dtype=np.float32)
    assert_product_close(y, a, b, rtol=2.0**-8)
    wrong = testing.Executor(run.name).numpy(y).copy()
    wrong[0, 0] += 1e4
    with pytest.raises(AssertionError, match=r"worst at \(0, 0\)"):
        assert_product_close(run.array(wrong), a, b)
