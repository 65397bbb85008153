"""Reference of cupy_fp8.ops.convert.scaling_aware: row-wise blocks become column-wise ones (docs/numerics.md,
section 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arrays import bits
from ...formats import FORMATS, float8_e8m0fnu, float32
from ...layouts import cdiv, row_scale_rows, target_rows
from ...results import Quantized, Scaled, row_wise
from .. import numerics
from ..scales.convert import as_dtype, padded, rows_of_scales
from ..scales.swizzle import group_ranges

_NOTHING = np.iinfo(np.int64).min


class Exponents(NamedTuple):
    """Scales as powers of two: 2^power where `exists`, 0 where `zero`, anything else `wrong`. An E8M0 NaN
    sets none of the three."""

    power: np.ndarray
    exists: np.ndarray
    zero: np.ndarray
    wrong: np.ndarray


def scaling_aware_transpose(q: Scaled | Quantized, *, splits: Any = None, target: str = "column",
                            scale_layout: str = "gemm_ready") -> Quantized:
    """out = narrow(v * s / t), where t is the power of two for the values of a column-wise block."""
    s = row_wise(q)
    assert s.block is not None
    if s.block == (128, 128):
        return _transposed_squares(s, scale_layout)
    block, (rows, columns) = int(s.block[1] or 0), s.shape
    row_scales = as_dtype(rows_of_scales(s), float32 if block == 128 else float8_e8m0fnu)
    ranges = [(0, rows)] if splits is None else list(group_ranges(splits, rows, 0))
    lines = target_rows(rows, None if splits is None else len(ranges), block)
    scale_inv = np.zeros((lines, columns), row_scales.dtype)
    pieces, line = [], 0
    for first, last in ranges:
        data, scales = transpose_group(s.data[first:last], exponents(row_scales[first:last]), block, target,
                                       row_scales.dtype)
        pieces.append(data)
        scale_inv[line:line + len(scales)] = scales
        line += len(scales)
    if splits is None:
        stored = pieces[0]
    else:
        stored = np.zeros(rows * columns, np.uint8)
        flat = np.concatenate([np.zeros(0, np.uint8), *(bits(piece).reshape(-1) for piece in pieces)])
        stored[:len(flat)] = flat
        stored = stored.view(s.data.dtype)
    rowwise, layout, own = s, "compact", None if splits is None else np.array(splits)
    if row_scales.dtype == float32:
        rowwise = Scaled._of(s.data, _row_scales(row_scales, None if splits is None else ranges), s.shape,
                             False, s.block, "gemm_ready", own)
        layout = scale_layout
    scale_inv = padded(scale_inv) if layout == "gemm_ready" else scale_inv
    return Quantized(rowwise, Scaled._of(stored, scale_inv, s.shape, True, (block, 1), layout, own))


def _transposed_squares(s: Scaled, scale_layout: str) -> Quantized:
    """Transpose square blocks, whose codes and scales are the same in both directions."""
    data, blocks = np.swapaxes(s.data, -1, -2).copy(order="C"), cdiv(s.shape[-1], 128)
    scales = np.swapaxes(s.scale_inv[..., :blocks], -1, -2).copy(order="C")
    scale_inv = padded(scales) if scale_layout == "gemm_ready" else scales
    return Quantized(s, Scaled._of(data, scale_inv, s.shape, True, s.block, scale_layout))


def _row_scales(scales: np.ndarray, ranges: list[tuple[int, int]] | None) -> np.ndarray:
    """Return the row-wise scales in gemm_ready; for groups a flat array with the scales of one group after
    another."""
    if ranges is None:
        return padded(np.ascontiguousarray(scales.T))
    out = np.zeros(scales.shape[1] * row_scale_rows(len(scales), len(ranges)), np.float32)
    flat = np.concatenate([np.zeros(0, np.float32), *(padded(np.ascontiguousarray(scales[a:b].T)).reshape(-1)
                                                      for a, b in ranges)])
    out[:len(flat)] = flat
    return out


def exponents(scale_inv: np.ndarray) -> Exponents:
    """Return the exponents of f32 scales or E8M0 bytes."""
    if scale_inv.dtype == float8_e8m0fnu:
        e = scale_inv.view(np.uint8).astype(np.int64)
        return Exponents(e - 127, e != 255, np.zeros(e.shape, bool), np.zeros(e.shape, bool))
    fraction, exponent = np.frexp(scale_inv)
    # False for 0, negative values, Inf and NaN
    right = fraction == 0.5
    zero = scale_inv.view(np.uint32) == 0
    return Exponents(np.where(right, exponent - 1, 0).astype(np.int64), right, zero, ~(right | zero))


def transpose_group(data: np.ndarray, s: Exponents, block: int, target: str,
                    dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """(data [K, rows], scale_inv [ceil(rows / block), K]) of one group's rows."""
    rows, columns = data.shape
    blocks = cdiv(rows, block)
    codes = np.zeros((blocks * block, columns), np.uint8)
    codes[:rows] = data.view(np.uint8)
    power, exists, zero, wrong = (_spread(a, blocks, block, columns) for a in s)
    v = numerics.widen(codes.view(data.dtype)).reshape(blocks, block, columns)
    t = (column_target(v, power, exists, data.dtype) if target == "column"
         else tile_target(v, power, exists, block))
    out = moved(v, power - t[:, None, :], exists, zero, data.dtype)
    out = out.reshape(blocks * block, columns)[:rows]
    scales = stored_scales(t, np.asarray(wrong.any(axis=1)), dtype)
    return np.ascontiguousarray(bits(out).T).view(data.dtype), scales


def column_target(v: np.ndarray, power: np.ndarray, exists: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return log2 of the smallest power of two not below max(|v| * s) / fp8_max, for v [blocks, rows,
    columns]: [blocks, columns]."""
    return target_exponent(magnitudes(v, power, exists).max(axis=1), dtype)


def magnitudes(v: np.ndarray, power: np.ndarray, exists: np.ndarray) -> np.ndarray:
    """|v| * s, exact in f64; 0 where the element affects no target."""
    counts = exists & ~np.isnan(v)
    return np.ldexp(np.where(counts, np.abs(v), 0).astype(np.float64), power.astype(np.int32))


def moved(v: np.ndarray, k: np.ndarray, exists: np.ndarray, zero: np.ndarray,
          dtype: np.dtype[Any]) -> np.ndarray:
    """narrow(v * 2^k); narrow(v * 0) where the scale is 0, NaN where it is not a power of two."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = np.select([exists, zero], [np.ldexp(v, k.astype(np.int32)), v * np.float32(0)],
                           np.float32(np.nan))
    return numerics.narrow(values, dtype)


def target_exponent(top: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return log2 of the smallest power of two not below top / fp8_max, within -127 and 127; 0 where top is
    0. top: f64."""
    fraction, exponent = np.frexp(np.where(np.isinf(top), 0, top))
    # fp8_max is 1.75 * 2^emax. A product with a mantissa of at most 1.75 needs its own exponent, any other
    # the next one.
    t = exponent - 1 - int(np.log2(FORMATS[dtype].max)) + (fraction > 0.875)
    return np.where(top == 0, 0, np.clip(np.where(np.isinf(top), 127, t), -127, 127)).astype(np.int64)


def tile_target(v: np.ndarray, power: np.ndarray, exists: np.ndarray, block: int) -> np.ndarray:
    """Return log2 of the largest scale among rows with a nonzero value in the columns of a row-wise block; 0
    if there are none."""
    not_zero = numerics.in_blocks((v != 0) & exists, (1, block)).any(axis=(-3, -1))      # NaN is not 0
    anything = np.repeat(not_zero, block, axis=-1)[..., :v.shape[-1]]
    top = np.max(np.where(anything, power, _NOTHING), axis=1, initial=_NOTHING)
    return np.where(top == _NOTHING, 0, top)


def _spread(a: np.ndarray, blocks: int, block: int, columns: int) -> np.ndarray:
    """Repeat values of row-wise blocks [rows, ceil(K / block)] for every element [blocks, block, K], with 0
    in rows beyond the end."""
    out = np.zeros((blocks * block, columns), a.dtype)
    out[:len(a)] = np.repeat(a, block, axis=1)[:, :columns]
    return out.reshape(blocks, block, columns)


def stored_scales(t: np.ndarray, wrong: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """2^t as E8M0 or f32, with NaN where the block has a wrong scale."""
    if dtype == float8_e8m0fnu:
        return np.where(wrong, 255, t + 127).astype(np.uint8).view(float8_e8m0fnu)
    return numerics.one_nan(np.where(wrong, np.float32(np.nan), np.ldexp(np.float32(1), t.astype(np.int32))))
