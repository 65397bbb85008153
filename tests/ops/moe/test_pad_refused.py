"""What pad_groups, unpad_groups and sort_chunks refuse: rows, sizes, orders and results that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from moe_arrays import array, on_the_cpu, refused

import cupy_fp8 as fp8
from cupy_fp8 import Scaled
from cupy_fp8.formats import float8_e4m3fn, float8_e8m0fnu

PAD, UNPAD, SORT = fp8.pad_groups, fp8.unpad_groups, fp8.sort_chunks
X, OUT = (array((rows, 16), float8_e4m3fn) for rows in (9, 15))


def all_three(error: type[Exception], message: str, x: Any, splits: Any) -> list[Any]:
    """All three ops refuse an x, under the name that it has there."""
    return [(error, message.replace("X", "y" if op is UNPAD else "x"), op, (x, splits, rest), {})
            for op, rest in ((PAD, 4), (UNPAD, 4), (SORT, [0]))]


def line(error: type[Exception], message: str, *args: Any, op: Callable[..., Any] = PAD,
         **kwargs: Any) -> tuple[Any, ...]:
    return error, message, op, args, kwargs


# ---- quantised rows ----
ONES = np.ones((8, 256), np.float32)
MX, BLOCKS = fp8.quantize_mx(ONES, columnwise=True), fp8.quantize_block(ONES, columnwise=True)
TENSOR = fp8.cast_transpose(ONES, 1.0)
SQUARE = fp8.quantize_block(ONES, block=(128, 128), scale_layout="compact").rowwise
Q = Scaled(array((9, 64), float8_e4m3fn), array((9, 2), float8_e8m0fnu, 1), (9, 64), False, (1, 32),
           "compact")
ONE_SCALE = Scaled(Q.data, np.array([0.37], np.float32), (9, 64))
PADDED = PAD(Q, [4, 5], 8)


def result(data: Any = PADDED.data, scale_inv: Any = PADDED.scale_inv, transposed: bool = False) -> Scaled:
    return Scaled._of(data, scale_inv, (23, 64), transposed, (1, 32), "compact")


REFUSED: list[tuple[type[Exception], str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    # rows
    *(each for wrong in ([[1]], 3, None)
      for each in all_three(TypeError, "X: expected a numpy.ndarray or cupy.ndarray", wrong, [1])),
    *(each for dtype in (np.complex128, object, "S3")
      for each in all_three(TypeError, "X: expected a dtype of 1, 2, 4 or 8 bytes", np.zeros(4, dtype), [4])),
    *all_three(ValueError, "X: expected an array of one or more dimensions", np.array(1, np.float32), [1]),
    *(each for wrong in (MX.columnwise, SQUARE, TENSOR.columnwise, BLOCKS.columnwise)
      for each in all_three(ValueError, "X: expected row-wise data stored as is, with one scale or blocks",
                            wrong, [8])),
    *all_three(ValueError, "X: expected a row-wise part, whose scales move with their rows",
               fp8.Quantized(columnwise=MX.columnwise), [8]),
    *all_three(ValueError, r"X.scale_inv: expected shape \(8, 8\)",
          Scaled._of(MX.data, MX.scale_inv[:, :4], (8, 256), False, (1, 32), "compact"), [8]),
    *all_three(ValueError, r"X.data: expected shape \(9, 256\) for the logical shape \(9, 256\), got \(8, 25",
          Scaled._of(TENSOR.data, TENSOR.scale_inv, (9, 256)), [8]),
    *all_three(ValueError, "X.scale_inv: expected one element",
               Scaled._of(TENSOR.data, np.ones(2, np.float32), (8, 256)), [8]),
    # sizes
    line(ValueError, "splits: expected sizes of 0 or more, got -5 for group 1", X, [14, -5], 4, out=OUT),
    *(line(ValueError, f"splits: expected sizes that add up to the 9 rows of x, got {sum(given)}", X, given,
           4)
      for given in ([4, 4], [4, 6], [], [2**62] * 4)),
    *(line(ValueError, f"splits: expected sizes that add up to the 9 rows of x, got {sum(given)}", X,
            np.array(given, np.int64), np.arange(len(given)), op=SORT, out=X.copy())
      for given in ([4, 4], [4, 6], [])),
    line(ValueError, r"splits: expected an array of one dimension, got shape \(1, 2\)", X,
         np.array([[4, 5]]), 4, out=OUT),
    line(TypeError, "splits: expected dtype int32, int64, got float32", X, np.zeros(2, np.float32), 4,
         out=OUT),
    line(TypeError, "splits: expected integers", X, [4.0, 5], 4, out=OUT),
    line(TypeError, "splits: expected a numpy.ndarray or cupy.ndarray", X, 9, 4, out=OUT),
    line(ValueError,
         "splits: expected sizes that, each rounded up to 4, add up to at most the 9 rows of y, got 12",
          X, [4, 5], 4, op=UNPAD, rows=9, out=X.copy()),
    line(ValueError,
         "splits: expected sizes that add up to at most the 4 rows of the result, got 5; give rows= or an "
         "out=",
          X, [4, 1], 4, op=UNPAD, rows=4),
    line(ValueError, "splits: expected sizes of 0 or more", X, [-1], 4, op=UNPAD, out=X.copy()),
    line(ValueError, "splits: expected sizes that add up to the 9 rows of x, got 10", Q, [4, 6], 8,
         out=result()),
    line(ValueError, "rows: expected 0 or more, got -1", X, [4], 4, op=UNPAD, rows=-1),
    line(ValueError, r"rows: expected less than 2\*\*63", X, [4], 4, op=UNPAD, rows=2**63),
    line(TypeError, "rows: expected an integer, got 4.0", X, [4], 4, op=UNPAD, rows=4.0),
    # alignments
    *(line(ValueError, f"align: expected a power of two from 1 to 65536, got {align}", X, [4, 5], align,
           op=op)
      for align in (0, -1, 3, 24, 2**17) for op in (PAD, UNPAD)),
    *(line(TypeError, "align: expected an integer, got", X, [4, 5], align) for align in (16.0, None, "16")),
    # orders
    *(line(ValueError, f"order: expected a permutation of 0 to 1, {found}", X, [4, 5], kind(order), op=SORT,
           out=X.copy())
      for order, found in (([0, 0], "got 0 at 1, for a second time"), ([1, 2], "got 2 at 1$"),
                           ([-1, 0], "got -1 at 0$"))
      for kind in (list, np.array)),
    line(ValueError, "order: expected 2 indices, one for each of splits, got 3", X, [4, 5], [0, 1, 2],
         op=SORT, out=X.copy()),
    line(TypeError, "order: expected dtype int32, int64, got uint8", X, [4, 5], np.zeros(2, np.uint8),
         op=SORT, out=X.copy()),
    line(TypeError, "order: expected integers", X, [4, 5], [0.0, 1], op=SORT, out=X.copy()),
    # results
    line(TypeError, r"out: expected an array of rows \(an earlier result\), got list", X, [4], 4, op=UNPAD,
         out=[]),
    # results of quantised rows
    line(TypeError, r"out: expected a Scaled \(an earlier result\), got ndarray", Q, [4, 5], 8,
         out=PADDED.data),
    line(ValueError, "out.scale_inv: overlaps x.scale_inv in memory", ONE_SCALE, [4, 5], 8,
          out=Scaled._of(PADDED.data, ONE_SCALE.scale_inv, (23, 64)))]


@on_the_cpu
@pytest.mark.parametrize(("error", "message", "op", "args", "options"), REFUSED)
def test_refused(error, message, op, args, options, run):
    refused(error, message, op, *args, **options)
