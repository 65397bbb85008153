"""Which scales belong to an FP8 tensor of a checkpoint, and what they mean: told by dtypes and shapes, not by
names alone.

Checkpoints multiply by their scales whatever they call them: `weight_scale_inv` (DeepSeek), `weight_scale`
(compressed-tensors, ModelOpt), `scale`. Scales of one byte are E8M0 exponents, also where a file calls them
U8: read as numbers they make weights 450,000 times too large.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..formats import float8_e8m0fnu, float32
from ..layouts import Block, cdiv
from ..results import Scaled
from .safetensors import Tensor

__all__ = ["Pair", "combine", "pairs_of", "scales_among"]

#: Only data of these dtypes can have scales. Scales are floats that f32 holds, or exponents.
FP8_NAMES = ("F8_E4M3", "F8_E5M2")
_FLOATS, _EXPONENTS = ("F32", "BF16", "F16"), ("F8_E8M0", "U8")
_BLOCKS: tuple[Block, ...] = ((1, 32), (1, 128), (128, 128))
_WHOLE_ROW: Block = (1, None)


class Pair(NamedTuple):
    """An FP8 tensor and its scales. block: elements that share a scale; None: the whole tensor."""

    data: str
    scale: str
    block: Block | None


def pairs_of(tensors: Mapping[str, Tensor], config_block: Block | None = None,
             given: Block | Mapping[str, Block] | None = None) -> dict[str, Pair]:
    """The pairs among the tensors of a checkpoint, by the names of their data. FP8 tensors without scales
    have none.

    config_block : `weight_block_size` of the checkpoint's quantization_config, if it has one.
    given : the caller's word on blocks: for all tensors, or by name.
    Raises ValueError that names the tensors where scales fit no reading, or several that differ.
    """
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in FP8_NAMES:
            continue
        scale = scales_among(tensors, name, "load with raw=True and make a Scaled of those that are meant")
        if scale is not None:
            said = given.get(name) if isinstance(given, Mapping) else given
            found[name] = Pair(name, scale, _block(name, tensor, scale, tensors[scale], config_block, said))
    return found


def scales_among(names: Container[str], name: str, advice: str) -> str | None:
    """The name of a tensor's scales among these, or None. ValueError, which ends with the advice, for
    several."""
    found = [other for other in scale_names(name) if other in names]
    if len(found) > 1:
        raise ValueError(f"{name}: expected one tensor of scales, got {' and '.join(found)}; {advice}")
    return found[0] if found else None


def scale_names(name: str) -> list[str]:
    """The names under which a tensor's scales are looked for."""
    names = [f"{name}_scale_inv", f"{name}_scale"]
    return [*names, f"{name.removesuffix('.weight')}.scale"] if name.endswith(".weight") else names


def _block(name: str, data: Tensor, scale_name: str, scale: Tensor, config_block: Block | None,
           given: Block | None) -> Block | None:
    """What shares a scale, from the shapes of data and scales."""
    if scale.dtype not in (*_FLOATS, *_EXPONENTS):
        raise ValueError(
            f"{scale_name}: expected scales of type {', '.join((*_FLOATS, *_EXPONENTS))}, got {scale.dtype}")
    readings = [block for block in _readings(data, config_block, given)
                if scale.shape in _shapes(data.shape, block)]
    if scale.dtype in _EXPONENTS:
        readings = [block for block in readings if block is not None and None not in block]
    shown = f"{scale_name} {scale.dtype} {list(scale.shape)} beside {name} {list(data.shape)}"
    if not readings:
        raise ValueError(
            f"{shown}: these scales fit no block that is known; pass block=(rows, columns), or raw=True")
    if len({_extent(data.shape, block) for block in readings}) > 1:
        raise ValueError(
            f"{shown}: may be blocks of {' or '.join(map(str, readings))}; pass block=(rows, columns)")
    return readings[0]


def _readings(data: Tensor, config_block: Block | None, given: Block | None) -> list[Block | None]:
    """What scales may be of, likeliest first. What the caller says is all that counts."""
    if given is not None:
        return [given]
    if len(data.shape) < 2:
        return [None]
    return list(dict.fromkeys([None, *([config_block] if config_block else []), _WHOLE_ROW, *_BLOCKS]))


def _shapes(shape: tuple[int, ...], block: Block | None) -> list[tuple[int, ...]]:
    """The shapes that scales of such blocks can have."""
    if block is None:
        return [(), (1,), (1, 1), (1,) * len(shape)]
    *batch, rows, columns = shape
    down, across = (cdiv(n, b or max(n, 1)) for n, b in zip((rows, columns), block, strict=True))
    return [(*batch, down, across), *([(*batch, down)] if across == 1 else [])]


def _extent(shape: tuple[int, ...], block: Block | None) -> tuple[int, ...]:
    """How many elements of the tensor really share a scale: blocks that reach past its ends are alike."""
    if block is None:
        return shape
    return (*(1,) * (len(shape) - 2), *(min(b or n, n) for n, b in zip(shape[-2:], block, strict=True)))


def combine(data: Any, scale: np.ndarray, pair: Pair) -> Scaled:
    """The data with their scales, as arrays: f32, or E8M0 for exponents."""
    if scale.dtype == np.uint8:
        scale = scale.view(float8_e8m0fnu)
    if scale.dtype != float8_e8m0fnu:
        scale = scale.astype(float32)                       # This is exact, from bfloat16 and float16 too.
    if pair.block is None:
        return Scaled(data, scale.reshape(1), data.shape)
    *batch, rows, columns = data.shape
    down, across = (cdiv(n, b or max(n, 1)) for n, b in zip((rows, columns), pair.block, strict=True))
    assert prod(scale.shape) == prod((*batch, down, across))
    return Scaled(data, np.ascontiguousarray(scale.reshape(*batch, down, across)), data.shape, False,
                  pair.block, "compact")
