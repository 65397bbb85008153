"""Reference of cupy_fp8.ops.quantize.grouped (docs/numerics.md, section 7): each group by the recipe's own
quantiser."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np

from ...arrays import bits, zeros
from ...formats import float32
from ...grouped import Grouped
from ...layouts import Block, grouped_scale_shape
from ...recipes import BlockScaling, MXScaling, Recipe
from ...results import Quantized, Scaled
from ..moe.pad import pad_groups
from .by_recipe import quantize_by


def group_quantize(x: np.ndarray, splits: Any, recipe: Recipe, *, rowwise: bool = True,
                   columnwise: bool = False, scales: Any = None, amaxes: np.ndarray | None = None,
                   offsets: np.ndarray | None = None, align: int = 1) -> Grouped:
    rows, columns = x.shape
    sizes = np.clip(np.asarray(splits, np.int64), 0, rows + 1)
    ends = np.minimum(np.cumsum(sizes), rows)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    if align > 1:
        sizes = np.diff(starts)                             # effective sizes, of wrong ones too
        aligned = (-(-sizes // align) * align).astype(getattr(splits, "dtype", np.int64))
        return group_quantize(pad_groups(x, sizes, align=align), aligned, recipe, rowwise=rowwise,
                              columnwise=columnwise, scales=scales, amaxes=amaxes)
    if isinstance(recipe, (BlockScaling, MXScaling)):
        return _in_blocks(x, splits, recipe, starts, offsets, rowwise, columnwise)
    row = zeros(x.size, recipe.dtype, like=np) if rowwise else None
    column = zeros(x.size, recipe.dtype, like=np) if columnwise else None
    scale_inv = np.empty(len(sizes), float32)
    for g in range(len(sizes)):
        scale, amax = (None if a is None else a[g : g + 1] for a in (scales, amaxes))
        q = quantize_by(recipe, x[starts[g] : starts[g + 1]], rowwise=True, columnwise=True, scale=scale,
                        amax=amax)
        here = slice(starts[g] * columns, starts[g + 1] * columns)
        scale_inv[g] = q.scale_inv[0]
        for flat, direction in ((row, q.rowwise), (column, q.columnwise)):
            if flat is not None:
                bits(flat)[here] = bits(direction.data).reshape(-1)
    # unchecked: wrong sizes, which only a device array can have, stay in the result
    return Grouped._of_fields(
        splits=np.array(splits), offsets=starts * columns if offsets is None else offsets.copy(),
        shape=(rows, columns), rowwise=row, columnwise=column, scale_inv=scale_inv,
        columnwise_scale_inv=None, block=None, scale_layout=None, transposed=True)


def _in_blocks(x: np.ndarray, splits: Any, recipe: BlockScaling | MXScaling, starts: np.ndarray,
               offsets: np.ndarray | None, rowwise: bool, columnwise: bool) -> Grouped:
    """Store each group's data where its rows are, its scales after those of the previous group."""
    rows, columns = x.shape

    def quantized(group: np.ndarray) -> Quantized:
        return quantize_by(recipe, group, rowwise=rowwise, columnwise=columnwise)

    groups = [quantized(x[start:end]) for start, end in pairwise(starts)]
    without_rows, row_of_zeros = quantized(x[:0]), quantized(np.zeros((1, columns), x.dtype))
    flat: dict[str, np.ndarray] = {}
    for name, empty in without_rows.parts.items():
        parts = [group.parts[name] for group in groups]
        flat[name] = zeros(x.size, recipe.dtype, like=np)
        for start, part in zip(starts, parts, strict=False):
            here = slice(start * columns, start * columns + part.data.size)
            bits(flat[name])[here] = bits(part.data).reshape(-1)
        block = cast(Block, empty.block)
        if block[0] is None:            # an empty group still has one line of scales, that of zeros
            parts = [part if part.shape[0] else row_of_zeros.parts[name] for part in parts]
        scales = zeros(grouped_scale_shape((rows, columns), len(groups), block, recipe.scale_layout,
                                           empty.transposed), empty.scale_inv.dtype, like=np)
        stored = np.concatenate([np.zeros(0, bits(scales).dtype),
                                 *(bits(part.scale_inv).reshape(-1) for part in parts)])
        bits(scales).reshape(-1)[: stored.size] = stored
        flat["scale_inv" if name == "rowwise" else "columnwise_scale_inv"] = scales
    row, column = without_rows._row, without_rows._column
    if row and column and recipe.block[0] == recipe.block[1] and not column.transposed:
        flat["columnwise"] = flat["rowwise"]                    # both directions have the same codes
    row_block = row.block if row else cast(Scaled, column).T.block
    fields = {**dict.fromkeys(("rowwise", "columnwise", "scale_inv", "columnwise_scale_inv")), **flat}
    return Grouped._of_fields(
        splits=np.array(splits), offsets=starts * columns if offsets is None else offsets.copy(),
        shape=(rows, columns), block=row_block, scale_layout=recipe.scale_layout,
        transposed=isinstance(recipe, BlockScaling), **fields)
