"""Groups of arrays: per-tensor scaling of any number of matrices in one launch, and every recipe for a list of arrays. Kernels:
kernels_cu/quantize/tensor_list.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from ... import backend, reference
from ...arrays import Array, empty_beside
from ...calls import tensor_lists, validate
from ...calls.memory import Range, check_separate
from ...calls.results import given_result
from ...calls.tensor_lists import Key, Launch, Table, as_list, of_output, same
from ...formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, flag, float8_e4m3fn, float32, lookup
from ...kernels import Kernel, Variant, executor_of, tiles
from ...recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    check_directions,
    checked_eps,
    empty_per_tensor,
)
from ...results import Quantized
from ..scales.scale import scale_target
from . import block_results, single_read, tensor, tensor_list_blocks

Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling

_FEW = 8                                        # of them that a launch has room for (kFew)
_CAST = Kernel("quantize/tensor_list", "multi_cast_transpose")
_AMAX = Kernel("quantize/tensor_list", "multi_amax_scale")
_CURRENT = Kernel("quantize/tensor_list", "multi_cast_current", cooperative=True)
_AMAX_THREADS = 256
_SMALL = tiles.SMALL


def multi_cast_transpose(xs: Sequence[Array], scales: Any, *, dtype: Any = float8_e4m3fn, amaxes: Any = None, noop: Array | None = None,
                         outputs: Sequence[Quantized] | None = None) -> list[Quantized]:
    """`cast_transpose` of any number of matrices, of any shapes, in one launch.

        data = cast(x * scale)      column-wise: data transposed      scale_inv = 1 / scale      amax = max(amax, max |x|)

    for each x with its own scale; bytes as `cast_transpose` writes them, one by one.

    Parameters
    ----------
    xs : list of bfloat16, float16 or float32 matrices [M, K]: all of one dtype, each with its own shape (0 included)
    scales : one for each: an f32 array [n], or a list of one-element f32 arrays or of Python or NumPy scalars
    dtype : float8_e4m3fn or float8_e5m2
    amaxes : f32 array [n], or a list of one-element f32 arrays: each is raised to the largest |x| before scaling (NaN ignored)
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `outputs`. Must not change while the
        launches run
    outputs : earlier results for the same shapes, or those of ``recipe.empty(…)``; written in place and returned. Arrays that come
        together again cost little: what the launch reads of them is on the device already. With such, the call allocates and copies
        nothing, and can be captured into a CUDA graph

    Returns
    -------
    list of Quantized (`outputs` itself where given), whose directions share one scale_inv each.

    Raises
    ------
    TypeError for wrong dtypes, dtypes that differ, or NumPy and CuPy arrays mixed, ValueError for shapes, lists of different lengths,
    devices and overlaps (and, during a capture, arrays that no call has had before), DeviceError; all before anything is written.

    Source: TransformerEngine's multi_cast_transpose. Bytes moved per element: x + 2. Matrices whose rows are no multiples of 8 elements (or
    columns of 16) send the whole group through smaller tiles.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[0.5, 300]], np.float32)
    >>> first, second = fp8.multi_cast_transpose([a, b], [1.0, 2.0])
    >>> first.columnwise.data.astype(np.float32).tolist(), second.dequantize().tolist()
    ([[1.0, 3.0], [2.0, 4.0]], [[0.5, 224.0]])
    """
    if scales is None:
        raise ValueError("scales: expected one for each array, got None; multi_quantize with CurrentScaling takes them from the arrays")
    return _per_tensor(xs, _Options(lookup(dtype, FP8_DTYPES, "dtype").dtype, True, True, None), scales, amaxes, noop, outputs)


def multi_quantize(xs: Sequence[Array], recipe: Recipe, *, rowwise: bool = True, columnwise: bool = False, scales: Any = None,
                   amaxes: Any = None, noop: Array | None = None, outputs: Sequence[Quantized] | None = None) -> list[Quantized]:
    """``recipe.quantize`` of any number of arrays: the same bytes.

    All arrays take one launch together. With CurrentScaling 16-bit arrays whose rows are multiples of 8 elements (16-byte aligned) are read
    once, and wait in the GPU's multiprocessors for their scales, where the list is large enough (17 M elements on an H200) and most of it
    is in arrays that fit (15 M elements each); other lists take two launches, of which the first finds every scale. BlockScaling and
    MXScaling take one for each dtype that there is, and one for each array whose last two axes are swapped in memory; blocks of whole lines
    are quantised array by array.

    Parameters
    ----------
    xs : list of bfloat16, float16 or float32 arrays of any, different shapes: for per-tensor recipes matrices of one dtype, for the
        others what `quantize_block` and `quantize_mx` take
    recipe : DelayedScaling, CurrentScaling, BlockScaling or MXScaling
    rowwise, columnwise : the directions of every result
    scales : of DelayedScaling, which needs them: as for `multi_cast_transpose`
    amaxes : of per-tensor recipes: as for `multi_cast_transpose`
    noop, outputs : as for `multi_cast_transpose`

    Returns
    -------
    list of Quantized (`outputs` itself where given).

    Raises
    ------
    As `multi_cast_transpose`, and TypeError for another recipe, ValueError for scales and amaxes that the recipe has no use for; all
    before anything is written.

    Source: TransformerEngine's multi-tensor quantize. In blocks, an array whose rows are no multiples of 4 elements sends all arrays of its
    dtype through the slower kernel for any shape.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> xs = [np.full((2, 3), 7, np.float32), np.full((1, 4), 0.5, np.float32)]
    >>> [q.scale_inv.tolist() for q in fp8.multi_quantize(xs, fp8.CurrentScaling())]
    [[0.015625], [0.0011160714784637094]]
    """
    options = _options(recipe, rowwise, columnwise, scales, amaxes)
    if isinstance(options, tensor_list_blocks.Options):
        return tensor_list_blocks.quantize(xs, options, noop, outputs)
    return _per_tensor(xs, options, scales, amaxes, noop, outputs)


def check_call(xs: Sequence[Array], recipe: Recipe, *, rowwise: bool, columnwise: bool, scales: Any, amaxes: Any, noop: Array | None,
               outputs: Sequence[Quantized] | None) -> None:
    """All validation of `multi_quantize` and nothing else: for callers that make several such calls or none."""
    options = _options(recipe, rowwise, columnwise, scales, amaxes)
    if isinstance(options, tensor_list_blocks.Options):
        tensor_list_blocks.check_call(xs, options, noop, outputs)
    else:
        _validated(xs, options, scales, amaxes, noop, outputs)


def _options(recipe: Recipe, rowwise: bool, columnwise: bool, scales: Any, amaxes: Any) -> _Options | tensor_list_blocks.Options:
    rowwise, columnwise = flag(rowwise, "rowwise"), flag(columnwise, "columnwise")
    if isinstance(recipe, DelayedScaling):
        if scales is None:
            raise ValueError("scales: delayed scaling needs the scales that earlier steps determined, got None")
        rule = None
    elif isinstance(recipe, CurrentScaling):
        if scales is not None:
            raise ValueError("scales: current scaling takes them from the arrays themselves; DelayedScaling quantises with given scales")
        rule = scale_target(recipe.dtype, 0), checked_eps(recipe.eps), bool(recipe.pow2_scale)
    else:
        if not isinstance(recipe, (BlockScaling, MXScaling)):
            raise TypeError(f"recipe: expected DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got {type(recipe).__name__}")
        if scales is not None or amaxes is not None:
            raise ValueError("scales, amaxes: belong to per-tensor recipes; blocks take their scales from their own elements")
        return tensor_list_blocks.Options(recipe, rowwise, columnwise)
    return _Options(recipe.dtype, rowwise, columnwise, rule)


class _Options(NamedTuple):
    dtype: np.dtype[Any]
    rowwise: bool
    columnwise: bool
    rule: tuple[float, float, bool] | None          # of current scaling: target, eps, pow2_scale


# ---- arguments ----
class _Sources(NamedTuple):
    arrays: list[Array]                             # C-contiguous
    xp: Any
    addresses: list[int]
    copied: bool                                    # some are copies of what was given


def _sources(xs: Sequence[Array]) -> _Sources:
    """The arrays of a group, at least one: matrices of one kind and dtype on one device."""
    arrays: list[Array] = []
    addresses, xp, copied = [], None, False
    for i, given in enumerate(xs):
        if xp is not None and not isinstance(given, xp.ndarray):
            backend.require_module(given, xp, f"xs[{i}]")
        x, xp, at = validate.source(given, INPUT_DTYPES, f"xs[{i}]")
        first = arrays[0] if arrays else x
        if x.dtype != first.dtype:
            raise TypeError(f"xs[{i}]: expected dtype {first.dtype}, that of xs[0], got {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"xs[{i}]: expected a matrix (two dimensions), got shape {x.shape}")
        if xp is not np:
            validate.same_device(x, first, f"xs[{i}]")
        copied = copied or x is not given
        arrays.append(x)
        addresses.append(at)
    return _Sources(arrays, xp, addresses, copied)


def _each_f32(a: Any, number: int, x: Array, xp: Any, name: str, scalars: bool) -> list[tuple[int, float]]:
    """(address, 0) of each array's element of an f32 array [n] or list, or (0, value) of a scalar."""
    if isinstance(a, (list, tuple)):
        as_list(a, name, number)
        check: Callable[..., Any] = validate.scalar_or_one_f32 if scalars else lambda *given: (validate.one_f32(*given), 0.0)
        return [check(one, x, xp, f"{name}[{i}]") for i, one in enumerate(a)]
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.dtype != float32:
        raise TypeError(f"{name}: expected dtype float32, got {a.dtype}")
    if a.shape != (number,):
        raise ValueError(f"{name}: expected shape {(number,)}, one for each array of xs, got {a.shape}")
    if xp is not np:
        validate.same_device(a, x, name)
    at, stride = validate.address(a), a.strides[0]
    if at % 4 or stride % 4:
        raise ValueError(f"{name}: address {at:#x} or stride {stride} is not a multiple of 4")
    return [(at + i * stride, 0.0) for i in range(number)]


def _check_writable(amaxes: Any, name: str = "amaxes") -> None:
    for a in amaxes if isinstance(amaxes, (list, tuple)) else (amaxes,):
        if isinstance(a, np.ndarray) and not a.flags.writeable:
            raise ValueError(f"{name}: the array is read-only")


# ---- per tensor ----
def _per_tensor(xs: Any, options: _Options, scales: Any, amaxes: Any, noop: Array | None, outputs: Any) -> list[Quantized]:
    key = Key.of(xs, scales, amaxes, outputs, options) if outputs is not None else None
    plan = tensor_lists.known(key, outputs)
    if plan is not None:
        plan.launch_again(xs[0], noop)
        return same(outputs)
    call = _validated(xs, options, scales, amaxes, noop, outputs)
    if call is None:
        return [] if outputs is None else same(outputs)
    sources, x = call.sources, call.sources.arrays[0]
    if executor_of(sources.xp) == "reference":
        if noop is not None and noop.reshape(()) == 1:
            return same(outputs)
        made = _by_reference(sources.arrays, options, scales, amaxes)
        if outputs is None:
            return made
        for out, fresh in zip(outputs, made, strict=True):
            block_results.store(out, fresh)
        return same(outputs)
    results = same(outputs)
    if outputs is None:
        validate.may_allocate(x)
        results = [empty_per_tensor(empty_beside(x, (1,), float32), a.shape, options.dtype, options.rowwise, options.columnwise)
                   for a in sources.arrays]
    table = _Table(sources, options, call.scales_at, call.amaxes_at, results)
    key = None if sources.copied else Key.of(xs, scales, amaxes, results, options)
    tensor_lists.launch(table, x, call.noop_at, call.runs, results, key, xs, scales, amaxes)
    return results


class _Call(NamedTuple):
    """A call found valid: its arrays, the places of scales, amaxes and noop, and the memory that it reads and writes."""

    sources: _Sources
    scales_at: list[tuple[int, float]] | None
    amaxes_at: list[int] | None
    noop_at: int
    runs: list[Range]


def _validated(xs: Any, options: _Options, scales: Any, amaxes: Any, noop: Array | None, outputs: Any) -> _Call | None:
    """None for a list without arrays."""
    xs = as_list(xs, "xs")
    if outputs is not None:
        as_list(outputs, "outputs", len(xs))
    if noop is not None and outputs is None:
        raise ValueError("noop: needs outputs=, since nothing may be written")
    check_directions((0, 0), options.rowwise, options.columnwise)
    if not xs:
        for name, given in (("scales", scales), ("amaxes", amaxes)):
            if given is not None and len(given):
                raise ValueError(f"{name}: expected none for no arrays, got {len(given)}")
        return None
    sources = _sources(xs)
    x, xp = sources.arrays[0], sources.xp
    scales_at = None if scales is None else _each_f32(scales, len(xs), x, xp, "scales", scalars=True)
    amaxes_at = None if amaxes is None else [at for at, _ in _each_f32(amaxes, len(xs), x, xp, "amaxes", scalars=False)]
    _check_writable(amaxes)
    noop_at = 0 if noop is None else validate.one_f32(noop, x, xp, "noop")
    runs = [Range(at, at + a.nbytes, False, f"xs[{i}]") for i, (a, at) in enumerate(zip(sources.arrays, sources.addresses, strict=True))
            if a.nbytes]
    runs += [Range(at, at + 4, False, f"scales[{i}]") for i, (at, _) in enumerate(scales_at or ()) if at]
    runs += [Range(at, at + 4, True, f"amaxes[{i}]") for at, i in {at: i for i, at in enumerate(amaxes_at or ())}.items()]
    if noop_at:
        runs.append(Range(noop_at, noop_at + 4, False, "noop"))
    if outputs is not None:
        for i, (a, out) in enumerate(zip(sources.arrays, outputs, strict=True)):
            runs += [Range(start, end, True, f"outputs[{i}]") for start, end in _ranges(out, a, xp, options, i)]
    check_separate(runs)
    return _Call(sources, scales_at, amaxes_at, noop_at, runs)


def _ranges(out: Any, x: Array, xp: Any, options: _Options, i: int) -> list[tuple[int, int]]:
    """The memory of a result given by the caller, once it has been found to fit."""
    described = tensor.PerTensorResult(x.shape, options.dtype, options.rowwise, options.columnwise)
    try:
        _, _, ranges = given_result(described, out, x, xp)
        check_separate(ranges)
    except (TypeError, ValueError) as error:
        raise of_output(error, i) from None
    return [(found.start, found.end) for found in ranges if found.start < found.end]


def _by_reference(xs: list[Array], options: _Options, scales: Any, amaxes: Any) -> list[Quantized]:
    recipe: Recipe = DelayedScaling(options.dtype)
    if options.rule:
        recipe = CurrentScaling(options.dtype, *options.rule[1:])
    return reference.multi_quantize(xs, recipe, rowwise=options.rowwise, columnwise=options.columnwise, scales=scales, amaxes=amaxes)


class _Table(Table):
    """A record for each matrix. For current scaling a workspace follows, and where another launch finds the scales, these."""

    def __init__(self, sources: _Sources, options: _Options, scales: list[tuple[int, float]] | None, amaxes: list[int] | None,
                 results: list[Quantized]) -> None:
        x, number = sources.arrays[0], len(sources.arrays)
        targets = [_Addresses.of(out) for out in results]
        aligned = [a.shape[1] % 8 == 0 and at % 16 == 0 and to.data % 8 == 0
                   for a, at, to in zip(sources.arrays, sources.addresses, targets, strict=True)]
        vector = [a.shape[0] % 16 == 0 and to.data_t % 16 == 0 for a, to in zip(sources.arrays, targets, strict=True)]
        self._resident = single_read.choose(x, _blocks(sources.arrays, single_read.TILE)) if options.rule and all(aligned) else None
        tile = _SMALL if self._resident is None else single_read.TILE
        if self._resident is None and all(aligned) and all(vector):
            wide = x.dtype.itemsize == 2 and options.rowwise and options.columnwise
            large = tiles.BOTH if wide and tiles.fills_wide(a.shape[1] for a in sources.arrays) else tiles.BOTH_NARROW
            tile = tiles.choose(x, large, sum(a.size for a in sources.arrays))
        blocks = _blocks(sources.arrays, tile)
        ends = list(accumulate(blocks))
        if ends[-1] > 0x7FFFFFFF:
            raise ValueError(f"xs: {ends[-1]} blocks, more than a launch can have (2**31 - 1); split the group")
        rows = zip(sources.arrays, sources.addresses, targets, scales or [(0, 0.0)] * number, amaxes or [0] * number, ends, blocks,
                   aligned, vector, strict=True)
        record = _CAST.record("MultiTensor")
        packed = b"".join(
            record.pack(x=at, data=to.data, data_t=to.data_t, scale=scale, scale_inv=to.scale_inv, scale_inv_copy=to.scale_inv_copy,
                        amax=amax, rows=a.shape[0], columns=a.shape[1], first_block=end - count, blocks=count, scale_value=value,
                        aligned=whole, vector=rows16)
            for a, at, to, (scale, value), amax, end, count, whole, rows16 in rows)
        self._source, self._options, self._tile, self._number = x.dtype, options, tile, number
        self._own_scales = scales is None and self._resident is None
        workspace = 12 * number if self._own_scales else 4 * single_read.words(ends[-1]) if self._resident else 0
        super().__init__(packed, blocks, (options, x.dtype, tile, self._resident), workspace)

    def write(self, host: np.ndarray, at: int) -> None:
        super().write(host, at)
        if self._own_scales:
            _scale_members(host, self._number)[:] = self._scales(at) + 4 * np.arange(self._number, dtype=np.uint64)

    def _scales(self, at: int) -> int:
        return at + self.workspace + 8 * self._number

    def launches(self, at: int) -> list[Launch]:
        read, grid = (at, at + self.numbers), sum(self.blocks)
        if self._resident:
            assert self._options.rule is not None
            variant = single_read.variant(_CURRENT, self._source, self._options.dtype, self._resident.shared)
            return [Launch(variant, self._resident.blocks, read,
                           single_read.members(at + self.workspace, grid, self._resident, self._options.rule))]
        each = self.blocks[0] if len(set(self.blocks)) == 1 else 0
        few = self.packed if self._number <= _FEW and not self._own_scales else b""
        found = [Launch(_cast_variant(self._source, self._options.dtype, self._tile), grid, read,
                        (int(self._own_scales), each, self._number if few else 0, few))]
        if self._options.rule:
            target, eps, pow2 = self._options.rule
            members = at + self.workspace, self._scales(at), target, eps, int(pow2)
            found.insert(0, Launch(_amax_variant(self._source), grid, read, members))
        return found


def _blocks(arrays: Sequence[Array], tile: tiles.Tile) -> list[int]:
    """Tiles of each matrix; 1 of an empty one."""
    return [-(-a.shape[0] // tile.rows) * -(-a.shape[1] // tile.columns) or 1 for a in arrays]


def _scale_members(host: np.ndarray, number: int) -> np.ndarray:
    """The addresses of the scales in a table of MultiTensors."""
    return host[:number * _CAST.record("MultiTensor").size].view(np.uint64).reshape(number, -1)[:, 3]


class _Addresses(NamedTuple):
    """Where a matrix's results go; 0: nowhere."""

    data: int
    data_t: int
    scale_inv: int
    scale_inv_copy: int

    @staticmethod
    def of(out: Quantized) -> _Addresses:
        row, column, first = out.rowwise, out.columnwise, out._any.scale_inv
        return _Addresses(0 if row is None else validate.address(row.data), 0 if column is None else validate.address(column.data),
                          validate.address(first),
                          0 if column is None or column.scale_inv is first else validate.address(column.scale_inv))


@functools.cache
def _cast_variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile) -> Variant:
    return _CAST.variant(block=tile.block, shared=tile.shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, TILE_ROWS=tile.rows,
                         TILE_COLUMNS=tile.columns, DBIAS=0, WHOLE=int(tile != _SMALL))


@functools.cache
def _amax_variant(source: np.dtype[Any]) -> Variant:
    return _AMAX.variant(block=_AMAX_THREADS, IN=FORMATS[source].tag)


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    yield from single_read.variants(_CURRENT)
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _cast_variant(source, to, _SMALL)
        yield _cast_variant(source, to, tiles.BOTH_NARROW)
        if source.itemsize == 2:
            yield _cast_variant(source, to, tiles.BOTH)
    for source in INPUT_DTYPES:
        yield _amax_variant(source)
