"""Quantisers that compute values first, from the same read: how recipes store them, which program serves a
call, and its launches. Kernels: kernels_cu/include/fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array
from ...calls.call import Call
from ...directions import check_directions
from ...formats import FP8_DTYPES, INPUT_DTYPES
from ...kernels import Kernel, Launch, Variant, shapes
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, check_recipe
from ..scales.scale import TensorScaleRule
from . import blocks, mx
from .quantized_result import QuantizedResult, per_tensor_destinations, per_tensor_result

DIRECTIONS = "rowwise", "columnwise"
#: Members of a kernel's struct, by name.
Members = dict[str, Any]
#: Values of the define SCALING, for kernels <source>_cast, _block and _mx.
ONE_SCALE, F32_BLOCKS, MX_BLOCKS = "one_scale", "f32_blocks", "mx_blocks"
_ENTRIES = {ONE_SCALE: "cast", F32_BLOCKS: "block", MX_BLOCKS: "mx"}
#: Values of the define PATH (enum Path in kernels_cu/include/fused/program.cuh).
ANY, ROWS, TILES, PLAIN = "any", "rows", "tiles", "plain"
OPTIONS, EXPERTS, WIDE, QUOTIENTS = "options", "experts", "wide", "quotients"
#: A flag of the struct SourceCall, and the unit of the activation's number in its flags.
WIDE_FLAG, _KIND_UNIT = 8, 16
#: Activations in the order of their numbers (AnyKind in kernels_cu/include/source/any_kind.cuh).
KINDS = "silu", "gelu", "gelu_tanh", "relu", "relu2"

TILE = shapes.SMALL
#: 16-byte loads in flight per thread and array (kStages rows of kLoads)
_STAGES = 4
COLUMN_AMAXES = 4 * (8 * TILE.columns + 8) * 4     # shared memory per tile, in bytes (struct ColumnAmaxes)
#: least shared memory of a launch, in bytes: an array of 0 bytes has no address on the CPU
LEAST_SHARED = 16
#: Thread blocks that must remain for a block to take more tiles.
_ENOUGH_BLOCKS = 512
#: Workspace of current scaling: the amax, the number of finished blocks, then the scale.
_WORKSPACE_WORDS, _SCALE_OFFSET = 4, 8


# ---- how recipes store a matrix ----
class Output:
    """How a recipe stores a matrix: the scaling of its kernel, the description of its result, and members of
    its struct.

    row_block: elements of a row per scale, all in one part of the result. divides: elements are divided by
    scale_inv. transposed: column-wise data are stored transposed."""

    scaling: str
    result: QuantizedResult
    row_block = 1
    divides = False
    transposed = True

    def __init__(self, shape: tuple[int, int], recipe: Any, columnwise: bool) -> None:
        self.shape, self.recipe, self.columnwise = shape, recipe, columnwise

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        """Return members with the addresses of data and scales. result: the description of what is written.
        """
        raise NotImplementedError


class _PerTensor(Output):
    scaling = ONE_SCALE

    def __init__(self, shape: tuple[int, int], source: np.dtype[Any], recipe: Any, rowwise: bool,
                 columnwise: bool) -> None:
        super().__init__(shape, recipe, columnwise)
        check_directions(shape, rowwise, columnwise)
        self.result = per_tensor_result(shape, recipe.dtype, bool(rowwise), bool(columnwise))

    def destinations(self, result: QuantizedResult, written: Sequence[int]) -> Members:
        return per_tensor_destinations(result, written)


class _Blocks(Output):
    scaling = F32_BLOCKS

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
    scaling = MX_BLOCKS
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
    """Return how a recipe stores a matrix of this shape. source: x's dtype. TypeError or ValueError for
    recipes without a kernel."""
    check_recipe(recipe)
    made: Output = _OUTPUTS[type(recipe)](shape, source, recipe, rowwise, columnwise)
    return made


# ---- programs ----
class Program(NamedTuple):
    """A program of a source, except its types. halves: of a row of x."""

    scaling: str
    halves: int
    backward: bool
    path: str

    @property
    def parts(self) -> int:
        """Parts of a result: y, or the gradients of the halves."""
        return self.halves if self.backward else 1

    @property
    def is_streamed(self) -> bool:
        """Whether rows come through shared memory (kernels_cu/include/fused/stream.cuh)."""
        through_registers = self.path == ROWS or (self.path == TILES and self.backward)
        return self.path != ANY and not (self.scaling == ONE_SCALE and through_registers)

    @property
    def block(self) -> int:
        """Threads per block."""
        return TILE.block * (1 + (self.is_streamed and self.path != ROWS))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        tile_bytes = 0 if self.scaling == MX_BLOCKS else TILE.shared
        if not self.is_streamed:
            if self.path == ROWS or not tile_bytes:
                return LEAST_SHARED
            return tile_bytes * (self.parts if self.path == TILES else 1)
        arrays, both = self.halves + self.backward, self.path != ROWS
        stages = _STAGES * arrays * 16 * self.block // (2 if both and arrays > 2 else 1)
        if not both:
            return stages
        if self.scaling == ONE_SCALE:
            return stages + tile_bytes * self.parts
        return stages + tile_bytes + COLUMN_AMAXES

    def most_tiles(self, dtype: np.dtype[Any]) -> int:
        """Return the most tiles per thread block, limited by shared memory for the rows' weights (kMostRows
        in stream_shape.cuh)."""
        if not self.is_streamed:
            return 1
        most = self.block // TILE.rows
        if self.scaling == F32_BLOCKS and not self.backward and self.path not in (ROWS, TILES, PLAIN):
            most //= (2 if dtype.itemsize == 4 else 1) * (1 if self.path == OPTIONS else 2)
        return most


#: Whether a source has a program, for x's dtype and that of the quantised data.
HasPath = Callable[[Program, np.dtype[Any], np.dtype[Any]], bool]


@functools.cache
def _kernels(name: str) -> dict[str, Kernel]:
    """Return the kernels of a .cu file, by scaling."""
    return {scaling: Kernel(f"quantize/{name}", f"{name}_{entry}") for scaling, entry in _ENTRIES.items()}


class Source:
    """The kernels of kernels_cu/quantize/<name>.cu, <name>_cast, _block and _mx, for one activation. halves:
    of a row of x. has_path: selects the programs that exist. Path any has one program for all activations."""

    def __init__(self, name: str, halves: int, has_path: HasPath, activation: str) -> None:
        self.halves, self._has_path, self.kernels = halves, has_path, _kernels(name)
        #: Activation some_name is the struct SomeName of kernels_cu/include/source.
        self._struct = "".join(map(str.capitalize, activation.split("_")))
        self.kind_flags = _KIND_UNIT * KINDS.index(activation)
        self.by_path = functools.cache(self._by_path)

    def _by_path(self, scaling: str, dtype: np.dtype[Any], to: np.dtype[Any],
                 backward: bool) -> dict[str, tuple[Program, Variant]]:
        """Return the programs for these types, by path. dtype: x's."""
        found = {}
        for path in (ANY, ROWS, TILES, PLAIN, OPTIONS, EXPERTS, WIDE, QUOTIENTS):
            program = Program(scaling, self.halves, backward, path)
            if self._has_path(program, dtype, to):
                variant = self.kernels[scaling].variant(
                    block=program.block, shared=program.shared, IN=dtype, OUT=to, SCALING=scaling,
                    BACKWARD=int(backward), PATH=path, ACT="AnyKind" if path == ANY else self._struct)
                found[path] = program, variant
        return found

    def variants(self) -> Iterator[Variant]:
        """Yields every variant that may be launched."""
        for scaling, dtype, to, backward in product(_ENTRIES, INPUT_DTYPES, FP8_DTYPES, (False, True)):
            for _, variant in self.by_path(scaling, dtype, to, backward).values():
                yield variant


# ---- launches ----
class Values(NamedTuple):
    """The values that a call computes and quantises.

    members: of the struct SourceCall. half: elements of a row of each part. paths: programs for the call; the
    first that exists for its types is taken. amax_at: one element that is raised, or 0. scale: (address, 0)
    or (0, value)."""

    x: Array
    backward: bool
    half: int
    members: Members
    paths: Sequence[str]
    output: Output
    amax_at: int
    scale: tuple[int, float]


def is_wide(output: Output, destinations: Members, half: int, read: int) -> bool:
    """Return whether every row that is read allows 16-byte loads, and every row that is not transposed 8-byte
    stores. read: bitwise or of the addresses that are read."""
    data = destinations.get("data", 0)
    if not output.transposed:
        data |= destinations["column_data"]
    return half % 8 == 0 and read % 16 == 0 and data % 8 == 0


def launches(call: Call, source: Source, values: Values, destinations: Members) -> Iterator[Launch]:
    """Yields the launches that compute values and write them quantised. destinations: of the output."""
    output, x, half = values.output, values.x, values.half
    programs = source.by_path(output.scaling, x.dtype, output.recipe.dtype, values.backward)
    program, variant = next(programs[path] for path in values.paths if path in programs)
    grid, tiles = _grid(program, output.shape, half, x.dtype)
    column_data = destinations.get("data_t", 0) or destinations.get("column_data", 0)
    call_members = {**values.members, "flags": values.members["flags"] | source.kind_flags}
    members: Members = {"call": call_members, "tiles": tiles}
    if output.transposed:
        members["vector"] = int(output.shape[0] % 16 == 0 and column_data % 16 == 0)

    def bind(columnwise: Any, **more: Any) -> Launch:
        shared = None if columnwise or program.is_streamed else LEAST_SHARED
        return variant.bind(x, grid, shared=shared, **{**members, **more})

    if output.scaling == ONE_SCALE:
        yield from _cast(call, values, bind, destinations)
    elif x.size:
        yield bind(column_data, **destinations)


def _cast(call: Call, values: Values, bind: Callable[..., Launch], destinations: Members) -> Iterator[Launch]:
    """Yield the launch that casts with one scale; for current scaling, preceded by one that finds it."""
    recipe, amax_at = values.output.recipe, values.amax_at
    scale_at, scale_value = values.scale
    if isinstance(recipe, CurrentScaling):
        rule = TensorScaleRule.of(recipe.dtype, recipe.eps, recipe.pow2_scale)
        words_at = call.workspace("fused", _WORKSPACE_WORDS)
        scale_at = words_at + _SCALE_OFFSET
        yield bind(False, vector=0, amax=amax_at, workspace=words_at, found_scale=scale_at, scale_value=1.0,
                   rule=rule._asdict())
        amax_at = 0
    yield bind(values.output.columnwise, **destinations, scale=scale_at, scale_value=scale_value,
               amax=amax_at)


def _grid(program: Program, shape: tuple[int, int], half: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the thread blocks of a launch, and the tiles of a column for each."""
    if program.path == ANY:
        return TILE.grid(shape), 1
    # these write the tiles of both parts at once
    once, each, most = (shape[0], half), 1, program.most_tiles(dtype)
    while each < most and TILE.grid(once) // (2 * each) >= _ENOUGH_BLOCKS:
        each *= 2
    return TILE._replace(rows=each * TILE.rows).grid(once), each
