"""Type conversion and transposition. Kernels: kernels_cu/convert/astype.cu."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ... import reference
from ...arrays import Array, check_dimensions
from ...calls.call import Call, Input, Op, run
from ...calls.descriptions import Description, one_array
from ...formats import BYTE_DTYPES, FORMATS, DType, flag, lookup
from ...kernels import Kernel, Launch, Variant, shapes
from ...layouts import swap_last
from ...methods import for_methods
from ...typed_array import TypedArray

_CONVERT = Kernel("convert/astype", "convert", block=shapes.ELEMENTWISE_THREADS)
_TRANSPOSE = Kernel("convert/astype", "transpose")
_ALL_DTYPES = tuple(FORMATS)
#: fastest on an H200 (docs/lab-notes)
_BYTES = shapes.Tile(256, 256, down_first=True)


@for_methods
def astype(a: Array, dtype: DType, *, saturate: bool = True, out: Array | None = None) -> TypedArray:
    """Convert between float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu, in any
    direction.

    Each element is widened exactly to f32 and rounded once, to nearest even. Subnormals stay subnormal. In
    FP8, values beyond the maximum become the maximum, or with ``saturate=False`` NaN (E4M3, above 464) or Inf
    (E5M2, from 61440), and NaN becomes 0x7F. In E8M0, values become the next power of two upwards; negative
    values, Inf and NaN become NaN (0xFF). Floats overflow to Inf, and every NaN becomes the same quiet one.

    a : array of any shape.
    dtype : the type of the result.
    saturate : to FP8, whether values beyond the maximum become the maximum.
    out : array of the same shape and the target dtype, written and returned.
    Raises TypeError (dtypes, mixed kinds), ValueError (out), DeviceError. Bytes moved: both arrays once.
    Source: OCP 8-bit Floating Point Specification; docs/numerics.md rules 2 to 5.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.astype(np.array([1.0, 1000.0, -0.3], np.float32), fp8.float8_e4m3fn).view(np.uint8).tolist()
    [56, 126, 170]
    """
    return run(_ASTYPE, (a, dtype, saturate), out)


def transpose(a: Array, *, out: Array | None = None) -> TypedArray:
    """Swap the last two axes of FP8 or E8M0 data, byte for byte, into a new C-contiguous array, at copy
    speed.

    a : float8_e4m3fn, float8_e5m2 or float8_e8m0fnu array […, M, K].
    out : array […, K, M] of a's dtype, written and returned.
    Raises TypeError, ValueError, DeviceError as in `astype`. Bytes moved: both arrays once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.transpose(fp8.zeros((2, 3, 4), fp8.float8_e5m2, like=np)).shape
    (2, 4, 3)
    """
    return run(_TRANSPOSE_OP, (a,), out)


# ---- the call and its launches ----
class _Inputs(NamedTuple):
    a: Input
    to: np.dtype[Any]
    saturate: bool = True


class _AsType(Op[_Inputs]):
    def arguments(self, call: Call, a: Any, dtype: Any, saturate: Any) -> _Inputs:
        to = lookup(dtype, _ALL_DTYPES, "dtype").dtype
        saturate = flag(saturate, "saturate")
        return _Inputs(call.read("a", a, _ALL_DTYPES), to, saturate)

    def result(self, inputs: _Inputs) -> Description:
        return one_array(inputs.a.shape, inputs.to)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.astype(inputs.a.array, inputs.to, saturate=inputs.saturate)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        yield from flat_launches(inputs.a, written[0], 0, inputs.to, saturate=inputs.saturate)


class _Transpose(Op[_Inputs]):
    def arguments(self, call: Call, a: Any) -> _Inputs:
        source = call.read("a", a, BYTE_DTYPES)
        check_dimensions(source.shape, "a", 2)
        return _Inputs(source, source.dtype)

    def result(self, inputs: _Inputs) -> Description:
        return one_array(swap_last(inputs.a.shape), inputs.to)

    def reference(self, inputs: _Inputs) -> np.ndarray:
        return reference.transpose(inputs.a.array)

    def launches(self, call: Call, inputs: _Inputs, *written: int) -> Iterator[Launch]:
        yield from transposed_launches(inputs.a, written[0])


_ASTYPE, _TRANSPOSE_OP = _AsType(), _Transpose()


def flat_launches(a: Input, to_at: int, scale_at: int, to: np.dtype[Any], saturate: bool) -> Iterator[Launch]:
    """Yields the launch that converts an array in its order. scale: the address of a factor, or 0 for none.
    """
    src = a.array
    if src.size:
        blocks, vector = shapes.elementwise_grid(src.size, src.shape, src.dtype.itemsize, to.itemsize,
                                                 a.at, to_at)
        yield _CONVERT.variant(IN=src.dtype, OUT=to).bind(
            src, blocks, src=a.at, dst=to_at, scale_inv=scale_at, n=src.size, vector=vector,
            saturate=int(saturate))


def transposed_launches(a: Input, to_at: int) -> Iterator[Launch]:
    """Yields the launch that transposes each matrix of an array of bytes."""
    src = a.array
    if src.size:
        rows, columns = src.shape[-2:]
        vector = (columns % 8 == 0 and a.at % 8 == 0) | (rows % 16 == 0 and to_at % 16 == 0) << 1
        tile = shapes.choose_tile(src, _BYTES) if vector == 3 else shapes.SMALL
        yield _transpose_variant(tile).bind(src, tile.grid(src.shape), src=a.at, dst=to_at, rows=rows,
                                            columns=columns, vector=vector)


def _transpose_variant(tile: shapes.Tile) -> Variant:
    return _TRANSPOSE.variant(block=tile.block, shared=tile.shared, **tile.defines,
                              ALIGNED=tile is not shapes.SMALL)


def variants() -> Iterator[Variant]:
    """Yields every variant that these ops may launch."""
    for source, to in product(_ALL_DTYPES, _ALL_DTYPES):
        yield _CONVERT.variant(IN=source, OUT=to)
    for tile in (shapes.SMALL, _BYTES):
        yield _transpose_variant(tile)
