"""The layout of block scales: compact, or swizzled as block-scaled matrix products read them. Kernels: kernels_cu/scales/swizzle.cu."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, bits, empty_beside, is_contiguous
from ...calls import validate
from ...calls.splits import NO_GROUPS, Groups, read, refuse_negative
from ...formats import float8_e8m0fnu
from ...kernels import Kernel, Variant, error_word, executor_of, grid_size
from ...layouts import (
    SWIZZLE_COLUMNS,
    SWIZZLE_ELEMENTS,
    SWIZZLE_ROWS,
    cdiv,
    grouped_columns,
    grouped_rows,
    grouped_shape,
    round_up,
)
from ...results import swap_last

_SWIZZLE = Kernel("scales/swizzle", "swizzle_scales")
_UNSWIZZLE = Kernel("scales/swizzle", "unswizzle_scales")
_THREADS = 64
_TILES = 8                  # per block of threads, along a line


def swizzle_scales(s: Array, *, splits: Any = None, axis: int = 0, out: Array | None = None, check: bool = False) -> Array:
    """Compact E8M0 scales in the layout that block-scaled matrix products read: tiles of 128 lines x 4 blocks, padded with zeros.

        scale (i, j) is byte (i // 128 * ceil(C / 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4

    Parameters
    ----------
    s : float8_e8m0fnu [R, C] or [E, R, C]: R lines of C blocks. Row-wise scales are that; column-wise ones, stored [blocks, lines],
        are passed as ``s.T`` (``s.swapaxes(1, 2)``), which is read as it is, without a copy
    splits : sizes of G consecutive groups of an s [R, C]: each is swizzled by itself, one after the other. An int32 or int64 array [G]
        of s's kind, or a list (for a CuPy s it is copied to the GPU, which cannot be captured into a CUDA graph)
    axis : 0: groups of lines, sizes in lines. 1: groups along the blocks, sizes in elements, 32 to a block; a started block counts
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are always looked at)

    Returns
    -------
    float8_e8m0fnu […, R rounded up to 128, C rounded up to 4]. With splits its size is a bound that does not depend on the sizes, and
    what is past the last group is 0:
    axis 0: [(R + 127 * min(G, R)) // 128 * 128, C rounded up to 4]; a group begins at the row that is the sum of the sizes before it,
    each rounded up to 128.
    axis 1: flat, (R rounded up to 128) * ((C + 3 * min(G, C)) // 4 * 4) bytes; a group of c blocks takes (R rounded up to 128) *
    (c rounded up to 4) of them.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Sizes on the device raise nothing: a negative one counts as 0, groups
    that go past the end of s are cut short; `device_errors` tells. Scales that no group covers are left out.

    Source: cuBLAS's layout of 1-D block scaling factors; docs/layouts.md. Bytes moved: s and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> w = fp8.swizzle_scales(np.arange(40, dtype=np.uint8).reshape(40, 1).view(fp8.float8_e8m0fnu))
    >>> w.shape, w.view(np.uint8).reshape(32, 16)[1].tolist()                      # lines 1, 33, 65 and 97
    ((128, 4), [1, 0, 0, 0, 33, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    """
    xp, adjacent = _module(s), _lines_adjacent(s)
    dense, _, at = validate.source(s.swapaxes(-1, -2) if adjacent else s, (float8_e8m0fnu,), "s")
    groups = _groups(splits, axis, s.shape, s, xp, check)
    plan = _plan(s.shape, groups.number, axis, 0)
    result = _new(s, plan.swizzled) if out is None else out
    result_at = validate.destination(result, plan.swizzled, float8_e8m0fnu, dense, xp, at)
    groups.check_separate(result_at, result.nbytes)
    if executor_of(xp) == "reference":
        bits(result)[...] = bits(reference.swizzle_scales(s, splits=groups.host, axis=axis))
    else:
        _launch(_SWIZZLE, plan, dense, at, adjacent, result_at, "out", groups, axis)
    return result


def unswizzle_scales(s: Array, *, shape: tuple[int, ...], splits: Any = None, axis: int = 0, out: Array | None = None,
                     check: bool = False) -> Array:
    """The inverse of `swizzle_scales`: compact scales, without the padding.

    s : float8_e8m0fnu, of the shape that `swizzle_scales` gives
    shape : of the compact scales, (R, C) or (E, R, C)
    splits, axis, check : as for `swizzle_scales`. Scales that no group covers are 0
    out : float8_e8m0fnu array of this shape, written and returned: C-contiguous, or with its lines adjacent (``a.T`` of an a [C, R],
        which is how column-wise scales are stored)
    Returns float8_e8m0fnu of this shape. Errors and source as for `swizzle_scales`. Bytes moved: s and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> s = np.arange(40, dtype=np.uint8).reshape(20, 2).view(fp8.float8_e8m0fnu)
    >>> fp8.bytes_equal(fp8.unswizzle_scales(fp8.swizzle_scales(s), shape=(20, 2)), s)
    True
    """
    xp = _module(s)
    dense, _, at = validate.source(s, (float8_e8m0fnu,), "s")
    shape = _as_shape(shape)
    groups = _groups(splits, axis, shape, s, xp, check)
    plan = _plan(shape, groups.number, axis, 1)
    if s.shape != plan.swizzled:
        raise ValueError(f"s: expected shape {plan.swizzled} for compact scales of shape {shape}"
                         f"{'' if groups.number is None else f' in {groups.number} groups along axis {axis}'}, got {s.shape}")
    result = _new(s, shape) if out is None else out
    adjacent, result_at = _compact_destination(result, shape, dense, xp, at)
    groups.check_separate(result_at, result.nbytes)
    if executor_of(xp) == "reference":
        bits(result)[...] = bits(reference.unswizzle_scales(s, shape=shape, splits=groups.host, axis=axis))
    else:
        _launch(_UNSWIZZLE, plan, dense, result_at, adjacent, at, "s", groups, axis)
    return result


class _Plan(NamedTuple):
    """What follows from the shapes: of the swizzled array, and of the launch (the members of LayoutParams)."""

    swizzled: tuple[int, ...]
    lines: int
    blocks: int
    tiles: int
    down: int
    across: int
    grid: int               # 0: nothing to do


@functools.lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], groups: int | None, axis: int, spare: int) -> _Plan:
    """For compact scales of this shape. spare: 1 where the launch also has to reach what no group covers."""
    if len(shape) not in (2, 3):
        raise ValueError(f"compact scales: expected shape [R, C] or [E, R, C], got {shape}")
    *batch, lines, blocks = shape
    if min(shape) < 0:
        raise ValueError(f"shape: expected extents of zero or more, got {shape}")
    rows, columns = round_up(lines, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS)
    runs, reached = rows, columns
    if groups is not None and axis == 0:
        rows, runs = grouped_rows(lines, groups), grouped_rows(lines, groups + spare)
    if groups is not None and axis == 1:
        columns, reached = grouped_columns(blocks, groups), grouped_columns(blocks, groups + spare)
    across = cdiv(reached, SWIZZLE_COLUMNS * _TILES)
    grid = (batch[0] if batch else 1) * (runs // SWIZZLE_ROWS) * across
    return _Plan((*batch, rows, columns) if groups is None else grouped_shape(shape, groups, axis), lines, blocks,
                 columns // SWIZZLE_COLUMNS, rows // SWIZZLE_ROWS, max(across, 1), grid and grid_size(grid, shape))


def _groups(splits: Any, axis: int, shape: tuple[int, ...], x: Array, xp: Any, check: bool) -> Groups:
    """Validates splits and axis for compact scales of this shape; sizes that are on the host, or are to be checked, as well."""
    if splits is None:
        if not isinstance(axis, (int, np.integer)) or axis != 0:
            raise ValueError(f"axis: means something for groups only, which need splits=; got axis={axis!r} without")
        return NO_GROUPS
    if not isinstance(axis, (int, np.integer)) or axis not in (0, 1):
        raise ValueError(f"axis: expected 0 (groups of lines) or 1 (groups along the blocks), got {axis!r}")
    if len(shape) != 2:
        raise ValueError(f"splits: groups are of scales [R, C], got shape {shape}; give each matrix its own call")
    groups = read(splits, x, xp, check)
    if groups.host is not None:
        _check_sizes(groups.host, shape[axis], axis)
    return groups


def _as_shape(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, shape))
    except TypeError as error:
        raise TypeError(f"shape: expected integers, (R, C) or (E, R, C), got {shape!r} ({error})") from None


def _check_sizes(sizes: np.ndarray, total: int, axis: int) -> None:
    """ValueError unless sizes on the host are what they should be."""
    given = sizes.tolist()                                   # Python's integers: sums do not overflow
    refuse_negative(given)
    covered = sum(cdiv(size, SWIZZLE_ELEMENTS) for size in given) if axis == 1 else sum(given)
    if covered > total:
        what = "blocks of 32 elements" if axis == 1 else "lines"
        raise ValueError(f"splits: expected sizes that add up to at most the {total} {what} there are, got {covered}")


def _module(s: Array) -> Any:
    """The module of an array of scales; TypeError for any other dtype than theirs."""
    xp = np if isinstance(s, np.ndarray) else backend.module_of(s, "s")
    if s.dtype != float8_e8m0fnu:
        hint = "; bytes of scales are made one by .view(cupy_fp8.float8_e8m0fnu)" if s.dtype.itemsize == 1 else ""
        raise TypeError(f"s: expected dtype float8_e8m0fnu, got {s.dtype}{hint}")
    return xp


def _lines_adjacent(s: Array) -> bool:
    """Whether s is not C-contiguous, but is with its last two axes swapped."""
    if is_contiguous(s) or s.ndim < 2:
        return False
    shape, strides = s.shape, s.strides
    return bool(strides[-2:] == (1, shape[-2]) and (s.ndim == 2 or (s.ndim == 3 and strides[0] == shape[1] * shape[2])))


def _compact_destination(out: Array, shape: tuple[int, ...], x: Array, xp: Any, at: int) -> tuple[bool, int]:
    """(whether out's lines are adjacent, its address)."""
    if isinstance(out, xp.ndarray) and out.shape == shape and _lines_adjacent(out):
        return True, validate.destination(out.swapaxes(-1, -2), swap_last(shape), float8_e8m0fnu, x, xp, at)
    return False, validate.destination(out, shape, float8_e8m0fnu, x, xp, at)


def _new(x: Array, shape: tuple[int, ...]) -> Array:
    validate.may_allocate(x)
    return empty_beside(x, shape, float8_e8m0fnu)


def _launch(kernel: Kernel, plan: _Plan, x: Array, compact_at: int, adjacent: bool, swizzled_at: int, swizzled: str, groups: Groups,
            axis: int) -> None:
    if swizzled_at % 16:
        raise ValueError(f"{swizzled}: address {swizzled_at:#x} is not a multiple of 16, as that of swizzled scales has to be")
    grouped, errors_at = 0, 0
    if groups.number is not None:
        grouped, errors_at = 1 + int(axis), error_word(x)   # even an empty array's sizes are looked at
    elif not plan.grid:
        return
    words = kernel is _SWIZZLE and grouped != 2 and not adjacent and plan.blocks % 4 == 0 and compact_at % 4 == 0
    _variant(kernel, adjacent, grouped, words).launch(
        x, plan.grid or 1, compact_at, swizzled_at, groups.at, groups.number or 0, errors_at, groups.wide, plan.lines, plan.blocks,
        plan.lines if adjacent else plan.blocks, plan.tiles, plan.down, plan.across)


@functools.cache
def _variant(kernel: Kernel, adjacent: bool, grouped: int, words: bool) -> Variant:
    return kernel.variant(block=_THREADS, ADJACENT=int(adjacent), WORDS=int(words), GROUPED=grouped)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    for kernel, adjacent, grouped in product((_SWIZZLE, _UNSWIZZLE), (False, True), (0, 1, 2)):
        yield _variant(kernel, adjacent, grouped, False)
    for grouped in (0, 1):
        yield _variant(_SWIZZLE, False, grouped, True)
