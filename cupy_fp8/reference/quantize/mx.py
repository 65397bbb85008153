"""Reference of cupy_fp8.ops.quantize.mx: blocks of 32 elements with E8M0 scales (docs/numerics.md, section
2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import FORMATS, float8_e4m3fn, float8_e8m0fnu
from ...layouts import Block
from ...results import Quantized, Scaled
from .. import numerics
from ..convert.astype import transpose
from ..convert.dequantize import on_elements
from .blocks import block_amax, stored_scales

BLOCK = 32


def quantize_mx(x: np.ndarray, *, dtype: Any = float8_e4m3fn, rowwise: bool = True, columnwise: bool = False,
                transposed: bool = False, mode: str = "rceil", profile: str = "te",
                block: tuple[int, int] = (1, BLOCK), scale_layout: str = "compact") -> Quantized:
    """data = narrow(fl(x * inv(e))), with e from the amax of the block."""
    dtype, v = np.dtype(dtype), numerics.widen(x)

    def direction(along: Block, transposed: bool, data: np.ndarray | None = None) -> Scaled:
        of = along if block[0] == 1 else block
        amax = block_amax(v, of, nan_wins=profile == "torchao")
        e = on_elements(scale_byte(amax, dtype, mode, profile), of, x.shape)
        if data is None:
            data = numerics.narrow(numerics.mul(v, inverse_e8m0(e)), dtype)
        scales = e[..., ::along[0], ::along[1]].view(float8_e8m0fnu)
        return Scaled._of(transpose(data) if transposed else data,
                          stored_scales(scales, along, transposed, scale_layout), x.shape, transposed, along,
                          scale_layout)

    row = direction((1, BLOCK), False) if rowwise else None
    # both directions of square blocks have the same bytes
    same = row.data if row is not None and block[0] == BLOCK and not transposed else None
    return Quantized(row, direction((BLOCK, 1), transposed, same) if columnwise else None)


def scale_byte(amax: np.ndarray, dtype: np.dtype[Any], mode: str, profile: str) -> np.ndarray:
    """Return the E8M0 byte of each block."""
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
