"""Per-tensor scaling: quantise with a given scale, row-wise, column-wise, or both from one read. Kernels: kernels_cu/cast.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..arrays import Array, bits
from ..formats import FORMATS, FP8_DTYPES, INPUT_DTYPES, float8_e4m3fn, float32, lookup
from ..recipes import check_directions, empty_per_tensor
from ..results import Quantized, Scaled, swap_last
from ..runtime import Kernel, executor_of
from . import checks, flat, tiles

_CAST = Kernel("cast", "cast", "8P3qfI")
_CAST_TRANSPOSE = Kernel("cast", "cast_transpose", "8P3qfI")


def quantize_tensor(x: Array, scale: Any, *, dtype: Any = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                    transposed: bool = True, amax: Array | None = None, noop: Array | None = None,
                    out: Quantized | None = None) -> Quantized:
    """Quantise a tensor with one given scale.

        data = cast(x * scale)      scale_inv = 1 / scale      amax = max(amax, max |x|)

    in f32: round to nearest even, saturating, NaN as 0x7F; every byte as docs/numerics.md section 1 says. One kernel reads x
    once and writes everything, scale_inv included.

    Parameters
    ----------
    x : bfloat16, float16 or float32 array of any shape (two or more dimensions for `columnwise`)
    scale : one-element f32 array, or a Python or NumPy scalar (fixed in a captured graph)
    dtype : float8_e4m3fn or float8_e5m2
    rowwise, columnwise : which directions to return; `columnwise` data is stored […, K, M] for an x of […, M, K], which is what
        TN matrix products want, or as x with ``transposed=False`` (then both directions are the same array)
    amax : one-element f32 array, raised to the largest finite or infinite |x| before scaling (NaN ignored); not zeroed first
    noop : one-element f32 array on the device; where it holds 1.0 nothing at all is written. Needs `out`
    out : an earlier result of the same shape, dtype and directions (or ``recipe.empty(…)``); written in place and returned.
        With it the call allocates nothing and can be captured into a CUDA graph

    Returns
    -------
    Quantized, whose directions share one scale_inv (f32 [1]).

    Raises
    ------
    TypeError for wrong dtypes or NumPy and CuPy arrays mixed, ValueError for shapes, sizes and overlaps, DeviceError; all before
    anything is written.

    Source: TransformerEngine's delayed scaling. Bytes moved per element: x + 1 per direction.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.quantize_tensor(np.array([[0.5, 300.0]], np.float32), 2.0)
    >>> q.dequantize().tolist(), q.scale_inv.tolist()
    ([[0.5, 224.0]], [0.5])
    """
    fmt = lookup(dtype, FP8_DTYPES, "dtype")
    x, xp = checks.source(x, INPUT_DTYPES)
    scale_at, scale_value = checks.scalar_or_one_f32(scale, xp, "scale")
    for name, a in (("amax", amax), ("noop", noop)):
        if a is not None:
            checks.one_f32(a, xp, name)
            checks.same_device(a, x, name)
    if scale_at:
        checks.same_device(scale, x, "scale")
    check_directions(x.shape, rowwise, columnwise)
    if out is None:
        if noop is not None:
            raise ValueError("noop: needs out=, since nothing may be written")
        out_or_new = None
    else:
        _check_out(out, x, xp, fmt.dtype, rowwise, columnwise, transposed, amax)
        out_or_new = out
    executor = executor_of(xp)
    if executor == "reference":
        return _by_reference(x, scale, fmt.dtype, rowwise, columnwise, transposed, amax, noop, out)
    if out_or_new is None:
        out_or_new = empty_per_tensor(x.shape, fmt.dtype, rowwise, columnwise, transposed, x)
    _launch(x, xp, out_or_new, scale_at, scale_value, amax, noop)
    return out_or_new


def cast_transpose(x: Array, scale: Any, *, dtype: Any = float8_e4m3fn, transposed: bool = True, amax: Array | None = None,
                   noop: Array | None = None, out: Quantized | None = None) -> Quantized:
    """`quantize_tensor` in both directions from one read of x: row-wise data […, M, K] and column-wise data […, K, M].

    Parameters, errors and source as for `quantize_tensor`.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> q = fp8.cast_transpose(np.arange(6, dtype=np.float32).reshape(2, 3), 1.0)
    >>> q.columnwise.data.astype(np.float32).tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    return quantize_tensor(x, scale, dtype=dtype, columnwise=True, transposed=transposed, amax=amax, noop=noop, out=out)


def _launch(x: Array, xp: Any, q: Quantized, scale_at: int, scale_value: float, amax: Array | None, noop: Array | None) -> None:
    row, column = q.rowwise, q.columnwise
    if column is not None and not column.transposed:
        row, column = row or column, None              # the same bytes in the same order
    first = row or column
    assert first is not None
    scale_inv = checks.address(first.scale_inv)
    copy = checks.address(column.scale_inv) if row is not None and column is not None else 0
    data = 0 if row is None else checks.address(row.data)
    at = checks.address(x)
    tail = (scale_at, scale_inv, 0 if copy == scale_inv else copy, checks.address_or_null(amax), checks.address_or_null(noop), x.size)
    types = (("IN", FORMATS[x.dtype].tag), ("OUT", FORMATS[first.dtype].tag))
    if column is None:
        grid, vector = flat.grid(x.size, x.shape, x.dtype.itemsize, 1, at, data)
        _CAST.launch(x, types, grid, flat.THREADS, 0, at, data, 0, *tail, 0, 0, scale_value, vector)
        return
    rows, columns = tiles.matrices(x.shape)
    tile, blocks = tiles.choose(x, xp)
    data_t = checks.address(column.data)
    vector = (columns % 8 == 0 and at % 16 == 0 and data % 8 == 0) | (rows % 16 == 0 and data_t % 16 == 0) << 1
    _CAST_TRANSPOSE.launch(x, (*types, ("TILE", tile), ("ROWWISE", int(row is not None))), blocks, tile * tile // 64, tile * tile,
                           at, data, data_t, *tail, rows, columns, scale_value, vector)


def _check_out(out: Quantized, x: Array, xp: Any, dtype: np.dtype[Any], rowwise: bool, columnwise: bool, transposed: bool,
               amax: Array | None) -> None:
    if not isinstance(out, Quantized):
        raise TypeError(f"out: expected a Quantized (an earlier result, or recipe.empty(…)), got {type(out).__name__}")
    seen: dict[int, tuple[str, Array]] = {} if amax is None else {id(amax): ("amax", amax)}
    for name, wanted, part, swapped in (("rowwise", rowwise, out.rowwise, False),
                                        ("columnwise", columnwise, out.columnwise, transposed)):
        if wanted != (part is not None):
            raise ValueError(f"out: {'no' if wanted else 'has a'} {name} part, but {name}={wanted} was asked for")
        if part is None:
            continue
        if part.transposed != swapped or part.block is not None:
            raise ValueError(f"out.{name}: expected per-tensor data {'' if swapped else 'not '}stored transposed, got {part!r}")
        checks.destination(part.data, swap_last(x.shape) if swapped else x.shape, dtype, x, xp, f"out.{name}.data")
        checks.destination(part.scale_inv, (1,), float32, x, xp, f"out.{name}.scale_inv")
        for what, a in (("data", part.data), ("scale_inv", part.scale_inv)):
            for other, b in seen.values():
                if a is not b:
                    checks.separate(a, b, f"out.{name}.{what}", other)
            seen[id(a)] = (f"out.{name}.{what}", a)


def _by_reference(x: Array, scale: Any, dtype: Any, rowwise: bool, columnwise: bool, transposed: bool, amax: Any, noop: Any,
                  out: Quantized | None) -> Quantized:
    if noop is not None and noop.reshape(()) == 1:
        assert out is not None
        return out
    result = reference.quantize_tensor(x, scale, dtype=dtype, rowwise=rowwise, columnwise=columnwise, transposed=transposed, amax=amax)
    if out is None:
        return result
    for mine, fresh in ((out.rowwise, result.rowwise), (out.columnwise, result.columnwise)):
        if isinstance(mine, Scaled) and isinstance(fresh, Scaled):
            for a, b in zip(mine, fresh, strict=True):
                bits(a)[...] = bits(b)
    return out
