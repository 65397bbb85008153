"""Pads, unpads and reorders groups of consecutive rows, and moves the scales of quantised rows with them.
Kernel: kernels_cu/moe/pad.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, overload

import numpy as np

from ... import reference
from ...advice import shown
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description
from ...calls.group_sizes import NO_GROUPS, Groups, check_align, none_negative
from ...formats import integer
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import cdiv, padded_rows, round_up
from ...results import Quantized, Scaled
from ...typed_array import TypedArray
from .rows import MovedRows, read_rows, rowwise

_THREADS = 256
_KERNEL = Kernel("moe/pad", "move_groups", block=_THREADS)
_UNIT = 16                  # bytes that a thread loads at once
_UNITS = 8                  # most loads in flight per thread
#: fastest number of loads per thread, unless more fill rows better (docs/lab-notes)
_BEST_UNITS = 5
_INDEX_BYTES = 8            # bytes of a row's index, for the reference
_ROWS = 2048                # most rows per thread block


@overload
def pad_groups(x: Scaled | Quantized, splits: Any, *, align: int, out: Scaled | None = None,
               check: bool = False) -> Scaled: ...
@overload
def pad_groups(x: Array, splits: Any, *, align: int, out: Array | None = None,
               check: bool = False) -> TypedArray: ...
def pad_groups(x: Array | Scaled | Quantized, splits: Any, *, align: int, out: Array | Scaled | None = None,
               check: bool = False) -> TypedArray | Scaled:
    """Append rows of zeros to each group, so that every group has a multiple of `align` rows.

        group g goes from row sum(splits[:g]) to row sum(round_up(splits[:g], align))

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included: M rows of any shape. Or a row-wise
        `Scaled` of M rows (or the `Quantized` that has it): with scales of blocks 1×n, which move with the
        rows, or with one scale for all. Scales that are not compact are made so by a launch of
        `convert_scales` before, into new memory
    splits : rows of each of E consecutive groups: an int32 or int64 array [E] of x's kind, or a list (for a
        CuPy x it is copied to the GPU, which cannot be captured into a CUDA graph). Any may be 0
    align : rows, a power of two from 1 to 65536: 16, 32 and 128 are what block scales and matrix products of
        groups want
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    Array of x's dtype, of M + (align - 1) * min(E, M) rows rounded down to a multiple of `align`: a bound
    that does not depend on the sizes. A `Scaled` becomes a `Scaled` of the same number of rows, with compact
    scales. The same launch writes zeros as padding and after the last group, in data and scales.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, rows past the end of x are zeros, and rows
    of no group are skipped.

    Source: TransformerEngine (fused_multi_row_padding); docs/numerics.md section 7. One launch; bytes moved:
    x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], align=2).ravel().tolist()
    [1.0, 0.0, 2.0, 3.0, 0.0, 0.0]
    >>> q = fp8.quantize_mx(np.ones((3, 64), np.float32))
    >>> padded = fp8.pad_groups(q.rowwise, [1, 0, 2], align=2)
    >>> padded.shape, padded.scale_inv.view(np.uint8)[:, 0].tolist()
    ((6, 64), [119, 0, 119, 119, 0, 0])
    """
    return run(_PAD, (rowwise(x, "x"), splits, align, check), out)


@overload
def unpad_groups(y: Scaled | Quantized, splits: Any, *, align: int, rows: int | None = None,
                 out: Scaled | None = None, check: bool = False) -> Scaled: ...
@overload
def unpad_groups(y: Array, splits: Any, *, align: int, rows: int | None = None,
                 out: Array | None = None, check: bool = False) -> TypedArray: ...
def unpad_groups(y: Array | Scaled | Quantized, splits: Any, *, align: int, rows: int | None = None,
                 out: Array | Scaled | None = None, check: bool = False) -> TypedArray | Scaled:
    """Move the rows of each group together again: the inverse of `pad_groups`. Padding is not read.

        group g goes from row sum(round_up(splits[:g], align)) to row sum(splits[:g])

    y : array [Y, …], `Scaled` or `Quantized`, as `pad_groups` takes it: dtypes and scales as there
    splits, align : those of `pad_groups`: rows of each group without the padding, and what they were padded
        to
    rows : of the result, the caller's bound of sum(splits) (which only the device knows). None: those of
        `out`, else all Y
    out, check : as for `pad_groups`
    Returns an array [rows, …] of y's dtype, or a `Scaled` of `rows` rows with compact scales; rows after the
    last group are zeros. Errors and source as for `pad_groups`. Sizes are wrong if the padded groups need
    more rows than y has, or the groups more than `rows`: rows past the end of y are zeros, and rows past the
    end of the result are skipped.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> y = fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], align=2)
    >>> fp8.unpad_groups(y, [1, 0, 2], align=2, rows=3).ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    if rows is None and out is not None:
        rows = _rows_of(out)
    return run(_UNPAD, (rowwise(y, "y"), splits, align, rows, check), out)


@overload
def sort_chunks(x: Scaled | Quantized, splits: Any, order: Any, *,
                out: Scaled | None = None, check: bool = False) -> Scaled: ...
@overload
def sort_chunks(x: Array, splits: Any, order: Any, *,
                out: Array | None = None, check: bool = False) -> TypedArray: ...
def sort_chunks(x: Array | Scaled | Quantized, splits: Any, order: Any, *, out: Array | Scaled | None = None,
                check: bool = False) -> TypedArray | Scaled:
    """Put chunks of consecutive rows into another order.

        result = concatenate([chunk[order[0]], chunk[order[1]], …])

    where the chunks are x, split into splits[0], splits[1], … rows.

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included, or a `Scaled` or `Quantized`
        of M rows as for `pad_groups`
    splits : rows of each of E consecutive chunks: an int32 or int64 array [E] of x's kind, or a list
    order : a permutation of 0 … E - 1, the chunks as they are wanted: an int32 or int64 array [E] of x's
        kind, or a list. The inverse is ``sort_chunks(result, splits[order], argsort(order))``
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes or order there are wrong. (NumPy arrays and
        lists are always examined)

    Returns an array of x's shape and dtype, or a `Scaled` like x with compact scales.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes and order on the device raise
    nothing, but `device_errors` reports them: a negative size counts as 0, an index without a chunk means an
    empty chunk, and rows past the end of x and rows that no chunk fills are zeros.

    Source: TransformerEngine (sort_chunks_by_index); docs/numerics.md section 7. One launch; bytes moved: x
    and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.sort_chunks(np.array([1, 2, 3, 4]), [1, 2, 1], [2, 0, 1]).tolist()
    [4, 1, 2, 3]
    """
    return run(_SORT, (rowwise(x, "x"), splits, order, check), out)


# ---- arguments and results ----
class _MoveInputs(NamedTuple):
    rows: MovedRows
    groups: Groups
    number: int                     # rows of the result
    align: int = 1                  # multiple of sizes in the source (unpad) or the result (pad)
    order: Groups = NO_GROUPS


class _MoveGroupsOp(Op[_MoveInputs]):
    """The results and launches of the three ops. exact: the groups have all rows of the source."""

    padded_source, exact = False, True

    def result(self, inputs: _MoveInputs) -> Description:
        return inputs.rows.moved(inputs.number)

    def launches(self, call: Call, inputs: _MoveInputs, *written: int) -> Iterator[Launch]:
        rows, groups, number, align, order = inputs
        data, blocks = _row_array(rows.data, number, written[0])
        scales, scale_blocks, one = _NOTHING, 0, {}
        if rows.scales is not None:
            scales, scale_blocks = _row_array(rows.scales, number, written[1])
        elif rows.one_scale is not None:
            one = {"scale": rows.one_scale.at, "scale_to": written[1]}
        x = rows.data.array
        align_from, align_to = (align, 1) if self.padded_source else (1, align)
        yield _KERNEL.variant().bind(
            x, grid_size(blocks + scale_blocks, x.shape), data=data, scales=scales, **one,
            splits=groups.members(call.error_word()), order=order.at, order_wide=order.wide,
            from_rows=rows.number, rows=number, align_from=align_from, align_to=align_to,
            exact=int(self.exact), data_blocks=blocks)


class _PadOp(_MoveGroupsOp):
    def arguments(self, call: Call, x: Any, splits: Any, align: Any, check: Any) -> _MoveInputs:
        rows, align = read_rows(call, "x", x), _align(call, align)
        groups = call.splits("splits", splits, check)
        if groups.host is not None:
            _check_sizes(groups.host, rows.number, "x")
        return _MoveInputs(rows, groups, padded_rows(rows.number, len(groups.array), align), align)

    def reference(self, inputs: _MoveInputs) -> Any:
        return reference.pad_groups(inputs.rows.given, inputs.groups.host, align=inputs.align)


class _UnpadOp(_MoveGroupsOp):
    padded_source, exact = True, False

    def arguments(self, call: Call, y: Any, splits: Any, align: Any, number: Any, check: Any) -> _MoveInputs:
        rows, align = read_rows(call, "y", y), _align(call, align)
        if number is None:
            number = rows.number
        call.repeatable &= type(number) is int      # a mutable object may be another number later
        number = integer(number, "rows")
        if not 0 <= number < 2**63:
            wanted = f"0 or more, got {shown(number)}" if number < 0 else "less than 2**63"
            raise ValueError(f"rows: expected {wanted}")
        row_bytes = rows.data.dtype.itemsize * prod(rows.data.shape[1:])
        if number * max(row_bytes, _INDEX_BYTES) >= 2**63:
            raise ValueError(f"rows: expected a result of less than 2**63 bytes, got {number} rows of "
                             f"{row_bytes} bytes")
        groups = call.splits("splits", splits, check)
        if groups.host is not None:
            _check_padded_sizes(groups.host, align, rows.number, number)
        return _MoveInputs(rows, groups, number, align)

    def reference(self, inputs: _MoveInputs) -> Any:
        return reference.unpad_groups(inputs.rows.given, inputs.groups.host, align=inputs.align,
                                      rows=inputs.number)


class _SortOp(_MoveGroupsOp):
    def arguments(self, call: Call, x: Any, splits: Any, order: Any, check: Any) -> _MoveInputs:
        rows = read_rows(call, "x", x)
        groups, wanted = call.splits("splits", splits, check), call.splits("order", order, check)
        if wanted.number != groups.number:
            raise ValueError(f"order: expected {groups.number} indices, one for each of splits, got "
                             f"{wanted.number}")
        if groups.host is not None:
            _check_sizes(groups.host, rows.number, "x")
        if wanted.host is not None:
            _check_order(wanted.host)
        return _MoveInputs(rows, groups, rows.number, order=wanted)

    def reference(self, inputs: _MoveInputs) -> Any:
        return reference.sort_chunks(inputs.rows.given, inputs.groups.host, inputs.order.host)


_PAD, _UNPAD, _SORT = _PadOp(), _UnpadOp(), _SortOp()


# ---- validation ----
def _align(call: Call, align: Any) -> int:
    call.repeatable &= type(align) is int           # a mutable object may be another number later
    return check_align(align)


def _rows_of(out: Any) -> int:
    shape = getattr(out, "shape", None)
    if not isinstance(shape, tuple) or not shape:
        raise TypeError(f"out: expected an array of rows (an earlier result), got {type(out).__name__}")
    return int(shape[0])


def _check_sizes(sizes: np.ndarray, total: int, name: str) -> None:
    """Raise ValueError unless sizes on the host are 0 or more and add up to all rows."""
    given = none_negative(sizes)
    if sum(given) != total:
        raise ValueError(f"splits: expected sizes that add up to the {total} rows of {name}, got "
                         f"{sum(given)}")


def _check_padded_sizes(sizes: np.ndarray, align: int, total: int, rows: int) -> None:
    """Raise ValueError unless the padded groups fit into `total` rows, and the groups without padding into
    `rows` rows."""
    given = none_negative(sizes)
    padded = sum(round_up(size, align) for size in given)
    if padded > total:
        raise ValueError(f"splits: expected sizes that, each rounded up to {align}, add up to at most the "
                         f"{total} rows of y, got {padded}")
    if sum(given) > rows:
        raise ValueError(f"splits: expected sizes that add up to at most the {rows} rows of the result, got "
                         f"{sum(given)}; give rows= or an out= that holds them")


def _check_order(order: np.ndarray) -> None:
    given = order.tolist()
    if sorted(given) != list(range(len(given))):
        wrong = next(i for i, group in enumerate(given) if not 0 <= group < len(given) or group in given[:i])
        again = ", for a second time" if 0 <= given[wrong] < len(given) else ""
        raise ValueError(f"order: expected a permutation of 0 to {len(given) - 1}, got {given[wrong]} at "
                         f"{wrong}{again}")


# ---- launches ----
#: the struct RowArray without scales
_NOTHING = {"rows_per_block": 1, "across": 1, "step": 1}


def _row_array(rows: Input, number: int, to: int) -> tuple[dict[str, int], int]:
    """Return (the struct RowArray for `number` rows that are written, the thread blocks that write them)."""
    row_bytes = rows.dtype.itemsize * prod(rows.shape[1:])
    per_block, across, row_share = _shares(row_bytes)
    low_bits = rows.at | to | row_bytes
    step = 16 if low_bits % 16 == 0 else 4 if low_bits % 4 == 0 else 1
    members = {"from": rows.at, "to": to, "row_bytes": row_bytes, "rows_per_block": per_block,
               "across": across, "row_share": row_share, "step": step}
    # at least one thread block, so that an empty array's sizes are examined too
    return members, grid_size(cdiv(number, per_block) * across, (number, *rows.shape[1:]))


@functools.lru_cache(maxsize=1024)
def _shares(row_bytes: int) -> tuple[int, int, int]:
    """Return (rows per thread block, thread blocks that share a row, bytes of a row for each)."""
    at_once = _UNIT * _THREADS
    if row_bytes > at_once * _UNITS:
        across = cdiv(row_bytes, at_once * _BEST_UNITS)
        share = cdiv(row_bytes, across)
        whole = round_up(share, at_once)
        return 1, across, whole if cdiv(row_bytes, whole) == across else round_up(share, _UNIT)

    def filled(rows: int) -> tuple[float, int]:
        units = max(1, cdiv(rows * row_bytes, at_once))
        return rows * row_bytes / (units * at_once), -abs(units - _BEST_UNITS)

    most = min(_ROWS, at_once * _UNITS // max(1, row_bytes))
    fewest = min(most, max(1, at_once * _BEST_UNITS // max(1, row_bytes) // 2))
    return max(range(fewest, most + 1), key=filled), 1, row_bytes


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    yield _KERNEL.variant()
