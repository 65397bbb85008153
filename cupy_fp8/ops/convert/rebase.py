"""Changes the blocks of data with power-of-two scales. Kernel: kernels_cu/convert/rebase.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array, address, asnumpy
from ...calls import validate
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, Written
from ...formats import FP8_DTYPES, as_dtype, flag, float8_e8m0fnu, float32, names
from ...kernels import Kernel, Launch, Variant, grid_size
from ...layouts import (
    LAYOUTS_WITH_STRIDES,
    SCALE_DTYPES,
    Block,
    ScaleLayout,
    as_block,
    cdiv,
    scale_dtype,
    scale_shape,
    swap_last,
)
from ...methods import for_methods
from ...reference.convert.dequantize import block_scales
from ...results import Quantized, Scaled, row_wise
from ..scales.convert import Conversion, conversion, conversion_launches
from .dequantize import block_shift
from .scaling_aware import check_powers_of_two

_KERNEL = Kernel("convert/rebase", "rebase_scales", block=256)
_TILE_LOG2 = 10                             # log2 of the 16-byte chunks in a tile
_CHUNK_LOG2 = 4                             # log2 of the elements in a chunk
_WARP_LOG2 = 5
#: log2 of a tile's chunks side by side: usually 5, so that a warp reads 512 adjacent bytes; at most one per
#: thread.
_CHUNKS_ACROSS_LOG2, _MOST_ACROSS_LOG2 = 5, 8
#: layouts that the kernel itself does not read or write
_OTHER_LAYOUTS = ("swizzled", "deepgemm_sm100")


@for_methods
def rebase_scales(q: Scaled | Quantized, *, block: Sequence[int | None], scale_dtype: Any = None,
                  scale_layout: ScaleLayout = "compact", changed: Array | None = None, check: bool = False,
                  out: Scaled | None = None) -> Scaled:
    """FP8 with other blocks of power-of-two scales: exponents move, nothing is dequantised or quantised
    twice. It makes 1×128 or 128×128 blocks of MX data (1×32), for GPUs that multiply no MX blocks.

        out = cast(data * s / t)        s: the scale of the element, t: that of its new block

    t is the smallest power of two under which all values of the new block fit (1 if it has only zeros). Each
    element is rounded once, to nearest even, subnormals included. It changes only if it is below the smallest
    normal number under t and lies between two of the subnormals there. ±0 stays ±0, and NaN becomes 0x7F.
    docs/numerics.md section 4 defines every byte.

    Parameters
    ----------
    q : Scaled (or the row-wise part of a Quantized) of shape (…, M, K), float8_e4m3fn or float8_e5m2, whose
        scales are powers of two: float8_e8m0fnu, or float32 (2**-149 to 2**127, or 0, as unused rows of
        `permute` have it). Blocks are (1, B) or (B, B'), or one scale for the tensor; of data stored
        transposed (`.T` too) they are (B, 1). Scales have any layout
    block : the new blocks, which may be larger or smaller than those of q, in the same direction: (1, B) or
        (B, B'), of data stored transposed (B, 1); B a power of two of 32 or more, None for a whole row. No
        block has elements of two matrices
    scale_dtype : of the new scales, float8_e8m0fnu or float32. None: that of q's scales if the layout holds
        it
    scale_layout : of the new scales: 'compact', 'gemm_ready' or 'deepgemm_sm90' (f32), 'swizzled' (E8M0) or
        'deepgemm_sm100' (words of E8M0 scales)
    changed : int64 array of one element, to which the call adds how many values are not what they were: those
        whose data * scale is not exactly the same number. NaN counts as unchanged. (e5m2: Inf becomes the
        largest value, and counts)
    check : wait for the device and raise ValueError if scales there are no powers of two. (NumPy arrays are
        always examined)
    out : an earlier result; written in place and returned. With it the call allocates nothing and can be
        captured into a CUDA graph; with scales in 'swizzled' or 'deepgemm_sm100' once it has been used before

    Returns
    -------
    Scaled, stored as q is.

    Raises
    ------
    TypeError, ValueError, DeviceError, before anything is written. A float32 scale on the device that is
    neither a power of two nor 0 raises nothing, but `device_errors` reports it: its block of q becomes 0x7F,
    and the scales of the new blocks that it touches become NaN.

    Source: docs/numerics.md; the rule of `scaling_aware_transpose`. Bytes moved: data once in, once out, and
    the scales. Blocks of more than 16384 elements are read twice, mostly from the L2.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_mx(np.float32([[448] * 32 + [1] * 32]))
    >>> count = np.zeros(1, np.int64)
    >>> r = fp8.rebase_scales(q, block=(1, 128), scale_dtype=np.float32, changed=count)
    >>> r.scale_inv.tolist(), r.data[0, ::32].astype(np.float32).tolist(), count.tolist()
    ([[1.0]], [448.0, 1.0], [0])
    """
    given = row_wise(q), as_block(block), scale_dtype, scale_layout, changed, check
    result: Scaled = run(_REBASE, given, out)
    return result


class _Result(Description):
    """Description of a Scaled with blocks, stored in the order of q."""

    def __init__(self, s: Scaled, block: Block, layout: str, dtype: np.dtype[Any]) -> None:
        self._facts = s.shape, s.transposed, block, layout
        shape = scale_shape(s.shape, block, layout, s.transposed)
        super().__init__(Written("out.data", s.data.shape, s.dtype), Written("out.scale_inv", shape, dtype))

    def build(self, arrays: Sequence[Array]) -> Scaled:
        data, scale_inv = arrays
        return Scaled._of(data, scale_inv, *self._facts)

    def arrays_of(self, out: Any) -> Sequence[Array]:
        if not isinstance(out, Scaled):
            raise TypeError(f"out: expected a Scaled (an earlier result), got {type(out).__name__}")
        if (out.shape, out.transposed, out.block, out.scale_layout) != self._facts:
            shape, transposed, block, layout = self._facts
            how = " stored transposed" if transposed else ""
            raise ValueError(f"out: expected shape {shape}{how}, block {block}, {layout} scales; got "
                             f"{out!r}, scales {out.scale_layout}")
        return out.data, out.scale_inv


class _Inputs(NamedTuple):
    s: Scaled
    data: Input
    scales: Input
    block: Block
    layout: str
    dtype: np.dtype[Any]
    changed: Input | None
    before: Conversion | None           # converts the scales to compact ones
    after: Conversion | None            # converts the new compact scales to their layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        return self.data.shape

    def stored(self, block: Block) -> Block:
        return (block[1], block[0]) if self.s.transposed else block


class _Rebase(Op[_Inputs]):
    def arguments(self, call: Call, s: Scaled, block: Any, dtype: Any, layout: Any, changed: Any,
                  check: Any) -> _Inputs:
        data, scales = call.read_scaled("q", s, LAYOUTS_WITH_STRIDES)
        scale_shape(s.shape, block, layout, s.transposed)     # raises for blocks that do not exist
        held = _held(layout, s.scale_inv.dtype, dtype)
        _check_direction(s, "q", s.block)
        _check_direction(s, "block", block)
        before, after, raised = None, None, None
        if s.block is not None and s.scale_layout in _OTHER_LAYOUTS:
            before = conversion(s.scale_layout, "compact", *_as_converted(s, s.block), scales.dtype,
                                float8_e8m0fnu)
        if changed is not None:
            raised = call.update("changed", changed, np.dtype(np.int64))
            if raised.array.size != 1:
                raise ValueError(f"changed: expected one element, got shape {raised.shape}")
        if layout in _OTHER_LAYOUTS:
            after = conversion("compact", layout, *_as_converted(s, block), float8_e8m0fnu)
        if (flag(check, "check") or call.xp is np) and s.scale_inv.dtype == float32:
            call.repeatable = False
            validate.may_wait(s.scale_inv)
            host = Scaled._of(s.data, asnumpy(s.scale_inv), s.shape, s.transposed, s.block, s.scale_layout)
            check_powers_of_two(host.scale_inv if s.block is None else block_scales(host))
        return _Inputs(s=s, data=data, scales=scales, block=block, layout=layout, dtype=held, changed=raised,
                       before=before, after=after)

    def result(self, inputs: _Inputs) -> Description:
        return _Result(inputs.s, inputs.block, inputs.layout, inputs.dtype)

    def reference(self, inputs: _Inputs) -> Scaled:
        changed = None if inputs.changed is None else inputs.changed.array
        return reference.rebase_scales(inputs.s, block=inputs.block, scale_dtype=inputs.dtype,
                                       scale_layout=inputs.layout, changed=changed)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        s, shape, data = inputs.s, inputs.shape, inputs.data
        if not data.array.size:
            return
        scales_at, new_at = inputs.scales.at, written[1]
        strides = _source_strides(inputs)
        if inputs.before is not None and s.block is not None:
            scratch = _scratch(call, "compact_scales", inputs.before.shape)
            scales_at, strides = scratch.at, _strides(inputs.before.shape, s, s.block, "compact")
            yield from conversion_launches(call, inputs.before, inputs.scales, scales_at)
        layout, new_scales = inputs.layout, Input(data.array, 0)
        if inputs.after is not None:
            layout = "compact"
            new_scales = _scratch(call, "new_scales", inputs.after.source_shape)
            new_at = new_scales.at
        new_shape = scale_shape(s.shape, inputs.block, layout, s.transposed)
        old = block_shifts(inputs.stored(s.block), shape) if s.block else block_shifts((None, None), shape)
        new = block_shifts(inputs.stored(inputs.block), shape)
        tiling = choose_tiling(shape, new)
        f32_scales = inputs.before is None and s.scale_inv.dtype == float32
        aligned = shape[-1] % 16 == 0 and data.at % 16 == 0 and written[0] % 16 == 0
        yield _KERNEL.variant(IN=data.dtype, ALIGNED=aligned).bind(
            data.array, grid_size(prod(shape[:-2]) * tiling.down * tiling.across, shape), data=data.at,
            out=written[0], scales=scales_at, new_scales=new_at,
            errors=call.error_word() if f32_scales else 0,
            changed=inputs.changed.at if inputs.changed else 0, rows=shape[-2], columns=shape[-1],
            row_shift=old[0], column_shift=old[1], new_row_shift=new[0], new_column_shift=new[1],
            f32_scales=int(f32_scales), new_f32_scales=int(inputs.dtype == float32), **strides._asdict(),
            **{f"new_{name}": stride
               for name, stride in _strides(new_shape, s, inputs.block, layout)._asdict().items()},
            **tiling._asdict(), **_padding(shape, new, layout, inputs.block))
        if inputs.after is not None:
            yield from conversion_launches(call, inputs.after, new_scales, written[1])


_REBASE = _Rebase()


# ---- arguments ----
def _held(layout: str, before: np.dtype[Any], dtype: Any) -> np.dtype[Any]:
    """Returns the dtype of the new scales."""
    if dtype is None:
        return scale_dtype(before, layout)
    new_dtype = as_dtype(dtype, "scale_dtype", "one that scales have")
    if new_dtype not in SCALE_DTYPES[layout]:
        raise TypeError(f"scale_dtype: {layout} scales are {names(SCALE_DTYPES[layout])}, got {new_dtype}")
    return new_dtype


def _check_direction(s: Scaled, name: str, block: Block | None) -> None:
    """Raise ValueError for blocks across the rows of the stored data."""
    if block is None or block[0 if s.transposed else 1] != 1:
        return
    wanted = "(B, 1) or (B, B'), along the rows of data stored transposed" if s.transposed else \
        "(1, B) or (B, B'), along the rows of data not stored transposed"
    if name == "q":
        raise ValueError(f"q: expected blocks of {wanted}; got {s!r}; rebase the other direction, or "
                         "dequantise and quantise again")
    raise ValueError(f"{name}: expected {wanted}; got {block}")


def _as_converted(s: Scaled, block: Block) -> tuple[tuple[int, ...], Block]:
    """Return the shape and the block for `convert_scales`: scales of 2-D blocks follow the stored data."""
    if s.transposed and 1 not in block:
        return swap_last(s.shape), (block[1], block[0])
    return s.shape, block


def _scratch(call: Call, use: str, shape: tuple[int, ...]) -> Input:
    """Returns memory for E8M0 scales."""
    words = call.scratch(use, cdiv(prod(shape), 4))
    scales = words.view(np.uint8)[:prod(shape)].view(float8_e8m0fnu).reshape(shape)
    return Input(scales, address(words))


# ---- the launch ----
class _ScaleStrides(NamedTuple):
    """Strides of scales, of data as stored: down, to the right, to the next matrix."""

    row_stride: int
    column_stride: int
    matrix_stride: int


def _strides(shape: tuple[int, ...], s: Scaled, block: Block, layout: str) -> _ScaleStrides:
    """Returns the strides of C-contiguous scales of this shape."""
    return _turned((shape[-2] * shape[-1], shape[-1], 1), s, block, layout)


def _source_strides(inputs: _Inputs) -> _ScaleStrides:
    s = inputs.s
    if s.block is None:
        return _ScaleStrides(0, 0, 0)
    strides = validate.matrix_strides(inputs.scales.array)
    assert strides is not None
    return _turned(strides, s, s.block, str(s.scale_layout))


def _turned(strides: tuple[int, int, int], s: Scaled, block: Block, layout: str) -> _ScaleStrides:
    """strides: matrix, row and column strides of the array of scales, whose rows are lines of blocks
    (compact), or whose columns are (compact for data stored transposed, and other layouts)."""
    matrix, row, column = strides
    if 1 in block and (layout != "compact" or s.transposed):
        row, column = column, row
    return _ScaleStrides(row, column, matrix)


def block_shifts(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns log2 of a block's extents."""
    return block_shift(block[0], shape[-2]), block_shift(block[1], shape[-1])


def _padding(shape: tuple[int, ...], shifts: tuple[int, int], layout: str, block: Block) -> dict[str, int]:
    """Return the grid of new blocks, and the padding of scales after it."""
    rows, columns = (cdiv(extent, 1 << shift) for extent, shift in zip(shape[-2:], shifts, strict=True))
    pads = layout in ("gemm_ready", "deepgemm_sm90")
    return {"new_rows": rows, "new_columns": columns, "pad_rows": -rows % 4 if pads and 1 in block else 0,
            "pad_columns": -columns % 4 if pads and 1 not in block else 0}


class RebaseTiling(NamedTuple):
    """How thread blocks share a matrix: members of the kernel's struct."""

    down: int
    across: int
    chunks_log2: int
    targets_down_log2: int
    targets_across_log2: int
    steps_down: int
    steps_across: int
    lanes_log2: int


def choose_tiling(shape: tuple[int, ...], shifts: tuple[int, int]) -> RebaseTiling:
    """Return a tile that holds whole new blocks if possible, else a part of one. shifts: log2 of their
    extents."""
    rows, columns = shape[-2:]
    block_rows, block_chunks = shifts[0], shifts[1] - _CHUNK_LOG2
    # this many chunks across leave room for the rows of a block
    most = min(_MOST_ACROSS_LOG2, _TILE_LOG2 - min(block_rows, _TILE_LOG2))
    if block_chunks <= most:
        row_chunks = max(1, (cdiv(columns, 1 << _CHUNK_LOG2) - 1).bit_length())
        across = min(max(min(_CHUNKS_ACROSS_LOG2, row_chunks), block_chunks), most)
    else:
        across = min(block_chunks, max(_CHUNKS_ACROSS_LOG2, most))
    down = _TILE_LOG2 - across
    targets_down, targets_across = max(0, down - block_rows), max(0, across - block_chunks)
    lanes = across - targets_across if targets_across else across + down - targets_down
    region_rows, region_columns = max(down, block_rows), max(across + _CHUNK_LOG2, shifts[1])
    return RebaseTiling(cdiv(rows, 1 << region_rows), cdiv(columns, 1 << region_columns), across,
                        targets_down, targets_across,
                        cdiv(min(1 << region_rows, rows), 1 << down) if block_rows > down else 1,
                        cdiv(min(1 << region_columns, columns), 1 << across + _CHUNK_LOG2)
                        if block_chunks > across else 1,
                        min(_WARP_LOG2, lanes))


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for dtype, aligned in product(FP8_DTYPES, (False, True)):
        yield _KERNEL.variant(IN=dtype, ALIGNED=aligned)
