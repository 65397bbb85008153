"""Launch shapes of the kernels that transpose through shared memory (kernels_cu/include/tile/tile.cuh)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..layouts import cdiv
from .device import grid_size, multiprocessors

_LARGE_PER_MULTIPROCESSOR = 1 << 18      # elements: four 256 x 256 tiles


class Tile(NamedTuple):
    """A tile's extents and the order of tiles: down_first makes neighbouring blocks write neighbouring
    output."""

    rows: int
    columns: int
    down_first: bool

    @property
    def block(self) -> int:
        """Threads of a block: one for each 8 x 8 elements."""
        return self.rows * self.columns // 64

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.rows * self.columns

    @property
    def defines(self) -> dict[str, int]:
        return {"TILE_ROWS": self.rows, "TILE_COLUMNS": self.columns, "DOWN_FIRST": int(self.down_first)}


#: Tiles for both directions, which have long phases of loads and of stores. The NARROW one serves if 1024
#: threads have too few registers, or if rows do not fill wide tiles.
BOTH = Tile(256, 256, False)
BOTH_NARROW = Tile(256, 128, False)
#: The tile for arrays that fit into the L2, and for the CPU executor: it has blocks of 256 threads, and the
#: sanitizers' time grows with the threads.
SMALL = Tile(128, 128, False)


def choose(x: Array, large: Tile, size: int | None = None) -> Tile:
    """`large` for arrays that give every multiprocessor of the GPU several tiles, else SMALL. size: the
    elements of x's group, if x is one of several."""
    size = x.size if size is None else size
    if isinstance(x, np.ndarray) or size < _LARGE_PER_MULTIPROCESSOR * multiprocessors(x.data.device_id):
        return SMALL
    return large


def fills_wide(columns: Iterable[int]) -> bool:
    """True if 256-wide tiles (BOTH) waste at most 2 % more columns than 128-wide ones (BOTH_NARROW)."""
    narrow = wide = 0
    for count in columns:
        narrow += cdiv(count, BOTH_NARROW.columns)
        wide += 2 * cdiv(count, BOTH.columns)
    return 50 * wide <= 51 * narrow


def grid(shape: tuple[int, ...], tile: Tile) -> int:
    """The blocks for an array of matrices."""
    count = -(-shape[-2] // tile.rows) * -(-shape[-1] // tile.columns)
    for extent in shape[:-2]:
        count *= extent
    return grid_size(count, shape)
