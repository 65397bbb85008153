"""How scales of blocks are stored: shapes and padding (pure arithmetic; the bytes are in docs/layouts.md).

A direction's scales form, per matrix, a grid of `outer` lines by `blocks` scales along each line: for
row-wise blocks (1, B) the lines are the M rows and the blocks run along K, for column-wise blocks (B, 1) the
lines are the K columns and the blocks run along M. For 2-D blocks the lines are the rows of blocks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .advice import block_instead, shown
from .formats import choice, float8_e8m0fnu, float32, int32

__all__ = ["SCALE_DTYPES", "grouped_scale_shape", "scale_shape"]

#: rows and columns of a block that shares a scale; None: all rows or columns of the matrix
Block = tuple[int | None, int | None]
_BLOCK_TYPES = frozenset((int, type(None)))

ScaleLayout: TypeAlias = Literal["compact", "swizzled", "gemm_ready", "deepgemm_sm90", "deepgemm_sm100"]
#: layouts of block scales, and the dtypes that they hold (int32: words of four E8M0 scales)
SCALE_DTYPES: dict[str, tuple[np.dtype[Any], ...]] = {
    "compact": (float8_e8m0fnu, float32), "swizzled": (float8_e8m0fnu,), "gemm_ready": (float32,),
    "deepgemm_sm90": (float32,), "deepgemm_sm100": (int32,)}
#: Layouts with constant strides between scales, along lines and along blocks.
LAYOUTS_WITH_STRIDES = ("compact", "gemm_ready", "deepgemm_sm90")
#: gemm_ready and DeepGEMM's layouts round lines up to this, so that rows of scales begin at multiples of 16
#: bytes.
PADDED_TO = 4
PACKED = 4                                  # E8M0 scales in a word of deepgemm_sm100
SMALLEST_BLOCK = 32                         # elements along a line; kernels rely on it

#: The tile of `swizzled`: 128 lines x 4 blocks in 512 consecutive bytes.
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
#: Elements of data for each block. Sizes of groups along the blocks count elements.
SWIZZLE_ELEMENTS = 32


class ScaleGrid(NamedTuple):
    """The scales of one direction of a […, M, K] array."""

    batch: tuple[int, ...]
    outer: int
    blocks: int
    columnwise: bool


def swap_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with its last two axes exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def as_block(block: Any) -> Any:
    """Return a block given as a list, as an array or in NumPy's integers as a tuple of Python's. Anything
    else is returned unchanged, for checks to refuse.

    >>> as_block([1, np.int64(128)]), as_block(np.array([128, 128]))
    ((1, 128), (128, 128))
    """
    if type(block) is tuple and _BLOCK_TYPES.issuperset(map(type, block)):
        return block
    if not isinstance(block, (tuple, list, np.ndarray)) or getattr(block, "ndim", 1) != 1:
        return block
    return tuple(int(extent) if isinstance(extent, np.integer) else extent for extent in block)


def block_text(block: tuple[int | None, int | None]) -> str:
    """Return a block as users see it: 'block 1×128', 'block 1×row'."""
    return "block " + "×".join(("column", "row")[axis] if b is None else str(b)
                               for axis, b in enumerate(block))


def check_block(block: Any, name: str = "block") -> Block:
    """Return a block as a tuple. ValueError unless elements can share a scale that way. name: of the block,
    in messages."""
    block = as_block(block)
    if not is_block(block):
        raise ValueError(f"{name}: expected (1, B), (B, 1) or (B, B'), a power of two of {SMALLEST_BLOCK} or "
                         f"more each, or None for a whole line beside a 1; got {shown(block)}"
                         f"{block_instead(block)}")
    found: Block = block
    return found


def is_of_integers(block: tuple[Any, ...]) -> bool:
    """Whether every extent of a block is None or an int: not a number that merely equals one, nor an array,
    whose comparison has no single truth value."""
    return all(extent is None or type(extent) is int for extent in block)


def scale_grid(shape: tuple[int, ...], block: Block) -> ScaleGrid:
    """Return the grid of blocks: (1, B) lie along rows, (B, 1) along columns, and (1, None) is one block per
    row. The grid of 2-D blocks has rows of blocks as lines.

    >>> scale_grid((4, 100, 64), (32, 1))
    ScaleGrid(batch=(4,), outer=64, blocks=4, columnwise=True)
    >>> scale_grid((100, 640), (128, 128))
    ScaleGrid(batch=(), outer=1, blocks=5, columnwise=False)
    """
    down, across = (cdiv(extent, b or max(extent, 1)) for extent, b in zip(shape[-2:], block, strict=True))
    if block[1] == 1:
        return ScaleGrid(shape[:-2], across, down, True)
    return ScaleGrid(shape[:-2], down, across, False)


def grouped_rows(lines: int, groups: int) -> int:
    """Return the rows for the swizzled scales of `groups` groups with `lines` lines in all, each group
    rounded up to 128 rows: a bound for groups of any sizes.

    >>> grouped_rows(300, 1), grouped_rows(300, 4), grouped_rows(3, 1000)
    (384, 768, 384)
    """
    return padded_rows(lines, groups, SWIZZLE_ROWS)


def grouped_columns(blocks: int, groups: int) -> int:
    """Do the same along the blocks, with each group rounded up to 4.

    >>> grouped_columns(30, 4)
    40
    """
    return padded_rows(blocks, groups, SWIZZLE_COLUMNS)


def grouped_shape(shape: tuple[int, ...], groups: int, axis: int) -> tuple[int, ...]:
    """Return the shape of swizzled scales of `groups` groups, given the shape of the compact ones. axis 0:
    groups are lines, and rows of the result; axis 1: groups lie along the blocks, and are bytes of the
    result.

    >>> grouped_shape((300, 30), 4, 0), grouped_shape((300, 30), 4, 1)
    ((768, 32), (15360,))
    """
    lines, blocks = shape
    if axis == 0:
        return grouped_rows(lines, groups), round_up(blocks, SWIZZLE_COLUMNS)
    return (round_up(lines, SWIZZLE_ROWS) * grouped_columns(blocks, groups),)


def padded_rows(rows: int, groups: int, align: int) -> int:
    """Return the most rows of `groups` groups with `rows` rows in all, each rounded up to a multiple of
    `align`, for groups of any sizes. At most min(groups, rows) of them are not empty, and rounding one up
    adds at most align - 1.

    >>> padded_rows(300, 4, 128), padded_rows(3, 1000, 16)
    (768, 48)
    """
    return (rows + (align - 1) * min(groups, rows)) // align * align


def target_rows(rows: int, groups: int | None, block: int) -> int:
    """Return the rows of the compact scales of blocks (block, 1), which lie along M: for `groups` groups a
    bound that does not depend on their sizes.

    >>> target_rows(300, None, 128), target_rows(300, 4, 128)
    (3, 6)
    """
    return cdiv(rows, block) if groups is None else padded_rows(rows, groups, block) // block


def row_scale_rows(rows: int, groups: int | None) -> int:
    """Return the lines of gemm_ready scales of blocks (1, B), padding included: for `groups` groups, each
    padded separately, a bound that does not depend on their sizes.

    >>> row_scale_rows(301, None), row_scale_rows(301, 4)
    (304, 312)
    """
    return round_up(rows, PADDED_TO) if groups is None else padded_rows(rows, groups, PADDED_TO)


def scale_dtype(dtype: np.dtype[Any], layout: str) -> np.dtype[Any]:
    """Return the dtype of scales in a layout: this dtype if the layout holds it.

    >>> [scale_dtype(float32, layout).name for layout in ("compact", "swizzled")]
    ['float32', 'float8_e8m0fnu']
    >>> scale_dtype(int32, "compact").name
    'float8_e8m0fnu'
    """
    held = SCALE_DTYPES[layout]
    return dtype if dtype in held else held[0]


def scale_shape(shape: tuple[int, ...], block: Block | None, layout: str | None,
                transposed: bool = False) -> tuple[int, ...]:
    """Return the shape of a `Scaled`'s scale_inv. For 1-D blocks, with `lines` and `blocks` of the direction:

    compact : row-wise […, M, blocks], column-wise […, blocks, K]
    swizzled : […, lines rounded up to 128, blocks rounded up to 4], whose bytes lie in tiles of 128 x 4
    gemm_ready, deepgemm_sm90 : […, blocks, lines rounded up to 4]
    deepgemm_sm100 : […, words of four blocks, lines rounded up to 4]

    2-D blocks follow the order in which the data are stored. They have one scale each (compact, or
    gemm_ready, whose rows are padded), or repeat it for each line of the block (deepgemm_sm100).

    >>> scale_shape((100, 64), (1, 32), "compact"), scale_shape((100, 64), (32, 1), "compact")
    ((100, 2), (4, 64))
    >>> scale_shape((100, 640), (128, 128), "compact", transposed=True)
    (5, 1)
    >>> scale_shape((100, 64), (1, 32), "swizzled")
    (128, 4)
    >>> scale_shape((101, 640), (1, 128), "gemm_ready"), scale_shape((100, 640), (128, 128), "gemm_ready")
    ((5, 104), (1, 8))
    >>> [scale_shape((101, 640), block, "deepgemm_sm100") for block in ((1, 128), (128, 128))]
    [(2, 104), (2, 104)]

    Raises ValueError for blocks and layouts that do not exist, and where the layout does not fit the block.
    """
    layout = choice(layout, "scale_layout", SCALE_DTYPES)
    block = check_block(block)
    if len(shape) < 2:
        raise ValueError(f"block: {block} needs two or more dimensions, got shape {shape}")
    if transposed and 1 not in block:
        shape, block = (*shape[:-2], shape[-1], shape[-2]), (block[1], block[0])
    batch, outer, blocks, columnwise = scale_grid(shape, block)
    if 1 not in block:
        if layout in ("swizzled", "deepgemm_sm90"):
            raise ValueError(f"scale_layout: {layout!r} belongs to blocks along one line, got block {block}; "
                             "take compact or gemm_ready")
        if layout == "gemm_ready":
            return (*batch, outer, round_up(blocks, PADDED_TO))
        if layout == "deepgemm_sm100":
            outer = shape[-2]
    if layout == "compact":
        return (*batch, blocks, outer) if columnwise else (*batch, outer, blocks)
    if layout == "swizzled":
        return (*batch, round_up(outer, SWIZZLE_ROWS), round_up(blocks, SWIZZLE_COLUMNS))
    return (*batch, cdiv(blocks, PACKED) if layout == "deepgemm_sm100" else blocks,
            round_up(outer, PADDED_TO))


def group_unit(block: Block, layout: str, transposed: bool = False) -> int:
    """Return the granularity, in rows, of a group's stored scales: the rows of a block, times the
    blocks that a layout rounds up to if blocks lie along M. 0 for whole columns, since a group with any
    number of rows, even none, has equally many scales.

    >>> group_unit((1, 128), "compact"), group_unit((1, 128), "gemm_ready"), group_unit((32, 1), "swizzled")
    (1, 4, 128)
    >>> group_unit((1, None), "compact"), group_unit((None, 1), "compact")
    (1, 0)
    """
    rows, columns = block
    if rows is None:
        return 0
    if layout == "compact":
        return rows
    if rows == 1:
        return SWIZZLE_ROWS if layout == "swizzled" else PADDED_TO
    if columns == 1:
        return rows * SWIZZLE_COLUMNS if layout == "swizzled" else rows
    return rows * PADDED_TO if transposed else rows


def group_scales(columns: int, block: Block, layout: str,
                 transposed: bool = False) -> int:
    """Return the number of scales of `group_unit` rows with this many columns; for whole columns, of a
    group."""
    unit = group_unit(block, layout, transposed) or 1
    down, across = scale_shape((unit, columns), block, layout, transposed)
    return down * across


def grouped_scale_shape(shape: tuple[int, int], groups: int, block: Block, layout: str,
                        transposed: bool = False) -> tuple[int, ...]:
    """Return the shape of the scales of `groups` groups of rows of an array of this shape: a bound for groups
    of any sizes. Each group's scales have the `scale_shape` of the group alone, one group after the other.
    The shape is flat if rows of scales are not equally long in every group. Whole columns have one line for
    each group.

    >>> [grouped_scale_shape((300, 256), 4, (1, 128), layout) for layout in ("compact", "gemm_ready")]
    [(300, 2), (624,)]
    >>> grouped_scale_shape((300, 256), 4, (128, 1), "compact")
    (6, 256)
    >>> [grouped_scale_shape((300, 255), 4, (None, 1), layout) for layout in ("compact", "gemm_ready")]
    [(4, 255), (4, 256)]
    """
    unit = group_unit(block, layout, transposed)
    if unit == 0:
        return groups, group_scales(shape[1], block, layout, transposed)
    units = padded_rows(shape[0], groups, unit) // unit
    (down, across), (_, across_two) = (scale_shape((unit * n, shape[1]), block, layout, transposed)
                                       for n in (1, 2))
    return (units * down, across) if across == across_two else (units * down * across,)


def is_block(block: object) -> bool:
    if not isinstance(block, tuple) or len(block) != 2 or not is_of_integers(block):
        return False
    if block in ((1, None), (None, 1)):
        return True
    return block != (1, 1) and all(b is not None and (b == 1 or (b >= SMALLEST_BLOCK and b & b - 1 == 0))
                                   for b in block)
