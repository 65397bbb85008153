"""Launch shapes of the kernels that keep a tile of 32 x 128 elements per warp in registers
(kernels_cu/include/tile/warp_tile.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from .device import grid_size

ROWS, COLUMNS = 32, 128         # of a warp tile
LANE_COLUMNS = 4                # neighbouring columns of a lane


class WarpTiles(NamedTuple):
    """The warp tiles of a block of threads, and the order of blocks: with down_first neighbouring blocks
    write neighbouring transposed data. tiles_per_block: tiles of a group that a block takes, one below the
    other."""

    down: int
    across: int
    down_first: bool
    tiles_per_block: int = 1

    @property
    def rows(self) -> int:
        """Elements down, and across, of a tile."""
        return self.down * ROWS

    @property
    def rows_of_block(self) -> int:
        """Rows that a block has of a group."""
        return self.tiles_per_block * self.rows

    @property
    def columns(self) -> int:
        return self.across * COLUMNS

    @property
    def block(self) -> int:
        """Threads."""
        return 32 * self.down * self.across

    @property
    def tile(self) -> int:
        """Bytes of shared memory that gather one transposed output."""
        return self.down * self.across * ROWS * COLUMNS

    @property
    def defines(self) -> dict[str, int]:
        return {
            "WARP_TILES_DOWN": self.down,
            "WARP_TILES_ACROSS": self.across,
            "DOWN_FIRST": int(self.down_first),
        }

    def grid(self, shape: tuple[int, ...]) -> int:
        """Blocks for an array of matrices."""
        count = -(-shape[-2] // (self.down * ROWS)) * -(-shape[-1] // (self.across * COLUMNS))
        for extent in shape[:-2]:
            count *= extent
        return grid_size(count, shape)
