"""Layout of block scales: compact, or swizzled as block-scaled matrix products read them. Kernels:
kernels_cu/scales/swizzle.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...advice import shown
from ...arrays import Array, _as_shape, address, is_contiguous
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written
from ...calls.group_sizes import NO_GROUPS, Groups, none_negative
from ...formats import flag, float8_e8m0fnu
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import (
    SWIZZLE_COLUMNS,
    SWIZZLE_ELEMENTS,
    SWIZZLE_ROWS,
    cdiv,
    grouped_columns,
    grouped_rows,
    grouped_shape,
    round_up,
    swap_last,
)
from ...typed_array import TypedArray

_SWIZZLE = Kernel("scales/swizzle", "swizzle_scales", block=64)
_UNSWIZZLE = Kernel("scales/swizzle", "unswizzle_scales", block=64)
_TILES = 8                  # tiles along a line per thread block
_ALIGNMENT = 16             # bytes of swizzled scales moved at a time
#: values of the define GROUPED
_NOT_GROUPED, _GROUPS_OF_LINES, _GROUPS_OF_BLOCKS = 0, 1, 2


def swizzle_scales(s: Array, *, splits: Any = None, axis: int = 0, out: Array | None = None,
                   check: bool = False) -> TypedArray:
    """Store compact E8M0 scales in the layout that block-scaled matrix products read: tiles of 128 lines x 4
    blocks, padded with zeros.

        scale (i, j) is byte (i // 128 * ceil(C / 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4

    Parameters
    ----------
    s : float8_e8m0fnu [R, C] or [E, R, C]: R lines of C blocks. Row-wise scales are that; column-wise ones,
        stored [blocks, lines], are passed as ``s.T`` (``s.swapaxes(1, 2)``), which is read as it is, without
        a copy
    splits : sizes of G consecutive groups of an s [R, C]: each is swizzled by itself, one after the other. An
        int32 or int64 array [G] of s's kind, or a list (for a CuPy s it is copied to the GPU, which cannot be
        captured into a CUDA graph)
    axis : 0: groups of lines, sizes in lines. 1: groups along the blocks, sizes in elements, 32 to a block; a
        started block counts
    out : result of an earlier call, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if sizes there are wrong. (NumPy arrays and lists are
        always examined)

    Returns
    -------
    float8_e8m0fnu […, R rounded up to 128, C rounded up to 4]. With splits its size is a bound that does not
    depend on the sizes, and everything past the last group is 0.

    axis=0 : [(R + 127 * min(G, R)) // 128 * 128, C rounded up to 4]; a group begins at the row that is the
        sum of the sizes before it, each rounded up to 128
    axis=1 : flat, (R rounded up to 128) * ((C + 3 * min(G, C)) // 4 * 4) bytes; a group of c blocks takes (R
        rounded up to 128) * (c rounded up to 4) of them

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. Wrong sizes on the device raise nothing,
    but `device_errors` reports them: a negative size counts as 0, and a group that passes the end of s ends
    there. Scales of no group are skipped.

    Source: cuBLAS's layout of 1-D block scaling factors; docs/layouts.md. Bytes moved: s and the result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> w = fp8.swizzle_scales(np.arange(40, dtype=np.uint8).reshape(40, 1).view(fp8.float8_e8m0fnu))
    >>> w.shape, w.view(np.uint8).reshape(32, 16)[1].tolist()                      # lines 1, 33, 65 and 97
    ((128, 4), [1, 0, 0, 0, 33, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    """
    return run(_SWIZZLE_OP, (s, splits, axis, check), out)


def unswizzle_scales(s: Array, *, shape: tuple[int, ...], splits: Any = None, axis: int = 0,
                     out: Array | None = None, check: bool = False) -> TypedArray:
    """The inverse of `swizzle_scales`: compact scales, without the padding.

    s : float8_e8m0fnu, of the shape that `swizzle_scales` gives
    shape : of the compact scales, (R, C) or (E, R, C)
    splits, axis, check : as for `swizzle_scales`. Scales that no group covers are 0. The splits have to be
        those that s was made with: an array holds no sizes, so with others the scales are those of other
        places, without an error
    out : float8_e8m0fnu array of this shape, written and returned: C-contiguous, or with its lines adjacent
        (``a.T`` of an a [C, R], which is how column-wise scales are stored)
    Returns float8_e8m0fnu of this shape. Errors and source as for `swizzle_scales`. Bytes moved: s and the
    result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> s = np.arange(40, dtype=np.uint8).reshape(20, 2).view(fp8.float8_e8m0fnu)
    >>> fp8.bytes_equal(fp8.unswizzle_scales(fp8.swizzle_scales(s), shape=(20, 2)), s)
    True
    """
    return run(_UNSWIZZLE_OP, (s, _compact_shape(shape), splits, axis, check), out)


# ---- the calls ----
class _Inputs(NamedTuple):
    given: Array            # s as given
    s: Input                # the same memory, C-contiguous
    adjacent: bool          # the last two axes are swapped for that
    groups: Groups
    axis: int
    extents: _Extents


class _SwizzleScales(Op[_Inputs]):
    def arguments(self, call: Call, s: Any, splits: Any, axis: Any, check: Any) -> _Inputs:
        _check_dtype(s)
        if s.ndim not in (2, 3):
            raise ValueError(f"s: expected shape [R, C] or [E, R, C], got {s.shape}")
        adjacent = lines_adjacent(s)
        scales = call.read("s", s.swapaxes(-1, -2) if adjacent else s, (float8_e8m0fnu,))
        groups = _groups(call, splits, axis, s.shape, check)
        return _Inputs(s, scales, adjacent, groups, axis, _extents(s.shape, groups.number, axis, 0))

    def result(self, inputs: _Inputs) -> Description:
        return Description(Written("out", inputs.extents.swizzled, float8_e8m0fnu))

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.swizzle_scales(inputs.given, splits=inputs.groups.host, axis=inputs.axis)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        check_aligned("out", written[0])
        yield from _launches(call, _SWIZZLE, inputs, inputs.s.at, written[0], inputs.adjacent)


class _UnswizzleScales(Op[_Inputs]):
    def arguments(self, call: Call, s: Any, shape: Any, splits: Any, axis: Any, check: Any) -> _Inputs:
        _check_dtype(s)
        scales = call.read("s", s, (float8_e8m0fnu,))
        if call.xp is np and scales.at % _ALIGNMENT:                # only arrays on a GPU have to be aligned
            copy = scales.array.copy()
            scales, call.repeatable = Input(copy, address(copy)), False
        groups = _groups(call, splits, axis, shape, check)
        of = "" if groups.number is None else f" in {groups.number} groups along axis {axis}"
        validate.check_shape("s", s.shape, _swizzled_shape(shape, groups.number, axis),
                             f"swizzled scales of shape {shape}{of}")
        return _Inputs(s, scales, False, groups, axis, _extents(shape, groups.number, axis, 1))

    def result(self, inputs: _Inputs) -> Description:
        return _CompactResult(inputs.extents.shape)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.unswizzle_scales(inputs.s.array, shape=inputs.extents.shape,
                                          splits=inputs.groups.host, axis=inputs.axis)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        check_aligned("s", inputs.s.at)
        adjacent = isinstance(call.result, _CompactResult) and call.result.adjacent
        yield from _launches(call, _UNSWIZZLE, inputs, written[0], inputs.s.at, adjacent)


class _CompactResult(Description):
    """Description of compact scales. If `out` has adjacent lines instead of adjacent blocks, it is written as
    the C-contiguous array with its last two axes swapped."""

    def __init__(self, shape: tuple[int, ...], adjacent: bool = False) -> None:
        super().__init__(Written("out", swap_last(shape) if adjacent else shape, float8_e8m0fnu))
        self.shape, self.adjacent = shape, adjacent

    def for_out(self, out: Any) -> Description:
        backend.module_of(out, "out")
        return _CompactResult(self.shape, True) if out.shape == self.shape and lines_adjacent(out) else self

    def arrays_of(self, out: Any) -> tuple[Array]:
        return (out.swapaxes(-1, -2) if self.adjacent else out,)


_SWIZZLE_OP, _UNSWIZZLE_OP = _SwizzleScales(), _UnswizzleScales()


def _check_dtype(s: Any) -> None:
    backend.module_of(s, "s")
    if s.dtype != float8_e8m0fnu:
        is_byte = s.dtype.itemsize == 1
        hint = "; bytes of scales are made one by .view(cupy_fp8.float8_e8m0fnu)" if is_byte else ""
        raise TypeError(f"s: expected dtype float8_e8m0fnu, got {s.dtype}{hint}")


def _groups(call: Call, splits: Any, axis: Any, shape: tuple[int, ...], check: Any) -> Groups:
    """Validate the options for compact scales of this shape, and the sizes if Python knows them."""
    flag(check, "check")
    is_axis = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
    if splits is None:
        if not is_axis or axis != 0:
            raise ValueError("axis: means something for groups only, which need splits=; "
                             f"got axis={shown(axis)} without")
        return NO_GROUPS
    if not is_axis or axis not in (0, 1):
        raise ValueError("axis: expected 0 (groups of lines) or 1 (groups along the blocks), got "
                         f"{shown(axis)}")
    if len(shape) != 2:
        raise ValueError(f"splits: groups are of scales [R, C], got shape {shape}; give each matrix its own "
                         "call")
    groups = call.splits("splits", splits, check)
    if groups.host is not None:
        _check_sizes(groups.host, shape[axis], axis)
    return groups


def _check_sizes(sizes: np.ndarray, total: int, axis: int) -> None:
    """Raise ValueError if sizes on the host are negative, or add up to more lines or blocks than there are.
    """
    given = none_negative(sizes)
    covered = sum(cdiv(size, SWIZZLE_ELEMENTS) for size in given) if axis == 1 else sum(given)
    if covered > total:
        what = "blocks of 32 elements" if axis == 1 else "lines"
        raise ValueError(f"splits: expected sizes that add up to at most the {total} {what} there are, got "
                         f"{covered}")


def _compact_shape(shape: Any) -> tuple[int, ...]:
    try:
        extents = _as_shape(shape)
    except TypeError:
        raise TypeError(f"shape: expected integers, (R, C) or (E, R, C), got {shown(shape)}") from None
    if len(extents) not in (2, 3):
        raise ValueError(f"shape: expected (R, C) or (E, R, C), got {shown(extents)}")
    return extents


def _swizzled_shape(shape: tuple[int, ...], groups: int | None, axis: int) -> tuple[int, ...]:
    *batch, lines, blocks = shape
    return ((*batch, round_up(lines, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS)) if groups is None
            else grouped_shape(shape, groups, axis))


def lines_adjacent(s: Array) -> bool:
    """Return whether s is C-contiguous only with its last two axes swapped."""
    if is_contiguous(s) or s.ndim < 2:
        return False
    shape, strides, size = s.shape, s.strides, s.itemsize
    return bool(strides[-2:] == (size, shape[-2] * size)
                and (s.ndim == 2 or (s.ndim == 3 and strides[0] == shape[1] * shape[2] * size)))


# ---- launches ----
class _Extents(NamedTuple):
    """What follows from the shape of the compact scales; most are members of the struct LayoutParams."""

    shape: tuple[int, ...]
    swizzled: tuple[int, ...]
    lines: int
    blocks: int
    tiles: int
    down: int
    across: int
    grid: int               # 0: there are no scales


@functools.lru_cache(maxsize=4096)
def _extents(shape: tuple[int, ...], groups: int | None, axis: int, spare: int) -> _Extents:
    """spare: 1 if the launch also writes the scales that no group covers, else 0."""
    *batch, lines, blocks = shape
    rows, columns = round_up(lines, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS)
    reached_rows, reached_columns = rows, columns
    if groups is not None and axis == 0:
        rows, reached_rows = grouped_rows(lines, groups), grouped_rows(lines, groups + spare)
    if groups is not None and axis == 1:
        columns, reached_columns = grouped_columns(blocks, groups), grouped_columns(blocks, groups + spare)
    across = cdiv(reached_columns, SWIZZLE_COLUMNS * _TILES)
    grid = (batch[0] if batch else 1) * (reached_rows // SWIZZLE_ROWS) * across
    return _Extents(shape, _swizzled_shape(shape, groups, axis), lines, blocks, columns // SWIZZLE_COLUMNS,
                    rows // SWIZZLE_ROWS, max(across, 1), grid and grid_size(grid, shape))


def check_aligned(name: str, at: int, layout: str = "swizzled") -> None:
    """Raise ValueError for unaligned scales that are read 16 bytes at a time."""
    if at % _ALIGNMENT:
        raise ValueError(f"{name}: address {at:#x} is not a multiple of {_ALIGNMENT}, as that of {layout} "
                         "scales has to be")


def _launches(call: Call, kernel: Kernel, inputs: _Inputs, compact_at: int, swizzled_at: int,
              adjacent: bool) -> Iterator[Launch]:
    groups = inputs.groups
    if groups.number is None:
        yield from matrix_launches(kernel is _SWIZZLE, inputs.s.array, inputs.extents, compact_at,
                                   swizzled_at, adjacent)
        return
    splits = {"sizes": groups.at, "groups": groups.number, "errors": call.error_word(), "wide": groups.wide}
    grouped = _GROUPS_OF_BLOCKS if inputs.axis else _GROUPS_OF_LINES
    words = (kernel is _SWIZZLE and grouped == _GROUPS_OF_LINES
             and _are_words(inputs.extents, compact_at, adjacent))
    # an empty array's sizes are examined too
    yield _variant(kernel, adjacent, grouped, words).bind(
        inputs.s.array, inputs.extents.grid or 1, splits=splits,
        **_members(inputs.extents, compact_at, swizzled_at, adjacent))


def matrix_launches(swizzles: bool, x: Array, extents: _Extents, compact_at: int, swizzled_at: int,
                    adjacent: bool) -> Iterator[Launch]:
    """Yield the launch that swizzles or unswizzles whole matrices. adjacent: their lines are adjacent in
    compact memory."""
    if extents.grid:
        kernel = _SWIZZLE if swizzles else _UNSWIZZLE
        words = swizzles and _are_words(extents, compact_at, adjacent)
        yield _variant(kernel, adjacent, _NOT_GROUPED, words).bind(
            x, extents.grid, **_members(extents, compact_at, swizzled_at, adjacent))


def matrix_extents(shape: tuple[int, ...]) -> _Extents:
    """Return the extents for `matrix_launches`, for compact scales of this shape."""
    return _extents(shape, None, 0, 0)


def _are_words(extents: _Extents, compact_at: int, adjacent: bool) -> bool:
    """Return whether all compact words of four blocks exist and are aligned."""
    return not adjacent and extents.blocks % 4 == 0 and compact_at % 4 == 0


def _members(extents: _Extents, compact_at: int, swizzled_at: int, adjacent: bool) -> dict[str, int]:
    return {"compact": compact_at, "swizzled": swizzled_at, "lines": extents.lines, "blocks": extents.blocks,
            "stride": extents.lines if adjacent else extents.blocks, "tiles": extents.tiles,
            "down": extents.down, "across": extents.across}


def _variant(kernel: Kernel, adjacent: bool, grouped: int, words: bool) -> Variant:
    return kernel.variant(ADJACENT=adjacent, WORDS=words, GROUPED=grouped)


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    for kernel, adjacent, grouped in product((_SWIZZLE, _UNSWIZZLE), (False, True),
                                             (_NOT_GROUPED, _GROUPS_OF_LINES, _GROUPS_OF_BLOCKS)):
        yield _variant(kernel, adjacent, grouped, False)
    for grouped in (_NOT_GROUPED, _GROUPS_OF_LINES):
        yield _variant(_SWIZZLE, False, grouped, True)
