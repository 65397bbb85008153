"""Type conversion, dequantisation and transposition. Kernels: kernels_cu/convert.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..arrays import Array, bits, empty
from ..formats import BYTE_DTYPES, FORMATS, FP8_DTYPES, INPUT_DTYPES, float32, lookup
from ..results import Quantized, Scaled, swap_last
from ..runtime import Kernel, executor_of
from . import checks, flat, tiles

_CONVERT = Kernel("convert", "convert", "3P3qI")
_TRANSPOSE = Kernel("convert", "transpose", "3P3qI")
_ALL_DTYPES = tuple(FORMATS)


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
    a, xp = checks.source(a, _ALL_DTYPES, "a")
    return _convert(a, xp, to.dtype, saturate, None, False, out, a.shape, lambda: reference.astype(a, to.dtype, saturate))


def dequantize(q: Scaled | Quantized, *, dtype: Any = float32, out: Array | None = None) -> Array:
    """The values of quantised data: data * scale_inv in f32, rounded to `dtype`, in the logical shape.

    q : a Scaled, or a Quantized (its row-wise part where it has one). Data stored transposed is transposed back.
    dtype : float32, float16 or bfloat16 (overflow to Inf, one quiet NaN).
    out : array of the logical shape and of dtype, written and returned.
    Raises TypeError, ValueError, DeviceError as in `astype`. Bytes moved: data and result once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.dequantize(fp8.quantize_tensor(np.float32([[3.0, -5.1]]), 16.0), dtype=np.float16).tolist()
    [[3.0, -5.0]]
    """
    to = lookup(dtype, INPUT_DTYPES, "dtype")
    if not isinstance(q, (Scaled, Quantized)):
        raise TypeError(f"q: expected a Scaled or Quantized, got {type(q).__name__}; use astype for a plain array")
    s = q if isinstance(q, Scaled) else q._any
    data, xp = checks.source(s.data, FP8_DTYPES, "q.data")
    checks.one_f32(s.scale_inv, xp, "q.scale_inv")
    checks.same_device(s.scale_inv, data, "q.scale_inv")
    return _convert(data, xp, to.dtype, True, s.scale_inv, s.transposed, out, s.shape, lambda: reference.dequantize(s, dtype=to.dtype))


def transpose(a: Array, *, out: Array | None = None) -> Array:
    """The last two axes swapped, as a new C-contiguous array: FP8 and E8M0 data, byte for byte, at copy speed.

    a : float8_e4m3fn, float8_e5m2 or float8_e8m0fnu array […, M, K].  out : […, K, M], written and returned.
    Raises TypeError, ValueError, DeviceError as in `astype`. Bytes moved: both arrays once.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> fp8.transpose(fp8.zeros((2, 3, 4), fp8.float8_e5m2, like=np)).shape
    (2, 4, 3)
    """
    a, xp = checks.source(a, BYTE_DTYPES, "a")
    if a.ndim < 2:
        raise ValueError(f"a: expected an array of two or more dimensions, got shape {a.shape}")
    return _convert(a, xp, a.dtype, True, None, True, out, swap_last(a.shape), lambda: reference.transpose(a))


def _convert(src: Array, xp: Any, dtype: np.dtype[Any], saturate: bool, scale_inv: Array | None, swap: bool, out: Array | None,
             shape: tuple[int, ...], by_reference: Any) -> Array:
    if out is not None:
        checks.destination(out, shape, dtype, src, xp, "out")
        if scale_inv is not None:
            checks.separate(out, scale_inv, "out", "q.scale_inv")
    if executor_of(xp) == "reference":
        result = by_reference()
        if out is None:
            return result
        bits(out)[...] = bits(result)
        return out
    if out is None:
        out = empty(shape, dtype, like=src)
    if src.size == 0:
        return out
    at, to = checks.address(src), checks.address(out)
    scale_at = checks.address_or_null(scale_inv)
    variant = (("IN", FORMATS[src.dtype].tag), ("OUT", FORMATS[dtype].tag), ("SATURATE", int(saturate)))
    if not swap:
        blocks, aligned = flat.grid(src.size, shape, src.dtype.itemsize, dtype.itemsize, at, to)
        _CONVERT.launch(src, variant, blocks, flat.THREADS, 0, at, to, scale_at, src.size, 0, 0, 3 * aligned)
    else:
        rows, columns = tiles.matrices(src.shape)
        tile, blocks = tiles.choose(src, xp)
        vector = (columns % 8 == 0 and at % 8 == 0) | (rows % 16 == 0 and to % 16 == 0) << 1
        _TRANSPOSE.launch(src, (*variant, ("TILE", tile)), blocks, tile * tile // 64, tile * tile,
                          at, to, scale_at, src.size, rows, columns, vector)
    return out
