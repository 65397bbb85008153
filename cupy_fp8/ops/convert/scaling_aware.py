"""Column-wise FP8 from row-wise FP8, without dequantising. Kernel: kernels_cu/convert/scaling_aware.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ... import backend, reference
from ...advice import shown
from ...arrays import Array, address, asnumpy, bits, is_contiguous
from ...calls import group_sizes, validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written
from ...calls.row_segments import find_segments
from ...formats import choice, flag, float8_e8m0fnu, float32
from ...kernels import Launch
from ...layouts import (
    LAYOUTS_WITH_STRIDES,
    cdiv,
    round_up,
    row_scale_rows,
    scale_shape,
    swap_last,
    target_rows,
)
from ...reference.convert.scaling_aware import exponents
from ...results import Quantized, Scaled, row_wise
from ...scaled_parts import check_one_piece
from ..scales.convert import Conversion, conversion, conversion_launches, row_scale_strides
from .astype import transposed_launches
from .scaling_aware_tiles import TARGETS, TILE_ROWS, Target, launch, tiles_of, variants

__all__ = ["TARGETS", "scaling_aware_transpose", "variants"]

#: log2 of the rows per unit that E8M0 blocks, and padded row scales, before an expert are counted in
_UNITS = 5, 2
#: Blocks along rows that become blocks along columns, and the dtype of their scales.
_BLOCKS = {(1, 128): float32, (1, 32): float8_e8m0fnu}
_SQUARE = (128, 128)
_LAYOUTS = ("gemm_ready", "compact")


def scaling_aware_transpose(q: Scaled | Quantized, *, splits: Any = None, target: Target = "column",
                            scale_layout: Literal["gemm_ready", "compact"] = "gemm_ready",
                            out: Quantized | None = None, check: bool = False) -> Quantized:
    """Column-wise FP8 from row-wise FP8 with power-of-two scales: exponents move, nothing is dequantised or
    quantised twice.

        out = cast(data * s / t)        s: the scale of the element, t: that of its new, column-wise block

    Each element is rounded once, to nearest even, subnormals included; it is exact if it fits under t. ±0
    stays ±0, and NaN becomes 0x7F. docs/numerics.md section 4 defines every byte.

    Parameters
    ----------
    q : row-wise Scaled (or the Quantized that has it) of shape (M, K), float8_e4m3fn or float8_e5m2: blocks
        of (1, 128) with float32 scales, all powers of two (2**-149 to 2**127) or 0, as unused rows of
        `permute` have it, or of (1, 32) with float8_e8m0fnu scales (MX). Compact, gemm_ready and
        deepgemm_sm90 scales are read as they are; others are made compact by a launch before. Or blocks of
        (128, 128), compact or gemm_ready, any float32 scales, two or three dimensions: such data are
        transposed as they are, byte for byte, and so are their scales (no splits; the target does not matter;
        `rowwise` is q itself)
    splits : rows of each of E consecutive experts: an int32 or int64 array [E] of q's kind, or a list (for a
        CuPy q it is copied to the GPU). No block has rows of two experts. Rows after the last expert (memory
        allocated for the worst case) belong to none
    target : which t. 'column': for each block of B rows of a column the smallest power of two under which all
        its values fit. 'tile': for B x B elements the largest s of the rows that hold anything but zeros (as
        FP8-Flow-MoE; less accurate where rows differ)
    scale_layout : of f32 scales: 'gemm_ready' (rows of K rounded up to a multiple of 4, padding 0) or
        'compact'; E8M0 ones are compact
    out : an earlier result for the same q.data; written in place and returned. With it the call allocates
        nothing and can be captured into a CUDA graph; with splits, or scales made compact before, once it has
        been used before
    check : wait for the device and raise ValueError if splits or scales there are wrong. (NumPy arrays and
        lists are always examined)

    Returns
    -------
    Quantized. With splits its parts have a copy of them, which the same launch makes, and which
    `grouped_matmul_nt` compares with the sizes of its own call. The parts are

    columnwise : block (B, 1), stored transposed. Without splits the data are [K, M] and scale_inv is
        [ceil(M/B), K]. With splits the data are flat, [M * K]: each expert's [K, m_e], one after the other.
        scale_inv has each expert's ceil(m_e/B) rows, one expert after the other, and (M + (B-1) * min(E, M))
        // B rows in all, a bound that does not depend on the sizes; rows past the last expert are 0
    rowwise : q's own data (for MX q itself). The same launch transposes f32 scales to gemm_ready,
        [ceil(K/128), M rounded up to 4]. With splits these are flat: each expert's [ceil(K/128), m_e rounded
        up to 4], one after the other, (M + 3 * min(E, M)) // 4 * 4 * ceil(K/128) in all, the rest 0

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong values on the device raise nothing,
    but `device_errors` reports them: a row-block whose f32 scale is neither a power of two nor 0 becomes
    0x7F, and the column-wise scales that depend on it become NaN; a negative size counts as 0, and an expert
    whose rows pass the last row ends there. Rows of no expert are skipped; the end of the data is 0 for them.

    Source: FP8-Flow-MoE (target 'tile'); docs/numerics.md. Bytes moved: data once in, once out, and the
    scales.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> data = fp8.asarray([[448, 2], [1, 0.5]], fp8.float8_e4m3fn, like=np)
    >>> q = fp8.Scaled(data, np.float32([[1], [4]]), (2, 2), block=(1, 128), scale_layout="compact")
    >>> c = fp8.scaling_aware_transpose(q).columnwise
    >>> c.data.astype(np.float32).tolist(), c.scale_inv.tolist()
    ([[448.0, 4.0], [256.0, 256.0]], [[1.0, 0.0078125, 0.0, 0.0]])
    """
    given = row_wise(q)
    op: Op[Any] = _SQUARES if given.block == _SQUARE else _ROW_BLOCKS
    made = run(op, (given, splits, target, scale_layout, check), out)
    if out is not None:
        return out
    column, *row_scales = made
    if row_scales:
        given = Scaled._of(given.data, row_scales[0], given.shape, False, given.block, "gemm_ready",
                           column.splits)
    return Quantized._of(given, column)


# ---- the result ----
class _Result(Description):
    """Description of the arrays written besides q's own data: the column-wise part, the sizes of experts, and
    the row-wise scales if they are written too. A result of an earlier call is recognised by the addresses of
    q's arrays, so nothing keeps them alive."""

    def __init__(self, s: Scaled, column_block: tuple[int, int], layout: str, *written: Written,
                 splits: Written | None = None, row_scales: Written | None = None) -> None:
        super().__init__(*written, *(each for each in (splits, row_scales) if each))
        self._column = s.shape, True, column_block, layout
        self._has_splits, self._writes_row_scales = splits is not None, row_scales is not None
        self._row = s.shape, False, s.block, "gemm_ready" if self._writes_row_scales else s.scale_layout
        self._own = self._memory_of(s)

    def _memory_of(self, row: Scaled) -> list[Any]:
        """Return the memory that `out` must share with q."""
        return [(backend.module_of(a, "out.rowwise"), a.dtype, a.shape, is_contiguous(a) or a.strides,
                 address(a) if a.size else 0) for a in ([row.data] if self._writes_row_scales else row)]

    def build(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        data, scale_inv, *others = arrays
        splits = others.pop(0) if self._has_splits else None
        return Scaled._of(data, scale_inv, *self._column, splits), *others

    def arrays_of(self, out: Any) -> list[Array]:
        if not isinstance(out, Quantized):
            raise TypeError(f"out: expected a Quantized (an earlier result), got {type(out).__name__}")
        row, column = out._row, out._column
        if row is None or column is None:
            raise ValueError("out: expected a row-wise and a column-wise part, as an earlier result has them")
        if out.dbias is not None:
            raise ValueError("out: has a dbias, which a scaling-aware transpose does not write")
        if _facts(row) != self._row or self._memory_of(row) != self._own:
            what = "q's own data with gemm_ready scales" if self._writes_row_scales else "q itself"
            raise ValueError(f"out.rowwise: expected {what}, got {row!r}; a result belongs to the memory of "
                             "the q that it was made for")
        if _facts(column) != self._column:
            shape, _, block, layout = self._column
            raise ValueError(f"out.columnwise: expected data of shape {shape} stored transposed, block "
                             f"{block}, {layout} scales; got {column!r}, scales {column.scale_layout}")
        self._check_splits(row, column)
        return self._arrays(column, [row.scale_inv] if self._writes_row_scales else [])

    def _check_splits(self, row: Scaled, column: Scaled) -> None:
        """Raise ValueError unless both parts have the same array of sizes, or none."""
        wanted = "sizes" if self._has_splits else "None"
        if (column.splits is not None) != self._has_splits:
            raise ValueError(f"out.columnwise.splits: expected {wanted}, got "
                             f"{'None' if self._has_splits else 'sizes'}")
        if self._writes_row_scales and row.splits is not column.splits:
            raise ValueError(f"out.rowwise.splits: expected {wanted}, as out.columnwise has, that very array")

    def _arrays(self, column: Scaled, row_scales: Sequence[Array]) -> list[Array]:
        return [*column, *([] if column.splits is None else [column.splits]), *row_scales]

    def store(self, out: Any, made: Any) -> None:
        column, *row_scales = made
        for array, computed in zip(self.arrays_of(out), self._arrays(column, row_scales), strict=True):
            bits(array)[...] = bits(computed)


def _facts(s: Scaled) -> tuple[Any, ...]:
    return s.shape, s.transposed, s.block, s.scale_layout


# ---- the call ----
class _Inputs(NamedTuple):
    s: Scaled
    data: Input
    scales: Input
    conversion: Conversion | None           # makes the scales compact; None: they are read by strides
    groups: group_sizes.Groups
    target: str
    layout: str                             # the layout of the column-wise scales

    @property
    def block(self) -> int:
        """Elements per scale."""
        return int(self.s.block[1])         # type: ignore[index, arg-type]

    @property
    def pitch(self) -> int:
        """Elements between rows of the column-wise scales."""
        columns = self.s.shape[1]
        return round_up(columns, 4) if self.layout == "gemm_ready" else columns

    @property
    def compact_bytes(self) -> int:
        """Bytes of the compact scales."""
        rows, columns = self.s.shape
        return rows * cdiv(columns, self.block) * _BLOCKS[1, self.block].itemsize

    def compact_scales(self) -> np.ndarray:
        """Returns the scales on the host, for the reference."""
        return reference.convert_scales(asnumpy(self.scales.array), source=str(self.s.scale_layout),
                                        target="compact", shape=self.s.shape, block=(1, self.block),
                                        dtype=_BLOCKS[1, self.block])


class _TransposeRowBlocks(Op[_Inputs]):
    def arguments(self, call: Call, s: Scaled, splits: Any, target: Any, scale_layout: Any,
                  check: Any) -> _Inputs:
        _check_choices(target, scale_layout)
        check_one_piece(s)
        if s.block not in _BLOCKS or s.transposed or len(s.shape) != 2:
            blocks = " or ".join(map(str, _BLOCKS))
            raise ValueError(f"q: expected row-wise data [M, K] in blocks of {blocks}, not stored "
                             f"transposed; got {s!r}")
        data, scales = call.read_scaled("q", s, LAYOUTS_WITH_STRIDES)
        dtype, held, found = _BLOCKS[s.block], scales.dtype, None
        # Scales in words become either dtype.
        if held != dtype and s.scale_layout != "deepgemm_sm100":
            raise TypeError(f"q.scale_inv: expected dtype {dtype} for blocks of {s.block}, got {held}")
        if s.scale_layout not in LAYOUTS_WITH_STRIDES:
            found = conversion(str(s.scale_layout), "compact", s.shape, s.block, held, dtype)
        groups = group_sizes.NO_GROUPS if splits is None else call.splits("splits", splits, check)
        if groups.host is not None:
            group_sizes.check_at_most(groups.host, s.shape[0])
        layout = scale_layout if dtype == float32 else "compact"
        inputs = _Inputs(s=s, data=data, scales=scales, conversion=found, groups=groups, target=target,
                         layout=layout)
        if (flag(check, "check") or call.xp is np) and dtype == float32:
            call.repeatable = False
            _check_scales(inputs)
        return inputs

    def result(self, inputs: _Inputs) -> Description:
        s, groups, block = inputs.s, inputs.groups.number, inputs.block
        rows, columns = s.shape
        stored = (columns, rows) if groups is None else (rows * columns,)
        targets = target_rows(rows, groups, block)
        splits = row_scales = None
        if groups is not None:
            splits = Written("out.columnwise.splits", (groups,), inputs.groups.array.dtype)
        if block == 128:
            blocks, padded_rows = cdiv(columns, block), row_scale_rows(rows, groups)
            shape = (blocks, padded_rows) if groups is None else (blocks * padded_rows,)
            row_scales = Written("out.rowwise.scale_inv", shape, float32)
        return _Result(s, (block, 1), inputs.layout, Written("out.columnwise.data", stored, s.dtype),
                       Written("out.columnwise.scale_inv", (targets, inputs.pitch), _BLOCKS[1, block]),
                       splits=splits, row_scales=row_scales)

    def reference(self, inputs: _Inputs) -> Any:
        s = inputs.s
        dense = Scaled._of(inputs.data.array, inputs.compact_scales(), s.shape, False, s.block, "compact")
        made = reference.scaling_aware_transpose(dense, splits=inputs.groups.host, target=inputs.target,
                                                 scale_layout=inputs.layout)
        return made.columnwise, *([made.rowwise.scale_inv] if inputs.block == 128 else [])

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        tiles, scales_at = tiles_of(inputs.s.shape, inputs.groups.number, written[0]), inputs.scales.at
        if not tiles.down * tiles.strips:
            return
        if inputs.conversion is None:
            steps = row_scale_strides(inputs.scales.array, str(inputs.s.scale_layout))
        else:
            steps = cdiv(inputs.s.shape[1], inputs.block), 1
            scratch = call.scratch("compact_scales", cdiv(inputs.compact_bytes, 4))
            scales_at = address(scratch)
            yield from conversion_launches(call, inputs.conversion, inputs.scales, scales_at)
        groups, rows, segments_at, sizes_out = inputs.groups, inputs.s.shape[0], 0, 0
        splits = {"sizes": groups.at, "groups": -1 if groups.number is None else groups.number,
                  "errors": call.error_word(), "wide": groups.wide}
        if groups.number is not None:
            of_rows = {"splits": splits, "rows": rows, "columns": 1, "result_rows": rows, "across": 1,
                       "align": 1}
            segments = find_segments(call, TILE_ROWS, tiles.down, of_rows, _UNITS)
            segments_at, sizes_out = segments.at, written[2]
            yield segments.launch
        row_scales_at = written[-1] if inputs.block == 128 else 0
        yield launch(inputs.data, inputs.block, inputs.target, groups.number, tiles, scales=scales_at,
                     scale_row=steps[0], scale_block=steps[1], out=written[0], target_scales=written[1],
                     row_scales=row_scales_at, segments=segments_at, splits=splits, sizes_out=sizes_out,
                     target_pitch=inputs.pitch)


class _Squares(NamedTuple):
    s: Scaled
    data: Input
    scales: Input                           # rows of blocks of the transposed matrix
    conversion: Conversion
    layout: str                             # the layout of the column-wise scales


class _TransposeSquares(Op[_Squares]):
    """Transposes the data and the scales of square blocks."""

    def arguments(self, call: Call, s: Scaled, splits: Any, target: Any, scale_layout: Any,
                  check: Any) -> _Squares:
        _check_choices(target, scale_layout)
        flag(check, "check")
        if splits is not None:
            raise ValueError(f"splits: blocks of {_SQUARE} may straddle two experts; transpose each by "
                             "itself")
        if s.transposed or s.scale_layout not in _LAYOUTS:
            raise ValueError(f"q: expected data not stored transposed with scales in one of {_LAYOUTS}, got "
                             f"{s!r}")
        data, scales = call.read_scaled("q", s, _LAYOUTS)
        view = scales.array[..., :scale_shape(s.shape, _SQUARE, "compact")[-1]].swapaxes(-1, -2)
        found = conversion("compact", scale_layout, swap_last(s.shape), _SQUARE, view.dtype, None,
                           validate.matrix_strides(view))
        return _Squares(s, data, Input(view, scales.at), found, scale_layout)

    def result(self, inputs: _Squares) -> Description:
        s, found = inputs.s, inputs.conversion
        return _Result(s, _SQUARE, inputs.layout, Written("out.columnwise.data", swap_last(s.shape), s.dtype),
                       Written("out.columnwise.scale_inv", found.shape, found.dtype))

    def reference(self, inputs: _Squares) -> Any:
        s, stored = inputs.s, swap_last(inputs.s.shape)
        scale_inv = reference.convert_scales(inputs.scales.array, source="compact", target=inputs.layout,
                                             shape=stored, block=_SQUARE)
        return (Scaled._of(reference.transpose(inputs.data.array), scale_inv, s.shape, True, _SQUARE,
                           inputs.layout),)

    def launches(self, call: Call, inputs: _Squares, *written: int) -> Iterator[Launch]:
        yield from transposed_launches(inputs.data, written[0])
        yield from conversion_launches(call, inputs.conversion, inputs.scales, written[1])


_ROW_BLOCKS, _SQUARES = _TransposeRowBlocks(), _TransposeSquares()


def _check_choices(target: Any, scale_layout: Any) -> None:
    choice(target, "target", TARGETS)
    if not isinstance(scale_layout, str) or scale_layout not in _LAYOUTS:
        hint = "; .to_layout converts" if isinstance(scale_layout, str) and scale_layout == "swizzled" else ""
        raise ValueError(f"scale_layout: expected one of {_LAYOUTS}, got {shown(scale_layout)}{hint}")


def _check_scales(inputs: _Inputs) -> None:
    """Raise ValueError unless f32 scales are powers of two, as E8M0 scales always are. If the sizes are
    known, only rows of experts count. Waits for the device."""
    host = inputs.groups.host
    validate.may_wait(inputs.scales.array)
    check_powers_of_two(inputs.compact_scales()[:None if host is None else sum(host.tolist())])


def check_powers_of_two(scales: np.ndarray, name: str = "q") -> None:
    """Raise ValueError unless all f32 scales of `name` are powers of two or 0."""
    wrong = exponents(scales).wrong
    if wrong.any():
        first = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
        raise ValueError(f"{name}.scale_inv: expected powers of two, got {scales[first]} at {first}; "
                         "quantise with pow2_scale=True, or dequantise and quantise again")
