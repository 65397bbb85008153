"""Reference of cupy_fp8.ops.quantize.mx: blocks of 32 elements with E8M0 scales (docs/numerics.md, section
2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import FORMATS, float8_e4m3fn, float8_e8m0fnu
from ...results import Quantized, Scaled
from .. import numerics
from ..convert.astype import transpose
from ..scales.swizzle import swizzle

BLOCK = 32


def quantize_mx(x: np.ndarray, *, dtype: Any = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                transposed: bool = False, mode: str = "rceil", profile: str = "te",
                block: tuple[int, int] = (1, BLOCK), scale_layout: str = "compact") -> Quantized:
    """data = narrow(fl(x * inv(e))), with e from the amax of the block."""
    dtype, v = np.dtype(dtype), numerics.widen(x)
    amax_rows = block_amax(v, profile)                                      # […, M, blocks along K]
    amax_columns = block_amax(np.swapaxes(v, -1, -2), profile)              # […, K, blocks along M]
    if block[0] == BLOCK:
        # […, blocks along K, blocks along M]
        square = block_amax(np.swapaxes(amax_rows, -1, -2), profile)
        amax_rows = np.repeat(np.swapaxes(square, -1, -2), BLOCK, axis=-2)[..., :x.shape[-2], :]
        amax_columns = np.repeat(square, BLOCK, axis=-2)[..., :x.shape[-1], :]
    row = column = None
    if rowwise:
        e = scale_byte(amax_rows, dtype, mode, profile)
        row = Scaled._of(scaled_data(v, e, dtype), _stored(e, False, scale_layout), x.shape, False,
                         (1, BLOCK), scale_layout)
    if columnwise:
        e = scale_byte(amax_columns, dtype, mode, profile)
        data = scaled_data(np.swapaxes(v, -1, -2), e, dtype)
        if block[0] == BLOCK and row is not None and not transposed:
            data = row.data  # both directions have the same bytes
        elif not transposed:
            data = transpose(data)
        column = Scaled._of(data, _stored(e, True, scale_layout), x.shape, transposed, (BLOCK, 1),
                            scale_layout)
    return Quantized(row, column)


def block_amax(v: np.ndarray, profile: str) -> np.ndarray:
    """max |v| of each 32 elements of the last axis in f32: […, L] -> […, ceil(L / 32)]. NaN is ignored; in
    the profile 'torchao' it wins."""
    # Magnitudes order like their bits, and NaN is above Inf.
    magnitude = v.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if profile == "te":
        magnitude = np.where(np.isnan(v), np.uint32(0), magnitude)
    return numerics.in_blocks(magnitude, (1, BLOCK)).max(axis=(-3, -1)).view(np.float32)


def scale_byte(amax: np.ndarray, dtype: np.dtype[Any], mode: str, profile: str) -> np.ndarray:
    """The E8M0 byte of each block."""
    fmt = FORMATS[dtype]
    emax = int(np.log2(fmt.max))
    u = amax.view(np.uint32).astype(np.int64)
    if mode == "rceil":
        reciprocal = numerics.div(numerics.F32_ONE, np.float32(fmt.max))
        e = numerics.round_up_e8m0(numerics.mul(amax, reciprocal)).view(np.uint8)
    elif mode == "floor":
        e = numerics.mul(amax, np.float32(2.0**-emax)).view(np.uint32) >> np.uint32(23)
    elif mode == "ceil":
        e = np.maximum((u >> 23) + ((u & 0x7FFFFF) != 0) - emax, 0)
    else:
        assert mode == "even"
        e = np.maximum((u + (1 << 23 - fmt.mantissa_bits - 1) >> 23) - emax, 0)
    not_finite = 254 if profile == "te" else 255
    return np.where(np.isfinite(amax), e, not_finite).astype(np.uint8)


def inverse_e8m0(e: np.ndarray) -> np.ndarray:
    """2^(127 - e) in f32."""
    u = np.where(e == 254, np.uint32(0x00400000), (254 - e.astype(np.int64)).astype(np.uint32) << 23)
    return np.where(e == 255, numerics.F32_NAN, u).astype(np.uint32).view(np.float32)


def scaled_data(v: np.ndarray, e: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """FP8 codes of v under the scales of the blocks along its last axis."""
    inverse = np.repeat(inverse_e8m0(e), BLOCK, axis=-1)[..., :v.shape[-1]]
    return numerics.narrow(numerics.mul(v, inverse), dtype)


def _stored(e: np.ndarray, columnwise: bool, scale_layout: str) -> np.ndarray:
    """Stores scales […, lines, blocks] in their layout."""
    if scale_layout == "swizzled":
        e = swizzle(e)
    elif columnwise:
        e = transpose(e)
    return e.view(float8_e8m0fnu)
