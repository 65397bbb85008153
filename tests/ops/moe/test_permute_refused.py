"""What permute, unpermute and their gradients refuse: tokens, scales, probs and results that do not fit the
routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from moe_arrays import array, normal, on_the_cpu, refused

import cupy_fp8 as fp8
from cupy_fp8 import Scaled
from cupy_fp8.cases.moe.route import routing as routed
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float16, float32

PERMUTE, UNPERMUTE, PERMUTE_BACKWARD, UNPERMUTE_BACKWARD = (
    fp8.permute, fp8.unpermute, fp8.permute_backward, fp8.unpermute_backward)
R, OF_MASK = routed(9, 2, 3), routed(9, 2, 5, form="mask")
X, Y, PROBS = normal((9, 16)), normal((18, 16)), normal((9, 2))
DATA = array((9, 256), float8_e4m3fn)
MX = fp8.quantize_mx(normal((9, 256)), columnwise=True)
SQUARE = fp8.quantize_block(normal((9, 256)), block=(128, 128), scale_layout="compact")
BOTH = np.empty(18 * 16, np.float32)
ROWS_GRAD = normal((18,))


def mx(data: Any = MX.data, scale_inv: Any = MX.scale_inv) -> Scaled:
    return Scaled._of(data, scale_inv, (9, 256), False, (1, 32), "compact")


def line(error: type[Exception], message: str, function: Callable[..., Any], *args: Any,
         **options: Any) -> tuple[Any, ...]:
    return error, message, function, args, options


REFUSED: list[tuple[type[Exception], str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    # tokens and rows
    *(line(TypeError, "x: expected a numpy.ndarray or cupy.ndarray", PERMUTE, wrong, R, out=Y.copy())
      for wrong in ([[1]], 3, None)),
    line(ValueError,
         "x: expected a row-wise part, whose scales move with their rows, got a Quantized without one",
         PERMUTE, fp8.quantize_mx(normal((9, 32)), rowwise=False, columnwise=True), R),
    *(line(TypeError, "x: expected a dtype of 1, 2, 4 or 8 bytes", PERMUTE, np.zeros((9, 4), dtype), R)
      for dtype in (np.complex128, object, "S3")),
    line(ValueError, "x: expected an array of one or more dimensions", PERMUTE, np.array(1, np.float32), R),
    line(ValueError, r"x: expected 9 rows, the tokens of the routing, got shape \(8, 16\)", PERMUTE, X[:8], R,
         out=Y.copy()),
    *(each for function, name in ((UNPERMUTE, "y"), (PERMUTE_BACKWARD, "grad")) for each in (
        line(TypeError, f"{name}: expected dtype bfloat16, float16, float32, got float8", function,
             array((18, 16), float8_e4m3fn), R),
        line(ValueError, rf"{name}: expected 18 rows, the rows of the routing, got shape \(9, 16\)", function,
             X, R),
        line(ValueError, f"{name}: expected an array of one or more", function, np.array(1, np.float32), R))),
    *(line(TypeError, r"routing: expected a Routing \(cupy_fp8.route makes one\), got ndarray", function, X,
           R.row_map)
      for function in (PERMUTE, UNPERMUTE, PERMUTE_BACKWARD)),
    # scales
    line(ValueError, r"x.scale_inv: expected shape \(2, 12\) \(gemm_ready scales", PERMUTE,
         Scaled._of(DATA, np.ones((9, 2), float32), (9, 256), False, (1, 128), "gemm_ready"), R),
    line(ValueError, "x: per-tensor data has a single scale, which does not move; permute x.data", PERMUTE,
         fp8.quantize_tensor(normal((9, 256)), 1.0).rowwise, R),
    *(line(ValueError, r"x: expected (row-wise data stored as is|a matrix)", PERMUTE, wrong, R)
      for wrong in (MX.columnwise, SQUARE.rowwise)),
    line(ValueError, r"x.scale_inv: expected shape \(9, 8\)", PERMUTE, mx(scale_inv=MX.scale_inv[:, :7]), R),
    line(TypeError, "x.data: expected dtype float8_e4m3fn, float8_e5m2, got float32", PERMUTE,
         mx(normal((9, 256))), R),
    line(TypeError, "out: expected a Scaled", PERMUTE, mx(), R, out=MX.data),
    # probs
    *(line(ValueError, r"probs: expected shape \(9, 2\), one for each slot", function, *args, routing,
           probs=normal(shape))
      for routing, shapes in ((R, [(9, 3), (9,), (8, 2), (9, 2, 1)]), (OF_MASK, [(9, 3), (9, 4)]))
      for shape in shapes
      for function, args in ((PERMUTE, [X]), (UNPERMUTE, [Y]), (UNPERMUTE_BACKWARD, [X, Y]))),
    line(ValueError, r".* or \(9, 5\), one for each expert; got \(9, 3\)", PERMUTE, X, OF_MASK,
         probs=normal((9, 3))),
    line(TypeError, "probs: expected dtype float32, got bfloat16", PERMUTE, X, R,
         probs=normal((9, 2), bfloat16)),
    line(TypeError, "probs: expected a numpy.ndarray", PERMUTE, X, R, probs=[[1, 2]] * 9),
    line(ValueError, r"probs_grad: expected shape \(18,\)", PERMUTE_BACKWARD, Y, R, probs_grad=normal((17,))),
    line(TypeError, "y: needed for the gradient of probs, got None", UNPERMUTE_BACKWARD, X, None, R,
         probs=PROBS),
    line(TypeError, "y: expected dtype float32, got float16", UNPERMUTE_BACKWARD, X, Y.astype(float16), R,
         probs=PROBS),
    line(ValueError, r"y: expected shape \(18, 16\)", UNPERMUTE_BACKWARD, X, normal((18, 8)), R, probs=PROBS),
    # results
    line(TypeError, "out: expected a tuple of two", PERMUTE, X, R, probs=PROBS, out=Y.copy()),
    line(TypeError, "out: expected a tuple of two", PERMUTE_BACKWARD, Y, R, probs_grad=ROWS_GRAD,
         out=X.copy()),
    line(TypeError, "out: expected a tuple of two", UNPERMUTE_BACKWARD, X, Y, R, probs=PROBS,
         out=[Y.copy(), PROBS]),
    line(TypeError, r"out\[0\]: expected an array, got None", UNPERMUTE_BACKWARD, X, None, R,
         out=(None, None)),
    line(TypeError, r"out\[1\]: expected None, since no probs were given", UNPERMUTE_BACKWARD, X, None, R,
         out=(Y.copy(), PROBS)),
    line(ValueError, r"out\[1\]: overlaps out in memory", PERMUTE, X, R, probs=PROBS,
         out=(BOTH.reshape(18, 16), BOTH[:18]))]


@on_the_cpu
@pytest.mark.parametrize(("error", "message", "function", "args", "options"), REFUSED)
def test_refused(error, message, function, args, options, run):
    refused(error, message, function, *args, **options)


@on_the_cpu
@pytest.mark.parametrize("layout", ["compact", "gemm_ready"])
def test_scales_that_overlap(layout, run):
    """The scales given and those of the result, also where compact ones are made of them first."""
    q = fp8.quantize_block(normal((9, 256)), scale_layout=layout).rowwise
    assert q is not None
    out = fp8.permute(q, R)
    size = q.scale_inv.size
    memory = np.zeros(size + out.scale_inv.size - 1, np.float32)            # one element is in both
    given = dataclasses.replace(q, scale_inv=memory[:size].reshape(q.scale_inv.shape))
    over = dataclasses.replace(out, scale_inv=memory[size - 1:].reshape(out.scale_inv.shape))
    fp8.permute(given, R, out=out)
    refused(ValueError, "out.scale_inv: overlaps x.scale_inv in memory", fp8.permute, given, R, out=over)
    inside = dataclasses.replace(q, data=out.data[:9])
    refused(ValueError, "out.data: overlaps x.data in memory", fp8.permute, inside, R, out=out)
