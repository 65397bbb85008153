"""Launch shapes of elementwise kernels over flat arrays (kernels_cu/include/memory/elementwise.cuh)."""

from __future__ import annotations

from .device import grid_size

THREADS = 128
_CHUNKS_PER_THREAD = 2


def grid(n: int, shape: tuple[int, ...], in_bytes: int, out_bytes: int, source: int,
         target: int) -> tuple[int, int]:
    """(blocks, whether both addresses are aligned to their chunks). A chunk is 16 bytes of the wider
    dtype."""
    chunk = 16 // (in_bytes if in_bytes > out_bytes else out_bytes)
    vector = source % (chunk * in_bytes) == 0 and target % (chunk * out_bytes) == 0
    return grid_size(-(-n // (chunk * _CHUNKS_PER_THREAD * THREADS)), shape), int(vector)
