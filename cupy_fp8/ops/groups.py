"""Groups of consecutive rows, padded, unpadded, and in another order. Kernel: kernels_cu/groups.cu."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import backend, reference
from ..arrays import Array, bits, empty_beside
from ..layouts import cdiv, padded_rows, round_up
from ..runtime import Kernel, Variant, error_word, executor_of
from . import checks
from .splits import NO_GROUPS, Groups, read, refuse_negative

_KERNEL = Kernel("groups", "move_groups", "2PPqPIP5q6I")
_THREADS = 256
_BYTES = 32 << 10           # that a block of threads writes
_ROWS = 256                 # of a block of threads, at most
_MOST_ALIGN = 1 << 16


def pad_groups(x: Array, splits: Any, align: int, *, out: Array | None = None, check: bool = False) -> Array:
    """The rows of each group followed by zeros, so that every group has a multiple of `align` rows.

        group g goes from row sum(splits[:g]) to row sum(round_up(splits[:g], align))

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included: M rows of any shape
    splits : rows of each of E consecutive groups: an int32 or int64 array [E] of x's kind, or a list (for a CuPy x it is copied to the
        GPU, which cannot be captured into a CUDA graph). Any may be 0
    align : rows, a power of two from 1 to 65536: 16, 32 and 128 are what block scales and matrix products of groups want
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    Array [M + (align - 1) * min(E, M), …] of x's dtype: a bound that does not depend on the sizes. Padding, and the rows after the last
    group, are zeros, written by the same launch.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, rows
    past the end of x are zeros, rows that no group covers are left out; `device_errors` tells.

    Source: TransformerEngine (fused_multi_row_padding); docs/numerics.md section 7. One launch; bytes moved: x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], 2).ravel().tolist()
    [1.0, 0.0, 2.0, 3.0, 0.0, 0.0]
    """
    align = _align(align)
    a, xp, at = _rows(x, "x")
    groups = read(splits, a, xp, check)
    if groups.host is not None:
        _check_sizes(groups.host, len(a), "x")
    shape = padded_rows(len(a), len(groups.array), align), *a.shape[1:]
    result = _result(a, shape, out)
    result_at = checks.destination(result, shape, a.dtype, a, xp, at)
    groups.check_separate(result_at, result.nbytes)
    if executor_of(xp) == "reference":
        return _store(result, reference.pad_groups(a, groups.host, align))
    _launch(a, at, result, result_at, groups, NO_GROUPS, 1, align)
    return result


def unpad_groups(y: Array, splits: Any, align: int, *, rows: int | None = None, out: Array | None = None, check: bool = False) -> Array:
    """The inverse of `pad_groups`: the rows of each group one after the other, without the padding, which is not read.

        group g goes from row sum(round_up(splits[:g], align)) to row sum(splits[:g])

    y : array [Y, …], as `pad_groups` gives it: dtypes as there
    splits, align : those of `pad_groups`: rows of each group without the padding, and what they were padded to
    rows : of the result, the caller's bound of sum(splits) (which only the device knows). None: those of `out`, else all Y
    out, check : as for `pad_groups`
    Returns an array [rows, …] of y's dtype; rows after the last group are zeros. Errors and source as for `pad_groups`; wrong sizes are
    those whose padded groups are more than y's rows, or that are more than `rows`: what is past either end is zeros or left out.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> y = fp8.pad_groups(np.array([[1], [2], [3]], np.float32), [1, 0, 2], 2)
    >>> fp8.unpad_groups(y, [1, 0, 2], 2, rows=3).ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    align = _align(align)
    a, xp, at = _rows(y, "y")
    if rows is None:
        rows = len(a) if out is None else _rows_of(out)
    elif (rows := _integer(rows, "rows")) < 0:
        raise ValueError(f"rows: expected 0 or more, got {rows}")
    groups = read(splits, a, xp, check)
    if groups.host is not None:
        _check_padded_sizes(groups.host, align, len(a), rows)
    shape = rows, *a.shape[1:]
    result = _result(a, shape, out)
    result_at = checks.destination(result, shape, a.dtype, a, xp, at)
    groups.check_separate(result_at, result.nbytes)
    if executor_of(xp) == "reference":
        return _store(result, reference.unpad_groups(a, groups.host, align, rows=rows))
    _launch(a, at, result, result_at, groups, NO_GROUPS, align, 1, exact=False)
    return result


def sort_chunks(x: Array, splits: Any, order: Any, *, out: Array | None = None, check: bool = False) -> Array:
    """Chunks of consecutive rows in another order.

        result = concatenate([chunk[order[0]], chunk[order[1]], …])        chunk: x split into splits[0], splits[1], … rows

    Parameters
    ----------
    x : array [M, …] of any dtype of 1, 2, 4 or 8 bytes, FP8 included
    splits : rows of each of E consecutive chunks: an int32 or int64 array [E] of x's kind, or a list
    order : a permutation of 0 … E - 1, the chunks as they are wanted: an int32 or int64 array [E] of x's kind, or a list. The inverse
        is ``sort_chunks(result, splits[order], argsort(order))``
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes or order there are wrong. (NumPy arrays and lists are always looked at)

    Returns an array of x's shape and dtype.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes and order on the device raise nothing: a negative size counts
    as 0, an index of no chunk is an empty chunk, rows past the end of x are zeros, so are those that no chunk fills; `device_errors` tells.

    Source: TransformerEngine (sort_chunks_by_index); docs/numerics.md section 7. One launch; bytes moved: x and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.sort_chunks(np.array([1, 2, 3, 4]), [1, 2, 1], [2, 0, 1]).tolist()
    [4, 1, 2, 3]
    """
    a, xp, at = _rows(x, "x")
    groups = read(splits, a, xp, check)
    places = read(order, a, xp, check, "order")
    if places.number != groups.number:
        raise ValueError(f"order: expected {groups.number} indices, one for each of splits, got {places.number}")
    if groups.host is not None:
        _check_sizes(groups.host, len(a), "x")
    if places.host is not None:
        _check_order(places.host)
    result = _result(a, a.shape, out)
    result_at = checks.destination(result, a.shape, a.dtype, a, xp, at)
    groups.check_separate(result_at, result.nbytes)
    checks.separate(result_at, result.nbytes, places.at, places.nbytes, "out", "order")
    if executor_of(xp) == "reference":
        return _store(result, reference.sort_chunks(a, groups.host, places.host))
    _launch(a, at, result, result_at, groups, places, 1, 1)
    return result


# ---- validation ----
def _rows(x: Any, name: str) -> tuple[Array, Any, int]:
    """(x ready for a kernel, its module, its address)."""
    if not isinstance(x, np.ndarray):
        backend.module_of(x, name)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name}: expected a dtype of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name}: expected rows, an array of one or more dimensions, got shape ()")
    return checks.source(x, (x.dtype,), name)


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def _align(align: Any) -> int:
    align = _integer(align, "align")
    if not 1 <= align <= _MOST_ALIGN or align & align - 1:
        raise ValueError(f"align: expected a power of two from 1 to {_MOST_ALIGN}, got {align}")
    return align


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


def _result(a: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    if out is not None:
        return out
    checks.may_allocate(a)
    return empty_beside(a, shape, a.dtype)


def _store(result: Array, by_reference: np.ndarray) -> Array:
    bits(result)[...] = bits(by_reference)
    return result


# ---- launches ----
class _Plan(NamedTuple):
    """What follows from the shapes: members of GroupsParams, and the number of blocks."""

    row_bytes: int
    rows_per_block: int
    across: int
    segment: int
    grid: int


@functools.lru_cache(maxsize=1024)
def _plan(shape: tuple[int, ...], itemsize: int) -> _Plan:
    """For a result of this shape. One block at least: even an empty array's sizes are looked at."""
    row_bytes = itemsize
    for extent in shape[1:]:
        row_bytes *= extent
    across = max(1, cdiv(row_bytes, _BYTES))
    segment = row_bytes if across == 1 else round_up(cdiv(row_bytes, across), 16)
    rows = max(1, min(_ROWS, _BYTES // max(1, row_bytes)))
    return _Plan(row_bytes, rows, across, segment, checks.grid_size(cdiv(shape[0], rows) * across, shape))


def _launch(a: Array, at: int, result: Array, result_at: int, groups: Groups, order: Groups, align_from: int, align_to: int,
            exact: bool = True) -> None:
    plan = _plan(result.shape, a.dtype.itemsize)
    low_bits = at | result_at | plan.row_bytes
    step = 16 if low_bits % 16 == 0 else 4 if low_bits % 4 == 0 else 1
    _variant().launch(a, plan.grid, at, result_at, groups.at, groups.number, error_word(a), groups.wide, order.at, len(a), len(result),
                      plan.row_bytes, align_from, align_to, order.wide, plan.rows_per_block, plan.across, plan.segment, step, int(exact))


@functools.cache
def _variant() -> Variant:
    return _KERNEL.variant(block=_THREADS)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield _variant()
