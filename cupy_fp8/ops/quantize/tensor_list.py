"""Tensor lists: per-tensor scaling of any number of matrices in one launch, and every recipe for a list of
arrays. Kernels: kernels_cu/quantize/tensor_list.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product, repeat
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from ... import advice, reference
from ...advice import without_rest
from ...arrays import Array, check_dimensions
from ...calls.call import Call, Input, Op, run
from ...calls.tables import Records
from ...calls.tensor_lists import ListResult, TableLayout, check_none_given, checked, each_amax, each_scale
from ...directions import check_directions
from ...formats import FP8_DTYPES, INPUT_DTYPES, FP8DType, flag, float8_e4m3fn, lookup
from ...kernels import Kernel, Launch, Variant, shapes
from ...recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    Recipe,
    check_recipe,
    check_scales,
)
from ...results import Quantized
from ..scales.scale import TensorScaleRule
from . import single_read, tensor_list_blocks
from .quantized_result import QuantizedResult, per_tensor_destinations, per_tensor_result

_CAST = Kernel("quantize/tensor_list", "multi_cast_transpose")
_AMAX = Kernel("quantize/tensor_list", "multi_amax_scale", block=256)
_CURRENT = Kernel("quantize/tensor_list", "multi_cast_current", block=single_read.THREADS, cooperative=True)
_SMALL = shapes.SMALL


@without_rest
def multi_cast_transpose(xs: Sequence[Array], scales: Any, *, dtype: FP8DType = float8_e4m3fn,
                         amaxes: Any = None, noop: Array | None = None,
                         out: Sequence[Quantized] | None = None, **renamed: NoReturn) -> list[Quantized]:
    """`cast_transpose` of any number of matrices, of any shapes, in one launch.

        data = cast(x * scale)      column-wise: data transposed      scale_inv = 1 / scale
        amax = max(amax, max |x|)

    for each x with its own scale. The bytes are those of `cast_transpose`, called for each x.

    Parameters
    ----------
    xs : list of bfloat16, float16 or float32 matrices [M, K]: all of one dtype, each with its own shape (0
        included)
    scales : one for each: an f32 array [n], or a list of one-element f32 arrays or of Python or NumPy scalars
    dtype : float8_e4m3fn or float8_e5m2
    amaxes : f32 array [n], or a list of one-element f32 arrays: each is raised to the largest |x| before
        scaling (NaN ignored)
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`.
        Must not change while the launches run
    out : earlier results for the same shapes, or those of ``recipe.empty(…)``; written in place and
        returned. A call with the arrays of an earlier call costs little, since their table is on the device
        already: it allocates and copies nothing, and can be captured into a CUDA graph

    Returns
    -------
    list of Quantized (`out` itself where given), whose directions share one scale_inv each.

    Raises
    ------
    TypeError for wrong dtypes, dtypes that differ, or NumPy and CuPy arrays mixed, ValueError for shapes,
    lists of different lengths, devices and overlaps (and, during a capture, arrays that no call has had
    before), DeviceError; all before anything is written.

    Source: TransformerEngine's multi_cast_transpose. Bytes moved per element: x + 2. Matrices whose rows are
    no multiples of 8 elements (or columns of 16) send the whole group through smaller tiles.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[0.5, 300]], np.float32)
    >>> first, second = fp8.multi_cast_transpose([a, b], [1.0, 2.0])
    >>> first.columnwise.data.astype(np.float32).tolist(), second.dequantize().tolist()
    ([[1.0, 3.0], [2.0, 4.0]], [[0.5, 224.0]])
    """
    if renamed:
        raise advice.renamed("multi_cast_transpose", renamed, outputs="out")
    results: list[Quantized] = run(_CAST_TRANSPOSE, (xs, scales, amaxes, noop, dtype), out)
    return results


@without_rest
def multi_quantize(xs: Sequence[Array], recipe: Recipe, *, rowwise: bool = True, columnwise: bool = False,
                   scales: Any = None, amaxes: Any = None, noop: Array | None = None,
                   out: Sequence[Quantized] | None = None, **renamed: NoReturn) -> list[Quantized]:
    """Quantise any number of arrays: the bytes are those of ``recipe.quantize`` for each.

    All arrays take one launch together. With CurrentScaling, 16-bit arrays whose rows are multiples of 8
    elements (16-byte aligned) are read once and wait for their scales in the GPU's multiprocessors, if the
    list is large enough (17 M elements on an H200) and most of it is in arrays that fit (15 M elements each).
    Other lists take two launches, the first of which finds every scale. BlockScaling and MXScaling take one
    launch for each dtype, and one for each array whose last two axes are swapped in memory or whose blocks
    are whole rows or columns.

    Parameters
    ----------
    xs : list of bfloat16, float16 or float32 arrays of any, different shapes: for per-tensor recipes matrices
        of one dtype, for the others what `quantize_block` and `quantize_mx` take
    recipe : DelayedScaling, CurrentScaling, BlockScaling or MXScaling
    rowwise, columnwise : the directions of every result
    scales : of DelayedScaling, which needs them: as for `multi_cast_transpose`
    amaxes : of per-tensor recipes: as for `multi_cast_transpose`
    noop, out : as for `multi_cast_transpose`

    Returns
    -------
    list of Quantized (`out` itself where given).

    Raises
    ------
    As `multi_cast_transpose`; also TypeError for another recipe, and ValueError for scales and amaxes that
    the recipe does not take; all before anything is written.

    Source: TransformerEngine's multi-tensor quantize. In blocks, an array whose rows are no multiples of 4
    elements sends all arrays of its dtype through the slower kernel for any shape.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> xs = [np.full((2, 3), 7, np.float32), np.full((1, 4), 0.5, np.float32)]
    >>> [q.scale_inv.tolist() for q in fp8.multi_quantize(xs, fp8.CurrentScaling())]
    [[0.015625], [0.0011160714784637094]]
    """
    if renamed:
        raise advice.renamed("multi_quantize", renamed, outputs="out")
    op, given = call_of(xs, recipe, rowwise=rowwise, columnwise=columnwise, scales=scales, amaxes=amaxes,
                        noop=noop)
    results: list[Quantized] = run(op, given, out)
    return results


def call_of(xs: Sequence[Array], recipe: Recipe, *, rowwise: bool, columnwise: bool, scales: Any, amaxes: Any,
            noop: Array | None) -> tuple[Op[Any], tuple[Any, ...]]:
    """Return the op that quantises with this recipe, and its arguments, for `calls.call.run` and
    `validate_call`."""
    if not isinstance(recipe, (BlockScaling, MXScaling)):
        return _QUANTIZE, (xs, scales, amaxes, noop, recipe, rowwise, columnwise)
    check_scales(recipe, scales, amaxes, several=True)
    return tensor_list_blocks.QUANTIZE, (xs, noop, recipe, rowwise, columnwise)


# ---- arguments and result ----
class _Inputs(NamedTuple):
    """scales: address or value of each. amaxes: their addresses. given: the reference's options, as given.
    rule: of current scaling."""

    xs: list[Input]
    scales: list[tuple[int, float]] | None
    amaxes: list[int] | None
    given: dict[str, Any]
    recipe: DelayedScaling | CurrentScaling
    rule: TensorScaleRule | None
    result: ListResult


_result_of = functools.lru_cache(maxsize=1024)(per_tensor_result)


class _PerTensorList(Op[_Inputs]):
    """Quantises matrices with one scale each."""

    def arguments(self, call: Call, xs: Any, scales: Any, amaxes: Any, noop: Any, recipe: Any, rowwise: Any,
                  columnwise: Any) -> _Inputs:
        rowwise, columnwise = flag(rowwise, "rowwise"), flag(columnwise, "columnwise")
        rule = _rule(recipe, scales)
        check_directions((0, 0), rowwise, columnwise)
        number = len(checked(xs, "xs"))
        if not number:
            call.without_arrays(noop)
            check_none_given(scales, "scales")
            check_none_given(amaxes, "amaxes")
        arrays = [_matrix(call, f"xs[{i}]", x) for i, x in enumerate(xs)]
        scales_at = each_scale(call, scales, number) if number and scales is not None else None
        amaxes_at = each_amax(call, amaxes, number) if number and amaxes is not None else None
        call.noop(noop)
        result = ListResult([_result_of(x.shape, recipe.dtype, rowwise, columnwise) for x in arrays])
        given = {"scales": scales, "amaxes": amaxes, "rowwise": rowwise, "columnwise": columnwise}
        return _Inputs(xs=arrays, scales=scales_at, amaxes=amaxes_at, given=given, recipe=recipe, rule=rule,
                       result=result)

    def reference(self, inputs: _Inputs) -> list[Quantized]:
        return reference.multi_quantize([x.array for x in inputs.xs], inputs.recipe, **inputs.given)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterable[Launch]:
        assert isinstance(call.result, ListResult)
        addresses = [per_tensor_destinations(cast(QuantizedResult, result), own)
                     for result, own in zip(call.result.members, call.result.divide(written), strict=True)]
        scales, amaxes = inputs.scales or repeat((0, 0.0)), inputs.amaxes or repeat(0)
        matrices = [_Matrix(*each) for each in zip(inputs.xs, addresses, scales, amaxes, strict=False)]
        if not matrices:
            return []
        if not inputs.rule:
            return [_cast(call, matrices, inputs.recipe.dtype)]
        staging = None
        if all(each.aligned for each in matrices):
            staging = single_read.choose(call.x, [each.tiles(single_read.TILE) for each in matrices])
        if staging:
            return [_read_once(call, matrices, inputs.recipe.dtype, inputs.rule, staging)]
        return _read_twice(call, matrices, inputs.recipe.dtype, inputs.rule)


class _CastTransposeList(_PerTensorList):
    """Quantises matrices with given scales in both directions."""

    def arguments(self, call: Call, *given: Any) -> _Inputs:
        xs, scales, amaxes, noop, dtype = given
        recipe = DelayedScaling(lookup(dtype, FP8_DTYPES, "dtype").dtype)
        if scales is None:
            raise ValueError("scales: expected one for each array, got None; multi_quantize with "
                             "CurrentScaling takes them from the arrays")
        return super().arguments(call, xs, scales, amaxes, noop, recipe, True, True)


_QUANTIZE, _CAST_TRANSPOSE = _PerTensorList(), _CastTransposeList()


def _rule(recipe: Any, scales: Any) -> TensorScaleRule | None:
    check_recipe(recipe)
    check_scales(recipe, scales, None, several=True)
    if isinstance(recipe, DelayedScaling):
        return None
    return TensorScaleRule.of(recipe.dtype, recipe.eps, recipe.pow2_scale)


def _matrix(call: Call, name: str, x: Any) -> Input:
    found = call.read(name, x, INPUT_DTYPES)
    if found.dtype != call.x.dtype:
        raise TypeError(f"{name}: expected dtype {call.x.dtype}, that of xs[0], got {found.dtype}")
    check_dimensions(found.shape, name, 2, 2)
    return found


# ---- launches ----
class _Matrix(NamedTuple):
    """A matrix, the addresses of its results by the names of the kernel's members, its scale (address or
    value), and the address of its amax."""

    x: Input
    addresses: dict[str, int]
    scale: tuple[int, float]
    amax: int

    @property
    def aligned(self) -> bool:
        """Every row of x and of the row-wise data allows chunked access."""
        return self.x.shape[1] % 8 == 0 and self.x.at % 16 == 0 and self.addresses.get("data", 0) % 8 == 0

    @property
    def vector(self) -> bool:
        """Every row of the transposed data allows 16-byte stores."""
        return self.x.shape[0] % 16 == 0 and self.addresses.get("data_t", 0) % 16 == 0

    def tiles(self, tile: shapes.Tile) -> int:
        """Return the thread blocks of a matrix. An empty one has one too, for its scale_inv."""
        return -(-self.x.shape[0] // tile.rows) * -(-self.x.shape[1] // tile.columns) or 1


def _tile(matrices: list[_Matrix]) -> shapes.Tile:
    x, addresses = matrices[0].x.array, matrices[0].addresses
    if not all(each.aligned and each.vector for each in matrices):
        return _SMALL
    wide = x.dtype.itemsize == 2 and "data" in addresses and "data_t" in addresses
    wide = wide and shapes.fills_wide(each.x.shape[1] for each in matrices)
    size = sum(each.x.array.size for each in matrices)
    return shapes.choose_tile(x, shapes.BOTH if wide else shapes.BOTH_NARROW, size)


def _table(matrices: list[_Matrix], tile: shapes.Tile, zeros: int = 0) -> TableLayout:
    return TableLayout(_CAST.record("MultiTensor"), [each.tiles(tile) for each in matrices], zeros)


def _packed(matrices: list[_Matrix], table: TableLayout, scales: int = 0) -> bytes:
    """Pack the records. scales: offset in the table of the scales that another launch finds."""
    ends = accumulate(table.blocks)
    return b"".join(
        table.record.pack(x=each.x.at, scale=scales + 4 * i if scales else each.scale[0],
                          scale_value=each.scale[1], amax=each.amax, **each.addresses, rows=each.x.shape[0],
                          columns=each.x.shape[1], first_block=end - blocks, blocks=blocks,
                          aligned=each.aligned, vector=each.vector)
        for i, (each, blocks, end) in enumerate(zip(matrices, table.blocks, ends, strict=True)))


def _read_once(call: Call, matrices: list[_Matrix], to: np.dtype[Any], rule: TensorScaleRule,
               staging: single_read.Staging) -> Launch:
    """Return the launch of current scaling if matrices stay in the SMs until their scales are known."""
    x, count = matrices[0].x.array, sum(each.tiles(single_read.TILE) for each in matrices)
    table = _table(matrices, single_read.TILE, 4 * single_read.words(count))
    at = table.make(call, _packed(matrices, table))
    return _CURRENT.variant(shared=staging.shared, IN=x.dtype, OUT=to).bind(
        x, staging.blocks, tensors=at, tensor_of=at + table.numbers, noop=call.noop_at,
        single_read=single_read.members(at + table.zeros, count, staging, rule))


def _read_twice(call: Call, matrices: list[_Matrix], to: np.dtype[Any],
                rule: TensorScaleRule) -> Iterator[Launch]:
    """Yield the launches of current scaling if one finds the scales and the other casts. The cast begins at
    the end, which the L2 still holds."""
    x, tile, number = matrices[0].x.array, _tile(matrices), len(matrices)
    table = _table(matrices, tile, 12 * number)             # an AmaxOfBlocks and a scale for each
    scales = table.zeros + 8 * number
    at = table.make(call, _packed(matrices, table, scales), own="scale")
    members = {"tensors": at, "tensor_of": at + table.numbers, "noop": call.noop_at}
    yield _AMAX.variant(IN=x.dtype).bind(x, table.count, **members, workspace=at + table.zeros,
                                      scale=at + scales, rule=rule._asdict())
    yield _cast_variant(x.dtype, to, tile).bind(x, table.count, **members, reverse=1, each=table.each)


def _cast(call: Call, matrices: list[_Matrix], to: np.dtype[Any]) -> Launch:
    """Return the launch for given scales. Records of few matrices are passed as kernel arguments; if all
    matrices also have equally many thread blocks, it needs no table."""
    x, tile = matrices[0].x.array, _tile(matrices)
    table = _table(matrices, tile)
    packed = _packed(matrices, table)
    members: dict[str, Any] = {}
    if len(matrices) <= _CAST.constant("kRecordsInArguments"):
        members = {"number": len(matrices), "argument_records": Records.of(packed, table.pointers())}
    if not members or not table.each:
        at = table.make(call, packed)
        members |= {"tensors": at, "tensor_of": at + table.numbers}
    return _cast_variant(x.dtype, to, tile).bind(x, table.count, **members, noop=call.noop_at,
                                                 each=table.each)


def _cast_variant(source: np.dtype[Any], to: np.dtype[Any], tile: shapes.Tile) -> Variant:
    return _CAST.variant(block=tile.block, shared=tile.shared, IN=source, OUT=to, TILE_ROWS=tile.rows,
                         TILE_COLUMNS=tile.columns, DBIAS=0)


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    yield from single_read.variants(_CURRENT)
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _cast_variant(source, to, _SMALL)
        yield _cast_variant(source, to, shapes.BOTH_NARROW)
        if source.itemsize == 2:
            yield _cast_variant(source, to, shapes.BOTH)
    for source in INPUT_DTYPES:
        yield _AMAX.variant(IN=source)
