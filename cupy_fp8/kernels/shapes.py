"""Launch shapes shared by several kernels: how arrays are divided among the thread blocks of a grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..layouts import cdiv
from .device import grid_size, multiprocessors

# ---- flat arrays (kernels_cu/include/memory/elementwise.cuh) ----
ELEMENTWISE_THREADS = 128
_CHUNKS_PER_THREAD = 2


def elementwise_grid(n: int, shape: tuple[int, ...], in_bytes: int, out_bytes: int, from_at: int,
                     to_at: int) -> tuple[int, int]:
    """Return (blocks, whether both addresses are aligned to their chunks). A chunk is 16 bytes of the wider
    dtype."""
    chunk = 16 // (in_bytes if in_bytes > out_bytes else out_bytes)
    vector = from_at % (chunk * in_bytes) == 0 and to_at % (chunk * out_bytes) == 0
    return grid_size(-(-n // (chunk * _CHUNKS_PER_THREAD * ELEMENTWISE_THREADS)), shape), int(vector)


def _grid_of_tiles(shape: tuple[int, ...], rows: int, columns: int) -> int:
    """Return the blocks for an array of matrices, one per tile."""
    count = -(-shape[-2] // rows) * -(-shape[-1] // columns)
    for extent in shape[:-2]:
        count *= extent
    return grid_size(count, shape)


# ---- tiles that are transposed through shared memory (kernels_cu/include/tile/tile.cuh) ----
_LARGE_PER_MULTIPROCESSOR = 1 << 18      # elements: four 256 x 256 tiles


class Tile(NamedTuple):
    """A tile's extents and the order of tiles; down_first: neighbouring blocks write neighbouring output."""

    rows: int
    columns: int
    down_first: bool

    @property
    def block(self) -> int:
        """Threads per block: one per 8 x 8 elements."""
        return self.rows * self.columns // 64

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.rows * self.columns

    @property
    def defines(self) -> dict[str, int]:
        return {"TILE_ROWS": self.rows, "TILE_COLUMNS": self.columns, "DOWN_FIRST": int(self.down_first)}

    def grid(self, shape: tuple[int, ...]) -> int:
        """Return the blocks for an array of matrices."""
        return _grid_of_tiles(shape, self.rows, self.columns)


#: Tiles for both directions, with long phases of loads and of stores. NARROW: if 1024 threads have too few
#: registers, or if rows do not fill wide tiles.
BOTH = Tile(256, 256, False)
BOTH_NARROW = Tile(256, 128, False)
#: Tile for arrays that fit into the L2, and for the CPU executor: blocks of 256 threads, since the
#: sanitizers' time grows with the threads.
SMALL = Tile(128, 128, False)


def choose_tile(x: Array, large: Tile, size: int | None = None) -> Tile:
    """Return `large` for arrays with several tiles per SM, else SMALL. size: elements of x's group, if x is
    one of several."""
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


# ---- tiles that a warp keeps in registers (kernels_cu/include/tile/warp_tile.cuh) ----
WARP_TILE_ROWS, WARP_TILE_COLUMNS = 32, 128
LANE_COLUMNS = 4                # adjacent columns per lane


class WarpTiles(NamedTuple):
    """The warp tiles of a thread block, and the order of thread blocks; down_first: neighbouring ones write
    neighbouring transposed data. tiles_per_block: tiles of a group per thread block, one below the other."""

    down: int
    across: int
    down_first: bool
    tiles_per_block: int = 1

    @property
    def rows(self) -> int:
        """Elements down, and across, of a tile."""
        return self.down * WARP_TILE_ROWS

    @property
    def rows_of_block(self) -> int:
        """Rows of a group per thread block."""
        return self.tiles_per_block * self.rows

    @property
    def columns(self) -> int:
        return self.across * WARP_TILE_COLUMNS

    @property
    def block(self) -> int:
        """Threads per block."""
        return 32 * self.down * self.across

    @property
    def tile(self) -> int:
        """Bytes of shared memory that gather one transposed output."""
        return self.rows * self.columns

    @property
    def defines(self) -> dict[str, int]:
        return {
            "WARP_TILES_DOWN": self.down,
            "WARP_TILES_ACROSS": self.across,
            "DOWN_FIRST": int(self.down_first),
        }

    def grid(self, shape: tuple[int, ...]) -> int:
        """Return the blocks for an array of matrices."""
        return _grid_of_tiles(shape, self.rows, self.columns)
