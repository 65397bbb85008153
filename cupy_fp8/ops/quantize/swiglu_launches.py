"""Launches of SwiGLU with quantisation: chooses the program for a call and sets its members. Kernels:
kernels_cu/quantize/swiglu_tensor.cu, swiglu_blocks.cu, swiglu_mx.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...calls import row_segments
from ...calls.call import Call, Input
from ...calls.group_sizes import Groups
from ...directions import check_directions
from ...formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn
from ...kernels import Kernel, Launch, Variant, shapes
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_recipe
from ...reference.quantize.swiglu import ALPHA
from ..scales.scale import TensorScaleRule
from . import blocks, mx
from .bias_gradient import ColumnSums, partial_sums
from .quantized_result import QuantizedResult, per_tensor_destinations, per_tensor_result

DIRECTIONS = "rowwise", "columnwise"
#: A kernel's struct is given by the names of its members.
Members = dict[str, Any]

_CAST = Kernel("quantize/swiglu", "swiglu_cast")
_BLOCK = Kernel("quantize/swiglu", "swiglu_block")
_MX = Kernel("quantize/swiglu", "swiglu_mx")
_KERNELS = (_CAST, _BLOCK, _MX)

#: The define PATH has these values (enum Path in kernels_cu/include/swiglu/swiglu.cuh says what each program
#: can do).
ANY, ROWS, TILES, OPTIONS, EXPERTS = "any", "rows", "tiles", "options", "experts"
WIDE, QUOTIENTS = "wide", "quotients"
#: The struct SwigluCall has these flags.
_CLAMPED, _GPT_OSS, _INTERLEAVED, _WIDE = 1, 2, 4, 8

_TILE = shapes.SMALL
#: A thread has so many 16-byte loads in flight for each array (kStages rows of kLoads).
_STAGES = 4
_COLUMN_AMAXES = 4 * (8 * _TILE.columns + 8) * 4    # bytes of shared memory for a tile (struct ColumnAmaxes)
#: A launch that needs no shared memory asks for so many bytes: an array of 0 bytes has no address on the CPU.
_LEAST_SHARED = 16
#: A block of threads takes more tiles only if at least so many blocks remain.
_ENOUGH_BLOCKS = 512
#: The workspace of current scaling has the amax, the number of finished blocks, then the scale.
_WORKSPACE_WORDS, _SCALE_OFFSET = 4, 8


class Inputs(NamedTuple):
    """Holds the validated arguments of a call.

    grad: the gradient of y; a call with it computes that of x. groups: the rows of experts that have biases
    of their own. scale: (address, 0) or (0, value). limit: infinity without clamp. options: those of the
    reference, by name."""

    x: Input
    grad: Input | None
    probs: Input | None
    bias: Input | None
    groups: Groups | None
    scale: tuple[int, float]
    amax_at: int
    limit: float
    gpt_oss: bool
    interleaved: bool
    output: Output
    options: dict[str, Any]

    @property
    def half(self) -> int:
        return self.x.shape[1] // 2


# ---- how recipes store a matrix ----
class Output:
    """Says how a recipe stores a matrix: the kernel, the description of its result, and members of its
    struct.

    row_block: so many elements of a row share a scale, and all of them belong to da or to db. divides:
    whether elements are divided by scale_inv. transposed: how column-wise data are stored."""

    kernel: Kernel
    result: QuantizedResult
    row_block = 1
    divides = False
    transposed = True

    def __init__(self, shape: tuple[int, int], recipe: Any, columnwise: bool) -> None:
        self.shape, self.recipe, self.columnwise = shape, recipe, columnwise

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        """Returns members with the addresses of data and scales. result: the description of what is written.
        """
        raise NotImplementedError


class _PerTensor(Output):
    kernel = _CAST

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool,
                 columnwise: bool) -> None:
        super().__init__(shape, recipe, columnwise)
        check_directions(shape, rowwise, columnwise)
        self.result = per_tensor_result(shape, recipe.dtype, bool(rowwise), bool(columnwise))

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        return per_tensor_destinations(result, written)


class _Blocks(Output):
    kernel = _BLOCK

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool,
                 columnwise: bool) -> None:
        super().__init__(shape, recipe, columnwise)
        if recipe.block not in ((1, 128), (1, 64), (1, 32)):
            raise ValueError("recipe: expected blocks of one of ((1, 128), (1, 64), (1, 32)), got "
                             f"{recipe.block}; quantize_block has the others")
        self._quantization = blocks.BlockQuantization(
            shape, source, False, blocks.BlockOptions.of(recipe, rowwise, columnwise))
        self.result, self.divides = self._quantization.result, self._quantization.divide
        self.row_block = recipe.block[1]
        if any(prod(d.scale_shape) >= 1 << 32 for d in self._quantization.directions.values()):
            raise ValueError(f"x: expected fewer than 2^32 scales, which rows of {shape[1]} elements have "
                             f"from {shape[0]} rows on")

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        at = self._quantization.result.addresses(written)
        (data, row_scales), (data_t, column_scales) = (at.get(name, (0, 0)) for name in DIRECTIONS)
        rows, columns = self._quantization.axes(list(self._quantization.directions))
        return {"data": data, "data_t": data_t, "row_scales": {"to": row_scales, **rows.strides},
                "column_scales": {"to": column_scales, **columns.strides}, "rule": self._quantization.rule,
                "subblocks_per_block": self.row_block // 32, "divides": int(self.divides)}


class _Mx(Output):
    kernel = _MX
    row_block = 32
    transposed = False

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool,
                 columnwise: bool) -> None:
        super().__init__(shape, recipe, columnwise)
        if recipe.block != (1, 32):
            raise ValueError(f"recipe: expected MX blocks of (1, 32), got {recipe.block}; quantize_mx has "
                             "the others")
        self._quantization = mx.MxQuantization(
            shape, source, False, mx.MxOptions.of(recipe, rowwise, columnwise))
        self.result = self._quantization.result

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        at = self._quantization.result.addresses(written)
        (data, row_scales), (column_data, column_scales) = (at.get(name, (0, 0)) for name in DIRECTIONS)
        rows, columns = self._quantization.axes
        return {"data": data, "column_data": column_data, "row_scales": {"to": row_scales, **rows.strides},
                "column_scales": {"to": column_scales, **columns.strides},
                "rule": self._quantization.members["rule"]}


_OUTPUTS: dict[type, Any] = {
    DelayedScaling: _PerTensor, CurrentScaling: _PerTensor, BlockScaling: _Blocks, MXScaling: _Mx}


def output_of(shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: Any,
              columnwise: Any) -> Output:
    """Returns how a recipe stores a matrix of this shape. source: x's dtype. TypeError or ValueError for
    recipes that have no kernel."""
    check_recipe(recipe)
    made: Output = _OUTPUTS[type(recipe)](shape, source, recipe, rowwise, columnwise)
    return made


# ---- launches ----
def launches(call: Call, inputs: Inputs, result: QuantizedResult, written: Sequence[int],
             dprobs_at: int) -> Iterator[Launch]:
    """Yields the launches that write y or the gradient of x, and the gradient of probs if it has an address.
    result, written: the description of the quantised arrays and their addresses."""
    x, output, rows = inputs.x.array, inputs.output, len(inputs.x.array)
    addresses = output.destinations(result, written)
    swiglu = _described(inputs, call.noop_at)
    if inputs.groups is not None and rows and len(inputs.groups.array):
        launch, swiglu["experts"] = row_segments.find_groups_of_rows(call, inputs.groups, rows, _TILE.rows)
        yield launch
    sums = None
    if dprobs_at:
        # The partial sums of a tile of columns are a row: summing down these rows sums over the columns of x.
        shape = (2 if inputs.interleaved else 1) * inputs.half, rows
        sums = ColumnSums(shape, dprobs_at, call.scratch("swiglu_dprobs", partial_sums(shape)))
        swiglu["sums"] = sums.tiles_at(_TILE.columns)
    column_data = addresses.get("data_t", 0) or addresses.get("column_data", 0)
    if _is_wide(inputs, addresses.get("data", 0) if output.transposed
                else addresses["data"] | addresses["column_data"]):
        swiglu["flags"] |= _WIDE
    program = _program(inputs, swiglu)
    members = {"call": swiglu, "tiles": program.tiles}
    if output.transposed:
        members["vector"] = int(rows % 16 == 0 and column_data % 16 == 0)
    if output.kernel is _CAST:
        yield from _cast(call, inputs, program, members, addresses)
    elif x.size:
        yield program.bind(x, bool(column_data), **members, **addresses)
    if sums:
        yield from sums.launches(x, _TILE.columns, call.noop_at)


def _described(inputs: Inputs, noop_at: int) -> Members:
    """Returns the struct SwigluCall without the results of other launches and without the flag of wide
    accesses."""
    rows, columns = inputs.output.shape
    flags = _GPT_OSS * inputs.gpt_oss | _INTERLEAVED * inputs.interleaved
    flags |= _CLAMPED * bool(np.isfinite(inputs.limit))
    return {"x": inputs.x.at, "grad": inputs.grad.at if inputs.grad else 0, "bias": _bias_at(inputs),
            "probs": inputs.probs.at if inputs.probs else 0, "noop": noop_at, "rows": rows,
            "columns": columns, "limit": inputs.limit, "minus_limit": -inputs.limit,
            "alpha": float(ALPHA) if inputs.gpt_oss else 1.0, "flags": flags}


def _bias_at(inputs: Inputs) -> int:
    """Returns the address of the biases. 0 if there are none: the address of an empty array may be anything.
    """
    return inputs.bias.at if inputs.bias and inputs.bias.array.size else 0


def _is_wide(inputs: Inputs, data: int) -> bool:
    """Returns whether every row that is read allows 16-byte loads, and every row that is not transposed
    8-byte stores. data: the or'ed addresses of data that are not transposed."""
    read = inputs.x.at | _bias_at(inputs) | (inputs.grad.at if inputs.grad else 0)
    return inputs.half % 8 == 0 and read % 16 == 0 and data % 8 == 0


def _cast(call: Call, inputs: Inputs, program: _TiledProgram, members: Members,
          addresses: Members) -> Iterator[Launch]:
    """Yields the launch that casts with one scale; for current scaling another one before it finds that
    scale."""
    x, recipe, amax_at = inputs.x.array, inputs.output.recipe, inputs.amax_at
    scale_at, scale_value = inputs.scale
    if isinstance(recipe, CurrentScaling):
        rule = TensorScaleRule.of(recipe.dtype, recipe.eps, recipe.pow2_scale)
        words_at = call.workspace("swiglu", _WORKSPACE_WORDS)
        scale_at = words_at + _SCALE_OFFSET
        yield program.bind(x, False, **{**members, "vector": 0}, amax=amax_at, workspace=words_at,
                           found_scale=scale_at, scale_value=1.0, rule=rule._asdict())
        amax_at = 0
    yield program.bind(x, inputs.output.columnwise, **members, **addresses, scale=scale_at,
                       scale_value=scale_value, amax=amax_at)


# ---- programs ----
class _TiledProgram(NamedTuple):
    """Describes a program for a call, its grid, and how many tiles of a column a block of threads takes."""

    variant: Variant
    grid: int
    tiles: int

    def bind(self, x: Any, columnwise: bool, /, **members: Any) -> Launch:
        """columnwise: whether transposed data need shared memory."""
        shared = None if columnwise or _is_streamed(self.variant) else _LEAST_SHARED
        return self.variant.bind(x, self.grid, shared=shared, **members)


def _program(inputs: Inputs, swiglu: Members) -> _TiledProgram:
    """Returns the program that a call takes. swiglu: the members of SwigluCall."""
    output, backward, source = inputs.output, inputs.grad is not None, inputs.x.dtype
    by_path = _variants(output.kernel, source, output.recipe.dtype, backward)
    path = _path(inputs, swiglu)
    variant = by_path.get(path) or by_path[ANY if path == QUOTIENTS else WIDE]
    if variant is by_path[ANY]:
        return _TiledProgram(variant, _TILE.grid(output.shape), 1)
    # These write the tiles of da and of db at once.
    once, each = (output.shape[0], inputs.half), 1
    while each < _most_tiles(variant) and _TILE.grid(once) // (2 * each) >= _ENOUGH_BLOCKS:
        each *= 2
    return _TiledProgram(variant, _TILE._replace(rows=each * _TILE.rows).grid(once), each)


def _path(inputs: Inputs, swiglu: Members) -> str:
    """Returns the path for a call, if a program for the call's types has it."""
    output, half, backward = inputs.output, inputs.half, inputs.grad is not None
    straddled = backward and not inputs.interleaved and half % output.row_block != 0
    if not swiglu["flags"] & _WIDE or straddled:
        return ANY
    if output.divides:
        return QUOTIENTS
    if swiglu["flags"] == _WIDE and inputs.bias is None and not (backward and half % _TILE.columns):
        return TILES if output.columnwise or (output.kernel is _CAST and backward) else ROWS
    return EXPERTS if swiglu.get("experts") else OPTIONS


@functools.cache
def _variants(kernel: Kernel, source: np.dtype[Any], to: np.dtype[Any], backward: bool) -> dict[str, Variant]:
    """Returns the programs for these types, by path. bf16 to e4m3 has all of them. Other types take WIDE for
    those that they lack."""
    common, to_e4m3 = source == bfloat16 and to == float8_e4m3fn, to == float8_e4m3fn
    paths = {
        ROWS: common or (source == bfloat16 and backward) or (to_e4m3 and not backward and kernel is not _MX),
        TILES: common or (source == bfloat16 and backward),
        OPTIONS: common,
        EXPERTS: common,
        WIDE: not common,
        QUOTIENTS: kernel is _BLOCK and to_e4m3 and not backward,
        ANY: True}
    if kernel is _CAST and backward:
        paths[ROWS] = False             # TILES computes such rows too.
    return {path: _variant(kernel, source, to, int(backward), path) for path, exists in paths.items()
            if exists}


def _variant(kernel: Kernel, source: np.dtype[Any], to: np.dtype[Any], backward: int, path: str) -> Variant:
    types: dict[str, Any] = {"IN": source, "OUT": to, "BACKWARD": backward, "PATH": path,
                             "SCALING": {_CAST: "one_scale", _BLOCK: "f32_blocks", _MX: "mx_blocks"}[kernel]}
    block, shared = _TILE.block, _LEAST_SHARED
    # These rows come through registers.
    if path == ANY or (kernel is _CAST and (path == ROWS or (path == TILES and backward))):
        if kernel is not _MX and path != ROWS:
            shared = _TILE.shared * (2 if path == TILES else 1)
        return kernel.variant(block=block, shared=shared, **types)
    both = path != ROWS
    block *= 1 + both
    shared = _STAGES * (2 + backward) * 16 * block // (1 + (backward and both))
    if both:
        tile_bytes = (0 if kernel is _MX else 1 + (kernel is _CAST and backward)) * _TILE.shared
        shared += tile_bytes + (kernel is not _CAST) * _COLUMN_AMAXES
    return kernel.variant(block=block, shared=shared, **types)


def _is_streamed(v: Variant) -> bool:
    """Returns whether rows come through shared memory (kernels_cu/include/swiglu/swiglu_stream.cuh)."""
    defines = dict(v.defines)
    path = defines["PATH"]
    if v.kernel is _CAST:
        return path not in (ANY, ROWS, TILES) or (path == TILES and defines["BACKWARD"] == "0")
    return path != ANY


def _most_tiles(v: Variant) -> int:
    """Returns how many tiles a block of threads can take. Its shared memory has room for the weights of so
    many rows (kMostRows in swiglu_stream.cuh)."""
    defines = dict(v.defines)
    path, most = defines["PATH"], v.block // _TILE.rows
    if not _is_streamed(v):
        return 1
    if v.kernel is _BLOCK and defines["BACKWARD"] == "0" and path not in (ROWS, TILES):
        most //= (2 if defines["IN"] == "f32" else 1) * (1 if path == OPTIONS else 2)
    return most


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    yield from row_segments.rows_variants()
    for kernel, source, to, backward in product(_KERNELS, INPUT_DTYPES, FP8_DTYPES, (False, True)):
        yield from _variants(kernel, source, to, backward).values()
