"""Reference of cupy_fp8.ops.group_quantize (docs/numerics.md, section 7): each group by `quantize_tensor`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import bits, zeros
from ..formats import float32
from ..grouped import Grouped
from ..recipes import DelayedScaling
from .cast import quantize_tensor


def group_quantize(x: np.ndarray, splits: Any, recipe: DelayedScaling, *, rowwise: bool = True, columnwise: bool = False, scales: Any,
                   amaxes: np.ndarray | None = None, offsets: np.ndarray | None = None) -> Grouped:
    rows, columns = x.shape
    sizes = np.clip(np.asarray(splits, np.int64), 0, rows + 1)
    ends = np.minimum(np.cumsum(sizes), rows)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    row, column = (zeros(x.size, recipe.dtype, like=np) if wanted else None for wanted in (rowwise, columnwise))
    scale_inv = np.empty(len(sizes), float32)
    for g in range(len(sizes)):
        part = x[starts[g] : starts[g + 1]]
        q = quantize_tensor(part, scales[g : g + 1], dtype=recipe.dtype, rowwise=True, columnwise=True,
                            amax=None if amaxes is None else amaxes[g : g + 1])
        here = slice(starts[g] * columns, starts[g + 1] * columns)
        scale_inv[g] = q.scale_inv[0]
        for flat, direction in ((row, q.rowwise), (column, q.columnwise)):
            if flat is not None and direction is not None:
                bits(flat)[here] = bits(direction.data).reshape(-1)
    return Grouped(np.asarray(splits), starts * columns if offsets is None else offsets, (rows, columns), row, column, scale_inv)
