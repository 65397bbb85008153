"""Sums of the rows of each group: bias gradients of experts. Kernel: kernels_cu/moe/group_sums.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array, address, check_dimensions
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, one_array
from ...calls.group_sizes import Groups, check_at_most
from ...calls.row_segments import find_segments, is_worth_a_launch
from ...calls.row_segments import variants as segment_variants
from ...formats import FP8_DTYPES, INPUT_DTYPES, float32
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import LAYOUTS_WITH_STRIDES, cdiv, padded_rows
from ...results import Quantized, Scaled
from ...typed_array import TypedArray
from ..convert.dequantize import scale_strides
from ..scales.convert import with_compact_scales
from .rows import rowwise

_THREADS = 256
_KERNEL = Kernel("moe/group_sums", "group_sums", block=_THREADS)
_LANES = 32
#: rows per segment; groups of fewer than _SMALL on average get short segments
_ROWS, _FEW_ROWS, _SMALL = 256, 64, 128


def group_sums(x: Array | Scaled | Quantized, splits: Any, *, weights: Array | None = None,
               out: Array | None = None, check: bool = False) -> TypedArray:
    """Add up the rows of each group, each row times its weight: the gradient of a bias that each expert has.

        sums[e, k] = sum over the rows r of group e of x[r, k] * weights[r]

    in f32: each product is rounded, and the products are added by the fixed tree of docs/numerics.md rule 11,
    so the same arguments give the same bytes.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array [M, K]; or a row-wise Scaled [M, K] (or the Quantized that has it)
        with one scale or scales of blocks 1×128, compact or gemm_ready, read as it is (other layouts are made
        compact first). Its values are those of `dequantize`
    splits : rows of each of E consecutive groups: an int32 or int64 array [E] of x's kind, or a list (for a
        CuPy x it is copied to the GPU, which cannot be captured into a CUDA graph). Any may be 0. Rows after
        the last group are not read
    weights : f32 array [M]. None: 1
    out : float32 array [E, K], written and returned; with it the call can be captured into a CUDA graph, once
        it has been used before
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    float32 array [E, K]; 0 for a group without rows.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, and a group that passes the last row ends
    there.

    Source: docs/numerics.md section 12. One launch, or two for many blocks; bytes moved: x once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.group_sums(np.float32([[1, 2], [3, 4], [5, 6]]), [1, 0, 2]).tolist()
    [[1.0, 2.0], [0.0, 0.0], [8.0, 10.0]]
    >>> q = fp8.quantize_tensor(np.float32([[1, 2], [3, 4]]), 1.0)
    >>> fp8.group_sums(q, [2], weights=np.float32([0.5, 2])).tolist()
    [[6.5, 9.0]]
    """
    result: Array = run(_GROUP_SUMS, (rowwise(x, "x"), splits, weights, check), out)
    return result


class _Inputs(NamedTuple):
    """x: the array, or the data of a Scaled, and its scales. given: what the caller gave."""

    given: Any
    x: Any
    data: Input
    scales: Input | None
    groups: Groups
    weights: Input | None

    @property
    def number(self) -> int:
        assert self.groups.number is not None
        return self.groups.number


class _GroupSums(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, splits: Any, weights: Any, check: Any) -> _Inputs:
        given, scales = x, None
        if isinstance(x, Scaled):
            x, data, scales = _read_scaled(call, x)
        else:
            data = call.read("x", x, INPUT_DTYPES)
        check_dimensions(data.shape, "x", 2, 2)
        groups = call.splits("splits", splits, check)
        if groups.host is not None:
            check_at_most(groups.host, data.shape[0])
        factors = None if weights is None else call.read("weights", weights, (float32,), data.shape[:1],
                                                         "one for each row of x")
        return _Inputs(given, x, data, scales, groups, factors)

    def result(self, inputs: _Inputs) -> Description:
        return one_array((inputs.number, inputs.data.shape[1]), float32)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        x = inputs.given if inputs.scales is not None else inputs.data.array
        return reference.group_sums(x, inputs.groups.array, weights=inputs.weights and inputs.weights.array)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        data, (rows, columns) = inputs.data, inputs.data.shape
        if inputs.number == 0 or columns == 0:
            return
        segment_rows = _ROWS if rows >= _SMALL * inputs.number else _FEW_ROWS
        count = _columns_of_lane(data.dtype)
        across = cdiv(columns, _LANES * count)
        segments = max(1, padded_rows(rows, inputs.number, segment_rows) // segment_rows)
        slots = 2 * (rows // segment_rows + 1)
        groups = {"splits": inputs.groups.members(call.error_word()), "rows": rows, "columns": 1,
                  "result_rows": rows, "across": across, "align": 1}
        grid, segments_at = grid_size(segments * across, data.shape), 0
        if is_worth_a_launch(data.array, grid):
            find, segments_at = find_segments(call, segment_rows, segments, groups)
            yield find
        yield _KERNEL.variant(IN=data.dtype).bind(
            data.array, grid, x=data.at, weights=inputs.weights.at if inputs.weights else 0, sums=written[0],
            of_segments=address(call.scratch("sums of row segments", slots * columns)),
            done=call.workspace("group_sums", slots * across), columns=columns,
            groups={**groups, "segments": segments_at},
            rows_log2=segment_rows.bit_length() - 1,
            vector=int(columns % count == 0 and data.at % (count * data.dtype.itemsize) == 0),
            **_scale_members(inputs))


def _read_scaled(call: Call, s: Scaled) -> tuple[Scaled, Input, Input]:
    if s.transposed or s.block not in (None, (1, 128)):
        raise ValueError("x: expected row-wise data stored as is, with one scale or blocks (1, 128), got "
                         f"{s!r}; dequantize makes an array")
    data, scales = call.read_scaled("x", s, LAYOUTS_WITH_STRIDES)
    if s.block is not None and s.scale_layout not in LAYOUTS_WITH_STRIDES:
        s, scales = with_compact_scales(call, "x", s)
    return s, data, scales


def _scale_members(inputs: _Inputs) -> dict[str, int]:
    """Return the struct's members for the places of scales."""
    if inputs.scales is None:
        return {}
    if inputs.x.block is None:
        return {"scale": inputs.scales.at, "scale_row": 0, "scale_block": 0, "f32_scales": 1}
    strides = scale_strides(inputs.x, inputs.scales.array)
    return {"scale": inputs.scales.at, "scale_row": strides["row_stride"],
            "scale_block": strides["column_stride"], "f32_scales": int(inputs.scales.dtype == float32)}


def _columns_of_lane(dtype: np.dtype[Any]) -> int:
    return 4 if dtype.itemsize == 4 else 8


_GROUP_SUMS = _GroupSums()


def variants() -> Iterator[Variant]:
    """Yields every variant that group_sums may launch."""
    for dtype in (*FP8_DTYPES, *INPUT_DTYPES):
        yield _KERNEL.variant(IN=dtype)
    yield from segment_variants()
