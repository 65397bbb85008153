"""Per-tensor scaling: quantises with one scale, row-wise, column-wise, or both from a single read. Kernels:
kernels_cu/quantize/tensor.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ... import advice, reference
from ...advice import shown, without_rest
from ...arrays import Array
from ...calls.call import Call, Input, Op, run
from ...directions import check_directions
from ...formats import FP8_DTYPES, INPUT_DTYPES, FP8DType, flags, float8_e4m3fn, float32, lookup
from ...kernels import Kernel, Launch, Variant, shapes
from ...methods import for_methods
from ...options import checked_eps
from ...results import Quantized
from ..scales.amax import current_scale
from ..scales.scale import TensorScaleRule
from . import tensor_current
from .bias_gradient import ColumnSums, partial_sums
from .quantized_result import QuantizedResult, per_tensor_destinations, per_tensor_result

_CAST = Kernel("quantize/tensor", "cast", block=shapes.ELEMENTWISE_THREADS)
_CAST_TRANSPOSE = Kernel("quantize/tensor", "cast_transpose")
#: fastest on an H200 (docs/lab-notes)
_COLUMNWISE = shapes.Tile(256, 128, down_first=True)
#: bits of the define DIRECTIONS
_ROWWISE_BIT, _COLUMNWISE_BIT = 1, 2
#: DIRECTIONS and DBIAS of the programs for whole patches
_WHOLE = ((3, False), (2, False), (3, True), (1, True))


@for_methods
def quantize_tensor(x: Array, scale: Any = None, *, dtype: FP8DType = float8_e4m3fn, rowwise: bool = True,
                    columnwise: bool = False, transposed: bool = True, amax: Array | None = None,
                    noop: Array | None = None, dbias: bool = False, eps: float = 0.0,
                    pow2_scale: bool = False, out: Quantized | None = None) -> Quantized:
    """Quantise a tensor with one scale: a given one (delayed scaling), or the one that its own amax calls for
    (current scaling).

        data = cast(x * scale)  scale_inv = 1 / scale  amax = max(amax, max |x|)  dbias = sum of x over rows

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 1 says. One
    kernel reads x once and writes everything, scale_inv included. Without a given scale it is
    ``compute_scale(compute_amax(x), dtype=dtype, eps=eps, pow2_scale=pow2_scale)``, found by a kernel before
    it, or, for row-wise data of a tensor that fits into the GPU's multiprocessors, by the same one.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array of any shape (two or more dimensions for `columnwise`)
    scale : one-element f32 array, or a Python or NumPy scalar (fixed in a captured graph); None: current
        scaling
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : which directions to return; `columnwise` data is stored […, K, M] for an x of […, M,
        K], which is what TN matrix products want, or as x with ``transposed=False`` (then both directions are
        the same array)
    amax : one-element f32 array, raised to the largest finite or infinite |x| before scaling (NaN ignored);
        not zeroed first
    noop : one-element f32 array on the device; nothing is written if it holds 1.0. Needs `out`. It
        must not change while the call runs
    dbias : also return the bias gradient, f32 […, K]: the sum of an x of […, M, K] over M before scaling, by
        a fixed tree, so that its bytes depend on nothing but x
    eps, pow2_scale : of current scaling: the floor of the amax, and whether the scale is a power of two (see
        `compute_scale`)
    out : an earlier result of the same shape, dtype and directions (or ``recipe.empty(…)``); written in place
        and returned. With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, whose directions share one scale_inv (f32 [1]); its `dbias` is None unless asked for.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, sizes and overlaps,
    DeviceError; all before anything is written.

    Source: TransformerEngine's delayed and current scaling. Bytes moved per element: x + 1 per direction;
    current scaling in two launches reads x twice (the second time from the L2, as far as it still holds x). A
    dbias of more than one tile of rows takes another launch.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_tensor(np.array([[0.5, 300.0]], np.float32), 2.0)
    >>> q.dequantize().tolist(), q.scale_inv.tolist()
    ([[0.5, 224.0]], [0.5])
    """
    given = x, scale, dtype, rowwise, columnwise, transposed, amax, noop, dbias, eps, pow2_scale
    result: Quantized = run(_QUANTIZE, given, out)
    return result


@without_rest
def cast_transpose(x: Array, scale: Any = None, *, dtype: FP8DType = float8_e4m3fn, amax: Array | None = None,
                   noop: Array | None = None, dbias: bool = False, eps: float = 0.0, pow2_scale: bool = False,
                   out: Quantized | None = None, **renamed: NoReturn) -> Quantized:
    """`quantize_tensor` in both directions from one read of x: row-wise data […, M, K] and column-wise data
    […, K, M].

    Parameters, errors and source as for `quantize_tensor`.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.cast_transpose(np.arange(6, dtype=np.float32).reshape(2, 3), 1.0)
    >>> q.columnwise.data.astype(np.float32).tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    if renamed:
        raise advice.renamed("cast_transpose", renamed,
                             transposed="quantize_tensor(x, columnwise=True, transposed=False)")
    return quantize_tensor(x, scale, dtype=dtype, columnwise=True, amax=amax, noop=noop, dbias=dbias, eps=eps,
                           pow2_scale=pow2_scale, out=out)


class _Inputs(NamedTuple):
    """scale: as given. rule: of current scaling; None with a given scale. directions: rowwise, columnwise and
    transposed."""

    x: Input
    scale: Any
    scale_at: int
    scale_value: float
    rule: TensorScaleRule | None
    amax: Array | None
    amax_at: int
    directions: dict[str, bool]
    result: QuantizedResult
    dtype: np.dtype[Any]


class _QuantizeTensor(Op[_Inputs]):
    def arguments(self, call: Call, x: Any, scale: Any, dtype: Any, rowwise: Any, columnwise: Any,
                  transposed: Any, amax: Any, noop: Any, dbias: Any, eps: Any, pow2_scale: Any) -> _Inputs:
        fmt = lookup(dtype, FP8_DTYPES, "dtype")
        x_input = call.read("x", x, INPUT_DTYPES)
        flags(rowwise=rowwise, columnwise=columnwise, transposed=transposed, dbias=dbias,
              pow2_scale=pow2_scale)
        if type(eps) is not float:
            checked_eps(eps)
        rule = None if scale is not None else TensorScaleRule.of(fmt.dtype, eps, pow2_scale)
        scale_at, scale_value = (0, 0.0) if scale is None else call.scalar("scale", scale)
        if scale is not None and (eps or pow2_scale):
            raise ValueError("eps, pow2_scale: belong to current scaling, but a scale was given "
                             f"(got eps={shown(eps)}, pow2_scale={shown(pow2_scale)})")
        amax_at = 0 if amax is None else call.one_f32("amax", amax, updated=True)
        call.noop(noop)
        check_directions(x_input.shape, rowwise, columnwise, dbias)
        directions = {"rowwise": bool(rowwise), "columnwise": bool(columnwise),
                      "transposed": bool(transposed)}
        result = per_tensor_result(x_input.shape, fmt.dtype, **directions, dbias=bool(dbias))
        return _Inputs(x=x_input, scale=scale, scale_at=scale_at, scale_value=scale_value, rule=rule,
                       amax=amax, amax_at=amax_at, directions=directions, result=result, dtype=fmt.dtype)

    def reference(self, inputs: _Inputs) -> Quantized:
        _, eps, pow2_scale = inputs.rule or (0.0, 0.0, False)
        return reference.quantize_tensor(
            inputs.x.array, inputs.scale, dtype=inputs.dtype, **inputs.directions, amax=inputs.amax,
            dbias=inputs.result.dbias, eps=eps, pow2_scale=pow2_scale)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        assert isinstance(call.result, QuantizedResult)
        addresses = per_tensor_destinations(call.result, written)
        flat = "data_t" not in addresses and not inputs.result.dbias
        scale_at, amax_at = inputs.scale_at, inputs.amax_at
        if inputs.rule:
            if flat and (launch := tensor_current.launch(call, inputs.x, inputs.dtype, inputs.rule,
                                                         amax=amax_at, **addresses)):
                yield launch
                return
            launch, scale_at = current_scale(call, inputs.x, inputs.rule)
            yield launch
        members = {"x": inputs.x.at, "scale": scale_at, "scale_value": inputs.scale_value, "amax": amax_at,
                   "noop": call.noop_at, "n": inputs.x.array.size, "reverse": int(inputs.rule is not None)}
        if flat:
            yield _flat(inputs, members, addresses)
        else:
            yield from _tiled(call, inputs, members, addresses)


def _flat(inputs: _Inputs, members: dict[str, Any], addresses: dict[str, int]) -> Launch:
    """Returns the launch that casts an array in its order."""
    x = inputs.x.array
    grid, vector = shapes.elementwise_grid(x.size, x.shape, x.dtype.itemsize, 1, inputs.x.at,
                                           addresses["data"])
    return _CAST.variant(IN=x.dtype, OUT=inputs.dtype).bind(x, grid, **members, **addresses, vector=vector)


def _tiled(call: Call, inputs: _Inputs, members: dict[str, Any],
           addresses: dict[str, int]) -> Iterator[Launch]:
    """Yields the launch for tiles of a matrix, and those that add up column sums."""
    x, dbias = inputs.x.array, inputs.result.dbias
    rows, columns = x.shape[-2:]
    directions = _ROWWISE_BIT * ("data" in addresses) | _COLUMNWISE_BIT * ("data_t" in addresses)
    aligned = columns % 8 == 0 and inputs.x.at % 16 == 0 and addresses.get("data", 0) % 8 == 0
    vector = rows % 16 == 0 and addresses.get("data_t", 0) % 16 == 0
    whole = aligned and vector and (directions, dbias) in _WHOLE
    tile = shapes.choose_tile(x, _large_tile(x.dtype, directions, dbias)) if whole else shapes.SMALL
    sums = None
    if dbias:
        dbias_at = addresses.pop("dbias")
        sums = ColumnSums(x.shape, dbias_at, call.scratch("bias_gradient", partial_sums(x.shape)))
        members["column_sums"] = sums.tiles_at(tile.rows)
    variant = _cast_transpose_variant(x.dtype, inputs.dtype, tile, dbias, whole * directions)
    yield variant.bind(x, tile.grid(x.shape), shared=_shared(tile, directions, dbias), **members,
                       **addresses, rows=rows, columns=columns, aligned=int(aligned), vector=int(vector))
    if sums:
        yield from sums.launches(x, tile.rows, call.noop_at)


_QUANTIZE = _QuantizeTensor()


def _large_tile(source: np.dtype[Any], directions: int, dbias: bool) -> shapes.Tile:
    """Return the tile for whole patches of large arrays."""
    if directions == _ROWWISE_BIT:
        return shapes.SMALL
    if directions == _COLUMNWISE_BIT:
        return _COLUMNWISE
    # 1024 threads have 64 registers each, too few for f32 patches and column sums
    return shapes.BOTH_NARROW if source == float32 or dbias else shapes.BOTH


def _shared(tile: shapes.Tile, directions: int, dbias: bool) -> int:
    """Return the bytes of shared memory of a launch: the transposed tile, and an f32 per 16 rows of a
    column."""
    return bool(directions & _COLUMNWISE_BIT) * tile.shared + dbias * tile.shared // 4


def _cast_transpose_variant(source: np.dtype[Any], to: np.dtype[Any], tile: shapes.Tile, dbias: bool,
                            directions: int = 0) -> Variant:
    """Return the program for whole patches in these directions, or, for SMALL tiles, the one for any array
    and any directions."""
    return _CAST_TRANSPOSE.variant(
        block=tile.block, shared=_shared(tile, directions or _COLUMNWISE_BIT, dbias), IN=source, OUT=to,
        **tile.defines, DBIAS=dbias, WHOLE=directions > 0, DIRECTIONS=directions)


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _CAST.variant(IN=source, OUT=to)
        for dbias in (False, True):
            yield _cast_transpose_variant(source, to, shapes.SMALL, dbias)
        for directions, dbias in _WHOLE:
            for tile in {shapes.SMALL, _large_tile(source, directions, dbias)}:
                yield _cast_transpose_variant(source, to, tile, dbias, directions)
