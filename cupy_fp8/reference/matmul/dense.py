"""Reference of cupy_fp8.ops.matmul.dense (docs/numerics.md, section 10)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...formats import bfloat16, float32
from ...results import Quantized, Scaled, row_wise
from .. import numerics
from ..convert.dequantize import block_scales

_STRIP = 1 << 22                    # values of an operand widened to f64 at a time


def matmul_nt(a: Scaled | Quantized, b: Scaled | Quantized, *, dtype: Any = bfloat16,
              bias: np.ndarray | None = None, accumulate: np.ndarray | None = None) -> np.ndarray:
    """narrow(Σ_k a[m, k] · b[n, k] + bias[n] + accumulate[m, n]), summed in f64 and rounded once."""
    total = product(row_wise(a), row_wise(b))
    with np.errstate(invalid="ignore"):
        if bias is not None:
            total += bias.astype(np.float64)
        if accumulate is not None:
            total += accumulate
    return numerics.narrow_f64(total, float32 if accumulate is not None else np.dtype(dtype))


def magnitudes(a: Scaled | Quantized, b: Scaled | Quantized, *, bias: np.ndarray | None = None,
               accumulate: np.ndarray | None = None) -> np.ndarray:
    """Σ_k |a[m, k]| · |b[n, k]| + |bias[n]| + |accumulate[m, n]|: what the error bound is relative to."""
    total = product(row_wise(a), row_wise(b), np.abs)
    with np.errstate(invalid="ignore"):
        for addend in (bias, accumulate):
            if addend is not None:
                total += np.abs(addend.astype(np.float64))
    return total


def product(a: Scaled, b: Scaled, of: Any = np.asarray) -> np.ndarray:
    """Σ_k of(a[m, k]) · of(b[n, k]) in f64, for each matrix of a batch. A product of two FP8 values has at
    most 8 significant bits, so only scales and sums are rounded."""
    m, n, k = a.shape[-2], b.shape[-2], a.shape[-1]
    out = np.zeros((prod(a.shape[:-2]), m, n))
    rows = max(1, _STRIP // max(k, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        for i, into in enumerate(out):
            for r in range(0, m, rows):
                left = of(scaled_values(a, i, r, min(r + rows, m)))
                for c in range(0, n, rows):
                    into[r:r + rows, c:c + rows] = left @ of(scaled_values(b, i, c, min(c + rows, n))).T
    return out.reshape(*a.shape[:-2], m, n)


def scaled_values(s: Scaled, matrix: int, start: int, end: int) -> np.ndarray:
    """Return rows of one matrix as f64, each value times its scale."""
    k = s.shape[-1]
    batch = prod(s.shape[:-2])
    data = numerics.widen(s.data.reshape(batch, *s.shape[-2:])[matrix, start:end]).astype(np.float64)
    if s.block is None:
        return data * np.float64(s.scale_inv.reshape(-1)[0])
    scales = block_scales(s)
    scales = numerics.widen(scales.reshape(batch, *scales.shape[-2:])[matrix]).astype(np.float64)
    down, across = (extent or max(size, 1) for extent, size in zip(s.block, s.shape[-2:], strict=True))
    return data * np.repeat(scales[np.arange(start, end) // down], across, axis=1)[:, :k]
