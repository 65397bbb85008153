"""Groups of consecutive rows, padded, unpadded, and in another order, with the scales of quantised ones. Kernel: kernels_cu/moe/pad.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, bits, empty_beside
from ...calls import validate
from ...calls.splits import NO_GROUPS, Groups, check_align, integer, read, refuse_negative
from ...kernels import Kernel, Variant, error_word, executor_of, grid_size
from ...layouts import cdiv, padded_rows, round_up
from ...results import Scaled, check_block_scales

_KERNEL = Kernel("moe/pad", "move_groups")
_THREADS = 256
#: Bytes that a thread has in flight, and how many times that at most; a block writes as much at once. About five times is fastest, and more
#: where rows fill it better (docs/performance.md).
_UNIT, _UNITS, _BEST_UNITS = 16, 8, 5
_ROWS = 2048                # of a block of threads, at most


def pad_groups(x: Array | Scaled, splits: Any, align: int, *, out: Array | Scaled | None = None, check: bool = False) -> Any:
    """The rows of each group followed by zeros, so that every group has a multiple of `align` rows.

        group g goes from row sum(splits[:g]) to row sum(round_up(splits[:g], align))

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included: M rows of any shape. Or a `Scaled` of M rows: row-wise data with
        compact scales of blocks 1×n, whose rows move with those of the data, or with one scale for all
    splits : rows of each of E consecutive groups: an int32 or int64 array [E] of x's kind, or a list (for a CuPy x it is copied to the
        GPU, which cannot be captured into a CUDA graph). Any may be 0
    align : rows, a power of two from 1 to 65536: 16, 32 and 128 are what block scales and matrix products of groups want
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    Array [M + (align - 1) * min(E, M), …] of x's dtype: a bound that does not depend on the sizes. Of a `Scaled` one of so many rows.
    Padding, and the rows after the last group, are zeros, their scales too, written by the same launch.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, rows
    past the end of x are zeros, rows that no group covers are left out; `device_errors` tells.

    Source: TransformerEngine (fused_multi_row_padding); docs/numerics.md section 7. One launch; bytes moved: x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], 2).ravel().tolist()
    [1.0, 0.0, 2.0, 3.0, 0.0, 0.0]
    >>> q = fp8.quantize_mx(np.ones((3, 64), np.float32))
    >>> padded = fp8.pad_groups(q.rowwise, [1, 0, 2], 2)
    >>> padded.shape, padded.scale_inv.view(np.uint8)[:, 0].tolist()
    ((6, 64), [119, 0, 119, 119, 0, 0])
    """
    align = check_align(align)
    rows, xp = _rows(x, "x")
    groups = read(splits, rows.array, xp, check)
    if groups.host is not None:
        _check_sizes(groups.host, rows.number, "x")
    result = _result(rows, xp, padded_rows(rows.number, len(groups.array), align), groups, NO_GROUPS, out)
    if executor_of(xp) == "reference":
        return result.store(reference.pad_groups(rows.given, groups.host, align))
    return _launch(rows, result, groups, NO_GROUPS, 1, align)


def unpad_groups(y: Array | Scaled, splits: Any, align: int, *, rows: int | None = None, out: Array | Scaled | None = None,
                 check: bool = False) -> Any:
    """The inverse of `pad_groups`: the rows of each group one after the other, without the padding, which is not read.

        group g goes from row sum(round_up(splits[:g], align)) to row sum(splits[:g])

    y : array [Y, …] or `Scaled`, as `pad_groups` gives it: dtypes and scales as there
    splits, align : those of `pad_groups`: rows of each group without the padding, and what they were padded to
    rows : of the result, the caller's bound of sum(splits) (which only the device knows). None: those of `out`, else all Y
    out, check : as for `pad_groups`
    Returns an array [rows, …] of y's dtype, or a `Scaled` of so many rows; rows after the last group are zeros. Errors and source as for
    `pad_groups`; wrong sizes are those whose padded groups are more than y's rows, or that are more than `rows`: what is past either end
    is zeros or left out.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> y = fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], 2)
    >>> fp8.unpad_groups(y, [1, 0, 2], 2, rows=3).ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    align = check_align(align)
    source, xp = _rows(y, "y")
    if rows is None:
        rows = source.number if out is None else _rows_of(out)
    elif not 0 <= (rows := integer(rows, "rows")) < 2**63:
        raise ValueError(f"rows: expected 0 or more, got {rows}" if rows < 0 else "rows: expected less than 2**63")
    groups = read(splits, source.array, xp, check)
    if groups.host is not None:
        _check_padded_sizes(groups.host, align, source.number, rows)
    result = _result(source, xp, rows, groups, NO_GROUPS, out)
    if executor_of(xp) == "reference":
        return result.store(reference.unpad_groups(source.given, groups.host, align, rows=rows))
    return _launch(source, result, groups, NO_GROUPS, align, 1, exact=False)


def sort_chunks(x: Array | Scaled, splits: Any, order: Any, *, out: Array | Scaled | None = None, check: bool = False) -> Any:
    """Chunks of consecutive rows in another order.

        result = concatenate([chunk[order[0]], chunk[order[1]], …])        chunk: x split into splits[0], splits[1], … rows

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included, or a `Scaled` of M rows as for `pad_groups`
    splits : rows of each of E consecutive chunks: an int32 or int64 array [E] of x's kind, or a list
    order : a permutation of 0 … E - 1, the chunks as they are wanted: an int32 or int64 array [E] of x's kind, or a list. The inverse
        is ``sort_chunks(result, splits[order], argsort(order))``
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes or order there are wrong. (NumPy arrays and lists are always looked at)

    Returns an array of x's shape and dtype, or a `Scaled` like x.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes and order on the device raise nothing: a negative size counts
    as 0, an index of no chunk is an empty chunk, rows past the end of x are zeros, so are those that no chunk fills; `device_errors` tells.

    Source: TransformerEngine (sort_chunks_by_index); docs/numerics.md section 7. One launch; bytes moved: x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.sort_chunks(np.array([1, 2, 3, 4]), [1, 2, 1], [2, 0, 1]).tolist()
    [4, 1, 2, 3]
    """
    rows, xp = _rows(x, "x")
    groups = read(splits, rows.array, xp, check)
    places = read(order, rows.array, xp, check, "order")
    if places.number != groups.number:
        raise ValueError(f"order: expected {groups.number} indices, one for each of splits, got {places.number}")
    if groups.host is not None:
        _check_sizes(groups.host, rows.number, "x")
    if places.host is not None:
        _check_order(places.host)
    result = _result(rows, xp, rows.number, groups, places, out)
    if executor_of(xp) == "reference":
        return result.store(reference.sort_chunks(rows.given, groups.host, places.host))
    return _launch(rows, result, groups, places, 1, 1)


# ---- validation ----
class _Rows(NamedTuple):
    """What moves: rows of an array, or of a Scaled's data and scales."""

    given: Any                      # the array, or a Scaled of these arrays
    array: Array                    # ready for a kernel, as are the scales
    at: int
    scales: Array | None = None     # a row for each of the array's
    scale: Array | None = None      # one for all rows
    scales_at: int = 0              # of either

    @property
    def number(self) -> int:
        return len(self.array)


def _rows(x: Any, name: str) -> tuple[_Rows, Any]:
    """(what moves, its module)."""
    if isinstance(x, Scaled):
        return _scaled_rows(x, name)
    if not isinstance(x, np.ndarray):
        backend.module_of(x, name)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name}: expected rows, an array of one or more dimensions, got shape ()")
    a, xp, at = validate.source(x, (x.dtype,), name)
    return _Rows(a, a, at), xp


def _scaled_rows(q: Scaled, name: str) -> tuple[_Rows, Any]:
    if q.transposed:
        raise ValueError(f"{name}: expected data stored as they are, whose rows can move, got {q!r}")
    if q.block is not None and q.block[0] != 1:
        raise ValueError(f"{name}: expected row-wise data: one scale for the tensor, or for blocks 1×n of its rows; got {q!r}")
    if q.block is not None and q.scale_layout != "compact":
        raise ValueError(f"{name}: expected compact scales, a row for each row of the data, got {q.scale_layout} ones: use "
                         f"{name}.to_layout('compact')")
    data, xp, at = validate.source(q.data, (q.dtype,), f"{name}.data")
    if data.ndim == 0 or data.shape != q.shape:
        raise ValueError(f"{name}.data: expected rows of the logical shape {q.shape}, got {data.shape}")
    scales = q.scale_inv
    if q.block is None:
        scales_at = validate.one_f32(scales, data, xp, f"{name}.scale_inv")
        return _Rows(Scaled._of(data, scales, q.shape), data, at, None, scales, scales_at), xp
    if not isinstance(scales, xp.ndarray):
        backend.require_module(scales, xp, f"{name}.scale_inv")
    check_block_scales(q, name)
    if xp is not np:
        validate.same_device(scales, data, f"{name}.scale_inv")
    scales, _, scales_at = validate.source(scales, (scales.dtype,), f"{name}.scale_inv")
    return _Rows(Scaled._of(data, scales, q.shape, False, q.block, q.scale_layout), data, at, scales, None, scales_at), xp


def _rows_of(out: Any) -> int:
    if not getattr(out, "shape", ()):
        raise TypeError(f"out: expected an array of rows (an earlier result), got {type(out).__name__}")
    return int(out.shape[0])


def _check_sizes(sizes: np.ndarray, total: int, name: str) -> None:
    """ValueError unless sizes on the host are those of groups that make up all rows."""
    given = sizes.tolist()                                   # Python's integers: sums do not overflow
    refuse_negative(given)
    if sum(given) != total:
        raise ValueError(f"splits: expected sizes that add up to the {total} rows of {name}, got {sum(given)}")


def _check_padded_sizes(sizes: np.ndarray, align: int, total: int, rows: int) -> None:
    given = sizes.tolist()
    refuse_negative(given)
    padded = sum(round_up(size, align) for size in given)
    if padded > total:
        raise ValueError(f"splits: expected sizes that, each rounded up to {align}, add up to at most the {total} rows of y, got {padded}")
    if sum(given) > rows:
        raise ValueError(f"splits: expected sizes that add up to at most the {rows} rows of the result, got {sum(given)}; "
                         "give rows= or an out= that holds them")


def _check_order(order: np.ndarray) -> None:
    given = order.tolist()
    if sorted(given) != list(range(len(given))):
        wrong = next(i for i, group in enumerate(given) if not 0 <= group < len(given) or group in given[:i])
        raise ValueError(f"order: expected a permutation of 0 to {len(given) - 1}, got {given[wrong]} at {wrong}"
                         f"{', for a second time' if 0 <= given[wrong] < len(given) else ''}")


class _Result(NamedTuple):
    """Where they go."""

    given: Any                      # the array, or a Scaled of these
    array: Array
    at: int
    scale_inv: Array | None = None
    scale_inv_at: int = 0

    def store(self, by_reference: Any) -> Any:
        fresh = by_reference if isinstance(by_reference, Scaled) else (by_reference,)
        for mine, theirs in zip((self.array, self.scale_inv), fresh, strict=False):
            bits(mine)[...] = bits(theirs)
        return self.given


def _result(rows: _Rows, xp: Any, number: int, groups: Groups, order: Groups, out: Any) -> _Result:
    """For so many rows: allocated, or `out` once it has been found to fit."""
    shape = number, *rows.array.shape[1:]
    if isinstance(rows.given, Scaled):
        return _scaled_result(rows, rows.given, xp, shape, groups, order, out)
    if out is None:
        validate.may_allocate(rows.array)
        out = empty_beside(rows.array, shape, rows.array.dtype)
    at = validate.destination(out, shape, rows.array.dtype, rows.array, xp, rows.at)
    groups.check_separate(at, out.nbytes)
    validate.separate(at, out.nbytes, order.at, order.nbytes, "out", "order")
    return _Result(out, out, at)


def _scaled_result(rows: _Rows, q: Scaled, xp: Any, shape: tuple[int, ...], groups: Groups, order: Groups, out: Any) -> _Result:
    a = rows.array
    scale_shape = q.scale_inv.shape if rows.scales is None else (shape[0], *rows.scales.shape[1:])
    if out is None:
        validate.may_allocate(a)
        scale_inv = empty_beside(a, scale_shape, q.scale_inv.dtype)
        out = Scaled._of(empty_beside(a, shape, a.dtype), scale_inv, shape, False, q.block, q.scale_layout)
    elif not isinstance(out, Scaled):
        raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
    elif (out.shape, out.transposed, out.block, out.scale_layout) != (shape, False, q.block, q.scale_layout):
        raise ValueError(f"out: expected rows of shape {shape} quantised as {q!r} is, got {out!r}")
    data_at = validate.destination(out.data, shape, a.dtype, a, xp, rows.at, "out.data")
    scale_at = validate.destination(out.scale_inv, scale_shape, q.scale_inv.dtype, a, xp, rows.at, "out.scale_inv")
    read = ((rows.scales_at, q.scale_inv.nbytes, "scale_inv of the input"), (groups.at, groups.nbytes, "splits"),
            (order.at, order.nbytes, "order"))
    for at, nbytes, name in ((data_at, out.data.nbytes, "out.data"), (scale_at, out.scale_inv.nbytes, "out.scale_inv")):
        for other_at, other_nbytes, other in read:
            validate.separate(at, nbytes, other_at, other_nbytes, name, other)
    validate.separate(data_at, out.data.nbytes, scale_at, out.scale_inv.nbytes, "out.data", "out.scale_inv")
    return _Result(out, out.data, data_at, out.scale_inv, scale_at)


# ---- launches ----
class _Plan(NamedTuple):
    """What follows from the shapes: members of a RowArray, and the number of blocks."""

    row_bytes: int
    rows_per_block: int
    across: int
    segment: int
    grid: int


@functools.lru_cache(maxsize=1024)
def _plan(shape: tuple[int, ...], itemsize: int) -> _Plan:
    """For a result of this shape. One block at least: even an empty array's sizes are looked at."""
    row_bytes = itemsize * prod(shape[1:])
    rows, across, segment = _shares(row_bytes)
    return _Plan(row_bytes, rows, across, segment, grid_size(cdiv(shape[0], rows) * across, shape))


@functools.lru_cache(maxsize=1024)
def _shares(row_bytes: int) -> tuple[int, int, int]:
    """(rows of a block of threads, blocks that share a row, bytes of a row that each takes)."""
    at_once = _UNIT * _THREADS
    if row_bytes > at_once * _UNITS:
        across = cdiv(row_bytes, at_once * _BEST_UNITS)
        whole = round_up(cdiv(row_bytes, across), at_once)
        return 1, across, whole if cdiv(row_bytes, whole) == across else round_up(cdiv(row_bytes, across), _UNIT)

    def filled(rows: int) -> tuple[float, int]:
        units = max(1, cdiv(rows * row_bytes, at_once))
        return rows * row_bytes / (units * at_once), -abs(units - _BEST_UNITS)

    most = min(_ROWS, at_once * _UNITS // max(1, row_bytes))
    fewest = min(most, max(1, at_once * _BEST_UNITS // max(1, row_bytes) // 2))
    return max(range(fewest, most + 1), key=filled), 1, row_bytes


_NOTHING: tuple[int, ...] = (0, 0, 0, 1, 1, 0, 1)


def _row_array(at: int, result: Array, result_at: int) -> tuple[tuple[int, ...], int]:
    """(members of a RowArray, blocks)."""
    *plan, grid = _plan(result.shape, result.dtype.itemsize)
    low_bits = at | result_at | plan[0]
    return (at, result_at, *plan, 16 if low_bits % 16 == 0 else 4 if low_bits % 4 == 0 else 1), grid


def _launch(rows: _Rows, result: _Result, groups: Groups, order: Groups, align_from: int, align_to: int, exact: bool = True) -> Any:
    a = rows.array
    data, data_blocks = _row_array(rows.at, result.array, result.at)
    scales, scale_blocks, scale = _NOTHING, 0, (0, 0)
    if rows.scales is not None:
        scales, scale_blocks = _row_array(rows.scales_at, result.scale_inv, result.scale_inv_at)
    elif rows.scale is not None:
        scale = rows.scales_at, result.scale_inv_at
    _variant().launch(a, grid_size(data_blocks + scale_blocks, a.shape), *data, *scales, groups.at, groups.number, error_word(a),
                      groups.wide, order.at, len(a), len(result.array), align_from, align_to, *scale, order.wide, int(exact), data_blocks)
    return result.given


@functools.cache
def _variant() -> Variant:
    return _KERNEL.variant(block=_THREADS)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield _variant()
