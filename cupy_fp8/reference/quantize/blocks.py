"""Reference of cupy_fp8.ops.quantize.blocks: blocks with f32 scales (docs/numerics.md, section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import FORMATS, float8_e4m3fn
from ...layouts import Block
from ...options import block_eps, block_pow2
from ...results import Quantized, Scaled
from .. import numerics
from ..convert.astype import transpose
from ..convert.dequantize import on_elements
from ..scales.convert import stored


def quantize_block(x: np.ndarray, *, block: Block = (1, 128), dtype: Any = float8_e4m3fn,
                   rowwise: bool = True, columnwise: bool = False, transposed: bool = True,
                   pow2_scale: bool | None = None, eps: float | None = None, profile: str = "te",
                   scale_layout: str = "gemm_ready", source: Any = None) -> Quantized:
    """data = narrow(fl(x * factor)), with factor and scale_inv from the amax of the block. source: the dtype
    whose largest value limits the scale; None: x's dtype."""
    dtype, v = np.dtype(dtype), numerics.widen(x)
    pow2 = block_pow2(pow2_scale, profile)

    def direction(block: Block, transposed: bool) -> Scaled:
        scales = scales_from_amax(block_amax(v, block), np.float32(FORMATS[dtype].max), profile,
                                  np.float32(block_eps(eps, profile)), pow2,
                                  np.float32(FORMATS[source or x.dtype].max))
        factor, scale_inv = (on_elements(s, block, x.shape) for s in scales)
        scaled = numerics.div(v, scale_inv) if profile == "vllm" and not pow2 else numerics.mul(v, factor)
        data = numerics.narrow(scaled, dtype)
        return Scaled._of(transpose(data) if transposed else data, stored_scales(scales[1], block, transposed,
                                                                                 scale_layout), x.shape,
                          transposed, block, scale_layout)

    row = direction(block, False) if rowwise else None
    if row is not None and columnwise and not transposed and block[0] == block[1]:
        return Quantized(row, row)  # both directions have the same bytes
    return Quantized(row, direction((block[1], block[0]), transposed) if columnwise else None)


def block_amax(v: np.ndarray, block: Block, nan_wins: bool = False) -> np.ndarray:
    """max |v| of each block in f32: […, M, K] -> […, blocks along M, blocks along K]. nan_wins: NaN counts as
    larger than Inf, instead of being ignored."""
    # magnitudes order like their bits
    magnitude = v.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if not nan_wins:
        magnitude = np.where(np.isnan(v), np.uint32(0), magnitude)
    return numerics.in_blocks(magnitude, block).max(axis=(-3, -1)).view(np.float32)


def scales_from_amax(amax: np.ndarray, target: np.float32, profile: str, eps: np.float32, pow2: bool,
                     largest: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return (what elements are multiplied by, scale_inv) of each block."""
    a = np.where(amax < eps, eps, amax)
    if profile == "te":
        scale = numerics.scale_from_amax(amax, target, eps, largest, pow2)
        return scale, numerics.div(numerics.F32_ONE, scale)
    if pow2:
        scale_inv = numerics.div(a, target)
        round_up = deepgemm_power_of_two if profile == "deepgemm" else ceil_to_power_of_two
        scale_inv = round_up(scale_inv)
        return numerics.div(numerics.F32_ONE, scale_inv), scale_inv
    if profile == "torchao":
        scale = numerics.div(target, a)
        return scale, numerics.div(numerics.F32_ONE, scale)
    if profile == "sglang":
        return numerics.div(target, a), numerics.mul(a, numerics.div(numerics.F32_ONE, target))
    scale_inv = numerics.div(a, target)
    if profile == "tilekernels":
        return numerics.div(target, a), scale_inv
    assert profile in ("deepgemm", "vllm")
    return numerics.div(numerics.F32_ONE, scale_inv), scale_inv


def deepgemm_power_of_two(v: np.ndarray) -> np.ndarray:
    """Return the exponent field, increased by 1 if the mantissa is not 0, within 1 and 254."""
    u = v.view(np.uint32)
    field = (u >> np.uint32(23)) + ((u & np.uint32(0x7FFFFF)) != 0)
    return (np.clip(field, 1, 254).astype(np.uint32) << np.uint32(23)).view(np.float32)


def ceil_to_power_of_two(v: np.ndarray) -> np.ndarray:
    """Return the smallest power of two not below v >= 0 nor below 2^-127 (rule 5's RP8). Inf stays."""
    return np.where(np.isinf(v), v, numerics.widen(numerics.round_up_e8m0(v)))


def stored_scales(scales: np.ndarray, block: Block, transposed: bool, scale_layout: str) -> np.ndarray:
    """Store scales, given as rows and columns of blocks, in a layout."""
    by_columns = block[1] == 1 or (1 not in block and transposed)
    return stored(transpose(scales) if by_columns else scales, scale_layout, block)
