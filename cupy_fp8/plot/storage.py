"""Plots of storage: scales in memory, and tokens in the rows of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..advice import shown
from ..arrays import _as_shape, asnumpy, zeros
from ..formats import choice, float8_e4m3fn, float8_e8m0fnu, float32, lookup
from ..layouts import SCALE_DTYPES, Block, ScaleLayout, cdiv, check_block
from ..results import Scaled
from ..routing import Routing
from .style import BLUE, GREEN, GREY, ORANGE, VERMILION, axes, ink
from .tables import cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["routes", "scale_layout"]

_MOST_SCALES, _MOST_ROWS = 512, 128
_EXPERTS = (BLUE, VERMILION, GREEN, ORANGE, "#CC79A7", "#56B4E9")
_BASE = 254                     # base of the numbering of scales: E8M0 bytes 1 … 254, so that 0 is padding


def scale_layout(shape: tuple[int, int], layout: ScaleLayout, *, block: Block = (1, 128),
                 dtype: Any = "float32", ax: Axes | None = None) -> Axes:
    """Draw where each scale of a small matrix lies in memory, row by row. A cell names its scale as
    'line, block': for 1-D blocks a line is a row of the matrix, for 2-D blocks a row of blocks. Grey cells
    are padding.

    shape : of the matrix.
    layout : a scale layout of `Scaled.to_layout`; swizzled scales are drawn 16 bytes a row, as tensor cores
        load them.
    block : the block that has one scale.
    dtype : of the scales, float32 or float8_e8m0fnu.
    Raises TypeError, ValueError also for more than 512 scales, ImportError without matplotlib.

    >>> import cupy_fp8 as fp8
    >>> ax = fp8.plot.scale_layout((3, 256), "gemm_ready")
    >>> [t.get_text() for t in ax.texts]
    ['0, 0', '1, 0', '2, 0', '', '0, 1', '1, 1', '2, 1', '']
    """
    f = lookup(dtype, (float32, float8_e8m0fnu), "dtype")
    choice(layout, "layout", SCALE_DTYPES)
    shape, block = _matrix_shape(shape), check_block(block)
    lines, blocks = (cdiv(extent, along or max(extent, 1))
                     for extent, along in zip(shape, block, strict=True))
    if lines * blocks > _MOST_SCALES:
        raise ValueError(f"shape: expected at most {_MOST_SCALES} scales, got {lines * blocks}; "
                         f"draw a smaller matrix, since layouts repeat")
    number = _stored_numbers(shape, layout, block, f.dtype, lines, blocks)
    if layout == "swizzled":
        number = number.reshape(-1, 16)
    text = np.vectorize(lambda n: "" if n < 0 else f"{n // blocks}, {n % blocks}", otypes=[object])(number)
    value = np.where(number < 0, np.nan, number // blocks if layout == "swizzled" else number % blocks)
    ax = cells(value, text, ax=ax,
               title=f"{layout}: blocks {block[0]} × {block[1]} of {shape[0]} × {shape[1]}")
    ax.set(xticks=(), yticks=())
    if number.size > 128:
        for cell in ax.texts:
            cell.set_fontsize("xx-small")
        figure: Any = ax.figure
        figure.set_size_inches(8.5, 1 + 0.17 * number.shape[0])
    return ax


def _matrix_shape(shape: Any) -> tuple[int, int]:
    extents = _as_shape(shape)
    if len(extents) != 2:
        raise ValueError(f"shape: expected (rows, columns), got {shown(shape)}")
    return extents[0], extents[1]


def _stored_numbers(shape: tuple[int, int], layout: ScaleLayout, block: Block, dtype: Any, lines: int,
                    blocks: int) -> np.ndarray:
    """Return the number of the scale stored at each place, -1 for padding, by moving numbered scales to the
    layout. A number takes two digits if scales are bytes."""
    data = zeros(shape, float8_e4m3fn, like=np)
    number = np.arange(lines * blocks).reshape(lines, blocks)

    def moved(scale_inv: np.ndarray) -> np.ndarray:
        compact = Scaled(data, scale_inv, shape, block=block, scale_layout="compact")
        return asnumpy(compact.to_layout(layout).scale_inv)

    if dtype == float32:
        return moved((number + 1).astype(np.float32)).astype(int) - 1
    low, high = (moved((1 + digit).astype(np.uint8).view(dtype)).view(np.uint8).astype(int) - 1
                 for digit in (number % _BASE, number // _BASE))
    return np.where(low < 0, -1, _BASE * high + low)


def routes(routing: Routing, *, ax: Axes | None = None) -> Axes:
    """Draw a small routing: above, every slot of every token with the expert it asks for (– for a dropped
    one), below, the rows with the token that each holds, and a line from slot to row. Grey rows are padding.

    Raises TypeError, ValueError for more than 128 rows, ImportError without matplotlib.

    >>> import numpy as np, cupy_fp8 as fp8
    >>> r = fp8.route(np.array([[1, 0], [1, -1]]), num_experts=2, align=2)
    >>> ax = fp8.plot.routes(r)
    >>> ax.get_title()
    '2 tokens in 6 rows: 3 hold a token, 3 are padding'
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected a Routing, as route returns it, got {type(routing).__name__}")
    if routing.rows > _MOST_ROWS:
        raise ValueError(f"routing: expected at most {_MOST_ROWS} rows, got {routing.rows}; draw a small one")
    row_map, sources, offsets = (asnumpy(a) for a in (routing.row_map, routing.sources, routing.offsets))
    tokens, topk, rows = *row_map.shape, routing.rows
    expert_of = np.searchsorted(offsets, np.arange(rows), "right") - 1
    ax = axes(ax, (max(6, 0.36 * rows), 2.8))
    pitch = max(rows / max(tokens, 1), topk + 0.5)
    for token, slot in np.ndindex(row_map.shape):
        row, x = int(row_map[token, slot]), pitch * token + slot
        expert = int(expert_of[row]) if row >= 0 else -1
        _box(ax, x, 5, str(expert) if row >= 0 else "–", expert)
        if row >= 0:
            ax.plot([x, row], [5, 1], color=_EXPERTS[expert % len(_EXPERTS)], linewidth=1.2, zorder=0)
    for token in range(tokens):
        ax.text(pitch * token + (topk - 1) / 2, 6.4, f"token {token}", ha="center", va="center",
                fontsize="small")
    for row, source in enumerate(sources):
        used = source >= 0
        _box(ax, row, 0, str(source // topk) if used else "", int(expert_of[row]) if used else -1)
    for expert in range(routing.num_experts):
        begin, end = int(offsets[expert]), int(offsets[expert + 1])
        if end > begin:
            ax.text((begin + end - 1) / 2, -0.6, f"expert {expert}", ha="center", va="center",
                    fontsize="small")
    if rows > offsets[-1]:
        ax.text((offsets[-1] + rows - 1) / 2, -0.6, "after the last expert", ha="center", va="center",
                fontsize="small")
    full = int((sources >= 0).sum())
    ax.set_title(f"{tokens} tokens in {rows} rows: {full} hold a token, {rows - full} are padding",
                 fontsize="medium")
    ax.set(xlim=(-0.7, max(rows, pitch * tokens) - 0.3), ylim=(-1.3, 7), xticks=(),
           yticks=(0.5, 5.5), yticklabels=("token in the row", "expert of the slot"))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def _box(ax: Any, x: float, y: float, text: str, expert: int) -> None:
    """Draw a unit square; expert −1 is grey."""
    from matplotlib.patches import Rectangle

    colour = GREY if expert < 0 else _EXPERTS[expert % len(_EXPERTS)]
    ax.add_patch(Rectangle((x - 0.45, y), 0.9, 1, facecolor=colour, alpha=0.4 if expert < 0 else 1))
    ax.text(x, y + 0.5, text, ha="center", va="center", fontsize="small",
            color=ink(ax) if expert < 0 else "black" if colour in (ORANGE, GREEN, *_EXPERTS[4:]) else "white")
