"""Current scaling in one launch, for tensors that fit into the GPU's SMs. Kernel:
kernels_cu/quantize/tensor_current.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ...calls.call import Call, Input
from ...formats import FP8_DTYPES, INPUT_DTYPES
from ...kernels import Kernel, Launch, Variant, multiprocessors, shared_memory_per_block
from ..scales.scale import TensorScaleRule

_CAST_CURRENT = Kernel("quantize/tensor_current", "cast_current", cooperative=True)
_STATIC_SHARED = 1024       # bytes for the kernel's own variables
_CHUNK_BYTES = 16


class _Grid:
    """What a grid can hold: one block per SM, and the rounds of chunks per block."""

    def __init__(self, blocks: int, threads: int, shared_bytes: int) -> None:
        self.blocks, self.threads = blocks, threads
        round_bytes = threads * _CHUNK_BYTES
        self.rounds_in_shared = (shared_bytes - _STATIC_SHARED) // round_bytes
        self.shared = self.rounds_in_shared * round_bytes


_CPU = _Grid(blocks=4, threads=256, shared_bytes=10 << 10)


@functools.cache
def _gpu(device_id: int) -> _Grid:
    return _Grid(multiprocessors(device_id), 1024, shared_memory_per_block(device_id))


def launch(call: Call, x: Input, dtype: np.dtype[Any], rule: TensorScaleRule,
           **addresses: int) -> Launch | None:
    """Return the launch that finds amax and scale and casts row-wise. None if x does not fit, or is not
    aligned as the kernel needs. addresses: of the result. The launch takes no more shared memory than it
    needs, because rounds in registers arrive through the L1."""
    a, chunk = x.array, _CHUNK_BYTES // x.dtype.itemsize
    grid = _CPU if isinstance(a, np.ndarray) else _gpu(a.data.device_id)
    chunks = a.size // chunk
    blocks = min(grid.blocks, -(-chunks // grid.threads)) or 1
    rounds = -(-chunks // (blocks * grid.threads))
    in_registers = _CAST_CURRENT.constant("kChunksInRegisters")
    if rounds > in_registers + grid.rounds_in_shared or x.at % _CHUNK_BYTES or addresses["data"] % chunk:
        return None
    # Thread blocks read what others published in this launch, so each grid size has its own words.
    words_at = call.workspace(f"current scaling by {blocks} blocks", 1 + blocks)
    return _variant(x.dtype, dtype, grid).bind(
        a, blocks, shared=max(1, rounds - in_registers) * grid.threads * _CHUNK_BYTES, x=x.at, **addresses,
        noop=call.noop_at, workspace=words_at, n=a.size, rule=rule._asdict(), rounds=rounds)


def _variant(source: np.dtype[Any], to: np.dtype[Any], grid: _Grid) -> Variant:
    return _CAST_CURRENT.variant(block=grid.threads, shared=grid.shared, IN=source, OUT=to)


def variants() -> Iterator[Variant]:
    """Yields every variant that this op may launch."""
    for source, to in product(INPUT_DTYPES, FP8_DTYPES):
        yield _variant(source, to, _Grid(1, 1024, _STATIC_SHARED))
