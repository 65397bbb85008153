"""Groups of arrays: per-tensor scaling of any number of matrices in one launch, and every recipe for a list of arrays. Kernels:
kernels_cu/multi.cu."""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .. import backend, reference
from ..arrays import Array, empty_beside
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float32, lookup
from ..recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    block_forms,
    check_directions,
    checked_eps,
    empty_per_tensor,
    mx_forms,
)
from ..results import Quantized
from ..runtime import Kernel, Variant, capturing, executor_of
from . import cast, checks, forms, tiles
from .scale import scale_target

Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling

_CAST = Kernel("multi", "multi_cast_transpose", "3PI")
_AMAX = Kernel("multi", "multi_amax_scale", "5PffI")
_TENSOR = struct.Struct("=7Q3qIfII")            # MultiTensor of the kernels
_AMAX_THREADS = 256
_SMALL = tiles.SMALL
_LARGE = tiles.Tile(256, 256, down_first=False)
_LARGE_F32 = tiles.Tile(256, 128, down_first=False)         # see ops/cast.py
_KEPT = 4                                       # plans of a result that no graph has captured


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
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `outputs`
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

    Per-tensor recipes are fused: one launch for all arrays with DelayedScaling, two with CurrentScaling (the first finds every scale).
    BlockScaling and MXScaling launch once per array.

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

    Source: TransformerEngine's multi-tensor quantize.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> xs = [np.full((2, 3), 7, np.float32), np.full((1, 4), 0.5, np.float32)]
    >>> [q.scale_inv.tolist() for q in fp8.multi_quantize(xs, fp8.CurrentScaling())]
    [[0.015625], [0.0011160714784637094]]
    """
    if isinstance(recipe, DelayedScaling):
        if scales is None:
            raise ValueError("scales: delayed scaling needs the scales that earlier steps determined, got None")
        rule = None
    elif isinstance(recipe, CurrentScaling):
        if scales is not None:
            raise ValueError("scales: current scaling takes them from the arrays themselves; DelayedScaling quantises with given scales")
        rule = scale_target(recipe.dtype, 0), checked_eps(recipe.eps), bool(recipe.pow2_scale)
    else:
        return _one_by_one(xs, recipe, rowwise, columnwise, scales, amaxes, noop, outputs)
    return _per_tensor(xs, _Options(recipe.dtype, bool(rowwise), bool(columnwise), rule), scales, amaxes, noop, outputs)


class _Options(NamedTuple):
    dtype: np.dtype[Any]
    rowwise: bool
    columnwise: bool
    rule: tuple[float, float, bool] | None          # of current scaling: target, eps, pow2_scale


# ---- arguments ----
def _list(a: Any, name: str, number: int | None = None) -> Sequence[Any]:
    if not isinstance(a, (list, tuple)):
        raise TypeError(f"{name}: expected a list, got {type(a).__name__}")
    if number is not None and len(a) != number:
        raise ValueError(f"{name}: expected {number}, one for each array of xs, got {len(a)}")
    return a


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
        x, xp, at = checks.source(given, INPUT_DTYPES, f"xs[{i}]")
        first = arrays[0] if arrays else x
        if x.dtype != first.dtype:
            raise TypeError(f"xs[{i}]: expected dtype {first.dtype}, that of xs[0], got {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"xs[{i}]: expected a matrix (two dimensions), got shape {x.shape}")
        if xp is not np:
            checks.same_device(x, first, f"xs[{i}]")
        copied = copied or x is not given
        arrays.append(x)
        addresses.append(at)
    return _Sources(arrays, xp, addresses, copied)


def _each_f32(a: Any, number: int, x: Array, xp: Any, name: str, scalars: bool) -> list[tuple[int, float]]:
    """(address, 0) of each array's element of an f32 array [n] or list, or (0, value) of a scalar."""
    if isinstance(a, (list, tuple)):
        _list(a, name, number)
        check: Callable[..., Any] = checks.scalar_or_one_f32 if scalars else lambda *given: (checks.one_f32(*given), 0.0)
        return [check(one, x, xp, f"{name}[{i}]") for i, one in enumerate(a)]
    if not isinstance(a, xp.ndarray):
        backend.require_module(a, xp, name)
    if a.dtype != float32:
        raise TypeError(f"{name}: expected dtype float32, got {a.dtype}")
    if a.shape != (number,):
        raise ValueError(f"{name}: expected shape {(number,)}, one for each array of xs, got {a.shape}")
    if xp is not np:
        checks.same_device(a, x, name)
    at, stride = checks.address(a), a.strides[0]
    if at % 4 or stride % 4:
        raise ValueError(f"{name}: address {at:#x} or stride {stride} is not a multiple of 4")
    return [(at + i * stride, 0.0) for i in range(number)]


def _check_writable(amaxes: Any, name: str = "amaxes") -> None:
    for a in amaxes if isinstance(amaxes, (list, tuple)) else (amaxes,):
        if isinstance(a, np.ndarray) and not a.flags.writeable:
            raise ValueError(f"{name}: the array is read-only")


class _Run(NamedTuple):
    """Of memory, and what it is to a call."""

    start: int
    end: int
    written: bool
    name: str


def _check_separate(runs: Iterable[_Run]) -> None:
    """ValueError if any run that is written shares a byte with another."""
    furthest: dict[bool, _Run] = {}                 # by whether it is written: the one that ends last
    for run in sorted(runs):
        for other in furthest.values() if run.written else filter(None, [furthest.get(True)]):
            if run.start < other.end:
                written, met = (run, other) if run.written else (other, run)
                raise ValueError(f"{written.name}: overlaps {met.name} in memory; results need memory of their own")
        if run.written not in furthest or run.end > furthest[run.written].end:
            furthest[run.written] = run


def _same(outputs: Any) -> list[Quantized]:
    found: list[Quantized] = outputs
    return found


# ---- per tensor ----
def _per_tensor(xs: Any, options: _Options, scales: Any, amaxes: Any, noop: Array | None, outputs: Any) -> list[Quantized]:
    key = _Key.of(xs, scales, amaxes, outputs, options) if outputs is not None else None
    if key is not None:
        for plan in outputs[0].__dict__.get("_groups", ()):
            if plan.key == key and plan.alive:
                plan.launch_again(xs[0], noop)
                return _same(outputs)
    xs = _list(xs, "xs")
    if outputs is not None:
        _list(outputs, "outputs", len(xs))
    if noop is not None and outputs is None:
        raise ValueError("noop: needs outputs=, since nothing may be written")
    check_directions((0, 0), options.rowwise, options.columnwise)
    if not xs:
        for name, given in (("scales", scales), ("amaxes", amaxes)):
            if given is not None and len(given):
                raise ValueError(f"{name}: expected none for no arrays, got {len(given)}")
        return [] if outputs is None else _same(outputs)
    sources = _sources(xs)
    x, xp = sources.arrays[0], sources.xp
    scales_at = None if scales is None else _each_f32(scales, len(xs), x, xp, "scales", scalars=True)
    amaxes_at = None if amaxes is None else [at for at, _ in _each_f32(amaxes, len(xs), x, xp, "amaxes", scalars=False)]
    _check_writable(amaxes)
    noop_at = 0 if noop is None else checks.one_f32(noop, x, xp, "noop")
    runs = [_Run(at, at + a.nbytes, False, f"xs[{i}]") for i, (a, at) in enumerate(zip(sources.arrays, sources.addresses, strict=True))
            if a.nbytes]
    runs += [_Run(at, at + 4, False, f"scales[{i}]") for i, (at, _) in enumerate(scales_at or ()) if at]
    runs += [_Run(at, at + 4, True, f"amaxes[{i}]") for at, i in {at: i for i, at in enumerate(amaxes_at or ())}.items()]
    if noop_at:
        runs.append(_Run(noop_at, noop_at + 4, False, "noop"))
    by_reference = executor_of(xp) == "reference"
    in_capture = xp is not np and capturing(x.data.device_id)
    results: list[Quantized]
    if outputs is None:
        _check_separate(runs)
        if by_reference:
            return _by_reference(sources.arrays, options, scales, amaxes)
        checks.may_allocate(x)
        results = [empty_per_tensor(empty_beside(x, (1,), float32), a.shape, options.dtype, options.rowwise, options.columnwise)
                   for a in sources.arrays]
    else:
        results = outputs
        for i, (a, out) in enumerate(zip(sources.arrays, results, strict=True)):
            runs += [_Run(start, end, True, f"outputs[{i}]") for start, end in _ranges(out, a, xp, options, i)]
        _check_separate(runs)
        if by_reference:
            if noop is None or noop.reshape(()) != 1:
                for out, fresh in zip(results, _by_reference(sources.arrays, options, scales, amaxes), strict=True):
                    forms.store(out, fresh)
            return results
    table = _Table(sources, options, scales_at, amaxes_at, results)
    groups = results[0].__dict__.setdefault("_groups", [])
    plan = next((plan for plan in groups if plan.table == table), None)
    if plan is None:
        if in_capture:
            raise ValueError("outputs: used with these arrays for the first time while a CUDA graph is captured; call once before the "
                             "capture")
        plan = _Plan(table, x, [run for run in runs if run.written])
        _forget(groups)
        groups.append(plan)
    plan.watch(None if sources.copied else _Key.of(xs, scales, amaxes, results, options), xs, scales, amaxes, results)
    plan.launch(x, noop_at)
    plan.captured = plan.captured or in_capture
    return results


def _forget(groups: list[_Plan]) -> None:
    """Makes room for another plan: graphs that are replayed still read the tables of some."""
    free = [plan for plan in groups if not plan.captured]
    for i, plan in enumerate(free):
        if not plan.alive or i <= len(free) - _KEPT:
            groups.remove(plan)


def _ranges(out: Any, x: Array, xp: Any, options: _Options, i: int) -> list[tuple[int, int]]:
    """The memory of a result given by the caller, once it has been found to fit."""
    try:
        return cast._validated(out, x, xp, options.dtype, options.rowwise, options.columnwise, True, False).ranges
    except (TypeError, ValueError) as error:
        raise _of_output(error, i) from None


def _of_output(error: Exception, i: int) -> Exception:
    """What an op says of `out`, said of one of `outputs`."""
    message = str(error)
    return type(error)(f"outputs[{i}]{message[3:]}" if message.startswith("out") else f"outputs[{i}]: {message}")


def _by_reference(xs: list[Array], options: _Options, scales: Any, amaxes: Any) -> list[Quantized]:
    recipe: Recipe = DelayedScaling(options.dtype)
    if options.rule:
        recipe = CurrentScaling(options.dtype, *options.rule[1:])
    return reference.multi_quantize(xs, recipe, rowwise=options.rowwise, columnwise=options.columnwise, scales=scales, amaxes=amaxes)


class _Key(NamedTuple):
    """What a call must have in common with an earlier one to launch the same: the identities of its arrays (all of them alive, see
    `_Plan.alive`), their shapes, which can be assigned to, and where the scales and amaxes are. NumPy arrays can also move their memory."""

    options: _Options                               # what differs most often comes first
    scales: Any
    amaxes: Any
    xs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]

    @staticmethod
    def of(xs: Any, scales: Any, amaxes: Any, outputs: Any, options: _Options) -> _Key | None:
        """None for what is no call at all."""
        if type(xs) not in (list, tuple) or type(outputs) not in (list, tuple) or not xs or not outputs:
            return None
        if type(outputs[0]) is not Quantized:
            return None
        try:
            shapes = tuple(map(_SHAPE, xs))
            scales_key, amaxes_key = _identity(scales), _identity(amaxes)
        except AttributeError:
            return None
        memory: tuple[int, ...] = ()
        if isinstance(xs[0], np.ndarray):
            held = [*xs, *_members(scales), *_members(amaxes)]
            memory = tuple(a.ctypes.data for a in held if isinstance(a, np.ndarray))
        return _Key(options, scales_key, amaxes_key, tuple(map(id, xs)), tuple(map(id, outputs)), shapes, memory)


_SHAPE: Callable[[Any], tuple[int, ...]] = attrgetter("shape")


def _members(a: Any) -> Sequence[Any]:
    return a if isinstance(a, (list, tuple)) else ()


def _identity(a: Any) -> Any:
    """Of scales or amaxes. One array is known by its memory: views of a state's arrays come and go."""
    if a is None or isinstance(a, (list, tuple)):
        return a and tuple(map(id, a))
    return checks.address(a), a.shape, a.strides, a.dtype, type(a)


class _Table:
    """What the launches read of each matrix, but for where the table itself will be. Equal tables make equal launches."""

    def __init__(self, sources: _Sources, options: _Options, scales: list[tuple[int, float]] | None, amaxes: list[int] | None,
                 results: list[Quantized]) -> None:
        x, number = sources.arrays[0], len(sources.arrays)
        self.number, self.source, self.options, self.own_scales = number, x.dtype, options, scales is None
        targets = [_Addresses.of(out) for out in results]
        aligned = [a.shape[1] % 8 == 0 and at % 16 == 0 and to.data % 8 == 0
                   for a, at, to in zip(sources.arrays, sources.addresses, targets, strict=True)]
        vector = [a.shape[0] % 16 == 0 and to.data_t % 16 == 0 for a, to in zip(sources.arrays, targets, strict=True)]
        self.tile = _SMALL
        if all(aligned) and all(vector):
            self.tile = tiles.choose(x, _large(x.dtype), sum(a.size for a in sources.arrays))
        self.blocks = [-(-a.shape[0] // self.tile.rows) * -(-a.shape[1] // self.tile.columns) or 1 for a in sources.arrays]
        ends = list(accumulate(self.blocks))
        if ends[-1] > 0x7FFFFFFF:
            raise ValueError(f"xs: {ends[-1]} blocks, more than a launch can have (2**31 - 1); split the group")
        rows = zip(sources.arrays, sources.addresses, targets, scales or [(0, 0.0)] * number, amaxes or [0] * number, ends, self.blocks,
                   aligned, vector, strict=True)
        self.packed = b"".join(
            _TENSOR.pack(at, to.data, to.data_t, scale, to.scale_inv, to.scale_inv_copy, amax, *a.shape, end - count, count, value, whole,
                         rows16)
            for a, at, to, (scale, value), amax, end, count, whole, rows16 in rows)

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, _Table) and (self.packed, self.options, self.source, self.tile)
                == (other.packed, other.options, other.source, other.tile))

    __hash__ = None                                 # type: ignore[assignment]


class _Plan:
    """A group's table in its memory, with which matrix each block belongs to, and for current scaling the scales and a workspace.

    Kept with the first of the results that it writes, so that a call with the same arrays neither validates nor copies anything; where a
    CUDA graph has captured it for as long as that result lives.
    """

    captured = False

    def __init__(self, table: _Table, x: Array, written: list[_Run]) -> None:
        self.table, self.key, self._written = table, None, written
        self._alive = [True]
        number, blocks = table.number, sum(table.blocks)
        of_blocks = number * _TENSOR.size
        workspace = -(-(of_blocks + 4 * blocks) // 16) * 16
        own_scales = workspace + 8 * number
        host = np.zeros(own_scales + 4 * number if table.own_scales else workspace, np.uint8)
        memory: Array = host if isinstance(x, np.ndarray) else empty_beside(x, host.shape, host.dtype)
        self._memory = host, memory                 # host: the copy may still be reading it
        at = checks.address(memory)
        host[:of_blocks] = np.frombuffer(table.packed, np.uint8)
        if table.own_scales:
            _scale_members(host, number)[:] = at + own_scales + 4 * np.arange(number, dtype=np.uint64)
        host[of_blocks:of_blocks + 4 * blocks].view(np.uint32)[:] = np.repeat(np.arange(number, dtype=np.uint32), table.blocks)
        if memory is not host:
            with backend.cupy().cuda.Device(x.data.device_id):
                memory.data.copy_from_host_async(host.ctypes.data, host.nbytes)
        cast_variant = _cast_variant(table.source, table.options.dtype, table.tile)
        #: Variants, and the members of their structs after noop.
        self._launches: list[tuple[Variant, tuple[Any, ...]]] = [(cast_variant, (int(table.own_scales),))]
        if table.options.rule:
            target, eps, pow2 = table.options.rule
            self._launches.insert(0, (_amax_variant(table.source), (at + workspace, at + own_scales, target, eps, int(pow2))))
        self._blocks, self._at, self._of_blocks = blocks, at, at + of_blocks
        self._checked = {0}                         # addresses of noop that overlap nothing

    key: _Key | None

    @property
    def alive(self) -> bool:
        """Whether all arrays still exist: else their identities may be others' by now."""
        return self._alive[0]

    def watch(self, key: _Key | None, xs: Any, scales: Any, amaxes: Any, results: Sequence[Quantized]) -> None:
        """From now on calls with this key are this plan's, for as long as these arrays live."""
        self.key, self._alive = key, [True]
        died = functools.partial(_died, self._alive)
        held = [*xs, *results, *_members(scales), *_members(amaxes)]
        # Scalars cannot be watched, but kept.
        self._held = [weakref.ref(a, died) if isinstance(a, Quantized) or (hasattr(a, "strides") and not np.isscalar(a)) else a
                      for a in held]

    def launch_again(self, x: Array, noop: Array | None) -> None:
        on_device = not isinstance(x, np.ndarray)
        noop_at = 0
        if noop is not None:
            noop_at = checks.one_f32(noop, x, backend.cupy() if on_device else np, "noop")
            if noop_at not in self._checked:
                _check_separate([_Run(noop_at, noop_at + 4, False, "noop"), *self._written])
        if on_device and not self.captured:
            self.captured = capturing(x.data.device_id)
        self.launch(x, noop_at)

    def launch(self, x: Array, noop_at: int) -> None:
        self._checked.add(noop_at)
        for variant, members in self._launches:
            variant.launch(x, self._blocks, self._at, self._of_blocks, noop_at, *members)


def _scale_members(host: np.ndarray, number: int) -> np.ndarray:
    """The addresses of the scales in a table of MultiTensors."""
    return host[:number * _TENSOR.size].view(np.uint64).reshape(number, -1)[:, 3]


def _died(alive: list[bool], _: Any) -> None:
    alive[0] = False


class _Addresses(NamedTuple):
    """Where a matrix's results go; 0: nowhere."""

    data: int
    data_t: int
    scale_inv: int
    scale_inv_copy: int

    @staticmethod
    def of(out: Quantized) -> _Addresses:
        row, column, first = out.rowwise, out.columnwise, out._any.scale_inv
        return _Addresses(0 if row is None else checks.address(row.data), 0 if column is None else checks.address(column.data),
                          checks.address(first),
                          0 if column is None or column.scale_inv is first else checks.address(column.scale_inv))


def _large(dtype: np.dtype[Any]) -> tiles.Tile:
    return _LARGE_F32 if dtype == float32 else _LARGE


@functools.cache
def _cast_variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile) -> Variant:
    return _CAST.variant(block=tile.block, shared=tile.shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, TILE_ROWS=tile.rows,
                         TILE_COLUMNS=tile.columns, DBIAS=0, WHOLE=int(tile != _SMALL))


@functools.cache
def _amax_variant(source: np.dtype[Any]) -> Variant:
    return _AMAX.variant(block=_AMAX_THREADS, IN=FORMATS[source].tag)


# ---- blocks ----
def _one_by_one(xs: Any, recipe: Any, rowwise: bool, columnwise: bool, scales: Any, amaxes: Any, noop: Array | None,
                outputs: Any) -> list[Quantized]:
    if not isinstance(recipe, (BlockScaling, MXScaling)):
        raise TypeError(f"recipe: expected DelayedScaling, CurrentScaling, BlockScaling or MXScaling, got {type(recipe).__name__}")
    if scales is not None or amaxes is not None:
        raise ValueError("scales, amaxes: belong to per-tensor recipes; blocks take their scales from their own elements")
    xs = _list(xs, "xs")
    if noop is not None and outputs is None:
        raise ValueError("noop: needs outputs=, since nothing may be written")
    check_directions((0, 0), rowwise, columnwise)
    results = [None] * len(xs) if outputs is None else _list(outputs, "outputs", len(xs))
    if xs:
        _check_blocks(xs, recipe, rowwise, columnwise, noop, outputs)
    quantized = [recipe.quantize(x, rowwise=rowwise, columnwise=columnwise, noop=noop, out=out) for x, out in zip(xs, results, strict=True)]
    return quantized if outputs is None else _same(outputs)


def _check_blocks(xs: Sequence[Any], recipe: BlockScaling | MXScaling, rowwise: bool, columnwise: bool, noop: Array | None,
                  outputs: Any) -> None:
    """Everything that the call for one of the arrays could refuse, before the first is written."""
    xp, first, runs = None, xs[0], []
    for i, given in enumerate(xs):
        if xp is not None and not isinstance(given, xp.ndarray):
            backend.require_module(given, xp, f"xs[{i}]")
        xp = backend.module_of(given, f"xs[{i}]")
        if given.dtype not in INPUT_DTYPES or given.ndim not in (2, 3):
            checks.source(given, INPUT_DTYPES, f"xs[{i}]")
            raise ValueError(f"xs[{i}]: expected an array of two or three dimensions, got shape {given.shape}")
        if xp is not np:
            checks.same_device(given, first, f"xs[{i}]")
            if outputs is None:
                checks.may_allocate(given)
        try:
            x, _, at, swapped = forms.source(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"xs[{i}]: {error}") from None
        runs.append(_Run(at, at + x.nbytes, False, f"xs[{i}]"))
        if outputs is not None:
            runs += [_Run(start, end, True, f"outputs[{i}]")
                     for start, end in _block_ranges(outputs[i], x, swapped, xp, recipe, rowwise, columnwise, i)]
    if noop is not None:
        at = checks.one_f32(noop, first, xp, "noop")
        runs.append(_Run(at, at + 4, False, "noop"))
    _check_separate(run for run in runs if run.start < run.end)


def _block_ranges(out: Any, x: Array, swapped: bool, xp: Any, recipe: BlockScaling | MXScaling, rowwise: bool, columnwise: bool,
                  i: int) -> forms.Ranges:
    shape, kind = forms.logical(x.shape, swapped), "block-scaled"
    if isinstance(recipe, MXScaling):
        kind = "MX"
        found = mx_forms(shape, recipe.dtype, rowwise, columnwise, False, recipe.block, recipe.scale_layout)
    else:
        found = block_forms(shape, recipe.dtype, rowwise, columnwise, True, recipe.block, recipe.scale_layout)
    shared: tuple[str, ...] = ()
    if "rowwise" in found and "columnwise" in found:
        if found["rowwise"] == found["columnwise"]:
            shared = ("data", "scale_inv")
        elif recipe.block == (32, 32):
            shared = ("data",)
    try:
        return forms.written(out, found, x, xp, kind, shared)
    except (TypeError, ValueError) as error:
        raise _of_output(error, i) from None


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _cast_variant(source, to, _SMALL)
        yield _cast_variant(source, to, _large(source))
    for source in INPUT_DTYPES:
        yield _amax_variant(source)
