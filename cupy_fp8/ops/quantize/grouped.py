"""`group_quantize`: quantises each group of rows as a tensor of its own. Launches: grouped_tensor.py for one
scale per group, grouped_blocks.py for blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import Array, check_dimensions
from ...calls import group_sizes, row_segments
from ...calls.call import Call, Input, Op, run
from ...directions import check_directions, tensor_directions
from ...formats import INPUT_DTYPES, float32
from ...grouped import Grouped
from ...kernels import Launch, Variant
from ...layouts import padded_rows, round_up
from ...recipes import BlockScaling, MXScaling, Recipe, check_recipe, check_scales
from ...results import Quantized
from . import grouped_blocks, grouped_tensor
from .grouped_call import Inputs
from .grouped_result import GroupedResult

_INT64 = np.dtype(np.int64)
_MOST_INT32 = 0x7FFFFFFF


def group_quantize(x: Array, splits: Any, recipe: Recipe, *, rowwise: bool = True, columnwise: bool = False,
                   scales: Any = None, amaxes: Array | None = None, noop: Array | None = None,
                   offsets: Array | None = None, align: int = 1, out: Grouped | None = None,
                   check: bool = False) -> Grouped[Quantized]:
    """Quantise each group of rows as a tensor of its own: its bytes are those of ``recipe.quantize(group)``.

    Per-tensor recipes give each group a scale:

        data[g] = cast(x[g] * scales[g])      scale_inv[g] = 1 / scales[g]
        amaxes[g] = max(amaxes[g], max |x[g]|)

    DelayedScaling, BlockScaling and MXScaling take one launch. So does CurrentScaling of a large 16-bit array
    (from 17 M elements on an H200) whose rows are multiples of 8 elements, if a group of average size (at
    most 15 M elements) can wait for its scale in the GPU's multiprocessors. x is then read once, except for
    groups that are too large. Otherwise CurrentScaling takes two launches: the first finds the scales that
    the groups' own maxima call for, as `compute_scale` does (from 0 for an empty group). For large arrays a
    small launch goes before each of these and finds where the groups are. No block has rows of two groups.

    BlockScaling of whole rows, block (1, None), gives every row a scale, in one launch that reads x once.
    Column-wise it gives every column of each group one, as (None, 1) does row-wise. Then there are three
    launches, for both directions together: the first finds the groups, the second all maxima, and the third
    quantises; x is read twice.

    With `align` the same launches pad: the groups are those of ``group_quantize(pad_groups(x, splits,
    align=), aligned sizes, recipe)``, each followed by what the recipe makes of rows of zeros, up to a
    multiple of `align` rows.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]
    splits : rows of each of N consecutive groups, any of them 0: an int32 or int64 array [N] of x's kind, or
        a list. Rows of x that they leave over (memory allocated for the worst case) belong to no group
    recipe : DelayedScaling, which needs `scales`, CurrentScaling, BlockScaling or MXScaling
    rowwise, columnwise : which directions to return. Column-wise data are stored transposed, each group's [K,
        m]; those of MX are not
    scales : f32 array [N]
    amaxes : for per-tensor recipes, f32 array [N], raised to each group's largest magnitude before scaling;
        not zeroed first
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`. It
        must not change while the launches run
    offsets : int64 [N + 1], where each group begins and the last one ends, in elements. Given offsets are
        used as they are; without them the same launch computes them. Not with `align`
    align : rows that every group of the result is a multiple of, a power of two from 1 to 65536; 1: groups as
        they are
    out : an earlier result for as many splits of their dtype; written in place and returned, with its own
        splits and offsets. A call with it can be captured into a CUDA graph once it has been made before
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    Grouped, flat arrays of M * K elements; what follows the last group is 0. Its splits and offsets are
    copies, which the same launch makes: those given may change. The scales of blocks are those
    of each group, as ``recipe.quantize`` stores them, one group after the other (`Grouped`). Those of whole
    columns are [N, K], K rounded up to 4 except in compact scales: a line for each group, that of zeros for a
    group without rows. With `align` the result has as many rows as that of `pad_groups`, whatever the
    sizes; its splits are the aligned sizes, of splits' dtype (int32 only if M rounded up fits),
    and its offsets are theirs.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, a group that passes the last row of x ends
    there, and a group whose given offset is not a row start, or points past the end, is skipped.

    Source: TransformerEngine's grouped quantisation; with `align` also its fused_multi_row_padding. Bytes
    moved per element: x + 1 per direction, and the scales of blocks; CurrentScaling in two launches reads x
    twice (the second time from the L2, as far as it still holds x).

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> g = fp8.group_quantize(x, [1, 2], fp8.DelayedScaling(), columnwise=True, scales=np.float32([1, 2]))
    >>> g[1].columnwise.data.astype(np.float32).tolist(), g.scale_inv.tolist()
    ([[6.0, 10.0], [8.0, 12.0]], [1.0, 0.5])
    >>> fp8.group_quantize(x, [1, 2], fp8.CurrentScaling(pow2_scale=True)).scale_inv.tolist()
    [0.0078125, 0.015625]
    >>> recipe = fp8.BlockScaling(scale_layout="compact")
    >>> g = fp8.group_quantize(np.ones((300, 256), np.float32), [130, 170], recipe, columnwise=True)
    >>> [member.columnwise.scale_inv.shape for member in g]
    [(2, 256), (2, 256)]
    >>> rows = fp8.BlockScaling((1, None), scale_layout="compact")
    >>> g = fp8.group_quantize(x, [1, 0, 2], rows, columnwise=True)
    >>> g.scale_inv.tolist(), (g.columnwise_scale_inv * 256).tolist()
    ([[0.0078125], [0.015625], [0.015625]], [[1.0, 2.0], [256.0, 256.0], [4.0, 4.0]])
    >>> scales = np.ones(3, np.float32)
    >>> g = fp8.group_quantize(x, [1, 0, 2], fp8.DelayedScaling(), scales=scales, align=2)
    >>> g.splits.tolist(), [member.data.astype(np.float32).tolist() for member in g]
    ([2, 0, 2], [[[1.0, 2.0], [0.0, 0.0]], [], [[3.0, 4.0], [5.0, 6.0]]])
    """
    # calls are remembered by the memory of arrays, so a list becomes one first
    splits = group_sizes.on_device_of(splits, x)
    given = x, splits, recipe, rowwise, columnwise, scales, amaxes, noop, align, check, offsets
    result: Grouped = run(_GROUP_QUANTIZE, given, out)
    return result


class _GroupQuantize(Op[Inputs]):
    def arguments(self, call: Call, x: Any, splits: Any, recipe: Any, rowwise: Any, columnwise: Any,
                  scales: Any, amaxes: Any, noop: Any, align: Any, check: Any, offsets: Any) -> Inputs:
        read_x = call.read("x", x, INPUT_DTYPES)
        check_dimensions(read_x.shape, "x", 2, 2)
        check_directions(read_x.shape, rowwise, columnwise)
        wanted = bool(rowwise), bool(columnwise)
        groups, (rows, columns) = call.splits("splits", splits, check), read_x.shape
        if groups.host is not None:
            group_sizes.check_at_most(groups.host, rows)
        align = group_sizes.check_align(align)
        check_recipe(recipe)
        check_scales(recipe, scales, amaxes, several=True)
        read_scales = None if scales is None else _read_scales(call, scales, groups)
        updated_amaxes = None
        if amaxes is not None:
            updated_amaxes = call.update("amaxes", amaxes, float32, (len(groups.array),))
        call.noop(noop)
        read_offsets = None if offsets is None else _read_offsets(call, offsets, align, groups, check)
        shape = _result_rows(groups, rows, align), columns
        if isinstance(recipe, (BlockScaling, MXScaling)):
            quantization = grouped_blocks.quantization_of(shape, read_x.dtype, recipe, *wanted)
            directions = quantization.directions
        else:
            quantization, directions = None, tensor_directions(shape, recipe.dtype, *wanted)
        result = GroupedResult(directions, not isinstance(recipe, MXScaling), groups)
        return Inputs(x=read_x, groups=groups, recipe=recipe, rowwise=wanted[0], columnwise=wanted[1],
                      scales=read_scales, amaxes=updated_amaxes, offsets=read_offsets, align=align,
                      quantization=quantization, result=result)

    def reference(self, inputs: Inputs) -> Grouped:
        scales, amaxes, offsets = (a and a.array for a in (inputs.scales, inputs.amaxes, inputs.offsets))
        return reference.group_quantize(
            inputs.x.array, inputs.groups.host, inputs.recipe, rowwise=inputs.rowwise,
            columnwise=inputs.columnwise, scales=scales, amaxes=amaxes, offsets=offsets, align=inputs.align)

    def launches(self, call: Call, inputs: Inputs, *written: int) -> Iterator[Launch]:
        launches = grouped_tensor.launches if inputs.quantization is None else grouped_blocks.launches
        return launches(call, inputs, inputs.result.addresses(written))


_GROUP_QUANTIZE = _GroupQuantize()


def _read_scales(call: Call, scales: Any, groups: group_sizes.Groups) -> Input:
    return call.read("scales", scales, (float32,), (len(groups.array),), "one for each group")


def _read_offsets(call: Call, offsets: Any, align: int, groups: group_sizes.Groups, check: bool) -> Input:
    if align > 1:
        raise ValueError(f"offsets: expected none with align={align}, got {type(offsets).__name__}; the call "
                         "finds those of the padded groups (the result's offsets)")
    read = call.read("offsets", offsets, (_INT64,), (len(groups.array) + 1,), "one more than splits")
    if groups.host is not None and (call.xp is np or check):
        group_sizes.compare_offsets(read.array, groups.host, call.x.shape[1])
    return read


def _result_rows(groups: group_sizes.Groups, rows: int, align: int) -> int:
    """Return the number of rows of the result."""
    if align == 1:
        return rows
    if not groups.wide and round_up(rows, align) > _MOST_INT32:
        raise ValueError(f"splits: expected int64, since {rows} rows rounded up to {align} are more than "
                         "int32 holds, got int32")
    return padded_rows(rows, len(groups.array), align)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield from grouped_tensor.variants()
    yield from grouped_blocks.variants()
    yield from row_segments.variants()
