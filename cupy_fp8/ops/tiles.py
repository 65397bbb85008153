"""Launch shapes of the kernels that transpose through shared memory (kernels_cu/include/tile.cuh)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import runtime
from ..arrays import Array
from . import checks

#: On the CPU a block of 256 threads: the sanitizers pay per thread.
_HOST_TILE = 128


def matrices(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of the matrices of an array with two or more dimensions."""
    return shape[-2], shape[-1]


def choose(x: Array, xp: Any) -> tuple[int, int]:
    """(tile, blocks) for an array of matrices: 256 x 256 tiles, one block per multiprocessor, where there are enough of them
    to fill the GPU; 128 x 128 for smaller arrays."""
    tile = _HOST_TILE
    if xp is not np and _tiles(x.shape, 256) >= runtime.multiprocessors(x.data.device_id):
        tile = 256
    return tile, checks.grid_size(_tiles(x.shape, tile), x.shape)


def _tiles(shape: tuple[int, ...], tile: int) -> int:
    if 0 in shape:
        return 0
    count = -(-shape[-2] // tile) * -(-shape[-1] // tile)
    for extent in shape[:-2]:
        count *= extent
    return count
