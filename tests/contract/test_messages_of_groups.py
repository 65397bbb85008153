"""The wording of errors about groups, tokens and lists of tensors: one line for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from messages import Line, check, every_line, line, poisoned

import cupy_fp8 as fp8
from cupy_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Scaled
from cupy_fp8.formats import bfloat16, float8_e4m3fn
from cupy_fp8.grouped import Grouped

T, V = TypeError, ValueError
SUMS = fp8.group_sums
PAD, UNPAD, SORT, PERMUTE, UNPERMUTE = (fp8.pad_groups, fp8.unpad_groups, fp8.sort_chunks, fp8.permute,
                                        fp8.unpermute)
BOTH, QUANTISED = fp8.permute_transpose, fp8.quantize_permute
BACK, UNBACK, ROUTE, OFFSETS = fp8.permute_backward, fp8.unpermute_backward, fp8.route, fp8.splits_to_offsets
GROUP, CAST, MANY = fp8.group_quantize, fp8.multi_cast_transpose, fp8.multi_quantize
BLOCKS, CURRENT, DELAYED, MX = BlockScaling(), CurrentScaling(), DelayedScaling(), MXScaling()


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, Y, CODES = ones(9, 16), ones(18, 16), ones(9, 256, dtype=float8_e4m3fn)
Q, COLUMN = fp8.quantize_mx(ones(9, 256), columnwise=True), fp8.quantize_mx(ones(9, 256)).T
SQUARE = fp8.quantize_block(ones(9, 256), block=(128, 128), scale_layout="compact")
F32 = fp8.quantize_block(ones(9, 256))
TENSOR = fp8.quantize_tensor(ones(9, 256), 1.0)
FEWER = fp8.quantize_block(ones(8, 256))
ONE_SCALE_TOO_MANY = Scaled._of(CODES, ones(2), (9, 256))
OTHER_SCALES = Scaled._of(CODES, Q.scale_inv[:, :7], (9, 256), False, (1, 32), "compact")
OTHER_ROWS = Scaled._of(CODES, Q.scale_inv, (10, 256), False, (1, 32), "compact")
OF_MASK = np.arange(9)[:, None] % 4 != np.arange(4)
R, M = ROUTE(np.arange(18).reshape(9, 2) % 3, num_experts=3), ROUTE(OF_MASK, topk=3)
SIZES = "splits: expected sizes "

MOVES: list[Line] = [
    # ---- pad_groups, unpad_groups, sort_chunks, permute ----
    *[line(error, message.replace("X", "y" if call is UNPAD else "x"), call, x, *rest,
           **({"align": 4} if call in (PAD, UNPAD) else {}))
      for call, rest in ((PAD, ([9],)), (UNPAD, ([9],)), (SORT, ([9], [0])), (PERMUTE, (R,)))
      for error, message, x in (
          (T, "X: expected a dtype of 1, 2, 4 or 8 bytes, got complex128", ones(9, 2, dtype=np.complex128)),
          (V, "X: expected an array of one or more dimensions, got shape ()", np.array(1, np.float32)),
          (V, "X: expected row-wise data stored as is", Q.columnwise),
          (V, "X: expected a row-wise part, got a Quantized without one", COLUMN),
          (V, "X.scale_inv: expected shape (9, 8), compact scales of blocks (1, 32) of shape (9, 256)",
           OTHER_SCALES),
          (V, "X.data: expected shape (10, 256) for the logical shape (10, 256), got (9, 256)", OTHER_ROWS))],
    line(V, "x.scale_inv: expected one element, got shape (2,)", PAD, ONE_SCALE_TOO_MANY, [9], align=4),
    line(V, "x: per-tensor data has a single scale, which does not move; permute x.data", PERMUTE, TENSOR, R),
    line(V, "scale_layout: gemm_ready scales are float32, got float8_e8m0fnu in x.scale_inv; take 'compact', "
         "or x.to_layout('gemm_ready') first", PERMUTE, Q, R, scale_layout="gemm_ready"),
    line(V, "scale_layout: expected None, since x is an array without scales; got 'compact'", PERMUTE, X, R,
         scale_layout="compact"),
    line(V, "out: expected shape (18, 256) with gemm_ready scales of blocks (1, 128), got", PERMUTE, F32, R,
         out=PERMUTE(F32, R, scale_layout="compact")),
    # ---- permute_transpose, quantize_permute ----
    line(T, "x: expected a Scaled or a Quantized, got ndarray", BOTH, X, R),
    line(V, "x: expected row-wise data [T, K] in blocks of (1, 128), not stored transposed", BOTH, Q, R),
    line(V, "x: expected 9 rows, the tokens of the routing, got shape (8, 256)", BOTH, FEWER, R),
    line(V, "x.scale_inv: expected powers of two, got", BOTH,
         fp8.quantize_block(ones(9, 256), profile="sglang"), R),
    line(T, "out: expected a Quantized (an earlier result), got Scaled", BOTH, F32, R, out=F32.rowwise),
    line(V, "out.rowwise: expected an earlier result for rows of shape (18, 256), got", BOTH, F32, R,
         out=F32),
    line(V, "x: expected shape [T, K], got (9, 2, 8)", QUANTISED, ones(9, 2, 8), R),
    line(T, "x: expected dtype bfloat16, float16, float32, got int32", QUANTISED,
         np.ones((9, 16), np.int32), R),
    line(V, "x: expected 9 rows, the tokens of the routing, got shape (8, 16)", QUANTISED, X[:8], R),
    line(T, "recipe: expected a BlockScaling, got MXScaling", QUANTISED, X, R, fp8.MXScaling()),
    line(V, "recipe: expected blocks of (1, 128), got BlockScaling(block=(128, 128)", QUANTISED, X, R,
         fp8.BlockScaling((128, 128))),
    line(V, "probs: expected shape (9, 2), one for each slot; got (9, 3)", QUANTISED, X, R, probs=ones(9, 3)),
    line(V, "out: expected shape (18, 16) with gemm_ready scales of blocks (1, 128), got", QUANTISED, X, R,
         out=QUANTISED(X[:, :8], R)),
    line(V, SIZES + "of 0 or more, got -5 for group 1", PAD, X, [14, -5], align=4, out=ones(15, 16)),
    line(V, SIZES + "that add up to the 9 rows of x, got 10", PAD, X, [4, 6], align=4, out=ones(15, 16)),
    line(V, SIZES + "that add up to the 9 rows of x, got 8", SORT, X, np.array([4, 4]), [0, 1], out=X.copy()),
    line(V, SIZES + "that, each rounded up to 4, add up to at most the 9 rows of y, got 12", UNPAD, X, [4, 5],
         align=4, rows=9, out=X.copy()),
    line(V, SIZES + "that add up to at most the 4 rows of the result, got 5; give rows= or an out=", UNPAD, X,
         [4, 1], align=4, rows=4),
    line(V, "splits: expected an array of one dimension, got shape (1, 2)", PAD, X, np.array([[4, 5]]),
         align=4),
    line(T, "splits: expected integers ('float' object", PAD, X, [4.0, 5], align=4),
    line(V, "splits: expected integers of 64 bits, got [9223372036854775808]", PAD, X, [2**63], align=4),
    line(V, "rows: expected 0 or more, got -1", UNPAD, X, [4], align=4, rows=-1),
    line(V, f"rows: expected a result of less than 2**63 bytes, got {2**62} rows of 64 bytes", UNPAD,
         X, [4], align=4, rows=2**62),
    line(V, "rows: expected less than 2**63", UNPAD, X, [4], align=4, rows=2**63),
    *[line(V, f"align: expected a power of two from 1 to 65536, got {align}", call, X, [4, 5],
           align=align)
      for align in (0, 12, 1 << 17) for call in (PAD, UNPAD)],
    *[line(V, f"order: expected a permutation of 0 to 1, got {found}", SORT, X, [4, 5], order, out=X.copy())
      for order, found in (([0, 0], "0 at 1, for a second time"), ([1, 2], "2 at 1"), ([-1, 0], "-1 at 0"))],
    line(V, "order: expected 2 indices, one for each of splits, got 3", SORT, X, [4, 5], [0, 1, 2]),
    line(T, "out: expected an array of rows (an earlier result), got list", UNPAD, X, [4], align=4, out=[]),
    line(T, "out: expected a Scaled (an earlier result), got ndarray", PAD, Q.rowwise, [4, 5], align=4,
         out=CODES),
    # ---- group_sums ----
    line(V, "x: expected an array of two dimensions, got shape (9,)", SUMS, X[:, 0], [9]),
    line(T, "x: expected dtype bfloat16, float16, float32, got float8_e4m3fn", SUMS, CODES, [9]),
    line(V, "x: expected row-wise data stored as is, with one scale or blocks (1, 128), got", SUMS, Q, [9]),
    line(V, "x: expected row-wise data stored as is", SUMS, SQUARE, [9]),
    line(V, "x: expected row-wise data stored as is", SUMS, fp8.quantize_tensor(X, 1.0, columnwise=True)
         .columnwise, [9]),
    line(V, "x: expected a row-wise part, got a Quantized without one", SUMS, COLUMN, [9]),
    line(V, SIZES + "that add up to at most the 9 rows there are, got 10", SUMS, X, [4, 6]),
    line(V, SIZES + "of 0 or more, got -5 for group 1", SUMS, X, [9, -5]),
    line(V, "weights: expected shape (9,), one for each row of x, got (8,)", SUMS, X, [9], weights=ones(8)),
    line(T, "weights: expected dtype float32, got float64", SUMS, X, [9], weights=np.ones(9)),
    line(V, "out: expected shape (1, 16), got (16,)", SUMS, X, [9], out=ones(16)),
    # ---- unpermute and gradients ----
    line(V, "x: expected 9 rows, the tokens of the routing, got shape (8, 16)", PERMUTE, X[:8], R),
    *[line(V, f"{name}: expected 18 rows, the rows of the routing, got shape (9, 16)", call, X, R)
      for call, name in ((UNPERMUTE, "y"), (BACK, "grad"))],
    line(T, 'grad: expected dtype bfloat16, as y has, got float32; grad.astype("bfloat16") converts it',
         UNBACK, X, Y.astype(bfloat16), R, probs=ones(9, 2)),
    line(T, "y: expected dtype bfloat16, float16, float32, got float64", UNBACK, X, Y.astype(np.float64), R,
         probs=ones(9, 2)),
    line(T, "routing: expected a Routing (cupy_fp8.route makes one), got ndarray", PERMUTE, X, X),
    line(V, "probs: expected shape (9, 2), one for each slot; got (9, 3)", PERMUTE, X, R, probs=ones(9, 3)),
    line(V, "probs: expected shape (9, 3), one for each slot, or (9, 4), one for each expert; got (9, 2)",
         PERMUTE, X, M, probs=ones(9, 2)),
    line(V, "probs_grad: expected shape (18,), the routing's rows, got (17,)", BACK, Y, R,
         probs_grad=ones(17)),
    line(T, "y: needed for the gradient of probs, got None", UNBACK, X, None, R, probs=ones(9, 2)),
    line(V, "y: expected shape (18, 16), the routing's rows, and the columns of grad, got (18, 8)", UNBACK,
         X, ones(18, 8), R, probs=ones(9, 2)),
    line(T, "out: expected a tuple of two (an earlier result), got ndarray", PERMUTE, X, R, probs=ones(9, 2),
         out=Y.copy()),
    line(T, "out[0]: expected an array, got None", UNBACK, X, None, R, out=(None, None)),
]

INDICES, OUT = np.arange(18).reshape(9, 2) % 4, ROUTE(np.arange(18).reshape(9, 2) % 4, num_experts=4, align=2)
MANY_OF_ONE = np.arange(3)[:, None] % 2 == np.ones(5, int)

ROUTES: list[Line] = [
    # ---- route ----
    line(V, "assignment: expected shape [T, topk], got (9,)", ROUTE, INDICES[:, 0], num_experts=4),
    line(V, "assignment: expected shape [T, E], got (9, 2, 1)", ROUTE, np.zeros((9, 2, 1), bool), topk=1),
    *[line(V, f"assignment: expected experts 0 to 3, or -1 for none, got {value} at [3, 1]", ROUTE,
           np.where(np.arange(18).reshape(9, 2) == 7, value, INDICES), num_experts=4) for value in (4, -2)],
    line(V, "assignment: expected at most topk=4 experts of a token, got 5 of token 1", ROUTE, MANY_OF_ONE,
         topk=4),
    line(V, "num_experts: needed where the assignment is indices", ROUTE, INDICES),
    line(V, "num_experts: expected 1 to 1024, got 1025", ROUTE, INDICES, num_experts=1025),
    line(V, "num_experts: expected 4, the columns of the mask, got 5", ROUTE, OF_MASK, num_experts=5, topk=3),
    line(V, "topk: a mask needs topk", ROUTE, OF_MASK),
    line(V, "topk: expected at most 4, the experts of the mask, got 5", ROUTE, OF_MASK, topk=5),
    line(V, "topk: expected 0 to 1024, got 1025", ROUTE, np.zeros((1, 1025), np.int32), num_experts=4),
    line(V, "topk: expected 2, the columns of the assignment, got 3", ROUTE, INDICES, num_experts=4, topk=3),
    *[line(V, f"align: expected a power of two from 1 to 128, got {align}", ROUTE, INDICES, num_experts=4,
           align=align) for align in (0, 24, 256)],
    line(V, "rows: 2147483648 rows of 18 routes are more than int32 holds", ROUTE, INDICES, num_experts=4,
         rows=2**31),
    line(V, "rows: expected at least the 64 that this assignment needs (sizes rounded up to 16), got 63",
         ROUTE, INDICES, num_experts=4, rows=63, align=16),
    line(V, "out: expected align 4, got a routing with 2", ROUTE, INDICES, num_experts=4, align=4, out=OUT),
    line(V, "out: expected the routing of indices, got that of a mask", ROUTE, INDICES, num_experts=4,
         out=ROUTE(OF_MASK, topk=3)),
    line(V, "out: expected the routing of a mask, got that of indices", ROUTE, OF_MASK, topk=3, align=2,
         out=OUT),
    # ---- splits_to_offsets ----
    line(V, "splits: output 0 would end with 9223372036854775808 * 1, more than int64 holds", OFFSETS,
         [2**63 - 1, 1, 0]),
    line(V, "splits: output 1 would end with 8 * 268435456, more than int32 holds; ask for int64 there",
         OFFSETS, [3, 0, 5], strides=(1, 2**28), dtypes=("int64", "int32"),
         out=[np.ones(4, np.int64), np.ones(4, np.int32)]),
    line(T, "strides: expected integers, one for each output, got 1", OFFSETS, [3], strides=1),
    *[line(V, f"strides: expected 0 to 2**63 - 1, got {stride} for output 1", OFFSETS, [3],
           strides=(1, stride)) for stride in (-1, 2**63)],
    line(V, "include_leading_zero: expected one for all outputs or 2, one for each stride; got 3", OFFSETS,
         [3], strides=(1, 2), include_leading_zero=(True, False, True)),
    line(V, "dtypes: expected one for all outputs or 2, one for each stride; got 1", OFFSETS, [3],
         strides=(1, 2), dtypes=("int32",)),
    *[line(T, "dtypes: expected int32, int64, got", OFFSETS, [3], dtypes=wrong)
      for wrong in (np.float64, "uint32", None, ">i8", (np.int16,))],
    line(T, "out: expected a list of arrays (an earlier result), got ndarray", OFFSETS, [3],
         out=np.ones(2, np.int64)),
    line(V, "out: expected 2 arrays, one for each stride, got 1", OFFSETS, [3], strides=(1, 2),
         out=[np.ones(2, np.int64)]),
]

SPLITS, SCALES = np.array([4, 5], np.int32), ones(2)


def group(error: type[Exception], message: str, recipe: Any = DELAYED, x: Any = X, splits: Any = SPLITS,
          **options: Any) -> Line:
    if recipe is DELAYED:
        options.setdefault("scales", SCALES)
    return line(error, message, GROUP, x, splits, recipe, **options)


def made(recipe: Any, **options: Any) -> Grouped:
    return poisoned_groups(GROUP(X, SPLITS, recipe, columnwise=True, **options))


def poisoned_groups(g: Grouped) -> Grouped:
    """Return it with poison, and the sizes from which it was made."""
    poisoned([a for a in (g.rowwise, g.columnwise, g.scale_inv, g.columnwise_scale_inv) if a is not None])
    return g


OF_BLOCKS, OF_DELAYED = made(BLOCKS), made(DELAYED, scales=SCALES)
OF_TILES = made(MXScaling(block=(32, 32)))
APART = Grouped._of_fields(**{**OF_TILES.__getstate__(), "columnwise": OF_TILES._any.copy()})
PER_TENSOR = "scales, amaxes: belong to per-tensor recipes"

GROUPS: list[Line] = [
    # ---- group_quantize ----
    group(V, "x: expected an array of two dimensions, got shape (144,)", x=X.reshape(-1)),
    group(V, SIZES + "that add up to at most the 9 rows there are, got 10", splits=[4, 6]),
    group(V, "splits: expected int64, since 2147483640 rows rounded up to 16 are more than int32 holds, got "
          "int32", x=np.zeros((2**31 - 8, 0), bfloat16), align=16),
    group(V, "scales: delayed scaling needs the scales", scales=None),
    group(V, "scales: current scaling takes them from the values themselves", CURRENT, scales=SCALES),
    group(V, PER_TENSOR, BLOCKS, scales=SCALES), group(V, PER_TENSOR, MX, amaxes=SCALES),
    group(V, "scales: expected shape (2,), one for each group, got (3,)", scales=ones(3)),
    group(V, "amaxes: expected shape (2,), got (3,)", amaxes=ones(3)),
    group(V, "rowwise, columnwise: expected at least one", rowwise=False),
    group(V, "offsets: expected none with align=8, got ndarray", align=8, offsets=np.array([0, 128, 256])),
    group(V, "offsets: expected 64 at 1 (rows before it, times 16 columns), got 65",
          offsets=np.array([0, 65, 144])),
    group(V, "out.offsets: overlaps offsets in memory; results need memory of their own", columnwise=True,
          out=OF_DELAYED, offsets=OF_DELAYED.offsets),
    group(V, "out.splits: overlaps splits in memory; results need memory of their own", columnwise=True,
          out=OF_DELAYED, splits=OF_DELAYED.splits),
    group(T, "out.splits: expected dtype int64, got int32", columnwise=True, splits=SPLITS.astype(np.int64),
          out=OF_DELAYED),
    group(T, "out: expected a Grouped (an earlier result), got ndarray", out=X.copy()),
    group(V, "out: expected shape (10, 16), got (9, 16)", x=ones(10, 16), columnwise=True, out=OF_DELAYED),
    group(V, "out: expected shape (16, 16), got (9, 16)", columnwise=True, align=8, out=OF_DELAYED),
    group(V, "out.columnwise: expected none for these options, got one", out=OF_DELAYED),
    group(V, "out.columnwise: expected one for these options, got none", columnwise=True,
          out=poisoned_groups(GROUP(X, SPLITS, DELAYED, scales=SCALES))),
    group(V, "out: expected block (1, None), got (1, 128)", BlockScaling((1, None)), columnwise=True,
          out=OF_BLOCKS),
    group(V, "out: expected scale_layout compact, got gemm_ready", BlockScaling(scale_layout="compact"),
          columnwise=True, out=OF_BLOCKS),
    group(V, "out.columnwise: expected out.rowwise itself, since both directions are the same here",
          MXScaling(block=(32, 32)), columnwise=True, out=APART),
]

XS = [ones(24, 16), ones(9, 24), ones(9, 8)]
OUTPUTS = poisoned(CAST(XS, [1.0] * 3))
RIGHT: dict[str, Any] = {"scales": [1.0] * 3, "out": OUTPUTS}

LISTS: list[Line] = [
    *[line(error, message, CAST, **{"xs": XS, **RIGHT, **wrong}) for error, message, wrong in (
        (V, "scales: expected 3, one for each array of xs, got 2", {"scales": [1.0] * 2}),
        (V, "scales: expected shape (3,), one for each array of xs, got (4,)", {"scales": ones(4)}),
        (V, "scales: expected one for each array, got None; multi_quantize with CurrentScaling",
         {"scales": None}),
        (T, "scales[1]: expected a number or a float32 array of one element, got str",
         {"scales": [1.0, "two", 1.0]}),
        (T, "amaxes[0]: expected a numpy.ndarray or cupy.ndarray, got float", {"amaxes": [1.0] * 3}),
        (V, "out[0].rowwise: expected per-tensor data of shape (24, 16) not stored transposed",
         {"out": OUTPUTS[::-1]}),
        (V, "out[1]: no columnwise part", {
            "out": [OUTPUTS[0], DELAYED.empty((9, 24), like=np), OUTPUTS[2]]}),
        (T, "xs[1]: expected dtype float32, that of xs[0], got bfloat16",
         {"xs": [XS[0], XS[1].astype(bfloat16), XS[2]]}),
        (V, "xs[2]: expected an array of two dimensions, got shape (72,)",
         {"xs": [*XS[:2], XS[2].reshape(-1)]}),
        (V, "noop: needs out=, since nothing may be written", {"out": None, "noop": ones(1)}),
        (V, "scales: expected none for no arrays, got 3", {"xs": [], "out": []}))],
    line(V, "scales: delayed scaling needs the scales", MANY, XS, DELAYED),
    line(V, "scales: current scaling takes them from the values themselves", MANY, XS, CURRENT,
         scales=[1.0] * 3),
    line(V, PER_TENSOR, MANY, XS, MX, amaxes=[ones(1)] * 3),
    *[line(V, "rowwise, columnwise: expected at least one", MANY, XS, recipe, rowwise=False)
      for recipe in (CURRENT, BLOCKS, MX)],
]


@every_line([*MOVES, *ROUTES, *GROUPS, *LISTS])
def test_message(error, message, call, args, kwargs):
    check(error, message, call, args, kwargs)
