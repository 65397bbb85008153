"""Launch shapes of the kernels that transpose through shared memory (kernels_cu/include/tile.cuh)."""

from __future__ import annotations

import numpy as np

from .. import runtime
from ..arrays import Array
from . import checks

Tile = tuple[int, int]

#: Also for the CPU executor: blocks of 256 threads (the sanitizers pay per thread).
SMALL: Tile = (128, 128)


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(count, rows, columns) of the matrices of an array with two or more dimensions."""
    count = 1
    for extent in shape[:-2]:
        count *= extent
    return count, shape[-2], shape[-1]


def choose(x: Array, large: Tile) -> tuple[Tile, int]:
    """(tile, blocks): `large` tiles where there are at least two for every multiprocessor of x's GPU, else small ones."""
    count, rows, columns = matrices(x.shape)
    tile = SMALL
    if not isinstance(x, np.ndarray) and count * rows * columns >= 2 * large[0] * large[1] * runtime.multiprocessors(x.data.device_id):
        tile = large
    return tile, checks.grid_size(count * -(-rows // tile[0]) * -(-columns // tile[1]), x.shape)
