"""Moves FP8 tokens to their experts' rows, and transposes these in the same launch. Kernel:
kernels_cu/convert/scaling_aware.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from ... import reference
from ...arrays import Array, address, asnumpy
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Pair, Written, one_array
from ...calls.group_sizes import Groups
from ...calls.row_segments import find_segments
from ...formats import float32
from ...kernels import Launch, Variant
from ...layouts import LAYOUTS_WITH_STRIDES, PADDED_TO, cdiv, round_up, scale_shape, target_rows
from ...results import Quantized, Scaled
from ...routing import Routing
from ...scaled_parts import check_one_piece
from ...typed_array import TypedArray
from ..convert.scaling_aware import check_powers_of_two
from ..convert.scaling_aware_tiles import TILE_ROWS, Gathered, gathering_variants, launch, tiles_of
from . import permute_launches as launching
from .permute import check_length, read_probs, read_routing
from .permute_launches import Probs
from .rows import rowwise

_BLOCK = (1, 128)


@overload
def permute_transpose(x: Scaled | Quantized, routing: Routing, *, probs: None = None,
                      out: Quantized | None = None) -> Quantized: ...
@overload
def permute_transpose(x: Scaled | Quantized, routing: Routing, *, probs: Array,
                      out: tuple[Quantized, Array] | None = None) -> tuple[Quantized, TypedArray]: ...
def permute_transpose(x: Scaled | Quantized, routing: Routing, *, probs: Array | None = None,
                      out: Any = None) -> Quantized | tuple[Quantized, TypedArray]:
    """Copy each FP8 token to the rows that the routing gives it, and transpose these rows expert by expert:
    both operands of an expert's products from one read of the tokens.

        rowwise = permute(x, routing)
        columnwise = scaling_aware_transpose(rowwise, splits=routing.aligned_splits).columnwise

    byte for byte.

    Parameters
    ----------
    x : row-wise Scaled [T, K] (or the Quantized that has it) in blocks of 1×128 with float32 scales, all
        powers of two or 0; compact, gemm_ready or deepgemm_sm90 ones
    routing : of T tokens, as `route` gives it. With groups that begin at multiples of 16 rows columns are
        stored fastest
    probs : f32 array [T, topk], one for each slot; of a mask also [T, E]
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured

    Returns
    -------
    Quantized; with probs a tuple: that, and f32 [rows], the prob of each row. The parts are

    rowwise : [rows, K] with gemm_ready scales, as `permute` returns it
    columnwise : as `scaling_aware_transpose` with splits returns it, with a copy of the splits

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong scales on the device raise nothing,
    but `device_errors` reports them, as those of `scaling_aware_transpose`.

    Three launches, the first two of which are small. Bytes moved: the tokens, and the rows twice. Source:
    docs/numerics.md sections 4 and 8.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_block(np.float32([[448, 2], [1, 0.5], [3, 1]]))
    >>> r = fp8.route(np.array([[1], [0], [1]]), num_experts=2)
    >>> moved = fp8.permute_transpose(q, r)
    >>> moved.rowwise.data.astype(np.float32).tolist()[1], moved.columnwise.splits.tolist()
    ([448.0, 2.0], [1, 2])
    """
    return run(_PERMUTE_TRANSPOSE, (rowwise(x, "x"), routing, probs), out)


class _Result(Description):
    """Description of a Quantized of rows, and of columns by expert."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any], experts: int) -> None:
        rows, columns = shape
        self._row = shape, False, _BLOCK, "gemm_ready"
        self._column = shape, True, (_BLOCK[1], 1), "gemm_ready"
        super().__init__(
            Written("out.rowwise.data", shape, dtype),
            Written("out.rowwise.scale_inv", scale_shape(shape, _BLOCK, "gemm_ready"), float32),
            Written("out.columnwise.data", (rows * columns,), dtype),
            Written("out.columnwise.scale_inv",
                    (target_rows(rows, experts, _BLOCK[1]), round_up(columns, PADDED_TO)), float32),
            Written("out.columnwise.splits", (experts,), np.dtype(np.int32)))

    def build(self, arrays: Sequence[Array]) -> Quantized:
        data, scales, column, column_scales, splits = arrays
        return Quantized._of(Scaled._of(data, scales, *self._row),
                             Scaled._of(column, column_scales, *self._column, splits))

    def arrays_of(self, out: Any) -> Sequence[Array]:
        if not isinstance(out, Quantized):
            raise TypeError(f"out: expected a Quantized (an earlier result), got {type(out).__name__}")
        for part, name, wanted in ((out._row, "rowwise", self._row),
                                   (out._column, "columnwise", self._column)):
            if part is None or (part.shape, part.transposed, part.block, part.scale_layout) != wanted:
                raise ValueError(f"out.{name}: expected an earlier result for rows of shape {wanted[0]}, got "
                                 f"{part!r}")
        if out.dbias is not None or out.rowwise.splits is not None or out.columnwise.splits is None:
            raise ValueError("out: expected columns with splits, rows without, and no dbias, as an earlier "
                             f"result has them; got {out!r}")
        return *out.rowwise, *out.columnwise, out.columnwise.splits


class _Inputs(NamedTuple):
    s: Scaled
    data: Input
    scales: Input
    routing: Routing
    groups: Groups
    probs: Probs

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the rows."""
        return self.routing.rows, self.s.shape[1]


class _PermuteTranspose(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, routing: Any, probs: Any) -> _Inputs:
        if not isinstance(x, Scaled):
            raise TypeError(f"x: expected a Scaled or a Quantized, got {type(x).__name__}")
        check_one_piece(x, "x")
        if (x.block != _BLOCK or x.transposed or len(x.shape) != 2
                or x.scale_layout not in LAYOUTS_WITH_STRIDES):
            raise ValueError(f"x: expected row-wise data [T, K] in blocks of {_BLOCK}, not stored transposed,"
                             f" with scales in one of {LAYOUTS_WITH_STRIDES}; got {x!r}")
        data, scales = call.read_scaled("x", x, LAYOUTS_WITH_STRIDES)
        if scales.dtype != float32:
            raise TypeError(f"x.scale_inv: expected dtype float32 for blocks of {_BLOCK}, got {scales.dtype}")
        read_routing(call, routing)
        check_length(data.array, routing.tokens, "x", "tokens")
        groups = call.splits("routing.aligned_splits", routing.aligned_splits, False)
        inputs = _Inputs(x, data, scales, routing, groups, read_probs(call, probs, routing))
        if call.xp is np:
            call.repeatable = False
            used = np.unique(asnumpy(routing.sources)[asnumpy(routing.sources) >= 0] // max(1, routing.topk))
            check_powers_of_two(self._compact(inputs).scale_inv[used], "x")
        return inputs

    def _compact(self, inputs: _Inputs) -> Scaled:
        scales = reference.convert_scales(asnumpy(inputs.scales.array), source=str(inputs.s.scale_layout),
                                          target="compact", shape=inputs.s.shape, block=_BLOCK, dtype=float32)
        return Scaled._of(inputs.data.array, scales, inputs.s.shape, False, _BLOCK, "compact")

    def result(self, inputs: _Inputs) -> Description:
        assert inputs.groups.number is not None
        moved = _Result(inputs.shape, inputs.s.dtype, inputs.groups.number)
        if inputs.probs.array is None:
            return moved
        return Pair(moved, one_array(inputs.shape[:1], float32, "out[1]"))

    def reference(self, inputs: _Inputs) -> Any:
        return reference.permute_transpose(self._compact(inputs), inputs.routing, probs=inputs.probs.array)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        rows_at, row_scales_at, out, target_scales, sizes_out, *probs_at = written
        (rows, columns), routing, groups = inputs.shape, inputs.routing, inputs.groups
        tiles = tiles_of(inputs.shape, groups.number, out)
        splits = groups.members(call.error_word())
        of_rows = {"splits": splits, "rows": rows, "columns": 1, "result_rows": rows, "across": 1, "align": 1}
        segments = find_segments(call, TILE_ROWS, tiles.down, of_rows, (0, 2))
        given = launching.TokenScales.of(inputs.scales, str(inputs.s.scale_layout))
        yield launching.without_data(inputs.data.array, given, routing, inputs.probs, row_scales_at,
                                     probs_at[0] if probs_at else 0)
        yield segments.launch
        multiplier, shift = division(routing.topk)
        members = {"sources": address(routing.sources), "to": rows_at, "tokens": routing.tokens,
                   "multiplier": multiplier, "shift": shift}
        scale_block = round_up(rows, PADDED_TO)
        yield launch(inputs.data, _BLOCK[1], "column", groups.number, tiles,
                     gathered=Gathered(rows, rows_at, members), scales=row_scales_at, scale_row=1,
                     scale_block=scale_block, out=out, target_scales=target_scales, row_scales=0,
                     segments=segments.at, splits=splits, sizes_out=sizes_out,
                     target_pitch=round_up(columns, PADDED_TO))


def division(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift): n * multiplier >> shift is n // divisor for n below 2**31. 0 counts as
    1."""
    bits = (max(1, divisor) - 1).bit_length()
    return cdiv(1 << (31 + bits), max(1, divisor)), 31 + bits


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    yield launching.PERMUTE.variant()
    yield from gathering_variants()


_PERMUTE_TRANSPOSE = _PermuteTranspose()
