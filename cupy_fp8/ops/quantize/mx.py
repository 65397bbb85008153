"""Quantises to MX: blocks of 32 elements with E8M0 scales. Kernels: kernels_cu/quantize/mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array
from ...calls.call import Call, run
from ...directions import Direction, mx_directions
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, FP8DType, flag, float8_e4m3fn, float16, float32
from ...kernels import Kernel, Launch, Variant, shapes
from ...kernels.shapes import LANE_COLUMNS, WarpTiles
from ...layouts import SWIZZLE_COLUMNS, as_block, cdiv, scale_grid
from ...methods import for_methods
from ...options import MXMode, MXProfile, MXScaleLayout, check_mx_options
from ...recipes import MXScaling
from ...results import Quantized
from .block_quantization import (
    ABSENT,
    ALL_WIDE,
    AS_IS,
    TRANSPOSED,
    Axis,
    BlockOp,
    Inputs,
    Members,
    Quantization,
    destinations,
    logical_shape,
    stored_as,
)
from .quantized_result import Addresses

_ROWS = Kernel("quantize/mx", "quantize_mx_rows", block=shapes.ELEMENTWISE_THREADS)
_TILE = Kernel("quantize/mx", "quantize_mx_tile")
_BLOCK = 32
_NO_SCALES = {"line": 1, "block": 1}            # a line stride of 0 would mean swizzled scales

#: storage along rows and along columns of memory that has programs
_STORED_BOTH_WAYS = ((AS_IS, ABSENT), (TRANSPOSED, ABSENT), (ABSENT, AS_IS), (ABSENT, TRANSPOSED),
                     (AS_IS, AS_IS), (AS_IS, TRANSPOSED))
# With 128 lines the swizzled scales of a tile of 128 x 128 elements are contiguous.
_SWIZZLED = WarpTiles(4, 1, down_first=False)
_COMPACT = WarpTiles(1, 8, down_first=False)       # writes 32 bytes of a row's scales or data
_GATHERED = WarpTiles(8, 1, down_first=False)      # writes 256 bytes of a transposed row
ANY_SHAPE = _GATHERED


@for_methods
def quantize_mx(x: Array, *, dtype: FP8DType = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                transposed: bool = False, mode: MXMode = "rceil", profile: MXProfile = "te",
                block: tuple[int, int] = (1, 32), scale_layout: MXScaleLayout = "compact",
                noop: Array | None = None, out: Quantized | None = None) -> Quantized:
    """Quantise to MXFP8: every 32 neighbouring elements share a scale, a power of two kept as one E8M0 byte.

        e = scale byte of max |x| over the block    data = cast(x * 2**(127 - e))    scale_inv = 2**(e - 127)

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 2 says. One
    kernel reads x once and writes everything, both directions included.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array […, M, K] of two or three dimensions (a batch: each matrix by
        itself). An array whose last two axes are swapped in memory (expert weights with strides (N·K, 1, N),
        say) is read as it is; any other view is copied first
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : blocks of 32 along K, blocks of 32 along M; the last one of a line may be shorter
    transposed : store the column-wise data […, K, M], which products here and most libraries want. False, as
        all of MX is stored here, recipes included: TransformerEngine has its columns so
    mode : how the block's amax becomes e: 'rceil' (amax / fp8_max rounded up to a power of two), 'floor' (OCP
        MX v1.0: large elements may saturate), 'ceil', 'even'
    profile : 'te' (NaN is ignored by the amax and stays NaN; a block with Inf gets e = 254) or 'torchao' (NaN
        or Inf makes its whole block NaN, e = 255)
    block : (1, 32), or (32, 32): one amax for 32 x 32 elements, whose scale either direction repeats for its
        lines
    scale_layout : 'compact' (row-wise […, M, ceil(K/32)], column-wise […, ceil(M/32), K]) or 'swizzled'
        (tiles of 128 lines x 4 blocks, as cuBLAS reads them: […, lines rounded up to 128, blocks rounded up
        to 4], padding 0; see docs/layouts.md)
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty(…)``); written in place and
        returned. With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, its scale_inv float8_e8m0fnu. With blocks of (32, 32) and without `transposed` both directions
    are the same data array.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written.

    Source: OCP Microscaling Formats v1.0; TransformerEngine's MXFP8; torchao's to_mx. Bytes moved per
    element: x + 1 + 1/32 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.zeros((1, 64), np.float32)
    >>> x[0, :2], x[0, 40] = (448, 3), 0.3
    >>> q = fp8.quantize_mx(x)
    >>> q.scale_inv.view(np.uint8).tolist(), q.data.astype(np.float32)[0, [0, 1, 40]].tolist()
    ([[127, 117]], [448.0, 3.0, 320.0])
    """
    given = (x, noop, dtype, rowwise, columnwise, transposed, mode, profile, as_block(block), scale_layout)
    result: Quantized = run(QUANTIZE, given, out)
    return result


class MxOptions(NamedTuple):
    """The options of `quantize_mx`."""

    dtype: Any
    rowwise: bool
    columnwise: bool
    transposed: bool
    mode: str
    profile: str
    block: tuple[int, int]
    scale_layout: str

    @classmethod
    def of(cls, recipe: MXScaling, rowwise: bool, columnwise: bool) -> MxOptions:
        """Return those of a recipe, which never stores data transposed."""
        return cls(**vars(recipe), rowwise=rowwise, columnwise=columnwise, transposed=False)


# ---- what follows from shape and options ----
class MxQuantization(Quantization):
    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], swapped: bool,
                 options: MxOptions) -> None:
        to, rowwise, columnwise, transposed, mode, profile, block, scale_layout = options
        check_mx_options(mode, profile, block, scale_layout)
        switches = flag(rowwise, "rowwise"), flag(columnwise, "columnwise"), flag(transposed, "transposed")
        directions = mx_directions(logical_shape(shape, swapped), to, *switches, block, scale_layout)
        super().__init__(shape, source, swapped, options, directions, "MX")
        square = block == (_BLOCK, _BLOCK)
        #: whether neighbouring scales down a column of memory are adjacent in scale_inv
        self.scales_adjoin_down = scale_layout == "swizzled" or swapped
        self.axes = _axes(directions, swapped, square)
        self.members: Members = {"n": self.size, "rows": self.rows, "columns": self.columns,
                                 "rule": _rule(to, mode, profile), "square": int(square),
                                 "stored": self.axes[0].stored | self.axes[1].stored << 2}


def _axes(directions: dict[str, Direction], swapped: bool, square: bool) -> tuple[Axis, Axis]:
    """Return what is written for the blocks along rows of memory, which are the row-wise ones unless x is
    swapped in memory, and for those along columns."""
    names = ("columnwise", "rowwise") if swapped else ("rowwise", "columnwise")
    stored = [stored_as(directions.get(name), swapped) for name in names]
    data: list[str | None] = [name if how else None for name, how in zip(names, stored, strict=True)]
    if square:
        # Both directions have the same codes, so each order of storage is written once.
        name_of = dict(zip(stored, names, strict=True))
        both = AS_IS in name_of and TRANSPOSED in name_of
        stored = [AS_IS if both else ABSENT, TRANSPOSED if TRANSPOSED in name_of else AS_IS]
        data = [name_of[how] if how else None for how in stored]
    rows, columns = (Axis(data[i], stored[i], name if name in directions else None,
                          _scale_strides(directions.get(name)))
                     for i, name in enumerate(names))
    return rows, columns


@functools.cache
def _rule(dtype: np.dtype[Any], mode: str, profile: str) -> Members:
    """Returns the MXScaleRule of kernels_cu/include/numerics/e8m0.cuh."""
    fmt = FORMATS[dtype]
    emax = int(np.log2(fmt.max))
    up, half_a_step = 0x7FFFFF, 1 << 23 - fmt.mantissa_bits - 1
    factor, rounding, bias = {"rceil": (float(np.float32(1) / np.float32(fmt.max)), up, 0),
                              "floor": (2.0**-emax, 0, 0), "ceil": (1.0, up, emax),
                              "even": (1.0, half_a_step, emax)}[mode]
    return {"factor": factor, "round": rounding, "bias": bias, "not_finite": 254 if profile == "te" else 255}


def _scale_strides(direction: Direction | None) -> dict[str, int]:
    """Returns the ScaleDestination of kernels_cu/include/numerics/e8m0.cuh without its address."""
    if direction is None:
        return _NO_SCALES
    assert direction.block is not None
    grid = scale_grid(direction.shape, direction.block)
    matrix = direction.scale_shape[-2] * direction.scale_shape[-1]
    if direction.scale_layout == "swizzled":
        return {"matrix": matrix, "line": 0, "block": cdiv(grid.blocks, SWIZZLE_COLUMNS)}
    line, block = (1, grid.outer) if grid.columnwise else (grid.blocks, 1)
    return {"matrix": matrix, "line": line, "block": block}


# ---- launches ----
class _QuantizeMx(BlockOp):
    options = MxOptions
    quantization = MxQuantization
    definition = reference.quantize_mx

    def launches(self, call: Call, inputs: Inputs, *written: int) -> Iterator[Launch]:
        quantization: MxQuantization = inputs.quantization
        if quantization.size:
            addresses = quantization.result.addresses(written)
            yield _rows_launch(call, inputs, addresses) or _tile_launch(call, inputs, addresses)


def _rows_launch(call: Call, inputs: Inputs, addresses: Addresses) -> Launch | None:
    """Returns the launch of quantize_mx_rows, which writes whole blocks along rows of memory, data in x's
    order and scales one after the other. None for other calls."""
    quantization, x = inputs.quantization, inputs.x
    along_rows, along_columns = quantization.axes
    direction = quantization.directions.get(along_rows.scales)
    if (along_rows.stored, along_columns.stored) != (AS_IS, ABSENT) or direction is None:
        return None
    if (direction.block, direction.scale_layout) != ((1, _BLOCK), "compact") or quantization.columns % _BLOCK:
        return None
    members = destinations(quantization.axes, addresses)
    grid, vector = shapes.elementwise_grid(quantization.size, quantization.shape, x.dtype.itemsize, 1, x.at,
                                           members["rows_data"])
    return _ROWS.variant(IN=quantization.source, OUT=quantization.to).bind(
        x.array, grid, x=x.at, noop=call.noop_at, **members, **quantization.members, vector=vector)


def _tile_launch(call: Call, inputs: Inputs, addresses: Addresses) -> Launch:
    """Returns the launch of quantize_mx_tile, which writes everything else, both directions at once."""
    quantization, x = inputs.quantization, inputs.x
    members = quantization.warp_tile_members(quantization.axes, addresses,
                                             x.at % (LANE_COLUMNS * x.dtype.itemsize) == 0)
    stored, tile = (quantization.axes[0].stored, quantization.axes[1].stored), None
    if members["vector"] == ALL_WIDE:
        tile = _wide_tile(quantization.source, *stored, quantization.scales_adjoin_down)
    variant = (tile_variant(quantization.source, quantization.to, *stored, tile) if tile
               else any_shape_variant(quantization.source, quantization.to))
    return variant.bind(x.array, (tile or ANY_SHAPE).grid(quantization.shape), x=x.at, noop=call.noop_at,
                        **members, **quantization.members)


QUANTIZE = _QuantizeMx()


# ---- programs ----
def warp_tiles_of(source: np.dtype[Any], rows: int, columns: int, adjoin_down: bool) -> WarpTiles:
    """Return the choice that is fastest on an H200 (docs/lab-notes). adjoin_down: neighbouring scales down a
    column of memory are adjacent in scale_inv, so a tile has four of them."""
    if TRANSPOSED not in (rows, columns):
        return _SWIZZLED if adjoin_down or not rows else _COMPACT
    if AS_IS not in (rows, columns):
        return _GATHERED._replace(down_first=True)
    return _SWIZZLED if source == float32 else _GATHERED if adjoin_down else _COMPACT


def _wide_tile(source: np.dtype[Any], rows: int, columns: int, adjoin_down: bool) -> WarpTiles | None:
    """Return the tile of the program for wide accesses. None for rare cases, which have no program: both
    directions stored transposed, or both directions of float16 with scales that are adjacent down columns."""
    if (rows, columns) == (TRANSPOSED, TRANSPOSED):
        return None
    if source == float16 and adjoin_down and rows and columns:
        return None
    # Data along rows alone come here for swizzled scales or for partial blocks; quantize_mx_rows writes the
    # others.
    return warp_tiles_of(source, rows, columns, adjoin_down or columns == ABSENT)


def tile_variant(source: np.dtype[Any], to: np.dtype[Any], rows: int, columns: int, warp_tiles: WarpTiles,
                 aligned: bool = True, kernel: Kernel = _TILE) -> Variant:
    """Returns the variant of the tile kernel for arrays, or for groups (ops/quantize/grouped_blocks.py)."""
    # plus shared memory for the scales of both directions
    shared = (rows, columns).count(TRANSPOSED) * warp_tiles.tile + 2 * warp_tiles.tile // _BLOCK
    return kernel.variant(block=warp_tiles.block, shared=shared, IN=source, OUT=to, ALONG_ROWS=rows,
                          ALONG_COLUMNS=columns, ALIGNED=aligned, **warp_tiles.defines)


def any_shape_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    """Return the program for arrays whose rows do not allow wide accesses. What to store, and how, are
    run-time values."""
    return tile_variant(source, to, TRANSPOSED, TRANSPOSED, ANY_SHAPE, False)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _ROWS.variant(IN=source, OUT=to)
        yield any_shape_variant(source, to)
        for (rows, columns), adjoin_down in product(_STORED_BOTH_WAYS, (False, True)):
            if tile := _wide_tile(source, rows, columns, adjoin_down):
                yield tile_variant(source, to, rows, columns, tile)
