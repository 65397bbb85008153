"""Scales of blocks from any layout to any other. Kernel: kernels_cu/scales/convert.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, kernels, reference
from ...advice import shown
from ...arrays import Array, _as_shape, address, asnumpy, is_contiguous
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, one_array
from ...formats import as_dtype, choice, flag, float8_e8m0fnu, float32, int32, names
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import (
    PACKED,
    PADDED_TO,
    SCALE_DTYPES,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    Block,
    ScaleGrid,
    ScaleLayout,
    as_block,
    cdiv,
    check_block,
    round_up,
    scale_dtype,
    scale_grid,
    scale_shape,
)
from ...methods import for_methods
from ...reference.scales.convert import is_in_e8m0
from ...results import Scaled
from ...typed_array import TypedArray
from .swizzle import check_aligned, lines_adjacent, matrix_extents, matrix_launches

_KERNEL = Kernel("scales/convert", "convert_scales", block=256)
_FOUR_LINES, _FOUR_BLOCKS, _PACKED, _SWIZZLED = range(4)             # values of the kernel's `order`
_TILE, _SWIZZLED_TILE = (32, 32), (SWIZZLE_ROWS, 2 * SWIZZLE_COLUMNS)


@for_methods
def convert_scales(scale_inv: Array, *, source: ScaleLayout, target: ScaleLayout,
                   shape: tuple[int, ...], block: Block, dtype: Any = None,
                   out: Array | None = None, check: bool = False) -> TypedArray:
    """Convert the scales of blocks to another layout, and to its dtype if that is another: f32 powers of two
    become E8M0, E8M0 becomes f32.

    Parameters
    ----------
    scale_inv : the scales in layout `source`: of the shape that docs/layouts.md says, float32,
        float8_e8m0fnu, or int32 (deepgemm_sm100, words of four E8M0 scales). Compact ones may be any view
        without negative strides, which is read as it is
    source, target : 'compact', 'gemm_ready', 'swizzled', 'deepgemm_sm90' or 'deepgemm_sm100'; the same one
        makes a copy
    shape : of the data that have these scales, (…, M, K), whatever its storage
    block : that shares a scale: (1, B) along K, (B, 1) along M, or (B, B') in both; B a power of two of 32 or
        more, None for a whole row or column. Scales of 2-D blocks are compact, gemm_ready, or deepgemm_sm100
        (scales repeated for each row, as DeepGEMM wants weights); if their data are stored transposed, give
        the stored shape and block, (…, K, M) and (B', B), which is what such scales follow
    dtype : of compact scales, float32 or float8_e8m0fnu. None: that of scale_inv, float8_e8m0fnu for words.
        Other layouts hold one dtype
    out : array of the target's shape and dtype, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if f32 scales there are not what E8M0 holds. (NumPy
        arrays are always examined)

    Returns
    -------
    The array of scales, C-contiguous. Padding of scale_inv is never read; padding of the result is 0.

    f32 -> f32 and E8M0 -> E8M0 keep every bit. E8M0 -> f32 is 2**(e - 127), a subnormal for e = 0, and
    0x7FC00000 for NaN. f32 -> E8M0: powers of two from 2**-127 to 2**127 exactly; 0, as unused rows of
    `permute` have it, is 2**-127; NaN is NaN (0xFF).

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written; ValueError for f32 scales in NumPy arrays
    (or with check=True) that have no E8M0 value: −0, Inf, negative ones, other mantissas, below 2**-127. On
    the device such a scale becomes 0xFF, and `device_errors` reports it.

    Source: docs/layouts.md; DeepGEMM (get_mn_major_tma_aligned_packed_ue8m0_tensor). Bytes moved: each side
    once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> s = np.float32([[1, 2, 4, 8, 16], [0.5, 1, 1, 1, 2**-127]])             # of 2 rows in blocks of 128
    >>> w = fp8.convert_scales(s, source="compact", target="deepgemm_sm100", shape=(2, 640), block=(1, 128))
    >>> w.shape, [hex(word) for word in w.view(np.uint32)[:, 0]]
    ((2, 4), ['0x8281807f', '0x83'])
    >>> back = fp8.convert_scales(w, source="deepgemm_sm100", target="compact", shape=(2, 640),
    ...                           block=(1, 128), dtype=np.float32)
    >>> fp8.bytes_equal(back, s)
    True
    """
    given = scale_inv, source, target, _as_tuple(shape), as_block(block), dtype, check
    return run(_CONVERT_SCALES, given, out)


def with_compact_scales(call: Call, name: str, s: Scaled) -> tuple[Scaled, Input]:
    """Return the Scaled, which the call has read, with compact scales in new memory; and these scales."""
    given: Array = s.scale_inv
    if not isinstance(given, np.ndarray) and kernels.capturing(given.data.device_id):
        raise ValueError(f"{name}: {s.scale_layout} scales are made compact in new memory, which cannot be "
                         f"had while a CUDA graph is captured; take {name}.to_layout('compact') before the "
                         "capture")
    call.repeatable = False                     # a later call finds these scales elsewhere
    compact = s.to_layout("compact")
    return compact, Input(compact.scale_inv, address(compact.scale_inv))


def row_scale_strides(scales: Array, layout: str) -> tuple[int, int]:
    """Return the row and block strides, in elements, of scales of blocks (1, B) in one of
    LAYOUTS_WITH_STRIDES."""
    strides = validate.matrix_strides(scales)
    assert strides is not None
    _, row, column = strides
    return (row, column) if layout == "compact" else (column, row)


# ---- the call ----
class _Inputs(NamedTuple):
    scales: Input
    conversion: Conversion
    options: dict[str, Any]         # the keywords of the reference


class _ConvertScales(Op[_Inputs]):
    def arguments(self, call: Call, scale_inv: Any, source: Any, target: Any, shape: Any, block: Any,
                  dtype: Any, check: Any) -> _Inputs:
        backend.module_of(scale_inv, "scale_inv")
        for name, layout in (("source", source), ("target", target)):
            choice(layout, name, SCALE_DTYPES)
        strides = None
        if source == "compact" and scale_inv.ndim >= 2 and not is_contiguous(scale_inv):
            strides = validate.matrix_strides(scale_inv)
        block = check_block(block)
        to = None if dtype is None else as_dtype(dtype, "dtype", "one that scales have")
        plan = conversion(source, target, shape, block, scale_inv.dtype, to, strides)
        validate.check_shape("scale_inv", scale_inv.shape, plan.source_shape,
                             f"{source} scales of blocks {block} of shape {shape}")
        scales = (call.read("scale_inv", scale_inv, (scale_inv.dtype,)) if strides is None
                  else call.read_strided("scale_inv", scale_inv))
        if (flag(check, "check") or call.xp is np) and plan.may_be_wrong:
            call.repeatable = False
            _check_powers_of_two(scale_inv, plan.used)
        options = {"source": source, "target": target, "shape": shape, "block": block, "dtype": plan.dtype}
        return _Inputs(scales, plan, options)

    def result(self, inputs: _Inputs) -> Description:
        return one_array(inputs.conversion.shape, inputs.conversion.dtype)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.convert_scales(inputs.scales.array, **inputs.options)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        yield from conversion_launches(call, inputs.conversion, inputs.scales, written[0])


_CONVERT_SCALES = _ConvertScales()


def _as_tuple(shape: Any) -> tuple[int, ...]:
    try:
        return _as_shape(shape)
    except TypeError as error:
        raise TypeError(f"shape: expected integers, (…, M, K), got {shown(shape)} ({error})") from None


def _check_powers_of_two(scale_inv: Array, used: int) -> None:
    """Raise ValueError unless E8M0 represents every f32 scale among the first `used` of the last axis. Waits
    for the device."""
    validate.may_wait(scale_inv)
    scales = asnumpy(scale_inv)[..., :used]
    wrong = ~(is_in_e8m0(scales) | np.isnan(scales))
    if wrong.any():
        first = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
        raise ValueError("scale_inv: expected powers of two from 2**-127 to 2**127, which E8M0 holds, "
                         f"got {scales[first]} at {first}; quantise with pow2_scale=True, or keep float32 "
                         "scales")


# ---- launches, which other ops use too ----
class Conversion(NamedTuple):
    """What follows from layouts, dtypes, the shape of the data and their blocks."""

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]          # the result's shape
    dtype: np.dtype[Any]
    used: int                       # elements along the source's last axis before its padding
    may_be_wrong: bool              # some f32 scales have no value in the result's dtype
    aligned_for: str                # the layout that must be 16-byte aligned, or ''
    swizzles: bool | None           # swizzle_scales (True) or unswizzle_scales (False) does the same
    columnwise: bool
    lines: tuple[int, ...]          # the shape of the scales, […, lines, blocks]
    variant: Variant
    grid: int                       # thread blocks; 0: there are no scales
    members: dict[str, Any]         # members of the struct ScaleLayoutParams, except addresses


@functools.lru_cache(maxsize=4096)
def conversion(source: str, target: str, shape: tuple[int, ...], block: Block, held: np.dtype[Any],
               dtype: np.dtype[Any] | None = None, strides: tuple[int, int, int] | None = None) -> Conversion:
    """held, dtype: the dtypes before and after. strides: of compact scales that are not C-contiguous, by
    matrix, row, column."""
    source_shape = _scale_shape("source", source, shape, block)
    target_shape = _scale_shape("target", target, shape, block)
    if held not in SCALE_DTYPES[source]:
        raise TypeError(f"scale_inv: expected dtype {names(SCALE_DTYPES[source])} of {source} scales, got "
                        f"{held}")
    to = scale_dtype(held, target) if dtype is None else dtype
    if to not in SCALE_DTYPES[target]:
        raise TypeError(f"dtype: {target} scales are {names(SCALE_DTYPES[target])}, got {to}")
    grid = scale_grid(shape, block)
    before = _stored_scales(source, grid, block, shape[-2], strides)
    after = _stored_scales(target, grid, block, shape[-2], None)
    tile = _SWIZZLED_TILE if after.order == _SWIZZLED else _TILE
    down, across = cdiv(after.lines, tile[0]), cdiv(after.blocks, tile[1])
    blocks = prod(grid.batch) * down * across
    kinds = tuple(float8_e8m0fnu if dtype == int32 else dtype for dtype in (held, to))
    can_swizzle = held == to and {source, target} == {"compact", "swizzled"} and len(shape) <= 3
    return Conversion(
        source_shape, target_shape, to,
        used=source_shape[-1] if source == "compact" else grid.outer if 1 in block else grid.blocks,
        may_be_wrong=kinds == (float32, float8_e8m0fnu),
        aligned_for=target if target in ("swizzled", "deepgemm_sm100") else "",
        swizzles=target == "swizzled" if can_swizzle else None,
        columnwise=grid.columnwise, lines=(*grid.batch, grid.outer, grid.blocks),
        variant=_KERNEL.variant(IN=kinds[0], OUT=kinds[1]), grid=blocks and grid_size(blocks, shape, "shape"),
        members={"source": before.strides, "target": after.strides,
                 "lines": shape[-2] if after.shift else grid.outer, "blocks": grid.blocks,
                 "stored_lines": after.lines, "stored_blocks": after.blocks, "down": down, "across": across,
                 "source_shift": before.shift, "target_shift": after.shift, "order": after.order})


def conversion_launches(call: Call, plan: Conversion, scales: Input, to_at: int) -> Iterator[Launch]:
    """Yields the launch of a conversion."""
    if plan.aligned_for:
        check_aligned("out", to_at, plan.aligned_for)
    adjacent = _adjacent_lines(plan, scales)
    if adjacent is not None:
        compact_at, swizzled_at = (scales.at, to_at) if plan.swizzles else (to_at, scales.at)
        yield from matrix_launches(bool(plan.swizzles), scales.array, matrix_extents(plan.lines),
                                   compact_at, swizzled_at, adjacent)
    elif plan.grid:
        errors = call.error_word() if plan.may_be_wrong else 0
        yield plan.variant.bind(scales.array, plan.grid, to=to_at, errors=errors, **{"from": scales.at},
                                 **plan.members)


def _adjacent_lines(plan: Conversion, scales: Input) -> bool | None:
    """Return whether the lines of compact scales are adjacent in memory. None if the kernels of
    swizzle_scales and unswizzle_scales cannot do the conversion."""
    if plan.swizzles is None or (not plan.swizzles and scales.at % 16):
        return None
    if is_contiguous(scales.array):
        return plan.columnwise
    return not plan.columnwise if lines_adjacent(scales.array) else None


def _scale_shape(name: str, layout: str, shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    try:
        return scale_shape(shape, block, layout)
    except ValueError as error:
        raise ValueError(str(error).replace("scale_layout", name)) from None


class _StoredScales(NamedTuple):
    """Place of the scale of (line, block) in a layout. strides: the members of ScaleStrides; lines, blocks:
    their numbers with padding; order: which scales a thread takes; shift: log2 of the lines that share a line
    of scales."""

    strides: dict[str, int]
    lines: int
    blocks: int
    order: int
    shift: int = 0


def _stored_scales(layout: str, grid: ScaleGrid, block: Block, rows: int,
                   strides: tuple[int, int, int] | None) -> _StoredScales:
    """strides: of compact scales that are not C-contiguous."""
    lines, blocks = grid.outer, grid.blocks
    if layout == "swizzled":
        tiles = cdiv(blocks, SWIZZLE_COLUMNS)
        tile = SWIZZLE_ROWS * SWIZZLE_COLUMNS
        padded = round_up(lines, SWIZZLE_ROWS)
        strides_of_tiles = {"matrix": padded * tiles * SWIZZLE_COLUMNS, "line": 16, "line32": 4,
                            "line128": tiles * tile, "block": 1, "block4": tile}
        return _StoredScales(strides_of_tiles, padded, tiles * SWIZZLE_COLUMNS, _SWIZZLED)
    if layout == "deepgemm_sm100":
        repeated = 1 if 1 in block else block[0] or 1
        padded, words = round_up(lines if repeated == 1 else rows, PADDED_TO), cdiv(blocks, PACKED)
        return _StoredScales(_strides(PACKED * padded * words, PACKED, 1, PACKED * padded), padded,
                             words * PACKED, _PACKED, repeated.bit_length() - 1)
    if layout == "compact":
        matrix, line, step = (lines * blocks, *((1, lines) if grid.columnwise else (blocks, 1)))
        if strides is not None:
            matrix, line, step = (strides[0], strides[2], strides[1]) if grid.columnwise else strides
        order = _FOUR_LINES if grid.columnwise else _FOUR_BLOCKS
        return _StoredScales(_strides(matrix, line, step, 4 * step), lines, blocks, order)
    if 1 not in block:
        padded = round_up(blocks, PADDED_TO)
        return _StoredScales(_strides(lines * padded, padded, 1, 4), lines, padded, _FOUR_BLOCKS)
    padded = round_up(lines, PADDED_TO)
    return _StoredScales(_strides(padded * blocks, 1, padded, 4 * padded), padded, blocks, _FOUR_LINES)


def _strides(matrix: int, line: int, block: int, block4: int) -> dict[str, int]:
    """Returns the strides of a layout without tiles."""
    return {"matrix": matrix, "line": line, "line32": 32 * line, "line128": SWIZZLE_ROWS * line,
            "block": block, "block4": block4}


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for source, to in product((float32, float8_e8m0fnu), repeat=2):
        yield _KERNEL.variant(IN=source, OUT=to)
