"""Products of FP8 matrices for groups whose sizes are on the device. Kernels: kernels_cu/matmul."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ... import reference
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, one_array
from ...calls.group_sizes import Groups, check_align
from ...formats import INPUT_DTYPES, DType, bfloat16, choice, float32, lookup
from ...grouped import Grouped
from ...kernels import Launch
from ...results import Quantized, Scaled
from ...typed_array import TypedArray
from . import tiles
from .grouped_operands import (
    GroupedOperand,
    check_multiples,
    check_whole_blocks,
    columns_instead,
    counted,
    read_columns,
    read_rows,
    read_sizes,
    read_weights,
    row_starts,
)
from .problem import Problem

GroupedAxis: TypeAlias = Literal["m", "k"]
GROUPS: tuple[GroupedAxis, ...] = get_args(GroupedAxis)


def grouped_matmul_nt(a: Scaled | Quantized | Grouped, b: Scaled | Quantized | Grouped, splits: Any = None,
                      *, group: GroupedAxis = "m", dtype: DType = bfloat16, bias: Array | None = None,
                      bias_weights: Array | None = None, accumulate: Array | None = None,
                      align: int = 1, out: Array | None = None, check: bool = False) -> TypedArray:
    """Products of FP8 matrices, one for each group (expert), whose sizes may be on the device alone. All
    groups of "m" take one launch, and so do those of "k"; on Hopper "k" takes another one before it, which
    copies groups that begin anywhere, unless the host knows that none does.

        group="m":  out[r, n]    = Σ_k a[r, k] · b[e, n, k]             e: the group that row r belongs to
                                   + bias_weights[r] · bias[e, n]
        group="k":  out[e, m, n] = Σ_k a[m, k] · b[n, k]                over the columns k of group e

    of the dequantised values; "m" is the forward pass and the gradient of the input, "k" the gradient of the
    weights. With NumPy operands it is computed in float64, exact but for sums, and rounded once. GPUs add in
    float32, within the bound of docs/numerics.md section 10; the same call gives the same bytes again.

    Parameters
    ----------
    a : of "m" the rows of all groups, one group after the other. A Scaled (or Quantized with a row-wise part)
        [sum m, K] with one scale, a scale for each row (block (1, None)) or blocks 1×128, in any layout; or a
        Grouped from `group_quantize`, whose row-wise part is taken: one scale for each group, or blocks
        (1, None), (1, 128) or (128, 128) with float32 scales.
        Of "k" the columns of all groups: a Grouped, whose column-wise part, stored transposed, is taken (one
        scale for each group, row-wise block (1, None) or (1, 128)); a Quantized of
        `scaling_aware_transpose(q, splits=splits)`; or a Scaled [M, sum k], or a Quantized with such a
        row-wise part (the ``.T`` of rows), with one scale, a scale for each row, or blocks along K. Groups of
        blocks then begin at multiples of 128
    b : of "m" the weights of all groups, a Scaled (or Quantized) [E, N, K] with one scale, a scale for each
        row, or blocks 128×128 or 1×128. Of "k" columns of the same groups, as a
    splits : rows (columns of "k") of each of E groups: an int32 or int64 array [E] of a's kind, or a list
        (for CuPy operands it is copied to the GPU). None beside an operand that is laid out by sizes and has
        a copy of them, a Grouped or a result of `scaling_aware_transpose`: its own are taken, a's first
    group : what the sizes belong to, 'm' or 'k'
    dtype : of a new result: bfloat16, float16 or float32
    bias : of "m" bfloat16, float16 or float32 [E, N], of which each row gets its group's before it is
        rounded. Not beside `accumulate`
    bias_weights : float32 array [sum m], by which each row's bias is multiplied (the probs of the rows of
        experts). None: 1
    accumulate : float32 array of the result's shape, to which the products are added in place, and which is
        returned; `dtype` is without effect, and no other `out` is taken
    align : of "k", a promise: all sizes are multiples of it, a power of two (``route(align=)``). From 16 on
        no memory is taken for copies of groups that begin anywhere. The product of a group that breaks it is
        0, and `device_errors` tells
    out : array of the result's shape and dtype, written and returned. With it the call allocates nothing (but
        for scales that have to be converted and rows that have to be copied, once for each size) and can be
        captured into a CUDA graph, once it has been used before
    check : wait for the device and raise ValueError if the sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    Array [sum m, N] or [E, M, N], C-contiguous. Rows of "m" after the last group are 0, and so are products
    of "k" over no columns; with `accumulate` both stay as they were.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, a group that passes the last row ends
    there, and the product of a group of "k" is 0 if it has to begin at a multiple of 128 and does not. Sizes
    other than those that an operand is laid out by are an error wherever the host knows both; on the device
    the kernel compares them, and the products are then those of bytes that do not belong together.

    Any extents, sizes and addresses are taken, on compute capability 8.0 or later. It is fast on 9.0 with
    NVRTC 12.3 or later, and several times slower elsewhere; on other GPUs it was compiled but never ran.
    Rows that do not begin at multiples of 16 bytes are copied first, where that saves time: of "m" all rows
    of an operand, of "k" those of groups that begin elsewhere, or in column-wise data are no multiples of 16
    long. Memory for it, as large as the operand, is needed where the host cannot tell that nothing is copied.
    (It can by sizes in a list, or of blocks 1×128 of all columns.) Large products convert compact scales
    1×128 first.

    Source: docs/numerics.md, section 10; DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = fp8.quantize_tensor(np.float32([[1, 2], [3, 4], [5, 6]]), 1.0)
    >>> w = fp8.quantize_tensor(np.float32([[[1, 1]], [[0, 2]]]), 1.0)      # two experts, N = 1
    >>> fp8.grouped_matmul_nt(x, w, [1, 2], dtype=np.float32).tolist()
    [[3.0], [8.0], [12.0]]
    """
    if accumulate is not None:
        if out is not None and out is not accumulate:
            raise ValueError("out: expected None beside accumulate, which is the result")
        out = accumulate
    given = a, b, splits, group, dtype, bias, bias_weights, accumulate, align, check
    return run(_GROUPED_MATMUL_NT, given, out)


class _Inputs(NamedTuple):
    """A validated call.

    to          dtype of the result
    bias        of each group [E, N], if there are any; weights: of the rows' biases
    accumulate  the result's array, to which the products are added; None: nothing to add to
    align       promised common divisor of the sizes
    """

    a: GroupedOperand
    b: GroupedOperand
    groups: Groups
    group: str
    to: np.dtype[Any]
    bias: Input | None
    weights: Input | None
    accumulate: Array | None
    align: int

    @property
    def number(self) -> int:
        assert self.groups.number is not None
        return self.groups.number

    @property
    def total(self) -> int:
        """Rows of all groups, or their columns."""
        return self.a.rows if self.group == "m" else self.a.k

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.a.rows, self.b.rows) if self.group == "m" else (self.number, self.a.rows, self.b.rows)


class _GroupedMatmulNT(Op[_Inputs]):
    def arguments(self, call: Call, a: Any, b: Any, splits: Any, group: Any, dtype: Any, bias: Any,
                  bias_weights: Any, accumulate: Any, align: Any, check: Any) -> _Inputs:
        to = lookup(dtype, INPUT_DTYPES, "dtype").dtype
        choice(group, "group", GROUPS)
        align = check_align(align)
        if group == "m" and align > 1:
            raise ValueError(f"align: expected 1 with group='m', whose rows begin anywhere, got {align}")
        if group == "m":
            left, right = read_rows(call, a, check), read_weights(call, b)
        else:
            left = read_columns(call, "a", a, check)
            right = read_columns(call, "b", b, check)
        if left.k != right.k:
            wanted = f"K = {left.k}" if group == "m" else f"{left.k} columns of all groups"
            instead = "" if group == "m" else columns_instead(left, right)
            raise ValueError(f"b: expected {wanted}, as a has, got {right.k}{instead}")
        groups = read_sizes(call, left, right, splits, check, group)
        assert groups.number is not None
        if group == "m" and right.unconverted is not None and right.unconverted.batch != groups.number:
            raise ValueError(f"b: expected the weights of {counted(groups.number)}, as many as there "
                             f"are sizes, got {right.unconverted.batch}")
        if left.whole_blocks or right.whole_blocks:
            check_whole_blocks(groups)
        check_multiples(groups, align)
        added, weights = _read_bias(call, bias, bias_weights, group, accumulate,
                                    (groups.number, right.rows), left.rows)
        return _Inputs(left, right, groups, group, to if accumulate is None else float32, added, weights,
                       accumulate, align)

    def result(self, inputs: _Inputs) -> Description:
        return one_array(inputs.shape, inputs.to, "out" if inputs.accumulate is None else "accumulate")

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.grouped_matmul_nt(
            inputs.a.given, inputs.b.given, inputs.groups.array, group=inputs.group, dtype=inputs.to,
            bias=inputs.bias and inputs.bias.array, bias_weights=inputs.weights and inputs.weights.array,
            accumulate=inputs.accumulate, align=inputs.align)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        of_rows, n = inputs.group == "m", inputs.b.rows
        worth = tiles.worth_of_copied_scales(inputs.a.scaling, inputs.b.scaling,
                                             inputs.a.rows * n * inputs.a.k, sizes_of_k=not of_rows)
        conversions, left = inputs.a.view_for(call, inputs.groups, worth)
        more, right = inputs.b.view_for(call, inputs.groups, worth)
        yield from (*conversions, *more)
        bias, weights = inputs.bias, inputs.weights
        m, k = (0, inputs.a.k) if of_rows else (inputs.a.rows, 0)
        yield from tiles.own_kernel_launches(call, Problem(
            a=row_starts(inputs.a, left) if of_rows else left, b=right, sizes_of_k=not of_rows,
            groups=inputs.number, splits=inputs.groups.members(call.error_word()), total=inputs.total,
            m=m, n=n, k=k, out=written[0], to=inputs.to,
            out_group=0 if of_rows else m * n, out_start=n if of_rows else 0,
            bias=bias.at if bias else 0, bias_dtype=bias.dtype if bias else inputs.to, bias_group=n,
            bias_weights=weights.at if weights else 0, accumulate=inputs.accumulate is not None,
            whole_blocks=inputs.a.whole_blocks or inputs.b.whole_blocks, align=inputs.align,
            sizes=inputs.groups.host))


def _read_bias(call: Call, bias: Any, weights: Any, group: str, accumulate: Any, shape: tuple[int, int],
               rows: int) -> tuple[Input | None, Input | None]:
    """Return the biases [E, N] of "m", and the weights by which rows multiply them."""
    if bias is None:
        if weights is not None:
            raise ValueError("bias_weights: expected None without a bias, got an array")
        return None, None
    if group == "k":
        raise ValueError("bias: expected None for group='k', whose products have no rows of groups, got an "
                         "array; group_sums makes gradients of biases")
    if accumulate is not None:
        raise ValueError("bias: expected None beside accumulate, whose rows have theirs, got an array")
    added = call.read("bias", bias, INPUT_DTYPES, shape, "a value for each row of each group's b")
    if weights is None:
        return added, None
    return added, call.read("bias_weights", weights, (float32,), (rows,), "one for each row of a")


_GROUPED_MATMUL_NT = _GroupedMatmulNT()
