"""The values of quantised data. Kernels: kernels_cu/convert/astype.cu (one scale),
kernels_cu/convert/dequantize.cu (a scale per block)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ... import reference
from ...advice import shown, type_name, without_rest
from ...arrays import Array, bits, is_array, is_contiguous
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, one_array
from ...formats import FP8_DTYPES, INPUT_DTYPES, DType, float32, lookup
from ...grouped import Grouped
from ...kernels import Kernel, Launch, Variant, grid_size, shapes
from ...layouts import LAYOUTS_WITH_STRIDES, SMALLEST_BLOCK, SWIZZLE_COLUMNS, cdiv
from ...methods import for_methods
from ...results import Quantized, Scaled
from ...typed_array import TypedArray
from ..scales.convert import with_compact_scales
from .astype import flat_launches

_LONG_ROW = Kernel("convert/dequantize", "dequantize_long_row", block=shapes.ELEMENTWISE_THREADS)
_BLOCKS = Kernel("convert/dequantize", "dequantize_blocks", block=shapes.ELEMENTWISE_THREADS)
_BLOCKS_TRANSPOSED = Kernel("convert/dequantize", "dequantize_blocks_transposed")
#: fastest on an H200 (docs/lab-notes)
_TRANSPOSED = shapes.Tile(128, 256, down_first=True)
#: chunks per thread block of dequantize_long_row
_CHUNKS = 2 * shapes.ELEMENTWISE_THREADS
#: log2 of the chunks along a row of a tile of dequantize_blocks; fewer if rows are short
_CHUNKS_LOG2 = 5
#: rows per thread of dequantize_blocks
_STEPS, _STEPS_SWIZZLED = 4, 8


@for_methods
@without_rest
def dequantize(q: Scaled | Quantized | Grouped, *misplaced: NoReturn, dtype: DType = float32,
               out: Array | None = None) -> TypedArray:
    """The values of quantised data: data * scale_inv in f32, rounded to `dtype`, in the logical shape.

    q : a Scaled, or a Quantized (its row-wise part where it has one): per tensor or in blocks, scales of
        blocks in any layout (a `.T` too, without a copy; only deepgemm_sm100 scales are made compact first).
        Data stored transposed is transposed back. A Grouped takes a launch for each group and waits for the
        device to know the sizes; rows of no group are 0.
    dtype : float32, float16 or bfloat16 (overflow to Inf, one quiet NaN).
    out : array of the logical shape and of dtype, written and returned.
    Raises TypeError, ValueError (also for scales that are not those of the blocks), DeviceError, before
    anything is written. Bytes moved: data, scales and result once. Source: docs/numerics.md rules 3 to 5 and
    10.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.dequantize(fp8.quantize_tensor(np.float32([[3.0, -5.1]]), 16.0), dtype=np.float16).tolist()
    [[3.0, -5.0]]
    """
    if misplaced:
        raise _misplaced(q, misplaced[0])
    if isinstance(q, Grouped):
        return dequantize_groups(q, dtype, out)
    return run(_DEQUANTIZE, (q, dtype), out)


def _misplaced(q: Any, second: Any) -> TypeError:
    """Returns the error for a second positional argument: scales, or a dtype."""
    if is_array(second):
        return TypeError("q: expected data and scales in one Scaled, got them apart; write "
                         "dequantize(Scaled(data, scale_inv, data.shape)), with block= and scale_layout= for "
                         "scales of blocks")
    return TypeError(f"dequantize: expected one positional argument, got {type_name(q)} and {shown(second)}; "
                     "write dtype= before a dtype")


@for_methods
def dequantize_groups(g: Grouped, dtype: Any, out: Array | None) -> Array:
    """Computes `Grouped.dequantize`."""
    result: Array = run(_DEQUANTIZE_GROUPS, (g, dtype), out)
    return result


# ---- the calls ----
class _Inputs(NamedTuple):
    s: Scaled
    data: Input
    scales: Input
    to: np.dtype[Any]

    def launches(self, result_at: int) -> Iterator[Launch]:
        if self.s.block is None and not self.s.transposed:
            yield from flat_launches(self.data, result_at, self.scales.at, self.to, True)
        elif self.data.array.size:
            yield _Blocks(self).launch(result_at)


def _read(call: Call, s: Scaled, to: np.dtype[Any]) -> _Inputs:
    data, scales = call.read_scaled("q", s, LAYOUTS_WITH_STRIDES)
    if s.scale_layout == "deepgemm_sm100":                      # no kernel here reads words
        s, scales = with_compact_scales(call, "q", s)
    return _Inputs(s, data, scales, to)


class _Dequantize(Op[_Inputs]):
    def arguments(self, call: Call, q: Any, dtype: Any) -> _Inputs:
        to = lookup(dtype, INPUT_DTYPES, "dtype").dtype
        if not isinstance(q, (Scaled, Quantized)):
            raise TypeError(f"q: expected a Scaled or Quantized, got {type_name(q)}; use astype for a "
                            "plain array")
        return _read(call, q if isinstance(q, Scaled) else q._any, to)

    def result(self, inputs: _Inputs) -> Description:
        return one_array(inputs.s.shape, inputs.to)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.dequantize(inputs.s, dtype=inputs.to)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        yield from inputs.launches(written[0])


class _Groups(NamedTuple):
    shape: tuple[int, int]
    members: list[_Inputs]
    starts: list[int]               # the element of the result that each member begins at
    to: np.dtype[Any]


class _DequantizeGroups(Op[_Groups]):
    """Dequantises the members of a Grouped into one array, by a launch for each."""

    def arguments(self, call: Call, g: Grouped, dtype: Any) -> _Groups:
        if g._plain:
            raise TypeError(f"dequantize: plain {g.dtype} values are not quantised; use astype on .data")
        to = lookup(dtype, INPUT_DTYPES, "dtype").dtype
        call.read("q.data", g._any, FP8_DTYPES)
        call.repeatable = False                                 # a later call may find other sizes
        sizes, starts = g._sizes_and_offsets()
        member = g._members(sizes, starts)
        return _Groups(g.shape, [_read(call, member(i)._any, to) for i in range(len(g))], starts, to)

    def result(self, inputs: _Groups) -> Description:
        return one_array(inputs.shape, inputs.to)

    def reference(self, inputs: _Groups) -> np.ndarray:
        values = np.zeros(prod(inputs.shape), inputs.to)
        for member, start in zip(inputs.members, inputs.starts, strict=False):
            part = reference.dequantize(member.s, dtype=inputs.to)
            values[start:start + part.size] = part.reshape(-1)
        return values.reshape(inputs.shape)

    def launches(self, call: Call, inputs: _Groups, *written: int) -> Iterator[Launch]:
        bits(call.arrays[0]).fill(0)                            # the launches leave out rows of no group
        for member, start in zip(inputs.members, inputs.starts, strict=False):
            yield from member.launches(written[0] + start * inputs.to.itemsize)


_DEQUANTIZE, _DEQUANTIZE_GROUPS = _Dequantize(), _DequantizeGroups()


# ---- launches ----
#: A variant, its thread blocks, and members of its struct by name.
_Chosen = tuple[Variant, int, dict[str, int]]


class _Blocks:
    """How a kernel finds the scale of each element. One scale for the tensor is a block that covers it.
    """

    def __init__(self, inputs: _Inputs) -> None:
        s, self.data, scales, self.to = inputs
        self.scale_at = scales.at
        self.transposed = s.transposed
        self.batch, (self.rows, self.columns) = prod(s.shape[:-2]), s.shape[-2:]
        block = (None, None) if s.block is None else s.block
        row_shift, column_shift = (block_shift(b, extent)
                                   for b, extent in zip(block, s.shape[-2:], strict=True))
        self.scaling = {"row_shift": row_shift, "column_shift": column_shift,
                        "columnwise": int(block[1] == 1),
                        "f32_scales": int(scales.dtype == float32)}
        self.long_row = False
        if s.block is not None:
            self.scaling |= scale_strides(s, scales.array)
            tiles_rows = block[0] == 1 and block[1] is not None and self.columns % block[1] == 0
            self.long_row = (tiles_rows and not s.transposed and s.scale_layout == "compact"
                             and is_contiguous(scales.array))
        if self.long_row:                   # no block ends with a row: the array is one long row
            self.batch, self.rows, self.columns = 1, 1, self.data.array.size

    def launch(self, result_at: int) -> Launch:
        variant, grid, members = (self._transposing if self.transposed else self._direct)(result_at % 16 == 0)
        return variant.bind(self.data.array, grid, data=self.data.at, out=result_at, scale_inv=self.scale_at,
                            rows=self.rows, columns=self.columns, **self.scaling, **members)

    def _direct(self, aligned: bool) -> _Chosen:
        """Return the launch of dequantize_long_row or dequantize_blocks. aligned: the result is 16-byte
        aligned."""
        source, to, chunk = self.data.dtype, self.to, 16 // self.to.itemsize
        chunks_log2 = _CHUNKS_LOG2
        if not self.scaling["columnwise"]:
            chunks_log2 = min(chunks_log2, (cdiv(self.columns, chunk) - 1).bit_length())
        across = cdiv(self.columns, chunk * _CHUNKS if self.long_row else chunk << chunks_log2)
        swizzled = not self.long_row and self.scaling["scale_tiles"] != 0
        steps = _STEPS_SWIZZLED if swizzled else _STEPS
        down = 1 if self.long_row else cdiv(self.rows, (shapes.ELEMENTWISE_THREADS >> chunks_log2) * steps)
        vector = 3 if aligned and self.columns % chunk == 0 and self.data.at % chunk == 0 else 0
        if vector and self._four_scales_adjoin():
            vector |= 4
        variant = (_LONG_ROW.variant(IN=source, OUT=to) if self.long_row
                   else _BLOCKS.variant(IN=source, OUT=to, SWIZZLED=swizzled))
        grid = grid_size(self.batch * down * across, self.data.shape)
        return variant, grid, {"down": down, "across": across, "chunks_log2": chunks_log2, "vector": vector}

    def _four_scales_adjoin(self) -> bool:
        """Return whether the scales of four neighbouring columns are adjacent, to be loaded at once."""
        s, four = self.scaling, 16 if self.scaling["f32_scales"] else 4
        return s["column_stride"] == 1 and not (
            s["scale_tiles"] or s["row_stride"] % 4 or s["matrix_stride"] % 4 or self.scale_at % four)

    def _transposing(self, aligned: bool) -> _Chosen:
        """Returns the launch of dequantize_blocks_transposed."""
        data = self.data.array
        vector = (self.rows % 8 == 0 and self.data.at % 8 == 0) | (self.columns % 16 == 0 and aligned) << 1
        tile = shapes.choose_tile(data, _TRANSPOSED) if vector == 3 else shapes.SMALL
        variant = _transposed_variant(data.dtype, self.to, tile)
        return variant, tile.grid(data.shape), {"vector": vector}


def scale_strides(s: Scaled, scales: Array) -> dict[str, int]:
    """Return the strides of block scales, as members of the struct."""
    assert s.block is not None
    strides = validate.matrix_strides(scales)
    assert strides is not None
    matrix_stride, row_stride, column_stride = strides
    follows_rows = s.block[0] == 1 and s.scale_layout not in ("compact", "swizzled")
    if follows_rows or (s.transposed and 1 not in s.block):
        row_stride, column_stride = column_stride, row_stride
    scale_tiles = s.scale_inv.shape[-1] // SWIZZLE_COLUMNS if s.scale_layout == "swizzled" else 0
    return {"row_stride": row_stride, "column_stride": column_stride, "matrix_stride": matrix_stride,
            "scale_tiles": scale_tiles}


def block_shift(block: int | None, extent: int) -> int:
    """Return log2 of a block's extent. A block of None, or one larger than the array, covers everything."""
    everything = max(SMALLEST_BLOCK, extent).bit_length()
    return everything if block is None else min(block.bit_length() - 1, everything)


def _transposed_variant(source: np.dtype[Any], to: np.dtype[Any], tile: shapes.Tile) -> Variant:
    # Shared memory: the tile, and the f32 scales of its blocks, which have at least SMALLEST_BLOCK elements.
    return _BLOCKS_TRANSPOSED.variant(
        block=tile.block, shared=tile.shared + tile.shared // SMALLEST_BLOCK * 4, IN=source, OUT=to,
        **tile.defines, ALIGNED=tile is not shapes.SMALL)


def variants() -> Iterator[Variant]:
    """Yields every variant that blocks or transposed data may launch. Other calls launch those of `convert`.
    """
    for source, to in product(FP8_DTYPES, INPUT_DTYPES):
        yield _LONG_ROW.variant(IN=source, OUT=to)
        for swizzled in (False, True):
            yield _BLOCKS.variant(IN=source, OUT=to, SWIZZLED=swizzled)
        for tile in (shapes.SMALL, _TRANSPOSED):
            yield _transposed_variant(source, to, tile)
