"""The wording of errors that no declaration generates, one line for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from messages import Line, check, every_line, line

import cupy_fp8 as fp8
from cupy_fp8 import DelayedScaling, Quantized, Scaled, backend, cases
from cupy_fp8.formats import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float32
from cupy_fp8.layouts import swap_last

SHAPE = (4, 6)


def ones(shape: tuple[int, ...] = SHAPE, dtype: Any = float32) -> np.ndarray:
    return np.ones(shape, np.float32).astype(dtype)


def one() -> np.ndarray:
    return np.full(1, 2, np.float32)


def poisoned(shape: tuple[int, ...] = SHAPE, dtype: Any = float8_e4m3fn) -> np.ndarray:
    a = np.empty(shape, dtype)
    cases.poison(a)
    return a


def row(shape: tuple[int, ...] = SHAPE, dtype: Any = float8_e4m3fn) -> Scaled:
    return Scaled._of(poisoned(shape, dtype), poisoned((1,), float32), shape)


def column(shape: tuple[int, ...] = SHAPE) -> Scaled:
    return Scaled._of(poisoned(swap_last(shape)), poisoned((1,), float32), shape, True)


Q, CT, DEQ, AMAX = fp8.quantize_tensor, fp8.cast_transpose, fp8.dequantize, fp8.compute_amax
TRANS = fp8.transpose
ASTYPE: Callable[..., Any] = fp8.astype
DELAYED, EMPTY = DelayedScaling().quantize, DelayedScaling().empty
X, BYTES = ones(), ones(SHAPE, float8_e4m3fn)
FP8, INPUTS = "float8_e4m3fn, float8_e5m2", "bfloat16, float16, float32"
ARRAY, ANY_DTYPE = "expected a numpy.ndarray or cupy.ndarray, got ", f"{FP8}, float8_e8m0fnu, {INPUTS}"
NUMBER = "expected a number or a float32 array of one element, got "
RESULT = r"out: expected a Quantized (an earlier result, or recipe.empty(…)), got "
DIRECTIONS = "rowwise, columnwise: expected at least one of them, got neither"
SQUARE, TWO_OR_MORE = (5, 5), "expected an array of two or more dimensions, got shape (24,)"
NO_ARRAYS: tuple[Any, ...] = ([[1.0]], ((1.0,),), 3.0, None, "x", {})
NO_SCALES: tuple[Any, ...] = ([2.0], (2.0,), True, np.bool_(True), "2", 2j)
NO_RULES: tuple[Any, ...] = ("raise", "IGNORE", None, True)
NO_RESULTS: tuple[Any, ...] = ([1], 1.0, "out", BYTES, row(), (BYTES, one()), {})
SHARED = Scaled._of(poisoned(SQUARE), one(), SQUARE)

#: the error, the start of its message, and the call
LINES: list[Line] = [
    # ---- arrays ----
    *[line(TypeError, f"x: {ARRAY}{type(x).__name__}", Q, x, 2.0) for x in NO_ARRAYS],
    line(TypeError, f'x: {ARRAY}list; cupy_fp8.asarray(x, "float32") makes one', AMAX, [1.0]),
    line(TypeError, f"x: expected dtype {INPUTS}, got float64", Q, np.ones(SHAPE), 2.0),
    line(TypeError, f"x: expected dtype {INPUTS}, got >f4", AMAX, np.ones(SHAPE, ">f4")),
    line(TypeError, f"a: expected dtype {FP8}, float8_e8m0fnu, got float32", TRANS, X),
    line(TypeError, f"a: expected dtype {ANY_DTYPE}, got int8", ASTYPE, np.ones(SHAPE, np.int8),
         float8_e4m3fn),
    *[line(TypeError, f"q: expected a Scaled or Quantized, got {type(q).__name__}; use astype", DEQ, q)
      for q in (BYTES, [1.0], None, 2.0)],
    *[line(ValueError, f"q.data: expected shape {swap_last(shape) if flipped else shape}", DEQ,
           Scaled._of(ones(data, float8_e4m3fn), one(), shape, flipped), out=poisoned(shape, float32))
      for data, shape, flipped in (((8, 8), (2, 2), False), ((2, 2), (8, 8), False), (SHAPE, SHAPE, True),
                                   ((6, 4), SHAPE, False))],
    line(ValueError, "columnwise: " + TWO_OR_MORE, Q, ones((24,)), 2.0, columnwise=True,
         amax=poisoned((1,), float32)),
    line(ValueError, "columnwise: " + TWO_OR_MORE, CT, ones((24,)), 2.0),
    line(ValueError, "columnwise: " + TWO_OR_MORE, EMPTY, (24,), columnwise=True, like="numpy"),
    line(ValueError, "a: " + TWO_OR_MORE, TRANS, ones((24,), float8_e4m3fn)),

    # ---- options ----
    line(ValueError, DIRECTIONS, Q, X, 2.0, rowwise=False, out=Quantized(row())),
    line(ValueError, DIRECTIONS, DELAYED, X, scale=2.0, rowwise=False),
    line(ValueError, DIRECTIONS, EMPTY, SHAPE, rowwise=False, like="numpy"),
    *[line(TypeError, f"dtype: expected one of {FP8}, got ", call, *args, dtype=wrong)
      for wrong in (float8_e8m0fnu, bfloat16, np.uint8, "int8", None, "nope", object())
      for call, *args in ((Q, X, 2.0), (CT, X, 2.0), (DelayedScaling,))],
    *[line(TypeError, f"dtype: expected one of {INPUTS}, got ", DEQ, row(), dtype=wrong)
      for wrong in (float8_e4m3fn, float8_e8m0fnu, np.float64, "int8", None, "nope", object())],
    *[line(TypeError, f"dtype: expected one of {ANY_DTYPE}, got ", ASTYPE, X, wrong, out=poisoned())
      for wrong in (np.float64, "int8", None, "nope", object())],
    *[line(ValueError, f"nan: expected one of ('ignore', 'propagate'), got {wrong!r}", AMAX, X, nan=wrong,
           out=one())
      for wrong in NO_RULES],
    *[line(TypeError, f"scale: {NUMBER}{type(wrong).__name__}", call, X, wrong, amax=one())
      for wrong in NO_SCALES for call in (Q, CT)],
    line(ValueError, "scale: an integer of 1329 bits, beyond every float", Q, X, 10**400, amax=one()),
    line(ValueError, "scale: expected one element, got shape (1, 2)", CT, X, ones((1, 2)), amax=one()),
    line(ValueError, "scale: delayed scaling needs the scale that earlier steps determined, got None",
         DELAYED, X),
    *[line(TypeError, f"{name}: expected dtype float32, got {wrong.dtype}", Q, X, 2.0, **{name: wrong},
           out=Quantized(row()))
      for name in ("amax", "noop") for wrong in (np.ones(1), ones((1,), bfloat16), np.ones(1, np.int32))],
    line(ValueError, "noop: needs out=, since nothing may be written", DELAYED, X, scale=2.0, noop=one()),

    # ---- out ----
    *[line(TypeError, RESULT + type(wrong).__name__, call, X, 2.0, out=wrong)
      for wrong in NO_RESULTS for call in (Q, CT)],
    line(ValueError, "out: expected one element, got shape (4, 6)", AMAX, X, out=poisoned(SHAPE, float32)),
    line(ValueError, "out: expected shape (4, 6), got (24,)", ASTYPE, X, float8_e4m3fn, out=poisoned((24,))),
    line(TypeError, "out: expected dtype float8_e4m3fn, got uint8", ASTYPE, X, float8_e4m3fn,
         out=np.ones(SHAPE, np.uint8)),
    line(TypeError, "out.rowwise.data: expected dtype float8_e5m2, got float8_e4m3fn", Q, X, 2.0,
         dtype=float8_e5m2,
         out=Quantized(row())),
    line(ValueError,
         "out.rowwise: expected per-tensor data of shape (4, 6) not stored transposed, got Scaled("
         "float8_e4m3fn[6, 4]", Q, X, 2.0, out=Quantized(row((6, 4)))),
    *[line(ValueError, f"out: {message} was asked for", call, X, scale=2.0, out=Quantized(*parts),
           **directions)
      for parts, directions, message in (
          ((row(), None), {"columnwise": True}, "no columnwise part, but columnwise=True"),
          ((row(), None), {"rowwise": False, "columnwise": True}, "has a rowwise part, but rowwise=False"),
          ((None, column()), {}, "no rowwise part, but rowwise=True"),
          ((row(), column()), {}, "has a columnwise part, but columnwise=False")) for call in (Q, DELAYED)],
    line(ValueError,
         "out.columnwise: expected per-tensor data of shape (5, 5) not stored transposed, got Scaled(", Q,
         ones(SQUARE), 2.0, columnwise=True, transposed=False,
         out=Quantized(row(SQUARE), column(SQUARE))),
    line(ValueError,
         "out.columnwise: expected per-tensor data of shape (5, 5) stored transposed, got Scaled(", CT,
         ones(SQUARE), 2.0, out=Quantized(SHARED, SHARED)),
    line(ValueError,
         "out.columnwise.data: expected out.rowwise.data itself, since both directions are the same here", Q,
         ones(SQUARE), 2.0, columnwise=True, transposed=False, out=Quantized(row(SQUARE), row(SQUARE))),
    line(ValueError, "dbias: " + TWO_OR_MORE, Q, ones((24,)), 2.0, dbias=True),
    line(ValueError, "dbias: " + TWO_OR_MORE, EMPTY, (24,), dbias=True),
    line(ValueError, "out: no dbias, but dbias=True was asked for", Q, X, 2.0, dbias=True,
         out=Quantized(row())),
    line(ValueError, "out: has a dbias, but dbias=False was asked for", Q, X, 2.0,
         out=fp8.quantize_tensor(X, 1.0, dbias=True)),
    line(TypeError, "out[1]: expected None, since no probs were given", fp8.unpermute_backward, X, None,
         fp8.route(np.zeros((4, 1), np.int64), num_experts=1), out=(ones(), one())),

    # ---- recipe.empty(buffers=…) ----
    *[line(error, message, EMPTY, SHAPE, buffers=buffers, **directions) for error, message, buffers,
      directions in (
        (ValueError, "buffers: expected a (data, scale_inv) pair for each of ['rowwise'], got []", {}, {}),
        (ValueError, "buffers: expected a (data, scale_inv) pair for each of ['rowwise'], got ['columnwise']",
         {"columnwise": column()}, {}),
        (ValueError,
         "buffers: expected a (data, scale_inv) pair for each of ['rowwise', 'columnwise'], got ['rowwise']",
         {"rowwise": tuple(row())}, {"columnwise": True}),
        (ValueError,
         "buffers: expected a (data, scale_inv) pair for each of ['rowwise'], got ['columnwise', 'rowwise']",
         {"rowwise": tuple(row()), "columnwise": tuple(column())}, {}),
        (ValueError, "buffers: expected a (data, scale_inv) pair for each of ['rowwise'], got ['rows']",
         {"rows": tuple(row())}, {}),
        (ValueError, "buffers['rowwise']: expected a (data, scale_inv) pair, got ndarray",
         {"rowwise": poisoned()}, {}),
        (ValueError, "buffers['rowwise']: expected a (data, scale_inv) pair, got tuple",
         {"rowwise": (poisoned(),)}, {}),
        (ValueError, "buffers['rowwise']: expected a (data, scale_inv) pair, got NoneType",
         {"rowwise": None}, {}),
        (TypeError, f"buffers['rowwise'] scale_inv: {ARRAY}NoneType", {"rowwise": (poisoned(), None)}, {}),
        (TypeError, f"buffers['rowwise'] data: {ARRAY}NoneType", {"rowwise": (None, one())}, {}),
        (TypeError, f"buffers['rowwise'] data: {ARRAY}list", {"rowwise": ([1], one())}, {}),
        (TypeError, "buffers['rowwise'] data: expected dtype float8_e4m3fn, got float8_e5m2",
         {"rowwise": tuple(row(SHAPE, float8_e5m2))}, {}),
        (TypeError, "buffers['rowwise'] scale_inv: expected dtype float32, got float64",
         {"rowwise": (poisoned(), np.ones(1))}, {}),
        (ValueError,
         "buffers['rowwise'] data: expected a C-contiguous array of shape (4, 6), got shape (4, 7)",
         {"rowwise": (poisoned((4, 7)), one())}, {}),
        (ValueError,
         "buffers['rowwise'] data: expected a C-contiguous array of shape (4, 6), got shape (4, 6), strides",
         {"rowwise": (poisoned((4, 12))[:, ::2], one())}, {}),
        (ValueError,
         "buffers['rowwise'] scale_inv: expected a C-contiguous array of shape (1,), got shape (2,)",
         {"rowwise": (poisoned(), ones((2,)))}, {}),
        (ValueError,
         "buffers['columnwise'] data: expected a C-contiguous array of shape (6, 4), got shape (4, 6)",
         {"columnwise": (poisoned(), one())}, {"rowwise": False, "columnwise": True}))],
    *[line(ValueError, "shape: expected extents of zero or more, got (", EMPTY, shape, like="numpy")
      for shape in (-1, (4, -6))],
]


@every_line(LINES)
def test_message(error, message, call, args, kwargs):
    check(error, message, call, args, kwargs)


def test_buffers_of_another_kind(device):
    for buffers in ((device.array(poisoned()), one()), (poisoned(), device.array(one()))):
        with pytest.raises(TypeError, match=r"^buffers\['rowwise'\] scale_inv: a \w+ array among"):
            EMPTY(SHAPE, buffers={"rowwise": buffers})


def test_an_assignment_that_is_checked_is_examined_in_every_call(device):
    """Without check=True a call with the same memory is launched again at once; with it the data are read."""
    host = np.zeros((64, 2), np.int64)
    x = device.array(host)
    out = fp8.route(x, num_experts=4)
    for checked in (False, True, False, True):
        assert fp8.route(x, num_experts=4, check=checked, out=out) is out
    x[3, 1] = 4
    with pytest.raises(ValueError,
                       match=r"^assignment: expected experts 0 to 3, or -1 for none, got 4 at \[3, 1\]"):
        fp8.route(x, num_experts=4, check=True, out=out)
    fp8.route(x, num_experts=4, out=out)
    assert fp8.device_errors(clear=True)


def test_without_a_gpu_cupy_is_refused_by_name():
    problem = backend.gpu_problem()
    if problem is None:
        pytest.skip("there is a GPU")
    for call in (lambda: fp8.empty(3, float8_e4m3fn, like="cupy"), lambda: EMPTY(SHAPE, like="cupy"),
                 lambda: fp8.asarray([1.0], like="cupy")):
        with pytest.raises(fp8.DeviceError, match=re.escape(problem)):
            call()
    assert issubclass(fp8.DeviceError, RuntimeError)
