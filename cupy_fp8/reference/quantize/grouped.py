"""Reference of cupy_fp8.ops.quantize.grouped (docs/numerics.md, section 7): each group by the recipe's own
quantiser."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import bits, zeros
from ...formats import float32
from ...grouped import Grouped
from ...layouts import grouped_scale_shape
from ...recipes import BlockScaling, CurrentScaling, DelayedScaling, MXScaling
from ..moe.pad import pad_groups
from .blocks import quantize_block
from .mx import quantize_mx
from .tensor import quantize_tensor

Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXScaling


def group_quantize(x: np.ndarray, splits: Any, recipe: Recipe, *, rowwise: bool = True,
                   columnwise: bool = False, scales: Any = None, amaxes: np.ndarray | None = None,
                   offsets: np.ndarray | None = None, align: int = 1) -> Grouped:
    rows, columns = x.shape
    sizes = np.clip(np.asarray(splits, np.int64), 0, rows + 1)
    ends = np.minimum(np.cumsum(sizes), rows)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    if align > 1:
        sizes = np.diff(starts)                             # what wrong sizes count as
        aligned = (-(-sizes // align) * align).astype(getattr(splits, "dtype", np.int64))
        return group_quantize(pad_groups(x, sizes, align), aligned, recipe, rowwise=rowwise,
                              columnwise=columnwise, scales=scales, amaxes=amaxes)
    if isinstance(recipe, (BlockScaling, MXScaling)):
        return _in_blocks(x, splits, recipe, starts, offsets, rowwise, columnwise)
    row = zeros(x.size, recipe.dtype, like=np) if rowwise else None
    column = zeros(x.size, recipe.dtype, like=np) if columnwise else None
    scale_inv = np.empty(len(sizes), float32)
    rule: dict[str, Any] = {}
    if isinstance(recipe, CurrentScaling):
        rule = {"eps": recipe.eps, "pow2_scale": recipe.pow2_scale}
    for g in range(len(sizes)):
        part = x[starts[g] : starts[g + 1]]
        q = quantize_tensor(part, None if rule else scales[g : g + 1], dtype=recipe.dtype, rowwise=True,
                            columnwise=True, amax=None if amaxes is None else amaxes[g : g + 1], **rule)
        here = slice(starts[g] * columns, starts[g + 1] * columns)
        scale_inv[g] = q.scale_inv[0]
        for flat, direction in ((row, q._row), (column, q._column)):
            if flat is not None and direction is not None:
                bits(flat)[here] = bits(direction.data).reshape(-1)
    return Grouped(np.asarray(splits), starts * columns if offsets is None else offsets, (rows, columns), row,
                   column, scale_inv)


def _in_blocks(x: np.ndarray, splits: Any, recipe: BlockScaling | MXScaling, starts: np.ndarray,
               offsets: np.ndarray | None, rowwise: bool, columnwise: bool) -> Grouped:
    """Each group's data go where its rows are, its scales after those of the group before."""
    (rows, columns), ends = x.shape, starts[1:]
    wanted = {"rowwise": rowwise, "columnwise": columnwise}
    flat: dict[str, np.ndarray] = {}
    part_of: dict[str, Any] = {}
    for name in filter(wanted.get, wanted):
        parts = [getattr(_quantize(x[start:end], recipe, **wanted), name)
                 for start, end in zip(starts, ends, strict=False)]
        part_of[name] = part = getattr(_quantize(x[:0], recipe, **wanted), name)
        stored_shape = grouped_scale_shape((rows, columns), len(ends), part.block, part.scale_layout,
                                           part.transposed)
        scales = zeros(stored_shape, part.scale_inv.dtype, like=np)
        flat[name] = zeros(x.size, recipe.dtype, like=np)
        for start, part in zip(starts, parts, strict=False):
            here = slice(start * columns, start * columns + part.data.size)
            bits(flat[name])[here] = bits(part.data).reshape(-1)
        if part.block[0] is None:  # a group without rows has a line of scales too, that of zeros
            none = getattr(_quantize(np.zeros((1, columns), x.dtype), recipe, **wanted), name)
            parts = [part if part.shape[0] else none for part in parts]
        stored = np.concatenate([np.zeros(0, bits(scales).dtype),
                                 *(bits(part.scale_inv).reshape(-1) for part in parts)])
        bits(scales).reshape(-1)[: stored.size] = stored
        flat["scale_inv" if name == "rowwise" else "columnwise_scale_inv"] = scales
    if columnwise and rowwise and recipe.block[0] == recipe.block[1] and not part_of["columnwise"].transposed:
        flat["columnwise"] = flat["rowwise"]                    # both directions have the same codes
    row = part_of.get("rowwise")
    block = row.block if row is not None else part_of["columnwise"].block[::-1]
    return Grouped(np.asarray(splits), starts * columns if offsets is None else offsets, (rows, columns),
                   block=block, scale_layout=recipe.scale_layout, transposed=isinstance(recipe, BlockScaling),
                   **flat)


def _quantize(x: np.ndarray, recipe: BlockScaling | MXScaling, **directions: bool) -> Any:
    if isinstance(recipe, BlockScaling):
        return quantize_block(x, block=recipe.block, dtype=recipe.dtype, pow2_scale=recipe.pow2_scale,
                              eps=recipe.eps, profile=recipe.profile, scale_layout=recipe.scale_layout,
                              **directions)
    return quantize_mx(x, dtype=recipe.dtype, mode=recipe.mode, profile=recipe.profile, block=recipe.block,
                       scale_layout=recipe.scale_layout, **directions)
