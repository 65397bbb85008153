"""Launch shapes of the kernels that keep a tile of 32 x 128 elements per warp in registers
(kernels_cu/include/tile/warp_tile.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from .kernel import grid_size

ROWS, COLUMNS = 32, 128         # of a warp tile
LANE_COLUMNS = 4                # neighbouring columns of a lane


class Panels(NamedTuple):
    """The panels of a block of threads, and the order of blocks: down_first makes neighbouring ones write
    neighbouring transposed data. run: tiles that a block has of a group, one below the other."""

    down: int
    across: int
    down_first: bool
    run: int = 1

    @property
    def rows(self) -> int:
        """Elements down, and across, of a tile."""
        return self.down * ROWS

    @property
    def run_rows(self) -> int:
        """Rows that a block has of a group."""
        return self.run * self.rows

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
        return {"PANELS_DOWN": self.down, "PANELS_ACROSS": self.across, "DOWN_FIRST": int(self.down_first)}

    def grid(self, shape: tuple[int, ...]) -> int:
        """Blocks for an array of matrices."""
        count = -(-shape[-2] // (self.down * ROWS)) * -(-shape[-1] // (self.across * COLUMNS))
        for extent in shape[:-2]:
            count *= extent
        return grid_size(count, shape)
