"""Scales of blocks from any layout to any other. Kernel: kernels_cu/scales/convert.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import backend, kernels, reference
from ...arrays import Array, _as_shape, asnumpy, bits, empty_beside, is_contiguous
from ...calls import validate
from ...formats import FORMATS, flag, float8_e8m0fnu, float32, int32, names
from ...kernels import Kernel, Variant, error_word, executor_of, grid_size
from ...layouts import (
    PACKED,
    PADDED_TO,
    SCALE_DTYPES,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    ScaleGrid,
    cdiv,
    round_up,
    scale_dtype,
    scale_grid,
    scale_shape,
)
from ...reference.scales.convert import is_in_e8m0
from ...results import Scaled, check_block_scales
from .swizzle import swizzle_scales, unswizzle_scales

_KERNEL = Kernel("scales/convert", "convert_scales")
_THREADS = 256
_FOUR_LINES, _FOUR_BLOCKS, _PACKED, _SWIZZLED = range(4)             # the kernel's `order`
_TILE, _SWIZZLED_TILE = (32, 32), (SWIZZLE_ROWS, 2 * SWIZZLE_COLUMNS)

Block = tuple[int | None, int | None]


def convert_scales(scale_inv: Array, *, source: str, target: str, shape: tuple[int, ...], block: Block, dtype: Any = None,
                   out: Array | None = None, check: bool = False) -> Array:
    """Scales of blocks in another layout, and where that holds another dtype, in that: f32 powers of two as E8M0, E8M0 as f32.

    Parameters
    ----------
    scale_inv : the scales in layout `source`: of the shape that docs/layouts.md says, float32, float8_e8m0fnu, or int32 (deepgemm_sm100,
        words of four E8M0 scales). Compact ones may be a transposed view, which is read as it is
    source, target : 'compact', 'gemm_ready', 'swizzled', 'deepgemm_sm90' or 'deepgemm_sm100'; the same one makes a copy
    shape : of the data that have these scales, (…, M, K), whatever its storage
    block : that shares a scale: (1, B) along K, (B, 1) along M, or (B, B') in both; B a power of two of 32 or more, None for all of a line.
        Scales of 2-D blocks are compact, gemm_ready, or deepgemm_sm100 (a line for each row, as DeepGEMM wants weights); if their data are
        stored transposed, give the stored shape and block, (…, K, M) and (B', B), which is what such scales follow
    dtype : of compact scales, float32 or float8_e8m0fnu. None: that of scale_inv, float8_e8m0fnu for words. Other layouts hold one dtype
    out : array of the target's shape and dtype, written and returned; needed while a CUDA graph is captured
    check : wait for the device and raise ValueError if f32 scales there are not what E8M0 holds. (NumPy arrays are always looked at)

    Returns
    -------
    The array of scales, C-contiguous. Padding of scale_inv is never looked at; that of the result is 0.

    f32 -> f32 and E8M0 -> E8M0 keep every bit. E8M0 -> f32 is 2**(e - 127), a subnormal for e = 0, and 0x7FC00000 for NaN. f32 -> E8M0:
    powers of two from 2**-127 to 2**127 exactly; 0, as unused rows of `permute` have it, is 2**-127; NaN is NaN (0xFF).

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written; ValueError for f32 scales in NumPy arrays (or with check=True) that have
    no E8M0 value: −0, Inf, negative ones, other mantissas, below 2**-127. On the device such a scale becomes 0xFF, and `device_errors`
    tells.

    Source: docs/layouts.md; DeepGEMM (get_mn_major_tma_aligned_packed_ue8m0_tensor). Bytes moved: each side once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> s = np.float32([[1, 2, 4, 8, 16], [0.5, 1, 1, 1, 2**-127]])             # of 2 rows in blocks of 128
    >>> w = fp8.convert_scales(s, source="compact", target="deepgemm_sm100", shape=(2, 640), block=(1, 128))
    >>> w.shape, [hex(word) for word in w.view(np.uint32)[:, 0]]
    ((2, 4), ['0x8281807f', '0x83'])
    >>> back = fp8.convert_scales(w, source="deepgemm_sm100", target="compact", shape=(2, 640), block=(1, 128), dtype=np.float32)
    >>> fp8.bytes_equal(back, s)
    True
    """
    xp = np if isinstance(scale_inv, np.ndarray) else backend.module_of(scale_inv, "scale_inv")
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, str):
            raise ValueError(f"{name}: expected one of {tuple(SCALE_DTYPES)}, got {layout!r}")
    strides = None
    if source == "compact" and scale_inv.ndim >= 2 and not is_contiguous(scale_inv):
        strides = validate.matrix_strides(scale_inv)
    shape, block = shape if isinstance(shape, tuple) else _as_tuple(shape), tuple(block) if isinstance(block, list) else block
    if not isinstance(block, tuple) or not all(b is None or isinstance(b, (int, np.integer)) for b in block):
        scale_shape(shape, block, target)                   # which says what a block is
    plan = _plan(source, target, shape, block, scale_inv.dtype, None if dtype is None else _as_dtype(dtype), strides)
    if scale_inv.shape != plan.source_shape:
        raise ValueError(f"scale_inv: expected shape {plan.source_shape} ({source} scales of blocks {block} of shape {shape}), got "
                         f"{scale_inv.shape}")
    if strides is None:
        scales, _, at = validate.source(scale_inv, (scale_inv.dtype,), "scale_inv")
    else:
        scales, at = scale_inv, validate.address(scale_inv)
    if (flag(check, "check") or xp is np) and plan.may_be_wrong:
        _check_powers_of_two(scale_inv, plan.used)
    if out is None:
        validate.may_allocate(scales)
        out = empty_beside(scales, plan.shape, plan.dtype)
        out_at = validate.address(out)
    elif strides is None:
        out_at = validate.destination(out, plan.shape, plan.dtype, scales, xp, at)
    else:
        out_at = validate.writable(out, plan.shape, plan.dtype, scales, xp, "out")
        validate.separate(out_at, out.nbytes, at, validate.extent(scales), "out", "the input")
    if executor_of(xp) == "reference":
        options: dict[str, Any] = {"source": source, "target": target, "shape": shape, "block": block, "dtype": plan.dtype}
        bits(out)[...] = bits(reference.convert_scales(scale_inv, **options))
        return out
    if plan.aligned and out_at % 16:
        raise ValueError(f"out: address {out_at:#x} is not a multiple of 16, as that of {target} scales has to be")
    if plan.swizzles and (target == "swizzled" or at % 16 == 0):
        _move_swizzled(scales, out, target, plan.columnwise)
    elif plan.grid:
        plan.variant.launch(scales, plan.grid, at, out_at, error_word(scales) if plan.may_be_wrong else 0, *plan.members)
    return out


def with_compact_scales(s: Scaled, name: str, dtype: np.dtype[Any] | None = None) -> Scaled:
    """A Scaled whose scales are compact: itself, or converted into new memory. dtype: that words of E8M0 scales (deepgemm_sm100) get."""
    if s.scale_layout == "compact":
        return s
    check_block_scales(s, name)
    if not isinstance(s.scale_inv, np.ndarray) and kernels.capturing(s.scale_inv.data.device_id):
        raise ValueError(f"{name}: {s.scale_layout} scales are made compact in new memory, which cannot be had while a CUDA graph is "
                         f"captured; take {name}.to_layout('compact') before the capture")
    return s.to_layout("compact", dtype=dtype if s.scale_layout == "deepgemm_sm100" else None)


def _as_tuple(shape: Any) -> tuple[int, ...]:
    try:
        return _as_shape(shape)
    except TypeError as error:
        raise TypeError(f"shape: expected integers, (…, M, K), got {shape!r} ({error})") from None


def _as_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected one that scales have, got {dtype!r}") from None


def _check_powers_of_two(scale_inv: Array, used: int) -> None:
    """ValueError unless f32 scales, the first `used` along the last axis, are what E8M0 holds, or NaN. Waits for the device."""
    if not isinstance(scale_inv, np.ndarray) and kernels.capturing(scale_inv.data.device_id):
        raise ValueError("check: waits for the device, which cannot be done while a CUDA graph is captured; check before the capture")
    scales = asnumpy(scale_inv)[..., :used]
    wrong = ~(is_in_e8m0(scales) | np.isnan(scales))
    if wrong.any():
        first = tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))
        raise ValueError(f"scale_inv: expected powers of two from 2**-127 to 2**127, which E8M0 holds, got {scales[first]} at {first}; "
                         "quantise with pow2_scale=True, or keep float32 scales")


def _move_swizzled(scales: Array, out: Array, target: str, columnwise: bool) -> None:
    """E8M0 scales between compact and swizzled: by the kernels that know nothing else."""
    compact = scales if target == "swizzled" else out
    lines = compact.swapaxes(-1, -2) if columnwise else compact
    if target == "swizzled":
        swizzle_scales(lines, out=out)
    else:
        unswizzle_scales(scales, shape=lines.shape, out=lines)


class _Plan(NamedTuple):
    """What follows from everything but memory, found valid."""

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]          # of the result
    dtype: np.dtype[Any]
    used: int                       # of the source's last axis: the rest is padding
    may_be_wrong: bool              # scales that have no value in the result's dtype
    aligned: bool                   # whoever reads the result wants it at a multiple of 16
    swizzles: bool                  # swizzle_scales or unswizzle_scales can do it
    columnwise: bool
    variant: Variant
    grid: int                       # 0: nothing to do
    members: tuple[int, ...]        # of ScaleLayoutParams, after the addresses


@functools.lru_cache(maxsize=4096)
def _plan(source: str, target: str, shape: tuple[int, ...], block: Block, held: np.dtype[Any], dtype: np.dtype[Any] | None,
          strides: tuple[int, int, int] | None) -> _Plan:
    """strides: of compact scales that are not dense, from matrix to matrix, row to row, column to column."""
    shape = _as_tuple(shape)
    source_shape, target_shape = (_scale_shape(name, layout, shape, block) for name, layout in (("source", source), ("target", target)))
    if held not in SCALE_DTYPES[source]:
        raise TypeError(f"scale_inv: expected dtype {names(SCALE_DTYPES[source])} of {source} scales, got {held}")
    to = scale_dtype(held, target) if dtype is None else dtype
    if to not in SCALE_DTYPES[target]:
        raise TypeError(f"dtype: {target} scales are {names(SCALE_DTYPES[target])}, got {to}")
    grid = scale_grid(shape, block)
    before, after = _layout(source, grid, block, shape[-2], strides), _layout(target, grid, block, shape[-2], None)
    tile = _SWIZZLED_TILE if after.order == _SWIZZLED else _TILE
    down, across = cdiv(after.lines, tile[0]), cdiv(after.blocks, tile[1])
    blocks = prod(grid.batch) * down * across
    kinds = tuple(float8_e8m0fnu if dtype == int32 else dtype for dtype in (held, to))
    return _Plan(source_shape, target_shape, to,
                 used=source_shape[-1] if source == "compact" else grid.outer if 1 in block else grid.blocks,
                 may_be_wrong=kinds == (float32, float8_e8m0fnu), aligned=target in ("swizzled", "deepgemm_sm100"),
                 swizzles=held == to and {source, target} == {"compact", "swizzled"} and len(shape) <= 3, columnwise=grid.columnwise,
                 variant=_variant(*kinds), grid=blocks and grid_size(blocks, shape),
                 members=(*before.strides, *after.strides, shape[-2] if after.shift else grid.outer, grid.blocks, after.lines, after.blocks,
                          down, across, before.shift, after.shift, after.order))


def _scale_shape(name: str, layout: str, shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    try:
        return scale_shape(shape, block, layout)
    except ValueError as error:
        raise ValueError(str(error).replace("scale_layout", name)) from None


class _Layout(NamedTuple):
    """Where a layout has the scale of (line, block). strides: the members of ScaleStrides; lines, blocks: with the padding; order: how
    threads take it; shift: log2 of its lines that repeat a line of scales."""

    strides: tuple[int, ...]
    lines: int
    blocks: int
    order: int
    shift: int = 0


def _layout(layout: str, grid: ScaleGrid, block: Block, rows: int, strides: tuple[int, int, int] | None) -> _Layout:
    """strides: of compact scales that lie otherwise than compact scales do."""
    lines, blocks = grid.outer, grid.blocks
    if layout == "swizzled":
        tiles = cdiv(blocks, SWIZZLE_COLUMNS)
        tile = SWIZZLE_ROWS * SWIZZLE_COLUMNS
        padded = round_up(lines, SWIZZLE_ROWS)
        return _Layout((padded * tiles * SWIZZLE_COLUMNS, 16, 4, tiles * tile, 1, tile), padded, tiles * SWIZZLE_COLUMNS, _SWIZZLED)
    if layout == "deepgemm_sm100":
        repeated = 1 if 1 in block else block[0] or 1
        padded, words = round_up(lines if repeated == 1 else rows, PADDED_TO), cdiv(blocks, PACKED)
        return _Layout((PACKED * padded * words, *_line_strides(PACKED), 1, PACKED * padded), padded, words * PACKED, _PACKED,
                       repeated.bit_length() - 1)
    if layout == "compact":
        matrix, line, step = (lines * blocks, *((1, lines) if grid.columnwise else (blocks, 1)))
        if strides is not None:
            matrix, line, step = (strides[0], strides[2], strides[1]) if grid.columnwise else strides
        return _Layout((matrix, *_line_strides(line), step, 4 * step), lines, blocks, _FOUR_LINES if grid.columnwise else _FOUR_BLOCKS)
    if 1 not in block:
        padded = round_up(blocks, PADDED_TO)
        return _Layout((lines * padded, *_line_strides(padded), 1, 4), lines, padded, _FOUR_BLOCKS)
    padded = round_up(lines, PADDED_TO)
    return _Layout((padded * blocks, *_line_strides(1), padded, 4 * padded), padded, blocks, _FOUR_LINES)


def _line_strides(line: int) -> tuple[int, int, int]:
    """Of a layout without tiles."""
    return line, 32 * line, SWIZZLE_ROWS * line


@functools.cache
def _variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _KERNEL.variant(block=_THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag)


def variants() -> Iterator[Variant]:
    """Every variant that this op may launch."""
    for source, to in product((float32, float8_e8m0fnu), repeat=2):
        yield _variant(source, to)
