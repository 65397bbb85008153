"""The wording of errors about norms: one line for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from messages import Line, check, every_line, line, poisoned

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from cupy_fp8.formats import bfloat16, float16

T, V = TypeError, ValueError
FORWARD, BACKWARD = fp8.norm_quantize, fp8.norm_backward_quantize
BLOCKS, DELAYED, CURRENT = BlockScaling(), DelayedScaling(), CurrentScaling()


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, W, SIX = ones(6, 16), ones(16), ones(6)
GRAD, OTHER = ones(6, 16), ones(6, 16)
NARROW, HALF = ones(6, 15), ones(6, 16, dtype=bfloat16)
OUT: Any = poisoned(FORWARD(X, W, BLOCKS))
SHORT: Any = poisoned(FORWARD(X[:5].copy(), W, BLOCKS))
OF_MX: Any = poisoned(FORWARD(X, W, MXScaling()))
MEMORY = "in memory; results need memory of their own"


def forward(error: type[Exception], message: str, recipe: Any = BLOCKS, x: Any = X, weight: Any = W,
            **options: Any) -> Line:
    return line(error, message, FORWARD, x, weight, recipe, **options)


def backward(error: type[Exception], message: str, recipe: Any = BLOCKS, grad: Any = GRAD, x: Any = X,
             **options: Any) -> Line:
    return line(error, message, BACKWARD, grad, x, W, recipe, **options)


def both(error: type[Exception], message: str, x: Any = X, weight: Any = W, recipe: Any = BLOCKS,
         **options: Any) -> list[Line]:
    """Of both ops, of which one has a gradient like x."""
    return [line(error, message, FORWARD, x, weight, recipe, **options),
            line(error, message, BACKWARD, x, x, weight, recipe, **options)]


ARRAYS: list[Line] = [
    *both(T, "x: expected dtype bfloat16, float16, float32, got float64", np.ones((6, 16))),
    *both(T, "x: expected a numpy.ndarray or cupy.ndarray, got list", X.tolist()),
    *[one for x in (SIX, ones(2, 3, 16), ones())
      for one in both(V, f"x: expected shape [M, K], got {x.shape}", x)],
    *both(V, "weight: expected shape (16,), one for each column of x, got (15,)", weight=ones(15)),
    *both(V, "weight: expected shape (16,), one for each column of x, got (1, 16)", weight=ones(1, 16)),
    *both(T, "weight: expected dtype float32, got float16", weight=W.astype(float16)),
    *both(T, "weight: expected dtype bfloat16, float32, got float16", HALF, W.astype(float16)),
    *both(T, "weight: expected a numpy.ndarray or cupy.ndarray, got NoneType", weight=None),
    forward(V, "residual: expected shape (6, 16), x's shape, got (6, 15)", residual=NARROW),
    forward(T, "residual: expected dtype float32, got bfloat16", residual=HALF),
    forward(V, "bias: RMSNorm has none; kind='layer' has", bias=W),
    forward(V, "bias: expected shape (16,), weight's shape, got (6,)", bias=SIX, kind="layer"),
    forward(T, "bias: expected dtype float32, got float16", bias=W.astype(float16), kind="layer"),
    backward(T, "grad: expected a numpy.ndarray or cupy.ndarray, got NoneType", grad=None),
    backward(V, "grad: expected shape (6, 16), x's shape, got (6, 15)", grad=NARROW),
    backward(T, "grad: expected dtype float32, got bfloat16", grad=HALF),
    backward(V, "residual_grad: expected shape (6, 16), x's shape, got (6, 15)", residual_grad=NARROW),
    backward(T, "residual_grad: expected dtype float32, got bfloat16", residual_grad=HALF),
    backward(V, "rstd: expected shape (6,), one for each row of x, got (5,)", rstd=ones(5)),
    backward(V, "rstd: expected shape (6,), one for each row of x, got (6, 1)", rstd=ones(6, 1)),
    backward(T, "rstd: expected dtype float32, got float64", rstd=np.ones(6)),
    *both(T, "noop: expected dtype float32, got float64", noop=np.ones(1), out=OUT),
    *both(V, "noop: needs out=, since nothing may be written", noop=ones(1)),
]

OPTIONS: list[Line] = [
    *both(V, "kind: expected one of ('rms', 'layer'), got 'group'", kind="group"),
    *both(V, "kind: expected one of ('rms', 'layer'), got True", kind=True),
    *[one for wrong in (-1e-9, float("nan"), np.inf, 1e39)
      for one in both(V, f"eps: expected a finite float32 of 0 or more, got {wrong}", eps=wrong)],
    *[one for wrong in ("1e-6", True, None, [1e-6])
      for one in both(T, f"eps: expected a number, got {wrong!r}", eps=wrong)],
    *[one for wrong in ("1", True, None, [1.0])
      for one in both(T, f"weight_offset: expected a number, got {wrong!r}", weight_offset=wrong)],
    *[one for wrong in (float("nan"), -np.inf, 1e39)
      for one in both(V, f"weight_offset: expected a finite float32, got {wrong}", weight_offset=wrong)],
    *[forward(T, f"round_through: expected one of bfloat16, float16, got {shown}", round_through=wrong)
      for wrong, shown in ((np.float32, "float32"), ("float8_e4m3fn", "float8_e4m3fn"), ("rows", "'rows'"),
                           (True, "True"))],
    *[forward(T, f"return_{name}: expected True or False, got 'yes'", **{f"return_{name}": "yes"})
      for name in ("residual", "normed", "rstd")],
    forward(V, "return_residual: there is no residual to add; x itself is what is normed",
            return_residual=True),
    # ---- recipes and scales ----
    forward(T, "recipe: expected a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got NoneType",
            None),
    *[one for recipe, message in (
        (BlockScaling, "a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got the class"),
        ("mx", "a DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got str"))
      for one in both(T, f"recipe: expected {message}", recipe=recipe)],
    *both(V, "recipe: expected blocks of one of ((1, 128), (1, 64), (1, 32)), got (128, 128)",
          recipe=BlockScaling((128, 128))),
    *both(V, "recipe: expected MX blocks of (1, 32), got (32, 32)", recipe=MXScaling(block=(32, 32))),
    *both(V, "rowwise, columnwise: expected at least one of them, got neither", rowwise=False),
    *both(V, "scale: delayed scaling needs the scale", recipe=DELAYED),
    *both(V, "scale: current scaling takes it from the values themselves", recipe=CURRENT, scale=1.0),
    *both(V, "scale, amax: belong to per-tensor recipes", scale=1.0),
    *both(V, "scale, amax: belong to per-tensor recipes", amax=ones(1)),
    backward(V, "scale: only with a recipe; without one dx is not scaled", None, scale=1.0),
    backward(V, "amax: only with a recipe; without one dx is not scaled", None, amax=ones(1)),
    backward(V, "rowwise, columnwise: only with a recipe; without one dx", None, rowwise=False),
    backward(V, "rowwise, columnwise: only with a recipe; without one dx", None, columnwise=True),
    backward(T, "columnwise: expected True or False, got 'x'", None, columnwise="x"),
    backward(V, "dtype: only without a recipe, which has a dtype of its own", dtype=np.float32),
    backward(T, "dtype: expected one of float32, got bfloat16", None, dtype=bfloat16),
]

RESULTS: list[Line] = [
    forward(T, "out: expected a Quantized (an earlier result, or recipe.empty(…)), got tuple", out=(OUT, X)),
    forward(V, "out.rowwise: expected block-scaled data of shape (6, 16)", out=OF_MX),
    forward(V, "out.rowwise: expected block-scaled data of shape (6, 16)", out=SHORT),
    forward(T, "out: expected a tuple of two (an earlier result), got Quantized", out=OUT, return_rstd=True),
    forward(T, "out: expected a tuple of two (an earlier result), got tuple", out=(OUT,), return_rstd=True),
    forward(T, "out: expected a tuple of three (an earlier result), got tuple", out=(OUT, SIX.copy()),
            return_normed=True, return_rstd=True),
    forward(V, "out[1]: expected shape (6,), got (16,)", out=(OUT, W.copy()), return_rstd=True),
    forward(T, "out[1]: expected dtype float32, got bfloat16", out=(OUT, HALF.copy()), return_normed=True),
    forward(V, f"out[1]: overlaps x {MEMORY}", out=(OUT, X), return_normed=True),
    forward(V, f"out[1]: overlaps residual {MEMORY}", residual=GRAD, out=(OUT, GRAD), return_residual=True),
    forward(V, f"out[1]: overlaps weight {MEMORY}", out=(OUT, W[:6]), return_rstd=True),
    forward(V, f"out[2]: overlaps out[1] {MEMORY}", out=(OUT, OTHER, OTHER[0, :6]), return_normed=True,
            return_rstd=True),
    backward(T, "out: expected a tuple of two (an earlier result), got Quantized", out=OUT),
    backward(T, "out: expected a tuple of two (an earlier result), got ndarray", None, out=X),
    backward(T, "out: expected a tuple of three (an earlier result), got tuple", None, kind="layer",
             out=(X.copy(), W.copy())),
    backward(V, "out[0]: expected shape (6, 16), got (6, 15)", None, out=(NARROW, W.copy())),
    backward(V, "out[1]: expected shape (16,), got (6,)", None, out=(X.copy(), SIX.copy())),
    *[backward(V, f"out[0]: overlaps {name} {MEMORY}", None, residual_grad=OTHER, out=(a, W.copy()))
      for name, a in (("x", X), ("grad", GRAD), ("residual_grad", OTHER))],
    backward(V, f"out[1]: overlaps weight {MEMORY}", None, out=(X.copy(), W)),
]


@every_line([*ARRAYS, *OPTIONS, *RESULTS])
def test_message(error, message, call, args, kwargs):
    check(error, message, call, args, kwargs)
