"""Converts one weight, a chunk of rows at a time.

Values come from a float tensor, or from FP8 data with scales; they become BF16, or FP8 data with other
scales. Where both scales are powers of two, data are re-based (`rebase_scales`): every value is divided by
its new scale exactly and rounded once, to FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import backend
from ..arrays import Array, asarray, asnumpy, bits
from ..formats import FP8_DTYPES, INPUT_DTYPES, bfloat16, float8_e4m3fn, float8_e8m0fnu, float32
from ..layouts import cdiv
from ..ops.convert.astype import astype
from ..ops.convert.rebase import rebase_scales
from ..ops.quantize.blocks import quantize_block
from ..ops.quantize.mx import quantize_mx
from ..ops.quantize.tensor import quantize_tensor
from ..ops.scales.amax import compute_amax
from ..ops.scales.scale import compute_scale
from ..results import Scaled

__all__ = ["RECIPES", "SCALE_FORMATS", "Changes", "Rows", "StoredWeight", "make_rows", "row_chunks",
           "stored_weight"]

#: possible formats of each recipe's scales, the default first
SCALE_FORMATS: dict[str, tuple[str, ...]] = {
    "block128": ("f32", "e8m0"), "mxfp8": ("e8m0",), "row": ("f32",), "tensor": ("f32",), "bf16": ()}
RECIPES = tuple(SCALE_FORMATS)
_CHUNK = 1 << 20                        # elements worked on at a time, or one row of blocks
_UINT8 = np.dtype(np.uint8)


class StoredWeight(NamedTuple):
    """The stored form of a weight. block: elements that share a scale; (): no scales; None: one for the
    tensor. scale: the suffix of the scales' name, their dtype and their shape."""

    dtype: np.dtype[Any]
    block: tuple[int | None, int | None] | tuple[()] | None
    scale: tuple[str, np.dtype[Any], tuple[int, ...]] | None

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the dtype and shape of each tensor of a weight of this name and shape."""
        found = {name: (self.dtype, shape)}
        if self.scale:
            found[name + self.scale[0]] = self.scale[1:]
        return found


def stored_weight(recipe: str, scale_format: str, shape: tuple[int, ...]) -> StoredWeight:
    """Return the form that a recipe gives a weight […, N, K]: names and shapes as in DeepSeek's (block128),
    MX and compressed-tensors' (row, tensor) checkpoints. MX scales are stored as U8, as readers expect."""
    if recipe == "bf16":
        return StoredWeight(bfloat16, (), None)
    if recipe == "tensor":
        return StoredWeight(float8_e4m3fn, None, ("_scale", float32, (1,)))
    *batch, rows, columns = shape
    if recipe == "row":
        return StoredWeight(float8_e4m3fn, (1, None), ("_scale", float32, (*batch, rows, 1)))
    down, across, dtype = (1, 32, _UINT8) if recipe == "mxfp8" else (
        128, 128, float8_e8m0fnu if scale_format == "e8m0" else float32)
    return StoredWeight(float8_e4m3fn, (down, across),
                        ("_scale_inv", dtype, (*batch, cdiv(rows, down), cdiv(columns, across))))


class Rows(NamedTuple):
    """Rows `start` to `stop` of matrix `matrix` of a weight, processed as one chunk."""

    matrix: int
    start: int
    stop: int


def row_chunks(shape: tuple[int, ...], unit: int = 1) -> Iterator[Rows]:
    """Yield all rows of a weight, in chunks of whole rows of blocks. unit: rows of a block of the source, a
    power of two."""
    *batch, rows, columns = shape
    unit = max(128, unit)
    step = max(unit, _CHUNK // max(columns, 1) // unit * unit)
    for matrix in range(prod(batch)):
        for start in range(0, rows, step):
            yield Rows(matrix, start, min(start + step, rows))


class Changes(NamedTuple):
    """The number of changed values, and the energies of values and of differences (without NaN and Inf). Data
    whose bytes are kept have no energy of values: they were not decoded."""

    elements: int = 0
    changed: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: Any) -> Changes:
        return Changes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-noise ratio; None if nothing changed, or there is nothing."""
        return float(10 * np.log10(self.signal / self.noise)) if self.noise and self.signal else None


def make_rows(source: Array | Scaled, stored: StoredWeight, scale: float | None
              ) -> tuple[np.ndarray, np.ndarray | None, Changes]:
    """Return (data, scales or None, changes) of a chunk, as stored in a file. scale: the tensor's, if it has
    one scale."""
    if isinstance(source, Scaled) and stored.scale is not None:
        scales = asnumpy(bits(source.scale_inv)).view(source.scale_inv.dtype)
        exponents = _has_exponents(stored)
        if not exponents or is_power_of_two(scales):
            if source.block == stored.block and source.dtype == stored.dtype:
                return _kept(source, scales, stored)
            along_rows = source.block is None or source.block[1] != 1
            if exponents and source.dtype == stored.dtype and along_rows:
                return _rebased(source, stored)
    if isinstance(source, Scaled):
        values = source.dequantize(bfloat16 if stored.scale is None else np.float32)
    else:
        values = _floats(source)
    if stored.scale is None:
        data = values if values.dtype == bfloat16 else astype(values, bfloat16)
        return asnumpy(data), None, _compared(source, data)
    q = _quantized(values, stored, scale)
    scales = asnumpy(q.scale_inv)
    if _has_exponents(stored) and scales.dtype == float32:
        scales = astype(scales, float8_e8m0fnu)             # exact: powers of two
    if scales.itemsize == 1:
        scales = scales.view(stored.scale[1])
    return asnumpy(bits(q.data)).view(stored.dtype), scales, _compared(source, q)


def _kept(source: Scaled, scales: np.ndarray, stored: StoredWeight) -> tuple[np.ndarray, np.ndarray, Changes]:
    """Return data that already have the right scales; these are at most stored in another dtype, exactly."""
    assert stored.scale is not None
    if _has_exponents(stored):
        scales = astype(scales, float8_e8m0fnu).view(stored.scale[1])
    elif scales.dtype != float32:
        scales = astype(scales, float32)
    return asnumpy(bits(source.data)).view(source.dtype), scales, Changes(prod(source.shape))


def _quantized(values: Array, stored: StoredWeight, scale: float | None) -> Scaled:
    if stored.block is None:
        found = quantize_tensor(values, scale).rowwise
    elif stored.block == (1, 32):
        found = quantize_mx(values).rowwise
    else:
        assert stored.block
        found = quantize_block(values, block=stored.block, pow2_scale=_has_exponents(stored),
                               scale_layout="compact").rowwise
    return found


def tensor_scale(amaxes: list[float]) -> float:
    """Return the scale of a tensor from the amaxes of its chunks."""
    amax = np.array([max(amaxes, default=0.0)], np.float32)
    return float(compute_scale(amax, dtype=float8_e4m3fn)[0])


def amax_of(source: Array | Scaled) -> float:
    values = source.dequantize() if isinstance(source, Scaled) else _floats(source)
    return float(compute_amax(values)[0])


def is_power_of_two(scale: np.ndarray) -> bool:
    """Whether all scales are powers of two (E8M0 ones are), so that re-basing needs one rounding."""
    if scale.dtype == float8_e8m0fnu:
        return True
    words = np.ascontiguousarray(scale, float32).view(np.uint32)
    normal = (words & 0x7FFFFF == 0) & (words > 0) & (words < 0x7F800000)
    return bool((normal | (words == 0x400000)).all())       # 2**-127, the smallest of E8M0


def _has_exponents(stored: StoredWeight) -> bool:
    return stored.scale is not None and stored.scale[1].itemsize == 1


def _rebased(source: Scaled, stored: StoredWeight) -> tuple[np.ndarray, np.ndarray, Changes]:
    """Move data from power-of-two scales to new ones, and count changed values."""
    assert stored.scale is not None
    assert stored.block
    q = rebase_scales(source, block=stored.block, scale_dtype=float8_e8m0fnu)
    data, scales = (asnumpy(bits(a)).view(a.dtype) for a in q)
    return data, scales.view(stored.scale[1]), _compared(source, q)


def _compared(source: Array | Scaled, made: Array | Scaled) -> Changes:
    """Measure what rounding changed, on the arrays' device; NaN and Inf are left out."""
    before, after = (_values(a) for a in (source, made))
    xp = backend.module_of(before)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = after - before
        # BLAS would use threads of its own, beside the workers
        signal, noise = (float((a * a).sum()) for a in (before, difference))
        if not np.isfinite(signal + noise):
            finite = (before - before == 0) & (difference - difference == 0)
            before, difference = (xp.where(finite, a, 0) for a in (before, difference))
            signal, noise = (float((a * a).sum()) for a in (before, difference))
    return Changes(prod(source.shape), int(xp.count_nonzero(difference)), signal, noise)


def _values(a: Array | Scaled) -> Array:
    return (a.dequantize() if isinstance(a, Scaled) else _floats(a)).astype(np.float64).reshape(-1)


def _floats(a: Array) -> Array:
    """Return an array as quantisers take it."""
    if a.dtype in INPUT_DTYPES:
        return a
    return astype(a, float32) if a.dtype in FP8_DTYPES else a.astype(np.float32)


def on(like: Any, source: np.ndarray | Scaled) -> Array | Scaled:
    """Copy a chunk to the device that works on it."""
    if isinstance(source, Scaled):
        return Scaled(asarray(source.data, like=like), asarray(source.scale_inv, like=like), source.shape,
                      False, source.block, source.scale_layout)
    return asarray(source, like=like)
