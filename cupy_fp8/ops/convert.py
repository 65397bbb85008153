"""Type conversion and transposition. Kernels: kernels_cu/convert.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from .. import reference
from ..arrays import Array, bits, empty_beside
from ..formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, flag, lookup
from ..results import swap_last
from ..runtime import Kernel, Variant, executor_of
from . import checks, flat, tiles

_CONVERT = Kernel("convert", "convert", "3P3qI")
_TRANSPOSE = Kernel("convert", "transpose", "3P3qI")
_ALL_DTYPES = tuple(FORMATS)
#: The fastest on an H200 of those tried (docs/performance.md).
_BYTES = tiles.Tile(256, 256, down_first=True)
TO_FLOAT = tiles.Tile(128, 256, down_first=True)


def astype(a: Array, dtype: Any, saturate: bool = True, *, out: Array | None = None) -> Array:
    """Convert between float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu, in any direction.

    Each element is widened exactly to f32 and rounded once, to nearest even with subnormals kept. To FP8: values beyond the
    maximum become the maximum, or with ``saturate=False`` NaN (E4M3, above 464) or Inf (E5M2, from 61440); NaN is 0x7F. To E8M0:
    the next power of two upwards; negative values, Inf and NaN become NaN (0xFF). To floats: overflow to Inf, one quiet NaN.

    a : array of any shape.  out : array of the same shape and the target dtype, written and returned.
    Raises TypeError (dtypes, mixed kinds), ValueError (out), DeviceError. Bytes moved: both arrays once.
    Source: OCP 8-bit Floating Point Specification; docs/numerics.md rules 2 to 5.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.astype(np.array([1.0, 1000.0, -0.3], np.float32), fp8.float8_e4m3fn).view(np.uint8).tolist()
    [56, 126, 170]
    """
    to = lookup(dtype, _ALL_DTYPES, "dtype")
    saturate = flag(saturate, "saturate")
    a, xp, at = checks.source(a, _ALL_DTYPES, "a")
    if executor_of(xp) == "reference":
        return store(reference.astype(a, to.dtype, saturate), out, a)
    result = new_result(a, a.shape, to.dtype) if out is None else out
    result_at = checks.destination(result, a.shape, to.dtype, a, xp, at)
    launch_flat(a, at, result_at, 0, to.dtype, bool(saturate))
    return result


def transpose(a: Array, *, out: Array | None = None) -> Array:
    """The last two axes swapped, as a new C-contiguous array: FP8 and E8M0 data, byte for byte, at copy speed.

    a : float8_e4m3fn, float8_e5m2 or float8_e8m0fnu array […, M, K].  out : […, K, M], written and returned.
    Raises TypeError, ValueError, DeviceError as in `astype`. Bytes moved: both arrays once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.transpose(fp8.zeros((2, 3, 4), fp8.float8_e5m2, like=np)).shape
    (2, 4, 3)
    """
    a, xp, at = checks.source(a, BYTE_DTYPES, "a")
    if a.ndim < 2:
        raise ValueError(f"a: expected an array of two or more dimensions, got shape {a.shape}")
    if executor_of(xp) == "reference":
        return store(reference.transpose(a), out, a)
    result = new_result(a, swap_last(a.shape), a.dtype) if out is None else out
    result_at = checks.destination(result, swap_last(a.shape), a.dtype, a, xp, at)
    launch_transposed(a, at, result_at, 0, a.dtype)
    return result


def new_result(x: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    checks.may_allocate(x)
    return empty_beside(x, shape, dtype)


def launch_flat(src: Array, at: int, to_at: int, scale_at: int, to: np.dtype[Any], saturate: bool) -> None:
    if src.size:
        blocks, vector = flat.grid(src.size, src.shape, src.dtype.itemsize, to.itemsize, at, to_at)
        _convert_variant(src.dtype, to, saturate).launch(src, blocks, at, to_at, scale_at, src.size, 0, 0, 3 * vector)


def launch_transposed(src: Array, at: int, to_at: int, scale_at: int, to: np.dtype[Any]) -> None:
    if src.size:
        rows, columns = src.shape[-2:]
        vector = (columns % 8 == 0 and at % 8 == 0) | (rows % 16 == 0 and to_at % 16 == 0) << 1
        tile = tiles.choose(src, _BYTES if src.dtype == to else TO_FLOAT) if vector == 3 else tiles.SMALL
        variant = _transpose_variant(src.dtype, to, tile)
        variant.launch(src, tiles.grid(src.shape, tile), at, to_at, scale_at, src.size, rows, columns, vector)


@functools.cache
def _convert_variant(source: np.dtype[Any], to: np.dtype[Any], saturate: bool) -> Variant:
    saturate = saturate or to not in FP8_DTYPES            # the other formats have one way to overflow
    return _CONVERT.variant(block=flat.THREADS, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, SATURATE=int(saturate))


@functools.cache
def _transpose_variant(source: np.dtype[Any], to: np.dtype[Any], tile: tiles.Tile) -> Variant:
    return _TRANSPOSE.variant(block=tile.block, shared=tile.shared, IN=FORMATS[source].tag, OUT=FORMATS[to].tag, SATURATE=1,
                              **tile.defines, ALIGNED=int(tile is not tiles.SMALL))


def store(result: np.ndarray, out: Array | None, *inputs: Array) -> Array:
    """The reference's result, in `out` where one is given."""
    if out is None:
        return result
    for a in inputs:
        checks.destination(out, result.shape, result.dtype, a, np, checks.address(a))
    bits(out)[...] = bits(result)
    return out


def variants() -> Iterator[Variant]:
    """Every variant that these ops may launch."""
    for source, to in product(_ALL_DTYPES, _ALL_DTYPES):
        yield _convert_variant(source, to, True)
    for source, to in product(_ALL_DTYPES, FP8_DTYPES):
        yield _convert_variant(source, to, False)
    for source, tile in product(BYTE_DTYPES, (tiles.SMALL, _BYTES)):
        yield _transpose_variant(source, source, tile)
    for source, to, tile in product(FP8_DTYPES, INPUT_DTYPES, (tiles.SMALL, TO_FLOAT)):
        yield _transpose_variant(source, to, tile)
