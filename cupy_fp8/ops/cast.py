"""Per-tensor scaling: quantise with a given scale, row-wise, column-wise, or both from one read. Kernels: kernels_cu/cast.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import numpy as np

from .. import reference
from ..arrays import Array, bits, empty_beside
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, flags, float8_e4m3fn, float32, lookup
from ..recipes import check_directions, checked_eps, dbias_shape, empty_per_tensor
from ..results import Quantized, Scaled, swap_last
from ..runtime import Kernel, Variant, executor_of
from . import checks, current, flat, tiles
from .amax import current_scale
from .dbias import ColumnSums
from .scale import scale_target

_CAST = Kernel("cast", "cast", "9P3qfII")
_CAST_TRANSPOSE = Kernel("cast", "cast_transpose", "9P3qfII")
#: The fastest on an H200 of those tried (docs/performance.md).
_COLUMNWISE = tiles.Tile(256, 128, down_first=True)
_COLUMNWISE_SUMS = tiles.Tile(128, 128, down_first=True)

#: The types of flags that need no second look.
_FLAGS: set[type] = {bool}


def quantize_tensor(x: Array, scale: Any = None, *, dtype: Any = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                    transposed: bool = True, amax: Array | None = None, noop: Array | None = None, dbias: bool = False,
                    eps: float = 0.0, pow2_scale: bool = False, out: Quantized | None = None) -> Quantized:
    """Quantise a tensor with one scale: a given one (delayed scaling), or the one that its own amax calls for (current scaling).

        data = cast(x * scale)      scale_inv = 1 / scale      amax = max(amax, max |x|)      dbias = sum of x over rows

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 1 says. One kernel reads x
    once and writes everything, scale_inv included. Without a given scale it is
    ``compute_scale(compute_amax(x), dtype=dtype, eps=eps, pow2_scale=pow2_scale)``, found by a kernel before it, or, for row-wise
    data of a tensor that fits into the GPU's multiprocessors, by the same one.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array of any shape (two or more dimensions for `columnwise`)
    scale : one-element f32 array, or a Python or NumPy scalar (fixed in a captured graph); None: current scaling
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : which directions to return; `columnwise` data is stored […, K, M] for an x of […, M, K], which is what
        TN matrix products want, or as x with ``transposed=False`` (then both directions are the same array)
    amax : one-element f32 array, raised to the largest finite or infinite |x| before scaling (NaN ignored); not zeroed first
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`. It must not change while
        the call runs
    dbias : also return the bias gradient, f32 […, K]: the sum of an x of […, M, K] over M before scaling, by a fixed tree, so that
        its bytes depend on nothing but x
    eps, pow2_scale : of current scaling: the floor of the amax, and whether the scale is a power of two (see `compute_scale`)
    out : an earlier result of the same shape, dtype and directions (or ``recipe.empty(…)``); written in place and returned.
        With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, whose directions share one scale_inv (f32 [1]); its `dbias` is None unless asked for.

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, sizes and overlaps, DeviceError; all before
    anything is written.

    Source: TransformerEngine's delayed and current scaling. Bytes moved per element: x + 1 per direction; current scaling in
    two launches reads x twice (what the L2 still holds of it, from there). A dbias of more than one tile of rows takes another launch.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_tensor(np.array([[0.5, 300.0]], np.float32), 2.0)
    >>> q.dequantize().tolist(), q.scale_inv.tolist()
    ([[0.5, 224.0]], [0.5])
    """
    fmt = lookup(dtype, FP8_DTYPES, "dtype")
    x, xp, at = checks.source(x, INPUT_DTYPES)
    if {type(rowwise), type(columnwise), type(transposed), type(dbias), type(pow2_scale)} != _FLAGS:
        flags(rowwise=rowwise, columnwise=columnwise, transposed=transposed, dbias=dbias, pow2_scale=pow2_scale)
    if type(eps) is not float and hasattr(eps, "__len__"):
        checked_eps(eps)
    current_rule = None if scale is not None else (scale_target(fmt.dtype, 0), checked_eps(eps), bool(pow2_scale))
    scale_at, scale_value = (0, 0.0) if scale is None else checks.scalar_or_one_f32(scale, x, xp, "scale")
    if scale is not None and (eps or pow2_scale):
        raise ValueError(f"eps, pow2_scale: belong to current scaling, but a scale was given (got eps={eps}, pow2_scale={pow2_scale})")
    amax_at = 0 if amax is None else checks.one_f32(amax, x, xp, "amax")
    noop_at = 0 if noop is None else checks.one_f32(noop, x, xp, "noop")
    if amax_at and (amax_at in (scale_at, noop_at) or (at < amax_at + 4 and amax_at < at + x.nbytes)):
        raise ValueError("amax: overlaps an input in memory; it is written and needs memory of its own")
    if amax_at and xp is np and not cast(np.ndarray, amax).flags.writeable:
        raise ValueError("amax: the array is read-only")
    by_reference = executor_of(xp) == "reference"
    if out is None:
        check_directions(x.shape, rowwise, columnwise, dbias)
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        if by_reference:
            return reference.quantize_tensor(x, scale, dtype=fmt.dtype, rowwise=rowwise, columnwise=columnwise,
                                             transposed=transposed, amax=amax, dbias=dbias, eps=eps, pow2_scale=pow2_scale)
        checks.may_allocate(x)
        out = empty_per_tensor(empty_beside(x, (1,), float32), x.shape, fmt.dtype, rowwise, columnwise, transposed, dbias)
        target, owner = _Target(out, x, fmt.dtype), None
    else:
        target = _validated(out, x, xp, fmt.dtype, rowwise, columnwise, transposed, dbias)
        target.check_separate(at, x.nbytes, scale_at, amax_at, noop_at)
        owner = out._any.scale_inv
        if by_reference:
            return out if noop is not None and noop.reshape(()) == 1 else _store(out, reference.quantize_tensor(
                x, scale, dtype=fmt.dtype, rowwise=rowwise, columnwise=columnwise, transposed=transposed, amax=amax, dbias=dbias,
                eps=eps, pow2_scale=pow2_scale))
    if current_rule:
        if target.flat and current.launch(x, at, fmt.dtype, target.data, target.scale_inv, target.scale_inv_copy, amax_at, noop_at,
                                          owner, *current_rule):
            return out
        scale_at = current_scale(x, at, owner, noop_at, *current_rule)
    target.launch(x, at, scale_at, scale_value, amax_at, noop_at, bool(current_rule))
    return out


def cast_transpose(x: Array, scale: Any = None, *, dtype: Any = float8_e4m3fn, transposed: bool = True, amax: Array | None = None,
                   noop: Array | None = None, dbias: bool = False, eps: float = 0.0, pow2_scale: bool = False,
                   out: Quantized | None = None) -> Quantized:
    """`quantize_tensor` in both directions from one read of x: row-wise data […, M, K] and column-wise data […, K, M].

    Parameters, errors and source as for `quantize_tensor`.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.cast_transpose(np.arange(6, dtype=np.float32).reshape(2, 3), 1.0)
    >>> q.columnwise.data.astype(np.float32).tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    return quantize_tensor(x, scale, dtype=dtype, columnwise=True, transposed=transposed, amax=amax, noop=noop, dbias=dbias,
                           eps=eps, pow2_scale=pow2_scale, out=out)


class _Target:
    """Where a launch writes: a result's addresses and the kernel variants for it. Kept with the Quantized it describes, so that
    using a result again as `out=` costs one comparison instead of its validation."""

    ranges: list[tuple[int, int]]      # of memory that is written; known for a result given as `out=`

    def __init__(self, out: Quantized, x: Array, dtype: np.dtype[Any]) -> None:
        self.dtype, row, column = dtype, out.rowwise, out.columnwise
        if column is not None and not column.transposed:
            row, column = row or column, None              # the same bytes in the same order
        self.rowwise, self.columnwise = row is not None, column is not None       # not by address: an empty array has none
        self.flat = column is None and out.dbias is None
        self.data = 0 if row is None else checks.address(row.data)
        self.data_t = 0 if column is None else checks.address(column.data)
        first = out._any.scale_inv
        self.scale_inv, self.scale_inv_copy = checks.address(first), 0
        if out.columnwise is not None and out.columnwise.scale_inv is not first:
            self.scale_inv_copy = checks.address(out.columnwise.scale_inv)
        self.rows = self.columns = 0
        self.sums = None
        if out.dbias is not None:
            self.sums = ColumnSums(x, out.dbias, out.__dict__.get("_sums"))
            out.__dict__["_sums"] = self.sums.partial          # its size follows from the shape alone
        if self.flat:
            self.variant = _cast_variant(x.dtype, dtype)
        else:
            self.rows, self.columns = x.shape[-2:]
            self.tile = tiles.choose(x, _large_tile(x.dtype, self.rowwise, self.sums is not None)) if self.columnwise else tiles.SMALL
            self.whole = self.tile is not tiles.SMALL or not self.columnwise

    def check_separate(self, at: int, nbytes: int, scale_at: int, amax_at: int, noop_at: int) -> None:
        for start, end in self.ranges:
            if at < end and start < at + nbytes:
                raise ValueError("out: overlaps the input in memory; results need memory of their own")
            start -= 3                                      # of four bytes the last may be the first that is written
            if start <= scale_at < end or start <= amax_at < end or start <= noop_at < end:
                raise ValueError("out: overlaps scale, amax or noop in memory; results need memory of their own")

    def launch(self, x: Array, at: int, scale_at: int, scale_value: float, amax_at: int, noop_at: int, reverse: bool) -> None:
        sums_at = 0
        if self.flat:
            variant = self.variant
            grid, vector = flat.grid(x.size, x.shape, x.dtype.itemsize, 1, at, self.data)
        else:
            aligned = self.columns % 8 == 0 and at % 16 == 0 and self.data % 8 == 0
            vector = int(self.rows % 16 == 0 and self.data_t % 16 == 0)
            whole = aligned and vector and self.whole
            tile = self.tile if whole else tiles.SMALL
            grid = tiles.grid(x.shape, tile)
            if self.sums:
                sums_at = self.sums.tiles_at(tile.rows)
            variant = _cast_transpose_variant(x.dtype, self.dtype, tile, self.rowwise, self.columnwise, bool(self.sums),
                                              2 if whole else int(aligned))
        variant.launch(x, grid, at, self.data, self.data_t, scale_at, self.scale_inv, self.scale_inv_copy, amax_at, noop_at, sums_at,
                       x.size, self.rows, self.columns, scale_value, reverse, vector)
        if self.sums:
            self.sums.finish(x, tile.rows, noop_at)


def _large_tile(source: np.dtype[Any], rowwise: bool, dbias: bool) -> tiles.Tile:
    if not rowwise:
        return _COLUMNWISE_SUMS if dbias else _COLUMNWISE
    # f32 patches and column sums do not fit the 64 registers of 1024 threads
    return tiles.BOTH_NARROW if source == float32 or dbias else tiles.BOTH


@functools.cache
def _cast_variant(source: np.dtype[Any], to: np.dtype[Any]) -> Variant:
    return _CAST.variant(block=flat.THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag)


@functools.cache
def _cast_transpose_variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile, rowwise: bool, columnwise: bool, dbias: bool,
                            aligned: int) -> Variant:
    shared = columnwise * tile.shared + dbias * tile.shared // 4     # bytes of the tile; an f32 for every 16 rows of a column
    return _CAST_TRANSPOSE.variant(block=tile.block, shared=shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, **tile.defines,
                                   ROWWISE=int(rowwise), COLUMNWISE=int(columnwise), DBIAS=int(dbias), ALIGNED=aligned)


def _validated(out: Quantized, x: Array, xp: Any, dtype: np.dtype[Any], rowwise: bool, columnwise: bool, transposed: bool,
               dbias: bool) -> _Target:
    """The _Target of a result given as `out=`, once it has been found to fit the call."""
    key = (id(out), x.shape, x.dtype, dtype, rowwise, columnwise, transposed, dbias, 0 if xp is np else x.data.device_id)
    kept = getattr(out, "_target", None)
    if kept is not None and kept[0] == key:
        return cast(_Target, kept[1])
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    check_directions(x.shape, rowwise, columnwise, dbias)
    if dbias != (out.dbias is not None):
        raise ValueError(f"out: {'no' if dbias else 'has a'} dbias, but dbias={dbias} was asked for")
    written: list[tuple[str, int, int]] = []

    def write(name: str, a: Array, shape: tuple[int, ...], of: np.dtype[Any]) -> None:
        at = checks.destination(a, shape, of, x, xp, checks.address(x), name)
        for other, other_at, other_nbytes in written:
            checks.separate(at, a.nbytes, other_at, other_nbytes, name, other)
        written.append((name, at, a.nbytes))

    for name, wanted, part, swapped in (("rowwise", rowwise, out.rowwise, False),
                                        ("columnwise", columnwise, out.columnwise, transposed)):
        if wanted != (part is not None):
            raise ValueError(f"out: {'no' if wanted else 'has a'} {name} part, but {name}={wanted} was asked for")
        if part is None:
            continue
        if part.transposed != swapped or part.block is not None or part.shape != x.shape:
            raise ValueError(f"out.{name}: expected per-tensor data of shape {x.shape} {'' if swapped else 'not '}stored transposed, "
                             f"got {part!r}")
        for what, a, shape, of in (("data", part.data, swap_last(x.shape) if swapped else x.shape, dtype),
                                   ("scale_inv", part.scale_inv, (1,), float32)):
            shared = name == "columnwise" and out.rowwise is not None and a is getattr(out.rowwise, what)
            if not (shared and (what == "scale_inv" or not transposed)):
                write(f"out.{name}.{what}", a, shape, of)
    if out.dbias is not None:
        write("out.dbias", out.dbias, dbias_shape(x.shape), float32)
    if rowwise and columnwise and not transposed and cast(Scaled, out.rowwise).data is not cast(Scaled, out.columnwise).data:
        raise ValueError("out: with transposed=False both directions are the same bytes; expected them to share one data array")
    if dbias and "_sums" not in out.__dict__:
        checks.may_prepare(x)
    target = _Target(out, x, dtype)
    target.ranges = [(at, at + nbytes) for _, at, nbytes in written if nbytes]
    if xp is not np:
        object.__setattr__(out, "_target", (key, target))
    return target


def _store(out: Quantized, result: Quantized) -> Quantized:
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if mine is not None and fresh is not None:
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)
    if out.dbias is not None:
        out.dbias[...] = result.dbias
    return out


#: (row-wise, column-wise, dbias) of what the tiles do.
_TILED = ((True, True, False), (False, True, False), (True, True, True), (False, True, True), (True, False, True))


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _cast_variant(source, to)
        for rowwise, columnwise, dbias in _TILED:
            large = _large_tile(source, rowwise, dbias) if columnwise else tiles.SMALL
            yield _cast_transpose_variant(source, to, large, rowwise, columnwise, dbias, 2)
            for aligned in (0, 1):
                yield _cast_transpose_variant(source, to, tiles.SMALL, rowwise, columnwise, dbias, aligned)
