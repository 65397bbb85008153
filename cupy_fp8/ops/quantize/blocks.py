"""Quantises in blocks with f32 scales: 1 x 128, 128 x 1, 128 x 128 and others. Kernels:
kernels_cu/quantize/blocks.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array
from ...calls.call import Call, run
from ...directions import Direction, block_directions
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, FP8DType, flag, float8_e4m3fn, float16, float32
from ...kernels import Kernel, Launch, Variant, grid_size
from ...kernels.shapes import LANE_COLUMNS, WARP_TILE_COLUMNS, WARP_TILE_ROWS, WarpTiles
from ...layouts import Block, as_block, cdiv
from ...methods import for_methods
from ...options import (
    BlockProfileName,
    BlockScaleLayout,
    block_eps,
    block_pow2,
    check_block_options,
)
from ...recipes import BlockScaling
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
    logical_shape,
    stored_as,
)
from .quantized_result import Addresses

_TILE = Kernel("quantize/blocks", "quantize_block_tile")
_WHOLE_VECTORS = Kernel("quantize/whole_vectors", "quantize_whole_vectors")
#: elements of the smallest block: a quarter of a warp tile's row
_SMALLEST = 32
_NO_SCALES = {"row": 1, "column": 1}
_NO_BLOCKS = Axis(None, ABSENT, None, _NO_SCALES)

_ACROSS = WarpTiles(1, 8, down_first=False)        # writes 32 bytes of a row's compact scales
_DOWN = WarpTiles(4, 1, down_first=False)
_GATHERED = WarpTiles(8, 1, down_first=False)      # writes 256 bytes of a transposed row
ANY_SHAPE = _GATHERED
_WIDE = WarpTiles(4, 2, down_first=False)          # a compromise
_WARPS = 4                                          # warps per thread block of quantize_block_rows
_LOAD_BYTES = 16                                    # bytes per load of it
_ROWS = Kernel("quantize/block_rows", "quantize_block_rows", block=32 * _WARPS)
#: shared memory for the scales of a warp tile's rows and columns, in bytes
_ROW_BYTES, _COLUMN_BYTES = 2 * 4 * (WARP_TILE_ROWS + 4) * 4, WARP_TILE_COLUMNS * 4
#: shared memory per column of a row segment, in bytes (kernels_cu/include/tile/column_segment.cuh)
_SEGMENT_BYTES = 64

#: Flags of the BlockRule of kernels_cu/include/scale/block_scale.cuh.
_AMAX_FIRST, _GUARDED, _ROUND_DOWN, _ROUND_UP, _OTHER_QUOTIENT, _OTHER_PRODUCT = 1, 2, 4, 8, 16, 32


@for_methods
def quantize_block(x: Array, block: tuple[int | None, int | None] = (1, 128), *,
                   dtype: FP8DType = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                   transposed: bool = True, pow2_scale: bool | None = None, eps: float | None = None,
                   profile: BlockProfileName = "te", scale_layout: BlockScaleLayout = "gemm_ready",
                   noop: Array | None = None, out: Quantized | None = None) -> Quantized:
    """Quantise to FP8 in blocks, each with an f32 scale of its own.

        s = fp8_max / max |x| over the block      data = cast(x * s)      scale_inv = 1 / s

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 3 says. One
    kernel reads x once and writes everything, both directions included (blocks of a whole line: one kernel
    per direction, which reads x twice).

    Parameters
    ----------
    x : bfloat16, float16 or float32 array […, M, K] of two or three dimensions (a batch: each matrix by
        itself). An array whose last two axes are swapped in memory is read as it is; any other view is copied
        first
    block : (1, 128), (1, 64), (1, 32), (1, None) (whole rows), their transposes such as (128, 1), or (128,
        128): the row-wise block, in rows and columns of x; column-wise blocks are its transpose, found from x
        with their own amax. Blocks at the ends are smaller
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : the directions
    transposed : store the column-wise data […, K, M], which matrix products want
    pow2_scale : scales are powers of two. None: the profile's own (te: True, the others False)
    eps : the amax is at least this, in f32. None: the profile's own (te 0, deepgemm and tilekernels 1e-4,
        vllm and sglang 1e-10, torchao 1e-12)
    profile : whose arithmetic: 'te', 'deepgemm', 'tilekernels', 'vllm', 'sglang' or 'torchao'. They differ in
        roundings, and in what a block with Inf gives
    scale_layout : of scale_inv, f32, padding 0. 1-D blocks: 'gemm_ready' and 'deepgemm_sm90' […, blocks,
        lines rounded up to 4], 'compact' […, M, ceil(K/128)] and […, ceil(M/128), K]. Blocks of 128 x 128:
        'compact' has one scale for each in the order in which the data are stored, 'gemm_ready' the same with
        rows rounded up to 4. See docs/layouts.md
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    out : an earlier result of the same shape and options (or ``recipe.empty(…)``); written in place and
        returned. With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, its scale_inv float32. With blocks of (128, 128) and without `transposed` both directions are
    the same Scaled.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, options and overlaps,
    DeviceError; all before anything is written.

    Source: DeepSeek-V3 (arXiv 2412.19437); TransformerEngine, DeepGEMM, TileKernels, vLLM, SGLang, torchao.
    Bytes moved per element: x + 1 + 4/128 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> x = np.zeros((1, 256), np.float32)
    >>> x[0, :2], x[0, 200] = (448, 3), 0.3
    >>> q = fp8.quantize_block(x)
    >>> q.scale_inv.tolist(), q.data.astype(np.float32)[0, [0, 1, 200]].tolist()
    ([[1.0, 0.0, 0.0, 0.0], [0.0009765625, 0.0, 0.0, 0.0]], [448.0, 3.0, 320.0])
    """
    given = (x, noop, as_block(block), dtype, rowwise, columnwise, transposed, pow2_scale, eps, profile,
             scale_layout)
    result: Quantized = run(QUANTIZE, given, out)
    return result


class BlockOptions(NamedTuple):
    """The options of `quantize_block`."""

    block: Block
    dtype: Any
    rowwise: bool
    columnwise: bool
    transposed: bool
    pow2_scale: bool | None
    eps: float | None
    profile: str
    scale_layout: str

    @classmethod
    def of(cls, recipe: BlockScaling, rowwise: bool, columnwise: bool) -> BlockOptions:
        """Return those of a recipe, which always stores column-wise data transposed."""
        return cls(**vars(recipe), rowwise=rowwise, columnwise=columnwise, transposed=True)


# ---- what follows from shape and options ----
class BlockQuantization(Quantization):
    def __init__(self, shape: tuple[int, ...], source: np.dtype[Any], swapped: bool,
                 options: BlockOptions) -> None:
        block, to, rowwise, columnwise, transposed, pow2_scale, eps, profile, scale_layout = options
        check_block_options(block, profile, scale_layout)
        least = block_eps(eps, profile) + 0.0       # -0 becomes 0: the kernel compares the bits of magnitudes
        pow2 = block_pow2(pow2_scale, profile)
        switches = flag(rowwise, "rowwise"), flag(columnwise, "columnwise"), flag(transposed, "transposed")
        directions = block_directions(logical_shape(shape, swapped), to, *switches, block, scale_layout)
        super().__init__(shape, source, swapped, options, directions, "block-scaled")
        self.compact, self.square = scale_layout == "compact", 1 not in block
        self.rule, self.divide = _rule(source, to, pow2, least, profile), profile == "vllm" and not pow2

    def axes(self, names: list[str]) -> tuple[Axis, Axis]:
        """Return what a kernel of warp tiles writes for these directions, along rows and along columns of
        memory."""
        rows, columns = (name if name in names else None for name in (
            ("rowwise", "columnwise") if (self.block[0] == 1) != self.swapped else ("columnwise", "rowwise")))
        written: list[tuple[int, str | None]] = [
            (stored_as(self.directions[name], self.swapped) if name else ABSENT, name)
            for name in (rows, columns)]
        if self.square:
            # Both directions have the same codes, so each order of storage is written once.
            name_of = dict(written)
            written = [(stored, name_of[stored]) if stored in name_of else (ABSENT, None)
                       for stored in (AS_IS, TRANSPOSED)]
        (rows_stored, rows_data), (columns_stored, columns_data) = written
        return (Axis(rows_data, rows_stored, rows, _strides(self.directions.get(rows or ""), self.swapped)),
                Axis(columns_data, columns_stored, columns,
                     _strides(self.directions.get(columns or ""), self.swapped)))

    def members(self, axes: tuple[Axis, Axis]) -> Members:
        """Return members of the struct of a kernel of warp tiles that do not depend on memory."""
        length = (self.block[0] if self.block[1] == 1 else self.block[1]) or _SMALLEST
        return {
            "rows": self.rows,
            "columns": self.columns,
            "rule": self.rule,
            "subblocks_per_block": length // _SMALLEST,
            "divide": int(self.divide),
            "square": int(self.square),
            "stored": axes[0].stored | axes[1].stored << 2,
        }


def _rule(source: np.dtype[Any], to: np.dtype[Any], pow2: bool, eps: float,
          profile: str) -> Members:
    """Return the BlockRule of kernels_cu/include/scale/block_scale.cuh."""
    target = np.float32(FORMATS[to].max)
    flags = {"te": _GUARDED, "deepgemm": _AMAX_FIRST, "tilekernels": _OTHER_QUOTIENT, "vllm": _AMAX_FIRST,
             "sglang": _OTHER_PRODUCT, "torchao": 0}[profile]
    if pow2:
        flags = _GUARDED | _ROUND_DOWN if profile == "te" else _AMAX_FIRST | _ROUND_UP
    low, high = (0x00800000, 0x7F000000) if profile == "deepgemm" else (0x00400000, 0x7F800000)
    return {"target": float(target), "reciprocal": float(np.float32(1) / target), "eps": eps,
            "largest": float(FORMATS[source].max), "low": low, "high": high, "flags": flags}


def _strides(direction: Direction | None, swapped: bool) -> dict[str, int]:
    """Return the ScaleGrid of kernels_cu/include/scale/block_scale.cuh without its address."""
    if direction is None:
        return _NO_SCALES
    assert direction.block is not None
    *_, rows, columns = direction.scale_shape
    lines_first = direction.block[0] == 1 and direction.scale_layout != "compact"
    # whether rows of blocks in memory are columns of scale_inv
    if (lines_first or (1 not in direction.block and direction.transposed)) != swapped:
        return {"matrix": rows * columns, "row": 1, "column": columns, "rows": columns, "columns": rows}
    return {"matrix": rows * columns, "row": columns, "column": 1, "rows": rows, "columns": columns}


# ---- launches ----
class _QuantizeBlock(BlockOp):
    options = BlockOptions
    quantization = BlockQuantization
    definition = reference.quantize_block

    def launches(self, call: Call, inputs: Inputs, *written: int) -> Iterator[Launch]:
        quantization: BlockQuantization = inputs.quantization
        if not quantization.size:
            return
        addresses = quantization.result.addresses(written)
        names = quantization.directions.distinct
        if None in quantization.block:
            yield from (_whole_vectors_launch(call, inputs, name, addresses) for name in names)
        else:
            axes = quantization.axes(names)
            yield (_rows_launch(call, inputs, axes, addresses)
                   or _tile_launch(call, inputs, axes, addresses))


def _whole_vectors_launch(call: Call, inputs: Inputs, name: str, addresses: Addresses) -> Launch:
    """Returns the launch of quantize_whole_vectors, which writes one direction of blocks of whole rows or
    columns."""
    quantization, x, direction = inputs.quantization, inputs.x, inputs.quantization.directions[name]
    along_rows = (direction.block[0] == 1) != quantization.swapped
    axis = Axis(name, stored_as(direction, quantization.swapped), name,
                _strides(direction, quantization.swapped))
    tile = _ACROSS if along_rows else _GATHERED
    tiles = cdiv(quantization.rows, tile.rows) if along_rows else cdiv(quantization.columns, tile.columns)
    matrices = quantization.size // (quantization.rows * quantization.columns)
    members = quantization.warp_tile_members((axis, _NO_BLOCKS), addresses,
                                             x.at % (LANE_COLUMNS * x.dtype.itemsize) == 0)
    return _whole_vectors_variant(quantization.source, quantization.to, along_rows).bind(
        x.array, grid_size(matrices * tiles, quantization.shape), x=x.at, noop=call.noop_at, **members,
        rows=quantization.rows, columns=quantization.columns, rule=quantization.rule, subblocks_per_block=1,
        divide=int(quantization.divide), stored=axis.stored)


def _rows_launch(call: Call, inputs: Inputs, axes: tuple[Axis, Axis],
                 addresses: Addresses) -> Launch | None:
    """Returns the launch of quantize_block_rows, which writes whole blocks of 128 along rows of memory, data
    in x's order. None for other calls, and if memory does not allow the kernel's accesses."""
    quantization, x = inputs.quantization, inputs.x
    stored = axes[0].stored, axes[1].stored
    length, warp_blocks = _ROWS.constant("kLength"), _ROWS.constant("kWarpBlocks")
    whole_blocks = set(quantization.block) == {1, length} and quantization.columns % length == 0
    if not whole_blocks or stored != (AS_IS, ABSENT):
        return None
    members = quantization.warp_tile_members(axes, addresses, x.at % _LOAD_BYTES == 0,
                                             _LOAD_BYTES // x.dtype.itemsize)
    if members["vector"] != ALL_WIDE:
        return None
    rows, across = axes[0].strides["rows"], axes[0].strides["columns"]
    rows_adjoin = axes[0].strides["row"] == 1
    warps = cdiv(rows, warp_blocks) * across if rows_adjoin else cdiv(rows * across, warp_blocks)
    matrices = quantization.size // (quantization.rows * quantization.columns)
    return _ROWS.variant(IN=quantization.source, OUT=quantization.to, DIVIDE=quantization.divide).bind(
        x.array, grid_size(matrices * cdiv(warps, _WARPS), quantization.shape), x=x.at, noop=call.noop_at,
        **members, **quantization.members(axes))


def _tile_launch(call: Call, inputs: Inputs, axes: tuple[Axis, Axis], addresses: Addresses) -> Launch:
    """Returns the launch of quantize_block_tile, which writes everything else, both directions at once."""
    quantization, x = inputs.quantization, inputs.x
    source, to, square = quantization.source, quantization.to, quantization.square
    members = quantization.warp_tile_members(axes, addresses, x.at % (LANE_COLUMNS * x.dtype.itemsize) == 0)
    stored = axes[0].stored, axes[1].stored
    tile = None
    if members["vector"] == ALL_WIDE and not quantization.divide:
        tile = warp_tiles_of(source, *stored, square, quantization.compact)
    variant = tile_variant(source, to, *stored, square, tile) if tile else any_shape_variant(source, to)
    return variant.bind(x.array, (tile or ANY_SHAPE).grid(quantization.shape), x=x.at, noop=call.noop_at,
                        **members, **quantization.members(axes))


QUANTIZE = _QuantizeBlock()


# ---- programs ----
def warp_tiles_of(source: np.dtype[Any], rows: int, columns: int, square: bool,
                  compact: bool) -> WarpTiles | None:
    """Return the tile of the program for wide accesses, without division. None for rare cases, which have no
    program: blocks along columns whose data are not stored transposed, and squares of float16."""
    if rows == TRANSPOSED or columns == AS_IS or (square and source == float16):
        return None
    if columns == ABSENT:
        return _DOWN if square else _ACROSS
    if rows == ABSENT:
        return _GATHERED._replace(down_first=True)
    if source == float32:
        return _DOWN
    return _WIDE if compact and source != float16 and not square else _GATHERED


def tile_variant(source: np.dtype[Any], to: np.dtype[Any], rows: int, columns: int, square: bool,
                 warp_tiles: WarpTiles, aligned: bool = True, kernel: Kernel = _TILE) -> Variant:
    """Returns the variant of the tile kernel for arrays, or for groups (ops/quantize/grouped_blocks.py)."""
    keeps_columns = not aligned or columns != ABSENT or square
    keeps_rows = not aligned or (rows != ABSENT and not square)
    per_warp_tile = _COLUMN_BYTES * keeps_columns + _ROW_BYTES * keeps_rows
    shared = (rows, columns).count(TRANSPOSED) * warp_tiles.tile
    shared += warp_tiles.down * warp_tiles.across * per_warp_tile
    shared += _SEGMENT_BYTES * warp_tiles.columns * (warp_tiles.tiles_per_block > 1)
    of_groups = {} if kernel is _TILE else {"TILES_PER_BLOCK": warp_tiles.tiles_per_block}
    return kernel.variant(block=warp_tiles.block, shared=shared, IN=source, OUT=to, ALONG_ROWS=rows,
                          ALONG_COLUMNS=columns, SQUARE=square, ALIGNED=aligned,
                          **warp_tiles.defines, **of_groups)


def any_shape_variant(source: np.dtype[Any], to: np.dtype[Any], kernel: Kernel = _TILE) -> Variant:
    """Return the program for arrays whose rows do not allow wide accesses, and for rare cases. What to store,
    and how, are run-time values."""
    return tile_variant(source, to, TRANSPOSED, TRANSPOSED, False, ANY_SHAPE, False, kernel)


def _whole_vectors_variant(source: np.dtype[Any], to: np.dtype[Any], along_rows: bool) -> Variant:
    warp_tiles = _ACROSS if along_rows else _GATHERED
    per_warp_tile = _ROW_BYTES // 2 if along_rows else _COLUMN_BYTES
    return _WHOLE_VECTORS.variant(
        block=warp_tiles.block, shared=warp_tiles.tile + warp_tiles.down * warp_tiles.across * per_warp_tile,
        IN=source, OUT=to, ALONG_ROWS=along_rows, WARP_TILES_DOWN=warp_tiles.down,
        WARP_TILES_ACROSS=warp_tiles.across)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield any_shape_variant(source, to)
        for divide in (False, True):
            yield _ROWS.variant(IN=source, OUT=to, DIVIDE=divide)
        for along_rows in (False, True):
            yield _whole_vectors_variant(source, to, along_rows)
        for (rows, columns), square, compact in product(
                ((AS_IS, ABSENT), (ABSENT, TRANSPOSED), (AS_IS, TRANSPOSED)), (False, True), (False, True)):
            if warp_tiles := warp_tiles_of(source, rows, columns, square, compact):
                yield tile_variant(source, to, rows, columns, square, warp_tiles)
