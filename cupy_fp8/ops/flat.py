"""Launch shapes of elementwise kernels over flat arrays (kernels_cu/include/flat.cuh)."""

from __future__ import annotations

from . import checks

THREADS = 256


def chunk(in_bytes: int, out_bytes: int) -> int:
    """Elements that a thread handles at once: 16 bytes on the wider side."""
    return 16 // max(in_bytes, out_bytes)


def grid(n: int, shape: tuple[int, ...], in_bytes: int, out_bytes: int, source: int, target: int) -> tuple[int, int]:
    """(blocks, whether both addresses are aligned to their chunks)."""
    c = chunk(in_bytes, out_bytes)
    unroll = 4 if c * in_bytes == 16 else 8
    vector = source % (c * in_bytes) == 0 and target % (c * out_bytes) == 0
    return checks.grid_size(-(-n // (c * unroll * THREADS)), shape), int(vector)
