"""The values of quantised data. Kernels: kernels_cu/convert.cu (one scale), kernels_cu/dequantize.cu (a scale per block)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .. import backend, reference, runtime
from ..arrays import Array, is_contiguous
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float8_e8m0fnu, float32, lookup
from ..grouped import Grouped
from ..layouts import SMALLEST_BLOCK, SWIZZLE_COLUMNS, cdiv
from ..results import Quantized, Scaled, check_block_scales, swap_last
from ..runtime import Kernel, Variant, executor_of
from . import checks, convert, flat, tiles

_RUNS = Kernel("dequantize", "dequantize_runs", "3P6q6I")
_BLOCKS = Kernel("dequantize", "dequantize_blocks", "3P6q6I")
_BLOCKS_TRANSPOSED = Kernel("dequantize", "dequantize_blocks_transposed", "3P6q6I")
_CHUNKS = 2 * flat.THREADS                  # of a block of threads of dequantize_runs
_RUN = 5                                    # log2 of the chunks along a row of a tile of dequantize_blocks; fewer where rows are short
_STEPS, _STEPS_SWIZZLED = 4, 8              # rows of one of its threads


def dequantize(q: Scaled | Quantized | Grouped, *, dtype: Any = float32, out: Array | None = None) -> Array:
    """The values of quantised data: data * scale_inv in f32, rounded to `dtype`, in the logical shape.

    q : a Scaled, or a Quantized (its row-wise part where it has one): per tensor or in blocks, scales of blocks in any layout (a
        `.T` too, without a copy; only deepgemm_sm100 scales are made compact first). Data stored transposed is transposed back.
        A Grouped: a launch for each group, rows of no group are 0, and it waits for the device to know the sizes.
    dtype : float32, float16 or bfloat16 (overflow to Inf, one quiet NaN).
    out : array of the logical shape and of dtype, written and returned.
    Raises TypeError, ValueError (also for scales that are not those of the blocks), DeviceError, before anything is written. Bytes
    moved: data, scales and result once. Source: docs/numerics.md rules 3 to 5 and 10.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.dequantize(fp8.quantize_tensor(np.float32([[3.0, -5.1]]), 16.0), dtype=np.float16).tolist()
    [[3.0, -5.0]]
    """
    to = lookup(dtype, INPUT_DTYPES, "dtype").dtype
    if isinstance(q, Grouped):
        return q.dequantize(to, out=out)
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}; use astype for a plain array")
    s = q if isinstance(q, Scaled) else q._any
    kept: _Blocks | None = s.__dict__.get("_blocks")
    if kept is not None:
        return kept.dequantize(s, to, out)
    if s.block is not None and s.scale_layout == "deepgemm_sm100":
        s = _unpacked(s)
    data, xp, at = _data(s)
    if s.block is not None:
        return _Blocks(s, data, xp, at).dequantize(s, to, out)
    scale_at = checks.one_f32(s.scale_inv, data, xp, "q.scale_inv")
    if executor_of(xp) == "reference":
        return convert.store(reference.dequantize(s, dtype=to), out, data, s.scale_inv)
    result = convert.new_result(data, s.shape, to) if out is None else out
    result_at = checks.destination(result, s.shape, to, data, xp, at)
    checks.separate(result_at, result.nbytes, scale_at, 4, "out", "q.scale_inv")
    if s.transposed:
        convert.launch_transposed(data, at, result_at, scale_at, to)
    else:
        convert.launch_flat(data, at, result_at, scale_at, to, True)
    return result


def check_call(q: Scaled | Quantized, to: np.dtype[Any], out: Array) -> None:
    """All validation of `dequantize` with out= and nothing else: for callers that make several such calls or none."""
    s = q if isinstance(q, Scaled) else q._any
    data, xp, at = _data(s)
    if s.block is None:
        scale_at, scale_bytes = checks.one_f32(s.scale_inv, data, xp, "q.scale_inv"), 4
    elif s.scale_layout == "deepgemm_sm100":
        _check_unpacked(s, xp)
        scale_at, scale_bytes = checks.address(s.scale_inv), checks.extent(s.scale_inv)
    else:
        blocks = _Blocks(s, data, xp, at)
        scale_at, scale_bytes = blocks.scale_at, blocks.scale_bytes
    result_at = checks.destination(out, s.shape, to, data, xp, at)
    checks.separate(result_at, out.nbytes, scale_at, scale_bytes, "out", "q.scale_inv")


def _data(s: Scaled) -> tuple[Array, Any, int]:
    """(data ready for a kernel, their module, their address)."""
    data, xp, at = checks.source(s.data, FP8_DTYPES, "q.data")
    stored = swap_last(s.shape) if s.transposed else s.shape
    if data.shape != stored:
        raise ValueError(f"q.data: expected shape {stored} for the logical shape {s.shape}, got {data.shape}")
    return data, xp, at


def _unpacked(s: Scaled) -> Scaled:
    """With compact scales instead of words, which no kernel here reads."""
    _check_unpacked(s, None)
    return s.to_layout("compact")


def _check_unpacked(s: Scaled, xp: Any) -> None:
    if xp is not None:
        backend.require_module(s.scale_inv, xp, "q.scale_inv")
    check_block_scales(s, "q")
    if not isinstance(s.scale_inv, np.ndarray) and runtime.capturing(s.scale_inv.data.device_id):
        raise ValueError("q: deepgemm_sm100 scales are unpacked into new memory, which cannot be done while a CUDA graph is captured; "
                         "dequantise q.to_layout('compact')")


#: A variant, its blocks, and the members of its struct after the addresses.
_Launch = tuple[Variant, int, tuple[int, ...]]


class _Blocks:
    """A Scaled's blocks, found valid: where its data and scales lie, and how the scale of a block is found. Kept with a Scaled on a GPU
    whose arrays are read where they are, so that dequantising it again costs no validation."""

    def __init__(self, s: Scaled, data: Array, xp: Any, at: int) -> None:
        scales = s.scale_inv
        if not isinstance(scales, xp.ndarray):
            backend.require_module(scales, xp, "q.scale_inv")
        check_block_scales(s, "q")
        assert s.block is not None
        if xp is not np:
            checks.same_device(scales, data, "q.scale_inv")
        strides = checks.matrix_strides(scales) if s.scale_layout != "swizzled" else None
        if strides is None:                                             # swizzled, or strides that no kernel reads
            scales, _, _ = checks.source(scales, (scales.dtype,), "q.scale_inv")
            strides = checks.matrix_strides(scales)
            assert strides is not None
        self.data, self.at, self.xp = data, at, xp
        self.scales, self.scale_at = scales, checks.address(scales)
        self.scale_bytes = checks.extent(scales)
        self.columnwise = s.block[1] == 1
        self._describe(s, strides)
        self._launches: dict[tuple[np.dtype[Any], bool], _Launch] = {}
        if xp is not np and data is s.data and scales is s.scale_inv:
            s.__dict__["_blocks"] = self

    def _describe(self, s: Scaled, strides: tuple[int, int, int]) -> None:
        """The numbers that a launch passes on, whatever the output dtype."""
        assert s.block is not None
        self.batch, (self.rows, self.columns) = prod(s.shape[:-2]), s.shape[-2:]
        matrix_stride, row_stride, column_stride = strides
        lines_adjoin = s.block[0] == 1 and s.scale_layout not in ("compact", "swizzled")
        if lines_adjoin or (s.transposed and 1 not in s.block):
            row_stride, column_stride = column_stride, row_stride
        scale_tiles = s.scale_inv.shape[-1] // SWIZZLE_COLUMNS if s.scale_layout == "swizzled" else 0
        shifts = [_shift(b, extent) for b, extent in zip(s.block, s.shape[-2:], strict=True)]
        self.one_row = (not s.transposed and s.block[0] == 1 and s.block[1] is not None and self.columns % s.block[1] == 0
                        and s.scale_layout == "compact" and is_contiguous(self.scales))
        if self.one_row:                    # no block ends with a row: the array is one long row
            self.batch, self.rows, self.columns = 1, 1, self.data.size
        self.scaling = row_stride, column_stride, matrix_stride, scale_tiles, *shifts

    def dequantize(self, s: Scaled, to: np.dtype[Any], out: Array | None) -> Array:
        data, xp = self.data, self.xp
        by_reference = executor_of(xp) == "reference"
        if out is not None:
            result_at = checks.destination(out, s.shape, to, data, xp, self.at)
            checks.separate(result_at, out.nbytes, self.scale_at, self.scale_bytes, "out", "q.scale_inv")
        elif not by_reference:
            out = convert.new_result(data, s.shape, to)
            result_at = checks.address(out)
        if by_reference:
            return convert.store(reference.dequantize(s, dtype=to), out)
        if data.size:
            key = to, result_at % 16 == 0
            launch = self._launches.get(key)
            if launch is None:
                launch = self._launches[key] = self._transposing(*key) if s.transposed else self._direct(*key)
            variant, grid, members = launch
            variant.launch(data, grid, self.at, result_at, self.scale_at, *members)
        return out

    def _direct(self, to: np.dtype[Any], aligned: bool) -> _Launch:
        """Of dequantize_runs or dequantize_blocks, to a result that is or is not aligned to 16 bytes."""
        chunk = 16 // to.itemsize
        run = _RUN if self.columnwise else min(_RUN, (cdiv(self.columns, chunk) - 1).bit_length())
        across = cdiv(self.columns, chunk * _CHUNKS if self.one_row else chunk << run)
        steps = _STEPS_SWIZZLED if self.scaling[3] else _STEPS
        down = 1 if self.one_row else cdiv(self.rows, (flat.THREADS >> run) * steps)
        vector = 3 if aligned and self.columns % chunk == 0 and self.at % chunk == 0 else 0
        row_stride, column_stride, matrix_stride, scale_tiles, *_ = self.scaling
        four = 4 * self.scales.itemsize
        if vector and column_stride == 1 and not (scale_tiles or row_stride % 4 or matrix_stride % 4 or self.scale_at % four):
            vector |= 4
        variant = (_runs_variant(self.data.dtype, to, self.scales.dtype) if self.one_row else
                   _variant(self.data.dtype, to, self.scales.dtype, self.columnwise, steps))
        grid = checks.grid_size(self.batch * down * across, self.data.shape)
        return variant, grid, (self.rows, self.columns, *self.scaling, down, across, run, vector)

    def _transposing(self, to: np.dtype[Any], aligned: bool) -> _Launch:
        """Of dequantize_blocks_transposed."""
        vector = (self.rows % 8 == 0 and self.at % 8 == 0) | (self.columns % 16 == 0 and aligned) << 1
        tile = tiles.choose(self.data, convert.TO_FLOAT) if vector == 3 else tiles.SMALL
        variant = _transposed_variant(self.data.dtype, to, self.scales.dtype, self.columnwise, tile)
        return variant, tiles.grid(self.data.shape, tile), (self.rows, self.columns, *self.scaling, 0, 0, 0, vector)


def _shift(block: int | None, extent: int) -> int:
    """log2 of a block's extent; of None, or of one past everything, of one that holds all."""
    everything = max(SMALLEST_BLOCK, extent).bit_length()
    return everything if block is None else min(block.bit_length() - 1, everything)


@functools.cache
def _runs_variant(source: np.dtype[Any], to: np.dtype[Any], scale: np.dtype[Any]) -> Variant:
    return _RUNS.variant(block=flat.THREADS, **_defines(source, to, scale, False))


@functools.cache
def _variant(source: np.dtype[Any], to: np.dtype[Any], scale: np.dtype[Any], columnwise: bool, steps: int) -> Variant:
    return _BLOCKS.variant(block=flat.THREADS, **_defines(source, to, scale, columnwise), STEPS=steps)


@functools.cache
def _transposed_variant(source: np.dtype[Any], to: np.dtype[Any], scale: np.dtype[Any], columnwise: bool, tile: tiles.Tile) -> Variant:
    # Beside the tile the f32 scales of its blocks, none of which has fewer than SMALLEST_BLOCK elements.
    return _BLOCKS_TRANSPOSED.variant(block=tile.block, shared=tile.shared + tile.shared // SMALLEST_BLOCK * 4,
                                      **_defines(source, to, scale, columnwise), **tile.defines, ALIGNED=int(tile is not tiles.SMALL))


def _defines(source: np.dtype[Any], to: np.dtype[Any], scale: np.dtype[Any], columnwise: bool) -> dict[str, Any]:
    return {"IN": FORMATS[source].tag, "OUT": FORMATS[to].tag, "SCALE": FORMATS[scale].tag, "COLUMNWISE": int(columnwise)}


def variants() -> Iterator[Variant]:
    """Every variant that dequantising blocks may launch; with one scale it is those of `convert`."""
    for choice in product(FP8_DTYPES, INPUT_DTYPES, (float8_e8m0fnu, float32), (False, True)):
        for steps in (_STEPS, _STEPS_SWIZZLED) if choice[2] == float8_e8m0fnu else (_STEPS,):
            yield _variant(*choice, steps)
        if not choice[-1]:
            yield _runs_variant(*choice[:-1])
        for tile in (tiles.SMALL, convert.TO_FLOAT):
            yield _transposed_variant(*choice, tile)
